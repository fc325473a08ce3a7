"""Early stopping: when it asks to end, what it remembers, and a real run that ends by it and goes on exactly."""
from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from vit_jax import main
from vit_jax.core.errors import UserError
from vit_jax.train import hooks
from vit_jax.train.state import TrainState

STATE = TrainState(np.int32(0), {}, {}, {})
SETTINGS = ['--config=digits', '--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2',
            '--config.model.mlp=16', '--config.batch_size=40', '--config.length=40 steps',
            '--config.evals.test.every=5 steps', '--config.evals.test.batch_size=80',
            '--config.checkpoints.every=5 steps', '--config.train.ema=0', '--config.optimizer.lr=0',
            '--config.train.early_stop.metric=test/top1', '--config.train.early_stop.patience=2']


def stopper(metric: str = 'test/top1', *, patience: int = 2, min_delta: float = 0.) -> tuple[hooks.EarlyStop, dict]:
  latest: hooks.Latest = {}
  return hooks.EarlyStop(metric, patience=patience, min_delta=min_delta, every=10, latest=latest), latest


def steps_until_end(values: list[float], *args: str, **settings: float) -> int:
  hook, latest = stopper(*args, **settings)
  for i, value in enumerate(values, 1):
    latest[args[0] if args else 'test/top1'] = (10 * i, value)
    hook.on_state(10 * i, STATE)
    if hook.reason:
      return 10 * i
  return 0


def test_it_ends_after_patience_evaluations_without_a_new_best() -> None:
  assert steps_until_end([.1, .3, .2, .3, .4]) == 40
  assert steps_until_end([.1, .3, .2, .31, .3, .3]) == 60
  assert steps_until_end([.1, .2, .3, .4]) == 0
  assert steps_until_end([.1, .15, .19], min_delta=.1) == 30
  assert steps_until_end([.5, float('nan'), float('nan')]) == 30


def test_lower_is_better_for_nll_and_ece_of_any_view() -> None:
  assert steps_until_end([.5, .4, .3], 'test/nll@ema') == 0
  assert steps_until_end([.1, .2, .3], 'test/ece') == 30


def test_the_record_gives_the_memory_back() -> None:
  rows = [{'step': 10., 'test/top1': .5}, {'step': 15., 'train/loss': 1.}, {'step': 20., 'test/top1': .4},
          {'step': 20., 'test/top1': .4}, {'step': 25., 'test/top1': .9}, {'step': 30., 'test/top1': .3}]
  hook, _ = stopper()
  hook.recall(rows, up_to=20)
  assert not hook.reason
  hook.recall(rows[-1:], up_to=30)
  assert hook.reason == 'early stopping: test/top1 has had no new best value for 2 evaluations, since step 10'


def test_a_metric_that_is_not_measured_is_an_error_with_those_that_are() -> None:
  hook, latest = stopper('test/top7')
  latest['test/top1'] = (10, .5)
  with pytest.raises(UserError, match="'test/top7' was not measured; the evaluations gave: test/top1"):
    hook.on_state(10, STATE)


def test_a_run_ends_as_if_done_and_an_interrupted_one_at_the_same_step(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  whole, split = tmp_path / 'whole', tmp_path / 'split'
  with caplog.at_level('INFO'):
    assert main.run([*SETTINGS, f'--workdir={whole}']) == 0
  assert 'Ended at step 15 of 40 by early stopping: test/top1' in caplog.text
  assert main.run([*SETTINGS, '--config.length=10 steps', f'--workdir={split}']) == 0
  for again in (split, whole):  # the second finds a run that has ended
    assert main.run([*SETTINGS, f'--workdir={again}']) == 0
  a, b = (json.loads((w / 'final.json').read_text()) for w in (whole, split))
  assert a['step'] == b['step'] == 15 and a['params_digest'] == b['params_digest']
