"""The trackers of a run by its config, and the hooks that show images and histograms in them."""
from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import secrets
import threading
from collections.abc import Callable, Mapping

from jax.sharding import Mesh

from vit_jax.config import schema
from vit_jax.core import extras
from vit_jax.jobs import build
from vit_jax.record import run_directory, storage
from vit_jax.record.trackers import tensorboard
from vit_jax.record.trackers.tracker import Guarded, Tracker
from vit_jax.record.writer import Writer
from vit_jax.train import loop

FILE = 'trackers.json'
"""In the run directory: the ids of the run in its trackers, by which a resumed run finds them again."""
PACKAGES = {'wandb': ('wandb',), 'mlflow': ('mlflow', 'mlflow.tracking', 'mlflow.entities')}
"""Modules that a tracker uses, the package first."""
_REMEMBERING = threading.Lock()  # the trackers of a run start in threads


def check(config: schema.Config) -> None:
  """Checks that the packages of the trackers are installed.

  Raises:
    UserError: names the package that is missing.
  """
  for setting, (package, *_) in PACKAGES.items():
    if getattr(config.trackers, setting) and importlib.util.find_spec(package) is None:
      raise extras.missing(package, setting, f'trackers.{setting}')


def opener(config: schema.Config, workdir: storage.Path, resumed_from: int | None) -> Callable[[str], list[Guarded]]:
  """Returns a function from a local folder for files to the trackers of a run, for `Writer`."""
  def opened(folder: str) -> list[Guarded]:
    found = [tensorboard.opened(folder, resumed_from)] if config.trackers.tensorboard else []
    chosen = {setting: modules for setting, modules in PACKAGES.items() if getattr(config.trackers, setting)}
    settings = _settings(config) if chosen else {}
    for setting, modules in chosen.items():
      # Not in the thread of the tracker: Python 3.11 may fail to parse source in two threads at a time.
      with contextlib.suppress(Exception):  # which the tracker then raises again, and reports
        for module in modules:
          importlib.import_module(module)
      make = functools.partial(_make, setting, config, settings, workdir, folder, resumed_from)
      found.append(Guarded(f'trackers.{setting}', make, background=True))
    return found

  return opened


def _settings(config: schema.Config) -> dict[str, str]:
  """Returns every setting as text, by dotted name."""
  from vit_jax.config import describe
  return {one.name: describe.text(one.value) for one in describe.settings(config)}


def _make(setting: str, config: schema.Config, settings: Mapping[str, str], workdir: storage.Path, folder: str,
          resumed_from: int | None) -> Tracker:
  """Returns a new tracker, or the one of the earlier starts of a resumed run."""
  known = '' if resumed_from is None else _ids(workdir).get(setting, '')
  remember = functools.partial(_remember, workdir, setting)
  if setting == 'mlflow':
    from vit_jax.record.trackers.mlflow_run import MlflowRun
    return MlflowRun(config.trackers.mlflow, name=config.name, run_id=known, remember=remember, settings=settings)
  if not known:
    known = secrets.token_hex(4)
    remember(known)
  from vit_jax.record.trackers.weights_and_biases import WeightsAndBiases
  return WeightsAndBiases(config.trackers.wandb, name=config.name, run_id=known, folder=folder, settings=settings)


def _ids(workdir: storage.Path) -> dict[str, str]:
  try:
    found = json.loads((workdir / FILE).read_text())
  except (OSError, ValueError):  # no such file, or a damaged one: a new run
    return {}
  return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _remember(workdir: storage.Path, setting: str, run_id: str) -> None:
  with _REMEMBERING:
    run_directory.write_json(workdir / FILE, {**_ids(workdir), setting: run_id})


def hooks(config: schema.Config, parts: build.Parts, writer: Writer, mesh: Mesh) -> list[loop.Hook]:
  """Returns the hooks that show images and histograms; none by default."""
  settings, recipe = config.trackers, config.data.recipe
  if not settings.images and not settings.histograms:
    return []
  from vit_jax.train import tracker_hooks
  found: list[loop.Hook] = []
  if settings.images:
    found.append(tracker_hooks.Images(settings.images, parts.prepare, writer.show, mean=recipe.mean, std=recipe.std,
                                      mesh=mesh, seed=config.seed))
  if settings.histograms and (every := parts.lengths.steps(settings.histograms)):
    found.append(tracker_hooks.Histograms(every, writer.show, mesh=mesh))
  return found
