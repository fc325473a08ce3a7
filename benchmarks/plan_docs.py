"""Writes the plans of complete runs where they are documented: a table of their page, and a line in each config.

  python -m benchmarks.plan_docs DIR [ROOT]

DIR has a folder for each plan, named CONFIG-TOPOLOGY as `benchmarks/plans.sh` names them, with a `plan.json`. ROOT is
the repository. In `benchmarks/records/TABLES.md` the text between the two comments of `MARKS` is replaced, and in
`configs/CONFIG.py` what follows the command of the docstring's `Plan:`. Configs without a plan in DIR stay as they are.
"""
from __future__ import annotations

import json
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

from vit_jax.plan import quick, table

PAGE = 'benchmarks/records/TABLES.md'
MARKS = ('<!-- plans of runs: written by benchmarks/plans.sh -->', '<!-- end of the plans of runs -->')
HEAD = ('run', 'topology, devices', 'layout', 'peak GiB', 'step ms', 'lower bound', 'collectives ms', 'core-days',
        'with collectives', 'paper', 'warnings', 'made')
_PLAN = re.compile(r'^(Plan: +(?:[^\n]*\\\n)*[^\n]*\n)(?: [^\n]*\n)*', re.MULTILINE)


def read(folder: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
  """The plans of a folder by the name of the config's file, in the order of the names of their folders.

  If there are a quick and a complete plan of a run, only the complete one is returned.
  """
  found: dict[str, list[dict[str, Any]]] = {}
  for path in sorted(folder.glob('*/plan.json')):
    is_quick = path.parent.name.endswith('-quick')
    if not (is_quick and (folder / path.parent.name.removesuffix('-quick') / 'plan.json').is_file()):
      found.setdefault(path.parent.name.partition('-')[0], []).append(json.loads(path.read_text()))
  return found


def cells(plan: dict[str, Any]) -> tuple[str, ...]:
  """The row of a plan; '–' where it has no figure."""
  def number(name: str, digits: int = 1) -> str:
    return '–' if plan[name] is None else f'{plan[name]:,.{digits}f}'

  paper = plan['paper_core_days']
  return (plan['config'], f'{plan["topology"]}, {plan["num_devices"]:,}', layout(plan),
          number('peak_gib_per_device', 2), number('estimated_step_ms'), number('scheduled_step_ms'),
          number('collectives_ms'), number('core_days', 0), number('core_days_with_collectives', 0),
          f'{paper:,}' if paper else '', str(len(plan['warnings'])), made(plan))


def layout(plan: dict[str, Any]) -> str:
  """The axes of more than one device."""
  return ' '.join(f'{axis}={size}' for axis, size in plan['mesh'].items() if size > 1)


def made(plan: dict[str, Any]) -> str:
  """The date, and whether the figures are extended from shallow programs."""
  return f'{plan["date"]}, quick' if plan['quick'] else plan['date']


def section(plans: Sequence[dict[str, Any]]) -> str:
  """The text of the page between `MARKS`."""
  low, high = quick.DEPTHS
  note = (f'Quick rows are from programs of {low} and {high} unrolled blocks, extended to all blocks.\n'
          if any(plan['quick'] for plan in plans) else '')
  return f'{MARKS[0]}\n{table.table(HEAD, [cells(plan) for plan in plans])}\n\n{note}{MARKS[1]}'


def lines(plans: Sequence[dict[str, Any]]) -> str:
  """What follows the command of `Plan:` in the docstring of a config."""
  found = ['Compiled without the hardware, not measured on a TPU (benchmarks/plans.sh). Times in ms; core-days of the',
           'steps without collectives, and with the exposed ones.']
  if any(plan['quick'] for plan in plans):
    found.append('Quick: programs of {} and {} blocks, extended to all blocks.'.format(*quick.DEPTHS))
  shown = [('topology', 'layout', 'GiB', 'step', 'collectives', 'core-days', 'with', 'made')]
  for plan in plans:
    row = dict(zip(HEAD, cells(plan), strict=True))
    shown.append((plan['topology'], row['layout'], row['peak GiB'], row['step ms'], row['collectives ms'],
                  row['core-days'], row['with collectives'], row['made']))
  widths = [max(len(row[i]) for row in shown) for i in range(len(shown[0]))]
  found += ['  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in shown]
  found += [f'Warning: {one}' for one in dict.fromkeys(text for plan in plans for text in _short(plan))]
  return ''.join(f'          {line}\n' for line in found)


def _short(plan: dict[str, Any]) -> list[str]:
  """The warnings of a plan, up to their first sentence, in a line."""
  return [f'{plan["topology"]}: {one.split(". ")[0]}'[:96] for one in plan['warnings']]


def write(plans: dict[str, list[dict[str, Any]]], root: pathlib.Path) -> list[pathlib.Path]:
  """Writes the plans into the files of a repository; returns those that changed."""
  page = root / PAGE
  text = page.read_text()
  begin, end = (text.index(mark) for mark in MARKS)
  texts = {page: text[:begin] + section([plan for own in plans.values() for plan in own]) + text[end + len(MARKS[1]):]}
  for name, own in plans.items():
    path = root / 'configs' / f'{name}.py'
    new, more = path.read_text(), lines(own)
    texts[path] = _PLAN.sub(lambda found, more=more: found[1] + more, new, count=1)  # type: ignore[misc]
  changed = [path for path, text in texts.items() if path.read_text() != text]
  for path in changed:
    path.write_text(texts[path])
  return changed


def main(arguments: Sequence[str]) -> int:
  """Writes all plans of a folder."""
  folder = pathlib.Path(arguments[0]) if arguments else pathlib.Path()
  plans = read(folder) if 1 <= len(arguments) <= 2 else {}
  if not plans:
    print('usage: python -m benchmarks.plan_docs DIR [ROOT], a folder of plans', file=sys.stderr)
    return 2
  root = pathlib.Path(arguments[1]) if len(arguments) > 1 else pathlib.Path(__file__).resolve().parents[1]
  for path in write(plans, root):
    print(path)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
