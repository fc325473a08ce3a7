"""What is wrong with the settings of a backbone. Asked by `check.py`, and where a backbone is built."""
from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from vit_jax.config import resnet_options, schema, vit_options
from vit_jax.config.schema import AttentionKernel, Execution, Remat, ranges

MOST_CUDNN_WIDTH = 256  # of a head, on Hopper and later
UNIT_REMAT = (Remat.NONE, Remat.FULL)
"""What networks of convolutions know: their units keep everything, or only what they got."""


def faults(model: schema.Model, image_px: tuple[int, int]) -> Iterator[str]:
  """What is wrong with a model for images of `image_px` (height, width), each with what would be right."""
  yield from ranges.all_problems(model, lambda sound: _together(sound, image_px), 'model.')


def _together(model: schema.Model, image_px: tuple[int, int]) -> Iterator[str]:
  match model:
    case schema.ViT():
      yield from _vit(model, image_px)
    case schema.ResNet():
      yield from resnet_options.faults('model', model.layers, model.width, eps=model.var_eps)
      if not model.layers:
        yield 'model.layers=() has no stage; want a number of units for each, such as 3,4,6,3'
      yield from _unit_remat(model.remat)
    case schema.Mixer():
      yield from _tiles(model.patch, image_px)
    case schema.EfficientNet():
      yield from _unit_remat(model.remat)
    case _:
      assert_never(model)


def has_statistics(model: schema.Model) -> bool:
  """Whether the model has BatchNorm, whose statistics are those of the whole batch of a step."""
  return isinstance(model, schema.EfficientNet) or (
      isinstance(model, schema.ViT) and isinstance(model.stem, schema.ConvStem))


def ways_to_run(model: schema.Model) -> tuple[tuple[Remat, ...], tuple[Execution | None, ...]]:
  """What `model.remat` and `model.execution` may be; None: the model has no such setting."""
  match model:
    case schema.ViT() | schema.Mixer():
      return (tuple(r for r in Remat if r is not Remat.AUTO), (Execution.SCAN, Execution.UNROLLED))
    case schema.ResNet() | schema.EfficientNet():
      return UNIT_REMAT, (None,)
    case _:
      assert_never(model)


def _unit_remat(remat: Remat) -> Iterator[str]:
  if remat not in (*UNIT_REMAT, Remat.AUTO):
    yield f'model.remat={remat.value} is for blocks of attention and MLP; want none or full'


def _tiles(patch: int, image_px: tuple[int, int]) -> Iterator[str]:
  if any(px % patch for px in image_px):
    yield f'image_px={image_px} is not a multiple of model.patch={patch} in both directions'


def _vit(m: schema.ViT, image_px: tuple[int, int]) -> Iterator[str]:
  if m.unroll > 1 and m.execution is Execution.UNROLLED:
    yield f'model.unroll={m.unroll} is for a scan, but model.execution={m.execution.value}; want unroll=1'
  if m.full_remat > m.depth:
    yield f'model.full_remat={m.full_remat} are not some of model.depth={m.depth} blocks; want 0 to {m.depth}'
  if m.width % m.heads:
    yield f'model.width={m.width} is not a multiple of model.heads={m.heads}'
  if m.positions in vit_options.FIXED and m.width % 4:
    yield f'model.width={m.width} is not a multiple of 4, which 2-D sine-cosine positions need'
  yield from _tiles(m.patch, image_px)
  yield from vit_options.faults(m)
  yield from _attention(m)


def _attention(m: schema.ViT) -> Iterator[str]:
  """What a kernel of attention cannot do. Of what only the devices can tell, see `parallel/kernels.py`."""
  if m.attention is AttentionKernel.XLA:
    return
  own = f'model.attention={m.attention.value}'
  if m.positions is schema.Positions.RELATIVE or m.attention_dropout:
    what = 'relative positions' if m.positions is schema.Positions.RELATIVE else 'attention_dropout'
    yield f'{own} never holds the weights that {what} would change; want model.attention=xla'
  if m.attention is AttentionKernel.CUDNN and m.dtype is not schema.DType.BF16:
    yield (f'{own} multiplies bf16 only, but model.dtype={m.dtype.value}; want model.dtype=bfloat16, or '
           'model.attention=xla')
  width = m.width // m.heads
  if m.attention is AttentionKernel.CUDNN and (width % 8 or width > MOST_CUDNN_WIDTH):
    yield (f'{own} knows heads of 8, 16, … {MOST_CUDNN_WIDTH} channels, but model.width={m.width} gives '
           f'model.heads={m.heads} {width} each; want model.attention=xla')
