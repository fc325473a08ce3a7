"""The decisions of a search: which runs continue at each rung, which run is the best, and the table of the runs.

Successive halving trains all runs for a part of their length (a rung, such as '25 %'), then only the best runs to the
next rung, and so on. Other searches have one rung, the end. The coordinator of a study (`job.py`) calls `check_same` at
the start, `continuing` after each rung, and `with_table` and `write_best` at the end. A decision is written once, into
a file such as `search/16_points_25%.json`, which all processes of the study read, also after a restart.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.config import engine, schema
from vit_jax.config.schema import checks
from vit_jax.core import documents, failures, files
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.record import reader, run_directory
from vit_jax.study.runs import Task

END, PART = '100 %', 'part %'
FOLDER, RECORD, BEST = 'search', 'search.json', 'best.json'
_MAX_PANELS = 4  # of the figure, one for each setting


class Rung(NamedTuple):
  """The part of the length after which runs are compared, such as '25 %' ('' = the end), and the number of runs."""
  until: str
  num_runs: int

  @property
  def label(self) -> str:
    return self.until or END


def rungs(method: schema.SearchMethod) -> list[Rung]:
  """Returns the rungs of a search in order; the last rung is the end."""
  if isinstance(method, schema.Sobol):
    return [Rung('', method.points)]
  nums_runs = [method.points]
  while len(nums_runs) < method.rungs or (not method.rungs and nums_runs[-1] >= method.factor):
    nums_runs.append(max(1, nums_runs[-1] // method.factor))
  percents = [100 / method.factor**power for power in reversed(range(len(nums_runs)))]
  return [Rung('' if percent == 100 else f'{percent:.6g} %', num_runs)
          for percent, num_runs in zip(percents, nums_runs, strict=True)]


def score(search: schema.Search, result: schema.Result) -> float | None:
  """Returns the metric of the search, negated if lower values are better; None if the value is not finite.

  Raises UserError if the run has no such metric.
  """
  value = result.metrics.get(search.metric) if search.metric else result.headline
  if value is None:
    raise UserError(f'search.metric: expected one of {", ".join(result.metrics) or "the metrics of evals"}, got '
                    f'{search.metric!r}, which {result.workdir} does not have. Set one of these.')
  return (-value if reader.is_lower_better(search.metric) else value) if math.isfinite(value) else None


def ranked(search: schema.Search, tasks: Sequence[Task]) -> list[Task]:
  """Returns the done tasks with a finite score, the best first; tasks of equal score stay in order."""
  scores = {task.name: score(search, task.result()) for task in tasks if task.is_done}
  scored = [task for task in tasks if scores.get(task.name) is not None]
  return sorted(scored, key=lambda task: -(scores[task.name] or 0.))


def check_same(workdir: pathlib.Path, search: schema.Search) -> None:
  """Writes the settings of a new search; raises UserError if an earlier start wrote others. Points may differ."""
  current = {'seed': search.seed, 'metric': search.metric, 'rungs': [rung.label for rung in rungs(search.method)],
             'ranges': {setting: repr(values) for setting, values in search.ranges.items()}}
  path = workdir / RECORD
  if not path.is_file():
    _write_once(path, current)
  saved = documents.read(path, advice='Use another --workdir.').object()
  changed = [f'  {name}: {documents.shown(str(saved.get(name)))} -> {value}' for name, value in current.items()
             if saved.get(name) != value]
  if changed:
    raise UserError('\n'.join([f'--workdir: expected a directory of the same search, got {workdir} with another:',
                               *changed, 'Use the settings of that search (more points are possible; state the rungs '
                               'with them: --search=halving:POINTS,rungs=R), or another --workdir.']))


def continuing(workdir: pathlib.Path, search: schema.Search, rung_index: int, tasks: Sequence[Task]) -> list[str]:
  """Returns the names of the runs that continue after a rung; chooses and writes the names if no process has done so.

  Args:
    workdir, search: the directory and the search of the study.
    rung_index: the index of the rung, from 0.
    tasks: the tasks of all runs at this rung; each run has results for this rung or has failed.

  Raises TemporaryError if a run failed for a reason that may pass, and UserError if no run has results.
  """
  rung, next_rung = rungs(search.method)[rung_index:rung_index + 2]
  path = workdir / FOLDER / f'{search.method.points}_points_{rung.label.replace(" ", "")}.json'
  if not path.is_file():
    failed = [task.name for task in tasks if not task.is_done and failures.worst([task.failure]) == failures.TRY_AGAIN]
    if failed:
      raise TemporaryError(f'{", ".join(failed)}: expected results at {rung.label}, got none, for a reason that may '
                           'pass. Run the same command again.')
    best = ranked(search, tasks)[:next_rung.num_runs]
    if not best:
      raise UserError(f'results: expected at least one run with a finite {search.metric or "headline"} at '
                      f'{rung.label}, got none. See the outputs of the runs.')
    _write_once(path, {'kept': [task.name for task in best], 'metric': search.metric, 'results': {
        task.name: score(search, task.result()) for task in tasks if task.is_done}})
  return list(documents.read(path).field('kept').texts())


def _write_once(path: pathlib.Path, content: Mapping[str, object]) -> None:
  """Writes a JSON file, unless another process has written it before."""
  with contextlib.suppress(FileExistsError), files.replacing(path, is_new=True) as part:
    part.write_text(json.dumps(documents.finite(content), indent=2) + '\n')


def _tasks_by_run(search: schema.Search, tasks: Sequence[Task]) -> dict[str, list[Task]]:
  """Returns the tasks at all rungs with results, the last rung last, by run; the best run of the last rung first."""
  untils = {rung.until for rung in rungs(search.method)}
  by_run = {task.name: [reached for reached in task.with_results() if reached.until in untils] for task in tasks}
  names: list[str] = []
  for rung in reversed(rungs(search.method)):
    ended = [reached[-1] for reached in by_run.values() if reached and reached[-1].until == rung.until]
    names += [task.name for task in ranked(search, ended)]
    names += [task.name for task in ended if task.name not in names]  # runs without a finite score
  return {name: by_run[name] for name in names}


def write_best(workdir: pathlib.Path, search: schema.Search, tasks: Sequence[Task]) -> str:
  """Writes the config of the best run as `best.json`, and returns a sentence on the run; '' if no run has results."""
  by_run = _tasks_by_run(search, tasks)
  if not by_run:
    return ''
  best = next(iter(by_run.values()))[-1]  # the best run at the highest rung
  result = best.result()
  value = abs(score(search, result) or 0.)
  run_directory.write_text(workdir / BEST, engine.to_json(best.config))
  flags = ' '.join(f'--config.{setting}={_setting_value(best.config, setting)}' for setting in search.ranges)
  return (f'Best: {best.name}, {search.metric or "headline"} {value:.4g} after {result.step:,} steps '
          f'({best.until or END}): {flags}\nIts config: {workdir / BEST}')


def with_table(study: schema.Study, tasks: Sequence[Task]) -> schema.Study:
  """Returns a study with a table of the runs of the search, the best first, and figures, if it has no table yet."""
  search = study.search
  if search is None or study.table:
    return study
  metric, labels = search.metric or 'headline', [rung.label for rung in rungs(search.method)][:-1]
  rows: list[schema.Row] = []
  curves: list[schema.Row] = []
  for name, reached in _tasks_by_run(search, tasks).items():
    results = [task.result() for task in reached]
    exact_values = [result.metrics.get(metric, result.headline) for result in results]
    values = [value if value is None else float(f'{value:.5g}') for value in exact_values]
    value_by_until = {task.until: value for task, value in zip(reached, values, strict=True)}
    last_result, last_task = results[-1], reached[-1]
    rows.append({'run': name, metric: values[-1], PART: last_task.percent,
                 **{setting: _setting_value(last_task.config, setting) for setting in search.ranges},
                 **{f'at {label}': value_by_until.get(label) for label in labels},
                 'step': last_result.step, 'parameters': last_result.num_params, 'exaFLOPs': last_result.exaflops})
    curves += [{'run': name, PART: task.percent, metric: value} for task, value in zip(reached, values, strict=True)]
  panels = [schema.Figure(setting, metric, series=PART if labels else '', log_x=isinstance(interval, schema.LogUniform))
            for setting, interval in search.ranges.items()][:_MAX_PANELS]
  if labels:
    panels.insert(0, schema.Figure(PART, metric, series='run', log_x=True))
  return dataclasses.replace(study, table=lambda results: rows, figures=tuple(panels), curves=lambda results: curves)


def _setting_value(config: schema.Config, setting: str) -> str | float:
  """Returns the value of a setting by its dotted name; for a part of the config, such as `model`, a short text."""
  value: object = config
  for name in setting.split('.'):
    value = value[name] if isinstance(value, dict) else getattr(value, name)
  return value if isinstance(value, int | float | str) else checks.shown(value)
