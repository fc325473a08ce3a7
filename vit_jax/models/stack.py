"""Runs a stack of equal layers whose parameters are stored stacked, `[depth, ...]`.

How the stack is run (scanned or unrolled) and what is saved for the backward pass change speed and
memory, never results or parameters. Knows nothing of what a layer does, only the names it gives to
intermediate values with `checkpoint_name`.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from vit_jax.config.schema import Execution, Remat
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Key, Params, PyTree
from vit_jax.models import adapters

Sums = dict[str, Array]
"""Scalars f32 by name, which are summed over the layers; `{}` for most networks."""
Layer = Callable[[Params, PyTree, Array | None, Key | None], tuple[PyTree, Sums]]
"""Applies one layer: `(its parameters, activations, its drop-path rate, its key) -> (activations, sums)`.

Activations may be a tree of arrays.
"""
Ready = Callable[[Params], Params]
"""Prepares stacked parameters of any number of layers for use, such as by casting them; each layer for itself."""

SAVED_NAMES = {
    Remat.NAMES: ('query', 'key', 'value', 'attention', 'residual', 'mlp'),
    Remat.QKV: ('query', 'key', 'value', 'mlp'),
    Remat.MLP: ('mlp',),
    Remat.FULL: (),
}


def unstack(tree: PyTree) -> list[PyTree]:
  """Returns the layers of a stacked tree, each a stack of one.

  Each leaf is cut by one `split`, whose transpose is one concatenation; indexing instead would make the
  gradient a sum of `depth` arrays that are zero but for one slice.
  """
  leaves, structure = jax.tree.flatten(tree)
  depth = leaves[0].shape[0]
  cut = [lax.split(leaf, (1,) * depth) for leaf in leaves]
  return [jax.tree.unflatten(structure, [parts[i] for parts in cut]) for i in range(depth)]


def cast(dtype: DTypeLike) -> Ready:
  """Returns a function that casts parameters to the compute dtype.

  Norms and frequencies of positions stay in f32, and so does what is no weight: gains and keys of dropout.
  """
  not_cast = ('norm', 'frequencies', *adapters.NOT_CAST)

  def cast_leaf(name: str, leaf: Array) -> Array:
    return leaf if any(part in name for part in not_cast) else leaf.astype(dtype)

  return lambda params: trees.map_named(cast_leaf, params)


def rematerialized(layer: Layer, remat: Remat, *, prevent_cse: bool) -> Layer:
  """Returns `layer` with a backward pass that computes again whatever `remat` does not save."""
  if remat.saves_everything:
    return layer
  policy = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES[remat])
  return jax.checkpoint(layer, policy=policy, prevent_cse=prevent_cse)


def _scan(step: Layer, x: PyTree, layers: tuple[Params, Array | None, Array | None],
          unroll: int) -> tuple[PyTree, Sums]:
  """Scans over layers: stacked parameters, rates and keys. Returns activations, and the sums over the layers."""
  def checked(x: PyTree, layer: tuple[Params, Array | None, Array | None]) -> tuple[PyTree, Sums]:
    params, rate, key = layer
    y, sums = step(params, x, rate, key)
    if _shapes(x) != _shapes(y):
      raise UserError(f'model.execution: expected unrolled for blocks that do not pass on what they get, here '
                      f'{_shapes(x)} and then {_shapes(y)}, got scan. Set --config.model.execution=unrolled.')
    return y, sums

  x, sums = lax.scan(checked, x, layers, unroll=unroll)
  return x, jax.tree.map(lambda leaf: leaf.sum(0), sums)


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each array by its path; a single array has the name `tokens`."""
  return {name or 'tokens': leaf.shape for name, leaf in trees.flatten(tree).items()}


def run(layer: Layer, params: Params, x: PyTree, *, ready: Ready, rates: Array | None, keys: Array | None,
        execution: Execution, remat: Remat, full_remat: int = 0, unroll: int = 1) -> tuple[PyTree, Sums]:
  """Applies `layer` depth times. Returns the activations after it, and the sums over all layers.

  Args:
    layer: one layer.
    params: stacked, `[L, ...]`.
    x: activations, a tree of arrays of any shapes; a scanned layer keeps shapes and dtypes.
    ready: prepares the parameters. A scan prepares all of them before it cuts them, so that a sharded kernel is cast
      and gathered once; unrolled, each is cut first, so that no stack of cast kernels is kept.
    rates: `[L]` f32, drop-path rate of each layer, or None: no branch is dropped.
    keys: `[L]` keys, one for each layer, or None: no randomness.
    execution: scanned or unrolled.
    remat: what is saved for the backward pass.
    full_remat: the first `full_remat` layers save nothing but their input instead.
    unroll: number of layers in an iteration of the scan.
  """
  # Inside a scan nothing can be merged across iterations: no barrier is needed against it.
  prevent_cse = execution is not Execution.SCAN
  first = rematerialized(layer, Remat.FULL, prevent_cse=prevent_cse)
  rest = rematerialized(layer, remat, prevent_cse=prevent_cse)
  match execution:
    case Execution.SCAN:
      layers = (ready(params), rates, keys)
      if not full_remat:
        return _scan(rest, x, layers, unroll)
      x, sums = _scan(first, x, jax.tree.map(lambda leaf: leaf[:full_remat], layers), unroll)
      x, more = _scan(rest, x, jax.tree.map(lambda leaf: leaf[full_remat:], layers), unroll)
      return x, jax.tree.map(jnp.add, sums, more)
    case Execution.UNROLLED | Execution.AUTO:
      total: Sums = {}
      for i, stacked in enumerate(unstack(params)):
        own = jax.tree.map(lambda leaf: leaf[0], ready(stacked))
        step = first if i < full_remat else rest
        x, sums = step(own, x, None if rates is None else rates[i], None if keys is None else keys[i])
        total = jax.tree.map(jnp.add, total, sums) if total else sums
      return x, total
    case _:
      assert_never(execution)
