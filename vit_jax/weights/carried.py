"""Compares a written weight file with the weights it was made from: every bit of every parameter, and the settings."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.weights import tables
from vit_jax.weights.infer import Leaves
from vit_jax.weights.loading import Weights

_TRAINING = ('dropout', 'drop_path', 'drop_path_even', 'attention_dropout', 'norm_momentum', 'dtype', 'execution',
             'unroll', 'remat', 'full_remat', 'layer_scale', 'init')
"""Settings that do not change the function of a model; of LayerScale only its presence matters."""


def compare(weights: Weights, again: Weights, *, leaves: Callable[[Weights, str], Leaves]) -> list[str]:
  """Returns preprocessing settings and class names that differ after the weights were written and read back.

  Args:
    weights: the weights that were written.
    again: the weights that were read back.
    leaves: returns the leaves of weights in the form that a file of a family (second argument) has.

  Raises:
    UserError: a parameter differs, or a setting of the model that changes its function.
  """
  wanted, found = leaves(weights, again.family), leaves(again, again.family)
  wrong = [name for name in wanted.keys() | found.keys()
           if name not in wanted or name not in found or not _is_same(wanted[name], found[name])]
  if wrong:
    raise UserError(f'--to: expected every bit as it was written, got {len(wrong)} other parameters when reading back. '
                    'Nothing was kept:\n' + '\n'.join(tables.listed(sorted(wrong))))
  changed = [f'{field.name}={getattr(weights.model, field.name)} (read back: {getattr(again.model, field.name)})'
             for field in dataclasses.fields(weights.model) if field.name not in _TRAINING
             and field.name not in _unused(weights.model)
             and getattr(weights.model, field.name) != getattr(again.model, field.name)]
  if changed:
    raise UserError(f'--family: expected a format that can hold this network, got one that cannot say '
                    f'{", ".join(changed)}. Nothing was kept. Choose another, such as --family=run.')
  lost = [f'preprocessing {name} ({value}, read back {getattr(again.preprocess, name)})'
           for name, value in weights.preprocess._asdict().items()
           if name != 'rule' and value != getattr(again.preprocess, name)]
  return lost + (['class names'] if weights.class_names != again.class_names else [])


def _unused(model: schema.Model) -> set[str]:
  """Settings that this network does not use: the GELU beside a gate, resizing of positions that are computed."""
  if not isinstance(model, schema.ViT):
    return set()
  unused = {'gelu': model.swiglu and not model.pool.is_attention, 'position_resize': not model.positions.is_learned}
  return {name for name, is_so in unused.items() if is_so}


def _is_same(a: HostArray, b: HostArray) -> bool:
  """Whether every bit is the same; 0 and -0 count as the same."""
  a, b = (np.ascontiguousarray(x, np.float32) + np.float32(0) for x in (a, b))
  return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))
