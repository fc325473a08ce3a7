"""Stores the features of splits in memory for the evaluations of a job, and on disk for later jobs.

  FOLDER/<what>/<weights>/<part>-of-<parts>.{features.npy,rows.npy,json}

<what> is a digest of everything but the weights that features depend on; for each, only the newest weights are kept.
The JSON file is written last and describes the others with their checksums. Without it, or if a checksum differs, the
features are computed again. Features of other weights than in the folder's name are an error.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.core import archives, documents, files
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import HostArray
from vit_jax.evaluate import embedding_files

log = logging.getLogger('vit_jax.evaluate')

FORMAT = 1
_FEATURES, _ROWS, _INFO = '.features.npy', '.rows.npy', '.json'
_CHUNK_BYTES = 2**24
_NAME = 16  # hexadecimal digits of a digest in a name


class Damaged(Exception):
  """Files of the store differ from what was written."""


class Layout(NamedTuple):
  """The positions of the examples of a split in its table.

  parts: numbers of the parts that this process loads of each batch, of `num_parts` equal ones.
  """
  num_examples: int
  batch_size: int
  num_parts: int
  parts: tuple[int, ...]

  @property
  def size(self) -> int:
    """Rows of a part in one batch."""
    return self.batch_size // self.num_parts

  @property
  def num_rows(self) -> int:
    """Rows of a part in all batches."""
    return -(-self.num_examples // self.batch_size) * self.size

  def examples(self, part: int) -> HostArray:
    """Returns the example of each row of a part, `[R] i64`; numbers from `num_examples` on are padding."""
    rows = np.arange(self.num_rows)
    return rows // self.size * self.batch_size + part * self.size + rows % self.size

  def find(self, examples: HostArray) -> tuple[HostArray, HostArray]:
    """Returns part and row of examples."""
    batch, within = np.divmod(examples, self.batch_size)
    part, row = np.divmod(within, self.size)
    return part, batch * self.size + row


class Rows(NamedTuple):
  """The rows of one part of a split (or of several parts, with an additional leading axis).

  features: `[R, D]` f32.   label, example: `[R]` i32; `example` is the position in the source.
  mask: `[R]` f32, 0 for padding and for images that could not be decoded.
  """
  features: HostArray
  label: HostArray
  example: HostArray
  mask: HostArray


Table = tuple[Rows, ...]
"""This process's parts of a split."""


class Store:
  """Tables of features by identity; with `folder` None they are only in memory. Every process creates one.

  `embedded` are files and folders that `vit-jax embed` wrote: their features are used where everything that features
  depend on is the same.
  """

  def __init__(self, folder: pathlib.Path | None, embedded: Sequence[pathlib.Path] = ()) -> None:
    self._folder = folder
    self._kept: dict[str, tuple[str, Layout, Table]] = {}
    self._embedded = [(path, *embedding_files.open_complete(path)) for path in embedded]

  def find(self, identity: Mapping[str, str], weights: str, layout: Layout) -> Table | None:
    """Returns the table if every process has its part of it, else None.

    Raises:
      UserError: the folder of these weights contains features of other weights.
    """
    what = digest(identity)
    kept = self._kept.get(what)
    if kept is not None and kept[:2] == (weights, layout):
      return kept[2]
    found = self._read_embedded(identity, weights, layout)
    if found is None and self._folder is not None:
      found = self._read(identity, weights, layout)
    if not _all_agree(found is not None):
      return None
    assert found is not None
    self._kept[what] = (weights, layout, found)
    return found

  def make(self, identity: Mapping[str, str], weights: str, layout: Layout, batches: Iterable[Rows]) -> Table:
    """Stores the rows of all batches, `[P, b, …]` each, and returns them as a table."""
    what = digest(identity)
    self._kept.pop(what, None)
    if self._folder is not None and jax.process_index() == 0:
      _remove_others(self._folder / what, keep=weights[:_NAME])
    writers: list[_Writer] = []
    try:
      for number, batch in enumerate(batches):
        if not writers:
          writers = [_Writer(self._path(what, weights, layout, part), layout, batch.features.shape[-1])
                     for part in layout.parts]
        for place, writer in enumerate(writers):
          writer.write(number * layout.size, Rows(*(x[place] for x in batch)))
      info = {'identity': dict(identity), 'weights': weights}
      table = tuple(writer.finish({**info, 'part': part}) for writer, part in zip(writers, layout.parts, strict=True))
    finally:
      for writer in writers:
        writer.close()
    self._kept[what] = (weights, layout, table)
    return table

  def _read_embedded(self, identity: Mapping[str, str], weights: str, layout: Layout) -> Table | None:
    """Reads this process's rows from the first of the embedded files that has them."""
    differing = []
    for path, info, kind in self._embedded:
      other = [name for name in identity if info.get('identity', {}).get(name) != identity[name]]
      if not other and info['features_digest'] == weights and kind.read is not None:
        log.info('Features are read from %s.', path)
        return _table(path, embedding_files.read(path, info, kind), layout, info)
      differing.append(f'{path} ({", ".join(sorted(other)) or "weights"})')
    if differing:
      log.warning('Features are computed for %s examples of %s: expected files of vit-jax embed with the same data, '
                  'images, network and weights, got others in what is named: %s.', f'{layout.num_examples:,}',
                  identity.get('data', '')[:_NAME], '; '.join(differing))
    return None

  def _path(self, what: str, weights: str, layout: Layout, part: int) -> pathlib.Path | None:
    """Returns the path of a part without its suffix."""
    if self._folder is None:
      return None
    return self._folder / what / weights[:_NAME] / f'{part:05d}-of-{layout.num_parts:05d}'

  def _read(self, identity: Mapping[str, str], weights: str, layout: Layout) -> Table | None:
    """Reads this process's rows from disk, even if they were written for other batch sizes or processes."""
    folder = self._folder / digest(identity) / weights[:_NAME] if self._folder else None
    if folder is None or not folder.is_dir():
      return None
    infos = {path: _read_info(path, identity, weights) for path in sorted(folder.glob(f'*{_INFO}'))}
    found = [(Layout(info['num_examples'], info['batch_size'], info['num_parts'], ()), info['part'],
              path.with_suffix('')) for path, info in infos.items() if info]
    try:
      return _open_parts(found, layout)
    except (Damaged, OSError, ValueError, KeyError) as error:
      log.warning('The features in %s are damaged (%s); extracting them again.', folder, error)
      return None


