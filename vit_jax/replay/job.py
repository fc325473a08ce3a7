"""`vit-jax replay`: runs the commands of a record again, in a new directory, and compares the outcome with the record.

`run` first prints the claim and the plan and checks the commands (`planned`), then compares the data and the settings
(`inputs`, `settings`), and only then runs the commands and compares their outcome (`outcomes`). With `--segment`, `run`
trains from one checkpoint of a run to the next checkpoint and compares the digest of the parameters, so that a run of
weeks can be verified in parts, on several machines.
"""
from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vit_jax.config import engine, schema
from vit_jax.core import failures, implementation
from vit_jax.core.errors import UserError
from vit_jax.jobs import train
from vit_jax.record import checkpoint_files, console, growing, machine, reader, storage
from vit_jax.replay import inputs, outcomes, planned, records, settings
from vit_jax.replay.outcomes import Status
from vit_jax.replay.records import Record

ReadLine = Callable[[Sequence[str]], tuple[str, list[schema.Config]]]
"""Maps the arguments of a command line to the name of the job and the configs; see `commands.read_line`."""


def run(*, files: Sequence[str], data: Mapping[str, str], to: pathlib.Path | None, workdir: pathlib.Path | None,
        segment: int | None, mark: bool, allow_code: bool, read_line: ReadLine) -> int:
  """Replays one record, or one segment of a run; returns a `Status`, or the exit status of a command that fails.

  Args:
    files: the id or the file of the record.
    data: paths of data and weights, by the names of the placeholders of the record.
    to: a directory for the outcome; None = a temporary directory, which is removed if the outcome is equal or close.
    workdir: with `segment`, the directory of the run.
    segment: the step of the checkpoint at which the segment begins; None = replay the complete commands.
    mark: write the date of a replay that is equal or close into the record.
    allow_code: run configs and modules of the record even if they are not of this package.
  """
  if len(files) > 1 or (not files and segment is None):
    raise UserError(f'replay: expected one record, got {" and ".join(files) or "none"}. List all with vit-jax list '
                    '--records.')
  record = records.read(files[0]) if files else None
  if segment is not None and workdir is not None:
    return _replay_segment(workdir, segment, record, to)
  if segment is not None or workdir is not None:
    raise UserError('--segment: expected both --segment=STEP and --workdir=DIR of the run, got one of them. Add the '
                    'other one.')
  assert record is not None
  if record.kind == 'measurement':
    raise UserError(f'{record.id}: expected a record of a result, got a measurement of '
                    f'{record.made.get("date", "an unknown date")}, which no machine repeats exactly. Measure it '
                    f'again: {" && ".join(record.command)}')
  print(planned.header(record), flush=True)
  planned.check(record, is_shipped=records.is_id(files[0]), allow_code=allow_code)
  print(planned.plan(record, with_workdirs(record)), flush=True)
  try:
    paths = inputs.find_paths(inputs.find_names(record.words()), data, record.about)
  except inputs.MissingPath as error:
    print(f'SKIPPED: {error}', flush=True)
    return Status.MISSING
  print(''.join(f'  {{{name}}} = {path}\n' for name, path in paths.items()), end='', flush=True)
  console.begin_stage('reading the data')
  status, lines = _compare_inputs(record, paths, read_line)
  console.end_stage()
  if lines:
    print('\n'.join([f'DIFFERS from the record, so nothing was run: {status.name.lower()}', *lines,
                     _advice(record, paths, status)]), flush=True)
    return status
  return _run_and_compare(record, paths, to, marked_file=records.find(files[0]) if mark else None)


def with_workdirs(record: Record) -> list[list[str]]:
  """Returns the arguments of each command of a record, with a `--workdir` below `{work}` if a command has none.

  The last command writes into `{work}/result`, earlier commands into `{work}/result_1`, `{work}/result_2`, ….
  """
  commands = record.words()
  for number, words in enumerate(commands, 1):
    has_workdir = any(word.startswith('--workdir=') for word in words)
    if planned.job_of(words) in planned.JOBS and not has_workdir:
      folder = 'result' if number == len(commands) else f'result_{number}'
      words.append(f'--workdir={{{inputs.WORK}}}/{folder}')
  return commands


