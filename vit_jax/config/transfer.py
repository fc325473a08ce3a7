"""Table 2 of the ViT paper (arXiv 2010.11929): fine-tuning one network on seven sets, and the published numbers.

For each set the learning rates of the paper's Table 4 are tried on held-out training examples; three final runs with
the best one give mean and deviation. ReaL is measured by the runs on ImageNet. VTAB is as in `vtab.py`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vit_jax.config import finetune, published, studies, vtab
from vit_jax.config import schema as s

ROWS = {'imagenet2012': 'ImageNet', 'cifar10': 'CIFAR-10', 'cifar100': 'CIFAR-100', 'pets': 'Oxford-IIIT Pets',
        'flowers': 'Oxford Flowers-102'}
REAL, VTAB, COST = 'ImageNet ReaL', 'VTAB (19 tasks)', 'TPUv3-core-days'
IMAGENET_PX = {'L/16': 512, 'H/14': 518}  # Table 2
HERE, PUBLISHED = 'measured here', 'published only'


def build(network: s.Model, name: str, dataset: str, *, phase: str, point: finetune.Point | None, px: int,
          real: str) -> s.Config:
  """A run on a set; `real` is the path of `real.json`, '' = labels from TFDS, `no` = none."""
  px = px or (IMAGENET_PX.get(name, vtab.PX) if dataset == 'imagenet2012' else vtab.PX)
  config = finetune.build(network, name, dataset, protocol='vit', phase=phase, px=px, point=point)
  if dataset != 'imagenet2012' or phase != 'final' or real == 'no':
    return config
  labelled = s.Real(every='50 %', labels=real) if real else s.Real(
      every='50 %', source='tfds:imagenet2012_real', split='validation')
  return dataclasses.replace(config, evals={**config.evals, 'real': labelled})


def points(dataset: str) -> dict[str, finetune.Point]:
  """What is tried on a set, by the name of the run."""
  return {f'{dataset}_{point.name}': point for point in finetune.grid(dataset, 'vit')}


def rows(results: s.Results, name: str, datasets: Sequence[str], tasks: Sequence[str]) -> list[s.Row]:
  """Table 2: ours, how it came about, and the published columns."""
  ours: dict[str, list[float]] = {REAL: real_scores(results)}
  ours |= {ROWS[dataset]: list(final_scores(results, dataset).values()) for dataset in datasets}
  ours[VTAB], num_tasks = vtab.mean(results, tasks)
  notes = {VTAB: f'{num_tasks} of {len(vtab.TASKS)} tasks' if num_tasks else '', COST: 'of pre-training'}
  found: list[s.Row] = []
  for label, cells in published.CELLS.items():
    values = ours.get(label, [])
    found.append({
        'set': label, f'{name} here': vtab.spread_text(values), 'runs': len(values),
        'status': HERE if values else PUBLISHED,
        'note': notes.get(label, ''),
        **dict(zip(published.COLUMNS, map(str, cells), strict=True))})
  return found


def final_scores(results: s.Results, dataset: str) -> dict[str, float]:
  """Accuracies of the final runs on a set by name, in per cent."""
  return {name: 100 * result.headline for name, result in results.items()
          if name.startswith(f'{dataset}_seed') and result.headline is not None}


def real_scores(results: s.Results) -> list[float]:
  """ReaL accuracies of the final runs on ImageNet, of the weights that ImageNet is quoted for."""
  found = []
  for name, result in results.items():
    if name.startswith('imagenet2012_seed'):
      metrics = {metric: value for metric, value in result.metrics.items() if metric.startswith('real/top1')}
      found += [100 * value for _, value in sorted(metrics.items(), key=lambda item: '@ema' not in item[0])[:1]]
  return found


def finals(network: s.Model, name: str, datasets: Sequence[str], results: s.Results, *, px: int, real: str,
           seeds: int) -> dict[str, s.Config]:
  """The final runs of each set that has a run to choose by."""
  found: dict[str, s.Config] = {}
  for dataset in datasets:
    grid = points(dataset)
    if not any(run in results for run in grid):
      continue
    config = build(network, name, dataset, phase='final', point=grid[studies.best(results, grid)], px=px, real=real)
    found |= {f'{dataset}_seed{seed}': dataclasses.replace(config, seed=seed) for seed in range(seeds)}
  return found
