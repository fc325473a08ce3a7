"""A network with its weights, ready to use: classes, features and attention of images.

Images are PIL images, numpy arrays `[H, W, 3]`, `[H, W]` or `[B, H, W, 3]` of uint8, paths, or encoded bytes; one of
them or a list. They are resized, cropped and normalized as the weights require. Results are numpy arrays with one row
per image.
"""
from __future__ import annotations

import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, HostArray, Params
from vit_jax.data import orientation
from vit_jax.data.device.prepare import normalize
from vit_jax.data.formats import image_list
from vit_jax.data.image import headers
from vit_jax.data.image import transform as transforms
from vit_jax.data.labels import classes, imagenet
from vit_jax.data.source import Record
from vit_jax.data.text.prompts import PLAIN
from vit_jax.inspect import measurements
from vit_jax.inspect.images import ImageLike, decode, listed
from vit_jax.inspect.layerwise import Driver
from vit_jax.inspect.zeroshot import Guess, ZeroShot, rank
from vit_jax.models import cost
from vit_jax.weights import inference, saving
from vit_jax.weights.network import Weights

if TYPE_CHECKING:
  from vit_jax.weights.text_encoder import TextEncoder

BATCH = 32
Images = ImageLike | Sequence[ImageLike]


class Model:
  """Holds a network with its weights on the device. `vit_jax.load` returns one.

  weights: as loaded.
  image_px: (height, width) of its input.
  recipe, decoding: how images are prepared and files decoded.
  class_names: of its outputs; if the weights name none, those of ImageNet-1k or -21k by their number, or 'class 0', ….
  assumed_classes: the set, such as ImageNet-1k, if its names were chosen by the number of outputs alone; or ''.
  num_layers: blocks; 0 for networks without blocks.
  """

  def __init__(self, weights: Weights, *, batch_size: int = BATCH) -> None:
    weights.check_rgb('this use of a network (predict, inspect, serve, the Python API)')
    self.weights, self._batch_size = weights, batch_size
    self.image_px = weights.preprocess.image_px
    self._params = jax.device_put(inference.parameters(weights))
    self.recipe = orientation.decide_for_named_files(inference.eval_recipe(weights))
    self.decoding = headers.decode_options(self.recipe)
    self._normalize = jax.jit(functools.partial(normalize, recipe=self.recipe))
    infer = inference.function(weights)
    self._apply = jax.jit(lambda params, pixels: infer(params, normalize(pixels, self.recipe)))
    self._encoder: TextEncoder | None = None
    self._tokenizer = ''  # of the encoder
    self.assumed_classes = ''
    self._names: tuple[str, ...] = ()
    if len(weights.class_names) == weights.num_classes:
      self._names = weights.class_names
    elif class_list := imagenet.by_count(weights.num_classes):
      self.assumed_classes, self._names = class_list.title, class_list.names
    self.class_names = self._names or tuple(f'class {i}' for i in range(weights.num_classes))

  def __repr__(self) -> str:
    height, width = self.image_px
    return (f'{type(self.weights.model).__name__} from {self.weights.source}: {height} x {width} px, '
            f'{self.num_layers} blocks, {self.weights.num_classes} classes')

  def tabulate(self) -> str:
    """Returns a table of all parameters with their shapes, and of the FLOPs of a forward pass by module."""
    w = self.weights
    forward = cost.forward(w.model, self.image_px, head=w.head, num_classes=w.num_classes)
    return cost.table(w.params, forward.flops)

  def classify(self, images: Images, *, top: int = 5, names: Sequence[str] = (),
               prompts: str | Sequence[str] = PLAIN) -> list[list[Guess]]:
    """Returns the `top` most probable classes of each image, best first.

    Classes are those of the head or, with `names` in words, found by texts; `prompts` are those of `zero_shot`.

    Raises:
      UserError: the weights have no head, or with `names` no text tower.
    """
    if names:
      return self.zero_shot(names, prompts=prompts).classify(images, top=top)
    return [self.rank(row, top=top) for row in self.logits(images)]

  def zero_shot(self, names: Sequence[str], *, prompts: str | Sequence[str] = PLAIN, tokenizer: str = '') -> ZeroShot:
    """Returns a classifier by names of classes in words, which embeds their texts once.

    `prompts` is a template with `{}` for the name, several, or `clip_paper`, `clip_best` or `class_name_only`;
    `tokenizer` is its file, '' = beside the weights. Raises UserError if there is no text tower or no tokenizer.
    """
    from vit_jax.weights import text_encoder  # only here: most programs predict the classes of a head
    if self._encoder is None or tokenizer != self._tokenizer:
      where = self.weights.given or self.weights.source
      self._encoder, self._tokenizer = text_encoder.load(where, self.weights, tokenizer_file=tokenizer), tokenizer
    return ZeroShot(lambda images, prepared: self.features(images, prepared=prepared), self._encoder, names, prompts)

  def rank(self, logits: HostArray, *, top: int) -> list[Guess]:
    """Returns the `top` largest of `logits [C]` with names and probabilities, largest first, ties in class order."""
    guesses = rank(logits, self.class_names, top=top, is_sigmoid=self.weights.is_sigmoid)
    return [guess._replace(share=None) for guess in guesses]  # several classes may be true: they share nothing

  def logits(self, images: Images, *, prepared: bool = False) -> HostArray:
    """Returns the logits of the classes, `[B, C]` f32.

    Args:
      images: of any size.
      prepared: the images are outputs of `prepare`, `[B, H, W, 3]` u8.

    Raises:
      UserError: the weights have no head.
    """
    if not self.weights.num_classes:
      raise UserError(f'{self.weights.source}: expected weights with a classification head, got weights without one. '
                      'Use features(), or weights that were trained on classes.')
    return self._map(images, lambda pixels: self._apply(self._params, pixels).logits, prepared=prepared)

  def features(self, images: Images, *, layer: int | None = None, layers: Sequence[int] | None = None,
               as_grid: bool = False, norm: bool = False, prepared: bool = False) -> HostArray:
    """Returns features of each image, f32.

    Args:
      images: of any size.
      layer: None = the pooled features that the head receives, `[B, D]`; else all tokens after block `layer`,
        `[B, M, D]`: class token and registers, if there are any, then the patches row by row. Blocks count from 1;
        0 is the input of the first block, and -1 the last block.
      layers: as `layer`, for several blocks in one pass: `[n, B, M, D]`.
      as_grid: return the patch tokens alone, in their places in the image: `[B, h, w, D]`, or `[n, B, h, w, D]` of
        `layers`. Without a layer they are the tokens that the network ends with, after its last norm.
      norm: of grids, apply the last norm to each layer, as DINOv2's programs do for dense tasks; otherwise the tokens
        are those of the residual stream. A network whose norm follows pooling has none for its tokens.
      prepared: the images have the size of the network's input, as outputs of `prepare` do, `[B, H, W, 3]` u8.

    Raises:
      UserError: there is no such block, or the settings exclude each other.
    """
    if (layer is not None and layers is not None) or (norm and not as_grid):
      raise UserError('features: expected layer or layers, and norm=True with as_grid=True only, got others. '
                      'Leave out the other arguments.')
    if layer is not None:
      depths = [self._find_depth(layer, least=0)]
    elif layers is not None:
      depths = [self._find_depth(one, least=0) for one in layers]
      if not depths:
        raise UserError('layers: expected at least one block, got none. Pass the numbers of blocks.')
    else:
      def read_last(pixels: Array) -> Array:
        features: Features = self._apply(self._params, pixels).features
        return features.maps() if as_grid else features.pooled
      return self._map(images, read_last, prepared=prepared)
    tokens = self._map(images, lambda pixels: self._read_tokens(pixels, depths, as_grid=as_grid, norm=norm),
                       prepared=prepared)
    return tokens[:, 0] if layers is None else tokens.swapaxes(0, 1)

  def embed(self, images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *,
            to: str | os.PathLike[str], what: str = 'features', blocks: Sequence[int] = (), format: str = '',
            follow_links: bool = False) -> None:
    """Writes features of any number of image files as files; after a kill, the same call resumes.

    Args:
      images: files and folders, with all images in and below them.
      to: folder to write, or `FILE.npz` or `FILE.parquet`.
      what: `features` (as `features(images)`), `probabilities`, or `tokens`, the patch tokens that the network ends
        with, `[N, D]` an image.
      blocks: features after these blocks, concatenated: from 1, or from the end as -1; () = those of the head.
      format: `parquet` or `npz`; '' = by the suffix.
      follow_links: also read files outside of a folder to which links in it lead.

    Raises:
      UserError: no image is found, the weights have no such output, or `to` has other content.
    """
    from vit_jax.inspect import many_images  # only here: few programs write files
    if isinstance(images, str | os.PathLike):
      images = [images]
    paths = list(image_list.find([os.fspath(path) for path in images], follow_links=follow_links))
    image_list.check_exist(paths)
    many_images.embed(self.weights, image_list.ImageList(paths), pathlib.Path(os.path.expanduser(to)),
                      recipe=self.recipe, format=format, wanted=many_images.Wanted(what, tuple(blocks)))

  def _read_tokens(self, pixels: Array, depths: Sequence[int], *, as_grid: bool, norm: bool) -> Array:
    """Returns the tokens after each of `depths`, `[B, n, M, D]`, or as grids `[B, n, h, w, D]`."""
    tokens_by_depth, (h, w) = {}, self.grid
    layers = self.driver.layers(self.normalize(pixels), capture=False)
    for depth, tokens, _ in itertools.islice(layers, max(depths) + 1):
      if depth in depths:
        if norm:
          tokens = self.driver.finish(tokens, grid=self.grid).tokens
        tokens_by_depth[depth] = tokens[:, -h * w:].reshape(len(tokens), h, w, -1) if as_grid else tokens
    return jnp.stack([tokens_by_depth[depth] for depth in depths], 1).astype(jnp.float32)

  def attention(self, images: Images, *, layer: int = -1) -> HostArray:
    """Returns the attention of block `layer`, `[B, A, M, M]` f32: per head, the weight of each key in each row.

    Raises:
      UserError: there is no such block.
    """
    depth = self._find_depth(layer, least=1)

    def read_attention(pixels: Array) -> Array | None:
      layers = self.driver.layers(self.normalize(pixels), capture=True)
      return next(itertools.islice(layers, depth, None)).attention
    return self._map(images, read_attention)

  def rollout(self, images: Images, *, prepared: bool = False) -> HostArray:
    """Returns attention over all layers, `[B, h, w]` f32, by attention rollout (ViT paper, Appendix D.8).

    Args:
      images: of any size.
      prepared: the images are outputs of `prepare`, `[B, H, W, 3]` u8.

    Raises:
      UserError: the network has no attention.
    """
    driver = self.driver

    def roll(pixels: Array) -> Array:
      product = None
      for layer in driver.layers(self.normalize(pixels), capture=True):
        if layer.attention is not None:
          product = measurements.roll(product, layer.attention)
      assert product is not None
      h, w = self.grid
      rolled = jnp.einsum('bm,bmk->bk', driver.readout_weights(layer.tokens), product)[:, -h * w:]
      return rolled.reshape(-1, h, w)
    return self._map(images, roll, prepared=prepared)

  def relevance(self, images: Images, *, of_class: int | str | None = None) -> HostArray:
    """Returns the relevance of patches for a class, `[B, h, w]` f32: attention times its gradient (arXiv 2103.15679).

    Args:
      images: of any size; gradients are computed one image at a time.
      of_class: index or name of the class; None = the predicted class of each image.

    Raises:
      UserError: the network has no head or no attention, or there is no such class.
    """
    if self.head is None:
      raise UserError(f'{self.weights.source}: expected weights with a classification head, got weights without one. '
                      'Use rollout().')
    class_index = None if of_class is None else self.find_class(of_class)
    return np.stack([measurements.relevance(self.driver, np.asarray(self.normalize(self.prepare(image)[None])),
                                            grid=self.grid, logits=self.head, of_class=class_index)
                     for image in listed(images)])

  def find_class(self, named: int | str) -> int:
    """Returns the index of a class given by index or name, see `data.labels.classes.find`.

    Raises:
      UserError: no class or several classes match.
    """
    return classes.find(self._names, named, num_classes=self.weights.num_classes)

  def functional(self, *, num_classes: int | None = None, seed: int = 0) -> tuple[Params, inference.Function]:
    """Returns the parameters, and the network as a pure function of them, for a training loop of your own.

    Args:
      num_classes: of a new head; None = the head of the weights, if they have one; 0 = no head.
      seed: of the parameters of a new head.

    Returns:
      Nested dicts of f32 arrays, and `apply(params, image, train=False, key=None)`, which returns `logits [B, C]` and
      `features` for images `[B, H, W, 3]` that `prepare` and `normalize` made. `apply.shardings(mesh)` has a
      NamedSharding for each parameter.
    """
    return inference.make_function(self.weights, num_classes=num_classes, seed=seed)

  def save(self, to: str | os.PathLike[str], *, params: Params | None = None, family: str = '',
           overwrite: bool = False) -> list[str]:
    """Writes the network in a format of any family, as `vit-jax convert` does.

    Args:
      to: a file in .npz, .safetensors, .pth, .pt or .bin, otherwise a folder.
      params: as `functional` returned them, after training; None = those of the weights.
      family: the format, such as `timm` or `huggingface`; '' = by the name of the file.
      overwrite: replace an existing file or folder.

    Returns:
      One sentence for each thing that the format cannot hold.

    Raises:
      UserError: the parameters are those of another network, the format cannot hold them, or `to` cannot be written.
    """
    weights = self.weights if params is None else inference.with_params(self.weights, params)
    return saving.save(weights, os.fspath(to), family=family, overwrite=overwrite)[1]

  @property
  def num_layers(self) -> int:
    blocks = self.weights.params['backbone'].get('blocks')
    return 0 if blocks is None else int(jax.tree.leaves(blocks)[0].shape[0])

  def prepare(self, image: ImageLike) -> HostArray:
    """Returns the image as the network receives it before normalization, `[H, W, 3]` u8.

    Raises:
      BadImage: it cannot be decoded.
      UserError: it is not an image.
    """
    prepared = transforms.eval_transform(self.recipe, self.image_px)(Record(decode(image, self.decoding)))
    return np.asarray(prepared['image'])

  def _map(self, images: Images, function: Callable[[Array], Array | None], *, prepared: bool = False) -> HostArray:
    """Applies `function` to any number of outputs of `prepare`, `[B, H, W, 3]` u8, in batches of a few sizes."""
    all_images = list(listed(images))
    if not all_images:
      raise UserError('images: expected at least one image, got none. Pass images.')
    results = []
    for start in range(0, len(all_images), self._batch_size):
      batch = np.stack([np.asarray(image) if prepared else self._prepare(image)
                        for image in all_images[start:start + self._batch_size]])
      size = min(self._batch_size, 1 << (len(batch) - 1).bit_length())  # a power of two: few sizes are compiled
      padded = np.concatenate([batch, np.repeat(batch[:1], size - len(batch), 0)])
      results.append(np.asarray(function(jnp.asarray(padded)))[:len(batch)])
    return np.concatenate(results)

  def _prepare(self, image: ImageLike) -> HostArray:
    """Like `prepare`, with the path in the error."""
    try:
      return self.prepare(image)
    except headers.BadImage as error:
      if isinstance(image, str | os.PathLike):
        raise headers.BadImage(f'{os.fspath(image)}: {error}') from error
      raise

  def _find_depth(self, layer: int, *, least: int) -> int:
    """Returns the index of a block, which may be counted from the end."""
    depth = layer + self.num_layers + 1 if layer < 0 else layer
    if least <= depth <= self.num_layers:
      return depth
    if not self.num_layers:
      raise UserError(f'layer: expected None, as {type(self.weights.model).__name__} has no blocks, got {layer}. '
                      'Leave it out.')
    raise UserError(f'layer: expected {least} to {self.num_layers}, or -1 for the last block, got {layer}. Choose one '
                    'of these blocks.')

  @functools.cached_property
  def head(self) -> Callable[[Features], Array] | None:
    """Maps features to logits; None without a head."""
    return inference.head(self.weights, self._params)

  def normalize(self, images: HostArray | Array) -> Array:
    """Normalizes outputs of `prepare`, `[B, H, W, 3]` u8 to f32."""
    return self._normalize(jnp.asarray(images))

  @functools.cached_property
  def driver(self) -> Driver:
    """The backbone, for running it layer by layer."""
    backbone: Any = inference.backbone(self.weights)
    return Driver(backbone, self._params['backbone'], self._params['state'])

  @property
  def grid(self) -> tuple[int, int]:
    """`(h, w)` of the patch tokens."""
    patch = self.weights.model.patch  # type: ignore[union-attr]
    return self.image_px[0] // patch, self.image_px[1] // patch