def _compare_inputs(record: Record, paths: Mapping[str, str], read_line: ReadLine) -> tuple[Status, list[str]]:
  """Returns DATA and lines about data and weights that differ, or else CONFIG and lines about settings, if any."""
  def describe(digest: Mapping[str, object]) -> str:
    return ' '.join(f'{name} {str(value)[:12]}' for name, value in digest.items())

  now = inputs.digest_files(record.words(), paths)
  lines = [f'  {name}: {describe(digest)} -> {describe(now[name]) if name in now else "not found"}'
           for name, digest in record.files.items() if digest != now.get(name)]
  lines += [f'  {line}' for line in inputs.find_changes(record.settings, record.data, paths)]
  if lines:
    return Status.DATA, lines
  _, configs = read_line(_commands(record, paths, pathlib.Path('work'))[-1])
  if len(configs) != 1 or not record.settings:  # a study has the settings of several runs
    return Status.EQUAL, []
  differences = settings.of_config(configs[0], paths).differences(record.settings, ignored=record.found)
  return Status.CONFIG, [f'  {line}' for line in differences]


def _advice(record: Record, paths: Mapping[str, str], status: Status) -> str:
  """Returns a sentence about what to do if data (`DATA`) or settings (`CONFIG`) differ from those of the record."""
  if status is Status.CONFIG:
    commit = str(record.made.get('commit', 'not known'))[:12]
    changed, advice = 'settings', f'Check out the commit of the record, {commit}'
  elif paths:
    changed, advice = 'data', f'Set --data={",".join(f"{name}=PATH" for name in paths)} to those of the record'
  else:
    changed, advice = 'data', 'Put the data of the record in their place'
  return f'{advice}, or run the command with these {changed} and write a record of it with vit-jax record.'


def _commands(record: Record, paths: Mapping[str, str], work: pathlib.Path) -> list[list[str]]:
  """Returns the arguments with which each command of a record is run, with paths in place of placeholders."""
  all_paths = {**paths, inputs.WORK: str(work)}
  return [[inputs.with_paths(word, all_paths) for word in words] for words in with_workdirs(record)]


def _run_and_compare(record: Record, paths: Mapping[str, str], to: pathlib.Path | None, *,
                     marked_file: pathlib.Path | None) -> int:
  """Runs each command in a process, compares the outcome, and prints the result; returns the exit status.

  After a replay that is equal or close, the record is written again to `marked_file`, unless that is None.
  """
  work = _new_directory(to, 'vit_jax_replay_')
  began_s, processor_began_s = time.monotonic(), machine.processor_s()
  commands = _commands(record, paths, work)
  for words in commands:
    print(f'$ vit-jax {" ".join(words)}', flush=True)
    status = subprocess.run([sys.executable, '-m', 'vit_jax.main', *words], check=False,
                            env=implementation.environment(os.environ)).returncode
    if status:
      print(f'The command ended with status {status}. Its files are in {work}', flush=True)
      return status if status > 0 else 128 - status  # a negative status is a signal; shells return 128 + signal
  workdir = pathlib.Path(next(word.partition('=')[2] for word in commands[-1] if word.startswith('--workdir=')))
  is_study = workdir.parent == work / 'runs'  # the commands are the runs of a study
  outcome = outcomes.read(work if is_study else workdir)
  config = engine.read_file(outcome.config_folder / 'config.json')
  now = settings.of_config(config, {**paths, inputs.WORK: str(work)})
  notes, differences = _compare_settings(record, now)
  verdict = outcomes.compare(record, outcome)
  print('\n'.join([*notes, *verdict.lines, *differences]), flush=True)
  status = verdict.status or (Status.CONFIG if differences else Status.EQUAL)
  processor_s = machine.processor_s() - processor_began_s
  print(f'Replayed in {time.monotonic() - began_s:,.0f} s, {processor_s:,.0f} processor seconds.', flush=True)
  if to is not None or status:
    print(f'The run is in {work}')
  else:
    shutil.rmtree(work, ignore_errors=True)
  if marked_file and not status:
    _mark(marked_file, record, processor_s, outcome.commit, now if verdict.is_equal else None)
  return status


def _compare_settings(record: Record, now: settings.Settings) -> tuple[list[str], list[str]]:
  """Returns lines about settings that are new in this version, and lines about settings that differ from the record."""
  if not record.config_digest:
    return [], []
  notes = [] if record.config_digest == now.digest else [now.explain_digest(record.setting_digests)]
  if newer := now.newer(record.settings):
    notes.append('Chosen by the run, and not in the record, whose version did not have these settings: '
                 + ', '.join(f'{name}={json.dumps(value)}' for name, value in newer.items()))
  differences = [f'  {line}' for line in now.differences(record.settings)]
  if differences:
    differences.insert(0, 'The settings of the run differ from those of the record:')
  return notes, differences


