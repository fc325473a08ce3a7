"""Reads parts of files by offset, with temporary errors of the storage repeated. Safe for threads.

Every reader of an indexed format (ArrayRecord in object storage, TFRecord, tar, Parquet) reads its records here. A path
is a local one, or an address `gs://BUCKET/NAME` or `s3://BUCKET/NAME`, which `remote.py` reads.

A record of object storage takes tens of milliseconds to arrive, so a loader starts reads before it needs them
(`start`, `drop`); bytes that were started and not yet dropped are bounded. A bounded folder may keep what was read
(`range_cache.py`).
"""
from __future__ import annotations

import dataclasses
import os
import pathlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vit_jax.core import retrying
from vit_jax.core.errors import UserError
from vit_jax.data.files import access, group_cache, open_files, range_cache, remote, user_files

if TYPE_CHECKING:
  from vit_jax.config import schema
  from vit_jax.data.files.remote import Future


class Range(NamedTuple):
  """A part of a file: `size` bytes from `offset`; with a negative offset the last bytes."""
  path: str
  offset: int
  size: int


class Settings(NamedTuple):
  """How a process reads object storage.

  ahead_bytes: that are read before they are needed, at most.
  cache_bytes: of the folder with what was read; 0 = nothing is kept.
  cache_dir: that folder, and that of temporary files; '' = in the user's cache, and the system's for temporary files.
  group_bytes: of decoded row groups that are held.
  """
  ahead_bytes: int = 2**28
  cache_bytes: int = 0
  cache_dir: str = ''
  group_bytes: int = 2**30

  @classmethod
  def of(cls, data: schema.Data) -> Settings:
    """Returns the settings of the data of a run."""
    return cls(data.read_ahead_mib * 2**20, data.cache_gib * 2**30, data.cache_dir,
               data.shuffle_mib * 2**20)


@dataclasses.dataclass
class _Started:
  """A read that has begun, and how many will use it."""
  future: Future
  num_users: int = 1


class _State:
  """What a process has of remote objects: settings, reads that have begun, generations, and the caches."""

  def __init__(self, settings: Settings) -> None:
    self.settings, self.lock, self.num_bytes = settings, threading.Lock(), 0
    self.started: dict[Range, _Started] = {}
    self.generations: dict[str, bytes] = {}
    self.cache = _open_cache(settings)
    self.groups = group_cache.Cache(settings.group_bytes)


def _open_cache(settings: Settings) -> range_cache.Cache | None:
  if not settings.cache_bytes:
    return None
  folder = pathlib.Path(settings.cache_dir) if settings.cache_dir else access.cache_folder('objects')
  try:
    return range_cache.Cache(folder, settings.cache_bytes)
  except OSError as error:
    raise UserError(f'data.cache_dir: expected a folder that can be written, got {folder} ({error.strerror}). Choose '
                    'another folder, or set data.cache_gib=0.') from error


_state = _State(Settings())


def configure(settings: Settings) -> None:
  """Sets how this process reads object storage; loader processes get the settings of their parent.

  Raises:
    UserError: the folder for the cache cannot be written.
  """
  global _state
  if settings != _state.settings:
    _state = _State(settings)


def settings() -> Settings:
  """Returns how this process reads object storage."""
  return _state.settings


def groups() -> group_cache.Cache:
  """Returns the decoded row groups of this process."""
  return _state.groups


def read(path: str, offset: int, size: int, *, keep: bool = True) -> bytes:
  """Returns up to `size` bytes of a file from `offset`; fewer at its end.

  `keep`: the bytes may be kept in the folder of `data.cache_gib`, since they will be read again.

  Raises:
    OSError: the file cannot be read.
    TemporaryError: its storage still fails after a time.
    UserError: the account of this machine may not read it, or it has changed since this process read from it.
  """
  if remote.is_address(path):
    return _read_object(Range(path, offset, size), keep=keep)

  def once() -> bytes:
    with open_files.pool().use(('range', path), lambda: os.open(path, os.O_RDONLY), os.close) as opened:
      return os.pread(opened, size, offset)
  return retrying.retried(once, f'reading {path}')


def read_end(path: str, size: int) -> bytes:
  """Returns the last `size` bytes of a file, or all if it has fewer; raises as `read`."""
  if remote.is_address(path):
    return _read_object(Range(path, -size, size), keep=True)
  return read(path, max(0, os.path.getsize(path) - size), size)


