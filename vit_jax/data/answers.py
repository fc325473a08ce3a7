"""Answers of a teacher on disk: the classes that a teacher finds most likely at each position of an image.

Token labeling has a grid of positions for each image; the answers for token labeling are called label maps. Noisy
Student has one position for each image; the answers for Noisy Student are called labels. `jobs/teacher_labels.py`
calls `write`. Later, `open_label_maps` opens label maps, and `formats/pseudo.py` opens labels; both return `Answers`.
`AddAnswers` adds the answers to each batch of the loader. This module knows neither the teacher nor the objective.

The examples of a source are stored in parts of `per_part` consecutive examples. A directory of answers has `info.json`
(see `Info`) and two files for each part:

    classes-00000.npy  [n, h, w, k] u16, or u32 for more than 65,536 classes: the most likely class comes first
    scores-00000.npy   [n, h, w, k] f16: logits or probabilities of these classes

Position (i, j) covers the area [i / h, (i + 1) / h] x [j / w, (j + 1) / w] of the stored image. The directory gets
its final name when all parts are written. After a kill, the same command writes the missing parts.

Axes: B examples of a batch, S examples of a source, P = h w positions, K = k classes.
"""
from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.core import archives, documents, failures, files
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, HostArray
from vit_jax.data import user_files
from vit_jax.data.source import Source
from vit_jax.data.user_files import OWN, Rules

FORMAT = 'vit_jax label maps 1'
INFO = 'info.json'
LABEL_MAPS = 'objective.maps'  # the setting that names a directory of label maps, which `vit-jax prepare` writes
LABELS = 'data.pseudo.labels'  # the setting that names a directory of labels, which training writes when it starts
_CONTENT_BY_SETTING = {LABEL_MAPS: 'label maps', LABELS: 'labels of a teacher'}
PER_PART = 16_384  # number of images in a part of label maps
_MAX_POSITIONS = 2**16  # positions in an image: a grid of 4 px patches in 1,024 px
_MAX_TOP = 1_000  # classes stored at a position
_MAX_PARTS = 100_000
LOGITS, PROBABILITIES = 'logits', 'probabilities'
CERTAIN = 30.  # logit of a certain class: if 1,000 other classes have logit 0, the certain class has 1 - 1e-10


