"""`--job=study`: several named runs of the train job, in order or in parallel, and one table of their results.

`run` checks the study, and a `Coordinator` starts the runs. Each run is a separate process in WORKDIR/runs/NAME
(`runs.py`), so that a crash affects no other run. If the study is started again, finished runs are not repeated,
interrupted runs are resumed, and failed runs are tried again. Several hosts that share WORKDIR also share the runs: by
locks if they start the same command, or by the index of each host (`--share`).
"""
from __future__ import annotations

import functools
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from vit_jax.config import check, schema, searches
from vit_jax.core import failures, signals
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.jobs import check as check_job
from vit_jax.parallel import hosts
from vit_jax.recipes import sizes
from vit_jax.record.run_directory import default_name
from vit_jax.study import estimate, halving, runs, table

POLL_S = .1  # between two checks of the processes
ALL = (0, 1)
"""The share of a single process: the index of the process, and the number of processes that share the runs."""
_NAME = re.compile(r'[\w.=+-]+')
Configs = dict[str, schema.Config]  # by the name of the run


class Stage(NamedTuple):
  """Runs that start together.

  select: returns the configs of the runs, given the results of earlier stages.
  until, continues: where the runs pause, such as '25 %' ('' = the end), and whether they are runs of the last stage.
  """
  select: Callable[[schema.Results], Configs]
  until: str = ''
  continues: bool = False


