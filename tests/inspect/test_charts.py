"""Marks in heat maps where there is no colour."""
from __future__ import annotations

import numpy as np

from vit_jax.inspect import charts


def test_a_heat_map_marks_zeros_and_values_that_are_not_finite() -> None:
  def marks(values: list[list[float]]) -> tuple[int, int]:
    svg = charts.draw_heat_map(np.asarray(values), rows=['a', 'b'], xlabel='layer', unit='norm')
    return svg.count('#d64545'), svg.count('>0</text>') + svg.count('>×</text>')

  crosses, texts = marks([[1., 2., 3.], [4., 5., 6.]])
  assert crosses == 0
  zeros = marks([[1., 0., 3.], [4., 0., 6.]])
  assert zeros == (0, texts + 2)
  broken = marks([[1., np.nan, 3.], [4., np.inf, 6.]])
  assert broken[0] >= 1 and broken[1] == texts + 2
