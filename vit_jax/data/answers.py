"""The predictions of a teacher on disk (its answers): the most likely classes at each position of an image.

`jobs/teacher_labels.py` calls `write`. Later, `open_logits` opens the answers for token labeling, which has a grid of
positions for each image (a label map), and `formats/pseudo.py` opens those for Noisy Student, which has one position.
`loader.py` calls `Extra` to add answers to batches. This module knows neither the teacher nor the objective.

A directory has `info.json` and, for every `per_part` examples in the order of the source, `classes-00000.npy
[n, h, w, k]` (u16, or u32 for more classes: class ids are exact) and `scores-00000.npy [n, h, w, k]` (f16, logits or
probabilities). Position (i, j) covers the part [i / h, (i + 1) / h] x [j / w, (j + 1) / w] of the stored image, for any
shape. The directory is written part by part (`files.Unfinished`) and renamed when it is complete, so that the same
command resumes after a kill.
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
PER_PART = 16_384
_MOST_POSITIONS, _MOST_TOP = 2**16, 1_000  # of a map; 2**16 are those of a patch of 4 px in 1,024 px
_MOST_PARTS = 100_000
_AGAIN = 'The file is damaged: copy it again, or write the maps again.'
LOGITS, PROBABILITIES = 'logits', 'probabilities'
CERTAIN = 30.  # logit of a class that is certain: among 1,000 with logit 0 its probability is 1 - 1e-10


class Info(NamedTuple):
  """The content of `info.json`.

  source, digest, num_examples: name, digest and size of the source.
  grid: rows and columns of the positions of an image.
  top: number of classes stored at each position, k.
  num_classes: of the teacher.
  per_part: examples of one file.
  made: describes the teacher and its settings.
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


class Answers:
  """The answers in a directory, memory-mapped."""

  def __init__(self, folder: pathlib.Path, rules: Rules = OWN) -> None:
    """Raises UserError if the directory has no maps, is incomplete, or has links to files outside of it."""
    self.folder, self.rules, self.info = folder, rules, read_info(folder)
    starts = range(0, self.info.num_examples, self.info.per_part)
    shapes = [(min(self.info.per_part, self.info.num_examples - start), *self.info.grid, self.info.top)
              for start in starts[:_MOST_PARTS + 1]]
    if len(starts) > _MOST_PARTS:
      raise UserError(f'{folder / INFO}: expected at most {_MOST_PARTS:,} parts, got {len(starts):,}. {_AGAIN}')
    for kind, i in itertools.product(('classes', 'scores'), range(len(starts))):
      user_files.check_inside(str(_file(folder, kind, i)), str(folder), rules)
    self._parts = [(_load(_file(folder, 'classes', i), shape, 'u'), _load(_file(folder, 'scores', i), shape, 'f'))
                   for i, shape in enumerate(shapes)]

  def extra(self) -> Extra:
    """Returns what adds the answers to batches of the source that they are for."""
    return Extra(self)

  def read(self, indexes: HostArray) -> tuple[HostArray, HostArray]:
    """Returns `token_labels [B, h * w, k] i32` and `token_scores [B, h * w, k] f32` of examples `indexes [B]`."""
    shape = (len(indexes), self.info.grid[0] * self.info.grid[1], self.info.top)
    labels, scores = np.empty(shape, np.int32), np.empty(shape, np.float32)
    for row, index in enumerate(indexes.tolist()):
      part, place = divmod(index, self.info.per_part)
      classes, weights = self._parts[part]
      labels[row], scores[row] = classes[place].reshape(shape[1:]), weights[place].reshape(shape[1:])
    self._check(labels, scores)
    return labels, scores

  def surest(self) -> tuple[HostArray, HostArray]:
    """Returns the most likely class `[S]` of each example at the first position, and its probability `[S] f16`."""
    classes, scores = zip(*((classes[:, 0, 0, 0], weights[:, 0, 0, 0]) for classes, weights in self._parts),
                          strict=True)
    found = np.concatenate(classes), np.concatenate(scores)
    self._check(*found)
    return found

  def _check(self, labels: HostArray, scores: HostArray) -> None:
    """Raises UserError if a class is not one of the network, or a score is not a number."""
    if labels.size and labels.max() >= self.info.num_classes:
      raise UserError(f'{self.folder}: expected classes below {self.info.num_classes:,}, got {labels.max():,}. '
                      f'{_AGAIN}')
    if not np.isfinite(scores).all():
      raise UserError(f'{self.folder}: expected scores that are finite, got others. {_AGAIN}')


