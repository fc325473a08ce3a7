"""When checkpoints are saved: at fixed steps, or after a wall time that all processes agree on.

The train job makes a `SaveTimes` on every process. The hook `Checkpoint` calls `is_due` at the steps that `next`
divides, and `saved` after each save. A wall time does not change results: a state depends only on its step, so a
resumed run continues bit for bit, whatever the step at which it was saved.
"""
from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from vit_jax.parallel import mesh as meshes

FIRST_STEPS = 10  # from the start of the process until process 0 first reads its clock
SHARE, PARTS = 0.9, 8
"""The clock is read after this share of the time left, and at least 8 times between two saves: the speed may change."""
_MOST_STEPS = 2**30  # so that the number of steps fits int32


class SaveTimes:
  """Decides to save every `steps` steps (0 = never), or at the step that ends nearest to `seconds` after the last save.

  With `seconds`, process 0 reads its clock at few steps. It sends two numbers to the other processes: whether to save,
  and after how many steps it reads the clock again, from the mean time of a step since the last reading.

  Args:
    steps: between two saves; not used with `seconds`.
    seconds: between two saves; None = fixed steps.
    start: the number of steps done at the start of this process.
    clock: returns seconds.
    agree: returns on every process the array that process 0 passes.
  """

  def __init__(self, steps: int = 0, seconds: float | None = None, *, start: int = 0,
               clock: Callable[[], float] = time.monotonic,
               agree: Callable[[np.ndarray], np.ndarray] | None = None) -> None:
    self._seconds, self._clock, self._agree = seconds, clock, agree or meshes.of_process_0
    self._saved_s = self._read_s = clock()  # times of the last save and of the last reading
    self._read_step = start
    self.next = start + FIRST_STEPS if seconds else steps  # call `is_due` at this step, or also at its multiples

  def is_due(self, step: int) -> bool:
    """Returns whether to save at a step. All processes call it at the same steps, and get the same result."""
    if self._seconds is None:
      return bool(self.next) and step % self.next == 0
    if step != self.next:
      return False
    now_s = self._clock()
    step_s = (now_s - self._read_s) / max(1, step - self._read_step)
    left_s = self._seconds - (now_s - self._saved_s)
    is_due = left_s < step_s / 2
    if is_due:
      left_s = self._seconds
    if left_s / max(step_s, 1e-9) > FIRST_STEPS:
      left_s = min(left_s * SHARE, self._seconds / PARTS)
    num_steps = min(_MOST_STEPS, max(1, round(left_s / max(step_s, 1e-9))))
    due, num_steps = self._agree(np.asarray([is_due, num_steps], np.int32)).tolist()
    self._read_step, self._read_s, self.next = step, now_s, step + num_steps
    return bool(due)

  def saved(self) -> None:
    """Notes that a save has ended. The next interval begins now, and the save does not count as time of steps."""
    self._saved_s = self._read_s = self._clock()
