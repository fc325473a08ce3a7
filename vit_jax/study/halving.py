"""The decisions of a search: which runs continue at each rung, which run is the best, and the table of the runs.

Successive halving trains all runs for a part of their length (a rung, such as '25 %'), then only the best ones to the
next rung, and so on. Other searches have one rung, the end. The coordinator of a study (`job.py`) calls `check_same` at
its start, `continuing` after each rung, and `with_table` and `write_best` at the end. A decision is written once, into
`search/16_points_25%.json` or the like, so that all processes of the study follow the same one, also after a restart.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vit_jax.config import json_files, schema
from vit_jax.config.schema import checks
from vit_jax.core import documents, failures, files
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.record import reader, run_directory
from vit_jax.study.runs import Task

END, PART = '100 %', 'part %'
FOLDER, RECORD, BEST = 'search', 'search.json', 'best.json'
_MOST_PANELS = 4  # of the figure, one for each setting


class Rung(NamedTuple):
  """The part of their length at which runs are compared, such as '25 %' ('' = the end), and their number."""
  until: str
  runs: int

  @property
  def label(self) -> str:
    return self.until or END


def rungs(method: schema.SearchMethod) -> list[Rung]:
  """Returns the rungs of a search, the one at the end last."""
  if isinstance(method, schema.Sobol):
    return [Rung('', method.points)]
  nums_runs = [method.points]
  while len(nums_runs) < method.rungs or (not method.rungs and nums_runs[-1] >= method.factor):
    nums_runs.append(max(1, nums_runs[-1] // method.factor))
  percents = [100 / method.factor**power for power in reversed(range(len(nums_runs)))]
  return [Rung('' if percent == 100 else f'{percent:.6g} %', num_runs)
          for percent, num_runs in zip(percents, nums_runs, strict=True)]


def score(search: schema.Search, result: schema.Result) -> float | None:
  """Returns the metric that decides, with its sign changed if lower values are better; None if it is not finite.

  Raises UserError if the run has no such metric.
  """
  value = result.metrics.get(search.metric) if search.metric else result.headline
  if value is None:
    raise UserError(f'search.metric: expected one of {", ".join(result.metrics) or "the metrics of evals"}, got '
                    f'{search.metric!r}, which {result.workdir} does not have. Set one of these.')
  return (-value if reader.is_lower_better(search.metric) else value) if math.isfinite(value) else None


def ranked(search: schema.Search, tasks: Sequence[Task]) -> list[Task]:
  """Returns the tasks that are done and have a score, the best first; equal ones in the order of `tasks`."""
  scores = {task.name: score(search, task.result()) for task in tasks if task.is_done}
  scored = [task for task in tasks if scores.get(task.name) is not None]
  return sorted(scored, key=lambda task: -(scores[task.name] or 0.))


def check_same(workdir: pathlib.Path, search: schema.Search) -> None:
  """Writes the settings of a search into its directory; raises UserError if it has others. More points are allowed."""
  now = {'seed': search.seed, 'metric': search.metric, 'rungs': [rung.label for rung in rungs(search.method)],
         'ranges': {setting: repr(values) for setting, values in search.ranges.items()}}
  path = workdir / RECORD
  if not path.is_file():
    _write_once(path, now)
  before = documents.read(path, advice='Use another --workdir.').object()
  changed = [f'  {name}: {documents.shown(str(before.get(name)))} -> {value}' for name, value in now.items()
             if before.get(name) != value]
  if changed:
    raise UserError('\n'.join([f'--workdir: expected a directory of the same search, got {workdir} with another:',
                               *changed, 'Use the settings of that search (more points are possible; state the rungs '
                               'with them: --search=halving:POINTS,rungs=R), or another --workdir.']))


def continuing(workdir: pathlib.Path, search: schema.Search, number: int, tasks: Sequence[Task]) -> list[str]:
  """Returns the names of the runs that continue after a rung; decides and writes them if no process has done so.

  Args:
    workdir, search: of the study.
    number: of the rung, from 0.
    tasks: all runs of the rung; each has results there or has failed.

  Raises:
    TemporaryError: a run failed for a reason that may pass.
    UserError: no run has results.
  """
  rung, following = rungs(search.method)[number:number + 2]
  path = workdir / FOLDER / f'{search.method.points}_points_{rung.label.replace(" ", "")}.json'
  if not path.is_file():
    failed = [task.name for task in tasks if not task.is_done and failures.worst([task.failure]) == failures.TRY_AGAIN]
    if failed:
      raise TemporaryError(f'{", ".join(failed)}: expected results at {rung.label}, got none, for a reason that may '
                           'pass. Run the same command again.')
    best = ranked(search, tasks)[:following.runs]
    if not best:
      raise UserError(f'results: expected at least one run with a finite {search.metric or "headline"} at '
                      f'{rung.label}, got none. See the outputs of the runs.')
    _write_once(path, {'kept': [task.name for task in best], 'metric': search.metric, 'results': {
        task.name: score(search, task.result()) for task in tasks if task.is_done}})
  return list(documents.read(path).field('kept').texts())


def _write_once(path: pathlib.Path, content: Mapping[str, object]) -> None:
  """Writes a JSON file, unless another process has written it: the first one counts."""
  with contextlib.suppress(FileExistsError), files.replacing(path, is_new=True) as part:
    part.write_text(json.dumps(documents.finite(content), indent=2) + '\n')


def at_rungs(search: schema.Search, tasks: Sequence[Task]) -> dict[str, list[Task]]:
  """Returns by run a task for each rung with results, the highest last; the best runs of the highest rung first."""
  parts = {rung.until for rung in rungs(search.method)}
  by_run = {task.name: [at_rung for at_rung in task.with_results() if at_rung.until in parts] for task in tasks}
  names: list[str] = []
  for rung in reversed(rungs(search.method)):
    ended = [at_rung[-1] for at_rung in by_run.values() if at_rung and at_rung[-1].until == rung.until]
    names += [task.name for task in ranked(search, ended)]
    names += [task.name for task in ended if task.name not in names]
  return {name: by_run[name] for name in names}


def write_best(workdir: pathlib.Path, search: schema.Search, tasks: Sequence[Task]) -> str:
  """Writes the config of the best run at the highest rung as `best.json`, and returns a sentence on it; '' if none."""
  by_run = at_rungs(search, tasks)
  if not by_run:
    return ''
  best = [*by_run.values()][0][-1]
  result = best.result()
  value = abs(score(search, result) or 0.)
  run_directory.write_text(workdir / BEST, json_files.to_json(best.config))
  flags = ' '.join(f'--config.{setting}={_value(best.config, setting)}' for setting in search.ranges)
  return (f'Best: {best.name}, {search.metric or "headline"} {value:.4g} after {result.step:,} steps '
          f'({best.until or END}): {flags}\nIts config: {workdir / BEST}')


def with_table(study: schema.Study, tasks: Sequence[Task]) -> schema.Study:
  """Returns the study with a table of the runs of its search, the best first, and figures, unless it has a table."""
  search = study.search
  if search is None or study.table:
    return study
  metric, labels = search.metric or 'headline', [rung.label for rung in rungs(search.method)][:-1]
  rows: list[schema.Row] = []
  curves: list[schema.Row] = []
  for name, at_rung in at_rungs(search, tasks).items():
    results = [task.result() for task in at_rung]
    numbers = [result.metrics.get(metric, result.headline) for result in results]
    values = [number if number is None else float(f'{number:.5g}') for number in numbers]
    by_part = {task.until: value for task, value in zip(at_rung, values, strict=True)}
    result, end = results[-1], at_rung[-1]
    rows.append({'run': name, metric: values[-1], PART: end.percent,
                 **{setting: _value(end.config, setting) for setting in search.ranges},
                 **{f'at {label}': by_part.get(label) for label in labels},
                 'step': result.step, 'parameters': result.num_params, 'exaFLOPs': result.exaflops})
    curves += [{'run': name, PART: task.percent, metric: value} for task, value in zip(at_rung, values, strict=True)]
  panels = [schema.Figure(setting, metric, series=PART if labels else '', log_x=isinstance(kind, schema.LogUniform))
            for setting, kind in search.ranges.items()][:_MOST_PANELS]
  if labels:
    panels.insert(0, schema.Figure(PART, metric, series='run', log_x=True))
  return dataclasses.replace(study, table=lambda results: rows, figures=tuple(panels), curves=lambda results: curves)


def _value(config: schema.Config, setting: str) -> str | float:
  """Returns the value of a setting by its dotted name; of a part of the config, such as `model`, its kind."""
  value: object = config
  for name in setting.split('.'):
    value = value[name] if isinstance(value, dict) else getattr(value, name)
  return value if isinstance(value, int | float | str) else checks.shown(value)
