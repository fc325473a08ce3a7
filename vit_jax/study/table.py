"""`--job=report`, and the results of a study: `table.csv`, `table.html` and `figure.png` in its directory."""
from __future__ import annotations

import csv
import io
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vit_jax.config import schema
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.inspect import html_pages, plotting
from vit_jax.inspect.html_pages import to_float
from vit_jax.inspect.plotting import COLORS
from vit_jax.jobs import report
from vit_jax.record import run_directory, storage

if TYPE_CHECKING:
  from matplotlib.axes import Axes

_SIZE = (6., 3.4)  # inches, of a panel with its legend
_DPI = 150
_MOST_NAMED = 10  # series in a legend


def run(workdir: Sequence[storage.Path], to: str, *, overwrite: bool = False) -> int:
  """Prints the table of a study, or else writes the page of runs; exit status 0. See `jobs.report.run`."""
  if len(workdir) > 1 or not (workdir[0] / 'runs').is_dir() or (workdir[0] / 'config.json').is_file():
    return report.run(workdir, to, overwrite=overwrite)
  print(show(workdir[0]))
  return 0


def write(workdir: pathlib.Path, study: schema.Study, results: schema.Results, missing: Mapping[str, str]) -> str:
  """Writes table and figure of the finished runs, and returns the path of the page.

  Args:
    workdir: directory of the study.
    study: defines the table and the figures.
    results: of the finished runs.
    missing: for each other run, the reason why it has no results.
  """
  rows = make_rows(study, results)
  figures = study.figures or (() if study.table else (schema.Figure('run', 'headline'),))
  curves = study.curves(results) if study.curves else []
  figure = draw_figure(rows, figures, curves) if rows and figures else b''
  columns, text = _columns(rows), io.StringIO()
  writer = csv.DictWriter(text, columns, lineterminator='\n')
  writer.writeheader()
  writer.writerows(rows)
  cells = [['–' if row.get(column) is None else row[column] for column in columns] for row in rows]
  page = html_pages.render('study.html', title=f'{study.name} – study', name=study.name, columns=columns, rows=cells,
                           figure=figure, missing=missing)
  workdir.mkdir(parents=True, exist_ok=True)
  run_directory.write_text(workdir / 'table.csv', text.getvalue())
  run_directory.write_text(workdir / 'table.html', page)
  if figure:
    run_directory.write_bytes(workdir / 'figure.png', figure)
  return str(workdir / 'table.html')


def show(workdir: storage.Path) -> str:
  """Returns the table of a study as text, and the path of its page.

  Raises:
    UserError: the study has no table yet.
  """
  path = workdir / 'table.csv'
  if not path.is_file():
    raise UserError(f'{path}: expected the table of a study, got no such file. It is written when the study ends or is '
                    'stopped.')
  expected, advice = 'the table of a study', 'It is written again when the study ends or is stopped.'
  text = documents.read_text(path, expected=expected, advice=advice)
  try:
    rows = list(csv.reader(io.StringIO(text), strict=True))
  except csv.Error:
    rows = []
  if len({len(row) for row in rows}) != 1:
    raise UserError(f'{path}: expected {expected}, got lines of different lengths, or none. {advice}')
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = ['  '.join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
  return '\n'.join([*lines, f'Page: {workdir / "table.html"}'])


def make_rows(study: schema.Study, results: schema.Results) -> list[schema.Row]:
  """Returns the rows of the study's own table, or one row for each run."""
  rows = study.table(results) if study.table else [
      {'run': name, 'headline': result.headline, **result.metrics, 'steps': result.step,
       'parameters': result.num_params, 'exaFLOPs': result.exaflops, 'seconds': round(result.seconds, 1)}
      for name, result in results.items()]
  unknown = {name for f in study.figures for name in (f.x, f.y, f.series, f.error) if name} - set(_columns(rows))
  if rows and unknown:
    raise UserError(f'figures of {study.name}: expected columns of its table, {", ".join(_columns(rows))}, got '
                    f'{", ".join(sorted(unknown))}. Name such columns.')
  if any(one.limit for result in results.values() for one in result.config.evals.values()):
    rows = [{**row, 'partial': 'some runs were evaluated on a part of their split'} for row in rows]
  return rows


def _columns(rows: Sequence[schema.Row]) -> list[str]:
  return list(dict.fromkeys(name for row in rows for name in row))


def draw_figure(rows: Sequence[schema.Row], figures: Sequence[schema.Figure],
                curves: Sequence[schema.Row] = ()) -> bytes:
  """Returns a PNG file with a panel for each figure, side by side.

  Points without a finite number on an axis are omitted. If x is text, the axis shows the names in their order. The
  points of a series are connected by lines, unless there are `curves`: rows of other points to connect, in the color of
  the series that they name.
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
  has_curves = bool(curves)
  rows, curves = ([row for row in group if isinstance(value := row.get(settings.y), int | float)
                   and math.isfinite(value) and row.get(settings.x) is not None] for group in (rows, curves))
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
          marker='o', markersize=4, capsize=3, linestyle='none' if is_named or has_curves else '-', linewidth=1.3,
          color=color, label=str(name))
    ax.plot([to_float(row[settings.x]) for row in curve], [to_float(row[settings.y]) for row in curve], linewidth=1.3,
            color=color, label=None if points else str(name))
  if 1 < len(series) <= _MOST_NAMED:
    ax.legend(frameon=False, title=settings.series, loc='center left', bbox_to_anchor=(1, .5))  # beside the points
  if settings.log_x and not is_named:
    ax.set_xscale('log')
  if settings.log_y:
    ax.set_yscale('log')
  if is_named:
    ax.tick_params(axis='x', rotation=60 if len(rows) > 4 else 0)
  ax.set(xlabel=settings.x, ylabel=settings.y)
  ax.grid(alpha=.25)
  ax.spines[['top', 'right']].set_visible(False)
