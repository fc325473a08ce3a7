"""Writes weights in the format of any family, reads them back, and keeps the file only if every bit is the same."""
from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import Frequencies, checks
from vit_jax.core import globs
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.record import destination
from vit_jax.weights import card, files, peft, preprocess, recognize, resize, runs, tables
from vit_jax.weights.families import timm, transformers
from vit_jax.weights.hints import pool_word
from vit_jax.weights.infer import Leaves
from vit_jax.weights.loading import load
from vit_jax.weights.network import Weights, hidden_settings, layer_scale, position_resize

FORMATS = (*recognize.FORMATS, 'run')
TORCH_SUFFIXES = ('.safetensors', '.pth', '.pt', '.bin')
REPORT = 'weights.json'
"""Of a folder; beside a single file it is part of `FILE.json`."""
_CHECKED = 'Converted by vit_jax: the file was read back, and no bit of a parameter differs.'


def save(weights: Weights, to: str, *, family: str = '', overwrite: bool = False,
         with_card: bool = False) -> tuple[pathlib.Path, list[str]]:
  """Writes weights at the local path `to`.

  Args:
    weights: of any family.
    to: a file in .npz, .safetensors, .pth, .pt or .bin, otherwise a folder. Its parent directory must exist.
    family: one of `FORMATS`; '' = determined by `to`: vision_transformer for npz (big_vision if only that has the
      names), timm for a PyTorch file, Hugging Face for a folder.
    overwrite: replace an existing file or folder.
    with_card: also write a model card; one that a person has written stays.

  Returns:
    The written path, and one sentence for each thing that the format cannot hold.

  Raises:
    UserError: the format cannot hold the weights, `to` exists or cannot be written, or the weights differ when read
      back. No new file is left then, and an existing one is unchanged.
  """
  weights.check_rgb('conversion')
  path = check(to, family=family, overwrite=overwrite)
  family = choose_family(weights, path, family)
  if family == 'run' and 'text' in weights.params:
    raise UserError(f'--family: expected weights without a text tower with --family=run, got {weights.source}. Use '
                    'this run as it is.')
  weights, notes = _with_table(weights, family)
  with destination.staged(path, shown=to, overwrite=overwrite, is_ours=card.is_ours) as part:
    target = part / path.name
    _write(weights, target, family)
    lost = _compare(weights, load(str(target)))
    if with_card:
      content = card.text(weights, path.name, written_as=family, how=_CHECKED, is_folder=target.is_dir())
      card.place(content, target, path)
  return path, notes + lost


def save_adapters(where: str, to: str, *, view: str = '', overwrite: bool = False) -> pathlib.Path:
  """Writes the adapters and the head of the run at `where` into the folder `to` for PEFT, and returns its path.

  Raises:
    UserError: the run has no adapters, began with weights whose program PEFT does not adapt, or `to` exists.
  """
  path = check(to, family='run', overwrite=overwrite)
  if path.suffix in ('.npz', *TORCH_SUFFIXES):
    raise UserError(f'--to: expected a folder with --family={peft.FAMILY}, got {path.name}. Change it.')
  run = peft.read_run(where, view=view)
  merged = load(where, view=view)
  peft.check_network(run, merged)
  with destination.staged(path, shown=to, overwrite=overwrite, is_ours=card.is_ours) as part:
    target = part / path.name
    target.mkdir()
    peft.write(run, merged, target)
    peft.check_written(run, merged, target)
  return path


