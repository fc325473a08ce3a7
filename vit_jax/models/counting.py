"""The printed table of a network: its parameters, and FLOPs by module."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vit_jax.core import trees
from vit_jax.core.types import PyTree


def table(params: PyTree, flops: Mapping[str, int]) -> str:
  """Path, shape and number of each parameter, their sum, and FLOPs of one image in the forward pass by module."""
  leaves: dict[str, Any] = trees.flatten(params)
  rows = [('parameter', 'shape', 'parameters')]
  rows += [(name, ' x '.join(map(str, leaf.shape)), f'{leaf.size:,}') for name, leaf in leaves.items()]
  rows += [('all parameters', '', f'{trees.num_elements(params):,}'), ('', '', '')]
  rows += [('forward pass, one image', '', 'MFLOPs')]
  rows += [(module, '', f'{count / 1e6:,.3f}') for module, count in flops.items() if count]
  rows += [('all modules', '', f'{sum(flops.values()) / 1e6:,.3f}')]
  first, second, third = (max(map(len, column)) for column in zip(*rows, strict=True))
  return '\n'.join(f'{a:<{first}}  {b:<{second}}  {c:>{third}}'.rstrip() for a, b, c in rows)
