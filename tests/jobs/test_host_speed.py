"""A run whose step waits for the host warns."""
from __future__ import annotations

import logging
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import jax
import pytest
import runs

from vit_jax.data import loader, workers
from vit_jax.jobs import host_speed
from vit_jax.record.clock import Clock


class Run:
  """A run whose step of 1,024 images takes 64 ms alone, and longer in the loop, of which it waits a share."""

  def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float = .122, waiting: float = .45) -> None:
    self.s, self.step_s, self.waiting = 100., step_s, waiting
    monkeypatch.setattr(host_speed.time, 'monotonic', lambda: self.s)
    monkeypatch.setattr(host_speed, 'busy_s', lambda: 14. * self.s)
    monkeypatch.setattr(workers, 'machine', lambda: workers.Machine(112, 2**38))
    self.clock = Clock(1, 0., None, now=lambda: self.s)
    data = object.__new__(loader.TrainLoader)
    monkeypatch.setattr(loader.TrainLoader, 'workers', workers.Workers(0, 0, 2**20), raising=False)
    self.hook = host_speed.HostSpeed(self.clock, 1_024., data)
    self.step_fn = self.hook.timed(self.call)

  def call(self, state: Any, batch: Any) -> Any:
    self.s += .064
    return state, batch

  def go(self, num: int) -> None:
    for _ in range(num):
      with self.clock.phase('data_wait'):
        self.s += self.waiting * self.step_s
      self.step_fn(1, 2)
      self.s += self.step_s * (1 - self.waiting) - .064
      self.hook.on_metrics(None)  # type: ignore[arg-type]


def test_a_step_that_waits_is_one_warning_with_the_number_of_processes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
  Run(monkeypatch, .12, .04).go(800)
  assert not caplog.records  # it keeps up
  Run(monkeypatch).go(800)
  assert [(one.levelno, one.getMessage()) for one in caplog.records] == [(
      logging.WARNING, 'The host makes 8.4k of the 16k images/s that the step takes: the threads of one process use '
      '14.0 of 112 cores; set data.workers=3.')]


def test_a_window_lasts_long_enough_but_not_for_ever(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(host_speed, 'MIN_WINDOW_S', 9.)
  run = Run(monkeypatch)  # 40 steps take 4.9 s
  run.go(host_speed.WARMUP_STEPS + host_speed.WINDOW_STEPS)
  assert not caplog.records
  run.go(host_speed.WINDOW_STEPS)
  assert len(caplog.records) == 1
  monkeypatch.setattr(host_speed, 'MIN_WINDOW_S', 1e9)
  run = Run(monkeypatch)
  run.go(host_speed.WARMUP_STEPS + host_speed.MAX_WINDOW_STEPS)
  assert len(caplog.records) == 2


def test_data_in_memory_are_not_measured(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
  run = Run(monkeypatch)
  run.hook = host_speed.HostSpeed(run.clock, 1_024., object())  # type: ignore[arg-type]
  run.go(800)
  assert not caplog.records


def test_few_steps_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
  waited = list[float]()
  run = Run(monkeypatch)
  monkeypatch.setattr(jax, 'block_until_ready', lambda x: waited.append(run.s) or x)
  run.go(20)
  assert len(waited) == 8 and waited[0] > 100.12  # the first step compiles


def test_busy_cores_are_those_of_this_process(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(host_speed.os, 'sched_getaffinity', lambda _: {1, 3})
  monkeypatch.setattr(host_speed.os, 'sysconf', lambda _: 100)
  stat = tmp_path / 'stat'
  stat.write_text('cpu 9 9 9 9\ncpu0 900 0 0 0 0 0 0 0 0 0\ncpu1 100 20 3 500 400 0 7 0 50 0\ncpu3 70 0 0 1 1 0 0 0\n')
  assert host_speed.busy_s(stat) == pytest.approx(2.)
  assert host_speed.busy_s(tmp_path / 'none') > 0


ABANDONED = """
import sys
from vit_jax import main
from vit_jax.parallel import feed

feed.CLOSE_S = 0.  # as if the next batch took longer
if __name__ == '__main__':
  main.program()
"""


@pytest.mark.slow(reason='about 15 s each: a run with loader processes')
@pytest.mark.parametrize('number', [None, signal.SIGUSR1, signal.SIGTERM])
def test_a_run_with_host_speed_ends_without_a_word_on_standard_error(
    number: signal.Signals | None, tmp_path: pathlib.Path) -> None:
  """Also if a scheduler sends a signal to all of its processes."""
  (tmp_path / 'run.py').write_text(ABANDONED)
  words = ['train', '--config=digits', '-q', f'--workdir={tmp_path / "run"}', *runs.TINY,
           f'--config.length={4_000 if number else 12} steps', '--config.checkpoints.every=10 steps',
           '--config.train.progress=false', '--config.data.workers=2', '--config.data.in_memory=no']
  process = subprocess.Popen([sys.executable, str(tmp_path / 'run.py'), *words], env=runs.environment(), text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
  if number:
    runs.wait_for_checkpoint(process, tmp_path / 'run')
    os.killpg(process.pid, number)
  out, error = process.communicate(timeout=300)
  assert (process.returncode, error) == (75 if number else 0, '')
  assert (f'Stopped by {number.name} after step' if number else 'Report: ') in out
