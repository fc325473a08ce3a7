"""Records of an ArrayRecord file in object storage, read by ranges.

An ArrayRecord file is a Riegeli file: chunks of records, and at its end a chunk with the offset of each chunk. The
offsets are read here; a record is decoded by the package `array_record`, which reads local files only. So each file has
a local one of the same size that has holes in place of all chunks: the end with the offsets is written to it when it is
opened, and for each record its chunk, which becomes a hole again once the record is decoded. The package thus
decompresses and compares the checksum of each record as it does for a file that is completely there.

Format: github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md, and
github.com/google/array_record/blob/main/beam (`layout.proto`).
"""
from __future__ import annotations

import os
import struct
import tempfile
import threading
from typing import Any

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import access, ranges
from vit_jax.data.files.ranges import Range

BLOCK_BYTES, _BLOCK_HEADER, _CHUNK = 2**16, 24, struct.Struct('<5Q')
_MAGIC = 0x71930e704fdae05e  # in the record that has the offset of the last chunk
_TAGS = (0x08, 0x10, 0x18)  # fields of an entry: offset of a chunk, its decoded bytes, its number of records
_BYTES_EACH = 12  # of an entry, at most; usually 6 when compressed
_PLAIN, _ZSTD = 0, ord('z')
# No threads in the reader: they would read ahead from a record, which is useless in a random order.
OPTIONS = 'readahead_buffer_size:0,max_parallelism:0'
BUFFER_BYTES = 32_768
_AGAIN = 'Copy or prepare the dataset again.'


def find_end(path: str, num_records: int, num_bytes: int) -> Range:
  """Returns the range at the end of a file that most likely has the offsets of its chunks."""
  size = min(num_bytes, 2 * BLOCK_BYTES + _BYTES_EACH * num_records)
  return Range(path, num_bytes - size, size)


class RemoteRecords:
  """An ArrayRecord file in object storage. Safe for threads.

  Raises:
    OSError, TemporaryError, UserError: as `ranges.read`; also, the file has another size or number of records, or
      offsets that cannot be read.
  """

  NUM_FILES = 2
  """Open files of each: the local one, for writing and by the reader."""

  def __init__(self, path: str, num_records: int, num_bytes: int) -> None:
    from array_record.python import array_record_module
    self._path, self._num_bytes, self._lock = path, num_bytes, threading.Lock()
    end = _End(path, find_end(path, num_records, num_bytes))
    chunks, firsts = end.offsets()
    if (found := int(firsts[-1])) != num_records:
      raise UserError(f'{path}: expected {num_records:,} records, got {found:,}. {_AGAIN}')
    self._chunks = chunks.astype(np.uint32 if num_bytes < 2**32 else np.int64)  # they stay in memory
    self._firsts = None if len(firsts) == num_records + 1 else firsts  # None = a chunk for each record
    self._file, name = tempfile.mkstemp('.array_record', dir=ranges.settings().cache_dir or None)
    try:
      os.ftruncate(self._file, num_bytes)
      os.pwrite(self._file, end.content, end.part.offset)
      self._reader = array_record_module.ArrayRecordReader(name, options=OPTIONS, file_reader_buffer_size=BUFFER_BYTES)
    except BaseException as error:
      os.close(self._file)
      if system_error := access.find_system_error(str(error)):
        raise system_error from error
      raise
    finally:
      os.unlink(name)  # the open files remain until they are closed, or the process ends

  def part(self, place: int) -> Range:
    """Returns the range of the chunk of a record."""
    chunk = place if self._firsts is None else int(np.searchsorted(self._firsts, place, side='right')) - 1
    first, last = int(self._chunks[chunk]), int(self._chunks[chunk + 1])
    return Range(self._path, first, last - first)

  def read(self, place: int) -> bytes:
    """Returns a record.

    Raises:
      RuntimeError: it is damaged.
      OSError, TemporaryError, UserError: as `ranges.read`.
    """
    part = self.part(place)
    content = ranges.read(*part)
    with self._lock:
      try:
        os.pwrite(self._file, content, part.offset)
        found: bytes = self._reader.read(place, place + 1)[0]
      finally:
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, self._num_bytes)
    return found

  def close(self) -> None:
    """Closes the local file."""
    self._reader.close()
    os.close(self._file)


