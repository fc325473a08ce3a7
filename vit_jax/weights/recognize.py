"""Detects the family of a file's tensors, and collects what the records of all families say."""
from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.config import schema
from vit_jax.config.schema import PositionResize
from vit_jax.core.errors import UserError
from vit_jax.weights.families import FAMILIES, flax, timm, transformers
from vit_jax.weights.families.record import Family, Files, Recognized, Tensors
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Weights
from vit_jax.weights.preprocess import PreprocessRule
from vit_jax.weights.tables import Table, check_whole

PROGRAMS: dict[str, Callable[[Tensors], Recognized]] = {
    'file': lambda tensors: Recognized('', tensors), 'flax': flax.prepare,
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


def _find(tensors: Tensors) -> tuple[Recognized, Family, Files] | None:
  for program, prepare in PROGRAMS.items():
    prepared = prepare(tensors)
    for family in FAMILIES:
      for files in family.files:
        if files.program == program and files.found(prepared.tensors):
          return prepared, family, files
  return None


def recognize(tensors: Tensors) -> Recognized:
  """Returns the family of a file, detected from the names of its tensors, and the tensors under those of its table.

  Raises:
    UserError: the names belong to no family.
  """
  if found := _find(tensors):
    prepared, family, files = found
    ends = tuple(line.name for line in prepared.dropped)
    check_whole(tensors, [name for name, x in tensors.items() if x.ndim > 1 and x.dtype.itemsize == 1
                          and x.dtype.kind != 'b' and not name.endswith(ends)])
    hints = files.hints if isinstance(files.hints, Hints) else files.hints(prepared.tensors)
    first = files.first if isinstance(files.first, tuple) else files.first(prepared.tensors)
    changed, lines = files.change(prepared.tensors)
    table = files.table if isinstance(files.table, tuple) else files.table(changed)
    return Recognized(files.label or prepared.family or family.name, changed, prepared.dropped + lines, table, hints,
                      files.warn, first)
  shown = ', '.join(sorted(tensors)[:6])
  raise UserError(f'its {len(tensors)} tensors are named as in no known family ({", ".join(FORMATS)}): {shown}')


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


def position_resize(label: str) -> PositionResize | None:
  """Returns how the program resizes positions whose files reports call `label`; None if that follows from the name."""
  return _RESIZES.get(label)


def written_table(weights: Weights, label: str) -> Table:
  """Returns the names under which a network is written in one of `FORMATS`; () if the format has none for it."""
  model = weights.model
  if label == 'huggingface':
    kind = transformers.kind_of(weights, KINDS)
    assert isinstance(model, schema.ViT)
    return kind.table(model)
  found = next((files for family in FAMILIES for files in family.files
                if label in files.formats and isinstance(model, files.network)), None)
  if found is None:
    return ()
  if found.written:
    return found.written(model)
  assert isinstance(found.table, tuple)
  return found.table
