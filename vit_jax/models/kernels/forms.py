"""The operations that have a fast form and a plain one, and the choice between them (`model.kernels`).

Both forms compute the same up to rounding. The fast ones have gradients written by hand, which is faster and saves
memory, but permits reverse-mode differentiation of the first order only. The plain ones are differentiated by JAX: with
them `jax.jvp`, `jax.linearize` and Hessian-vector products work through a complete network.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.schema import AttentionKernel, Kernels, Quantize
from vit_jax.core.types import Array
from vit_jax.models.kernels import attend, attend_kernels, dense, depthwise, norm_act, quantized


class Forms(NamedTuple):
  """One form of each operation; arguments and results are those of the functions named `plain_…`.

  `low_rank` is `dense` for the products of adapters, which are never quantized.
  """
  dense: Callable[[Array, Array, Array], Array]
  low_rank: Callable[[Array, Array, Array], Array]
  shared: Callable[..., tuple[Array, ...]]
  layer_norm: Callable[..., Array]
  gelu: Callable[..., Array]
  depthwise: Callable[..., Array]
  attend: Callable[..., Array]


def _plain_attend(query: Array, key: Array, value: Array, *, kernel: AttentionKernel, num_keys: int = 0) -> Array:
  assert not kernel.platform and not num_keys, (kernel, num_keys)
  return checkpoint_name(attend.plain_attend(query, key, value), 'attention')


def _once(form: Callable[..., Array], *static: int) -> Callable[..., Array]:
  """The form, traced once for each shape, and written into the program of each layer as if there were no `jit`."""
  return jax.jit(form, static_argnums=static, inline=True)


_FAST_DENSE, _PLAIN_DENSE = _once(dense.dense), _once(dense.plain_dense)
FAST = Forms(_FAST_DENSE, _FAST_DENSE, dense.shared, _once(norm_act.layer_norm, 3), _once(norm_act.gelu, 1),
             _once(depthwise.depthwise, 2, 3), attend_kernels.attend)
PLAIN = Forms(_PLAIN_DENSE, _PLAIN_DENSE, dense.plain_shared, _once(norm_act.plain_layer_norm, 3),
              _once(norm_act.plain_gelu, 1), depthwise.plain_depthwise, _plain_attend)


def _quantized(how: Quantize) -> Forms:
  """The fast forms with quantized products; `dense` is a function of its own, as a trace is kept for each function."""

  def form(x: Array, kernel: Array, bias: Array) -> Array:
    return quantized.dense(x, kernel, bias, how)

  return FAST._replace(dense=_once(form))


QUANTIZED = {how: _quantized(how) for how in quantized.NARROW}


def select(kernels: Kernels, quantize: Quantize = Quantize.NONE) -> Forms:
  """The forms that a network with these settings computes with; only the fast ones can be quantized."""
  assert kernels is Kernels.FAST or quantize is Quantize.NONE, (kernels, quantize)
  return QUANTIZED.get(quantize) or {Kernels.FAST: FAST, Kernels.PLAIN: PLAIN}[kernels]
