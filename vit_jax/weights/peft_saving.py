"""Writes the adapters of a run as a folder of PEFT, for the weights that the run began with (see `peft.py`)."""
from __future__ import annotations

import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents, trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.models import adapters
from vit_jax.record import destination
from vit_jax.weights import addresses, card, files, loading, network, peft, recognize, runs, saving
from vit_jax.weights.families import transformers
from vit_jax.weights.network import Weights
from vit_jax.weights.peft import Layer
from vit_jax.weights.tables import Entry

FAMILY = 'peft'
TIMM = ('timm', 'mae', 'dino', 'dinov2')
"""Families whose files have the names of timm."""
TOLERANCE = 1e-6
"""Of a merged kernel, relative to its largest entry: a sum of `rank` products in f32, in another order."""
_MODULES = (('attention.attention.query', 'attention.q_proj'), ('attention.attention.key', 'attention.k_proj'),
            ('attention.attention.value', 'attention.v_proj'), ('attention.output.dense', 'attention.o_proj'),
            ('intermediate.dense', 'mlp.fc1'), ('output.dense', 'mlp.fc2'))
"""From files of transformers to its modules, as of version 5."""


class Run(NamedTuple):
  """A run with adapters.

  found: the run's adapters, head and frozen kernels.   merged: its weights with adapters merged.
  base: address of the weights it began with.   family: their format.
  """
  found: runs.Found
  merged: Weights
  base: str
  family: str


def check(flags: Mapping[str, object]) -> None:
  """Raises UserError if one of these flags is set: adapters are written as they are in the run."""
  for name, value in flags.items():
    if value:
      raise UserError(f'--{name}: expected none with --family={FAMILY}, got {value}. Leave it out, as adapters are '
                      'written as they are in the run.')


def save(where: str, to: str, *, view: str = '', overwrite: bool = False) -> pathlib.Path:
  """Writes the adapters and the head of the run at `where` into the folder `to`, and returns its path.

  Raises:
    UserError: the run has no adapters, began with weights whose program PEFT does not adapt, or `to` exists.
  """
  path = saving.check(to, family='run', overwrite=overwrite)
  if path.suffix in ('.npz', *saving.TORCH_SUFFIXES):
    raise UserError(f'--to: expected a folder with --family={FAMILY}, got {path.name}. Change it.')
  run = _read(where, view)
  with destination.staged(path, shown=to, overwrite=overwrite, is_ours=card.is_ours) as part:
    target = part / path.name
    target.mkdir()
    _write(run, target)
    _check(run, peft.read(target))
  return path


def _read(where: str, view: str) -> Run:
  path = addresses.local(where)
  if not runs.is_run(path):
    raise UserError(f'--weights: expected a run with --family={FAMILY}, got {where}. Train adapters with vit-jax '
                    'finetune --lora.')
  found = runs.read(path, view=view)
  if not found.frozen:
    raise UserError(f'--weights: expected a run that trained adapters, got {where}, which trained all weights. Choose '
                    'another --family.')
  folder = path if (path / 'config.json').is_file() else path.parents[1]
  record = documents.read(
      folder / 'init.json', expected='the weights that the run began with, whose names PEFT writes',
      advice='Restore the file, or choose another --family, which writes merged weights.').object_or_empty('init_from')
  base, family = record.field('source').text(), record.field('family').text()
  family = 'timm' if family in TIMM else family
  merged = loading.load(where, view=view)
  model = merged.model
  if family not in ('timm', 'huggingface') or not isinstance(model, schema.ViT):
    raise UserError(f'--weights: expected a run on a ViT of timm or transformers with --family={FAMILY}, got one on '
                    f'{base} ({family}). Choose another --family, which writes merged weights.')
  kind = transformers.kind_of(merged, recognize.KINDS).model_type if family == 'huggingface' else ''
  if model.positions.is_rotary or isinstance(model.mlp, schema.SwiGlu) or kind not in ('', 'vit', 'deit'):
    raise UserError(f'--weights: expected a ViT without rotary positions or SwiGLU with --family={FAMILY}, got '
                    f'{network.describe(model)}. Choose another --family, which writes merged weights.')
  return Run(found, merged, base, family)


