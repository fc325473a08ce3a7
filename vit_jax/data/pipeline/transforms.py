"""From a stored image to what the network gets: host part `*_transform`, device part `prepare_*`.

The host ends with uint8 at the training resolution; normalisation and mixing happen inside the jitted step.
*Geometry writes the box it used into the example*: `box` is top, left, bottom, right in fractions of the
stored image, or with `exif_orientation` of the upright one. A mirrored image has left > right; a shifted one may
reach below 0 or beyond 1. Rotation, scale and shear are not part of the box.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.core.contracts import Prepare
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Batch, HostArray, Key
from vit_jax.data.device import augment, erase, mix
from vit_jax.data.image import colors, crops, image_ops, jpeg_crop, multicrop, randaugment
from vit_jax.data.image.headers import Reading, reading
from vit_jax.data.source import Record

Example = dict[str, HostArray | np.int32]
"""`image [H, W, 3] u8`, `box [4] f32`, `label [] i32`, and with `max_labels` also `label_list [T] i32`.

With views, those instead of image, box and list.
"""
Transform = Callable[[Record, np.random.Generator], Example]
Shapes = dict[str, tuple[tuple[int, ...], type]]
"""Of an example: shape and dtype by name."""


@dataclasses.dataclass(frozen=True)
class TrainTransform:
  """The host part of a training recipe: crop, resize, affine, flip, shift, and then colours, in this order."""
  recipe: schema.Recipe
  image_px: tuple[int, int]
  open_picture: Callable[[bytes | HostArray, Reading], image_ops.Picture | jpeg_crop.Jpeg] = image_ops.open_picture
  max_labels: int = 0

  def __call__(self, record: Record, rng: np.random.Generator) -> Example:
    recipe = self.recipe
    if recipe.crop is not schema.Crop.RESIZE:
      stored = self.open_picture(record.image, reading(recipe))
      size = stored.size
      if recipe.crop is schema.Crop.INCEPTION:
        window = crops.sample(recipe.crop_sampler, size, rng=rng, area=recipe.crop_area, aspect=recipe.crop_aspect)
      else:
        window = image_ops.window_crop(size, rng=rng, area=recipe.crop_area)
      image = resize_crop(stored.cut(window), self.image_px, recipe=recipe)
      box = image_ops.fractions(window, size)
    else:
      image, box = fit(image_ops.as_rgb(record.image, reading(recipe)), recipe=recipe, image_px=self.image_px)
    image, box = host_geometry(image, box, recipe=recipe, rng=rng)
    image = host_colors(image, recipe=recipe, rng=rng)
    return {'image': image, 'box': box, **host_labels(record, self.max_labels)}


@dataclasses.dataclass(frozen=True)
class EvalTransform:
  """The host part of evaluation; nothing random."""
  recipe: schema.Recipe
  image_px: tuple[int, int]
  max_labels: int = 0

  def __call__(self, record: Record) -> Example:
    stored = image_ops.as_rgb(record.image, reading(self.recipe))
    image, box = fit(stored, recipe=self.recipe, image_px=self.image_px)
    return {'image': image, 'box': box, **host_labels(record, self.max_labels)}


def host_labels(record: Record, max_labels: int) -> Example:
  """`label [] i32` and, if there is room for several, `label_list [T] i32`, filled up with -1.

  Raises:
    UserError: the example has more classes than `max_labels`.
  """
  if not max_labels:
    return {'label': np.int32(record.label)}
  labels = (record.label,) if record.labels is None else record.labels
  if len(labels) > max_labels:
    raise UserError(f'data.max_labels: expected at least {len(labels)}, the labels of one image that was read, got '
                    f'{max_labels}. Set it to the most labels that an image has.')
  return {'label': np.int32(record.label),
          'label_list': np.array([*labels, *[-1] * (max_labels - len(labels))], np.int32)}


def train_transform(recipe: schema.Recipe, image_px: tuple[int, int], *, decode: schema.Decode = schema.Decode.FULL,
                    max_labels: int = 0) -> Transform:
  """`(record, rng) -> Example` for training; pickles. Raises UserError if the decoder is not installed."""
  if recipe.views.on:
    return multicrop.ViewsTransform(recipe, (image_px[0], image_px[1]))
  if decode is schema.Decode.FULL:
    return TrainTransform(recipe, (image_px[0], image_px[1]), max_labels=max_labels)
  jpeg_crop.check()
  return TrainTransform(recipe, (image_px[0], image_px[1]), jpeg_crop.open_picture, max_labels)


def read_as(recipe: schema.Recipe, other: schema.Recipe) -> schema.Recipe:
  """A recipe that reads stored images as another one does."""
  return dataclasses.replace(recipe, exif_orientation=other.exif_orientation, max_image_pixels=other.max_image_pixels)


def eval_transform(recipe: schema.Recipe, image_px: tuple[int, int], *, max_labels: int = 0) -> EvalTransform:
  """`record -> Example` for evaluation; pickles."""
  return EvalTransform(recipe, (image_px[0], image_px[1]), max_labels)


def eval_shapes(image_px: tuple[int, int], *, max_labels: int = 0) -> Shapes:
  """What `eval_transform` makes."""
  found: Shapes = {'image': ((*image_px, 3), np.uint8), 'label': ((), np.int32), 'box': ((4,), np.float32)}
  return found | {'label_list': ((max_labels,), np.int32)} if max_labels else found


def train_shapes(recipe: schema.Recipe, image_px: tuple[int, int], *, max_labels: int = 0) -> Shapes:
  """What `train_transform` makes."""
  views, height, width = recipe.views, image_px[0], image_px[1]
  if not views.on:
    return eval_shapes(image_px, max_labels=max_labels)
  found: Shapes = {'views_global': ((2, height, width, 3), np.uint8), 'label': ((), np.int32)}
  if views.num_local:
    found['views_local'] = ((views.num_local, views.local_px, views.local_px, 3), np.uint8)
  return found


def host_only(recipe: schema.Recipe) -> str:
  """The settings of a recipe that only the host can follow, for every image anew; '' if there are none."""
  found = {f'crop={recipe.crop.value}': recipe.crop is not schema.Crop.RESIZE, 'views.on=true': recipe.views.on,
           f'randaugment.layers={recipe.randaugment.layers}': recipe.randaugment.layers > 0,
           'three_augment=true': recipe.three_augment, 'jitter': colors.is_on(recipe.jitter)}
  return ', '.join(f'data.recipe.{name}' for name, needed in found.items() if needed)


def resize(image: HostArray, image_px: tuple[int, int], *, recipe: schema.Recipe) -> HostArray:
  """`image [H, W, 3] u8` at `image_px`, resampled as the recipe says."""
  return image_ops.resize(image, image_px, antialias=recipe.antialias, interpolation=recipe.interpolation)


def resize_crop(image: HostArray, image_px: tuple[int, int], *, recipe: schema.Recipe) -> HostArray:
  """A random crop `[h, w, 3] u8` at `image_px`, resampled as the recipe says for crops."""
  if recipe.crop_interpolation is schema.CropInterpolation.SAME:
    return resize(image, image_px, recipe=recipe)
  return image_ops.resize(image, image_px, antialias=recipe.antialias,
                          interpolation=schema.Interpolation(recipe.crop_interpolation.value))


def fit(image: HostArray, *, recipe: schema.Recipe, image_px: tuple[int, int]) -> tuple[HostArray, HostArray]:
  """`image [H, W, 3] u8` as evaluation sees it, `[*image_px, 3]`, and its box `[4] f32`."""
  how, antialias = eval_resampling(recipe)
  if recipe.eval_resize_px:
    return image_ops.resize_small_center_crop(image, image_px, small_px=recipe.eval_resize_px, antialias=antialias,
                                              interpolation=how, geometry=recipe.eval_geometry)
  return (image_ops.resize(image, image_px, antialias=antialias, interpolation=how),
          np.array([0, 0, 1, 1], np.float32))


def eval_resampling(recipe: schema.Recipe) -> tuple[schema.Interpolation, bool]:
  """How evaluation resamples, and whether with antialias."""
  return (schema.Interpolation.AREA, False) if recipe.eval_area else (recipe.interpolation, recipe.antialias)


def eval_summary(recipe: schema.Recipe, image_px: tuple[int, int]) -> dict[str, object]:
  """What evaluation does to images, for reports and JSON: names as in `weights.preprocess.Preprocess`."""
  how, antialias = eval_resampling(recipe)
  return {'geometry': recipe.eval_geometry.value, 'resize_px': recipe.eval_resize_px, 'image_px': list(image_px),
          'interpolation': how.value, 'antialias': antialias, 'mean': list(recipe.mean), 'std': list(recipe.std),
          'exif_orientation': recipe.exif_orientation}


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


def host_colors(image: HostArray, *, recipe: schema.Recipe, rng: np.random.Generator) -> HostArray:
  """RandAugment or 3-Augment, and then colour jitter, of one `image [H, W, 3] u8`."""
  if not (recipe.randaugment.layers or recipe.three_augment or colors.is_on(recipe.jitter)):
    return image
  image = np.ascontiguousarray(image)
  if recipe.randaugment.layers:
    style = randaugment.style(recipe.randaugment, interpolation=recipe.interpolation, mean=recipe.mean)
    image = randaugment.randaugment(image, recipe.randaugment, rng, style=style)
  if recipe.three_augment:
    image = colors.three_augment(image, rng)
  return colors.jitter(image, recipe.jitter, rng)


def normalize(image: Array, recipe: schema.Recipe) -> Array:
  """`image [..., H, W, 3]` in 0..255 to f32: (x / 255 - mean) / std, each channel by its own."""
  shape = (1,) * (image.ndim - 1) + (3,)
  mean, std = (jnp.array(x, jnp.float32).reshape(shape) for x in (recipe.mean, recipe.std))
  return (image.astype(jnp.float32) / 255. - mean) / std


def prepare_train(recipe: schema.Recipe, *, num_classes: int, on_device_geometry: bool) -> Prepare:
  """The device part of a training recipe, to be jitted inside the step.

  Args:
    recipe: what to do.
    num_classes: C of the soft labels that mixup and cutmix make.
    on_device_geometry: flip, shift and affine happen here; True exactly when the loader is in memory.
  """
  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    del step
    geometry_key, mix_key, erase_key = jax.random.split(key, 3)
    if recipe.views.on:
      return batch | {k: normalize(v, recipe) for k, v in batch.items() if k.startswith('views_')}
    if on_device_geometry:
      batch = batch | {'image': batch['image'].astype(jnp.float32)}
      batch = augment.geometry(batch, geometry_key, recipe=recipe)
    batch = batch | {'image': normalize(batch['image'], recipe)}
    if recipe.erase.probability:
      batch = erase.erase(batch, erase_key, settings=recipe.erase)
    if recipe.mixup or recipe.cutmix:
      batch = mix.mix(batch, mix_key, recipe=recipe, num_classes=num_classes)
    return batch
  return prepare


def prepare_eval(recipe: schema.Recipe) -> Prepare:
  """The device part of evaluation: normalisation."""
  def prepare(batch: Batch, key: Key, step: Array) -> Batch:
    del key, step
    return batch | {'image': normalize(batch['image'], recipe)}
  return prepare
