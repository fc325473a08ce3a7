"""Reads single records of ArrayRecord files in object storage.

`array_record.py` opens each file as a `RemoteRecords`. For a record it calls `span`, reads these bytes by
`data/storage.py`, and passes them to `decode`. It may read the spans of `find_end` before, for many files at a time.

An ArrayRecord file is a Riegeli file. Each of its blocks of 64 KiB begins with a header of 24 bytes, also in the
middle of a chunk. The file has

  chunks      of one or more records
  footer      a chunk with a record of metadata, and an entry for each chunk: offset, decoded bytes, number of records
  postscript  a chunk in the last block of the file: one record with the offset of the footer, and a magic number

This module decodes the footer. The package `array_record` decodes records, but it reads local files only. So each
object has a local file of the same size with holes in place of its bytes. When the object is opened, its end is written
to this file for the reader of the package. The chunk of a record is written to it before the record is decoded; then
the whole file becomes a hole again. The package thus decompresses each record and compares its checksum as usual.

Format: github.com/google/riegeli/blob/master/doc/riegeli_records_file_format.md, and
github.com/google/array_record/blob/main/beam (`layout.proto`).
"""
from __future__ import annotations

import os
import struct
import tempfile
import threading
from typing import NamedTuple

import numpy as np

from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import storage

# No threads in the package's reader: bytes that they read ahead are useless in a random order.
READER = {'options': 'readahead_buffer_size:0,max_parallelism:0', 'file_reader_buffer_size': 32_768}
_BLOCK_BYTES, _BLOCK_HEADER_BYTES = 2**16, 24
_CHUNK_HEADER = struct.Struct('<5Q')  # hash, bytes of data, hash of data, type (in the lowest byte), decoded bytes
_SIMPLE_CHUNK = ord('r')  # the type of a chunk of records that is not transposed
_PLAIN, _ZSTD = 0, ord('z')  # how a chunk is compressed
_MAGIC = 0x71930e704fdae05e  # in the postscript
_POSTSCRIPT_TAGS = [0x08, 0x10]  # protobuf tags of: offset of the footer, magic number
_ENTRY_TAGS = (0x08, 0x10, 0x18)  # protobuf tags of: offset of a chunk, its decoded bytes, its number of records
_MAX_ENTRY_BYTES = 12  # usually 6 when compressed
_MAX_FOOTER_BYTES = 2**31  # decoded
_AGAIN = 'Copy or prepare the dataset again.'


class _Footer(NamedTuple):
  """The content of the footer of a file with C chunks.

  offsets: first byte of each chunk, and of the footer, `[C + 1] i64`.
  first_records: number of the first record of each chunk, and the number of all records, `[C + 1] i64`.
  end: the last bytes of the file, which contain the footer.
  """
  offsets: HostArray
  first_records: HostArray
  end: bytes


def find_end(path: str, num_records: int, num_bytes: int) -> storage.Span:
  """Returns the span at the end of a file that most likely contains its footer and postscript."""
  size = min(num_bytes, 2 * _BLOCK_BYTES + _MAX_ENTRY_BYTES * num_records)
  return storage.Span(path, num_bytes - size, size)


