"""Hooks with a record in memory: what is logged when, and what a person reads when numbers go wrong."""
from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Mean
from vit_jax.record.clock import Clock
from vit_jax.train import hooks, loop, save_times
from vit_jax.train.state import Norms, StepMetrics, TrainState

STATE = TrainState(np.int32(0), {}, {}, {})


class Record:
  def __init__(self) -> None:
    self.rows: list[tuple[int, dict[str, float]]] = []
    self.events: list[tuple[str, dict[str, object]]] = []
    self.steps: list[int] = []

  def write(self, step: int, values: dict[str, float]) -> None:
    self.rows.append((step, values))

  def event(self, name: str, **fields: object) -> None:
    self.events.append((name, fields))

  def check_not_moved(self) -> None:
    pass

  def advance(self, step: int) -> None:
    self.steps.append(step)


def done(step: int, loss: float = 2., *, ok: bool = True) -> loop.Done:
  norm = np.float32(1.) if ok else np.float32(np.nan)
  grad = {'head/kernel': np.float32(1.), 'backbone/blocks/mlp/up/kernel': np.array([1., norm, 2.])}
  metrics = StepMetrics({'loss': Mean(np.float32(4 * loss), np.float32(4.))}, norm,
                        Norms(grad, {'head/kernel': np.float32(1.)}, {}), np.bool_(ok))
  return loop.Done(step, metrics, {'index': np.arange(4)}, STATE)


def metrics_hook(record: Record) -> hooks.Metrics:
  now = iter(np.arange(0., 1000.))
  clock = Clock(32, 1e9, 1e12, now=lambda: float(next(now)))
  return hooks.Metrics(record, clock, log_every=3, total=8, steps_an_epoch=4., schedule=lambda step: .1 * (step + 1))


def test_the_first_the_last_and_every_third_step_are_logged_with_their_own_values() -> None:
  record = Record()
  hook = metrics_hook(record)
  for step in range(1, 9):
    hook.on_metrics(done(step, loss=float(step)))
  assert [step for step, _ in record.rows] == [1, 3, 6, 8]
  assert record.steps == [2, 4, 5, 7]  # a step with values is shown with these, not before
  values = record.rows[2][1]
  assert values['train/loss'] == 6. and values['train/lr'] == pytest.approx(.6) and values['train/epoch'] == 1.5
  assert values['train/grad_norm'] == 1. and values['train/images_per_s'] > 0 and values['train/mfu'] > 0
  assert [name for name, _ in record.events] == ['norms', 'goodput'] * 4
  assert [fields['step'] for _, fields in record.events] == [1, 1, 3, 3, 6, 6, 8, 8]
  seconds = [fields['seconds']['step'] for name, fields in record.events if name == 'goodput']
  assert seconds == sorted(set(seconds)) and seconds[0] > 0


@pytest.mark.parametrize(('most', 'steps'), [(2, [1, 6, 8]), (1, [1, 8])])
def test_the_norms_of_all_parameters_are_recorded_at_a_bounded_number_of_steps(
    most: int, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(hooks, 'MAX_NORM_EVENTS', most)
  record = Record()
  hook = metrics_hook(record)
  for step in range(1, 9):
    hook.on_metrics(done(step))
  found = [fields for name, fields in record.events if name == 'norms']
  assert [fields['step'] for fields in found] == steps
  assert found[0] == {'step': 1, 'grad': {'head/kernel': 1., 'backbone/blocks/mlp/up/kernel': [1., 1., 2.]},
                      'param': {'head/kernel': 1.}, 'update': {}}


def test_stop_names_step_loss_path_layer_and_examples() -> None:
  hook = hooks.Finite(schema.OnNonfinite.STOP, lambda done: ['a.jpg (index 2)'])
  hook.on_metrics(done(1))
  with pytest.raises(UserError) as error:
    hook.on_metrics(done(5, loss=float('nan'), ok=False))
  text = str(error.value)
  for part in ('Step 5 is not finite: loss nan, gradient norm nan', 'backbone/blocks/mlp/up/kernel (layer 1)',
               'examples: a.jpg (index 2)', 'all finite before the step', 'on_nonfinite=skip'):
    assert part in text


def test_skip_goes_on_and_counts(caplog: pytest.LogCaptureFixture) -> None:
  hook = hooks.Finite(schema.OnNonfinite.SKIP, lambda done: [])
  with caplog.at_level(logging.WARNING):
    for step in (1, 2):
      hook.on_metrics(done(step, ok=False))
  assert hook.num_skipped == 2 and 'Skipped; 2 so far' in caplog.text and 'each finite on its own' in caplog.text


class Saver:
  def __init__(self) -> None:
    self.saves: list[tuple[int, dict[str, float]]] = []

  def save(self, state: TrainState, about: object, metrics: dict[str, float], *,
           announce: Callable[[str], object]) -> str:
    step = int(state.step)
    announce(f'digest {step}')
    self.saves.append((step, dict(metrics)))
    return f'digest {step}'

  def check(self) -> None:
    pass


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
  yield


def test_an_evaluation_for_the_checkpoints_runs_where_its_metric_was_not_measured_just_now() -> None:
  record, latest, clock = Record(), {'test/top1': (4, .4)}, Clock(1, 0, None)
  evaluate = hooks.Evaluate(2, lambda state, step: {'test/top1': step / 10}, record, clock, latest, metric='test/top1')
  for step in (4, 6, 6):
    evaluate.on_state(step, STATE)
  assert record.rows == [(6, {'test/top1': .6})] and latest == {'test/top1': (6, .6)}


def test_a_checkpoint_is_judged_by_metrics_of_its_own_step_and_made_once() -> None:
  record, saver, latest = Record(), Saver(), {}
  clock = Clock(1, 0, None)
  evaluate = hooks.Evaluate(2, lambda state, step: {'test/top1': step / 10}, record, clock, latest)
  save = hooks.Checkpoint(save_times.SaveTimes(1), saver, record, clock, about={}, latest=latest)
  for step in (1, 2, 3):
    if step % 2 == 0:
      evaluate.on_state(step, STATE)
    for _ in range(2):
      save.on_state(step, STATE._replace(step=np.int32(step)))
  assert saver.saves == [(1, {}), (2, {'test/top1': .2}), (3, {})]
  assert record.events[-2] == ('checkpoint', {'step': 3, 'params_digest': 'digest 3'})
  name, fields = record.events[-1]
  assert name == 'goodput' and fields['step'] == 3 and fields['seconds'].keys() >= {'checkpoint', 'evaluate'}
  assert record.rows == [(2, {'test/top1': .2})]
