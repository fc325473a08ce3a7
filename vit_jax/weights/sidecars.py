"""Sidecars of a weight file, with settings that tensors do not determine.

They are `FILE.json` of this project, `config.json` of transformers or timm, `preprocessor_config.json` of transformers,
and `open_clip_config.json`, and they are checked like the weights themselves. `read` finds those of a file.
"""
from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import Frequencies, Gelu, Geometry, Interpolation, PositionResize
from vit_jax.core import documents
from vit_jax.core.documents import Field
from vit_jax.core.errors import UserError
from vit_jax.weights import published
from vit_jax.weights.hints import MOST_HEADS, MOST_PX, POOLS, Hints
from vit_jax.weights.preprocess import ADAPTERS, Known, PreprocessRule
from vit_jax.weights.recognize import CONFIG_DEFAULTS

ACTIVATIONS = {'gelu': Gelu.EXACT, 'gelu_new': Gelu.TANH, 'gelu_pytorch_tanh': Gelu.TANH, 'gelu_tanh': Gelu.TANH,
               'quick_gelu': Gelu.QUICK, 'quickgelu': Gelu.QUICK}
"""Keys are the names of transformers and timm."""
PILLOW = {2: Interpolation.BILINEAR, 3: Interpolation.BICUBIC}
"""Keys are the numbers of Pillow's filters; bilinear and bicubic are antialiased in Pillow."""
_SHORT_SIDE = ('CLIP', 'Bit')
"""Processors of transformers for which one number as `size` is the short side (`default_to_square=False`)."""
_OTHER_FILTERS = {0: 'nearest', 1: 'Lanczos', 4: 'box', 5: 'Hamming'}

MOST_CLASSES = 1_000_000
_MEAN, _STD, _EPSILON = (-1e3, 1e3), (1e-6, 1e3), (0., .999)  # limits of normalization, and of the epsilon of norms
_FIX = 'Correct the file, fetch it again, or move it away from the weight file.'


def read(path: pathlib.Path) -> Known:
  """Reads the sidecars of the weight file `path`; our own file overrides the others.

  Raises:
    UserError: a sidecar is damaged, or describes an unknown network.
  """
  ours = path.with_name(f'{path.name}.json')
  if ours.is_file():
    return _ours(_content(ours))
  config, processor = path.with_name('config.json'), path.with_name('preprocessor_config.json')
  open_clip = path.with_name('open_clip_config.json')
  if open_clip.is_file() and (path.name.startswith('open_clip') or not config.is_file()):
    return _open_clip(_content(open_clip))
  known = _config(_content(config)) if config.is_file() else Known()
  if processor.is_file():
    known = known._replace(rules=(*_processor(_content(processor)), *known.rules))
  return known


def of_adapters(path: pathlib.Path) -> Known:
  """Reads `weights.json` beside adapters, as `peft.write` writes it. Raises UserError if a value is not as expected."""
  content = _content(path)
  values = _preprocess(content.object_or_empty('preprocess'), resize='resize')
  return Known(rules=(PreprocessRule(ADAPTERS, values),), class_names=content.field('class_names').texts(MOST_CLASSES))


def _content(path: pathlib.Path) -> Field:
  return documents.read(path, expected='settings of a network as JSON', advice=_FIX)


# Files of this project

def _preprocess(content: Field, *, resize: str) -> dict[str, Any]:
  """Parses the values of a `PreprocessRule`; `resize` is the name of the size before the crop.

  Files of version 0.1 leave out some. Only those of weights with a record of it have `exif_orientation`.
  """
  values = {'mean': content.field('mean').numbers(3, *_MEAN), 'std': content.field('std').numbers(3, *_STD),
            'image_px': content.field('image_px').numbers(2, 1, MOST_PX, whole=True),
            'resize': content.field(resize).whole(0, MOST_PX),
            'interpolation': content.field('interpolation').choice(Interpolation),
            'antialias': content.field('antialias').flag(), 'truncate': content.field('truncate', default=False).flag(),
            'native_patch': content.field('native_patch', default=0).whole(0, MOST_PX),
            'exif_orientation': content.field('exif_orientation', default=None).flag(),
            'geometry': content.field('geometry', default=None).choice(Geometry)}
  return {name: value for name, value in values.items() if value is not None}


