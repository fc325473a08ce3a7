"""A run of Weights & Biases. `$WANDB_MODE=offline` writes it to files, which `wandb sync` sends."""
from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vit_jax.core import lazy
from vit_jax.core.types import HostArray
from vit_jax.record.trackers.tracker import Histogram, Status

if TYPE_CHECKING:
  import wandb
else:
  wandb = lazy.Module('wandb')


class WeightsAndBiases:
  """Sends metrics to a run, which is resumed if one with this id exists.

  Steps are a metric of their own, `step`: a resumed run may repeat steps, and wandb drops values of earlier steps.

  Args:
    project: PROJECT or ENTITY/PROJECT.
    name: of the run.
    run_id: of letters and digits, the same at every start of the run.
    folder: for its files.
    settings: of the run, by dotted name.
  """

  def __init__(self, project: str, *, name: str, run_id: str, folder: str, settings: Mapping[str, str]) -> None:
    entity, _, project = project.rpartition('/')
    self._run = wandb.init(entity=entity or None, project=project, name=name, id=run_id, resume='allow', dir=folder,
                           config=dict(settings))
    self._run.define_metric('step')
    self._run.define_metric('*', step_metric='step')

  def write(self, step: int, values: Mapping[str, float]) -> None:
    self._run.log({**values, 'step': step})

  def images(self, step: int, values: Mapping[str, HostArray]) -> None:
    self._run.log({**{name: [wandb.Image(one) for one in images] for name, images in values.items()}, 'step': step})

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    self._run.log({**{name: wandb.Histogram(np_histogram=(one.counts.tolist(), one.edges.tolist()))
                      for name, one in values.items()}, 'step': step})

  def settle(self) -> None:
    pass

  def close(self, status: Status) -> None:
    self._run.finish(exit_code=1 if status == 'failed' else 0)
