"""The table of complete runs on TPUs, from the folders that `plan` wrote: memory, times of a step, and core-days.

  python -m benchmarks.tpu_runs DIR

DIR has a folder with a `plan.json` for each run. Core-days follow from the estimate of a step, without collectives, and
with the time that the step waits for them.
"""
from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from vit_jax.plan import table

HEAD = ('run', 'devices', 'peak GiB per device', 'step ms', 'lower bound, ms', 'collectives ms', 'core-days',
        'with collectives', 'paper')


def row(plan: dict[str, Any]) -> tuple[str, ...]:
  """The cells of a plan; '–' where it has no figure."""
  def number(name: str, digits: int = 1) -> str:
    return '–' if plan[name] is None else f'{plan[name]:,.{digits}f}'

  paper = plan['paper_core_days']
  return (plan['config'], f'{plan["topology"]}, {plan["num_devices"]}', number('peak_gib_per_device', 2),
          number('estimated_step_ms'), number('scheduled_step_ms'), number('collectives_ms'), number('core_days', 0),
          number('core_days_with_collectives', 0), f'{paper:,}' if paper else '')


def main(arguments: Sequence[str]) -> int:
  """Prints the table of all plans of a folder, in the order of their names."""
  if len(arguments) != 1 or not pathlib.Path(arguments[0]).is_dir():
    print('usage: python -m benchmarks.tpu_runs DIR, a folder of plans', file=sys.stderr)
    return 2
  found = [json.loads(path.read_text()) for path in sorted(pathlib.Path(arguments[0]).glob('*/plan.json'))]
  print(table.table(HEAD, [row(plan) for plan in found]))
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
