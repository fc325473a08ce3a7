"""Sidecars of a weight file, with settings that tensors do not determine: our `FILE.json`, `config.json` of
transformers or timm, `preprocessor_config.json`. They are checked like the weights themselves.
"""
from __future__ import annotations

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


def read(path: pathlib.Path) -> Known:
  """Reads the sidecars of the weight file `path`; our own file overrides the others.

  Raises:
    UserError: a sidecar is damaged, or describes an unknown network.
  """
  own = path.with_name(f'{path.name}.json')
  if own.is_file():
    return _from(own, _ours)
  config, processor = path.with_name('config.json'), path.with_name('preprocessor_config.json')
  open_clip = path.with_name('open_clip_config.json')
  if open_clip.is_file() and (path.name.startswith('open_clip') or not config.is_file()):
    return _from(open_clip, _open_clip)
  found = _from(config, _config) if config.is_file() else Known()
  if processor.is_file():
    found = found._replace(rules=(*_from(processor, _processor).rules, *found.rules))
  return found


def _from(path: pathlib.Path, reader: Callable[[Field], Known]) -> Known:
  return reader(documents.read(path, expected='settings of a network as JSON', advice=_FIX))


_FIX = 'Correct the file, fetch it again, or move it away from the weight file.'


def of_adapters(path: pathlib.Path) -> Known:
  """Reads `weights.json` beside adapters, as `peft_saving` writes it.

  Raises:
    UserError: a value is not as expected.
  """
  return _from(path, lambda content: Known(
      rules=(PreprocessRule(ADAPTERS, _preprocess(content.object_or_empty('preprocess'), 'resize')),),
      class_names=content.field('class_names').texts(MOST_CLASSES)))


def _preprocess(p: Field, resize: str) -> dict[str, Any]:
  """Parses the preprocessing of our own files; `resize` is the name of the size before the crop."""
  values = {'mean': p.field('mean').numbers(3, *_MEAN), 'std': p.field('std').numbers(3, *_STD),
            'image_px': p.field('image_px').numbers(2, 1, MOST_PX, whole=True),
            'resize': p.field(resize).whole(0, MOST_PX),
            'interpolation': p.field('interpolation').choice(Interpolation), 'antialias': p.field('antialias').flag(),
            'truncate': p.field('truncate', default=False).flag(),  # not in files of version 0.1
            'native_patch': p.field('native_patch', default=0).whole(0, MOST_PX)}
  if 'exif_orientation' in p:  # of weights with a record of it
    values['exif_orientation'] = p.field('exif_orientation').flag()
  if 'geometry' in p:  # not in files of version 0.1
    values['geometry'] = p.field('geometry').choice(Geometry)
  return values


def _ours(content: Field) -> Known:
  hints = Hints(content.field('heads').whole(0, MOST_HEADS), content.field('decoder_heads').whole(0, MOST_HEADS),
                content.field('gelu').choice(Gelu) if content.field('gelu').text() else None,
                content.field('norm_eps').number(*_EPSILON),
                content.field('image_px', default=None).numbers(2, 1, MOST_PX, whole=True), _position_resize(content),
                _one_of(content, 'pool', POOLS),
                settings=_settings(content.object_or_empty('network')))
  images = _preprocess(content.object_or_empty('preprocess'), 'resize_px')
  return Known(hints, (PreprocessRule(_name(content), images),), content.field('class_names').texts(MOST_CLASSES),
               is_sigmoid=content.field('probability', default='').text() == 'sigmoid')


def _name(content: Field) -> str:
  return pathlib.Path(content.source).name


