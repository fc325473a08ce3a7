"""What a ResNet of bottleneck units costs, by arithmetic: BiT, and the stem of a hybrid."""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.config.schema import DType, Remat
from vit_jax.models.cost.parts import Conv, Costs, by_part, halved, item_bytes

EXPANSION = 4  # channels that a unit gives, over those of its 3 x 3 convolution


def costs(model: schema.ResNet, image_px: tuple[int, int]) -> Costs:
  """Of BiT: a norm before each convolution of a unit, one after the last."""
  convs = convolutions(model.layers, model.width, image_px)
  width = num_channels(model.layers, model.width)
  norms = [(conv.part, 2 * conv.inputs) for conv in convs if _name(conv) in NAMES]
  parameters = by_part([*((_top(part), size) for part, size in norms),
                        *((_top(conv.part), conv.parameters) for conv in convs), ('norm', 2 * width)])
  last = width * convs[-1].map_out[0] * convs[-1].map_out[1]
  return Costs(parameters, by_part((_top(conv.part), conv.macs) for conv in convs),
               kept_bytes(convs, model.dtype, model.remat) + last * item_bytes(model.dtype), width)


def stem_costs(stem: schema.ResNetStem, image_px: tuple[int, int], *, dtype: DType, remat: Remat) -> Costs:
  """Of the ResNet of a hybrid: a norm after each convolution."""
  convs = convolutions(stem.layers, stem.width, image_px)
  parameters = by_part((_top(conv.part), conv.parameters + 2 * conv.outputs) for conv in convs)
  return Costs(parameters, by_part((_top(conv.part), conv.macs) for conv in convs), kept_bytes(convs, dtype, remat),
               num_channels(stem.layers, stem.width))


def num_channels(layers: tuple[int, ...], width: int) -> int:
  """Channels of the last map."""
  return EXPANSION * width * 2 ** (len(layers) - 1) if layers else width


NAMES = ('conv1', 'conv2', 'conv3')


def convolutions(layers: tuple[int, ...], width: int, image_px: tuple[int, int]) -> list[Conv]:
  """All convolutions in order; their parts are the paths of the parameters, such as `stage2/unit1/conv3`."""
  side = halved(image_px)
  found = [Conv('root', 7, 3, width, image_px, side)]
  side, channels = halved(side), width
  for stage, units in enumerate(layers, 1):
    hidden = width * 2 ** (stage - 1)
    for unit in range(1, units + 1):
      part, before = f'stage{stage}/unit{unit}', side
      side = halved(side) if stage > 1 and unit == 1 else side
      found += [Conv(f'{part}/conv1', 1, channels, hidden, before, before),
                Conv(f'{part}/conv2', 3, hidden, hidden, before, side),
                Conv(f'{part}/conv3', 1, hidden, EXPANSION * hidden, side, side)]
      if unit == 1:
        found.append(Conv(f'{part}/proj', 1, channels, EXPANSION * hidden, before, side))
      channels = EXPANSION * hidden
  return found


def kept_bytes(convs: list[Conv], dtype: DType, remat: Remat) -> int:
  """Estimate of what the backward pass needs: what each norm and each convolution of a unit reads.

  Where units are computed again, what each of them reads, and all of the largest one.
  """
  size = item_bytes(dtype)
  units = by_part((_unit(conv), 2 * conv.input_size) for conv in convs if _name(conv) in NAMES)
  first = {_unit(conv): conv.input_size for conv in convs if _name(conv) == 'conv1'}
  root = convs[0].output_size * 2
  if remat.saves_everything or not units:
    return (root + sum(units.values())) * size
  return (root + sum(first.values()) + max(units.values())) * size


def _name(conv: Conv) -> str:
  return conv.part.split('/')[-1]


def _unit(conv: Conv) -> str:
  return conv.part.rpartition('/')[0]


def _top(part: str) -> str:
  return part.split('/')[0]
