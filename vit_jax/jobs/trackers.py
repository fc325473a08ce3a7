"""Opens the trackers of a run (TensorBoard, Weights & Biases, MLflow), and makes the hooks that show images in them.

`train` calls `check` before it reads data, passes the function from `opener` to the `Writer`, which opens the trackers,
and passes the result of `hooks` to the loop. `record/trackers.py` has a class for each tracker.
"""
from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import secrets
from collections.abc import Callable

from jax.sharding import Mesh

from vit_jax.config import describe, schema
from vit_jax.core import documents, extras
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.jobs import build
from vit_jax.record import run_directory, storage
from vit_jax.record import trackers as tracker_classes
from vit_jax.record.writer import Writer
from vit_jax.train import loop

FILE = 'trackers.json'
"""A file in the run directory with the id of the run in each tracker, such as `{"wandb": ID}`, for resumed runs."""
PACKAGES = {'wandb': ('wandb',), 'mlflow': ('mlflow', 'mlflow.tracking', 'mlflow.entities')}
"""Modules that a tracker imports, by the name of the tracker's setting. The first module is the package."""
log = logging.getLogger('vit_jax.jobs')


def check(config: schema.Config) -> None:
  """Raises UserError if the package of a tracker of the config is not installed; the message names the package."""
  for setting, (package, *_) in PACKAGES.items():
    if getattr(config.trackers, setting) and importlib.util.find_spec(package) is None:
      raise extras.missing(package, setting, f'trackers.{setting}')


def opener(config: schema.Config, workdir: storage.Path,
           resumed_from: int | None) -> Callable[[str], list[tracker_classes.Guarded]]:
  """Returns a function that opens the trackers of a run; its argument is a local folder for the files of trackers."""
  def open_trackers(folder: str) -> list[tracker_classes.Guarded]:
    chosen, trackers = config.trackers, list[tracker_classes.Guarded]()
    id_by_tracker = _read_ids(workdir) if resumed_from is not None else {}
    settings = {setting.name: describe.text(setting.value) for setting in describe.settings(config)}

    def write_id(setting: str, run_id: str) -> str:
      id_by_tracker[setting] = run_id
      try:
        run_directory.write_json(workdir / FILE, id_by_tracker)
      except (OSError, UserError, TemporaryError) as error:
        log.warning('%s cannot be written, so a resumed run will be a new run in its trackers: %s', FILE, error)
      return run_id

    def open_in_background(setting: str, make: Callable[[], tracker_classes.Tracker]) -> None:
      # Imports here, not in the thread of the tracker: Python 3.11 may fail to parse source in two threads at a time.
      with contextlib.suppress(Exception):  # `make` raises the same error again, and `Guarded` reports the error
        for module in PACKAGES[setting]:
          importlib.import_module(module)
      trackers.append(tracker_classes.Guarded(f'trackers.{setting}', make, background=True))

    if chosen.tensorboard:
      trackers.append(tracker_classes.tensorboard(folder, resumed_from))
    if chosen.wandb:
      run_id = id_by_tracker.get('wandb') or write_id('wandb', secrets.token_hex(4))
      open_in_background('wandb', lambda: tracker_classes.WeightsAndBiases(
          chosen.wandb, name=config.name, run_id=run_id, folder=folder, settings=settings))
    if chosen.mlflow:
      open_in_background('mlflow', lambda: tracker_classes.MLflow(
          chosen.mlflow, name=config.name, run_id=id_by_tracker.get('mlflow', ''), settings=settings,
          remember=lambda run_id: write_id('mlflow', run_id)))
    return trackers

  return open_trackers


def _read_ids(workdir: storage.Path) -> dict[str, str]:
  """Returns the content of `FILE`; {} if the file is missing or damaged: each tracker then begins a new run."""
  try:
    ids = documents.load(workdir / FILE)
  except (OSError, ValueError):
    return {}
  return {str(setting): str(run_id) for setting, run_id in ids.items()} if isinstance(ids, dict) else {}


def hooks(config: schema.Config, parts: build.Parts, writer: Writer, mesh: Mesh) -> list[loop.Hook]:
  """Returns the hooks that show images and histograms in the trackers; by default, there are none."""
  settings, recipe = config.trackers, config.data.recipe
  if not settings.images and not settings.histograms:
    return []
  from vit_jax.train import tracker_hooks
  added: list[loop.Hook] = []
  if settings.images:
    added.append(tracker_hooks.Images(settings.images, parts.prepare, writer.show, mean=recipe.mean, std=recipe.std,
                                      mesh=mesh, seed=config.seed))
  if settings.histograms and (every := parts.lengths.steps(settings.histograms)):
    added.append(tracker_hooks.Histograms(every, writer.show, mesh=mesh))
  return added
