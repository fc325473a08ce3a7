"""MLP-Mixer (arXiv 2105.01601), a `core.contracts.Backbone`, with its cost.

Parameters, all f32 (a public format; leaves under `blocks` are stacked, depth first; S, F are the hidden
widths of the MLPs over tokens and over channels):

  stem/{kernel [P, P, 3, D], bias [D]}
  blocks/{norm1,norm2}/{scale,bias} [L, D]
  blocks/tokens/{up/{kernel [L, N, S], bias [L, S]}, down/{kernel [L, S, N], bias [L, N]}}
  blocks/channels/{up/{kernel [L, D, F], bias [L, F]}, down/{kernel [L, F, D], bias [L, D]}}
  norm/{scale,bias} [D]

The MLP over tokens is for one number of tokens: larger images need parameters that `grow` makes, and settings with a
larger `tokens_mlp`. Features are the normed tokens and their mean, f32. Knows no mesh, no objective and no weight
format.
"""
from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config import schema
from vit_jax.config.schema import layers
from vit_jax.core.axes import Names
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import constrain_batch, split_key
from vit_jax.core.types import Array, Features, Key, Params, PyTree
from vit_jax.models import stack
from vit_jax.models.initialization import LECUN
from vit_jax.models.kernels.forms import select
from vit_jax.models.layers import Dense, LayerNorm, applied, drop_path, dropout, initial
from vit_jax.models.vit.context import Context
from vit_jax.models.vit.stem import Patches


class Mlp(nn.Module, kw_only=True):
  """`W2 gelu(W1 x + b1) + b2`, with dropout after both; the value before the activation is named `mlp`."""
  settings: schema.Mixer
  hidden: int

  @nn.compact
  def __call__(self, x: Array, key: Key | None) -> Array:
    """`[B, M, I]` to `[B, M, I]`."""
    s, forms = self.settings, select(self.settings.kernels)

    def dense(width: int, name: str, axes: Names) -> Dense:
      return Dense(features=(width,), axes=axes, dtype=jnp.dtype(s.dtype.value), law=LECUN, num_batch_dims=2,
                   forms=forms, name=name)

    keys = (None, None) if key is None else tuple(jax.random.split(key))
    hidden_BMF = checkpoint_name(dense(self.hidden, 'up', ('embed', 'mlp'))(x), 'mlp')
    hidden_BMF = dropout(forms.gelu(hidden_BMF, s.gelu), s.dropout, keys[0])
    return dropout(dense(x.shape[-1], 'down', ('mlp', 'out'))(hidden_BMF), s.dropout, keys[1])


class Block(nn.Module, kw_only=True):
  """`U = X + (W2 gelu(W1 LN(X)^T))^T`, `Y = U + W4 gelu(W3 LN(U))` (eq. 1)."""
  settings: schema.Mixer

  @nn.compact
  def __call__(self, x: Array, *, rate: Array | None, dropout_key: Key | None) -> Array:
    """Applies one block.

    Args:
      x: `[B, N, D]` in the compute dtype.
      rate: f32 scalar, probability that a branch is dropped for an image; None = never.
      dropout_key: None switches dropout and stochastic depth off.
    """
    s, num_images = self.settings, x.shape[0]
    keys = (None,) * 4 if dropout_key is None else tuple(jax.random.split(dropout_key, 4))
    y_BND = norm(s, 'norm1')(x)
    y_BDN = Mlp(settings=s, hidden=s.tokens_mlp, name='tokens')(y_BND.astype(x.dtype).swapaxes(1, 2), keys[0])
    y_BND = drop_path(y_BDN.swapaxes(1, 2), rate, keys[1], num_images=num_images)
    x = checkpoint_name(x + y_BND, 'residual')
    y_BND = Mlp(settings=s, hidden=s.channels_mlp, name='channels')(norm(s, 'norm2')(x), keys[2])
    return x + drop_path(y_BND, rate, keys[3], num_images=num_images)


def norm(settings: schema.Mixer, name: str | None = None) -> LayerNorm:
  """Returns a LayerNorm of the network."""
  return LayerNorm(settings.norm_eps, select(settings.kernels), name=name)


