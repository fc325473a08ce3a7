"""Scaling laws on made points with known parameters, and on the ViT paper's own."""
from __future__ import annotations

import numpy as np
import pytest

from vit_jax.recipes import published, scaling
from vit_jax.recipes.scaling import Law

COMPUTES = (3., 11., 40., 170., 900.)


@pytest.mark.parametrize('law', [Law(40., .35, 9.), Law(3., .02, 1.5), Law(800., 1.7, 0.), Law(7e3, 4., 30.)])
def test_a_law_is_found_again(law: Law) -> None:
  found = scaling.fit(COMPUTES, [law.error(c) for c in COMPUTES])
  assert found is not None
  np.testing.assert_allclose([found.error(c) for c in COMPUTES], [law.error(c) for c in COMPUTES], rtol=1e-6)
  if law.exponent > .1:
    np.testing.assert_allclose(found, law, rtol=1e-4, atol=1e-4)


def test_noise_moves_it_as_little_as_a_search_over_all_three_numbers() -> None:
  rng = np.random.default_rng(0)
  errors = [Law(40., .35, 9.).error(c) + e for c, e in zip(COMPUTES, rng.normal(0, .3, 5), strict=True)]
  found = scaling.fit(COMPUTES, errors)
  assert found is not None

  def loss(factor: float, exponent: float, floor: float) -> float:
    return sum((floor + factor * c ** -exponent - e) ** 2 for c, e in zip(COMPUTES, errors, strict=True))

  near = [loss(found.factor * a, found.exponent * b, max(0., found.floor + c))
          for a in (.97, 1., 1.03) for b in (.97, 1., 1.03) for c in (-.2, 0., .2)]
  assert loss(*found) <= min(near) + 1e-12


def test_neither_number_is_negative() -> None:
  rising = scaling.fit((1., 10., 100.), (5., 6., 7.))
  assert rising is not None and rising.floor >= 0 and rising.factor >= 0
  straight = scaling.fit((1., 2., 3., 4.), (9., 6., 3., 0.))  # falls faster than any law that ends above 0
  assert straight is not None and straight.floor == 0


def test_two_points_are_no_law() -> None:
  assert scaling.fit((1., 2., 2.), (5., 4., 3.)) is None


def test_the_compute_of_an_error_is_the_inverse() -> None:
  law = Law(40., .35, 9.)
  assert law.compute(law.error(77.)) == pytest.approx(77.)
  assert law.compute(9.) == law.compute(3.) == float('inf')


def test_the_frontier_holds_what_nothing_cheaper_reaches() -> None:
  points = [('dear', 9., 80.), ('worse', 5., 60.), ('cheap', 1., 50.), ('good', 4., 70.), ('same', 4., 69.)]
  assert scaling.frontier(points) == ['cheap', 'good', 'dear']
  assert scaling.frontier([]) == []


def test_the_papers_transformers_saturate_near_ninety_per_cent() -> None:
  vit = [row for row in published.TABLE_6 if 'R' not in row.model]
  law = scaling.fit([row.exaflops for row in vit], [100 - row.imagenet for row in vit])
  assert law is not None and 89 < 100 - law.floor < 91
  assert max(abs(law.error(row.exaflops) - 100 + row.imagenet) for row in vit) < 1.5
