"""The first steps show what the step takes alone, and how much of the time it waits for data."""
from __future__ import annotations

import pathlib
from typing import Any

import jax
import pytest

from vit_jax.record.clock import Goodput
from vit_jax.train import host_speed


class Run:
  """A run whose step takes 0.3 s alone and 0.5 s in the loop, of which 0.2 s is waiting; three cores are busy."""

  def __init__(self) -> None:
    self.s, self.steps, self.found = 100., 0, list[host_speed.Found]()
    self.hook = host_speed.HostSpeed(self.goodput, self.found.append, now=lambda: self.s, busy=lambda: 3 * self.s)

  def goodput(self) -> Goodput:
    return Goodput({'step': .3 * self.steps, 'data_wait': .2 * self.steps, 'evaluate': 50.}, 0., 0.)

  def step_fn(self, state: Any, batch: Any) -> Any:
    self.s += .3
    return state, batch

  def go(self, num: int) -> None:
    step_fn = self.hook.timed(self.step_fn)
    for _ in range(num):
      step_fn(1, 2)
      self.s += .2
      self.steps += 1
      self.hook.on_metrics(None)  # type: ignore[arg-type]


def test_a_window_of_steps_is_told_once() -> None:
  run = Run()
  run.go(host_speed.FIRST + host_speed.STEPS - 1)
  assert not run.found
  run.go(2 * host_speed.MOST_STEPS)
  assert [tuple(one) for one in run.found] == [pytest.approx((.3, .5, .4, 3.))]


def test_a_window_lasts_long_enough_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(host_speed, 'SECONDS', 35.)
  run = Run()
  run.go(host_speed.FIRST + host_speed.STEPS)
  assert not run.found
  run.go(host_speed.STEPS)
  assert run.found
  monkeypatch.setattr(host_speed, 'SECONDS', 1e9)
  run = Run()
  run.go(host_speed.FIRST + host_speed.MOST_STEPS)
  assert len(run.found) == 1


def test_few_steps_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
  waited = list[int]()
  run = Run()
  monkeypatch.setattr(jax, 'block_until_ready', lambda x: waited.append(run.steps) or x)
  run.go(20)
  assert waited == [1, 1, 2, 2, 3, 3, 4, 4]  # the first step compiles


def test_busy_cores_are_those_of_this_process(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(host_speed.os, 'sched_getaffinity', lambda _: {1, 3})
  monkeypatch.setattr(host_speed.os, 'sysconf', lambda _: 100)
  stat = tmp_path / 'stat'
  stat.write_text('cpu 9 9 9 9\ncpu0 900 0 0 0 0 0 0 0 0 0\ncpu1 100 20 3 500 400 0 7 0 50 0\ncpu3 70 0 0 1 1 0 0 0\n')
  assert host_speed.busy_s(stat) == pytest.approx(2.)
  assert host_speed.busy_s(tmp_path / 'none') > 0