_UNIT = 'unitinterval'
SETTINGS: dict[str, Callable[[Field, str], Any]] = {
    'positions.base': lambda t, name: t.field(name).number(1.001, 1e9),
    'positions.coordinates': lambda t, name: _one_of(t, name, (_UNIT,)),
    'positions.grid': lambda t, name: t.field(name).whole(0, MOST_PX),
    'positions.offset': lambda t, name: t.field(name).number(-1e6, 1e6),
    'positions.frequencies': lambda t, name: t.field(name).choice(Frequencies),
    'pool.heads': lambda t, name: t.field(name).whole(0, MOST_HEADS),
    **dict.fromkeys(('stem.std_eps', 'stem.var_eps', 'stem.norm_eps'), lambda t, name: t.field(name).number(*_EPSILON))}
"""Settings of our own files that tensors do not determine, besides those with a field of their own."""


def _settings(content: Field) -> dict[str, Any]:
  """Parses `SETTINGS` as `Hints.settings`."""
  if unknown := [name for name in content.object() if name not in SETTINGS]:
    raise content.field(str(unknown[0])[:60], default=None).error(f'only the settings {", ".join(SETTINGS)}')
  found = {name: SETTINGS[name](content, name) for name in content.object()}
  grid, offset = found.pop('positions.grid', None), found.pop('positions.offset', 0.)
  if found.pop('positions.coordinates', ''):
    found['positions.coordinates'] = schema.UnitInterval()
  elif grid is not None:
    found['positions.coordinates'] = schema.ByIndex(grid, offset)
  if frequencies := found.pop('positions.frequencies', None):
    found['positions'] = schema.SinCos(frequencies)
  return found


def _one_of(content: Field, name: str, known: Collection[str]) -> str:
  """Returns a text that is '' or one of `known`."""
  if (found := content.field(name, default='').text()) and found not in known:
    raise content.field(name, default=None).error(f'one of {", ".join(known)}')
  return found


def _config(content: Field) -> Known:
  """Parses `config.json` of transformers or timm; such a file of any other program is ignored."""
  if found := content.object().get('quantization_config'):
    method = found.get('quant_method') if isinstance(found, Mapping) else found
    raise UserError(f'{content.source}: expected the config of weights in floating point, got quantization_config '
                    f'({ascii(method)[:40]}): the weights are quantized. Use those from before the quantization.')
  if 'model_type' in content:
    return _transformers(content)
  return _timm(content) if 'pretrained_cfg' in content or 'architecture' in content else Known()


def _transformers(whole: Field) -> Known:
  kind = whole.field('model_type').text()
  c: dict[str, Any] = dict(whole.object())
  if kind in CONFIG_DEFAULTS and 'vision_config' in whole:
    c |= whole.object_or_empty('vision_config').object()
  default = CONFIG_DEFAULTS.get(kind) or CONFIG_DEFAULTS.get(str(c.get('model_type')))
  table = Field({**default, **c} if default else c, whole.source, advice=_FIX)
  size = _pair(table, 'image_size') if 'image_size' in table else (224, 224)
  if 'image_size' not in table and 'num_patches' in table:  # SigLIP 2, any size: its positions are of a square
    num_patches, patch_px = table.field('num_patches'), table.field('patch_size').whole(1, MOST_PX)
    size = (math.isqrt(num_patches.whole(1, MOST_PX**2)) * patch_px,) * 2
    if size[0] > MOST_PX:
      raise num_patches.error(f'patches of an image of at most {MOST_PX:,} px')
  eps = table.field('layer_norm_eps', default=None).number(*_EPSILON)
  eps = table.field('rms_norm_eps', default=0.).number(*_EPSILON) if eps is None else eps
  hints = Hints(table.field('num_attention_heads').whole(0, MOST_HEADS),
                table.field('decoder_num_attention_heads', default=0).whole(0, MOST_HEADS),
                _activation(table, 'hidden_act') if 'hidden_act' in table else Gelu.EXACT, eps, size,
                _position_resize(table),
                settings={'positions.base': table.field('rope_theta').number(1.001, 1e9)}
                if 'rope_theta' in table else {})
  return Known(hints, (), _labels(table))


