"""The text tower of an evaluation with texts: of the evaluated weights, or of those that a run began with.

`build.resources` calls `find` when an evaluator first needs an encoder of texts.
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
  """Returns the encoder of texts of an evaluation.

  Args:
    config: the config of the run.
    weights: the weights that are evaluated; None = those of the run.
    name, settings: the name and the settings of the evaluation.
    mesh: the devices for the parameters of the tower.

  Raises:
    UserError: no weights are set, they have no text tower, or the network has features of another width.
  """
  console.begin_stage('loading the text tower')
  if weights is None and not settings.weights and config.objective.takes_texts:
    return text_encoder.of_run(config, mesh=mesh)
  image = weights if weights is not None and not settings.weights else None
  where = settings.weights or ((weights.given or weights.source) if weights else config.init_from)
  if not where:
    raise UserError(f'evals.{name}.weights: expected weights with a text tower, got none. Set '
                    f'--config.evals.{name}.weights=FILE, or begin the run with such weights (init_from).')
  image = image or loading.load(where)
  width, beside = (cost.forward(model, px, head=config.head, num_classes=0).width for model, px in (
      (config.model, config.image_px), (image.model, image.preprocess.image_px)))
  if width != beside:
    raise UserError(f'evals.{name}.weights: expected weights of a network with {width} features, as that of the run, '
                    f'got {beside} in {where}. Use the text tower that belongs to this image tower.')
  tower = texts.load(where, image=image)
  log.info('%s', texts.describe(tower))
  return TextEncoder(tower, image, tokenizer_file=settings.tokenizer, mesh=mesh)