class _Writer:
  """Writes one part, in memory or to a file that is renamed when it is complete."""

  def __init__(self, path: pathlib.Path | None, layout: Layout, width: int) -> None:
    self._path, self._layout = path, layout
    self._other = np.zeros((layout.num_rows, 3), np.int32)
    shape = (layout.num_rows, width)
    if path is None:
      self._features: HostArray = np.zeros(shape, np.float32)
      return
    path.parent.mkdir(parents=True, exist_ok=True)
    self._part = files.temporary_path(path.parent)
    self._features = np.lib.format.open_memmap(self._part, mode='w+', dtype=np.float32, shape=shape)

  def write(self, start: int, rows: Rows) -> None:
    stop = start + len(rows.label)
    self._features[start:stop] = rows.features
    self._other[start:stop] = np.stack([rows.label, rows.example, rows.mask > 0], -1)

  def finish(self, info: Mapping[str, Any]) -> Rows:
    if self._path is None:
      return _rows(self._features, self._other)
    assert isinstance(self._features, np.memmap)
    self._features.flush()
    files.publish_over(self._part, pathlib.Path(f'{self._path}{_FEATURES}'))
    with files.replacing(pathlib.Path(f'{self._path}{_ROWS}')) as part, open(part, 'wb') as file:
      np.save(file, self._other)
    sums = {ending: _checksum(f'{self._path}{ending}') for ending in (_FEATURES, _ROWS)}
    layout = self._layout
    files.replace(pathlib.Path(f'{self._path}{_INFO}'), json.dumps({
        'format': FORMAT, **info, 'num_examples': layout.num_examples, 'batch_size': layout.batch_size,
        'num_parts': layout.num_parts, 'crc32': sums}).encode())
    return _rows(archives.map_npy(f'{self._path}{_FEATURES}'), self._other)

  def close(self) -> None:
    """Removes incomplete files."""
    if self._path is not None:
      self._part.unlink(missing_ok=True)


def digest(identity: Mapping[str, str]) -> str:
  """Returns the digest of an identity."""
  return hashlib.sha256(json.dumps(dict(identity), sort_keys=True).encode()).hexdigest()[:_NAME]


def _rows(features: HostArray, other: HostArray) -> Rows:
  return Rows(features, other[:, 0], other[:, 1], other[:, 2].astype(np.float32))


def _all_agree(said: bool) -> bool:
  """Returns whether the value is true on all processes; computing features needs all of them."""
  if jax.process_count() == 1:
    return said
  return bool(np.all(multihost_utils.process_allgather(np.array(said))))


def _remove_others(folder: pathlib.Path, *, keep: str) -> None:
  """Removes the features of other weights."""
  for other in folder.iterdir() if folder.is_dir() else ():
    if other.name != keep and other.is_dir():
      for ending in (_FEATURES, _ROWS, _INFO):
        for path in other.glob(f'*{ending}'):
          path.unlink()
      with contextlib.suppress(OSError):  # there is something else
        other.rmdir()


