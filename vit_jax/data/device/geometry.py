"""Geometry on the device, for images that are held in memory: flip, shift, rotation, scale, shear.

The settings are those of `image/geometry.py`. The random numbers come from a JAX key for the global batch, so that the
result does not depend on the mesh. Pixels are gathered, which suits small images, where the host would be the
bottleneck.
"""
from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.types import Array, Batch, Key
from vit_jax.data.image.geometry import inverse_affine


def augment(batch: Batch, key: Key, *, recipe: schema.Recipe) -> Batch:
  """Applies the recipe's affine, flip and shift, in this order, to `image [B, H, W, 3] f32`.

  `box [B, 4]` follows flip and shift. The random numbers depend only on the key and the row in the global batch.
  """
  affine_key, flip_key, shift_key = jax.random.split(key, 3)
  if recipe.rotate_degrees or recipe.scale or recipe.shear:
    matrix_B23 = draw_affine(affine_key, batch['image'].shape, recipe=recipe)
    batch = batch | {'image': sample_affine(batch['image'], matrix_B23)}
  if recipe.flip:
    batch = flip(batch, jax.random.bernoulli(flip_key, 0.5, batch['image'].shape[:1]))
  if recipe.shift_px:
    limit = recipe.shift_px
    batch = shift(batch, jax.random.randint(shift_key, (batch['image'].shape[0], 2), -limit, limit + 1),
                  limit_px=limit)
  return batch


def flip(batch: Batch, chosen_B: Array) -> Batch:
  """Mirrors the rows where `chosen [B] bool`; left and right of their boxes are exchanged."""
  image = jnp.where(chosen_B[:, None, None, None], batch['image'][:, :, ::-1], batch['image'])
  if 'box' not in batch:
    return batch | {'image': image}
  box_B4 = batch['box']
  mirrored_B4 = box_B4[:, jnp.array([0, 3, 2, 1])]
  return batch | {'image': image, 'box': jnp.where(chosen_B[:, None], mirrored_B4, box_B4)}


def shift(batch: Batch, offsets_B2: Array, *, limit_px: int) -> Batch:
  """Moves row b down and right by `offsets [B, 2] i32` px, at most `limit_px`; zeros fill the uncovered part."""
  height, width = batch['image'].shape[1:3]
  padded = jnp.pad(batch['image'], ((0, 0), (limit_px, limit_px), (limit_px, limit_px), (0, 0)))
  starts_B2 = limit_px - offsets_B2

  def crop(image: Array, start: Array) -> Array:
    return jax.lax.dynamic_slice(image, (start[0], start[1], jnp.int32(0)), (height, width, image.shape[2]))
  moved = batch | {'image': jax.vmap(crop)(padded, starts_B2)}
  if 'box' in batch:
    box_B4 = batch['box']
    size_B2 = box_B4[:, 2:] - box_B4[:, :2]
    box_offset_B2 = offsets_B2 / jnp.array([[height, width]], jnp.float32) * size_B2
    moved['box'] = box_B4 - jnp.tile(box_offset_B2, (1, 2))
  return moved


def draw_affine(key: Key, shape: tuple[int, ...], *, recipe: schema.Recipe) -> Array:
  """Returns matrices `[B, 2, 3] f32` for `sample_affine`, with the recipe's ranges, for `shape` (B, H, W, 3)."""
  unit_B3 = jax.random.uniform(key, (shape[0], 3), jnp.float32, -1., 1.)
  angle_B = unit_B3[:, 0] * math.radians(recipe.rotate_degrees)
  rows = inverse_affine(jnp.cos(angle_B), jnp.sin(angle_B), 1. + unit_B3[:, 1] * recipe.scale,
                        unit_B3[:, 2] * recipe.shear, size=(shape[1], shape[2]))
  return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)


def sample_affine(image_BHWC: Array, matrix_B23: Array) -> Array:
  """Samples `image [B, H, W, 3] f32` at `matrix [B, 2, 3] @ (x, y, 1)`: bilinear, zeros outside."""
  height, width = image_BHWC.shape[1:3]
  y_HW, x_HW = jnp.meshgrid(jnp.arange(height, dtype=jnp.float32), jnp.arange(width, dtype=jnp.float32),
                            indexing='ij')

  def one(image_HWC: Array, matrix_23: Array) -> Array:
    x, y = (row[0] * x_HW + row[1] * y_HW + row[2] for row in matrix_23)
    sample = functools.partial(jax.scipy.ndimage.map_coordinates, coordinates=[y, x], order=1,
                               mode='constant')
    return jax.vmap(sample, in_axes=-1, out_axes=-1)(image_HWC)
  return jax.vmap(one)(image_BHWC, matrix_B23)
