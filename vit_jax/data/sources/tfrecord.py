"""TFRecord files read in any order: an index of their frames, made once and kept in the user's cache.

A frame is u64 length, u32 CRC of the length, data, u32 CRC of the data (little endian). Both checksums are compared:
CRC-32C, rotated right by 15 bits, plus a constant.
"""
from __future__ import annotations

import functools
import hashlib
import logging
import os
import pathlib
import struct
from collections.abc import Sequence
from typing import Any

import google_crc32c
import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.sources import open_files, system_errors
from vit_jax.data.sources.tf_example import BadRecord

log = logging.getLogger('vit_jax.data')

HEADER_BYTES, FOOTER_BYTES = 12, 4
_MASK_DELTA = 0xA282EAD8  # of TFRecord files
_LOST = -1                # first byte of a record that cannot be found, as the file is damaged before it


class Records:
  """The records of several files, one file after the other. Pickles small; safe for threads."""

  def __init__(self, paths: Sequence[str], counts: Sequence[int], *, cache: pathlib.Path | None = None) -> None:
    """Indexes `paths`.

    Args:
      paths: of the files.
      counts: how many records each holds.
      cache: the folder for indexes, None for the user's.

    Raises:
      UserError: a file is not there, cannot be read, or holds more records.
    """
    self._paths, self._counts = [os.path.abspath(p) for p in paths], tuple(counts)
    self._cache = cache or cache_folder()
    self._start()

  def __len__(self) -> int:
    return len(self._index)

  def __getitem__(self, number: int) -> bytes:
    """A record.

    Raises:
      BadRecord: it is damaged, or lost.
      OSError: the system does not let its file be read.
    """
    file, offset, size = self._index[number].tolist()
    path = self._paths[file]
    if offset == _LOST:
      raise BadRecord(f'the record is lost: {path} is damaged before it, or cut short')
    with open_files.pool().use(('tfrecord', path), functools.partial(os.open, path, os.O_RDONLY), os.close) as opened:
      frame = os.pread(opened, size + FOOTER_BYTES, offset)
    if len(frame) < size + FOOTER_BYTES or mask(frame[:size]) != frame[size:]:
      raise BadRecord(f'the record at byte {offset:,} of {path} does not have its checksum')
    return frame[:size]

  def __getstate__(self) -> dict[str, Any]:
    return {'_paths': self._paths, '_counts': self._counts, '_cache': self._cache}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._start()

  def _start(self) -> None:
    self._index = load_index(self._paths, self._counts, self._cache)


def mask(data: bytes) -> bytes:
  """The checksum of `data` as a frame holds it, 4 bytes."""
  crc = google_crc32c.value(data)
  return struct.pack('<I', ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def cache_folder() -> pathlib.Path:
  """Where indexes are kept: below $XDG_CACHE_HOME, or ~/.cache."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'vit_jax' / 'tfrecord'


def load_index(paths: Sequence[str], counts: Sequence[int], cache: pathlib.Path) -> HostArray:
  """File number, first byte and size `[S, 3] i64` of each record; from the cache where the files are the same.

  Raises:
    UserError: a file is not there, cannot be read, or holds more records than it should.
  """
  try:
    stats = [os.stat(p) for p in paths]
    key = repr([(p, n, s.st_size, s.st_mtime_ns) for p, n, s in zip(paths, counts, stats, strict=True)])
    kept = cache / f'{hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]}.npy'
    if kept.exists():
      return np.load(kept, mmap_mode='r')
    index = np.concatenate([_scan(p, number, count) for number, (p, count) in enumerate(
        zip(paths, counts, strict=True))])
  except OSError as error:
    raise system_errors.stop(error, f'the TFRecord file {error.filename}') from error
  cache.mkdir(parents=True, exist_ok=True)
  part = kept.with_name(f'{kept.stem}.{os.getpid()}.npy')
  np.save(part, index)
  part.replace(kept)  # whole or not at all: loader processes may come at the same time
  return index


def _scan(path: str, number: int, count: int) -> HostArray:
  """`count` rows of the index for one file; records that cannot be found are marked."""
  rows: list[tuple[int, int, int]] = []
  place, end = 0, os.path.getsize(path)
  with open(path, 'rb', buffering=0) as file:
    while place < end:
      header = os.pread(file.fileno(), HEADER_BYTES, place)
      is_whole = len(header) == HEADER_BYTES and mask(header[:8]) == header[8:]
      size = struct.unpack('<Q', header[:8])[0] if is_whole else end
      if place + HEADER_BYTES + size + FOOTER_BYTES > end:
        lost = max(0, count - len(rows))
        log.warning('%s is damaged at byte %s of %s: %s of its %s records are lost and count as bad images. Copy it '
                    'again, or prepare the set again.', path, f'{place:,}', f'{end:,}', f'{lost:,}', f'{count:,}')
        break
      rows.append((number, place + HEADER_BYTES, size))
      place += HEADER_BYTES + size + FOOTER_BYTES
  if len(rows) > count:
    raise UserError(f'{path}: expected {count:,} records, as its dataset_info.json says, got {len(rows):,}. Copy or '
                    'prepare the set again')
  return np.array(rows + [(number, _LOST, 0)] * (count - len(rows)), np.int64).reshape(-1, 3)
