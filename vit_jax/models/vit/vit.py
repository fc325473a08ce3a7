"""Vision Transformer (arXiv 2010.11929, eqs. 1-4), a `core.api.TokenBackbone`.

Parameters, all f32 (a public format; leaves under `blocks` are stacked, depth first):

  stem/{kernel [P, P, 3, D], bias [D]}
                               (with a network before the patches: what `stems.py` lists)
  cls [1, 1, D]                (pooling by class token, or by the patches beside one)
  dist [1, 1, D]               (`distilled`)
  registers [1, R, D]          (`registers`)
  positions [1, M, D]          (learned; first the rows of class and distillation token; registers have none)
  positions/{column [w, D/2], row [h, D/2]}                         (learned2d)
  blocks/{norm1,norm2}/{scale,bias} [L, D]                          (`parallel`: no norm2)
  blocks/attn/{query,key,value}/{kernel [L, D, A, K], bias [L, A, K]}
  blocks/attn/{query_norm,key_norm}/{scale,bias} [L, K]             (`qk_norm`)
  blocks/attn/relative [L, 2N-1, A, K]                              (relative positions)
  blocks/attn/out/{kernel [L, A, K, D], bias [L, D]}
  blocks/mlp/up/{kernel [L, D, F], bias [L, F]}, and such a blocks/mlp/gate (`swiglu`)
  blocks/mlp/down/{kernel [L, F, D], bias [L, D]}
  blocks/{scale1,scale2} [L, D]                                     (`layer_scale`: of attention, of MLP)
  blocks/positions [L, 1, M, D], or blocks/positions/{column [L, w, D/2], row [L, h, D/2]}
                               (learned positions at `layers`; then there is no `positions`)
  norm/{scale,bias} [D]
  pool/{probe [1, 1, D], attn, norm, mlp}                           (`map` pooling; shapes as in a block without L)

With `axial`, what a block holds lies under `blocks/row` and again under `blocks/column`; only
`blocks/positions` stays in its place. The residual stream is in the compute dtype; LayerNorm and softmax
are in f32, and so are the features and attention pooling. Knows no mesh, no task and no weight format.
"""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.config.schema import Pool, Positions, PositionsAt
from vit_jax.core.numerics import constrain_batch, split_key
from vit_jax.core.types import Array, Features, Key, Params, PyTree, UserError
from vit_jax.models.layers import LayerNorm, applied, dropout, initial
from vit_jax.models.vit import posemb, stack, vit_checks
from vit_jax.models.vit.block import AxialBlock, Block
from vit_jax.models.vit.pool import AttentionPool
from vit_jax.models.vit.positions import Table
from vit_jax.models.vit.stem import Stem

REGISTERS_STDDEV = 1e-6  # DINOv2 with registers
DIST_STDDEV = .02        # DeiT


