"""`vit-jax replay`: runs the commands of a record again, in a fresh directory, and compares the outcome with it."""
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
from collections.abc import Callable, Iterator, Mapping, Sequence

from vit_jax.config import schema
from vit_jax.core import implementation
from vit_jax.core.errors import UserError, printable
from vit_jax.record import console, machine
from vit_jax.replay import comparison, inputs, outcomes, planned, records, segments, settings
from vit_jax.replay.comparison import Status
from vit_jax.replay.records import Record

ReadLine = Callable[[Sequence[str]], tuple[str, list[schema.Config]]]
"""Maps the arguments of a command line to the name of its job and its configs; see `commands.read_line`."""


def run(*, files: Sequence[str], data: Mapping[str, str], to: pathlib.Path | None, workdir: pathlib.Path | None,
        segment: int | None, mark: bool, allow_code: bool, read_line: ReadLine) -> int:
  """Replays one record, or one segment of a run; exit status `comparison.Status`, or that of a command that fails.

  Args:
    files: the id or the file of the record.
    data: paths by name.
    to: directory to keep; None = a temporary one, which is removed if the outcome is equal.
    workdir: of the run of which a segment is replayed.
    segment: step of the checkpoint at which the segment starts; None = the complete commands.
    mark: write the date of a replay that is equal or close into the record.
    allow_code: run configs that are not of this package, and modules, that the record names.
    read_line: reads a command line.
  """
  if len(files) > 1 or not files and segment is None:
    raise UserError(f'replay: expected one record, got {" and ".join(files) or "none"}. List all with vit-jax list '
                    '--records.')
  record = records.read(files[0]) if files else None
  if (segment is None) != (workdir is None):
    raise UserError('--segment: expected both --segment=STEP and --workdir=DIR of the run, got one of them. Add the '
                    'other one.')
  if segment is not None:
    assert workdir is not None
    return segments.run(workdir, segment, record, to)
  assert record is not None
  if record.kind == 'measurement':
    raise UserError(f'{record.id}: expected a record of a result, got a measurement of '
                    f'{record.made.get("date", "an unknown date")}, which no machine repeats exactly. Measure it '
                    f'again: {" && ".join(record.command)}')
  print('\n'.join(map(printable, comparison.header(record).splitlines())), flush=True)
  planned.check(record, is_own=records.is_id(files[0]), allow_code=allow_code)
  print(planned.text(record, with_places(record.words(), WORK_TEXT)), flush=True)
  try:
    return Replay(record, data, read_line).run(to, mark=mark)
  except inputs.Missing as error:
    console.end_stage()
    print(f'SKIPPED: {error}', flush=True)
    return Status.MISSING


WORK_TEXT = f'{{{inputs.WORK}}}'


def with_places(commands: Sequence[Sequence[str]], work: str) -> list[list[str]]:
  """Returns commands that all write below a directory: the last one into `result` there, unless it says another."""
  def with_place(words: Sequence[str], name: str) -> list[str]:
    is_given = planned.job(words) not in planned.JOBS or any(word.startswith('--workdir=') for word in words)
    return [*words, *([] if is_given else [f'--workdir={work}/{name}'])]
  return [with_place(words, 'result' if number == len(commands) else f'result_{number}')
          for number, words in enumerate(commands, 1)]