class _End:
  """The end of a file, which has the offsets of its chunks."""

  def __init__(self, path: str, part: Range) -> None:
    self.part, self.content = part, ranges.read(*part)
    self._path = path
    self._last = part.offset + part.size - BLOCK_BYTES
    if len(self.content) < part.size or part.offset + part.size < 2 * BLOCK_BYTES or self._last % BLOCK_BYTES:
      raise self._error('another size')

  def offsets(self) -> tuple[HostArray, HostArray]:
    """Returns the first byte of each chunk, `[C + 1] i64`, and its first record, `[C + 1] i64`; ends come last."""
    sizes, values = self._chunk(self._last)
    record = _varints(values[:_varints(sizes)[0]]).tolist()
    if len(record) != 4 or record[::2] != [8, 16] or record[3] != _MAGIC or not 0 < record[1] < self._last:
      raise self._error('no place of the offsets of its records')
    footer = record[1]
    if footer < self.part.offset:
      more = self.part.offset - footer
      self.content = ranges.read(self._path, footer, more) + self.content
      self.part = Range(self._path, footer, self.part.size + more)
    sizes, values = self._chunk(footer)
    rows = _varints(values[_varints(sizes)[0]:]).reshape(-1, 2 * len(_TAGS))
    if (rows[:, ::2] != _TAGS).any():
      raise self._error('offsets of another form')
    return np.append(rows[:, 1], footer), np.concatenate([[0], np.cumsum(rows[:, 5])])

  def _chunk(self, place: int) -> tuple[bytes, bytes]:
    """Returns the sizes of the records of a chunk, as varints, and the records."""
    _, size, _, kind, _ = _CHUNK.unpack(self._logical(place, _CHUNK.size))
    data = self._logical(place, _CHUNK.size + size)[_CHUNK.size:]
    if kind & 0xFF != ord('r') or data[0] not in (_PLAIN, _ZSTD):
      raise self._error('offsets that are not compressed by zstd, or not at all, as ArrayRecord does by default')
    length = int(_varints(data[1:12])[0])
    start = 2 + int(np.argmax(np.frombuffer(data[1:12], np.uint8) < 128))
    sizes, values = data[start:start + length], data[start + length:]
    return (_inflate(sizes), _inflate(values)) if data[0] == _ZSTD else (sizes, values)

  def _logical(self, place: int, size: int) -> bytes:
    """Returns bytes of the file from a place without the headers of blocks in between."""
    found = []
    while size:
      place += _BLOCK_HEADER if place % BLOCK_BYTES == 0 else 0
      num = min(size, BLOCK_BYTES - place % BLOCK_BYTES)
      part = self.content[place - self.part.offset:place - self.part.offset + num]
      if len(part) < num:
        raise self._error('a truncated end')
      found.append(part)
      place, size = place + num, size - num
    return b''.join(found)

  def _error(self, got: str) -> UserError:
    return UserError(f'{self._path}: expected an ArrayRecord file of {self.part.offset + self.part.size:,} bytes, got '
                     f'{got}. {_AGAIN}')


def _varints(data: bytes) -> HostArray:
  """Returns the numbers in a text of varints, `[N] i64`."""
  found = np.frombuffer(data, np.uint8)
  ends = np.flatnonzero(found < 128)
  starts = np.append(0, ends[:-1] + 1)
  found = found[:ends[-1] + 1] if len(ends) else found[:0]
  shifts = 7 * (np.arange(len(found)) - np.repeat(starts[:len(ends)], ends - starts[:len(ends)] + 1))
  if not len(ends):
    return np.zeros(0, np.int64)
  return np.add.reduceat((found & 127).astype(np.uint64) << shifts.astype(np.uint64), starts).astype(np.int64)


def _inflate(data: bytes) -> bytes:
  """Returns the content of a zstd frame with its decoded size before it, as Riegeli writes it.

  TensorStore, which Orbax needs, has a decoder: that of a Zarr array of one chunk.
  """
  import tensorstore
  num = int(_varints(data[:10])[0])
  start = 1 + int(np.argmax(np.frombuffer(data[:10], np.uint8) < 128))
  context = tensorstore.Context()
  tensorstore.KvStore.open('memory://', context=context).result()['0'] = data[start:]
  spec: dict[str, Any] = {
      'driver': 'zarr', 'kvstore': 'memory://', 'metadata': {
          'zarr_format': 2, 'shape': [num], 'chunks': [num], 'dtype': '|u1', 'order': 'C', 'fill_value': None,
          'filters': None, 'compressor': {'id': 'zstd', 'level': 1}}}
  found = tensorstore.open(spec, open=True, assume_metadata=True, context=context).result().read().result()
  return bytes(found.tobytes())
