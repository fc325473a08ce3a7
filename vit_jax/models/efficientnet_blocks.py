"""The blocks of an EfficientNet, by the compound scaling of its paper (arXiv 1905.11946, section 3.3, Table 1)."""
from __future__ import annotations

import math
from typing import NamedTuple

from vit_jax.config import schema

STEM, TOP = 32, 1280  # channels of B0
SE_RATIO = .25        # of squeeze and excitation: its hidden channels over those that the block reads
MULTIPLE = 8          # that channels are rounded to


class Stage(NamedTuple):
  """Equal blocks; the first of them has the stride."""
  repeats: int
  kernel: int
  stride: int
  expansion: int
  channels: int


B0 = (
    Stage(1, 3, 1, 1, 16), Stage(2, 3, 2, 6, 24), Stage(2, 5, 2, 6, 40), Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112), Stage(4, 5, 2, 6, 192), Stage(1, 3, 1, 6, 320))
"""Table 1 of the paper, rows 2 to 8."""


class Block(NamedTuple):
  """An inverted bottleneck: expands to `hidden` channels, depthwise convolution, gate, projection.

  `name` is that in its stage; `squeezed` are the channels inside the gate. Where `hidden` equals `inputs` nothing
  is expanded.
  """
  name: str
  kernel: int
  stride: int
  inputs: int
  hidden: int
  squeezed: int
  outputs: int

  @property
  def is_residual(self) -> bool:
    return self.stride == 1 and self.inputs == self.outputs


def scaled(channels: int, factor: float) -> int:
  """Channels times a factor, to the nearest multiple of 8; one more if that lost over a tenth."""
  wanted = channels * factor
  rounded = max(MULTIPLE, int(wanted + MULTIPLE / 2) // MULTIPLE * MULTIPLE)
  return rounded + MULTIPLE if rounded < .9 * wanted else rounded


def stages(model: schema.EfficientNet) -> list[tuple[Block, ...]]:
  """The blocks of each stage."""
  found = []
  inputs = scaled(STEM, model.width_factor)
  for stage in B0:
    outputs, blocks = scaled(stage.channels, model.width_factor), []
    for i in range(math.ceil(stage.repeats * model.depth_factor)):
      blocks.append(Block(f'block{i + 1}', stage.kernel, stage.stride if i == 0 else 1, inputs,
                          inputs * stage.expansion, max(1, int(inputs * SE_RATIO)), outputs))
      inputs = outputs
    found.append(tuple(blocks))
  return found
