"""Token labelling (LV-ViT, Jiang et al. 2021, arXiv 2104.10858): each patch token learns a target of its own.

Targets come with the batch: `token_targets [B, N, C]` are distributions over classes, made of label maps. A token whose
target is 0 (nothing of the image is there) does not count. With `class_from_map` the class token has such a target too,
`labels [B, C]`, as in the authors' code; else the image's label, as in the paper (eq. 3). Where we differ from the
authors' code (zihangJiang/TokenLabeling@9dbfd59): MixToken's partner is the neighbour in a pair of rows, as for all
mixing here; there it is the row as far from the end of the batch as this one is from its start.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from vit_jax.core.contracts import TokenBackbone, View
from vit_jax.core.numerics import class_targets, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Outputs, Params, PyTree
from vit_jax.objectives import losses
from vit_jax.objectives.supervised import STATE, Head

DENSE_SHARE = .5  # of the tokens' logits at inference; LV-ViT


class TokenLabel:
  """Objective: `L = H(y_cls, softmax(z_cls)) + beta mean_n H(y_n, softmax(z_n))` (eq. 3), in nats.

  z_cls is `head` on the pooled features, z_n is `aux` on token n. With `mix` a box of tokens is exchanged with
  another image after the embedding (MixToken, section 3.2) and back after the last block; the class target is mixed
  by area. Inference adds half of the largest token logit of each class: `z_cls + max_n z_n / 2`.
  """

  def __init__(self, backbone: TokenBackbone, head: Head, aux: Head, *, patch: int, num_classes: int,
               dense_weight: float, mix: bool, label_smoothing: float, class_from_map: bool):
    self._backbone, self._head, self._aux, self._patch = backbone, head, aux, patch
    self._num_classes, self._dense_weight, self._mix = num_classes, dense_weight, mix
    self._smoothing, self._class_from_map = label_smoothing, class_from_map

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys, image = split_key(key, 'backbone', 'head', 'aux'), batch['image']
    params, state = self._backbone.init(keys['backbone'], image)
    width = jax.eval_shape(lambda: self._backbone.apply(params, state, image, train=False, key=None)[0].pooled).shape[1]
    heads = {'head': self._head, 'aux': self._aux}
    return ({'backbone': params, **{name: head.init(keys[name], width, self._num_classes)
                                    for name, head in heads.items()}}, {STATE: state} if state else {})

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del step
    keys, image, mask_B = split_key(key, 'mix', 'encoder'), batch['image'], batch.get('mask')
    backbone, grid = params['backbone'], (image.shape[1] // self._patch, image.shape[2] // self._patch)
    kept_BN = self._kept(keys['mix'], image.shape[0], grid, mask_B)
    tokens_BND, state = self._backbone.stem(backbone, extra.get(STATE, {}), image, train=True)
    features = self._backbone.encode(
        backbone, exchange(tokens_BND, kept_BN), self._backbone.positions(backbone, grid), grid=grid, train=True,
        key=keys['encoder'])
    logits_BC = self._head.apply(params['head'], features.pooled)
    smooth = smooth_map if self._class_from_map else losses.smooth
    mixed_BC = mix_by_area(class_targets(batch, self._num_classes), kept_BN)
    class_B = losses.softmax_xent(logits_BC, smooth(mixed_BC, self._smoothing))
    dense_B = self._dense(params['aux'], exchange(features.tokens, kept_BN), batch)
    return LossOut(weighted_mean(class_B + self._dense_weight * dense_B, mask_B), {
        'accuracy': weighted_mean(losses.hit(logits_BC, mixed_BC), mask_B),
        'class_loss': weighted_mean(class_B, mask_B), 'dense_loss': weighted_mean(dense_B, mask_B)},
        {STATE: state} if state else {})

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    del params, step
    return {**extra, **stats} if stats else extra

  def views(self) -> dict[str, View]:
    return {'student': Both(self._backbone, self._head, self._aux)}

  def _kept(self, key: Key, num_images: int, grid: tuple[int, int], mask_B: Array | None) -> Array | None:
    """`[B, N] f32`, 0 where a token comes from the partner; all 1 for rows without one. None: nothing is mixed."""
    if not self._mix:
      return None
    kept_BN = jnp.broadcast_to(draw_kept(key, grid)[None], (num_images, grid[0] * grid[1]))
    return kept_BN if mask_B is None else jnp.where(swap_pairs(mask_B)[:, None] > 0, kept_BN, 1.)

  def _dense(self, aux: Params, tokens_BND: Array, batch: Batch) -> Array:
    """Mean over the tokens with a target of their cross-entropy, `[B]`."""
    logits_RC = self._aux.apply(aux, tokens_BND.reshape(-1, tokens_BND.shape[-1]))
    targets_BNC = batch['token_targets']
    targets_RC = smooth_map(targets_BNC, self._smoothing).reshape(logits_RC.shape)
    nll_BN = losses.softmax_xent(logits_RC, targets_RC).reshape(tokens_BND.shape[:2])
    counts_BN = (targets_BNC.sum(-1) > 0).astype(jnp.float32)
    return (nll_BN * counts_BN).sum(1) / jnp.maximum(counts_BN.sum(1), 1)


class Both:
  """A view on a classifier with a head on its tokens too."""

  def __init__(self, backbone: TokenBackbone, head: Head, aux: Head):
    self._backbone, self._head, self._aux = backbone, head, aux

  def select(self, params: Params, extra: Extra) -> PyTree:
    return {**{name: params[name] for name in ('backbone', 'head', 'aux')}, 'state': extra.get(STATE, {})}

  def predict(self, selected: PyTree, image: Array) -> Outputs:
    features, _ = self._backbone.apply(selected['backbone'], selected['state'], image, train=False, key=None)
    num_images, num_tokens, width = features.tokens.shape
    dense_RC = self._aux.apply(selected['aux'], features.tokens.reshape(-1, width))
    best_BC = dense_RC.reshape(num_images, num_tokens, -1).max(1)
    return Outputs(self._head.apply(selected['head'], features.pooled) + DENSE_SHARE * best_BC, features)


def smooth_map(targets: Array, amount: float) -> Array:
  """`(1 - amount + amount / C) targets + amount / C`, as the authors' code smooths targets of maps; C is the last axis.

  They add up to `1 + amount / C`: the code multiplies by the value that a true class has after smoothing.
  """
  off = amount / targets.shape[-1]
  return (1. - amount + off) * targets + off if amount else targets


def swap_pairs(x: Array) -> Array:
  """Rows 0 and 1, 2 and 3, ... exchanged; their number is even."""
  return x.reshape(-1, 2, *x.shape[1:])[:, ::-1].reshape(x.shape)


def exchange(tokens_BND: Array, kept_BN: Array | None) -> Array:
  """Tokens with those at `kept` 0 taken from the other row of the pair. Its own inverse."""
  if kept_BN is None:
    return tokens_BND
  return jnp.where(kept_BN[..., None] > 0, tokens_BND, swap_pairs(tokens_BND))


def mix_by_area(targets_BC: Array, kept_BN: Array | None) -> Array:
  """Class targets of a pair, in proportion to their tokens."""
  if kept_BN is None:
    return targets_BC
  share_B1 = kept_BN.mean(1, keepdims=True)
  return share_B1 * targets_BC + (1. - share_B1) * swap_pairs(targets_BC)


def draw_kept(key: Key, grid: tuple[int, int]) -> Array:
  """`[N] f32`: 0 in a box, as cutmix draws it with Beta(1, 1), but on the token grid; 1 around it."""
  area_key, center_key = jax.random.split(key)
  sides_2 = jnp.floor(jnp.sqrt(jax.random.uniform(area_key)) * jnp.array(grid, jnp.float32))
  center_2 = jax.random.randint(center_key, (2,), 0, jnp.array(grid))
  low_2, high_2 = center_2 - sides_2 // 2, center_2 + sides_2 // 2
  row_h, column_w = ((jnp.arange(grid[i]) >= low_2[i]) & (jnp.arange(grid[i]) < high_2[i]) for i in (0, 1))
  return 1. - (row_h[:, None] & column_w[None, :]).astype(jnp.float32).reshape(-1)
