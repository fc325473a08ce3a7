"""`--job=report`: writes the page of a run, or one that compares several runs, and no other file."""
from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from vit_jax.config import json_files, provenance
from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.core.failures import Damaged
from vit_jax.jobs import report_page
from vit_jax.jobs import runtime as startup
from vit_jax.record import checkpoint_files, destination, storage

RECORDS = ('config.json', 'final.json', 'evaluate.json')
TRACES = (*RECORDS, 'metrics.jsonl', 'checkpoints')
"""Files and folders of which every run directory has at least one."""


def run(workdirs: Sequence[storage.Path], to: str, *, overwrite: bool = False) -> int:
  """Writes the page and prints its path; exit status 0.

  Args:
    workdirs: run directories.
    to: path of the page; '' = `report.html` in the run directory.
    overwrite: replace the file at `to`.

  Raises:
    UserError: a directory is not a run, or its config is not that of its checkpoints; or a file is damaged, and the
      page is written without it.
  """
  if absent := [str(one) for one in workdirs if not one.is_dir()]:
    raise UserError(f'--workdir: expected directories of runs, got {",".join(absent)}, which does not exist. Pass the '
                    'directory of a run, or several with commas.')
  if len(workdirs) > 1 and not to:
    raise UserError('--to: expected a path for the page of several runs, got none. Set --to=FILE.html.')
  if to and storage.is_local(to):
    destination.check_free([pathlib.Path(to)], setting='--to', overwrite=overwrite)
  startup.quiet_abandoned_reads()
  for one in workdirs:
    check(one)
  damaged = [line for one in workdirs for line in find_damaged(one)]
  print(f'Report: {report_page.write_report(workdirs, to or None)}', flush=True)
  if damaged:
    raise UserError('\n'.join([*damaged, 'The page was written without the damaged files. The command that trained '
                               'the run writes them again.']))
  return 0


def check(workdir: storage.Path) -> None:
  """Checks that a directory is a run, and that its config is the one its newest checkpoint was saved with.

  Raises:
    UserError: one of these conditions does not hold.
  """
  if not any((workdir / name).exists() for name in TRACES):
    raise UserError(f'--workdir={workdir}: expected the directory of a run, got one without {", ".join(TRACES)}. '
                    'Pass the --workdir that the run was trained or evaluated with.')
  steps = checkpoint_files.steps(workdir / 'checkpoints')
  try:
    config = json_files.from_json(storage.read_text(workdir / 'config.json'), code='none')
    meta = checkpoint_files.read_meta(workdir / 'checkpoints' / str(steps[-1])) if steps else {}
  except (OSError, UserError, Damaged):
    return  # nothing to compare; the page lists damaged files
  provenance.check(meta, config, said=str(workdir / 'config.json'))


def find_damaged(workdir: storage.Path) -> list[str]:
  """Returns one line per record of a run that exists and is not a JSON object.

  Raises:
    UserError: the system does not allow reading one.
  """
  lines = []
  for path in (workdir / name for name in RECORDS):
    try:
      found = documents.load(path)
      got = '' if isinstance(found, dict) else documents.describe(found)
    except FileNotFoundError:
      continue
    except (OSError, ValueError) as error:
      if isinstance(error, OSError) and failures.advice(error):
        raise failures.unreadable(error, os.fspath(path)) from error
      got = str(getattr(error, 'strerror', error))
    if got:
      lines.append(f'{path}: expected a JSON object, got {got}.')
  return lines
