"""What is known about a family of published weights, as one record, and the operations on tensors that records use.

`weights/recognize.py` reads records in this order: the tensors of a file are prepared by program (`Prepared`), a family
is found by their names (`Files.matches`), they are changed for it (`Files.change`), and the result is `Recognized`.
"""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.config.schema import PositionResize
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.models.vit.positions import sincos2d_mae
from vit_jax.weights.grids import TOKENS
from vit_jax.weights.hints import Hints
from vit_jax.weights.network import Line, Weights
from vit_jax.weights.tables import Table

Tensors = dict[str, HostArray]


class Changed(NamedTuple):
  """Tensors under other names or in another form, and a line for each one that was dropped or folded."""
  tensors: Tensors
  lines: tuple[Line, ...] = ()


class Prepared(NamedTuple):
  """As `Changed`, and what reports call the format of the file, where its names show it; '' = as its family."""
  tensors: Tensors
  lines: tuple[Line, ...] = ()
  label: str = ''


class Clues(NamedTuple):
  """What is known about a file besides its tensors.

  names: of the file, its address and its architecture, in lower case, without folders.
  has_config: whether a config is beside it.
  has_gelu: whether `--model`, a config or a published name determines the form of the GELU.
  """
  names: tuple[str, ...]
  has_config: bool
  has_gelu: bool


Warn = Callable[[schema.Model, Clues], list[str]]
"""Returns warnings about a network whose tensors could also be those of another one."""


class Files(NamedTuple):
  """The files of a family under the names of one program.

  program: a key of `recognize.PROGRAMS`, which first removes what all files of the program have around the names;
    `file` for names as they are in the file.
  matches: whether tensors with these names are of the family, such as `named('cls_token')`.
  table: the names; a function of the tensors where networks differ in them.
  hints: settings of its networks that tensors do not show, where these are not those of the family; a function of the
    tensors where networks differ in them.
  change: what else is done to the tensors before the table applies.
  warn: see `Warn`.
  label: of this format in reports and as a rule of preprocessing; '' = that of the program, else the family's name.
  formats: the values of `--family` with which a network of class `network` is written so; () = only read.
  written: names for writing a network, where they depend on its settings.
  first_rows: which rows its tables of positions have before those of the patches, see `grids.py`; a function of the
    tensors where networks differ in them.
  """
  program: str
  matches: Callable[[Tensors], bool]
  table: Table | Callable[[Tensors], Table]
  hints: Hints | Callable[[Tensors], Hints] = Hints()
  change: Callable[[Tensors], Changed] = Changed
  warn: Warn = lambda model, clues: []
  label: str = ''
  formats: tuple[str, ...] = ()
  network: type[schema.Model] = schema.ViT
  written: Callable[[schema.Model], Table] | None = None
  first_rows: tuple[str, ...] | Callable[[Tensors], tuple[str, ...]] = (TOKENS,)


class Kind(NamedTuple):
  """A kind of network of transformers, with the config that its programs read.

  model_type: of the config.
  loaded_by: name of the class that loads it, without and with a head.
  holds: whether it computes a network; its last argument are the settings that differ from a plain ViT, as in
    `transformers.differing`.
  table: names for writing a network; a function of its settings where networks differ in them.
  config: what `config.json` has besides the settings of all kinds.
  finish: the last change of the tensors, such as a prefix.
  """
  model_type: str
  loaded_by: tuple[str, str]
  holds: Callable[[schema.ViT, Weights, frozenset[str]], bool]
  table: Table | Callable[[schema.ViT], Table]
  config: Callable[[schema.ViT, Weights], dict[str, Any]]
  finish: Callable[[Tensors, Weights], Tensors] = lambda tensors, _: tensors


class License(NamedTuple):
  """The license of models of the hub whose `OWNER/NAME` matches a pattern; some are given out on request only."""
  pattern: str
  license: str
  is_on_request: bool = False


class Published(NamedTuple):
  """What names of weights that match a pattern mean.

  model: template of the network's name, filled with the groups of the pattern.
  px: side of the images; 0 = not known from the name.
  data: that they were trained on.
  num_classes: outputs; 0 = no head.
  source: the paper.
  license: of the authors' repository.
  is_hidden: whether the head has the hidden layer of the ViT paper's pre-training.
  """
  pattern: str
  model: str
  px: int
  data: str
  num_classes: int
  source: str
  license: str = 'Apache-2.0'
  is_hidden: bool = False


