"""Reads bytes of files: of this machine by path, and of object storage by `gs://BUCKET/NAME` or `s3://BUCKET/NAME`.

`formats/shards.py` lists files with `list_names`. `index.py` compares the `stamps` of files with the stamps of the kept
index. A format scans a file through a `Window`, and later reads examples with `read_many`. Object storage takes tens of
milliseconds to answer a request, so `read_many` has many requests in flight. Their total size is limited by
`data.read_ahead_mib`, which `configure` sets. No other module reads ahead. Reads are repeated after temporary errors.
Files that a run writes are in `record/storage.py`.

TensorStore keeps requests in flight without a thread for each request, and repeats a request after an error of the
server. TensorStore finds credentials as the programs of Google and Amazon do: for `gs://` the account of the machine or
of `gcloud auth application-default login`, for `s3://` the environment, `~/.aws` or the role of the machine. The
variables `TENSORSTORE_GCS_HTTP_URL` and `AWS_ENDPOINT_URL` set another server, such as a server for tests.
"""
from __future__ import annotations

import collections
import errno
import functools
import itertools
import os
import re
import resource
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.data import open_files

if TYPE_CHECKING:
  import tensorstore

  from vit_jax.config import schema

  Future = tensorstore.Future

SCHEMES = ('gs://', 's3://')
ANSWER_S = 120.
"""Seconds until a request without an answer counts as failed."""
MAX_IN_FLIGHT = 128
"""Default of the largest number of reads that `read_many` starts before their bytes are needed."""
_RETRIES = {'max_retries': 5, 'initial_delay': '0.5s', 'max_delay': '8s'}
_FILES_PER_CONNECTION = 16  # the process has one connection per so many files that it may open
_MIN_CONNECTIONS_FOR_THREADS = 16  # with fewer connections, TensorStore gets only one thread
_DRIVER_BY_SCHEME = {'gs': 'gcs', 's3': 's3'}  # drivers of TensorStore
_ENDPOINT_VARIABLES = ('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL')
# TensorStore's own message is "OUT_OF_RANGE: Requested byte range [0, 9) is not valid for value with total size 5".
# Messages about errors of a server contain "[http_response_code='403' ...]".
_TOTAL_SIZE = re.compile(r'total size (\d+)')
_NO_RIGHTS = re.compile(r"^(PERMISSION_DENIED|UNAUTHENTICATED)\b|http_response_code='40[13]'")
_BEYOND_END = re.compile(r"^OUT_OF_RANGE\b|http_response_code='416'")


class Span(NamedTuple):
  """A part of a file: `size` bytes from `offset`. A negative offset counts from the end of the file."""
  path: str
  offset: int
  size: int


class Settings(NamedTuple):
  """Limits of a process: the bytes of objects to read ahead, and the bytes of decoded row groups to hold in memory."""
  ahead_bytes: int = 2**28
  group_bytes: int = 2**30

  @classmethod
  def of(cls, data: schema.Data) -> Settings:
    """Returns the settings of the data of a run."""
    return cls(data.read_ahead_mib * 2**20, data.shuffle_mib * 2**20)


class _State:
  """The reads of objects in this process: `reserve` is called before a read, `release` afterwards. Safe for threads.

  num_bytes: number of bytes of the reads in flight.
  generations: the generation of each object that was read, by address.
  """

  def __init__(self, settings: Settings) -> None:
    self.settings, self._lock, self.num_bytes = settings, threading.Lock(), 0
    self.generations: dict[str, bytes] = {}

  def reserve(self, size: int, *, is_needed: bool) -> bool:
    """Counts a read of `size` bytes and returns True; returns False if the limit is reached, unless `is_needed` now."""
    with self._lock:
      if not is_needed and self.num_bytes + size > self.settings.ahead_bytes:
        return False
      self.num_bytes += size
      return True

  def release(self, size: int) -> None:
    with self._lock:
      self.num_bytes -= size


_state = _State(Settings())


def configure(settings: Settings) -> None:
  """Sets the limits of this process. A loader process calls this with the settings of its parent process."""
  global _state
  if settings != _state.settings:
    _state = _State(settings)


def settings() -> Settings:
  """Returns the limits of this process."""
  return _state.settings


def is_address(path: str) -> bool:
  """Returns whether a path is an address in object storage, which this module can read."""
  return path.startswith(SCHEMES)


def split(address: str) -> tuple[str, str, str]:
  """Returns the scheme, the bucket and the name of `gs://BUCKET/NAME`."""
  scheme, _, bucket_and_name = address.partition('://')
  bucket, _, name = bucket_and_name.partition('/')
  return scheme, bucket, name


