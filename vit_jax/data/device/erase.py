"""Random erasing on the device (Zhong et al., arXiv 1708.04896), in the manner of timm's `pixel` mode.

A rectangle of each chosen image becomes normal noise, new for each value, after normalisation. Its area is
uniform, its aspect ratio height / width log-uniform; of ten such draws the first that fits inside is taken, and if
none does the image stays. Draws depend on the key and the row in the global batch alone.
"""
from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from vit_jax.config.schema import Erase
from vit_jax.core.types import Array, Batch, Key

TRIES = 10


def erase(batch: Batch, key: Key, *, settings: Erase) -> Batch:
  """Erases a part of the rows of `image [B, H, W, 3] f32`."""
  box_key, chosen_key, noise_key = jax.random.split(key, 3)
  num, height, width, _ = batch['image'].shape
  chosen_B = jax.random.bernoulli(chosen_key, settings.probability, (num,))
  hidden_BHW = inside(draw_boxes(box_key, batch['image'].shape, settings=settings), (height, width))
  hidden_BHW = hidden_BHW & chosen_B[:, None, None]
  noise = jax.random.normal(noise_key, batch['image'].shape, jnp.float32)
  return batch | {'image': jnp.where(hidden_BHW[..., None], noise, batch['image'])}


def draw_boxes(key: Key, shape: tuple[int, ...], *, settings: Erase) -> Array:
  """`[B, 4] i32`: top, left, height and width, px, for images of `shape` (B, H, W, 3); no area where none fits."""
  num, height, width, _ = shape
  unit_TB4 = jax.random.uniform(key, (TRIES, num, 4), jnp.float32)
  area = (settings.area[0] + unit_TB4[..., 0] * (settings.area[1] - settings.area[0])) * height * width
  low, high = (math.log(a) for a in settings.aspect)
  aspect = jnp.exp(low + unit_TB4[..., 1] * (high - low))
  tall, wide = jnp.round(jnp.sqrt(area * aspect)), jnp.round(jnp.sqrt(area / aspect))
  top = jnp.floor(unit_TB4[..., 2] * (height - tall + 1))
  left = jnp.floor(unit_TB4[..., 3] * (width - wide + 1))
  fits_TB = (tall < height) & (wide < width)
  boxes_TB4 = jnp.stack([top, left, tall, wide], -1) * fits_TB[..., None]
  first_B = jnp.argmax(fits_TB, axis=0)  # 0 where none fits: an empty box
  return jnp.take_along_axis(boxes_TB4, first_B[None, :, None], axis=0)[0].astype(jnp.int32)


def inside(boxes_B4: Array, size: tuple[int, int]) -> Array:
  """`[B, H, W] bool`: where (top, left, height, width) lies in pictures of `size`."""
  rows_H, columns_W = jnp.arange(size[0])[None], jnp.arange(size[1])[None]
  top_B, left_B, tall_B, wide_B = (boxes_B4[:, i, None] for i in range(4))
  in_rows_BH = (rows_H >= top_B) & (rows_H < top_B + tall_B)
  in_columns_BW = (columns_W >= left_B) & (columns_W < left_B + wide_B)
  return in_rows_BH[:, :, None] & in_columns_BW[:, None, :]