def _ours(content: Field) -> Known:
  """Parses `FILE.json`, as `saving.save` writes it."""
  hints = Hints(
      heads=content.field('heads').whole(0, MOST_HEADS),
      decoder_heads=content.field('decoder_heads').whole(0, MOST_HEADS),
      gelu=content.field('gelu').choice(Gelu) if content.field('gelu').text() else None,
      norm_eps=content.field('norm_eps').number(*_EPSILON),
      image_px=content.field('image_px', default=None).numbers(2, 1, MOST_PX, whole=True),
      position_resize=_position_resize(content), pool=_one_of(content.field('pool', default=''), POOLS),
      settings=_settings(content.object_or_empty('network')))
  values = _preprocess(content.object_or_empty('preprocess'), resize='resize_px')
  return Known(hints, (PreprocessRule(_name(content), values),), content.field('class_names').texts(MOST_CLASSES),
               is_sigmoid=content.field('probability', default='').text() == 'sigmoid')


def _name(content: Field) -> str:
  return pathlib.Path(content.source).name


SETTINGS: dict[str, Callable[[Field], Any]] = {
    'positions.base': lambda field: field.number(1.001, 1e9),
    'positions.coordinates': lambda field: _one_of(dataclasses.replace(field, default=''), ('unitinterval',)),
    'positions.grid': lambda field: field.whole(0, MOST_PX),
    'positions.offset': lambda field: field.number(-1e6, 1e6),
    'positions.frequencies': lambda field: field.choice(Frequencies),
    'pool.heads': lambda field: field.whole(0, MOST_HEADS),
    **dict.fromkeys(('stem.std_eps', 'stem.var_eps', 'stem.norm_eps'), lambda field: field.number(*_EPSILON))}
"""Settings of our own files that tensors do not determine, besides those with a field of their own."""


def _settings(content: Field) -> dict[str, Any]:
  """Parses `SETTINGS` as `Hints.settings`."""
  if unknown := [name for name in content.object() if name not in SETTINGS]:
    raise content.field(str(unknown[0])[:60], default=None).error(f'only the settings {", ".join(SETTINGS)}')
  settings = {name: SETTINGS[name](field) for name, field in content.fields()}
  grid, offset = settings.pop('positions.grid', None), settings.pop('positions.offset', 0.)
  if settings.pop('positions.coordinates', ''):
    settings['positions.coordinates'] = schema.UnitInterval()
  elif grid is not None:
    settings['positions.coordinates'] = schema.ByIndex(grid, offset)
  if frequencies := settings.pop('positions.frequencies', None):
    settings['positions'] = schema.SinCos(frequencies)
  return settings


def _one_of(field: Field, known: Collection[str]) -> str:
  """Returns a text that is '' or one of `known`."""
  if (text := field.text()) and text not in known:
    raise field.error(f'one of {", ".join(known)}')
  return text


def _position_resize(content: Field) -> PositionResize | None:
  """Parses the setting of our own files; None for other programs' files and for version 0.1."""
  field = content.field('position_resize', default='')
  return field.choice(PositionResize) if field.text() else None


# Configs of transformers, timm and open_clip

def _config(content: Field) -> Known:
  """Parses `config.json` of transformers or timm; such a file of any other program is ignored."""
  if quantization := content.object().get('quantization_config'):
    method = quantization.get('quant_method') if isinstance(quantization, Mapping) else quantization
    raise UserError(f'{content.source}: expected the config of weights in floating point, got quantization_config '
                    f'({ascii(method)[:40]}): the weights are quantized. Use those from before the quantization.')
  if 'model_type' in content:
    return _transformers(content)
  return _timm(content) if 'pretrained_cfg' in content or 'architecture' in content else Known()


def _transformers(content: Field) -> Known:
  """Parses `config.json` of transformers; one of two towers has the settings of the image tower in `vision_config`."""
  model_type = content.field('model_type').text()
  settings: dict[str, Any] = dict(content.object())
  if model_type in CONFIG_DEFAULTS and 'vision_config' in content:
    settings |= content.object_or_empty('vision_config').object()
  defaults = CONFIG_DEFAULTS.get(model_type) or CONFIG_DEFAULTS.get(str(settings.get('model_type'))) or {}
  table = Field({**defaults, **settings}, content.source, advice=_FIX)
  eps = table.field('layer_norm_eps', default=None).number(*_EPSILON)
  hints = Hints(
      heads=table.field('num_attention_heads').whole(0, MOST_HEADS),
      decoder_heads=table.field('decoder_num_attention_heads', default=0).whole(0, MOST_HEADS),
      gelu=_activation(table, 'hidden_act') if 'hidden_act' in table else Gelu.EXACT,
      norm_eps=table.field('rms_norm_eps', default=0.).number(*_EPSILON) if eps is None else eps,
      image_px=_image_px(table), position_resize=_position_resize(table),
      settings={'positions.base': table.field('rope_theta').number(1.001, 1e9)} if 'rope_theta' in table else {})
  return Known(hints, (), _labels(table))


