"""All measurements of a network on some images in one pass, batch by batch and layer by layer.

In memory are the attention of one layer for one batch, the product of the rollout so far, and the results.
"""
from __future__ import annotations

import collections
import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, HostArray
from vit_jax.inspect import attention as maps
from vit_jax.inspect import statistics
from vit_jax.inspect.layerwise import Driver, Logits

_MEANS = ('distance_px', 'information', 'entropy', 'fourier', 'singular')


class Measurements(NamedTuple):
  """Measurements on S images, with maps of the first K; L blocks, depth 0 is before the first.

  distance_px, information, entropy: `[L, A]`, of attention (`statistics`).
  fourier: `[L + 1, n]`; singular: `[L + 1, m]`, of tokens (`statistics`).
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
    logits: the head; None without one. With a head, relevance is computed too, one image at a time.
    of_class: number of the class of relevance; None = the predicted class of each image.
  """
  parts: list[dict[str, HostArray]] = []
  num_images = 0
  for batch in batches:
    num_here = max(0, min(num_maps - num_images, len(batch)))
    found = _measure_batch(driver, batch, grid=grid, patch_px=patch_px, num_maps=num_here, discard=discard,
                           logits=logits)
    if logits is not None:
      each = [relevance(driver, image[None], grid=grid, logits=logits, of_class=of_class)
              for image in batch[:num_here]]
      found['relevance'] = np.array(each, np.float32).reshape(num_here, *grid)
    parts.append(found)
    num_images += len(batch)
  return _merge(parts)


def relevance(driver: Driver, image: HostArray, *, grid: tuple[int, int], logits: Logits,
              of_class: int | None = None) -> HostArray:
  """Returns the relevance of patches for a class: `[h, w]` f32 of one image `[1, H, W, 3]`.

  By default the class is the predicted one.
  """
  *_, last = driver.layers(jnp.asarray(image), capture=False)
  chosen = int(logits(driver.finish(last.tokens, grid=grid))[0].argmax()) if of_class is None else of_class
  pairs = driver.relevance_gradients(jnp.asarray(image), logits, chosen, grid=grid)
  row = maps.relevance(pairs, driver.readout_weights(last.tokens))
  return np.asarray(row)[0, -grid[0] * grid[1]:].reshape(grid)


def _measure_batch(driver: Driver, batch: HostArray, *, grid: tuple[int, int], patch_px: tuple[float, float],
                   num_maps: int, discard: float, logits: Logits | None) -> dict[str, HostArray]:
  num_patches = grid[0] * grid[1]
  distances = statistics.distances_px(grid, patch_px)
  rows: dict[str, list[Array]] = collections.defaultdict(list)
  product = None
  for layer in driver.layers(jnp.asarray(batch), capture=True):
    found = _measure_tokens(layer.tokens, grid=grid)
    if layer.attention is not None:
      found |= _measure_attention(layer.attention, distances)
      product = _roll(product, layer.attention, discard=discard, count=num_maps) if num_maps else None
      last = layer.attention
    for name, row in found.items():
      rows[name].append(row)
  features = driver.finish(layer.tokens, grid=grid)
  heads, rollout = _read_out(last, product, driver.readout_weights(layer.tokens), num_patches=num_patches)
  return {**{name: np.stack([np.asarray(row) for row in every]) for name, every in rows.items()},
          'pooled': np.asarray(features.pooled), 'tokens': np.asarray(features.tokens)[:num_maps],
          'heads': np.asarray(heads)[:num_maps].reshape(num_maps, heads.shape[1], *grid),
          'rollout': np.asarray(rollout).reshape(num_maps, *grid),
          **({} if logits is None else {'logits': np.asarray(logits(features))})}


def _merge(parts: list[dict[str, HostArray]]) -> Measurements:
  """Averages over images what `_MEANS` names, and concatenates the rest."""
  sizes = [len(part['pooled']) for part in parts]
  merged = {name: np.average([part[name] for part in parts], axis=0, weights=sizes) if name in _MEANS else
            np.concatenate([part[name] for part in parts], 1 if name == 'by_depth' else 0) for name in parts[0]}
  return Measurements(**{'logits': None, 'relevance': None, **merged})  # type: ignore[arg-type]


@jax.jit
def _measure_attention(attention: Array, distances: Array) -> dict[str, Array]:
  num_patches = distances.shape[0]
  return {'distance_px': statistics.mean_distance(attention, distances),
          'information': statistics.mutual_information(attention, num_patches),
          'entropy': statistics.entropy(attention, num_patches)}


@functools.partial(jax.jit, static_argnames='grid')
def _measure_tokens(tokens: Array, *, grid: tuple[int, int]) -> dict[str, Array]:
  patches = tokens[:, -grid[0] * grid[1]:].astype(jnp.float32)
  return {'fourier': statistics.fourier_amplitude(patches, grid), 'singular': statistics.singular_values(patches),
          'by_depth': patches.mean(1)}


@functools.partial(jax.jit, static_argnames=('discard', 'count'))
def _roll(product: Array | None, attention: Array, *, discard: float, count: int) -> Array:
  """Rolls the attention of the first `count` images."""
  return maps.roll(product, attention[:count], discard=discard)


@functools.partial(jax.jit, static_argnames='num_patches')
def _read_out(last: Array, product: Array | None, readout_weights: Array, *, num_patches: int) -> tuple[Array, Array]:
  """Returns the head maps of the last block for all images, and the rollout of those that were rolled."""
  heads = maps.head_maps(last, readout_weights, num_patches)
  if product is None:
    return heads, jnp.zeros((0, num_patches))
  rollout = jnp.einsum('bm,bmk->bk', readout_weights[:len(product)], product)
  return heads, rollout[:, -num_patches:]
