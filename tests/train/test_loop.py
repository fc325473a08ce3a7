"""The loop with steps that only count: who is called when."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from vit_jax.core.errors import TemporaryError
from vit_jax.train import loop


class Clock:
  @contextlib.contextmanager
  def phase(self, name: str) -> Iterator[None]:
    yield


class Text(str):
  """Stands for the metrics of a step."""

  def unpack(self) -> str:
    return str(self)


class Recorder:
  def __init__(self, calls: list[str], every: int = 0) -> None:
    self.calls, self.every = calls, every

  def on_metrics(self, done: loop.Done) -> None:
    self.calls.append(f'metrics {done.step} {done.metrics} batch {done.batch} state {done.state}')

  def on_state(self, step: int, state: int) -> None:
    self.calls.append(f'state {step} {state}')


def run(calls: list[str], *, start: int = 0, total: int = 4, every: int = 2, stop_at: int = 99) -> loop.Ended:
  def step_fn(state: int, batch: int) -> tuple[int, Text]:
    calls.append(f'step {state}')
    return state + 1, Text(f'm{state}')

  return loop.run(step_fn, start, iter(range(start, 99)), start=start, total=total, hooks=[Recorder(calls, every)],
                  clock=Clock(), should_stop=lambda step: 'SIGTERM' if step >= stop_at else '')


def test_metrics_come_one_step_late_and_before_the_state_they_led_to() -> None:
  calls: list[str] = []
  assert run(calls) == loop.Ended(4, 4, '')
  assert calls == ['step 0', 'step 1', 'metrics 1 m0 batch 0 state 2', 'metrics 2 m1 batch 1 state 2', 'state 2 2',
                   'step 2', 'step 3', 'metrics 3 m2 batch 2 state 4', 'metrics 4 m3 batch 3 state 4']


def test_a_stop_ends_after_the_step_at_hand_with_all_metrics_handed_over() -> None:
  calls: list[str] = []
  assert run(calls, every=0, stop_at=2) == loop.Ended(2, 2, 'SIGTERM')
  assert calls[-1].startswith('metrics 2')


def test_a_finished_run_does_nothing() -> None:
  calls: list[str] = []
  assert run(calls, start=4) == loop.Ended(4, 4, '') and calls == []


def test_a_stop_at_the_last_step_is_no_stop() -> None:
  assert run([], stop_at=4).reason == ''


def test_where_no_more_batches_can_be_made_the_state_before_comes_back() -> None:
  stopped = TemporaryError('no more')

  def batches() -> Iterator[int]:
    yield from (0, 1)
    raise stopped

  class Evaluates(Recorder):
    def on_state(self, step: int, state: int) -> None:
      raise stopped

  calls: list[str] = []
  options = {'start': 0, 'total': 9, 'clock': Clock(), 'should_stop': lambda step: ''}
  ended = loop.run(lambda s, b: (s + 1, Text(f'm{s}')), 0, batches(), hooks=[Recorder(calls)], **options)
  assert ended == (2, 2, '', stopped) and [call.split(' state')[0] for call in calls] == [
      'metrics 1 m0 batch 0', 'metrics 2 m1 batch 1']
  assert loop.run(lambda s, b: (s + 1, Text()), 0, iter(range(9)), hooks=[Evaluates([], 3)], **options) == (
      3, 3, '', stopped)


def test_an_error_in_a_hook_reaches_the_caller() -> None:
  class Fails(Recorder):
    def on_metrics(self, done: loop.Done) -> None:
      raise ValueError('hook')

  with pytest.raises(ValueError, match='hook'):
    loop.run(lambda s, b: (s + 1, Text()), 0, iter(range(9)), start=0, total=3, hooks=[Fails([])], clock=Clock(),
             should_stop=lambda step: '')
