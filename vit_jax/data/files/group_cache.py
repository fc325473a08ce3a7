"""A bounded cache of decoded row groups, which all sources and threads of a process share."""
from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple


class _Entry(NamedTuple):
  """A value and its bytes."""
  value: Any
  num_bytes: int


class Cache:
  """Values that are expensive to make; the least recently used are removed above `max_bytes`. Safe for threads.

  Threads that need a value which another one makes wait for it. A value that is larger than the limit is kept until
  the next one is made, so the cache takes at most `max_bytes` or one value.
  """

  def __init__(self, max_bytes: int) -> None:
    self.max_bytes, self.num_bytes, self.num_made = max_bytes, 0, 0
    self._lock = threading.Lock()
    self._entries: collections.OrderedDict[Hashable, _Entry] = collections.OrderedDict()
    self._making: dict[Hashable, threading.Lock] = {}

  def __contains__(self, key: Hashable) -> bool:
    return key in self._entries

  def get(self, key: Hashable, make: Callable[[], tuple[Any, int]]) -> Any:
    """Returns the value of a key; `make` returns it with its bytes if it is not there."""
    if (found := self._find(key)) is not None:
      return found.value
    with self._lock:
      making = self._making.setdefault(key, threading.Lock())
    with making:
      if (found := self._find(key)) is not None:
        return found.value
      try:
        entry = _Entry(*make())
        self._keep(key, entry)
      finally:
        with self._lock:
          self._making.pop(key, None)
    return entry.value

  def _find(self, key: Hashable) -> _Entry | None:
    with self._lock:
      if (found := self._entries.get(key)) is not None:
        self._entries.move_to_end(key)
    return found

  def _keep(self, key: Hashable, entry: _Entry) -> None:
    with self._lock:
      self.num_made += 1
      while self._entries and self.num_bytes + entry.num_bytes > self.max_bytes:
        self.num_bytes -= self._entries.popitem(last=False)[1].num_bytes
      self._entries[key] = entry
      self.num_bytes += entry.num_bytes
