"""The scaling study of the ViT paper (arXiv 2010.11929, section 4.4, Figure 5, Table 6): rows, fits, what comes next.

A point is a pre-training run. Its compute is that of pre-training; its accuracy is the mean on ImageNet over the runs
that fine-tune it, or its own where there are none. One law is fitted to all runs of a family (ViT, hybrid, ResNet).
"""
from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema as s
from vit_jax.core.errors import UserError
from vit_jax.recipes import published, scaling_laws, transfer

COMPUTE, ACCURACY, ERROR, FAMILY = 'exaFLOPs', 'top-1 %', 'error %', 'family'
FRONTIER = 'frontier'
FIGURES = (s.Figure(COMPUTE, ACCURACY, series=FAMILY, log_x=True),
           s.Figure(COMPUTE, ERROR, series=FAMILY, log_x=True, log_y=True))
PX = 384  # of fine-tuning, Table 5's caption
_DRAWN = 40  # points of a curve


class Run(NamedTuple):
  """A network, for how long it is pre-trained, and its learning rate."""
  model: str
  epochs: int
  rate: float

  @property
  def name(self) -> str:
    return f'{self.model.replace("/", "_")}_{self.epochs}ep'

  @property
  def prefix(self) -> str:
    """What the names of the runs that fine-tune it begin with."""
    return f'{self.name}_'


class Next(NamedTuple):
  """A network that was not trained, and what it would cost."""
  model: str
  epochs: int
  exaflops: float


def family(model: str) -> str:
  """Of a network by its name."""
  return 'ResNet' if model.startswith('BiT') else 'hybrid' if model.startswith(('R', 'hybrid')) else 'ViT'


def choose(runs: Sequence[Run], text: str) -> list[Run]:
  """The runs of the networks or families that `B/32+R50+B/16+ResNet` names; all for ''.

  Raises:
    UserError: a name is none of them.
  """
  known = sorted({run.model for run in runs}, key=len, reverse=True)
  families = list(dict.fromkeys(family(run.model) for run in runs))
  left, wanted = text, []
  while left:
    name = next((name for name in (*known, *families) if left == name or left.startswith(f'{name}+')), None)
    if name is None:
      raise UserError(f'models={text}: {left!r} begins with no network of this study; want some of '
                      f'{", ".join([*families, *dict.fromkeys(run.model for run in runs)])}, with + between them')
    wanted.append(name)
    left = left[len(name) + 1:]
  return [run for run in runs if not wanted or run.model in wanted or family(run.model) in wanted]


def points(results: s.Results, runs: Sequence[Run]) -> dict[Run, tuple[float, float]]:
  """Compute in exaFLOPs and accuracy in % of each run that has both."""
  found = {}
  for run in runs:
    result = results.get(run.name)
    if result is None:
      continue
    tuned = list(transfer.final_scores(results, 'imagenet2012', prefix=run.prefix).values())
    own = [100 * result.headline] if result.headline is not None else []
    if accuracy := tuned or own:
      found[run] = result.exaflops, statistics.fmean(accuracy)
  return found


def laws(measured: Mapping[Run, tuple[float, float]]) -> dict[str, scaling_laws.Law]:
  """The fit of each family that has enough points."""
  groups: dict[str, list[tuple[float, float]]] = {}
  for run, point in measured.items():
    groups.setdefault(family(run.model), []).append(point)
  fitted = {name: scaling_laws.fit([c for c, _ in group], [100 - a for _, a in group])
            for name, group in groups.items()}
  return {name: law for name, law in fitted.items() if law}


