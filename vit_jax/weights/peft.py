"""Reads and writes adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

A folder of adapters is read as the weights that it names, with the adapters merged into the tensors of their file. All
forms of layers are exact then: query, key and value in one matrix, as in timm, or in three, as in transformers.
`loading.py` calls `is_adapter`, `read`, `resolve` and `merge` in this order.

The adapters of a run are written for the program whose weights the run began with; `saving.save_adapters` calls
`read_run`, `check_network`, `write` and `check_written` in this order. Where the program has query, key and value in
one matrix, their adapters are joined: A are the rows of all three, B is a block-diagonal matrix, and rank and alpha are
the sums of those of the parts (`rank_pattern`, `alpha_pattern`), so that the product is the same. If their A are equal,
they are one adapter of the same rank.
"""
from __future__ import annotations

import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents, trees
from vit_jax.core.documents import Field
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.models import adapters
from vit_jax.weights import addresses, files, network, recognize, runs, sidecars, tables
from vit_jax.weights.families import transformers
from vit_jax.weights.network import Weights
from vit_jax.weights.preprocess import Known, PreprocessRule

log = logging.getLogger('vit_jax.weights')

FAMILY = 'peft'
"""The value of `--family`."""
SIDE = 'weights.json'
"""The file beside adapters with what PEFT has no place for: class names and the preprocessing of images."""
CONFIG, TENSORS = 'adapter_config.json', ('adapter_model.safetensors', 'adapter_model.bin')
PREFIX = 'base_model.model.'
_LEAF = re.compile(r'(?P<layer>.+)\.(?P<leaf>lora_A|lora_B|lora_magnitude_vector)(\.weight)?')
_RENAMED = (
    (r'\.layers\.(\d+)\.attention\.([qkv])_proj$', r'.encoder.layer.\1.attention.attention.\2'),
    (r'\.layers\.(\d+)\.attention\.o_proj$', r'.encoder.layer.\1.attention.output.dense'),
    (r'\.layers\.(\d+)\.mlp\.fc1$', r'.encoder.layer.\1.intermediate.dense'),
    (r'\.layers\.(\d+)\.mlp\.fc2$', r'.encoder.layer.\1.output.dense'),
    (r'\.layers\.(\d+)\.', r'.encoder.layer.\1.'))
"""From names of modules in transformers 5 to names in files, which are those of transformers 4; the first that fits."""
_MOST_ALPHA, _MOST_BASE, _MOST_CHOICES = 1e6, 1_000, 256
"""Of alpha, of characters in the name of the base weights, and of ways to match a pattern."""
_MERGE = 'Merge the adapters in PEFT (merge_and_unload), and save the model.'
_PLAIN_STARTS = ('gaussian', 'eva', 'orthogonal')
"""Initial values of adapters after which PEFT keeps the base weights; PiSSA, OLoRA, CorDA and LoftQ change them, also
when adapters are read. A converted folder has true."""
_LETTERS = {'q': 'query', 'k': 'key', 'v': 'value'}


class Layer(NamedTuple):
  """The adapter of one matrix `[out, in]`, which adds `scale * b @ a` to it.

  a: `[r, in]`.
  b: `[out, r]`.
  m: DoRA's magnitude `[out]`; None = LoRA.
  scale: alpha divided by the rank r, or by its root in rsLoRA.
  """
  a: HostArray
  b: HostArray
  m: HostArray | None
  scale: float


