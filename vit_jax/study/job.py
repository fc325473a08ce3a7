"""`--job=study`: several named runs of the train job, in order or in parallel, and one table of them.

Each run is a separate process in WORKDIR/runs/NAME: a crash of one does not affect the others, and its memory and
compiled programs are freed with it. When the study is started again, finished runs are not repeated, interrupted ones
are resumed and failed ones are tried again. Several hosts that share WORKDIR share the runs: by locks if they start the
same command, or by their index among the tasks of a cluster (`--share`).
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
from vit_jax.jobs import check as places
from vit_jax.parallel import hosts
from vit_jax.recipes import sizes
from vit_jax.record.run_directory import default_name
from vit_jax.study import estimate, halving, runs, table

POLL_S = .1
ALL = (0, 1)
"""The share of a process that works alone: (index, number of tasks)."""
_NAME = re.compile(r'[\w.=+-]+')
Configs = dict[str, schema.Config]


class Stage(NamedTuple):
  """Runs that start together, as a function of the results before them.

  until: the part of the run after which they pause; '' = the end.    continues: they are runs of the stage before.
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
    processes: runs at the same time.
    dry_run: only print.
    topology: of a dry run, hardware for which to estimate hours, such as `v3:4x4`; '' = this machine.
    share: the runs that this process takes; the others are awaited where later ones depend on them.
    search: in place of the method of the study's search; None = that one.
    changes: overrides of the config.
    environ: environment of the runs; None = that of this process.

  Returns:
    Exit status: 0 done, `failures.TRY_AGAIN` when stopped; with failed runs the worst of theirs, see `failures.worst`.
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
  if place := hosts.find_place(os.environ):
    raise UserError(f'VIT_JAX_DISTRIBUTED: expected off, as a study starts processes for its runs itself, got {place}. '
                    'Set VIT_JAX_DISTRIBUTED=off, and start one process per host.')
  return Coordinator(config, workdir, processes, dict(os.environ if environ is None else environ), share).run()


def check_names(configs: Configs) -> None:
  """Raises UserError unless there are runs, and the names of all are valid names of directories."""
  odd = [name for name in configs if not _NAME.fullmatch(name) or name.startswith('.')]
  if odd or not configs:
    raise UserError('--config: expected a study whose runs have names of letters, digits and . _ - = +, got '
                    f'{", ".join(map(repr, odd)) or "no runs"}. Rename the runs.')


def check_configs(configs: Configs) -> None:
  """Raises UserError with the problems of all configs, each problem once."""
  _refuse({name: check.problems(config) for name, config in configs.items()}, 'a study of valid configs')


def check_places(configs: Configs) -> None:
  """Raises UserError with what lacks, each once, if the data of no config are on this machine.

  Where some are, the others fail one by one, so that a study of many datasets makes what it can.
  """
  problems: dict[str, list[str]] = {}  # by what the places are, which most runs of a study share
  keys = {name: repr((list(places.sources(config)), config.data)) for name, config in configs.items()}
  for name, config in configs.items():
    if keys[name] not in problems:
      problems[keys[name]] = places.problems(config, None, places.Location())
  if all(problems.values()):
    _refuse({name: problems[key] for name, key in keys.items()}, 'a study whose data are on this machine')


def _refuse(lines_of: Mapping[str, Sequence[str]], expected: str) -> None:
  """Raises UserError with the problems of runs by name, if there are any."""
  problems: dict[str, list[str]] = {}
  for name, lines in lines_of.items():
    for problem in lines:
      problems.setdefault(f'  {problem}', []).append(name)
  if problems:
    raise UserError('\n'.join([f'--config: expected {expected}, got problems:', *(
        f'{line} (of {", ".join(names) if len(names) < len(lines_of) else "all runs"})'
        for line, names in problems.items())]))


_STOPPING = 'Ctrl-C: stopping as soon as the runs have saved. Press Ctrl-C again to end them at once, without saving.'


