"""When checkpoints are saved: at fixed steps, or after a wall time that all processes agree on.

The train job makes a `SaveTimes` on every process. The hook `Checkpoint` calls `decide` at the steps that `every`
divides, and `note_save` after each save. A wall time does not change results: a state depends only on its step, so a
resumed run continues bit for bit, whatever the step of the checkpoint.
"""
from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from vit_jax.parallel import mesh as meshes

FIRST_STEPS = 10  # from the start of the process until process 0 first reads its clock
WAIT_SHARE, MIN_READINGS = 0.9, 8
"""The speed may change: the clock is read after this share of the time left, and so often between two saves."""
_MAX_STEPS = 2**30  # so that the number of steps fits int32


class SaveTimes:
  """Decides to save every `steps` steps (0 = never), or at the step that ends nearest to `seconds` after the last save.

  With `seconds`, process 0 reads its clock at few steps. It sends two numbers to the other processes: whether to save,
  and after how many steps it reads the clock again, from the mean time of a step since the last reading. `every` is
  the interval in steps; with `seconds`, it is the step at which process 0 reads its clock next.

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
    self._seconds, self._clock, self._agree = seconds, clock, agree or meshes.broadcast_from_process_0
    self._saved_s = self._read_s = clock()  # times of the last save and of the last reading of the clock
    self._read_step = start
    self.every = start + FIRST_STEPS if seconds else steps

  def decide(self, step: int) -> bool:
    """Returns whether to save at a step, and sets the next `every`. All processes must call it at the same steps."""
    if self._seconds is None:
      return bool(self.every) and step % self.every == 0
    if step != self.every:
      return False
    now_s = self._clock()
    step_s = (now_s - self._read_s) / max(1, step - self._read_step)
    left_s = self._seconds - (now_s - self._saved_s)
    is_due = left_s < step_s / 2
    wait_s = self._seconds if is_due else left_s  # until the clock is read again
    if wait_s / max(step_s, 1e-9) > FIRST_STEPS:
      wait_s = min(wait_s * WAIT_SHARE, self._seconds / MIN_READINGS)
    num_steps = min(_MAX_STEPS, max(1, round(wait_s / max(step_s, 1e-9))))
    is_due, num_steps = self._agree(np.asarray([is_due, num_steps], np.int32)).tolist()
    self._read_step, self._read_s = step, now_s
    self.every = step + num_steps
    return bool(is_due)

  def note_save(self) -> None:
    """Notes that a save has ended. The next interval begins now, and the save does not count as time of steps."""
    self._saved_s = self._read_s = self._clock()
