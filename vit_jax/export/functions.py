"""What is exported: a function of images, in f32, its two formats, and the check of a file against the network.

Each file is read back and run on several batch sizes, and must give the same results.
"""
from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from vit_jax.config import schema
from vit_jax.config.schema.checks import kind
from vit_jax.config.schema.data import RGB
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray, Params
from vit_jax.data.device.prepare import normalize
from vit_jax.export import onnx
from vit_jax.record import destination
from vit_jax.weights import inference
from vit_jax.weights.network import Weights

PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')
SUFFIXES = ('.stablehlo', '.onnx')
TOLERANCE = 1e-4  # relative to the largest output, or to 1 if that is smaller
NUM_IMAGES = (1, 3)  # batch sizes of the check


class Subject(NamedTuple):
  """The function to export, its input `[1, H, W, C]`, and the name of its output.

  multiple: px, the function takes any height and width that are multiples of it; 0 = those of `image` alone.
  """
  function: Callable[[Array], Array]
  image: jax.ShapeDtypeStruct
  output: str
  multiple: int = 0


def check(to: pathlib.Path) -> pathlib.Path:
  """Checks the output path before anything is read, and returns it.

  Raises UserError if the suffix is unknown, the file exists, or its directory does not exist.
  """
  path = destination.checked(to)
  if path.suffix not in SUFFIXES:
    raise UserError(f'--to: expected a name that ends in {" or ".join(SUFFIXES)}, got {to}. Change it.')
  for output in (path, path.with_name(onnx.beside(path)), path.with_name(table_name(path))):
    if output.exists() or output.is_symlink():
      raise UserError(f'--to: expected a new path, got {to}, and {output.name} exists. Choose another path.')
  return path


def table_name(path: pathlib.Path) -> str:
  """Returns the name of the file with the errors of products in int8."""
  return f'{path.name}.int8.json'


def write_subject(subject: Subject, path: pathlib.Path, *, params: Params, about: Mapping[str, str]) -> float:
  """Writes one function, and returns the largest difference from its results; raises as `compare`."""
  if path.suffix == '.onnx':
    onnx.write(path, subject.function, params, subject.image, output=subject.output, about=about,
               multiple=subject.multiple)
    return compare(subject, lambda image: onnx.run(path, image))
  path.write_bytes(to_stablehlo(subject))
  return compare(subject, from_stablehlo(path.read_bytes()))


def checked(difference: float, multiple: int) -> str:
  """Returns what was checked of a file, for its card."""
  sizes = f', and any height and width that are multiples of {multiple} px' if multiple else ''
  return (f'Exported by vit_jax in float32 for any batch size{sizes}: the largest difference from the network is '
          f'{difference:.0e} of the largest output.')


def make_subject(weights: Weights, *, from_pixels: bool, any_size: bool = False) -> Subject:
  """Returns the inference function of weights, with their parameters inside.

  Raises UserError if `any_size` is set, and the network takes one size of images only.
  """
  function = make_function(weights, from_pixels=from_pixels)
  if from_pixels:
    weights.check_rgb('--from_pixels')
  image = jax.ShapeDtypeStruct((1, *weights.preprocess.image_px, weights.channels),
                               jnp.uint8 if from_pixels else jnp.float32)
  return Subject(function, image, 'logits' if weights.num_classes else 'features',
                 _multiple(weights) if any_size else 0)


def make_function(weights: Weights, *, from_pixels: bool, is_pooled: bool = False) -> Callable[[Array], Array]:
  """Returns the logits of weights as a function of images, in f32; the features without a head, or if `is_pooled`."""
  f32 = {'dtype': schema.DType.F32, 'quantize': schema.Quantize.NONE, 'execution': schema.Execution.UNROLLED}
  f32 = {name: value for name, value in f32.items() if hasattr(weights.model, name)}
  weights = weights._replace(model=dataclasses.replace(weights.model, **f32))  # type: ignore[arg-type]
  infer, params, recipe = inference.function(weights), inference.parameters(weights), inference.eval_recipe(weights)

  def function(image: Array) -> Array:
    outputs = infer(params, normalize(image, recipe) if from_pixels else image)
    return outputs.features.pooled if outputs.logits is None or is_pooled else outputs.logits

  return function


