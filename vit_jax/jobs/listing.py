"""`--job=list`: configs, networks, published weights and records that are known by name, as text, Markdown or JSON.

The tables in `docs/reference/` are the Markdown of this job.
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

from vit_jax.config import catalog as configs
from vit_jax.core import globs
from vit_jax.core.errors import UserError
from vit_jax.record import console

KINDS = ('configs', 'models', 'weights', 'records')
FORMATS = ('text', 'markdown', 'json')
_INDENT = '    '  # of what does not fit beside the other columns
_NARROWEST = 20  # columns of a line
_UNITS = {'K': 1e3, 'M': 1e6, 'B': 1e9}


class Table(NamedTuple):
  """What is known of some names.

  title: heading of the page.
  about: what the columns mean, one paragraph.
  columns: headings.    num_short: the first columns, which are shown in a terminal.    is_number: per column.
  rows: texts by column.
  entries: the same as plain values, for JSON.
  """
  title: str
  about: str
  columns: tuple[str, ...]
  num_short: int
  is_number: tuple[bool, ...]
  rows: list[tuple[str, ...]]
  entries: list[dict[str, object]]


class Filter(NamedTuple):
  """What networks and weights must have, beside their names; the last three concern weights alone."""
  max_params: float = math.inf
  family: str = '*'
  data: str = '*'
  license: str = '*'
  px: int = 0


EVERY = Filter()


def run(*, models: str, weights: str, configs: str, records: str, format: str, max_params: float | None, family: str,
        data: str, license: str, px: int) -> int:
  """Prints what matches the patterns, `*` for all; configs if there is no pattern. Exit status 0.

  The other arguments are those of `Filter`.

  Raises:
    UserError: nothing matches, or a filter has no effect on what is listed.
  """
  given = dict(zip(KINDS, (configs, models, weights, records), strict=True))
  given = {kind: pattern for kind, pattern in given.items() if pattern} or {'configs': '*'}
  wanted = Filter(math.inf if max_params is None else max_params, family or '*', data or '*', license or '*', px)
  for name, value in wanted._asdict().items():
    kinds = ('weights',) if name in ('data', 'license', 'px') else ('models', 'weights')
    if value != getattr(EVERY, name) and (others := [kind for kind in given if kind not in kinds]):
      flags = ' or '.join(f'--{kind}' for kind in kinds)
      advice = f'Remove --{", --".join(others)}' if len(others) < len(given) else f'Set {flags} instead'
      raise UserError(f'--{name}: expected it with {flags} alone, got it with --{", --".join(given)}. {advice}.')
  with contextlib.nullcontext() if [*given] == ['configs'] else console.stages_shown():
    console.begin_stage('importing jax')
    with warnings.catch_warnings():
      warnings.simplefilter('ignore')  # of an empty list, which is an error here
      tables = {kind: table(kind, pattern, wanted) for kind, pattern in given.items()}
    console.end_stage()
  if problems := [_no_match(kind, given[kind], wanted) for kind, listed in tables.items() if not listed.rows]:
    raise UserError('\n'.join(problems))
  if format == 'json':
    print(json.dumps({kind: listed.entries for kind, listed in tables.items()}, indent=1, ensure_ascii=False))
  else:
    columns = max(_NARROWEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else 0
    print('\n\n'.join(markdown(listed) if format == 'markdown' else text(listed, columns)
                      for listed in tables.values()))
  return 0


def table(kind: str, pattern: str = '*', wanted: Filter = EVERY) -> Table:
  """Returns the table of one of `KINDS`."""
  return {'configs': _configs, 'models': _models, 'weights': _weights, 'records': _records}[kind](pattern, wanted)


def text(listed: Table, columns: int = 0) -> str:
  """Returns a line for each row, for configs without a heading.

  Rows that are longer than `columns` are wrapped; 0 = no limit.
  """
  short = [row[:listed.num_short] for row in listed.rows]
  rows = short if listed.columns[0] == 'config' else [listed.columns[:listed.num_short], *short]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  cells = [[f'{cell:>{width}}' if number else f'{cell:<{width}}' for cell, width, number in zip(
      row, widths, listed.is_number[:listed.num_short], strict=True)] for row in rows]
  return '\n'.join(_wrapped(row, columns) for row in cells)


def _wrapped(cells: Sequence[str], columns: int) -> str:
  """Returns a row whose last cell is continued below itself, or indented if little room is left beside the others."""
  line, head = '  '.join(cells).rstrip(), '  '.join(cells[:-1])
  if not columns or len(line) <= columns:
    return line
  if len(head) > columns:
    start, rest, words = '', _INDENT, line
  elif len(head) > columns // 2:
    start, rest, words = f'{head.rstrip()}\n', _INDENT, _INDENT + cells[-1]
  else:
    start, rest, words = '', ' ' * (len(head) + 2), line
  return start + textwrap.fill(words, columns, subsequent_indent=rest, break_on_hyphens=False)


def markdown(listed: Table) -> str:
  """Returns a page with a heading, a paragraph and a table."""
  rule = ['---:' if number else '---' for number in listed.is_number]
  lines = [listed.columns, tuple(rule), *([cell.replace('|', '\\|') for cell in row] for row in listed.rows)]
  return f'# {listed.title}\n\n{listed.about}\n\n' + '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def _configs(pattern: str, _: Filter) -> Table:
  entries = configs.list_configs(pattern)
  return Table(
      'Configs', 'Use a name as `--config=NAME`, or `--config=NAME:ARGUMENTS` with arguments of these kinds, such as '
      '`--config=finetune:B/16,pets`. This page is the output of `vit-jax list --configs --format=markdown`.',
      ('config', 'about', 'arguments'), 2, (False, False, False),
      [(config.name, config.about, ', '.join(config.arguments)) for config in entries],
      [{**config._asdict(), 'path': os.fspath(config.path)} for config in entries])


def _models(pattern: str, wanted: Filter) -> Table:
  from vit_jax.recipes import catalog
  entries = catalog.list_models(pattern, max_params=wanted.max_params, family=wanted.family)
  return Table(
      'Networks', 'Use a name as `--config.model=NAME`. Parameters include a linear head of 1,000 classes. GFLOPs are '
      'those of a forward pass of one image of the given side in pixels, with two FLOPs per multiply-add. Other patch '
      'sides of plain ViTs and Mixers (`B/20`) and other factors of BiT (`BiT-R101x2`) work too. This page is the '
      'output of `vit-jax list --models --format=markdown`.',
      ('model', 'parameters', 'GFLOPs', 'px', 'source', 'family'), 5, (False, True, True, True, False, False),
      [(model.name, _millions(model.parameters), _billions(model.flops), str(model.px), model.source, model.family)
       for model in entries],
      [model._asdict() for model in entries])


def _weights(pattern: str, wanted: Filter) -> Table:
  from vit_jax.weights import catalog
  entries = catalog.list_weights(pattern, **wanted._asdict())
  others = '; '.join(f'`{names}` ({what})' for names, what in catalog.PATTERNS)
  return Table(
      'Published weights', 'Use a name as `--weights=NAME`, `--config.init_from=NAME` or `vit_jax.load(NAME)`; the '
      'file is downloaded once. Licenses are those of the repositories that publish the files, as far as known: check '
      'them there before use. A dash in the column px means that '
      f'the name does not give the image size. Other names that work: {others}. This page is the output of '
      '`vit-jax list --weights --format=markdown`.',
      ('weights', 'parameters', 'px', 'license', 'data', 'model', 'classes', 'GFLOPs', 'source'), 5,
      (False, True, True, False, False, False, True, True, False),
      [(entry.name, _millions(entry.parameters), str(entry.px or '–'), entry.license, entry.data, entry.model,
        f'{entry.num_classes:,}', _billions(entry.flops), entry.source) for entry in entries],
      [entry._asdict() for entry in entries])


def _records(pattern: str, _: Filter) -> Table:
  from vit_jax.replay import records
  entries = [record for record in map(records.read_file, records.paths()) if globs.matches(record.id, pattern)]
  return Table(
      'Records', 'Numbers of the documentation, each with the command that gives it again: `vit-jax replay ID`.',
      ('record', 'kind', 'replayed', 'claim'), 4, (False, False, False, False),
      [(record.id, record.kind, record.replayed, record.sentence) for record in entries],
      [{'id': record.id, **records.to_plain(record)} for record in entries])


def _no_match(kind: str, pattern: str, wanted: Filter) -> str:
  if kind in ('models', 'weights') and wanted != EVERY and (matching := table(kind, pattern).entries):
    set_ones = {name: value for name, value in wanted._asdict().items() if value != getattr(EVERY, name)}
    unit = next((unit for unit in ('B', 'M', 'K') if wanted.max_params >= _UNITS[unit]), '')
    count = f'{wanted.max_params / _UNITS.get(unit, 1.):.12g}{unit}'  # as a flag has it: 30M, 1.2B
    flags = ' '.join(f'--{name}={count if name == "max_params" else value}' for name, value in set_ones.items())
    advice = 'Leave one out' if len(set_ones) > 1 else 'Set another value'
    known = '; '.join(f'{name}: {", ".join(sorted({str(entry[name]) for entry in matching if entry[name]}))}'
                      for name in set_ones if name != 'max_params')
    return (f'--{kind}: expected filters that some of {len(matching)} names pass, got {flags}. {advice}.'
            + f' What there is: {known}.' * bool(known))
  names = [row[0] for row in table(kind).rows]
  text = f'--{kind}: {globs.no_match(pattern, names)} List all names with vit-jax list --{kind}.'
  if kind != 'weights':
    return text
  from vit_jax.weights import catalog
  return f'{text} {catalog.others()}'


def _millions(number: int) -> str:
  return f'{number / 1e6:,.1f} M' if number < 1e10 else f'{number / 1e9:,.1f} B'


def _billions(number: int) -> str:
  return f'{number / 1e9:,.2f}' if number < 1e10 else f'{number / 1e9:,.1f}'