def _labels(c: Field) -> tuple[str, ...]:
  """Returns the names of classes; () for the names that transformers gives to classes without names."""
  labels = c.object_or_empty('id2label').object()
  numbered = {int(key): value for key, value in labels.items() if re.fullmatch('[0-9]{1,7}', key, re.ASCII)}
  if not all(isinstance(value, str) for value in labels.values()) or sorted(numbered) != list(range(len(labels))):
    raise c.field('id2label', default=None).error('texts, numbered from 0 on')
  names = tuple(numbered[i] for i in range(len(numbered)))
  return () if all(name == f'LABEL_{i}' for i, name in enumerate(names)) else names


def _timm(c: Field) -> Known:
  """Parses `config.json` of timm, whose oldest files have the preprocessing beside the architecture."""
  cfg = c.object_or_empty('pretrained_cfg') if 'pretrained_cfg' in c else c
  values = {**_pixels(cfg), 'geometry': Geometry.TORCHVISION}
  part = cfg.field('crop_pct', default=1.).number(.01, 10.)
  if cfg.field('crop_mode', default='').text() == 'squash':
    values |= {'resize': 0} if part == 1. else {'resize': part, 'geometry': Geometry.HUGGINGFACE}
  elif 'crop_pct' in cfg:
    values['resize'] = part
  size = cfg.field('input_size', default=(0, 0, 0)).numbers(3, 1, MOST_PX, whole=True)[1:]
  if any(size):
    values['image_px'] = size
  arguments, network = c.object_or_empty('model_args'), c.field('architecture', default='').text()
  tag = cfg.field('tag', default='').text()
  pool = arguments.field('global_pool', default='').text() or c.field('global_pool', default='').text()
  return Known(Hints(arguments.field('num_heads', default=0).whole(0, MOST_HEADS),
                       gelu=_activation(arguments, 'act_layer') if 'act_layer' in arguments else None,
                       image_px=size if any(size) else None, position_resize=_position_resize(c),
                       settings=_settings(c.object_or_empty('network')), timm_pool=pool),
                 (PreprocessRule(_name(c), values),), _timm_labels(c), published.full_name(network, tag))


def _pixels(c: Field) -> dict[str, Any]:
  """Parses mean, deviation and filter as timm and open_clip have them."""
  values: dict[str, Any] = {name: c.field(name).numbers(3, *limits)
                            for name, limits in (('mean', _MEAN), ('std', _STD)) if name in c}
  if c.field('interpolation', default='').text() in ('bilinear', 'bicubic'):
    values |= {'interpolation': c.field('interpolation').choice(Interpolation), 'antialias': True}
  return values


def _open_clip(c: Field) -> Known:
  """Parses `open_clip_config.json`: the image tower, and the preprocessing that open_clip uses for it."""
  model, found = c.object_or_empty('model_cfg'), c.object_or_empty('preprocess_cfg')
  vision = model.object_or_empty('vision_cfg')
  values = _pixels(found)
  mode = found.field('resize_mode', default='shortest').text()
  if mode in ('squash', 'shortest'):
    values |= {'geometry': Geometry.TORCHVISION, 'resize': 0 if mode == 'squash' else 1.}
  size = _pair(vision, 'image_size') if 'image_size' in vision else None
  values |= {'image_px': size} if size else {}
  network = vision.field('timm_model_name', default='').text()
  width = vision.field('width', default=0).whole(0, 1 << 20)
  hints = Hints(image_px=size) if network else Hints(
      width // vision.field('head_width', default=64).whole(1, 1 << 20), image_px=size,
      gelu=Gelu.QUICK if model.field('quick_gelu', default=False).flag() else Gelu.EXACT)
  return Known(hints, (PreprocessRule(_name(c), values),), architecture=network)


def _timm_labels(c: Field) -> tuple[str, ...]:
  labels = c.field('label_names', default=()).texts(MOST_CLASSES)
  if isinstance(c.object().get('label_descriptions'), Mapping):
    named = c.object_or_empty('label_descriptions')
    return tuple(named.field(label, default=label).text() for label in labels)
  return c.field('label_descriptions', default=()).texts(MOST_CLASSES) or labels


