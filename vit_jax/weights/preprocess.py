"""The preprocessing of images for a network, and the rule that each of its settings comes from.

Weight files rarely contain the preprocessing. The first of these sources with a value decides: `--preprocess=`, the
config of adapters, the sidecars of the file, its published name (`published.py`), and the default of its family. The
size of images that the positions of the network are for goes before all but the first two. Defaults come with a
warning, since the files of AugReg and DeiT have the same names and shapes but need differently normalized images.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema import Geometry, Interpolation
from vit_jax.core.errors import UserError
from vit_jax.weights.hints import MOST_PX, Hints, parse_number, parse_px, parse_whole


class Preprocess(NamedTuple):
  """The preprocessing of images for evaluation.

  geometry: the program that defines the resized size and the offset of the crop, as in `schema.Recipe`.
  resize_px: short side before the center crop, px (both sides, for `huggingface`); 0 = resized to `image_px` without
    preserving the aspect ratio.
  image_px: (height, width) of the network's input.
  interpolation, antialias: how pixels are resampled, as in `schema.Recipe`.
  mean, std: of RGB in [0, 1]; of other channels in their own units.
  rule: the rules that decided, for the report.
  truncate: whether values are truncated to integers, as in `schema.Recipe`.
  exif_orientation: whether images are turned as their EXIF says; None = no record has it: images in folders and named
    files are turned, those of published datasets are not, as with `schema.Exif.AUTO`.
  native_patch: side of the patches of images at their own aspect, as in `schema.Recipe`; only evaluations and features
    of many images have it.
  """
  geometry: Geometry
  resize_px: int
  image_px: tuple[int, int]
  interpolation: Interpolation
  antialias: bool
  mean: tuple[float, ...]
  std: tuple[float, ...]
  rule: str
  truncate: bool = False
  exif_orientation: bool | None = None
  native_patch: int = 0


class PreprocessRule(NamedTuple):
  """Values set by one rule: some of `mean`, `std`, `image_px`, `geometry`, `interpolation`, `antialias`, `truncate`,
  `exif_orientation`, `native_patch` and `resize`.

  `resize` is the short side in px (int; 0 = without preserving the aspect ratio), or the part of it that the crop keeps
  (float). `is_guess`: whether the values may be those of other weights, so that their use is a warning.
  """
  rule: str
  values: Mapping[str, Any]
  is_guess: bool = False


class Known(NamedTuple):
  """What sidecars or a published name say about weights.

  hints: settings of the network.
  rules: of the preprocessing, the first one that has a value decides.
  class_names: of the outputs, in their order.
  architecture: timm's name of the network, with its tag if the config has one.
  is_sigmoid: that of `network.Weights`.
  """
  hints: Hints = Hints()
  rules: tuple[PreprocessRule, ...] = ()
  class_names: tuple[str, ...] = ()
  architecture: str = ''
  is_sigmoid: bool = False


NORMS: dict[str, dict[str, Any]] = {
    'half': {'mean': (.5, .5, .5), 'std': (.5, .5, .5)},  # vision_transformer, AugReg: [-1, 1]
    'imagenet': {'mean': (.485, .456, .406), 'std': (.229, .224, .225)},  # DeiT, MAE, DINO
    'clip': {'mean': (.48145466, .4578275, .40821073), 'std': (.26862954, .26130258, .27577711)},
    'zero_one': {'mean': (0., 0., 0.), 'std': (1., 1., 1.)},
    'satellite': {'mean': (.430, .411, .296), 'std': (.213, .156, .143)},  # DINOv3 for satellite images
}
PILLOW = {'geometry': Geometry.TORCHVISION, 'interpolation': Interpolation.BICUBIC, 'antialias': True}
TF = {'geometry': Geometry.BIG_VISION, 'interpolation': Interpolation.BILINEAR, 'antialias': False}
_REPORTED = ('mean', 'std', 'image_px', 'geometry', 'resize', 'interpolation', 'antialias', 'exif_orientation')


def parse(text: str) -> list[PreprocessRule]:
  """Parses `--preprocess=imagenet,resize=248,image=224,geometry=torchvision,interpolation=bicubic,antialias=true`.

  Raises:
    UserError: the text is not of this form, or a size is out of range.
  """
  if not text:
    return []
  found = schema.parse_arg(text, norm=('', *NORMS), resize=(), image=(), crop=(),
                           geometry=('', *(g.value for g in Geometry)),
                           interpolation=('', *(i.value for i in Interpolation)), antialias=('', 'true', 'false'),
                           truncate=('', 'true', 'false'), exif=('', 'true', 'false'))
  if found['resize'] and found['crop']:
    raise UserError('--preprocess: expected resize or crop, got both. Leave one of them out.')
  values: dict[str, Any] = {**NORMS[found['norm']]} if found['norm'] else {}
  if found['resize']:
    values['resize'] = 0 if found['resize'] == '0' else parse_whole(
        '--preprocess', 'resize', found['resize'], 1, MOST_PX)
  elif found['crop']:
    values['resize'] = parse_number('--preprocess', 'crop', found['crop'], .01, 10.)
  if found['image']:
    values['image_px'] = parse_px('--preprocess', found['image'])
  for name, choices in (('geometry', Geometry), ('interpolation', Interpolation)):
    values |= {name: choices(found[name])} if found[name] else {}
  for word, name in (('antialias', 'antialias'), ('truncate', 'truncate'), ('exif', 'exif_orientation')):
    values |= {name: found[word] == 'true'} if found[word] else {}
  return [PreprocessRule('--preprocess', values)]


ADAPTERS = 'the adapters'
FIRST = ('--preprocess', ADAPTERS)
"""Rules that decide the size of the images against the position embeddings, which are resized for it."""


def decide(rules: Sequence[PreprocessRule], *, usual: PreprocessRule,
           own_px: tuple[int, int] | None) -> tuple[Preprocess, tuple[str, ...]]:
  """Takes each value from the first of `rules` that has it, or else from the family's defaults, with a warning.

  Args:
    rules: in order of priority.
    usual: the defaults of the family, as `recognize.usual` returns them, which complete the rules.
    own_px: image size of the network's position embeddings, if it has any; only rules of `FIRST` override it.

  Returns:
    The preprocessing, and warnings.
  """
  own = [PreprocessRule('its positions', {'image_px': own_px})] if own_px else []
  first = [rule for rule in rules if rule.rule in FIRST]
  order = [*first, *own, *rules, usual, PreprocessRule('the usual size', {'image_px': (224, 224)})]
  chosen = {name: rule for rule in reversed(order) for name, value in rule.values.items() if value is not None}
  values = {name: rule.values[name] for name, rule in chosen.items()}
  by_rule: dict[str, list[str]] = {}
  for name in [name for name in _REPORTED if name in chosen]:
    by_rule.setdefault(chosen[name].rule, []).append(name)
  origin = '; '.join(f'{", ".join(names)} by {rule}' for rule, names in by_rule.items())
  image_px = values['image_px']
  if chosen['image_px'] in first and chosen['resize'] not in first:  # the short side is for another size of images
    usual_px = next(rule.values['image_px'] for rule in order if 'image_px' in rule.values and rule not in first)
    resize_px = _rescaled(values['resize'], usual_px, image_px)
  else:
    resize_px = _short_side(values['resize'], image_px)
  found = Preprocess(
      geometry=values['geometry'], resize_px=resize_px, image_px=image_px, interpolation=values['interpolation'],
      antialias=values['antialias'], mean=tuple(values['mean']), std=tuple(values['std']), rule=origin,
      truncate=not values['antialias'] and values.get('truncate', False),
      exif_orientation=values.get('exif_orientation'), native_patch=values.get('native_patch', 0))
  guessed = {rule.rule: [name for name in chosen if chosen[name] is rule] for rule in order if rule.is_guess}
  return found, tuple(warning for rule, names in guessed.items() for warning in _guesses(found, names, rule))


def _guesses(p: Preprocess, names: Sequence[str], rule: str) -> tuple[str, ...]:
  """Returns a warning about the settings of these names, which a guess decided, and how to set them."""
  shown = [what for name, what in (
      ('mean', f'mean {p.mean}, std {p.std}'), ('resize', resizing(p)),
      ('interpolation', p.interpolation.value + (', antialiased' if p.antialias else ''))) if name in names]
  if not shown:
    return ()
  return (f'The preprocessing of images is a guess: {"; ".join(shown)} is {rule}. If it is wrong, set it with '
          '--preprocess=half, imagenet or clip, and resize=, geometry=, interpolation=.',)


def _rescaled(resize: int | float, old_px: tuple[int, int], new_px: tuple[int, int]) -> int:
  """Returns the short side for images of `new_px`, of a part of it or of px for images of `old_px`; 0 stays.

  For another size than `old_px` it is at least the longer side of `new_px`, so that the crop lies within each image.
  """
  if old_px == new_px or not resize:
    return _short_side(resize, new_px)
  small_px = _short_side(resize, new_px) if isinstance(resize, float) else resize * min(new_px) // min(old_px)
  return max(small_px, *new_px)


def scaled(p: Preprocess, image_px: tuple[int, int]) -> Preprocess:
  """Returns the preprocessing for another image size (height, width); the crop keeps its part of the short side."""
  if p.image_px == image_px:
    return p
  return p._replace(image_px=image_px, resize_px=_rescaled(p.resize_px, p.image_px, image_px))


def recipe_values(p: Preprocess) -> dict[str, Any]:
  """Returns the fields of `schema.Recipe` for this preprocessing."""
  return {'eval_resize_px': p.resize_px, 'eval_geometry': p.geometry, 'interpolation': p.interpolation,
          'antialias': p.antialias, 'truncate': p.truncate, 'mean': p.mean, 'std': p.std,
          **({} if p.exif_orientation is None else {'exif_orientation': schema.Exif(p.exif_orientation)})}


def _short_side(resize: int | float, image_px: tuple[int, int]) -> int:
  """Returns the short side in px for `resize`: px, or the part of it that a crop of `image_px` keeps, as in timm."""
  return resize if isinstance(resize, int) else math.floor(min(image_px) / resize)


def describe(p: Preprocess) -> str:
  """Returns the preprocessing in one line."""
  filtered = (', antialiased' if p.antialias else '') + (', truncated' if p.truncate else '')
  turned = {None: 'applied to folders and named files', True: 'applied', False: 'ignored'}[p.exif_orientation]
  native = f'evaluated at their own aspect in patches of {p.native_patch} px, else ' if p.native_patch else ''
  return (f'Images: {native}{resizing(p)}, {p.interpolation.value}{filtered}, mean {p.mean}, std {p.std}, EXIF '
          f'orientation {turned} ({p.rule})')


def resizing(p: Preprocess) -> str:
  """Returns a description of the resizing."""
  size = f'{p.image_px[0]} x {p.image_px[1]} px'
  if not p.resize_px:
    return f'resized to {size} without preserving the aspect ratio'
  if p.geometry is Geometry.HUGGINGFACE:
    return (f'resized to {p.resize_px} x {p.resize_px} px without preserving the aspect ratio, center crop of {size} '
            f'(geometry {p.geometry.value})')
  return f'short side resized to {p.resize_px} px, center crop of {size} (geometry {p.geometry.value})'


def side_px(p: Preprocess) -> int | list[int]:
  """Returns the size of images as configs of other programs have it: one number for a square."""
  return p.image_px[0] if p.image_px[0] == p.image_px[1] else list(p.image_px)
