"""Masked autoencoder (He et al. 2022, arXiv 2111.06377): most patches are hidden, and reconstructed from the rest.

The encoder gets the patches that are left and nothing else, so that it costs in proportion to them. Where we differ
from the authors' code: the class token begins at zero instead of N(0, .02), and query, key and value are initialised
as matrices of their own.
"""
from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from vit_jax.core.contracts import TokenBackbone, View
from vit_jax.core.numerics import split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Features, Key, LossOut, Params, PyTree
from vit_jax.models.mae_decoder import Decoder
from vit_jax.objectives import patches
from vit_jax.objectives.views import Encoder


class Reconstruction(NamedTuple):
  """`predicted [B, H, W, 3]` f32 and `hidden [B, H, W, 3]`, 1 where the encoder saw nothing, else 0."""
  predicted: Array
  hidden: Array


class Mae:
  """Objective: the mean squared error of hidden patches, `L = mean over hidden i of |x_i - y_i|^2 / (3 P^2)`.

  x_i is the patch, with mean 0 and deviation 1 if `normalized` (section 4.1), y_i its prediction. Per image
  `int(N (1 - hidden))` patches are visible.
  """

  def __init__(self, backbone: TokenBackbone, decoder: Decoder, *, patch: int, hidden: float, normalized: bool):
    self._backbone, self._decoder, self._patch = backbone, decoder, patch
    self._hidden, self._normalized = hidden, normalized

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys = split_key(key, 'backbone', 'decoder', 'mask_token')
    params, _ = self._backbone.init(keys['backbone'], batch['image'])
    return {'backbone': params, 'decoder': self._decoder.init(keys['decoder']),
            'mask_token': self._decoder.init_mask(keys['mask_token'])}, {}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del extra, step
    keys = split_key(key, 'hide', 'encoder')
    choice = self.draw(keys['hide'], batch['image'])
    wanted_BNP = self.targets(batch['image'])
    predicted_BNP = self.predict(params, batch['image'], choice, train=True, key=keys['encoder'])
    error_BN = jnp.square(predicted_BNP - wanted_BNP).mean(-1)
    num_visible = choice.chosen.shape[1]
    loss_B = jnp.where(choice.rank >= num_visible, error_BN, 0.).sum(-1) / choice.others.shape[1]
    return LossOut(weighted_mean(loss_B, batch.get('mask')), {}, {})

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    del params, stats, step
    return extra

  def views(self) -> dict[str, View]:
    return {'student': Encoder(self._backbone)}

  def draw(self, key: Key, image: Array) -> patches.Choice:
    """Which patches of each image are visible."""
    h, w = self._grid(image)
    return patches.draw(key, num_images=image.shape[0], num_patches=h * w,
                        num_chosen=patches.num_kept(h * w, self._hidden))

  def targets(self, image: Array) -> Array:
    """What is to be predicted of every patch, `[B, N, P * P * 3]`."""
    image_BNP = patches.patchify(image, self._patch)
    if not self._normalized:
      return image_BNP
    mean, deviation = patches.moments(image_BNP)
    return (image_BNP - mean) / deviation

  def encode(self, params: Params, image: Array, choice: patches.Choice, *, train: bool, key: Key | None) -> Features:
    """Features of the visible patches alone; `tokens [B, n, D]` in the order of `choice.chosen`."""
    grid, backbone = self._grid(image), params['backbone']
    visible_BnP = patches.pick(patches.patchify(image, self._patch), choice.chosen)
    tokens_BnD = self._backbone.embed(backbone, patches.strip(visible_BnP, self._patch))
    positions_BnD = self._backbone.positions(backbone, grid)[choice.chosen]
    return self._backbone.encode(backbone, tokens_BnD, positions_BnD, grid=grid, train=train, key=key)

  def predict(self, params: Params, image: Array, choice: patches.Choice, *, train: bool, key: Key | None) -> Array:
    """Predictions `[B, N, P * P * 3]` f32 of all patches."""
    features = self.encode(params, image, choice, train=train, key=key)
    cls = features.pooled if 'cls' in params['backbone'] else None
    return self._decoder.apply(params['decoder'], params['mask_token'], features.tokens, cls, places=choice.rank,
                               grid=self._grid(image))

  def reconstruct(self, params: Params, image: Array, key: Key) -> Reconstruction:
    """Pictures to look at, in the units of `image`. Normalised patches get mean and deviation of the true ones."""
    choice, grid = self.draw(key, image), self._grid(image)
    predicted_BNP = self.predict(params, image, choice, train=False, key=None)
    if self._normalized:
      mean, deviation = patches.moments(patches.patchify(image, self._patch))
      predicted_BNP = predicted_BNP * deviation + mean
    hidden_BN1 = (choice.rank >= choice.chosen.shape[1])[..., None].astype(jnp.float32)
    hidden_BNP = jnp.broadcast_to(hidden_BN1, predicted_BNP.shape)
    return Reconstruction(*(patches.unpatchify(x, self._patch, grid=grid) for x in (predicted_BNP, hidden_BNP)))

  def _grid(self, image: Array) -> tuple[int, int]:
    return image.shape[1] // self._patch, image.shape[2] // self._patch
