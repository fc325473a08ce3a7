"""Makes batches one ahead of their consumer, in a thread: the host reads and places batch t + 1 during step t.

The train job creates one `Ahead` of its loader and `mesh.put_batch`, over which the training loop iterates. The
consumer puts True into the queue `_wanted` for each value that the thread `feed` is to make, and False to end it. The
thread puts each value, or the error in place of it, into the queue `_made`.
"""
from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

In = TypeVar('In')
Out = TypeVar('Out')
CLOSE_S = 5.
"""Longest time that `close` waits for the batch that is being made."""


class Ahead(Generic[In, Out]):
  """Iterates over `place(item)` for each of `items`, of which one is made ahead; use it in a `with` statement.

  The values and their order are those of `map(place, items)`. An error of `items` or `place` is raised by the call of
  `next` for the value that could not be made. The thread does not keep the process alive.
  """

  def __init__(self, items: Iterator[In], place: Callable[[In], Out]) -> None:
    self._items, self._place = items, place
    self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
    self._made: queue.SimpleQueue[Out | BaseException] = queue.SimpleQueue()
    self._ended: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name='feed', daemon=True)
    self._wanted.put(True)
    self._thread.start()

  def __iter__(self) -> Iterator[Out]:
    return self

  def __next__(self) -> Out:
    if self._ended is not None:
      raise self._ended
    made = self._made.get()
    if isinstance(made, BaseException):
      self._ended = made
      raise made
    self._wanted.put(True)
    return made

  def __enter__(self) -> Ahead[In, Out]:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends the thread after the batch that it is making. The owner of `items` closes them afterwards."""
    self._ended = self._ended or StopIteration()
    self._wanted.put(False)
    self._thread.join(CLOSE_S)

  def _run(self) -> None:
    while self._wanted.get():
      try:
        self._made.put(self._place(next(self._items)))
      except BaseException as error:  # any error of reading or placing; the consumer raises it
        self._made.put(error)
        break
    if hasattr(self._items, 'close'):  # a generator can only be closed by the thread that runs it
      with contextlib.suppress(Exception):
        self._items.close()
