"""Reads bytes of files: of this machine by path, and of object storage by `gs://BUCKET/NAME` or `s3://BUCKET/NAME`.

`formats/shards.py` lists files with `list_names`. `index.py` compares the `stamps` of files with those of the kept
index. A format scans a file through a `Window`, and later reads examples with `read_many`. An object takes tens of
milliseconds to answer, so `read_many` has many requests in flight, within the bytes of `data.read_ahead_mib`, which
`configure` sets. Nothing else reads ahead. Reads are repeated after temporary errors. Files that a run writes are in
`record/storage.py`.

TensorStore keeps requests in flight without a thread for each of them, and repeats a request after an error of the
server. It finds credentials as the clients of the clouds do: for Google the account of the machine or that of
`gcloud auth application-default login`, for S3 the environment, `~/.aws` or the role of the machine. The variables
`TENSORSTORE_GCS_HTTP_URL` and `AWS_ENDPOINT_URL` set another server, such as one for tests.
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
IN_FLIGHT = 128
"""Reads of objects that `read_many` starts before they are needed."""
_RETRIES = {'max_retries': 5, 'initial_delay': '0.5s', 'max_delay': '8s'}
_FILES_PER_CONNECTION = 16  # files that the process may open for each connection
_FEW_CONNECTIONS = 16  # with fewer than these, TensorStore gets one thread
_DRIVERS = {'gs': 'gcs', 's3': 's3'}  # of TensorStore, by scheme
_ENDPOINTS = ('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL')
# Messages of TensorStore: "OUT_OF_RANGE: Requested byte range [0, 9) is not valid for value with total size 5", and of
# servers "... [http_response_code='403' ...]".
_TOTAL_SIZE = re.compile(r'total size (\d+)')
_NO_RIGHTS = re.compile(r"^(PERMISSION_DENIED|UNAUTHENTICATED)\b|http_response_code='40[13]'")
_BEYOND_END = re.compile(r"^OUT_OF_RANGE\b|http_response_code='416'")


class Span(NamedTuple):
  """A part of a file: `size` bytes from `offset`. A negative offset counts from the end of the file."""
  path: str
  offset: int
  size: int


class Settings(NamedTuple):
  """Limits of a process: the bytes of objects that it reads ahead, and those of decoded row groups that it holds."""
  ahead_bytes: int = 2**28
  group_bytes: int = 2**30

  @classmethod
  def of(cls, data: schema.Data) -> Settings:
    """Returns the settings of the data of a run."""
    return cls(data.read_ahead_mib * 2**20, data.shuffle_mib * 2**20)


class _State:
  """The state of a process; its methods are safe for threads.

  num_bytes: of the reads of objects in flight.
  generations: of the objects that were read, by address.
  """

  def __init__(self, settings: Settings) -> None:
    self.settings, self._lock, self.num_bytes = settings, threading.Lock(), 0
    self.generations: dict[str, bytes] = {}

  def reserve(self, size: int, *, is_needed: bool) -> bool:
    """Counts a read of `size` bytes, and returns whether it may start. One whose bytes are needed now always may."""
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
  """Sets the limits of this process. Loader processes get the settings of their parent."""
  global _state
  if settings != _state.settings:
    _state = _State(settings)


def settings() -> Settings:
  """Returns the limits of this process."""
  return _state.settings


def is_address(path: str) -> bool:
  """Returns whether a path is an address in object storage that is read directly."""
  return path.startswith(SCHEMES)


def split(address: str) -> tuple[str, str, str]:
  """Returns the scheme, the bucket and the name of `gs://BUCKET/NAME`."""
  scheme, _, rest = address.partition('://')
  bucket, _, name = rest.partition('/')
  return scheme, bucket, name


def read_many(spans: Iterable[Span], in_flight: int = IN_FLIGHT) -> Iterator[bytes]:
  """Yields the bytes of spans, in order; fewer at the end of a file. Objects are read up to `in_flight` spans ahead.

  Raises at a span:
    OSError: the file cannot be read.
    TemporaryError: its storage still fails after a time.
    UserError: the account of this machine may not read it, or it has changed since this process read from it.
  """
  iterator, state = iter(spans), _state
  started = collections.deque[tuple[Span, 'Future | None']]()  # a local file has no future
  waiting: Span | None = None  # the next span, if there is no space for it yet
  try:
    while True:
      while len(started) < in_flight:
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
          state.release(next_span.size)  # it was reserved, and `finally` releases only what was started
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
  """Returns up to `size` bytes of a file from `offset`, as in `Span`. Raises the errors of `read_many`."""
  return next(read_many([Span(path, offset, size)], 1))


def read_file(path: str, max_bytes: int) -> bytes:
  """Returns the content of a small file, such as a description.

  Raises:
    TooLarge: it has more than `max_bytes`.
    OSError, TemporaryError, UserError: those of `read_many`.
  """
  if not is_address(path):
    return documents.read_bytes(path, max_bytes)
  span = Span(path, 0, max_bytes + 1)
  content, _ = failures.retried(lambda: _answer(span, _submit(span)), f'reading {path}')
  if len(content) > max_bytes:
    raise documents.TooLarge(path, len(content), max_bytes)
  return content


def write(address: str, content: bytes) -> None:
  """Creates or replaces an object. Raises OSError if this account cannot write it, or UserError without its bucket."""
  scheme, bucket, name = split(address)
  try:
    _store(scheme, bucket).write(name, content).result(ANSWER_S)
  except (ValueError, NotImplementedError) as error:  # NotImplementedError: of servers that are read-only
    raise OSError(f'{address}: {str(error).splitlines()[0][:300]}') from error


def read_text(path: str, what: str, *, expected: str = 'a text file', advice: str = 'Check the path.') -> str:
  """Returns the text of a file of at most `documents.MAX_BYTES` in UTF-8. Arguments are as in `documents.read_text`.

  Raises:
    TemporaryError: its storage still fails after a time.
    UserError: it cannot be read, is too large, or is not text in UTF-8.
  """
  with documents.explained(what, max_bytes=documents.MAX_BYTES, expected=expected, advice=advice):
    return read_file(path, documents.MAX_BYTES).decode('utf-8-sig')


def stamps(paths: Sequence[str]) -> list[tuple[object, ...]]:
  """Returns for each file values that change when the file is written again.

  Of a file they are `(size, modification time, change time)` in bytes and nanoseconds; no program can set the change
  time. Of an object they are `(generation,)`.

  Raises:
    OSError, TemporaryError, UserError: those of `read_many`.
  """
  for _ in read_many(Span(path, 0, 1) for path in paths if is_address(path)):
    pass  # a read stores the generation

  def stamp(path: str) -> tuple[object, ...]:
    if is_address(path):
      return (_state.generations.get(path, b''),)
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
  return [stamp(path) for path in paths]


def list_names(folder: str, start: str = '') -> list[str]:
  """Returns the sorted names of the files in a folder that begin with `start`.

  In object storage, the files below its subfolders are among them, with their relative names.

  Raises:
    OSError, TemporaryError, UserError: those of `read_many`.
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
  end = stem[:-1] + bytes([stem[-1] + 1]) if stem else b''  # the first key after all that begin with `first`
  store = _store(scheme, bucket)
  try:
    keys = store.list(tensorstore.KvStore.KeyRange(first, end),
                      strip_prefix_length=len(os.fsencode(name))).result(ANSWER_S)
    # If access is refused, TensorStore lists no objects of GCS and raises no error. So one object is read, or a name
    # that does not exist: this raises the error.
    any_key = os.fsencode(name) + keys[0] if keys else first or b'0'
    store.read(any_key, byte_range=slice(0, 1)).result(ANSWER_S)
  except ValueError as error:
    if not _BEYOND_END.search(str(error)):  # the error of an empty object
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
  """Starts to read a span of an object; `_take` waits for the bytes. Raises UserError if there is no such bucket."""
  path, offset, size = span
  scheme, bucket, name = split(path)
  byte_range = slice(offset, None) if offset < 0 else slice(offset, offset + size)
  future: Future = _store(scheme, bucket).read(name, byte_range=byte_range)
  return future