def _image_px(table: Field) -> tuple[int, int]:
  """Parses the size of images; SigLIP 2 for any size has the number of patches of a square instead."""
  if 'image_size' in table:
    return _pair(table, 'image_size')
  if 'num_patches' not in table:
    return 224, 224
  num_patches, patch_px = table.field('num_patches'), table.field('patch_size').whole(1, MOST_PX)
  side_px = math.isqrt(num_patches.whole(1, MOST_PX**2)) * patch_px
  if side_px > MOST_PX:
    raise num_patches.error(f'patches of an image of at most {MOST_PX:,} px')
  return side_px, side_px


def _labels(c: Field) -> tuple[str, ...]:
  """Returns the names of classes; () for the names that transformers gives to classes without names."""
  labels = c.object_or_empty('id2label').object()
  numbered = {int(key): value for key, value in labels.items() if re.fullmatch('[0-9]{1,7}', key, re.ASCII)}
  if not all(isinstance(value, str) for value in labels.values()) or sorted(numbered) != list(range(len(labels))):
    raise c.field('id2label', default=None).error('texts, numbered from 0 on')
  names = tuple(numbered[i] for i in range(len(numbered)))
  return () if all(name == f'LABEL_{i}' for i, name in enumerate(names)) else names


def _timm(content: Field) -> Known:
  """Parses `config.json` of timm, whose oldest files have the preprocessing beside the architecture."""
  pretrained = content.object_or_empty('pretrained_cfg') if 'pretrained_cfg' in content else content
  values = {**_pixels(pretrained), 'geometry': Geometry.TORCHVISION}
  crop_pct = pretrained.field('crop_pct', default=1.).number(.01, 10.)
  if pretrained.field('crop_mode', default='').text() == 'squash':
    values |= {'resize': 0} if crop_pct == 1. else {'resize': crop_pct, 'geometry': Geometry.HUGGINGFACE}
  elif 'crop_pct' in pretrained:
    values['resize'] = crop_pct
  image_px = pretrained.field('input_size', default=(0, 0, 0)).numbers(3, 1, MOST_PX, whole=True)[1:]
  if any(image_px):
    values['image_px'] = image_px
  arguments = content.object_or_empty('model_args')
  hints = Hints(
      heads=arguments.field('num_heads', default=0).whole(0, MOST_HEADS),
      gelu=_activation(arguments, 'act_layer') if 'act_layer' in arguments else None,
      image_px=image_px if any(image_px) else None, position_resize=_position_resize(content),
      settings=_settings(content.object_or_empty('network')),
      timm_pool=(arguments.field('global_pool', default='').text() or content.field('global_pool', default='').text()))
  architecture = published.full_name(content.field('architecture', default='').text(),
                                     pretrained.field('tag', default='').text())
  return Known(hints, (PreprocessRule(_name(content), values),), _timm_labels(content), architecture)


def _pixels(c: Field) -> dict[str, Any]:
  """Parses mean, deviation and filter as timm and open_clip have them."""
  values: dict[str, Any] = {name: c.field(name).numbers(3, *limits)
                            for name, limits in (('mean', _MEAN), ('std', _STD)) if name in c}
  if c.field('interpolation', default='').text() in ('bilinear', 'bicubic'):
    values |= {'interpolation': c.field('interpolation').choice(Interpolation), 'antialias': True}
  return values


def _open_clip(content: Field) -> Known:
  """Parses `open_clip_config.json`: the image tower, and the preprocessing that open_clip uses for it."""
  model, preprocess = content.object_or_empty('model_cfg'), content.object_or_empty('preprocess_cfg')
  vision = model.object_or_empty('vision_cfg')
  values = _pixels(preprocess)
  mode = preprocess.field('resize_mode', default='shortest').text()
  if mode in ('squash', 'shortest'):
    values |= {'geometry': Geometry.TORCHVISION, 'resize': 0 if mode == 'squash' else 1.}
  hints = Hints(image_px=_pair(vision, 'image_size') if 'image_size' in vision else None)
  if hints.image_px:
    values['image_px'] = hints.image_px
  width = vision.field('width', default=0).whole(0, 1 << 20)
  architecture = vision.field('timm_model_name', default='').text()
  if not architecture:
    hints = hints._replace(heads=width // vision.field('head_width', default=64).whole(1, 1 << 20),
                           gelu=Gelu.QUICK if model.field('quick_gelu', default=False).flag() else Gelu.EXACT)
  return Known(hints, (PreprocessRule(_name(content), values),), architecture=architecture)