def read_file(path: str, max_bytes: int) -> bytes:
  """Returns the content of a small file, such as a description.

  Raises:
    TooLarge: it has more than `max_bytes`.
    OSError, TemporaryError, UserError: as `read`.
  """
  if not remote.is_address(path):
    return user_files.read(path, max_bytes)
  found = retrying.retried(lambda: remote.take(remote.submit(path, 0, max_bytes + 1), path, 0).content,
                           f'reading {path}')
  if len(found) > max_bytes:
    raise user_files.TooLarge(len(found))
  return found


def read_text(path: str, what: str, *, expected: str = 'a text file', advice: str = 'Check the path.') -> str:
  """Returns the text of a file of at most `user_files.TEXT_BYTES` in UTF-8; arguments as `user_files.read_text`.

  Raises:
    TemporaryError: its storage still fails after a time.
    UserError: it cannot be read, is too large, or is not text in UTF-8.
  """
  with user_files.explained(what, max_bytes=user_files.TEXT_BYTES, expected=expected, advice=advice):
    return read_file(path, user_files.TEXT_BYTES).decode('utf-8-sig')


def stamps(paths: Sequence[str]) -> list[tuple[object, ...]]:
  """Returns for each file what changes when it is written again: size and time, or the generation of an object.

  Raises:
    OSError, TemporaryError, UserError: as `read`.
  """
  begun = [part for path in paths if remote.is_address(path) and start(part := Range(path, 0, 1))]
  try:
    return [_stamp(path) for path in paths]
  finally:
    for part in begun:
      drop(part)


def _stamp(path: str) -> tuple[object, ...]:
  if remote.is_address(path):
    _read_object(Range(path, 0, 1), keep=False)
    return (_state.generations.get(path, b''),)
  found = os.stat(path)
  return found.st_size, found.st_mtime_ns


def list_names(folder: str, start: str = '') -> list[str]:
  """Returns the names of the files in a folder, in order; in object storage also those below its folders.

  Only names that begin with `start` are listed.

  Raises:
    OSError, TemporaryError, UserError: as `read`.
  """
  if remote.is_address(folder):
    return retrying.retried(lambda: remote.list_names(folder, start), f'listing {folder}')
  return retrying.retried(lambda: sorted(name for name in os.listdir(folder) if name.startswith(start)),
                          f'listing {folder}')


def _read_object(part: Range, *, keep: bool) -> bytes:
  """Returns a part of an object, from the cache, from a read that was started, or from the storage."""
  state, path, offset, size = _state, *part
  generation = state.generations.get(path)
  if keep and state.cache and generation and (kept := state.cache.get(path, generation, offset, size)) is not None:
    return kept
  with state.lock:
    begun = state.started.get(part)
  first = begun.future if begun else None

  def once() -> remote.Answer:
    nonlocal first
    future, first = first, None  # after an error the range is read anew
    return remote.take(remote.submit(*part) if future is None else future, path, offset)
  answer = retrying.retried(once, f'reading {path}')
  if answer.generation and answer.generation != state.generations.setdefault(path, answer.generation):
    raise UserError(f'{path}: expected an object that does not change, got another one during the run. Start the run '
                    'again, if the object is the right one.')
  if keep and state.cache and answer.generation and offset >= 0 and len(answer.content) == size:
    state.cache.put(path, answer.generation, offset, answer.content)
  return answer.content


def start(part: Range) -> bool:
  """Starts reading a part of a file that `read` will soon be called for; returns False if too many bytes are waiting.

  Nothing is begun for a local file, or if the part is kept. Each `start` that returns True needs a `drop`, after the
  part was read or when it is not needed any more.
  """
  state, (path, offset, size) = _state, part
  if not remote.is_address(path):
    return True
  with state.lock:
    if (known := state.started.get(part)) is not None:
      known.num_users += 1
      return True
    if state.started and state.num_bytes + size > state.settings.ahead_bytes:
      return False
  generation = state.generations.get(path)
  if state.cache and generation and state.cache.has(path, generation, offset, size):
    return True
  future = remote.submit(*part)
  with state.lock:
    if (known := state.started.get(part)) is not None:  # another thread was faster
      known.num_users += 1
    else:
      state.started[part] = _Started(future)
      state.num_bytes += size
  return True


def drop(part: Range) -> None:
  """Removes a part that was started, which is not read any more by the caller."""
  state = _state
  with state.lock:
    if (known := state.started.get(part)) is None:
      return
    known.num_users -= 1
    if not known.num_users:
      del state.started[part]
      state.num_bytes -= part.size

