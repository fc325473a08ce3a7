"""All numbers of an inspection of one network on some images, in one pass, a batch and a layer at a time.

Held are one layer's attention of one batch, the running product of rollout, and what is asked for in the end.
"""
from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, HostArray
from vit_jax.inspect import attention as maps
from vit_jax.inspect import attention_stats as numbers
from vit_jax.inspect import spectra
from vit_jax.inspect.layerwise import Driver, Logits


class Measured(NamedTuple):
  """What was seen of S images, K of them closely; L blocks, depth 0 is before the first.

  distance_px, information, entropy: `[L, A]`, of attention (`attention_numbers`).
  fourier: `[L + 1, n]`; singular: `[L + 1, m]` (`spectra`).
  by_depth: `[L + 1, S, D]` f32, mean patch token of each image.
  pooled: `[S, D]`; logits: `[S, C]`, or None without a head.
  tokens: `[K, N, D]`, patch tokens that the network ends with.
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
            num_close: int, discard: float, logits: Logits | None, has_relevance: bool,
            of_class: int | None = None) -> Measured:
  """Runs the network over images and collects everything.

  Args:
    driver: the network.
    batches: prepared images `[B, H, W, 3]` f32, all of one size; the last may be smaller.
    grid: `(h, w)` of their tokens.
    patch_px: sides of a patch in pixels, height and width.
    num_close: K, images to look at closely, the first ones.
    discard: of `attention.rollout`.
    logits: the head; None without one.
    has_relevance: also the relevance for a class (twice the work, an image at a time).
    of_class: number of that class; None = the one that is predicted for each image.
  """
  parts: list[dict[str, HostArray]] = []
  num_images = 0
  for batch in batches:
    close = max(0, min(num_close - num_images, len(batch)))
    found = _measure_batch(driver, batch, grid=grid, patch_px=patch_px, close=close, discard=discard, logits=logits)
    if has_relevance and logits is not None:
      each = [relevance(driver, image[None], grid=grid, logits=logits, of_class=of_class)
              for image in batch[:close]]
      found['relevance'] = np.array(each, np.float32).reshape(close, *grid)
    parts.append(found)
    num_images += len(batch)
  return _together(parts)


def relevance(driver: Driver, image: HostArray, *, grid: tuple[int, int], logits: Logits,
              of_class: int | None = None) -> HostArray:
  """Relevance of patches for a class, the predicted one by default: `[h, w]` f32 of one image `[1, H, W, 3]`."""
  *_, last = driver.layers(jnp.asarray(image), capture=False)
  chosen = int(logits(driver.finish(last.tokens, grid=grid))[0].argmax()) if of_class is None else of_class
  pairs = driver.relevance_gradients(jnp.asarray(image), logits, chosen, grid=grid)
  row = maps.relevance(pairs, driver.reading(last.tokens))
  return np.asarray(row[0, -grid[0] * grid[1]:].reshape(grid))


def _measure_batch(driver: Driver, batch: HostArray, *, grid: tuple[int, int], patch_px: tuple[float, float],
                   close: int, discard: float, logits: Logits | None) -> dict[str, HostArray]:
  num_patches = grid[0] * grid[1]
  distances = numbers.distances_px(grid, patch_px)
  rows: dict[str, list[Array]] = {name: [] for name in ('distance_px', 'information', 'entropy', 'fourier', 'singular',
                                                        'by_depth')}
  product = None
  for layer in driver.layers(jnp.asarray(batch), capture=True):
    patches = layer.tokens[:, -num_patches:].astype(jnp.float32)
    for name, row in _of_tokens(patches, grid=grid).items():
      rows[name].append(row)
    if layer.attention is not None:
      for name, row in _of_attention(layer.attention, distances).items():
        rows[name].append(row)
      product = _roll(product, layer.attention[:close], discard=discard) if close else None
      last = layer.attention
  features = driver.finish(layer.tokens, grid=grid)
  reading = driver.reading(layer.tokens)[:close]
  seen = {name: np.stack([np.asarray(row) for row in row_list]) for name, row_list in rows.items()}
  seen['pooled'] = np.asarray(features.pooled)
  seen['tokens'] = np.asarray(features.tokens[:close])
  seen['heads'] = np.asarray(maps.head_maps(last[:close], reading, num_patches)).reshape(close, last.shape[1], *grid)
  seen['rollout'] = (np.zeros((0, *grid), np.float32) if product is None else
                     np.asarray(jnp.einsum('bm,bmk->bk', reading, product)[:, -num_patches:]).reshape(close, *grid))
  if logits is not None:
    seen['logits'] = np.asarray(logits(features))
  return seen


def _together(parts: list[dict[str, HostArray]]) -> Measured:
  """Means over images of what is a mean, and the rest in order."""
  sizes = [len(part['pooled']) for part in parts]

  def mean(name: str) -> HostArray:
    return np.average([part[name] for part in parts], axis=0, weights=sizes)

  def joined(name: str, axis: int = 0) -> HostArray:
    return np.concatenate([part[name] for part in parts], axis)

  return Measured(
      mean('distance_px'), mean('information'), mean('entropy'), mean('fourier'), mean('singular'),
      joined('by_depth', 1), joined('pooled'), joined('logits') if 'logits' in parts[0] else None, joined('tokens'),
      joined('rollout'), joined('heads'), joined('relevance') if 'relevance' in parts[0] else None)


@jax.jit
def _of_attention(attention: Array, distances: Array) -> dict[str, Array]:
  num_patches = distances.shape[0]
  return {'distance_px': numbers.mean_distance(attention, distances),
          'information': numbers.mutual_information(attention, num_patches),
          'entropy': numbers.entropy(attention, num_patches)}


@functools.partial(jax.jit, static_argnames='grid')
def _of_tokens(patches: Array, *, grid: tuple[int, int]) -> dict[str, Array]:
  return {'fourier': spectra.fourier_amplitude(patches, grid), 'singular': spectra.singular_values(patches),
          'by_depth': patches.mean(1)}


@functools.partial(jax.jit, static_argnames='discard')
def _roll(product: Array | None, attention: Array, *, discard: float) -> Array:
  return maps.roll(product, attention, discard=discard)