def _take(span: Span, submitted: Future) -> bytes:
  """Returns the bytes of a span that was submitted. Raises the errors of `read_many`."""
  futures = [submitted]

  def read_once() -> tuple[bytes, bytes]:
    return _answer(span, futures.pop() if futures else _submit(span))  # after an error the span is submitted again
  content, generation = failures.retried(read_once, f'reading {span.path}')
  if generation and generation != _state.generations.setdefault(span.path, generation):
    raise UserError(f'{span.path}: expected an object that does not change, got another one during the run. Start the '
                    'run again, if the object is the right one.')
  return content


def _answer(span: Span, future: Future) -> tuple[bytes, bytes]:
  """Returns bytes of an object, and its generation, which changes when the object is written again.

  If the object ends inside of the span, it is read again up to its end. `b'', b''` is returned if it ends before.
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
    return _answer(inside, _submit(inside))
  if answer.state != 'value':
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
  return bytes(answer.value), bytes(answer.stamp.generation)


def _explain(error: ValueError, address: str) -> UserError | OSError:
  """Returns the error to raise in place of one of TensorStore, all of whose errors are ValueErrors."""
  text = str(error)
  if _NO_RIGHTS.search(text):
    right = ('the role roles/storage.objectViewer' if address.startswith('gs://') else
             'the permissions s3:GetObject and s3:ListBucket')
    return UserError(f'{address}: expected permission to read it, got "{text.splitlines()[0][:200]}". Give the account '
                     f'of this machine {right}, or log in as another account.')
  return OSError(f'{address}: {text.splitlines()[0][:300]}')


@functools.cache
def _context() -> Any:
  """Returns the context of all clients: it has fewer connections in a process that may open few files."""
  import tensorstore
  max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  connections = max(4, min(256, max_files // _FILES_PER_CONNECTION)) if max_files > 0 else 256
  if connections < _FEW_CONNECTIONS:
    os.environ.setdefault('TENSORSTORE_HTTP_THREADS', '1')  # each of the usual four threads needs two files
  spec: dict[str, Any] = {}
  for driver in _DRIVERS.values():
    spec |= {f'{driver}_request_concurrency': {'limit': connections}, f'{driver}_request_retries': _RETRIES}
  return tensorstore.Context(spec)


@functools.cache
def _store(scheme: str, bucket: str) -> Any:
  """Returns the client of a bucket. Raises UserError if there is no such bucket."""
  import tensorstore
  spec: dict[str, Any] = {'driver': _DRIVERS[scheme], 'bucket': bucket}
  endpoints = [os.environ[name] for name in _ENDPOINTS if os.environ.get(name)]
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
  """Reads a few bytes here and there from the beginning of a file to its end, as the scan for an index does.

  Of a local file, `LOCAL` bytes are read at a time, and the bytes between are skipped. An object is read in blocks of
  `BLOCK` bytes, of which the next `AHEAD` ones are in flight.
  """
  LOCAL, BLOCK, AHEAD = 2**12, 2**22, 3
  _MOST = 2**62  # bytes of a file

  def __init__(self, path: str) -> None:
    """Opens the file. Raises OSError if a local one is missing."""
    self.path, self._is_object = path, is_address(path)
    self._size = self._MOST if self._is_object else os.path.getsize(path)
    self._start, self._content = 0, b''  # the bytes that were read last
    # Blocks of an object by number, of which the stream yields the one with the number `_next_block` next; -1 = none.
    self._blocks, self._next_block = dict[int, bytes](), -1
    self._stream: Iterator[bytes] = iter(())

  def read(self, offset: int, size: int) -> bytes:
    """Returns up to `size` bytes; fewer at the end of the file."""
    start = offset - self._start
    if start < 0 or start + size > len(self._content):
      start, self._start = 0, offset
      self._content = (self._join(offset, size) if self._is_object else
                       read(self.path, offset, max(size, self.LOCAL)))
    return self._content[start:start + size]

  def holds(self, end: int) -> bool:
    """Returns whether the file has at least `end` bytes."""
    if not self._is_object or not 0 < end <= self._MOST:
      return end <= self._size
    number, last = divmod(end - 1, self.BLOCK)
    return len(self._block(number)) > last  # blocks before this one are kept, as they may still be needed

  def place(self, offset: int) -> str:
    """Returns how a message names a place in the file, such as `at byte 1,024 of 4,096`."""
    return f'at byte {offset:,}' + ('' if self._is_object else f' of {self._size:,}')

  def close(self) -> None:
    """Discards what was read ahead."""
    self._blocks, self._next_block, self._stream = {}, -1, iter(())

  def _join(self, offset: int, size: int) -> bytes:
    """Returns the bytes of an object from `offset` to the end of the last block needed; discards earlier blocks."""
    if offset + size > self._MOST:
      return b''
    first, last = offset // self.BLOCK, (offset + max(size, 1) - 1) // self.BLOCK
    if last - first > self.AHEAD:  # more than an index usually needs: read in one request
      return read(self.path, offset, size)
    content = b''.join(self._block(number) for number in range(first, last + 1))
    self._blocks = {number: block for number, block in self._blocks.items() if number >= first}
    return content[offset - first * self.BLOCK:]

  def _block(self, number: int) -> bytes:
    if number in self._blocks:
      return self._blocks[number]
    is_ahead = self._next_block <= number <= self._next_block + self.AHEAD
    if self._next_block < 0 or not is_ahead:
      self._stream = read_many((Span(self.path, following * self.BLOCK, self.BLOCK)
                                for following in itertools.count(number)), self.AHEAD + 1)
      self._next_block = number
    while self._next_block <= number:
      self._blocks[self._next_block] = next(self._stream)
      self._next_block += 1
    return self._blocks[number]


_COMPRESSED = {b'\x1f\x8b': 'gzip', b'\x28\xb5\x2f\xfd': 'Zstandard', b'BZh': 'bzip2', b'\xfd7zXZ': 'xz',
               **{b'\x78' + level: 'zlib' for level in (b'\x01', b'\x5e', b'\x9c', b'\xda')}}
"""The first bytes of compressed files."""


def describe_compression(start: bytes) -> str:
  """Returns what a message says of a file whose first bytes are those of a compressed file; '' if they are not."""
  kind = next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), '')
  return f'a file compressed by {kind}, which cannot be read at random: decompress it' if kind else ''
