"""Narrow transformers on the tokens of an encoder, which are discarded after training.

`Decoder` is that of a masked autoencoder (arXiv 2111.06377, section 3), and `Predictor` that of I-JEPA (arXiv
2301.08243, section 3). Parameters, all f32, for an encoder of width D and patches of P px:

  embed/{kernel [D, E], bias [E]}
  blocks/...                          as in `vit.py`, stacked, at width E with an MLP of 4 E
  norm/{scale,bias} [E]
  predict/{kernel [E, n], bias [n]}   n = P * P * 3 for `Decoder`, D for `Predictor`

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
  """The parts that `Decoder` and `Predictor` share."""
  width: int  # E
  depth: int  # number of blocks
  heads: int  # attention heads of a block
  encoder: schema.ViT  # settings of the encoder; GELU, epsilon, dtype, kernels and execution are those of the encoder

  def init(self, key: Key) -> Params:
    """Returns new parameters."""
    keys = split_key(key, 'embed', 'blocks', 'norm', 'predict')
    x = jnp.zeros((1, 1, self.width), self._context.dtype)

    def init_block(key: Key) -> Params:
      return initial(self._block, key, x, {}, BlockInfo(1))

    embed = initial(self._embed, keys['embed'], jnp.zeros((1, 1, self.encoder.width)))
    blocks = jax.vmap(init_block)(jax.random.split(keys['blocks'], self.depth))
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
    """Returns a new mask token, `[1, 1, E]` f32."""
    return labelled(self._context.laws.mask(key, (1, 1, self.width)), (None, 'tokens', None))

  def _run(self, params: Params, x_BME: Array, mask: Array | None = None) -> Array:
    """Returns `x [B, M, E]` after all blocks; `mask` broadcasts to `[B, A, M, M]`, None = all are attended to."""
    def layer(params: Params, x: Array, rate: Array | None, key: Key | None) -> tuple[Array, stack.Sums]:
      y, _, _ = applied(self._block, params, x, {}, BlockInfo(x.shape[0], rate, key, mask=mask))
      return constrain_batch(y), {}

    return stack.run(layer, params, x_BME, ready=stack.cast(self._context.dtype), rates=None, keys=None,
                     execution=self.encoder.execution, remat=self.encoder.remat)[0]

  def _positions(self, grid: tuple[int, int]) -> Array:
    """Returns the positions of all patches of a grid `(h, w)`, `[N, E]` in the compute dtype."""
    return jnp.asarray(sincos2d_mae(grid, self.width)).astype(self._context.dtype)

  @property
  def _context(self) -> Context:
    return self._without_dropout(context.of(self.encoder))

  def _without_dropout(self, of_encoder: Context) -> Context:
    """Returns the context with LayerNorm in place of the encoder's norm, and without dropout."""
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
    """Outputs of a token, n in the module's docstring."""
    raise NotImplementedError

  @property
  def _block(self) -> Plain:
    return Plain(heads=self.heads, attention=schema.Attention(), mlp=schema.Mlp(MLP_RATIO * self.width),
                 context=self._without_dropout(context.of_blocks(self.encoder)))


@dataclasses.dataclass(frozen=True)
class Decoder(Narrow):
  """Predicts the pixels of all patches from the features of the visible ones."""

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
    at_BN1 = jnp.minimum(places, num_seen - 1)[..., None]
    x_BNE = jnp.where((places < num_seen)[..., None], jnp.take_along_axis(seen_BnE, at_BN1, axis=1),
                      mask_token.astype(self._context.dtype))
    x_BNE = x_BNE + self._positions(grid)[None]
    x_BME = constrain_batch(jnp.concatenate([first, x_BNE], axis=1))
    y_BME = applied(self._norm, params['norm'], self._run(params['blocks'], x_BME))
    return constrain_batch(applied(self._predict, params['predict'], y_BME[:, num_first:]).astype(jnp.float32))

  @property
  def _num_outputs(self) -> int:
    return self.encoder.patch ** 2 * 3


@dataclasses.dataclass(frozen=True)
class Predictor(Narrow):
  """Predicts the features of blocks of patches from the features of other patches."""

  def apply(self, params: Params, mask_token: Array, tokens: Array, *, context: Array, is_context: Array,
            targets: Array, is_target: Array, grid: tuple[int, int]) -> Array:
    """Predicts each target block by a pass of its own.

    Args:
      params: of this predictor.
      mask_token: `[1, 1, E]`, in place of each target patch.
      tokens: `[B, n, D]` of the encoder.
      context: `[B, n] i32`, the patch of each token.
      is_context: `[B, n] bool`, which tokens are attended to.
      targets: `[B, M, t] i32`, the patches of M blocks.
      is_target: `[B, M, t] bool`; predictions for the others have no meaning.
      grid: `(h, w)`.

    Returns:
      `[B, M, t, D]` f32.
    """
    num_images, num_blocks, size = targets.shape
    positions_NE = self._positions(grid)
    seen_BnE = applied(self._embed, params['embed'], tokens) + positions_NE[context]
    masked_BMtE = mask_token.astype(self._context.dtype)[None] + positions_NE[targets]
    seen_BMnE = jnp.broadcast_to(seen_BnE[:, None], (num_images, num_blocks, *seen_BnE.shape[1:]))
    x = jnp.concatenate([seen_BMnE, masked_BMtE], axis=2).reshape(num_images * num_blocks, -1, self.width)
    mask = jnp.concatenate([jnp.broadcast_to(is_context[:, None], seen_BMnE.shape[:3]), is_target], axis=2)
    y = self._run(params['blocks'], constrain_batch(x), mask.reshape(x.shape[0], 1, 1, -1))
    y = applied(self._norm, params['norm'], y)[:, -size:]
    predicted = applied(self._predict, params['predict'], y).astype(jnp.float32)
    return constrain_batch(predicted.reshape(num_images, num_blocks, size, -1))

  @property
  def _num_outputs(self) -> int:
    return self.encoder.width
