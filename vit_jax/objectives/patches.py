"""Images as patches, and random subsets of them: what MAE, I-JEPA and masked patch prediction share."""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.core.contracts import TokenBackbone
from vit_jax.core.types import Array, Features, Key, Params

EPS = 1e-6  # MAE: added to the variance of a patch


class Choice(NamedTuple):
  """A subset of the patches of each image.

  `chosen [B, n] i32` and `others [B, N - n] i32` are patch numbers in random order; `rank [B, N] i32` is the position
  of each patch in the concatenation of both.
  """
  chosen: Array
  others: Array
  rank: Array


def patchify(image: Array, patch: int) -> Array:
  """Maps `[B, H, W, 3]` to patches `[B, N, P * P * 3]` in raster order.

  The order in a patch is row, column, channel.
  """
  num_images, height, width, _ = image.shape
  cut = image.reshape(num_images, height // patch, patch, width // patch, patch, 3).swapaxes(2, 3)
  return cut.reshape(num_images, -1, patch * patch * 3)


def unpatchify(patches: Array, patch: int, *, grid: tuple[int, int]) -> Array:
  """Inverts `patchify` for a grid `(h, w)`."""
  num_images, (h, w) = patches.shape[0], grid
  cut = patches.reshape(num_images, h, w, patch, patch, 3).swapaxes(2, 3)
  return cut.reshape(num_images, h * patch, w * patch, 3)


def strip(patches: Array, patch: int) -> Array:
  """Places patches `[B, n, P * P * 3]` side by side as images `[B, P, n * P, 3]`, which any backbone can embed."""
  return unpatchify(patches, patch, grid=(1, patches.shape[1]))


def pick(patches: Array, numbers: Array) -> Array:
  """Returns the patches or tokens `[B, N, ...]` at `numbers [B, n]`."""
  return jnp.take_along_axis(patches, numbers[..., None], axis=1)


def encode(backbone: TokenBackbone, params: Params, image: Array, numbers: Array, *, patch: int, train: bool,
           key: Key | None, mask: Array | None = None) -> Features:
  """Encodes the patches at `numbers [B, n]` of `image [B, H, W, 3]`; those with `mask [B, n]` False are not seen."""
  grid = image.shape[1] // patch, image.shape[2] // patch
  seen_BnP = pick(patchify(image, patch), numbers)
  tokens_BnD = backbone.embed(params, strip(seen_BnP, patch))
  positions_BnD = backbone.positions(params, grid)[numbers]
  return backbone.encode(params, tokens_BnD, positions_BnD, grid=grid, train=train, key=key, mask=mask)


def num_kept(num_patches: int, share: float) -> int:
  """Returns the number of patches that remain when a share is removed: `int(N (1 - share))`.

  It is safe from rounding errors.
  """
  return int(num_patches * (1. - share) + 1e-6)


def choose(noise: Array, num_chosen: int) -> Choice:
  """Chooses the `num_chosen` patches of each image with the smallest `noise [B, N]` (MAE, section 3)."""
  order_BN = jnp.argsort(noise, axis=1)
  return Choice(order_BN[:, :num_chosen], order_BN[:, num_chosen:], jnp.argsort(order_BN, axis=1))


def draw(key: Key, *, num_images: int, num_patches: int, num_chosen: int) -> Choice:
  """Draws an independent choice for each image, uniform among all subsets of this size."""
  return choose(jax.random.uniform(key, (num_images, num_patches)), num_chosen)


def moments(patches: Array) -> tuple[Array, Array]:
  """Returns mean and standard deviation `sqrt(var + 1e-6)` of each patch, `[B, N, 1]`.

  The variance is unbiased, as in MAE.
  """
  mean = patches.mean(-1, keepdims=True)
  variance = jnp.square(patches - mean).sum(-1, keepdims=True) / (patches.shape[-1] - 1)
  return mean, jnp.sqrt(variance + EPS)
