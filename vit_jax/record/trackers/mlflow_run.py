"""A run of MLflow, in the store of `$MLFLOW_TRACKING_URI`."""
from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vit_jax.core import lazy
from vit_jax.core.types import HostArray
from vit_jax.record.trackers.tracker import Histogram, Status

if TYPE_CHECKING:
  from mlflow import entities
  from mlflow import tracking as mlflow
else:
  mlflow, entities = lazy.Module('mlflow.tracking'), lazy.Module('mlflow.entities')

_NOT_IN_NAMES = re.compile(r'[^-\w./: ]')
_MOST_SETTINGS = 100  # in one request
_MOST_TEXT = 500      # characters of a setting, which every store takes
_ENDS: dict[Status, str] = {'done': 'FINISHED', 'stopped': 'KILLED', 'failed': 'FAILED'}


class MlflowRun:
  """Sends metrics to a run, which is resumed if `run_id` is given. Characters that names cannot have become `_`.

  Args:
    experiment: its name; made if there is none.
    name: of the run.
    run_id: of an earlier start; '' = a new run.
    remember: is given the id of a new run.
    settings: of the run, by dotted name.
  """

  def __init__(self, experiment: str, *, name: str, run_id: str, remember: Callable[[str], None],
               settings: Mapping[str, str]) -> None:
    logging.getLogger('mlflow').setLevel(logging.WARNING)  # it reports every table of its database
    self._client = mlflow.MlflowClient()
    if run_id:
      self._client.update_run(run_id, status='RUNNING')
      self._id = run_id
      return
    found = self._client.get_experiment_by_name(experiment)
    place = found.experiment_id if found else self._client.create_experiment(experiment)
    self._id = self._client.create_run(place, run_name=name).info.run_id
    remember(self._id)
    params = [entities.Param(key, value[:_MOST_TEXT]) for key, value in settings.items()]
    for first in range(0, len(params), _MOST_SETTINGS):
      self._client.log_batch(self._id, params=params[first:first + _MOST_SETTINGS])

  def write(self, step: int, values: Mapping[str, float]) -> None:
    now_ms = int(1000 * time.time())
    self._client.log_batch(self._id, metrics=[
        entities.Metric(_NOT_IN_NAMES.sub('_', name), value, now_ms, step) for name, value in values.items()])

  def images(self, step: int, values: Mapping[str, HostArray]) -> None:
    for name, images in values.items():
      for number, image in enumerate(images):
        self._client.log_image(self._id, image, key=f'{_NOT_IN_NAMES.sub("_", name)}/{number}', step=step)

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    """Does nothing: MLflow has no histograms."""

  def settle(self) -> None:
    pass

  def close(self, status: Status) -> None:
    self._client.set_terminated(self._id, status=_ENDS[status])
