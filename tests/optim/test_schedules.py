from __future__ import annotations

import math

import pytest

from vit_jax.config import schema
from vit_jax.optim import schedules


def build(decay: schema.Decay, end: float = 0.) -> schedules.Schedule:
  return schedules.build(schema.Schedule(decay=decay, end_lr=end), peak=2., total_steps=110, warmup_steps=10)


def test_the_first_update_moves_and_the_warm_up_is_linear() -> None:
  rate = build(schema.Decay.COSINE)
  assert [float(rate(s)) for s in (0, 4, 9)] == pytest.approx([2 / 11, 10 / 11, 20 / 11])
  assert float(rate(10)) == pytest.approx(2.)


@pytest.mark.parametrize('step', [10, 37, 60, 109])
def test_decay_follows_the_formula(step: int) -> None:
  t = (step - 10) / 100
  assert float(build(schema.Decay.COSINE, .1)(step)) == pytest.approx(
      .1 + 1.9 * (1 + math.cos(math.pi * t)) / 2, rel=1e-5)
  assert float(build(schema.Decay.LINEAR, .1)(step)) == pytest.approx(.1 + 1.9 * (1 - t), rel=1e-5)


def test_after_the_end_the_rate_stays_at_its_end() -> None:
  assert float(build(schema.Decay.LINEAR, .1)(500)) == pytest.approx(.1)


def test_no_warm_up_starts_at_the_peak() -> None:
  rate = schedules.build(schema.Schedule(), peak=3., total_steps=5, warmup_steps=0)
  assert float(rate(0)) == pytest.approx(3.)
