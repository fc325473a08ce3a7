"""`--job=study`: several named runs of the train job, one after the other or side by side, and one table of them.

Each run is a process of its own in WORKDIR/runs/NAME: a crash of one leaves the others going, and memory and
compiled programs end with it. Finished runs are not repeated, interrupted ones go on, failed ones are tried again
when the study is started again. Started on several hosts that share WORKDIR, each takes the runs that are free.
"""
from __future__ import annotations

import os
import pathlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.parallel import hosts
from vit_jax.study import estimate, runs, table
from vit_jax.train.stopping import RESUMABLE

POLL_S = .1
_NAME = re.compile(r'[\w.=+-]+')
Configs = dict[str, schema.Config]
Stage = Callable[[schema.Results], Configs]


def run(study: schema.Study, workdir: pathlib.Path | None, *, processes: str, dry_run: bool, topology: str,
        environ: Mapping[str, str] | None = None) -> int:
  """Runs a study, or with `dry_run` says what it is and what it would take.

  Args:
    study: the runs.
    workdir: holds the runs, `table.csv`, `table.html` and `figure.png`; may be None for a dry run.
    processes: how many runs at once, as text; '' = one.
    dry_run: print only.
    topology: of a dry run, hardware to estimate the hours for, such as `v3:4x4`; '' = this machine.
    environ: environment of the runs; None = that of this process.

  Returns:
    Exit status: 0 done, 2 with failed runs, `RESUMABLE` when asked to stop.
  """
  check_names(study.runs)
  check_configs(study.runs)
  if not dry_run and workdir is None:
    raise UserError('--job=study needs --workdir: directory of the study, made if missing, continued if it holds one')
  if topology and not dry_run:
    raise UserError(f'--topology={topology} is for --dry_run, which estimates hours')
  if dry_run:
    print(estimate.describe(study, workdir, topology=topology), flush=True)
    return 0
  if place := hosts.find_place(os.environ):
    raise UserError(f'This is {place} of one run, but a study starts its runs itself, one host each; want '
                    'VIT_JAX_DISTRIBUTED=off, and one such process a host')
  assert workdir is not None
  return Coordinator(study, workdir, count(processes), dict(os.environ if environ is None else environ)).run()


def count(processes: str) -> int:
  """The number in --processes.

  Raises:
    UserError: it is none.
  """
  if processes and (not processes.isdecimal() or not int(processes)):
    raise UserError(f'--processes={processes} is no number of processes; want 1 or more')
  return int(processes or 1)


def check_names(configs: Configs) -> None:
  """Raises UserError unless all runs have names that directories can have."""
  odd = [name for name in configs if not _NAME.fullmatch(name) or name.startswith('.')]
  if odd or not configs:
    raise UserError(f'The study has {f"runs named {odd}" if odd else "no runs"}; want names of letters, digits and '
                    '. _ - = +, which directories can have')


def check_configs(configs: Configs) -> None:
  """Raises UserError with the problems of all configs, those that several have once."""
  faults: dict[str, list[str]] = {}
  for name, config in configs.items():
    for problem in check.problems(config):
      faults.setdefault(f'  {problem}', []).append(name)
  if faults:
    raise UserError('\n'.join(['The configs of the study have problems:', *(
        f'{line} (of {", ".join(names) if len(names) < len(configs) else "all runs"})'
        for line, names in faults.items())]))


