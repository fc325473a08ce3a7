"""Errors of evaluations: empty splits, different classes, outputs that are not finite."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from vit_jax.core import documents, trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, PyTree

_MOST_NAMES = 5


def check_size(name: str, num_examples: int) -> None:
  """Raises UserError if a split is empty."""
  if not num_examples:
    raise UserError(f'{name}: expected a split with at least one example, got none. Choose another split.')


def check_classes(predicted: int, known: int) -> None:
  """Raises UserError unless the numbers of classes of the weights and of the data are equal."""
  if predicted != known:
    raise UserError(f'expected weights that predict the {known:,} classes of the data, got a head of {predicted:,}. '
                    'Use weights with a head for these classes, or data whose class names are among theirs.')


def check_counted(name: str, num_counted: int, num_examples: int) -> None:
  """Raises UserError if a split has no valid example."""
  if not num_counted:
    raise UserError(f'{name}: expected an example that can be decoded and has a label or a caption, got none among '
                    f'{num_examples:,}. Choose another split, or correct its files.')


def check_finite(name: str, num_broken: int, selected: PyTree) -> None:
  """Raises UserError if outputs of a batch are not finite, and names non-finite weights. Every process must call it."""
  if num_broken:
    names = nonfinite_leaves(selected)
    why = (f'these weights hold nan or inf: {documents.joined(names, _MOST_NAMES)}. Use others, such as those of an '
           'earlier checkpoint.' if names else
           'all weights are finite, so numbers overflow inside the network (through its dtype, or images whose range '
           'is not that of its training).')
    raise UserError(f'{name}: expected finite outputs, got others for {num_broken:,} images of a batch: {why}')


def nonfinite_leaves(tree: PyTree) -> list[str]:
  """Returns the path names of leaves with NaN or infinite values."""
  finite = jax.device_get(_finite(tree))
  return [name for name, is_good in trees.flatten(finite).items() if not is_good]


@jax.jit
def _finite(tree: PyTree) -> PyTree:
  def one(x: Array) -> Array:
    return jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(True)

  return jax.tree.map(one, tree)