def _position_resize(c: Field) -> PositionResize | None:
  """Parses the setting of our own files; None for other programs' files and for version 0.1."""
  return c.field('position_resize').choice(PositionResize) if c.field('position_resize', default='').text() else None


def _activation(c: Field, name: str) -> Gelu | None:
  """Parses the name of an activation; None for that of a gate."""
  found = c.field(name).text()
  if found in ('silu', 'swish'):
    return None
  if found not in ACTIVATIONS:
    raise c.field(name, default=None).error(f'an activation that is known here, one of {", ".join(ACTIVATIONS)}')
  return ACTIVATIONS[found]


def _processor(c: Field) -> Known:
  """Parses `preprocessor_config.json` of all versions: sizes, filter and normalization."""
  if abs(c.field('rescale_factor', default=1 / 255).number() - 1 / 255) > 1e-6:
    raise c.field('rescale_factor', default=None).error('1/255, as images here are divided by 255')
  if not c.field('do_rescale', default=True).flag():
    raise c.field('do_rescale', default=None).error('true, as images here are divided by 255')
  values: dict[str, Any] = {}
  if not c.field('do_normalize', default=True).flag():
    values |= {'mean': (0., 0., 0.), 'std': (1., 1., 1.)}
  elif 'image_mean' in c:
    values |= {'mean': c.field('image_mean').numbers(3, *_MEAN), 'std': c.field('image_std').numbers(3, *_STD)}
  rules: tuple[PreprocessRule, ...] = ()
  if (resample := c.field('resample', default=None).whole(0, 100)) in PILLOW:
    values |= {'interpolation': PILLOW[resample], 'antialias': True}
  elif resample is not None:
    filter_name = _OTHER_FILTERS.get(resample, f'the filter {resample}')
    rules = (PreprocessRule(f'in place of {filter_name} of {_name(c)}, which is not available here',
                            {'interpolation': Interpolation.BILINEAR, 'antialias': True}, is_guess=True),)
  size = c.object().get('size')
  kind = c.field('image_processor_type', default='').text() or c.field('feature_extractor_type', default='').text()
  is_short = type(size) is int and kind.startswith(_SHORT_SIDE)
  has_short = is_short or (isinstance(size, Mapping) and 'shortest_edge' in size)
  if c.field('do_center_crop', default=False).flag() and 'crop_size' in c and size is not None:
    crop = _pair(c, 'crop_size')
    if has_short:
      short = c.field('size') if is_short else c.object_or_empty('size').field('shortest_edge')
      values |= {'image_px': crop, 'resize': short.whole(1, MOST_PX), 'geometry': Geometry.TORCHVISION}
    else:
      values |= {'image_px': crop, 'resize': min(_pair(c, 'size')), 'geometry': Geometry.HUGGINGFACE}  # such as DeiT's
  elif size is not None and not has_short:
    values |= {'image_px': _pair(c, 'size'), 'resize': 0, 'geometry': Geometry.HUGGINGFACE}
  return Known(rules=(PreprocessRule(_name(c), values), *rules))


def _pair(c: Field, name: str) -> tuple[int, int]:
  """Parses (height, width) from a number, a pair, or `{height, width}`."""
  value = c.object().get(name)
  if isinstance(value, Mapping):
    if not {'height', 'width'} <= value.keys():
      names = ascii(', '.join(map(str, value)))[1:-1][:60]
      raise c.field(name).error(f'height and width, or shortest_edge, and not {names or "nothing"} alone')
    both = c.object_or_empty(name)
    return both.field('height').whole(1, MOST_PX), both.field('width').whole(1, MOST_PX)
  if isinstance(value, list | tuple):
    return c.field(name).numbers(2, 1, MOST_PX, whole=True)
  return (c.field(name).whole(1, MOST_PX),) * 2
