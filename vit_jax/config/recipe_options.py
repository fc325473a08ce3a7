"""Which settings of a recipe make no sense, alone or together; part of `check.py`."""
from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from vit_jax.config import schema

MAX_TIMM = 10  # timm cuts magnitudes off there


def faults(config: schema.Config) -> Iterator[str]:
  """Every fault of `config.data.recipe`, but for its geometry."""
  r = config.data.recipe
  yield from _randaugment(r)
  pairs = {'crop_area': r.crop_area, 'crop_aspect': r.crop_aspect, 'erase.area': r.erase.area,
           'erase.aspect': r.erase.aspect}
  for name, pair in pairs.items():
    yield from _ordered(name, pair)
  yield from _off(r)
  yield from _crop(r)
  yield from _mixing(config, r)
  yield from _repeats(config, r)
  if r.antialias and r.interpolation is schema.Interpolation.AREA:
    yield ('data.recipe.antialias=true widens the filters of bilinear and bicubic, but data.recipe.interpolation=area '
           'covers every pixel as it is; want antialias=false')
  if r.eval_area and r.crop is schema.Crop.RESIZE:
    yield ('data.recipe.eval_area=true with crop=resize: training sees what evaluation does; want interpolation=area '
           'for both, and eval_area=false')
  elif r.eval_area and r.interpolation is schema.Interpolation.AREA:
    yield 'data.recipe.eval_area=true changes nothing with interpolation=area; want eval_area=false'
  if config.data.mix_classes is schema.MixClasses.SEPARATE and not config.data.source.startswith('mix:'):
    yield f'data.mix_classes=separate is for mixtures, not data.source={config.data.source!r}; want mix_classes=same'
  if r.views.on:
    yield from _views(config, r)
  if config.data.in_memory is schema.InMemory.YES:
    yield from (f'data.in_memory=yes augments on the device, but {name} happens on the host; want data.in_memory=no'
                for name in _on_host(r))


def _off(r: schema.Recipe) -> Iterator[str]:
  """Settings of parts that are switched off."""
  parts: dict[str, tuple[str, bool, Any, Any]] = {
      'randaugment': ('layers=0', r.randaugment.layers == 0, r.randaugment, schema.RandAugment()),
      'erase': ('probability=0', r.erase.probability == 0, r.erase, schema.Erase()),
      'jitter': ('no spread', not any(_spreads(r.jitter)), r.jitter, schema.Jitter()),
      'views': ('on=false', not r.views.on, r.views, schema.Views())}
  for name, (switch, is_off, part, usual) in parts.items():
    if is_off and part != usual:
      changed = [f.name for f in dataclasses.fields(part) if getattr(part, f.name) != getattr(usual, f.name)]
      yield (f'data.recipe.{name}.{", ".join(changed)} is set, but changes nothing with {switch}; want {name} switched '
             'on, or as it is by default')


def _crop(r: schema.Recipe) -> Iterator[str]:
  """Settings of crops that are not made."""
  usual = schema.Recipe()
  if r.crop is schema.Crop.RESIZE and r.crop_area != usual.crop_area:
    yield f'data.recipe.crop_area={r.crop_area} changes nothing with crop=resize; want crop=inception or window'
  if r.crop is not schema.Crop.INCEPTION and r.crop_aspect != usual.crop_aspect:
    yield f'data.recipe.crop_aspect={r.crop_aspect} changes nothing with crop={r.crop.value}; want crop=inception'
  if r.crop is not schema.Crop.INCEPTION and r.crop_sampler is not usual.crop_sampler:
    yield (f'data.recipe.crop_sampler: expected crop=inception beside {r.crop_sampler.value}, got crop={r.crop.value}, '
           'which draws no such crop. Remove crop_sampler, or set crop=inception.')
  if r.crop_interpolation is not usual.crop_interpolation and (
      r.crop is schema.Crop.RESIZE or r.views.on or r.crop_interpolation.value == r.interpolation.value):
    yield (f'data.recipe.crop_interpolation: expected same with crop={r.crop.value}, views.on={r.views.on} and '
           f'interpolation={r.interpolation.value}, got {r.crop_interpolation.value}, which changes nothing.'
           ' Remove it.')


