"""The runs of a study on disk (`Task`) and as processes (`begin`): each run is the train job in WORKDIR/runs/NAME.

The files in that directory show the state of a run, so that several hosts that share WORKDIR can work on a study:

  checkpoints/5         the run has started             .claim        is locked by the study process of the run
  paused_25%.json       the run has paused after 25 %   .failed       the exit status of the last try, if it failed
  final.json            the run has finished            output.txt    the output of all tries
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

from vit_jax.config import engine, schema
from vit_jax.core import documents, failures, files, implementation
from vit_jax.core.errors import UserError
from vit_jax.jobs import resume
from vit_jax.parallel import layout
from vit_jax.record import reader, run_directory
from vit_jax.train import hooks

FINAL, OUTPUT, CLAIM, FAILED = 'final.json', 'output.txt', '.claim', '.failed'
CHILD = ('-m', 'vit_jax.study.child')
MAX_TAIL_BYTES = 2**20  # of the output of a failed run that are read
NUM_TAIL_LINES = 6  # of the output of a failed run that are shown if no line has the error
_STATUS = re.compile(rb'[0-9]{1,3}\b')  # an exit status
_RESTORE = 'Restore it, or remove that folder to run it again.'  # advice for a damaged file


class Task(NamedTuple):
  """A run up to `until`, a part such as '25 %' after which the run pauses, '' = the end. Properties read `folder`."""
  name: str
  config: schema.Config
  folder: pathlib.Path
  until: str = ''

  @property
  def percent(self) -> float:
    """The number of percent in `until`; 100 for the end."""
    return float((self.until or '100 %').removesuffix(' %'))

  @property
  def is_done(self) -> bool:
    """Whether the run has finished, or has paused after this part."""
    return self._results_file.is_file()

  @property
  def is_finished(self) -> bool:
    """Whether the run has reached its end."""
    return (self.folder / FINAL).is_file()

  @property
  def failure(self) -> int:
    """The exit status of the last try if the try failed, else 0; `TRY_AGAIN` if the file `FAILED` has no status."""
    path = self.folder / FAILED
    if not path.is_file():
      return 0
    status = _STATUS.match(documents.read_bytes(path))
    return int(status[0]) if status else failures.TRY_AGAIN

  @property
  def has_diverged(self) -> bool:
    """Whether the run failed because its loss was not finite."""
    return bool(self.failure) and hooks.NOT_FINITE in explain(self.folder)

  @property
  def is_over(self) -> bool:
    """Whether the task is done, or the last try has failed."""
    return self.is_done or bool(self.failure)

  @property
  def _results_file(self) -> pathlib.Path:
    """The file of the pause if it exists, else `final.json`: early stopping may end a run before it pauses."""
    paused = self.folder / run_directory.paused_file(self.until)
    return paused if self.until and paused.is_file() else self.folder / FINAL

  @property
  def is_started(self) -> bool:
    """Whether the run has a checkpoint."""
    checkpoints = self.folder / 'checkpoints'
    return checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir())

  def with_results(self) -> list[Task]:
    """Returns the tasks of this run that have results: for each part where it paused, in order, and for the end."""
    paused = [self._replace(until=f'{path.name.removeprefix("paused_").removesuffix("%.json")} %')
              for path in self.folder.glob(run_directory.paused_file('*%'))]
    finished = [self._replace(until='')] if self.is_finished else []
    return sorted(paused, key=lambda task: task.percent) + finished

  def check(self) -> None:
    """Raises UserError if the directory has this run with other settings."""
    path = self.folder / 'config.json'
    if not path.is_file() or not (self.is_done or self.is_started):
      return
    saved = layout.unchosen(engine.read_file(path))  # without the layout, which a run chooses for the devices
    if changed := resume.changes(engine.to_plain(saved), layout.unchosen(self.config)):
      raise UserError('\n'.join([
          f'--workdir: expected a study with the same settings, got {self.folder} with others:', *changed,
          'Use the settings of that study, another --workdir, or remove that folder.']))

  def result(self) -> schema.Result:
    """Returns the results of the run at its end, or where it paused.

    Raises UserError if a file of the run cannot be read.
    """
    path = self._results_file
    results = documents.read(path, advice=_RESTORE)
    evaluation = documents.read(self.folder / 'evaluate.json', advice=_RESTORE) if path.name == FINAL else results
    fields = results.object_or_empty('metrics')
    metrics = {name: fields.field(name, default=math.nan).number() for name in fields.object()}  # null = not finite
    return schema.Result(
        self.config, str(self.folder), results.field('step').whole(), results.field('seconds').number(0),
        results.field('num_params').whole(0, 2**53), results.field('exaflops').number(0), metrics,
        evaluation.field('top1', default=None).number(), self._best_metrics(),
        results.field('training_processor_s', default=0.).number(0))

  def _best_metrics(self) -> dict[str, float]:
    """Returns all metrics of the step where the metric of early stopping or `keep_best` was best; {} without one."""
    metric = self.config.train.early_stop.metric or self.config.checkpoints.keep_best
    if not metric:
      return {}
    row_by_step: dict[float, dict[str, float]] = {}
    for row in reader.read(self.folder).rows:
      row_by_step.setdefault(row['step'], {}).update(row)
    sign = -1. if reader.is_lower_better(metric) else 1.
    return max((row for row in row_by_step.values() if metric in row), key=lambda row: sign * row[metric], default={})


class Process:
  """The process of a run; made by `begin`. `claim` is the open file `.claim`, whose lock ends when it is closed."""

  def __init__(self, task: Task, claim: IO[str], child: subprocess.Popen[bytes]) -> None:
    self.task, self._claim, self._child = task, claim, child

  def poll(self) -> int | None:
    """Returns None while the process runs; afterwards releases the lock on `.claim` and returns the exit status."""
    status = self._child.poll()
    if status is not None:
      self._claim.close()
    return status

  def stop(self, number: signal.Signals) -> None:
    """Sends a signal to the process if it still runs."""
    if self._child.poll() is None:
      self._child.send_signal(number)


def begin(task: Task, environ: dict[str, str]) -> Process | None:
  """Starts or resumes a run in a new process; returns None if another process runs it, or it is done."""
  task.folder.mkdir(parents=True, exist_ok=True)
  claim = open(task.folder / CLAIM, 'a+')
  if not _lock(claim) or _is_locked(task.folder / '.lock') or task.is_done:
    claim.close()
    return None
  (task.folder / FAILED).unlink(missing_ok=True)
  config = task.folder / 'config.json'
  run_directory.write_text(config, engine.to_json(task.config))
  command = [sys.executable, *CHILD, str(os.getpid()), '--job=train', f'--config={config}', f'--workdir={task.folder}',
             *([f'--until={task.until}'] if task.until else [])]
  with open(task.folder / OUTPUT, 'ab') as output:
    # The process has its own session, so that it does not also receive Ctrl-C directly.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                             env=implementation.environment(environ), start_new_session=True)
  return Process(task, claim, child)


def explain(folder: pathlib.Path) -> str:
  """Returns why a run failed: the last error message in its output, else the last lines; '' without output."""
  if not (folder / OUTPUT).is_file():
    return ''
  with open(folder / OUTPUT, 'rb') as file:
    file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_TAIL_BYTES))
    lines = file.read(MAX_TAIL_BYTES).decode(errors='replace').rstrip().splitlines()
  error_lines = [i for i, line in enumerate(lines) if line.startswith('error: ')]
  return '\n'.join(lines[error_lines[-1]:] if error_lines else lines[-NUM_TAIL_LINES:])


def _lock(file: IO[str]) -> bool:
  """Locks a file in a run directory until it is closed; returns False if another process holds the lock."""
  return files.try_lock(file, where=f'--workdir={os.path.dirname(file.name)}')


def _is_locked(path: pathlib.Path) -> bool:
  """Returns whether another process holds the lock of a file, such as a run that a person started."""
  if not path.exists():
    return False
  with open(path, 'r+') as file:  # NFS locks only files that are open for writing
    return not _lock(file)
