"""Writes weights in the format of any family, reads them back, and keeps the file only if every bit is the same."""
from __future__ import annotations

import dataclasses
import difflib
import json
import pathlib
import re
from typing import Any

import numpy as np

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.models.vit.positions import FIXED
from vit_jax.record import destination
from vit_jax.weights import (
    card,
    carried,
    families_timm,
    files,
    folders,
    infer,
    names,
    names_families,
    prefixes,
    preprocess,
    rotary,
    runs,
    tables,
)
from vit_jax.weights.infer import Leaves
from vit_jax.weights.loading import Weights, load
from vit_jax.weights.names import Table

FAMILIES = (*names.FAMILIES, 'run')
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
    family: one of `FAMILIES`; '' = determined by `to`: vision_transformer for npz (big_vision if only that has the
      names), timm for a PyTorch file, Hugging Face for a folder.
    overwrite: replace an existing file or folder.
    with_card: also write a model card; one that a person has written stays.

  Returns:
    The written path, and one sentence for each thing that the format cannot hold.

  Raises:
    UserError: the format cannot hold the weights, `to` exists or cannot be written, or the weights differ when read
      back. No new file is left then, and an existing one is unchanged.
  """
  path = check(to, family=family, overwrite=overwrite)
  family = choose_family(weights, path, family)
  weights, notes = _with_table(weights, family)
  with destination.staged(path, shown=to) as part:
    target = part / path.name
    _write(weights, target, family)
    lost = carried.compare(weights, load(str(target)), leaves=_comparable)
    if with_card:
      content = card.text(weights, path.name, written_as=family, how=_CHECKED, is_folder=target.is_dir())
      card.place(content, target, path)
  return path, notes + lost


def _with_table(weights: Weights, family: str) -> tuple[Weights, list[str]]:
  """Returns the weights with fixed positions as a table, and a note of it; unchanged if the format computes them."""
  m = weights.model
  if family == 'run' or not isinstance(m, schema.ViT) or m.positions not in FIXED or (
      family == 'big_vision' and m.positions is schema.Positions.SINCOS2D):
    return weights, []
  h, w = (px // m.patch for px in weights.preprocess.image_px)
  first = np.zeros(((m.pool.has_class_token) + m.distilled, m.width), np.float32)
  table = np.concatenate([first, FIXED[m.positions]((h, w), m.width).astype(np.float32)])[None]
  params = {**weights.params, 'backbone': {**weights.params['backbone'], 'positions': table}}
  return (weights._replace(model=dataclasses.replace(m, positions=schema.Positions.LEARNED), params=params),
          [f'that positions are fixed ({m.positions.value}): they are written as a table'])


def check(to: str, *, family: str, overwrite: bool) -> pathlib.Path:
  """Checks the path to write before anything is read, and returns it.

  Raises:
    UserError: the family or the suffix is unknown, the path exists, or its parent directory does not exist.
  """
  path = destination.checked(to)
  if family and family not in FAMILIES:
    near = difflib.get_close_matches(family, FAMILIES, 1)
    raise UserError(f'--family: expected one of {", ".join(FAMILIES)}, got {family!r}.'
                    + (f' Did you mean {near[0]}?' if near else ' Choose one.'))
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
        not weights.model.pool.is_attention and weights.model.positions is schema.Positions.LEARNED)
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
    recipe = schema.Recipe(**preprocess.recipe_values(p))
    config = schema.Config(name='converted', model=weights.model, head=weights.head, image_px=p.image_px,
                           data=schema.Data(recipe=recipe), objective=weights.decoder or schema.Supervised())
    path.mkdir()
    runs.write(path, config, weights.params, weights.state, class_names=weights.class_names, image_px=p.image_px)
    (path / REPORT).write_text(json.dumps(_report(weights), indent=2) + '\n')
    return
  configs = _configs(weights, path, family)
  tensors = to_tensors(weights, family)
  if configs:
    path.mkdir()
    files.write_safetensors(path / 'model.safetensors', tensors)
    for name, content in (configs | {REPORT: _report(weights)}).items():
      (path / name).write_text(json.dumps(content, indent=2) + '\n')
    return
  writer = {'.npz': files.write_npz, '.safetensors': files.write_safetensors}.get(path.suffix, files.write_torch)
  writer(path, tensors)
  content = folders.ours(weights, written_as=family)
  path.with_name(f'{path.name}.json').write_text(json.dumps(content, indent=2) + '\n')


def _report(weights: Weights) -> dict[str, Any]:
  """Returns how every tensor was used when these weights were loaded."""
  return {'source': weights.source, 'family': weights.family, **weights.report.plain()}


def _configs(weights: Weights, path: pathlib.Path, family: str) -> dict[str, Any]:
  """Returns the config files of a folder by name; {} for a single file."""
  if family == 'huggingface':
    return {'config.json': folders.transformers_config(weights),
            'preprocessor_config.json': folders.transformers_processor(weights.preprocess)}
  if family == 'timm' and path.suffix not in TORCH_SUFFIXES:
    return {'config.json': folders.timm_config(weights)}
  return {}


def to_tensors(weights: Weights, family: str) -> dict[str, HostArray]:
  """Returns the tensors of a file of this family.

  Raises:
    UserError: lists the parameters that the family cannot hold.
  """
  leaves = _leaves(weights)
  table = table_for(weights, family)
  if family == 'big_vision':
    leaves = _without_class_row(leaves)
  if family in ('timm', 'huggingface'):
    leaves = rotary.reordered(leaves, rotary.order(weights.model), back=True)
    leaves = infer.without_heads(leaves)
  if family == 'timm' and isinstance(weights.model, schema.ViT) and weights.model.registers:
    leaves = _with_register_rows(leaves, weights.model)
  tensors, unmatched = tables.write(leaves, table)
  if unmatched:
    raise UserError(f'files of {family} have no place for {len(unmatched)} of the parameters:\n'
                    + '\n'.join(tables.listed(unmatched)) + f'\nWant another --family: {", ".join(FAMILIES)}')
  match family:
    case 'huggingface':
      return prefixes.add(tensors, weights)
    case 'timm' if getattr(weights.model, 'rotary_mixed', False):
      return families_timm.joined(tensors)
    case 'timm' if _is_root_alone(weights.model):
      return {re.sub(r'^patch_embed\.backbone\.stem\.', 'patch_embed.backbone.', k): x for k, x in tensors.items()}
    case 'timm' if getattr(weights.model, 'norm_after_pool', False):
      return {re.sub(r'^norm\.', 'fc_norm.', k): x for k, x in tensors.items()}
    case 'timm' if weights.decoder:
      return tensors | {'decoder_pos_embed': prefixes.decoder_positions(weights)}
    case 'timm' if weights.num_classes and not weights.head.bias:
      return tensors | {'head.bias': np.zeros(weights.num_classes, np.float32)}
  return tensors


def _leaves(weights: Weights) -> Leaves:
  """Returns parameters and running statistics by path."""
  whole = {**weights.params, **({'state': weights.state} if weights.state else {})}
  return {name: np.asarray(leaf) for name, leaf in trees.flatten(whole).items()}


def _comparable(weights: Weights, family: str) -> Leaves:
  """Returns the leaves in the form that both sides of a comparison have after conversion to this family."""
  return _without_class_row(_leaves(weights)) if family == 'big_vision' else _leaves(weights)


def table_for(weights: Weights, family: str) -> Table:
  """Returns the table of a family for this kind of network."""
  if isinstance(weights.model, schema.ResNet):
    return names.TIMM_BIT if family == 'timm' else names.BIT
  if isinstance(weights.model, schema.EfficientNet):
    return names.TIMM_EFFICIENTNET if family == 'timm' else ()
  is_mixer = isinstance(weights.model, schema.Mixer)
  is_gated = isinstance(weights.model, schema.ViT) and weights.model.swiglu
  match family:
    case 'timm':
      return names_families.timm(weights.model) if isinstance(weights.model, schema.ViT) else names.TIMM_MIXER
    case 'huggingface':
      kind = folders.transformers_type(weights)
      if kind in prefixes.TABLES:
        return prefixes.TABLES[kind]
      if kind.startswith(('dinov2', 'tipsv2')):
        return names.HUGGINGFACE_DINO_SWIGLU if is_gated else names.HUGGINGFACE_DINO
      return names.HUGGINGFACE
    case 'bit':
      return ()
    case 'big_vision':
      return names.FLAX_MIXER if is_mixer else names.BIG_VISION
    case _:
      return names.FLAX_MIXER if is_mixer else names.VISION_TRANSFORMER


def _is_root_alone(model: schema.Model) -> bool:
  """Whether the stem has no stages, so that timm has another name for it."""
  return isinstance(model, schema.ViT) and isinstance(model.stem, schema.ResNetStem) and not model.stem.layers


def _without_class_row(leaves: Leaves) -> Leaves:
  """Returns the leaves in big_vision's form, in which the class token includes its position embedding."""
  if 'backbone/cls' not in leaves or 'backbone/positions' not in leaves:
    return leaves
  table = leaves['backbone/positions']
  return {**leaves, 'backbone/cls': leaves['backbone/cls'] + table[:, :1], 'backbone/positions': table[:, 1:]}


def _with_register_rows(leaves: Leaves, model: schema.ViT) -> Leaves:
  """Returns the leaves with a zero position for each register; timm has these if the class token has a position."""
  table, first = leaves.get('backbone/positions'), (model.pool.has_class_token) + model.distilled
  if table is None:
    return leaves
  rows = np.zeros((1, model.registers, table.shape[2]), np.float32)
  return {**leaves, 'backbone/positions': np.concatenate([table[:, :first], rows, table[:, first:]], axis=1)}
