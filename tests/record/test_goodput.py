"""Seconds by phase over several starts, and what kills cost, from records made by hand."""
from __future__ import annotations

import pytest

from vit_jax.record import goodput
from vit_jax.record.reader import Event


def start(resumed_from: int | None = None) -> Event:
  return {'event': 'start', 'resumed_from': resumed_from}


def note(at: int, **seconds: object) -> Event:
  return {'event': 'goodput', 'step': at, 'seconds': seconds}


FIRST = [start(), note(1, startup=10., compile=20., step=1., data_wait=0.), {'event': 'checkpoint', 'step': 4},
         note(4, startup=10., compile=20., step=4., data_wait=1., checkpoint=2.),
         note(7, startup=10., compile=25., step=7., data_wait=1.5, checkpoint=2., evaluate=6.)]
SECOND = [start(4), note(5, startup=8., compile=3., step=1.), note(9, startup=8., compile=3., step=5., checkpoint=2.)]


def test_a_start_counts_with_what_it_noted_last() -> None:
  found = goodput.sum_starts(FIRST)
  assert found.seconds == {'startup': 10., 'compile': 25., 'step': 7., 'data_wait': 1.5, 'checkpoint': 2.,
                           'evaluate': 6.}
  assert found.total_s == 51.5 and found.fraction == pytest.approx(7 / 51.5)


def test_what_came_after_the_step_resumed_from_is_lost_but_preparations_are_not() -> None:
  found = goodput.sum_starts([*FIRST, *SECOND])
  assert found.seconds == {'startup': 18., 'compile': 28., 'step': 9., 'data_wait': 1., 'checkpoint': 4.,
                           'evaluate': 0., 'lost': 3. + .5 + 6.}
  assert found.total_s == 51.5 + 18. and found.fraction == pytest.approx(9 / 69.5)


def test_a_start_from_further_back_loses_of_all_starts_before_it() -> None:
  found = goodput.sum_starts([*FIRST, *SECOND, start(1), note(3, startup=5., step=2.)])
  assert found.seconds['step'] == 1. + 0. + 2.
  assert found.seconds['lost'] == (6. + 1.5 + 2. + 6.) + (5. + 2.)
  assert found.seconds['startup'] == 10. + 8. + 5.


def test_a_kill_before_the_first_checkpoint_loses_all_but_preparations() -> None:
  found = goodput.sum_starts([*FIRST, start(None), note(2, startup=9., step=2.)])
  assert found.seconds['step'] == 2. and found.seconds['lost'] == 7. + 1.5 + 2. + 6.


def test_a_run_that_stopped_when_asked_or_was_done_loses_nothing() -> None:
  found = goodput.sum_starts([*FIRST, start(7), note(9, step=3.), start(9), note(9, startup=4., evaluate=1.)])
  assert 'lost' not in found.seconds and found.seconds['step'] == 10.


def test_steps_and_seconds_lost_are_told_at_the_next_start() -> None:
  assert goodput.find_lost(FIRST, resumed_from=4) == (3, 9.5)
  assert goodput.find_lost(FIRST, resumed_from=7) == goodput.find_lost(FIRST, resumed_from=8) == (0, 0.)
  assert goodput.find_lost([*FIRST, *SECOND], resumed_from=4) == (5, 7.)
  assert goodput.find_lost([], resumed_from=4) == (0, 0.)


def test_a_damaged_record_counts_with_what_can_be_read() -> None:
  events = [note(1, step=5.), start(), note(2, step='nan', compile=None, data_wait=2.), {'event': 'goodput'}]
  assert goodput.sum_starts(events[:3]).seconds == {'step': 0., 'compile': 0., 'data_wait': 2.}
  assert goodput.sum_starts(events).seconds == {}
  assert goodput.sum_starts([{'event': 'goodput', 'seconds': [1]}]) == ({}, 0, 0.)
