"""Reads single records of ArrayRecord files in object storage.

`array_record.py` reads the span of `find_end` of a file, often for many files together, and opens the file as a
`RemoteRecords`. For a record, it calls `span`, reads the bytes of the span, and passes the bytes to `decode`.

An ArrayRecord file is a Riegeli file: a sequence of blocks of 64 KiB. Each block begins with a header of 24 bytes, also
in the middle of a chunk. The rest of the blocks is a sequence of chunks:

  chunks      one or more records in each
  footer      a chunk with a record of metadata, and an entry for each chunk: offset, decoded bytes, number of records
  postscript  a chunk in the last block of the file: one record with the offset of the footer, and a magic number

This module decodes the footer. The package `array_record` decodes records, but it reads local files only. Therefore
each object in object storage has a sparse local file: a file of the same size whose zeros take no space. To open an
object, its end is written to the local file, where the package reads the footer. To decode a record, its chunk is
written to the local file, from which all bytes are removed afterwards. The package thus decompresses each record and
compares its checksum as usual.

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

# The reader of the package has no threads: bytes that threads read ahead are useless in a random order.
READER = {'options': 'readahead_buffer_size:0,max_parallelism:0', 'file_reader_buffer_size': 32_768}
_BLOCK_BYTES, _BLOCK_HEADER_BYTES = 2**16, 24
_CHUNK_HEADER = struct.Struct('<5Q')  # hash, bytes of data, hash of data, type (in the lowest byte), decoded bytes
_SIMPLE_CHUNK = ord('r')  # the type of a chunk of records that is not transposed
_UNCOMPRESSED, _ZSTD = 0, ord('z')  # values of the first byte of the data of a chunk
_MAGIC = 0x71930e704fdae05e  # in the postscript
_POSTSCRIPT_TAGS = [0x08, 0x10]  # protobuf tags of: offset of the footer, magic number
_ENTRY_TAGS = (0x08, 0x10, 0x18)  # protobuf tags of: offset of a chunk, its decoded bytes, its number of records
_MAX_ENTRY_BYTES = 12  # of a compressed entry of the footer, which usually has 6 bytes
_MAX_FOOTER_BYTES = 2**31  # decompressed
_AGAIN = 'Copy or prepare the dataset again.'


class _Footer(NamedTuple):
  """The content of the footer of a file with C chunks.

  offsets: the offset of each chunk, and of the footer, `[C + 1] i64`.
  first_records: the number of the first record of each chunk, and the count of all records, `[C + 1] i64`.
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
  """An ArrayRecord file in object storage, see the top of this module. Safe for threads."""
  NUM_FILES = 2  # open files of each object: this class and the package each open the local file

  def __init__(self, path: str, num_records: int, num_bytes: int, end: bytes = b'') -> None:
    """Opens the file at an address; `end` has the bytes of `find_end`, b'' = the bytes are read here.

    Raises as `storage.read_many`; and UserError if the file has another size or number of records, or another format.
    """
    self._path, self._num_bytes = path, num_bytes
    self._lock = threading.Lock()  # held while a chunk is in the local file
    end_span = find_end(path, num_records, num_bytes)
    end = end or storage.read(*end_span)
    if len(end) < end_span.size or num_bytes < 2 * _BLOCK_BYTES or num_bytes % _BLOCK_BYTES:
      raise self._error('another size')
    footer = self._read_footer(end)
    if (num_stored := int(footer.first_records[-1])) != num_records:
      raise UserError(f'{path}: expected {num_records:,} records, got {num_stored:,}. {_AGAIN}')
    self._offsets = footer.offsets.astype(np.uint32 if num_bytes < 2**32 else np.int64)  # which saves memory
    has_single_records = len(footer.first_records) == num_records + 1
    self._first_records = None if has_single_records else footer.first_records  # None: chunk i has record i alone
    self._open_local_file(footer.end)

  def _open_local_file(self, end: bytes) -> None:
    """Creates and opens the local file, which has only the bytes `end`. No file is left if an error is raised."""
    from array_record.python import array_record_module
    self._local_file, local_path = tempfile.mkstemp('.array_record')
    try:
      os.ftruncate(self._local_file, self._num_bytes)
      os.pwrite(self._local_file, end, self._num_bytes - len(end))
      self._reader = array_record_module.ArrayRecordReader(local_path, **READER)
    except BaseException as error:
      os.close(self._local_file)
      raise (failures.system_error(error) or error) from None
    finally:
      os.unlink(local_path)  # an open file without a name remains until it is closed, or the process ends

  def span(self, record_number: int) -> storage.Span:
    """Returns the span of the chunk that contains a record."""
    chunk = record_number
    if self._first_records is not None:
      chunk = int(np.searchsorted(self._first_records, record_number, side='right')) - 1
    start = int(self._offsets[chunk])
    return storage.Span(self._path, start, int(self._offsets[chunk + 1]) - start)

  def decode(self, record_number: int, content: bytes) -> bytes:
    """Returns a record, given the bytes of its `span`. Raises RuntimeError if it is damaged."""
    with self._lock:
      try:
        os.pwrite(self._local_file, content, self.span(record_number).offset)
        record: bytes = self._reader.read(record_number, record_number + 1)[0]
      finally:
        os.ftruncate(self._local_file, 0)  # removes the bytes; the next line makes the file sparse
        os.ftruncate(self._local_file, self._num_bytes)
    return record

  def close(self) -> None:
    """Closes the local file, which removes it."""
    self._reader.close()
    os.close(self._local_file)

  def _read_footer(self, end: bytes) -> _Footer:
    """Returns the footer, given the last bytes of the file. Reads more bytes if the footer begins before them."""
    last_block = self._num_bytes - _BLOCK_BYTES
    sizes, records = self._parse_chunk(end, last_block)
    postscript = _decode_varints(records[:sizes[0]]).tolist()  # tag, offset, tag, magic number
    if len(postscript) != 4 or postscript[::2] != _POSTSCRIPT_TAGS or postscript[3] != _MAGIC or not (
        0 < postscript[1] < last_block):
      raise self._error('none that has the offsets of its records')
    footer_offset = postscript[1]
    if (missing_bytes := self._num_bytes - len(end) - footer_offset) > 0:
      end = storage.read(self._path, footer_offset, missing_bytes) + end
    sizes, records = self._parse_chunk(end, footer_offset)
    entries = _decode_varints(records[sizes[0]:])  # an entry is 6 numbers: 3 values, each after its tag
    if len(entries) % 6 or (entries[::2] != np.tile(_ENTRY_TAGS, len(entries) // 6)).any():
      raise self._error('offsets of another form')
    offsets, num_records = entries[1::6], entries[5::6]
    return _Footer(np.append(offsets, footer_offset), np.concatenate([[0], np.cumsum(num_records)]), end)

  def _parse_chunk(self, end: bytes, offset: int) -> tuple[HostArray, bytes]:
    """Returns the sizes of the N records of a chunk and a final 0, `[N + 1] i64`, and the bytes of all records.

    The chunk begins at `offset` of the file, in the last bytes `end` of the file. After its header, a chunk has: its
    compression (1 byte), the number of bytes of the sizes (a varint), the sizes of the records, and the records.
    """
    offsets = np.arange(self._num_bytes - len(end), self._num_bytes)  # of each byte of `end`
    is_chunk = (offsets >= offset) & (offsets % _BLOCK_BYTES >= _BLOCK_HEADER_BYTES)  # without the headers of blocks
    content = np.frombuffer(end, np.uint8)[is_chunk].tobytes()
    data_bytes = chunk_type = 0
    if len(content) > _CHUNK_HEADER.size:
      _, data_bytes, _, chunk_type, _ = _CHUNK_HEADER.unpack(content[:_CHUNK_HEADER.size])
    data = content[_CHUNK_HEADER.size:_CHUNK_HEADER.size + data_bytes]
    if len(data) < max(1, data_bytes):
      raise self._error('a truncated end')
    if chunk_type & 0xFF != _SIMPLE_CHUNK or data[0] not in (_UNCOMPRESSED, _ZSTD):
      raise self._error('offsets that are not compressed by zstd, or not at all, as ArrayRecord does by default')
    sizes_bytes, varint_bytes = _decode_varint(data[1:])
    start, stop = 1 + varint_bytes, 1 + varint_bytes + sizes_bytes
    sizes, records = data[start:stop], data[stop:]
    try:
      if data[0] == _ZSTD:
        sizes, records = _decompress(sizes), _decompress(records)
      return _decode_varints(sizes + b'\0'), records  # the final 0 is there even if a damaged chunk has no sizes
    except (OSError, ValueError) as error:
      raise self._error('damaged offsets') from error

  def _error(self, got: str) -> UserError:
    return UserError(f'{self._path}: expected an ArrayRecord file of {self._num_bytes:,} bytes, got {got}. {_AGAIN}')


def _decompress(data: bytes) -> bytes:
  """Returns the content of a zstd frame after a varint with its size. Raises OSError or ValueError if it is damaged."""
  import pyarrow as pa
  num_bytes, start = _decode_varint(data)
  return bytes(pa.decompress(data[start:], min(num_bytes, _MAX_FOOTER_BYTES), codec='zstd', asbytes=True))


def _decode_varint(data: bytes) -> tuple[int, int]:
  """Returns the number that the first varint of `data` stands for, and how many bytes the varint has."""
  num_bytes = 1 + int(np.argmax(np.frombuffer(data[:10] + b'\0', np.uint8) < 128))  # a varint has at most 10 bytes
  return int(_decode_varints(data[:num_bytes] + b'\0')[0]), num_bytes


def _decode_varints(data: bytes) -> HostArray:
  """Returns the numbers that N consecutive varints stand for, `[N] i64`; a truncated varint at the end is ignored.

  A varint has 7 bits of its number in each byte, the lowest bits first. Its last byte is below 128.
  """
  values = np.frombuffer(data, np.uint8)
  lasts = np.flatnonzero(values < 128)  # indexes of the last bytes of varints
  if not len(lasts):
    return np.zeros(0, np.int64)
  starts = np.append(0, lasts[:-1] + 1)
  values = values[:lasts[-1] + 1]
  shifts = 7 * (np.arange(len(values)) - np.repeat(starts, lasts - starts + 1))  # 7 times the index in the varint
  return np.add.reduceat((values & 127).astype(np.uint64) << shifts.astype(np.uint64), starts).astype(np.int64)
