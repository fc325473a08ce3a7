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
import math
import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from vit_jax.core import documents
from vit_jax.core.documents import Field, describe
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.models import adapters
from vit_jax.weights import addresses, files, sidecars, tables
from vit_jax.weights.preprocess import Known, PreprocessRule

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
MOST_ALPHA, MOST_BASE, MOST_CHOICES = 1e6, 1_000, 256
_MERGE = 'Merge the adapters in PEFT (merge_and_unload), and save the model.'
_PLAIN_STARTS = ('gaussian', 'eva', 'orthogonal')
"""Initial values of adapters after which PEFT keeps the base weights; PiSSA, OLoRA, CorDA and LoftQ change them, also
when adapters are read. A converted folder has true."""
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


class _Settings(NamedTuple):
  """What a config determines beside the tensors; `patterns` have the alpha of single layers."""
  base: str
  alpha: float
  patterns: tuple[tuple[re.Pattern[str], float], ...]
  is_rslora: bool

  def scale(self, layer: str, rank: int) -> float:
    alpha = next((value for pattern, value in self.patterns if pattern.match(layer)), self.alpha)
    return alpha / (rank ** .5 if self.is_rslora else rank)


def read(path: pathlib.Path) -> Adapter:
  """Reads a folder of PEFT.

  Raises:
    UserError: it has adapters of another kind than LoRA and DoRA of dense layers, or they are incomplete.
  """
  settings = _read_config(path)
  file = next((path / name for name in TENSORS if (path / name).is_file()), path / TENSORS[0])
  parts: dict[str, dict[str, HostArray]] = {}
  replaced = {}
  tensors = files.read(file)
  tables.check_whole(tensors, [name for name, x in tensors.items() if x.dtype != np.float32])
  for name, tensor in tensors.items():
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
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or not a.size * b.size or (
        m is not None and m.size != len(b)):
      problems.append(f'{layer}: expected lora_A [r, in] and lora_B [out, r] of a dense layer, r at least 1, and for '
                      'DoRA lora_magnitude_vector [out], got '
                      f'{", ".join(f"{leaf} {list(x.shape)}" for leaf, x in found_parts.items())}')
      continue
    layers[layer] = Layer(a, b, None if m is None else m.reshape(-1), settings.scale(layer, len(a)))
  if problems:
    raise UserError('\n'.join([f'{file}: expected adapters of dense layers, got others:', *tables.listed(problems)]))
  beside = sidecars.of_adapters(path / SIDE) if (path / SIDE).is_file() else Known()
  return Adapter(settings.base, layers, replaced, beside.class_names, list(beside.rules))


def _read_config(path: pathlib.Path) -> _Settings:
  file = path / CONFIG
  config = documents.read(file, advice='Fetch it again.')
  if config.object().get('peft_type') != 'LORA':
    raise UserError(f'{file}: expected peft_type LORA (LoRA, rsLoRA or DoRA), got '
                    f'{describe(config.object().get("peft_type"))}. {_MERGE}')
  for name in ('fan_in_fan_out', 'lora_bias', 'alora_invocation_tokens', 'use_qalora', 'use_bdlora'):
    if found := config.object().get(name):
      raise UserError(f'{file}: expected {name} false, got {describe(found)}. {_MERGE}')
  start = config.object().get('init_lora_weights')
  if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
    raise UserError(f'{file}: expected init_lora_weights that leaves the base weights as they are, got '
                    f'{describe(start)}. {_MERGE}')
  return _Settings(_base(config, path), config.field('lora_alpha').number(0, MOST_ALPHA), _patterns(config),
                   config.field('use_rslora', default=False).flag())


def _patterns(config: Field) -> tuple[tuple[re.Pattern[str], float], ...]:
  """Returns the alpha of single layers by patterns of their names, which are at the end of the complete name.

  A pattern may repeat single characters twice, as in `.*\\.0\\..*`, and its groups and optional characters may have
  `MOST_CHOICES` combinations: the time to match it stays bounded.
  """
  found = []
  alphas = config.object_or_empty('alpha_pattern')
  for key in alphas.object():
    choices = 2**key.count('?') * math.prod(group.count('|') + 1 for group in key.split(')'))
    try:
      if len(key) > 200 or re.search(r'[)][*+?{]|[(][?]|[{]|\\\d', key) or len(re.findall('[*+]', key)) > 2 or (
          choices > MOST_CHOICES):
        raise ValueError('too many ways to match')
      pattern = re.compile(rf'(?:.*\.)?(?:{key})$')
    except (ValueError, re.error, OverflowError, RecursionError):
      raise UserError(f'{alphas.place}: expected names of layers or simple patterns of names, got {describe(key)}. '
                      'Write the layers out.') from None
    found.append((pattern, alphas.field(key).number(0, MOST_ALPHA)))
  return tuple(found)


def _base(config: Field, path: pathlib.Path) -> str:
  """Returns the path or the address of the weights that adapters are for."""
  base = config.field('base_model_name_or_path', default='').text()
  if not base:
    raise UserError(f'{path / CONFIG}: expected the weights that the adapters are for in base_model_name_or_path, got '
                    'none. Set it to a file, a folder, or OWNER/NAME.')
  if not base.isprintable() or len(base.encode(errors='replace')) > MOST_BASE:
    raise config.field('base_model_name_or_path').error(f'a path or an address of at most {MOST_BASE:,} characters')
  for one in (pathlib.Path(base), path / base):
    if addresses.exists(one):
      return str(one)
  if not re.fullmatch(r'[\w.-]+/[\w.-]+', base):
    return base
  revision = config.field('revision', default='').text()
  if revision and not re.fullmatch(r'[\w.-]+', revision):
    raise config.field('revision').error('a branch, a tag or a commit without a slash')
  return f'hf://{base}' + (f'@{revision}' if revision else '')


def resolve(adapter: Adapter, where: str, *, allow_download: bool) -> pathlib.Path:
  """Returns the path of the weights that adapters are for.

  The adapters' config names them, so a person may not know of them. They are downloaded only on request.

  Raises:
    UserError: they are an address, and downloads are not allowed; or they cannot be found.
  """
  if not allow_download and not addresses.exists(adapter.base) and addresses.is_remote(adapter.base):
    raise UserError(f'--weights={where}: expected adapters for weights on this machine, got adapters for '
                    f'{adapter.base}, which their {CONFIG} names. Add --allow_download to download '
                    'that, or set base_model_name_or_path to a local path. A run takes adapters that were merged by '
                    'vit-jax convert.')
  return addresses.local(adapter.base)


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
    tables.check_whole(found, [name] if found[name].dtype != np.float32 else [])
    weight = found[name].T[None]  # [1, in, out]
    m = None if low.m is None else low.m[None]
    with np.errstate(all='ignore'):  # values that are not finite are an error of the merged weights
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
