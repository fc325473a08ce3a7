"""Ticks are few, round and inside the range, and their texts short."""
from __future__ import annotations

import pytest

from vit_jax.inspect import ticks


@pytest.mark.parametrize(('low', 'high', 'expected'), [
    (0., 1., [0., .2, .4, .6, .8, 1.]), (0., 100., [0., 20., 40., 60., 80., 100.]), (-.3, .9, [-.25, 0., .25, .5, .75]),
    (3., 3.001, [3., 3.0002, 3.0004, 3.0006, 3.0008, 3.001]), (17., 1684., [500., 1000., 1500.])])
def test_linear_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
  assert ticks.linear(low, high) == pytest.approx(expected, abs=1e-12)


def test_whole_ticks_are_whole() -> None:
  assert ticks.linear(1., 4., whole=True) == [1., 2., 3., 4.] and ticks.linear(1., 2., whole=True) == [1., 2.]
  assert all(tick == int(tick) for high in range(2, 60) for tick in ticks.linear(1., high, whole=True))


@pytest.mark.parametrize(('low', 'high', 'expected'), [
    (1., 30., [1., 2., 5., 10., 20.]), (.03, 5., [.03, .1, .3, 1., 3.]), (1e-9, 1., [1e-8, 1e-6, 1e-4, 1e-2, 1.]),
    (2.1, 2.4, [2.1, 2.2, 2.3, 2.4])])
def test_logarithmic_ticks_are_powers_of_ten_or_denser(low: float, high: float, expected: list[float]) -> None:
  assert ticks.logarithmic(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(('value', 'expected'), [
    (0., '0'), (.25, '0.25'), (-.5, '-0.5'), (1500., '1,500'), (20_000., '20k'), (3e6, '3M'), (2.5e9, '2.5G'),
    (5e-4, '0.0005'), (1e-5, '10⁻⁵'), (2e-5, '2·10⁻⁵'), (.1 + .2, '0.3'), (1.2e-10, '1.2·10⁻¹⁰')])
def test_texts_are_short(value: float, expected: str) -> None:
  assert ticks.text(value) == expected
