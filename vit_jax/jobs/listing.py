"""`--job=list`: lists configs, networks, published weights and records by name, as text, Markdown or JSON.

`commands.Command.run` calls `run`, which makes a `Table` for each kind of names with `table`, and prints the table with
`text` or `markdown`. The Markdown of this job is in `docs/reference/`.
"""
from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import textwrap
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.config import files as configs
from vit_jax.core import globs
from vit_jax.core.errors import UserError
from vit_jax.record import console

KINDS = ('configs', 'models', 'weights', 'records')
FORMATS = ('text', 'markdown', 'json')
_INDENT = '    '  # of lines that continue a row
_MIN_WIDTH = 20  # characters of a line, even if the terminal is narrower
_FACTOR_BY_UNIT = {'B': 1e9, 'M': 1e6, 'K': 1e3}  # units of `--max_params=30M`


class Table(NamedTuple):
  """A table with a row for each name of a kind.

  title, about, columns: the heading of the page in Markdown, the paragraph below it, the headings of the columns.
  num_text_columns: how many columns, from the first on, are shown as text; Markdown has all.
  is_number: for each column, whether the cells are numbers, which are aligned to the right.
  rows, entries: for each name, the cells, and the fields for JSON.
  """
  title: str
  about: str
  columns: tuple[str, ...]
  num_text_columns: int
  is_number: tuple[bool, ...]
  rows: list[tuple[str, ...]]
  entries: list[dict[str, object]]


class Filter(NamedTuple):
  """Which networks and weights are listed. `data`, `license` and `px` are for weights alone."""
  max_params: float = math.inf
  family: str = '*'  # a pattern
  data: str = '*'  # a pattern for the training data
  license: str = '*'  # a pattern
  px: int = 0  # side of the images; 0 = any


NO_FILTER = Filter()


