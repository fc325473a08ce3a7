"""The device part of a recipe, inside the jitted step: geometry, normalization, random erasing, mixing and labels.

`jobs/build.py` passes the function that `prepare_train` returns to the train step; evaluations use that of
`prepare_eval`. Both functions get the batches of `loader.py`. This module does not depend on networks or losses.

Random erasing (Zhong et al., arXiv 1708.04896) follows timm's `pixel` mode: after normalization, a rectangle of each
chosen image becomes normal noise, drawn for each value. The area of the rectangle is uniform, and the aspect ratio
height / width is log-uniform. The first of ten draws that fits inside the image is taken; else the image stays.

Geometry (flip, shift, rotation, scale and shear, with the settings of `image/geometry.py`) is applied here to images
that are held in memory. Gathering pixels on the device suits small images, for which the host would be the bottleneck.

All random numbers depend only on a key for the global batch and on the row, so the result does not depend on the mesh.
"""
from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.config.schema.data import RGB
from vit_jax.core.contracts import Prepare
from vit_jax.core.types import Array, Batch, Key, NativeImages
from vit_jax.data.device import mix, token_targets
from vit_jax.data.image.geometry import inverse_affine

TRIES = 10  # T, the draws of the rectangle to erase, as in timm


def prepare_train(recipe: schema.Recipe, *, num_classes: int, on_device_geometry: bool, soft_labels: bool = False,
                  targets: token_targets.Targets | None = None) -> Prepare:
  """Returns the device part of a training recipe, to be jitted inside the step.

  Args:
    recipe: the augmentation.
    num_classes: C of the soft labels that mixup and cutmix make.
    on_device_geometry: whether flip, shift and affine are applied here: if the loader holds the images in memory.
    soft_labels: whether the batch has stored probabilities of classes, which become `labels [B, C]`.
    targets: how label maps of the batch become targets of tokens; None if the batch has no maps.
  """
  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    del step
    if soft_labels:
      batch = token_targets.soften(batch, num_classes)
    geometry_key, mix_key, erase_key = jax.random.split(key, 3)
    if recipe.views.on:
      batch = batch | {name: normalize(views, recipe) for name, views in batch.items() if name.startswith('views_')}
    else:
      if on_device_geometry:
        batch = augment_geometry(batch | {'image': batch['image'].astype(jnp.float32)}, geometry_key, recipe=recipe)
      batch = _normalize_batch(batch, recipe)
      if recipe.erase.probability:
        batch = erase(batch, erase_key, settings=recipe.erase)
      if recipe.mixup or recipe.cutmix:
        batch = mix.mix(batch, mix_key, recipe=recipe, num_classes=num_classes)
    return token_targets.add(batch, targets, num_classes=num_classes) if targets else batch
  return prepare


def prepare_eval(recipe: schema.Recipe) -> Prepare:
  """Returns the device part of evaluation, to be jitted: it normalizes images."""
  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    del key, step
    return _normalize_batch(batch, recipe)
  return prepare


def _normalize_batch(batch: Batch, recipe: schema.Recipe) -> Batch:
  """Returns the batch with normalized images; if it has `grid [B, 2]`, `image` becomes `NativeImages` of patches."""
  image = normalize(batch['image'], recipe)
  if 'grid' not in batch:
    return batch | {'image': image}
  patches = image.reshape(image.shape[0], -1, recipe.eval_native_patch ** 2 * recipe.channels)
  return batch | {'image': NativeImages(patches, batch['grid'])}


def normalize(image: Array, recipe: schema.Recipe) -> Array:
  """Returns `image [..., H, W, 3]` in 0..255 as f32: (x / 255 - mean) / std, for each channel.

  With other channels than RGB, mean and std are in the units of the image: (x - mean) / std.
  """
  shape = (1,) * (image.ndim - 1) + (recipe.channels,)
  mean = jnp.array(recipe.mean, jnp.float32).reshape(shape)
  std = jnp.array(recipe.std, jnp.float32).reshape(shape)
  if recipe.channels != RGB:
    return (image.astype(jnp.float32) - mean) / std
  return (image.astype(jnp.float32) / 255. - mean) / std


def erase(batch: Batch, key: Key, *, settings: schema.Erase) -> Batch:
  """Replaces a rectangle by noise in randomly chosen images of `image [B, H, W, 3] f32`."""
  box_key, chosen_key, noise_key = jax.random.split(key, 3)
  num_images, height, width, _ = batch['image'].shape
  is_chosen_B = jax.random.bernoulli(chosen_key, settings.probability, (num_images,))
  in_box_BHW = inside(draw_boxes(box_key, batch['image'].shape, settings=settings), (height, width))
  is_erased_BHW = in_box_BHW & is_chosen_B[:, None, None]
  noise_BHWC = jax.random.normal(noise_key, batch['image'].shape, jnp.float32)
  return batch | {'image': jnp.where(is_erased_BHW[..., None], noise_BHWC, batch['image'])}


