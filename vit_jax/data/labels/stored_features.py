"""Features of a teacher on disk, for each crop of the first passes of a run over its images.

The crop of a row is a function of the seed and of its position in the stream of training examples
(`pipeline/order.py`). A directory has `info.json` and, for every `PER_PART` positions, `pooled-00000.npy [n, D]` and
`patches-00000.npy [n, N, D]` (f16), and `sums-00000.npy [n]` (u32, the CRC of the pixels of each crop). So a run that
has other crops than those that the teacher saw is refused, whatever the reason. Training that is longer repeats the
stored positions.

The directory is written part by part as `DIR.part`, and renamed when complete: after a kill, the same command resumes.
"""
from __future__ import annotations

import json
import pathlib
import shutil
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, HostArray
from vit_jax.data.files import json_fields

FORMAT = 'vit_jax features 1'
INFO = 'info.json'
POOLED, PATCHES = 'teacher_pooled', 'teacher_patches'
"""Names of the features in batches."""
FILES = {POOLED: 'pooled', PATCHES: 'patches'}
SUMS = 'sums'
PER_PART = 8_192
_MOST = 2**31 - 1
_AGAIN = 'Write the features again with vit-jax prepare --config=CONFIG --weights=TEACHER --to=DIR.'


class Info(NamedTuple):
  """Content of a directory: rows, width of features, patches of each row (0 = only pooled features), and the teacher.

  `made` says of which images and by which teacher; it is for people.
  """
  num_rows: int
  width: int
  num_patches: int
  made: dict[str, Any]

  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns the shape of the features of a row, by name."""
    found: dict[str, tuple[int, ...]] = {POOLED: (self.width,)}
    return found | ({PATCHES: (self.num_patches, self.width)} if self.num_patches else {})


def read_info(folder: pathlib.Path) -> Info:
  """Returns the content of `folder/info.json`.

  Raises:
    UserError: it is missing, damaged, or of another format.
  """
  path = folder / INFO
  if not path.is_file():
    raise UserError(f'objective.features: expected a directory of features, got {folder}, which has no {INFO}. '
                    f'{_AGAIN}')
  found = json_fields.read(path, expected='the output of vit-jax prepare', advice=_AGAIN)
  kind = found.optional('format')
  if kind is None or kind.value != FORMAT:
    raise UserError(f'{path}: expected the format {FORMAT!r}, got another one. {_AGAIN}')
  return Info(found.field('num_rows').whole(1, _MOST), found.field('width').whole(1, _MOST),
              found.field('num_patches').whole(0, _MOST), found.field('made').object())


class StoredFeatures:
  """The features of a directory, memory-mapped, as labels that a loader adds to its batches."""

  def __init__(self, folder: pathlib.Path, names: Sequence[str]) -> None:
    """Raises UserError if the directory does not have the features of these names, or a file is damaged."""
    self.folder, self.info = folder, read_info(folder)
    self.digest = f' features={zlib.crc32(json.dumps(self.info._asdict(), sort_keys=True).encode()):08x}'
    shapes = self.info.shapes()
    if PATCHES in names and PATCHES not in shapes:
      raise UserError(f'objective.patch_weight: expected 0, as {folder} has no features of patches, got more. Set it '
                      'to 0, or write the features again with this config.')
    self._parts = []
    for start in range(0, self.info.num_rows, PER_PART):
      num = min(PER_PART, self.info.num_rows - start)
      part = {name: _open(folder, FILES[name], start, (num, *shapes[name]), np.float16) for name in names}
      self._parts.append(part | {SUMS: _open(folder, SUMS, start, (num,), np.uint32)})

  def add(self, batch: Batch, positions: HostArray) -> Batch:
    """Returns the batch with the features of the rows at `positions [B]` of the stream.

    Raises:
      UserError: the crops are not those of which the teacher's features are.
    """
    rows = positions % self.info.num_rows
    picked = [self._row(row) for row in rows.tolist()]
    sums = checksums(batch['image'])
    wrong = np.flatnonzero(np.array([one[SUMS] for one in picked], np.uint32) != sums)
    if len(wrong):
      raise UserError(f'objective.features: expected features of the crops of this run, got {self.folder}, whose '
                      f'crops differ in {len(wrong)} of {len(rows)} rows, first at position {int(rows[wrong[0]])}: '
                      f'seed, source, data.recipe or image_px is another one. {_AGAIN}')
    return {**batch, **{name: np.stack([one[name] for one in picked]) for name in picked[0] if name != SUMS}}

  def _row(self, row: int) -> dict[str, HostArray]:
    part, place = divmod(row, PER_PART)
    return {name: x[place] for name, x in self._parts[part].items()}


def checksums(images: HostArray) -> HostArray:
  """Returns the CRC of the bytes of each image `[B, H, W, C]`; `[B]` u32."""
  return np.array([zlib.crc32(np.ascontiguousarray(image).tobytes()) for image in images], np.uint32)


Compute = Callable[[range], dict[str, HostArray]]
"""Maps positions to their features by name, and to `SUMS`."""


def write(folder: pathlib.Path, info: Info, compute: Compute) -> bool:
  """Writes the features of all rows; parts that are there already are kept.

  Returns:
    False if the same features exist already.

  Raises:
    UserError: the folder has other content.
  """
  plan = json.dumps({'format': FORMAT, **info._asdict()}, indent=1)
  if folder.is_dir() and any(folder.iterdir()):
    if not (folder / INFO).is_file() or (folder / INFO).read_text() != plan:
      raise UserError(f'--to={folder}: expected a new folder, got one with other content. Choose another folder.')
    return False
  part = folder.with_name(f'{folder.name}.part')
  started = part / 'plan.json'
  if not started.is_file() or started.read_text() != plan:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    started.write_text(plan)
  for start in range(0, info.num_rows, PER_PART):
    if not _file(part, SUMS, start).is_file():  # written last
      found = compute(range(start, min(start + PER_PART, info.num_rows)))
      for name, x in sorted(found.items(), key=lambda pair: pair[0] == SUMS):
        _save(_file(part, FILES.get(name, name), start), x.astype(np.uint32 if name == SUMS else np.float16))
  started.rename(part / INFO)
  if folder.is_dir():
    folder.rmdir()  # it is empty
  part.rename(folder)
  return True


def _file(folder: pathlib.Path, kind: str, start: int) -> pathlib.Path:
  return folder / f'{kind}-{start // PER_PART:05d}.npy'


def _open(folder: pathlib.Path, kind: str, start: int, shape: tuple[int, ...], dtype: type) -> HostArray:
  path = _file(folder, kind, start)
  what = f'{path}: expected an array of shape {shape}'
  try:
    found: HostArray = np.load(path, mmap_mode='r', allow_pickle=False)
  except (OSError, ValueError, EOFError):
    raise UserError(f'{what}, got a file that is missing or damaged. {_AGAIN}') from None
  if found.shape != shape or found.dtype != dtype:
    raise UserError(f'{what}, got {found.shape} of {found.dtype}. {_AGAIN}')
  return found


def _save(path: pathlib.Path, array: HostArray) -> None:
  half = path.with_suffix('.half')
  with open(half, 'wb') as file:
    np.save(file, array)
  half.replace(path)
