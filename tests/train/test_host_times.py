"""The host that the others wait for: what is measured, who is named, and what is recorded and logged."""
from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

from vit_jax.jobs import report
from vit_jax.record.clock import Clock
from vit_jax.record.reader import Event
from vit_jax.record.writer import Writer
from vit_jax.train import host_times
from vit_jax.train.host_times import HostTimes


@pytest.mark.parametrize(('ready_s', 'late'), [
    ([0., .5, .02], (1, .49)), ([.11, .9, .11, .2], (1, .79)), ([.6, .62, .64], (2, 0.)),  # all wait for data
    ([0., .049], (1, 0.)), ([0., .051], (1, .051))])
def test_a_host_is_late_if_it_is_ready_well_after_the_median_of_the_others(
    ready_s: list[float], late: tuple[int, float]) -> None:
  assert host_times.find_late(ready_s, 1.) == pytest.approx(late)


class Run:
  """Process 0 with steps of 1 s, in which it waits for data and has other work before each launch.

  It gathers its own number, and those of the `others`.
  """

  def __init__(self, *others: float, log_every: int = 10) -> None:
    self.s, self.step, self.events, self.gathered_at = 100., 0, list[dict[str, Any]](), list[int]()
    self.others, self.handed = others, 0
    self.clock = Clock(1, 0., None, now=lambda: self.s)
    self.hook = HostTimes(self.clock, self, log_every=log_every, gather=self.gather)  # type: ignore[arg-type]
    self.call = self.hook.timed(lambda state, batch: (state, batch))  # type: ignore[arg-type,return-value]

  def gather(self, number: float) -> list[float]:
    self.gathered_at.append(self.step + 1)
    return [number, *self.others]

  def event(self, name: str, **fields: Any) -> None:
    """Stands in for the writer."""
    self.events.append({'event': name, **fields})

  def go(self, num: int, data_s: float = 0., host_s: float = 0.) -> None:
    """Steps of the loop: data, launch, and the metrics of the step before when the devices have finished it."""
    for _ in range(num):
      self.s += host_s
      with self.clock.phase('data_wait'):
        self.s += data_s
      self.call(None, None)  # type: ignore[arg-type]
      self.s += 1. - data_s - host_s
      if self.step > self.handed:
        self.hand_over()
      self.step += 1

  def hand_over(self) -> None:
    self.handed = self.step
    self.hook.on_metrics(type('Done', (), {'step': self.step})())

  def evaluate(self) -> None:
    """Evaluates the newest state, before which the metrics of its step are handed over."""
    self.hand_over()
    with self.clock.phase('evaluate'):
      self.s += 50.


def test_waits_and_other_work_of_steps_count_but_not_evaluations() -> None:
  run = Run(0.)
  run.go(5, .3, .1)
  run.evaluate()
  run.go(8, .3, .1)
  [found] = run.events
  assert found['ready_s'] == pytest.approx([.4, 0.]) and found['step_s'] == pytest.approx(1.)
  assert (found['step'], found['steps'], found['slowest'], found['late_s']) == (10, 9, 0, .4)


def test_process_0_names_the_late_host_records_it_and_shows_it_in_the_report(
    caplog: pytest.LogCaptureFixture, tmp_path: pathlib.Path) -> None:
  run = Run(.65, 0.)
  run.go(53, 0., .02)
  run.others = 0., 0.
  run.go(20, 0., .02)
  assert [one['step'] for one in run.events] == [10, 20, 30, 40, 50, 60, 70]
  assert [(one['slowest'], one['late_s']) for one in run.events[-3:]] == [(1, .64), (0, 0.), (0, 0.)]
  assert [re.findall(r'Host 1 is late at step (\d+), in (\d) of (\d) intervals', text)[0] for text in caplog.messages
          ] == [('10', '1', '1'), ('20', '2', '2'), ('40', '4', '4')]
  assert 'it launches a step 640 ms after the others, of 1 s that a step takes.' in caplog.text
  said = 'Host 1 was late in 5 of 7 intervals: it launched a step 640 ms after the others on average.'
  assert host_times.sentences(run.events) == [said]
  with Writer(tmp_path, process_index=0, resumed_from=None, progress_total=10, progress=False) as writer:
    for one in run.events:
      writer.event(str(one.pop('event')), **one)
  page = report.to_html([tmp_path])
  assert '<h2>Hosts</h2>' in page and said in page


def test_the_other_processes_gather_and_say_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(host_times.jax, 'process_index', lambda: 1)
  run = Run(.5)
  run.go(30)
  assert run.gathered_at == [12, 22] and not run.events and not caplog.messages


def test_numbers_are_gathered_before_a_launch_and_read_after_its_step() -> None:
  """A process that has no data for its next step has gathered nothing that the others have not."""
  run = Run(0.)
  run.go(11)
  assert not run.gathered_at
  run.go(1)
  assert run.gathered_at == [12] and not run.events
  run.go(1)
  assert [one['step'] for one in run.events] == [10]


def test_short_intervals_of_the_log_are_joined() -> None:
  run = Run(0., log_every=1)
  run.go(30)
  assert [one['step'] for one in run.events] == [8, 16, 24] and [one['steps'] for one in run.events] == [8, 8, 8]


def test_one_process_measures_nothing() -> None:
  def step_fn(state: Any, batch: Any) -> Any:
    return state, batch

  assert host_times.gather_by_devices() is None
  hook = HostTimes(Clock(1, 0., None), Run(), log_every=10, gather=None)  # type: ignore[arg-type]
  assert hook.timed(step_fn) is step_fn


def test_events_of_earlier_versions_and_damaged_ones_are_read() -> None:
  events: list[Event] = [
      {'event': 'hosts', 'step': 10, 'step_s': [.3, .3], 'data_s': [0., .2], 'slowest': 1, 'late_s': .2},
      {'event': 'hosts', 'step': 20, 'slowest': 1, 'late_s': 0.}, {'event': 'hosts', 'slowest': 'x', 'late_s': None},
      {'event': 'alarm'}]
  assert host_times.sentences(events) == [
      'Host 1 was late in 1 of 3 intervals: it launched a step 200 ms after the others on average.']
  assert not host_times.sentences([])
