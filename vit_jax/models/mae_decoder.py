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

import flax.linen as nn
import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.axes import LAYERS, labelled
from vit_jax.core.numerics import constrain_batch, split_key
from vit_jax.core.types import Array, Key, Params
from vit_jax.models import stack
from vit_jax.models.layers import Dense, applied, initial
from vit_jax.models.vit import context
from vit_jax.models.vit.block import Plain
from vit_jax.models.vit.context import BlockInfo, Context
from vit_jax.models.vit.positions import sincos2d_mae

MLP_RATIO = 4


@dataclasses.dataclass(frozen=True)
class Narrow:
  """Width E, depth and heads of a narrow transformer on the tokens of an encoder.

  GELU, epsilon, dtype, kernels and execution are those of the encoder.

  encoder: settings of the encoder.
  """
  width: int
  depth: int
  heads: int
  encoder: schema.ViT

  def init(self, key: Key) -> Params:
    """New parameters."""
    s, keys = self.encoder, split_key(key, 'embed', 'blocks', 'norm', 'predict')
    x = jnp.zeros((1, 1, self.width), self._context.dtype)
    embed = initial(self._embed, keys['embed'], jnp.zeros((1, 1, s.width)))
    blocks = jax.vmap(lambda key: initial(
        self._block, key, x, {}, BlockInfo(1)))(
            jax.random.split(keys['blocks'], self.depth))
    # `fsdp` splits E on every TPU: 'out', unlike 'embed', has no other choice in `parallel/sharding.py`.
    out, down = blocks['attn']['out'], blocks['mlp']['down']
    out['kernel'] = labelled(out['kernel'], (LAYERS, 'heads', 'head', 'out'), matrix=(2, 1))
    down['kernel'] = labelled(down['kernel'], (LAYERS, 'mlp', 'out'), matrix=(1, 1))
    return {
        'embed': embed,
        'blocks': blocks,
        'norm': initial(self._norm, keys['norm'], x),
        'predict': initial(self._predict, keys['predict'], x)}

  def init_mask(self, key: Key) -> Array:
    """A new mask token, `[1, 1, E]`."""
    return labelled(self._context.laws.mask(key, (1, 1, self.width)), (None, 'tokens', None))

  def _run(self, params: Params, x_BME: Array, mask: Array | None = None) -> Array:
    """Returns `x [B, M, E]` after all blocks; `mask` broadcasts to `[B, A, M, M]`, None = all are attended to."""
    def layer(params: Params, x: Array, rate: Array | None, key: Key | None) -> tuple[Array, stack.Sums]:
      y, _, _ = applied(self._block, params, x, {}, BlockInfo(x.shape[0], rate, key, mask=mask))
      return constrain_batch(y), {}

    return stack.run(layer, params, x_BME, ready=stack.cast(self._context.dtype), rates=None, keys=None,
                     execution=self.encoder.execution, remat=self.encoder.remat)[0]

  @property
  def _context(self) -> Context:
    return self._changed(context.of(self.encoder))

  def _changed(self, of_encoder: Context) -> Context:
    return dataclasses.replace(of_encoder, norm=schema.LayerNorm(self.encoder.norm.eps), dropout=0.)

  @property
  def _norm(self) -> nn.Module:
    return self._context.make_norm()

  def _dense(self, width: int) -> Dense:
    return Dense(features=(width,), axes=('embed', None), dtype=self._context.dtype, law=self._context.laws.decoder,
                 num_batch_dims=2, forms=self._context.forms)

  @property
  def _embed(self) -> Dense:
    return self._dense(self.width)

  @property
  def _predict(self) -> Dense:
    return self._dense(self._num_outputs)

  @property
  def _num_outputs(self) -> int:
    """Outputs of a token: the values of a patch."""
    return self.encoder.patch ** 2 * 3

  @property
  def _block(self) -> Plain:
    return Plain(heads=self.heads, attention=schema.Attention(), mlp=schema.Mlp(MLP_RATIO * self.width),
                 context=self._changed(context.of_blocks(self.encoder)))


@dataclasses.dataclass(frozen=True)
class Decoder(Narrow):
  """The decoder of a masked autoencoder."""

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
                      mask_token.astype(self._context.dtype))
    x_BNE = x_BNE + positions_NE.astype(self._context.dtype)[None]
    x_BME = constrain_batch(jnp.concatenate([first, x_BNE], axis=1))
    y_BME = applied(self._norm, params['norm'], self._run(params['blocks'], x_BME))
    return constrain_batch(applied(self._predict, params['predict'], y_BME[:, num_first:]).astype(jnp.float32))
