"""Muon: momentum made orthogonal for the matrices of blocks, AdamW for everything else.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks". With `scale=rms`, updates are as long as
those of AdamW, whose learning rate and weight decay carry over (Liu et al. 2025, arXiv 2502.16982, equation 4).

Query, key and value are matrices of their own, `[D, A K]`, and so is each layer of a stack. A matrix is made orthogonal
whole, on one device: the matrices of a shape are spread over the devices of the mesh before that, and come back to
the layout of their parameters after it. So an update takes the time of `matrices / devices` matrices, rounded up, and
its bits do not depend on how parameters are sharded.
"""
from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from vit_jax.config import schema
from vit_jax.core import numerics, trees
from vit_jax.core.axes import Matrix
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, PyTree
from vit_jax.optim import adam, masks
from vit_jax.optim.masks import Matrices

Polynomials: TypeAlias = tuple[tuple[float, float, float], ...]

POLYNOMIALS: dict[schema.NewtonSchulz, Polynomials] = {
    schema.NewtonSchulz.KELLER: ((3.4445, -4.7750, 2.0315),) * 5,
    schema.NewtonSchulz.DION: ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                               (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))}
"""Coefficients of x, x^3 and x^5 in each iteration. They map the singular values of a matrix of norm 1 to about 1."""
LEAST_NORM = 1e-7
"""The norm of a matrix counts as at least this, so that a matrix of zeros can be divided by it."""
FEW = 4
"""Matrices of one shape that a device takes before more devices are used."""
RMS = .2
"""Root mean square of an update of AdamW, as it is usually seen."""


class MuonState(NamedTuple):
  """State of Muon."""
  momentum: PyTree  # mean of the gradients of matrices
  rest: PyTree      # state of AdamW for the other parameters


def muon(config: schema.Muon, *, matrices: Matrices, **_: Any) -> optax.GradientTransformation:
  """Returns Muon for the parameters that `matrices` names, with AdamW for the others. The decay is applied later."""
  rest = adam.scale_by_adam(config.b1, config.b2, config.eps, config.mu_dtype.value)
  moment_dtype, beta = config.mu_dtype.value, config.momentum

  def choose(tree: PyTree) -> PyTree:
    """Returns whether each leaf is made orthogonal; `rules.check` ensures that every pattern matches a parameter."""
    return trees.map_named(lambda name, _: masks.matches(name, config.matrices, matrices), tree)

  def with_named(tree: PyTree) -> Matrices:
    """Adds parameters that nothing states to be matrices, and that patterns name: their last axis is the output."""
    num_inputs = {name: leaf.ndim - trees.is_stacked(name) - 1 for name, leaf in trees.flatten(tree).items()
                  if name not in matrices and masks.matches(name, config.matrices)}
    return {**matrices, **{name: (num, 1) for name, num in num_inputs.items() if num > 0}}

  def init(params: PyTree) -> MuonState:
    chosen, all_matrices = choose(params), with_named(params)

    def zeros(name: str, leaf: Array) -> Array:
      matrix = all_matrices.get(name)
      if matrix is None or min(shape_of(leaf.shape, matrix)) < 2:
        raise UserError(f'optimizer.matrices: expected patterns of matrices, got {name!r} with the shape '
                        f'{list(leaf.shape)}. Leave it to AdamW.')
      return jnp.zeros(leaf.shape, moment_dtype)

    momentum = trees.map_named(zeros, _select(params, chosen, is_matrix=True))
    return MuonState(momentum, rest.init(_select(params, chosen, is_matrix=False)))

  def update(updates: PyTree, state: MuonState, params: PyTree | None = None, *, ok: Array | bool = True,
             **_: Any) -> tuple[PyTree, MuonState]:
    del params
    chosen = choose(updates)
    rest_updates, rest_state = rest.update(_select(updates, chosen, is_matrix=False), state.rest, ok=ok)
    grads = _select(updates, chosen, is_matrix=True)
    momentum = trees.map_once(lambda m, g: jnp.where(ok, beta * m.astype(jnp.float32) + (1. - beta) * g, m),
                              state.momentum, grads)
    ahead = trees.map_once(lambda m, g: beta * m + (1. - beta) * g, momentum, grads)  # Nesterov's
    matrix_updates = _orthogonal(ahead, config, with_named(updates))
    new_updates = jax.tree.map(lambda is_matrix, of_matrix, of_rest: of_matrix if is_matrix else of_rest,
                               chosen, matrix_updates, rest_updates, is_leaf=lambda x: isinstance(x, bool))
    return new_updates, MuonState(jax.tree.map(lambda m: m.astype(moment_dtype), momentum), rest_state)

  return optax.GradientTransformationExtraArgs(init, update)


def _select(tree: PyTree, chosen: PyTree, *, is_matrix: bool) -> PyTree:
  """Returns the leaves for which `chosen` is `is_matrix`, with `optax.MaskedNode` in place of the others."""
  return jax.tree.map(lambda is_chosen, x: x if is_chosen is is_matrix else optax.MaskedNode(), chosen, tree)