@dataclasses.dataclass(frozen=True)
class Mixer:
  """A Mixer for images of `image_px` (height, width)."""
  settings: schema.Mixer
  image_px: tuple[int, int]

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Returns parameters, and `{}`. `image [B, H, W, 3]` must be of `image_px`; only its shape is read."""
    assert tuple(image.shape[1:3]) == tuple(self.image_px), (image.shape, self.image_px)
    s = self.settings
    keys = split_key(key, 'stem', 'blocks', 'norm')
    tokens = jnp.zeros((1, (self.image_px[0] // s.patch) * (self.image_px[1] // s.patch), s.width))

    def init_block(key: Key) -> Params:
      return initial(Block(settings=s), key, tokens, rate=None, dropout_key=None)

    return {'stem': self._stem.init(keys['stem'], image.shape[-1])[0],
            'blocks': jax.vmap(init_block)(jax.random.split(keys['blocks'], s.depth)),
            'norm': initial(norm(s), keys['norm'], jnp.zeros((1, s.width)))}, {}

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Returns features (f32) of `image [B, H, W, 3]` f32, and `state` unchanged.

    Raises:
      UserError: if patches do not tile the image, or the parameters are for another number of tokens.
    """
    s = self.settings
    for problem in layers.untiled((image.shape[1], image.shape[2]), s.patch):
      raise UserError(problem)
    grid = image.shape[1] // s.patch, image.shape[2] // s.patch
    num_known = params['blocks']['tokens']['up']['kernel'].shape[1]
    if grid[0] * grid[1] != num_known:
      raise UserError(f'image_px: expected a size of {num_known} patches of {s.patch} px, which the MLP over tokens '
                      f'was made for, got {image.shape[1:3]}, which has {grid[0] * grid[1]}. Use images of that size.')
    is_random = train and (s.dropout > 0. or s.drop_path > 0.)
    assert key is not None or not is_random, 'train=True with dropout or drop_path needs a key'
    with jax.named_scope('stem'):
      x_BND, _ = self._stem.apply(params['stem'], {}, image, train=train)
    with jax.named_scope('blocks'):
      x_BND = self._run(params['blocks'], x_BND, key=key if is_random else None)
    x_BND = applied(norm(s), params['norm'], x_BND)
    return Features(x_BND, constrain_batch(x_BND.mean(1)), grid), state

  def _run(self, params: Params, x_BND: Array, *, key: Key | None) -> Array:
    """Runs all blocks; without a key nothing is random."""
    s = self.settings

    def layer(params: Params, x: Array, rate: Array | None, key: Key | None) -> tuple[Array, stack.Sums]:
      return constrain_batch(applied(Block(settings=s), params, x, rate=rate, dropout_key=key)), {}

    rates_L = jnp.asarray(np.linspace(0., s.drop_path, s.depth), jnp.float32) if s.drop_path else None
    keys_L = None if key is None else jax.random.split(key, s.depth)
    return stack.run(layer, params, x_BND, ready=stack.cast(jnp.dtype(s.dtype.value)), rates=rates_L, keys=keys_L,
                     execution=s.execution, remat=s.remat)[0]

  @property
  def _stem(self) -> Patches:
    s = self.settings
    return Patches(model=s, context=Context(norm=schema.LayerNorm(s.norm_eps), gelu=s.gelu,
                                            dtype=jnp.dtype(s.dtype.value), forms=select(s.kernels)))


def grow(params: Params, grid: tuple[int, int], *, times: tuple[int, int]) -> Params:
  """Returns parameters for images that are a multiple of the size (arXiv 2105.01601, Appendix C).

  The large image is divided into tiles of the original size. `W1` and `W2` of the MLP over tokens become block diagonal
  with one copy for each tile, so that each tile is at first processed as an image of its own; the hidden width grows
  with the number of tiles.

  Args:
    params: of a Mixer.
    grid: tokens (h, w) of the original size.
    times: number of tiles, (downwards, sideways).
  """
  (h, w), (down, across) = grid, times
  tiles = down * across
  y, x = np.meshgrid(np.arange(h * down), np.arange(w * across), indexing='ij')  # of the tokens of the large grid
  tile_N, place_N = (y // h * across + x // w).ravel(), (y % h * w + x % w).ravel()
  of_tile_NT = jax.nn.one_hot(tile_N, tiles, dtype=jnp.float32)
  first, last = params['blocks']['tokens']['up'], params['blocks']['tokens']['down']
  num_layers, _, hidden = first['kernel'].shape
  kernels_LNTS = first['kernel'][:, place_N, None] * of_tile_NT[None, :, :, None]
  kernels_LTSN = last['kernel'][:, None, :, place_N] * of_tile_NT.T[None, :, None]
  tokens = {'up': {'kernel': kernels_LNTS.reshape(num_layers, -1, tiles * hidden),
                   'bias': jnp.tile(first['bias'], (1, tiles))},
            'down': {'kernel': kernels_LTSN.reshape(num_layers, tiles * hidden, -1),
                     'bias': last['bias'][:, place_N]}}
  return {**params, 'blocks': {**params['blocks'], 'tokens': tokens}}
