"""What frequencies and how many directions the tokens of a layer use.

Tokens are `[B, N, D]`, patch tokens in raster order, without class token and registers.
"""
from __future__ import annotations

import jax.numpy as jnp

from vit_jax.core.types import Array


def fourier_amplitude(tokens: Array, grid: tuple[int, int]) -> Array:
  """Relative log amplitude along the diagonal, `[n]` f32, n = min(h, w) // 2 + 1 (arXiv 2202.06709; 2305.00729).

  The token map of each channel is Fourier transformed; `log(|F| + 1e-6)` is averaged over channels and images. Entry
  i is the frequency `i / n * pi` in both directions, less the constant part's, so that entry 0 is 0.
  """
  (h, w), (num_images, _, width) = grid, tokens.shape
  maps = tokens.astype(jnp.float32).reshape(num_images, h, w, width)
  amplitude = jnp.log(jnp.abs(jnp.fft.fft2(maps, axes=(1, 2))) + 1e-6).mean((0, 3))
  diagonal = amplitude[jnp.arange(min(h, w) // 2 + 1), jnp.arange(min(h, w) // 2 + 1)]
  return diagonal - diagonal[0]


def singular_values(tokens: Array) -> Array:
  """Log singular values of an image's centred tokens relative to the first, `[min(N, D)]`, mean over images."""
  centred = tokens.astype(jnp.float32)
  centred = centred - centred.mean(1, keepdims=True)
  values = jnp.linalg.svd(centred, compute_uv=False)
  return jnp.log(jnp.maximum(values, 1e-12) / jnp.maximum(values[:, :1], 1e-12)).mean(0)
