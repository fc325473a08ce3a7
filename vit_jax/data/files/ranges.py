"""Reads parts of files by offset, with temporary errors of the storage repeated. Safe for threads.

Every reader of an indexed format (ArrayRecord in object storage, TFRecord, tar, Parquet) reads its records here. A path
is a local one, or an address `gs://BUCKET/NAME` or `s3://BUCKET/NAME`, which `remote.py` reads.

A record of object storage takes tens of milliseconds to arrive, so a loader starts reads before it needs them:
`start` begins one, and the `read` of the same range waits for it. Bytes that were started and not yet read are bounded.
"""
from __future__ import annotations

import dataclasses
import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from vit_jax.core import retrying
from vit_jax.data.files import open_files, remote, user_files

if TYPE_CHECKING:
  from vit_jax.data.files.remote import Future


class Range(NamedTuple):
  """A part of a file: `size` bytes from `offset`; with a negative offset the last bytes."""
  path: str
  offset: int
  size: int


@dataclasses.dataclass
class _Started:
  """A read that has begun, and how many will use it."""
  future: Future
  num_users: int = 1


class _Ahead:
  """The reads that have begun in this process."""

  def __init__(self) -> None:
    self.max_bytes = 2**28
    self._lock, self._bytes = threading.Lock(), 0
    self._started: dict[Range, _Started] = {}

  def start(self, part: Range) -> bool:
    with self._lock:
      if (known := self._started.get(part)) is not None:
        known.num_users += 1
        return True
      if self._started and self._bytes + part.size > self.max_bytes:
        return False
      self._started[part] = _Started(remote.submit(*part))
      self._bytes += part.size
    return True

  def claim(self, part: Range) -> Future | None:
    """Returns the read of a range, which counts one user less."""
    if not self._started:
      return None
    with self._lock:
      if (known := self._started.get(part)) is None:
        return None
      known.num_users -= 1
      if not known.num_users:
        del self._started[part]
        self._bytes -= part.size
    return known.future


_ahead = _Ahead()


def read(path: str, offset: int, size: int) -> bytes:
  """Returns up to `size` bytes of a file from `offset`; fewer at its end.

  Raises:
    OSError: the file cannot be read.
    TemporaryError: its storage still fails after a time.
    UserError: the account of this machine may not read it.
  """
  if remote.is_address(path):
    return read_object(Range(path, offset, size)).content

  def once() -> bytes:
    with open_files.pool().use(('range', path), lambda: os.open(path, os.O_RDONLY), os.close) as opened:
      return os.pread(opened, size, offset)
  return retrying.retried(once, f'reading {path}')


def read_end(path: str, size: int) -> bytes:
  """Returns the last `size` bytes of a file, or all if it has fewer; raises as `read`."""
  if remote.is_address(path):
    return read_object(Range(path, -size, size)).content
  return read(path, max(0, os.path.getsize(path) - size), size)


def read_file(path: str, max_bytes: int) -> bytes:
  """Returns the content of a small file, such as a description.

  Raises:
    TooLarge: it has more than `max_bytes`.
    OSError, TemporaryError, UserError: as `read`.
  """
  if not remote.is_address(path):
    return user_files.read(path, max_bytes)
  found = read(path, 0, max_bytes + 1)
  if len(found) > max_bytes:
    raise user_files.TooLarge(len(found))
  return found


def list_names(folder: str) -> list[str]:
  """Returns the names of the files in a folder, in order; in object storage also those below its folders.

  Raises:
    OSError, TemporaryError, UserError: as `read`.
  """
  if remote.is_address(folder):
    return retrying.retried(lambda: remote.list_names(folder), f'listing {folder}')
  return retrying.retried(lambda: sorted(os.listdir(folder)), f'listing {folder}')


def read_object(part: Range) -> remote.Answer:
  """Returns a part of an object of object storage, which may have been started; raises as `read`."""
  first = _ahead.claim(part)

  def once() -> remote.Answer:
    nonlocal first
    future, first = first, None  # after an error the range is read anew
    return remote.take(remote.submit(*part) if future is None else future, part.path, part.offset)
  return retrying.retried(once, f'reading {part.path}')


def start(part: Range) -> bool:
  """Starts reading a part of a file that `read` will soon be called for; returns False if too many bytes are waiting.

  Nothing is begun for a local file. Each range that was started must be read, or given up with `drop`.
  """
  return not remote.is_address(part.path) or _ahead.start(part)


def drop(part: Range) -> None:
  """Removes a range that was started, which will not be read."""
  _ahead.claim(part)


def set_max_bytes(num: int) -> None:
  """Sets how many bytes may be started and not yet read, in this process."""
  _ahead.max_bytes = num
