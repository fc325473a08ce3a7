"""Detects the family of a file's tensors, writes networks under the names of a format, and collects the records.

`recognize` is for `loading.py`, `to_tensors` for `saving.py` and `peft.py`; what the records of all families say about
images, positions and configs is at the top of the module, by the label of a family or format.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import PositionResize
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.weights import infer, tables
from vit_jax.weights.families import FAMILIES, flax, rotary, timm, transformers
from vit_jax.weights.families.record import Family, Files, Prepared, Recognized, Tensors
from vit_jax.weights.network import Weights
from vit_jax.weights.preprocess import PreprocessRule
from vit_jax.weights.tables import Table, check_whole

T = TypeVar('T')
PROGRAMS: dict[str, Callable[[Tensors], Prepared]] = {
    'file': Prepared, 'flax': flax.prepare,
    'transformers': transformers.prepare, 'timm': lambda tensors: timm.prepare(tensors, FAMILIES)}
"""For each program, how its files are prepared before families look for their names; in the order of detection."""
FORMATS = ('vision_transformer', 'big_vision', 'timm', 'huggingface', 'bit')
"""Formats that can be written, beside the directory of a run."""
_IMAGES: dict[str, Mapping[str, Any]] = {
    'timm': timm.IMAGES, 'huggingface': transformers.IMAGES, **{one.name: one.images for one in FAMILIES if one.images}}
_SCALES = (r'.*\.(qweight|qzeros|SCB|absmax|scales?|weight_scale\w*|input_scale|zero_point)$',
           'some of them are of quantized weights, which are not read: use those from before the quantization')
_RESIZES = {'huggingface': PositionResize.BICUBIC, **{one.name: one.position_resize for one in FAMILIES}}
LABELS = tuple(_IMAGES)
"""What reports call the families and formats."""
CONFIG_DEFAULTS = {kind: values for one in FAMILIES for kind, values in one.config_defaults.items()}
KINDS = tuple(kind for one in FAMILIES for kind in one.kinds)


def is_known(tensors: Tensors) -> bool:
  """Returns whether the names of tensors are those of a family; values are not looked at."""
  try:
    return bool(tensors) and _find(tensors) is not None
  except UserError:  # two tensors with one name: other networks are beside it
    return False


def _find(tensors: Tensors) -> tuple[Prepared, Family, Files] | None:
  for program, prepare in PROGRAMS.items():
    prepared = prepare(tensors)
    for family in FAMILIES:
      for files in family.files:
        if files.program == program and files.matches(prepared.tensors):
          return prepared, family, files
  return None


def recognize(tensors: Tensors) -> Recognized:
  """Returns the family of a file, detected from the names of its tensors, and the tensors under those of its table.

  Raises:
    UserError: the names belong to no family.
  """
  found = _find(tensors)
  if found is None:
    shown = ', '.join(sorted(tensors)[:6])
    raise UserError(f'its {len(tensors)} tensors are named as in no known family ({", ".join(FORMATS)}): {shown}')
  prepared, family, files = found
  unused = tuple(line.name for line in prepared.lines)
  check_whole(tensors, [name for name, x in tensors.items() if x.ndim > 1 and x.dtype.itemsize == 1
                        and x.dtype.kind != 'b' and not name.endswith(unused)])
  changed, lines = files.change(prepared.tensors)
  return Recognized(label=files.label or prepared.label or family.name, tensors=changed,
                    dropped=prepared.lines + lines, table=_resolved(files.table, changed),
                    hints=_resolved(files.hints, prepared.tensors), warn=files.warn,
                    first_rows=_resolved(files.first_rows, prepared.tensors))


def _resolved(value: T | Callable[[Tensors], T], tensors: Tensors) -> T:
  """Returns an entry of a record, which is a function of the tensors where networks of the family differ in it."""
  return value(tensors) if callable(value) else value


def reasons(left: list[str], label: str) -> list[str]:
  """Returns the known reasons why unused tensors of a file, which reports call `label`, are not supported.

  Families whose files have names of their own give reasons for their files alone.
  """
  def may_speak(family: Family) -> bool:
    has_own_names = bool(family.files) and all(files.program == 'file' for files in family.files)
    return family.name == label or not has_own_names

  known = [one for family in FAMILIES if may_speak(family) for one in family.unsupported.items()] + [_SCALES]
  return [reason for pattern, reason in known if any(re.match(pattern, name) for name in left)]


def usual(label: str) -> PreprocessRule:
  """Returns how images are usually prepared for files that reports call `label`."""
  return PreprocessRule(f'what is usual for {label}', _IMAGES[label], is_guess=True)


def position_resize(label: str, by_name: PositionResize | None, *, has_registers: bool) -> PositionResize:
  """Returns how the program that wrote the weights resizes position embeddings.

  Args:
    label: what reports call the files.
    by_name: what the published name says; it distinguishes DeiT, MAE and DINO, whose tensors have timm's names.
    has_registers: whether there are registers. DINOv2 with registers is antialiased, in its own program and in
      transformers.
  """
  resize = _RESIZES.get(label) or by_name or PositionResize.BICUBIC_ANTIALIAS
  is_torch = resize not in (PositionResize.ALIGNED, PositionResize.BILINEAR, PositionResize.BILINEAR_ANTIALIAS,
                            PositionResize.BICUBIC_ANTIALIAS_SQUARE)
  return PositionResize.BICUBIC_ANTIALIAS if has_registers and is_torch else resize


def written_table(weights: Weights, label: str) -> Table:
  """Returns the names under which a network is written in one of `FORMATS`; () if the format has none for it."""
  model = weights.model
  if label == 'huggingface':
    table = transformers.kind_of(weights, KINDS).table
    assert isinstance(model, schema.ViT)
    return table(model) if callable(table) else table
  for family in FAMILIES:
    for files in family.files:
      if label in files.formats and isinstance(model, files.network):
        if files.written:
          return files.written(model)
        assert isinstance(files.table, tuple)
        return files.table
  return ()


def to_tensors(weights: Weights, label: str) -> Tensors:
  """Returns the tensors of a file in one of `FORMATS`.

  Raises:
    UserError: lists the parameters that the format cannot hold.
  """
  leaves = leaves_of(weights)
  if label == 'big_vision':
    leaves = without_class_row(leaves)
  if label in ('timm', 'huggingface'):
    leaves = infer.without_heads(rotary.reordered(leaves, weights.model, to_file=True))
  if label == 'timm':
    leaves = timm.with_register_rows(leaves, weights)
  tensors, unmatched = tables.write(leaves, written_table(weights, label))
  if unmatched:
    raise UserError(f'files of {label} have no place for {len(unmatched)} of the parameters:\n'
                    + '\n'.join(tables.listed(unmatched)) + f'\nSet another --family: {", ".join((*FORMATS, "run"))}')
  if label == 'huggingface':
    return transformers.kind_of(weights, KINDS).finish(tensors, weights)
  return timm.finish(tensors, weights) if label == 'timm' else tensors


def leaves_of(weights: Weights) -> Tensors:
  """Returns parameters and running statistics by path."""
  whole = {**weights.params, **({'state': weights.state} if weights.state else {})}
  return {name: np.asarray(leaf) for name, leaf in trees.flatten(whole).items()}


def without_class_row(leaves: Tensors) -> Tensors:
  """Returns the leaves in big_vision's form, in which the class token includes its position embedding."""
  if 'backbone/cls' not in leaves or 'backbone/positions' not in leaves:
    return leaves
  class_row, patch_rows = np.split(leaves['backbone/positions'], [1], axis=1)
  return {**leaves, 'backbone/cls': leaves['backbone/cls'] + class_row, 'backbone/positions': patch_rows}
