"""Which options of a ViT go together. The only place that says so; asked by `check.py` and by `models/vit/vit.py`."""
from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from vit_jax.config import resnet_options, schema
from vit_jax.config.schema import Pool, Positions, PositionsAt

LEARNED = (Positions.LEARNED, Positions.LEARNED2D)
FIXED = (Positions.SINCOS2D, Positions.SINCOS2D_MAE)


def stem_stride(stem: schema.PatchStem | schema.ResNetStem | schema.ConvStem) -> int:
  """Pixels of the image a pixel of the map that a stem cuts into patches."""
  match stem:
    case schema.PatchStem():
      return 1
    case schema.ConvStem():
      return 2
    case schema.ResNetStem():
      return 4 * 2 ** max(0, len(stem.layers) - 1)
    case _:
      assert_never(stem)


def faults(m: schema.ViT) -> Iterator[str]:
  """What is wrong with the options of a model, each with its value and what would be right."""
  if m.drop_path_even and not m.drop_path:
    yield 'model.drop_path_even=True changes nothing with model.drop_path=0; want a rate, or drop_path_even=False'
  if m.positions is Positions.LEARNED2D and m.width % 2:
    yield f'model.width={m.width} is odd, but learned2d positions give half of it to rows and half to columns'
  if m.positions_at is not PositionsAt.STEM and m.positions not in LEARNED:
    yield (f'model.positions_at={m.positions_at.value} is defined for learned positions, but '
           f'model.positions={m.positions.value}; want learned or learned2d, or model.positions_at=stem')
  if m.parallel and m.layer_scale:
    yield (f'model.layer_scale={m.layer_scale} scales two branches, but model.parallel=True has one sum of both; '
           'want model.layer_scale=0 or model.parallel=False')
  if m.norm_after_pool and m.pool not in (Pool.MEAN, Pool.PATCHES):
    yield (f'model.norm_after_pool: expected False with model.pool={m.pool.value}, got True. Set model.pool=mean or '
           'patches, whose mean it normalises.')
  if m.distilled and m.pool is not Pool.CLS:
    yield (f'model.distilled=True puts a distillation token after the class token, but model.pool={m.pool.value} has '
           'none; want model.pool=cls')
  if m.patch % stem_stride(m.stem):
    yield (f'model.patch={m.patch} is not a multiple of the {stem_stride(m.stem)} px that one pixel of the map of '
           f'model.stem={type(m.stem).__name__} stands for')
  if isinstance(m.stem, schema.ResNetStem):
    yield from resnet_options.faults('model.stem', m.stem.layers, m.stem.width, eps=m.stem.var_eps + m.stem.std_eps)
  if m.axial:
    yield from _axial(m)


def _axial(m: schema.ViT) -> Iterator[str]:
  if m.pool.has_class_token:
    yield (f'model.pool={m.pool.value} has a class token, which lies in no row and no column, but model.axial=True; '
           'want model.pool=mean or map')
  if m.registers:
    yield (f'model.registers={m.registers} lie in no row and no column, but model.axial=True; '
           'want model.registers=0')
  if m.positions is Positions.RELATIVE:
    yield ('model.positions=relative knows offsets in the whole sequence, but model.axial=True attends in rows and '
           'columns; want learned, learned2d, sincos2d or none')
  if m.parallel:
    yield 'model.parallel=True and model.axial=True: no such model is defined; want one of them'
