"""Writes the numbers of records where the documentation shows them.

  python -m benchmarks.record_pages

Between `<!-- records: PATTERN PATTERN -->` and `<!-- end of the records -->` it writes a table of the records with
these ids; between `<!-- claim: ID -->` and `<!-- end -->` the claim of one, or between `<!-- claim: ID = TEXT -->` and
`<!-- end -->` another text with its values. Between `<!-- seeds of METRIC = HEADING, … against ID: PATTERN … -->` and
`<!-- end of the seeds -->` it writes a comparison of studies, a row each (`record_seeds.py`). Between `<!-- speedrun:
PATTERN PATTERN -->` and `<!-- end of the speedrun -->` it writes records with their cost (`record_ledger.py`). The rest
of a page stays.
"""
from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import sys

from benchmarks import record_ledger, record_limits, record_seeds
from vit_jax.core import globs
from vit_jax.core.errors import UserError
from vit_jax.record import machine
from vit_jax.replay import records
from vit_jax.replay.records import Record

PAGES = ('README.md', 'BENCHMARKS.md', 'docs/explanation/results.md', 'docs/tutorials/self_supervised.md',
         'docs/guides/speedrun.md', 'docs/guides/images_and_text.md', 'docs/guides/choose_an_optimizer.md',
         'docs/explanation/fidelity.md', 'tests/fidelity_measured.md', 'benchmarks/comparisons.md',
         'benchmarks/records/TABLES.md')
"""The pages with numbers of records. `fidelity_measured.md` is the lower part of `fidelity.md`."""
HEAD = '| result | made on | replay |\n|---|---|---|\n'


def _part(begin: str, end: str) -> re.Pattern[str]:
  """Returns the pattern of a part of a page, with the groups `begin`, `body` and `end`."""
  return re.compile(f'(?P<begin><!-- {begin})(?P<body>.*?)(?P<end><!-- {end} -->)', re.S)


_TABLE = _part(r'records: (?P<patterns>[^>]*) -->\n', 'end of the records')
_SPEEDRUN = _part(r'speedrun: (?P<patterns>[^>]*) -->\n', 'end of the speedrun')
_SEEDS = _part(r'seeds of (?P<metrics>[^>]*?) against (?P<against>[\w.-]+): (?P<patterns>[^>]*?) -->\n',
               'end of the seeds')
_CLAIM = _part(r'claim: (?P<id>[\w.-]+)(?: = (?P<text>.*?))? -->', 'end')


def table(patterns: str) -> str:
  """Returns a table of the records whose ids match one of several patterns; see `names`."""
  return HEAD + ''.join(f'| {" | ".join(cells(_read(name)))} |\n' for name in names(patterns))


def names(patterns: str) -> list[str]:
  """Returns the ids of the records that match one of several patterns, in the order of the patterns.

  Raises:
    UserError: a pattern matches no record.
  """
  known = [path.stem for path in records.paths()]
  found: list[str] = []
  for pattern in patterns.split():
    if not (own := [name for name in known if name == pattern] or [
        name for name in known if globs.matches(name, pattern)]):
      raise UserError(f'records: {globs.no_match(pattern, known)}')
    found += [name for name in own if name not in found]
  return found


def cells(record: Record) -> tuple[str, str, str]:
  """Returns the row of a record: its sentence, where and when it was made, and how it is replayed."""
  return record.sentence.replace('|', '\\|'), made(record), replay(record)


def made(record: Record) -> str:
  """Returns the machine, the date and the commit of a record, and its processor seconds."""
  spent = record.made.get('processor_s')
  return place(record) + (f', {spent:,.0f} processor s' if spent else '')


def place(record: Record) -> str:
  """Returns the machine, the date and the commit of a record."""
  machine, commit = record.made.get('machine', {}), record.made.get('commit')
  device = machine.get('device_kind', 'cpu')
  parts = ['' if device == 'cpu' else device, machine.get('cpu_model', 'unknown machine'), machine.get('cpu_isa', ''),
           record.made.get('date', ''), f'`{commit[:7]}`' if commit else '']
  return ', '.join(filter(None, parts))


