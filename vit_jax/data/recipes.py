"""From a stored image to what the network gets: host part `*_transform`, device part `prepare_*`.

The host ends with uint8 at the training resolution; normalisation and mixing happen inside the jitted step.
*Geometry writes the box it used into the example*: `box` is top, left, bottom, right in fractions of the
stored image. A mirrored image has left > right; a shifted one may reach below 0 or beyond 1. Rotation, scale
and shear are not part of the box.
"""
from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.core.api import Prepare
from vit_jax.core.types import Array, Batch, HostArray, Key
from vit_jax.data import augment, image_ops, mix
from vit_jax.data.sources import Record

Example = dict[str, HostArray | np.int32]
"""`image [H, W, 3] u8`, `box [4] f32`, `label [] i32`."""


@dataclasses.dataclass(frozen=True)
class TrainTransform:
  """The host part of a training recipe: crop, resize, and then affine, flip and shift in this order."""
  recipe: schema.Recipe
  image_px: tuple[int, int]

  def __call__(self, record: Record, rng: np.random.Generator) -> Example:
    recipe, stored = self.recipe, image_ops.as_rgb(record.image)
    if recipe.crop is schema.Crop.INCEPTION:
      size = stored.shape[:2]
      window = image_ops.inception_crop(size, rng=rng, area=recipe.crop_area, aspect=recipe.crop_aspect)
      image = image_ops.resize(image_ops.cut(stored, window), self.image_px, antialias=recipe.antialias)
      box = image_ops.fractions(window, size)
    else:
      image, box = fit(stored, recipe=recipe, image_px=self.image_px)
    image, box = host_geometry(image, box, recipe=recipe, rng=rng)
    return {'image': image, 'box': box, 'label': np.int32(record.label)}


@dataclasses.dataclass(frozen=True)
class EvalTransform:
  """The host part of evaluation; nothing random."""
  recipe: schema.Recipe
  image_px: tuple[int, int]

  def __call__(self, record: Record) -> Example:
    image, box = fit(image_ops.as_rgb(record.image), recipe=self.recipe, image_px=self.image_px)
    return {'image': image, 'box': box, 'label': np.int32(record.label)}


def train_transform(recipe: schema.Recipe, image_px: tuple[int, int]) -> TrainTransform:
  """`(record, rng) -> Example` for training; pickles."""
  return TrainTransform(recipe, (image_px[0], image_px[1]))


def eval_transform(recipe: schema.Recipe, image_px: tuple[int, int]) -> EvalTransform:
  """`record -> Example` for evaluation; pickles."""
  return EvalTransform(recipe, (image_px[0], image_px[1]))


def fit(image: HostArray, *, recipe: schema.Recipe, image_px: tuple[int, int]) -> tuple[HostArray, HostArray]:
  """`image [H, W, 3] u8` as evaluation sees it, `[*image_px, 3]`, and its box `[4] f32`."""
  if recipe.eval_resize_px:
    return image_ops.resize_small_center_crop(image, image_px, small_px=recipe.eval_resize_px,
                                              antialias=recipe.antialias)
  return image_ops.resize(image, image_px, antialias=recipe.antialias), np.array([0, 0, 1, 1], np.float32)


def host_geometry(image: HostArray, box: HostArray, *, recipe: schema.Recipe,
                  rng: np.random.Generator) -> tuple[HostArray, HostArray]:
  """Affine, flip and shift of one `image [H, W, 3] u8` on the host; `box [4] f32` follows flip and shift."""
  height, width = image.shape[:2]
  if recipe.rotate_degrees or recipe.scale or recipe.shear:
    unit = rng.uniform(-1., 1., 3)
    angle = math.radians(recipe.rotate_degrees) * unit[0]
    image = image_ops.warp(image, np.array(augment.inverse_affine(
        math.cos(angle), math.sin(angle), 1. + unit[1] * recipe.scale, unit[2] * recipe.shear,
        size=(height, width))))
  if recipe.flip and rng.random() < .5:
    image, box = image_ops.flip(image), box[[0, 3, 2, 1]]
  if recipe.shift_px:
    down, right = rng.integers(-recipe.shift_px, recipe.shift_px + 1, 2)
    image = image_ops.shift(image, down_px=int(down), right_px=int(right))
    away = np.array([down / height, right / width], np.float32) * (box[2:] - box[:2])
    box = box - np.tile(away, 2)
  return image, box


def normalize(image: Array, recipe: schema.Recipe) -> Array:
  """`image [B, H, W, 3]` in 0..255 to f32: (x / 255 - mean) / std, each channel by its own."""
  mean, std = (jnp.array(x, jnp.float32).reshape(1, 1, 1, 3) for x in (recipe.mean, recipe.std))
  return (image.astype(jnp.float32) / 255. - mean) / std


def prepare_train(recipe: schema.Recipe, *, num_classes: int, on_device_geometry: bool) -> Prepare:
  """The device part of a training recipe, to be jitted inside the step.

  Args:
    recipe: what to do.
    num_classes: C of the soft labels that mixup makes.
    on_device_geometry: flip, shift and affine happen here; True exactly when the loader is in memory.
  """
  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    del step
    geometry_key, mixup_key = jax.random.split(key)
    if on_device_geometry:
      batch = batch | {'image': batch['image'].astype(jnp.float32)}
      batch = augment.geometry(batch, geometry_key, recipe=recipe)
    batch = batch | {'image': normalize(batch['image'], recipe)}
    if not recipe.mixup:
      return batch
    return mix.mixup(batch, mixup_key, alpha=recipe.mixup, num_classes=num_classes)
  return prepare


def prepare_eval(recipe: schema.Recipe) -> Prepare:
  """The device part of evaluation: normalisation."""
  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    del key, step
    return batch | {'image': normalize(batch['image'], recipe)}
  return prepare