class Coordinator:
  """Starts the runs that are not finished, and writes the table.

  For each stage, it plans the tasks from the results so far (`_plan`), and starts and awaits their processes
  (`_execute`). After the last stage, or when it is stopped, it writes the table and the best config (`_write`).
  """

  def __init__(self, study: schema.Study, workdir: pathlib.Path, processes: int, environ: dict[str, str],
               share: tuple[int, int] = ALL) -> None:
    self._study, self._workdir, self._processes, self._environ, self._share = study, workdir, processes, environ, share
    self._tasks: dict[str, runs.Task] = {}
    self._failed: dict[str, str] = {}
    self._statuses: list[int] = []
    self._active: list[runs.Process] = []
    self._stopped_by = ''
    self._answer = signals.Answer(_STOPPING)
    self._is_last = False  # no later stage depends on the results of this one

  def run(self) -> int:
    """Runs all stages and writes the table; returns the exit status."""
    before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
    if self._study.search:
      halving.check_same(self._workdir, self._study.search)
    try:
      with signals.answering(_STOPPING, is_last=False) as self._answer:
        stages = self._stages()
        for number, stage in enumerate(stages):
          if not self._stopped_by:
            self._is_last = number == len(stages) - 1
            self._execute(self._plan(stage, number))
    except TemporaryError as error:
      self._say(str(error))
      self._statuses.append(failures.TRY_AGAIN)
    finally:
      for process in self._active:
        process.stop(signal.SIGTERM)
      for name, handler in before.items():
        signal.signal(name, handler)
    self._write()
    if self._stopped_by:
      print(f'Stopped by {self._stopped_by} after saving. Run the same command again to resume.', flush=True)
      return failures.TRY_AGAIN
    return failures.worst(self._statuses)

  def _stages(self) -> list[Stage]:
    search, first = self._study.search, self._study.runs
    rungs = halving.rungs(search.method) if search else [halving.Rung('', len(first))]
    stages = [Stage(lambda results: first, rungs[0].until)]
    if search:
      stages += [Stage(functools.partial(self._kept, search, number), rung.until, continues=True)
                 for number, rung in enumerate(rungs[1:])]
    return [*stages, *map(Stage, self._study.then)]

  def _kept(self, search: schema.Search, number: int, results: schema.Results) -> Configs:
    """Returns the runs that continue after a rung, which are those of the stage before."""
    del results
    at = halving.rungs(search.method)[number].until
    names = halving.kept(self._workdir, search, number, [task for task in self._tasks.values() if task.until == at])
    return {name: config for name, config in self._study.runs.items() if name in names}

  def _plan(self, stage: Stage, number: int) -> list[runs.Task]:
    """Returns the tasks of a stage; none, with a message, if the results so far do not determine them."""
    try:
      configs = stage.select(self.results())
      if number:
        check_names(configs)
        check_configs(configs)
      if again := [name for name in configs if name in self._tasks and not stage.continues]:
        raise UserError(f'runs: expected new names, got {", ".join(again)} again. Rename the runs of this stage.')
    except UserError as error:
      if not number:
        raise
      self._failed[f'stage {number + 1}'] = str(error)
      self._statuses.append(failures.USER_ERROR)
      self._say(f'Stage {number + 1} cannot start: {error}')
      return []
    tasks = [runs.Task(name, config, self._workdir / 'runs' / name, stage.until) for name, config in configs.items()]
    for task in tasks:
      task.check()
    check_places({task.name: task.config for task in tasks if not task.is_done})
    self._tasks |= {task.name: task for task in tasks}
    num_done = sum(task.is_done for task in tasks)
    chosen, part = ', chosen by the results,' if number else '', f' to {stage.until}' if stage.until else ''
    number_of = f'{len(tasks)} run' + 's' * (len(tasks) != 1)
    self._say(f'{self._study.name}: {number_of}{part}{chosen} in {self._workdir}, {num_done} of them '
              f'{"done" if part else "finished"}; {self._processes} at a time.')
    return tasks

  def _execute(self, tasks: list[runs.Task]) -> None:
    """Returns when each task has finished or failed, or this process received a signal to stop.

    Runs of the shares of other processes are awaited only if later runs depend on them.
    """
    index, count = self._share
    own = tasks[index::count]
    waiting = [task for task in own if not (self._study.search and task.has_diverged)]
    others = [task for task in tasks if task not in own] if not self._is_last else []
    while self._active or (waiting or others) and not self._stopped_by:
      others = [task for task in others if not task.is_over]
      for task in [] if self._stopped_by else list(waiting):
        if task.is_done:  # by an earlier start, or by another process
          waiting.remove(task)
        elif len(self._active) == self._processes:
          break
        elif process := runs.begin(task, self._environ):
          waiting.remove(task)
          self._active.append(process)
          self._say(f'{self._place(task)}: {"resumed" if task.is_started else "started"}; its output is in '
                    f'{task.folder / runs.OUTPUT}')
      for process in list(self._active):
        if process.status is not None:
          self._active.remove(process)
          self._end(process.task, process.status)
      time.sleep(POLL_S)

  def _end(self, task: runs.Task, status: int) -> None:
    """Prints how a run ended."""
    if status or not task.is_done:
      (task.folder / runs.FAILED).write_text(f'{status or failures.UNFORESEEN}\n')
      if not (self._study.search and task.has_diverged):
        self._statuses.append(status or failures.UNFORESEEN)
    if status == 0 and task.is_done:
      result = task.result()
      headline = '' if result.headline is None else f'{result.headline:.2%}, '
      part = f' paused at {task.until},' if task.until else ''
      self._say(f'{self._place(task)}:{part} {headline}{result.seconds:.0f} s')
    elif status == failures.TRY_AGAIN and self._stopped_by:
      self._say(f'{self._place(task)}: stopped after saving')
    else:
      self._failed[task.name] = reason = runs.explain(task.folder)
      self._say(f'{self._place(task)}: failed with exit status {status}; the other runs continue.\n{reason}')

  def _place(self, task: runs.Task) -> str:
    return f'[{list(self._tasks).index(task.name) + 1}/{len(self._tasks)}] {task.name}'

  def results(self) -> schema.Results:
    """Returns the results of all finished runs."""
    return {name: task.result() for name, task in self._tasks.items() if task.is_finished}

  def _write(self) -> None:
    tasks, search = self._tasks.values(), self._study.search
    open_ = {name: 'not finished' for name, task in self._tasks.items() if not task.is_done}
    study = halving.with_table(self._study, [task for task in tasks if task.name in self._study.runs])
    page = table.write(self._workdir, study, self.results(), open_ | self._failed)
    num_paused = sum(task.is_done and not task.is_finished for task in tasks)
    if search and (best := halving.write_best(self._workdir, search, [*tasks])):
      self._say(best)
    self._say(f'{len(self._tasks) - len(open_) - num_paused} of {len(self._tasks)} runs are finished'
              + (f', {num_paused} paused' if num_paused else '')
              + (f', {len(self._failed)} failed: {", ".join(self._failed)}' if self._failed else '')
              + f'. Table: {page}')

  def _note(self, number: int, frame: FrameType | None) -> None:
    """Passes a signal to stop on to the runs, which save; a second Ctrl-C kills them."""
    del frame
    if number == signal.SIGINT:
      self._answer.say()
    if self._stopped_by and number == signal.SIGINT:
      for process in self._active:
        process.stop(signal.SIGKILL)
      raise KeyboardInterrupt
    self._stopped_by = signal.Signals(number).name
    for process in self._active:
      process.stop(signal.SIGTERM)

  def _say(self, text: str) -> None:
    print(text, flush=True)