def run(config: schema.Study, workdir: pathlib.Path | None, *, processes: int = 1, dry_run: bool = False,
        topology: str = '', share: tuple[int, int] = ALL, search: schema.SearchMethod | None = None,
        changes: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> int:
  """Runs a study, or with `dry_run` prints its runs and their cost.

  Args:
    config: the study.
    workdir: directory for the runs, `table.csv`, `table.html` and `figure.png`; None = `runs/NAME`.
    processes: number of runs at the same time.
    dry_run: only print.
    topology: for a dry run, the hardware for which hours are estimated, such as `v3:4x4`; '' = this machine.
    share: the runs that this process starts; if later runs depend on other shares, the process waits for them.
    search: the method of the search; None = the method in the study.
    changes: overrides of the config, which apply to each run of a search.
    environ: environment of the runs; None = that of this process.

  Returns:
    The exit status: 0, or `failures.TRY_AGAIN` after a signal; with failed runs `failures.worst` of their statuses.
  """
  if search is not None:
    config = searches.expanded(config, changes, method=search, models=sizes.model)
  check_names(config.runs)
  check_configs(config.runs)
  workdir = workdir or pathlib.Path('runs', default_name(config.name)).absolute()
  if topology and not dry_run:
    raise UserError(f'--topology: expected --dry_run as well, got --topology={topology} alone. It is the hardware for '
                    'which a dry run estimates hours.')
  if dry_run:
    print(estimate.describe(config, workdir, topology=topology), flush=True)
    return 0
  if rank := hosts.find_rank(os.environ):
    raise UserError(f'VIT_JAX_DISTRIBUTED: expected off, as a study starts processes for its runs itself, got {rank}. '
                    'Set VIT_JAX_DISTRIBUTED=off, and start one process per host.')
  return Coordinator(config, workdir, processes, dict(os.environ if environ is None else environ), share).run()


def check_names(configs: Configs) -> None:
  """Raises UserError unless there are runs, and all names of runs can be names of directories."""
  invalid = [name for name in configs if not _NAME.fullmatch(name) or name.startswith('.')]
  if invalid or not configs:
    raise UserError('--config: expected a study whose runs have names of letters, digits and . _ - = +, got '
                    f'{", ".join(map(repr, invalid)) or "no runs"}. Rename the runs.')


def check_configs(configs: Configs) -> None:
  """Raises UserError with the problems of all configs, each problem once."""
  _raise_problems({name: check.problems(config) for name, config in configs.items()}, 'a study of valid configs')


def check_places(configs: Configs) -> None:
  """Raises UserError if the data of every config are missing; the message lists each missing file or folder once.

  If the data of some configs exist, nothing is raised, so that a study of many datasets can train on those that exist.
  """
  problems_by_data: dict[str, list[str]] = {}  # most runs of a study have the same data settings
  data_by_name = {name: repr((list(check_job.sources(config)), config.data)) for name, config in configs.items()}
  for name, config in configs.items():
    if data_by_name[name] not in problems_by_data:
      problems_by_data[data_by_name[name]] = check_job.problems(config, None, check_job.Location())
  if all(problems_by_data.values()):
    problems_by_run = {name: problems_by_data[data] for name, data in data_by_name.items()}
    _raise_problems(problems_by_run, 'a study whose data are on this machine')


def _raise_problems(problems_by_run: Mapping[str, Sequence[str]], expected: str) -> None:
  """Raises UserError if a run has problems; the message lists each problem once, with the names of the runs."""
  runs_by_problem: dict[str, list[str]] = {}
  for name, problems in problems_by_run.items():
    for problem in problems:
      runs_by_problem.setdefault(problem, []).append(name)
  lines = [f'  {problem} (of {", ".join(names) if len(names) < len(problems_by_run) else "all runs"})'
           for problem, names in runs_by_problem.items()]
  if lines:
    raise UserError('\n'.join([f'--config: expected {expected}, got problems:', *lines]))


_STOPPING = 'Ctrl-C: stopping as soon as the runs have saved. Press Ctrl-C again to end them at once, without saving.'


class Coordinator:
  """Starts the runs that are not finished, and writes the table. All its methods run in the main thread.

  For each stage, `run` plans the tasks from the results so far (`_plan`), and starts and awaits the processes of the
  tasks (`_execute`). After the last stage or a signal, `run` writes the table and the best config (`_write`).
  """

  def __init__(self, study: schema.Study, workdir: pathlib.Path, processes: int, environ: dict[str, str],
               share: tuple[int, int] = ALL) -> None:
    self._study, self._workdir, self._max_active, self._environ, self._share = study, workdir, processes, environ, share
    self._tasks: dict[str, runs.Task] = {}  # of all stages so far, by the name of the run
    self._reason_by_failed: dict[str, str] = {}  # by the name of a failed run, or such as 'stage 2'
    self._statuses: list[int] = []  # exit statuses of failed runs
    self._active: list[runs.Process] = []  # at most `_max_active`
    self._stopped_by = ''  # the name of a signal
    self._answer = signals.Answer(_STOPPING)
    self._is_last_stage = False

  def run(self) -> int:
    """Runs all stages and writes the table; returns the exit status."""
    handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    if self._study.search:
      halving.check_same(self._workdir, self._study.search)
    try:
      with signals.answering(_STOPPING, is_last=False) as self._answer:
        stages = self._stages()
        for number, stage in enumerate(stages):
          if not self._stopped_by:
            self._is_last_stage = number == len(stages) - 1
            self._execute(self._plan(stage, number))
    except TemporaryError as error:
      self._print(str(error))
      self._statuses.append(failures.TRY_AGAIN)
    finally:
      for process in self._active:
        process.stop(signal.SIGTERM)
      for signal_number, handler in handlers.items():
        signal.signal(signal_number, handler)
    self._write()
    if self._stopped_by:
      print(f'Stopped by {self._stopped_by} after saving. Run the same command again to resume.', flush=True)
      return failures.TRY_AGAIN
    return failures.worst(self._statuses)

  def _stages(self) -> list[Stage]:
    """Returns the stages: the runs of the study, the runs that continue after each rung of a search, `study.then`."""
    search = self._study.search
    if search is None:
      return [Stage(lambda results: self._study.runs), *map(Stage, self._study.then)]
    rungs = halving.rungs(search.method)
    later_rungs = [Stage(functools.partial(self._continuing, search, rung_index), rung.until, continues=True)
                   for rung_index, rung in enumerate(rungs[1:])]
    return [Stage(lambda results: self._study.runs, rungs[0].until), *later_rungs, *map(Stage, self._study.then)]

  def _continuing(self, search: schema.Search, rung_index: int, results: schema.Results) -> Configs:
    """Returns the configs of the runs that continue after a rung, whose results are read from the disk."""
    del results
    until = halving.rungs(search.method)[rung_index].until
    tasks_at_rung = [task for task in self._tasks.values() if task.until == until]
    names = halving.continuing(self._workdir, search, rung_index, tasks_at_rung)
    return {name: config for name, config in self._study.runs.items() if name in names}

  def _plan(self, stage: Stage, number: int) -> list[runs.Task]:
    """Returns the tasks of a stage and prints a line; after an error in a later stage, records it and returns none."""
    try:
      configs = stage.select(self.results())
      if number:
        check_names(configs)
        check_configs(configs)
      if repeated := [name for name in configs if name in self._tasks and not stage.continues]:
        raise UserError(f'runs: expected new names, got {", ".join(repeated)} again. Rename the runs of this stage.')
    except UserError as error:
      if not number:
        raise
      self._reason_by_failed[f'stage {number + 1}'] = str(error)
      self._statuses.append(failures.USER_ERROR)
      self._print(f'Stage {number + 1} cannot start: {error}')
      return []
    tasks = [runs.Task(name, config, self._workdir / 'runs' / name, stage.until) for name, config in configs.items()]
    for task in tasks:
      task.check()
    check_places({task.name: task.config for task in tasks if not task.is_done})
    self._tasks |= {task.name: task for task in tasks}
    num_done = sum(task.is_done for task in tasks)
    part, chosen = f' to {stage.until}' if stage.until else '', ', chosen by the results,' if number else ''
    self._print(f'{self._study.name}: {len(tasks)} {"run" if len(tasks) == 1 else "runs"}{part}{chosen} in '
                f'{self._workdir}, {num_done} of them {"done" if part else "finished"}; {self._max_active} at a time.')
    return tasks

  def _execute(self, tasks: list[runs.Task]) -> None:
    """Runs the tasks of this process's share; returns when all tasks have ended, or after a signal to stop.

    Before later stages, also waits for the tasks of other shares. A search does not repeat runs that have diverged.
    """
    index, num_shares = self._share
    own_tasks = tasks[index::num_shares]
    to_start = [task for task in own_tasks if not (self._study.search and task.has_diverged)]
    of_other_shares = [] if self._is_last_stage else [task for task in tasks if task not in own_tasks]
    while self._active or ((to_start or of_other_shares) and not self._stopped_by):
      of_other_shares = [task for task in of_other_shares if not task.is_over]
      for task in [] if self._stopped_by else list(to_start):
        if task.is_done:  # an earlier start or another process has run the task
          to_start.remove(task)
        elif len(self._active) == self._max_active:
          break
        elif process := runs.begin(task, self._environ):  # None if another process runs the task
          to_start.remove(task)
          self._active.append(process)
          self._print(f'{self._title(task)}: {"resumed" if task.is_started else "started"}; its output is in '
                      f'{task.folder / runs.OUTPUT}')
      for process in list(self._active):
        status = process.poll()
        if status is not None:
          self._active.remove(process)
          self._record_end(process.task, status)
      time.sleep(POLL_S)

  def _record_end(self, task: runs.Task, status: int) -> None:
    """Prints how a run ended, and records a failure for the summary and for later starts of the study."""
    if status or not task.is_done:
      (task.folder / runs.FAILED).write_text(f'{status or failures.UNFORESEEN}\n')
      if not (self._study.search and task.has_diverged):
        self._statuses.append(status or failures.UNFORESEEN)
    if status == 0 and task.is_done:
      result = task.result()
      headline = '' if result.headline is None else f'{result.headline:.2%}, '
      part = f' paused at {task.until},' if task.until else ''
      self._print(f'{self._title(task)}:{part} {headline}{result.seconds:.0f} s')
    elif status == failures.TRY_AGAIN and self._stopped_by:
      self._print(f'{self._title(task)}: stopped after saving')
    else:
      self._reason_by_failed[task.name] = reason = runs.explain(task.folder)
      self._print(f'{self._title(task)}: failed with exit status {status}; the other runs continue.\n{reason}')

  def _title(self, task: runs.Task) -> str:
    """Returns the number and the name of a run, such as '[2/9] lr_0.001'."""
    return f'[{list(self._tasks).index(task.name) + 1}/{len(self._tasks)}] {task.name}'

  def results(self) -> schema.Results:
    """Returns the results of all finished runs."""
    return {name: task.result() for name, task in self._tasks.items() if task.is_finished}

  def _write(self) -> None:
    """Writes the table and the best config, and prints a summary."""
    tasks, search = self._tasks.values(), self._study.search
    not_done = {name: 'not finished' for name, task in self._tasks.items() if not task.is_done}
    study = halving.with_table(self._study, [task for task in tasks if task.name in self._study.runs])
    page = table.write(self._workdir, study, self.results(), not_done | self._reason_by_failed)
    num_paused = sum(task.is_done and not task.is_finished for task in tasks)
    if search and (best := halving.write_best(self._workdir, search, [*tasks])):
      self._print(best)
    failed = list(self._reason_by_failed)
    self._print(f'{len(self._tasks) - len(not_done) - num_paused} of {len(self._tasks)} runs are finished'
                + (f', {num_paused} paused' if num_paused else '')
                + (f', {len(failed)} failed: {", ".join(failed)}' if failed else '') + f'. Table: {page}')

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    """Sends SIGTERM to the runs, which then save and stop; after a second Ctrl-C, kills the runs."""
    del frame
    if number == signal.SIGINT:
      self._answer.write()
    if self._stopped_by and number == signal.SIGINT:
      for process in self._active:
        process.stop(signal.SIGKILL)
      raise KeyboardInterrupt
    self._stopped_by = signal.Signals(number).name
    for process in self._active:
      process.stop(signal.SIGTERM)

  def _print(self, text: str) -> None:
    print(text, flush=True)
