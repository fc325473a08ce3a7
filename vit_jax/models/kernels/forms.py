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

from vit_jax.config.schema import AttentionKernel, Kernels
from vit_jax.core.types import Array
from vit_jax.models.kernels import attend, attend_kernels, dense, depthwise, norm_act


class Forms(NamedTuple):
  """One form of each operation; arguments and results are those of the functions named `plain_…`."""
  dense: Callable[[Array, Array, Array], Array]
  shared: Callable[..., tuple[Array, ...]]
  layer_norm: Callable[..., Array]
  gelu: Callable[..., Array]
  depthwise: Callable[..., Array]
  attend: Callable[..., Array]


def _plain_attend(query: Array, key: Array, value: Array, *, kernel: AttentionKernel) -> Array:
  assert not kernel.platform, kernel
  return checkpoint_name(attend.plain_attend(query, key, value), 'attention')


def _once(form: Callable[..., Array], *static: int) -> Callable[..., Array]:
  """The form, traced once for each shape, and written into the program of each layer as if there were no `jit`."""
  return jax.jit(form, static_argnums=static, inline=True)


FAST = Forms(_once(dense.dense), dense.shared, _once(norm_act.layer_norm, 3), _once(norm_act.gelu, 1),
             _once(depthwise.depthwise, 2, 3), attend_kernels.attend)
PLAIN = Forms(_once(dense.plain_dense), dense.plain_shared, _once(norm_act.plain_layer_norm, 3),
              _once(norm_act.plain_gelu, 1), depthwise.plain_depthwise, _plain_attend)


def select(kernels: Kernels) -> Forms:
  """The forms that a network with this setting computes with."""
  return {Kernels.FAST: FAST, Kernels.PLAIN: PLAIN}[kernels]