class Family(NamedTuple):
  """A family of published weights.

  name: in reports, and of the rule for the preprocessing of images.
  title, about: in the documentation: its name, and which of its files are read.
  files: how its files look, by program; the first one that matches counts.
  kinds: its networks in transformers.
  images: how images are usually prepared, by the names of `preprocess.PreprocessRule.values`.
  position_resize: how its program resizes positions; None = as the name of the file says.
  config_defaults: what configs of transformers of these kinds may leave out; 0 heads: those of the width.
  to_timm: renames tensors with the names of its authors to those of timm, if they are of this family.
  timm_drops: reasons why tensors of files with the names of timm or of the authors are left out, by pattern.
  unsupported: reasons why files with some tensors cannot be read, by pattern of their names.
  licenses: of models of the hub.
  addresses: of weights that are known by name.
  published: what these names mean.
  """
  name: str
  title: str
  about: str
  files: tuple[Files, ...] = ()
  kinds: tuple[Kind, ...] = ()
  images: Mapping[str, Any] = {}
  position_resize: PositionResize | None = None
  config_defaults: Mapping[str, Mapping[str, Any]] = {}
  to_timm: Callable[[Tensors], Changed] = Changed
  timm_drops: Mapping[str, str] = {}
  unsupported: Mapping[str, str] = {}
  licenses: tuple[License, ...] = ()
  addresses: Mapping[str, str] = {}
  published: tuple[Published, ...] = ()


class Recognized(NamedTuple):
  """A file's tensors under the names of its family, with the entries of the family's record that apply to them.

  label: what reports call the family or the format, as `Files.label` says.
  hints: defaults of the family, which sidecars of the file and `--model` override.
  warn, first_rows: as in `Files`.
  """
  label: str
  tensors: Tensors
  dropped: tuple[Line, ...]
  table: Table
  hints: Hints
  warn: Warn
  first_rows: tuple[str, ...]


def named(*names: str, without: Collection[str] = ()) -> Callable[[Tensors], bool]:
  """Returns a test whether a file has tensors with all of these names, and none with a name of `without`."""
  return lambda tensors: tensors.keys() >= set(names) and not tensors.keys() & set(without)


def dropping(tensors: Tensors, rules: Mapping[str, str]) -> Changed:
  """Returns the tensors without those that a rule (pattern of the name, reason) drops."""
  lines = [Line(name, 'dropped', reason) for name in tensors for pattern, reason in rules.items()
           if re.fullmatch(pattern, name)]
  dropped = {line.name for line in lines}
  return Changed({name: x for name, x in tensors.items() if name not in dropped}, tuple(lines))


def renamed(tensors: Tensors, *rules: tuple[str, str]) -> Tensors:
  """Returns the tensors with the patterns of the rules replaced in their names, in the order of the rules.

  Raises:
    UserError: two tensors get the same name.
  """
  by_new_name: Tensors = {}
  for name, x in tensors.items():
    new_name = name
    for pattern, replacement in rules:
      new_name = re.sub(pattern, replacement, new_name)
    if new_name in by_new_name:
      raise UserError(f'two of its tensors mean {new_name}, one of them {name}')
    by_new_name[new_name] = x
  return by_new_name


def with_patch_kernel(tensors: Tensors, name: str) -> Tensors:
  """Returns the tensors with a matrix that embeds patches as a convolution.

  The rows of its inputs are the pixels of a patch, row by row, with the channels last.

  Raises:
    UserError: the patches are not square, or have another number of channels than three.
  """
  shape = tensors[name].shape
  side = math.isqrt(shape[-1] // 3) if shape else 0
  if len(shape) == 2 and 3 * side * side == shape[1]:
    return {**tensors, name: tensors[name].reshape(len(tensors[name]), side, side, 3).transpose(0, 3, 1, 2)}
  if len(shape) != 4:
    raise UserError(f'{name} has the shape {list(shape)}, expected the pixels of square patches of three channels')
  return tensors


def without_fixed(tensors: Tensors, name: str) -> Changed:
  """Returns the tensors without the positions of MAE's decoder `[1, 1 + M, D]`, which the network computes.

  Raises:
    UserError: the positions differ from the computed ones, with zeros for the class token.
  """
  if name not in tensors:
    return Changed(tensors)
  if not _is_mae_table(tensors[name]):
    raise UserError(f'{name} is not the fixed 2-D sine-cosine table of MAE, which decoders here have')
  return dropping(tensors, {re.escape(name): 'the same as what is computed here'})


def _is_mae_table(positions: HostArray) -> bool:
  """Whether positions `[1, 1 + M, D]` are MAE's table for a square grid, with zeros for the class token."""
  if positions.ndim != 3 or len(positions) != 1:
    return False
  num_rows, width = positions.shape[1:]
  side = math.isqrt(max(num_rows - 1, 0))
  if not side or side * side != num_rows - 1 or not width or width % 4:
    return False
  class_row, patch_rows = positions[0, 0], positions[0, 1:]
  return not np.any(class_row) and bool(np.abs(patch_rows - sincos2d_mae((side, side), width)).max() <= 1e-4)


def decoder_positions(weights: Weights) -> HostArray:
  """Returns the fixed position table of MAE's decoder, with zeros for the class token."""
  assert weights.decoder and isinstance(weights.model, schema.ViT)
  h, w = (px // weights.model.patch for px in weights.preprocess.image_px)
  table = sincos2d_mae((h, w), weights.decoder.decoder_width)
  return np.concatenate([np.zeros((1, table.shape[1]), np.float32), table])[None]
