"""Statistics of a layer: distance, mutual information and entropy of its attention; spectra of its tokens.

Attention is `[B, A, M, M]` f32, query before key, the N patch tokens last; rows sum to 1. Its statistics are `[A]` f32
means over images (and queries), which may be averaged further over batches of the same size. Tokens are `[B, N, D]`,
patch tokens in raster order, without class token and registers.
"""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, HostArray

TINY = 1e-8  # added to attention before a logarithm


def patch_attention(attention: Array, num_patches: int) -> Array:
  """Returns the attention among patch tokens only, `[B, A, N, N]`, each row divided by its sum."""
  attention = attention[..., -num_patches:, -num_patches:]
  return attention / jnp.maximum(attention.sum(-1, keepdims=True), TINY)


def distances_px(grid: tuple[int, int], patch_px: tuple[float, float]) -> HostArray:
  """Returns the distances between patch centers, `[N, N]` f32 in pixels of the prepared image, in raster order."""
  rows, columns = np.indices(grid).reshape(2, -1).astype(np.float32)
  across = (columns[:, None] - columns[None]) * patch_px[1]
  return np.hypot((rows[:, None] - rows[None]) * patch_px[0], across)


def mean_distance(attention: Array, distances: Array | HostArray) -> Array:
  """Returns the mean attention distance of each head in pixels, `[A]` (ViT paper, Figure 7 right, Appendix D.7).

  `sum_k A(q, k) |q - k|`, without the row and column of the class token, averaged over queries and images.

  Args:
    attention: `[B, A, M, M]`.
    distances: `[N, N]`, from `distances_px`.
  """
  distances = jnp.asarray(distances)
  weights = patch_attention(attention, distances.shape[0])
  return jnp.einsum('baqk,qk->baq', weights, distances).mean((0, 2))


def mutual_information(attention: Array, num_patches: int) -> Array:
  """Returns the normalized mutual information of query and key of each head, `[A]`.

  Source: arXiv 2305.00729, section 3.1.

  With `p(q) = 1 / N` and `p(k | q) = A`: `I(q; k) / sqrt(H(q) H(k))`. Near 0, every query attends to the same keys.
  """
  conditional = attention[..., -num_patches:, -num_patches:] + TINY
  conditional = conditional / conditional.sum(-1, keepdims=True)
  marginal = conditional.mean(-2)
  information = (conditional * (jnp.log(conditional) - jnp.log(marginal)[..., None, :])).sum(-1).mean(-1)
  entropy_of_keys = -(marginal * jnp.log(marginal)).sum(-1)
  entropy_of_queries = float(np.log(num_patches))
  return (information / jnp.sqrt(jnp.maximum(entropy_of_queries * entropy_of_keys, TINY))).mean(0)


def entropy(attention: Array, num_patches: int) -> Array:
  """Returns the mean entropy of a patch's attention to patches, in nats, `[A]`; log N for uniform attention."""
  weights = patch_attention(attention, num_patches)
  return -(weights * jnp.log(weights + TINY)).sum(-1).mean((0, 2))


def fourier_amplitude(tokens: Array, grid: tuple[int, int]) -> Array:
  """Returns the relative log amplitude along the diagonal, `[n]` f32, n = min(h, w) // 2 + 1.

  Sources: arXiv 2202.06709; 2305.00729.

  The token map of each channel is Fourier transformed; `log(|F| + 1e-6)` is averaged over channels and images. Entry
  i is the frequency `i / n * pi` in both directions, relative to that of frequency 0, so that entry 0 is 0.
  """
  (h, w), (num_images, _, width) = grid, tokens.shape
  maps = tokens.astype(jnp.float32).reshape(num_images, h, w, width)
  amplitude = jnp.log(jnp.abs(jnp.fft.fft2(maps, axes=(1, 2))) + 1e-6).mean((0, 3))
  diagonal = amplitude[jnp.arange(min(h, w) // 2 + 1), jnp.arange(min(h, w) // 2 + 1)]
  return diagonal - diagonal[0]


def singular_values(tokens: Array) -> Array:
  """Returns the log singular values of an image's centered tokens relative to the first, averaged over images.

  The shape is `[min(N, D)]`.
  """
  centered = tokens.astype(jnp.float32)
  centered = centered - centered.mean(1, keepdims=True)
  values = jnp.linalg.svd(centered, compute_uv=False)
  return jnp.log(jnp.maximum(values, 1e-12) / jnp.maximum(values[:, :1], 1e-12)).mean(0)
