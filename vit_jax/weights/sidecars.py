"""Sidecars of a weight file, with settings that tensors do not determine: our `FILE.json`, `config.json` of
transformers or timm, `preprocessor_config.json`. They are checked like the weights themselves.
"""
from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config.schema import Gelu, Geometry, Interpolation, Pool, PositionResize, Positions, RotaryPlaces
from vit_jax.core.errors import UserError
from vit_jax.weights import files
from vit_jax.weights.hints import Hints
from vit_jax.weights.preprocess import PreprocessRule

ACTIVATIONS = {'gelu': Gelu.EXACT, 'gelu_new': Gelu.TANH, 'gelu_pytorch_tanh': Gelu.TANH, 'gelu_tanh': Gelu.TANH,
               'quick_gelu': Gelu.QUICK, 'quickgelu': Gelu.QUICK}
"""Keys are the names of transformers and timm."""
PILLOW = {2: Interpolation.BILINEAR, 3: Interpolation.BICUBIC}
"""Keys are the numbers of Pillow's filters; bilinear and bicubic are antialiased in Pillow."""

MOST_PX = 16_384  # side of an image; a network for larger images would not fit in memory
MOST_HEADS = 4096
MOST_CLASSES = 1_000_000


class Sidecar(NamedTuple):
  """The settings in the sidecars of a file; `architecture` is timm's name of the network."""
  hints: Hints = Hints()
  rules: tuple[PreprocessRule, ...] = ()
  class_names: tuple[str, ...] = ()
  architecture: str = ''


def read(path: pathlib.Path) -> Sidecar:
  """Reads the sidecars of the weight file `path`; our own file overrides the others.

  Raises:
    UserError: a sidecar is damaged, or describes an unknown network.
  """
  own = path.with_name(f'{path.name}.json')
  if own.is_file():
    return _from(own, _ours)
  config, processor = path.with_name('config.json'), path.with_name('preprocessor_config.json')
  found = _from(config, _config) if config.is_file() else Sidecar()
  if processor.is_file():
    found = found._replace(rules=(*_from(processor, _processor).rules, *found.rules))
  return found


def _from(path: pathlib.Path, reader: Callable[[Mapping[str, Any], str], Sidecar]) -> Sidecar:
  try:
    content = files.read_json(path)
    if not isinstance(content, Mapping):
      raise ValueError(f'it is a {type(content).__name__}')
    found = reader(content, str(path.name))
    _check(found.hints, found.rules, found.class_names)
    return found
  except UserError as error:
    raise UserError(f'{path}: {error}') from None
  except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
    raise UserError(f'{path}: expected settings of a network, got a file that cannot be understood: '
                    f'{str(error) or type(error).__name__}. Fix it, or move it away from the weight file.') from error


def _ours(content: Mapping[str, Any], name: str) -> Sidecar:
  p = content['preprocess']
  values = {'mean': tuple(p['mean']), 'std': tuple(p['std']), 'image_px': tuple(p['image_px']),
            'resize': int(p['resize_px']), 'interpolation': Interpolation(p['interpolation']),
            'antialias': bool(p['antialias'])}
  if 'geometry' in p:  # not in files of version 0.1
    values['geometry'] = Geometry(p['geometry'])
  image = content.get('image_px')
  return Sidecar(Hints(int(content['heads']), int(content['decoder_heads']),
                    Gelu(content['gelu']) if content['gelu'] else None, float(content['norm_eps']),
                    (image[0], image[1]) if image else None, _position_resize(content),
                    Pool(content['pool']) if content.get('pool') else None,  # not in files of version 0.1
                    settings=_settings(content.get('network', {}))),
              (PreprocessRule(name, values),), tuple(content['class_names']))


SETTINGS: dict[str, Callable[[Any], Any]] = {
    'rotary_base': float, 'rotary_places': RotaryPlaces, 'rotary_grid': int, 'rotary_offset': float, 'pool_heads': int,
    'positions': Positions}
"""Settings of our own files that tensors do not determine, besides those with a field of their own."""


def _settings(content: Mapping[str, Any]) -> dict[str, Any]:
  found = {name: SETTINGS[name](value) for name, value in content.items()}
  if found.get('rotary_grid', 0) < 0 or found.get('pool_heads', 0) < 0 or not 1 < found.get('rotary_base', 2.) < 1e9:
    raise ValueError(f'settings of the network: {ascii(content)[:200]}')
  return found


