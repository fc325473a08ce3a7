"""Reads bytes of files: of this machine by path, and of object storage by `gs://BUCKET/NAME` or `s3://BUCKET/NAME`.

`shards.py` lists files here (`list_names`); `index.py` compares them with the kept index (`stamps`); a format scans a
file through a `Window`, and later reads examples with `read_many`. `read_many` is the only place that reads ahead: an
object takes tens of milliseconds to answer, so many requests are in flight, within the bytes that may wait in a process
(`data.read_ahead_mib`, which `configure` sets). Reads are repeated after temporary errors. This module knows no format.

TensorStore keeps requests in flight without a thread for each of them, repeats a request after an error of the server,
and finds credentials as the clients of the clouds do: for Google the account of the machine or that of
`gcloud auth application-default login`, for S3 the environment, `~/.aws` or the role of the machine.
`TENSORSTORE_GCS_HTTP_URL` and `AWS_ENDPOINT_URL` set another server, such as one for tests or a store with the
interface of S3.
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
_FILES_EACH = 16  # open files of the process for each connection
_FEW = 16  # connections of a process that may open few files
_DRIVERS = {'gs': 'gcs', 's3': 's3'}
_ENDPOINTS = ('AWS_ENDPOINT_URL_S3', 'AWS_ENDPOINT_URL')
_TOTAL = re.compile(r'total size (\d+)')
_RIGHTS = re.compile(r"^(PERMISSION_DENIED|UNAUTHENTICATED)\b|http_response_code='40[13]'")
_BEYOND = re.compile(r"^OUT_OF_RANGE\b|http_response_code='416'")


class Span(NamedTuple):
  """A part of a file: `size` bytes from `offset`. A negative offset counts from the end of the file."""
  path: str
  offset: int
  size: int


class Settings(NamedTuple):
  """Limits of a process: the bytes that it reads ahead, and the bytes of decoded row groups that it holds."""
  ahead_bytes: int = 2**28
  group_bytes: int = 2**30

  @classmethod
  def of(cls, data: schema.Data) -> Settings:
    """Returns the settings of the data of a run."""
    return cls(data.read_ahead_mib * 2**20, data.shuffle_mib * 2**20)


class _State:
  """What a process knows of objects: its settings, the bytes in flight, and the generation of each object it has read.
  """

  def __init__(self, settings: Settings) -> None:
    self.settings, self.lock, self.num_bytes = settings, threading.Lock(), 0
    self.generations: dict[str, bytes] = {}

  def has_space(self, size: int, *, is_needed: bool) -> bool:
    """Returns whether a read of `size` bytes may start, and then counts them. A read that is needed now always may."""
    with self.lock:
      if not is_needed and self.num_bytes + size > self.settings.ahead_bytes:
        return False
      self.num_bytes += size
      return True

  def release(self, size: int) -> None:
    with self.lock:
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
      while len(started) < in_flight and (span := waiting or next(iterator, None)):
        is_object = is_address(span.path)
        waiting = None if not is_object or state.has_space(span.size, is_needed=not started) else span
        if waiting:
          break
        started.append((span, _submit(span) if is_object else None))
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
  """Returns up to `size` bytes of a file from `offset`, see `Span`; raises as `read_many`."""
  return next(read_many([Span(path, offset, size)], 1))


def read_file(path: str, max_bytes: int) -> bytes:
  """Returns the content of a small file, such as a description.

  Raises:
    TooLarge: it has more than `max_bytes`.
    OSError, TemporaryError, UserError: as `read_many`.
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
  except (ValueError, NotImplementedError) as error:  # NotImplementedError: from servers that only give objects
    raise OSError(f'{address}: {str(error).splitlines()[0][:300]}') from error


