"""The decoder of a masked autoencoder (arXiv 2111.06377, section 3): narrow, and discarded after training.

Parameters, all f32:

  embed/{kernel [D, E], bias [E]}
  blocks/...                          as in `vit.py`, stacked, at width E with an MLP of 4 E
  norm/{scale,bias} [E]
  predict/{kernel [E, P * P * 3], bias [P * P * 3]}

Positions are fixed, 2-D sine-cosine with MAE's frequencies. Products are in the compute dtype, the result is f32.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.core.axes import LAYERS, labelled
from vit_jax.core.numerics import constrain_batch, split_key
from vit_jax.core.types import Array, Key, Params
from vit_jax.models import initialization, stack
from vit_jax.models.initialization import Laws
from vit_jax.models.kernels.forms import Forms, select
from vit_jax.models.layers import Dense, LayerNorm, applied, initial
from vit_jax.models.vit.block import Block
from vit_jax.models.vit.positions import sincos2d_mae

MLP_RATIO = 4


@dataclasses.dataclass(frozen=True)
class Decoder:
  """Width E, depth and heads of a decoder; GELU, epsilon, dtype, kernels and execution are those of the encoder.

  encoder: settings of the encoder.
  """
  width: int
  depth: int
  heads: int
  encoder: schema.ViT

  def init(self, key: Key) -> Params:
    """New parameters."""
    s, keys = self.encoder, split_key(key, 'embed', 'blocks', 'norm', 'predict')
    x = jnp.zeros((1, 1, self.width), self._dtype)
    embed = initial(self._embed, keys['embed'], jnp.zeros((1, 1, s.width)))
    blocks = jax.vmap(lambda key: initial(
        self._block, key, x, num_images=1, num_sequences=1, rate=None, dropout_key=None, capture=False))(
            jax.random.split(keys['blocks'], self.depth))
    # `fsdp` splits E on every TPU: 'out', unlike 'embed', has no other choice in `parallel/sharding.py`.
    out, down = blocks['attn']['out'], blocks['mlp']['down']
    out['kernel'] = labelled(out['kernel'], (LAYERS, 'heads', 'head', 'out'))
    down['kernel'] = labelled(down['kernel'], (LAYERS, 'mlp', 'out'))
    return {
        'embed': embed,
        'blocks': blocks,
        'norm': initial(self._norm, keys['norm'], x),
        'predict': initial(self._predict, keys['predict'], x)}

  def init_mask(self, key: Key) -> Array:
    """A new mask token, `[1, 1, E]`."""
    return labelled(self._laws.mask(key, (1, 1, self.width)), (None, 'tokens', None))

  def apply(self, params: Params, mask_token: Array, tokens: Array, cls: Array | None, *, places: Array,
            grid: tuple[int, int]) -> Array:
    """Predicts the pixels of every patch.

    Args:
      params: of this decoder.
      mask_token: `[1, 1, E]`, in place of each patch that the encoder does not see.
      tokens: `[B, n, D]` of the encoder.
      cls: `[B, D]`, its class token, or None.
      places: `[B, N] i32`, for each patch of the grid its index among the n tokens, or any number >= n if it is not
        one of them.
      grid: `(h, w)`.

    Returns:
      `[B, N, P * P * 3]` f32, pixels in the order row, column, channel.
    """
    num_seen = tokens.shape[1]
    num_first = 0 if cls is None else 1
    sequence = tokens if cls is None else jnp.concatenate([cls[:, None], tokens], axis=1)
    x_BnE = constrain_batch(applied(self._embed, params['embed'], sequence))
    first, seen_BnE = x_BnE[:, :num_first], x_BnE[:, num_first:]
    positions_NE = jnp.asarray(sincos2d_mae(grid, self.width))
    at_BN1 = jnp.minimum(places, num_seen - 1)[..., None]
    x_BNE = jnp.where((places < num_seen)[..., None], jnp.take_along_axis(seen_BnE, at_BN1, axis=1),
                      mask_token.astype(self._dtype))
    x_BNE = x_BNE + positions_NE.astype(self._dtype)[None]
    x_BME = constrain_batch(jnp.concatenate([first, x_BNE], axis=1))
    y_BME = applied(self._norm, params['norm'], self._run(params['blocks'], x_BME))
    return constrain_batch(applied(self._predict, params['predict'], y_BME[:, num_first:]).astype(jnp.float32))

  def _run(self, params: Params, x_BME: Array) -> Array:
    num_images = x_BME.shape[0]

    def layer(params: Params, x: Array, rate: Array | None, key: Key | None) -> Array:
      y, _ = applied(self._block, params, x, num_images=num_images, num_sequences=num_images, rate=rate,
                     dropout_key=key, capture=False)
      return constrain_batch(y)

    return stack.run(layer, params, x_BME, ready=stack.cast(self._dtype), rates=None, keys=None,
                     execution=self.encoder.execution, remat=self.encoder.remat)

  @property
  def _dtype(self) -> DTypeLike:
    return jnp.dtype(self.encoder.dtype.value)

  @property
  def _laws(self) -> Laws:
    return initialization.laws(self.encoder)

  @property
  def _forms(self) -> Forms:
    return select(self.encoder.kernels)

  @property
  def _norm(self) -> LayerNorm:
    return LayerNorm(self.encoder.norm_eps, self._forms)

  def _dense(self, width: int) -> Dense:
    return Dense(features=(width,), axes=('embed', None), dtype=self._dtype, law=self._laws.decoder, num_batch_dims=2,
                 forms=self._forms)

  @property
  def _embed(self) -> Dense:
    return self._dense(self.width)

  @property
  def _predict(self) -> Dense:
    return self._dense(self.encoder.patch ** 2 * 3)

  @property
  def _block(self) -> Block:
    s = self.encoder
    return Block(heads=self.heads, mlp=MLP_RATIO * self.width, gelu=s.gelu, norm_eps=s.norm_eps, dtype=self._dtype,
                 laws=self._laws, forms=self._forms)