def rows(results: s.Results, runs: Sequence[Run], following: Sequence[Next]) -> list[s.Row]:
  """A row a pre-training run, beside the paper's; then of each family the next network, with what the law says."""
  measured = points(results, runs)
  fitted = laws(measured)
  best = scaling_laws.frontier((run.name, *point) for run, point in measured.items())
  table = {(row.model, row.epochs): row for row in published.TABLE_6}
  found: list[s.Row] = []
  for run in runs:
    if run.name in results:
      compute, row, law = results[run.name].exaflops, table.get((run.model, run.epochs)), fitted.get(family(run.model))
      accuracy = measured[run][1] if run in measured else None
      found.append(_row(run.model, run.epochs, compute, law, status='measured') | {
          ACCURACY: accuracy, ERROR: None if accuracy is None else 100 - accuracy,
          'on the frontier': 'yes' if run.name in best else 'no',
          'published exaFLOPs': row.exaflops if row else None, 'published %': row.imagenet if row else None,
          **_transferred(results, run, row)})
  return found + [_row(one.model, one.epochs, one.exaflops, fitted.get(family(one.model)), status='predicted')
                  for one in following]


def _transferred(results: s.Results, run: Run, row: published.Scaled | None) -> s.Row:
  """The columns of Table 6 beside ImageNet, each beside the published number; nothing for a network without a row."""
  if row is None:
    return {}
  ours = transfer.accuracies(results, tuple(transfer.ROWS), prefix=run.prefix)
  found: s.Row = {}
  for name, value in list(zip(published.TRANSFER_SETS, row.accuracies, strict=True))[1:]:
    found |= {f'{name} %': round(ours[name], 2) if name in ours else None, f'{name} published %': value}
  return found


def tunings(results: s.Results, runs: Sequence[Run], networks: Mapping[str, s.Model],
            datasets: Sequence[str]) -> dict[str, s.Config]:
  """For each finished pre-training run, the runs that choose how it is fine-tuned on each set, at 384 px."""
  found: dict[str, s.Config] = {}
  for run in runs:
    if run.name in results:
      found |= transfer.tunings(networks[run.model], run.model, datasets, px=PX, prefix=run.prefix,
                                init_from=results[run.name].workdir)
  return found


def finals(results: s.Results, runs: Sequence[Run], networks: Mapping[str, s.Model], datasets: Sequence[str], *,
           real: str, seeds: int) -> dict[str, s.Config]:
  """The final runs on each set with what was best on its held-out examples."""
  found: dict[str, s.Config] = {}
  for run in runs:
    if run.name in results:
      found |= transfer.finals(networks[run.model], run.model, datasets, results, px=PX, real=real, seeds=seeds,
                               prefix=run.prefix, init_from=results[run.name].workdir)
  return found


def _row(model: str, epochs: int, compute: float, law: scaling_laws.Law | None, *, status: str) -> s.Row:
  return {'model': model, FAMILY: family(model), 'epochs': epochs, COMPUTE: float(f'{compute:.4g}'), ACCURACY: None,
          ERROR: None, 'law %': round(100 - law.error(compute), 2) if law else None,
          'at most %': round(100 - law.floor, 2) if law else None, 'status': status}


def curves(results: s.Results, runs: Sequence[Run], following: Sequence[Next]) -> list[s.Row]:
  """The law of each family up to its next network, and the frontier of all runs, as points to draw lines through."""
  measured = points(results, runs)
  ends = {family(one.model): one.exaflops for one in following}
  found: list[s.Row] = []
  for name, law in laws(measured).items():
    computes = [compute for run, (compute, _) in measured.items() if family(run.model) == name]
    for compute in np.geomspace(min(computes), max(*computes, ends.get(name, 0.)), _DRAWN).tolist():
      found.append({FAMILY: name, COMPUTE: compute, ERROR: law.error(compute), ACCURACY: 100 - law.error(compute)})
  best = scaling_laws.frontier((run.name, *point) for run, point in measured.items())
  places = {run.name: point for run, point in measured.items()}
  return found + [{FAMILY: FRONTIER, COMPUTE: compute, ERROR: 100 - accuracy, ACCURACY: accuracy}
                  for compute, accuracy in (places[name] for name in best)]
