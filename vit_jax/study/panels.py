"""The figure of a study: panels of points and lines from columns of its table."""
from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.config import schema
from vit_jax.inspect import plotting
from vit_jax.inspect.figures import COLORS
from vit_jax.inspect.html_pages import to_float

if TYPE_CHECKING:
  from matplotlib.axes import Axes

_SIZE = (5., 3.4)  # inches, of a panel
_DPI = 150


def draw(rows: Sequence[schema.Row], figures: Sequence[schema.Figure], curves: Sequence[schema.Row] = ()) -> bytes:
  """Returns a PNG file with a panel for each figure, side by side.

  Points without a number on an axis are omitted. If x is text, the axis shows the names in their order. The points of a
  series are connected by lines, unless there are `curves`: rows of other points to connect, in the color of the series
  that they name.
  """
  plotting.load()
  from matplotlib.figure import Figure
  figure = Figure(figsize=(_SIZE[0] * len(figures), _SIZE[1]), layout='constrained')
  for ax, settings in zip(figure.subplots(1, len(figures), squeeze=False)[0], figures, strict=True):
    _draw_panel(ax, rows, curves, settings)
  png = io.BytesIO()
  figure.savefig(png, format='png', dpi=_DPI)
  return png.getvalue()


def _draw_panel(ax: Axes, rows: Sequence[schema.Row], curves: Sequence[schema.Row], settings: schema.Figure) -> None:
  rows, curves = ([row for row in group if isinstance(row.get(settings.y), int | float)
                   and row.get(settings.x) is not None] for group in (rows, curves))
  is_named = any(isinstance(row[settings.x], str) for row in rows)
  series = list(dict.fromkeys(row.get(settings.series) for row in (*rows, *curves)))
  for number, name in enumerate(series):
    points, curve = ([row for row in group if row.get(settings.series) == name] for group in (rows, curves))
    if not is_named:
      points = sorted(points, key=lambda row: row[settings.x])  # type: ignore[arg-type, return-value]
    x: list[Any] = [str(row[settings.x]) if is_named else row[settings.x] for row in points]
    y, error = ([to_float(row.get(column) or 0.) for row in points] for column in (settings.y, settings.error))
    color = COLORS[number % len(COLORS)]
    if points:
      ax.errorbar(
          x, y, error if settings.error else None,
          marker='o', markersize=4, capsize=3, linestyle='none' if is_named or curves else '-', linewidth=1.3,
          color=color, label=str(name))
    ax.plot([to_float(row[settings.x]) for row in curve], [to_float(row[settings.y]) for row in curve], linewidth=1.3,
            color=color, label=None if points else str(name))
  if len(series) > 1:
    ax.legend(frameon=False, title=settings.series)
  if settings.log_x and not is_named:
    ax.set_xscale('log')
  if settings.log_y:
    ax.set_yscale('log')
  if is_named:
    ax.tick_params(axis='x', rotation=60 if len(rows) > 4 else 0)
  ax.set(xlabel=settings.x, ylabel=settings.y)
  ax.grid(alpha=.25)
  ax.spines[['top', 'right']].set_visible(False)
