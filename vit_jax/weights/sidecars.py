"""Sidecars of a weight file, with settings that tensors do not determine: our `FILE.json`, `config.json` of
transformers or timm, `preprocessor_config.json`. They are checked like the weights themselves.
"""
from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from vit_jax.config import schema
from vit_jax.config.schema import Frequencies, Gelu, Geometry, Interpolation, PositionResize
from vit_jax.core import os_errors
from vit_jax.core.json_text import Table
from vit_jax.weights import files, published
from vit_jax.weights.hints import MOST_HEADS, MOST_PX, POOLS, Hints
from vit_jax.weights.preprocess import ADAPTERS, PreprocessRule
from vit_jax.weights.recognize import CONFIG_DEFAULTS

ACTIVATIONS = {'gelu': Gelu.EXACT, 'gelu_new': Gelu.TANH, 'gelu_pytorch_tanh': Gelu.TANH, 'gelu_tanh': Gelu.TANH,
               'quick_gelu': Gelu.QUICK, 'quickgelu': Gelu.QUICK}
"""Keys are the names of transformers and timm."""
PILLOW = {2: Interpolation.BILINEAR, 3: Interpolation.BICUBIC}
"""Keys are the numbers of Pillow's filters; bilinear and bicubic are antialiased in Pillow."""

MOST_CLASSES = 1_000_000
_MEAN, _STD, _EPSILON = (-1e3, 1e3), (1e-6, 1e3), (0., .999)  # limits of normalization, and of the epsilon of norms


class Sidecar(NamedTuple):
  """The settings in the sidecars of a file.

  architecture: timm's name of the network, with its tag if the config has one.
  pool: how timm pools tokens, in its words; '' = unknown.
  """
  hints: Hints = Hints()
  rules: tuple[PreprocessRule, ...] = ()
  class_names: tuple[str, ...] = ()
  architecture: str = ''
  pool: str = ''


def read(path: pathlib.Path) -> Sidecar:
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
  found = _from(config, _config) if config.is_file() else Sidecar()
  if processor.is_file():
    found = found._replace(rules=(*_from(processor, _processor).rules, *found.rules))
  return found


def _from(path: pathlib.Path, reader: Callable[[Table], Sidecar]) -> Sidecar:
  try:
    content = files.read_json(path)
  except (OSError, ValueError) as error:
    got = error.strerror if isinstance(error, OSError) else error
    raise os_errors.kind(error)(f'{path}: expected settings of a network as JSON, got {got}. {_FIX}') from error
  return reader(Table(content, str(path), fix=_FIX))


_FIX = 'Correct the file, fetch it again, or move it away from the weight file.'


def of_adapters(path: pathlib.Path) -> Sidecar:
  """Reads `weights.json` beside adapters, as `peft_saving` writes it.

  Raises:
    UserError: a value is not as expected.
  """
  return _from(path, _adapters)


def _adapters(content: Table) -> Sidecar:
  return Sidecar(rules=(PreprocessRule(ADAPTERS, _preprocess(content.table('preprocess'), 'resize')),),
                 class_names=content.texts('class_names', most=MOST_CLASSES))


def _preprocess(p: Table, resize: str) -> dict[str, Any]:
  """Parses the preprocessing of our own files; `resize` is the name of the size before the crop."""
  values = {'mean': p.numbers('mean', 3, *_MEAN), 'std': p.numbers('std', 3, *_STD),
            'image_px': p.numbers('image_px', 2, 1, MOST_PX, whole=True), 'resize': p.whole(resize, 0, MOST_PX),
            'interpolation': p.choice('interpolation', Interpolation), 'antialias': p.flag('antialias'),
            'truncate': p.flag('truncate', default=False)}  # not in files of version 0.1
  if 'geometry' in p:  # not in files of version 0.1
    values['geometry'] = p.choice('geometry', Geometry)
  return values


def _ours(content: Table) -> Sidecar:
  hints = Hints(content.whole('heads', 0, MOST_HEADS), content.whole('decoder_heads', 0, MOST_HEADS),
                content.choice('gelu', Gelu) if content.text('gelu') else None, content.number('norm_eps', *_EPSILON),
                content.numbers('image_px', 2, 1, MOST_PX, whole=True, default=None), _position_resize(content),
                _one_of(content, 'pool', POOLS),
                settings=_settings(content.table('network')))
  return Sidecar(hints, (PreprocessRule(_name(content), _preprocess(content.table('preprocess'), 'resize_px')),),
                 content.texts('class_names', most=MOST_CLASSES))


def _name(content: Table) -> str:
  return pathlib.Path(content.said).name


_UNIT = 'unitinterval'
SETTINGS: dict[str, Callable[[Table, str], Any]] = {
    'positions.base': lambda t, name: t.number(name, 1.001, 1e9),
    'positions.coordinates': lambda t, name: _one_of(t, name, (_UNIT,)),
    'positions.grid': lambda t, name: t.whole(name, 0, MOST_PX),
    'positions.offset': lambda t, name: t.number(name, -1e6, 1e6),
    'positions.frequencies': lambda t, name: t.choice(name, Frequencies),
    'pool.heads': lambda t, name: t.whole(name, 0, MOST_HEADS),
    **dict.fromkeys(('stem.std_eps', 'stem.var_eps', 'stem.norm_eps'), lambda t, name: t.number(name, *_EPSILON))}