def read_text(path: str, what: str, *, expected: str = 'a text file', advice: str = 'Check the path.') -> str:
  """Returns the text of a file of at most `documents.MAX_BYTES` in UTF-8; arguments as `documents.read_text`.

  Raises:
    TemporaryError: its storage still fails after a time.
    UserError: it cannot be read, is too large, or is not text in UTF-8.
  """
  with documents.explained(what, max_bytes=documents.MAX_BYTES, expected=expected, advice=advice):
    return read_file(path, documents.MAX_BYTES).decode('utf-8-sig')


def stamps(paths: Sequence[str]) -> list[tuple[object, ...]]:
  """Returns for each file values that change when the file is written again.

  They are size, modification time and change time of a file, of which no program can set the last one; and the
  generation of an object.

  Raises:
    OSError, TemporaryError, UserError: as `read_many`.
  """
  for _ in read_many(Span(path, 0, 1) for path in paths if is_address(path)):
    pass  # which notes the generation
  return [(_state.generations.get(path, b''),) if is_address(path) else
          ((status := os.stat(path)).st_size, status.st_mtime_ns, status.st_ctime_ns) for path in paths]


def list_names(folder: str, start: str = '') -> list[str]:
  """Returns the sorted names of the files in a folder that begin with `start`; of objects also those in its folders.

  Raises:
    OSError, TemporaryError, UserError: as `read_many`.
  """
  def list_once() -> list[str]:
    names = _list_objects(folder, start) if is_address(folder) else os.listdir(folder)
    return sorted(name for name in names if name.startswith(start))
  return failures.retried(list_once, f'listing {folder}')


def _list_objects(folder: str, start: str) -> list[str]:
  import tensorstore
  scheme, bucket, name = split(folder.rstrip('/') + '/')
  first = os.fsencode(name + start)
  stem = first.rstrip(b'\xff')
  end = stem[:-1] + bytes([stem[-1] + 1]) if stem else b''  # the first key after all that begin with `first`
  store = _store(scheme, bucket)
  try:
    keys = store.list(tensorstore.KvStore.KeyRange(first, end),
                      strip_prefix_length=len(os.fsencode(name))).result(ANSWER_S)
    # If access is refused, TensorStore lists no objects of GCS and raises no error; a read raises it.
    store.read(os.fsencode(name) + keys[0] if keys else first or b'0', byte_range=slice(0, 1)).result(ANSWER_S)
  except ValueError as error:
    if not _BEYOND.search(str(error)):  # an empty object
      raise _explained(error, folder) from error
  return [os.fsdecode(key) for key in keys]


def _read_local(span: Span) -> bytes:
  path, offset, size = span

  def once() -> bytes:
    with open_files.pool().use(('range', path), lambda: documents.open_regular(path), os.close) as opened:
      return os.pread(opened, size, offset if offset >= 0 else max(0, os.fstat(opened).st_size + offset))
  return failures.retried(once, f'reading {path}')


def _submit(span: Span) -> Future:
  """Starts to read a span of an object; `_take` waits for the bytes. Raises UserError if there is no such bucket."""
  path, offset, size = span
  scheme, bucket, name = split(path)
  byte_range = slice(offset, None) if offset < 0 else slice(offset, offset + size)
  future: Future = _store(scheme, bucket).read(name, byte_range=byte_range)
  return future


def _take(span: Span, submitted: Future) -> bytes:
  """Returns the bytes of a span that was submitted. Raises as `read_many`."""
  futures = [submitted]

  def once() -> tuple[bytes, bytes]:
    return _answer(span, futures.pop() if futures else _submit(span))  # after an error the span is submitted again
  content, generation = failures.retried(once, f'reading {span.path}')
  if generation and generation != _state.generations.setdefault(span.path, generation):
    raise UserError(f'{span.path}: expected an object that does not change, got another one during the run. Start the '
                    'run again, if the object is the right one.')
  return content


