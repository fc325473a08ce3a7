"""What `train` refuses when it builds the objects of a run, found by building them, without devices and compiler.

The weights, the data, the objective with its texts, label maps and stored features, and the evaluators are made by the
functions that a run calls (`build.py`, `weights/init_state.py`). Networks and parameters are shapes. What needs a
network connection is left to the run, as are large weights, weights that are not on this machine, and images that a
teacher labels.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable, Collection
from typing import TypeVar

import jax

from vit_jax.config import check, layout, schema
from vit_jax.config.schema import ranges
from vit_jax.core.errors import UserError
from vit_jax.data import loader as loaders
from vit_jax.data.source import title
from vit_jax.data.text import prompts as prompting
from vit_jax.evaluate import evaluators as evaluation
from vit_jax.jobs import build, train
from vit_jax.models import cost
from vit_jax.objectives import kinds
from vit_jax.parallel import mesh as meshes
from vit_jax.record import storage
from vit_jax.weights import addresses, inherit, init_state
from vit_jax.weights.network import Weights

ASSUMED_STEPS, ASSUMED_CLASSES = 1_000_000, 1_000
"""Steps of an epoch and classes, where neither the config nor a dataset on this machine has them.

So many steps that no schedule is longer than a run, and few enough for a thousand epochs.
"""
LARGE_BYTES = 4 << 30
"""Weights of more bytes are not read, which takes memory and the better part of a minute."""
T = TypeVar('T')


class _Collector:
  """Calls functions and collects the errors of a person that they raise."""

  def __init__(self) -> None:
    self.problems: list[str] = []

  def result(self, work: Callable[[], T]) -> T | None:
    """Returns what a function returns; None if it raises UserError, which is a problem."""
    try:
      return work()
    except UserError as error:
      if str(error) not in self.problems:
        self.problems.append(str(error))
      return None


def problems(config: schema.Config, workdir: storage.Path | None, overridden: Collection[str], *, elsewhere: bool,
             is_here: bool) -> list[str]:
  """Returns the problems of a training run that its config and the files on this machine show.

  Args:
    config: a config whose settings and places have no problems.
    workdir: the run directory; None = the default.
    overridden: names of the settings on the command line.
    elsewhere: whether the run is on other hosts, whose files are not known.
    is_here: whether its sources are on this machine.
  """
  log = logging.getLogger('vit_jax')
  before = log.level
  log.setLevel(logging.ERROR)  # the run itself shows warnings
  try:
    collector = _Collector()
    _find(config, workdir, overridden, collector, elsewhere=elsewhere, is_here=is_here)
    return collector.problems
  finally:
    log.setLevel(before)


def _find(config: schema.Config, workdir: storage.Path | None, overridden: Collection[str], collector: _Collector, *,
          elsewhere: bool, is_here: bool) -> None:
  """Finds the weights and the data, reads what is on this machine, and builds the run with it."""
  named = collector.result(lambda: init_state.named(config)) or {}
  for prefix, part in ranges.walk(config):
    if prompts := getattr(part, 'prompts', ''):
      collector.result(functools.partial(prompting.find_templates, prompts, setting=f'{prefix}prompts'))
  named |= {f'evals.{name}.weights': settings.weights for name, settings in config.evals.items()
            if isinstance(settings, schema.TextEvaluation) and settings.weights}
  paths = [] if elsewhere else [_path(where, collector) for where in dict.fromkeys(named.values())]
  num_bytes = sum(file.stat().st_size for path in paths if path
                  for file in (path.rglob('*') if path.is_dir() else [path]) if file.is_file())
  is_known = not collector.problems and not elsewhere and None not in paths and num_bytes <= LARGE_BYTES
  weights: Weights | None = None
  if is_known and named:
    where = workdir or train.default_workdir(config.name)
    resolved = collector.result(lambda: inherit.resolve(config, overridden, where))
    if resolved is None:
      return
    config, weights = resolved
    collector.result(functools.partial(check.check, config))
    if collector.problems:
      return
  data = collector.result(lambda: build.open_data(config)) if is_here else None
  if is_here and data is None:
    return
  _build(config, data, weights, collector, is_known=is_known)


def _path(where: str, collector: _Collector) -> pathlib.Path | None:
  """Returns the local path of weights; None if they are not on this machine, which is a problem of paths alone."""
  if not addresses.exists(pathlib.Path(where).expanduser()) and addresses.is_remote(where):
    with contextlib.suppress(UserError):
      return addresses.local(where, offline=True)
    return None
  return collector.result(lambda: addresses.local(where))


def _build(config: schema.Config, data: build.Data | None, weights: Weights | None, collector: _Collector, *,
           is_known: bool) -> None:
  """Builds a run on one device of this machine. What depends on the devices of the run is left out."""
  mesh = meshes.make(schema.Mesh(1, 1, 1), jax.devices()[:1])
  config = layout.plain(cost.plain(dataclasses.replace(config, mesh=schema.Mesh(1, 1, 1))))
  if data:
    measured = collector.result(lambda: build.measured(config, data.train))
    if measured is None:
      return
    config = measured
  numbers = known_numbers(config)
  if data:
    numbers = build.Numbers(config.data.num_examples or len(data.train), len(data.class_names), data.in_memory)
    collector.result(lambda: loaders.check_batch_size(config.batch_size, len(data.train), title(data.train)))
  elif config.data.num_examples and not config.data.any_num_examples:
    collector.result(lambda: loaders.check_batch_size(config.batch_size, config.data.num_examples, config.data.source))
  parts = collector.result(lambda: build.parts(config, mesh=mesh, **numbers._asdict()))
  if parts and is_known and (data or not config.objective.has_head):  # a head is compared by its classes
    collector.result(lambda: init_state.given(config, parts.program, data.class_names if data else (), weights))
  if not data:
    return
  opened = data._replace(in_memory=False)  # else evaluators decode all images now
  collector.result(lambda: build.check_size(config.data, opened.train))
  spec = kinds.of(config)
  targets = collector.result(lambda: (spec.open_maps(opened.train), spec.open_texts(opened.train)))
  has_texts = any(isinstance(settings, schema.TextEvaluation) for settings in config.evals.values())
  if parts and targets and (is_known or not has_texts):  # else they would read the weights again
    collector.result(lambda: evaluation.build(build.resources(
        config, opened, parts.objective, mesh=mesh, shard=meshes.local_rows(mesh))))


def known_numbers(config: schema.Config) -> build.Numbers:
  """Returns the numbers of the data that the config describes, or assumed ones."""
  data = config.data
  return build.Numbers(data.num_examples or ASSUMED_STEPS * config.batch_size, data.num_classes or ASSUMED_CLASSES,
                       in_memory=False)
