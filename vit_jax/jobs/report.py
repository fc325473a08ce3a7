"""`--job=report`: the page of a run directory, of several, or the table of a study.

Reads only; the page is all that is written, and a folder that is no run gets none.
"""
from __future__ import annotations

import json
import os
from collections.abc import Sequence

from vit_jax.config import json_files, provenance
from vit_jax.core import checkpoint_files, os_errors
from vit_jax.core.errors import UserError
from vit_jax.core.os_errors import Damaged
from vit_jax.jobs import report_page
from vit_jax.record import storage
from vit_jax.study import table

RECORDS = ('config.json', 'final.json', 'evaluate.json')
TRACES = (*RECORDS, 'metrics.jsonl', 'checkpoints')
"""What a folder has one of if it is a run, begun or done."""


def run(workdirs: Sequence[storage.Path], out: str | None) -> int:
  """Writes the page, and prints where it is; of a study, prints its table.

  Args:
    workdirs: run directories, or that of a study.
    out: where the page goes; None = `report.html` in the run directory.

  Returns:
    Exit status 0.

  Raises:
    UserError: a folder is no run, its config is not that of its checkpoints, or a file is damaged: then the page is
      written without it.
  """
  workdir = workdirs[0]
  if (workdir / 'runs').is_dir() and not (workdir / 'config.json').is_file():
    print(table.show(workdir))
    return 0
  for one in workdirs:
    check(one)
  damaged = [line for one in workdirs for line in find_damaged(one)]
  print(f'Report: {report_page.write_report(workdirs, out)}', flush=True)
  if damaged:
    raise UserError('\n'.join([*damaged, 'The page was written without what is damaged. The command that trained the '
                               'run writes these files again.']))
  return 0


def check(workdir: storage.Path) -> None:
  """Checks that a folder is a run, and that its config is the one its newest checkpoint was saved with.

  Raises:
    UserError: it is not.
  """
  if not any((workdir / name).exists() for name in TRACES):
    raise UserError(f'--workdir={workdir}: expected the directory of a run, got a folder without {", ".join(TRACES)}. '
                    'Pass the --workdir that the run was trained or evaluated with.')
  steps = checkpoint_files.steps(workdir / 'checkpoints')
  try:
    config = json_files.from_json(storage.read_text(workdir / 'config.json'))
    meta = checkpoint_files.read_meta(workdir / 'checkpoints' / str(steps[-1])) if steps else {}
  except (OSError, UserError, Damaged):
    return  # nothing to compare; what is damaged is named in the page
  provenance.check(meta, config, said=str(workdir / 'config.json'))


def find_damaged(workdir: storage.Path) -> list[str]:
  """A line for each record of a run that is there and is no JSON object.

  Raises:
    UserError: the system does not let one be read.
  """
  lines = []
  for name in RECORDS:
    path = workdir / name
    try:
      text = storage.read_text(path)
      found = json.loads(text)
      got = '' if isinstance(found, dict) else type(found).__name__
    except FileNotFoundError:
      continue
    except OSError as error:
      if os_errors.find(error):
        raise os_errors.reading(os.fspath(path), error) from error
      got = str(error.strerror)
    except (ValueError, RecursionError) as error:
      got = f'text that is not JSON: {error}' if text.strip() else 'an empty file'
    if got:
      lines.append(f'{path}: expected a JSON object, got {got}.')
  return lines
