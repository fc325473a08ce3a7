"""Which step the norms of a report show, and the ratios of updates and parameters over time."""
from __future__ import annotations

import re

from vit_jax.jobs import report_curves


def event(step: int, update: float) -> dict[str, object]:
  param = {'backbone/blocks/attn/kernel': [1., 2., 4.], 'head/bias': 5.}
  return {'step': step, 'grad': param, 'param': param,
          'update': {'backbone/blocks/attn/kernel': [update, 2 * update, 4 * update], 'head/bias': 10 * update}}


def test_norms_are_those_of_the_last_step_whose_rate_is_not_close_to_0() -> None:
  events = [event(1, .2), event(2, .125), event(3, 0.)]
  found = report_curves.summarize_norms(events, {1: 1., 2: .11, 3: .09})
  assert found.rows == [['head/bias', 5., 5., .25]]
  assert found.note.startswith('Step 2, the last one logged with a learning rate of at least 10% of the highest')
  assert report_curves.summarize_norms(events, {1: 1., 2: 1., 3: 1.}).note == 'Step 3.'
  assert report_curves.summarize_norms(events, {}).rows == [['head/bias', 5., 5., 0.]]  # the rate was not logged


def test_the_ratio_over_time_has_a_line_for_blocks_and_one_for_other_parameters() -> None:
  drawn = report_curves.summarize_norms([event(step, .1 / step) for step in range(1, 6)], {}).over_time
  assert drawn is not None
  assert re.findall(r'</i>(.*?) <b>(.*?)</b>', drawn) == [
      ('block 1', '0.02'), ('block 2', '0.02'), ('block 3', '0.02'), ('other parameters', '0.04')]
  assert drawn.count('<circle') == 20


def test_steps_without_an_update_leave_a_gap() -> None:
  drawn = report_curves.summarize_norms([event(1, 0.), event(2, .1), event(3, .1)], {}).over_time
  assert drawn is not None and drawn.count('<circle') == 8
  assert report_curves.summarize_norms([event(1, 0.)], {}).over_time is None
