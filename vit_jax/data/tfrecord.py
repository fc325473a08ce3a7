"""TFRecord files read in any order: an index of their frames, made once and kept in the user's cache.

A frame is u64 length, u32 CRC, data, u32 CRC (little endian). The checksums are not verified.
"""
from __future__ import annotations

import hashlib
import os
import pathlib
import struct
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from vit_jax.core.types import HostArray, UserError

HEADER_BYTES, FOOTER_BYTES = 12, 4


class Records:
  """The records of several files, one file after the other. Pickles small; safe for threads."""

  def __init__(self, paths: Sequence[str], *, cache: pathlib.Path | None = None) -> None:
    """Indexes `paths`; `cache` is the folder for indexes, None for the user's."""
    self._paths = [os.path.abspath(p) for p in paths]
    self._cache = cache or cache_folder()
    self._start()

  def __len__(self) -> int:
    return len(self._index)

  def __getitem__(self, number: int) -> bytes:
    file, offset, size = self._index[number].tolist()
    return os.pread(self._descriptor(file), size, offset)

  def __getstate__(self) -> dict[str, Any]:
    return {'_paths': self._paths, '_cache': self._cache}

  def __setstate__(self, state: dict[str, Any]) -> None:
    self.__dict__.update(state)
    self._start()

  def __del__(self) -> None:
    for descriptor in getattr(self, '_open', {}).values():
      os.close(descriptor)

  def _start(self) -> None:
    self._open: dict[int, int] = {}
    self._lock = threading.Lock()
    self._index = load_index(self._paths, self._cache)

  def _descriptor(self, file: int) -> int:
    with self._lock:
      if file not in self._open:
        self._open[file] = os.open(self._paths[file], os.O_RDONLY)
      return self._open[file]


def cache_folder() -> pathlib.Path:
  """Where indexes are kept: below $XDG_CACHE_HOME, or ~/.cache."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'vit_jax' / 'tfrecord'


def load_index(paths: Sequence[str], cache: pathlib.Path) -> HostArray:
  """File number, first byte and size `[S, 3] i64` of each record; from the cache where the files are the same."""
  stats = [os.stat(p) for p in paths]
  key = repr([(p, s.st_size, s.st_mtime_ns) for p, s in zip(paths, stats, strict=True)])
  kept = cache / f'{hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]}.npy'
  if kept.exists():
    return np.load(kept, mmap_mode='r')
  index = np.concatenate([_scan(p, number) for number, p in enumerate(paths)])
  cache.mkdir(parents=True, exist_ok=True)
  part = kept.with_name(f'{kept.stem}.{os.getpid()}.npy')
  np.save(part, index)
  part.replace(kept)  # whole or not at all: loader processes may come at the same time
  return index


def _scan(path: str, number: int) -> HostArray:
  """Rows of the index for one file."""
  rows: list[tuple[int, int, int]] = []
  place, end = 0, os.path.getsize(path)
  with open(path, 'rb', buffering=0) as file:
    while place < end:
      header = os.pread(file.fileno(), HEADER_BYTES, place)
      size = struct.unpack('<Q', header[:8])[0] if len(header) == HEADER_BYTES else end
      if place + HEADER_BYTES + size + FOOTER_BYTES > end:
        raise UserError(f'{path} is cut short, or no TFRecord file: record {len(rows)} at byte {place:,} reaches '
                        f'beyond its {end:,} bytes; right would be a whole copy, prepared again')
      rows.append((number, place + HEADER_BYTES, size))
      place += HEADER_BYTES + size + FOOTER_BYTES
  return np.array(rows, np.int64).reshape(-1, 3)
