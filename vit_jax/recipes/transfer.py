"""Tables 2 and 5 of the ViT paper (arXiv 2010.11929): fine-tuning on several datasets as runs of a study, and its rows.

The runs are those of `configs/finetune.py`. What is tried on held-out examples are the learning rates of Table 4, and
BiT-HyperRule for ResNets (Appendix B.1.1); the final runs take the better one. VTAB is in `vtab.py`.
"""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from vit_jax.config import files
from vit_jax.config import schema as s
from vit_jax.recipes import finetune, published, studies, vtab
from vit_jax.recipes.studies import Point

ROWS = {'imagenet2012': 'ImageNet', 'cifar10': 'CIFAR-10', 'cifar100': 'CIFAR-100', 'pets': 'Oxford-IIIT Pets',
        'flowers': 'Oxford Flowers-102'}
VTAB_PREFIX = 'vtab_'
"""Of the names of runs on VTAB tasks, as CIFAR-100 and Pets are sets of Table 2 as well."""
REAL, VTAB, COST = 'ImageNet ReaL', 'VTAB (19 tasks)', 'TPUv3-core-days'
IMAGENET_PX = {'L/16': 512, 'H/14': 518}  # Table 2; 384 px for all else
HERE, PUBLISHED = 'measured here', 'published only'
Stage = Callable[[s.Results], dict[str, s.Config]]


def choose(text: str, *, extra: Sequence[str] = ()) -> tuple[str, ...]:
  """Returns the datasets that `cifar10+pets` lists, or the five of the paper for ''.

  `extra` are names that are allowed beside them.

  Raises:
    UserError: a name is unknown.
  """
  return studies.choose('sets', text, (*ROWS, *extra)) if text else tuple(ROWS)


def candidates(name: str, dataset: str) -> dict[str, Point | None]:
  """Returns the points to try for a network on a dataset, by name.

  The value None means BiT-HyperRule, which has a point of its own.
  """
  points: dict[str, Point | None] = {point.name: point for point in finetune.grid(dataset, 'vit')}
  return {**points, 'hyperrule': None} if name.startswith('BiT-') else points


def build(name: str, dataset: str, *, phase: str, point: Point | None, px: int, real: str) -> s.Config:
  """Returns a run on a dataset.

  Args:
    name: of the network, such as `L/16`.
    dataset: one of `ROWS`.
    phase: `tune` or `final`.
    point: learning rate and length; None = BiT-HyperRule.
    px: side of the images; 0 = that of Table 2. BiT-HyperRule has its own.
    real: path of `real.json`, '' = labels from TFDS, `no` = ReaL is not evaluated.
  """
  if point is None:
    config = files.load(f'bit_hyperrule:model={name},dataset={dataset},phase={phase}', [])
  else:
    px = px or (IMAGENET_PX.get(name, 384) if dataset == 'imagenet2012' else 384)
    config = point.apply(files.load(f'finetune:model={name},dataset={dataset},phase={phase},px={px}', []))
  if dataset != 'imagenet2012' or phase != 'final' or real == 'no':
    return config
  labels = s.Real(every='50 %', labels=real) if real else s.Real(
      every='50 %', source='tfds:imagenet2012_real', split='validation')
  return dataclasses.replace(config, evals={**config.evals, 'real': labels})


def grid(name: str, datasets: Sequence[str], *, px: int, real: str, prefix: str = '',
         init_from: str = '') -> studies.Grid:
  """Returns what is tried for a network on some datasets; with `init_from` '', the setting of the run stays."""
  def build_run(dataset: str, point: Point | None, phase: str) -> s.Config:
    config = build(name, dataset, phase=phase, point=point, px=px, real=real)
    return dataclasses.replace(config, init_from=init_from or config.init_from)

  return studies.Grid(build_run, {dataset: candidates(name, dataset) for dataset in datasets}, prefix)


def stages(pretrained: Mapping[str, str], datasets: Sequence[str], *, px: int, real: str,
           seeds: int) -> tuple[Stage, Stage]:
  """Returns the stages of a study that fine-tunes the networks it has pre-trained: choosing runs, then final runs.

  Args:
    pretrained: names of pre-training runs, with the name of the network of each. Those without a result are skipped.
    datasets: to fine-tune on.
    px: side of the images.
    real: as of `build`.
    seeds: final runs of each.
  """
  def grids(results: s.Results) -> list[studies.Grid]:
    return [grid(model, datasets, px=px, real=real, prefix=f'{run}_', init_from=results[run].workdir)
            for run, model in pretrained.items() if run in results]

  def tune(results: s.Results) -> dict[str, s.Config]:
    return {name: config for of_network in grids(results) for name, config in of_network.tunings().items()}

  def final(results: s.Results) -> dict[str, s.Config]:
    return {name: config for of_network in grids(results)
            for name, config in of_network.finals(results, seeds).items()}

  return tune, final


def rows(results: s.Results, name: str, datasets: Sequence[str], tasks: Sequence[str]) -> list[s.Row]:
  """Returns Table 2: our accuracies, how they came about, and the published columns."""
  ours: dict[str, list[float]] = {REAL: real_scores(results)}
  ours |= {ROWS[dataset]: list(studies.scores(results, dataset).values()) for dataset in datasets}
  vtab_results = {run.removeprefix(VTAB_PREFIX): result for run, result in results.items()
                  if run.startswith(VTAB_PREFIX)}
  ours[VTAB], num_tasks = vtab.mean(vtab_results, tasks)
  notes = {VTAB: f'{num_tasks} of {len(vtab.TASKS)} tasks' if num_tasks else '', COST: 'of pre-training'}
  rows: list[s.Row] = []
  for label, cells in published.CELLS.items():
    values = ours.get(label, [])
    rows.append({
        'set': label, f'{name} here': vtab.spread_text(values), 'runs': len(values),
        'status': HERE if values else PUBLISHED, 'note': notes.get(label, ''),
        **dict(zip(published.COLUMNS, map(str, cells), strict=True)), **_table_5(name, label)})
  return rows


def _table_5(name: str, label: str) -> s.Row:
  """Returns what Table 5 has of a network and set, one column for each set that it was pre-trained on."""
  columns: s.Row = {}
  for pretraining_set, models in published.TABLE_5.items():
    if name in models:
      values = dict(zip(published.TRANSFER_SETS, models[name], strict=True))
      columns[f'ViT-{name} {pretraining_set}, Table 5'] = f'{values[label]:.2f}' if label in values else '–'
  return columns


def real_scores(results: s.Results, *, prefix: str = '') -> list[float]:
  """Returns the ReaL accuracies of the final runs on ImageNet, of the weights that ImageNet is quoted for."""
  scores = []
  for name, result in results.items():
    if name.startswith(f'{prefix}imagenet2012_seed'):
      metrics = [metric for metric in result.metrics if metric.startswith('real/top1')]
      if metrics:
        quoted = next((metric for metric in metrics if '@ema' in metric), metrics[0])
        scores.append(100 * result.metrics[quoted])
  return scores


def accuracies(results: s.Results, datasets: Sequence[str], *, prefix: str = '') -> dict[str, float]:
  """Returns the mean accuracy in % over the final runs on each set, and ReaL.

  Keys are the names of `published.TRANSFER_SETS`.
  """
  values = {ROWS[dataset]: list(studies.scores(results, dataset, prefix).values()) for dataset in datasets}
  values[REAL] = real_scores(results, prefix=prefix)
  return {name: statistics.fmean(values[name]) for name in published.TRANSFER_SETS if values.get(name)}