class Replay:
  """One replay of a record.

  Raises:
    inputs.Missing: data or weights are not given.
    UserError: they cannot be read.
  """

  def __init__(self, record: Record, data: Mapping[str, str], read_line: ReadLine) -> None:
    self.record, self._read_line = record, read_line
    words = record.words()
    self.found = inputs.find(inputs.names(words), data, record.about)
    print(''.join(f'  {{{name}}} = {path}\n' for name, path in self.found.items()), end='', flush=True)
    self.words = [inputs.filled(one, self.found) for one in words]

  def run(self, to: pathlib.Path | None, *, mark: bool) -> int:
    """Compares data and settings, runs the commands and compares the outcome; returns the exit status."""
    console.begin_stage('reading the data')
    for status, lines in ((Status.DATA, self.other_data()), (Status.CONFIG, self.other_settings())):
      if lines:
        console.end_stage()
        print('\n'.join([f'DIFFERS from the record, so nothing was run: {status.name.lower()}',
                         *(f'  {line}' for line in lines), self._advice(status)]), flush=True)
        return status
    console.end_stage()
    with _directory(to) as work:
      began, before_s = time.monotonic(), machine.processor_s()
      if failed := self._execute(work.path):
        work.is_kept = True
        return failed
      config, found, proven = self._outcome(work.path)
      verdict = comparison.compare(self.record, found)
      status = verdict.status
      print('\n'.join(verdict.lines), flush=True)
      if config:
        print('\n'.join(['The settings of the run differ from those of the record:',
                         *(f'  {line}' for line in config)]), flush=True)
        status = status or Status.CONFIG
      spent_s = machine.processor_s() - before_s
      print(f'Replayed in {time.monotonic() - began:,.0f} s, {spent_s:,.0f} processor seconds.', flush=True)
      work.is_kept = work.is_kept or bool(status)
      if work.is_kept:
        print(f'The run is in {work.path}')
    if mark and not status:
      _mark(self.record, spent_s, found.commit, proven if verdict.is_equal else ('', ''))
    return status

  def _advice(self, status: Status) -> str:
    """Returns what to do about other data or settings than those of the record."""
    flag = ','.join(f'{name}=PATH' for name in self.found)
    first = (f'Check out the commit of the record, {str(self.record.made.get("commit", "not known"))[:12]}'
             if status is Status.CONFIG else f'Set --data={flag} to those of the record' if flag else
             'Put those of the record in their place')
    what = 'these settings' if status is Status.CONFIG else 'these data'
    return f'{first}, or run the command with {what} and write a record of it with vit-jax record.'

  def other_data(self) -> list[str]:
    """Returns how data and weights differ from those of the record."""
    record = self.record
    now = inputs.files(record.words(), self.found)
    lines = [f'{name}: {_file(digest)} -> {_file(now[name]) if name in now else "not found"}'
             for name, digest in record.files.items() if digest != now.get(name)]
    return lines + inputs.changes(settings.of_data(record.settings), record.data, self.found)

  def other_settings(self) -> list[str]:
    """Returns how the settings that the last command gives differ from those of the record."""
    configs = self._read_line(self._arguments(pathlib.Path('work'))[-1])[1]
    if len(configs) != 1 or not self.record.settings:  # a study has the settings of several runs
      return []
    return settings.differences(self.record.settings, configs[0], self.found, without=self.record.found)

  def _arguments(self, work: pathlib.Path) -> list[list[str]]:
    """Returns the commands with their directories."""
    return [inputs.filled(words, {inputs.WORK: str(work)}) for words in with_places(self.words, WORK_TEXT)]

  def _execute(self, work: pathlib.Path) -> int:
    """Runs the commands, each in a process of its own; returns the exit status of the first one that fails."""
    for words in self._arguments(work):
      print(f'$ vit-jax {" ".join(words)}', flush=True)
      command = [sys.executable, '-m', 'vit_jax.main', *words]
      if status := subprocess.run(command, check=False, env=implementation.environment(os.environ)).returncode:
        print(f'The command ended with status {status}. What it left is in {work}', flush=True)
        return status if status > 0 else 128 - status
    return 0

  def _outcome(self, work: pathlib.Path) -> tuple[list[str], outcomes.Outcome, tuple[str, str]]:
    """Returns how the settings of the run differ from those of the record, the outcome, and digests of all settings."""
    folder = pathlib.Path(next(word.partition('=')[2] for word in self._arguments(work)[-1]
                               if word.startswith('--workdir=')))
    found = outcomes.read(work if folder.parent == work / 'runs' else folder)
    paths = self.found | {inputs.WORK: str(work)}
    config = settings.read(found.config)
    proven = settings.digest(config, paths), settings.digests(config, paths)
    if self.record.config_digest not in ('', proven[0]):
      print(settings.explain_digest(self.record.setting_digests, config, paths))
    if new := settings.newer(self.record.settings, config, paths) if self.record.config_digest else {}:
      print('Found out by the run, and not stated by the record, which is from before there were such settings: '
            + ', '.join(f'{name}={json.dumps(value)}' for name, value in new.items()))
    return settings.differences(self.record.settings, config, paths) if self.record.config_digest else [], found, proven


@dataclasses.dataclass
class _Work:
  path: pathlib.Path
  is_kept: bool


@contextlib.contextmanager
def _directory(to: pathlib.Path | None) -> Iterator[_Work]:
  """Yields the fresh directory of a replay; a temporary one is removed if it is not kept."""
  if to is not None and to.exists() and any(to.iterdir()):
    raise UserError(f'--to: expected a new or an empty directory, got {to}. Use another one.')
  work = _Work(to or pathlib.Path(tempfile.mkdtemp(prefix='vit_jax_replay_')), to is not None)
  work.path.mkdir(parents=True, exist_ok=True)
  yield work
  if not work.is_kept:
    shutil.rmtree(work.path, ignore_errors=True)


def _file(digest: Mapping[str, object]) -> str:
  return ' '.join(f'{name} {str(value)[:12]}' for name, value in digest.items())


def _mark(record: Record, spent_s: float, commit: str, proven: tuple[str, str]) -> None:
  """Writes into the file of a record when and with which commit it was replayed, and processor seconds if unknown.

  Args:
    record: to be written again.
    spent_s: processor seconds of the replay.
    commit: of this code.
    proven: digests of all settings of an equal replay, with which later ones compare; '' = keep those of the record.
  """
  path = records.path_of(record)
  today = datetime.datetime.now(datetime.UTC).date().isoformat()
  replayed = f'{today} {commit[:records.COMMIT_LETTERS] or "unknown"}' + ' close' * (not any(proven))
  records.write(dataclasses.replace(
      record, replayed=replayed, made={'processor_s': round(spent_s, 1)} | record.made,
      config_digest=proven[0] or record.config_digest, setting_digests=proven[1] or record.setting_digests), path)
  print(f'Written: {path}')