def run(*, models: str, weights: str, configs: str, records: str, format: str, max_params: float | None, family: str,
        data: str, license: str, px: int) -> int:
  """Prints a table for each kind of names that has a pattern, and returns the exit status 0.

  Args:
    models, weights, configs, records: patterns, such as `B/*`; '' = not listed. Without any, all configs are listed.
    format: one of `FORMATS`.
    max_params, family, data, license, px: see `Filter`; None, '' or 0 = any.

  Raises UserError if no name matches a pattern, or a filter has no effect on a kind that is listed.
  """
  patterns = {'configs': configs, 'models': models, 'weights': weights, 'records': records}
  patterns = {kind: pattern for kind, pattern in patterns.items() if pattern} or {'configs': '*'}
  filters = Filter(math.inf if max_params is None else max_params, family or '*', data or '*', license or '*', px)
  for name in _active_filters(filters):
    filtered_kinds = ('weights',) if name in ('data', 'license', 'px') else ('models', 'weights')
    if unfiltered := [kind for kind in patterns if kind not in filtered_kinds]:
      flags = ' or '.join(f'--{kind}' for kind in filtered_kinds)
      advice = f'Remove --{", --".join(unfiltered)}' if len(unfiltered) < len(patterns) else f'Set {flags} instead'
      raise UserError(f'--{name}: expected it with {flags} alone, got it with --{", --".join(patterns)}. {advice}.')
  # Listing configs is quick: it reads files, and does not import jax.
  with contextlib.nullcontext() if [*patterns] == ['configs'] else console.stages_shown():
    console.begin_stage('importing jax')
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # a list without names is a warning there, and an error here
      tables = {kind: table(kind, pattern, filters) for kind, pattern in patterns.items()}
    console.end_stage()
  if empty := [kind for kind, listed in tables.items() if not listed.rows]:
    raise UserError('\n'.join(_describe_no_match(kind, patterns[kind], filters) for kind in empty))
  if format == 'json':
    print(json.dumps({kind: listed.entries for kind, listed in tables.items()}, indent=1, ensure_ascii=False))
  else:
    width = max(_MIN_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 0
    print('\n\n'.join(markdown(listed) if format == 'markdown' else text(listed, width) for listed in tables.values()))
  return 0


def table(kind: str, pattern: str = '*', filters: Filter = NO_FILTER) -> Table:
  """Returns the table of one of `KINDS`; filters have no effect on configs and records."""
  make_table = {'configs': _make_configs, 'models': _make_models, 'weights': _make_weights, 'records': _make_records}
  return make_table[kind](pattern, filters)


def text(listed: Table, width: int = 0) -> str:
  """Returns the headings, except for configs, and the rows, in lines of at most `width` characters; 0 = no limit."""
  rows = [row[:listed.num_text_columns] for row in listed.rows]
  if listed.columns[0] != 'config':
    rows.insert(0, listed.columns[:listed.num_text_columns])
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for row in rows:
    cells = [cell.rjust(cell_width) if is_number else cell.ljust(cell_width) for cell, cell_width, is_number in zip(
        row, widths, listed.is_number[:listed.num_text_columns], strict=True)]
    lines.append(_wrap(cells, width))
  return '\n'.join(lines)


def _wrap(cells: Sequence[str], width: int) -> str:
  """Returns a row as text, with several lines if it is longer than `width`; 0 = no limit.

  If the cells before the last one take at most half of the width, the last cell continues below its own first line. If
  they take at most the whole width, the last cell begins a new line. Otherwise the row is wrapped like a sentence.
  """
  line = '  '.join(cells).rstrip()
  if not width or len(line) <= width:
    return line
  first_cells = '  '.join(cells[:-1])
  if len(first_cells) <= width // 2:
    indent = ' ' * (len(first_cells) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)
  if len(first_cells) <= width:
    last_cell = textwrap.fill(_INDENT + cells[-1], width, subsequent_indent=_INDENT, break_on_hyphens=False)
    return f'{first_cells.rstrip()}\n{last_cell}'
  return textwrap.fill(line, width, subsequent_indent=_INDENT, break_on_hyphens=False)


def markdown(listed: Table) -> str:
  """Returns a page with a heading, a paragraph and a table."""
  alignment = ['---:' if is_number else '---' for is_number in listed.is_number]
  rows = [[cell.replace('|', '\\|') for cell in row] for row in listed.rows]
  lines = [f'| {" | ".join(cells)} |' for cells in (listed.columns, alignment, *rows)]
  return f'# {listed.title}\n\n{listed.about}\n\n' + '\n'.join(lines)


def _make_configs(pattern: str, _: Filter) -> Table:
  entries = configs.list_configs(pattern)
  return Table(
      'Configs', 'Use a name as `--config=NAME`, or `--config=NAME:ARGUMENTS` with arguments of these kinds, such as '
      '`--config=finetune:B/16,pets`. This page is the output of `vit-jax list --configs --format=markdown`.',
      ('config', 'about', 'arguments'), 2, (False, False, False),
      [(config.name, config.about, ', '.join(config.arguments)) for config in entries],
      [{**config._asdict(), 'path': os.fspath(config.path)} for config in entries])


def _make_models(pattern: str, filters: Filter) -> Table:
  from vit_jax.recipes import catalog
  entries = catalog.list_models(pattern, max_params=filters.max_params, family=filters.family)
  return Table(
      'Networks', 'Use a name as `--config.model=NAME`. Parameters include a linear head of 1,000 classes. GFLOPs are '
      'those of a forward pass of one image of the given side in pixels, with two FLOPs per multiply-add. Other patch '
      'sides of plain ViTs and Mixers (`B/20`) and other factors of BiT (`BiT-R101x2`) work too. This page is the '
      'output of `vit-jax list --models --format=markdown`.',
      ('model', 'parameters', 'GFLOPs', 'px', 'source', 'family'), 5, (False, True, True, True, False, False),
      [(model.name, _millions(model.parameters), _billions(model.flops), str(model.px), model.source, model.family)
       for model in entries],
      [model._asdict() for model in entries])


def _make_weights(pattern: str, filters: Filter) -> Table:
  from vit_jax.weights import catalog
  entries = catalog.list_weights(pattern, **filters._asdict())
  other_names = '; '.join(f'`{pattern}` ({meaning})' for pattern, meaning in catalog.PATTERNS)
  return Table(
      'Published weights', 'Use a name as `--weights=NAME`, `--config.init_from=NAME` or `vit_jax.load(NAME)`; the '
      'file is downloaded once. Licenses are those of the repositories that publish the files, as far as known: check '
      'them there before use. A dash in the column px means that '
      f'the name does not give the image size. Other names that work: {other_names}. This page is the output of '
      '`vit-jax list --weights --format=markdown`.',
      ('weights', 'parameters', 'px', 'license', 'data', 'model', 'classes', 'GFLOPs', 'source'), 5,
      (False, True, True, False, False, False, True, True, False),
      [(entry.name, _millions(entry.parameters), str(entry.px or '–'), entry.license, entry.data, entry.model,
        f'{entry.num_classes:,}', _billions(entry.flops), entry.source) for entry in entries],
      [entry._asdict() for entry in entries])


def _make_records(pattern: str, _: Filter) -> Table:
  from vit_jax.replay import records
  entries = [record for record in map(records.read_file, records.paths()) if globs.matches(record.id, pattern)]
  return Table(
      'Records', 'Numbers of the documentation, each with the command that gives it again: `vit-jax replay ID`.',
      ('record', 'kind', 'replayed', 'claim'), 4, (False, False, False, False),
      [(record.id, record.kind, record.replayed, record.sentence) for record in entries],
      [{'id': record.id, **records.to_plain(record)} for record in entries])


def _active_filters(filters: Filter) -> dict[str, object]:
  return {name: value for name, value in filters._asdict().items() if value != getattr(NO_FILTER, name)}


def _describe_no_match(kind: str, pattern: str, filters: Filter) -> str:
  """Returns the error for a table without rows: for the filters if the pattern alone matches, else for the pattern."""
  values = _active_filters(filters) if kind in ('models', 'weights') else {}
  matching = table(kind, pattern).entries if values else []
  if matching:
    if 'max_params' in values:
      unit, factor = next((pair for pair in _FACTOR_BY_UNIT.items() if filters.max_params >= pair[1]), ('', 1.))
      values['max_params'] = f'{filters.max_params / factor:.12g}{unit}'  # as in the flag: 30M, 1.2B
    flags = ' '.join(f'--{name}={value}' for name, value in values.items())
    message = (f'--{kind}: expected filters that some of {len(matching)} names pass, got {flags}. '
               f'{"Leave one out" if len(values) > 1 else "Set another value"}.')
    names_by_filter = {name: sorted({str(entry[name]) for entry in matching if entry[name]})
                       for name in values if name != 'max_params'}
    known = '; '.join(f'{name}: {", ".join(names)}' for name, names in names_by_filter.items())
    return f'{message} What there is: {known}.' if known else message
  names = [row[0] for row in table(kind).rows]
  message = f'--{kind}: {globs.no_match(pattern, names)} List all names with vit-jax list --{kind}.'
  if kind == 'weights':
    from vit_jax.weights import catalog
    message += f' {catalog.others()}'
  return message


def _millions(number: int) -> str:
  """Returns a number in millions, or in billions from 10 billion on: `86.6 M`, `13.6 B`."""
  return f'{number / 1e6:,.1f} M' if number < 1e10 else f'{number / 1e9:,.1f} B'


def _billions(number: int) -> str:
  return f'{number / 1e9:,.2f}' if number < 1e10 else f'{number / 1e9:,.1f}'
