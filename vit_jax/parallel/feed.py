"""Makes batches one ahead of the training loop, in a thread: the host reads and places batch t + 1 during step t.

The train job creates one `Ahead` from the batches of its loader and `mesh.put_batch`; the training loop consumes it.
"""
from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar('Item')
Placed = TypeVar('Placed')
CLOSE_S = 5.
"""The longest time that `close` waits for the thread to finish a batch."""


class Ahead(Generic[Item, Placed]):
  """Iterates over `map(place, items)`, and makes one value ahead; use it in a `with` statement.

  An error of `items` or `place` is raised by the call of `next` for the value that could not be made. The thread `feed`
  does not keep the process alive.

  The consumer puts True into the queue `_requests` for each value that the thread should make, and False to end the
  thread. The thread puts each value, or the error in place of a value, into the queue `_results`.
  """

  def __init__(self, items: Iterator[Item], place: Callable[[Item], Placed]) -> None:
    self._items, self._place = items, place
    self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
    self._results: queue.SimpleQueue[Placed | BaseException] = queue.SimpleQueue()
    self._end: BaseException | None = None  # the error that every later call of `next` raises
    self._thread = threading.Thread(target=self._run, name='feed', daemon=True)
    self._requests.put(True)
    self._thread.start()

  def __iter__(self) -> Iterator[Placed]:
    return self

  def __next__(self) -> Placed:
    if self._end is not None:
      raise self._end
    result = self._results.get()
    if isinstance(result, BaseException):
      self._end = result
      raise result
    self._requests.put(True)
    return result

  def __enter__(self) -> Ahead[Item, Placed]:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def close(self) -> None:
    """Ends the thread when it has finished its batch. Afterwards the caller closes the loader of `items`."""
    self._end = self._end or StopIteration()
    self._requests.put(False)
    self._thread.join(CLOSE_S)

  def _run(self) -> None:
    while self._requests.get():
      try:
        self._results.put(self._place(next(self._items)))
      except BaseException as error:  # the consumer raises any error of `items` or `place`
        self._results.put(error)
        break
    if hasattr(self._items, 'close'):  # a generator can only be closed by the thread that runs it
      with contextlib.suppress(Exception):
        self._items.close()
