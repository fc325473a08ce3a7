"""All measurements of a network on some images in one pass, batch by batch and layer by layer, and their statistics.

In memory are the attention of one layer for one batch, the product of the rollout so far, and the results.

Attention is `[B, A, M, M]` f32, query before key, the N patch tokens last; rows sum to 1. Its statistics are `[A]` f32
means over images (and queries), which may be averaged further over batches of the same size. Tokens are `[B, N, D]`,
patch tokens in raster order, without class token and registers. `readout_weights [B, M]` are the weights of the final
tokens in the output: of a class token, of a mean over tokens, or of a learned query.
"""
from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray
from vit_jax.inspect.layerwise import Driver, Logits

log = logging.getLogger('vit_jax.inspect')
_MEANS = ('distance_px', 'information', 'entropy', 'fourier', 'singular')
"""Measurements that are means over the images of a batch; the others have a row for each image."""
TINY = 1e-8  # added to attention before a logarithm


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


_roll = jax.jit(roll, static_argnames='discard')


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


def relevance_of_tokens(pairs: Iterable[tuple[Array, Array]], readout_weights: Array) -> Array:
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


class Measurements(NamedTuple):
  """Measurements on S images, with maps of the first K; L blocks, depth 0 is before the first.

  distance_px, information, entropy: `[L, A]`, of attention.
  fourier: `[L + 1, n]`; singular: `[L + 1, m]`, of tokens.
  by_depth: `[L + 1, S, D]` f32, mean patch token of each image.
  pooled: `[S, D]`; logits: `[S, C]`, or None without a head.
  tokens: `[K, N, D]`, final patch tokens.
  rollout: `[K, h, w]`; heads: `[K, A, h, w]`, of the last block; relevance: `[K, h, w]`, or None.
  """
  distance_px: HostArray
  information: HostArray
  entropy: HostArray
  fourier: HostArray
  singular: HostArray
  by_depth: HostArray
  pooled: HostArray
  logits: HostArray | None
  tokens: HostArray
  rollout: HostArray
  heads: HostArray
  relevance: HostArray | None


def measure(driver: Driver, batches: Iterable[HostArray], *, grid: tuple[int, int], patch_px: tuple[float, float],
            num_maps: int, discard: float, logits: Logits | None, of_class: int | None = None) -> Measurements:
  """Runs the network over images and returns all measurements.

  Args:
    driver: the network.
    batches: normalized images `[B, H, W, 3]` f32, all of one size; the last batch may be smaller.
    grid: `(h, w)` of their tokens.
    patch_px: height and width of a patch in pixels.
    num_maps: K, the number of images to compute maps for, the first ones.
    discard: as in `attention.rollout`.
    logits: the head; None without one. With a head, relevance is computed too, one image at a time, where the blocks
      have one attention over all tokens.
    of_class: number of the class of relevance; None = the predicted class of each image.
  """
  parts: list[dict[str, HostArray]] = []
  num_images = 0
  for batch in batches:
    num_maps_here = max(0, min(num_maps - num_images, len(batch)))
    part = _measure_batch(driver, batch, grid=grid, patch_px=patch_px, num_maps=num_maps_here, discard=discard,
                          logits=logits)
    if logits is not None:
      try:
        maps = [relevance(driver, image[None], grid=grid, logits=logits, of_class=of_class)
                for image in batch[:num_maps_here]]
        part['relevance'] = np.array(maps, np.float32).reshape(num_maps_here, *grid)
      except UserError as error:
        log.info('%s', error)
    parts.append(part)
    num_images += len(batch)
  sizes = [len(part['pooled']) for part in parts]
  merged: dict[str, HostArray | None] = {'logits': None, 'relevance': None}
  for name in parts[0]:
    values = [part[name] for part in parts]
    if name in _MEANS:
      merged[name] = np.average(values, axis=0, weights=sizes)
    else:
      merged[name] = np.concatenate(values, axis=1 if name == 'by_depth' else 0)
  return Measurements(**merged)  # type: ignore[arg-type]


def relevance(driver: Driver, image: HostArray, *, grid: tuple[int, int], logits: Logits,
              of_class: int | None = None) -> HostArray:
  """Returns the relevance of patches for a class: `[h, w]` f32 of one image `[1, H, W, 3]`.

  By default the class is the predicted one.
  """
  *_, last = driver.layers(jnp.asarray(image), capture=False)
  if of_class is None:
    of_class = int(logits(driver.finish(last.tokens, grid=grid))[0].argmax())
  pairs = driver.relevance_gradients(jnp.asarray(image), logits, of_class, grid=grid)
  row = relevance_of_tokens(pairs, driver.readout_weights(last.tokens))
  return np.asarray(row)[0, -grid[0] * grid[1]:].reshape(grid)


def _measure_batch(driver: Driver, batch: HostArray, *, grid: tuple[int, int], patch_px: tuple[float, float],
                   num_maps: int, discard: float, logits: Logits | None) -> dict[str, HostArray]:
  """Returns the measurements of a batch by the names of `Measurements`, but for relevance; maps of the first images."""
  num_patches = grid[0] * grid[1]
  distances = distances_px(grid, patch_px)
  by_layer: dict[str, list[Array]] = collections.defaultdict(list)
  product = None
  for layer in driver.layers(jnp.asarray(batch), capture=True):
    measured = _measure_tokens(layer.tokens, grid=grid)
    if layer.attention is not None:
      measured |= _measure_attention(layer.attention, distances)
      product = _roll(product, layer.attention[:num_maps], discard=discard) if num_maps else None
      last_attention = layer.attention
    for name, values in measured.items():
      by_layer[name].append(values)
  features = driver.finish(layer.tokens, grid=grid)
  heads, rollout = _read_out(last_attention, product, driver.readout_weights(layer.tokens), num_patches=num_patches)
  found = {name: np.stack(list(map(np.asarray, layers))) for name, layers in by_layer.items()}
  found |= {'pooled': np.asarray(features.pooled), 'tokens': np.asarray(features.tokens)[:num_maps],
            'heads': np.asarray(heads)[:num_maps].reshape(num_maps, heads.shape[1], *grid),
            'rollout': np.asarray(rollout).reshape(num_maps, *grid)}
  if logits is not None:
    found['logits'] = np.asarray(logits(features))
  return found


@jax.jit
def _measure_attention(attention: Array, distances: Array) -> dict[str, Array]:
  num_patches = distances.shape[0]
  return {'distance_px': mean_distance(attention, distances),
          'information': mutual_information(attention, num_patches),
          'entropy': entropy(attention, num_patches)}


@functools.partial(jax.jit, static_argnames='grid')
def _measure_tokens(tokens: Array, *, grid: tuple[int, int]) -> dict[str, Array]:
  patches = tokens[:, -grid[0] * grid[1]:].astype(jnp.float32)
  return {'fourier': fourier_amplitude(patches, grid), 'singular': singular_values(patches),
          'by_depth': patches.mean(1)}


@functools.partial(jax.jit, static_argnames='num_patches')
def _read_out(last: Array, product: Array | None, readout_weights: Array, *, num_patches: int) -> tuple[Array, Array]:
  """Returns the head maps of the last block for all images, and the rollout of those that were rolled."""
  heads = head_maps(last, readout_weights, num_patches)
  if product is None:
    return heads, jnp.zeros((0, num_patches))
  rollout = jnp.einsum('bm,bmk->bk', readout_weights[:len(product)], product)
  return heads, rollout[:, -num_patches:]
