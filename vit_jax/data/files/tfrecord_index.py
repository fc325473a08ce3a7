"""Where the records of TFRecord files are: an index that is made once, in parallel, and kept beside the files.

A frame is u64 length, u32 CRC of the length, data, u32 CRC of the data (little endian). Both checksums are CRC-32C,
rotated right by 15 bits, plus a constant. Imports no jax, as processes that read frames start with this module.
"""
from __future__ import annotations

import logging
import os
import pathlib
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vit_jax.core import lazy
from vit_jax.core.errors import UserError
from vit_jax.data.files import access, kept_index, open_files

if TYPE_CHECKING:
  import google_crc32c

  from vit_jax.core.types import HostArray
else:
  google_crc32c = lazy.Module('google_crc32c')

log = logging.getLogger('vit_jax.data')

HEADER_BYTES, FOOTER_BYTES = 12, 4
_MOST_LOST = 10_000_000  # records of truncated files, whose number their sizes do not bound
LOST = -1  # offset of a record that cannot be found, since the file is damaged before it
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

  Raises:
    UserError: a file is missing, cannot be read, or has more records than expected.
  """
  try:
    most = max(sum(map(os.path.getsize, paths)) // (HEADER_BYTES + FOOTER_BYTES), _MOST_LOST)
    if sum(counts) > most:
      raise UserError(f'{paths[0]}: expected at most {most:,} records in files of this size, got {sum(counts):,} in '
                      'dataset_info.json. Copy or prepare the dataset again.')
    return kept_index.load(
        paths, counts, cache, what='TFRecord',
        make=lambda: _make([File(number, p, n) for number, (p, n) in enumerate(zip(paths, counts, strict=True))]),
        is_valid=lambda kept: kept.shape == (sum(counts), 3) and kept.dtype == np.int64)
  except OSError as error:
    raise access.unreadable(error, f'the TFRecord file {error.filename}') from error


def _make(files: Sequence[File]) -> HostArray:
  """Indexes the files in parallel."""
  num, began_s = sum(file.num_records for file in files), time.monotonic()
  cores = min(open_files.num_threads(0), len(files))
  is_long = num >= PROCESSES_FROM
  if is_long:
    log.info('Indexing %s TFRecord files with %s records, once ...', f'{len(files):,}', f'{num:,}')
  parts = kept_index.in_processes(scan_all, files, cores) if is_long and cores > 1 else None
  found = scan_all(files) if parts is None else [rows for part in parts for rows in part]
  if is_long:
    log.info('Indexed in %.1f s.', time.monotonic() - began_s)
  index = np.concatenate(found)
  return index[np.argsort(index[:, 0], kind='stable')] if parts is not None else index


def scan_all(files: Sequence[File]) -> list[HostArray]:
  """Returns the rows of the index for each file."""
  return kept_index.in_threads(_scan, files)


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
