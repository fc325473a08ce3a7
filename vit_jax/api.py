"""A network in a few lines: `vit_jax.load(…)`, and then classes, features and attention of pictures.

    model = vit_jax.load('ViT-B_16.npz')
    model.classify('cat.jpg')[0][0].name
    model.features(['cat.jpg', 'dog.jpg'])             # [2, 768]
    model.attention('cat.jpg', layer=12)               # [1, 12, 197, 197]
    model.relevance('cat.jpg', of_class='tabby')       # [1, 14, 14]

Pictures are PIL images, numpy arrays `[H, W, 3]`, `[H, W]` or `[B, H, W, 3]` of uint8, paths or encoded bytes; one
of them or a list. They are resized, cropped and normalised as the weights want it. What comes back is numpy, with
a row for each picture.
"""
from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, HostArray, Outputs
from vit_jax.data.image import headers, image_ops, pillow
from vit_jax.data.pipeline import transforms
from vit_jax.data.source import Record
from vit_jax.data.sources import classes as naming
from vit_jax.inspect import attention as maps
from vit_jax.inspect import measurements
from vit_jax.inspect.layerwise import Driver
from vit_jax.jobs import build, hardware, inference

if TYPE_CHECKING:
  from vit_jax.weights.loading import Weights

Picture = Image.Image | HostArray | str | os.PathLike[str] | bytes
BATCH = 32
UPRIGHT = headers.Reading(upright=True)


class Guess(NamedTuple):
  """A class that a picture may be of."""
  label: int
  name: str
  probability: float


def load(where: str | os.PathLike[str], *, preprocess: str = '', model: str = '', view: str = '',
         classes: str | os.PathLike[str] | Sequence[str] = ()) -> Model:
  """The network of a weight file, a folder, a run directory, an address or a known name, ready to use.

  Args:
    where: as `vit_jax.weights.loading.load` takes it.
    preprocess: decides over what the weights say of their images, such as `imagenet` or `resize=248,image=224`.
    model: decides what tensors cannot say, such as `heads=6,gelu=exact`.
    view: of a run directory: student, ema or teacher; '' = ema where there is one.
    classes: names of the outputs in their order, or a file with a line for each; () = those of the weights.

  Raises:
    UserError: there is nothing there, or nothing that can be trusted.
  """
  from vit_jax.weights import loading as weights
  if (found_here := hardware.platforms()) and not getattr(jax.config, 'jax_platforms', None):
    jax.config.update('jax_platforms', found_here)  # else libtpu tells at length of a TPU that is not here
  is_file = isinstance(classes, str | os.PathLike)
  names = naming.read(os.fspath(classes), said='classes') if is_file else tuple(classes)  # type: ignore[arg-type]
  found = weights.load(os.fspath(where), preprocess=preprocess, model=model, view=view)
  return Model(named(found, names, said=f'classes={classes}' if is_file else 'classes'))


def named(found: Weights, names: Sequence[str], *, said: str) -> Weights:
  """Weights whose outputs have these names; as they are without any. `said` is where the names are from.

  Raises:
    UserError: the weights have another number of outputs.
  """
  if names and len(names) != found.num_classes:
    raise UserError(f'{said} names {len(names):,} classes, but the weights have {found.num_classes:,} outputs; want a '
                    'name for each')
  return found._replace(class_names=tuple(names)) if names else found


