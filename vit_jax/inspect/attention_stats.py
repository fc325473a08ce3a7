"""Numbers that sum attention up: how far it reaches, how much it depends on the query, how spread it is.

Attention is `[B, A, M, M]` f32, query before key, the N patch tokens last; rows sum to 1. All results are `[A]` f32
means over images (and queries), which may be averaged further over batches of the same size.
"""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, HostArray

TINY = 1e-8  # added to attention where a logarithm is taken


def patch_attention(attention: Array, num_patches: int) -> Array:
  """Attention among patch tokens alone, `[B, A, N, N]`, each row divided by its sum."""
  attention = attention[..., -num_patches:, -num_patches:]
  return attention / jnp.maximum(attention.sum(-1, keepdims=True), TINY)


def distances_px(grid: tuple[int, int], patch_px: tuple[float, float]) -> HostArray:
  """Distances between patch centres, `[N, N]` f32 in pixels of the prepared image, in raster order."""
  rows, columns = np.indices(grid).reshape(2, -1).astype(np.float32)
  across = (columns[:, None] - columns[None]) * patch_px[1]
  return np.hypot((rows[:, None] - rows[None]) * patch_px[0], across)


def mean_distance(attention: Array, distances: Array | HostArray) -> Array:
  """Mean attention distance of each head in pixels, `[A]` (ViT paper, Figure 7 right and Appendix D.7).

  `sum_k A(q, k) |q - k|`, the class token's row and column left out, averaged over queries and images.

  Args:
    attention: `[B, A, M, M]`.
    distances: `[N, N]`, from `distances_px`.
  """
  distances = jnp.asarray(distances)
  weights = patch_attention(attention, distances.shape[0])
  return jnp.einsum('baqk,qk->baq', weights, distances).mean((0, 2))


def mutual_information(attention: Array, num_patches: int) -> Array:
  """Normalised mutual information of query and key of each head, `[A]` (arXiv 2305.00729, section 3.1).

  With `p(q) = 1 / N` and `p(k | q) = A`: `I(q; k) / sqrt(H(q) H(k))`. Near 0 every query looks at the same keys.
  """
  conditional = attention[..., -num_patches:, -num_patches:] + TINY
  conditional = conditional / conditional.sum(-1, keepdims=True)
  marginal = conditional.mean(-2)
  information = (conditional * (jnp.log(conditional) - jnp.log(marginal)[..., None, :])).sum(-1).mean(-1)
  entropy_of_keys = -(marginal * jnp.log(marginal)).sum(-1)
  entropy_of_queries = float(np.log(num_patches))
  return (information / jnp.sqrt(jnp.maximum(entropy_of_queries * entropy_of_keys, TINY))).mean(0)


def entropy(attention: Array, num_patches: int) -> Array:
  """Mean entropy of a patch's attention to patches, in nats, `[A]`; log N where it is uniform."""
  weights = patch_attention(attention, num_patches)
  return -(weights * jnp.log(weights + TINY)).sum(-1).mean((0, 2))
