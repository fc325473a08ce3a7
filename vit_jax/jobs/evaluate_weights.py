"""`--job=evaluate --weights=…`: measures weights of any format on a set of pictures, and writes `evaluate.json`."""
from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config import check, schema
from vit_jax.core.contracts import View
from vit_jax.core.errors import UserError
from vit_jax.core.types import Extra, Params
from vit_jax.data.pipeline import transforms
from vit_jax.data.sources import classes, opening
from vit_jax.evaluate import final as results
from vit_jax.jobs import build, resume
from vit_jax.jobs import runtime as startup
from vit_jax.jobs.evaluate import print_results
from vit_jax.models import heads
from vit_jax.objectives import distill
from vit_jax.objectives.networks import NetworkView, statistics
from vit_jax.parallel import kernels
from vit_jax.parallel import mesh as meshes
from vit_jax.record import run_directory, storage
from vit_jax.train.state import TrainState
from vit_jax.weights import init_state, loading, preprocess
from vit_jax.weights.loading import Weights

log = logging.getLogger('vit_jax.jobs')

_LEARNING = ('Where the weights know other classes than the data: --config.evals=knn,fewshot,logistic learns those of '
             'the data from features')


class Asked(NamedTuple):
  """What a person says of weights on the command line; '' is nothing."""
  where: str
  preprocess: str = ''
  model: str = ''
  view: str = ''


class Network:
  """Loaded weights as what evaluations take: something with views."""

  def __init__(self, config: schema.Config, *, has_head: bool):
    backbone = build.build_backbone(config)
    self._view: View = (distill.view(backbone, heads.Head(config.head)) if has_head
                        else NetworkView(backbone))

  def views(self) -> dict[str, View]:
    return {'student': self._view}


def run(config: schema.Config, asked: Asked, *, overridden: Collection[str], workdir: storage.Path | None) -> int:
  """Evaluates weights on every evaluation of the config; exit status 0.

  Args:
    config: data and evaluations; network and preprocessing are those of the weights.
    asked: which weights.
    overridden: settings of the config that a person has given, which decide over the weights.
    workdir: where `evaluate.json` goes; None = `runs/evaluate/NAME`.
  """
  if given := [name for name in overridden if name.startswith(('model.', 'head.'))]:
    raise UserError(f'config.{given[0]}: the weights say what network they are; what they cannot say is told by '
                    '--model=heads=N,gelu=exact,norm_eps=1e-6')
  if workdir is not None and (workdir / 'checkpoints').is_dir():
    raise UserError(f'--workdir={workdir} holds a run of its own; want another one for what is measured of weights')
  startup.start()
  found = loading.load(asked.where, preprocess=asked.preprocess, model=asked.model, view=asked.view)
  if 'image_px' in overridden:
    found = loading.at_size(found, preprocess.scaled(found.preprocess, config.image_px))
  log.info('%s', loading.text(found))
  if not found.num_classes and needs_head(config):
    raise UserError(f'{asked.where} has no head, so it knows no classes; want weights that were trained or fine-tuned '
                    'on classes, or --config.evals=knn,fewshot,logistic, which need none')
  config = with_weights(config, found, overridden)
  check.check(config)
  workdir = workdir or pathlib.Path('runs', 'evaluate', pathlib.Path(asked.where.rstrip('/')).name).absolute()
  data = open_data(config, found)
  mesh, shard = build.open_mesh(config)
  kernels.check(config.model, mesh, name='model')
  network = Network(config, has_head=bool(found.num_classes))
  evaluators = build.evaluators(config, data, network, mesh=mesh, shard=shard, workdir=workdir,
                                bar=config.train.progress)
  final = results.measure(evaluators, network, _state(found, mesh))
  workdir.mkdir(parents=True, exist_ok=True)
  resume.write_config(workdir, config)
  run_directory.write_json(workdir / 'weights.json',
                           {'source': found.source, 'family': found.family, **found.report.plain()})
  fit = transforms.eval_transform(config.data.recipe, config.image_px)
  results.write_evaluation(workdir, final, 0, fit=fit)
  results.write_predictions(workdir, final, build.eval_source(config, data, final.name), data.class_names, fit)
  if jax.process_index() == 0:
    print_results(final, workdir, num_classes=len(data.class_names), recipe=config.data.recipe)
  return 0


def with_weights(config: schema.Config, found: Weights, overridden: Collection[str]) -> schema.Config:
  """The config with network and preprocessing of weights, but for what a person has given."""
  p, recipe = found.preprocess, config.data.recipe
  kept: dict[str, Any] = {name: value for name, value in preprocess.recipe_values(p).items()
                          if f'data.recipe.{name}' not in overridden}
  return dataclasses.replace(
      config, model=found.model, head=found.head, image_px=p.image_px,
      data=dataclasses.replace(config.data, recipe=dataclasses.replace(recipe, **kept)))


def open_data(config: schema.Config, found: Weights) -> build.Data:
  """What is to be evaluated, with labels that are outputs of the head.

  Raises:
    UserError: which output is which class cannot be known.
  """
  source = opening.check_labels(
      opening.open_split(config.data, config.data.eval_split, image_px=config.image_px), config.data)
  if not needs_head(config):
    return build.Data(source, source, source.class_names, in_memory=False)
  try:
    if not config.data.classes and found.class_names and source.class_names != found.class_names:
      source = classes.renumbered(source, found.class_names, where=found.source)
    else:
      init_state.check_order(found, source.class_names, is_listed=bool(config.data.classes))
  except UserError as error:
    raise UserError(f'{error}. {_LEARNING}') from None
  return build.Data(source, source, source.class_names, in_memory=False)


def needs_head(config: schema.Config) -> bool:
  """Whether some evaluation is of the head's classes; others learn the classes of the data."""
  return any(isinstance(one, schema.TopK) for one in config.evals.values())


def _state(found: Weights, mesh: jax.sharding.Mesh) -> TrainState:
  """The weights as a state, whole on every device."""
  params: Params = {name: found.params[name] for name in ('backbone', 'head', 'head_dist') if name in found.params}
  extra: Extra = statistics(found.state)
  whole = meshes.replicated(mesh)
  placed = jax.device_put((params, extra), whole)
  return TrainState(jax.device_put(jnp.zeros((), jnp.int32), whole), placed[0], {}, placed[1])
