"""The contract of a tracker, to which a run sends its metrics, and what keeps its errors from the run.

`metrics.jsonl` is the record of a run. A tracker shows it elsewhere: TensorBoard, Weights & Biases, MLflow.
"""
from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Protocol

from vit_jax.core.types import HostArray

log = logging.getLogger('vit_jax.record')
WAITING = 10_000  # calls that may wait for a slow tracker
CLOSE_S = 60.     # that the end of a run waits for one
Status = Literal['done', 'stopped', 'failed']
"""How a start of a run ended: after its last step, by a signal to stop, or by an error."""


class Histogram(NamedTuple):
  """Numbers of values by bin: `counts [B]` and `edges [B + 1]`, with the sum of the values and of their squares."""
  counts: HostArray
  edges: HostArray
  sum: float
  sum_squares: float


class Tracker(Protocol):
  """Shows the record of a run; made when the run starts. Every method may raise any exception."""

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds metrics after `step` updates."""
    ...

  def images(self, step: int, values: Mapping[str, HostArray]) -> None:
    """Adds images `[B, H, W, 3]` u8 by name."""
    ...

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    """Adds histograms by name; a tracker that has none does nothing."""
    ...

  def settle(self) -> None:
    """Makes what was written durable, before a checkpoint; a tracker that writes no files of its own does nothing."""
    ...

  def close(self, status: Status) -> None:
    """Sends what is left."""
    ...


class Guarded:
  """A tracker whose first error is a warning, after which it does nothing: a run does not depend on it.

  Args:
    name: for the warning, such as `trackers.wandb`.
    make: returns the tracker, at its first call.
    background: all calls, that of `make` included, are those of a thread, so that a slow server does not delay steps.
  """

  def __init__(self, name: str, make: Callable[[], Tracker], *, background: bool) -> None:
    self._name, self._make = name, make
    self._tracker: Tracker | None = None
    self._failed = False
    self._calls: queue.Queue[Callable[[Tracker], None] | None] | None = None
    if background:
      self._calls = queue.Queue(WAITING)
      self._thread = threading.Thread(target=self._work, name=name, daemon=True)
      self._thread.start()
    self._do(lambda tracker: None)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    copied = dict(values)
    self._do(lambda tracker: tracker.write(step, copied))

  def images(self, step: int, values: Mapping[str, HostArray]) -> None:
    self._do(lambda tracker: tracker.images(step, values))

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    self._do(lambda tracker: tracker.histograms(step, values))

  def settle(self) -> None:
    self._do(lambda tracker: tracker.settle())

  def close(self, status: Status) -> None:
    """Closes the tracker, and waits for it for at most `CLOSE_S`."""
    self._do(lambda tracker: tracker.close(status))
    if self._calls is None:
      return
    if not self._failed:
      self._calls.put(None)
    self._thread.join(CLOSE_S)
    if self._thread.is_alive():
      self._warn(f'no end within {CLOSE_S:.0f} s')

  def _do(self, call: Callable[[Tracker], None]) -> None:
    if self._failed:
      return
    if self._calls is None:
      self._call(call)
      return
    try:
      self._calls.put_nowait(call)
    except queue.Full:
      self._warn(f'{WAITING:,} calls that wait')

  def _work(self) -> None:
    assert self._calls is not None
    while not self._failed and (call := self._calls.get()) is not None:
      self._call(call)

  def _call(self, call: Callable[[Tracker], None]) -> None:
    try:
      if self._tracker is None:
        self._tracker = self._make()
      call(self._tracker)
    except (Exception, SystemExit) as error:  # the code of other packages may raise anything
      lines = str(error).strip().splitlines()
      self._warn(f'{type(error).__name__}{": " + lines[0][:300] if lines else ""}')

  def _warn(self, got: str) -> None:
    self._failed = True
    log.warning('%s: expected a tracker that takes the metrics, got %s. The run continues without it; metrics.jsonl '
                'has all values.', self._name, got)
