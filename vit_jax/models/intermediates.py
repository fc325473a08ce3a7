"""Reads features after single blocks of a backbone, for linear probes, k-NN and other evaluations.

Blocks have numbers from 1, or from the end: -1 is the last block.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp

from vit_jax.core.contracts import Backbone, LayeredBackbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Params, PyTree


def is_layered(backbone: Backbone) -> TypeGuard[LayeredBackbone]:
  """Returns whether the blocks of a backbone can be run one by one."""
  return all(hasattr(backbone, name) for name in ('begin', 'block', 'finish'))


def read(backbone: LayeredBackbone, params: Params, image: Array, blocks: Sequence[int],
         state: PyTree | None = None) -> list[Features]:
  """Returns features after each of `blocks`, normalized and pooled as after the last one; in evaluation mode.

  Args:
    backbone: a network with blocks.
    params: its parameters.
    image: `[B, H, W, 3]` f32.
    blocks: numbers of blocks, ascending.
    state: its running statistics, if it has some.

  Raises:
    UserError: there is no such block.
  """
  return [backbone.finish(params, tokens, grid=(0, 0)) for tokens in _after(backbone, params, image, blocks, state)]


def grids(backbone: LayeredBackbone, params: Params, image: Array, blocks: Sequence[int], *, grid: tuple[int, int],
          norm: bool, state: PyTree | None = None) -> Array:
  """Returns patch tokens after each of n `blocks` as maps with concatenated channels, `[B, h, w, n * D]` f32.

  Args:
    backbone, params, image, blocks, state: as in `read`.
    grid: (h, w) of the patch tokens of the image.
    norm: applies the last norm to each layer; otherwise the tokens are those of the residual stream.

  Raises:
    UserError: there is no such block.
  """
  tokens_of_blocks = _after(backbone, params, image, blocks, state)
  if norm:
    tokens_of_blocks = [backbone.finish(params, tokens, grid=grid).tokens for tokens in tokens_of_blocks]
  h, w = grid
  parts = [x[:, -h * w:].reshape(len(x), h, w, -1).astype(jnp.float32) for x in tokens_of_blocks]
  return jnp.concatenate(parts, -1)


def numbers(blocks: Sequence[int], depth: int) -> list[int]:
  """Returns numbers of blocks that count from 1, for numbers that may count from the end.

  Raises:
    UserError: there is no such block, or the numbers do not ascend.
  """
  from_1 = [block if block > 0 else depth + 1 + block for block in blocks]
  if sorted(set(from_1)) != from_1 or not 1 <= from_1[0] <= from_1[-1] <= depth:
    raise UserError(f'blocks: expected ascending numbers from 1 to {depth}, or from -{depth} to -1, for a network of '
                    f'{depth} blocks, got {", ".join(map(str, blocks))}. Choose other blocks.')
  return from_1


def _after(backbone: LayeredBackbone, params: Params, image: Array, blocks: Sequence[int],
           state: PyTree | None) -> list[Array]:
  """Returns all tokens `[B, M, D]` after each of `blocks`."""
  def apply_block(layer: Array, tokens: Array) -> Array:
    return backbone.block(params, tokens, layer=layer, capture=False)[0]

  depth = jax.tree.leaves(params['blocks'])[0].shape[0]
  tokens, num_applied, tokens_of_blocks = backbone.begin(params, image, state), 0, []
  for number in numbers(blocks, depth):
    tokens = jax.lax.fori_loop(num_applied, number, apply_block, tokens)
    tokens_of_blocks.append(tokens)
    num_applied = number
  return tokens_of_blocks


def concatenate(features: Sequence[Features], *, patches: bool) -> Array:
  """Returns the pooled features of n blocks, `[B, n * D]` f32; with `patches`, also the last mean patch token."""
  parts = [of_block.pooled for of_block in features]
  if patches:
    parts.append(features[-1].tokens.mean(1))
  return jnp.concatenate([x.astype(jnp.float32) for x in parts], axis=-1)
