"""VTAB-1k: its tasks, which runs a study has for each, and the table of results. `configs/vtab.py` has the settings.

A study either has final runs of fixed settings (the ViT paper, arXiv 2010.11929), or tries a grid for each task and
chooses by val200 (AugReg, 2106.10270). Final runs train on train800val200 and are evaluated on the complete test split.
"""
from __future__ import annotations

import statistics
from collections.abc import Sequence

from vit_jax.config import schema as s
from vit_jax.recipes import published, studies

GROUPS = ('natural', 'specialized', 'structured')
TASKS: dict[str, tuple[str, int]] = {  # group and classes
    'caltech101': ('natural', 102), 'cifar100': ('natural', 100), 'dtd': ('natural', 47),
    'flowers102': ('natural', 102), 'pets': ('natural', 37), 'sun397': ('natural', 397), 'svhn': ('natural', 10),
    'patch_camelyon': ('specialized', 2), 'eurosat': ('specialized', 10), 'resisc45': ('specialized', 45),
    'retinopathy': ('specialized', 5),
    'clevr/count': ('structured', 8), 'clevr/distance': ('structured', 6), 'dmlab': ('structured', 6),
    'kitti/distance': ('structured', 4), 'dsprites/x_position': ('structured', 16),
    'dsprites/orientation': ('structured', 16), 'smallnorb/azimuth': ('structured', 18),
    'smallnorb/elevation': ('structured', 9)}


def choose(text: str) -> tuple[str, ...]:
  """Returns the tasks that `clevr/count+pets` lists, or all for ''.

  Raises:
    UserError: a task is unknown.
  """
  return studies.choose('tasks', text, TASKS)


def rows(results: s.Results, tasks: Sequence[str]) -> list[s.Row]:
  """Returns a row for each task, then the plain means of each group and of all tasks, beside Table 9."""
  rows = [_row(task, TASKS[task][0], list(studies.scores(results, task).values())) | _table_9([task])
          for task in tasks]
  for group in GROUPS:
    all_members = [task for task, (group_of_task, _) in TASKS.items() if group_of_task == group]
    if members := [task for task in tasks if task in all_members]:
      rows.append(_mean_row(results, f'mean of {group}', group, members, group_size=len(all_members)))
  rows.append(_mean_row(results, f'VTAB-{len(TASKS)}', 'all', tasks, group_size=len(TASKS)))
  return rows


def mean(results: s.Results, tasks: Sequence[str]) -> tuple[list[float], int]:
  """Returns the means over the tasks by seed, and how many tasks are measured.

  Only seeds that have every measured task count.
  """
  scores_by_task = [scores for task in tasks if (scores := studies.scores(results, task))]
  seeds = scores_by_task[0].keys() if scores_by_task else ()
  seeds_of_all = [seed for seed in seeds if all(seed in scores for scores in scores_by_task)]
  return [statistics.fmean(scores[seed] for scores in scores_by_task) for seed in seeds_of_all], len(scores_by_task)


def _mean_row(results: s.Results, name: str, group: str, tasks: Sequence[str], *, group_size: int) -> s.Row:
  """Returns the row of the mean over some tasks of a group; its `tasks` are `3 of 7` if three of seven are measured."""
  values, num_measured = mean(results, tasks)
  measured = [task for task in tasks if studies.scores(results, task)]
  return {**_row(name, group, values), 'tasks': f'{num_measured} of {group_size}', **_table_9(measured or tasks)}


def _table_9(tasks: Sequence[str]) -> s.Row:
  """Returns the mean over some tasks of each column of the ViT paper's Table 9."""
  columns = zip(*(published.TABLE_9[task] for task in tasks), strict=True)
  return {f'{name}, Table 9': round(statistics.fmean(column), 2)
          for name, column in zip(published.TABLE_9_COLUMNS, columns, strict=True)}


def _row(name: str, group: str, values: Sequence[float]) -> s.Row:
  """Returns the row of one task, or of a mean, from the scores of its seeds in percent; `deviation` is over seeds."""
  return {'task': name, 'group': group, 'top-1 %': round(statistics.fmean(values), 2) if values else None,
          'deviation': round(statistics.stdev(values), 2) if len(values) > 1 else None, 'runs': len(values),
          'tasks': '1' if values else 'not measured'}


def spread_text(values: Sequence[float]) -> str:
  """Formats mean and deviation for a table: `88.55 ± 0.04`; `–` for none."""
  if not values:
    return '–'
  deviation = f' ± {statistics.stdev(values):.2f}' if len(values) > 1 else ''
  return f'{statistics.fmean(values):.2f}{deviation}'
