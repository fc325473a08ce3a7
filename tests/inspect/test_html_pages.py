"""Templates escape values, show nested settings, and contain everything that a page needs."""
from __future__ import annotations

import pathlib
import re

import numpy as np
import pytest

from vit_jax.core.errors import UserError
from vit_jax.inspect import html_pages

STYLE = pathlib.Path(html_pages.__file__).parent / 'templates' / 'style.css'


def luminance(color: str) -> float:
  """The relative luminance of WCAG 2.2."""
  digits = color[1:] if len(color) == 7 else ''.join(2 * digit for digit in color[1:])
  values = [int(digits[i:i + 2], 16) / 255 for i in (0, 2, 4)]
  red, green, blue = (v / 12.92 if v <= .04045 else ((v + .055) / 1.055) ** 2.4 for v in values)
  return .2126 * red + .7152 * green + .0722 * blue


@pytest.mark.parametrize('mode', ['light', 'dark'])
def test_texts_of_reports_have_a_contrast_of_4_5_in_both_modes(mode: str) -> None:
  light, dark = re.findall(r':root \{([^}]*)\}', STYLE.read_text())
  colors = dict(re.findall(r'--(\w+): (#\w+)', light if mode == 'light' else dark))
  pairs = [(text, back) for text in ('text', 'quiet', 'good', 'bad') for back in ('page', 'card')]
  for text, back in [*pairs, ('text', 'heat')]:  # counts of a confusion matrix are on cells between page and heat
    low, high = sorted((luminance(colors[text]), luminance(colors[back])))
    assert (high + .05) / (low + .05) >= 4.5, (text, back)


def test_values_are_escaped_and_nothing_is_loaded_from_elsewhere() -> None:
  page = html_pages.render('study.html', title='<t>', name='a & b', columns=['<c>'], rows=[['<script>'], [1234]],
                           figure=b'png', missing={'<run>': '"no"'})
  assert '<title>&lt;t&gt;</title>' in page and '<h1>a &amp; b</h1>' in page and '&lt;run&gt;: &#34;no&#34;' in page
  assert '<script' not in page and '<td>&lt;script&gt;</td>' in page and '<td class="number">1,234</td>' in page
  assert 'http' not in page and '<style>\n:root {' in page and 'src="data:image/png;base64,cG5n"' in page


def test_a_column_title_is_aligned_with_its_numbers() -> None:
  page = html_pages.render('study.html', title='', name='', columns=['text', 'number'], rows=[['a', '–'], ['b', 2]],
                           figure=b'', missing={})
  assert '<th>text</th>' in page and '<th class="number">number</th>' in page
  assert '<td>–</td>' in page and '<img' not in page and 'Not in this table' not in page


def test_a_misspelled_value_of_a_template_is_an_error() -> None:
  with pytest.raises(Exception, match="'columns' is undefined"):
    html_pages.render('study.html', title='', name='', rows=[], figure=b'', missing={})


def test_only_uint8_images_become_png_files() -> None:
  assert html_pages.encode(np.zeros((2, 3, 3), np.uint8)).startswith(b'\x89PNG')
  with pytest.raises(ValueError, match=r'image: expected \[H, W, 3\] uint8, got \[2, 3\] float64'):
    html_pages.encode(np.zeros((2, 3)))


@pytest.mark.parametrize('name', ['top1', 'test/top5@ema', 'test/top1_k20', 'few/10shot_l2_0.5@ema', 'train/accuracy',
                                  'test/top1.partial50', 'test/class_mean', 'test/ece', 'train/teacher_accuracy'])
def test_shares_are_in_percent(name: str) -> None:
  assert html_pages.format_metric(name, .9806) == '98.06 %' and html_pages.format_metric(name, 'nan') == 'nan'


@pytest.mark.parametrize('name', ['test/nll', 'train/loss', 'topology', 'few/setting', 'test/topics1'])
def test_other_metrics_are_numbers(name: str) -> None:
  assert html_pages.format_metric(name, .25) == '0.25'


@pytest.mark.parametrize(('value', 'text'), [
    (9999.4, '9999'), (9999.96, '10,000'), (-9999.5, '-10,000'), (.12345, '0.1235')])
def test_numbers_near_ten_thousand_are_no_powers(value: float, text: str) -> None:
  assert html_pages.format_value(value) == text


def test_a_folder_at_the_place_of_a_page_is_not_replaced(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='expected none or a page of vit-jax at'):
    html_pages.check_ours(tmp_path)
