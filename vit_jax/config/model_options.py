"""What is wrong with the settings of a backbone. Asked by `check.py`, and where a backbone is built."""
from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from vit_jax.config import resnet_options, schema, vit_options
from vit_jax.config.schema import AttentionKernel, Execution, Remat

MOST_CUDNN_WIDTH = 256  # of a head, on Hopper and later
UNIT_REMAT = (Remat.NONE, Remat.FULL)
"""What networks of convolutions know: their units keep everything, or only what they got."""


def faults(model: schema.Model, image_px: tuple[int, int]) -> Iterator[str]:
  """What is wrong with a model for images of `image_px` (height, width), each with what would be right."""
  match model:
    case schema.ViT():
      yield from _vit(model, image_px)
    case schema.ResNet():
      yield from resnet_options.faults('model', model.layers, model.width, eps=model.var_eps)
      if not model.layers:
        yield 'model.layers=() has no stage; want a number of units for each, such as 3,4,6,3'
      yield from _unit_remat(model.remat)
    case schema.Mixer():
      yield from _mixer(model, image_px)
    case schema.EfficientNet():
      yield from _efficientnet(model)
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
      return tuple(Remat), tuple(Execution)
    case schema.ResNet() | schema.EfficientNet():
      return UNIT_REMAT, (None,)
    case _:
      assert_never(model)


def _unit_remat(remat: Remat) -> Iterator[str]:
  if remat not in UNIT_REMAT:
    yield f'model.remat={remat.value} is for blocks of attention and MLP; want none or full'


def _least(model: schema.Model, *names: str) -> Iterator[str]:
  for name in names:
    if getattr(model, name) < 1:
      yield f'model.{name}={getattr(model, name)} is too small; want at least 1'


def _rates(model: schema.ViT | schema.Mixer | schema.EfficientNet) -> Iterator[str]:
  for name in ('dropout', 'drop_path'):
    if not 0 <= getattr(model, name) < 1:
      yield f'model.{name}={getattr(model, name)} is out of range; want 0 to below 1'
  if model.norm_eps <= 0:
    yield f'model.norm_eps={model.norm_eps} is not positive'


def _tiles(patch: int, image_px: tuple[int, int]) -> Iterator[str]:
  if patch >= 1 and any(px % patch for px in image_px):
    yield f'image_px={image_px} is not a multiple of model.patch={patch} in both directions'


def _vit(m: schema.ViT, image_px: tuple[int, int]) -> Iterator[str]:
  yield from _least(m, 'patch', 'width', 'depth', 'heads', 'mlp', 'unroll')
  if m.unroll > 1 and m.execution is not Execution.SCAN:
    yield f'model.unroll={m.unroll} is for a scan, but model.execution={m.execution.value}; want unroll=1'
  if not 0 <= m.full_remat <= max(0, m.depth):
    yield f'model.full_remat={m.full_remat} are not some of model.depth={m.depth} blocks; want 0 to {m.depth}'
  if m.heads >= 1 and m.width % m.heads:
    yield f'model.width={m.width} is not a multiple of model.heads={m.heads}'
  if m.positions in vit_options.FIXED and m.width % 4:
    yield f'model.width={m.width} is not a multiple of 4, which 2-D sine-cosine positions need'
  yield from _tiles(m.patch, image_px)
  yield from _rates(m)
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
  width = m.width // max(1, m.heads)
  if m.attention is AttentionKernel.CUDNN and (width % 8 or width > MOST_CUDNN_WIDTH):
    yield (f'{own} knows heads of 8, 16, … {MOST_CUDNN_WIDTH} channels, but model.width={m.width} gives '
           f'model.heads={m.heads} {width} each; want model.attention=xla')


def _mixer(m: schema.Mixer, image_px: tuple[int, int]) -> Iterator[str]:
  yield from _least(m, 'patch', 'width', 'depth', 'tokens_mlp', 'channels_mlp')
  yield from _tiles(m.patch, image_px)
  yield from _rates(m)


def _efficientnet(m: schema.EfficientNet) -> Iterator[str]:
  for name in ('width_factor', 'depth_factor'):
    if getattr(m, name) <= 0:
      yield f'model.{name}={getattr(m, name)} is not positive'
  if not 0 <= m.norm_momentum < 1:
    yield f'model.norm_momentum={m.norm_momentum} is out of range; want 0 to below 1'
  yield from _rates(m)
  yield from _unit_remat(m.remat)