def _on_host(r: schema.Recipe) -> Iterator[str]:
  if r.randaugment.layers:
    yield f'data.recipe.randaugment.layers={r.randaugment.layers}'
  if r.three_augment:
    yield 'data.recipe.three_augment=true'
  if any(_spreads(r.jitter)):
    yield 'data.recipe.jitter'
  if r.views.on:
    yield 'data.recipe.views.on=true'


def _spreads(jitter: schema.Jitter) -> tuple[float, ...]:
  return jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue


def _randaugment(r: schema.Recipe) -> Iterator[str]:
  ra, name = r.randaugment, 'data.recipe.randaugment'
  if ra.table is schema.OpTable.TIMM and ra.magnitude > MAX_TIMM:
    yield f'{name}.magnitude={ra.magnitude:g} is more than the table timm knows; want at most {MAX_TIMM}'
  if ra.table is schema.OpTable.AUGREG and ra.magnitude_std:
    yield f'{name}.magnitude_std={ra.magnitude_std:g} is for the table timm; want 0, or table=timm'
  if ra.layers > 0 and r.three_augment:
    yield 'data.recipe.three_augment=true takes the place of RandAugment; want randaugment.layers=0, or false'


def _mixing(config: schema.Config, r: schema.Recipe) -> Iterator[str]:
  if r.cutmix and config.batch_size % 2:
    yield f'batch_size={config.batch_size} is odd, but cutmix mixes pairs; want an even batch'
  if r.mix_probability != 1 and not (r.mixup or r.cutmix):
    yield (f'data.recipe.mix_probability={r.mix_probability:g} changes nothing, as mixup and cutmix are 0; want 1, or '
           'one of them on')
  if r.cutmix_share != .5 and not (r.mixup and r.cutmix):
    yield (f'data.recipe.cutmix_share={r.cutmix_share:g} chooses between mixup and cutmix, but they are not both on; '
           'want 0.5, or both')


def _repeats(config: schema.Config, r: schema.Recipe) -> Iterator[str]:
  if r.repeats > 1 and config.batch_size < 2 * r.repeats:
    yield (f'batch_size={config.batch_size} has not two different examples with data.recipe.repeats={r.repeats}; want '
           f'at least {2 * r.repeats}')


def _views(config: schema.Config, r: schema.Recipe) -> Iterator[str]:
  v, name = r.views, 'data.recipe.views'
  if not config.objective.takes_views:
    yield (f'{name}.on=true makes views instead of images, which objective {type(config.objective).__name__} does not '
           'take; want false')
  others = {f'crop={r.crop.value}': r.crop is not schema.Crop.INCEPTION, 'randaugment': r.randaugment.layers > 0,
            'three_augment': r.three_augment, 'jitter': any(_spreads(r.jitter)), 'erase': r.erase.probability > 0,
            'mixup': r.mixup > 0, 'cutmix': r.cutmix > 0, 'shift_px': r.shift_px > 0, 'scale': r.scale > 0,
            'rotate_degrees': r.rotate_degrees > 0, 'shear': r.shear > 0}
  if also := [other for other, is_on in others.items() if is_on]:
    yield f'{name}.on=true has colours and crops of its own; want it without data.recipe.{{{", ".join(also)}}}'
  patch = getattr(config.model, 'patch', 1)
  if v.num_local and v.local_px % patch:
    yield f'{name}.local_px={v.local_px} is not a multiple of model.patch={patch}'
  yield from _ordered('views.global_area', v.global_area)
  yield from _ordered('views.local_area', v.local_area)


def _ordered(name: str, values: tuple[float, float]) -> Iterator[str]:
  if values[0] > values[1]:
    yield f'data.recipe.{name}: expected the smaller number first, got {values}.'