"""Settings of our own files that tensors do not determine, besides those with a field of their own."""


def _settings(content: Table) -> dict[str, Any]:
  """Parses `SETTINGS` as `Hints.settings`."""
  if unknown := [name for name in content.content if name not in SETTINGS]:
    raise content.wrong(str(unknown[0])[:60], f'only the settings {", ".join(SETTINGS)}')
  found = {name: SETTINGS[name](content, name) for name in content.content}
  grid, offset = found.pop('positions.grid', None), found.pop('positions.offset', 0.)
  if found.pop('positions.coordinates', ''):
    found['positions.coordinates'] = schema.UnitInterval()
  elif grid is not None:
    found['positions.coordinates'] = schema.ByIndex(grid, offset)
  if frequencies := found.pop('positions.frequencies', None):
    found['positions'] = schema.SinCos(frequencies)
  return found


def _one_of(content: Table, name: str, known: Collection[str]) -> str:
  """Returns a text that is '' or one of `known`."""
  if (found := content.text(name, default='')) and found not in known:
    raise content.wrong(name, f'one of {", ".join(known)}')
  return found


def _config(content: Table) -> Sidecar:
  """Parses `config.json` of transformers or timm; such a file of any other program is ignored."""
  if 'model_type' in content:
    return _transformers(content)
  return _timm(content) if 'pretrained_cfg' in content or 'architecture' in content else Sidecar()


def _transformers(whole: Table) -> Sidecar:
  kind = whole.text('model_type')
  c: dict[str, Any] = dict(whole.content)
  if kind in CONFIG_DEFAULTS and 'vision_config' in whole:
    c |= whole.table('vision_config').content
  default = CONFIG_DEFAULTS.get(kind) or CONFIG_DEFAULTS.get(str(c.get('model_type')))
  table = Table({**default, **c} if default else c, whole.said, fix=_FIX)
  size = _pair(table, 'image_size') if 'image_size' in table else (224, 224)
  if 'image_size' not in table and 'num_patches' in table:  # SigLIP 2, any size: its positions are of a square
    size = (math.isqrt(table.whole('num_patches', 1, MOST_PX**2)) * table.whole('patch_size', 1, MOST_PX),) * 2
    if size[0] > MOST_PX:
      raise table.wrong('num_patches', f'patches of an image of at most {MOST_PX:,} px')
  eps = table.number('layer_norm_eps', *_EPSILON, default=None)
  eps = table.number('rms_norm_eps', *_EPSILON, default=0.) if eps is None else eps
  hints = Hints(table.whole('num_attention_heads', 0, MOST_HEADS),
                table.whole('decoder_num_attention_heads', 0, MOST_HEADS, default=0),
                _activation(table, 'hidden_act') if 'hidden_act' in table else Gelu.EXACT, eps, size,
                _position_resize(table),
                settings={'positions.base': table.number('rope_theta', 1.001, 1e9)} if 'rope_theta' in table else {})
  return Sidecar(hints, (), _labels(table))


def _labels(c: Table) -> tuple[str, ...]:
  """Returns the names of classes; () for the names that transformers gives to classes without names."""
  labels = c.table('id2label').content
  numbered = {int(key): value for key, value in labels.items() if re.fullmatch('[0-9]{1,7}', key, re.ASCII)}
  if not all(isinstance(value, str) for value in labels.values()) or sorted(numbered) != list(range(len(labels))):
    raise c.wrong('id2label', 'texts, numbered from 0 on')
  names = tuple(numbered[i] for i in range(len(numbered)))
  return () if all(name == f'LABEL_{i}' for i, name in enumerate(names)) else names


def _timm(c: Table) -> Sidecar:
  """Parses `config.json` of timm, whose oldest files have the preprocessing beside the architecture."""
  cfg = c.table('pretrained_cfg') if 'pretrained_cfg' in c else c
  values: dict[str, Any] = {name: cfg.numbers(name, 3, *limits) for name, limits in (('mean', _MEAN), ('std', _STD))
                            if name in cfg}
  values['geometry'] = Geometry.TORCHVISION
  if cfg.text('interpolation', default='') in ('bilinear', 'bicubic'):
    values |= {'interpolation': cfg.choice('interpolation', Interpolation), 'antialias': True}
  part = cfg.number('crop_pct', .01, 10., default=1.)
  if cfg.text('crop_mode', default='') == 'squash':
    values |= {'resize': 0} if part == 1. else {'resize': part, 'geometry': Geometry.HUGGINGFACE}
  elif 'crop_pct' in cfg:
    values['resize'] = part
  size = cfg.numbers('input_size', 3, 1, MOST_PX, whole=True, default=(0, 0, 0))[1:]
  if any(size):
    values['image_px'] = size
  arguments, network, tag = c.table('model_args'), c.text('architecture', default=''), cfg.text('tag', default='')
  pool = arguments.text('global_pool', default='') or c.text('global_pool', default='')
  return Sidecar(Hints(arguments.whole('num_heads', 0, MOST_HEADS, default=0),
                       gelu=_activation(arguments, 'act_layer') if 'act_layer' in arguments else None,
                       image_px=size if any(size) else None, position_resize=_position_resize(c),
                       settings=_settings(c.table('network'))),
                 (PreprocessRule(_name(c), values),), _timm_labels(c), published.full_name(network, tag), pool)