def _config(content: Mapping[str, Any], name: str) -> Sidecar:
  """Parses `config.json` of transformers or timm; such a file of any other program is ignored."""
  if 'model_type' in content:
    return _transformers(content)
  return _timm(content, name) if 'pretrained_cfg' in content else Sidecar()


def _transformers(c: Mapping[str, Any]) -> Sidecar:
  kind = str(c['model_type'])
  tower = c.get('vision_config') if kind in TOWERS else None
  c = {**c, **tower} if isinstance(tower, Mapping) else c
  default = TOWERS.get(kind) or TOWERS.get(str(c.get('model_type')))
  if default:
    c = {**default, **c}
  size = _pair(c.get('image_size', 224))
  if 'image_size' not in c and 'num_patches' in c:  # SigLIP 2 for images of any size: its positions are of a square
    size = (math.isqrt(int(c['num_patches'])) * int(c['patch_size']),) * 2
  eps = float(c.get('layer_norm_eps', c.get('rms_norm_eps', 0.)))
  hints = Hints(int(c['num_attention_heads']), int(c.get('decoder_num_attention_heads', 0)),
                _activation(c.get('hidden_act', 'gelu')), eps, size,
                _position_resize(c), settings={'rotary_base': float(c['rope_theta'])} if 'rope_theta' in c else {})
  labels = {int(key): str(value) for key, value in c.get('id2label', {}).items()}
  names = tuple(labels[i] for i in range(len(labels)))
  # The names that transformers gives to classes without names.
  return Sidecar(hints, (), () if all(x == f'LABEL_{i}' for i, x in enumerate(names)) else names)


_CLIP = {'num_attention_heads': 0, 'hidden_act': 'quick_gelu', 'layer_norm_eps': 1e-5}
_SIGLIP = {'num_attention_heads': 0, 'hidden_act': 'gelu_pytorch_tanh', 'layer_norm_eps': 1e-6}
_SIGLIP2 = {**_SIGLIP, 'num_patches': 256, 'patch_size': 16}
_TIPS = {'num_attention_heads': 0, 'image_size': 448, 'layer_norm_eps': 1e-6, 'position_resize': 'bilinear_antialias'}
TOWERS: dict[str, dict[str, Any]] = {
    'clip': _CLIP, 'clip_vision_model': _CLIP, 'siglip': _SIGLIP, 'siglip_vision_model': _SIGLIP,
    'siglip2': _SIGLIP2, 'siglip2_vision_model': _SIGLIP2,
    'dinov3_vit': {'layer_norm_eps': 1e-5, 'rope_theta': 100.}, 'aimv2': {'hidden_act': 'silu'},
    'aimv2_vision_model': {'hidden_act': 'silu'}, 'tipsv2': _TIPS, 'tipsv2_vision_model': _TIPS}
"""What configs of these kinds may leave out, as it is the default of transformers; 0 heads: those of the width."""


def _timm(c: Mapping[str, Any], name: str) -> Sidecar:
  cfg = c['pretrained_cfg']
  values: dict[str, Any] = {key: tuple(cfg[key]) for key in ('mean', 'std') if key in cfg}
  values['geometry'] = Geometry.TORCHVISION
  if cfg.get('interpolation') in ('bilinear', 'bicubic'):
    values |= {'interpolation': Interpolation(cfg['interpolation']), 'antialias': True}
  if cfg.get('crop_mode') == 'squash':
    values['resize'] = 0
  elif 'crop_pct' in cfg:
    values['resize'] = float(cfg['crop_pct'])
  size = tuple(cfg['input_size'][1:]) if 'input_size' in cfg else None
  if size:
    values['image_px'] = size
  arguments = c.get('model_args') or {}
  act = arguments.get('act_layer')
  names = c.get('label_descriptions') or c.get('label_names') or ()
  labels = tuple(names.get(label, label) for label in c.get('label_names', ())) if isinstance(names, Mapping) else names
  return Sidecar(Hints(int(arguments.get('num_heads', 0)), gelu=_activation(act) if act else None, image_px=size,
                    position_resize=_position_resize(c)),
              (PreprocessRule(name, values),), tuple(map(str, labels)), str(c.get('architecture', '')))


def _position_resize(c: Mapping[str, Any]) -> PositionResize | None:
  """Parses the setting of our own files; None for other programs' files and for version 0.1."""
  return PositionResize(c['position_resize']) if c.get('position_resize') else None