def _answer(span: Span, future: Future) -> tuple[bytes, bytes]:
  """Returns bytes of an object, and its generation, which changes when the object is written again."""
  path, offset, _ = span
  try:
    answer = future.result(ANSWER_S)
  except ValueError as error:
    text = str(error)
    if not _BEYOND.search(text):
      raise _explained(error, path) from error
    end = int(total[1]) if (total := _TOTAL.search(text)) else 0
    if end <= offset:
      return b'', b''
    rest = Span(path, max(0, offset), end - max(0, offset))  # the object is smaller than the span
    return _answer(rest, _submit(rest))
  if answer.state != 'value':
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
  return bytes(answer.value), bytes(answer.stamp.generation)


def _explained(error: ValueError, address: str) -> UserError | OSError:
  """Returns the error to raise in place of TensorStore's, all of whose errors are ValueErrors."""
  text = str(error)
  if _RIGHTS.search(text):
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
  connections = max(4, min(256, max_files // _FILES_EACH)) if max_files > 0 else 256
  if connections < _FEW:
    os.environ.setdefault('TENSORSTORE_HTTP_THREADS', '1')  # each of the usual four needs two files
  spec: dict[str, Any] = {}
  for driver in _DRIVERS.values():
    spec |= {f'{driver}_request_concurrency': {'limit': connections}, f'{driver}_request_retries': _RETRIES}
  return tensorstore.Context(spec)


@functools.cache
def _store(scheme: str, bucket: str) -> Any:
  """Returns the client of a bucket."""
  import tensorstore
  spec: dict[str, Any] = {'driver': _DRIVERS[scheme], 'bucket': bucket}
  if scheme == 's3' and (endpoint := next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), '')):
    spec |= {'endpoint': endpoint, 'aws_region': os.environ.get('AWS_REGION', 'us-east-1')}
  address = f'{scheme}://{bucket}'
  try:
    return tensorstore.KvStore.open(spec, context=_context()).result(ANSWER_S)
  except ValueError as error:
    if failures.is_temporary(error):
      raise _explained(error, address) from error
    raise UserError(f'{address}: expected the address of a bucket, got "{str(error).splitlines()[0][:200]}". Correct '
                    'it.') from error


class Window:
  """Reads a few bytes here and there from the beginning of a file to its end, as the scan for an index does.

  Of a local file, 4 KiB are read at a time, and the bytes between are skipped. An object is read in blocks of 4 MiB, of
  which the next three are in flight.
  """
  LOCAL, BLOCK, AHEAD = 2**12, 2**22, 3
  _MOST = 2**62  # bytes of a file

  def __init__(self, path: str) -> None:
    """Raises OSError if a local file is missing."""
    self.path, self._is_object = path, is_address(path)
    self._size = self._MOST if self._is_object else os.path.getsize(path)
    self._start, self._content = 0, b''
    self._blocks, self._next = dict[int, bytes](), -1
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
    """Returns how a message names a place in the file."""
    return f'at byte {offset:,}' + ('' if self._is_object else f' of {self._size:,}')

  def close(self) -> None:
    """Discards what was read ahead."""
    self._blocks, self._next, self._stream = {}, -1, iter(())

  def _join(self, offset: int, size: int) -> bytes:
    """Returns bytes of an object up to the end of a block."""
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
    if not self._next <= number <= self._next + self.AHEAD or self._next < 0:
      self._stream = read_many((Span(self.path, n * self.BLOCK, self.BLOCK) for n in itertools.count(number)),
                               self.AHEAD + 1)
      self._next = number
    while self._next <= number:
      self._blocks[self._next] = next(self._stream)
      self._next += 1
    return self._blocks[number]


# What else a reader of a file needs.

_COMPRESSED = {b'\x1f\x8b': 'gzip', b'\x28\xb5\x2f\xfd': 'Zstandard', b'BZh': 'bzip2', b'\xfd7zXZ': 'xz',
               **{b'\x78' + level: 'zlib' for level in (b'\x01', b'\x5e', b'\x9c', b'\xda')}}
"""The first bytes of compressed files."""


def describe_compression(start: bytes) -> str:
  """Returns what a message says of a file whose first bytes are those of a compressed file; '' if they are not."""
  kind = next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), '')
  return f'a file compressed by {kind}, which cannot be read at random: decompress it' if kind else ''