def read_many(spans: Iterable[Span], max_in_flight: int = MAX_IN_FLIGHT) -> Iterator[bytes]:
  """Yields the bytes of spans, in order; at the end of a file, fewer bytes than the span has.

  Up to `max_in_flight` spans of objects are read ahead.

  Raises:
    OSError: the file cannot be read.
    TemporaryError: the storage of the file still fails after a time.
    UserError: the account of this machine may not read the file, or the file has changed since this process read it.
  """
  iterator, state = iter(spans), _state
  started = collections.deque[tuple[Span, 'Future | None']]()  # the future is None for a local file
  waiting: Span | None = None  # the next span, if it does not fit into the limit yet
  try:
    while True:
      while len(started) < max_in_flight:
        next_span = waiting or next(iterator, None)
        if next_span is None:
          break
        is_object = is_address(next_span.path)
        if is_object and not state.reserve(next_span.size, is_needed=not started):
          waiting = next_span
          break
        waiting = None
        try:
          future = _submit(next_span) if is_object else None
        except BaseException:
          state.release(next_span.size)  # `finally` only releases the spans in `started`
          raise
        started.append((next_span, future))
      if not started:
        return
      span, future = started[0]
      content = _read_local(span) if future is None else _take(span, future)
      started.popleft()
      if future is not None:
        state.release(span.size)
      yield content
  finally:
    for span, future in started:
      if future is not None:
        state.release(span.size)


def read(path: str, offset: int, size: int) -> bytes:
  """Returns the bytes of `Span(path, offset, size)`. Raises the errors of `read_many`."""
  return next(read_many([Span(path, offset, size)], 1))


def read_file(path: str, max_bytes: int) -> bytes:
  """Returns the content of a small file, such as a description.

  Raises `documents.TooLarge` if the file has more than `max_bytes`, and the errors of `read_many`.
  """
  if not is_address(path):
    return documents.read_bytes(path, max_bytes)
  span = Span(path, 0, max_bytes + 1)
  content, _ = failures.retried(lambda: _wait(span, _submit(span)), f'reading {path}')
  if len(content) > max_bytes:
    raise documents.TooLarge(path, len(content), max_bytes)
  return content


def write(address: str, content: bytes) -> None:
  """Creates or replaces an object. Raises OSError if the account may not write it, UserError if there is no bucket."""
  scheme, bucket, name = split(address)
  try:
    _store(scheme, bucket).write(name, content).result(ANSWER_S)
  except (ValueError, NotImplementedError) as error:  # NotImplementedError: the server is read-only
    raise OSError(f'{address}: {str(error).splitlines()[0][:300]}') from error


def read_text(path: str, what: str, *, expected: str = 'a text file', advice: str = 'Check the path.') -> str:
  """Returns the text of a file of at most `documents.MAX_BYTES` in UTF-8. See `documents.read_text` for the arguments.

  Raises:
    TemporaryError: the storage of the file still fails after a time.
    UserError: the file cannot be read, is too large, or is not text in UTF-8.
  """
  with documents.explained(path, what, max_bytes=documents.MAX_BYTES, expected=expected, advice=advice):
    return read_file(path, documents.MAX_BYTES).decode('utf-8-sig')


def stamps(paths: Sequence[str]) -> list[tuple[object, ...]]:
  """Returns for each file the values that change when the file is written again. Raises the errors of `read_many`.

  The values are `(size, modification time, change time)` in bytes and nanoseconds for a local file, and `(generation,)`
  for an object. No program can set the change time.
  """
  for _ in read_many(Span(path, 0, 1) for path in paths if is_address(path)):
    pass  # the read stores the generation in `_state`
  return [_stamp(path) for path in paths]


def _stamp(path: str) -> tuple[object, ...]:
  if is_address(path):
    return (_state.generations.get(path, b''),)
  status = os.stat(path)
  return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def list_names(folder: str, start: str = '') -> list[str]:
  """Returns the sorted names of the files in a folder that begin with `start`. Raises the errors of `read_many`.

  In object storage, the result includes the files in subfolders, with names relative to the folder.
  """
  def list_once() -> list[str]:
    names = _list_objects(folder, start) if is_address(folder) else os.listdir(folder)
    return sorted(name for name in names if name.startswith(start))
  return failures.retried(list_once, f'listing {folder}')