class Adapter(NamedTuple):
  """A folder of PEFT.

  base: path or address of the weights that the adapters are for.
  layers: adapters by the name of the layer, such as `blocks.0.attn.qkv`.
  replaced: tensors that replace those of the weights, such as `head.weight`.
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
  tensors = files.read(file)
  tables.check_whole(tensors, [name for name, x in tensors.items() if x.dtype != np.float32])
  by_layer: dict[str, dict[str, HostArray]] = {}
  replaced = {}
  for name, tensor in tensors.items():
    name = name.removeprefix(PREFIX)
    if match := _LEAF.fullmatch(name):
      by_layer.setdefault(match['layer'], {})[match['leaf']] = tensor
    else:
      replaced[name] = tensor
  problems = [f'{name} {list(x.shape)}: expected lora_A, lora_B or lora_magnitude_vector' for name, x in
              replaced.items() if '.lora_' in name]
  layers = {}
  for layer, leaves in by_layer.items():
    if _is_dense(**leaves):
      a, m = leaves['lora_A'], leaves.get('lora_magnitude_vector')
      layers[layer] = Layer(a, leaves['lora_B'], None if m is None else m.reshape(-1), settings.scale(layer, len(a)))
    else:
      problems.append(f'{layer}: expected lora_A [r, in] and lora_B [out, r] of a dense layer, r at least 1, and for '
                      'DoRA lora_magnitude_vector [out], got '
                      f'{", ".join(f"{leaf} {list(x.shape)}" for leaf, x in leaves.items())}')
  if problems:
    raise UserError('\n'.join([f'{file}: expected adapters of dense layers, got others:', *tables.listed(problems)]))
  beside = sidecars.of_adapters(path / SIDE) if (path / SIDE).is_file() else Known()
  return Adapter(settings.base, layers, replaced, beside.class_names, list(beside.rules))


def _is_dense(lora_A: HostArray | None = None, lora_B: HostArray | None = None,
              lora_magnitude_vector: HostArray | None = None) -> bool:
  """Whether these are the tensors of the adapter of a matrix, `[r, in]`, `[out, r]` and for DoRA `[out]`."""
  if lora_A is None or lora_B is None or lora_A.ndim != 2 or lora_B.ndim != 2 or not lora_A.size * lora_B.size:
    return False
  is_one_rank = len(lora_A) == lora_B.shape[1]
  return is_one_rank and (lora_magnitude_vector is None or lora_magnitude_vector.size == len(lora_B))


def _read_config(path: pathlib.Path) -> _Settings:
  file = path / CONFIG
  config = documents.read(file, advice='Fetch it again.')
  if config.object().get('peft_type') != 'LORA':
    raise UserError(f'{file}: expected peft_type LORA (LoRA, rsLoRA or DoRA), got '
                    f'{documents.describe(config.object().get("peft_type"))}. {_MERGE}')
  for name in ('fan_in_fan_out', 'lora_bias', 'alora_invocation_tokens', 'use_qalora', 'use_bdlora'):
    if value := config.object().get(name):
      raise UserError(f'{file}: expected {name} false, got {documents.describe(value)}. {_MERGE}')
  start = config.object().get('init_lora_weights')
  if isinstance(start, str) and start.lower() not in _PLAIN_STARTS:
    raise UserError(f'{file}: expected init_lora_weights that leaves the base weights as they are, got '
                    f'{documents.describe(start)}. {_MERGE}')
  return _Settings(_base(config, path), config.field('lora_alpha').number(0, _MOST_ALPHA), _patterns(config),
                   config.field('use_rslora', default=False).flag())


def _patterns(config: Field) -> tuple[tuple[re.Pattern[str], float], ...]:
  """Returns the alpha of single layers by patterns of their names, which are at the end of the complete name.

  A pattern may repeat single characters twice, as in `.*\\.0\\..*`, and its groups and optional characters may have
  `_MOST_CHOICES` combinations: the time to match it stays bounded.
  """
  patterns = []
  alphas = config.object_or_empty('alpha_pattern')
  for key in alphas.object():
    choices = 2**key.count('?') * math.prod(group.count('|') + 1 for group in key.split(')'))
    try:
      # Repeated groups, lookaheads, counts and back references are not simple.
      has_others = re.search(r'[)][*+?{]|[(][?]|[{]|\\\d', key)
      if has_others or len(key) > 200 or len(re.findall('[*+]', key)) > 2 or choices > _MOST_CHOICES:
        raise ValueError('too many ways to match')
      pattern = re.compile(rf'(?:.*\.)?(?:{key})$')
    except (ValueError, re.error, OverflowError, RecursionError):
      raise UserError(f'{alphas.place}: expected names of layers or simple patterns of names, got '
                      f'{documents.describe(key)}. Write the layers out.') from None
    patterns.append((pattern, alphas.field(key).number(0, _MOST_ALPHA)))
  return tuple(patterns)


def _base(config: Field, path: pathlib.Path) -> str:
  """Returns the path or the address of the weights that adapters are for."""
  base = config.field('base_model_name_or_path', default='').text()
  if not base:
    raise UserError(f'{path / CONFIG}: expected the weights that the adapters are for in base_model_name_or_path, got '
                    'none. Set it to a file, a folder, or OWNER/NAME.')
  if not base.isprintable() or len(base.encode(errors='replace')) > _MOST_BASE:
    raise config.field('base_model_name_or_path').error(f'a path or an address of at most {_MOST_BASE:,} characters')
  for local in (pathlib.Path(base), path / base):
    if addresses.exists(local):
      return str(local)
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
  merged = dict(tensors)
  problems = []
  for layer, low_rank in adapter.layers.items():
    name = _find(f'{layer}.weight', merged)
    shape = (low_rank.b.shape[0], low_rank.a.shape[1])
    if name not in merged or merged[name].shape != shape:
      problems.append(f'  {layer}: expected a matrix {list(shape)}, got '
                      f'{list(merged[name].shape) if name in merged else "none"}')
      continue
    tables.check_whole(merged, [name] if merged[name].dtype != np.float32 else [])
    weight = merged[name].T[None]  # [1, in, out]
    m = None if low_rank.m is None else low_rank.m[None]
    with np.errstate(all='ignore'):  # values that are not finite are an error of the merged weights
      merged[name] = adapters.merged(weight, low_rank.a.T[None], low_rank.b.T[None], m, scale=low_rank.scale)[0].T
  for name, tensor in adapter.replaced.items():
    merged[_find(name, merged)] = tensor
  if problems:
    raise UserError(f'The adapters do not fit the weights {adapter.base}:\n' + '\n'.join(problems))
  log.info('Merged the adapters of %d layers into %s.', len(adapter.layers), adapter.base)
  return merged


def _find(name: str, tensors: Mapping[str, HostArray]) -> str:
  """Returns the file's name of a tensor, which may be without the prefix of a model with a head; else `name`."""
  module, _, leaf = name.rpartition('.')
  modules = [module]
  for pattern, new in _RENAMED:
    if (renamed := re.sub(pattern, new, f'.{module}')) != f'.{module}':
      modules.append(re.sub(r'(?<=attention\.attention\.)[qkv]$', lambda letter: _LETTERS[letter[0]], renamed)[1:])
  for module in modules:
    without_prefix = module.partition('.')[2]
    for candidate in (f'{module}.{leaf}', f'{without_prefix}.{leaf}'):
      if candidate in tensors:
        return candidate
  return name