def replay(record: Record) -> str:
  """Returns when and how a record was replayed, and its id."""
  if record.kind == 'measurement':
    return f'measured, not replayed: `{record.id}`'
  if not record.replayed:
    return f'never replayed: `{record.id}`'
  date, *rest = record.replayed.split()
  if not date.startswith('20'):
    return f'{record.replayed}: `{record.id}`'
  how = 'CLOSE' if 'close' in rest else 'EQUAL'
  return ', '.join([how, date, *(f'`{commit}`' for commit in rest[:1])]) + f': `{record.id}`'


@functools.cache
def _read(name: str) -> Record:
  return records.read(name)


def seeds(metrics: str, against: str, patterns: str) -> str:
  """Returns a table that compares the studies of some records: `METRIC = HEADING, …`, an id, and patterns of ids."""
  found = [_read(name) for name in names(patterns)]
  headings = {metric.strip(): heading.strip() for metric, _, heading in (
      one.partition('=') for one in metrics.split(','))}
  return record_seeds.table(found, headings, _read(against), {one.id: (place(one), replay(one)) for one in found})


def speedrun(patterns: str) -> str:
  """Returns a table of the costs of some records as they improved; see `names`."""
  found = record_ledger.in_order([_read(name) for name in names(patterns)])
  costs = zip(record_ledger.cells(found), found, strict=True)
  return record_ledger.HEAD + ''.join(f'| {" | ".join((*cost, place(one), replay(one)))} |\n' for cost, one in costs)


def filled(text: str) -> str:
  """Returns the text of a page with the numbers of the records."""
  def with_table(match: re.Match[str]) -> str:
    if match.re is _SEEDS:
      rows = seeds(match['metrics'], match['against'], match['patterns'])
    else:
      rows = (speedrun if match.re is _SPEEDRUN else table)(match['patterns'])
    return f'{match["begin"]}{rows}{match["end"]}'

  def with_values(match: re.Match[str]) -> str:
    record = _read(match['id'])
    sentence = record.filled(match['text'] or record.claim)
    is_same = match['body'].split() == sentence.split()  # lines may be wrapped
    return match[0] if is_same else f'{match["begin"]}{sentence}{match["end"]}'

  for kind in (_TABLE, _SPEEDRUN, _SEEDS):
    text = kind.sub(with_table, text)
  return _CLAIM.sub(with_values, text)


def ids_on_pages() -> set[str]:
  """Returns the ids of all records that the pages show."""
  texts = [(machine.ROOT / page).read_text() for page in PAGES]
  return {match['id'] for text in texts for match in _CLAIM.finditer(text)} | {
      name for text in texts for kind in (_TABLE, _SPEEDRUN, _SEEDS) for match in kind.finditer(text)
      for name in re.findall(r': `([\w.-]+)` \|$', match['body'], re.M)}


def limits_of(name: str) -> dict[str, float]:
  """Returns how far the accuracies of a record may differ in a replay that is close; see `record_limits.py`."""
  return record_limits.limits(_read(name), _tables())


@functools.cache
def _tables() -> list[list[Record]]:
  """Returns the records of each table of the pages that are results."""
  patterns = [match['patterns'] for page in PAGES for text in [(machine.ROOT / page).read_text()]
              for kind in (_TABLE, _SPEEDRUN, _SEEDS) for match in kind.finditer(text)]
  return [[one for one in map(_read, names(found)) if one.kind != 'measurement'] for found in patterns]


def main() -> int:
  """Writes the limits of all records, and all pages, and names what changed."""
  for path in records.paths():
    one = _read(path.stem)
    if one.kind != 'measurement' and one.tolerance.values != (found := limits_of(one.id)):
      records.write(dataclasses.replace(one, tolerance=dataclasses.replace(one.tolerance, values=found)), path)
      print(pathlib.Path(path).relative_to(machine.ROOT))
  for path in (machine.ROOT / page for page in PAGES):
    if (text := path.read_text()) != (updated := filled(text)):
      path.write_text(updated)
      print(pathlib.Path(path).relative_to(machine.ROOT))
  return 0


if __name__ == '__main__':
  sys.exit(main())