def _list_objects(folder: str, start: str) -> list[str]:
  """Returns the names of the objects in a folder that begin with `start`, relative to the folder."""
  import tensorstore
  scheme, bucket, name = split(folder.rstrip('/') + '/')
  first = os.fsencode(name + start)
  stem = first.rstrip(b'\xff')
  end = stem[:-1] + bytes([stem[-1] + 1]) if stem else b''  # the first key after all keys that begin with `first`
  store = _store(scheme, bucket)
  try:
    keys = store.list(tensorstore.KvStore.KeyRange(first, end),
                      strip_prefix_length=len(os.fsencode(name))).result(ANSWER_S)
    # If access to GCS is refused, TensorStore lists no objects and raises no error. But reading any object raises the
    # error, even an object that does not exist.
    any_key = os.fsencode(name) + keys[0] if keys else first or b'0'
    store.read(any_key, byte_range=slice(0, 1)).result(ANSWER_S)
  except ValueError as error:
    if not _BEYOND_END.search(str(error)):  # reading an empty object raises such an error
      raise _explain(error, folder) from error
  return [os.fsdecode(key) for key in keys]


def _read_local(span: Span) -> bytes:
  path, offset, size = span

  def read_once() -> bytes:
    with open_files.pool().use(('range', path), lambda: documents.open_regular(path), os.close) as descriptor:
      start = offset if offset >= 0 else max(0, os.fstat(descriptor).st_size + offset)
      return os.pread(descriptor, size, start)
  return failures.retried(read_once, f'reading {path}')


def _submit(span: Span) -> Future:
  """Starts to read a span of an object; `_take` waits for the bytes. Raises UserError if the bucket does not exist."""
  path, offset, size = span
  scheme, bucket, name = split(path)
  byte_range = slice(offset, None) if offset < 0 else slice(offset, offset + size)
  future: Future = _store(scheme, bucket).read(name, byte_range=byte_range)
  return future


def _take(span: Span, submitted: Future) -> bytes:
  """Waits for the bytes of a submitted span, checks the generation, and returns the bytes; raises as `read_many`."""
  futures = [submitted]

  def read_once() -> tuple[bytes, bytes]:
    return _wait(span, futures.pop() if futures else _submit(span))  # after an error the span is submitted again
  content, generation = failures.retried(read_once, f'reading {span.path}')
  if generation and generation != _state.generations.setdefault(span.path, generation):
    raise UserError(f'{span.path}: expected an object that does not change, got another one during the run. Start the '
                    'run again, if the object is the right one.')
  return content


def _wait(span: Span, future: Future) -> tuple[bytes, bytes]:
  """Waits for bytes of an object. Returns the bytes and the generation, which changes when the object is rewritten.

  If the object ends inside of the span, reads the object again up to its end. Returns `b'', b''` if it ends before.
  """
  path, offset, _ = span
  try:
    answer = future.result(ANSWER_S)
  except ValueError as error:
    text = str(error)
    if not _BEYOND_END.search(text):
      raise _explain(error, path) from error
    total_size = _TOTAL_SIZE.search(text)
    end = int(total_size[1]) if total_size else 0
    if end <= offset:
      return b'', b''
    start = max(0, offset)
    inside = Span(path, start, end - start)
    return _wait(inside, _submit(inside))
  if answer.state != 'value':
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
  return bytes(answer.value), bytes(answer.stamp.generation)


def _explain(error: ValueError, address: str) -> UserError | OSError:
  """Returns the error to raise in place of an error of TensorStore, which only raises ValueError."""
  text = str(error)
  if _NO_RIGHTS.search(text):
    right = ('the role roles/storage.objectViewer' if address.startswith('gs://') else
             'the permissions s3:GetObject and s3:ListBucket')
    return UserError(f'{address}: expected permission to read it, got "{text.splitlines()[0][:200]}". Give the account '
                     f'of this machine {right}, or log in as another account.')
  return OSError(f'{address}: {text.splitlines()[0][:300]}')


