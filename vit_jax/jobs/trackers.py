"""The trackers of a run by its config, and the hooks that show images and histograms in them.

`train` calls `check` before anything is read, passes `opener` to the writer of the record, which opens the trackers,
and the hooks to the loop. How each tracker is written is in `record/trackers.py`.
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
from vit_jax.record import trackers as shown
from vit_jax.record.writer import Writer
from vit_jax.train import loop

FILE = 'trackers.json'
"""In the run directory: the ids of the run in its trackers, by which a resumed run finds them again."""
PACKAGES = {'wandb': ('wandb',), 'mlflow': ('mlflow', 'mlflow.tracking', 'mlflow.entities')}
"""Modules that a tracker uses, the package first."""
log = logging.getLogger('vit_jax.jobs')


def check(config: schema.Config) -> None:
  """Checks that the packages of the trackers are installed.

  Raises:
    UserError: names the package that is missing.
  """
  for setting, (package, *_) in PACKAGES.items():
    if getattr(config.trackers, setting) and importlib.util.find_spec(package) is None:
      raise extras.missing(package, setting, f'trackers.{setting}')


def opener(config: schema.Config, workdir: storage.Path,
           resumed_from: int | None) -> Callable[[str], list[shown.Guarded]]:
  """Returns a function from a local folder for files to the trackers of a run, for `Writer`."""
  def opened(folder: str) -> list[shown.Guarded]:
    chosen, trackers = config.trackers, list[shown.Guarded]()
    ids = _ids(workdir) if resumed_from is not None else {}
    settings = {one.name: describe.text(one.value) for one in describe.settings(config)}

    def remember(setting: str, run_id: str) -> str:
      ids[setting] = run_id
      try:
        run_directory.write_json(workdir / FILE, ids)
      except (OSError, UserError, TemporaryError) as error:
        log.warning('%s cannot be written, so a resumed run will be a new run in its trackers: %s', FILE, error)
      return run_id

    def background(setting: str, make: Callable[[], shown.Tracker]) -> None:
      # Not in the thread of the tracker: Python 3.11 may fail to parse source in two threads at a time.
      with contextlib.suppress(Exception):  # which the tracker then raises again, and reports
        for module in PACKAGES[setting]:
          importlib.import_module(module)
      trackers.append(shown.Guarded(f'trackers.{setting}', make, background=True))

    if chosen.tensorboard:
      trackers.append(shown.tensorboard(folder, resumed_from))
    if chosen.wandb:
      run_id = ids.get('wandb') or remember('wandb', secrets.token_hex(4))
      background('wandb', lambda: shown.WeightsAndBiases(
          chosen.wandb, name=config.name, run_id=run_id, folder=folder, settings=settings))
    if chosen.mlflow:
      background('mlflow', lambda: shown.MLflow(
          chosen.mlflow, name=config.name, run_id=ids.get('mlflow', ''), settings=settings,
          remember=lambda given: remember('mlflow', given)))
    return trackers

  return opened


def _ids(workdir: storage.Path) -> dict[str, str]:
  try:
    ids = documents.load(workdir / FILE)
  except (OSError, ValueError):  # no such file, or a damaged one: a new run
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
