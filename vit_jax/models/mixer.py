"""MLP-Mixer (arXiv 2105.01601), a `core.api.Backbone`.

Parameters, all f32 (a public format; leaves under `blocks` are stacked, depth first; S, F are the hidden
widths of the MLPs over tokens and over channels):

  stem/{kernel [P, P, 3, D], bias [D]}
  blocks/{norm1,norm2}/{scale,bias} [L, D]
  blocks/tokens/{up/{kernel [L, N, S], bias [L, S]}, down/{kernel [L, S, N], bias [L, N]}}
  blocks/channels/{up/{kernel [L, D, F], bias [L, F]}, down/{kernel [L, F, D], bias [L, D]}}
  norm/{scale,bias} [D]

The MLP over tokens is for one number of tokens: larger images need parameters as `grow` makes them, and settings
whose `tokens_mlp` has grown too. Features are the normed tokens and their mean, f32. Knows no mesh, no task and no
weight format.
"""
from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config import model_options, schema
from vit_jax.config.schema import Gelu
from vit_jax.core.numerics import constrain_batch, split_key
from vit_jax.core.types import Array, Features, Key, Params, PyTree, UserError
from vit_jax.models.kernels.norm_act import gelu
from vit_jax.models.layers import Dense, LayerNorm, applied, drop_path, dropout, initial
from vit_jax.models.vit import stack, vit_checks
from vit_jax.models.vit.stem import Stem

lecun_normal = initializers.lecun_normal()


class Mlp(nn.Module):
  """`W2 gelu(W1 x + b1) + b2`, with dropout after both; the value before the activation is named `mlp`."""
  hidden: int
  gelu: Gelu
  dropout: float
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Array, key: Key | None) -> Array:
    """`[B, M, I]` to `[B, M, I]`."""
    keys = (None, None) if key is None else tuple(jax.random.split(key))
    hidden_BMF = checkpoint_name(Dense((self.hidden,), self.dtype, lecun_normal, lead=2, name='up')(x), 'mlp')
    hidden_BMF = dropout(gelu(hidden_BMF, self.gelu), self.dropout, keys[0])
    down = Dense((x.shape[-1],), self.dtype, lecun_normal, lead=2, name='down')
    return dropout(down(hidden_BMF), self.dropout, keys[1])


class Block(nn.Module):
  """`U = X + (W2 gelu(W1 LN(X)^T))^T`, `Y = U + W4 gelu(W3 LN(U))` (eq. 1)."""
  tokens_mlp: int
  channels_mlp: int
  gelu: Gelu
  norm_eps: float
  dropout: float
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: Array, *, rate: Array | None, dropout_key: Key | None) -> Array:
    """One block.

    Args:
      x: `[B, N, D]` in the compute dtype.
      rate: f32 scalar, probability that a branch is dropped for an image; None = never.
      dropout_key: None switches dropout and stochastic depth off.
    """
    keys = (None,) * 4 if dropout_key is None else tuple(jax.random.split(dropout_key, 4))
    y_BND, num_images = LayerNorm(self.norm_eps, name='norm1')(x), x.shape[0]
    y_BDN = y_BND.astype(self.dtype).swapaxes(1, 2)
    y_BDN = Mlp(self.tokens_mlp, self.gelu, self.dropout, self.dtype, name='tokens')(y_BDN, keys[0])
    y_BND = drop_path(y_BDN.swapaxes(1, 2), rate, keys[1], num_images=num_images)
    x = checkpoint_name(x + y_BND, 'residual')
    y_BND = LayerNorm(self.norm_eps, name='norm2')(x)
    y_BND = Mlp(self.channels_mlp, self.gelu, self.dropout, self.dtype, name='channels')(y_BND, keys[2])
    return x + drop_path(y_BND, rate, keys[3], num_images=num_images)


