"""The host that the others wait for: what is measured, who is named, and what is recorded and logged."""
from __future__ import annotations

import json
import re
from typing import Any

import pytest

from vit_jax.parallel.board import LAG, Board
from vit_jax.record.clock import Clock
from vit_jax.train import host_times
from vit_jax.train.host_times import HostTimes, Late, Times


def times(data_s: float, host_s: float, step_s: float = 1.) -> Times:
  return Times(step_s, .1, data_s, host_s, 2., 'name', 10)


@pytest.mark.parametrize(('hosts', 'want'), [
    ([times(0., .01), times(.5, .01), times(0., .02)], Late(1, .495, 'data')),
    ([times(.1, .01), times(.1, .8), times(.1, .01), times(.2, .01)], Late(1, .79, 'host')),
    ([times(.6, 0.), times(.62, 0.), times(.64, 0.)], None),  # all wait for data
    ([times(0., .01), times(.049, .01)], None),
    ([times(0., .01), times(.051, .01)], Late(1, .051, 'data')),
    ([times(.9, 0.)], None),
    ([times(0., 0., 0.), times(0., 0., 0.)], None),
])
def test_a_host_is_late_if_it_is_ready_well_after_the_median_of_the_others(
    hosts: list[Times], want: Late | None) -> None:
  got = host_times.find_late(hosts)
  assert (got is None) == (want is None)
  if got and want:
    assert (got.host, got.cause) == (want.host, want.cause) and got.late_s == pytest.approx(want.late_s)


class Record:
  """Stands in for the writer."""

  def __init__(self) -> None:
    self.events: list[dict[str, Any]] = []

  def event(self, name: str, **fields: Any) -> None:
    assert name == 'hosts'
    self.events.append(fields)


class Run:
  """A host of a run with steps of 1 s, in which it waits for data and has other work before each launch."""

  def __init__(self, host: int, board: Board, num_hosts: int, log_every: int = 10) -> None:
    self.s, self.step, self.record = 100., 0, Record()
    self.clock = Clock(1, 0., None, now=lambda: self.s)
    self.hook = HostTimes(self.clock, self.record, board, log_every=log_every, num_hosts=num_hosts,  # type: ignore[arg-type]
                          host=host, profile='vit-jax profile --host={host}')
    self.call = self.hook.timed(lambda state, batch: (state, batch))  # type: ignore[arg-type,return-value]

  def go(self, data_s: float = 0., host_s: float = 0., *, step_s: float = 1., evaluates_s: float = 0.) -> None:
    """One step of the loop: data, launch, and the metrics of the step before when the devices have finished it."""
    with self.clock.phase('evaluate'):
      self.s += evaluates_s
    self.s += host_s
    with self.clock.phase('data_wait'):
      self.s += data_s
    self.call(None, None)  # type: ignore[arg-type]
    self.s += step_s - data_s - host_s
    if self.step:
      self.hook.on_metrics(type('Done', (), {'step': self.step})())
    self.step += 1


def test_waits_and_other_work_of_steps_count_but_not_evaluations() -> None:
  board = Board()
  run = Run(1, board, 2)
  for step in range(11):
    run.go(.3, .1, evaluates_s=50. if step == 5 else 0.)
  own = Times(*json.loads(board.get('hosts/10/1')))
  assert own.step_s == pytest.approx(1.) and own.deviation_s == pytest.approx(0., abs=1e-6)
  assert own.data_s == pytest.approx(.3) and own.host_s == pytest.approx(.1) and own.memory_gib > 0 and own.steps == 9


def test_process_0_names_the_late_host_records_it_and_says_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
  board = Board()
  hosts = [Run(host, board, 3) for host in range(3)]
  with caplog.at_level('INFO', logger='vit_jax.train'):
    for step in range(53):
      for host in hosts:
        host.go(*(.6, .05) if host is hosts[2] and step < 41 else (0., .02))
  record = hosts[0].record.events
  assert [one['step'] for one in record] == [10, 20, 30, 40, 50] and not hosts[1].record.events
  assert record[0]['slowest'] == 2 and record[0]['cause'] == 'data' and record[0]['late_s'] == pytest.approx(.63)
  assert record[0]['data_s'] == pytest.approx([0., 0., .6]) and record[0]['host_s'] == pytest.approx([.02, .02, .05])
  assert record[4]['cause'] == '' and record[4]['late_s'] == 0.
  own = [one.message for one in caplog.records if one.message.startswith('This host')]
  named = [one.message for one in caplog.records if not one.message.startswith('This host')]
  assert named[0].startswith('Host 2 (') and named[0].endswith('vit-jax profile --host=2')
  assert 'is late at step 10, waiting for data: it launches a step 630 ms after the others (600 ms for' in named[0]
  assert [re.findall(r'step (\d+)', text)[0] for text in named] == ['10', '20', '40', '50']
  assert named[-1] == 'At step 50 no host is late.'
  assert own[0] == 'This host waits for data at step 10: 600 ms of 1 s a step.' and len(own) == 4
  caplog.clear()
  hosts[0].hook.finish()
  assert caplog.messages == ['Host 2 was late in 4 of 5 intervals, waiting for data: by 630 ms a step on average.']
  assert not board.all('hosts/10')


def test_steps_that_are_slower_without_a_late_host_are_those_of_the_devices(caplog: pytest.LogCaptureFixture) -> None:
  board = Board()
  hosts = [Run(host, board, 2) for host in range(2)]
  for step in range(33):
    for host in hosts:
      host.go(step_s=1. if step < 11 else 1.5)
    if step == 25:
      assert not caplog.text  # one interval may be an accident
  assert 'At step 30 a step takes 1.5 s, 1 s at best before, and no host is late' in caplog.text


def test_short_intervals_of_the_log_are_joined() -> None:
  board = Board()
  hosts = [Run(host, board, 2, log_every=1) for host in range(2)]
  for _ in range(30):
    for host in hosts:
      host.go()
  assert [one['step'] for one in hosts[0].record.events] == [9, 17, 25]


def test_the_times_of_a_step_are_read_when_all_processes_have_put_them() -> None:
  board = Board()
  first, second = (Run(host, board, 2) for host in range(2))
  for _ in range(10 + LAG):
    first.go()
    second.go()
  assert not first.record.events
  first.go()
  assert [one['step'] for one in first.record.events] == [10]
  for _ in range(8):
    first.go()
  for _ in range(4):
    first.go()  # the other process puts nothing
  assert len(first.record.events) == 1


def test_one_process_measures_nothing() -> None:
  def step_fn(state: Any, batch: Any) -> Any:
    return state, batch

  board, run = Board(), Run(0, Board(), 1)
  assert run.hook.timed(step_fn) is step_fn
  for _ in range(30):
    run.go()
  assert not run.record.events and not board.all('hosts')
