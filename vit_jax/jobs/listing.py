"""`--job=list`: lists configs, networks, published weights and records by name, as text, Markdown or JSON.

`commands.Command.run` calls `run`, whose parameters have the names of the flags. `run` makes a `Table` for each kind of
names with `make_table`, and prints it with `as_text` or `as_markdown`, whose output is in `docs/reference/`.
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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.config import files as config_catalog
from vit_jax.core import globs
from vit_jax.core.errors import UserError
from vit_jax.record import console

KINDS = ('configs', 'models', 'weights', 'records')
FORMATS = ('text', 'markdown', 'json')
_INDENT = '    '  # of lines that continue a row
_MIN_WIDTH = 20  # characters of a line, even if the terminal is narrower
_FACTOR_BY_UNIT = {'B': 1e9, 'M': 1e6, 'K': 1e3}  # units of `--max_params=30M`


class Column(NamedTuple):
  """A column of a table. Numbers are aligned to the right. Text has the columns with `in_text`, Markdown has all."""
  heading: str
  is_number: bool = False
  in_text: bool = True


class Table(NamedTuple):
  """A table with a row for each name of a kind.

  title, about: the heading of the page in Markdown, and the paragraph below it.
  rows, entries: for each name, the cells, and the fields for JSON.
  """
  title: str
  about: str
  columns: tuple[Column, ...]
  rows: list[tuple[str, ...]]
  entries: list[dict[str, object]]
  has_text_headings: bool = True  # whether text has the headings of the columns


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
  patterns = {kind: pattern for kind, pattern in patterns.items() if pattern}
  filters = Filter(math.inf if max_params is None else max_params, family or '*', data or '*', license or '*', px)
  _check_filters(filters, patterns)
  patterns = patterns or {'configs': '*'}
  # Listing configs is quick: it reads files, and does not import jax.
  with contextlib.nullcontext() if [*patterns] == ['configs'] else console.stages_shown():
    console.begin_stage('listing names')
    table_by_kind = {kind: make_table(kind, pattern, filters) for kind, pattern in patterns.items()}
    console.end_stage()
  if empty := [kind for kind, table in table_by_kind.items() if not table.rows]:
    raise UserError('\n'.join(_describe_no_match(kind, patterns[kind], filters) for kind in empty))
  if format == 'json':
    print(json.dumps({kind: table.entries for kind, table in table_by_kind.items()}, indent=1, ensure_ascii=False))
  else:
    width = max(_MIN_WIDTH, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 0
    print('\n\n'.join(as_markdown(table) if format == 'markdown' else as_text(table, width)
                      for table in table_by_kind.values()))
  return 0


def _check_filters(filters: Filter, patterns: Mapping[str, str]) -> None:
  """Raises UserError if a filter has no effect on a kind of the command line; `patterns` has the pattern of each."""
  for name in _active_filters(filters):
    filtered_kinds = ('weights',) if name in ('data', 'license', 'px') else ('models', 'weights')
    flags = ' or '.join(f'--{kind}' for kind in filtered_kinds)
    if not patterns:
      raise UserError(f'--{name}: expected it with {flags}, got no such flag. Set {flags}.')
    if unfiltered := [kind for kind in patterns if kind not in filtered_kinds]:
      advice = f'Remove --{", --".join(unfiltered)}' if len(unfiltered) < len(patterns) else f'Set {flags} instead'
      raise UserError(f'--{name}: expected it with {flags} alone, got it with --{", --".join(patterns)}. {advice}.')


def make_table(kind: str, pattern: str = '*', filters: Filter = NO_FILTER) -> Table:
  """Returns the table of one of `KINDS`; filters have no effect on configs and records."""
  make = {'configs': _make_configs, 'models': _make_models, 'weights': _make_weights, 'records': _make_records}[kind]
  with warnings.catch_warnings(action='ignore'):  # a list without names is a warning there, and an error in `run`
    return make(pattern, filters)


def as_text(table: Table, width: int = 0) -> str:
  """Returns the headings, except for configs, and the rows, in lines of at most `width` characters; 0 = no limit."""
  headings = [tuple(column.heading for column in table.columns)] if table.has_text_headings else []
  padded_columns = []
  for column, cells in zip(table.columns, zip(*headings, *table.rows, strict=True), strict=True):
    if column.in_text:
      cell_width = max(map(len, cells))
      padded_columns.append([cell.rjust(cell_width) if column.is_number else cell.ljust(cell_width) for cell in cells])
  return '\n'.join(_wrap(cells, width) for cells in zip(*padded_columns, strict=True))


def _wrap(cells: Sequence[str], width: int) -> str:
  """Returns a row as text, with several lines if it is longer than `width`; 0 = no limit.

  If the cells before the last one take at most half of the width, the last cell continues below its own first line. If
  they take at most the whole width, the last cell begins a new line. Otherwise the row is wrapped like a sentence.
  """
  line = '  '.join(cells).rstrip()
  if not width or len(line) <= width:
    return line
  first_cells = '  '.join(cells[:-1])
  if width // 2 < len(first_cells) <= width:
    last_cell = textwrap.fill(_INDENT + cells[-1], width, subsequent_indent=_INDENT, break_on_hyphens=False)
    return f'{first_cells.rstrip()}\n{last_cell}'
  indent = _INDENT if len(first_cells) > width else ' ' * (len(first_cells) + 2)
  return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)


def as_markdown(table: Table) -> str:
  """Returns a page with a heading, a paragraph and a table."""
  alignment = ['---:' if column.is_number else '---' for column in table.columns]
  rows = [[cell.replace('|', '\\|') for cell in row] for row in table.rows]
  lines = [f'| {" | ".join(cells)} |' for cells in ([column.heading for column in table.columns], alignment, *rows)]
  return f'# {table.title}\n\n{table.about}\n\n' + '\n'.join(lines)


def _make_configs(pattern: str, _: Filter) -> Table:
  entries = config_catalog.list_configs(pattern)
  return Table(
      'Configs', 'Use a name as `--config=NAME`, or `--config=NAME:ARGUMENTS` with arguments of these kinds, such as '
      '`--config=finetune:B/16,pets`. This page is the output of `vit-jax list --configs --format=markdown`.',
      columns=(Column('config'), Column('about'), Column('arguments', in_text=False)), has_text_headings=False,
      rows=[(config.name, config.about, ', '.join(config.arguments)) for config in entries],
      entries=[{**config._asdict(), 'path': os.fspath(config.path)} for config in entries])


def _make_models(pattern: str, filters: Filter) -> Table:
  from vit_jax.recipes import catalog
  entries = catalog.list_models(pattern, max_params=filters.max_params, family=filters.family)
  return Table(
      'Networks', 'Use a name as `--config.model=NAME`. Parameters include a linear head of 1,000 classes. GFLOPs are '
      'those of a forward pass of one image of the given side in pixels, with two FLOPs per multiply-add. Other patch '
      'sides of plain ViTs and Mixers (`B/20`) and other factors of BiT (`BiT-R101x2`) work too. This page is the '
      'output of `vit-jax list --models --format=markdown`.',
      columns=(Column('model'), Column('parameters', is_number=True), Column('GFLOPs', is_number=True),
               Column('px', is_number=True), Column('source'), Column('family', in_text=False)),
      rows=[(model.name, _millions(model.parameters), _billions(model.flops), str(model.px), model.source, model.family)
            for model in entries],
      entries=[model._asdict() for model in entries])


def _make_weights(pattern: str, filters: Filter) -> Table:
  from vit_jax.weights import published
  entries = published.list_weights(pattern, **filters._asdict())
  other_names = '; '.join(f'`{other}` ({meaning})' for other, meaning in published.PATTERNS)
  return Table(
      'Published weights', 'Use a name as `--weights=NAME`, `--config.init_from=NAME` or `vit_jax.load(NAME)`; the '
      'file is downloaded once. Licenses are those of the repositories that publish the files, as far as known: check '
      'them there before use. A dash in the column px means that the name does not give the image size. Other names '
      f'that work: {other_names}. This page is the output of `vit-jax list --weights --format=markdown`.',
      columns=(Column('weights'), Column('parameters', is_number=True), Column('px', is_number=True), Column('license'),
               Column('data'), Column('model', in_text=False), Column('classes', is_number=True, in_text=False),
               Column('GFLOPs', is_number=True, in_text=False), Column('source', in_text=False)),
      rows=[(entry.name, _millions(entry.parameters), str(entry.px or '–'), entry.license, entry.data, entry.model,
             f'{entry.num_classes:,}', _billions(entry.flops), entry.source) for entry in entries],
      entries=[entry._asdict() for entry in entries])


def _make_records(pattern: str, _: Filter) -> Table:
  from vit_jax.replay import records
  entries = [record for record in map(records.read_file, records.paths()) if globs.matches(record.id, pattern)]
  return Table(
      'Records', 'Numbers of the documentation, each with the command that gives it again: `vit-jax replay ID`.',
      columns=(Column('record'), Column('kind'), Column('replayed'), Column('claim')),
      rows=[(record.id, record.kind, record.replayed, record.sentence) for record in entries],
      entries=[{'id': record.id, **records.to_plain(record)} for record in entries])


def _active_filters(filters: Filter) -> dict[str, object]:
  return {name: value for name, value in filters._asdict().items() if value != getattr(NO_FILTER, name)}


def _describe_no_match(kind: str, pattern: str, filters: Filter) -> str:
  """Returns the error for a table without rows: for the filters if the pattern alone matches, else for the pattern."""
  values = _active_filters(filters) if kind in ('models', 'weights') else {}
  matching = make_table(kind, pattern).entries if values else []
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
  names = [row[0] for row in make_table(kind).rows]
  message = f'--{kind}: {globs.no_match(pattern, names)} List all names with vit-jax list --{kind}.'
  if kind != 'weights':
    return message
  from vit_jax.weights import published
  return f'{message} {published.other_names()}'


def _millions(number: int) -> str:
  """Returns a number in millions, or in billions from 10 billion on: `86.6 M`, `13.6 B`."""
  return f'{number / 1e6:,.1f} M' if number < 1e10 else f'{number / 1e9:,.1f} B'


def _billions(number: int) -> str:
  return f'{number / 1e9:,.2f}' if number < 1e10 else f'{number / 1e9:,.1f}'