@dataclasses.dataclass(frozen=True)
class Mixer:
  """A Mixer for images of `image_px` (height, width); made by `build`."""
  settings: schema.Mixer
  image_px: tuple[int, int]

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Parameters, and `{}`. `image [B, H, W, 3]` must be of `image_px`; only its shape is read."""
    assert tuple(image.shape[1:3]) == tuple(self.image_px), (image.shape, self.image_px)
    s = self.settings
    keys = split_key(key, 'stem', 'blocks', 'norm')
    tokens = jnp.zeros((1, (self.image_px[0] // s.patch) * (self.image_px[1] // s.patch), s.width))

    def init_block(key: Key) -> Params:
      return initial(self._block, key, tokens, rate=None, dropout_key=None)

    return {'stem': self._stem.init(keys['stem'])[0],
            'blocks': jax.vmap(init_block)(jax.random.split(keys['blocks'], s.depth)),
            'norm': initial(self._norm, keys['norm'], jnp.zeros((1, s.width)))}, {}

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Features (f32) of `image [B, H, W, 3]` f32, and `state` as it is.

    Raises:
      UserError: if patches do not tile the image, or the parameters are for another number of tokens.
    """
    s = self.settings
    if wrong := vit_checks.untiled((image.shape[1], image.shape[2]), s.patch):
      raise UserError(wrong)
    grid = image.shape[1] // s.patch, image.shape[2] // s.patch
    num_known = params['blocks']['tokens']['up']['kernel'].shape[1]
    if grid[0] * grid[1] != num_known:
      raise UserError(f'image_px={image.shape[1]} x {image.shape[2]} gives {grid[0] * grid[1]} tokens, but the MLP '
                      f'over tokens of these parameters is for {num_known}.')
    is_random = train and (s.dropout > 0. or s.drop_path > 0.)
    assert key is not None or not is_random, 'train=True with dropout or drop_path needs a key'
    x_BND, _ = self._stem.apply(params['stem'], {}, image, train=train)
    x_BND = self._run(params['blocks'], x_BND, key=key if is_random else None)
    x_BND = applied(self._norm, params['norm'], x_BND)
    return Features(x_BND, constrain_batch(x_BND.mean(1)), grid), state

  def _run(self, params: Params, x_BND: Array, *, key: Key | None) -> Array:
    """All blocks."""
    s = self.settings

    def layer(params: Params, x: Array, rate: Array | None, key: Key | None) -> Array:
      return constrain_batch(applied(self._block, params, x, rate=rate, dropout_key=key))

    rates_L = jnp.asarray(np.linspace(0., s.drop_path, s.depth), jnp.float32) if s.drop_path else None
    keys_L = None if key is None else jax.random.split(key, s.depth)
    return stack.run(layer, params, x_BND, ready=stack.cast(self._dtype), rates=rates_L, keys=keys_L,
                     execution=s.execution, remat=s.remat)

  @property
  def _dtype(self) -> DTypeLike:
    return jnp.dtype(self.settings.dtype.value)

  @property
  def _stem(self) -> Stem:
    s = self.settings
    return Stem(schema.PatchStem(), s.patch, s.width, self._dtype, s.remat)

  @property
  def _norm(self) -> LayerNorm:
    return LayerNorm(self.settings.norm_eps)

  @property
  def _block(self) -> Block:
    s = self.settings
    return Block(s.tokens_mlp, s.channels_mlp, s.gelu, s.norm_eps, s.dropout, self._dtype)


def grow(params: Params, grid: tuple[int, int], *, times: tuple[int, int]) -> Params:
  """Parameters for images that are a whole number of times as large (arXiv 2105.01601, Appendix C).

  The large image is seen as tiles of the size that is known. `W1` and `W2` of the MLP over tokens become block
  diagonal with a copy a tile, so that each tile is at first treated for itself, as an image of its own; the
  hidden width grows with the number of tiles.

  Args:
    params: of a Mixer.
    grid: tokens (h, w) that it is for.
    times: how many tiles there are to be downwards and sideways.
  """
  tile_N, place_N = _tiles(grid, times)
  tiles = times[0] * times[1]
  of_tile_NT = jax.nn.one_hot(tile_N, tiles, dtype=jnp.float32)
  up, down = params['blocks']['tokens']['up'], params['blocks']['tokens']['down']
  num_layers, _, hidden = up['kernel'].shape
  kernels_LNTS = up['kernel'][:, place_N, None] * of_tile_NT[None, :, :, None]
  kernels_LTSN = down['kernel'][:, None, :, place_N] * of_tile_NT.T[None, :, None]
  tokens = {'up': {'kernel': kernels_LNTS.reshape(num_layers, -1, tiles * hidden),
                   'bias': jnp.tile(up['bias'], (1, tiles))},
            'down': {'kernel': kernels_LTSN.reshape(num_layers, tiles * hidden, -1),
                     'bias': down['bias'][:, place_N]}}
  return {**params, 'blocks': {**params['blocks'], 'tokens': tokens}}


def _tiles(grid: tuple[int, int], times: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
  """For each token of the large grid, row by row: which tile it is in, and where in it."""
  (h, w), (down, across) = grid, times
  y, x = np.meshgrid(np.arange(h * down), np.arange(w * across), indexing='ij')
  return (y // h * across + x // w).ravel(), (y % h * w + x % w).ravel()


def build(model: schema.Mixer, image_px: tuple[int, int]) -> Mixer:
  """The backbone of these settings for images of `image_px` (height, width).

  Raises:
    UserError: lists all settings that do not fit together.
  """
  if wrong := [*model_options.faults(model, image_px)]:
    raise UserError('\n'.join(wrong))
  return Mixer(model, (int(image_px[0]), int(image_px[1])))
