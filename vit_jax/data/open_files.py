"""Limits the open files and the threads of a process.

Every reader of shards opens files through the `pool` of the process. Without the pool, reading a dataset of 1,024
shards in random order would keep 1,024 files open, the default limit of a process on many systems; then other code
could not open a file. A job calls `raise_limit` when it starts. Loaders and indexes use `num_threads` threads.
"""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import os
import resource
import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

MAX_OPEN = 65_536  # open files of a process; not more, as some programs iterate over all numbers up to the limit
MAX_THREADS = 16
_NUM_RESERVED = 60  # files left for other code: a checkpoint alone opens about 20 files while it is written
_MIN_POOL = 4
_File = TypeVar('_File')


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
  """An open file, the number of file descriptors that it needs, and the number of threads that use it now."""
  key: Hashable
  file: Any
  close: Callable[[Any], None]
  num_files: int
  num_users: int = 0


class _Use:
  """The context of one use of an open file. A class, because a generator would take 2 us more for each image."""
  __slots__ = ('_entry', '_pool')

  def __init__(self, pool: Pool, entry: _Entry) -> None:
    self._pool, self._entry = pool, entry

  def __enter__(self) -> Any:
    return self._entry.file

  def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
    self._pool.give_back(self._entry, is_broken=error_type is not None)


class Pool:
  """Keeps at most `max_open` files open; closes the least recently used file first. Safe for threads.

  A reader writes `with pool.use(key, open_file, close) as file:`. Files in use stay open, so the limit may be exceeded
  by the number of threads. Each `_Use` calls `give_back` at the end of the `with` statement.
  """

  def __init__(self, max_open: int) -> None:
    self._max_open, self._lock, self._num_files = max_open, threading.Lock(), 0
    self._entries: collections.OrderedDict[Hashable, _Entry] = collections.OrderedDict()

  def __len__(self) -> int:
    return len(self._entries)

  def __contains__(self, key: Hashable) -> bool:
    return key in self._entries

  def use(self, key: Hashable, open_file: Callable[[], _File], close: Callable[[_File], None], *,
          num_files: int = 1) -> _Use:
    """Returns the context of the file with this key. The file stays open during the `with` statement, perhaps longer.

    `num_files` is the number of file descriptors that the file needs.
    """
    entry = self._take_or_add(key)
    if entry is None:
      try:
        file = open_file()  # outside of the lock: it may take milliseconds
      except OSError as error:
        if error.errno != errno.EMFILE:
          raise
        self._close_idle(0)  # other code has more open files than usual, such as while a checkpoint is written
        file = open_file()
      entry = self._take_or_add(key, _Entry(key, file, close, num_files))
      assert entry is not None
      if entry.file is not file:  # another thread has opened the file in the meantime
        close(file)
    return _Use(self, entry)

  def give_back(self, entry: _Entry, *, is_broken: bool) -> None:
    """Counts one user less; closes the least recently used files that no thread uses, down to the limit.

    A broken file, which a network file system may have lost, leaves the pool and is opened again at the next use.
    """
    with self._lock:
      entry.num_users -= 1
      is_in_pool = self._entries.get(entry.key) is entry
      if is_broken and is_in_pool:
        self._remove(entry)
        is_in_pool = False
      must_close = not is_in_pool and not entry.num_users
      is_too_full = self._num_files > self._max_open
    if must_close:  # no other thread uses the removed file
      entry.close(entry.file)
    if is_too_full:
      self._close_idle(self._max_open)

  def _close_idle(self, down_to: int) -> None:
    """Closes the least recently used files that no thread uses, until `down_to` files are open."""
    surplus: list[_Entry] = []
    with self._lock:
      for entry in [entry for entry in self._entries.values() if not entry.num_users]:
        if self._num_files > down_to:
          self._remove(entry)
          surplus.append(entry)
    for entry in surplus:
      entry.close(entry.file)

  def _take_or_add(self, key: Hashable, opened: _Entry | None = None) -> _Entry | None:
    """Returns the entry with this key, or adds and returns `opened`; counts one more user of the returned entry."""
    with self._lock:
      if key not in self._entries and opened is not None:
        self._entries[key] = opened
        self._num_files += opened.num_files
      entry = self._entries.get(key)
      if entry is not None:
        entry.num_users += 1
        self._entries.move_to_end(key)
    return entry

  def _remove(self, entry: _Entry) -> None:
    del self._entries[entry.key]
    self._num_files -= entry.num_files


@functools.cache
def pool() -> Pool:
  """Returns the pool of this process, which keeps at most half of the files open that the process may open."""
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  limit = min(soft if soft > 0 else MAX_OPEN, MAX_OPEN)
  return Pool(max(_MIN_POOL, min(limit // 2, limit - _NUM_RESERVED)))


def raise_limit() -> None:
  """Raises the limit of open files of this process and its children to the maximum of the system or `MAX_OPEN`."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = MAX_OPEN if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    with contextlib.suppress(OSError, ValueError):  # the system allows less than its stated maximum
      resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def num_threads(threads: int) -> int:
  """Returns `threads`; if that is 0, one thread per core that this process may use, at most `MAX_THREADS`."""
  return threads or min(MAX_THREADS, num_cores())


def num_cores() -> int:
  """Returns the number of cores that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