def _multiple(weights: Weights) -> int:
  """Returns the px of which sides of images are multiples.

  Raises UserError if the network takes one size of images only.
  """
  m = weights.model
  if not isinstance(m, schema.ViT):
    what = f'the network {type(m).__name__}'
  elif not m.positions.is_resizable:
    what = f'{kind(m.positions)} positions'
  elif not isinstance(m.stem, schema.PatchStem):
    what = 'a stem of convolutions'
  else:
    return m.patch
  raise UserError(f'--any_size: expected a Vision Transformer of patches whose positions can be resized, got {what}. '
                  'Export it for one size, which --preprocess=image=HEIGHTxWIDTH sets where it can be set.')


def describe(weights: Weights, *, from_pixels: bool, multiple: int = 0) -> dict[str, str]:
  """Returns what a user of the file needs to know, as properties."""
  images = weights.preprocess
  height, width = images.image_px
  resize = f'to {height} x {width} px'
  if images.resize_px:
    resize = f'short side to {images.resize_px} px, then center crop of {height} x {width}'
  if multiple:
    resize = f'any height and width that are multiples of {multiple} px; of the weights: {resize}'
  mean, std = (', '.join(f'{x:g}' for x in by_channel) for by_channel in (images.mean, images.std))
  if weights.channels != RGB:
    values = f'(channels - [{mean}]) / [{std}]'
  else:
    values = 'RGB from 0 to 255; normalized inside' if from_pixels else f'(RGB / 255 - [{mean}]) / [{std}]'
  properties = {'source': weights.source}
  if images.exif_orientation is not None:
    properties['exif_orientation'] = 'applied' if images.exif_orientation else 'ignored'
  interpolation = f'{images.interpolation.value}{", antialiased" if images.antialias else ""}'
  return {**properties, 'resize': f'{resize}, {interpolation}', 'values': values,
          'classes': json.dumps(list(weights.class_names)) if weights.class_names else 'not known'}


def compare(subject: Subject, runner: Callable[[HostArray], HostArray]) -> float:
  """Returns the largest difference between an exported file and the network, relative to the largest output or 1.

  Raises UserError if the shapes differ, or the difference is above `TOLERANCE`.
  """
  rng, worst = np.random.default_rng(0), 0.
  function = jax.jit(subject.function)
  for size in sizes(subject):
    pixels = rng.integers(0, 256, (max(NUM_IMAGES), *size, subject.image.shape[-1]), dtype=np.uint8)
    images = pixels if subject.image.dtype == jnp.uint8 else (pixels / 127.5 - 1).astype(np.float32)
    expected = np.asarray(function(images))  # compiled once a size, as results do not depend on the batch
    for num in NUM_IMAGES:
      got = np.asarray(runner(images[:num]))
      worst = float(np.maximum(worst, difference(expected[:num], got, what=subject.output)))  # keeps nan
  return within(worst, what=subject.output)


def difference(expected: HostArray, got: HostArray, *, what: str) -> float:
  """Returns the largest difference of results, relative to the largest one or 1; raises UserError if shapes differ."""
  if expected.shape != got.shape:
    raise UserError(f'--to: expected {what} {expected.shape} for {len(expected)} images, got {got.shape} from the '
                    'file. The file was not kept.')
  return float(np.abs(expected - got).max() / max(1., np.abs(expected).max()))


def within(worst: float, *, what: str) -> float:
  """Returns the largest difference. Raises UserError if it is above `TOLERANCE`, or nan."""
  if not worst <= TOLERANCE:
    raise UserError(f'--to: expected a file whose {what} differ from those of the network by at most '
                    f'{TOLERANCE:.0e} of the largest value, got {worst:.1e}. The file was not kept.')
  return worst


def sizes(subject: Subject) -> list[tuple[int, int]]:
  """Returns the image sizes (height, width) of the check: the own one, and with free sides a wider and a higher one."""
  height, width = subject.image.shape[1:3]
  if not subject.multiple:
    return [(height, width)]
  rows, columns = (side // subject.multiple for side in (height, width))
  grids = [(rows, columns), (max(1, rows // 2), columns + 1), (rows + 1, max(1, columns // 2 + 1))]
  return [(h * subject.multiple, w * subject.multiple) for h, w in grids]


def to_stablehlo(subject: Subject) -> bytes:
  """Serializes the function with `jax.export`, for any batch size and all `PLATFORMS`."""
  image = onnx.free(subject.image, subject.multiple)
  return bytes(export.export(jax.jit(subject.function), platforms=PLATFORMS)(image).serialize())


def from_stablehlo(content: bytes) -> Callable[[HostArray], HostArray]:
  """Returns the function in serialized StableHLO; needs only jax."""
  call = jax.jit(export.deserialize(bytearray(content)).call)
  return lambda image: np.asarray(call(image))
