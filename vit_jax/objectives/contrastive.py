"""Training on images and texts: SigLIP (Zhai et al. 2023, arXiv 2303.15343), CLIP (Radford et al. 2021, 2103.00020) and
LiT (Zhai et al. 2021, 2111.07991), whose image tower is frozen.

An image tower and a text tower give vectors of unit length; the loss compares all pairs of a batch
(`objectives/pair_losses.py`). A tower whose parameters are all frozen for the whole run only evaluates: it has no
dropout and no backward pass.

Differs from CLIP: its program clips the scale of the logits after each update. Here the scale is limited where it is
used, and its parameter gets no gradient that would increase it beyond the limit.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.config.schema import Activation, Gelu, PairLoss, TextProjection
from vit_jax.core import trees
from vit_jax.core.axes import labelled
from vit_jax.core.contracts import Backbone, Coupling, View
from vit_jax.core.numerics import counted, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Features, Key, LossOut, Params, PyTree
from vit_jax.data.image.transform import Shapes
from vit_jax.data.source import Source
from vit_jax.data.text import captions
from vit_jax.models import cost, heads, initialization
from vit_jax.models.text_tower import TextTower
from vit_jax.objectives import pair_losses, spec
from vit_jax.objectives.networks import STATE, NetworkView, OneNetwork, init_backbone, statistics
from vit_jax.optim import rules

SCALES = {PairLoss.SIGMOID: 10., PairLoss.SOFTMAX: 1 / .07}
"""Published scales of the logits at the start: SigLIP's t' = ln 10, and CLIP's t' = ln(1 / 0.07)."""
PARTS = ('head', 'text', 'logits')
"""What a view has beside the backbone: the projection of images, the text tower, scale and bias of the logits."""


class Contrastive(OneNetwork):
  """Objective: images and their texts get similar vectors, others different ones.

    x = unit(W backbone(image)), without W if `out_dim` is 0;  y = unit(tower(text))
    logits = e^t' x·y + b, and their loss over all pairs; with `same_class` all pairs of a class match

  Parameters: `backbone`, `head/kernel` (W), `text`, and `logits/{scale, bias}`, which are t' and b (sigmoid only).

  Metrics beside the loss: `similarity`, the mean cosine of an image and its own text, `scale` and `bias` of the logits.

  An objective that has more terms, such as the prediction of captions, inherits: its `embed` returns more rows, one for
  each example, and its `compare` adds their mean.

  Args:
    backbone: of images.
    tower: of texts, with vectors of the width of those of images.
    settings: of the objective.
    dtype: of the products of vectors.
    is_frozen: whether a parameter, by its path, is frozen for the whole run.
  """

  def __init__(self, backbone: Backbone, tower: TextTower, settings: schema.Contrastive, *, dtype: DTypeLike,
               is_frozen: Callable[[str], bool] = lambda name: False) -> None:
    self.backbone, self.tower, self.settings = backbone, tower, settings
    self._head, self._dtype, self._is_frozen = head(), dtype, is_frozen

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys, s = split_key(key, 'backbone', 'head', 'text'), self.settings
    backbone, state, features = init_backbone(self.backbone, keys['backbone'], batch['image'])
    params = {'backbone': backbone, 'text': self.tower.init(keys['text'])}
    if s.out_dim:
      params['head'] = self._head.init(keys['head'], features.pooled.shape[-1], s.out_dim)
    logits = {'scale': math.log(s.scale_init or SCALES[s.loss])}
    if s.loss is PairLoss.SIGMOID:
      logits['bias'] = s.bias_init
    params['logits'] = {name: labelled(jnp.full((), value), ()) for name, value in logits.items()}
    return params, statistics(state)

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    rows, stats = self.embed(params, extra, batch, key, step)
    return self.compare(params, extra, rows, batch, key, step)._replace(stats=stats)

  def coupling(self) -> Coupling:
    return Coupling(self.embed, self.compare)

  def embed(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> tuple[PyTree, PyTree]:
    """Returns the vectors of images and texts, each `[B, E]` f32, and the statistics of the backbone."""
    del step
    batch = counted(batch)
    features, state = self.image_features(params, extra, batch, key)
    texts = self.text_vectors(params, self.text_tokens(params, batch), batch)
    return (self.image_vectors(params, features), texts), statistics(state)

  def compare(self, params: Params, extra: Extra, rows: PyTree, batch: Batch, key: Key, step: Array) -> LossOut:
    """Returns the loss of the vectors that `embed` returns for the whole batch."""
    del extra, key, step
    (image_BE, text_BE), mask_B, logits, s = rows, batch.get('mask'), params['logits'], self.settings
    scale = jnp.exp(limited(logits['scale'], math.log(s.scale_max)) if s.scale_max else logits['scale'])
    bias = logits.get('bias', jnp.zeros(()))
    pairs = pair_losses.Pairs(image=image_BE.astype(self._dtype), text=text_BE.astype(self._dtype), scale=scale,
                              bias=bias, mask=mask_B, group=batch['label'] if s.same_class else None)
    loss = pair_losses.mean_loss(pairs, s.loss, form=s.form, chunk=s.chunk)
    values = {'similarity': (image_BE * text_BE).sum(-1), 'scale': scale}
    if 'bias' in logits:
      values['bias'] = bias
    metrics = {name: weighted_mean(jnp.broadcast_to(jax.lax.stop_gradient(x), len(image_BE)), mask_B)
               for name, x in values.items()}
    return LossOut(loss, metrics, {})

  def views(self) -> dict[str, View]:
    return {'student': NetworkView(self.backbone, PARTS)}

  def image_features(self, params: Params, extra: Extra, batch: Batch, key: Key) -> tuple[Features, PyTree]:
    """Returns the features of the images, and the state of the backbone."""
    backbone, is_frozen = params['backbone'], self._are_frozen('backbone', params)
    backbone = jax.lax.stop_gradient(backbone) if is_frozen else backbone
    features, state = self.backbone.apply(backbone, extra.get(STATE, {}), batch['image'], train=not is_frozen,
                                          key=None if is_frozen else key)
    return features, extra.get(STATE, {}) if is_frozen else state

  def image_vectors(self, params: Params, features: Features) -> Array:
    """Returns the vectors of the images, `[B, E]` f32."""
    pooled_BD = features.pooled
    if 'head' in params:
      pooled_BD = self._head.apply(params['head'], pooled_BD)
    return heads.normalize(pooled_BD, axis=-1)

  def text_tokens(self, params: Params, batch: Batch) -> Array:
    """Returns the tokens of the texts after the last norm of the text tower, `[B, N, D]` f32."""
    return self.tower.tokens(self._text_params(params), batch['text'], batch['text_mask'])

  def text_vectors(self, params: Params, tokens_BND: Array, batch: Batch) -> Array:
    """Returns the vectors of the texts with these tokens, `[B, E]` f32."""
    pooled_BE = self.tower.pooled(self._text_params(params), tokens_BND, batch['text'], batch['text_mask'])
    return heads.normalize(pooled_BE, axis=-1)

  def _text_params(self, params: Params) -> Params:
    return jax.lax.stop_gradient(params['text']) if self._are_frozen('text', params) else params['text']

  def _are_frozen(self, part: str, params: Params) -> bool:
    return all(self._is_frozen(f'{part}/{name}') for name in trees.flatten(params[part]))


@jax.custom_vjp
def limited(x: Array, most: float) -> Array:
  """Returns `min(x, most)`; at the limit and above it, its gradient only decreases x."""
  return jnp.minimum(x, most)


def _limited_forward(x: Array, most: float) -> tuple[Array, tuple[Array, float]]:
  return jnp.minimum(x, most), (x, most)


def _limited_backward(saved: tuple[Array, float], gradient: Array) -> tuple[Array, None]:
  x, most = saved
  return jnp.where(x < most, gradient, jnp.maximum(gradient, 0.)), None


limited.defvjp(_limited_forward, _limited_backward)


def head() -> heads.Head:
  """Returns the projection of images: a matrix without a bias, which starts at random, with variance 1 / D."""
  laws = initialization.VISION_TRANSFORMER._replace(head=initialization.LECUN)
  return heads.Head(schema.Head(bias=False), laws=laws)


def tower(settings: schema.Text, *, out_width: int, model: schema.Model | None = None) -> TextTower:
  """Returns the text tower of these settings, whose vectors have `out_width` numbers.

  `model` is the image tower, whose dtype, kernels and rematerialization it has in training.
  """
  gelu = None if settings.activation is Activation.RELU else Gelu(settings.activation.value)
  run: dict[str, Any] = {}
  if model is not None:
    run = {'dtype': jnp.dtype(model.dtype.value), 'kernels': model.kernels}
  if isinstance(model, schema.ViT | schema.Mixer):
    run |= {'execution': model.execution, 'remat': model.remat}
  sizes = {name: getattr(settings, name) for name in ('vocabulary', 'length', 'width', 'depth', 'heads', 'mlp')}
  return TextTower(
      **sizes, gelu=gelu, norm_eps=settings.norm_eps, pool=settings.pool, is_causal=settings.causal,
      is_sinusoidal=settings.sinusoidal, out_width=0 if settings.projection is TextProjection.NONE else out_width,
      projection_bias=settings.projection is TextProjection.BIAS, **run)


class Spec(spec.Spec[schema.Contrastive]):
  """Builds `Contrastive` from a config, with the texts of its examples."""
  from_weights = tuple(f'text.{field.name}' for field in dataclasses.fields(schema.Text) if field.name != 'weights')

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Contrastive:
    return Contrastive(backbone, **self.arguments(lengths))

  def arguments(self, lengths: Lengths) -> dict[str, Any]:
    """Returns the arguments of `Contrastive` beside the backbone."""
    model, frozen_for = self.config.model, rules.until(self.config.optimizer.rules, lengths.steps)
    width = self.settings.out_dim or cost.forward(
        model, self.config.image_px, head=self.config.head, num_classes=0, num_channels=self.config.data.channels).width
    return {'tower': tower(self.settings.text, out_width=width, model=model), 'settings': self.settings,
            'dtype': jnp.dtype(model.dtype.value), 'is_frozen': lambda name: frozen_for(name) >= lengths.total_steps}

  def begins_with(self) -> dict[str, spec.Begin]:
    return {'text': spec.Begin(self.settings.text.weights, 'text', self.config.model, self.config.image_px,
                               is_text=True)}

  def open_texts(self, source: Source) -> captions.Texts:
    s = self.settings
    return captions.open_texts(source, s.text, prompts=s.prompts, names=s.names, seed=self.config.seed)

  def batch_shapes(self) -> Shapes:
    return captions.shapes(self.settings.text.length)