def _with_table(weights: Weights, family: str) -> tuple[Weights, list[str]]:
  """Returns the weights with fixed positions as a table, and a note of it; unchanged if the format computes them."""
  m = weights.model
  if family == 'run' or not isinstance(m, schema.ViT) or not isinstance(m.positions, schema.SinCos) or (
      family == 'big_vision' and m.positions.frequencies is Frequencies.BIG_VISION):
    return weights, []
  h, w = (px // m.patch for px in weights.preprocess.image_px)
  first = np.zeros((m.num_first, m.width), np.float32)
  table = np.concatenate([first, resize.fixed(m.positions, (h, w), m.width)])[None]
  params = {**weights.params, 'backbone': {**weights.params['backbone'], 'positions': table}}
  return (weights._replace(model=dataclasses.replace(m, positions=schema.Learned()), params=params),
          [f'that positions are fixed ({m.positions.frequencies.value}): they are written as a table'])


def check(to: str, *, family: str, overwrite: bool) -> pathlib.Path:
  """Checks the path to write before anything is read, and returns it.

  Raises:
    UserError: the family or the suffix is unknown, the path exists, or its parent directory does not exist.
  """
  path = destination.checked(to)
  if family and family not in FORMATS:
    raise UserError(f'--family: expected one of {", ".join(FORMATS)}, got {family!r}.'
                    f'{globs.nearest(family, FORMATS) or " Choose one."}')
  if not family and re.fullmatch(r'\.[A-Za-z]\w{0,11}', path.suffix) and path.suffix not in ('.npz', *TORCH_SUFFIXES):
    raise UserError(f'--to: expected a name that ends in {", ".join((".npz", *TORCH_SUFFIXES))}, or that of a folder '
                    f'without an ending, got {to}. Change it, or set --family as well.')
  beside = path.with_name(f'{path.name}.json')
  for one in (path, *([beside] if path.suffix in ('.npz', *TORCH_SUFFIXES) else [])):
    if (one.exists() or one.is_symlink()) and not overwrite:
      raise UserError(f'--to: expected a path where nothing is, got {to}, and {one.name} exists. Choose another, or '
                      'add --overwrite.')
  if path.is_symlink() or (path.is_dir() and not (path / REPORT).is_file()):
    raise UserError(f'--to: expected a path that may be overwritten, got {to}: only files, and folders that this job '
                    f'wrote ({REPORT} is in them), are. Choose another.')
  return path


def choose_family(weights: Weights, path: pathlib.Path, family: str) -> str:
  """Returns the family to write: `family`, or for '' that of the path.

  Raises:
    UserError: the family cannot be written with the path's suffix.
  """
  suffix = path.suffix if path.suffix in ('.npz', *TORCH_SUFFIXES) else ''
  if not family:
    is_plain = not isinstance(weights.model, schema.ViT) or (
        not weights.model.pool.has_parameters and isinstance(weights.model.positions, schema.Learned))
    if isinstance(weights.model, schema.ResNet) and suffix == '.npz':
      return 'bit'
    by_suffix = {'.npz': 'vision_transformer' if is_plain and weights.family != 'big_vision' else 'big_vision',
                 '': 'huggingface'}
    return by_suffix.get(suffix, 'timm')
  wanted = {'vision_transformer': ('.npz',), 'bit': ('.npz',), 'big_vision': ('.npz',), 'timm': ('', *TORCH_SUFFIXES),
            'huggingface': ('',), 'run': ('',)}[family]
  if suffix not in wanted:
    shown = ' or '.join(s or 'a folder' for s in wanted)
    raise UserError(f'--to: expected {shown} with --family={family}, got {path.name}. Change one of them.')
  return family


def _write(weights: Weights, path: pathlib.Path, family: str) -> None:
  if family == 'run':
    p = weights.preprocess
    recipe = schema.Recipe(**preprocess.recipe_values(p), eval_native_patch=p.native_patch)
    config = schema.Config(name='converted', model=weights.model, head=weights.head, image_px=p.image_px,
                           data=schema.Data(recipe=recipe), objective=weights.decoder or schema.Supervised(
                               loss=schema.Loss.SIGMOID if weights.is_sigmoid else schema.Loss.SOFTMAX))
    path.mkdir()
    extra = {'model_state': weights.state} if weights.state else {}
    runs.write(path, config, weights.params, extra, class_names=weights.class_names, image_px=p.image_px)
    (path / REPORT).write_text(json.dumps(_report(weights), indent=2) + '\n')
    return
  configs: dict[str, Any] = {}
  if family == 'huggingface':
    configs = {'config.json': transformers.config(weights, transformers.kind_of(weights, recognize.KINDS)),
               'preprocessor_config.json': transformers.processor(weights.preprocess)}
  elif family == 'timm' and path.suffix not in TORCH_SUFFIXES:
    configs = {'config.json': timm.config(weights)}
  tensors = recognize.to_tensors(weights, family)
  if configs:
    path.mkdir()
    files.write_safetensors(path / 'model.safetensors', tensors)
    for name, content in (configs | {REPORT: _report(weights)}).items():
      (path / name).write_text(json.dumps(content, indent=2) + '\n')
    return
  writer = {'.npz': files.write_npz, '.safetensors': files.write_safetensors}.get(path.suffix, files.write_torch)
  writer(path, tensors)
  content = _ours(weights, written_as=family)
  path.with_name(f'{path.name}.json').write_text(json.dumps(content, indent=2) + '\n')


def _report(weights: Weights) -> dict[str, Any]:
  """Returns how every tensor was used when these weights were loaded."""
  return {'source': weights.source, 'family': weights.family, **weights.report.plain()}


def _comparable(weights: Weights, family: str) -> Leaves:
  """Returns the leaves in the form that both sides of a comparison have after conversion to this family."""
  leaves = recognize.leaves_of(weights)
  return recognize.without_class_row(leaves) if family == 'big_vision' else leaves


def _ours(weights: Weights, *, written_as: str) -> dict[str, Any]:
  """Returns the content of `FILE.json`: all settings that tensors do not determine, and the report of the tensors."""
  m, p = weights.model, weights.preprocess
  return {
      'written_by': 'vit_jax', 'family': written_as, 'source': weights.source,
      'gelu': m.gelu.value if isinstance(m, schema.ViT | schema.Mixer) else '',
      'norm_eps': m.norm.eps if isinstance(m, schema.ViT) else getattr(m, 'norm_eps', 0.),
      'heads': getattr(m, 'heads', 0),
      'position_resize': position_resize(m),
      'network': hidden_settings(m),
      'pool': pool_word(m.pool) if isinstance(m, schema.ViT) else '',
      'decoder_heads': weights.decoder.decoder_heads if weights.decoder else 0, 'image_px': list(p.image_px),
      'preprocess': {**p._asdict(), 'interpolation': p.interpolation.value, 'geometry': p.geometry.value},
      'class_names': list(weights.class_names),
      **({'probability': 'sigmoid'} if weights.is_sigmoid else {}),
      'report': weights.report.plain()}


_TRAINING = ('dropout', 'drop_path', 'drop_path_even', 'patch_dropout', 'attention.dropout',
             'dtype', 'quantize', 'kernels', 'attention.kernel', 'mlp.kernel',
             'execution', 'unroll', 'remat', 'full_remat', 'block.layer_scale', 'init')
"""Settings that do not change the function of a model; of LayerScale only its presence matters."""


def _compare(weights: Weights, again: Weights) -> list[str]:
  """Returns preprocessing settings and class names that differ after the weights were written and read back.

  Args:
    weights: the weights that were written.
    again: the weights that were read back.

  Raises:
    UserError: a parameter differs, or a setting of the model that changes its function.
  """
  wanted, found = _comparable(weights, again.family), _comparable(again, again.family)
  wrong = [name for name in wanted.keys() | found.keys()
           if name not in wanted or name not in found or not _is_same(wanted[name], found[name])]
  if wrong:
    raise UserError(f'--to: expected every bit as it was written, got {len(wrong)} other parameters when reading back. '
                    'Nothing was kept:\n' + '\n'.join(tables.listed(sorted(wrong))))
  ours, theirs = _function(weights.model), _function(again.model)
  changed = [f'{name}={checks.shown(ours.get(name))} (read back: {checks.shown(theirs.get(name))})'
             for name in dict.fromkeys((*ours, *theirs)) if ours.get(name) != theirs.get(name)]
  if changed:
    raise UserError(f'--family: expected a format that can hold this network, got one that cannot say '
                    f'{", ".join(changed)}. Nothing was kept. Choose another, such as --family=run.')
  lost = [f'preprocessing {name} ({value}, read back {getattr(again.preprocess, name)})'
           for name, value in weights.preprocess._asdict().items()
           if name != 'rule' and value != getattr(again.preprocess, name)]
  return lost + (['class names'] if weights.class_names != again.class_names else [])


def _function(model: schema.Model) -> dict[str, Any]:
  """Returns the settings on which the function of a network depends, by dotted names."""
  found = {name: value for name, value in _flat(model).items() if name not in _TRAINING}
  if isinstance(model, schema.ViT):
    found['block.layer_scale'] = layer_scale(model) > 0
    if isinstance(model.mlp, schema.SwiGlu) and not model.pool.has_parameters:
      del found['gelu']  # nothing computes it
  return found


def _flat(settings: Any, prefix: str = '') -> dict[str, Any]:
  """Returns settings by dotted names; for a part of several kinds also its kind."""
  found: dict[str, Any] = {}
  for field in dataclasses.fields(settings):
    name, value = f'{prefix}{field.name}', getattr(settings, field.name)
    is_part = dataclasses.is_dataclass(value)
    found |= {name: checks.kind(value), **_flat(value, f'{name}.')} if is_part else {name: value}
  return found


def _is_same(a: HostArray, b: HostArray) -> bool:
  """Whether every bit is the same; 0 and -0 count as the same."""
  a, b = (np.ascontiguousarray(x, np.float32) + np.float32(0) for x in (a, b))
  return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))
