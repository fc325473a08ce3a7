"""Token labeling (LV-ViT, Jiang et al. 2021, arXiv 2104.10858): each patch token has its own target.

The batch holds the targets: `token_targets [B, N, C]` are distributions over classes, made from label maps. A token
whose target is 0 (it lies outside the image) does not count. With `class_from_map` the target of the class token also
comes from the map, as `labels [B, C]`, as in the authors' code; otherwise it is the image's label, as in the paper
(eq. 3).

Differs from TokenLabeling: MixToken's partner is the neighbor in a pair of rows, as for all mixing here; there, row i
of a device's B is mixed with row B - 1 - i. Both are random after the shuffle.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core.contracts import Backbone, TokenBackbone, View
from vit_jax.core.numerics import class_targets, counted, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Features, Key, LossOut, Params, PyTree
from vit_jax.data import answers
from vit_jax.data.device import mix, token_targets
from vit_jax.data.image.transform import Shapes
from vit_jax.data.source import Source
from vit_jax.data.user_files import Rules
from vit_jax.models import heads
from vit_jax.objectives import losses, spec
from vit_jax.objectives.networks import STATE, Head, NetworkView, OneNetwork, init_backbone, statistics

DENSE_SHARE = 0.5  # of the tokens' logits at inference; LV-ViT


class TokenLabel(OneNetwork):
  """Objective: `L = H(y_cls, softmax(z_cls)) + beta mean_n H(y_n, softmax(z_n))` (eq. 3), in nats.

  z_cls is `head` on the pooled features, z_n is `aux` on token n. With `mix` a box of tokens, one for each `mix_group`
  consecutive images, is exchanged with another image after the embedding (MixToken, section 3.2) and back after the
  last block; the class target is mixed in proportion to the area. Inference adds half of the largest token logit of
  each class: `z_cls + max_n z_n / 2`.
  """
  _backbone: TokenBackbone

  def __init__(self, backbone: TokenBackbone, head: Head, aux: Head, settings: schema.TokenLabel, *, patch: int,
               num_classes: int) -> None:
    self._backbone, self._head, self._aux = backbone, head, aux
    self._settings, self._patch, self._num_classes = settings, patch, num_classes

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys, image = split_key(key, 'backbone', 'head', 'aux'), batch['image']
    params, state, features = init_backbone(self._backbone, keys['backbone'], image)
    heads = {name: head.init(keys[name], features.pooled.shape[1], self._num_classes)
             for name, head in (('head', self._head), ('aux', self._aux))}
    return {'backbone': params, **heads}, statistics(state)

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del step
    batch = counted(batch)
    keys, image, mask_B = split_key(key, 'mix', 'encoder'), batch['image'], batch.get('mask')
    backbone, grid = params['backbone'], (image.shape[1] // self._patch, image.shape[2] // self._patch)
    kept_BN = self._kept(keys['mix'], image.shape[0], grid, mask_B)
    tokens_BND, state = self._backbone.stem(backbone, extra.get(STATE, {}), image, train=True)
    features = self._backbone.encode(
        backbone, exchange(tokens_BND, kept_BN), self._backbone.positions(backbone, grid), grid=grid, train=True,
        key=keys['encoder'])
    logits_BC = self._head.apply(params['head'], features.pooled)
    s = self._settings
    smooth = smooth_map if s.class_target is schema.ClassTarget.MAP else losses.smooth
    mixed_BC = mix_by_area(class_targets(batch, self._num_classes), kept_BN)
    class_B = losses.softmax_xent(logits_BC, smooth(mixed_BC, s.label_smoothing))
    dense_B = self._dense(params['aux'], exchange(features.tokens, kept_BN), batch)
    loss = weighted_mean(class_B + s.dense_weight * dense_B, mask_B)
    metrics = {'accuracy': losses.hit(logits_BC, mixed_BC), 'class_loss': class_B, 'dense_loss': dense_B}
    means = {name: weighted_mean(values_B, mask_B) for name, values_B in metrics.items()}
    return LossOut(loss, means, statistics(state))

  def views(self) -> dict[str, View]:
    return {'student': NetworkView(self._backbone, ('head', 'aux'), self._logits)}

  def _logits(self, selected: PyTree, features: Features) -> Array:
    """Returns the logits of classes for inference, `[B, C]`."""
    num_images, num_tokens, width = features.tokens.shape
    dense_RC = self._aux.apply(selected['aux'], features.tokens.reshape(-1, width))
    best_BC = dense_RC.reshape(num_images, num_tokens, -1).max(1)
    return self._head.apply(selected['head'], features.pooled) + DENSE_SHARE * best_BC

  def _kept(self, key: Key, num_images: int, grid: tuple[int, int], mask_B: Array | None) -> Array | None:
    """Returns `[B, N] f32`, 0 where a token comes from the partner; all 1 for rows without one. None: no mixing."""
    if not self._settings.mix_token:
      return None
    groups = schema.num_groups(num_images, self._settings.mix_group)
    keys = jax.random.split(key, groups) if groups > 1 else key[None]
    kept_GN = jax.vmap(lambda one: draw_kept(one, grid))(keys)
    kept_BN = jnp.broadcast_to(kept_GN[:, None], (groups, num_images // groups, kept_GN.shape[1])).reshape(
        num_images, -1)
    return kept_BN if mask_B is None else jnp.where(mix.swap_pairs(mask_B)[:, None] > 0, kept_BN, 1.)

  def _dense(self, aux: Params, tokens_BND: Array, batch: Batch) -> Array:
    """Returns the mean cross-entropy of the tokens with a target, `[B]`."""
    logits_RC = self._aux.apply(aux, tokens_BND.reshape(-1, tokens_BND.shape[-1]))
    targets_BNC = batch['token_targets']
    targets_RC = smooth_map(targets_BNC, self._settings.label_smoothing).reshape(logits_RC.shape)
    nll_BN = losses.softmax_xent(logits_RC, targets_RC).reshape(tokens_BND.shape[:2])
    counts_BN = (targets_BNC.sum(-1) > 0).astype(jnp.float32)
    return (nll_BN * counts_BN).sum(1) / jnp.maximum(counts_BN.sum(1), 1)


def smooth_map(targets: Array, amount: float) -> Array:
  """Smooths targets of maps over the last axis C, `(1 - amount + amount / C) targets + amount / C`.

  The sum is `1 + amount / C`: the authors' code multiplies by the value that a true class has after smoothing.
  """
  off = amount / targets.shape[-1]
  return (1. - amount + off) * targets + off if amount else targets


def exchange(tokens_BND: Array, kept_BN: Array | None) -> Array:
  """Replaces the tokens with `kept` 0 by those of the other row of the pair. It is its own inverse."""
  if kept_BN is None:
    return tokens_BND
  return jnp.where(kept_BN[..., None] > 0, tokens_BND, mix.swap_pairs(tokens_BND))


def mix_by_area(targets_BC: Array, kept_BN: Array | None) -> Array:
  """Mixes the class targets of a pair in proportion to their tokens."""
  if kept_BN is None:
    return targets_BC
  share_B1 = kept_BN.mean(1, keepdims=True)
  return share_B1 * targets_BC + (1. - share_B1) * mix.swap_pairs(targets_BC)


def draw_kept(key: Key, grid: tuple[int, int]) -> Array:
  """Returns `[N] f32`: 0 in a box on the token grid, drawn as cutmix draws one with Beta(1, 1), and 1 elsewhere."""
  area_key, center_key = jax.random.split(key)
  return mix.outside_box(center_key, grid, area=jax.random.uniform(area_key)).reshape(-1)


class Spec(spec.Spec[schema.TokenLabel]):
  """Builds `TokenLabel` from a config, with the label maps of its examples."""

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> TokenLabel:
    encoder, model = spec.tokens(backbone)
    head, aux = heads.build(self.config.head, model), heads.build(schema.Head(), model)
    return TokenLabel(encoder, head, aux, self.settings, patch=model.patch, num_classes=num_classes)

  def open_maps(self, source: Source) -> answers.Answers:
    s = self.settings
    return answers.open_label_maps(s.maps, source, grid=(s.map_grid[0], s.map_grid[1]), top=s.top,
                                   rules=Rules(self.config.data.follow_links))

  def targets(self) -> token_targets.Targets:
    px, patch = self.config.image_px, self.vit.patch
    return token_targets.Targets(self.settings.map_grid, (px[0] // patch, px[1] // patch),
                                 self.settings.class_target is schema.ClassTarget.MAP)

  def batch_shapes(self) -> Shapes:
    shape = (self.settings.map_grid[0] * self.settings.map_grid[1], self.settings.top)
    return {'token_labels': (shape, np.int32), 'token_scores': (shape, np.float32)}