class RemoteRecords:
  """An ArrayRecord file in object storage. Safe for threads."""
  NUM_FILES = 2  # open files of each: the local file, which this class writes and the package reads

  def __init__(self, path: str, num_records: int, num_bytes: int, end: bytes = b'') -> None:
    """Opens the file at an address; `end` has the bytes of `find_end`, b'' = they are read here.

    Raises as `storage.read_many`; and UserError if the file has another size or number of records, or another form.
    """
    from array_record.python import array_record_module
    self._path, self._num_bytes, self._lock = path, num_bytes, threading.Lock()
    span = find_end(path, num_records, num_bytes)
    end = end or storage.read(*span)
    if len(end) < span.size or num_bytes < 2 * _BLOCK_BYTES or num_bytes % _BLOCK_BYTES:
      raise self._error('another size')
    footer = self._read_footer(end)
    if (num_stored := int(footer.first_records[-1])) != num_records:
      raise UserError(f'{path}: expected {num_records:,} records, got {num_stored:,}. {_AGAIN}')
    self._offsets = footer.offsets.astype(np.uint32 if num_bytes < 2**32 else np.int64)  # small, as all stay in memory
    has_single_records = len(footer.first_records) == num_records + 1  # chunk i has record i
    self._first_records = None if has_single_records else footer.first_records
    self._local_file, local_path = tempfile.mkstemp('.array_record')
    try:
      os.ftruncate(self._local_file, num_bytes)
      os.pwrite(self._local_file, footer.end, num_bytes - len(footer.end))
      self._reader = array_record_module.ArrayRecordReader(local_path, **READER)
    except BaseException as error:
      os.close(self._local_file)
      raise (failures.system_error(error) or error) from None
    finally:
      os.unlink(local_path)  # the open files remain until they are closed, or the process ends

  def span(self, number: int) -> storage.Span:
    """Returns the span of the chunk that contains a record."""
    chunk = number
    if self._first_records is not None:
      chunk = int(np.searchsorted(self._first_records, number, side='right')) - 1
    start, stop = int(self._offsets[chunk]), int(self._offsets[chunk + 1])
    return storage.Span(self._path, start, stop - start)

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

  def _read_footer(self, end: bytes) -> _Footer:
    """Returns the footer, given the last bytes of the file. Reads more bytes if these are too few."""
    last_block = self._num_bytes - _BLOCK_BYTES
    sizes, records = self._read_chunk(end, last_block)
    postscript = _decode_varints(records[:sizes[0]]).tolist()  # tag, offset, tag, magic
    if len(postscript) != 4 or postscript[::2] != _POSTSCRIPT_TAGS or postscript[3] != _MAGIC or not (
        0 < postscript[1] < last_block):
      raise self._error('none that has the offsets of its records')
    footer_offset = postscript[1]
    if (num_missing := self._num_bytes - len(end) - footer_offset) > 0:
      end = storage.read(self._path, footer_offset, num_missing) + end
    sizes, records = self._read_chunk(end, footer_offset)
    entries = _decode_varints(records[sizes[0]:])  # 6 numbers each: the tags, each before its value
    if len(entries) % 6 or (entries[::2] != np.tile(_ENTRY_TAGS, len(entries) // 6)).any():
      raise self._error('offsets of another form')
    num_records = entries[5::6]
    return _Footer(np.append(entries[1::6], footer_offset), np.concatenate([[0], np.cumsum(num_records)]), end)

  def _read_chunk(self, end: bytes, offset: int) -> tuple[HostArray, bytes]:
    """Returns the sizes of the N records of a chunk and a final 0, `[N + 1] i64`, and the bytes of all records.

    The chunk is at this offset of the file, in its last bytes `end`. Its data are: how it is compressed (1 byte), the
    number of bytes of the sizes (a varint), the sizes of the records, and the records one after the other.
    """
    offsets = np.arange(self._num_bytes - len(end), self._num_bytes)
    is_inside = (offsets >= offset) & (offsets % _BLOCK_BYTES >= _BLOCK_HEADER_BYTES)  # without the headers of blocks
    content = np.frombuffer(end, np.uint8)[is_inside].tobytes()
    size = kind = 0
    if len(content) > _CHUNK_HEADER.size:
      _, size, _, kind, _ = _CHUNK_HEADER.unpack(content[:_CHUNK_HEADER.size])
    data = content[_CHUNK_HEADER.size:_CHUNK_HEADER.size + size]
    if len(data) < max(1, size):
      raise self._error('a truncated end')
    if kind & 0xFF != _SIMPLE_CHUNK or data[0] not in (_PLAIN, _ZSTD):
      raise self._error('offsets that are not compressed by zstd, or not at all, as ArrayRecord does by default')
    length, varint_bytes = _decode_varint(data[1:])
    start = 1 + varint_bytes
    sizes, records = data[start:start + length], data[start + length:]
    try:
      if data[0] == _ZSTD:
        sizes, records = _decompress(sizes), _decompress(records)
      return _decode_varints(sizes + b'\0'), records  # so that a damaged chunk without sizes has one, too
    except (OSError, ValueError) as error:
      raise self._error('damaged offsets') from error

  def _error(self, got: str) -> UserError:
    return UserError(f'{self._path}: expected an ArrayRecord file of {self._num_bytes:,} bytes, got {got}. {_AGAIN}')


def _decompress(data: bytes) -> bytes:
  """Returns the content of a zstd frame that follows a varint with its size. Raises OSError or ValueError."""
  import pyarrow as pa
  num_bytes, start = _decode_varint(data)
  return bytes(pa.decompress(data[start:], min(num_bytes, _MAX_FOOTER_BYTES), codec='zstd', asbytes=True))


def _decode_varint(data: bytes) -> tuple[int, int]:
  """Returns the first of consecutive varints, and how many bytes it has."""
  num_bytes = 1 + int(np.argmax(np.frombuffer(data[:10] + b'\0', np.uint8) < 128))  # a varint has at most 10
  return int(_decode_varints(data[:num_bytes] + b'\0')[0]), num_bytes


def _decode_varints(data: bytes) -> HostArray:
  """Returns the numbers of consecutive varints, `[N] i64`; without the last one if it is truncated.

  A varint has 7 bits in each byte, the lowest first; the last byte is below 128.
  """
  values = np.frombuffer(data, np.uint8)
  lasts = np.flatnonzero(values < 128)
  if not len(lasts):
    return np.zeros(0, np.int64)
  starts, values = np.append(0, lasts[:-1] + 1), values[:lasts[-1] + 1]
  shifts = 7 * (np.arange(len(values)) - np.repeat(starts, lasts - starts + 1))
  return np.add.reduceat((values & 127).astype(np.uint64) << shifts.astype(np.uint64), starts).astype(np.int64)