@dataclasses.dataclass(frozen=True)
class ViT:
  """A Vision Transformer for images of `image_px` (height, width); made by `build`.

  Images of other sizes work too, except with relative positions: learned ones are resized in the forward pass.
  """
  settings: schema.ViT
  image_px: tuple[int, int]

  def init(self, key: Key, image: Array) -> tuple[Params, PyTree]:
    """Parameters, and running statistics `{'stem': ...}` of a stem that has some, else `{}`.

    `image [B, H, W, 3]` must be of `image_px`; only its shape is read.
    """
    assert tuple(image.shape[1:3]) == tuple(self.image_px), (image.shape, self.image_px)
    s = self.settings
    optional = (('registers', s.registers), ('pool', s.pool is Pool.MAP), ('dist', s.distilled))
    new = [name for name, is_used in optional if is_used]
    keys = split_key(key, 'stem', 'positions', 'blocks', 'norm', *new)
    stem, state = self._stem.init(keys['stem'])
    params: Params = {
        'stem': stem,
        'blocks': jax.vmap(self._init_block)(jax.random.split(keys['blocks'], s.depth)),
        'norm': initial(self._norm, keys['norm'], jnp.zeros((1, s.width)))}
    if s.pool.has_class_token:
      params['cls'] = jnp.zeros((1, 1, s.width))
    if s.distilled:
      params['dist'] = initializers.normal(DIST_STDDEV)(keys['dist'], (1, 1, s.width))
    if s.registers:
      params['registers'] = initializers.normal(REGISTERS_STDDEV)(keys['registers'], (1, s.registers, s.width))
    if s.pool is Pool.MAP:
      params['pool'] = initial(self._pool, keys['pool'], jnp.zeros((1, 1, s.width)))
    if self._table.exists and s.positions_at is PositionsAt.LAYERS:
      params['blocks']['positions'] = jax.vmap(self._table.init)(jax.random.split(keys['positions'], s.depth))
    elif self._table.exists:
      params['positions'] = self._table.init(keys['positions'])
    return params, {'stem': state} if state else {}

  def apply(self, params: Params, state: PyTree, image: Array, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Features (f32) of `image [B, H, W, 3]` f32, and the new state."""
    grid = self._grid(image)
    tokens_BND, state = self.stem(params, state, image, train=train)
    positions_ND = self.positions(params, grid)
    return self.encode(params, tokens_BND, positions_ND, grid=grid, train=train, key=key), state

  def stem(self, params: Params, state: PyTree, image: Array, *, train: bool) -> tuple[Array, PyTree]:
    """Patch tokens `[B, N, D]` in the compute dtype, and the new state."""
    self._grid(image)  # raises where patches do not tile it
    tokens_BND, changed = self._stem.apply(params['stem'], state.get('stem', {}), image, train=train)
    return tokens_BND, {'stem': changed} if changed else {}

  def embed(self, params: Params, image: Array) -> Array:
    """Patch tokens `[B, N, D]` in the compute dtype: `x_p E` of eq. 1; of a stem without running statistics."""
    return self.stem(params, {}, image, train=False)[0]

  def positions(self, params: Params, grid: tuple[int, int]) -> Array:
    """Position embeddings `[N, D]` f32 of the patch tokens on `grid`, resized if it is another grid.

    Zeros for what each block adds or knows by itself: relative positions, and those of `layers`.
    """
    if fixed := posemb.FIXED.get(self.settings.positions):
      return jnp.asarray(fixed(grid, self.settings.width))
    if 'positions' in params:
      return self._table.of_patches(params['positions'], grid)
    return jnp.zeros((grid[0] * grid[1], self.settings.width))

  def encode(self, params: Params, tokens: Array, positions: Array, *, grid: tuple[int, int],
             train: bool, key: Key | None) -> Features:
    """Adds positions and class token (eq. 1), runs the blocks (eqs. 2, 3), normalises and pools (eq. 4).

    Args:
      params: of this backbone.
      tokens: `[B, n, D]`, all patch tokens or any of them; all, in raster order, where the blocks know
        places themselves (relative positions, positions at `layers`, axial attention).
      positions: `[n, D]` or `[B, n, D]` f32, those of the tokens.
      grid: of the image; also passed on to the features.
      train: switches dropout and stochastic depth on.
      key: for these; may be None if there are none.

    Raises:
      UserError: if the blocks need all tokens and these are not.
    """
    s = self.settings
    self._check_whole(tokens.shape[1], grid)
    is_random = train and (s.dropout > 0. or s.drop_path > 0. or s.attention_dropout > 0.)
    assert key is not None or not is_random, 'train=True with dropout or drop_path needs a key'
    keys = jax.random.split(key, 2) if is_random and key is not None else (None, None)
    x_BMD = constrain_batch(dropout(self._sequence(params, tokens, positions), s.dropout, keys[0]))
    shared = self._extended(params['positions'], positions) if s.positions_at is PositionsAt.SHARED else None
    x_BMD = self._run(params['blocks'], x_BMD, shared=shared, grid=grid, key=keys[1])
    return self.finish(params, x_BMD, grid=grid)

  def begin(self, params: Params, image: Array) -> Array:
    """What the first block sees of `image [B, H, W, 3]`: `[B, M, D]` in the compute dtype."""
    return self._sequence(params, self.embed(params, image), self.positions(params, self._grid(image)))

  def finish(self, params: Params, tokens: Array, *, grid: tuple[int, int]) -> Features:
    """Normalises and pools (eq. 4) what the last block gave, `[B, M, D]`.

    With `norm_after_pool` the mean is normalised, and the tokens of the features are not.
    """
    x_BMD = tokens.astype(jnp.float32) if self.settings.norm_after_pool else applied(self._norm, params['norm'], tokens)
    distilled = constrain_batch(x_BMD[:, 1]) if self.settings.distilled else None
    return Features(x_BMD[:, self._num_extra:], constrain_batch(self._pooled(params, x_BMD)), grid, distilled)

  def _pooled(self, params: Params, x_BMD: Array) -> Array:
    """`[B, D]` (eq. 4) from the whole sequence. Registers are never part of it."""
    match self.settings.pool:
      case Pool.CLS:
        return x_BMD[:, 0]
      case Pool.MEAN | Pool.PATCHES:
        mean_BD = x_BMD[:, self._num_extra:].mean(1)
        return applied(self._norm, params['norm'], mean_BD) if self.settings.norm_after_pool else mean_BD
      case Pool.FIRST:
        return x_BMD[:, self._num_extra]
      case Pool.MAP:
        return applied(self._pool, params['pool'], x_BMD[:, self._num_extra:])

  def reading(self, params: Params, tokens: Array) -> Array:
    """How much of each token is read in the end, `[B, M]` f32 with sum 1, from what the last block gave.

    The class token alone; all patch tokens alike; the first of them alone; or, with `map`, as the probe attends to them
    (mean over heads).
    """
    num_images, num_tokens, _ = tokens.shape
    match self.settings.pool:
      case Pool.CLS:
        weights_M = jnp.zeros(num_tokens).at[0].set(1.)
      case Pool.MEAN | Pool.PATCHES:
        weights_M = jnp.zeros(num_tokens).at[self._num_extra:].set(1. / (num_tokens - self._num_extra))
      case Pool.FIRST:
        weights_M = jnp.zeros(num_tokens).at[self._num_extra].set(1.)
      case Pool.MAP:
        x_BMD = applied(self._norm, params['norm'], tokens)
        weights_BN = self._pool.apply({'params': params['pool']}, x_BMD[:, self._num_extra:], method='weights')
        return jnp.pad(jnp.asarray(weights_BN), ((0, 0), (self._num_extra, 0)))
    return jnp.broadcast_to(weights_M[None], (num_images, num_tokens))

  def block(self, params: Params, tokens: Array, *, layer: Array | int, capture: bool,
            nudge: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """Block `layer` (from 0; may be traced) on `[B, M, D]` of images of `image_px`; `train` is off.

    `nudge [B, A, M, M]` f32 is added to the attention weights: zeros, to differentiate by them; not with `axial`.

    Returns `[B, M, D]` in the compute dtype, and with `capture` `attention [B, A, M, M]` f32; with `axial`
    instead `row_attention [B, h, A, w, w]` and `column_attention [B, w, A, h, h]`.
    """
    grid = self._cut(self.image_px)
    self._check_whole(tokens.shape[1] - self._num_extra, grid)
    own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), params['blocks'])
    shared = params['positions'] if self.settings.positions_at is PositionsAt.SHARED else None
    table = own.get('positions', shared)
    return self._layer(
        _without_positions(own), tokens.astype(self._dtype), None if table is None else self._own(table, grid),
        grid=grid, rate=None, key=None, capture=capture, nudge=nudge)

  def _layer(self, params: Params, x_BMD: Array, positions: Array | None, *, grid: tuple[int, int], rate: Array | None,
             key: Key | None, capture: bool, nudge: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """Adds positions `[1, M, D]` or `[B, M, D]` if there are any, then runs one block."""
    x_BMD, num_images = x_BMD if positions is None else _add(x_BMD, positions), x_BMD.shape[0]
    runs = {'grid': grid} if self.settings.axial else {'num_sequences': num_images, 'nudge': nudge}
    return applied(self._block, params, x_BMD, num_images=num_images, **runs, rate=rate, dropout_key=key,
                   capture=capture)

  def _run(self, params: Params, x_BMD: Array, *, shared: Array | None, grid: tuple[int, int],
           key: Key | None) -> Array:
    """All blocks."""
    s = self.settings

    def layer(params: Params, x: Array, rate: Array | None, key: Key | None) -> Array:
      y, _ = self._layer(_without_positions(params), x, params.get('positions', shared), grid=grid, rate=rate, key=key,
                         capture=False)
      return constrain_batch(y)

    def ready(params: Params) -> Params:
      cast = stack.cast(self._dtype)(params)
      return cast if 'positions' not in params else {
          **cast, 'positions': jax.vmap(lambda table: self._own(table, grid))(params['positions'])}

    first = s.drop_path if s.drop_path_even else 0.
    rates_L = jnp.asarray(np.linspace(first, s.drop_path, s.depth), jnp.float32) if s.drop_path else None
    keys_L = None if key is None else jax.random.split(key, s.depth)
    return stack.run(layer, params, x_BMD, ready=ready, rates=rates_L, keys=keys_L, execution=s.execution,
                     remat=s.remat, full_remat=s.full_remat, unroll=s.unroll)

  def _own(self, table: PyTree, grid: tuple[int, int]) -> Array:
    """Positions `[1, M, D]` of one block, from its table."""
    return self._extended(table, self._table.of_patches(table, grid))

  def _extended(self, table: PyTree | None, positions: Array) -> Array:
    return self._table.extended(table, positions, num_registers=self.settings.registers).astype(self._dtype)

  def _sequence(self, params: Params, tokens: Array, positions: Array) -> Array:
    """`[x_cls; x_dist; registers; x_p E] + E_pos` (eq. 1), `[B, M, D]`, compute dtype; E_pos if it is added here."""
    first = [params[name] for name in ('cls', 'dist', 'registers') if name in params]
    x_BND = tokens.astype(self._dtype)
    if self.settings.positions_at is PositionsAt.STEM:
      x_BND = _add(x_BND, (positions[None] if positions.ndim == 2 else positions).astype(self._dtype))
      for i, row in enumerate(self._table.of_first(params.get('positions'))):
        first[i] = first[i] + row[None, None]
    each = [jnp.broadcast_to(x.astype(self._dtype), (tokens.shape[0], *x.shape[1:])) for x in first]
    return jnp.concatenate([*each, x_BND], axis=1) if each else x_BND

  def _init_block(self, key: Key) -> Params:
    s, grid = self.settings, self._cut(self.image_px)
    relative = s.positions is Positions.RELATIVE  # whose logits need as many tokens as there are keys
    x = jnp.zeros((grid[0] * grid[1] if relative else 1, s.width), self._dtype)
    runs = {'grid': (1, 1)} if s.axial else {'num_sequences': 1}
    return initial(self._block, key, x, num_images=1, **runs, rate=None, dropout_key=None, capture=False)

  def _check_whole(self, num_tokens: int, grid: tuple[int, int]) -> None:
    """Raises UserError if the blocks know the places of tokens and these do not fill them."""
    if wrong := vit_checks.misplaced(self.settings, num_tokens, grid=grid, own_grid=self._cut(self.image_px)):
      raise UserError(wrong)

  @property
  def _dtype(self) -> DTypeLike:
    return jnp.dtype(self.settings.dtype.value)

  @property
  def _num_extra(self) -> int:
    return self.settings.registers + self._num_first

  @property
  def _num_first(self) -> int:
    """Tokens with a position before the patch tokens: class and distillation token."""
    return self.settings.pool.has_class_token + self.settings.distilled

  @property
  def _table(self) -> Table:
    s = self.settings
    return Table(s.positions, self._cut(self.image_px), s.width, self._num_first, s.position_resize)

  @property
  def _stem(self) -> Stem:
    s = self.settings
    return Stem(s.stem, s.patch, s.width, self._dtype, s.remat)

  @property
  def _norm(self) -> LayerNorm:
    return LayerNorm(self.settings.norm_eps)

  @property
  def _pool(self) -> AttentionPool:
    s = self.settings
    return AttentionPool(s.heads, s.mlp, s.gelu, s.norm_eps)

  @property
  def _block(self) -> Block | AxialBlock:
    s, grid = self.settings, self._cut(self.image_px)
    relative = grid[0] * grid[1] if s.positions is Positions.RELATIVE else 0

    def one() -> Block:
      return Block(s.heads, s.mlp, s.gelu, s.norm_eps, s.dropout, self._dtype, s.attention_dropout, s.qk_norm,
                   relative, s.swiglu, s.layer_scale, s.parallel, s.qkv_bias, s.branch_scale, s.attention)

    return AxialBlock(one(), one()) if s.axial else one()

  def _grid(self, image: Array) -> tuple[int, int]:
    return self._cut((image.shape[1], image.shape[2]))

  def _cut(self, image_px: tuple[int, int]) -> tuple[int, int]:
    """Token grid of an image.

    Raises:
      UserError: if the patches do not tile it.
    """
    if wrong := vit_checks.untiled(image_px, self.settings.patch):
      raise UserError(wrong)
    return image_px[0] // self.settings.patch, image_px[1] // self.settings.patch


def build(model: schema.ViT, image_px: tuple[int, int]) -> ViT:
  """The backbone of these settings for images of `image_px` (height, width).

  Raises:
    UserError: lists all settings that do not fit together.
  """
  if wrong := vit_checks.faults(model, image_px):
    raise UserError('\n'.join(wrong))
  return ViT(model, (int(image_px[0]), int(image_px[1])))


def _without_positions(params: Params) -> Params:
  return {name: leaf for name, leaf in params.items() if name != 'positions'}


def _add(x_BMD: Array, positions: Array) -> Array:
  """Adds positions `[1, M, D]` or `[B, M, D]`."""
  return x_BMD + jnp.broadcast_to(positions, x_BMD.shape)
