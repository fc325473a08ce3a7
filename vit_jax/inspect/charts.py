"""SVG charts for HTML pages: curves, heat maps, confusion matrices.

A chart is inline SVG that takes its text color from the page, so that it fits a light and a dark one. Legends are
HTML, so that long names wrap. The templates `curves.svg` and `cells.svg` draw what is laid out here. The module knows
nothing about runs or models.

matplotlib is not used here: its SVG has neither the values under the pointer nor the colors of the page, is two
to four times as large, and takes several times as long, which the live page would wait for.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from vit_jax.core.types import HostArray
from vit_jax.inspect import html_pages
from vit_jax.inspect.figures import COLORS, shorten

WIDTH, _HEIGHT = 440, 250
"""Of a chart, in units of 1/12 of the height of its text."""
_LETTER = 7.  # mean width of a letter of text in a wide font, in the same units
_MAX_POINTS = 600  # points of a curve: more than the chart has pixels
_DASHES = (('', 'solid'), ('6 3', 'dashed'), ('1.5 3', 'dotted'))
"""The forms of lines in the chart, and in its legend; the second is for the ninth line, whose color is used again."""
_MAX_MARKED = 40  # a curve of fewer points has a mark with the value at each of them
_MAX_TICKS = 6  # of an axis
_SUPERSCRIPTS = str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹')


def linear_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
  """Returns at most `_MAX_TICKS` multiples of 1, 2, 2.5 or 5 times a power of ten between `low` and `high`.

  Args:
    low, high: the range, `low < high`.
    whole: whole numbers only.
  """
  min_step = (high - low) / (_MAX_TICKS - 1) * (1 - 1e-9)
  if whole:
    min_step = max(min_step, 1.)
  power = 10. ** math.floor(math.log10(min_step))
  steps = [factor * power for factor in (1, 2, 2.5, 5, 10)]
  step = next(step for step in steps if step >= min_step and not (whole and step % 1))
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [number * step for number in range(first, last + 1)]


def logarithmic_ticks(low: float, high: float) -> list[float]:
  """Returns at most `_MAX_TICKS` values between `low` and `high`: powers of ten, with round multiples if few.

  Args:
    low, high: the range, `0 < low < high`.
  """
  powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
  # The factors of the powers that are divisible by a stride, from most ticks to fewest.
  choices: list[tuple[tuple[float, ...], int]] = [((1., 2., 5.), 1), ((1., 3.), 1)]
  choices += [((1.,), stride) for stride in range(1, len(powers) + 1)]
  for factors, stride in choices:
    ticks = [factor * 10. ** power for power in powers if power % stride == 0 for factor in factors]
    inside = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    if len(inside) <= _MAX_TICKS:
      break
  return inside if len(inside) > 1 else linear_ticks(low, high)


def tick_text(value: float) -> str:
  """Returns a tick as text: 0.25, 1,500, 20k, 3M, 2·10⁻⁵."""
  size = abs(value)
  if value and size < 1e-4:
    power = math.floor(math.log10(size) + 1e-9)
    factor = f'{value / 10. ** power:.3g}·'.removeprefix('1·')
    return f'{factor}10{str(power).translate(_SUPERSCRIPTS)}'
  for least, unit, name in ((1e9, 1e9, 'G'), (1e6, 1e6, 'M'), (1e4, 1e3, 'k')):
    if size >= least:
      return f'{value / unit:.4g}{name}'
  return f'{value:,.6g}'


class Curve(NamedTuple):
  """A line of a chart: `x [n]`, `y [n]`, both floats; values that are not finite leave a gap.

  raw: `y` before it was smoothed, drawn faintly behind it; empty if it was not.
  """
  label: str
  x: Sequence[float]
  y: Sequence[float]
  raw: Sequence[float] = ()


class _Axis(NamedTuple):
  """An axis from the value `low` at the position `begin` to `high` at `end`; `is_log`: it is logarithmic."""
  low: float
  high: float
  is_log: bool
  begin: float
  end: float

  def at(self, value: float) -> float:
    """Returns the position of a value."""
    low, high, value = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
    return round(self.begin + (self.end - self.begin) * (value - low) / (high - low), 1)

  def ticks(self, *, whole: bool = False) -> list[tuple[float, str]]:
    """Returns positions and texts of the ticks; `whole`: at whole numbers only."""
    if self.is_log:
      values = logarithmic_ticks(self.low, self.high)
    else:
      values = linear_ticks(self.low, self.high, whole=whole)
    return [(self.at(value), tick_text(value)) for value in values]


def draw_curves(curves: Sequence[Curve], *, xlabel: str, ylabel: str, log: bool) -> Markup:
  """Draws lines over a common x axis; with `log`, y is logarithmic if all values are positive."""
  smooth = [_thin(curve.x, curve.y) for curve in curves]
  raw = [_thin(curve.x, curve.raw) for curve in curves]
  x, y = (np.concatenate([points[axis] for points in smooth + raw]) for axis in (0, 1))
  y = y[np.isfinite(y)]
  down = _axis(y, is_log=log and bool(len(y)) and y.min() > 0, begin=_HEIGHT - 34., end=24.)
  left = 14 + _LETTER * max(len(text) for _, text in down.ticks())
  across = _axis(x, is_log=False, begin=left, end=WIDTH - 12., pad=0.)

  def path(points: tuple[HostArray, HostArray]) -> str:
    """Returns points as the `d` of a path; a gap begins a new part."""
    parts, command = [], 'M'  # M: move to the point; L: draw a line to it
    for x, y in zip(*points, strict=True):
      if np.isfinite(y):
        parts.append(f'{command}{across.at(x):g} {down.at(y):g}')
      command = 'L' if np.isfinite(y) else 'M'
    return ''.join(parts)

  lines: list[dict[str, Any]] = []
  for number, curve in enumerate(curves):
    values = [(x, y, html_pages.format_value(float(y))) for x, y in zip(*smooth[number], strict=True) if np.isfinite(y)]
    dash, border = _DASHES[number // len(COLORS) % len(_DASHES)]
    lines.append({
        'label': curve.label, 'color': COLORS[number % len(COLORS)], 'dash': dash, 'border': border,
        'path': path(smooth[number]), 'raw': path(raw[number]), 'last': values[-1][2] if values else '',
        'marks': [(across.at(x), down.at(y), f'{x:,.6g}: {text}') for x, y, text in values
                  if len(values) < _MAX_MARKED]})
  return Markup(html_pages.render(
      'curves.svg', label=f'{ylabel} over {xlabel}', full=WIDTH, height=_HEIGHT, left=left, right=WIDTH - 12,
      down=down.ticks(), across=across.ticks(whole=True), xlabel=xlabel, ylabel=ylabel, lines=lines))


class _Cell(NamedTuple):
  """A cell of a table of colors: `share` from 0 to 1 is its color, `mark` is on it, and `text` is under the pointer."""
  row: int
  column: int
  share: float
  mark: str
  text: str


def draw_heat_map(values: HostArray, *, rows: Sequence[str], xlabel: str, unit: str) -> Markup:
  """Draws `values [rows, columns]` as colors on a log scale; '0' marks a zero, a cross a value that is not finite.

  The lowest tenth of the values has the palest color, as a few that are nearly 0 would hide the differences of all
  others. Columns count from 1.
  """
  values = np.asarray(values, np.float64)
  is_colored = np.isfinite(values) & (values > 0)
  logs = np.log10(np.where(is_colored, values, 1.))
  low, high = np.quantile(logs[is_colored], (.1, 1.)).tolist() if is_colored.any() else (0., 0.)
  color = np.clip((logs - low) / (high - low), .05, 1.) if high > low else 1.
  share = np.where(is_colored, color, 0.)
  mark = np.where(is_colored, '', np.where(values == 0, '0', '×'))
  cells = [_Cell(row, column, share=float(share[row, column]), mark=str(mark[row, column]),
                 text=f'{rows[row]}, {xlabel} {column + 1}: {html_pages.format_value(float(value))}')
           for (row, column), value in np.ndenumerate(values)]
  names, num_columns = [shorten(name, 34) for name in rows], values.shape[1]
  left = min(14 + _LETTER * max(map(len, names)), .55 * WIDTH)
  width = min((WIDTH - 8 - left) / num_columns, 48.)
  stride = max(1, math.ceil((3 + len(str(num_columns))) * _LETTER / width))  # of the columns whose number is shown
  least, most = (tick_text(float(f'{10**power:.2g}')) for power in (low, high))
  return Markup(html_pages.render(
      'cells.svg', label=f'{unit} by {xlabel}', full=WIDTH, left=left, side=17., width=width, rows=names,
      columns={column: column + 1 for column in range(0, num_columns, stride)}, num_columns=num_columns, cells=cells,
      xlabel=xlabel, ylabel='', turned=0., scale=(f'≤ {least}', f'{most} {unit}')))


def draw_confusion(counts: HostArray, names: Sequence[str]) -> Markup:
  """Draws a confusion matrix `counts [C, C]`, labels in rows; colors show the share of the images with a label."""
  counts = np.asarray(counts)
  share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
  has_numbers = len(names) <= 20
  cells = [_Cell(row, column, share=max(float(share[row, column]), .06),
                 mark=f'{counts[row, column]}' if has_numbers else '',
                 text=f'{names[row]}, predicted {names[column]}: {counts[row, column]:,} of {counts[row].sum():,} '
                      'images')
           for row, column in np.argwhere(counts > 0).tolist()]
  short = [shorten(name, 18) for name in names]
  longest = max(map(len, short), default=0)
  left = 26 + _LETTER * longest
  side = max(12., min(30., (WIDTH - left - 8) / len(names)))
  turned = _LETTER * longest if _LETTER * longest > side - 3 else 0.  # names are upright unless they would overlap
  return Markup(html_pages.render(
      'cells.svg', label='confusion matrix', full=left + len(names) * side + 8, left=left, side=side, width=side,
      rows=short, columns=dict(enumerate(short)), num_columns=len(short), cells=cells, xlabel='predicted',
      ylabel='label', turned=turned, scale=()))


def _axis(values: HostArray, *, is_log: bool, begin: float, end: float, pad: float = .05) -> _Axis:
  """Returns an axis of the finite values, with a margin of the share `pad` at both ends."""
  low, high = (float(values.min()), float(values.max())) if len(values) else (0., 1.)
  is_single = high <= low
  if is_log:
    low, high = (low / 2, high * 2) if is_single else (low * (low / high)**pad, high * (high / low)**pad)
  else:
    margin = (abs(low) / 10 or 1.) if is_single else pad * (high - low)
    low, high = low - margin, high + margin
  return _Axis(low, high, is_log, begin, end)


def _thin(steps: Sequence[float], values: Sequence[float]) -> tuple[HostArray, HostArray]:
  """Returns a curve as arrays of at most `_MAX_POINTS` points; beyond that, neighboring points are averaged."""
  x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
  y = np.where(np.isfinite(y), y, np.nan)
  group = -(-len(x) // _MAX_POINTS)  # points that are averaged
  if group <= 1 or not len(y):
    return x[:len(y)], y
  ends = np.arange(len(x), 0, -group)[::-1]  # the first group may be smaller
  starts = np.append(0, ends[:-1])
  return x[ends - 1], np.add.reduceat(y, starts) / (ends - starts)