class Extra:
  """Adds the teacher's answers to batches: `token_labels [B, h * w, k]` and `token_scores [B, h * w, k]`.

  An image without an answer gets its own class with certainty at every position. These are labeled images beside those
  of the teacher, and images that replace a bad one.
  """

  def __init__(self, answers: Answers, rows: HostArray | None = None) -> None:
    """Takes the answers, and the row of each example of the source in them, `[S]`; -1 = none, None = the same row."""
    self._answers, self._rows = answers, rows

  @property
  def digest(self) -> str:
    """Appended to the digest of the source; '' if the source already depends on the answers."""
    return f' maps={hashlib.sha256(str(self._answers.info).encode()).hexdigest()}' if self._rows is None else ''

  def __call__(self, batch: Batch, positions: HostArray) -> Batch:
    """Returns the batch with its answers."""
    del positions
    info, own = self._answers.info, batch['label'][:, None]
    rows = batch['index'] if self._rows is None else self._rows[batch['index']]
    known = np.flatnonzero((rows >= 0) & ~batch['bad'])
    shape = (len(rows), info.grid[0] * info.grid[1], info.top)
    labels, scores = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    if info.scores == LOGITS:  # a logit of 0 has weight, so the own class fills all places
      labels[:], scores[:, :, 0] = own[..., None], CERTAIN
    else:
      labels[:, :, 0], scores[:, :, 0] = own, 1.
    labels[known], scores[known] = self._answers.read(rows[known])
    return {**batch, 'token_labels': labels, 'token_scores': scores}


def open_logits(path: str, source: Source, *, grid: tuple[int, int], top: int,
                rules: Rules = OWN) -> Answers:
  """Opens the label maps of a source that `objective.maps` names.

  Raises:
    UserError: they are missing, or do not belong to this source and config.
  """
  if not path:
    raise UserError("objective.maps: expected a directory of label maps, got ''. Write one with vit-jax prepare "
                    '--config=CONFIG --weights=TEACHER --to=DIR.')
  maps = Answers(pathlib.Path(user_files.resolve(path, 'objective.maps')), rules)
  check(maps.info, {'digest': source.digest, 'num_examples': len(source), 'num_classes': len(source.class_names),
                    'grid': grid, 'top': top, 'scores': LOGITS}, folder=maps.folder)
  return maps


def read_info(folder: pathlib.Path) -> Info:
  """Returns the content of `folder/info.json`.

  Raises:
    UserError: it is missing, damaged, or of another format.
  """
  path = folder / INFO
  if not path.is_file():
    raise UserError(f'{folder}: expected label maps, got no {INFO}. Write them with vit-jax prepare --config=CONFIG '
                    '--weights=TEACHER --to=DIR.')
  found = documents.read(path, expected='the output of vit-jax prepare', advice=_AGAIN)
  kind = found.optional('format')
  if kind is None or kind.value != FORMAT:
    raise UserError(f'{path}: expected the format {FORMAT!r}, got another one. Write the maps again.')
  grid = [side.whole(1, _MOST_POSITIONS) for side in found.field('grid').items()]
  if len(grid) != 2 or grid[0] * grid[1] > _MOST_POSITIONS:
    raise found.field('grid').error(f'two sides of a grid of at most {_MOST_POSITIONS:,} positions')
  num_classes, scores = found.field('num_classes').whole(1, 2**31 - 1), found.field('scores')
  if scores.value not in (LOGITS, PROBABILITIES):
    raise scores.error(f'{LOGITS} or {PROBABILITIES}')
  made = found.field('made')
  return Info(found.field('source').text(), found.field('digest').text(), found.field('num_examples').whole(1),
              (grid[0], grid[1]), found.field('top').whole(1, min(num_classes, _MOST_TOP)), num_classes,
              found.field('per_part').whole(1), made.object(), scores.value)