class Info(NamedTuple):
  """The content of `info.json`. Digests contain the `repr` of this class, so the field names cannot change.

  source, digest, num_examples: name, digest and size of the source.
  grid: rows and columns of the positions of an image.
  top: number of classes stored at each position, k. If the teacher has fewer classes, the others have score 0.
  num_classes: number of classes of the teacher.
  per_part: number of examples in a part.
  made: the teacher and the settings of the teacher. People read them, and `write` compares them.
  scores: `LOGITS` or `PROBABILITIES`.
  """
  source: str
  digest: str
  num_examples: int
  grid: tuple[int, int]
  top: int
  num_classes: int
  per_part: int
  made: dict[str, Any]
  scores: str

  @property
  def num_parts(self) -> int:
    """The number of parts; the last one may be smaller."""
    return -(-self.num_examples // self.per_part)

  def examples(self, part: int) -> range:
    """Returns the indexes of the examples in the part with this number."""
    return range(part * self.per_part, min((part + 1) * self.per_part, self.num_examples))


class Answers:
  """The answers in a directory. The files are memory-mapped, so only the answers that are used are read from disk."""

  def __init__(self, folder: pathlib.Path, rules: Rules = OWN, *, setting: str = LABEL_MAPS) -> None:
    """Opens a directory. `setting` names the directory in messages, `rules` say which files a link may lead to.

    Raises UserError if the directory has no answers, is incomplete, or has links to files outside of it.
    """
    self.folder, self.rules, self.info = folder, rules, read_info(folder, setting=setting)
    self._content = _CONTENT_BY_SETTING[setting]
    self._rewrite_advice = _advise_rewrite(setting).capitalize()
    self._damage_advice = _advise_damaged(setting)
    if self.info.num_parts > _MAX_PARTS:
      raise UserError(f'{folder / INFO}: expected at most {_MAX_PARTS:,} parts, got {self.info.num_parts:,}. '
                      f'{self._damage_advice}')
    for array_name, part in itertools.product(('classes', 'scores'), range(self.info.num_parts)):
      user_files.check_inside(str(_array_path(folder, array_name, part)), str(folder), rules)
    self._parts = [(self._map_array('classes', part, dtype_kind='u'), self._map_array('scores', part, dtype_kind='f'))
                   for part in range(self.info.num_parts)]

  def _map_array(self, array_name: str, part: int, *, dtype_kind: str) -> HostArray:
    """Returns the memory map of the file of a part, whose `dtype.kind` must be `u` or `f`, as `dtype_kind` says."""
    path = _array_path(self.folder, array_name, part)
    shape = (len(self.info.examples(part)), *self.info.grid, self.info.top)
    expected = f'{path}: expected an array of shape {shape}'
    try:
      array = archives.map_npy(path)
    except OSError as error:
      raise failures.unreadable(error, str(path)) from None
    except ValueError:
      raise UserError(f'{expected}, got a damaged file. {self._damage_advice}') from None
    is_too_wide = dtype_kind == 'u' and array.dtype.itemsize > 4  # `read` returns classes as 32 bits
    if array.shape != shape or array.dtype.kind != dtype_kind or is_too_wide:
      raise UserError(f'{expected}, got {array.shape} of {array.dtype}. {self._damage_advice}')
    return array

  def check_matches(self, expected: Mapping[str, Any]) -> None:
    """Raises a UserError that lists the fields of `info` whose value differs from `expected`, values by field name."""
    unequal = [f'{name} {value}, got {getattr(self.info, name)}' for name, value in expected.items()
               if getattr(self.info, name) != value]
    if unequal:
      raise UserError(f'{self.folder}: expected {self._content} with {"; ".join(unequal)}. {self._rewrite_advice}.')

  def extra(self) -> AddAnswers:
    """Returns the callable that adds the answers to batches; the loader calls it for each batch of the source."""
    return AddAnswers(self)

  def read(self, index_B: HostArray) -> tuple[HostArray, HostArray]:
    """Returns the classes `[B, P, K] i32` of examples and their scores `[B, P, K] f32`; raises UserError if damaged."""
    shape = (len(index_B), self.info.grid[0] * self.info.grid[1], self.info.top)
    classes_BPK, scores_BPK = np.empty(shape, np.int32), np.empty(shape, np.float32)
    for row, index in enumerate(index_B.tolist()):
      part, offset = divmod(index, self.info.per_part)
      classes, scores = self._parts[part]
      classes_BPK[row] = classes[offset].reshape(shape[1:])
      scores_BPK[row] = scores[offset].reshape(shape[1:])
    self._check_values(classes_BPK.view(np.uint32), scores_BPK)  # as i32, classes from 2**31 on would be negative
    return classes_BPK, scores_BPK

  def read_most_likely(self) -> tuple[HostArray, HostArray]:
    """Returns the most likely class `[S]` of each example at the first position, and its score `[S] f16`."""
    classes_S = np.concatenate([classes[:, 0, 0, 0] for classes, _ in self._parts])
    scores_S = np.concatenate([scores[:, 0, 0, 0] for _, scores in self._parts])
    self._check_values(classes_S, scores_S)
    return classes_S, scores_S

  def _check_values(self, classes: HostArray, scores: HostArray) -> None:
    """Raises UserError if the teacher has no such class, or if a score is not finite."""
    if classes.size and classes.max() >= self.info.num_classes:
      raise UserError(f'{self.folder}: expected classes below {self.info.num_classes:,}, got {classes.max():,}. '
                      f'{self._damage_advice}')
    if not np.isfinite(scores).all():
      raise UserError(f'{self.folder}: expected finite scores, got infinite ones or NaN. {self._damage_advice}')


class AddAnswers:
  """Adds the teacher's answers to batches: `token_labels [B, P, K] i32` and `token_scores [B, P, K] f32`.

  At every position of an image without an answer, the label of the image is the certain class. An image has no answer
  if people have labeled it, or if it replaces a bad image.
  """

  def __init__(self, answers: Answers, rows_S: HostArray | None = None) -> None:
    """Takes the row of each example in `answers`; -1 = no answer. None = the row of an example is its index."""
    self._answers, self._rows_S = answers, rows_S

  @property
  def digest(self) -> str:
    """Text that the loader appends to the digest of the source; '' if that digest already depends on the answers."""
    return f' maps={hashlib.sha256(str(self._answers.info).encode()).hexdigest()}' if self._rows_S is None else ''

  def __call__(self, batch: Batch, positions: HostArray) -> Batch:
    """Returns the batch with the answers; `positions [B]` of the examples in the order of training are not used."""
    del positions  # the answer for an image is the same in each epoch
    info = self._answers.info
    rows_B = batch['index'] if self._rows_S is None else self._rows_S[batch['index']]
    shape = (len(rows_B), info.grid[0] * info.grid[1], info.top)
    labels_BPK, scores_BPK = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    if info.scores == LOGITS:  # logit 0 also gives its class a small probability, so all K classes are the label
      labels_BPK[:] = batch['label'][:, None, None]
      scores_BPK[:, :, 0] = CERTAIN
    else:
      labels_BPK[:, :, 0] = batch['label'][:, None]
      scores_BPK[:, :, 0] = 1.
    answered = np.flatnonzero((rows_B >= 0) & ~batch['bad'])
    labels_BPK[answered], scores_BPK[answered] = self._answers.read(rows_B[answered])
    return {**batch, 'token_labels': labels_BPK, 'token_scores': scores_BPK}


def open_label_maps(path: str, source: Source, *, grid: tuple[int, int], top: int, rules: Rules = OWN) -> Answers:
  """Opens the label maps of a source in the directory `path`, the value of `objective.maps`.

  Raises UserError if the label maps are missing, or do not belong to this source and config.
  """
  if not path:
    raise UserError(f"{LABEL_MAPS}: expected a directory of label maps, got ''. Write one with vit-jax prepare "
                    '--config=CONFIG --weights=TEACHER --to=DIR.')
  maps = Answers(pathlib.Path(user_files.resolve(path, LABEL_MAPS)), rules)
  maps.check_matches({'digest': source.digest, 'num_examples': len(source), 'num_classes': len(source.class_names),
                      'grid': grid, 'top': top, 'scores': LOGITS})
  return maps


def read_info(folder: pathlib.Path, *, setting: str = LABEL_MAPS) -> Info:
  """Returns the content of `folder/info.json`; `setting` names the folder in messages.

  Raises UserError if the file is missing, damaged, or of another format.
  """
  path = folder / INFO
  if not path.is_file():
    raise UserError(f'{folder}: expected label maps, got no {INFO}. Write them with vit-jax prepare --config=CONFIG '
                    '--weights=TEACHER --to=DIR.')
  document = documents.read(path, expected=_CONTENT_BY_SETTING[setting], advice=_advise_damaged(setting))
  format_field = document.optional('format')
  if format_field is None or format_field.value != FORMAT:
    raise UserError(f'{path}: expected the format {FORMAT!r}, got another one. '
                    f'{_advise_rewrite(setting).capitalize()}.')
  grid = [side.whole(1, _MAX_POSITIONS) for side in document.field('grid').elements()]
  if len(grid) != 2 or grid[0] * grid[1] > _MAX_POSITIONS:
    raise document.field('grid').error(f'two sides of a grid of at most {_MAX_POSITIONS:,} positions')
  scores = document.field('scores')
  if scores.value not in (LOGITS, PROBABILITIES):
    raise scores.error(f'{LOGITS} or {PROBABILITIES}')
  return Info(
      source=document.field('source').text(), digest=document.field('digest').text(),
      num_examples=document.field('num_examples').whole(1), grid=(grid[0], grid[1]),
      top=document.field('top').whole(1, _MAX_TOP), num_classes=document.field('num_classes').whole(1, 2**31 - 1),
      per_part=document.field('per_part').whole(1), made=document.field('made').object(), scores=scores.value)


def _advise_damaged(setting: str) -> str:
  """Returns the advice of a message about damaged answers in the directory that `setting` names."""
  return f'The file is damaged: copy it again, or {_advise_rewrite(setting)}.'


def _advise_rewrite(setting: str) -> str:
  """Returns advice how to replace the answers in the directory that `setting` names, as a part of a sentence."""
  if setting == LABEL_MAPS:
    return 'write the maps again with this config and vit-jax prepare'
  return f'set another folder in {setting}, as training writes them to a new one'


def write(folder: pathlib.Path, info: Info, compute: Callable[[range], tuple[HostArray, HostArray]], *, setting: str,
          process: tuple[int, int] = (0, 1), barrier: Callable[[str], None] = lambda name: None) -> bool:
  """Writes the answers for a source, unless the folder has the same answers already.

  Several processes that share the folder can each compute some of the parts. All processes call this function, with
  arguments that differ only in `process`. Process 0 creates the folder, and renames it when all parts are written.

  Args:
    folder: the directory to write.
    info: the content of `info.json`.
    compute: maps a range of examples to `classes [n, h, w, k]` and `scores [n, h, w, k]`.
    setting: the setting or flag that names the folder, for messages.
    process: index of this process and number of processes N. Process i computes the parts i, i + N, i + 2 N, ...
    barrier: a function that returns when all processes have called it with the same name.

  Returns:
    Whether answers were written; False if the folder has the same answers already.

  Raises UserError if the folder has other content, or `info.top` is too large to be read again.
  """
  if info.top > _MAX_TOP:
    raise UserError(f'{"objective" if info.scores == LOGITS else "data.pseudo"}.top: expected at most {_MAX_TOP:,} '
                    f'classes of an answer, got {info.top:,}. Set a lower number.')
  plan = json.dumps({'format': FORMAT, **info._asdict()}, indent=1)
  if not files.is_vacant(folder):
    if not (folder / INFO).is_file() or documents.read_bytes(folder / INFO) != plan.encode():
      raise UserError(f'{setting}={folder}: expected a new folder, got one with other content. Choose another folder.')
    return False  # all processes share the folder and return here, so no process waits at a barrier
  barrier('label maps checked')
  names = {_array_path(folder, name, part).name for name in ('classes', 'scores') for part in range(info.num_parts)}
  unfinished = files.Unfinished(folder, plan, names | {INFO})
  is_first = process[0] == 0
  with unfinished.open() if is_first else contextlib.nullcontext(unfinished.folder) as part_folder:
    barrier('label maps begun')
    _write_parts(part_folder, info, compute, process=process)
    barrier('label maps written')
    if is_first:
      files.replace(part_folder / INFO, plan.encode())
      unfinished.complete(unfinished.names)
  barrier('label maps complete')
  return True


def _write_parts(folder: pathlib.Path, info: Info, compute: Callable[[range], tuple[HostArray, HostArray]], *,
                 process: tuple[int, int]) -> None:
  """Writes those parts of one process that are missing in the folder."""
  class_type = np.uint16 if info.num_classes <= 2**16 else np.uint32
  index, num_processes = process
  for part in range(index, info.num_parts, num_processes):
    if not _array_path(folder, 'scores', part).is_file():  # the scores are written after the classes
      classes, scores = compute(info.examples(part))
      _save(_array_path(folder, 'classes', part), classes.astype(class_type))
      _save(_array_path(folder, 'scores', part), scores.astype(np.float16))


def _array_path(folder: pathlib.Path, array_name: str, part: int) -> pathlib.Path:
  return folder / f'{array_name}-{part:05d}.npy'


def _save(path: pathlib.Path, array: HostArray) -> None:
  with files.replacing(path) as temporary, open(temporary, 'wb') as file:
    np.save(file, array)
