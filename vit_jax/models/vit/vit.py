"""Vision Transformer (arXiv 2010.11929, eqs. 1-4), a `core.contracts.TokenBackbone`.

Parameters, all f32 (a public format; leaves under `blocks` are stacked, depth first):

  stem/{kernel [P, P, 3, D], bias [D]}                              (no bias without `stem.bias`)
                               (with a network before the patches: what `stem.py` lists)
  cls [1, 1, D]                (`pool.class_token`)
  dist [1, 1, D]               (`pool.distillation`)
  registers [1, R, D]          (`registers`)
  {stem_norm,norm_before}/{scale,bias} [D]                          (`stem.norm`, `norm_before`)
  positions [1, M, D]          (learned; first the rows of class and distillation token; registers have none)
  positions/{column [w, D/2], row [h, D/2]}                         (`learned2d`)
  blocks/{norm1,norm2}/{scale,bias} [L, D]                          (no norm2 in a `parallel` block)
  blocks/attn/{query,key,value}/{kernel [L, D, A, K], bias [L, A, K]}
                               (biases as `attention.qkv_bias` says)
  blocks/attn/{query_norm,key_norm}/{scale,bias} [L, K]             (`attention.qk_norm`)
  blocks/attn/norm/{scale,bias} [L, D], blocks/mlp/norm/{scale,bias} [L, F]   (`inner_norm` of each)
  blocks/attn/relative [L, 2N-1, A, K]                              (relative positions)
  blocks/attn/frequencies [L, 2, A, K/2]                            (`positions.mixed`: of columns, of rows)
  blocks/attn/out/{kernel [L, A, K, D], bias [L, D]}
  blocks/mlp/up/{kernel [L, D, F], bias [L, F]}, and such a blocks/mlp/gate (SwiGLU)
  blocks/mlp/down/{kernel [L, F, D], bias [L, D]}
  blocks/{scale1,scale2} [L, D]                                     (`block.layer_scale`: of attention, of MLP)
  blocks/positions [L, 1, M, D], or blocks/positions/{column [L, w, D/2], row [L, h, D/2]}
                               (learned positions at the layers; then there is no `positions`)
  norm/{scale,bias} [D]                                             (`last_norm`)
  pool/{probe [1, 1, D], attn, norm, mlp}                           (`map`; shapes as in a block without L)

RMSNorms have no bias; out, up, gate and down have none without `attention.out_bias` and `mlp.bias`.

In an `axial` block the parameters of a block lie under `blocks/row` and again under `blocks/column`; only
`blocks/positions` stays in its place. The residual stream is in the compute dtype; LayerNorm and softmax
are in f32, and so are the features and attention pooling. Knows no mesh, no objective and no weight format.
"""
from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import check, schema
from vit_jax.config.schema import Init, LastNorm, PositionsAt, layers, objective_base
from vit_jax.config.schema.checks import kind
from vit_jax.core import implementation, numerics, trees
from vit_jax.core.axes import labelled
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import constrain_batch, split_key
from vit_jax.core.types import Array, Features, Key, NativeImages, Params, PyTree
from vit_jax.models import stack
from vit_jax.models.kernels import attend
from vit_jax.models.layers import applied, dropout, initial
from vit_jax.models.vit import context
from vit_jax.models.vit.attention import with_mimetic
from vit_jax.models.vit.context import LOSSES, BlockInfo
from vit_jax.models.vit.pool import ClassToken, check_pooled
from vit_jax.models.vit.positions import NoPositions, check_all
from vit_jax.models.vit.stem import Patches
from vit_jax.parallel import kernels

TOKENS = (None, 'tokens', None)  # logical axes of learned tokens


class _BlockOutput(NamedTuple):
  """The output of one block or of all blocks.

  x: tokens `[B, M, D]` in the compute dtype.
  carry: what the last block passes on beside the tokens.
  losses: scalars f32 by name, which modules of the blocks have stated (`LOSSES`).
  """
  x: Array
  carry: PyTree
  losses: stack.Sums


