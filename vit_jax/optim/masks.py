"""Which parameters a setting applies to, by path pattern, and which parameters are matrices.

A network states which of its parameters are matrices (`core/axes.py`). Where nothing states it, as in a tree that no
network made, the leaves called `kernel` are matrices, whose last axis is their output, or the last two for the heads of
query, key and value.
"""
from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from vit_jax.core import trees
from vit_jax.core.axes import Matrix
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree

Matrices = Mapping[str, Matrix]
"""Numbers of input and output axes of each parameter that is a matrix, by path name; see `core.axes.Axes`."""


def find_matrices(params: PyTree) -> dict[str, Matrix]:
  """Returns which leaves are matrices by their names alone, for a tree of which nothing states it."""
  matrices = {}
  for name, leaf in trees.flatten(params).items():
    *_, layer, last = ['', *name.split('/')]  # `query`, `kernel` of `backbone/blocks/attn/query/kernel`
    num_outputs = 2 if layer in ('query', 'key', 'value') else 1
    num_inputs = len(leaf.shape) - trees.is_stacked(name) - num_outputs
    if last == 'kernel' and num_inputs > 0:
      matrices[name] = num_inputs, num_outputs
  return matrices


def matches(name: str, patterns: Sequence[str], matrices: Collection[str] = ()) -> bool:
  """Returns whether a whole path name matches one of `patterns` (`re.fullmatch`).

  A parameter among `matrices` is also matched as `…/kernel`, whatever its name is: `.*/kernel` means every matrix.
  """
  names = [name, f'{name}/kernel'] if name in matrices else [name]
  return any(re.fullmatch(pattern, one) for pattern in patterns for one in names)


def mask(params: PyTree, patterns: Sequence[str], *, what: str, matrices: Collection[str] = ()) -> PyTree:
  """Returns True for each leaf whose whole path name matches one of `patterns`.

  Args:
    params: any tree with the paths of the parameters.
    patterns: regular expressions, matched whole (`re.fullmatch`).
    what: the setting's name, for the error.
    matrices: as in `matches`.

  Raises:
    UserError: lists the patterns that match no parameter.
  """
  names = list(trees.flatten(params))
  idle = [p for p in patterns if not any(matches(name, [p], matrices) for name in names)]
  if idle:
    raise UserError(f'{what}: {", ".join(map(repr, idle))} matches no parameter; parameters are named like '
                    f'{", ".join(names[:3])}')
  return trees.map_named(lambda name, _: matches(name, patterns, matrices), params)
