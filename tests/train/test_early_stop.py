"""Early stopping: when it asks to end, and what it remembers. tests/jobs/test_train.py has a run that ends by it."""
from __future__ import annotations

import numpy as np
import pytest

from vit_jax.core.errors import UserError
from vit_jax.train import hooks
from vit_jax.train.state import TrainState

STATE = TrainState(np.int32(0), {}, {}, {})


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
