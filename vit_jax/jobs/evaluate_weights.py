"""Weights of any format as what evaluations need: a network with views, its config, data and state."""
from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.contracts import View
from vit_jax.core.errors import UserError
from vit_jax.core.types import Params
from vit_jax.data import opening
from vit_jax.data.labels import classes, imagenet
from vit_jax.data.source import Part, Parts
from vit_jax.jobs import build
from vit_jax.models import heads
from vit_jax.objectives import distill
from vit_jax.objectives.networks import NetworkView, statistics
from vit_jax.parallel import mesh as meshes
from vit_jax.record import console
from vit_jax.train.state import TrainState
from vit_jax.weights import init_state, loading, preprocess
from vit_jax.weights.network import Weights
from vit_jax.weights.reading import Reading

log = logging.getLogger('vit_jax.jobs')

_LEARNING = ('For weights with other classes than the data, --config.evals=knn,fewshot,logistic learns the classes of '
             'the data from features')


class Network:
  """Loaded weights with views, as evaluations need them."""

  def __init__(self, config: schema.Config, *, has_head: bool) -> None:
    backbone = build.build_backbone(config)
    self._view: View = (distill.view(backbone, heads.build(config.head, config.model)) if has_head
                        else NetworkView(backbone))

  def views(self) -> dict[str, View]:
    return {'student': self._view}


def check_overridden(overridden: Collection[str]) -> None:
  """Raises UserError for overrides of the network, which is that of the weights."""
  if given := [name for name in overridden if name.startswith(('model.', 'head.'))]:
    raise UserError(f'config.{given[0]}: expected the network of the weights, got an override. Set what tensors do not '
                    'determine with --model=heads=N,gelu=exact,norm_eps=1e-6.')


def load(config: schema.Config, where: str, reading: Reading, overridden: Collection[str]) -> Weights:
  """Returns the weights, for images of `config.image_px` if that is on the command line."""
  console.begin_stage('loading the weights')
  found = loading.load(where, **reading._asdict())
  if 'image_px' in overridden:
    found = loading.at_size(found, preprocess.scaled(found.preprocess, config.image_px))
  log.info('%s', loading.text(found))
  return found


def check_head(found: Weights, config: schema.Config, *, where: str) -> None:
  """Raises UserError if an evaluation needs the head of classes, and the weights have none, or a projection."""
  is_projection = found.num_classes and not found.head.bias and found.family != 'run'  # as of CLIP
  if needs_head(config) and (is_projection or not found.num_classes):
    got = f'a projection to {found.num_classes} numbers' if is_projection else 'weights without one'
    raise UserError(f'--weights={where}: expected weights with a classification head, got {got}. Use weights that were '
                    'trained on classes, or --config.evals=knn,fewshot,logistic.')


def with_weights(config: schema.Config, found: Weights, overridden: Collection[str]) -> schema.Config:
  """Returns the config with network and preprocessing of the weights, except for settings on the command line."""
  p, recipe = found.preprocess, config.data.recipe
  kept: dict[str, Any] = {name: value for name, value in preprocess.recipe_values(p).items()
                          if f'data.recipe.{name}' not in overridden}
  if p.native_patch and 'data.recipe.eval_native_patch' not in overridden:
    recipe = dataclasses.replace(recipe, eval_native_patch=p.native_patch)
  if recipe.eval_native_patch and 'data.recipe.eval_resize_px' not in overridden:
    kept['eval_resize_px'] = 0  # complete images
  return dataclasses.replace(
      config, model=found.model, head=found.head, image_px=p.image_px,
      data=dataclasses.replace(config.data, channels=found.channels, recipe=dataclasses.replace(recipe, **kept)))


def open_data(config: schema.Config, found: Weights) -> build.Data:
  """Opens the data to evaluate, with labels that index the outputs of the head.

  Raises:
    UserError: the order of the classes is unknown or different.
  """
  source = opening.check_labels(
      opening.open_split(config.data, config.data.eval_split, image_px=config.image_px), config.data)
  if not needs_head(config):
    return build.Data(source, source, source.class_names, in_memory=False)
  own = source.class_names
  known = None if config.data.classes else imagenet.by_ids(own, found.num_classes, found.class_names)
  # The numbers of all outputs, which the weights do not name so.
  are_numbers = bool(classes.numbered(own)) and len(own) == found.num_classes and own != found.class_names and not (
      set(own) & set(found.class_names))
  try:
    if known:
      log.info('The %s classes of the data are WordNet ids, and are evaluated as outputs of the %s classes of %s.',
               f'{len(own):,}', f'{found.num_classes:,}', known.title)
      source = classes.renumbered(source, known.lines(), where=known.title)
    elif not config.data.classes and are_numbers:
      log.info('The %s classes of the data are numbers, and are evaluated as these outputs of %s.',
               f'{len(own):,}', found.source)
      source = Parts([Part(source, labels=classes.numbered(own))],
                     class_names=found.class_names or classes.ordered(own))
    elif not config.data.classes and found.class_names and own != found.class_names:
      source = classes.renumbered(source, found.class_names, where=found.source)
    else:
      init_state.check_order(found, own, config.data)
  except UserError as error:
    raise UserError(f'{str(error).rstrip(".")}. {_LEARNING}.') from None
  return build.Data(source, source, source.class_names, in_memory=False)


def needs_head(config: schema.Config) -> bool:
  """Returns whether an evaluation uses the classes of the head.

  The other evaluations are trained on the data's classes.
  """
  return any(isinstance(one, schema.TopK) for one in config.evals.values())


def state(found: Weights, mesh: jax.sharding.Mesh) -> TrainState:
  """Returns the weights as a train state, replicated on all devices."""
  params: Params = {name: found.params[name] for name in ('backbone', 'head', 'head_dist') if name in found.params}
  step, params, extra = jax.device_put((jnp.zeros((), jnp.int32), params, statistics(found.state)),
                                       meshes.replicated(mesh))
  return TrainState(step, params, {}, extra)
