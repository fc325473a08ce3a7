"""Transfer as in the ViT paper (arXiv 2010.11929): a network fine-tuned on several sets, beside the published numbers.

For each set the learning rates of the paper's Table 4 are tried on held-out training examples. ResNets also try
BiT-HyperRule, and the better of all these is used (Appendix B.1.1). Final runs with the best choice give mean and
deviation (Table 2: three runs). ReaL is measured by the runs on ImageNet. VTAB is as in `vtab.py`.
"""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import finetune, published, studies, vtab

ROWS = {'imagenet2012': 'ImageNet', 'cifar10': 'CIFAR-10', 'cifar100': 'CIFAR-100', 'pets': 'Oxford-IIIT Pets',
        'flowers': 'Oxford Flowers-102'}
REAL, VTAB, COST = 'ImageNet ReaL', 'VTAB (19 tasks)', 'TPUv3-core-days'
IMAGENET_PX = {'L/16': 512, 'H/14': 518}  # Table 2
HERE, PUBLISHED = 'measured here', 'published only'


class Candidate(NamedTuple):
  """A choice that is tried on held-out examples: a protocol of `finetune.py`, and its point where it has a grid."""
  protocol: str
  point: finetune.Point | None = None

  @property
  def name(self) -> str:
    """Part of the name of a run."""
    return self.point.name if self.point else self.protocol


def choose(text: str, *, extra: Sequence[str] = ()) -> tuple[str, ...]:
  """The sets that `cifar10+pets` lists; the five of the paper for ''.

  Args:
    text: names with + between them.
    extra: names that are allowed beside those of `ROWS`.

  Raises:
    UserError: a name is unknown.
  """
  names = tuple(filter(None, text.split('+')))
  if unknown := [name for name in names if name not in (*ROWS, *extra)]:
    raise UserError(f'sets={text}: expected some of {", ".join((*ROWS, *extra))}, got {", ".join(unknown)}. Put + '
                    'between names.')
  return names or tuple(ROWS)


def candidates(name: str, dataset: str) -> list[Candidate]:
  """What is tried for a network on a set: the rates of Table 4, and BiT-HyperRule for ResNets."""
  found = [Candidate('vit', point) for point in finetune.grid(dataset, 'vit')]
  return [*found, Candidate('hyperrule')] if name.startswith('BiT-') else found


def points(name: str, dataset: str) -> dict[str, Candidate]:
  """What is tried for a network on a set, by the name of the run."""
  return {f'{dataset}_{one.name}': one for one in candidates(name, dataset)}


def build(network: s.Model, name: str, dataset: str, *, phase: str, candidate: Candidate | None, px: int,
          real: str) -> s.Config:
  """A run on a set.

  Args:
    network: its settings.
    name: of the network, such as `L/16`.
    dataset: one of `ROWS`.
    phase: `tune` or `final`.
    candidate: rate and budget, or the protocol; None = the paper's, with its third rate.
    px: side of the images; 0 = that of Table 2. BiT-HyperRule has its own.
    real: path of `real.json`, '' = labels from TFDS, `no` = ReaL is not measured.
  """
  candidate = candidate or Candidate('vit')
  if candidate.protocol == 'hyperrule':
    px = 0
  else:
    px = px or (IMAGENET_PX.get(name, vtab.PX) if dataset == 'imagenet2012' else vtab.PX)
  config = finetune.build(network, name, dataset, protocol=candidate.protocol, phase=phase, px=px,
                          point=candidate.point)
  if dataset != 'imagenet2012' or phase != 'final' or real == 'no':
    return config
  labelled = s.Real(every='50 %', labels=real) if real else s.Real(
      every='50 %', source='tfds:imagenet2012_real', split='validation')
  return dataclasses.replace(config, evals={**config.evals, 'real': labelled})


def tunings(network: s.Model, name: str, datasets: Sequence[str], *, px: int, prefix: str = '',
            init_from: str = '') -> dict[str, s.Config]:
  """The runs that choose for each set, named `{prefix}{dataset}_{candidate}`; `init_from` '' = as it is."""
  runs = {f'{prefix}{run}': build(network, name, dataset, phase='tune', candidate=candidate, px=px, real='no')
          for dataset in datasets for run, candidate in points(name, dataset).items()}
  return _starting(runs, init_from)


def _starting(runs: dict[str, s.Config], init_from: str) -> dict[str, s.Config]:
  return {name: dataclasses.replace(run, init_from=init_from or run.init_from) for name, run in runs.items()}


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
        **dict(zip(published.COLUMNS, map(str, cells), strict=True)), **_table_5(name, label)})
  return found


def _table_5(name: str, label: str) -> s.Row:
  """What Table 5 has of a network and set, one column for each set that it was pre-trained on."""
  found: s.Row = {}
  for one, models in published.TABLE_5.items():
    if name in models:
      values = dict(zip(published.TRANSFER_SETS, models[name], strict=True))
      found[f'ViT-{name} {one}, Table 5'] = f'{values[label]:.2f}' if label in values else '–'
  return found


def final_scores(results: s.Results, dataset: str, *, prefix: str = '') -> dict[str, float]:
  """Accuracies of the final runs on a set by name, in per cent."""
  return {name: 100 * result.headline for name, result in results.items()
          if name.startswith(f'{prefix}{dataset}_seed') and result.headline is not None}


def real_scores(results: s.Results, *, prefix: str = '') -> list[float]:
  """ReaL accuracies of the final runs on ImageNet, of the weights that ImageNet is quoted for."""
  found = []
  for name, result in results.items():
    if name.startswith(f'{prefix}imagenet2012_seed'):
      metrics = {metric: value for metric, value in result.metrics.items() if metric.startswith('real/top1')}
      found += [100 * value for _, value in sorted(metrics.items(), key=lambda item: '@ema' not in item[0])[:1]]
  return found


def accuracies(results: s.Results, datasets: Sequence[str], *, prefix: str = '') -> dict[str, float]:
  """Mean accuracy in % over the final runs on each set, and ReaL, by the names of `published.TRANSFER_SETS`."""
  values = {ROWS[dataset]: list(final_scores(results, dataset, prefix=prefix).values()) for dataset in datasets}
  values[REAL] = real_scores(results, prefix=prefix)
  return {name: statistics.fmean(values[name]) for name in published.TRANSFER_SETS if values.get(name)}


def finals(network: s.Model, name: str, datasets: Sequence[str], results: s.Results, *, px: int, real: str, seeds: int,
           prefix: str = '', init_from: str = '') -> dict[str, s.Config]:
  """The final runs of each set that has a run to choose by, named `{prefix}{dataset}_seed{seed}`."""
  found: dict[str, s.Config] = {}
  for dataset in datasets:
    grid = {f'{prefix}{run}': one for run, one in points(name, dataset).items()}
    if not any(run in results for run in grid):
      continue
    config = build(network, name, dataset, phase='final', candidate=grid[studies.best(results, grid)], px=px,
                   real=real)
    found |= {f'{prefix}{dataset}_seed{seed}': dataclasses.replace(config, seed=seed) for seed in range(seeds)}
  return _starting(found, init_from)
