"""Mild geometry on the device, for images that live in memory: flip, shift, rotation, scale, shear.

Same settings as on the host (`recipes.TrainTransform`), drawn from a JAX key for the whole global batch, so
that the result does not depend on the mesh. Gathers pixels: meant for small pictures, where the host would be
the limit.
"""
from __future__ import annotations

import functools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.types import Array, Batch, Key

Number = TypeVar('Number', float, Array)


def geometry(batch: Batch, key: Key, *, recipe: schema.Recipe) -> Batch:
  """The recipe's affine, flip and shift, in this order, on `image [B, H, W, 3] f32`.

  `box [B, 4]` follows flip and shift. The draws depend on the key and the row in the global batch alone.
  """
  affine_key, flip_key, shift_key = jax.random.split(key, 3)
  if recipe.rotate_degrees or recipe.scale or recipe.shear:
    matrix_B23 = draw_affine(affine_key, batch['image'].shape, recipe=recipe)
    batch = batch | {'image': warp(batch['image'], matrix_B23)}
  if recipe.flip:
    batch = flip(batch, jax.random.bernoulli(flip_key, .5, batch['image'].shape[:1]))
  if recipe.shift_px:
    limit = recipe.shift_px
    batch = shift(batch, jax.random.randint(shift_key, (batch['image'].shape[0], 2), -limit, limit + 1),
                  limit_px=limit)
  return batch


def flip(batch: Batch, chosen_B: Array) -> Batch:
  """Mirrors the rows where `chosen [B] bool`; their box gets left and right exchanged."""
  image = jnp.where(chosen_B[:, None, None, None], batch['image'][:, :, ::-1], batch['image'])
  if 'box' not in batch:
    return batch | {'image': image}
  box_B4 = batch['box']
  mirrored_B4 = box_B4[:, jnp.array([0, 3, 2, 1])]
  return batch | {'image': image, 'box': jnp.where(chosen_B[:, None], mirrored_B4, box_B4)}


def shift(batch: Batch, offsets_B2: Array, *, limit_px: int) -> Batch:
  """Moves row b down and right by `offsets [B, 2] i32` px, at most `limit_px`, zeros moving in."""
  height, width = batch['image'].shape[1:3]
  padded = jnp.pad(batch['image'], ((0, 0), (limit_px, limit_px), (limit_px, limit_px), (0, 0)))
  starts_B2 = limit_px - offsets_B2

  def crop(image: Array, start: Array) -> Array:
    return jax.lax.dynamic_slice(image, (start[0], start[1], jnp.int32(0)), (height, width, image.shape[2]))
  moved = batch | {'image': jax.vmap(crop)(padded, starts_B2)}
  if 'box' in batch:
    box_B4 = batch['box']
    size_B2 = box_B4[:, 2:] - box_B4[:, :2]
    away_B2 = offsets_B2 / jnp.array([[height, width]], jnp.float32) * size_B2
    moved['box'] = box_B4 - jnp.tile(away_B2, (1, 2))
  return moved


def inverse_affine(cos: Number, sin: Number, zoom: Number, shear: Number, *,
                   size: tuple[int, int]) -> list[list[Number]]:
  """Rows of the matrix from output to input pixels (x, y, 1) for rotation, zoom and shear about the centre.

  input - c = R(-angle) S(shear) (output - c) / zoom, with c = ((W - 1) / 2, (H - 1) / 2).
  """
  center_y, center_x = (size[0] - 1) / 2, (size[1] - 1) / 2
  xx, xy = cos / zoom, (cos * shear + sin) / zoom
  yx, yy = -sin / zoom, (cos - sin * shear) / zoom
  return [[xx, xy, center_x - xx * center_x - xy * center_y],
          [yx, yy, center_y - yx * center_x - yy * center_y]]


def draw_affine(key: Key, shape: tuple[int, ...], *, recipe: schema.Recipe) -> Array:
  """Matrices `[B, 2, 3] f32` for `warp`, with the recipe's ranges, for images of `shape` (B, H, W, 3)."""
  unit_B3 = jax.random.uniform(key, (shape[0], 3), jnp.float32, -1., 1.)
  angle_B = unit_B3[:, 0] * math.radians(recipe.rotate_degrees)
  rows = inverse_affine(jnp.cos(angle_B), jnp.sin(angle_B), 1. + unit_B3[:, 1] * recipe.scale,
                        unit_B3[:, 2] * recipe.shear, size=(shape[1], shape[2]))
  return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)


def warp(image_BHWC: Array, matrix_B23: Array) -> Array:
  """`image [B, H, W, 3] f32` sampled at `matrix [B, 2, 3] @ (x, y, 1)`: bilinear, zeros outside."""
  height, width = image_BHWC.shape[1:3]
  y_HW, x_HW = jnp.meshgrid(jnp.arange(height, dtype=jnp.float32), jnp.arange(width, dtype=jnp.float32),
                            indexing='ij')

  def one(image_HWC: Array, matrix_23: Array) -> Array:
    x, y = (row[0] * x_HW + row[1] * y_HW + row[2] for row in matrix_23)
    sample = functools.partial(jax.scipy.ndimage.map_coordinates, coordinates=[y, x], order=1,
                               mode='constant')
    return jax.vmap(sample, in_axes=-1, out_axes=-1)(image_HWC)
  return jax.vmap(one)(image_BHWC, matrix_B23)
