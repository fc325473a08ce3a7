"""The runs of a study on disk and as processes: each is the train job in WORKDIR/runs/NAME.

The directory of a run shows its state: `final.json` means finished, `paused_25%.json` paused there, checkpoints mean
started. So a study keeps no record of its own, but for the decisions of a search (`halving.py`), and processes on
several hosts that share the directory can work on the same study: a run belongs to the process that holds the lock on
its `.claim`, which the system releases when that process ends.
"""
from __future__ import annotations

import math
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import IO, NamedTuple

from vit_jax.config import json_files, layout, schema
from vit_jax.core import documents, failures, files, implementation
from vit_jax.core.errors import UserError
from vit_jax.jobs import resume
from vit_jax.record import reader, run_directory
from vit_jax.train import hooks

FINAL, OUTPUT, CLAIM, FAILED = 'final.json', 'output.txt', '.claim', '.failed'
CHILD = ('-m', 'vit_jax.study.child')
TAIL_BYTES = 2**20
TAIL_LINES = 6  # of the output of a failed run that are shown if no line has the error

_STATUS = re.compile(rb'[0-9]{1,3}\b')
_RESTORE = 'Restore it, or remove that folder to run it again.'


class Task(NamedTuple):
  """A run: its name, config and directory, and the part of it, such as '25 %', after which it pauses; '' = its end."""
  name: str
  config: schema.Config
  folder: pathlib.Path
  until: str = ''

  @property
  def percent(self) -> float:
    """The part of the run as a number, 100 for its end."""
    return float((self.until or '100 %').removesuffix(' %'))

  @property
  def is_done(self) -> bool:
    """Whether the run has finished, or paused after this part."""
    return self._file.is_file()

  @property
  def is_finished(self) -> bool:
    return (self.folder / FINAL).is_file()

  @property
  def failure(self) -> int:
    """The exit status of the last try of a run that failed; 0 if it did not."""
    path = self.folder / FAILED
    found = _STATUS.match(documents.read_bytes(path)) if path.is_file() else None
    return int(found[0]) if found else failures.TRY_AGAIN if path.is_file() else 0

  @property
  def has_diverged(self) -> bool:
    """Whether the run failed because its loss was not finite."""
    return bool(self.failure) and hooks.NOT_FINITE in explain(self.folder)

  @property
  def is_over(self) -> bool:
    """Whether the run is done, or failed at its last try."""
    return self.is_done or bool(self.failure)

  @property
  def _file(self) -> pathlib.Path:
    """The file with the results: of a run that ended early, as by early stopping, those of its end."""
    paused = self.folder / run_directory.paused_file(self.until)
    return paused if self.until and paused.is_file() else self.folder / FINAL

  @property
  def is_started(self) -> bool:
    """Whether the run has a checkpoint."""
    checkpoints = self.folder / 'checkpoints'
    return checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir())

  def with_results(self) -> list[Task]:
    """Returns the run at each part where it paused, in this order, and at its end if it has finished."""
    paused = [self._replace(until=f'{path.name.removeprefix("paused_").removesuffix("%.json")} %')
              for path in self.folder.glob(run_directory.paused_file('*%'))]
    return [*sorted(paused, key=lambda task: task.percent), *([self._replace(until='')] if self.is_finished else [])]

  def check(self) -> None:
    """Raises UserError if the directory holds this run with other settings."""
    path = self.folder / 'config.json'
    if not path.is_file() or not (self.is_done or self.is_started):
      return
    before = layout.unchosen(json_files.read(path))  # a run chooses its layout on its devices
    if changed := resume.changes(json_files.to_plain(before), layout.unchosen(self.config)):
      raise UserError('\n'.join([
          f'--workdir: expected a study with the same settings, got {self.folder} with others:', *changed,
          'Use the settings of that study, another --workdir, or remove that folder.']))

  def result(self) -> schema.Result:
    """Returns the results of the run at its end, or where it paused.

    Raises:
      UserError: a file of the run cannot be read.
    """
    file = self._file
    final, evaluation = (documents.read(path, advice=_RESTORE)
                         for path in (file, self.folder / 'evaluate.json' if file.name == FINAL else file))
    numbers = final.part('metrics')
    metrics = {name: numbers.field(name, default=math.nan).number() for name in numbers.object()}  # null = not finite
    return schema.Result(
        self.config, str(self.folder), final.field('step').whole(), final.field('seconds').number(0),
        final.field('num_params').whole(0, 2**53), final.field('exaflops').number(0), metrics,
        evaluation.field('top1', default=None).number(), self._best(),
        final.field('training_processor_s', default=0.).number(0))

  def _best(self) -> dict[str, float]:
    """Returns all metrics of the step at which the watched metric was best, from its latest rows."""
    watched = self.config.train.early_stop.metric or self.config.checkpoints.keep_best
    if not watched:
      return {}
    steps: dict[float, dict[str, float]] = {}
    for row in reader.read(self.folder).rows:
      steps.setdefault(row['step'], {}).update(row)
    sign = -1. if reader.is_lower_better(watched) else 1.
    return max((row for row in steps.values() if watched in row), key=lambda row: sign * row[watched], default={})


