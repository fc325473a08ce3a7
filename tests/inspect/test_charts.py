"""What charts show of values that are missing, and of long curves and names."""
from __future__ import annotations

import pathlib
import re

import browser
import numpy as np
import pytest

from vit_jax.inspect import charts, html_pages


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


def test_values_that_are_not_finite_interrupt_a_curve() -> None:
  curve = charts.Curve('loss', [1., 2., 3., 4., 5.], [1., 2., np.nan, 4., np.inf])
  svg = charts.draw_curves([curve], xlabel='step', ylabel='nats', log=False)
  path = re.search(r'class="line" style="stroke: #\w+" d="([^"]*)"', svg)
  assert path is not None and re.sub(r'[\d. ]+', '', path[1]) == 'MLM' and svg.count('<circle') == 3
  assert '</i>loss <b>4</b>' in svg


def test_a_curve_without_finite_values_has_a_chart() -> None:
  svg = charts.draw_curves([charts.Curve('a', [1.], [np.nan])], xlabel='step', ylabel='y', log=True)
  assert '<svg' in svg and '<circle' not in svg


def test_a_ninth_curve_differs_from_the_first_by_dashes() -> None:
  curves = [charts.Curve(f'{i}', [1., 2.], [i, i]) for i in range(9)]
  svg = charts.draw_curves(curves, xlabel='x', ylabel='y', log=False)
  assert svg.count('stroke-dasharray="6 3"') == 1 and svg.count('4px dashed #0a84c6') == 1
  assert svg.count('4px solid #0a84c6') == 1


def test_a_thinned_curve_has_all_points() -> None:
  x, y = charts._thin(range(1199), [6., *[0.] * 1197, 8.])
  assert (len(x), x[0], y[0], x[-1], y[-1]) == (600, 0, 6., 1198, 4.) and not y[1:-1].any()
  x, y = charts._thin(range(1200), np.arange(1200.))
  np.testing.assert_array_equal([x, y], [np.arange(1, 1200, 2), np.arange(600) * 2 + .5])


def test_a_long_curve_is_thinned_to_what_can_be_seen() -> None:
  curve = charts.Curve('a', list(range(10_000)), list(range(10_000)))
  assert len(charts.draw_curves([curve], xlabel='step', ylabel='y', log=False)) < 12_000


def test_names_of_many_classes_are_turned_where_they_would_overlap() -> None:
  upright, turned = (charts.draw_confusion(np.eye(n, dtype=int), [f'{i}' for i in range(n)]) for n in (10, 37))
  assert upright.count('rotate(-90') == 1 and turned.count('rotate(-90') == 38  # one is the title of the axis


def test_names_of_classes_are_escaped_and_turned_where_they_are_long() -> None:
  svg = charts.draw_confusion(np.array([[3, 1], [0, 4]]), ['<cat>', 'dog'])
  assert '&lt;cat&gt;, predicted dog: 1 of 4 images' in svg and 'rotate(-90' in svg and '<cat>' not in svg
  assert svg.count('class="heat"') == 3  # no cell without images


@pytest.mark.slow(reason='2 s: a browser')
@pytest.mark.skipif(browser.find() is None, reason='needs Chromium')
def test_the_value_of_a_point_and_of_a_cell_is_under_the_pointer(tmp_path: pathlib.Path) -> None:
  drawn = [charts.draw_curves([charts.Curve('a', [1., 2.], [3., 4.])], xlabel='step', ylabel='y', log=False),
           charts.draw_heat_map(np.array([[1., 0.], [np.nan, 4.]]), rows=['a', 'b'], xlabel='layer', unit='norm'),
           charts.draw_confusion(np.array([[3, 1], [0, 4]]), ['cat', 'dog'])]
  (tmp_path / 'page.html').write_text(f'<style>{html_pages.read("style.css")}</style>{"".join(drawn)}')
  with browser.Page(tmp_path / 'profile') as page:
    page.show(width=390, dark=True)
    page.open((tmp_path / 'page.html').as_uri())
    assert page.run("""[...document.querySelectorAll('svg title')].map(title => {
        title.parentElement.scrollIntoView({block: 'center'});
        const at = title.parentElement.getBoundingClientRect();
        const under = document.elementFromPoint(at.x + at.width / 2, at.y + at.height / 2);
        return under === title.parentElement})""") == 9 * [True]


@pytest.mark.parametrize(('low', 'high', 'expected'), [
    (0., 1., [0., .2, .4, .6, .8, 1.]), (0., 100., [0., 20., 40., 60., 80., 100.]), (-.3, .9, [-.25, 0., .25, .5, .75]),
    (3., 3.001, [3., 3.0002, 3.0004, 3.0006, 3.0008, 3.001]), (17., 1684., [500., 1000., 1500.])])
def test_linear_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
  assert charts.linear_ticks(low, high) == pytest.approx(expected, abs=1e-12)


def test_whole_ticks_are_whole() -> None:
  assert charts.linear_ticks(1., 4., whole=True) == [1., 2., 3., 4.]
  assert charts.linear_ticks(1., 2., whole=True) == [1., 2.]
  assert all(tick == int(tick) for high in range(2, 60) for tick in charts.linear_ticks(1., high, whole=True))


@pytest.mark.parametrize(('low', 'high', 'expected'), [
    (1., 30., [1., 2., 5., 10., 20.]), (.03, 5., [.03, .1, .3, 1., 3.]), (1e-9, 1., [1e-8, 1e-6, 1e-4, 1e-2, 1.]),
    (2.1, 2.4, [2.1, 2.2, 2.3, 2.4])])
def test_logarithmic_ticks_are_powers_of_ten_or_denser(low: float, high: float, expected: list[float]) -> None:
  assert charts.logarithmic_ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(('value', 'expected'), [
    (0., '0'), (.25, '0.25'), (-.5, '-0.5'), (1500., '1,500'), (20_000., '20k'), (3e6, '3M'), (2.5e9, '2.5G'),
    (5e-4, '0.0005'), (1e-5, '10⁻⁵'), (2e-5, '2·10⁻⁵'), (.1 + .2, '0.3'), (1.2e-10, '1.2·10⁻¹⁰')])
def test_texts_are_short(value: float, expected: str) -> None:
  assert charts.tick_text(value) == expected
