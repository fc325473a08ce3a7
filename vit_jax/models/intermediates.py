"""Reads features inside a backbone that can be driven block by block: what linear probes and k-NN are measured on."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp

from vit_jax.core.contracts import Backbone, LayeredBackbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Params, PyTree


def is_layered(backbone: Backbone) -> TypeGuard[LayeredBackbone]:
  """Whether its blocks can be run one by one."""
  return all(hasattr(backbone, name) for name in ('begin', 'block', 'finish'))


def read(backbone: LayeredBackbone, params: Params, image: Array, blocks: Sequence[int],
         state: PyTree | None = None) -> list[Features]:
  """Features after each of `blocks`, normalized and pooled as after the last one; in evaluation mode.

  Args:
    backbone: with blocks.
    params: of it.
    image: `[B, H, W, 3]` f32.
    blocks: from 1, or from the end: -1 is the last one. Rising.
    state: its running statistics, if it has some.

  Raises:
    UserError: there is no such block.
  """
  return [backbone.finish(params, tokens, grid=(0, 0)) for tokens in _after(backbone, params, image, blocks, state)]


def grids(backbone: LayeredBackbone, params: Params, image: Array, blocks: Sequence[int], *, grid: tuple[int, int],
          norm: bool, state: PyTree | None = None) -> Array:
  """Patch tokens after each of `blocks` in their places, with concatenated channels: `[B, h, w, n * D]` f32.

  Args:
    backbone, params, image, blocks, state: as of `read`.
    grid: (h, w) of the patch tokens of the image.
    norm: applies the last norm to each layer; otherwise the tokens are those of the residual stream.

  Raises:
    UserError: there is no such block.
  """
  found = _after(backbone, params, image, blocks, state)
  if norm:
    found = [backbone.finish(params, tokens, grid=grid).tokens for tokens in found]
  h, w = grid
  parts = [x[:, -h * w:].reshape(len(x), h, w, -1).astype(jnp.float32) for x in found]
  return jnp.concatenate(parts, -1)


def numbers(blocks: Sequence[int], depth: int) -> list[int]:
  """The numbers of blocks from 1, of numbers that may count from the end.

  Raises:
    UserError: there is no such block, or they do not rise.
  """
  places = [block if block > 0 else depth + 1 + block for block in blocks]
  if sorted(set(places)) != places or not 1 <= places[0] <= places[-1] <= depth:
    raise UserError(f'blocks: expected ascending numbers from 1 to {depth}, or from -{depth} to -1, for a network of '
                    f'{depth} blocks, got {", ".join(map(str, blocks))}. Choose other blocks.')
  return places


def _after(backbone: LayeredBackbone, params: Params, image: Array, blocks: Sequence[int],
           state: PyTree | None) -> list[Array]:
  """All tokens after each of `blocks`, `[B, M, D]`."""
  tokens, before, found = backbone.begin(params, image, state), 0, []
  for place in numbers(blocks, jax.tree.leaves(params['blocks'])[0].shape[0]):
    tokens = jax.lax.fori_loop(
        before, place, lambda i, x: backbone.block(params, x, layer=i, capture=False)[0], tokens)
    found.append(tokens)
    before = place
  return found


def concatenate(found: Sequence[Features], *, patches: bool) -> Array:
  """`[B, n * D]` f32: pooled features in a row, and with `patches` after them the mean patch token of the last."""
  each = [one.pooled for one in found] + ([found[-1].tokens.mean(1)] if patches else [])
  return jnp.concatenate([x.astype(jnp.float32) for x in each], axis=-1)
