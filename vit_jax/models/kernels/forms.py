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
  layer_norm: Callable[..., Array]
  gelu: Callable[..., Array]
  depthwise: Callable[..., Array]
  attend: Callable[..., Array]


def _plain_attend(query: Array, key: Array, value: Array, *, kernel: AttentionKernel) -> Array:
  assert not kernel.platform, kernel
  return checkpoint_name(attend.plain_attend(query, key, value), 'attention')


# Traced once for each shape, and written into the program of each layer as if there were no `jit`.
FAST = Forms(jax.jit(dense.dense, inline=True), jax.jit(norm_act.layer_norm, static_argnums=3, inline=True),
             jax.jit(norm_act.gelu, static_argnums=1, inline=True), depthwise.depthwise, attend_kernels.attend)
PLAIN = Forms(dense.plain_dense, norm_act.plain_layer_norm, norm_act.plain_gelu, depthwise.plain_depthwise,
              _plain_attend)


def select(kernels: Kernels) -> Forms:
  """The forms that a network with this setting computes with."""
  return {Kernels.FAST: FAST, Kernels.PLAIN: PLAIN}[kernels]
