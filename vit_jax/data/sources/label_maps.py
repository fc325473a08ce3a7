"""Label maps on disk: for each image of a source the most likely classes at each position, and their scores.

A directory holds `info.json` and, for every so many examples in the order of the source, `classes-00000.npy
[n, h, w, k]` (u16, or u32 for more classes: class ids are exact) and `scores-00000.npy [n, h, w, k]` (f16, logits or
probabilities). Position (i, j) covers the part [i / h, (i + 1) / h] x [j / w, (j + 1) / w] of the stored picture,
whatever its shape. Made in `DIR.part` part by part, and renamed when whole: the same command goes on after a kill.
"""
from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.sources import system_errors

FORMAT = 'vit_jax label maps 1'
INFO = 'info.json'
PER_PART = 16_384
LOGITS, PROBABILITIES = 'logits', 'probabilities'


class Info(NamedTuple):
  """What a directory holds. `digest` is that of the source; `made` says with what teacher, how.

  `scores` is `LOGITS` or `PROBABILITIES`; directories of former versions, which do not say, hold probabilities.
  """
  source: str
  digest: str
  num_examples: int
  grid: tuple[int, int]
  top: int
  num_classes: int
  per_part: int
  made: dict[str, Any]
  scores: str = PROBABILITIES


class LabelMaps:
  """The maps of a directory, read where they lie."""

  def __init__(self, folder: pathlib.Path):
    """Raises UserError if it is none, or not whole."""
    self.folder, self.info = folder, read_info(folder)
    count = -(-self.info.num_examples // self.info.per_part)
    try:
      self._parts = [tuple(np.load(_file(folder, kind, i), mmap_mode='r') for kind in ('classes', 'scores'))
                     for i in range(count)]
    except (OSError, ValueError) as error:
      raise UserError(f'{folder} is not whole: {error}; want it written again') from None

  def read(self, indexes: HostArray) -> tuple[HostArray, HostArray]:
    """`token_labels [B, h * w, k] i32` and `token_scores [B, h * w, k] f32` of examples `indexes [B]`."""
    shape = (len(indexes), self.info.grid[0] * self.info.grid[1], self.info.top)
    labels, scores = np.empty(shape, np.int32), np.empty(shape, np.float32)
    for row, index in enumerate(indexes.tolist()):
      part, place = divmod(index, self.info.per_part)
      classes, weights = self._parts[part]
      labels[row], scores[row] = classes[place].reshape(shape[1:]), weights[place].reshape(shape[1:])
    return labels, scores

  def surest(self) -> tuple[HostArray, HostArray]:
    """Of all examples, the most likely class `[S]` at the first position, and its probability `[S] f16`."""
    classes, scores = zip(*((classes[:, 0, 0, 0], weights[:, 0, 0, 0]) for classes, weights in self._parts),
                          strict=True)
    return np.concatenate(classes), np.concatenate(scores)


def read_info(folder: pathlib.Path) -> Info:
  """What `folder/info.json` says.

  Raises:
    UserError: it is not there, or of another format.
  """
  path = folder / INFO
  if not path.is_file():
    raise UserError(f'there are no label maps in {folder} (no {INFO}); right would be a directory written by '
                    '--job=prepare --config=CONFIG --weights=TEACHER --to=DIR')
  try:
    saved = json.loads(path.read_text())
    is_known = saved.pop('format', '') == FORMAT
    info = Info(**{**saved, 'grid': tuple(saved['grid'])}) if is_known else None
  except OSError as error:
    raise system_errors.stop(error, str(path)) from error
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
    raise UserError(f'{path}: expected what --job=prepare wrote, got {type(error).__name__}: {error}. It is damaged: '
                    'copy it again, or write the maps again') from error
  if info is None:
    raise UserError(f'{path} is not of format {FORMAT!r}: write the maps again')
  return info


def write(folder: pathlib.Path, info: Info, compute: Callable[[range], tuple[HostArray, HostArray]], *,
          share: tuple[int, int] = (0, 1), meet: Callable[[str], None] = lambda place: None) -> bool:
  """Writes the maps of a source. Several processes that share the folder may each compute some of the parts.

  Args:
    folder: to become the directory.
    info: what it will hold.
    compute: examples to `classes [n, h, w, k]` and `scores [n, h, w, k]`.
    share: number of this process, and how many there are.
    meet: of several processes: returns when all have called it with this name.

  Returns:
    False if the same is there already.

  Raises:
    UserError: something else is there.
  """
  plan = json.dumps({'format': FORMAT, **info._asdict()}, indent=1)
  if folder.is_dir() and any(folder.iterdir()):
    if not (folder / INFO).is_file() or (folder / INFO).read_text() != plan:
      raise UserError(f'--to={folder} holds something else; right would be a folder that is not there yet')
    return False
  meet('label maps seen')
  part = folder.with_name(f'{folder.name}.part')
  if not share[0]:
    _begin(part, plan)
  meet('label maps begun')
  for number, start in enumerate(range(0, info.num_examples, info.per_part)):
    if number % share[1] != share[0] or _file(part, 'scores', number).is_file():  # the last of a part
      continue
    classes, scores = compute(range(start, min(start + info.per_part, info.num_examples)))
    kind = np.uint16 if info.num_classes <= 2**16 else np.uint32
    _save(_file(part, 'classes', number), classes.astype(kind))
    _save(_file(part, 'scores', number), scores.astype(np.float16))
  meet('label maps computed')
  if not share[0]:
    (part / 'plan.json').rename(part / INFO)
    part.rename(folder)
  meet('label maps whole')
  return True


def check(info: Info, wanted: Mapping[str, Any], *, folder: pathlib.Path) -> None:
  """Raises UserError with all that is other than `wanted`, by field."""
  wrong = [f'{name} {getattr(info, name)}, want {value}' for name, value in wanted.items()
           if getattr(info, name) != value]
  if wrong:
    raise UserError(f'The label maps in {folder} are for something else: {"; ".join(wrong)}. Right would be maps made '
                    'with this config.')


def _begin(part: pathlib.Path, plan: str) -> None:
  """Makes `DIR.part`, emptied unless it was begun with the same plan."""
  part.mkdir(parents=True, exist_ok=True)
  path = part / 'plan.json'
  if not path.is_file() or path.read_text() != plan:
    shutil.rmtree(part)
    part.mkdir()
    path.write_text(plan)


def _file(folder: pathlib.Path, kind: str, number: int) -> pathlib.Path:
  return folder / f'{kind}-{number:05d}.npy'


def _save(path: pathlib.Path, array: HostArray) -> None:
  half = path.with_suffix('.half')
  with open(half, 'wb') as file:
    np.save(file, array)
  half.replace(path)
