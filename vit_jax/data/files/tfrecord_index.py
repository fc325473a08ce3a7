"""Where the records of TFRecord files are: an index that is made once, in parallel, and kept beside the files.

A frame is u64 length, u32 CRC of the length, data, u32 CRC of the data (little endian). Both checksums are CRC-32C,
rotated right by 15 bits, plus a constant. Imports no jax, as processes that read frames start with this module.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import logging
import multiprocessing
import os
import pathlib
import struct
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vit_jax.core import lazy
from vit_jax.core.errors import UserError
from vit_jax.data.files import access, open_files

if TYPE_CHECKING:
  import google_crc32c

  from vit_jax.core.types import HostArray
else:
  google_crc32c = lazy.Module('google_crc32c')

log = logging.getLogger('vit_jax.data')

HEADER_BYTES, FOOTER_BYTES = 12, 4
_MOST_LOST = 10_000_000  # records of truncated files, whose number their sizes do not bound
LOST = -1  # offset of a record that cannot be found, since the file is damaged before it
FOLDER = '.vit_jax_index'
"""The folder beside the files in which their index is kept."""
PROCESSES_FROM = 2**21
"""Records from which processes are started. They take one core about 13 s; on two busy cores, a third of them took
longer with processes, which must start, than with threads."""
_MASK_DELTA = 0xA282EAD8  # of TFRecord files


class File(NamedTuple):
  """A file to index: its place among the files of the dataset, its path, and the number of records it should have."""
  number: int
  path: str
  num_records: int


def mask(data: bytes) -> bytes:
  """Returns the checksum of `data` as a frame has it, 4 bytes."""
  crc = google_crc32c.value(data)
  return struct.pack('<I', ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)


def load(paths: Sequence[str], counts: Sequence[int], cache: pathlib.Path) -> HostArray:
  """Returns file number, offset and size `[S, 3] i64` of each record; a kept index if no file has changed.

  The index is kept in `FOLDER` beside the files, so that all hosts that share them share it, or in `cache` where that
  folder cannot be written.

  Raises:
    UserError: a file is missing, cannot be read, or has more records than expected.
  """
  try:
    stats = [os.stat(p) for p in paths]
    most = max(sum(s.st_size for s in stats) // (HEADER_BYTES + FOOTER_BYTES), _MOST_LOST)
    if sum(counts) > most:
      raise UserError(f'{paths[0]}: expected at most {most:,} records in files of this size, got {sum(counts):,} in '
                      'dataset_info.json. Copy or prepare the dataset again.')
    found = list(zip(paths, counts, [(s.st_size, s.st_mtime_ns) for s in stats], strict=True))
    places = [cache / _name([(p, n, *stamp) for p, n, stamp in found])]
    if len(folders := {os.path.dirname(p) for p in paths}) == 1:  # by names, as hosts may mount it at other places
      places.insert(0, pathlib.Path(*folders) / FOLDER / _name([(os.path.basename(p), n, *s) for p, n, s in found]))
    with _lock(cache, places):
      if (kept := _open_kept(places, sum(counts))) is not None:
        return kept
      index = _make([File(number, p, n) for number, (p, n) in enumerate(zip(paths, counts, strict=True))])
      return _keep(index, places)
  except OSError as error:
    raise access.unreadable(error, f'the TFRecord file {error.filename}') from error


def _name(key: object) -> str:
  return f'{hashlib.sha256(repr(key).encode(errors="surrogateescape")).hexdigest()[:32]}.npy'


@contextlib.contextmanager
def _lock(cache: pathlib.Path, places: Sequence[pathlib.Path]) -> Iterator[None]:
  """Lets one process of this user make an index that is not there, while others wait for it."""
  with contextlib.ExitStack() as stack:
    if not any(place.exists() for place in places):
      with contextlib.suppress(OSError):  # the cache cannot be written, or has no locks
        cache.mkdir(parents=True, exist_ok=True)
        fcntl.flock(stack.enter_context(open(cache / '.lock', 'wb')), fcntl.LOCK_EX)
    yield


def _open_kept(places: Sequence[pathlib.Path], num: int) -> HostArray | None:
  for place in places:
    with contextlib.suppress(OSError, ValueError, EOFError):  # missing or damaged
      kept = np.load(place, mmap_mode='r')
      if kept.shape == (num, 3) and kept.dtype == np.int64:
        return kept
  return None


def _keep(index: HostArray, places: Sequence[pathlib.Path]) -> HostArray:
  """Writes the index to the first place that can be written, and returns it as processes share it."""
  for place in places:
    with contextlib.suppress(OSError):
      with access.replacing(place) as file:
        np.save(file, index)
      return np.load(place, mmap_mode='r')
  log.warning('%s: expected to keep the index of TFRecord files there, got no permission or space. It will be made '
              'again at the next start.', places[-1].parent)
  return index


def _make(files: Sequence[File]) -> HostArray:
  """Indexes the files in parallel."""
  num, began_s = sum(file.num_records for file in files), time.monotonic()
  cores = min(open_files.num_threads(0), len(files))
  is_long = num >= PROCESSES_FROM
  if is_long:
    log.info('Indexing %s TFRecord files with %s records, once ...', f'{len(files):,}', f'{num:,}')
  parts = _in_processes(files, cores) if is_long and cores > 1 else None
  found = scan_all(files) if parts is None else [rows for part in parts for rows in part]
  if is_long:
    log.info('Indexed in %.1f s.', time.monotonic() - began_s)
  index = np.concatenate(found)
  return index[np.argsort(index[:, 0], kind='stable')] if parts is not None else index


def _in_processes(files: Sequence[File], cores: int) -> list[list[HostArray]] | None:
  """Returns what `scan_all` returns for each share of the files; None if processes cannot be started."""
  context = multiprocessing.get_context('spawn')
  try:
    with concurrent.futures.ProcessPoolExecutor(cores, mp_context=context) as pool:
      return list(pool.map(scan_all, [files[i::cores] for i in range(cores)]))
  except concurrent.futures.BrokenExecutor as error:  # such as a script that runs at import
    log.debug('no processes to index TFRecord files: %s', error)
    return None


def scan_all(files: Sequence[File]) -> list[HostArray]:
  """Returns the rows of the index for each file. Threads wait for the file system, which may be far away."""
  with concurrent.futures.ThreadPoolExecutor(min(open_files.MAX_THREADS, len(files))) as pool:
    return list(pool.map(_scan, files))


def _scan(file: File) -> HostArray:
  """Returns `count` rows of the index for one file; records that cannot be found are marked."""
  number, path, count = file
  rows: list[tuple[int, int, int]] = []
  place, end = 0, os.path.getsize(path)
  with open(path, 'rb', buffering=0) as opened:
    descriptor = opened.fileno()
    while place < end:
      header = os.pread(descriptor, HEADER_BYTES, place)
      is_complete = len(header) == HEADER_BYTES and mask(header[:8]) == header[8:]
      size = struct.unpack('<Q', header[:8])[0] if is_complete else end
      if place + HEADER_BYTES + size + FOOTER_BYTES > end:
        lost = max(0, count - len(rows))
        log.warning('%s is damaged at byte %s of %s: %s of its %s records are lost and count as bad images. Copy it '
                    'again, or prepare the dataset again.', path, f'{place:,}', f'{end:,}', f'{lost:,}', f'{count:,}')
        break
      rows.append((number, place + HEADER_BYTES, size))
      place += HEADER_BYTES + size + FOOTER_BYTES
  if len(rows) > count:
    raise UserError(f'{path}: expected {count:,} records, as in dataset_info.json, got {len(rows):,}. Copy or '
                    'prepare the dataset again.')
  missing = np.tile(np.array([[number, LOST, 0]], np.int64), (count - len(rows), 1))
  return np.concatenate([np.array(rows, np.int64).reshape(-1, 3), missing])