def write(folder: pathlib.Path, info: Info, compute: Callable[[range], tuple[HostArray, HostArray]], *,
          share: tuple[int, int] = (0, 1), meet: Callable[[str], None] = lambda place: None) -> bool:
  """Writes the maps of a source. Several processes that share the folder may each compute some of the parts.

  Args:
    folder: the directory to write.
    info: the content of its `info.json`.
    compute: maps a range of examples to `classes [n, h, w, k]` and `scores [n, h, w, k]`.
    share: index of this process, and the number of processes.
    meet: a barrier, which returns when all processes have called it with this name.

  Returns:
    False if the same maps exist already.

  Raises:
    UserError: the folder has other content.
  """
  plan = json.dumps({'format': FORMAT, **info._asdict()}, indent=1)
  if not files.is_new(folder):
    if not (folder / INFO).is_file() or (folder / INFO).read_text() != plan:
      raise UserError(f'--to={folder}: expected a new folder, got one with other content. Choose another folder.')
    return False
  meet('label maps seen')
  starts = range(0, info.num_examples, info.per_part)
  names = {_file(folder, kind, number).name for kind in ('classes', 'scores') for number in range(len(starts))}
  unfinished = files.Unfinished(folder, plan, names | {INFO})
  with contextlib.nullcontext(unfinished.folder) if share[0] else unfinished.open() as part:
    meet('label maps begun')
    for number, start in enumerate(starts):
      if number % share[1] != share[0] or _file(part, 'scores', number).is_file():  # the scores are written last
        continue
      classes, scores = compute(range(start, min(start + info.per_part, info.num_examples)))
      kind = np.uint16 if info.num_classes <= 2**16 else np.uint32
      _save(_file(part, 'classes', number), classes.astype(kind))
      _save(_file(part, 'scores', number), scores.astype(np.float16))
    meet('label maps computed')
    if not share[0]:
      files.replace(part / INFO, plan.encode())
      unfinished.complete(unfinished.names)
  meet('label maps whole')
  return True


def check(info: Info, wanted: Mapping[str, Any], *, folder: pathlib.Path) -> None:
  """Raises UserError with all fields that differ from `wanted`."""
  wrong = [f'{name} {value}, got {getattr(info, name)}' for name, value in wanted.items()
           if getattr(info, name) != value]
  if wrong:
    raise UserError(f'{folder}: expected label maps with {"; ".join(wrong)}. Write the maps again with this config.')


def _file(folder: pathlib.Path, kind: str, number: int) -> pathlib.Path:
  return folder / f'{kind}-{number:05d}.npy'


def _load(path: pathlib.Path, shape: tuple[int, ...], kind: str) -> HostArray:
  """Returns the memory map of an array of this shape; `kind` is `u` or `f`, as NumPy has it."""
  what = f'{path}: expected an array of shape {shape}'
  try:
    found = archives.map_npy(path)
  except OSError as error:
    raise failures.unreadable(error, str(path)) from None
  except ValueError:
    raise UserError(f'{what}, got a damaged file. {_AGAIN}') from None
  if found.shape != shape or found.dtype.kind != kind:
    raise UserError(f'{what}, got {"another file" if found.shape == (0,) else f"{found.shape} of {found.dtype}"}. '
                    f'{_AGAIN}')
  return found


def _save(path: pathlib.Path, array: HostArray) -> None:
  with files.replacing(path) as half, open(half, 'wb') as file:
    np.save(file, array)
