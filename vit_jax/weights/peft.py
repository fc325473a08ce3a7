"""Reads and writes adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

A folder of adapters is read as the weights that it names, with the adapters merged into the tensors of their file. All
forms of layers are exact then: query, key and value in one matrix, as in timm, or in three, as in transformers.

Adapters are written for the program whose weights a run began with. Where it has query, key and value in one matrix,
their adapters are joined: A are the rows of all three, B is a block-diagonal matrix, and rank and alpha are the sums of
those of the parts (`rank_pattern`, `alpha_pattern`), so that the product is the same. If their A are equal, they are
one adapter of the same rank.
"""
from __future__ import annotations

import logging
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config.schema import Geometry, Interpolation
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.models import adapters
from vit_jax.weights import files
from vit_jax.weights.preprocess import ADAPTERS, PreprocessRule

log = logging.getLogger('vit_jax.weights')

SIDE = 'weights.json'
CONFIG, TENSORS = 'adapter_config.json', ('adapter_model.safetensors', 'adapter_model.bin')
PREFIX = 'base_model.model.'
_LEAF = re.compile(r'(?P<layer>.+)\.(?P<leaf>lora_A|lora_B|lora_magnitude_vector)(\.weight)?')
RENAMED = (
    (r'\.layers\.(\d+)\.attention\.([qkv])_proj$', r'.encoder.layer.\1.attention.attention.\2'),
    (r'\.layers\.(\d+)\.attention\.o_proj$', r'.encoder.layer.\1.attention.output.dense'),
    (r'\.layers\.(\d+)\.mlp\.fc1$', r'.encoder.layer.\1.intermediate.dense'),
    (r'\.layers\.(\d+)\.mlp\.fc2$', r'.encoder.layer.\1.output.dense'),
    (r'\.layers\.(\d+)\.', r'.encoder.layer.\1.'))
"""From names of modules in transformers 5 to names in files, which are those of transformers 4; the first that fits."""
_LETTERS = {'q': 'query', 'k': 'key', 'v': 'value'}


class Layer(NamedTuple):
  """The adapter of one matrix: `a [r, in]`, `b [out, r]`, DoRA's magnitude `m [out]` or None, and the scale."""
  a: HostArray
  b: HostArray
  m: HostArray | None
  scale: float


class Adapter(NamedTuple):
  """A folder of PEFT: the weights that it is for, adapters by layer, and the tensors that replace others, by name.

  class_names, rules: of the outputs and of the images, where this project wrote the folder; else empty.
  """
  base: str
  layers: dict[str, Layer]
  replaced: dict[str, HostArray]
  class_names: tuple[str, ...]
  rules: list[PreprocessRule]


def is_adapter(path: pathlib.Path) -> bool:
  """Whether a folder holds adapters of PEFT."""
  return path.is_dir() and (path / CONFIG).is_file()


def read(path: pathlib.Path) -> Adapter:
  """Reads a folder of PEFT.

  Raises:
    UserError: it has adapters of another kind than LoRA and DoRA of dense layers, or they are incomplete.
  """
  config = _read_config(path)
  file = next((path / name for name in TENSORS if (path / name).is_file()), path / TENSORS[0])
  parts: dict[str, dict[str, HostArray]] = {}
  replaced = {}
  for name, tensor in files.read(file).items():
    name = name.removeprefix(PREFIX)
    if found := _LEAF.fullmatch(name):
      parts.setdefault(found['layer'], {})[found['leaf']] = tensor
    else:
      replaced[name] = tensor
  problems = [f'{name} {list(x.shape)}: expected lora_A, lora_B or lora_magnitude_vector' for name, x in
              replaced.items() if '.lora_' in name]
  layers = {}
  for layer, found_parts in parts.items():
    a, b, m = (found_parts.get(leaf) for leaf in ('lora_A', 'lora_B', 'lora_magnitude_vector'))
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1]:
      problems.append(f'{layer}: expected lora_A [r, in] and lora_B [out, r] of a dense layer, got '
                      f'{", ".join(f"{leaf} {list(x.shape)}" for leaf, x in found_parts.items())}')
      continue
    layers[layer] = Layer(a, b, None if m is None else m.reshape(-1), _scale(config, layer, len(a)))
  if problems:
    raise UserError(f'{file}: expected adapters of dense layers, got others:\n' + '\n'.join(problems))
  return Adapter(_base(config, path), layers, replaced, *_beside(path))


