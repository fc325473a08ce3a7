"""The device part of a recipe, inside the jitted step: geometry, normalization, random erasing, mixing and labels.

Random erasing (Zhong et al., arXiv 1708.04896) follows timm's `pixel` mode: a rectangle of each chosen image becomes
normal noise, drawn for each value, after normalization. Its area is uniform, its aspect ratio height / width
log-uniform; the first of ten such draws that fits inside is taken, and the image stays if none does. The random numbers
depend only on the key and the row in the global batch.
"""
from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.contracts import Prepare
from vit_jax.core.types import Array, Batch, Key
from vit_jax.data.device import geometry, mix, token_targets

TRIES = 10


def prepare_train(recipe: schema.Recipe, *, num_classes: int, on_device_geometry: bool, soft_labels: bool = False,
                  targets: token_targets.Targets | None = None) -> Prepare:
  """Returns the device part of a training recipe, to be jitted inside the step.

  Args:
    recipe: the augmentation.
    num_classes: C of the soft labels that mixup and cutmix make.
    on_device_geometry: apply flip, shift and affine here; True exactly if the loader holds the images in memory.
    soft_labels: the batch has stored probabilities of classes, which become `labels [B, C]`.
    targets: the batch has label maps, which become targets of tokens; None if it has none.
  """
  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    del step
    if soft_labels:
      batch = token_targets.soften(batch, num_classes)
    batch = _augment(batch, key, recipe, num_classes, on_device_geometry)
    return token_targets.add(batch, targets, num_classes=num_classes) if targets else batch
  return prepare


def prepare_eval(recipe: schema.Recipe) -> Prepare:
  """Returns the device part of evaluation: normalization."""
  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    del key, step
    return batch | {'image': normalize(batch['image'], recipe)}
  return prepare


def normalize(image: Array, recipe: schema.Recipe) -> Array:
  """Returns `image [..., H, W, 3]` in 0..255 as f32: (x / 255 - mean) / std, for each channel."""
  shape = (1,) * (image.ndim - 1) + (3,)
  mean, std = (jnp.array(x, jnp.float32).reshape(shape) for x in (recipe.mean, recipe.std))
  return (image.astype(jnp.float32) / 255. - mean) / std


def _augment(batch: Batch, key: Key, recipe: schema.Recipe, num_classes: int, on_device_geometry: bool) -> Batch:
  geometry_key, mix_key, erase_key = jax.random.split(key, 3)
  if recipe.views.on:
    return batch | {k: normalize(v, recipe) for k, v in batch.items() if k.startswith('views_')}
  if on_device_geometry:
    batch = geometry.augment(batch | {'image': batch['image'].astype(jnp.float32)}, geometry_key, recipe=recipe)
  batch = batch | {'image': normalize(batch['image'], recipe)}
  if recipe.erase.probability:
    batch = erase(batch, erase_key, settings=recipe.erase)
  if recipe.mixup or recipe.cutmix:
    batch = mix.mix(batch, mix_key, recipe=recipe, num_classes=num_classes)
  return batch


def erase(batch: Batch, key: Key, *, settings: schema.Erase) -> Batch:
  """Erases a rectangle in some rows of `image [B, H, W, 3] f32`."""
  box_key, chosen_key, noise_key = jax.random.split(key, 3)
  num, height, width, _ = batch['image'].shape
  chosen_B = jax.random.bernoulli(chosen_key, settings.probability, (num,))
  hidden_BHW = inside(draw_boxes(box_key, batch['image'].shape, settings=settings), (height, width))
  hidden_BHW = hidden_BHW & chosen_B[:, None, None]
  noise = jax.random.normal(noise_key, batch['image'].shape, jnp.float32)
  return batch | {'image': jnp.where(hidden_BHW[..., None], noise, batch['image'])}


def draw_boxes(key: Key, shape: tuple[int, ...], *, settings: schema.Erase) -> Array:
  """Returns `[B, 4] i32`: top, left, height and width, px, for images of `shape` (B, H, W, 3); 0 px if none fits."""
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
  first_B = jnp.argmax(fits_TB, axis=0)  # 0 if none fits: an empty box
  return jnp.take_along_axis(boxes_TB4, first_B[None, :, None], axis=0)[0].astype(jnp.int32)


def inside(boxes_B4: Array, size: tuple[int, int]) -> Array:
  """Returns `[B, H, W] bool`: the pixels inside (top, left, height, width) in images of `size`."""
  rows_H, columns_W = jnp.arange(size[0])[None], jnp.arange(size[1])[None]
  top_B, left_B, tall_B, wide_B = (boxes_B4[:, i, None] for i in range(4))
  in_rows_BH = (rows_H >= top_B) & (rows_H < top_B + tall_B)
  in_columns_BW = (columns_W >= left_B) & (columns_W < left_B + wide_B)
  return in_rows_BH[:, :, None] & in_columns_BW[:, None, :]
