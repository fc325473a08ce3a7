"""The host part of a recipe: from a stored image to the uint8 image or views of an example.

`loader.py` calls `train_transform` or `eval_transform` once, and the returned transform for each record. `train_shapes`
and `eval_shapes` return the shapes of an example before any example is made. A transform decodes the image, then
applies geometry, then colors, and returns uint8 at the training resolution. Normalization and mixing happen inside the
jitted step (`device/prepare.py`). This module does not know sources, batches or steps.
"""
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.image import channels, colors, crops, decode, geometry, jpeg, randaugment
from vit_jax.data.image.headers import decode_options
from vit_jax.data.source import Record

Example = dict[str, HostArray | np.int32]
"""`image [H, W, 3] u8`, `box [4] f32`, `label [] i32`, and with `max_labels` also `label_list [T] i32`.

With other channels than RGB, the image is `[H, W, C] f32`. For an image at its own aspect ratio, `image` holds patches,
and an example also has `grid [2] i32`. For the keys with views, see `ViewsTransform`.
"""
Transform = Callable[[Record, np.random.Generator], Example]
Shapes = dict[str, tuple[tuple[int, ...], type]]
"""Shape and dtype of the arrays of an example, by name."""
_COMPLETE_BOX = np.array([0, 0, 1, 1], np.float32)  # of an image that is not cropped
_FIRST, _SECOND, _LOCAL = 0, 1, 2  # kinds of views: indices into `schema.Views.blur` and `.solarize`


@dataclasses.dataclass(frozen=True)
class TrainTransform:
  """The host part of a training recipe: crop, resize, affine, flip, shift, and then colors, in this order.

  The fields are the arguments of `train_transform`; `jpeg.find_opener` returns `open_image`. With `num_tokens`, images
  keep their own aspect ratio and have at most `num_tokens` patches of `eval_native_patch` px. The aspect ratio of a
  crop, which resizing preserves, is that of the image times a number in `crop_aspect`.
  """
  recipe: schema.Recipe
  image_px: tuple[int, int]
  open_image: jpeg.Opener = decode.open_image
  max_labels: int = 0
  num_tokens: int = 0

  def __call__(self, record: Record, rng: np.random.Generator) -> Example:
    recipe, patch, image_px = self.recipe, self.recipe.eval_native_patch, self.image_px
    is_rgb = recipe.channels == channels.RGB
    if is_rgb:
      stored = self.open_image(record.image, decode_options(recipe))
    else:
      stored = decode.DecodedImage(decode_image(record, recipe))
    window = decode.Window(0, 0, *stored.size)
    is_cropped = recipe.crop is not schema.Crop.RESIZE
    if is_cropped:
      window = crops.draw(recipe, stored.size, rng, is_scaled=self.num_tokens > 0)
    if self.num_tokens:
      image_px = geometry.native_size((window.height, window.width), patch, self.num_tokens)
    if is_cropped or self.num_tokens:
      image = geometry.resize_crop(stored.cut(window), image_px, recipe=recipe)
      box = crops.fractions(window, stored.size)
    else:
      image, box = geometry.fit(stored.cut(window), recipe=recipe, image_px=image_px)
    image, box = geometry.augment(image, box, recipe=recipe, rng=rng)
    if is_rgb:
      image = augment_colors(image, recipe=recipe, rng=rng)
    example = {'image': image, 'box': box, **host_labels(record, self.max_labels)}
    if self.num_tokens:
      example['image'], example['grid'] = geometry.cut_patches(image, patch, self.num_tokens)
    return example


