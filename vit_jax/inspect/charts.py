"""SVG charts for HTML pages: curves, heat maps, confusion matrices.

A chart is inline SVG that takes its text color from the page, so that it fits a light and a dark one. Legends are
HTML, so that long names wrap. The templates `curves.svg`, `heat_map.svg` and `confusion.svg` draw what is laid out
here. The module knows nothing about runs or models.

matplotlib is not used here: its charts would have neither the values under the pointer nor the colors of the page, and
every training run, which writes its report at the end, would import it.
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

WIDTH = 440  # of a chart, in units of 1/12 of the height of its text
_HEIGHT = 250
_LETTER = 7.  # mean width of a letter of text in a wide font, in the same units
_MAX_POINTS = 600  # of a curve: more than the chart has pixels
_DASHES = (('', 'solid'), ('6 3', 'dashed'), ('1.5 3', 'dotted'))
"""Of lines whose colors are used again, in the chart and in its legend."""
_FEW = 40  # points, up to which each has a mark with its value
_MOST_TICKS = 6  # of an axis
_SUPERSCRIPTS = str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹')


def linear_ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
  """Returns at most `_MOST_TICKS` multiples of 1, 2, 2.5 or 5 times a power of ten between `low` and `high`.

  Args:
    low, high: the range, `low < high`.
    whole: whole numbers only.
  """
  least = (high - low) / (_MOST_TICKS - 1)
  power = 10. ** math.floor(math.log10(least))
  steps = [factor * power for factor in (1., 2., 2.5, 5., 10.)]
  step = next(step for step in steps if step >= least * (1 - 1e-9))
  if whole:
    step = max(1., next(step for step in steps if step >= least * (1 - 1e-9) and (step < 1 or step == round(step))))
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [number * step for number in range(first, last + 1)]


def logarithmic_ticks(low: float, high: float) -> list[float]:
  """Returns at most `_MOST_TICKS` values between `low` and `high`: powers of ten, with round multiples if few.

  Args:
    low, high: the range, `0 < low < high`.
  """
  powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
  for factors, stride in (((1., 2., 5.), 1), ((1., 3.), 1), *(((1.,), stride) for stride in range(1, len(powers) + 1))):
    found = [factor * 10. ** power for power in powers if power % stride == 0 for factor in factors]
    inside = [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    if len(inside) <= _MOST_TICKS:
      break
  return inside if len(inside) > 1 else linear_ticks(low, high)


def tick_text(value: float) -> str:
  """Returns a tick as text: 0.25, 1,500, 20k, 3M, 2·10⁻⁵."""
  size = abs(value)
  if value and size < 1e-4:
    power = math.floor(math.log10(size) + 1e-9)
    factor = f'{value / 10. ** power:.3g}'
    return f'{"" if factor == "1" else factor + "·"}10{str(power).translate(_SUPERSCRIPTS)}'
  for unit, name in ((1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
    if size >= unit:
      return f'{value / (1e3 if name == "k" else unit):.4g}{name}'
  return f'{value:,.6g}'


class Curve(NamedTuple):
  """A line of a chart: `x [n]`, `y [n]`, both floats; values that are not finite leave a gap.

  raw: `y` before it was smoothed, drawn faintly behind it; empty if it was not.
  """
  label: str
  x: Sequence[float]
  y: Sequence[float]
  raw: Sequence[float] = ()


class Span(NamedTuple):
  """An axis: its range, whether it is logarithmic, and the range of its positions."""
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
    """Returns positions and texts."""
    found = (logarithmic_ticks(self.low, self.high) if self.is_log
             else linear_ticks(self.low, self.high, whole=whole))
    return [(self.at(value), tick_text(value)) for value in found]


def draw_curves(curves: Sequence[Curve], *, xlabel: str, ylabel: str, log: bool) -> Markup:
  """Draws lines over a common x axis; with `log`, y is logarithmic if all values are positive."""
  arrays = [(_thin(curve.x, curve.y), _thin(curve.x, curve.raw) if len(curve.raw) else None) for curve in curves]
  every = [pair for smooth, raw in arrays for pair in (smooth, raw) if pair is not None]
  x, y = (np.concatenate([pair[axis] for pair in every]) for axis in (0, 1))
  y = y[np.isfinite(y)]
  is_log = log and bool(len(y)) and y.min() > 0
  down = _span(y, is_log=is_log, begin=_HEIGHT - 34., end=24.)
  left = 14 + _LETTER * max(len(text) for _, text in down.ticks())
  across = _span(x, is_log=False, begin=left, end=WIDTH - 12., pad=0.)
  lines = [_Line(curve, number, *pair, across, down).values
           for number, (curve, pair) in enumerate(zip(curves, arrays, strict=True))]
  return _draw('curves.svg', f'{ylabel} over {xlabel}', height=_HEIGHT, left=left, right=WIDTH - 12, down=down.ticks(),
               across=across.ticks(whole=True), xlabel=xlabel, ylabel=ylabel, lines=lines)


class _Line:
  """A curve as the template draws it."""

  def __init__(self, curve: Curve, number: int, smooth: tuple[HostArray, HostArray],
               raw: tuple[HostArray, HostArray] | None, across: Span, down: Span) -> None:
    self._across, self._down = across, down
    pairs = [(x, y) for x, y in zip(*smooth, strict=True) if np.isfinite(y)]
    dash, border = _DASHES[number // len(COLORS) % len(_DASHES)]
    self.values: dict[str, Any] = {
        'label': curve.label, 'color': COLORS[number % len(COLORS)], 'dash': dash, 'border': border,
        'path': self._path(*smooth), 'raw': self._path(*raw) if raw else '',
        'last': html_pages.format_value(float(pairs[-1][1])) if pairs else '',
        'marks': [(across.at(x), down.at(y), f'{x:,.6g}: {html_pages.format_value(float(y))}') for x, y in pairs
                  ] if len(pairs) < _FEW else []}

  def _path(self, x: HostArray, y: HostArray) -> str:
    """Returns the points as the `d` of a path; a gap begins a new part."""
    parts, pen = [], 'M'
    for one, value in zip(x.tolist(), y.tolist(), strict=True):
      if math.isfinite(value):
        parts.append(f'{pen}{self._across.at(one):g} {self._down.at(value):g}')
      pen = 'L' if math.isfinite(value) else 'M'
    return ''.join(parts)


def draw_heat_map(values: HostArray, *, rows: Sequence[str], xlabel: str, unit: str) -> Markup:
  """Draws `values [rows, columns]` as colors on a log scale; '0' marks a zero, a cross a value that is not finite.

  The lowest tenth of the values has the palest color, as a few that are nearly 0 would hide the differences of all
  others. Columns count from 1.
  """
  values = np.asarray(values, np.float64)
  good = np.isfinite(values) & (values > 0)
  logs = np.log10(np.where(good, values, 1.))
  low, high = np.quantile(logs[good], (.1, 1.)).tolist() if good.any() else (0., 0.)
  names = [shorten(name, 34) for name in rows]
  left, side = min(14 + _LETTER * max(map(len, names)), .55 * WIDTH), 17.
  width = min((WIDTH - 8 - left) / values.shape[1], 48.)
  cells = []
  for (row, column), value in np.ndenumerate(values):
    x, y, is_good = round(left + column * width, 1), 4 + row * side, bool(good[row, column])
    share = (logs[row, column] - low) / (high - low) if high > low else 1.
    mark = '' if is_good else '0' if value == 0 else '×'
    cells.append((x, y, round(min(max(float(share), .05), 1.), 3) if is_good else 0., mark,
                  f'{rows[row]}, {xlabel} {column + 1}: {html_pages.format_value(float(value))}'))
  every = max(1, math.ceil((3 + len(str(values.shape[1]))) * _LETTER / width))
  return _draw('heat_map.svg', f'{unit} by {xlabel}', height=4 + len(rows) * side + 56, left=left, side=side,
               width=width, rows=names, cells=cells, xlabel=xlabel, unit=unit, low=f'≤ {tick_text(_rounded(10**low))}',
               high=tick_text(_rounded(10**high)), bottom=4 + len(rows) * side,
               columns=[(left + (c + .5) * width, c + 1) for c in range(0, values.shape[1], every)])


def draw_confusion(counts: HostArray, names: Sequence[str]) -> Markup:
  """Draws a confusion matrix `counts [C, C]`, labels in rows; colors show the share of the images with a label."""
  counts = np.asarray(counts)
  share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
  short = [shorten(name, 18) for name in names]
  longest = max(map(len, short), default=0)
  is_turned = longest > 3
  left = 26 + _LETTER * longest
  side = round(max(12., min(30., (WIDTH - left - 8) / len(names))), 1)
  cells = [(left + column * side, 4 + row * side, round(float(share[row, column]), 3), int(counts[row, column]),
            f'{names[row]}, predicted {names[column]}: {counts[row, column]:,} of {counts[row].sum():,} images')
           for row, column in np.argwhere(counts > 0)]
  bottom = 4 + len(names) * side
  return _draw('confusion.svg', 'confusion matrix', width=left + len(names) * side + 8, left=left, side=side,
               bottom=bottom, height=bottom + 30 + (_LETTER * longest if is_turned else 14), names=short, cells=cells,
               is_turned=is_turned, has_numbers=len(names) <= 20)


def _draw(template: str, label: str, **values: object) -> Markup:
  return Markup(html_pages.render(template, **({'label': label, 'full': WIDTH} | values)))


def _span(values: HostArray, *, is_log: bool, begin: float, end: float, pad: float = .05) -> Span:
  """Returns an axis of the finite values, with a margin of the share `pad` at both ends."""
  low, high = (float(values.min()), float(values.max())) if len(values) else (0., 1.)
  if high <= low:
    low, high = (low / 2, high * 2) if is_log else (low - (abs(low) / 10 or 1.), high + (abs(high) / 10 or 1.))
  elif is_log:
    low, high = low * (low / high)**pad, high * (high / low)**pad
  else:
    low, high = low - pad * (high - low), high + pad * (high - low)
  return Span(low, high, is_log, begin, end)


def _rounded(value: float) -> float:
  return float(f'{value:.2g}')


def _thin(steps: Sequence[float], values: Sequence[float]) -> tuple[HostArray, HostArray]:
  """Returns a curve as arrays of at most `_MAX_POINTS` points; beyond that, neighboring points are averaged."""
  x, y = np.asarray(steps, np.float64), np.asarray(values, np.float64)
  y = np.where(np.isfinite(y), y, np.nan)
  group = -(-len(x) // _MAX_POINTS)
  if group <= 1:
    return x, y
  ends = np.arange(len(x), 0, -group)[::-1]  # the first group may be smaller
  starts = np.append(0, ends[:-1])
  return x[ends - 1], np.add.reduceat(y, starts) / (ends - starts)