def _mark(path: pathlib.Path, record: Record, processor_s: float, commit: str, now: settings.Settings | None) -> None:
  """Writes date and commit of a replay into the file of a record, and processor seconds if the record has none.

  `now` are the settings of an equal replay, whose digests replace those of the record; None = the replay is close.
  """
  today = datetime.datetime.now(datetime.UTC).date().isoformat()
  replayed = f'{today} {commit[:7] or "unknown"}{" close" if now is None else ""}'
  record = dataclasses.replace(record, replayed=replayed, made={'processor_s': round(processor_s, 1)} | record.made)
  if now is not None:
    record = dataclasses.replace(record, config_digest=now.digest, setting_digests=now.digests)
  records.write(record, path)
  print(f'Written: {path}')


def _new_directory(to: pathlib.Path | None, prefix: str) -> pathlib.Path:
  """Returns an empty directory: `to`, or a temporary directory if None. Raises UserError if `to` is not empty."""
  if to is None:
    return pathlib.Path(tempfile.mkdtemp(prefix=prefix))
  if to.exists() and any(to.iterdir()):
    raise UserError(f'--to: expected a new or an empty directory, got {to}. Use another one.')
  to.mkdir(parents=True, exist_ok=True)
  return to


def _replay_segment(workdir: pathlib.Path, step: int, record: Record | None, to: pathlib.Path | None) -> int:
  """Trains from one checkpoint of a run to the next, compares the digests, prints the result; returns the exit status.

  `workdir` does not change. The digests are those of `record`; None = those in the `metrics.jsonl` of the run. `to` is
  a directory for the segment; None = a temporary directory, which is removed if the parameters are equal.
  """
  config = engine.read_file(workdir / 'config.json')
  end, expected = _find_segment_end(workdir, step, record)
  work = _new_directory(to, 'vit_jax_segment_')
  shutil.copytree(workdir / 'checkpoints' / str(step), work / 'checkpoints' / str(step))
  for name in ('config.json', reader.FILE):
    with contextlib.suppress(FileNotFoundError):  # a checkpoint may come without the record of its run
      storage.write_bytes(work / name, growing.read(workdir / name))
  print(f'Training {workdir} from step {step:,} to step {end:,} again.', flush=True)
  status = train.run(config, work, until=f'{end} steps', is_segment=True)
  if status not in (0, failures.TRY_AGAIN):
    return status
  digest = _read_digests(work).get(end, '')
  if digest == expected:
    print(f'EQUAL: the parameters of step {end:,}, trained from step {step:,}, are those of the run, bit for bit.')
    if to is None:
      shutil.rmtree(work, ignore_errors=True)
    return Status.EQUAL
  changed = machine.differences(_last_machine(workdir), _last_machine(work))
  print('\n'.join([f'DIFFERS: the parameters of step {end:,}: {expected[:12]} -> {digest[:12] or "not saved"}.',
                   *(f'  {name}: {before} -> {now}' for name, (before, now) in changed.items()),
                   f'The segment is in {work}']), flush=True)
  return Status.MACHINE if changed else Status.RESULT


def _find_segment_end(workdir: pathlib.Path, step: int, record: Record | None) -> tuple[int, str]:
  """Returns the step of the next checkpoint, and the digest of its parameters; raises UserError if there is none."""
  if record and not all(name.isdecimal() for name in record.checkpoints):
    raise UserError(f'{record.id}: expected the record of one run, got one of {len(record.checkpoints)} runs. Leave '
                    'the record out: the digests of the run then count.')
  digest_by_step = {int(text): digest for text, digest in record.checkpoints.items()} if record else {}
  try:
    digest_by_step = digest_by_step or _read_digests(workdir)
  except FileNotFoundError:
    raise UserError(f'--workdir: expected the directory of a run, got {workdir}, which has no metrics.jsonl. Pass the '
                    '--workdir of a training run.') from None
  last = max(digest_by_step, default=0)
  usable = [saved for saved in checkpoint_files.steps(workdir / 'checkpoints') if saved < last]
  if step not in usable:
    raise UserError(f'--segment: expected the step of a checkpoint in {workdir} with a later one, got {step}. Use one '
                    f'of {", ".join(map(str, usable)) or "none: keep more with --config.checkpoints.keep_latest"}.')
  end = min(later for later in digest_by_step if later > step)
  return end, digest_by_step[end]


def _read_digests(workdir: pathlib.Path) -> dict[int, str]:
  """Returns the digests of parameters by step, for all checkpoints that a run has saved or removed."""
  events = reader.read(workdir, most_rows=1).events
  return {int(str(event['step'])): str(event['params_digest']) for event in events if event['event'] == 'checkpoint'}


def _last_machine(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the description of the machine of the last start of a run; {} if the machine is not known."""
  if not storage.open_path(workdir / reader.FILE).exists():
    return {}
  starts = [event for event in reader.read(workdir, most_rows=1).events if event['event'] == 'start']
  description = starts[-1].get('machine', {}) if starts else {}
  return description if isinstance(description, dict) else {}