def shape_of(shape: Sequence[int], matrix: Matrix) -> tuple[int, int]:
  """Returns inputs and outputs of the matrix that a leaf is, or of each that it holds, such as one for each layer."""
  num_inputs, num_outputs = matrix
  last = len(shape) - num_outputs
  return math.prod(shape[last - num_inputs:last]), math.prod(shape[last:])


def _orthogonal(tree: PyTree, config: schema.Muon, matrices: Matrices) -> PyTree:
  """Returns orthogonal matrices in place of those of the tree, scaled; all matrices of one shape at once."""
  groups: dict[tuple[int, int], list[tuple[str, Array]]] = defaultdict(list)
  for name, leaf in trees.flatten(tree).items():
    rows, columns = shape_of(leaf.shape, matrices[name])
    groups[min(rows, columns), max(rows, columns)].append((name, leaf))
  orthogonal: dict[str, Array] = {}
  for leaves in groups.values():
    wide = [_wide(leaf, matrices[name]).astype(config.dtype.value) for name, leaf in leaves]
    done = _each_on_one_device(jnp.concatenate(wide), POLYNOMIALS[config.polynomials])
    start = 0
    for (name, leaf), before in zip(leaves, wide, strict=True):
      after = done[start:start + len(before)]
      if _is_turned(leaf, matrices[name]):
        after = after.swapaxes(1, 2)
      factor = _scale(config.scale, *shape_of(leaf.shape, matrices[name]))
      orthogonal[name] = factor * after.reshape(leaf.shape).astype(jnp.float32)
      start += len(before)
  return trees.map_named(lambda name, _: orthogonal[name], tree)


def _wide(leaf: Array, matrix: Matrix) -> Array:
  """Returns the matrices of a leaf, `[n, small, large]`."""
  matrices = leaf.reshape(-1, *shape_of(leaf.shape, matrix))
  return matrices.swapaxes(1, 2) if _is_turned(leaf, matrix) else matrices


def _is_turned(leaf: Array, matrix: Matrix) -> bool:
  """Returns whether outputs come before inputs; in square matrices so that the width of the network comes first."""
  rows, columns = shape_of(leaf.shape, matrix)
  return rows > columns or (rows == columns and matrix[1] == 1)


def _each_on_one_device(x: Array, polynomials: Polynomials) -> Array:
  """Applies `newton_schulz` to `x [n, small, large]`, whose matrices are spread over the devices of the mesh.

  Each way is a few exchanges along one axis of the mesh. A device takes its matrices one by one, so that their bits
  do not depend on the number of devices.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return _one_by_one(x, polynomials)
  axes = spread(len(x), mesh.shape)
  places = math.prod(mesh.shape[axis] for axis in axes)
  ways = [(None, 'fsdp', 'tensor'), ('fsdp', None, 'tensor'), (('fsdp', 'tensor'), None, None), (axes, None, None)]
  padded = jnp.pad(numerics.constrain(x, ways[0]), ((0, -len(x) % places), (0, 0), (0, 0)))
  for way in ways:
    padded = numerics.constrain(padded, way)
  spec = jax.sharding.PartitionSpec(axes)
  done = jax.shard_map(lambda own: _one_by_one(own, polynomials), in_specs=spec, out_specs=spec,
                       check_vma=False)(padded)
  for way in reversed(ways):
    done = numerics.constrain(done, way)
  return done[:len(x)]


def spread(num_matrices: int, sizes: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the axes of the mesh over which matrices are spread: `data` only where the others leave a device many.

  The results are sent to all devices along `data`, which costs more than a few matrices.
  """
  inner = sizes['fsdp'] * sizes['tensor']
  return ('fsdp', 'tensor', 'data') if num_matrices > FEW * inner else ('fsdp', 'tensor')


def _one_by_one(x: Array, polynomials: Polynomials) -> Array:
  """Applies `newton_schulz` to the matrices `x [n, small, large]` in a loop."""
  return jax.lax.map(lambda matrix: newton_schulz(matrix, polynomials), x)


def _scale(scale: schema.MuonScale, rows: int, columns: int) -> float:
  """Returns the factor of an orthogonal matrix with so many inputs and outputs."""
  if scale is schema.MuonScale.RMS:
    return float(RMS * math.sqrt(max(rows, columns)))
  return math.sqrt(max(1., columns / rows))


def newton_schulz(x: Array, polynomials: Polynomials) -> Array:
  """Returns an approximation of `U V^T` for a matrix `x = U S V^T [small, large]`, in the dtype of `x`.

  Each iteration applies an odd polynomial to the singular values, which the first division brings below 1.
  Singular values of less than about a thousandth of the matrix's norm stay small.
  """
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  norm = jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum())
  x = x / jnp.maximum(norm, LEAST_NORM).astype(x.dtype)
  for a, b, c in polynomials:
    gram = jnp.matmul(x, x.T, precision=precision)
    x = a * x + jnp.matmul(b * gram + c * jnp.matmul(gram, gram, precision=precision), x, precision=precision)
  return x