def _open_clip(c: Table) -> Sidecar:
  """Parses `open_clip_config.json`: the image tower, and the preprocessing that open_clip uses for it."""
  model, found = c.table('model_cfg'), c.table('preprocess_cfg')
  vision = model.table('vision_cfg')
  values: dict[str, Any] = {name: found.numbers(name, 3, *limits) for name, limits in (('mean', _MEAN), ('std', _STD))
                            if name in found}
  if found.text('interpolation', default='') in ('bilinear', 'bicubic'):
    values |= {'interpolation': found.choice('interpolation', Interpolation), 'antialias': True}
  mode = found.text('resize_mode', default='shortest')
  if mode in ('squash', 'shortest'):
    values |= {'geometry': Geometry.TORCHVISION, 'resize': 0 if mode == 'squash' else 1.}
  size = _pair(vision, 'image_size') if 'image_size' in vision else None
  values |= {'image_px': size} if size else {}
  network, width = vision.text('timm_model_name', default=''), vision.whole('width', 0, 1 << 20, default=0)
  hints = Hints(image_px=size) if network else Hints(
      width // vision.whole('head_width', 1, 1 << 20, default=64), image_px=size,
      gelu=Gelu.QUICK if model.flag('quick_gelu', default=False) else Gelu.EXACT)
  return Sidecar(hints, (PreprocessRule(_name(c), values),), architecture=network)


def _timm_labels(c: Table) -> tuple[str, ...]:
  labels = c.texts('label_names', most=MOST_CLASSES, default=())
  if isinstance(c.content.get('label_descriptions'), Mapping):
    named = c.table('label_descriptions')
    return tuple(named.text(label, default=label) for label in labels)
  return c.texts('label_descriptions', most=MOST_CLASSES, default=()) or labels


def _position_resize(c: Table) -> PositionResize | None:
  """Parses the setting of our own files; None for other programs' files and for version 0.1."""
  return c.choice('position_resize', PositionResize) if c.text('position_resize', default='') else None


def _activation(c: Table, name: str) -> Gelu | None:
  """Parses the name of an activation; None for that of a gate."""
  found = c.text(name)
  if found in ('silu', 'swish'):
    return None
  if found not in ACTIVATIONS:
    raise c.wrong(name, f'an activation that is known here, one of {", ".join(ACTIVATIONS)}')
  return ACTIVATIONS[found]


def _processor(c: Table) -> Sidecar:
  """Parses `preprocessor_config.json` of all versions: sizes, filter and normalization."""
  if abs(c.number('rescale_factor', default=1 / 255) - 1 / 255) > 1e-6:
    raise c.wrong('rescale_factor', '1/255, as images here are divided by 255')
  if not c.flag('do_rescale', default=True):
    raise c.wrong('do_rescale', 'true, as images here are divided by 255')
  values: dict[str, Any] = {}
  if not c.flag('do_normalize', default=True):
    values |= {'mean': (0., 0., 0.), 'std': (1., 1., 1.)}
  elif 'image_mean' in c:
    values |= {'mean': c.numbers('image_mean', 3, *_MEAN), 'std': c.numbers('image_std', 3, *_STD)}
  if (resample := c.whole('resample', 0, 100, default=None)) in PILLOW:
    values |= {'interpolation': PILLOW[resample], 'antialias': True}
  size = c.content.get('size')
  has_short = isinstance(size, Mapping) and 'shortest_edge' in size
  if c.flag('do_center_crop', default=False) and 'crop_size' in c and size is not None:
    crop = _pair(c, 'crop_size')
    if has_short:
      values |= {'image_px': crop, 'resize': c.table('size').whole('shortest_edge', 1, MOST_PX),
                 'geometry': Geometry.TORCHVISION}
    else:
      values |= {'image_px': crop, 'resize': min(_pair(c, 'size')), 'geometry': Geometry.HUGGINGFACE}  # such as DeiT's
  elif size is not None and not has_short:
    values |= {'image_px': _pair(c, 'size'), 'resize': 0, 'geometry': Geometry.HUGGINGFACE}
  return Sidecar(rules=(PreprocessRule(_name(c), values),))


def _pair(c: Table, name: str) -> tuple[int, int]:
  """Parses (height, width) from a number, a pair, or `{height, width}`."""
  value = c.content.get(name)
  if isinstance(value, Mapping):
    both = c.table(name)
    return both.whole('height', 1, MOST_PX), both.whole('width', 1, MOST_PX)
  if isinstance(value, list | tuple):
    return c.numbers(name, 2, 1, MOST_PX, whole=True)
  return (c.whole(name, 1, MOST_PX),) * 2