class Model:
  """A network with its weights on the device.

  weights: as they were loaded.                    class_names: of its outputs, 'class 0', … where not known.
  image_px: (height, width) of what it is given.   num_layers: blocks; 0 for networks without.
  """

  def __init__(self, weights: Weights, *, batch_size: int = BATCH):
    self.weights, self._batch_size = weights, batch_size
    self.image_px = weights.preprocess.image_px
    self._params = jax.device_put(inference.parameters(weights))
    self._recipe = inference.eval_recipe(weights)
    self._apply = jax.jit(inference.function(weights))
    named = len(weights.class_names) == weights.num_classes
    self.class_names = weights.class_names if named else tuple(f'class {i}' for i in range(weights.num_classes))

  def __repr__(self) -> str:
    height, width = self.image_px
    return (f'{type(self.weights.model).__name__} from {self.weights.source}: {height} x {width} px, '
            f'{self.num_layers} blocks, {self.weights.num_classes} classes')

  def classify(self, images: Picture | Sequence[Picture], *, top: int = 5) -> list[list[Guess]]:
    """The `top` most probable classes of each picture, best first.

    Raises:
      UserError: the weights have no head.
    """
    return [self.rank(row, top=top) for row in self.logits(images)]

  def rank(self, logits: HostArray, *, top: int) -> list[Guess]:
    """The `top` largest of `logits [C]` with names and probabilities, first the largest, of equals the first."""
    powers = np.exp(logits - logits.max())
    probabilities = powers / powers.sum()
    order = np.argsort(-probabilities, kind='stable')[:top]
    return [Guess(int(i), self.class_names[i], float(probabilities[i])) for i in order]

  def logits(self, images: Picture | Sequence[Picture], *, prepared: bool = False) -> HostArray:
    """`[B, C]` f32.

    Args:
      images: of any size.
      prepared: they are what `prepare` gave, `[B, H, W, 3]` u8.

    Raises:
      UserError: the weights have no head.
    """
    if not self.weights.num_classes:
      raise UserError(f'{self.weights.source} has no head, so it knows no classes; want features(), or weights that '
                      'were trained or fine-tuned on classes')
    return self._over(images, lambda image: self._outputs(image).logits, prepared=prepared)

  def features(self, images: Picture | Sequence[Picture], *, layer: int | None = None) -> HostArray:
    """What the network makes of each picture, f32.

    Args:
      images: of any size.
      layer: None = what the head sees, `[B, D]`; else all tokens after block `layer`, `[B, M, D]`: class token and
        registers, if there are any, then the patches row by row. Blocks count from 1, 0 is before the first, and
        -1 the last.

    Raises:
      UserError: there is no such block.
    """
    if layer is None:
      return self._over(images, lambda image: self._outputs(image).features.pooled)
    depth = self._depth(layer, least=0)
    return self._over(images, lambda image: next(itertools.islice(
        self.driver.layers(image, capture=False), depth, None)).tokens.astype(jnp.float32))

  def attention(self, images: Picture | Sequence[Picture], *, layer: int = -1) -> HostArray:
    """Attention of block `layer`, `[B, A, M, M]` f32: of each head, how much each token (row) takes of each (column).

    Raises:
      UserError: there is no such block.
    """
    depth = self._depth(layer, least=1)

    def one(image: Array) -> Array:
      found = next(itertools.islice(self.driver.layers(image, capture=True), depth, None)).attention
      assert found is not None
      return found
    return self._over(images, one)

  def rollout(self, images: Picture | Sequence[Picture], *, prepared: bool = False) -> HostArray:
    """Where the network looks, over all layers: `[B, h, w]` f32, by attention rollout (ViT paper, Appendix D.8).

    Args:
      images: of any size.
      prepared: they are what `prepare` gave, `[B, H, W, 3]` u8.

    Raises:
      UserError: the network has no attention.
    """
    driver = self.driver

    def one(image: Array) -> Array:
      product, tokens = None, image
      for seen in driver.layers(image, capture=True):
        tokens = seen.tokens
        if seen.attention is not None:
          product = maps.roll(product, seen.attention, discard=0.)
      assert product is not None
      h, w = self.grid
      rolled = jnp.einsum('bm,bmk->bk', driver.reading(tokens), product)[:, -h * w:]
      return rolled.reshape(-1, h, w)
    return self._over(images, one, prepared=prepared)

  def relevance(self, images: Picture | Sequence[Picture], *, of_class: int | str | None = None) -> HostArray:
    """Which patches speak for a class: `[B, h, w]` f32, from attention and its gradient (arXiv 2103.15679).

    Args:
      images: of any size; the network is run back an image at a time.
      of_class: number or name of the class; None = the one that is predicted for each picture.

    Raises:
      UserError: the network has no head or no attention, or there is no such class.
    """
    if self.head is None:
      raise UserError(f'{self.weights.source} has no head, so it knows no classes; want rollout()')
    chosen = None if of_class is None else self.find_class(of_class)
    return np.stack([measurements.relevance(self.driver, np.asarray(self.normalize(self.prepare(image)[None])),
                                          grid=self.grid, logits=self.head, of_class=chosen)
                     for image in listed(images)])

  def find_class(self, named: int | str) -> int:
    """Number of the class of a number or a name, as `data.classes.find` has it.

    Raises:
      UserError: there is none, or there are several.
    """
    return naming.find(self.weights.class_names, named, count=self.weights.num_classes)

  @property
  def num_layers(self) -> int:
    blocks = self.weights.params['backbone'].get('blocks')
    return 0 if blocks is None else int(jax.tree.leaves(blocks)[0].shape[0])

  def prepare(self, image: Picture) -> HostArray:
    """`[H, W, 3]` u8: a picture as the network is given it, before normalisation.

    Raises:
      BadImage: it cannot be decoded.
      UserError: it is no picture.
    """
    prepared = transforms.eval_transform(self._recipe, self.image_px)(Record(decode(image), 0))
    return np.asarray(prepared['image'])

  def _over(self, images: Picture | Sequence[Picture], function: Callable[[Array], Array | None], *,
            prepared: bool = False) -> HostArray:
    """`function` of normalised images, over any number of pictures in batches of a few sizes."""
    pictures = list(listed(images))
    if not pictures:
      raise UserError('no pictures; want at least one')
    rows = []
    for start in range(0, len(pictures), self._batch_size):
      batch = np.stack([np.asarray(picture) if prepared else self._prepare(picture)
                        for picture in pictures[start:start + self._batch_size]])
      padded = np.concatenate([batch, np.repeat(batch[:1], _room(len(batch), self._batch_size) - len(batch), 0)])
      rows.append(np.asarray(function(transforms.normalize(jnp.asarray(padded), self._recipe)))[:len(batch)])
    return np.concatenate(rows)

  def _prepare(self, image: Picture) -> HostArray:
    """As `prepare`; of several files the bad one is named."""
    try:
      return self.prepare(image)
    except image_ops.BadImage as error:
      raise image_ops.BadImage(f'{os.fspath(image)}: {error}' if isinstance(image, str | os.PathLike)
                               else str(error)) from error

  def _outputs(self, image: Array) -> Outputs:
    return self._apply(self._params, image)

  def _depth(self, layer: int, *, least: int) -> int:
    """A block's number from one that may count from the end."""
    depth = layer + self.num_layers + 1 if layer < 0 else layer
    if not least <= depth <= self.num_layers:
      raise UserError(f'layer={layer}: the network has {self.num_layers} blocks; want {least} to {self.num_layers}, or '
                      '-1 for the last' if self.num_layers else
                      f'layer={layer}: {type(self.weights.model).__name__} has no blocks to look into; want layer=None')
    return depth

  @functools.cached_property
  def head(self) -> Callable[[Features], Array] | None:
    """Features to logits; None without a head."""
    return inference.head(self.weights, self._params)

  def normalize(self, images: HostArray) -> Array:
    """What the network sees: f32 `[B, H, W, 3]` of what `prepare` gave."""
    return transforms.normalize(jnp.asarray(images), self._recipe)

  @functools.cached_property
  def driver(self) -> Driver:
    """The backbone, to be run layer by layer."""
    backbone: Any = build.build_backbone(inference.run_config(self.weights))
    return Driver(backbone, self._params['backbone'])

  @property
  def grid(self) -> tuple[int, int]:
    """`(h, w)` of the patch tokens."""
    patch = self.weights.model.patch  # type: ignore[union-attr]
    return self.image_px[0] // patch, self.image_px[1] // patch


