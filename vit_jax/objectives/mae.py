"""Masked autoencoder (MAE; He et al. 2022, arXiv 2111.06377): reconstructs the masked patches from the visible ones.

The encoder sees only the visible patches, so its cost is in proportion to their number. With `model.init=mae`
parameters start as in the authors' code.
"""
from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core.contracts import Backbone, TokenBackbone
from vit_jax.core.numerics import counted, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Features, Key, LossOut, Params
from vit_jax.models.decoders import Decoder
from vit_jax.objectives import patches, spec
from vit_jax.objectives.networks import OneNetwork, init_backbone


class Reconstruction(NamedTuple):
  """`predicted [B, H, W, 3]` f32 and `hidden [B, H, W, 3]` f32: 1 in masked patches, which the encoder does not see."""
  predicted: Array
  hidden: Array


class Mae(OneNetwork):
  """Objective: the mean squared error of masked patches, `L = mean over masked i of |x_i - y_i|^2 / (3 P^2)`.

  x_i is the patch, with mean 0 and standard deviation 1 if `normalized` (section 4.1), and y_i its prediction. Of each
  image `int(N (1 - hidden))` patches are visible.
  """
  _backbone: TokenBackbone

  def __init__(self, backbone: TokenBackbone, decoder: Decoder, *, patch: int, hidden: float, normalized: bool) -> None:
    """`hidden` is the share of hidden patches; `normalized`: whether target patches are normalized."""
    self._backbone, self._decoder, self._patch = backbone, decoder, patch
    self._hidden, self._normalized = hidden, normalized

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys = split_key(key, 'backbone', 'decoder', 'mask_token')
    params, _, _ = init_backbone(self._backbone, keys['backbone'], batch['image'])
    return {'backbone': params, 'decoder': self._decoder.init(keys['decoder']),
            'mask_token': self._decoder.init_mask(keys['mask_token'])}, {}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del extra, step
    batch, keys = counted(batch), split_key(key, 'hide', 'encoder')
    choice = self.draw(keys['hide'], batch['image'])
    targets_BNP = self.targets(batch['image'])
    predicted_BNP = self.predict(params, batch['image'], choice, train=True, key=keys['encoder'])
    error_BN = jnp.square(predicted_BNP - targets_BNP).mean(-1)
    num_visible = choice.chosen.shape[1]
    loss_B = jnp.where(choice.rank >= num_visible, error_BN, 0.).sum(-1) / choice.others.shape[1]
    return LossOut(weighted_mean(loss_B, batch.get('mask')), {}, {})

  def draw(self, key: Key, image: Array) -> patches.Choice:
    """Draws which patches of each image are visible."""
    h, w = self._grid(image)
    return patches.draw(key, num_images=image.shape[0], num_patches=h * w,
                        num_chosen=patches.num_kept(h * w, self._hidden))

  def targets(self, image: Array) -> Array:
    """Returns the target of every patch, `[B, N, P * P * 3]`."""
    image_BNP = patches.patchify(image, self._patch)
    if not self._normalized:
      return image_BNP
    mean, deviation = patches.moments(image_BNP)
    return (image_BNP - mean) / deviation

  def encode(self, params: Params, image: Array, choice: patches.Choice, *, train: bool, key: Key | None) -> Features:
    """Returns the features of the visible patches: `tokens [B, n, D]` in the order of `choice.chosen`."""
    return patches.encode(self._backbone, params['backbone'], image, choice.chosen, patch=self._patch, train=train,
                          key=key)

  def predict(self, params: Params, image: Array, choice: patches.Choice, *, train: bool, key: Key | None) -> Array:
    """Returns the predictions `[B, N, P * P * 3]` f32 of all patches."""
    features = self.encode(params, image, choice, train=train, key=key)
    cls = features.pooled if 'cls' in params['backbone'] else None
    return self._decoder.apply(params['decoder'], params['mask_token'], features.tokens, cls, places=choice.rank,
                               grid=self._grid(image))

  def reconstruct(self, params: Params, image: Array, key: Key) -> Reconstruction:
    """Returns reconstructed images in the units of `image`. Normalized patches get the moments of the original ones."""
    choice, grid = self.draw(key, image), self._grid(image)
    predicted_BNP = self.predict(params, image, choice, train=False, key=None)
    if self._normalized:
      mean, deviation = patches.moments(patches.patchify(image, self._patch))
      predicted_BNP = predicted_BNP * deviation + mean
    hidden_BN1 = (choice.rank >= choice.chosen.shape[1])[..., None].astype(jnp.float32)
    hidden_BNP = jnp.broadcast_to(hidden_BN1, predicted_BNP.shape)
    return Reconstruction(predicted=patches.unpatchify(predicted_BNP, self._patch, grid=grid),
                          hidden=patches.unpatchify(hidden_BNP, self._patch, grid=grid))

  def _grid(self, image: Array) -> tuple[int, int]:
    return image.shape[1] // self._patch, image.shape[2] // self._patch


def build(settings: schema.Mae, backbone: Backbone) -> Mae:
  """Builds the objective. Raises UserError if the backbone is not a ViT."""
  encoder, model = spec.tokens(backbone)
  decoder = Decoder(settings.decoder_width, settings.decoder_depth, settings.decoder_heads, model)
  return Mae(encoder, decoder, patch=model.patch, hidden=settings.mask_ratio, normalized=settings.norm_pix_loss)


class Spec(spec.Spec[schema.Mae]):
  """Builds `Mae` from a config."""

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Mae:
    return build(self.settings, backbone)