@dataclasses.dataclass(frozen=True)
class ViewsTransform:
  """Several views of an image for self-supervised training (DINO, arXiv 2104.14294): two large crops
  `views_global [2, H, W, 3] u8`, V small crops `views_local [V, h, w, 3] u8`, and `label`.

  With `views.gram_scale` above 1, an example also has `views_gram [2, H', W', 3] u8`: the global crops at a larger
  size, with the same flips and, with `views.gram_colors`, the same colors; sigma of the blur is the same in pixels.

  The operations on a view are random crop, resize, flip, color jitter, grayscale, blur and solarize, in this order. The
  probabilities of blur and solarize are different for the first and the second global view and the local views.
  """
  recipe: schema.Recipe
  image_px: tuple[int, int]

  def __call__(self, record: Record, rng: np.random.Generator) -> Example:
    image, views = decode_image(record, self.recipe), self.recipe.views
    global_views, gram_views = [], []
    for view in (_FIRST, _SECOND):
      crop = self._crop(image, rng, view=view)
      if views.gram_scale > 1:  # a copy of the generator draws the same numbers
        gram_views.append(self._augment(crop, copy.deepcopy(rng), view=view, image_px=views.gram_px(self.image_px),
                                        has_colors=views.gram_colors))
      global_views.append(self._augment(crop, rng, view=view, image_px=self.image_px))
    example: Example = {'views_global': np.stack(global_views), 'label': np.int32(record.label)}
    if gram_views:
      example['views_gram'] = np.stack(gram_views)
    if views.num_local:
      local_px = views.local_px, views.local_px
      example['views_local'] = np.stack([
          self._augment(self._crop(image, rng, view=_LOCAL), rng, view=_LOCAL, image_px=local_px)
          for _ in range(views.num_local)])
    return example

  def _crop(self, image: HostArray, rng: np.random.Generator, *, view: int) -> HostArray:
    """Returns a random crop of `image [H, W, 3] u8`, not resized; `view` is `_FIRST`, `_SECOND` or `_LOCAL`."""
    recipe, views = self.recipe, self.recipe.views
    window = crops.sample(recipe.crop_sampler, (image.shape[0], image.shape[1]), rng=rng,
                          area=views.local_area if view == _LOCAL else views.global_area, aspect=recipe.crop_aspect,
                          tries=recipe.crop_tries, covered=recipe.crop_covered)
    return window.cut(image)

  def _augment(self, crop: HostArray, rng: np.random.Generator, *, view: int, image_px: tuple[int, int],
               has_colors: bool = True) -> HostArray:
    """Returns a crop resized to `image_px`, then flipped at random and, if `has_colors`, with changed colors."""
    recipe, views = self.recipe, self.recipe.views
    image = geometry.resize(crop, image_px, antialias=recipe.antialias, interpolation=recipe.interpolation,
                            truncate=recipe.truncate)
    if recipe.flip and rng.random() < 0.5:
      image = np.ascontiguousarray(geometry.flip(image))
    if not has_colors:
      return image
    image = colors.jitter(image, views.jitter, rng)
    if rng.random() < views.grayscale:
      image = colors.grayscale(image)
    if rng.random() < views.blur[view]:
      image = colors.random_blur(image, rng)
    if rng.random() < views.solarize[view]:
      image = colors.solarize(image, colors.SOLARIZE_FROM)
    return image


@dataclasses.dataclass(frozen=True)
class EvalTransform:
  """The host part of evaluation, which draws no random numbers; `shapes` has the shapes of the examples."""
  recipe: schema.Recipe
  image_px: tuple[int, int]
  max_labels: int = 0

  @property
  def shapes(self) -> Shapes:
    return eval_shapes(self.image_px, max_labels=self.max_labels, num_channels=self.recipe.channels,
                       has_grid=self.recipe.eval_native_patch > 0)

  def __call__(self, record: Record) -> Example:
    stored = decode_image(record, self.recipe)
    labels = host_labels(record, self.max_labels)
    if self.recipe.eval_native_patch:
      image, grid = geometry.fit_native(stored, recipe=self.recipe, image_px=self.image_px)
      return {'image': image, 'grid': grid, 'box': _COMPLETE_BOX, **labels}
    image, box = geometry.fit(stored, recipe=self.recipe, image_px=self.image_px)
    return {'image': image, 'box': box, **labels}


def train_transform(recipe: schema.Recipe, image_px: tuple[int, int], *, decode: schema.Decode = schema.Decode.FULL,
                    max_labels: int = 0, num_tokens: int = 0) -> Transform:
  """Returns the transform `(record, rng) -> Example` of training, which can be pickled.

  Args:
    recipe: the augmentation.
    image_px: height and width of the images, px.
    decode: whether a JPEG is decoded completely, or only inside its crop.
    max_labels: T of `label_list [T]`; 0 = examples have no list.
    num_tokens: largest number of patches of an image at its own aspect ratio; 0 = images are resized to `image_px`.

  Raises UserError if the decoder that `decode` requires is not installed.
  """
  if recipe.views.on:
    return ViewsTransform(recipe, (image_px[0], image_px[1]))
  opener = jpeg.find_opener(decode, is_cropped=recipe.crop is not schema.Crop.RESIZE)
  return TrainTransform(recipe, (image_px[0], image_px[1]), opener, max_labels, num_tokens)


def decode_image(record: Record, recipe: schema.Recipe) -> HostArray:
  """Returns the stored image of a record, `[H, W, 3] u8` or with other channels than RGB `[H, W, C] f32`.

  Raises BadImage if the image cannot be decoded, or is too large.
  """
  if recipe.channels == channels.RGB:
    return decode.decode(record.image, decode_options(recipe))
  return channels.read(record.image, recipe.channels, decode_options(recipe))


def eval_transform(recipe: schema.Recipe, image_px: tuple[int, int], *, max_labels: int = 0) -> EvalTransform:
  """Returns the transform `record -> Example` of evaluation, which can be pickled."""
  return EvalTransform(recipe, (image_px[0], image_px[1]), max_labels)


