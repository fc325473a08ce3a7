"""Writes the results of a study as `table.csv`, `table.html` and `figure.png`; also runs the job `report`.

The coordinator of a study calls `write` at the end. A row of the table is a dict from a column's name to a value.
"""
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
from vit_jax.inspect import figures as drawing
from vit_jax.inspect import html_pages
from vit_jax.inspect.html_pages import to_float
from vit_jax.jobs import report
from vit_jax.record import run_directory, storage

if TYPE_CHECKING:
  from matplotlib.axes import Axes

_PANEL_WIDTH, _PANEL_HEIGHT = 6., 3.4  # inches, with the legend
_MAX_SERIES = 10  # in a legend


def run(workdir: Sequence[storage.Path], to: str, *, overwrite: bool = False) -> int:
  """Prints the table if `workdir` is the directory of a study, else calls `jobs.report.run`."""
  if len(workdir) > 1 or not (workdir[0] / 'runs').is_dir() or (workdir[0] / 'config.json').is_file():
    return report.run(workdir, to, overwrite=overwrite)
  print(show(workdir[0]))
  return 0


def write(workdir: pathlib.Path, study: schema.Study, results: schema.Results, missing: Mapping[str, str]) -> str:
  """Writes table and figure of the finished runs; returns the path of the page.

  Args:
    workdir: the directory of the study.
    study: the study, which defines the table and the figures.
    results: the results of the finished runs, by name.
    missing: the reasons why other runs have no results, by name.
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
  """Returns the table of a study as text, with the path of its page; raises UserError if it has no table yet."""
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
  lines = ['  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
  return '\n'.join([*lines, f'Page: {workdir / "table.html"}'])


def make_rows(study: schema.Study, results: schema.Results) -> list[schema.Row]:
  """Returns the rows of `study.table`, or else a row for each run; raises UserError if a figure needs other columns."""
  rows = study.table(results) if study.table else [
      {'run': name, 'headline': result.headline, **result.metrics, 'steps': result.step,
       'parameters': result.num_params, 'exaFLOPs': result.exaflops, 'seconds': round(result.seconds, 1)}
      for name, result in results.items()]
  used_columns = {column for figure in study.figures for column in (figure.x, figure.y, figure.series, figure.error)}
  unknown = used_columns - {'', *_columns(rows)}
  if rows and unknown:
    raise UserError(f'figures of {study.name}: expected columns of its table, {", ".join(_columns(rows))}, got '
                    f'{", ".join(sorted(unknown))}. Name such columns.')
  if any(evaluation.limit for result in results.values() for evaluation in result.config.evals.values()):
    rows = [{**row, 'partial': 'some runs were evaluated on a part of their split'} for row in rows]
  return rows


def _columns(rows: Sequence[schema.Row]) -> list[str]:
  return list(dict.fromkeys(name for row in rows for name in row))


def draw_figure(rows: Sequence[schema.Row], figures: Sequence[schema.Figure],
                curves: Sequence[schema.Row] = ()) -> bytes:
  """Returns a PNG file with a panel for each figure, side by side.

  Rows are points; rows without x, or without a finite y, are omitted. Texts on the x axis keep the order of the rows. A
  line connects the points of each series, or, if there are `curves`, the rows of the series in `curves` instead.
  """
  with drawing.canvas(_PANEL_WIDTH * len(figures), _PANEL_HEIGHT, columns=len(figures)) as (figure, axes):
    for ax, settings in zip(axes, figures, strict=True):
      _draw_panel(ax, rows, curves, settings)
    return drawing.encode(figure)


def _draw_panel(ax: Axes, rows: Sequence[schema.Row], curves: Sequence[schema.Row], panel: schema.Figure) -> None:
  """Draws one panel, whose settings name the columns of the table on its axes."""
  def is_drawable(row: schema.Row) -> bool:
    y = row.get(panel.y)
    return isinstance(y, int | float) and math.isfinite(y) and row.get(panel.x) is not None
  has_curves = bool(curves)
  rows, curves = list(filter(is_drawable, rows)), list(filter(is_drawable, curves))
  is_x_text = any(isinstance(row[panel.x], str) for row in rows)
  linestyle = 'none' if is_x_text or has_curves else '-'  # of the line through the points
  series = list(dict.fromkeys(row.get(panel.series) for row in (*rows, *curves)))
  for i, name in enumerate(series):
    points = [row for row in rows if row.get(panel.series) == name]
    curve = [row for row in curves if row.get(panel.series) == name]
    if not is_x_text:
      points = sorted(points, key=lambda row: row[panel.x])  # type: ignore[arg-type, return-value]
    x: list[Any] = [str(row[panel.x]) if is_x_text else row[panel.x] for row in points]
    y, error = ([to_float(row.get(column) or 0.) for row in points] for column in (panel.y, panel.error))
    color = drawing.COLORS[i % len(drawing.COLORS)]
    if points:
      ax.errorbar(x, y, error if panel.error else None, marker='o', markersize=4, capsize=3, linestyle=linestyle,
                  linewidth=1.3, color=color, label=str(name))
    ax.plot([to_float(row[panel.x]) for row in curve], [to_float(row[panel.y]) for row in curve], linewidth=1.3,
            color=color, label=None if points else str(name))
  if 1 < len(series) <= _MAX_SERIES:
    ax.legend(frameon=False, title=panel.series, loc='center left', bbox_to_anchor=(1, .5))  # beside the points
  if panel.log_x and not is_x_text:
    ax.set_xscale('log')
  if panel.log_y:
    ax.set_yscale('log')
  if is_x_text:
    ax.tick_params(axis='x', rotation=60 if len(rows) > 4 else 0)
  drawing.finish(ax, xlabel=panel.x, ylabel=panel.y)
