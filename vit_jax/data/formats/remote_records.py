"""Records of an ArrayRecord file in object storage, read by spans.

`array_record.py` reads the end of a file (`find_end`), opens it (`RemoteRecords`), reads the span of each record
(`RemoteRecords.span`), and passes its bytes to `RemoteRecords.decode`.

An ArrayRecord file is a Riegeli file: chunks of records, and at its end a chunk with the offset of each chunk. The
offsets are decoded here. Records are decoded by the package `array_record`, which reads local files only. So each
object has a local file of the same size with holes in place of all chunks. The end with the offsets is written to it
when the object is opened, and the chunk of a record while the record is decoded; then the chunk becomes a hole again.
The package thus decompresses each record and compares its checksum as in a complete local file.

Format: github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md, and
github.com/google/array_record/blob/main/beam (`layout.proto`).
"""
from __future__ import annotations

import os
import struct
import tempfile
import threading

import numpy as np

from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import storage

# No threads in the package's reader: bytes that they read ahead are useless in a random order.
READER = {'options': 'readahead_buffer_size:0,max_parallelism:0', 'file_reader_buffer_size': 32_768}
_BLOCK, _BLOCK_HEADER, _CHUNK = 2**16, 24, struct.Struct('<5Q')  # bytes, and the header of a chunk
_MAGIC, _MOST_BYTES = 0x71930e704fdae05e, 2**31  # of the record with the place of the last chunk; of all offsets
_TAGS = (0x08, 0x10, 0x18)  # fields of an entry: offset of a chunk, its decoded bytes, its number of records
_BYTES_EACH, _PLAIN, _ZSTD = 12, 0, ord('z')  # bytes of an entry, at most; usually 6 when compressed
_AGAIN = 'Copy or prepare the dataset again.'


def find_end(path: str, num_records: int, num_bytes: int) -> storage.Span:
  """Returns the span at the end of a file that most likely has the offsets of all chunks."""
  size = min(num_bytes, 2 * _BLOCK + _BYTES_EACH * num_records)
  return storage.Span(path, num_bytes - size, size)