def _read_config(path: pathlib.Path) -> Mapping[str, Any]:
  try:
    config = files.read_json(path / CONFIG)
  except (OSError, ValueError) as error:
    raise UserError(f'{path / CONFIG}: expected a JSON file, got {error}.') from None
  kind = config.get('peft_type') if isinstance(config, Mapping) else config
  if kind != 'LORA':
    raise UserError(f'{path / CONFIG}: expected peft_type LORA (LoRA, rsLoRA or DoRA), got {kind}. Merge the adapters '
                    'in PEFT (merge_and_unload), and save the model.')
  assert isinstance(config, Mapping)
  for name in ('fan_in_fan_out', 'lora_bias', 'alora_invocation_tokens', 'use_qalora', 'use_bdlora'):
    if config.get(name):
      raise UserError(f'{path / CONFIG}: expected {name} false, got {config[name]}. Merge the adapters in PEFT '
                      '(merge_and_unload), and save the model.')
  return config


def _beside(path: pathlib.Path) -> tuple[tuple[str, ...], list[PreprocessRule]]:
  """Returns class names and preprocessing, which PEFT does not save, as `peft_saving` writes them."""
  if not (path / SIDE).is_file():
    return (), []
  try:
    content = files.read_json(path / SIDE)
    p = content['preprocess']
    values = {'mean': tuple(map(float, p['mean'])), 'std': tuple(map(float, p['std'])), 'resize': int(p['resize']),
              'image_px': (int(p['image_px'][0]), int(p['image_px'][1])), 'antialias': bool(p['antialias']),
              'interpolation': Interpolation(p['interpolation']), 'geometry': Geometry(p['geometry'])}
    return tuple(map(str, content['class_names'])), [PreprocessRule(ADAPTERS, values)]
  except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
    raise UserError(f'{path / SIDE}: expected class names and preprocessing, got {error!r}. Remove the file.') from None


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
  patterns = config.get('alpha_pattern') or {}
  alpha = next((value for key, value in patterns.items() if re.match(rf'(.*\.)?({key})$', layer)),
               config.get('lora_alpha', rank))
  return float(alpha) / (rank ** .5 if config.get('use_rslora') else rank)


def _base(config: Mapping[str, Any], path: pathlib.Path) -> str:
  base = config.get('base_model_name_or_path') or ''
  if not base:
    raise UserError(f'{path / CONFIG}: expected the weights that the adapters are for in base_model_name_or_path, got '
                    'none. Set it to a file, a folder, or OWNER/NAME.')
  if pathlib.Path(base).exists() or '://' in base:
    return str(base)
  if (path / base).exists():
    return str(path / base)
  return f'hf://{base}' if re.fullmatch(r'[\w.-]+/[\w.-]+', base) else str(base)


def merge(tensors: Mapping[str, HostArray], adapter: Adapter) -> dict[str, HostArray]:
  """Returns the tensors of a file with the adapters merged, under the file's names.

  Raises:
    UserError: a layer is not in the file, or has another shape.
  """
  found = dict(tensors)
  problems = []
  for layer, low in adapter.layers.items():
    name = _find(f'{layer}.weight', found)
    shape = (low.b.shape[0], low.a.shape[1])
    if name not in found or found[name].shape != shape:
      problems.append(f'  {layer}: expected a matrix {list(shape)}, got '
                      f'{list(found[name].shape) if name in found else "none"}')
      continue
    weight = np.asarray(found[name], np.float32).T[None]  # [1, in, out]
    m = None if low.m is None else low.m[None]
    found[name] = adapters.merged(weight, low.a.T[None], low.b.T[None], m, scale=low.scale)[0].T
  for name, tensor in adapter.replaced.items():
    found[_find(name, found)] = tensor
  if problems:
    raise UserError(f'The adapters do not fit the weights {adapter.base}:\n' + '\n'.join(problems))
  log.info('Merged the adapters of %d layers into %s.', len(adapter.layers), adapter.base)
  return found


def _find(name: str, tensors: Mapping[str, HostArray]) -> str:
  """Returns the file's name of a tensor, which may be without the prefix of a model with a head; else `name`."""
  stem, _, leaf = name.rpartition('.')
  known = [stem]
  for pattern, new in RENAMED:
    if (old := re.sub(pattern, new, f'.{stem}')) != f'.{stem}':
      known.append(re.sub(r'(?<=attention\.attention\.)[qkv]$', lambda one: _LETTERS[one[0]], old)[1:])
  for one in known:
    for candidate in (f'{one}.{leaf}', f'{one.partition(".")[2]}.{leaf}'):
      if candidate in tensors:
        return candidate
  return name
