"""How many files and threads a process uses: a pool of open files, shared by all sources of a process.

A dataset of 1,024 shards read in random order would keep 1,024 files open, the default limit of a process on many
systems; then other code could not open a file.
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

MAX_OPEN = 65_536  # files; some programs iterate over all numbers up to the limit
MAX_THREADS = 16
_SHARE, _OTHERS, _LEAST = 2, 60, 4  # others: a checkpoint alone opens about 20 files while it is written
_File = TypeVar('_File')


@dataclasses.dataclass(slots=True)
class _Entry:
  """An open file, the number of threads that read it now, and how many files of the system it stands for."""
  file: Any
  close: Callable[[Any], None]
  num_files: int
  num_users: int = 0
  is_dropped: bool = False


class _Use:
  """A use of an open file. A class of its own, as a generator takes 2 us more for each image."""
  __slots__ = ('_entry', '_pool')

  def __init__(self, pool: Pool, entry: _Entry) -> None:
    self._pool, self._entry = pool, entry

  def __enter__(self) -> Any:
    return self._entry.file

  def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
    self._pool.give_back(self._entry, is_broken=kind is not None)


class Pool:
  """At most `max_open` files; the least recently used one is closed first. Safe for threads.

  Files that are being read stay open, so the limit may be exceeded by the number of threads.
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
    """Returns the context of the file of this key, which stays open during the `with` statement, and perhaps longer.

    `num_files` is the number of open files of the system that it needs.
    """
    entry = self._take(key, None)
    if entry is None:
      try:
        made = _Entry(open_file(), close, num_files)  # outside of the lock: it may take milliseconds
      except OSError as error:
        if error.errno != errno.EMFILE:
          raise
        self._close_idle()  # other code has more open files than usual, such as while a checkpoint is written
        made = _Entry(open_file(), close, num_files)
      entry = self._take(key, made)
      assert entry is not None
      if entry is not made:  # another thread was faster
        close(made.file)
    return _Use(self, entry)

  def give_back(self, entry: _Entry, *, is_broken: bool = False) -> None:
    """Counts one user less; closes the least recently used files that no thread reads, down to the limit.

    A broken file, which a network file system may have lost, is opened anew at its next use.
    """
    with self._lock:
      entry.num_users -= 1
      if is_broken and not entry.is_dropped:
        entry.is_dropped = True
        self._num_files -= entry.num_files
        self._entries = collections.OrderedDict((k, one) for k, one in self._entries.items() if one is not entry)
      is_full, is_unused = self._num_files > self._max_open, entry.is_dropped and not entry.num_users
    if is_unused:
      entry.close(entry.file)
    if is_full:
      self._close_idle(self._max_open)

  def _close_idle(self, down_to: int = 0) -> None:
    """Closes the least recently used files that no thread reads, down to a number of files."""
    surplus: list[_Entry] = []
    with self._lock:
      for key in [key for key, entry in self._entries.items() if not entry.num_users]:
        if self._num_files > down_to:
          surplus.append(self._entries.pop(key))
          self._num_files -= surplus[-1].num_files
    for unused in surplus:
      unused.close(unused.file)

  def _take(self, key: Hashable, made: _Entry | None) -> _Entry | None:
    """Returns the entry of this key, or else stores and returns `made`; counts one more user."""
    with self._lock:
      if key not in self._entries and made is not None:
        self._entries[key] = made
        self._num_files += made.num_files
      entry = self._entries.get(key)
      if entry is not None:
        entry.num_users += 1
        self._entries.move_to_end(key)
    return entry


@functools.cache
def pool() -> Pool:
  """Returns the pool of this process: half of the files that it may open, and less if that leaves few for others."""
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  limit = min(soft if soft > 0 else MAX_OPEN, MAX_OPEN)
  return Pool(max(_LEAST, min(limit // _SHARE, limit - _OTHERS)))


def raise_limit() -> None:
  """Raises the limit of open files of this process and its children to the system's maximum, at most `MAX_OPEN`."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = MAX_OPEN if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    with contextlib.suppress(OSError, ValueError):  # the system allows less than its stated maximum
      resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def num_threads(threads: int) -> int:
  """Returns `threads`, or for 0 one per core that this process may use, at most 16."""
  return threads or min(MAX_THREADS, num_cores())


def num_cores() -> int:
  """Returns the number of cores that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
