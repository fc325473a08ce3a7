"""When checkpoints are saved: by steps or by the clock of process 0, at the same steps on all processes."""
from __future__ import annotations

import itertools

import numpy as np
import pytest

from vit_jax.config import check, durations
from vit_jax.config import schema as s
from vit_jax.train import checkpoint, save_times


class World:
  """A run of several processes, each with a clock of its own, whose steps take `step_s`; process 0 decides."""

  def __init__(self, every_s: float, *, offsets: tuple[float, ...] = (0.,), start: int = 0, save_s: float = 0.) -> None:
    self.save_s = save_s
    self.now_s, self.told = 0., np.zeros(2, np.int32)
    self.times = [save_times.SaveTimes(0, every_s, start=start, clock=lambda o=o, n=n: self.now_s * (1 + n) + o,  # type: ignore[misc]
                                          agree=self.tell if n == 0 else lambda answer: self.told)
                  for n, o in enumerate(offsets)]
    self.looked = 0

  def tell(self, answer: np.ndarray) -> np.ndarray:
    self.told, self.looked = answer, self.looked + 1
    return answer

  def run(self, steps: range, step_s: float) -> list[tuple[int, float]]:
    """Steps at which all save, and the time of process 0."""
    saved = []
    for step in steps:
      self.now_s += step_s
      assert len({one.every for one in self.times}) == 1
      due = {one.decide(step) for one in self.times if step % one.every == 0}  # as the loop asks
      assert len(due) <= 1, 'processes disagree'
      if due == {True}:
        saved.append((step, self.now_s))
        self.now_s += self.save_s
        for one in self.times:
          one.note_save()
    return saved


def test_checkpoints_are_as_far_apart_as_asked_and_the_clock_is_looked_at_seldom() -> None:
  world = World(1200.)
  saved = world.run(range(1, 6001), 1.1)
  gaps = np.diff([0., *(at for _, at in saved)])
  assert len(saved) == 5 and np.abs(gaps - 1200).max() <= 1.1, saved
  assert world.looked <= 12 * 5.5  # for 6,000 steps


def test_all_processes_save_at_the_steps_of_process_0_whatever_their_clocks_say() -> None:
  world = World(60., offsets=(0., 1e6, -50.))
  assert [step for step, _ in world.run(range(1, 400), .5)] == [120, 240, 360]


def test_steps_that_become_slower_or_faster_move_the_next_checkpoint() -> None:
  world = World(100.)
  slow = world.run(range(1, 61), .5) + world.run(range(61, 161), 5.)
  assert np.diff([0., *(at for _, at in slow)]).max() <= 100 + 100 / save_times.MIN_READINGS * 10, slow
  world = World(100.)
  fast = world.run(range(1, 11), 5.) + world.run(range(11, 2000), .1)
  assert 99 <= fast[0][1] <= 101 and abs(fast[1][1] - fast[0][1] - 100) <= 10, fast


def test_steps_longer_than_the_interval_save_every_step() -> None:
  assert [step for step, _ in World(1.).run(range(1, 14), 30.)] == [10, 11, 12, 13]


def test_the_time_of_a_save_is_not_that_of_steps() -> None:
  assert [step for step, _ in World(20., save_s=500.).run(range(1, 90), 1.)] == [20, 40, 60, 80]


def test_a_resumed_run_counts_from_its_start() -> None:
  world = World(50., start=700)
  assert [step for step, _ in world.run(range(701, 900), 1.)][:2] == [750, 800]


def test_steps_are_multiples_and_0_is_never() -> None:
  times = save_times.SaveTimes(5, start=3)
  assert [step for step in range(1, 12) if times.decide(step)] == [5, 10]
  assert not save_times.SaveTimes(0).decide(7)


@pytest.mark.parametrize(('text', 'seconds'), [
  ('20 minutes', 1200.), ('1 minute', 60.), ('1.5 hours', 5400.), ('.5 hours', 1800.), ('20 steps', None),
  ('0 minutes', None), ('-1 hours', None), ('1e9 hours', None), ('minutes', None), ('20_000 hours', None)])
def test_wall_times_are_read(text: str, seconds: float | None) -> None:
  assert durations.parse_wall(text) == seconds


def problems(**settings: str) -> str:
  return '\n'.join(check.problems(s.Config(name='x', checkpoints=s.Checkpoints(**settings))))  # type: ignore[arg-type]


def test_settings_that_need_known_steps_do_not_go_with_a_wall_time() -> None:
  assert problems(every='20 minutes', keep_every='12 hours') == '' == problems(every='5 steps', keep_every='1 hour')
  assert "checkpoints.keep_every: expected minutes or hours with checkpoints.every='20 minutes'" in problems(
      every='20 minutes', keep_every='100 steps')
  assert 'which is measured at the steps of all checkpoints' in problems(every='20 minutes', keep_best='test/top1')
  assert "or '20 minutes' or '1.5 hours', got '20 minuets'" in problems(every='20 minuets')


def test_checkpoints_so_far_apart_are_kept() -> None:
  steps = {'5 steps': 5, '10 steps': 10}.__getitem__
  assert checkpoint.Keep.of(s.Checkpoints(every='20 minutes', keep_every='12 hours'), steps).every_s == 43_200
  assert checkpoint.Keep.of(s.Checkpoints(every='20 minutes'), steps) == checkpoint.Keep(2)
  policy = checkpoint.Keep(1, every_s=60.).policy({})
  assert [type(one).__name__ for one in policy.policies] == ['LatestN', 'EveryNSeconds']  # type: ignore[attr-defined]
  assert list(itertools.islice(iter(policy.policies), 2))[1].interval_secs == 60  # type: ignore[attr-defined]


@pytest.mark.parametrize(('seconds', 'expected'), [(10.25, 10), (10.75, 11)])
def test_a_save_is_at_the_nearest_step(seconds: float, expected: int) -> None:
  steps = iter(range(20))  # of a second each
  now_s = [0.]
  times = save_times.SaveTimes(0, seconds, start=next(steps), clock=lambda: now_s[0], agree=lambda answer: answer)
  for step in steps:
    now_s[0] = float(step)
    if times.decide(step):
      break
  assert step == expected
