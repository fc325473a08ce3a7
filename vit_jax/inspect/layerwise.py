"""Runs a backbone layer by layer, so that the attention of only one layer is in memory.

All layers share one compiled program for a batch of a given shape. Attention is computed explicitly, not by a fused
kernel. Training and evaluation do not use this module.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.core.contracts import LayeredBackbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Params, PyTree

Logits = Callable[[Features], Array]
"""Features to logits `[B, C]`."""


class Layer(NamedTuple):
  """The tokens and the attention at one depth.

  depth: 0 is before the first block, l is after block l.
  tokens: `[B, M, D]`, the patch tokens last.
  attention: `[B, A, M, M]` f32 of block l, query before key; None at depth 0 and if it is not captured.
  """
  depth: int
  tokens: Array
  attention: Array | None


class Driver:
  """Runs the blocks of a backbone one by one.

  Args:
    backbone: a network with transformer blocks.
    params: its parameters, on the device.
    state: its running statistics, if it has some.

  Raises UserError if the network has no transformer blocks.
  """

  def __init__(self, backbone: LayeredBackbone, params: Params, state: PyTree | None = None) -> None:
    if 'blocks' not in params or not hasattr(backbone, 'block'):
      raise UserError(f'weights: expected a Vision Transformer, got a {type(backbone).__name__} without transformer '
                      'blocks. Choose other weights.')
    self.backbone, self.params, self._state = backbone, params, state
    self.num_layers = jax.tree.leaves(params['blocks'])[0].shape[0]
    self._begin = jax.jit(backbone.begin)
    self._finish = jax.jit(backbone.finish, static_argnames='grid')
    self._block = jax.jit(backbone.block, static_argnames='capture')
    self._readout_weights = jax.jit(backbone.readout_weights)
    self._pull = jax.jit(self._one_back)
    self._first_pull = jax.jit(self._first_back, static_argnames=('logits', 'grid'))

  def layers(self, image: Array, *, capture: bool) -> Iterator[Layer]:
    """Yields `num_layers + 1` depths of `image [B, H, W, 3]` f32, normalized; only the newest depth is in memory."""
    tokens = self._begin(self.params, image, self._state)
    yield Layer(0, tokens, None)
    for i in range(self.num_layers):
      tokens, captured = self._block(self.params, tokens, layer=i, capture=capture)
      yield Layer(i + 1, tokens, full_attention(captured) if capture else None)

  def finish(self, tokens: Array, *, grid: tuple[int, int]) -> Features:
    """Returns the features from the output of the last block."""
    return self._finish(self.params, tokens, grid=grid)

  def readout_weights(self, tokens: Array) -> Array:
    """Returns the weights of the tokens in the pooled features, `[B, M]`, from the output of the last block."""
    return self._readout_weights(self.params, tokens)

  def relevance_gradients(self, image: Array, logits: Logits, chosen: Array | int, *,
                          grid: tuple[int, int]) -> Iterator[tuple[Array, Array]]:
    """Yields the attention of each block and the gradient of a logit by it, the last block first.

    The input tokens of all layers are in memory (`[B, M, D]` each), and the attention of one layer.

    Args:
      image: `[B, H, W, 3]`.
      logits: the head; pass the same function for all images, so that it is compiled once.
      chosen: class whose logit is differentiated, the same for all images.
      grid: `(h, w)` of the image's tokens.

    Yields:
      Attention and gradient, both `[B, A, M, M]` f32.

    Raises UserError if the blocks have no single attention over all tokens.
    """
    held = [layer.tokens for layer in self.layers(image, capture=False)]
    gradient = self._first_pull(self.params, held[-1], chosen, logits=logits, grid=grid)
    for i in reversed(range(self.num_layers)):
      gradient, attention, by_attention = self._pull(self.params, i, held[i], gradient)
      yield attention, by_attention

  def _first_back(self, params: Params, tokens: Array, chosen: Array, *, logits: Logits,
                  grid: tuple[int, int]) -> Array:
    """Gradient of a logit with respect to the output of the last block."""
    return jax.grad(lambda x: logits(self.backbone.finish(params, x, grid=grid))[:, chosen].sum())(tokens)

  def _one_back(self, params: Params, layer: Array, tokens: Array, gradient: Array) -> tuple[Array, Array, Array]:
    """Backpropagates through a block: gradient of its input, its attention, and the gradient of the attention."""
    captured = self.backbone.block(params, tokens, layer=layer, capture=True)[1]
    if 'attention' not in captured:
      raise UserError('relevance: expected blocks with one attention over all tokens, got blocks with '
                      f'{" and ".join(captured)}. Use the rollout of the attention.')
    attention = captured['attention']

    def forward(x: Array, delta: Array) -> Array:
      return self.backbone.block(params, x, layer=layer, capture=False, attn_delta=delta)[0]

    _, pull = jax.vjp(forward, tokens, jnp.zeros_like(attention))
    by_tokens, by_attention = pull(gradient)
    return by_tokens, attention, by_attention


def full_attention(captured: dict[str, Array]) -> Array:
  """Returns `attention [B, A, M, M]`; of an axial pair the product: within the row first, then within the column.

  `A[(i, j), (k, l)] = column[j, i, k] row[k, j, l]`: the query (i, j) attends within column j to token (k, j), which
  has attended within row k.
  """
  if 'attention' in captured:
    return captured['attention']
  rows, columns = captured['row_attention'], captured['column_attention']  # [B, h, A, w, w], [B, w, A, h, h]
  both = jnp.einsum('bjaik,bkajl->baijkl', columns, rows)
  num_images, heads, h, w = both.shape[:4]
  return both.reshape(num_images, heads, h * w, h * w)