def listed(images: Picture | Sequence[Picture]) -> Iterator[Picture]:
  """One picture, an array of several, or a list of any, one by one."""
  if isinstance(images, np.ndarray) and images.ndim == 4:
    yield from images
  elif isinstance(images, Sequence) and not isinstance(images, str | bytes):
    for image in images:
      yield from listed(image)
  else:
    yield images


def decode(image: Picture) -> HostArray:
  """`[H, W, 3]` u8 of any kind of image; the same of a file, its bytes, and what Pillow opens it as.

  Files and Pillow's images are turned upright as their EXIF orientation says.

  Raises:
    BadImage: an image that cannot be decoded, or is too large.
    UserError: something else, or an array of another shape or type.
  """
  match image:
    case np.ndarray() if image.dtype == np.uint8 and (image.ndim == 2 or image.ndim == 3 and image.shape[2] in (1, 3)):
      return image_ops.as_rgb(image[..., None] if image.ndim == 2 else image)
    case Image.Image():
      return pillow.read(image, UPRIGHT)
    case bytes():
      return image_ops.decode(image, UPRIGHT)
    case str() | os.PathLike():
      with open(image, 'rb') as file:
        return image_ops.decode(file.read(), UPRIGHT)
  what = f'an array {image.shape} of {image.dtype}' if isinstance(image, np.ndarray) else type(image).__name__
  raise UserError(f'{what} is no picture; want uint8 of shape [H, W, 3], [H, W] or [B, H, W, 3], a PIL image, a path '
                  'or the bytes of a file')


def _room(num: int, most: int) -> int:
  """Rows that a batch of `num` is filled up to, so that few sizes are compiled: a power of two, or `most`."""
  return min(most, 1 << (num - 1).bit_length())
