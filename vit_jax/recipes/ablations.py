"""The ablations of the ViT paper's Appendix D (arXiv 2010.11929): variants of a network or a run, by name.

`Base` is a run on which an ablation is made: on JFT-300M as in the paper, or small, for a few processor cores.
"""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vit_jax.config import schema as s
from vit_jax.recipes import published, sizes, studies, transfer

FEW_SHOT = 'few-shot %'
MEAN = 'mean'
FIGURES = {'shape': (s.Figure('exaFLOPs', FEW_SHOT, series='scaled', log_x=True),)}
OPTIMIZER_FIGURES = (s.Figure('run', MEAN),)
_OTHERS = (s.Figure('run', FEW_SHOT),)


class Base(NamedTuple):
  """What the runs of an ablation have in common."""
  vit: s.ViT    # a plain one
  shape: s.ViT  # which is scaled; in Appendix D.2: 8 layers of width 1024 with MLPs of 2048 and patches of 32 px
  rate: float   # learning rate
  run: Callable[[str, s.Model, float], s.Config]  # makes the run of a name, a network and a learning rate


def positions(base: Base) -> dict[str, s.Config]:
  """Returns the runs of Appendix D.4, Table 8: which positions are used, and where they are added."""
  return {name: base.run(name, dataclasses.replace(base.vit, positions=positions), base.rate)
          for name, positions in sizes.POSITION_ABLATION.items()}


def pool(base: Base) -> dict[str, s.Config]:
  """Returns the runs of Appendix D.3, Figure 9: class token, or mean of the patches.

  The mean needs another learning rate, 3/8 of that of the class token.
  """
  cls, mean = dataclasses.replace(base.vit, pool=s.ClassToken()), dataclasses.replace(base.vit, pool=s.Mean())
  return {'cls': base.run('cls', cls, base.rate), 'mean': base.run('mean', mean, base.rate),
          'mean_lower_rate': base.run('mean_lower_rate', mean, base.rate * 3 / 8)}


def shape(base: Base) -> dict[str, s.Config]:
  """Returns the runs of Appendix D.2, Figure 8: one dimension scaled, or all of them. The factors are our choice."""
  plain = base.shape
  variants: dict[str, s.ViT] = {'base': plain}
  for factor in (2, 4):
    variants |= {
        f'depth_{factor}': dataclasses.replace(plain, depth=plain.depth * factor),
        f'width_{factor}': dataclasses.replace(plain, width=plain.width * factor, heads=plain.heads * factor),
        f'mlp_{factor}': s.replaced(plain, {'mlp.hidden': plain.mlp.hidden * factor}),
        f'patch_{factor}': dataclasses.replace(plain, patch=plain.patch // factor)}
  variants['all_2'] = s.replaced(plain, {
      'depth': plain.depth * 2, 'width': plain.width * 2, 'heads': plain.heads * 2, 'mlp.hidden': plain.mlp.hidden * 2,
      'patch': plain.patch // 2})
  return {name: base.run(name, model, base.rate) for name, model in variants.items()}


def optimizer_rows(results: s.Results, runs: Sequence[str], datasets: Sequence[str]) -> list[s.Row]:
  """Returns the rows of Appendix D.1, Table 7.

  A pre-training run has one row, with the accuracy on each set beside the published one. The mean is given when every
  set of the paper is measured.
  """
  rows: list[s.Row] = []
  for run in runs:
    if run in results:
      in_paper = published.TABLE_7.get(run, {})
      ours = transfer.accuracies(results, datasets, prefix=f'{run}_')
      ours.pop(transfer.REAL, None)
      if set(ours) == set(transfer.ROWS.values()):
        ours[MEAN] = statistics.fmean(ours.values())
      row: s.Row = {'run': run, 'exaFLOPs': results[run].exaflops, 'parameters': results[run].num_params}
      for name in (*transfer.ROWS.values(), MEAN):
        row |= {name: round(ours[name], 2) if name in ours else None, f'{name}, Table 7': in_paper.get(name)}
      rows.append(row)
  return rows


def rows(results: s.Results) -> list[s.Row]:
  """Returns a row for each run. `scaled` names what a run of `shape` scales.

  Runs of `positions` have the numbers of Table 8 beside theirs.
  """
  rows: list[s.Row] = []
  for run, result in results.items():
    few_shot = studies.few_shot(result.metrics)
    if few_shot is None:
      few_shot = result.headline
    top = next((value for name, value in result.metrics.items() if name.endswith('/top1')), None)
    row: s.Row = {
        'run': run, 'scaled': run.partition('_')[0], FEW_SHOT: studies.percent(few_shot),
        'top-1 %': studies.percent(top), 'lr': result.config.optimizer.lr, 'exaFLOPs': result.exaflops,
        'parameters': result.num_params, 'steps': result.step, 'seconds': round(result.seconds, 1)}
    if run in published.TABLE_8:
      row['Table 8 %'] = published.TABLE_8[run]
    rows.append(row)
  return rows


def figures(which: str) -> tuple[s.Figure, ...]:
  """Returns the panels of the figure of an ablation."""
  return FIGURES.get(which, _OTHERS)


VARIANTS: dict[str, Callable[[Base], dict[str, s.Config]]] = {'positions': positions, 'pool': pool, 'shape': shape}
"""The ablations of one network, by name."""
