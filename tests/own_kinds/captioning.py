"""CoCa in a file of one's own (arXiv 2205.01917): images and texts are compared, and captions are predicted."""
from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core.contracts import Backbone
from vit_jax.core.numerics import counted, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Mean, Params, PyTree
from vit_jax.models.initialization import TORCH
from vit_jax.models.layers import Dense, applied, initial
from vit_jax.models.text_tower import TextTower
from vit_jax.models.vit.block import Cross
from vit_jax.models.vit.context import BlockInfo, Context
from vit_jax.objectives import contrastive
from vit_jax.objectives.networks import statistics


@dataclasses.dataclass
class CoCa(schema.Contrastive):
  """Contrastive, and the cross-entropy of each next token of a caption."""
  implementation: ClassVar[str] = 'tests.own_kinds.captioning:Spec'
  caption_weight: float = schema.ranged(2., schema.Range(0))


class Objective(contrastive.Contrastive):
  """The tokens of the causal text tower attend to the image, and predict the next token."""

  def __init__(self, backbone: Backbone, tower: TextTower, settings: CoCa, **options: Any) -> None:
    super().__init__(backbone, tower, settings, **options)
    text, context = settings.text, Context(norm=schema.LayerNorm(settings.text.norm_eps), gelu=tower.gelu,
                                           dtype=tower.dtype)
    self.cross = Cross(heads=text.heads, mlp=schema.Mlp(text.mlp), context=context)
    self.words = Dense(features=(text.vocabulary,), axes=('embed', 'classes'), law=TORCH, num_batch_dims=2,
                       dtype=tower.dtype)
    self.align = Dense(features=(text.width,), axes=('embed', None), law=TORCH, num_batch_dims=2, dtype=tower.dtype)

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    params, extra = super().init(key, batch)
    keys, x = split_key(key, 'cross', 'words', 'align'), jnp.zeros((1, 2, self.settings.text.width))
    features = jax.eval_shape(lambda: self.image_features(params, extra, batch, key)[0])
    image = jnp.zeros((1, 1, features.tokens.shape[-1]))
    return {**params, 'cross': initial(self.cross, keys['cross'], x, x, BlockInfo(1)),
            'words': initial(self.words, keys['words'], x), 'align': initial(self.align, keys['align'], image)}, extra

  def embed(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> tuple[PyTree, PyTree]:
    """Returns the vectors of images and texts, the loss of each caption `[B]`, and the statistics of the backbone."""
    batch = counted(batch)
    features, state = self.image_features(params, extra, batch, key)
    tokens_BND = self.text_tokens(params, batch)
    vectors = self.image_vectors(params, features), self.text_vectors(params, tokens_BND, batch)
    memory = applied(self.align, params['align'], features.tokens)
    x = applied(self.cross, params['cross'], tokens_BND.astype(memory.dtype), memory, BlockInfo(len(memory)))
    log_p = jax.nn.log_softmax(applied(self.words, params['words'], x[:, :-1]).astype(jnp.float32))
    nll_BN = -jnp.take_along_axis(log_p, batch['text'][:, 1:, None], axis=2)[..., 0]
    weight_BN = batch['text_mask'][:, 1:].astype(jnp.float32)
    caption_B = (nll_BN * weight_BN).sum(1) / jnp.maximum(weight_BN.sum(1), 1.)
    return (*vectors, caption_B), statistics(state)

  def compare(self, params: Params, extra: Extra, rows: PyTree, batch: Batch, key: Key, step: Array) -> LossOut:
    """Returns the loss of all pairs, and the mean loss of the captions."""
    image_BE, text_BE, caption_B = rows
    out = super().compare(params, extra, (image_BE, text_BE), batch, key, step)
    caption = weighted_mean(caption_B, batch.get('mask'))
    total = out.loss.sum / out.loss.weight + self.settings.caption_weight * caption.sum / caption.weight
    return out._replace(loss=Mean(total * out.loss.weight, out.loss.weight),
                        metrics={**out.metrics, 'caption': jax.lax.stop_gradient(caption)})


class Spec(contrastive.Spec):
  """Builds `Objective` from a config."""

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Objective:
    return Objective(backbone, **self.arguments(lengths))