def _write(run: Run, target: pathlib.Path) -> None:
  layers, heads = to_layers(run), _heads(run)
  tensors: dict[str, HostArray] = {}
  for layer, low in layers.items():
    tensors |= {f'{peft.PREFIX}{layer}.lora_A.weight': low.a, f'{peft.PREFIX}{layer}.lora_B.weight': low.b}
    tensors |= {} if low.m is None else {f'{peft.PREFIX}{layer}.lora_magnitude_vector': low.m}
  tensors |= {f'{peft.PREFIX}{name}': x for name, x in heads.items()}
  files.write_safetensors(target / peft.TENSORS[0], {name: np.ascontiguousarray(x) for name, x in tensors.items()})
  local = pathlib.Path(os.path.expanduser(run.base))
  if not local.exists() and not addresses.is_remote(run.base):  # PEFT would take a relative path for a name of the hub
    raise UserError(f'--weights: expected the weights that the run began with at {run.base}, got no file or folder '
                    'there. Run the command in the directory where the run was started, or put them there.')
  hub = re.fullmatch(r'hf://([^@/]+/[^@/]+)(?:@([^/]+))?', run.base)  # PEFT has the revision in a field of its own
  base, revision = hub.groups() if hub else (str(local.resolve()) if local.exists() else run.base, None)
  config = _config(run, layers, heads, base) | {'revision': revision}
  (target / peft.CONFIG).write_text(json.dumps(config, indent=2) + '\n')
  p = run.found.preprocess
  (target / saving.REPORT).write_text(json.dumps({
      'source': run.merged.source, 'class_names': list(run.merged.class_names),
      'preprocess': {name: getattr(value, 'value', value) for name, value in p.items()}}, indent=2) + '\n')


def _config(run: Run, layers: Mapping[str, Layer], heads: Mapping[str, HostArray], base: str) -> dict[str, Any]:
  """Returns `adapter_config.json`; layers of another rank than the run's are in `rank_pattern`."""
  lora = run.found.config.lora
  ranks = {re.sub(r'\.\d+\.', r'\\.\\d+\\.', layer): (len(low.a), low.scale) for layer, low in layers.items()
           if len(low.a) != lora.rank}
  return {
      'peft_type': 'LORA', 'base_model_name_or_path': base, 'task_type': None, 'inference_mode': True, 'bias': 'none',
      'r': lora.rank, 'lora_alpha': lora.alpha or lora.rank, 'lora_dropout': lora.dropout, 'use_dora': lora.dora,
      'use_rslora': lora.rslora, 'fan_in_fan_out': False, 'init_lora_weights': True, 'target_modules': list(layers),
      'modules_to_save': sorted({name.rpartition('.')[0] for name in heads}) or None,
      'rank_pattern': {pattern: rank for pattern, (rank, _) in ranks.items()},
      'alpha_pattern': {pattern: scale * (rank ** .5 if lora.rslora else rank)
                        for pattern, (rank, scale) in ranks.items()}}


def to_layers(run: Run) -> dict[str, Layer]:
  """Returns the adapters of each matrix of the other program, by the names of its modules."""
  lora, leaves = run.found.config.lora, trees.flatten(run.found.trained)
  tensors = _tensors(run, merged=False)
  found: dict[str, Layer] = {}
  groups: dict[str, list[Entry]] = {}
  for entry in recognize.written_table(run.merged, run.family):
    if entry.ours.startswith(adapters.BLOCKS) and entry.ours.endswith('/kernel'):
      groups.setdefault(entry.theirs, []).append(entry)
  for theirs, entries in groups.items():
    names = [entry.ours.removesuffix('/kernel') for entry in sorted(entries, key=lambda one: one.part[0])]
    parts = [_stacked(leaves, name, lora.scale) for name in names]
    present = [one for one in parts if one]
    if not present:
      continue
    is_one = len(present) == len(parts) and all((one.a == present[0].a).all() for one in present)
    for i in range(len(present[0].a)):
      ending = theirs.replace('{i}', str(i))  # the file has it with a prefix, or without
      name = next(one for one in tensors if one == ending or one.endswith(f'.{ending}'))
      each = [None if one is None else Layer(one.a[i], one.b[i], None if one.m is None else one.m[i], one.scale)
              for one in parts]
      found[_module(name.removesuffix('.weight'), run.family)] = _joined(each, tensors[name], is_one=is_one)
  return found


