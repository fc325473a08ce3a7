"""Replays one segment of a run: from a checkpoint to the next one, whose parameters are compared by their digest.

A run of weeks is verified in parts, on several machines or only at a few places.
"""
from __future__ import annotations

import pathlib
import shutil
import tempfile
from typing import Any

from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.jobs import train
from vit_jax.record import checkpoint_files, growing, machine, reader, storage
from vit_jax.replay import settings
from vit_jax.replay.comparison import Status
from vit_jax.replay.records import Record


def run(workdir: pathlib.Path, step: int, record: Record | None, to: pathlib.Path | None) -> int:
  """Trains from a checkpoint of a run to its next one and compares the digests; returns the exit status.

  Args:
    workdir: of the run, which stays unchanged.
    step: of the checkpoint.
    record: whose digests count; None = those in the record of the run itself.
    to: directory to keep; None = a temporary one, which is removed.
  """
  known = checkpoints(workdir, record)
  end = next_step(workdir, step, known)
  work = to or pathlib.Path(tempfile.mkdtemp(prefix='vit_jax_segment_'))
  copy(workdir, step, work)
  config = settings.read(workdir)
  print(f'Training {workdir} from step {step:,} to step {end:,} again.', flush=True)
  status = train.run(config, work, until=f'{end} steps', is_segment=True)
  if status not in (0, failures.TRY_AGAIN):
    return status
  now = checkpoints(work, None).get(end, '')
  if now == known[end]:
    print(f'EQUAL: the parameters of step {end:,}, trained from step {step:,}, are those of the run, bit for bit.')
    if to is None:
      shutil.rmtree(work, ignore_errors=True)
    return Status.EQUAL
  changed = machine.differences(_machine(workdir), _machine(work))
  print('\n'.join([f'DIFFERS: the parameters of step {end:,}: {known[end][:12]} -> {now[:12] or "not saved"}.',
                   *(f'  {name}: {old} -> {new}' for name, (old, new) in changed.items()),
                   f'The segment is in {work}']), flush=True)
  return Status.MACHINE if changed else Status.RESULT


def checkpoints(workdir: pathlib.Path, record: Record | None) -> dict[int, str]:
  """Returns the digest of the parameters by step of checkpoint, also of those that are no longer kept.

  Raises:
    UserError: the run has no record.
  """
  if record is not None and record.checkpoints:
    return {int(step): digest for step, digest in record.checkpoints.items()}
  try:
    events = reader.read(workdir, most_rows=1).events
  except FileNotFoundError:
    raise UserError(f'--workdir: expected the directory of a run, got {workdir}, which has no metrics.jsonl. Pass the '
                    '--workdir of a training run.') from None
  return {int(str(e['step'])): str(e['params_digest']) for e in events if e['event'] == 'checkpoint'}


def next_step(workdir: pathlib.Path, step: int, known: dict[int, str]) -> int:
  """Returns the step of the checkpoint after `step`.

  Raises:
    UserError: the run has no such checkpoint, or none after it.
  """
  kept = checkpoint_files.steps(workdir / 'checkpoints')
  usable = [one for one in kept if any(other > one for other in known)]
  if step not in usable:
    raise UserError(f'--segment: expected the step of a checkpoint in {workdir} with a later one, got {step}. Use one '
                    f'of {", ".join(map(str, usable)) or "none: keep more with --config.checkpoints.keep_latest"}.')
  return min(other for other in known if other > step)


def copy(workdir: pathlib.Path, step: int, work: pathlib.Path) -> None:
  """Makes a directory with the run as it was at a checkpoint.

  Raises:
    UserError: the directory is not empty.
  """
  if work.exists() and any(work.iterdir()):
    raise UserError(f'--to: expected a new or an empty directory, got {work}. Use another one.')
  shutil.copytree(workdir / 'checkpoints' / str(step), work / 'checkpoints' / str(step))
  for name in ('config.json', 'metrics.jsonl'):
    if (workdir / name).exists():
      storage.write_bytes(work / name, growing.read(workdir / name))


def _machine(workdir: pathlib.Path) -> dict[str, Any]:
  starts = [e for e in reader.read(workdir, most_rows=1).events if e['event'] == 'start']
  found = starts[-1].get('machine', {}) if starts else {}
  return found if isinstance(found, dict) else {}