class Coordinator:
  """Runs what is not done yet, and writes the table."""

  def __init__(self, study: schema.Study, workdir: pathlib.Path, processes: int, environ: dict[str, str]) -> None:
    self._study, self._workdir, self._processes, self._environ = study, workdir, processes, environ
    self._tasks: dict[str, runs.Task] = {}
    self._failed: dict[str, str] = {}
    self._active: list[runs.Process] = []
    self._stopped_by = ''

  def run(self) -> int:
    """All stages, then the table; exit status."""
    before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
      for number, stage in enumerate(self._stages()):
        if self._stopped_by:
          break
        self._execute(self._plan(stage, number))
    finally:
      for one in self._active:
        one.stop(signal.SIGTERM)
      for name, handler in before.items():
        signal.signal(name, handler)
    self._write()
    if self._stopped_by:
      print(f'Stopped by {self._stopped_by}; saved. The same command resumes from there.', flush=True)
      return RESUMABLE
    return 2 if self._failed else 0

  def _stages(self) -> Iterator[Stage]:
    yield lambda results: self._study.runs
    yield from self._study.then

  def _plan(self, stage: Stage, number: int) -> list[runs.Task]:
    """The tasks of a stage; none, with a message, if it cannot tell from the results there are."""
    try:
      configs = stage(self.results())
      if number:
        check_names(configs)
        check_configs(configs)
      if again := [name for name in configs if name in self._tasks]:
        raise UserError(f'runs {", ".join(again)} are there twice; want another name')
    except UserError as error:
      if not number:
        raise
      self._failed[f'stage {number + 1}'] = str(error)
      self._say(f'Stage {number + 1} cannot begin: {error}')
      return []
    tasks = [runs.Task(name, config, self._workdir / 'runs' / name) for name, config in configs.items()]
    for task in tasks:
      task.check()
    self._tasks |= {task.name: task for task in tasks}
    num_done = sum(task.is_done for task in tasks)
    self._say(f'{self._study.name}: {len(tasks)} runs{", those chosen by the results," if number else ""} in '
              f'{self._workdir}, {num_done} of them done; {self._processes} at a time.')
    return tasks

  def _execute(self, tasks: list[runs.Task]) -> None:
    """Returns when each task is done, has failed, or this process was asked to stop."""
    waiting = list(tasks)
    while self._active or (waiting and not self._stopped_by):
      for task in [] if self._stopped_by else list(waiting):
        if task.is_done:  # before, or by another process
          waiting.remove(task)
        elif len(self._active) < self._processes and (process := runs.begin(task, self._environ)):
          waiting.remove(task)
          self._active.append(process)
          self._say(f'{self._place(task)}: {"continued" if task.is_begun else "started"}; its output is in '
                    f'{task.folder / runs.OUTPUT}')
      for process in list(self._active):
        if process.status is not None:
          self._active.remove(process)
          self._end(process.task, process.status)
      time.sleep(POLL_S)

  def _end(self, task: runs.Task, status: int) -> None:
    """Says how a run ended."""
    if status == 0 and task.is_done:
      result = task.result()
      shown = '' if result.headline is None else f'{result.headline:.2%}, '
      self._say(f'{self._place(task)}: {shown}{result.seconds:.0f} s')
    elif status == RESUMABLE:
      if not self._stopped_by:
        self._failed[task.name] = 'it was stopped; start the study again'
      self._say(f'{self._place(task)}: stopped, and saved')
    else:
      self._failed[task.name] = runs.explain(task.folder)
      self._say(f'{self._place(task)}: failed with status {status}; the other runs go on.\n{self._failed[task.name]}')

  def _place(self, task: runs.Task) -> str:
    return f'[{list(self._tasks).index(task.name) + 1}/{len(self._tasks)}] {task.name}'

  def results(self) -> schema.Results:
    """Those of all runs that are done."""
    return {name: task.result() for name, task in self._tasks.items() if task.is_done}

  def _write(self) -> None:
    open_ = {name: 'not done yet' for name, task in self._tasks.items() if not task.is_done}
    page = table.write(self._workdir, self._study, self.results(), open_ | self._failed)
    self._say(f'{len(self._tasks) - len(open_)} of {len(self._tasks)} runs are done'
              + (f', {len(self._failed)} failed: {", ".join(self._failed)}' if self._failed else '')
              + f'. Table: {page}')

  def _note(self, number: int, frame: FrameType | None) -> None:
    """Passes a request to stop on to the runs, which save; again, and they end at once."""
    del frame
    if self._stopped_by and number == signal.SIGINT:
      for one in self._active:
        one.stop(signal.SIGKILL)
      raise KeyboardInterrupt
    self._stopped_by = signal.Signals(number).name
    for one in self._active:
      one.stop(signal.SIGTERM)

  def _say(self, text: str) -> None:
    print(text, flush=True)
