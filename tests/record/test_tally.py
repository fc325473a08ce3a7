"""Progress of one piece of work: lines now and then, with the time left."""
from __future__ import annotations

import io
import logging
import sys

import pytest

from vit_jax.record import tally


class Time:
  """Seconds that pass when told."""

  def __init__(self) -> None:
    self.s = 0.

  def __call__(self) -> float:
    return self.s


@pytest.mark.parametrize(('active', 'bar'), [(True, False), (True, True), (False, True)])
def test_a_line_now_and_then_says_how_long_it_will_take(active: bool, bar: bool,
                                                        caplog: pytest.LogCaptureFixture) -> None:
  time = Time()
  with caplog.at_level(logging.INFO), tally.Tally('evals.knn (x)', 1_000, unit='images', bar=bar, active=active,
                                                  now=time) as one:
    for second in range(1, 26):
      time.s = float(second)
      one.update(10 * second)
  assert [record.message for record in caplog.records] == ([
      'evals.knn (x): 100 of 1,000 images, 1 min 30 s left', 'evals.knn (x): 200 of 1,000 images, 1 min 20 s left',
  ] if active else [])


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def test_a_terminal_on_which_nothing_else_draws_has_a_bar_with_the_rate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setattr(sys, 'stdout', Terminal())
  time = Time()
  with caplog.at_level(logging.INFO), tally.Tally('evals.knn (x)', 40, unit='images', bar=True, active=True,
                                                  now=time) as one:
    time.s = 2.
    one.update(48)
  assert [record.message for record in caplog.records] == ['evals.knn (x): 40 images']
  assert '40/40' in (shown := sys.stdout.getvalue()) and '20 images/s' in shown
