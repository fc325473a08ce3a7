"""Finds the text tower of an evaluation that compares images with texts, such as zero-shot classification.

`build.resources` calls `find` when an evaluator first needs an encoder of texts. The text tower is taken from the first
of these places: the weights in the settings of the evaluation; the weights that are evaluated; the run itself, if the
objective trains a text tower; the weights that the run began with (`init_from`).
"""
from __future__ import annotations

import logging

from jax.sharding import Mesh

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.models import cost
from vit_jax.record import console
from vit_jax.weights import loading, text_encoder
from vit_jax.weights import text as texts
from vit_jax.weights.network import Weights
from vit_jax.weights.text_encoder import TextEncoder

log = logging.getLogger('vit_jax.jobs')


def find(config: schema.Config, weights: Weights | None, name: str, settings: schema.TextEvaluation, *,
         mesh: Mesh) -> TextEncoder:
  """Loads the encoder of texts for an evaluation.

  Args:
    config: the config of the run.
    weights: the weights that are evaluated; None = the run evaluates its own network.
    name, settings: the name and the settings of the evaluation.
    mesh: the devices for the parameters of the tower.

  Raises UserError if no weights are set, they have no text tower, or the network has features of another width.
  """
  console.begin_stage('loading the text tower')
  if weights is None and not settings.weights and config.objective.takes_texts:
    return text_encoder.of_run(config, mesh=mesh)
  image_tower = None if settings.weights else weights  # None = is loaded from `address` below
  if image_tower is None:
    address = settings.weights or config.init_from
  else:
    address = image_tower.given or image_tower.source
  if not address:
    raise UserError(f'evals.{name}.weights: expected weights with a text tower, got none. Set '
                    f'--config.evals.{name}.weights=FILE, or begin the run with such weights (init_from).')
  image_tower = image_tower or loading.load(address)
  width = cost.forward(config.model, config.image_px, head=config.head, num_classes=0).width
  tower_width = cost.forward(image_tower.model, image_tower.preprocess.image_px, head=config.head, num_classes=0).width
  if width != tower_width:
    raise UserError(f'evals.{name}.weights: expected weights of a network with {width} features, as that of the run, '
                    f'got {tower_width} in {address}. Use the text tower that belongs to this image tower.')
  text_tower = texts.load(address, image=image_tower)
  log.info('%s', texts.describe(text_tower))
  return TextEncoder(text_tower, image_tower, tokenizer_file=settings.tokenizer, mesh=mesh)
