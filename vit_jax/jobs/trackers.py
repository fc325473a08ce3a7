"""Opens the trackers of a run (TensorBoard, Weights & Biases, MLflow), and makes the hooks that show images in them.

`train` calls three functions: `check` before anything is read; `opener`, whose result the `Writer` calls to open the
trackers; and `hooks`, for the loop. `record/trackers.py` has a class for each tracker.
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
"""In the run directory: the ids of the run in its trackers, `{"wandb": ID}`, under which a resumed run continues."""
PACKAGES = {'wandb': ('wandb',), 'mlflow': ('mlflow', 'mlflow.tracking', 'mlflow.entities')}
"""Modules that a tracker imports, by the name of its setting. The first one is the package."""
log = logging.getLogger('vit_jax.jobs')


def check(config: schema.Config) -> None:
  """Raises UserError with the name of the package if that of a tracker is not installed."""
  for setting, (package, *_) in PACKAGES.items():
    if getattr(config.trackers, setting) and importlib.util.find_spec(package) is None:
      raise extras.missing(package, setting, f'trackers.{setting}')


def opener(config: schema.Config, workdir: storage.Path,
           resumed_from: int | None) -> Callable[[str], list[tracker_classes.Guarded]]:
  """Returns a function that opens the trackers of a run, given a local folder for their files. `Writer` calls it."""
  def open_trackers(folder: str) -> list[tracker_classes.Guarded]:
    chosen, trackers = config.trackers, list[tracker_classes.Guarded]()
    ids = _ids(workdir) if resumed_from is not None else {}
    settings = {setting.name: describe.text(setting.value) for setting in describe.settings(config)}

    def remember(setting: str, run_id: str) -> str:
      ids[setting] = run_id
      try:
        run_directory.write_json(workdir / FILE, ids)
      except (OSError, UserError, TemporaryError) as error:
        log.warning('%s cannot be written, so a resumed run will be a new run in its trackers: %s', FILE, error)
      return run_id

    def open_in_background(setting: str, make: Callable[[], tracker_classes.Tracker]) -> None:
      # Not in the thread of the tracker: Python 3.11 may fail to parse source in two threads at a time.
      with contextlib.suppress(Exception):  # making the tracker raises it again, and the tracker reports it
        for module in PACKAGES[setting]:
          importlib.import_module(module)
      trackers.append(tracker_classes.Guarded(f'trackers.{setting}', make, background=True))

    if chosen.tensorboard:
      trackers.append(tracker_classes.tensorboard(folder, resumed_from))
    if chosen.wandb:
      run_id = ids.get('wandb') or remember('wandb', secrets.token_hex(4))
      open_in_background('wandb', lambda: tracker_classes.WeightsAndBiases(
          chosen.wandb, name=config.name, run_id=run_id, folder=folder, settings=settings))
    if chosen.mlflow:
      open_in_background('mlflow', lambda: tracker_classes.MLflow(
          chosen.mlflow, name=config.name, run_id=ids.get('mlflow', ''), settings=settings,
          remember=lambda run_id: remember('mlflow', run_id)))
    return trackers

  return open_trackers


def _ids(workdir: storage.Path) -> dict[str, str]:
  """Returns the content of `FILE`; {} if it is missing or damaged, which makes a new run in each tracker."""
  try:
    ids = documents.load(workdir / FILE)
  except (OSError, ValueError):
    return {}
  return {str(key): str(value) for key, value in ids.items()} if isinstance(ids, dict) else {}


def hooks(config: schema.Config, parts: build.Parts, writer: Writer, mesh: Mesh) -> list[loop.Hook]:
  """Returns the hooks that show images and histograms; none by default."""
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