def _stacked(leaves: Mapping[str, HostArray], name: str, scale: float) -> Layer | None:
  """Returns the adapters of all layers, `a [L, r, in]`, `b [L, out, r]`, `m [L, out]`; None without adapters."""
  if f'{name}/{adapters.A}' not in leaves:
    return None
  b = leaves[f'{name}/{adapters.B}']
  m = leaves.get(f'{name}/{adapters.MAGNITUDE}')
  b_LRO = b.reshape(*b.shape[:2], -1)
  a_LIR = leaves[f'{name}/{adapters.A}'].reshape(len(b), -1, b.shape[1])
  return Layer(a_LIR.swapaxes(1, 2), b_LRO.swapaxes(1, 2), None if m is None else m.reshape(len(m), -1), scale)


def _joined(parts: list[Layer | None], weight: HostArray, *, is_one: bool) -> Layer:
  """Returns one adapter for a matrix `[out, in]` whose equal parts of outputs have adapters of their own, or none."""
  present = [one for one in parts if one]
  if len(parts) == 1:
    return present[0]
  if is_one:
    a, b = present[0].a, np.concatenate([one.b for one in present])
  else:
    size, a = len(weight) // len(parts), np.concatenate([one.a for one in present])
    b, column = np.zeros((len(weight), len(a)), np.float32), 0
    for i, one in enumerate(parts):
      if one:
        b[i * size:(i + 1) * size, column:column + len(one.a)] = one.b
        column += len(one.a)
  norms = np.split(np.linalg.norm(weight, axis=1), len(parts))
  m = None if present[0].m is None else np.concatenate(
      [norm if one is None or one.m is None else one.m for one, norm in zip(parts, norms, strict=True)])
  return Layer(a, b, m, present[0].scale)


def _tensors(run: Run, *, merged: bool) -> dict[str, HostArray]:
  """Returns the tensors of the network under the names of the other program, with or without adapters."""
  weights = run.merged
  if not merged:
    weights = weights._replace(params={**weights.params, **run.found.frozen})
  return saving.to_tensors(weights, run.family)


def _module(name: str, family: str) -> str:
  if family == 'timm':
    return name
  name = name.replace('.encoder.layer.', '.layers.')
  return next((f'{name.removesuffix(old)}{new}' for old, new in _MODULES if name.endswith(old)), name)


def _heads(run: Run) -> dict[str, HostArray]:
  """Returns the tensors of the heads, which are trained whole."""
  tensors, found = _tensors(run, merged=True), {}
  for entry in recognize.written_table(run.merged, run.family):
    if entry.ours.startswith('head') and entry.ours in trees.flatten(run.merged.params):
      theirs = 'cls_classifier' if run.family == 'huggingface' and run.merged.model.pool.distillation and (  # type: ignore
          entry.theirs.startswith('classifier.')) else entry.theirs.rpartition('.')[0]
      name = f'{theirs}.{entry.theirs.rpartition(".")[2]}'
      found[name] = tensors[name]
  return found


def _check(run: Run, adapter: peft.Adapter) -> None:
  """Raises UserError unless the written adapters, read again and merged, give the kernels of the run."""
  again, wanted = peft.merge(_tensors(run, merged=False), adapter), _tensors(run, merged=True)
  for name, x in wanted.items():
    off = float(np.abs(again[name] - x).max())
    if off > TOLERANCE * max(float(np.abs(x).max()), 1e-30):
      raise UserError(f'--to: expected adapters with the weights of the run, got {name} that differs by {off:.3g}. '
                      'Nothing was kept. Please report this.')
