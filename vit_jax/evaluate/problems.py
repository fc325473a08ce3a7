"""The problems that an evaluation may have with its data or with the outputs of the network, as errors.

`check_size`, `check_single`, `check_masks` and `check_same` are called while evaluators are built. `check_finite` and
`check_counted` are called while they measure, by every process.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core import documents, trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree
from vit_jax.data import opening
from vit_jax.data.source import Source, has_masks, title

_MAX_NAMES = 5  # of weights in a message


def check_size(name: str, num_examples: int) -> None:
  """Raises UserError if a split is empty."""
  if not num_examples:
    raise UserError(f'{name}: expected a split with at least one example, got none. Choose another split.')


def check_single(where: str, source: Source) -> None:
  """Raises UserError if images of a source have several classes."""
  if source.most_labels:
    raise UserError(f'{where}: expected a source whose images have one class each, got {title(source)}, which has '
                    'several for an image. Use TopK, or another source.')


def check_masks(where: str, source: Source, settings: schema.Evaluation) -> None:
  """Raises UserError unless a source has masks exactly if the evaluation is one of masks."""
  if has_masks(source) and not isinstance(settings, schema.Segmentation):
    raise UserError(f'{where}: expected a source whose images have classes, got {source.name}, whose images have '
                    f'masks. Leave this evaluation out with --config.evals=…, or set {where}.source.')
  if not has_masks(source) and isinstance(settings, schema.Segmentation):
    raise UserError(f'{where}: expected a source whose images have masks, got {source.name}. Set {where}.source='
                    'masks:PATH or masks:tfds:NAME.')


def check_same(name: str, train: Source, test: Source) -> None:
  """Raises UserError unless both splits have the same classes, and each image has exactly one class."""
  for source in (train, test):
    check_single(f'evals.{name}', source)
  if not has_masks(train):
    opening.check_learnable(train, learner=f'evals.{name}')
  if train.class_names != test.class_names:
    raise UserError(f'evals.{name}: expected two splits with the same classes, got {train.name} with '
                    f'{len(train.class_names)} classes and {test.name} with {len(test.class_names)}. '
                    'Choose splits of one dataset.')


def check_counted(name: str, num_counted: int, num_examples: int) -> None:
  """Raises UserError if a split has no valid example."""
  if not num_counted:
    raise UserError(f'{name}: expected an example that can be decoded and has a label or a caption, got none among '
                    f'{num_examples:,}. Choose another split, or correct its files.')


def check_finite(name: str, num_broken: int, selected: PyTree) -> None:
  """Raises UserError if outputs of a batch are not finite, and names the weights that are not finite."""
  if not num_broken:
    return
  if names := nonfinite_leaves(selected):
    reason = (f'these weights hold nan or inf: {documents.joined(names, _MAX_NAMES)}. Use others, such as those of an '
              'earlier checkpoint.')
  else:
    reason = ('all weights are finite, so numbers overflow inside the network (through its dtype, or images whose '
              'range is not that of its training).')
  raise UserError(f'{name}: expected finite outputs, got others for {num_broken:,} images of a batch: {reason}')


def nonfinite_leaves(tree: PyTree) -> list[str]:
  """Returns the paths of the leaves with NaN or infinite values, such as `'backbone/blocks/attn/query/kernel'`."""
  is_finite = jax.device_get(_find_finite(tree))
  return [path for path, is_good in trees.flatten(is_finite).items() if not is_good]


@jax.jit
def _find_finite(tree: PyTree) -> PyTree:
  """Returns for each leaf whether all of its values are finite, a bool."""
  return jax.tree.map(
      lambda x: jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(True), tree)