# Writing the adapters of a run

_TIMM = ('timm', 'mae', 'dino', 'dinov2')
"""Families whose files have the names of timm."""
_TOLERANCE = 1e-6
"""Of a merged kernel, relative to its largest entry: a sum of `rank` products in f32, in another order."""
_MODULES = (('attention.attention.query', 'attention.q_proj'), ('attention.attention.key', 'attention.k_proj'),
            ('attention.attention.value', 'attention.v_proj'), ('attention.output.dense', 'attention.o_proj'),
            ('intermediate.dense', 'mlp.fc1'), ('output.dense', 'mlp.fc2'))
"""From files of transformers to its modules, as of version 5."""


class Run(NamedTuple):
  """A run with adapters.

  parts: the run's adapters, head and frozen kernels.
  base: address of the weights that it began with.
  family: their format, timm or huggingface, or another one that `check_network` refuses.
  """
  parts: runs.Found
  base: str
  family: str


def read_run(where: str, *, view: str) -> Run:
  """Reads a run with adapters.

  Raises:
    UserError: it is no run, has no adapters, or nothing says which weights it began with.
  """
  path = addresses.local(where)
  if not runs.is_run(path):
    raise UserError(f'--weights: expected a run with --family={FAMILY}, got {where}. Train adapters with vit-jax '
                    'finetune --lora.')
  parts = runs.read(path, view=view)
  if not parts.frozen:
    raise UserError(f'--weights: expected a run that trained adapters, got {where}, which trained all weights. Choose '
                    'another --family.')
  folder = path if (path / 'config.json').is_file() else path.parents[1]
  record = documents.read(
      folder / 'init.json', expected='the weights that the run began with, whose names PEFT writes',
      advice='Restore the file, or choose another --family, which writes merged weights.').object_or_empty('init_from')
  base, family = record.field('source').text(), record.field('family').text()
  return Run(parts, base, 'timm' if family in _TIMM else family)


