"""Maps of where a network looks: rollout, attention of the last block, relevance for a class.

Attention is `[B, A, M, M]` f32, query before key, the N patch tokens last. A map is `[B, N]` f32: what each patch token
contributes to what is read in the end, which is a class token, a mean of tokens or a learned query's choice.
"""
from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp

from vit_jax.core.types import Array


def rollout(attentions: Iterable[Array], reading: Array, *, discard: float = 0.) -> Array:
  """Attention rollout (arXiv 2005.00928; ViT paper, Appendix D.8), weights over input tokens, `[B, M]`.

  Each layer's attention, averaged over heads, gets half its weight from the identity, for the residual connection:
  `(mean_A A + I) / 2`; the layers are multiplied. `reading` times the product is what the output reads of the input.

  Args:
    attentions: one `[B, A, M, M]` a layer, the first layer first; taken one by one.
    reading: `[B, M]`, how much of each token is read in the end.
    discard: share of the smallest entries of each row of attention that are set to 0, the largest always stays;
      a row's sum is restored. 0 is the paper's.
  """
  product: Array | None = None
  for attention in attentions:
    product = roll(product, attention, discard=discard)
  assert product is not None, 'no layers'
  return jnp.einsum('bm,bmk->bk', reading, product)


def roll(product: Array | None, attention: Array, *, discard: float) -> Array:
  """One more layer of `rollout`: the product so far, `[B, M, M]` or None, times this layer's."""
  mixed = _without_smallest(attention.mean(1), discard)
  mixed = (mixed + jnp.eye(mixed.shape[-1])[None]) / 2
  return mixed if product is None else mixed @ product


def _without_smallest(attention: Array, share: float) -> Array:
  """`[..., M]` without the smallest `share` of its entries, rows summing to 1."""
  num_dropped = int(share * attention.shape[-1])
  if not num_dropped:
    return attention
  least = jnp.sort(attention, -1)[..., num_dropped:num_dropped + 1]
  kept = jnp.where(attention >= least, attention, 0.)
  return kept / kept.sum(-1, keepdims=True)


def head_maps(attention: Array, reading: Array, num_patches: int) -> Array:
  """What each head of the last block looks at (DINO, arXiv 2104.14294, Figure 1), `[B, A, N]` f32."""
  return jnp.einsum('bm,bamk->bak', reading, attention)[..., -num_patches:]


def keep_mass(maps: Array, mass: float) -> Array:
  """The smallest set of tokens that holds at least `mass` of a map `[..., N]`: bool (DINO uses .6)."""
  order = jnp.argsort(-maps, -1)
  ordered = jnp.take_along_axis(maps, order, -1)
  before = jnp.cumsum(ordered, -1) - ordered
  kept = before < mass * maps.sum(-1, keepdims=True)
  return jnp.take_along_axis(kept, jnp.argsort(order, -1), -1)


def relevance(pairs: Iterable[tuple[Array, Array]], reading: Array) -> Array:
  """Gradient-weighted relevance of input tokens for a score, `[B, M]` (arXiv 2103.15679, eqs. 5 and 6).

  With `E = mean_A max(0, gradient * A)` of each layer, `R <- R + E R` from `R = I`, the first layer first; here the
  row `reading R` is followed from the last layer to the first, so that no product of matrices is held. The part that
  stays where it is read (the identity's) is left out.

  Args:
    pairs: attention of a block and gradient of the score by it, both `[B, A, M, M]`, the last block first.
    reading: `[B, M]`, how much of each token is read in the end.
  """
  row = reading
  for attention, gradient in pairs:
    weights = jnp.maximum(attention * gradient, 0.).mean(1)
    row = row + jnp.einsum('bm,bmk->bk', row, weights)
  return row - reading