@functools.cache
def _context() -> Any:
  """Returns the context of all clients, which has fewer connections in a process that may open few files."""
  import tensorstore
  max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  num_connections = max(4, min(256, max_files // _FILES_PER_CONNECTION)) if max_files > 0 else 256
  if num_connections < _MIN_CONNECTIONS_FOR_THREADS:
    os.environ.setdefault('TENSORSTORE_HTTP_THREADS', '1')  # each of the usual four threads needs two files
  spec: dict[str, Any] = {}
  for driver in _DRIVER_BY_SCHEME.values():
    spec |= {f'{driver}_request_concurrency': {'limit': num_connections}, f'{driver}_request_retries': _RETRIES}
  return tensorstore.Context(spec)


@functools.cache
def _store(scheme: str, bucket: str) -> Any:
  """Returns the client of a bucket. Raises UserError if the bucket does not exist."""
  import tensorstore
  spec: dict[str, Any] = {'driver': _DRIVER_BY_SCHEME[scheme], 'bucket': bucket}
  endpoints = [os.environ[name] for name in _ENDPOINT_VARIABLES if os.environ.get(name)]
  if scheme == 's3' and endpoints:
    spec |= {'endpoint': endpoints[0], 'aws_region': os.environ.get('AWS_REGION', 'us-east-1')}
  address = f'{scheme}://{bucket}'
  try:
    return tensorstore.KvStore.open(spec, context=_context()).result(ANSWER_S)
  except ValueError as error:
    if failures.is_temporary(error):
      raise _explain(error, address) from error
    raise UserError(f'{address}: expected the address of a bucket, got "{str(error).splitlines()[0][:200]}". Correct '
                    'it.') from error


class Window:
  """Reads a few bytes at ascending offsets of a file, as the scan for an index does. `close` ends the reading.

  Each read of a local file gets at least `LOCAL` bytes, and skips the bytes between. An object is read in blocks of
  `BLOCK` bytes, and the next `AHEAD` blocks are in flight. `_content` has the bytes from `_start` on that were read
  last. `_block_by_number` has the blocks of an object that may still be needed. `_stream` yields the following blocks,
  starting with the number `_next_block`; -1 = there is no stream.
  """
  LOCAL, BLOCK, AHEAD = 2**12, 2**22, 3
  _MAX_BYTES = 2**62  # size of a file

  def __init__(self, path: str) -> None:
    """Opens the file. Raises OSError if a local file is missing."""
    self.path, self._is_object = path, is_address(path)
    self._size = self._MAX_BYTES if self._is_object else os.path.getsize(path)
    self._start, self._content = 0, b''
    self._block_by_number, self._next_block = dict[int, bytes](), -1
    self._stream: Iterator[bytes] = iter(())

  def read(self, offset: int, size: int) -> bytes:
    """Returns up to `size` bytes; fewer at the end of the file."""
    start = offset - self._start  # of the bytes in `_content`
    if start < 0 or start + size > len(self._content):
      start, self._start = 0, offset
      if self._is_object:
        self._content = self._read_blocks(offset, size)
      else:
        self._content = read(self.path, offset, max(size, self.LOCAL))
    return self._content[start:start + size]

  def holds(self, end: int) -> bool:
    """Returns whether the file has at least `end` bytes; reads the block of an object that has the last byte."""
    if not self._is_object or not 0 < end <= self._MAX_BYTES:
      return end <= self._size
    number, offset = divmod(end - 1, self.BLOCK)
    return len(self._read_block(number)) > offset  # earlier blocks are kept, because they may still be needed

  def place(self, offset: int) -> str:
    """Returns the description of an offset for a message, such as `at byte 1,024 of 4,096`."""
    return f'at byte {offset:,}' + ('' if self._is_object else f' of {self._size:,}')

  def close(self) -> None:
    """Discards the blocks that were read, and ends the reads in flight."""
    self._block_by_number, self._next_block, self._stream = {}, -1, iter(())

  def _read_blocks(self, offset: int, size: int) -> bytes:
    """Returns the bytes of an object from `offset` to the end of the last block needed; discards earlier blocks."""
    if offset + size > self._MAX_BYTES:
      return b''
    first, last = offset // self.BLOCK, (offset + max(size, 1) - 1) // self.BLOCK
    if last - first > self.AHEAD:  # an index rarely needs so many bytes: they are read with one request
      return read(self.path, offset, size)
    content = b''.join(self._read_block(number) for number in range(first, last + 1))
    self._block_by_number = {number: block for number, block in self._block_by_number.items() if number >= first}
    return content[offset - first * self.BLOCK:]

  def _read_block(self, number: int) -> bytes:
    """Returns a block of an object: a kept block, or the next blocks of the stream up to it; may start a new stream."""
    if number in self._block_by_number:
      return self._block_by_number[number]
    is_ahead = self._next_block <= number <= self._next_block + self.AHEAD
    if self._next_block < 0 or not is_ahead:
      self._stream = read_many((Span(self.path, following * self.BLOCK, self.BLOCK)
                                for following in itertools.count(number)), self.AHEAD + 1)
      self._next_block = number
    while self._next_block <= number:
      self._block_by_number[self._next_block] = next(self._stream)
      self._next_block += 1
    return self._block_by_number[number]


_COMPRESSION_BY_START = {b'\x1f\x8b': 'gzip', b'\x28\xb5\x2f\xfd': 'Zstandard', b'BZh': 'bzip2', b'\xfd7zXZ': 'xz',
                         **{b'\x78' + level: 'zlib' for level in (b'\x01', b'\x5e', b'\x9c', b'\xda')}}
"""The name of a compression by the first bytes of a compressed file."""


def describe_compression(start: bytes) -> str:
  """Returns the description of a compressed file for a message; '' if the first bytes `start` show no compression."""
  compression = next((name for first, name in _COMPRESSION_BY_START.items() if start.startswith(first)), '')
  return f'a file compressed by {compression}, which cannot be read at random: decompress it' if compression else ''
