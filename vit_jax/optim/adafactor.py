"""Adafactor's second moment, factored for large matrices, as Scaling ViT uses it.

Shazeer & Stern 2018 (arXiv 1804.04235), Algorithm 4, without update clipping, relative step and parameter scale;
the decay of the second moment is capped (Zhai et al. 2021, arXiv 2106.04560, section 3.4).
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.types import Array, PyTree
from vit_jax.optim.momentum import chain, hold, keep_as

B2_POWER = .8
"""The decay of the second moment at update t, from 1, is 1 - t ** -B2_POWER, up to the cap."""
LEAST = 32
"""Smallest side of a matrix whose second moment is factored."""


class FactoredState(NamedTuple):
  """Statistics of each parameter, f32. A leaf without one has zeros `[1]`, or `[L]` if it is stacked."""
  updates: Array   # number of updates so far, `[] i32`
  rows: PyTree     # of factored leaves: means over columns
  columns: PyTree  # of factored leaves: means over rows
  full: PyTree     # of the other leaves, with the leaf's shape


def find_axes(name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
  """Returns the second largest and the largest axis of a tensor, if both have at least `LEAST` entries.

  The layers of a stacked leaf are no axis of its tensors. Of two axes of one size the later counts as larger.
  """
  first = 1 if trees.is_stacked(name) else 0
  order = sorted(range(first, len(shape)), key=lambda axis: shape[axis])
  if len(order) < 2 or shape[order[-2]] < LEAST:
    return None
  return order[-2], order[-1]


def scale_by_factored_rms(*, cap: float, eps: float) -> optax.GradientTransformation:
  """Divides by the root of a running mean of squares, which is an outer product for large matrices.

  At update t (from 1), with beta = min(cap, 1 - t ** -B2_POWER) and s = g ** 2 + eps:

    R <- beta R + (1 - beta) mean_columns(s)      C <- beta C + (1 - beta) mean_rows(s)
    V = R C / mean(R)                             u = g / sqrt(V)

  and for other leaves V <- beta V + (1 - beta) s. Statistics are f32.
  """

  def init(params: PyTree) -> FactoredState:
    def stub(name: str, x: Array) -> Array:
      return jnp.zeros(x.shape[0] if trees.is_stacked(name) else 1)

    def mean_over(place: int, name: str, x: Array) -> Array:
      """Returns zeros for the mean over one of `find_axes`: the columns at place 1, the rows at place 0."""
      axes = find_axes(name, x.shape)
      return stub(name, x) if axes is None else jnp.zeros(tuple(np.delete(x.shape, axes[place])))

    def full(name: str, x: Array) -> Array:
      return jnp.zeros(x.shape) if find_axes(name, x.shape) is None else stub(name, x)

    return FactoredState(
        updates=jnp.zeros((), jnp.int32), rows=trees.map_named(functools.partial(mean_over, 1), params),
        columns=trees.map_named(functools.partial(mean_over, 0), params), full=trees.map_named(full, params))

  def update(updates: PyTree, state: FactoredState, params: PyTree | None = None,
             **_: Any) -> tuple[PyTree, FactoredState]:
    del params
    t = (state.updates + 1).astype(jnp.float32)
    beta = jnp.minimum(cap, 1. - t ** -B2_POWER)

    named, structure = jax.tree_util.tree_flatten_with_path(updates)
    statistics = zip(*(jax.tree.leaves(kind) for kind in (state.rows, state.columns, state.full)), strict=True)
    new_leaves = [_update(find_axes(trees.path_name(path), g.shape), g, old, beta, eps)
                  for (path, g), old in zip(named, statistics, strict=True)]
    scaled, rows, columns, full = (jax.tree.unflatten(structure, [new[i] for new in new_leaves]) for i in range(4))
    return scaled, FactoredState(state.updates + 1, rows, columns, full)

  return optax.GradientTransformation(init, update)


def _update(axes: tuple[int, int] | None, g: Array, statistics: tuple[Array, Array, Array], beta: Array,
            eps: float) -> tuple[Array, Array, Array, Array]:
  """Returns the scaled gradient and the new rows, columns and full statistics of one leaf."""
  rows, columns, full = statistics
  square = jnp.square(g.astype(jnp.float32)) + eps

  def mix(old: Array, new: Array) -> Array:
    return beta * old + (1. - beta) * new

  if axes is None:
    full = mix(full, square)
    return g * jax.lax.rsqrt(full), rows, columns, full
  small, large = axes
  rows, columns = mix(rows, square.mean(large)), mix(columns, square.mean(small))
  row_factor = jnp.expand_dims(rows, large)
  row_factor = row_factor / row_factor.mean(small, keepdims=True)
  scaled = g * jax.lax.rsqrt(row_factor) * jax.lax.rsqrt(jnp.expand_dims(columns, small))
  return scaled, rows, columns, full


def adafactor(config: schema.Adafactor, **_: Any) -> optax.GradientTransformation:
  """Returns Adafactor (Scaling ViT, section 3.4): the factored second moment, then a mean of the updates.

  The mean is `m <- b1 m + (1 - b1) u`. It is not corrected for its start at zero, as the warm-up makes up for that.
  """
  return chain(hold(scale_by_factored_rms(cap=config.b2_cap, eps=config.eps)),
               keep_as(config.mu_dtype, 'ema', optax.ema(config.b1, debias=False)))
