"""Masked patch prediction (ViT paper, arXiv 2010.11929, Appendix B.1.2): BERT's task on patches.

Half of the patches of each image are corrupted after the embedding: a patch becomes a learned mask token with
probability 0.8, another patch with probability 0.1, and otherwise stays. The final token of each corrupted patch
predicts the mean color of the patch, with 3 bits a channel. Our choices where the paper is silent: exactly the given
share of each image is corrupted, the other patch is from the same image, and the mask token is initialized as
N(0, 0.02).
"""
from __future__ import annotations

from typing import assert_never

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.config.schema import PatchTarget
from vit_jax.core.axes import labelled
from vit_jax.core.contracts import Backbone, TokenBackbone
from vit_jax.core.numerics import counted, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Params
from vit_jax.models import initialization
from vit_jax.models.initialization import VISION_TRANSFORMER, Laws
from vit_jax.models.kernels.dense import dense
from vit_jax.objectives import patches, spec
from vit_jax.objectives.networks import Normalization, OneNetwork, init_backbone

LEVELS = 8                   # 3 bits
NUM_COLORS = LEVELS ** 3     # 512
CELLS = schema.COLOR_CELLS   # a patch is shrunk to 4 x 4 for `colors`


def color_classes(pixels: Array) -> Array:
  """Maps colors `[..., 3]` in [0, 1] to classes `64 r + 8 g + b`, each channel in 8 equal steps, i32."""
  levels = jnp.clip(jnp.floor(pixels * LEVELS), 0, LEVELS - 1).astype(jnp.int32)
  return (levels[..., 0] * LEVELS + levels[..., 1]) * LEVELS + levels[..., 2]


def num_outputs(target: PatchTarget, patch: int) -> int:
  """Returns the width n of the prediction of a patch."""
  match target:
    case PatchTarget.COLOR:
      return NUM_COLORS
    case PatchTarget.COLORS:
      return CELLS ** 2 * NUM_COLORS
    case PatchTarget.PIXELS:
      return 3 * patch ** 2
    case _:
      assert_never(target)


class MaskedPatch(OneNetwork):
  """Objective: cross-entropy of the colors of corrupted patches, in nats, or the mean squared error of their pixels.

  Parameters beside the backbone: `mask_token [1, 1, D]`, `decoder/{kernel [D, n], bias [n]}` with n = 512, 16 * 512
  or 3 P^2. With `colors` the loss is the mean over the 16 predictions of a patch.
  """
  _backbone: TokenBackbone

  def __init__(self, backbone: TokenBackbone, settings: schema.MaskedPatch, normalization: Normalization, *,
               patch: int, laws: Laws = VISION_TRANSFORMER) -> None:
    """`normalization` is that of the images; parameters start by `laws`."""
    self._backbone, self._settings, self._normalization = backbone, settings, normalization
    self._patch, self._laws = patch, laws
    self.num_outputs = num_outputs(settings.target, patch)

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys = split_key(key, 'backbone', 'decoder', 'mask_token')
    params, _, _ = init_backbone(self._backbone, keys['backbone'], batch['image'])
    width = jax.eval_shape(lambda: self._backbone.embed(params, batch['image'])).shape[-1]
    kernel = self._laws.decoder.kernel(keys['decoder'], (width, self.num_outputs))
    decoder = {'kernel': labelled(kernel, ('embed', 'classes'), matrix=(1, 1)),
               'bias': labelled(jnp.zeros(self.num_outputs), ('classes',))}
    mask = labelled(self._laws.mask(keys['mask_token'], (1, 1, width)), (None, 'tokens', None))
    return {'backbone': params, 'decoder': decoder, 'mask_token': mask}, {}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del extra, step
    batch, keys = counted(batch), split_key(key, 'corrupt', 'encoder')
    image, backbone, mask_B = batch['image'], params['backbone'], batch.get('mask')
    grid = image.shape[1] // self._patch, image.shape[2] // self._patch
    tokens_BND, choice = self.corrupt(self._backbone.embed(backbone, image), params['mask_token'], keys['corrupt'])
    features = self._backbone.encode(backbone, tokens_BND, self._backbone.positions(backbone, grid), grid=grid,
                                     train=True, key=keys['encoder'])
    tokens_BnD = patches.pick(features.tokens, choice.chosen)
    predicted_Bnc = dense(tokens_BnD, params['decoder']['kernel'], params['decoder']['bias'])
    image_BnP = patches.pick(patches.patchify(image, self._patch), choice.chosen)
    if self._settings.target is PatchTarget.PIXELS:
      error_Bn = jnp.square(predicted_Bnc - image_BnP).mean(-1)
      return LossOut(weighted_mean(error_Bn.mean(-1), mask_B), {}, {})
    classes_BnG = self.classes(image_BnP)
    log_p_BnGC = jax.nn.log_softmax(predicted_Bnc.reshape(*classes_BnG.shape, NUM_COLORS))
    nll_BnG = -jnp.take_along_axis(log_p_BnGC, classes_BnG[..., None], -1)[..., 0]
    hits_BnG = (jnp.argmax(log_p_BnGC, -1) == classes_BnG).astype(jnp.float32)
    return LossOut(weighted_mean(nll_BnG.mean((1, 2)), mask_B),
                   {'accuracy': weighted_mean(hits_BnG.mean((1, 2)), mask_B)}, {})

  def corrupt(self, tokens: Array, mask_token: Array, key: Key) -> tuple[Array, patches.Choice]:
    """Returns tokens `[B, N, D]` of which some are corrupted, and which ones."""
    num_images, num_patches, _ = tokens.shape
    s, keys = self._settings, split_key(key, 'choice', 'fate', 'other')
    num_chosen = num_patches - patches.num_kept(num_patches, s.mask_ratio)
    choice = patches.draw(keys['choice'], num_images=num_images, num_patches=num_patches, num_chosen=num_chosen)
    away_BN = jax.random.randint(keys['other'], (num_images, num_patches), 1, max(num_patches, 2))
    others_BND = patches.pick(tokens, (jnp.arange(num_patches)[None] + away_BN) % num_patches)
    fate_BN = jnp.where(choice.rank < num_chosen, jax.random.uniform(keys['fate'], (num_images, num_patches)), 1.)
    is_masked_BN1 = (fate_BN < s.mask_token_prob)[..., None]
    is_swapped_BN1 = (fate_BN < s.mask_token_prob + s.random_patch_prob)[..., None]
    mixed_BND = jnp.where(is_masked_BN1, mask_token.astype(tokens.dtype),
                          jnp.where(is_swapped_BN1, others_BND, tokens))
    return mixed_BND, choice

  def classes(self, image_BnP: Array) -> Array:
    """Returns the color classes `[B, n, G] i32` of normalized patches `[B, n, 3 P^2]`, for G cells per patch."""
    mean, std = (jnp.array(x, jnp.float32).reshape(1, 1, 1, 1, 3) for x in self._normalization)
    cells = CELLS if self._settings.target is PatchTarget.COLORS else 1
    side, shape = self._patch // cells, image_BnP.shape[:2]
    cut = image_BnP.reshape(*shape, cells, side, cells, side, 3).mean((3, 5))
    return color_classes(cut * std + mean).reshape(*shape, -1)



class Spec(spec.Spec[schema.MaskedPatch]):
  """Builds `MaskedPatch` from a config."""

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> MaskedPatch:
    recipe, (encoder, model) = self.config.data.recipe, spec.tokens(backbone)
    return MaskedPatch(encoder, self.settings, Normalization(recipe.mean, recipe.std), patch=model.patch,
                       laws=initialization.laws(model))
