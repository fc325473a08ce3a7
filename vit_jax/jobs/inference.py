"""Loaded weights as a function of pictures: what using them, and exporting them, is made of."""
from __future__ import annotations

import functools
from collections.abc import Callable

from vit_jax.config import schema
from vit_jax.core.types import Array, Features, Outputs, PyTree
from vit_jax.jobs import build
from vit_jax.models import heads
from vit_jax.objectives.distill import Student
from vit_jax.objectives.supervised import STATE
from vit_jax.weights import preprocess
from vit_jax.weights.loading import Weights


def run_config(weights: Weights) -> schema.Config:
  """A config of a run with this network."""
  return schema.Config(name=weights.source, model=weights.model, head=weights.head,
                       image_px=weights.preprocess.image_px)


def eval_recipe(weights: Weights) -> schema.Recipe:
  """What the weights' images go through."""
  return schema.Recipe(**preprocess.recipe_values(weights.preprocess))


def parameters(weights: Weights) -> PyTree:
  """What `function` takes."""
  if not weights.num_classes:
    return {'backbone': weights.params['backbone'], 'state': weights.state}
  return _view(weights).select(weights.params, {STATE: weights.state})


def function(weights: Weights) -> Callable[[PyTree, Array], Outputs]:
  """`(parameters, image [B, H, W, 3] f32, normalised)` to features and logits, which are None without a head."""
  if weights.num_classes:
    return _view(weights).predict
  backbone = build.build_backbone(run_config(weights))

  def infer(params: PyTree, image: Array) -> Outputs:
    return Outputs(None, backbone.apply(params['backbone'], params['state'], image, train=False, key=None)[0])
  return infer


def head(weights: Weights, params: PyTree) -> Callable[[Features], Array] | None:
  """Features to logits `[B, C]`, with `parameters`; None without a head."""
  return functools.partial(_view(weights).classify, params) if weights.num_classes else None


def _view(weights: Weights) -> Student:
  return Student(build.build_backbone(run_config(weights)), heads.Head(weights.head))