class Process:
  """The process of a run; made by `begin`."""

  def __init__(self, task: Task, claim: IO[str], child: subprocess.Popen[bytes]) -> None:
    self.task, self._claim, self._child = task, claim, child

  @property
  def status(self) -> int | None:
    """Exit status; None while it runs. A finished run has no owner."""
    status = self._child.poll()
    if status is not None:
      self._claim.close()
    return status

  def stop(self, number: signal.Signals) -> None:
    """Sends a signal to the process if it still runs."""
    if self._child.poll() is None:
      self._child.send_signal(number)


def begin(task: Task, environ: dict[str, str]) -> Process | None:
  """Starts or resumes a run; None if another process works on it."""
  task.folder.mkdir(parents=True, exist_ok=True)
  claim = open(task.folder / CLAIM, 'a+')
  if not _lock(claim) or _is_locked(task.folder / '.lock') or task.is_done:
    claim.close()
    return None
  (task.folder / FAILED).unlink(missing_ok=True)
  config = task.folder / 'config.json'
  run_directory.write_text(config, json_files.to_json(task.config))
  command = [sys.executable, *CHILD, str(os.getpid()), '--job=train', f'--config={config}', f'--workdir={task.folder}',
             *([f'--until={task.until}'] if task.until else [])]
  with open(task.folder / OUTPUT, 'ab') as output:
    # The process has its own session, so that it does not also receive Ctrl-C directly.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                             env=implementation.environment(environ), start_new_session=True)
  return Process(task, claim, child)


def explain(folder: pathlib.Path) -> str:
  """Returns why a run failed, from the end of its output: its error message, else the last lines; '' without output."""
  if not (folder / OUTPUT).is_file():
    return ''
  with open(folder / OUTPUT, 'rb') as file:
    file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
    lines = file.read(TAIL_BYTES).decode(errors='replace').rstrip().splitlines()
  starts = [number for number, line in enumerate(lines) if line.startswith('error: ')]
  return '\n'.join(lines[starts[-1]:] if starts else lines[-TAIL_LINES:])


def _lock(file: IO[str]) -> bool:
  """Locks a file in the directory of a run; returns False if another process has. Raises as `files.try_lock`."""
  return files.try_lock(file, where=f'--workdir={os.path.dirname(file.name)}')


def _is_locked(path: pathlib.Path) -> bool:
  """Returns whether a process holds the lock of a file, as of a run directory.

  That one may have outlived its study, or run without one.
  """
  if not path.exists():
    return False
  with open(path, 'r+') as file:  # NFS locks only files that are open for writing
    return not _lock(file)
