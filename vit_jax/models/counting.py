"""The cost of a network as counts: what each kind of network reports, sums over convolutions, and the printed table."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config.schema import DType
from vit_jax.core import trees
from vit_jax.core.contracts import Backbone
from vit_jax.core.types import PyTree


class Costs(NamedTuple):
  """A backbone's costs for one image: parameters and multiply-adds by part, bytes, and the width of its features."""
  parameters: dict[str, int]
  macs: dict[str, int]
  activation_bytes: int
  width: int


class Conv(NamedTuple):
  """A convolution without bias: part it belongs to, side of its kernel, channels, groups, map in and out."""
  part: str
  kernel: int
  inputs: int
  outputs: int
  map_in: tuple[int, int]
  map_out: tuple[int, int]
  groups: int = 1

  @property
  def parameters(self) -> int:
    return self.kernel ** 2 * self.inputs // self.groups * self.outputs

  @property
  def macs(self) -> int:
    """Multiply-adds, those with the zeros of the padding included, as is usual."""
    return self.parameters * area(self.map_out)

  @property
  def input_size(self) -> int:
    """Numbers that it reads."""
    return self.inputs * area(self.map_in)

  @property
  def output_size(self) -> int:
    """Numbers that it gives."""
    return self.outputs * area(self.map_out)


def area(side: tuple[int, int]) -> int:
  return side[0] * side[1]


def halved(side: tuple[int, int]) -> tuple[int, int]:
  """The map after a stride of 2 with padding: half of each side, rounded up."""
  return -(-side[0] // 2), -(-side[1] // 2)


def by_part(pairs: Iterable[tuple[str, int]]) -> dict[str, int]:
  """Sums by part."""
  found: dict[str, int] = {}
  for part, value in pairs:
    found[part] = found.get(part, 0) + value
  return found


def item_bytes(dtype: DType) -> int:
  return {DType.F32: 4, DType.BF16: 2}[dtype]


def tabulate(backbone: Backbone, costs: Costs, image_px: tuple[int, int]) -> str:
  """The table of a backbone for images of `image_px` (height, width). Allocates nothing on devices."""
  params, _ = jax.eval_shape(lambda: backbone.init(jax.random.key(0), jnp.zeros((1, *image_px, 3))))
  return table(params, {part: 2 * count for part, count in costs.macs.items()})


def table(params: PyTree, flops: Mapping[str, int]) -> str:
  """Path, shape and number of each parameter, their sum, and FLOPs of one image in the forward pass by part."""
  leaves: dict[str, Any] = trees.flatten(params)
  rows = [('parameter', 'shape', 'parameters')]
  rows += [(name, ' x '.join(map(str, leaf.shape)), f'{leaf.size:,}') for name, leaf in leaves.items()]
  rows += [('all parameters', '', f'{trees.num_elements(params):,}'), ('', '', '')]
  rows += [('forward pass, one image', '', 'MFLOPs')]
  rows += [(part, '', f'{count / 1e6:,.3f}') for part, count in flops.items() if count]
  rows += [('all parts', '', f'{sum(flops.values()) / 1e6:,.3f}')]
  first, second, third = (max(map(len, column)) for column in zip(*rows, strict=True))
  return '\n'.join(f'{a:<{first}}  {b:<{second}}  {c:>{third}}'.rstrip() for a, b, c in rows)
