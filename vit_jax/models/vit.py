"""Vision Transformer (arXiv 2010.11929, eqs. 1-4), a `core.api.TokenBackbone`.

Parameters, all f32 (a public format; leaves under `blocks` are stacked, depth first):

  stem/{kernel [P, P, 3, D], bias [D]}
  cls [1, 1, D]                (class-token pooling)
  positions [1, M, D]          (learned; the first row is the class token's, if there is one)
  blocks/{norm1,norm2}/{scale,bias} [L, D]
  blocks/attn/{query,key,value}/{kernel [L, D, A, K], bias [L, A, K]}
  blocks/attn/out/{kernel [L, A, K, D], bias [L, D]}
  blocks/mlp/up/{kernel [L, D, F], bias [L, F]}
  blocks/mlp/down/{kernel [L, F, D], bias [L, D]}
  norm/{scale,bias} [D]

The residual stream is in the compute dtype; LayerNorm and softmax are in f32, and so are the features.
Knows no mesh, no task and no weight format.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.schema import Pool, Positions
from vit_jax.core.numerics import constrain_batch
from vit_jax.core.trees import map_named
from vit_jax.core.types import Array, Features, Key, Params, PyTree, UserError
from vit_jax.models import posemb, stack
from vit_jax.models.block import Block
from vit_jax.models.layers import Dense, LayerNorm, applied, dropout, initial

POSITIONS_STDDEV = .02  # vision_transformer, models_vit.py; the paper does not say


@dataclasses.dataclass(frozen=True)
class ViT:
  """A Vision Transformer for images of `image_px` (height, width); made by `build`.

  Images of other sizes work too: learned positions are then resized in the forward pass.
  """
  settings: schema.ViT
  image_px: tuple[int, int]

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Parameters, and `{}`. `image [B, H, W, 3]` must be of `image_px`; only its shape is read."""
    assert tuple(image.shape[1:3]) == tuple(self.image_px), (image.shape, self.image_px)
    s, grid = self.settings, self._grid(image)
    stem_key, positions_key, blocks_key, norm_key = jax.random.split(key, 4)
    params: Params = {
        'stem': initial(self._stem, stem_key, jnp.zeros((1, s.patch, s.patch, 3))),
        'blocks': jax.vmap(self._init_block)(jax.random.split(blocks_key, s.depth)),
        'norm': initial(self._norm, norm_key, jnp.zeros((1, s.width)))}
    if s.pool is Pool.CLS:
      params['cls'] = jnp.zeros((1, 1, s.width))
    if s.positions is Positions.LEARNED:
      shape = (1, grid[0] * grid[1] + self._num_extra, s.width)
      params['positions'] = initializers.normal(POSITIONS_STDDEV)(positions_key, shape)
    return params, {}

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Features (f32) of `image [B, H, W, 3]` f32, and `state` as it is."""
    grid = self._grid(image)
    tokens_BND = self.embed(params, image)
    positions_ND = self.positions(params, grid)
    return self.encode(params, tokens_BND, positions_ND, grid=grid, train=train, key=key), state

  def embed(self, params: Params, image: Array) -> Array:
    """Patch tokens `[B, N, D]` in the compute dtype: `x_p E` of eq. 1.

    A matrix product over cut patches; equal to a VALID convolution with kernel and stride P.
    """
    (h, w), patch, num_images = self._grid(image), self.settings.patch, image.shape[0]
    patches = image.reshape(num_images, h, patch, w, patch, 3).transpose(0, 1, 3, 2, 4, 5)
    tokens_RD = applied(self._stem, params['stem'], patches.reshape(-1, patch, patch, 3))
    return constrain_batch(tokens_RD.reshape(num_images, h * w, -1))

  def positions(self, params: Params, grid: tuple[int, int]) -> Array:
    """Position embeddings `[N, D]` f32 of the patch tokens on `grid`, resized if it is another grid."""
    if self.settings.positions is Positions.SINCOS2D:
      return jnp.asarray(posemb.sincos2d(grid, self.settings.width))
    own_grid = self._cut(self.image_px)
    return posemb.resize(params['positions'][0, self._num_extra:], own_grid, grid)

  def encode(self, params: Params, tokens: Array, positions: Array, *, grid: tuple[int, int],
             train: bool, key: Key | None) -> Features:
    """Adds positions and class token (eq. 1), runs the blocks (eqs. 2, 3), normalises and pools (eq. 4).

    Args:
      params: of this backbone.
      tokens: `[B, n, D]`, all patch tokens or any of them.
      positions: `[n, D]` or `[B, n, D]` f32, those of the tokens.
      grid: passed on to the features.
      train: switches dropout and stochastic depth on.
      key: for these; may be None if there are none.
    """
    s = self.settings
    is_random = train and (s.dropout > 0. or s.drop_path > 0.)
    assert key is not None or not is_random, 'train=True with dropout or drop_path needs a key'
    keys = jax.random.split(key, 2) if is_random and key is not None else (None, None)
    x_BMD = dropout(self._with_positions(params, tokens, positions), s.dropout, keys[0])
    x_RD = self._run(params['blocks'], constrain_batch(x_BMD).reshape(-1, s.width),
                     num_images=tokens.shape[0], key=keys[1])
    x_BMD = applied(self._norm, params['norm'], x_RD).reshape(x_BMD.shape)
    tokens_BND = x_BMD[:, self._num_extra:]
    pooled_BD = x_BMD[:, 0] if s.pool is Pool.CLS else tokens_BND.mean(1)
    return Features(tokens_BND, constrain_batch(pooled_BD), grid)

  def block(self, params: Params, tokens: Array, *, capture: bool) -> tuple[Array, dict[str, Array]]:
    """One block with its own (unstacked) parameters on `[B, M, D]`; `train` is off.

    Returns `[B, M, D]` in the compute dtype, and with `capture` `attention [B, A, M, M]` f32.
    """
    x_RD = tokens.reshape(-1, tokens.shape[-1]).astype(self._dtype)
    y_RD, captured = applied(
        self._block, params, x_RD, num_images=tokens.shape[0], rate=None, dropout_key=None, capture=capture)
    return y_RD.reshape(tokens.shape), captured

  def _run(self, params: Params, x_RD: Array, *, num_images: int, key: Key | None) -> Array:
    """All blocks. Kernels are cast before they are cut, so that a sharded one is gathered once, and cast."""
    s = self.settings

    def layer(params: Params, x: Array, rate: Array | None, key: Key | None) -> Array:
      y, _ = applied(
          self._block, params, x, num_images=num_images, rate=rate, dropout_key=key, capture=False)
      return constrain_batch(y)

    cast = map_named(lambda name, leaf: leaf if name.startswith('norm') else leaf.astype(self._dtype), params)
    rates_L = jnp.asarray(np.linspace(0., s.drop_path, s.depth), jnp.float32) if s.drop_path else None
    keys_L = None if key is None else jax.random.split(key, s.depth)
    return stack.run(layer, cast, x_RD, rates=rates_L, keys=keys_L, execution=s.execution, remat=s.remat)

  def _with_positions(self, params: Params, tokens: Array, positions: Array) -> Array:
    """Tokens plus positions after the class token plus its position: `[B, M, D]`, compute dtype.

    Fixed positions give the class token none, that is zeros.
    """
    positions = (positions[None] if positions.ndim == 2 else positions).astype(self._dtype)
    x_BND = tokens.astype(self._dtype) + jnp.broadcast_to(positions, tokens.shape)
    if self.settings.pool is not Pool.CLS:
      return x_BND
    cls = params['cls']
    if self.settings.positions is Positions.LEARNED:
      cls = cls + params['positions'][:, :1]
    cls_B1D = jnp.broadcast_to(cls.astype(self._dtype), (tokens.shape[0], 1, tokens.shape[2]))
    return jnp.concatenate([cls_B1D, x_BND], axis=1)

  def _init_block(self, key: Key) -> Params:
    x = jnp.zeros((1, self.settings.width), self._dtype)
    return initial(self._block, key, x, num_images=1, rate=None, dropout_key=None, capture=False)

  @property
  def _dtype(self) -> DTypeLike:
    return jnp.dtype(self.settings.dtype.value)

  @property
  def _num_extra(self) -> int:
    return 1 if self.settings.pool is Pool.CLS else 0

  @property
  def _stem(self) -> Dense:
    return Dense((self.settings.width,), self._dtype, initializers.lecun_normal())

  @property
  def _norm(self) -> LayerNorm:
    return LayerNorm(self.settings.norm_eps)

  @property
  def _block(self) -> Block:
    s = self.settings
    return Block(s.heads, s.mlp, s.gelu, s.norm_eps, s.dropout, self._dtype)

  def _grid(self, image: Array) -> tuple[int, int]:
    return self._cut((image.shape[1], image.shape[2]))

  def _cut(self, image_px: tuple[int, int]) -> tuple[int, int]:
    """Token grid of an image.

    Raises:
      UserError: if the patches do not tile it.
    """
    if wrong := _untiled(image_px, self.settings.patch):
      raise UserError(wrong)
    return image_px[0] // self.settings.patch, image_px[1] // self.settings.patch


def build(model: schema.ViT, image_px: tuple[int, int]) -> ViT:
  """The backbone of these settings for images of `image_px` (height, width).

  Raises:
    UserError: lists all settings that do not fit together.
  """
  if wrong := _faults(model, image_px):
    raise UserError('\n'.join(wrong))
  return ViT(model, (int(image_px[0]), int(image_px[1])))


def _faults(s: schema.ViT, image_px: tuple[int, int]) -> list[str]:
  sizes = {name: getattr(s, name) for name in ('patch', 'width', 'depth', 'heads', 'mlp')}
  wrong = [f'model.{name}={value}: want at least 1.' for name, value in sizes.items() if value < 1]
  if not wrong:
    wrong += [text for text in [_untiled(image_px, s.patch)] if text]
    if s.width % s.heads:
      wrong.append(f'model.width={s.width} is not a multiple of model.heads={s.heads}.')
  if s.positions is Positions.SINCOS2D and (s.width % 4 or s.width < 8):
    wrong.append(f'model.width={s.width} does not fit sincos2d positions: want a multiple of 4, at least 8.')
  for name in ('dropout', 'drop_path'):
    if not 0. <= getattr(s, name) < 1.:
      wrong.append(f'model.{name}={getattr(s, name)}: want a probability in [0, 1).')
  return wrong


def _untiled(image_px: tuple[int, int], patch: int) -> str:
  """What is wrong with cutting such an image into patches, or ''."""
  h, w = image_px
  if h % patch or w % patch or min(h, w) < patch:
    nearest = ' x '.join(str(max(1, round(side / patch)) * patch) for side in image_px)
    return (f'image_px={h} x {w} cannot be cut into patches of {patch} px: '
            f'want multiples of {patch}, such as {nearest}.')
  return ''