def _activation(name: str) -> Gelu | None:
  """Parses the name of an activation; None for that of a gate."""
  if name in ('silu', 'swish'):
    return None
  if name not in ACTIVATIONS:
    raise UserError(f'the activation {name!r} is not known here; known are {", ".join(ACTIVATIONS)}')
  return ACTIVATIONS[name]


def _processor(c: Mapping[str, Any], name: str) -> Sidecar:
  """Parses `preprocessor_config.json` of all versions: sizes, filter and normalization."""
  if abs(c.get('rescale_factor', 1 / 255) - 1 / 255) > 1e-6 or not c.get('do_rescale', True):
    raise UserError(f'rescale_factor={c.get("rescale_factor")}, do_rescale={c.get("do_rescale")}: images here are '
                    'divided by 255')
  values: dict[str, Any] = {}
  if not c.get('do_normalize', True):
    values |= {'mean': (0., 0., 0.), 'std': (1., 1., 1.)}
  elif 'image_mean' in c:
    values |= {'mean': tuple(c['image_mean']), 'std': tuple(c['image_std'])}
  if c.get('resample') in PILLOW:
    values |= {'interpolation': PILLOW[c['resample']], 'antialias': True}
  size = c.get('size')
  crop = _pair(c['crop_size']) if c.get('do_center_crop') and 'crop_size' in c else None
  if crop and isinstance(size, Mapping) and 'shortest_edge' in size:
    values |= {'image_px': crop, 'resize': int(size['shortest_edge']), 'geometry': Geometry.TORCHVISION}
  elif crop and size is not None:
    values |= {'image_px': crop, 'resize': min(_pair(size)), 'geometry': Geometry.HUGGINGFACE}  # such as DeiT's
  elif size is not None and not (isinstance(size, Mapping) and 'shortest_edge' in size):
    values |= {'image_px': _pair(size), 'resize': 0, 'geometry': Geometry.HUGGINGFACE}
  return Sidecar(rules=(PreprocessRule(name, values),))


def _pair(size: Any) -> tuple[int, int]:
  """Parses (height, width) from a number, a pair, or `{height, width}`."""
  if isinstance(size, Mapping):
    return int(size['height']), int(size['width'])
  if isinstance(size, (list, tuple)):
    return int(size[0]), int(size[1])
  return int(size), int(size)


def _check(hints: Hints, rules: Sequence[PreprocessRule], class_names: Sequence[str]) -> None:
  """Checks that sizes, normalization and numbers of heads are possible values.

  Raises:
    ValueError: names the first invalid value.
  """
  for name in ('heads', 'decoder_heads'):
    if not 0 <= getattr(hints, name) <= MOST_HEADS:
      raise ValueError(f'{name}: expected 0 to {MOST_HEADS:,}, got {getattr(hints, name)}')
  if not 0 <= hints.norm_eps < 1:
    raise ValueError(f'epsilon of the norms: expected 0 to 1, got {hints.norm_eps}')
  if len(class_names) > MOST_CLASSES or not all(isinstance(name, str) for name in class_names):
    raise ValueError(f'class names: expected up to {MOST_CLASSES:,} texts')
  for size in (hints.image_px, *(rule.values.get('image_px') for rule in rules)):
    if size is not None and not (_is_list(size, 2) and all(type(px) is int and 1 <= px <= MOST_PX for px in size)):
      raise ValueError(f'size of the images: expected two numbers from 1 to {MOST_PX:,} px, got {ascii(size)[:60]}')
  for rule in rules:
    _check_rule(rule)


def _check_rule(rule: PreprocessRule) -> None:
  for name, least in (('mean', -1e3), ('std', 1e-6)):
    found = rule.values.get(name)
    if found is not None and not (_is_list(found, 3) and all(_is_within(x, least, 1e3) for x in found)):
      raise ValueError(f'{name}: expected three numbers from {least:g} to 1,000, got {ascii(found)[:60]}')
  resize = rule.values.get('resize')
  if resize is not None and not (_is_within(resize, .01, 10.) if isinstance(resize, float) else
                                 _is_within(resize, 0, MOST_PX)):
    raise ValueError(f'size before the crop: expected 0 to {MOST_PX:,} px or a part of 0.01 to 10, got {resize}')


def _is_list(value: Any, length: int) -> bool:
  return isinstance(value, (list, tuple)) and len(value) == length


def _is_within(value: Any, least: float, most: float) -> bool:
  return type(value) in (int, float) and math.isfinite(value) and least <= value <= most
