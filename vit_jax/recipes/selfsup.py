"""The comparison of self-supervised objectives: runs that differ in the objective alone, their lengths, and their rows.

Every run has the network, the evaluations and, where the objective compares crops, the crops of the others. The rest is
that of the objective's own recipe: batch, optimizer, rates, temperatures, masks, momentum and augmentation. Runs are
equally long in images, or in processor seconds of training, for which the cost of a step of each objective is measured
by a short run before.
"""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.core.errors import UserError

COST_IMAGES = 6_400
"""Images of the run that measures the cost of a step."""
LABELED = 'train[:20%]'
"""The images whose labels both evaluations use, so that their features are computed once."""
PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
KNN, LOGISTIC, HEAD = 'knn/top1_k20', 'logistic/top1', 'head/top1'
K_NN, LOGISTIC_REGRESSION = 'k-NN %', 'logistic %'
FIGURES = (s.Figure('objective', K_NN), s.Figure('objective', LOGISTIC_REGRESSION))
DINO, UNTRAINED = 'dino_cifar10', 'random'


class Point(NamedTuple):
  """An objective of the comparison."""
  recipe: str  # its config
  view: str = ''  # the network whose features count: student, ema or teacher; '' = student
  change: Callable[[s.Config], s.Config] = lambda config: config  # what differs from the recipe


def untrained(config: s.Config) -> s.Config:
  """Returns a run that leaves the network as it was initialized."""
  evals = {name: evaluation for name, evaluation in config.evals.items() if name != 'head'}
  return s.replaced(config, {'length': '1 steps', 'optimizer.lr': 0., 'train.ema': 0., 'evals': evals})


def without_koleo(config: s.Config) -> s.Config:
  """Returns DINOv2's run without the loss that spreads the features."""
  return s.replaced(config, {'objective.koleo_weight': 0.})


POINTS = {
    UNTRAINED: Point('cifar10', change=untrained), 'supervised': Point('cifar10', 'ema'), 'mae': Point('mae_cifar10'),
    'masked_patch': Point('masked_patch_cifar10:pixels'), 'byol': Point('byol_cifar10', 'teacher'),
    'dino': Point(DINO, 'teacher'), 'dino_ibot': Point('dinov2_cifar10', 'teacher', without_koleo),
    'dinov2': Point('dinov2_cifar10', 'teacher'), 'ijepa': Point('ijepa_cifar10', 'teacher'),
    'lejepa': Point('lejepa_cifar10')}


def network(size: str) -> s.ViT:
  """Returns the network of all runs: `tiny` is that of `dino_cifar10`, for one CPU core; `small` is for one GPU."""
  tiny = files.load(DINO, []).model
  assert isinstance(tiny, s.ViT)
  return tiny if size == 'tiny' else dataclasses.replace(
      tiny, patch=4, width=192, depth=6, heads=3, mlp=s.Mlp(768), dtype=s.DType.BF16)


def fitted(config: s.Config, model: s.ViT) -> s.Config:
  """Returns a recipe with another network: widths of heads, decoders and predictors change in proportion to its width.

  With few patches, I-JEPA accepts smaller contexts, so that there are such blocks.
  """
  assert isinstance(config.model, s.ViT)
  changes: dict[str, object] = {'model': model}
  for name in ('hidden_dim', 'decoder_width', 'predictor_width'):
    if width := getattr(config.objective, name, 0):
      changes[f'objective.{name}'] = width * model.width // config.model.width
  if isinstance(config.objective, s.IJepa):
    most = config.objective.slots((config.image_px[0] // model.patch) ** 2)
    changes['objective.min_context'] = min(config.objective.min_context, most // 2)
  return s.replaced(config, changes)


def run(name: str, *, size: str, source: str, seed: int, length: str, train_split: str = 'train') -> s.Config:
  """Returns the run of an objective."""
  point = POINTS[name]
  base = files.load(f'{point.recipe}{"," if ":" in point.recipe else ":"}source={source}', [])
  recipe = base.data.recipe
  if base.objective.takes_views:
    crops = files.load(DINO, []).data.recipe
    recipe = s.replaced(crops, {'views.num_local': recipe.views.num_local and crops.views.num_local})
  views = (point.view,) if point.view else ()
  evals: dict[str, s.Eval] = {
      'knn': s.Knn(every='100 %', train_split=LABELED, neighbors=(20,), views=views, batch_size=500),
      'logistic': s.Logistic(every='100 %', train_split=LABELED, l2=PENALTIES, max_steps=100, views=views,
                             batch_size=500)}
  if base.objective.has_head:
    evals['head'] = s.TopK(every='100 %', views=views, batch_size=500)
  return point.change(fitted(s.replaced(base, {
      'name': name, 'seed': seed, 'length': length, 'evals': evals, 'data.recipe': recipe, 'data.workers': 0,
      'data.threads': 1, 'train.cpu_threads': 1, 'data.train_split': train_split,
      'checkpoints': s.Checkpoints(every='100 %', keep_latest=1)}), network(size)))


def cost_run(name: str, *, size: str, source: str) -> s.Config:
  """Returns the short run that measures the cost of a step."""
  return dataclasses.replace(run(name, size=size, source=source, seed=0, length=f'{COST_IMAGES} examples'), evals={})


def images(results: s.Results, name: str, seconds: float) -> int:
  """Returns the images of whole steps that take so many processor seconds, by the run that measured their cost.

  Raises:
    UserError: it has not been measured yet.
  """
  measured = results.get(f'{name}_cost')
  if measured is None or not measured.training_processor_s:
    raise UserError(f'seconds: expected the measured cost of a step of {name}, got none. The study measures it first; '
                    'or set images=.')
  return measured.config.batch_size * max(1, int(seconds * (measured.step - 1) / measured.training_processor_s))


def rows(results: s.Results, views: Mapping[str, str], column: str = 'objective') -> list[s.Row]:
  """Returns a row for each objective, with median, smallest and largest result of its seeds.

  Args:
    results: of runs named `NAME_seedN`.
    views: whose features count, by name.
    column: heading of the names.
  """
  rows: list[s.Row] = []
  for name, view in views.items():
    runs = [result for run, result in results.items() if run.rpartition('_seed')[0] == name]
    if not runs:
      continue
    trained = runs[0].step * runs[0].config.batch_size if name != UNTRAINED else 0
    row: s.Row = {column: name, 'images': trained, 'updates': runs[0].step if trained else 0, 'seeds': len(runs)}
    for heading, metric in ((K_NN, KNN), (LOGISTIC_REGRESSION, LOGISTIC), ('own head %', HEAD)):
      row |= spread(heading, metric + (f'@{view}' if view else ''), [result.metrics for result in runs])
    seconds = statistics.median(result.training_processor_s for result in runs)
    rows.append({**row, 'training processor seconds': round(seconds, 1), 'parameters': runs[0].num_params})
  return rows


def spread(column: str, metric: str, metrics: Iterable[Mapping[str, float]]) -> s.Row:
  """Returns median, smallest and largest value of a metric over runs, in percent; None if no run has it."""
  values = sorted(round(100 * of_run[metric], 2) for of_run in metrics if metric in of_run)
  if not values:
    return {column: None, f'{column}, smallest': None, f'{column}, largest': None}
  return {column: round(statistics.median(values), 2), f'{column}, smallest': values[0],
          f'{column}, largest': values[-1]}
