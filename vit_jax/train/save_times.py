"""When checkpoints are saved: at fixed steps, or after a wall time that all processes agree on.

The hook of checkpoints asks `is_due` at the steps that `next` divides, and calls `saved` after each save.

The step at which a checkpoint is saved does not change what it holds: a state is a function of its step, and a resumed
run continues bit by bit whichever step it resumes from.
"""
from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from vit_jax.parallel import mesh as meshes

FIRST_STEPS = 10
"""Steps from the start of the process to the first look at the clock."""
SHARE, PARTS = 0.9, 8
"""The clock is looked at again after this part of the remaining time, and at least so often in an interval, as steps
may become faster or slower."""
_MOST_STEPS = 2**30


class SaveTimes:
  """Every `steps` steps (0 = never), or after `seconds` since the start or the last save, to the nearest step.

  Process 0 looks at its clock, at few steps, and tells the others whether to save and at which step it looks again.
  That step is estimated from the time of the steps since it looked last. Looking waits for the steps under way.

  Args:
    steps: between two saves; not used with `seconds`.
    seconds: between two saves; None = fixed steps.
    start: the step that the run begins at.
    clock: in seconds.
    agree: returns the array that process 0 passes, on every process.
  """

  def __init__(self, steps: int = 0, seconds: float | None = None, *, start: int = 0,
               clock: Callable[[], float] = time.monotonic,
               agree: Callable[[np.ndarray], np.ndarray] | None = None) -> None:
    self._seconds, self._clock, self._agree = seconds, clock, agree or meshes.of_process_0
    self._saved_s = self._looked_s = clock()
    self._looked = start
    self.next = start + FIRST_STEPS if seconds else steps  # at which to ask; with fixed steps also at its multiples

  def is_due(self, step: int) -> bool:
    """Returns whether to save at a step. All processes ask at the same steps, and get the same answer."""
    if self._seconds is None:
      return bool(self.next) and step % self.next == 0
    if step != self.next:
      return False
    now_s = self._clock()
    step_s = (now_s - self._looked_s) / max(1, step - self._looked)
    left_s = self._seconds - (now_s - self._saved_s)
    is_due = left_s < step_s / 2
    left_s = self._seconds if is_due else left_s
    ahead = left_s / max(step_s, 1e-9)
    ahead = min(left_s * SHARE, self._seconds / PARTS) / max(step_s, 1e-9) if ahead > FIRST_STEPS else ahead
    answer = np.asarray([is_due, min(_MOST_STEPS, max(1, round(ahead)))], np.int32)
    due, ahead_steps = self._agree(answer).tolist()
    self._looked, self._looked_s, self.next = step, now_s, step + ahead_steps
    return bool(due)

  def saved(self) -> None:
    """Counts from now; the time of the save does not count as that of steps."""
    self._saved_s = self._looked_s = self._clock()