class RemoteRecords:
  """An ArrayRecord file in object storage. Safe for threads."""
  NUM_FILES = 2  # open ones of each: the local file, for writing and by the reader

  def __init__(self, path: str, num_records: int, num_bytes: int, end: bytes = b'') -> None:
    """Opens it; `end` has the bytes of `find_end`, if they were read.

    Raises as `storage.read_many`; and UserError if the file has another size, number of records or form.
    """
    from array_record.python import array_record_module
    self._path, self._num_bytes, self._lock = path, num_bytes, threading.Lock()
    span = find_end(path, num_records, num_bytes)
    end = end or storage.read(*span)
    if len(end) < span.size or num_bytes < 2 * _BLOCK or num_bytes % _BLOCK:
      raise self._error('another size')
    chunks, firsts, end = self._offsets(end)
    if (found := int(firsts[-1])) != num_records:
      raise UserError(f'{path}: expected {num_records:,} records, got {found:,}. {_AGAIN}')
    self._chunks = chunks.astype(np.uint32 if num_bytes < 2**32 else np.int64)  # they stay in memory
    self._firsts = None if len(firsts) == num_records + 1 else firsts  # None = a chunk for each record
    self._local_file, name = tempfile.mkstemp('.array_record')
    try:
      os.ftruncate(self._local_file, num_bytes)
      os.pwrite(self._local_file, end, num_bytes - len(end))
      self._reader = array_record_module.ArrayRecordReader(name, **READER)
    except BaseException as error:
      os.close(self._local_file)
      raise (failures.system_error(error) or error) from None
    finally:
      os.unlink(name)  # the open files remain until they are closed, or the process ends

  def span(self, number: int) -> storage.Span:
    """Returns the span of the chunk of a record."""
    chunk = number if self._firsts is None else int(np.searchsorted(self._firsts, number, side='right')) - 1
    start, end = int(self._chunks[chunk]), int(self._chunks[chunk + 1])
    return storage.Span(self._path, start, end - start)

  def decode(self, number: int, content: bytes) -> bytes:
    """Returns a record, given the bytes of its `span`. Raises RuntimeError if it is damaged."""
    with self._lock:
      try:
        os.pwrite(self._local_file, content, self.span(number).offset)
        record: bytes = self._reader.read(number, number + 1)[0]
      finally:
        os.ftruncate(self._local_file, 0)
        os.ftruncate(self._local_file, self._num_bytes)
    return record

  def close(self) -> None:
    """Closes the local file, which is then removed."""
    self._reader.close()
    os.close(self._local_file)

  def _offsets(self, end: bytes) -> tuple[HostArray, HostArray, bytes]:
    """Returns the first byte and the first record of each of C chunks and of their end, `[C + 1] i64`.

    Also returns the end of the file that has both, which may be longer than the argument.
    """
    sizes, values = self._chunk(end, last := self._num_bytes - _BLOCK)
    record = _varints(values[:sizes[0]]).tolist()
    if len(record) != 4 or record[::2] != [8, 16] or record[3] != _MAGIC or not 0 < record[1] < last:
      raise self._error('none that has the offsets of its records')
    if (missing := self._num_bytes - len(end) - record[1]) > 0:
      end = storage.read(self._path, record[1], missing) + end
    sizes, values = self._chunk(end, record[1])
    rows = _varints(values[sizes[0]:])
    if len(rows) % 6 or (rows[::2] != np.tile(_TAGS, len(rows) // 6)).any():
      raise self._error('offsets of another form')
    return np.append(rows[1::6], record[1]), np.concatenate([[0], np.cumsum(rows[5::6])]), end

  def _chunk(self, end: bytes, offset: int) -> tuple[HostArray, bytes]:
    """Returns the sizes of the records of the chunk at an offset, `[N] i64`, and the records one after the other."""
    offsets = np.arange(self._num_bytes - len(end), self._num_bytes)
    is_inside = (offsets >= offset) & (offsets % _BLOCK >= _BLOCK_HEADER)  # without the headers of blocks
    content = np.frombuffer(end, np.uint8)[is_inside].tobytes()
    size, kind = _CHUNK.unpack(content[:_CHUNK.size])[1::2] if len(content) > _CHUNK.size else (0, 0)
    data = content[_CHUNK.size:_CHUNK.size + size]
    if len(data) < max(1, size):
      raise self._error('a truncated end')
    if kind & 0xFF != ord('r') or data[0] not in (_PLAIN, _ZSTD):
      raise self._error('offsets that are not compressed by zstd, or not at all, as ArrayRecord does by default')
    length, start = _varint(data[1:])
    sizes, values = data[1 + start:1 + start + length], data[1 + start + length:]
    try:
      sizes, values = (sizes, values) if data[0] == _PLAIN else (_inflate(sizes), _inflate(values))
      return _varints(sizes + b'\0'), values
    except (OSError, ValueError) as error:
      raise self._error('damaged offsets') from error

  def _error(self, got: str) -> UserError:
    return UserError(f'{self._path}: expected an ArrayRecord file of {self._num_bytes:,} bytes, got {got}. {_AGAIN}')


def _inflate(data: bytes) -> bytes:
  """Returns the content of a zstd frame with its decoded size before it. Raises OSError or ValueError if damaged."""
  import pyarrow as pa
  num, start = _varint(data)
  return bytes(pa.decompress(data[start:], min(num, _MOST_BYTES), codec='zstd', asbytes=True))


def _varint(data: bytes) -> tuple[int, int]:
  """Returns the first of consecutive varints, and how many bytes it has."""
  num = 1 + int(np.argmax(np.frombuffer(data[:10] + b'\0', np.uint8) < 128))
  return int(_varints(data[:num] + b'\0')[0]), num


def _varints(data: bytes) -> HostArray:
  """Returns the numbers of consecutive varints, `[N] i64`."""
  values = np.frombuffer(data, np.uint8)
  if not len(ends := np.flatnonzero(values < 128)):
    return np.zeros(0, np.int64)
  starts, values = np.append(0, ends[:-1] + 1), values[:ends[-1] + 1]
  shifts = 7 * (np.arange(len(values)) - np.repeat(starts, ends - starts + 1))
  return np.add.reduceat((values & 127).astype(np.uint64) << shifts.astype(np.uint64), starts).astype(np.int64)
