"""What each kind of network says about its cost, and the convolutions that some are made of."""
from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vit_jax.config.schema import DType


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