def _timm_labels(c: Field) -> tuple[str, ...]:
  labels = c.field('label_names', default=()).texts(MOST_CLASSES)
  if isinstance(c.object().get('label_descriptions'), Mapping):
    named = c.object_or_empty('label_descriptions')
    return tuple(named.field(label, default=label).text() for label in labels)
  return c.field('label_descriptions', default=()).texts(MOST_CLASSES) or labels


def _activation(c: Field, name: str) -> Gelu | None:
  """Parses the name of an activation; None for that of a gate."""
  activation = c.field(name).text()
  if activation in ('silu', 'swish'):
    return None
  if activation not in ACTIVATIONS:
    raise c.field(name).error(f'an activation that is known here, one of {", ".join(ACTIVATIONS)}')
  return ACTIVATIONS[activation]


# Processors of transformers

def _processor(content: Field) -> tuple[PreprocessRule, ...]:
  """Parses `preprocessor_config.json` of all versions: sizes, filter and normalization."""
  if abs(content.field('rescale_factor', default=1 / 255).number() - 1 / 255) > 1e-6:
    raise content.field('rescale_factor').error('1/255, as images here are divided by 255')
  if not content.field('do_rescale', default=True).flag():
    raise content.field('do_rescale').error('true, as images here are divided by 255')
  values = _resizing(content)
  guess: tuple[PreprocessRule, ...] = ()
  if not content.field('do_normalize', default=True).flag():
    values |= {'mean': (0., 0., 0.), 'std': (1., 1., 1.)}
  elif 'image_mean' in content:
    values['mean'] = content.field('image_mean').numbers(3, *_MEAN)
    values['std'] = content.field('image_std').numbers(3, *_STD)
  resample = content.field('resample', default=None).whole(0, 100)
  if resample in PILLOW:
    values |= {'interpolation': PILLOW[resample], 'antialias': True}
  elif resample is not None:
    filter_name = _OTHER_FILTERS.get(resample, f'the filter {resample}')
    guess = (PreprocessRule(f'in place of {filter_name} of {_name(content)}, which is not available here',
                            {'interpolation': Interpolation.BILINEAR, 'antialias': True}, is_guess=True),)
  return (PreprocessRule(_name(content), values), *guess)


def _resizing(content: Field) -> dict[str, Any]:
  """Parses how a processor resizes and crops: the short side or both sides, and then a center crop or none."""
  size = content.object().get('size')
  processor_type = (content.field('image_processor_type', default='').text()
                    or content.field('feature_extractor_type', default='').text())
  is_short_side = type(size) is int and processor_type.startswith(_SHORT_SIDE)
  has_short_side = is_short_side or (isinstance(size, Mapping) and 'shortest_edge' in size)
  has_crop = content.field('do_center_crop', default=False).flag() and 'crop_size' in content
  if size is None:
    return {}
  if has_crop and has_short_side:
    crop = _pair(content, 'crop_size')
    field = content.field('size') if is_short_side else content.object_or_empty('size').field('shortest_edge')
    return {'image_px': crop, 'resize': field.whole(1, MOST_PX), 'geometry': Geometry.TORCHVISION}
  if has_crop:
    return {'image_px': _pair(content, 'crop_size'), 'resize': min(_pair(content, 'size')),
            'geometry': Geometry.HUGGINGFACE}  # such as DeiT's
  if has_short_side:
    return {}
  return {'image_px': _pair(content, 'size'), 'resize': 0, 'geometry': Geometry.HUGGINGFACE}


def _pair(c: Field, name: str) -> tuple[int, int]:
  """Parses (height, width) from a number, a pair, or `{height, width}`."""
  value = c.object().get(name)
  if isinstance(value, Mapping):
    if not {'height', 'width'} <= value.keys():
      names = ascii(', '.join(map(str, value)))[1:-1][:60]
      raise c.field(name).error(f'height and width, or shortest_edge, and not {names or "nothing"} alone')
    sides = c.object_or_empty(name)
    return sides.field('height').whole(1, MOST_PX), sides.field('width').whole(1, MOST_PX)
  if isinstance(value, list | tuple):
    return c.field(name).numbers(2, 1, MOST_PX, whole=True)
  return (c.field(name).whole(1, MOST_PX),) * 2
