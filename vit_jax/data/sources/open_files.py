"""A bounded number of files that stay open for reading, shared by all sources of a process.

A set of 1,024 shards read in random order would hold 1,024 files open, as many as a process may have by default on
many systems: then anything else that opens a file fails first.
"""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import resource
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

MOST_RAISED = 65_536  # files; some programs look at every number up to the limit
_SHARE, _LEAST = 2, 8
_File = TypeVar('_File')


@dataclasses.dataclass
class _Entry:
  """An open file, and how many threads read it now."""
  file: Any
  close: Callable[[Any], None]
  num_users: int = 0


class Pool:
  """At most `most` open files, of which the least recently used is closed first. Safe for threads.

  Files that are being read stay open, so there may be as many more as there are threads.
  """

  def __init__(self, most: int):
    self._most, self._lock = most, threading.Lock()
    self._entries: collections.OrderedDict[Hashable, _Entry] = collections.OrderedDict()

  def __len__(self) -> int:
    return len(self._entries)

  @contextlib.contextmanager
  def use(self, key: Hashable, open_file: Callable[[], _File], close: Callable[[_File], None]) -> Iterator[_File]:
    """The file of this key, open as long as the `with` statement lasts, and perhaps longer."""
    entry = self._take(key, None)
    if entry is None:
      made = _Entry(open_file(), close)  # outside of the lock: on a network's file system it takes milliseconds
      entry = self._take(key, made)
      assert entry is not None
      if entry is not made:  # another thread was faster
        close(made.file)
    try:
      yield entry.file
    finally:
      with self._lock:
        entry.num_users -= 1
      self._trim()

  def _take(self, key: Hashable, made: _Entry | None) -> _Entry | None:
    """The entry of this key, or else `made`, entered; with one user more."""
    with self._lock:
      if key not in self._entries and made is not None:
        self._entries[key] = made
      entry = self._entries.get(key)
      if entry is not None:
        entry.num_users += 1
        self._entries.move_to_end(key)
    return entry

  def _trim(self) -> None:
    """Closes the files used least recently that nobody reads, down to the limit."""
    surplus: list[_Entry] = []
    with self._lock:
      num = len(self._entries) - self._most
      if num > 0:
        idle = [key for key, entry in self._entries.items() if not entry.num_users][:num]
        surplus = [self._entries.pop(key) for key in idle]
    for entry in surplus:
      entry.close(entry.file)


@functools.cache
def pool() -> Pool:
  """The pool of this process: half of the files that it may open."""
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return Pool(max(_LEAST, min(soft if soft > 0 else MOST_RAISED, MOST_RAISED) // _SHARE))


def raise_limit() -> None:
  """Lets this process, and those it starts, open as many files as the system allows it, up to `MOST_RAISED`."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = MOST_RAISED if hard == resource.RLIM_INFINITY else min(hard, MOST_RAISED)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    with contextlib.suppress(OSError, ValueError):  # the system allows less than it says
      resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
