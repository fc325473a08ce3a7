"""Writes the numbers of records where the documentation shows them.

  python -m vit_jax.replay.pages

Between `<!-- records: PATTERN PATTERN -->` and `<!-- end of the records -->` it writes a table of the records with
these ids, and with `speedrun` in place of `records` also what each cost (`ledger.py`). Between `<!-- claim: ID -->` and
`<!-- end -->` it writes the claim of one, and between `<!-- claim: ID = TEXT -->` and `<!-- end -->` another text with
its values. The rest of a page stays.
"""
from __future__ import annotations

import functools
import pathlib
import re
import sys

from vit_jax.core import globs
from vit_jax.core.errors import UserError
from vit_jax.record import origin
from vit_jax.replay import ledger, records
from vit_jax.replay.records import Record

PAGES = ('README.md', 'BENCHMARKS.md', 'docs/explanation/results.md', 'docs/explanation/fidelity.md',
         'tests/fidelity_measured.md', 'docs/guides/speedrun.md')
"""The pages with numbers of records. The last but one is the lower part of the one before."""
HEAD = '| result | made on | replay |\n|---|---|---|\n'
_TABLE = re.compile(r'(<!-- (records|speedrun): ([^>]*) -->\n)(.*?)(<!-- end of the records -->)', re.S)
_CLAIM = re.compile(r'(<!-- claim: ([\w.-]+)(?: = (.*?))? -->)(.*?)(<!-- end -->)', re.S)


def table(patterns: str, kind: str = 'records') -> str:
  """Returns a table of the records whose ids match one of several patterns, in the order of the patterns.

  Args:
    patterns: with spaces between them.
    kind: `records`, or `speedrun` for a table of costs.

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
  own_records = [_read(name) for name in found]
  if kind == 'speedrun':
    costs = zip(own_records, ledger.cells(own_records), strict=True)
    return ledger.HEAD + ''.join(f'| {" | ".join((*cost, *cells(one)[1:]))} |\n' for one, cost in costs)
  return HEAD + ''.join(f'| {" | ".join(cells(one))} |\n' for one in own_records)


def cells(record: Record) -> tuple[str, str, str]:
  """Returns the row of a record: its sentence, where and when it was made, and how it is replayed."""
  return record.sentence.replace('|', '\\|'), _made(record), _replay(record)


def _made(record: Record) -> str:
  made, machine = record.made, record.made.get('machine', {})
  parts = [machine.get('cpu_model', 'unknown machine'), machine.get('cpu_isa', ''), made.get('date', ''),
           f'`{made["commit"][:7]}`' if made.get('commit') else '',
           f'{made["processor_s"]:,.0f} processor s' if made.get('processor_s') else '']
  return ', '.join(filter(None, parts))


def _replay(record: Record) -> str:
  if record.kind == 'measurement':
    return f'measured, not replayed: `{record.id}`'
  if not record.replayed.startswith('20'):
    return f'{record.replayed or "not yet"}: `{record.id}`'
  how = f'within {record.tolerance.same:g}' if record.tolerance.same else 'EQUAL'
  return f'{how}, {record.replayed}: `{record.id}`'


@functools.cache
def _read(name: str) -> Record:
  return records.read(name)


def filled(text: str) -> str:
  """Returns the text of a page with the numbers of the records."""
  text = _TABLE.sub(lambda found: f'{found[1]}{table(found[3], found[2])}{found[5]}', text)

  def with_values(found: re.Match[str]) -> str:
    record = _read(found[2])
    new = record.filled(found[3] or record.claim)
    return found[0] if found[4].split() == new.split() else f'{found[1]}{new}{found[5]}'  # lines may be wrapped

  return _CLAIM.sub(with_values, text)


def shown() -> set[str]:
  """Returns the ids of all records that the pages show."""
  found: set[str] = set()
  for page in PAGES:
    text = (origin.ROOT / page).read_text()
    found |= {name for match in _TABLE.finditer(text) for name in re.findall(r': `([\w.-]+)` \|$', match[4], re.M)}
    found |= {match[2] for match in _CLAIM.finditer(text)}
  return found


def main() -> int:
  """Writes all pages, and names those that changed."""
  for path in (origin.ROOT / page for page in PAGES):
    if (text := path.read_text()) != (new := filled(text)):
      path.write_text(new)
      print(pathlib.Path(path).relative_to(origin.ROOT))
  return 0


if __name__ == '__main__':
  sys.exit(main())