def _read_info(path: pathlib.Path, identity: Mapping[str, str], weights: str) -> dict[str, Any]:
  """Returns the content of a JSON file of the store; {} if it is damaged.

  Raises:
    UserError: the file describes other weights or features.
  """
  try:
    info = documents.read(path, advice='The features are extracted again.')
    info.field('format').whole(FORMAT, FORMAT)
    found, given = info.field('weights').text(), info.field('identity').object()
    for name in ('num_examples', 'batch_size', 'num_parts'):
      info.field(name).whole(1)
    info.field('part').whole()
  except (UserError, TemporaryError) as error:
    log.warning('%s', error)
    return {}
  other = [name for name in given if identity.get(name) != given[name]]
  if found != weights:
    raise UserError(f'{path}: expected features of the evaluated weights (digest {weights[:_NAME]}), got those of '
                    f'others ({found[:_NAME]}). Remove {path.parent}, so that they are extracted again.')
  if other:
    raise UserError(f'{path}: expected the features that its folder is named after, got others '
                    f'({", ".join(sorted(other))} differ). Remove {path.parent}, so that they are extracted again.')
  return info.object()


def _open_parts(found: list[tuple[Layout, int, pathlib.Path]], layout: Layout) -> Table | None:
  """Returns the parts of a layout from files with the same or another layout; None if some are missing."""
  same = {part: path for own, part, path in found if own[:3] == layout[:3]}
  if set(layout.parts) <= same.keys():
    return tuple(_open(same[part]) for part in layout.parts)
  for own in dict.fromkeys(own for own, _, _ in found if own.num_examples == layout.num_examples):
    paths = {part: path for one, part, path in found if one == own}
    if len(paths) == own.num_parts:
      opened = [_open(paths[part]) for part in range(own.num_parts)]
      return tuple(_gather(opened, own, layout, part) for part in layout.parts)
  return None


def _gather(opened: list[Rows], own: Layout, layout: Layout, part: int) -> Rows:
  """Returns one part of `layout`, gathered from all parts of the layout `own`."""
  examples = layout.examples(part)
  inside = examples < layout.num_examples
  parts, rows = own.find(np.where(inside, examples, 0))
  gathered = [np.zeros((len(examples), *x.shape[1:]), x.dtype) for x in opened[0]]
  for number, one in enumerate(opened):
    mine = inside & (parts == number)
    for target, source in zip(gathered, one, strict=True):
      target[mine] = source[rows[mine]]
  return Rows(*gathered)


def _table(path: pathlib.Path, blocks: Iterable[embedding_files.Block], layout: Layout,
           info: embedding_files.Info) -> Table:
  """Returns the parts of a layout from examples in any order; those that are missing have mask 0.

  Raises:
    UserError: an example is not one of the source or is there twice, or a value is not finite.
  """
  found = {part: Rows(np.zeros((layout.num_rows, info['shape'][0]), np.float32),
                      np.full(layout.num_rows, -1, np.int32), layout.examples(part).astype(np.int32),
                      np.zeros(layout.num_rows, np.float32))
           for part in layout.parts}
  seen = np.zeros(layout.num_examples, bool)
  for block in blocks:
    inside = (block.id >= 0) & (block.id < layout.num_examples)
    if not inside.all() or seen[block.id].any() or len(np.unique(block.id)) < len(block.id):
      raise UserError(f'{path}: expected ids from 0 to {layout.num_examples - 1:,}, each once, got others. Write the '
                      'features again with vit-jax embed.')
    if not np.isfinite(block.values).all():
      wrong = int(block.id[~np.isfinite(block.values).all(tuple(range(1, block.values.ndim)))][0])
      raise UserError(f'{path}: expected finite features, got NaN or infinity for image {wrong:,}. Write them again '
                      'with vit-jax embed; if they are the same then, the weights give no finite features.')
    seen[block.id] = True
    parts, rows = layout.find(block.id)
    for part, table in found.items():
      mine = parts == part
      table.features[rows[mine]], table.label[rows[mine]] = block.values[mine], block.label[mine]
      table.mask[rows[mine]] = 1.
  if 'num_rows' in info and (num := int(seen.sum())) != info['num_rows']:
    raise UserError(f'{path}: expected {info["num_rows"]:,} rows, got {num:,}. Write the features again with vit-jax '
                    'embed.')
  return tuple(found[part] for part in layout.parts)


def _open(path: pathlib.Path) -> Rows:
  """Reads a part from its files.

  Raises:
    Damaged: the files differ from what was written.
  """
  for ending, wanted in documents.read(f'{path}{_INFO}').field('crc32').object().items():
    if _checksum(f'{path}{ending}') != wanted:
      raise Damaged(f'{path.name}{ending} has another checksum')
  return _rows(archives.map_npy(f'{path}{_FEATURES}'), archives.map_npy(f'{path}{_ROWS}'))


def _checksum(path: str) -> int:
  """Returns the CRC-32 of a file."""
  found = 0
  with open(path, 'rb') as file:
    while chunk := file.read(_CHUNK_BYTES):
      found = zlib.crc32(chunk, found)
  return found