def train_shapes(recipe: schema.Recipe, image_px: tuple[int, int], *, max_labels: int = 0,
                 num_tokens: int = 0) -> Shapes:
  """Returns the arrays of an example of `train_transform` with the same arguments."""
  views = recipe.views
  if num_tokens:
    patch = recipe.eval_native_patch
    return eval_shapes((num_tokens * patch, patch), max_labels=max_labels, has_grid=True)
  if not views.on:
    return eval_shapes(image_px, max_labels=max_labels, num_channels=recipe.channels)
  shapes: Shapes = {'views_global': ((2, *image_px, 3), np.uint8), 'label': ((), np.int32)}
  if views.gram_scale > 1:
    shapes['views_gram'] = ((2, *views.gram_px(image_px), 3), np.uint8)
  if views.num_local:
    shapes['views_local'] = ((views.num_local, views.local_px, views.local_px, 3), np.uint8)
  return shapes


def eval_shapes(image_px: tuple[int, int], *, max_labels: int = 0, num_channels: int = channels.RGB,
                has_grid: bool = False) -> Shapes:
  """Returns the arrays of an example of `eval_transform`; with `has_grid`, images keep their own aspect ratio."""
  dtype = np.uint8 if num_channels == channels.RGB else np.float32
  shapes: Shapes = {'image': ((*image_px, num_channels), dtype), 'label': ((), np.int32), 'box': ((4,), np.float32)}
  if has_grid:
    shapes['grid'] = ((2,), np.int32)
  if max_labels:
    shapes['label_list'] = ((max_labels,), np.int32)
  return shapes


def augment_colors(image: HostArray, *, recipe: schema.Recipe, rng: np.random.Generator) -> HostArray:
  """Applies RandAugment or 3-Augment, and then color jitter, to `image [H, W, 3] u8`."""
  if not (recipe.randaugment.layers or recipe.three_augment or colors.is_on(recipe.jitter)):
    return image
  image = np.ascontiguousarray(image)
  if recipe.randaugment.layers:
    style = randaugment.make_style(recipe.randaugment, interpolation=recipe.interpolation, mean=recipe.mean)
    image = randaugment.randaugment(image, recipe.randaugment, rng, style=style)
  if recipe.three_augment:
    image = colors.three_augment(image, rng)
  return colors.jitter(image, recipe.jitter, rng)


def host_labels(record: Record, max_labels: int) -> Example:
  """Returns `label [] i32` and, if T = `max_labels` is above 0, `label_list [T] i32`, padded with -1.

  Raises UserError if the example has more classes than `max_labels`.
  """
  if not max_labels:
    return {'label': np.int32(record.label)}
  labels = record.labels
  if len(labels) > max_labels:
    raise UserError(f'data.max_labels: expected at least {len(labels)}, the number of labels of one image, got '
                    f'{max_labels}. Set it to the largest number of labels of an image.')
  padding = [-1] * (max_labels - len(labels))
  return {'label': np.int32(record.label), 'label_list': np.array([*labels, *padding], np.int32)}


def host_only(recipe: schema.Recipe) -> str:
  """Returns the settings of a recipe that the device cannot apply, joined by commas for messages; '' if there are none.

  With such a setting, the host needs the stored image at each step, and the loader cannot keep resized images.
  """
  is_set_by_name = {
      f'crop={recipe.crop.value}': recipe.crop is not schema.Crop.RESIZE,
      'views.on=true': recipe.views.on, 'native_lengths': bool(recipe.native_lengths),
      f'randaugment.layers={recipe.randaugment.layers}': recipe.randaugment.layers > 0,
      'three_augment=true': recipe.three_augment, 'jitter': colors.is_on(recipe.jitter)}
  return ', '.join(f'data.recipe.{name}' for name, is_set in is_set_by_name.items() if is_set)


def read_as(recipe: schema.Recipe, other: schema.Recipe) -> schema.Recipe:
  """Returns `recipe` with the decoding options of the recipe `other`."""
  return dataclasses.replace(recipe, exif_orientation=other.exif_orientation, max_image_pixels=other.max_image_pixels)


def at_one_size(recipe: schema.Recipe) -> schema.Recipe:
  """Returns the recipe without `eval_native_patch` and `native_lengths`, so that all images have one size."""
  return dataclasses.replace(recipe, eval_native_patch=0, native_lengths=())


def eval_summary(recipe: schema.Recipe, image_px: tuple[int, int]) -> dict[str, object]:
  """Returns the preprocessing of evaluation for reports and JSON, by field of `weights.preprocess.Preprocess`."""
  interpolation, antialias = geometry.eval_resampling(recipe)
  summary: dict[str, object] = {
      'geometry': recipe.eval_geometry.value, 'resize_px': recipe.eval_resize_px, 'image_px': list(image_px),
      'interpolation': interpolation.value, 'antialias': antialias, 'truncate': recipe.truncate,
      'mean': list(recipe.mean), 'std': list(recipe.std), 'exif_orientation': recipe.upright}
  if recipe.eval_native_patch:
    summary['native_patch'] = recipe.eval_native_patch
  return summary
