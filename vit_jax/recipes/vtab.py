"""Fine-tuning on VTAB-1k as the papers do it: runs by task, and their table.

Protocols: `vit` is the ViT paper's (arXiv 2010.11929, Appendix B.1.1 and Table 4): 2,500 steps at 384 px with one
learning rate for all tasks. `augreg` tries four rates and two lengths (arXiv 2106.10270, section 3.4) and chooses
for each task by val200. Final runs train on train800val200 and are measured on the whole test split.
"""
from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import published, studies
from vit_jax.recipes.finetune import Budget, Point

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
NUM_EXAMPLES = 1000
PROTOCOLS = ('vit', 'augreg')
PX = 384
_PAPER = Point(.01, Budget(2_500, 200))  # ViT paper, Table 4; the warm-up is AugReg's, as the paper gives none
_GRID = tuple(Point(rate, budget) for budget in (Budget(500, 100), Budget(2_500, 200))
              for rate in (.001, .003, .01, .03))


def choose(text: str) -> tuple[str, ...]:
  """The tasks that `clevr/count+pets` lists; all for ''.

  Raises:
    UserError: lists the ones that there are not.
  """
  names = tuple(filter(None, text.split('+')))
  if unknown := [name for name in names if name not in TASKS]:
    raise UserError(f'tasks={text}: VTAB has no {", ".join(unknown)}; there are {", ".join(TASKS)}')
  return names or tuple(TASKS)


def key(task: str) -> str:
  """The task in names of runs, which are names of directories."""
  return task.replace('/', '-')


def build(network: s.Model, task: str, *, point: Point, px: int, phase: str) -> s.Config:
  """A run on a task; `phase` is `final`, or `tune` for choosing by val200."""
  patch = getattr(network, 'patch', 1)
  train, test, name = ('train800val200', 'test', 'test') if phase == 'final' else ('train800', 'val200', 'val')
  return s.Config(
      name=f'vtab {task}', length=f'{point.budget.steps} steps', batch_size=512, image_px=(px - px % patch,) * 2,
      data=s.Data(source=f'vtab:{task}', train_split=train, eval_split=test, num_classes=TASKS[task][1],
                  num_examples=NUM_EXAMPLES if phase == 'final' else 800,
                  recipe=s.Recipe(crop=s.Crop.RESIZE, flip=False)),
      model=network, init_settings=s.InitSettings.NETWORK,  # VTAB resizes images without their aspect ratio
      optimizer=s.Sgd(lr=point.rate, mu_dtype=s.DType.BF16, clip_norm=1.,
                      schedule=s.Schedule(warmup=f'{point.budget.warmup} steps')),
      evals={name: s.TopK(every='50 %')}, checkpoints=s.Checkpoints(every='20 %', keep_latest=1))


def grid(protocol: str) -> tuple[Point, ...]:
  """What is tried before the final runs; nothing for the paper's protocol."""
  return _GRID if protocol == 'augreg' else ()


def tunings(network: s.Model, tasks: Iterable[str], *, protocol: str, px: int) -> dict[str, s.Config]:
  """The runs that choose, by name."""
  return {f'{key(task)}_{point.name}': build(network, task, point=point, px=px, phase='tune')
          for task in tasks for point in grid(protocol)}


def finals(network: s.Model, tasks: Iterable[str], results: s.Results, *, protocol: str, px: int,
           seeds: int) -> dict[str, s.Config]:
  """The final runs by name, with the best point of each task that has a result to choose by.

  Raises:
    UserError: no task has one.
  """
  found: dict[str, s.Config] = {}
  for task in tasks:
    names = {f'{key(task)}_{point.name}': point for point in grid(protocol)}
    if names and not any(name in results for name in names):
      continue
    point = names[studies.best(results, names)] if names else _PAPER
    config = build(network, task, point=point, px=px, phase='final')
    found |= {f'{key(task)}_seed{seed}': dataclasses.replace(config, seed=seed) for seed in range(seeds)}
  if not found:
    raise UserError('no task has a run to choose by')
  return found


def scores(results: s.Results, task: str) -> dict[str, float]:
  """Accuracies of the final runs of a task by seed, in per cent."""
  prefix = f'{key(task)}_seed'
  return {name.removeprefix(prefix): 100 * result.headline for name, result in results.items()
          if name.startswith(prefix) and result.headline is not None}


def rows(results: s.Results, tasks: Sequence[str]) -> list[s.Row]:
  """A row a task, then the plain means of each group and of all, with the deviation over seeds; beside Table 9."""
  found = [_row(task, TASKS[task][0], list(scores(results, task).values())) | _table_9([task]) for task in tasks]
  for group in GROUPS:
    if members := [task for task in tasks if TASKS[task][0] == group]:
      found.append(_mean(results, f'mean of {group}', group, members, of=sum(g == group for g, _ in TASKS.values())))
  found.append(_mean(results, f'VTAB-{len(TASKS)}', 'all', tasks, of=len(TASKS)))
  return found


def mean(results: s.Results, tasks: Sequence[str]) -> tuple[list[float], int]:
  """Means over the tasks by seed, of seeds that have every measured task; and how many tasks are measured."""
  known = [one for one in (scores(results, task) for task in tasks) if one]
  seeds = [seed for seed in known[0] if all(seed in one for one in known)] if known else []
  return [statistics.fmean(one[seed] for one in known) for seed in seeds], len(known)


def _mean(results: s.Results, name: str, group: str, tasks: Sequence[str], *, of: int) -> s.Row:
  values, num = mean(results, tasks)
  row = _row(name, group, values)
  return {**row, 'tasks': f'{num} of {of}', **_table_9([task for task in tasks if scores(results, task)] or tasks)}


def _table_9(tasks: Sequence[str]) -> s.Row:
  """The mean over some tasks of each column of the ViT paper's Table 9."""
  means = [round(statistics.fmean(column), 2) for column in zip(*(published.TABLE_9[task] for task in tasks),
                                                                strict=True)]
  return {f'{name}, Table 9': value for name, value in zip(published.TABLE_9_COLUMNS, means, strict=True)}


def _row(name: str, group: str, values: Sequence[float]) -> s.Row:
  return {'task': name, 'group': group, 'top-1 %': round(statistics.fmean(values), 2) if values else None,
          'deviation': round(statistics.stdev(values), 2) if len(values) > 1 else None, 'runs': len(values),
          'tasks': '1' if values else 'not measured'}


def spread_text(values: Sequence[float]) -> str:
  """Mean and deviation for a table: `88.55 ± 0.04`; `–` for none."""
  if not values:
    return '–'
  std = statistics.stdev(values) if len(values) > 1 else math.nan
  return f'{statistics.fmean(values):.2f}' + ('' if math.isnan(std) else f' ± {std:.2f}')