def check_network(run: Run, merged: Weights) -> None:
  """Raises UserError if PEFT has no names for the network of a run, whose weights with merged adapters are `merged`."""
  model = merged.model
  if run.family not in ('timm', 'huggingface') or not isinstance(model, schema.ViT):
    raise UserError(f'--weights: expected a run on a ViT of timm or transformers with --family={FAMILY}, got one on '
                    f'{run.base} ({run.family}). Choose another --family, which writes merged weights.')
  kind = transformers.kind_of(merged, recognize.KINDS).model_type if run.family == 'huggingface' else ''
  if model.positions.is_rotary or isinstance(model.mlp, schema.SwiGlu) or kind not in ('', 'vit', 'deit'):
    raise UserError(f'--weights: expected a ViT without rotary positions or SwiGLU with --family={FAMILY}, got '
                    f'{network.describe(model)}. Choose another --family, which writes merged weights.')


def write(run: Run, merged: Weights, target: pathlib.Path) -> None:
  """Writes the adapters and heads of a run into the folder `target`.

  Raises:
    UserError: there is no file or folder at the path of the weights that the run began with.
  """
  layers, heads = _to_layers(run, merged), _heads(run, merged)
  tensors = {f'{PREFIX}{name}': x for name, x in heads.items()}
  for name, low_rank in layers.items():
    tensors |= {f'{PREFIX}{name}.lora_A.weight': low_rank.a, f'{PREFIX}{name}.lora_B.weight': low_rank.b}
    if low_rank.m is not None:
      tensors[f'{PREFIX}{name}.lora_magnitude_vector'] = low_rank.m
  files.write_safetensors(target / TENSORS[0], {name: np.ascontiguousarray(x) for name, x in tensors.items()})
  (target / CONFIG).write_text(json.dumps(_config(run, layers, heads), indent=2) + '\n')
  preprocess = {name: getattr(value, 'value', value) for name, value in run.parts.preprocess.items()}
  (target / SIDE).write_text(json.dumps({
      'source': merged.source, 'class_names': list(merged.class_names), 'preprocess': preprocess}, indent=2) + '\n')


def _config(run: Run, layers: Mapping[str, Layer], heads: Mapping[str, HostArray]) -> dict[str, Any]:
  """Returns the content of `adapter_config.json`; layers of another rank than the run's are in `rank_pattern`."""
  local = pathlib.Path(os.path.expanduser(run.base))
  if not local.exists() and not addresses.is_remote(run.base):  # PEFT would take a relative path for a name of the hub
    raise UserError(f'--weights: expected the weights that the run began with at {run.base}, got no file or folder '
                    'there. Run the command in the directory where the run was started, or put them there.')
  base, revision = (str(local.resolve()) if local.exists() else run.base), None
  if hub := re.fullmatch(r'hf://([^@/]+/[^@/]+)(?:@([^/]+))?', run.base):  # PEFT has the revision in a field of its own
    base, revision = hub.groups()
  lora = run.parts.config.lora
  ranks, alphas = {}, {}
  for name, low_rank in layers.items():
    rank, pattern = len(low_rank.a), re.sub(r'\.\d+\.', r'\\.\\d+\\.', name)
    if rank != lora.rank:
      ranks[pattern] = rank
      alphas[pattern] = low_rank.scale * (rank ** .5 if lora.rslora else rank)
  return {
      'peft_type': 'LORA', 'base_model_name_or_path': base, 'task_type': None, 'inference_mode': True, 'bias': 'none',
      'r': lora.rank, 'lora_alpha': lora.alpha or lora.rank, 'lora_dropout': lora.dropout, 'use_dora': lora.dora,
      'use_rslora': lora.rslora, 'fan_in_fan_out': False, 'init_lora_weights': True, 'target_modules': list(layers),
      'modules_to_save': sorted({name.rpartition('.')[0] for name in heads}) or None,
      'rank_pattern': ranks, 'alpha_pattern': alphas, 'revision': revision}


def _to_layers(run: Run, merged: Weights) -> dict[str, Layer]:
  """Returns the adapters of each matrix of the other program, by the names of its modules."""
  lora, leaves = run.parts.config.lora, trees.flatten(run.parts.trained)
  tensors = _base_tensors(run, merged)
  layers: dict[str, Layer] = {}
  parts_of: dict[str, list[tables.Entry]] = {}  # the entries of our leaves that are parts of one matrix of the program
  for entry in recognize.written_table(merged, run.family):
    if entry.ours.startswith(adapters.BLOCKS) and entry.ours.endswith('/kernel'):
      parts_of.setdefault(entry.theirs, []).append(entry)
  for theirs, entries in parts_of.items():
    names = [entry.ours.removesuffix('/kernel') for entry in sorted(entries, key=lambda entry: entry.part)]
    stacks = [_stacked(leaves, name, lora.scale) for name in names]
    adapted = [stack for stack in stacks if stack]
    if not adapted:
      continue
    shares_a = len(adapted) == len(stacks) and all((stack.a == adapted[0].a).all() for stack in adapted)
    for i in range(len(adapted[0].a)):
      ending = theirs.replace('{i}', str(i))  # the file has it with a prefix, or without
      name = next(name for name in tensors if name == ending or name.endswith(f'.{ending}'))
      parts = [None if stack is None else Layer(
          stack.a[i], stack.b[i], None if stack.m is None else stack.m[i], stack.scale) for stack in stacks]
      module = _module(name.removesuffix('.weight'), run.family)
      layers[module] = _joined(parts, tensors[name], shares_a=shares_a)
  return layers


