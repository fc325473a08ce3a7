"""The decisions of a search: which runs continue at each rung, which run is the best, and the table of them.

The coordinator of a study (`job.py`) calls `check_same` at its start, `kept` after each rung, and `with_table` and
`write_best` at the end. A decision is written once, into `search/` of the study, so that all processes of a study
follow the same one, also after a restart.
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
FOLDER, RECORD = 'search', 'search.json'
BEST = 'best.json'
_MOST_PANELS = 4


class Rung(NamedTuple):
  """Part of the length of a run at which it is compared, such as '25 %' ('' = its end), and the number of runs."""
  until: str
  runs: int

  @property
  def label(self) -> str:
    return self.until or END


def rungs(method: schema.SearchMethod) -> list[Rung]:
  """Returns the rungs of a search, the one at the end last."""
  if isinstance(method, schema.Sobol):
    return [Rung('', method.points)]
  numbers = [method.points]
  while len(numbers) < method.rungs or (not method.rungs and numbers[-1] >= method.factor):
    numbers.append(max(1, numbers[-1] // method.factor))
  shares = [100 / method.factor**power for power in reversed(range(len(numbers)))]
  return [Rung('' if share == 100 else f'{share:.6g} %', number) for share, number in zip(shares, numbers, strict=True)]


def score(search: schema.Search, result: schema.Result) -> float | None:
  """Returns the metric that decides, negative if lower is better; None if it is not finite.

  Raises:
    UserError: the run has no such metric.
  """
  value = result.metrics.get(search.metric) if search.metric else result.headline
  if value is None:
    raise UserError(f'search.metric: expected one of {", ".join(result.metrics) or "the metrics of evals"}, got '
                    f'{search.metric!r}, which {result.workdir} does not have. Set one of these.')
  return (-value if reader.is_lower_better(search.metric) else value) if math.isfinite(value) else None


def ranked(search: schema.Search, tasks: Sequence[Task]) -> list[Task]:
  """Returns those that are done, the best first, and of equals the first."""
  scores = {task.name: score(search, task.result()) for task in tasks if task.is_done}
  known = [task for task in tasks if scores.get(task.name) is not None]
  return sorted(known, key=lambda task: -(scores[task.name] or 0.))


def check_same(workdir: pathlib.Path, search: schema.Search) -> None:
  """Writes which search a directory has, or raises UserError if it has another one; the number of points may change."""
  now = {'seed': search.seed, 'metric': search.metric, 'rungs': [rung.label for rung in rungs(search.method)],
         'ranges': {name: repr(one) for name, one in search.ranges.items()}}
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


def kept(workdir: pathlib.Path, search: schema.Search, number: int, tasks: Sequence[Task]) -> list[str]:
  """Returns the names of the runs that continue after a rung: as decided before, or now, for all processes.

  Args:
    workdir: of the study.
    search: the search.
    number: of the rung.
    tasks: all runs of the rung, which are over.

  Raises:
    TemporaryError: a run failed for a reason that may pass.
    UserError: no run has results.
  """
  rung, following = rungs(search.method)[number:number + 2]
  path = workdir / FOLDER / f'{search.method.points}_points_{rung.label.replace(" ", "")}.json'
  if not path.is_file():
    waiting = [task.name for task in tasks if not task.is_done and failures.worst([task.failure]) == failures.TRY_AGAIN]
    if waiting:
      raise TemporaryError(f'{", ".join(waiting)}: expected results at {rung.label}, got none, for a reason that may '
                           'pass. Run the same command again.')
    best = ranked(search, tasks)[:following.runs]
    if not best:
      raise UserError(f'results: expected at least one run with a finite {search.metric or "headline"} at '
                      f'{rung.label}, got none. See the outputs of the runs.')
    _write_once(path, {'kept': [task.name for task in best], 'metric': search.metric, 'results': {
        task.name: score(search, task.result()) for task in tasks if task.is_done}})
  return list(documents.read(path).field('kept').texts())


def _write_once(path: pathlib.Path, content: Mapping[str, object]) -> None:
  """Writes a file unless another process has: the first one counts."""
  with contextlib.suppress(FileExistsError), files.replacing(path, is_new=True) as part:
    part.write_text(json.dumps(documents.finite(content), indent=2) + '\n')


def at_rungs(search: schema.Search, tasks: Sequence[Task]) -> dict[str, list[Task]]:
  """Returns each run with the rungs at which it has results, the highest last; the best runs first."""
  parts = {rung.until for rung in rungs(search.method)}
  by_run = {task.name: [at_part for at_part in task.with_results() if at_part.until in parts] for task in tasks}
  order: list[str] = []
  for rung in reversed(rungs(search.method)):
    ended = [at_parts[-1] for at_parts in by_run.values() if at_parts and at_parts[-1].until == rung.until]
    order += [task.name for task in ranked(search, ended)]
    order += [task.name for task in ended if task.name not in order]
  return {name: by_run[name] for name in order}


def write_best(workdir: pathlib.Path, search: schema.Search, tasks: Sequence[Task]) -> str:
  """Writes the config of the best run at the highest rung as `best.json`, and returns a sentence on it; '' if none."""
  best = next((at_parts[-1] for at_parts in at_rungs(search, tasks).values()), None)
  if best is None:
    return ''
  value = score(search, result := best.result())
  run_directory.write_text(workdir / BEST, json_files.to_json(best.config))
  shown = ' '.join(f'--config.{setting}={_shown(best.config, setting)}' for setting in search.ranges)
  return (f'Best: {best.name}, {search.metric or "headline"} {abs(value or 0.):.4g} after {result.step:,} steps '
          f'({best.until or END}): {shown}\nIts config: {workdir / BEST}')


def with_table(study: schema.Study, tasks: Sequence[Task]) -> schema.Study:
  """Returns a study of a search with a table of its runs, the best first, and figures, unless it has its own."""
  search = study.search
  if search is None or study.table:
    return study
  metric, labels = search.metric or 'headline', [rung.label for rung in rungs(search.method)][:-1]
  rows: list[schema.Row] = []
  curves: list[schema.Row] = []
  for name, at_parts in at_rungs(search, tasks).items():
    results = [task.result() for task in at_parts]
    numbers = [result.metrics.get(metric, result.headline) for result in results]
    values = [number if number is None else float(f'{number:.5g}') for number in numbers]
    by_part = {task.until: value for task, value in zip(at_parts, values, strict=True)}
    last, end = results[-1], at_parts[-1]
    rows.append({'run': name, metric: values[-1], PART: end.percent,
                 **{setting: _shown(end.config, setting) for setting in search.ranges},
                 **{f'at {label}': by_part.get(label) for label in labels},
                 'step': last.step, 'parameters': last.num_params, 'exaFLOPs': last.exaflops})
    curves += [{'run': name, PART: task.percent, metric: value} for task, value in zip(at_parts, values, strict=True)]
  panels = [schema.Figure(setting, metric, series=PART if labels else '', log_x=isinstance(kind, schema.LogUniform))
            for setting, kind in search.ranges.items()][:_MOST_PANELS]
  if labels:
    panels.insert(0, schema.Figure(PART, metric, series='run', log_x=True))
  return dataclasses.replace(study, table=lambda results: rows, figures=tuple(panels), curves=lambda results: curves)


def _shown(config: schema.Config, setting: str) -> str | float:
  """Returns the value of a setting, a part by its kind."""
  value: object = config
  for name in setting.split('.'):
    value = value[name] if isinstance(value, dict) else getattr(value, name)
  return value if isinstance(value, int | float | str) else checks.shown(value)