def draw_boxes(key: Key, shape: tuple[int, ...], *, settings: schema.Erase) -> Array:
  """Returns `[B, 4] i32`: top, left, height and width, px, for images of `shape` (B, H, W, 3); 0 px if no draw fits."""
  num_images, height, width, _ = shape
  unit_TB4 = jax.random.uniform(key, (TRIES, num_images, 4), jnp.float32)
  area_TB = (settings.area[0] + unit_TB4[..., 0] * (settings.area[1] - settings.area[0])) * height * width
  min_log, max_log = (math.log(bound) for bound in settings.aspect)
  aspect_TB = jnp.exp(min_log + unit_TB4[..., 1] * (max_log - min_log))
  box_height_TB = jnp.round(jnp.sqrt(area_TB * aspect_TB))
  box_width_TB = jnp.round(jnp.sqrt(area_TB / aspect_TB))
  top_TB = jnp.floor(unit_TB4[..., 2] * (height - box_height_TB + 1))
  left_TB = jnp.floor(unit_TB4[..., 3] * (width - box_width_TB + 1))
  fits_TB = (box_height_TB < height) & (box_width_TB < width)
  boxes_TB4 = jnp.stack([top_TB, left_TB, box_height_TB, box_width_TB], -1) * fits_TB[..., None]
  first_B = jnp.argmax(fits_TB, axis=0)  # 0 if no draw fits; its box is all 0
  return jnp.take_along_axis(boxes_TB4, first_B[None, :, None], axis=0)[0].astype(jnp.int32)


def inside(boxes_B4: Array, size: tuple[int, int]) -> Array:
  """Returns `[B, H, W] bool`: whether a pixel is inside the box (top, left, height, width) of the image."""
  rows_1H = jnp.arange(size[0])[None]
  columns_1W = jnp.arange(size[1])[None]
  top_B1, left_B1, box_height_B1, box_width_B1 = (boxes_B4[:, i, None] for i in range(4))
  in_rows_BH = (rows_1H >= top_B1) & (rows_1H < top_B1 + box_height_B1)
  in_columns_BW = (columns_1W >= left_B1) & (columns_1W < left_B1 + box_width_B1)
  return in_rows_BH[:, :, None] & in_columns_BW[:, None, :]


def augment_geometry(batch: Batch, key: Key, *, recipe: schema.Recipe) -> Batch:
  """Applies the recipe's affine, flip and shift, in this order, to `image [B, H, W, 3] f32`.

  If the batch has `box [B, 4]`, flip and shift also change the box: top, left, bottom and right of the crop, in
  fractions of the stored image.
  """
  affine_key, flip_key, shift_key = jax.random.split(key, 3)
  if recipe.rotate_degrees or recipe.scale or recipe.shear:
    matrix_B23 = draw_affine(affine_key, batch['image'].shape, recipe=recipe)
    batch = batch | {'image': sample_affine(batch['image'], matrix_B23)}
  if recipe.flip:
    batch = flip(batch, jax.random.bernoulli(flip_key, 0.5, batch['image'].shape[:1]))
  if recipe.shift_px:
    limit = recipe.shift_px
    offsets_B2 = jax.random.randint(shift_key, (batch['image'].shape[0], 2), -limit, limit + 1)
    batch = shift(batch, offsets_B2, limit_px=limit)
  return batch


def flip(batch: Batch, is_flipped_B: Array) -> Batch:
  """Mirrors images from left to right where `is_flipped [B] bool`, and exchanges left and right of their boxes."""
  image = jnp.where(is_flipped_B[:, None, None, None], batch['image'][:, :, ::-1], batch['image'])
  if 'box' not in batch:
    return batch | {'image': image}
  box_B4 = batch['box']
  mirrored_B4 = box_B4[:, jnp.array([0, 3, 2, 1])]
  return batch | {'image': image, 'box': jnp.where(is_flipped_B[:, None], mirrored_B4, box_B4)}


def shift(batch: Batch, offsets_B2: Array, *, limit_px: int) -> Batch:
  """Moves each image down and right by `offsets [B, 2] i32` px, at most `limit_px`; zeros fill the uncovered part."""
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
  """Returns `image [B, H, W, 3] f32`, sampled at `matrix [B, 2, 3] @ (x, y, 1)`: bilinear, zeros outside."""
  height, width = image_BHWC.shape[1:3]
  y_HW, x_HW = jnp.meshgrid(jnp.arange(height, dtype=jnp.float32), jnp.arange(width, dtype=jnp.float32),
                            indexing='ij')

  def sample_image(image_HWC: Array, matrix_23: Array) -> Array:
    source_x_HW, source_y_HW = (row[0] * x_HW + row[1] * y_HW + row[2] for row in matrix_23)
    sample_channel = functools.partial(jax.scipy.ndimage.map_coordinates, coordinates=[source_y_HW, source_x_HW],
                                       order=1, mode='constant')
    return jax.vmap(sample_channel, in_axes=-1, out_axes=-1)(image_HWC)
  return jax.vmap(sample_image)(image_BHWC, matrix_B23)
