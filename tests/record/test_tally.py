"""Progress of one piece of work: lines now and then, with the time left."""
from __future__ import annotations

import logging

import pytest

from vit_jax.record import tally


class Time:
  """Seconds that pass when told."""

  def __init__(self) -> None:
    self.s = 0.

  def __call__(self) -> float:
    return self.s


@pytest.mark.parametrize('active', [True, False])
def test_a_line_now_and_then_says_how_long_it_will_take(active: bool, caplog: pytest.LogCaptureFixture) -> None:
  time = Time()
  with caplog.at_level(logging.INFO), tally.Tally('evals.knn (x)', 1_000, unit='images', bar=False, active=active,
                                                  now=time) as one:
    for second in range(1, 26):
      time.s = float(second)
      one.update(10 * second)
  assert [record.message for record in caplog.records] == ([
      'evals.knn (x): 100 of 1,000 images, 1 min 30 s left', 'evals.knn (x): 200 of 1,000 images, 1 min 20 s left',
  ] if active else [])


def test_where_nothing_else_draws_there_is_progress_with_the_rate(capsys: pytest.CaptureFixture) -> None:
  time = Time()
  with tally.Tally('x', 40, unit='images', bar=True, active=True, now=time) as one:
    time.s = 2.
    one.update(20)
    time.s = 13.
    one.update(48)
  out = capsys.readouterr().out
  assert 'step 20/40  10 images/s' in out and 'step 40/40' in out