@dataclasses.dataclass(frozen=True)
class ViT:
  """A Vision Transformer for images of `image_px` (height, width); made by `build`.

  Images of other sizes work too, except with relative positions: learned ones are resized in the forward pass.
  """
  settings: schema.ViT
  image_px: tuple[int, int]

  def init(self, key: Key, image: Array | NativeImages) -> tuple[Params, PyTree]:
    """Returns parameters, and running statistics `{'stem': ...}` of a stem that has some, else `{}`.

    `image [B, H, W, 3]` must be of `image_px`; only its shape is read. Images at their own aspect have any grid.
    """
    s, laws = self.settings, self._context.laws
    if isinstance(image, NativeImages):
      num_channels = image.patches.shape[-1] // s.patch ** 2
    else:
      assert tuple(image.shape[1:3]) == tuple(self.image_px), (image.shape, self.image_px)
      num_channels = image.shape[-1]
    has_part = {'registers': bool(s.registers), 'pool': s.pool.has_parameters, 'dist': s.pool.distillation,
                'cls': s.pool.class_token}
    parts = [name for name, is_used in has_part.items() if is_used]
    keys = split_key(key, 'stem', 'positions', 'blocks', 'norm', *parts)
    stem, state = self._stem.init(keys['stem'], num_channels)
    params: Params = {
        'stem': stem,
        'blocks': jax.vmap(self._init_block)(jax.random.split(keys['blocks'], s.depth))}
    has_norm = {'norm': s.last_norm is not LastNorm.NONE, 'norm_before': s.norm_before, 'stem_norm': s.stem.norm}
    for name, is_used in has_norm.items():
      if is_used:
        params[name] = initial(self._context.make_norm(), keys['norm'], jnp.zeros((1, s.width)))  # ones and zeros
    for name, law, number in (('cls', laws.cls, 1), ('dist', laws.dist, 1), ('registers', laws.registers, s.registers)):
      if has_part[name]:
        params[name] = labelled(law(keys[name], (1, number, s.width)), TOKENS)
    if has_part['pool']:
      params['pool'] = self._pool.init(keys['pool'])
    if s.positions.has_table and s.positions.at is PositionsAt.LAYERS:
      params['blocks']['positions'] = jax.vmap(self._positions.init)(jax.random.split(keys['positions'], s.depth))
    elif s.positions.has_table:
      params['positions'] = self._positions.init(keys['positions'])
    return params, {'stem': state} if state else {}

  def apply(self, params: Params, state: PyTree, image: Array | NativeImages, *, train: bool,
            key: Key | None) -> tuple[Features, PyTree]:
    """Returns features (f32) of `image [B, H, W, 3]` f32, and the new state.

    Of images at their own aspect, the grid of the features is `(1, N)`, and tokens of padding have no meaning.
    """
    if isinstance(image, NativeImages):
      return self._apply_native(params, image, train=train, key=key), state
    grid = self._grid(image.shape[1:3])
    tokens_BND, state = self.stem(params, state, image, train=train)
    positions = self.positions(params, grid)
    if train and self.settings.patch_dropout:
      assert key is not None, 'train=True with patch_dropout needs a key'
      keys = split_key(key, 'patches', 'blocks')
      tokens_BND, positions = self._drop_patches(tokens_BND, positions, keys['patches'])
      key = keys['blocks']
    return self.encode(params, tokens_BND, positions, grid=grid, train=train, key=key), state

  def _drop_patches(self, tokens_BND: Array, positions_NC: Array, key: Key) -> tuple[Array, Array]:
    """Returns a random subset of the patch tokens of each image `[B, n, D]`, and their positions `[B, n, C]`."""
    num_images, num_patches, _ = tokens_BND.shape
    num_kept = max(1, objective_base.num_kept(num_patches, self.settings.patch_dropout))
    kept_Bn = jnp.argsort(jax.random.uniform(key, (num_images, num_patches)), axis=1)[:, :num_kept]
    return constrain_batch(jnp.take_along_axis(tokens_BND, kept_Bn[..., None], axis=1)), positions_NC[kept_Bn]

  def _apply_native(self, params: Params, images: NativeImages, *, train: bool, key: Key | None) -> Features:
    """Returns features of images at their own aspect: no token attends to padding, and padding is not pooled."""
    s = self.settings
    if type(s.stem) is not type(schema.ViT().stem):
      raise UserError(f'data.recipe.eval_native_patch: expected model.stem=patches, got {kind(s.stem)}. Set it to 0.')
    if 'mask' not in inspect.signature(self._pool.pooled).parameters:
      raise UserError(f'{type(s.pool).implementation}: expected a method pooled(params, x_BMD, mask) for images at '
                      'their own aspect, got one without mask. Add it, or set data.recipe.eval_native_patch=0.')
    num_tokens = images.patches.shape[1]
    mask_BN = images.mask
    positions_BND = self._positions.of_grids(params.get('positions'), images.grid, num_tokens)
    with jax.named_scope('stem'):
      tokens_BND = self._stem.embedded(params['stem'], images.patches.astype(self._context.dtype))
    tokens_BND = self._apply_norm(params, 'stem_norm', tokens_BND)
    return self._encode(params, tokens_BND, positions_BND, grid=(1, num_tokens), train=train, key=key, mask=mask_BN,
                        pools_all=False)

  def stem(self, params: Params, state: PyTree, image: Array, *, train: bool) -> tuple[Array, PyTree]:
    """Returns patch tokens `[B, N, D]` in the compute dtype, and the new state."""
    self._grid(image.shape[1:3])  # raises where patches do not tile it
    assert 'stem' in state or not self.settings.has_batch_norm, 'the stem needs its running statistics'
    with jax.named_scope('stem'):
      tokens_BND, changed = self._stem.apply(params['stem'], state.get('stem', {}), image, train=train)
    return self._apply_norm(params, 'stem_norm', tokens_BND), {'stem': changed} if changed else {}

  def embed(self, params: Params, image: Array) -> Array:
    """Returns patch tokens `[B, N, D]` in the compute dtype, `x_p E` of eq. 1; the stem has no running statistics."""
    return self.stem(params, {}, image, train=False)[0]

  def positions(self, params: Params, grid: tuple[int, int]) -> Array:
    """Returns positions `[N, D]` f32 of the patch tokens on `grid`, resized if it is another grid.

    Rotary positions are cosines and sines `[N, K]`; learned ones come before them, `[N, D + K]`, if there are some.
    Positions that each block has itself (relative ones, and those of `layers`) are zeros here.
    """
    return self._positions.of_patches(params.get('positions'), grid)

  def encode(self, params: Params, tokens: Array, positions: Array, *, grid: tuple[int, int],
             train: bool, key: Key | None, mask: Array | None = None) -> Features:
    """Adds positions and class token (eq. 1), runs the blocks (eqs. 2, 3), normalizes and pools (eq. 4).

    Args:
      params: of this backbone.
      tokens: `[B, n, D]`, all patch tokens or any of them; all, in raster order, where positions follow from the
        order of tokens (relative positions, positions at `layers`, axial attention).
      positions: `[n, D]` or `[B, n, D]` f32, those of the tokens.
      grid: of the image; also passed on to the features.
      train: switches dropout and stochastic depth on.
      key: for these, and for positions that training changes; may be None if there are none.
      mask: bool, `[B, n]`: which tokens are attended to, all alike by every token; None = all. The features of the
        others have no meaning, and pooling does not know of the mask.

    Raises:
      UserError: if the blocks need all tokens and these are not.
    """
    return self._encode(params, tokens, positions, grid=grid, train=train, key=key, mask=mask, pools_all=True)

  def _encode(self, params: Params, tokens: Array, positions: Array, *, grid: tuple[int, int], train: bool,
              key: Key | None, mask: Array | None, pools_all: bool) -> Features:
    """Returns the result of `encode`; if `pools_all` is False, only the tokens of the mask are pooled."""
    s = self.settings
    self._check_complete(tokens.shape[1], grid, mask)
    is_random = train and (s.dropout > 0. or s.drop_path > 0. or s.attention.dropout > 0.)
    assert key is not None or not is_random, 'train=True with dropout or drop_path needs a key'
    keys = jax.random.split(key, 2) if is_random and key is not None else (None, None)  # of tokens, of blocks
    if train and self._positions.is_drawn:
      assert key is not None, 'train=True with positions that are drawn needs a key'
      positions = self._positions.drawn(positions, jax.random.fold_in(key, 2))
    x_BMD = constrain_batch(dropout(self._sequence(params, tokens, positions), s.dropout, keys[0]))
    x_BMD = self._apply_norm(params, 'norm_before', x_BMD)
    shared = self._positions.in_blocks(params.get('positions'), positions)
    output = self._run(params['blocks'], x_BMD, shared=shared, grid=grid, key=keys[1], mask=mask)
    is_pooled = None if pools_all or mask is None else self._with_extra(mask)
    if isinstance(output.carry, dict) and 'is_token' in output.carry:
      is_token = output.carry['is_token']
      is_pooled = is_token if is_pooled is None else is_token & is_pooled
    return self.finish(params, output.x, grid=grid, mask=is_pooled)._replace(losses=output.losses or None)

  def begin(self, params: Params, image: Array, state: PyTree | None = None) -> Array:
    """Returns the input of the first block for `image [B, H, W, 3]`: `[B, M, D]` in the compute dtype.

    `state` is that of `apply`; only a stem with running statistics needs it.
    """
    tokens_BND, _ = self.stem(params, state or {}, image, train=False)
    x_BMD = self._sequence(params, tokens_BND, self.positions(params, self._grid(image.shape[1:3])))
    return self._apply_norm(params, 'norm_before', x_BMD)

  def finish(self, params: Params, tokens: Array, *, grid: tuple[int, int], mask: Array | None = None) -> Features:
    """Normalizes and pools (eq. 4) the output `[B, M, D]` of the last block; only tokens of `mask [B, M]`, if given.

    With `last_norm=pooled` the mean is normalized, and the tokens of the features are not.
    """
    is_late = self.settings.last_norm is LastNorm.POOLED
    x_BMD = tokens.astype(jnp.float32) if is_late else self._apply_last_norm(params, tokens)
    with jax.named_scope('pool'):
      masked = {} if mask is None else {'mask': mask}
      pooled_BD = self._pool.pooled(params.get('pool', {}), x_BMD, **masked)
      check_pooled(self.settings.pool, pooled_BD, x_BMD.shape)
    if is_late:
      pooled_BD = self._apply_last_norm(params, pooled_BD)
    distilled = constrain_batch(x_BMD[:, 1]) if self.settings.pool.distillation else None
    return Features(x_BMD[:, self.settings.num_extra:], constrain_batch(pooled_BD), grid, distilled)

  def readout_weights(self, params: Params, tokens: Array) -> Array:
    """Returns the weight of each token in the pooled features, `[B, M]` f32 with sum 1, for the last block's output.

    For example the class token alone, all patch tokens alike, or the attention of a probe (mean over heads).
    """
    if self.settings.pool.has_parameters:
      tokens = self._apply_last_norm(params, tokens)
    return self._pool.weights(params.get('pool', {}), tokens)

  def block(self, params: Params, tokens: Array, *, layer: Array | int, capture: bool,
            attn_delta: Array | None = None) -> tuple[Array, dict[str, Array]]:
    """Applies block `layer` (from 0; may be traced) to `[B, M, D]` of images of `image_px`; `train` is off.

    `attn_delta [B, A, M, M]` f32 is added to the attention weights: zeros, to differentiate by them; not if `axial`.

    Returns `[B, M, D]` in the compute dtype, and with `capture` `attention [B, A, M, M]` f32; of an axial block
    instead `row_attention [B, h, A, w, w]` and `column_attention [B, w, A, h, h]`.
    """
    grid = self._grid(self.image_px)
    self._check_complete(tokens.shape[1] - self.settings.num_extra, grid)
    own = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), params['blocks'])
    if 'positions' in own:
      positions: Array | None = self._block_positions(own['positions'], grid)
    else:
      positions = self._positions.in_blocks(params.get('positions'), self.positions(params, grid))
    info = BlockInfo(len(tokens), capture=capture, num_extra=self.settings.num_extra, grid=grid, positions=positions,
                     attn_delta=attn_delta)
    x_BMD = tokens.astype(self._context.dtype)
    carry = self._init_carry(x_BMD, info)
    if jax.tree.leaves(carry):
      raise UserError(f'{type(self.settings.block).implementation}: expected blocks that pass on nothing but tokens, '
                      'for what reads single layers, got a kind of block with init_carry. Leave out what reads single '
                      'layers.')
    output, captured = self._apply_block(_without_positions(own), x_BMD, carry, info)
    return output.x, captured

  def _init_carry(self, x_BMD: Array, info: BlockInfo) -> PyTree:
    """Returns what the first block gets beside the tokens: `{}`, unless the kind of block says otherwise."""
    make = getattr(self._block, 'init_carry', None)
    return make(x_BMD, info) if make else {}

  def _apply_block(self, params: Params, x_BMD: Array, carry: PyTree,
                   info: BlockInfo) -> tuple[_BlockOutput, dict[str, Array]]:
    """Applies one block. Returns its output, and what it captured."""
    if info.positions is not None:
      x_BMD = self._positions.before_block(x_BMD, info.positions)
    (x_BMD, carry, captured), sown = self._block.apply({'params': params}, x_BMD, carry, info, mutable=[LOSSES])
    losses: stack.Sums = {}
    for path, value in trees.flatten(sown).items():  # such as 'losses/mlp/balance/0'
      name = path.split('/')[-2]
      losses[name] = losses.get(name, jnp.zeros(())) + value
    return _BlockOutput(x_BMD, carry, losses), captured

  def _joins_rows(self, params: Params, shared: Array | None, mask: Array | None) -> bool:
    """Returns whether the blocks run on joined rows `[B * M, D]`: on GPUs, where XLA then transposes nothing.

    Blocks are plain then, and attention gets nothing but the tokens. There is no dropout, whose masks would differ.
    """
    has_more = shared is not None or mask is not None or 'positions' in params
    return numerics.mesh_platform() == 'gpu' and kernels.may_join_rows(self.settings) and not has_more

  def _run(self, params: Params, x_BMD: Array, *, shared: Array | None, grid: tuple[int, int],
           key: Key | None, mask: Array | None) -> _BlockOutput:
    """Runs all blocks; `shared` are positions that all of them get, and `mask [B, N]` is that of `encode`."""
    num_images, num_tokens, width = x_BMD.shape
    info = BlockInfo(num_images, num_extra=self.settings.num_extra, grid=grid)
    if mask is not None:  # extra tokens are always attended to
      is_token = self._with_extra(mask)
      info = info._replace(is_token=is_token, mask=is_token[:, None, None])
    joins_rows = self._joins_rows(params, shared, mask)
    x, num_padded = x_BMD, num_tokens
    if joins_rows:  # the kernel of attention may need more tokens, which are cut off in the end
      num_padded = attend.padded_tokens(self.settings.attention.kernel, num_tokens)
      x = jnp.pad(x_BMD, ((0, 0), (0, num_padded - num_tokens), (0, 0))).reshape(-1, width)
      info = info._replace(num_keys=num_tokens)

    def layer(params: Params, x: tuple[Array, PyTree], rate: Array | None,
              key: Key | None) -> tuple[tuple[Array, PyTree], stack.Sums]:
      tokens, carry = x
      positions = params.get('positions', shared)
      if (positions is not None or mask is not None) and tokens.shape[1] != num_tokens:
        raise UserError(f'{type(self.settings.block).implementation}: expected blocks that keep the number of tokens, '
                        f'with model.positions={kind(self.settings.positions)} in the blocks or with images at their '
                        f'own aspect, got blocks that change it from {num_tokens} to {tokens.shape[1]}. Choose '
                        'positions that are added before the blocks, such as learned, and images of one size.')
      output, _ = self._apply_block(_without_positions(params), tokens, carry,
                                    info._replace(rate=rate, key=key, positions=positions))
      return (constrain_batch(output.x), output.carry), output.losses

    def ready(params: Params) -> Params:
      cast = stack.cast(self._context.dtype)(params)
      if 'positions' not in params:
        return cast
      return {**cast, 'positions': jax.vmap(lambda table: self._block_positions(table, grid))(params['positions'])}

    carry = {} if joins_rows else self._init_carry(x, info)
    (x, carry), losses = self._run_stack(layer, params, (x, carry), ready=ready, key=key)
    if joins_rows:
      x = x.reshape(num_images, num_padded, width)[:, :num_tokens]
    return _BlockOutput(x, carry, losses)

  def _run_stack(self, layer: stack.Layer, params: Params, x: PyTree, *, ready: stack.Ready,
                 key: Key | None) -> tuple[PyTree, stack.Sums]:
    """Runs the stack of blocks with its rates of stochastic depth and its keys, see `stack.run`."""
    s = self.settings
    first = s.drop_path if s.drop_path_even else 0.
    rates_L = jnp.asarray(np.linspace(first, s.drop_path, s.depth), jnp.float32) if s.drop_path else None
    keys_L = None if key is None else jax.random.split(key, s.depth)
    with jax.named_scope('blocks'):
      return stack.run(layer, params, x, ready=ready, rates=rates_L, keys=keys_L, execution=s.execution,
                       remat=s.remat, full_remat=s.full_remat, unroll=s.unroll)

  def _with_extra(self, mask_BN: Array) -> Array:
    """Returns a mask of all tokens `[B, M]`, in which class token and registers are seen."""
    return jnp.pad(mask_BN, ((0, 0), (self.settings.num_extra, 0)), constant_values=True)

  def _check_complete(self, num_tokens: int, grid: tuple[int, int], mask: Array | None = None) -> None:
    """Raises UserError if positions or blocks need all patch tokens of `grid`, and these are not."""
    self._positions.check_complete(num_tokens, grid)
    if self.settings.block.needs_grid:
      setting = f'model.block={kind(self.settings.block)}'
      check_all(setting, num_tokens, grid)
      if mask is not None:
        raise UserError(f'{setting}: expected every patch token to be attended to, got a mask of tokens. '
                        'Choose another block, or images of one size.')

  def _block_positions(self, table: PyTree, grid: tuple[int, int]) -> Array:
    """Returns positions `[1, M, D]` of one block, from its table."""
    return self._positions.of_sequence(table, self._positions.of_patches(table, grid))

  def _sequence(self, params: Params, tokens: Array, positions: Array) -> Array:
    """Returns `[x_cls; x_dist; registers; x_p E] + E_pos` (eq. 1), `[B, M, D]`, compute dtype; E_pos if added here."""
    first = [params[name] for name in ('cls', 'dist', 'registers') if name in params]
    dtype = self._context.dtype
    x_BND = tokens.astype(dtype)
    if (added := self._positions.at_stem(positions)) is not None:
      x_BND = x_BND + jnp.broadcast_to(added.astype(dtype), x_BND.shape)
      for i, row in enumerate(self._positions.of_first(params.get('positions'))):
        first[i] = first[i] + row[None, None]
    first_of_each = [jnp.broadcast_to(x.astype(dtype), (tokens.shape[0], *x.shape[1:])) for x in first]
    return jnp.concatenate([*first_of_each, x_BND], axis=1) if first else x_BND

  def _apply_norm(self, params: Params, name: str, x: Array) -> Array:
    """Returns `x` after the norm of this name, in the compute dtype; unchanged if the network does not have it."""
    if name not in params:
      return x
    return applied(self._context.make_norm(), params[name], x).astype(self._context.dtype)

  def _apply_last_norm(self, params: Params, x: Array) -> Array:
    """Returns `x` after the last norm, f32."""
    if self.settings.last_norm is LastNorm.NONE:
      return x.astype(jnp.float32)
    normed: Array = applied(self._context.make_norm(), params['norm'], x)
    return normed

  def _init_block(self, key: Key) -> Params:
    """Returns the parameters of one block."""
    s = self.settings
    # One token is enough, unless positions know the number of all.
    grid = (1, 1) if s.positions.is_resizable else self._grid(self.image_px)
    x = jnp.zeros((grid[0] * grid[1], s.width), self._context.dtype)
    info = BlockInfo(1, num_extra=s.num_extra, grid=grid)
    carry = self._init_carry(x, info)
    if s.init is not Init.MIMETIC:
      return initial(self._block, key, x, carry, info)
    keys = split_key(key, 'block', *s.block.parts)
    return with_mimetic(initial(self._block, keys.pop('block'), x, carry, info), keys)

  @functools.cached_property
  def _context(self) -> context.Context:
    return context.of(self.settings)

  @property
  def _stem(self) -> Patches:
    stem: Patches = implementation.make(self.settings.stem, model=self.settings, context=self._context)
    return stem

  @property
  def _positions(self) -> NoPositions:
    positions: NoPositions = implementation.make(self.settings.positions, model=self.settings,
                                                 grid=self._grid(self.image_px))
    return positions

  @property
  def _pool(self) -> ClassToken:
    pool: ClassToken = implementation.make(self.settings.pool, model=self.settings, context=self._context)
    return pool

  @property
  def _block(self) -> nn.Module:
    s, positions = self.settings, self._positions
    block: nn.Module = implementation.make(
        s.block, heads=s.heads, attention=s.attention, mlp=s.mlp, context=context.of_blocks(s),
        positions=positions if positions.acts_in_attention else None)
    return block

  def _grid(self, image_px: tuple[int, ...]) -> tuple[int, int]:
    """Returns the token grid of an image of this height and width.

    Raises:
      UserError: the patches do not tile it.
    """
    height, width = image_px
    for problem in layers.untiled((height, width), self.settings.patch):
      raise UserError(problem)
    return height // self.settings.patch, width // self.settings.patch


def build(model: schema.ViT, image_px: tuple[int, int]) -> ViT:
  """Returns the backbone of these settings for images of `image_px` (height, width).

  Raises:
    UserError: lists all settings that do not fit together.
  """
  check.check_model(model, image_px)
  return ViT(model, (int(image_px[0]), int(image_px[1])))


def _without_positions(params: Params) -> Params:
  """Returns the parameters of blocks without their tables of positions."""
  return {name: leaf for name, leaf in params.items() if name != 'positions'}
