"""What an EfficientNet costs, by arithmetic."""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.models.cost.parts import Conv, Costs, area, by_part, halved, item_bytes
from vit_jax.models.efficientnet_blocks import TOP, Block, scaled, stages


def costs(model: schema.EfficientNet, image_px: tuple[int, int]) -> Costs:
  """All of it. Each convolution has a norm after it; the gates are dense layers with bias on pooled channels."""
  found = [block._replace(name=f'stage{number}/{block.name}')
           for number, blocks in enumerate(stages(model), 1) for block in blocks]
  width = scaled(TOP, model.width_factor)
  convs = _convolutions(model, found, image_px)
  gates = [(_stage(block.name), 2 * block.hidden * block.squeezed) for block in found]
  biases = [(_stage(block.name), block.hidden + block.squeezed) for block in found]
  parameters = by_part([*((_stage(conv.part), conv.parameters + 2 * conv.outputs) for conv in convs), *gates, *biases])
  macs = by_part([*((_stage(conv.part), conv.macs) for conv in convs), *gates])
  return Costs(parameters, macs, _kept_bytes(model, convs), width)


def _convolutions(model: schema.EfficientNet, found: list[Block], image_px: tuple[int, int]) -> list[Conv]:
  side = halved(image_px)
  convs = [Conv('stem', 3, 3, found[0].inputs, image_px, side)]
  for block in found:
    before, side = side, halved(side) if block.stride == 2 else side
    if block.hidden != block.inputs:
      convs.append(Conv(block.name, 1, block.inputs, block.hidden, before, before))
    convs += [Conv(block.name, block.kernel, block.hidden, block.hidden, before, side, groups=block.hidden),
              Conv(block.name, 1, block.hidden, block.outputs, side, side)]
  top = scaled(TOP, model.width_factor)
  return [*convs, Conv('top', 1, found[-1].outputs, top, side, side)]


def _kept_bytes(model: schema.EfficientNet, convs: list[Conv]) -> int:
  """Estimate of what the backward pass needs: of each convolution what it reads, and what its norm and swish read.

  The gate reads what the depthwise convolution gives once more. Where blocks are computed again, what each
  of them reads, and all of the largest one.
  """
  size = item_bytes(model.dtype)
  needed = by_part((conv.part, conv.input_size + (2 + (conv.groups > 1)) * conv.output_size) for conv in convs)
  inputs = {conv.part: conv.inputs * area(conv.map_in) for conv in reversed(convs)}
  if model.remat.saves_everything:
    return sum(needed.values()) * size
  of_blocks = [needed[part] for part in needed if '/' in part]
  ends = sum(needed[part] for part in needed if '/' not in part)
  return (ends + sum(inputs[part] for part in inputs if '/' in part) + max(of_blocks)) * size


def _stage(name: str) -> str:
  return name.split('/')[0]
