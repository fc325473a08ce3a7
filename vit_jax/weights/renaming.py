"""Tensors of a file under other names: what `families.py` and its parts have in common."""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.models.vit.positions import sincos2d_mae
from vit_jax.weights.hints import Hints
from vit_jax.weights.names import Table
from vit_jax.weights.report import Line

Tensors = dict[str, HostArray]


class Recognized(NamedTuple):
  """A file's tensors under the names of its family's table.

  hints: defaults of the family, which sidecars of the file and `--model` override.
  """
  family: str
  table: Table
  tensors: Tensors
  dropped: tuple[Line, ...]
  hints: Hints


def dropping(tensors: Tensors, rules: Mapping[str, str]) -> tuple[Tensors, tuple[Line, ...]]:
  """Returns the tensors without those that a rule (pattern of the name, reason) drops."""
  lines = [Line(name, 'dropped', reason) for name in tensors for pattern, reason in rules.items()
           if re.fullmatch(pattern, name)]
  gone = {line.name for line in lines}
  return {name: x for name, x in tensors.items() if name not in gone}, tuple(lines)


def renamed(tensors: Tensors, *rules: tuple[str, str]) -> Tensors:
  """Returns the tensors with the patterns of the rules replaced in their names, in the order of the rules."""
  def rename(name: str) -> str:
    for pattern, new in rules:
      name = re.sub(pattern, new, name)
    return name

  return distinct(tensors, rename)


def distinct(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
  """Returns the tensors under new names. Raises UserError if two tensors get the same name."""
  found: Tensors = {}
  for name, x in tensors.items():
    if (new := rename(name)) in found:
      raise UserError(f'two of its tensors mean {new}, one of them {name}')
    found[new] = x
  return found


def without_fixed(tensors: Tensors, name: str) -> tuple[Tensors, tuple[Line, ...]]:
  """Returns the tensors without the positions of MAE's decoder, which the network computes.

  Raises:
    UserError: the positions differ from the computed ones.
  """
  if name not in tensors:
    return tensors, ()
  table_MD = tensors[name][0] if tensors[name].ndim == 3 and len(tensors[name]) == 1 else np.zeros((0, 0))
  side, width = math.isqrt(max(len(table_MD) - 1, 0)), table_MD.shape[1]
  wanted = sincos2d_mae((side, side), width) if width and width % 4 == 0 else np.zeros((0, 0))
  if not wanted.size or wanted.shape != table_MD[1:].shape or np.any(table_MD[0]) or not (
      np.abs(table_MD[1:] - wanted).max() <= 1e-4):
    raise UserError(f'{name} is not the fixed 2-D sine-cosine table of MAE, which decoders here have')
  return ({k: v for k, v in tensors.items() if k != name},
          (Line(name, 'dropped', 'the same as what is computed here'),))
