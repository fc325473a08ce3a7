"""Attention maps: rollout, attention of the last block, relevance for a class.

Attention is `[B, A, M, M]` f32, query before key, the N patch tokens last. A map is `[B, N]` f32: the contribution of
each patch token to the output. `readout_weights [B, M]` are the weights of the final tokens in the output: of a class
token, of a mean over tokens, or of a learned query.
"""
from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, HostArray


def roll(product: Array | None, attention: Array, *, discard: float = 0.) -> Array:
  """Multiplies the layers of attention rollout so far by one more (arXiv 2005.00928; ViT paper, Appendix D.8).

  Attention, averaged over heads, gets half its weight from the identity, for the residual connection:
  `(mean_A A + I) / 2`. The weights of the input tokens, `[B, M]`, are `readout_weights` times the product.

  Args:
    product: of the layers before, `[B, M, M]`; None for the first layer.
    attention: `[B, A, M, M]`.
    discard: share of the smallest entries of each row of attention that are set to 0, never the largest; rows are
      normalized again. The paper discards none: 0.
  """
  mean = attention.mean(1)
  if num_dropped := int(discard * mean.shape[-1]):
    least = jnp.sort(mean, -1)[..., num_dropped:num_dropped + 1]
    kept = jnp.where(mean >= least, mean, 0.)
    mean = kept / kept.sum(-1, keepdims=True)
  mixed = (mean + jnp.eye(mean.shape[-1])[None]) / 2
  return mixed if product is None else mixed @ product


def head_maps(attention: Array, readout_weights: Array, num_patches: int) -> Array:
  """Returns the attention map of each head of the last block (DINO, arXiv 2104.14294, Figure 1), `[B, A, N]` f32."""
  return jnp.einsum('bm,bamk->bak', readout_weights, attention)[..., -num_patches:]


def keep_mass(maps: HostArray, mass: float) -> HostArray:
  """Marks the smallest set of tokens with at least `mass` of a map `[..., N]`: bool (DINO uses 0.6)."""
  order = np.argsort(-maps, -1, kind='stable')
  ordered = np.take_along_axis(maps, order, -1)
  before = np.cumsum(ordered, -1) - ordered
  kept = before < mass * maps.sum(-1, keepdims=True)
  return np.take_along_axis(kept, np.argsort(order, -1), -1)


def relevance(pairs: Iterable[tuple[Array, Array]], readout_weights: Array) -> Array:
  """Returns the relevance of input tokens for a score, `[B, M]` (arXiv 2103.15679, eqs. 5 and 6).

  Attention is weighted by its gradient.

  With `E = mean_A max(0, gradient * A)` of each layer, `R <- R + E R` from `R = I`, the first layer first; here the
  row `readout_weights R` is computed from the last layer to the first, so that no product of matrices is held in
  memory. The contribution of the identity is subtracted.

  Args:
    pairs: attention of a block and gradient of the score by it, both `[B, A, M, M]`, the last block first.
    readout_weights: `[B, M]`.
  """
  row = readout_weights
  for attention, gradient in pairs:
    row = _with_layer(row, attention, gradient)
  return row - readout_weights


@jax.jit
def _with_layer(row: Array, attention: Array, gradient: Array) -> Array:
  """Returns `row [B, M]` with the relevance through one more layer."""
  return row + jnp.einsum('bm,bmk->bk', row, jnp.maximum(attention * gradient, 0.).mean(1))
