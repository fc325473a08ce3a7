"""Drives a backbone layer by layer, so that no more than one layer's attention is ever held.

All layers share one compiled program for a batch of a given shape. Attention is collected on the explicit path, in
the network as it is otherwise; training and evaluation never come here.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.core.contracts import LayeredBackbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Params

Logits = Callable[[Features], Array]
"""Features to logits `[B, C]`."""


class Layer(NamedTuple):
  """What is seen at one depth.

  depth: 0 is before the first block, l is after block l.
  tokens: `[B, M, D]`, the patch tokens last.
  attention: `[B, A, M, M]` f32 of block l, query before key; None at depth 0 and where it is not collected.
  """
  depth: int
  tokens: Array
  attention: Array | None


class Driver:
  """A backbone taken to pieces.

  Args:
    backbone: with blocks.
    params: of it, on the device.
  """

  def __init__(self, backbone: LayeredBackbone, params: Params):
    if 'blocks' not in params or not hasattr(backbone, 'block'):
      raise UserError(f'{type(backbone).__name__} has no transformer blocks to look into; want a Vision Transformer')
    self.backbone, self.params = backbone, params
    self.num_layers = jax.tree.leaves(params['blocks'])[0].shape[0]
    self._begin = jax.jit(backbone.begin)
    self._finish = jax.jit(backbone.finish, static_argnames='grid')
    self._block = jax.jit(backbone.block, static_argnames='capture')
    self._reading = jax.jit(backbone.reading)
    self._pull = jax.jit(self._one_back)
    self._first_pull = jax.jit(self._first_back, static_argnames=('logits', 'grid'))

  def layers(self, image: Array, *, capture: bool) -> Iterator[Layer]:
    """`num_layers + 1` depths of `image [B, H, W, 3]` f32, prepared; only the newest is held."""
    tokens = self._begin(self.params, image)
    yield Layer(0, tokens, None)
    for i in range(self.num_layers):
      tokens, captured = self._block(self.params, tokens, layer=i, capture=capture)
      yield Layer(i + 1, tokens, whole_attention(captured) if capture else None)

  def finish(self, tokens: Array, *, grid: tuple[int, int]) -> Features:
    """Features of what the last block gave."""
    return self._finish(self.params, tokens, grid=grid)

  def reading(self, tokens: Array) -> Array:
    """How much of each token is read in the end, `[B, M]`, from what the last block gave."""
    return self._reading(self.params, tokens)

  def relevance_gradients(self, image: Array, logits: Logits, chosen: Array | int, *,
                          grid: tuple[int, int]) -> Iterator[tuple[Array, Array]]:
    """Attention of each block and the gradient of a logit by it, the last block first.

    Token inputs of all layers are held (`[B, M, D]` each), attention of one.

    Args:
      image: `[B, H, W, 3]`.
      logits: the head; the same function for all images, as it is compiled once.
      chosen: class of the logit that is differentiated, the same for all images.
      grid: of the image's tokens.

    Yields:
      Attention and gradient, both `[B, A, M, M]` f32.
    """
    held = [layer.tokens for layer in self.layers(image, capture=False)]
    gradient = self._first_pull(self.params, held[-1], chosen, logits=logits, grid=grid)
    for i in reversed(range(self.num_layers)):
      gradient, attention, by_attention = self._pull(self.params, i, held[i], gradient)
      yield attention, by_attention

  def _first_back(self, params: Params, tokens: Array, chosen: Array, *, logits: Logits,
                  grid: tuple[int, int]) -> Array:
    """Gradient of a logit by what the last block gave."""
    return jax.grad(lambda x: logits(self.backbone.finish(params, x, grid=grid))[:, chosen].sum())(tokens)

  def _one_back(self, params: Params, layer: Array, tokens: Array, gradient: Array) -> tuple[Array, Array, Array]:
    """Through a block backwards: gradient by its input, its attention, and the gradient by that."""
    attention = self.backbone.block(params, tokens, layer=layer, capture=True)[1]['attention']

    def forward(x: Array, nudge: Array) -> Array:
      return self.backbone.block(params, x, layer=layer, capture=False, nudge=nudge)[0]

    _, pull = jax.vjp(forward, tokens, jnp.zeros_like(attention))
    by_tokens, by_attention = pull(gradient)
    return by_tokens, attention, by_attention


def whole_attention(captured: dict[str, Array]) -> Array:
  """`attention [B, A, M, M]`; of an axial pair the product: within the row first, then within the column.

  `A[(i, j), (k, l)] = column[j, i, k] row[k, j, l]`: token (i, j) asks column j, whose token (k, j) has asked row k.
  """
  if 'attention' in captured:
    return captured['attention']
  rows, columns = captured['row_attention'], captured['column_attention']  # [B, h, A, w, w], [B, w, A, h, h]
  both = jnp.einsum('bjaik,bkajl->baijkl', columns, rows)
  num_images, heads, h, w = both.shape[:4]
  return both.reshape(num_images, heads, h * w, h * w)