def _stacked(leaves: Mapping[str, HostArray], name: str, scale: float) -> Layer | None:
  """Returns the adapters of all layers, `a [L, r, in]`, `b [L, out, r]`, `m [L, out]`; None without adapters."""
  if f'{name}/{adapters.A}' not in leaves:
    return None
  b = leaves[f'{name}/{adapters.B}']
  m = leaves.get(f'{name}/{adapters.MAGNITUDE}')
  b_LRO = b.reshape(*b.shape[:2], -1)
  a_LIR = leaves[f'{name}/{adapters.A}'].reshape(len(b), -1, b.shape[1])
  return Layer(a_LIR.swapaxes(1, 2), b_LRO.swapaxes(1, 2), None if m is None else m.reshape(len(m), -1), scale)


def _joined(parts: list[Layer | None], weight: HostArray, *, shares_a: bool) -> Layer:
  """Returns one adapter for a matrix `[out, in]` whose equal parts of outputs have adapters of their own, or none."""
  adapted = [part for part in parts if part]
  if len(parts) == 1:
    return adapted[0]
  if shares_a:
    a, b = adapted[0].a, np.concatenate([part.b for part in adapted])
  else:
    size, a = len(weight) // len(parts), np.concatenate([part.a for part in adapted])
    b, column = np.zeros((len(weight), len(a)), np.float32), 0
    for i, part in enumerate(parts):
      if part:
        b[i * size:(i + 1) * size, column:column + len(part.a)] = part.b
        column += len(part.a)
  if adapted[0].m is None:
    return Layer(a, b, None, adapted[0].scale)
  norms = np.split(np.linalg.norm(weight, axis=1), len(parts))
  magnitudes = [norm if part is None or part.m is None else part.m for part, norm in zip(parts, norms, strict=True)]
  return Layer(a, b, np.concatenate(magnitudes), adapted[0].scale)


def _base_tensors(run: Run, merged: Weights) -> dict[str, HostArray]:
  """Returns the tensors of the network without adapters under the names of the other program."""
  base = merged._replace(params={**merged.params, **run.parts.frozen})
  return recognize.to_tensors(base, run.family)


def _module(name: str, family: str) -> str:
  """Returns the name of a module of the program, of its name in a file."""
  if family == 'timm':
    return name
  name = name.replace('.encoder.layer.', '.layers.')
  return next((f'{name.removesuffix(old)}{new}' for old, new in _MODULES if name.endswith(old)), name)


def _heads(run: Run, merged: Weights) -> dict[str, HostArray]:
  """Returns the tensors of the heads, which are trained whole."""
  tensors, leaves = recognize.to_tensors(merged, run.family), trees.flatten(merged.params)
  assert isinstance(merged.model, schema.ViT)
  is_deit = run.family == 'huggingface' and merged.model.pool.distillation
  names = [entry.theirs for entry in recognize.written_table(merged, run.family)
           if entry.ours.startswith('head') and entry.ours in leaves]
  names = [re.sub(r'^classifier\.', 'cls_classifier.', name) if is_deit else name for name in names]
  return {name: tensors[name] for name in names}


def check_written(run: Run, merged: Weights, target: pathlib.Path) -> None:
  """Raises UserError unless the adapters in `target`, read again and merged, give the kernels of the run."""
  merged_again = merge(_base_tensors(run, merged), read(target))
  for name, x in recognize.to_tensors(merged, run.family).items():
    difference = float(np.abs(merged_again[name] - x).max())
    if difference > _TOLERANCE * max(float(np.abs(x).max()), 1e-30):
      raise UserError(f'--to: expected adapters with the weights of the run, got {name} that differs by '
                      f'{difference:.3g}. Nothing was kept. Please report this.')
