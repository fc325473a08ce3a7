"""`--job=export`: a network in one file that runs without this project, as StableHLO or ONNX.

Each file is read back and run before it is called done, on several numbers of images, and has to give what the
network here gives. What is exported is f32, whatever the weights' run computed in.
"""
from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray
from vit_jax.data.pipeline import transforms
from vit_jax.export import onnx
from vit_jax.jobs import runtime as startup
from vit_jax.record import destination
from vit_jax.weights import inference, loading
from vit_jax.weights.loading import Weights

PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')
SUFFIXES = ('.stablehlo', '.onnx')
TOLERANCE = 1e-4  # of the largest output, or of 1 if that is smaller
NUM_IMAGES = (1, 3)  # that a file is tried on


class Subject(NamedTuple):
  """What is exported: `function` of an image like `image`, and the name of what it gives."""
  function: Callable[[Array], Array]
  image: jax.ShapeDtypeStruct
  output: str


def run(weights: str, to: pathlib.Path, *, preprocess: str, model: str, view: str, from_pixels: bool) -> int:
  """Exports weights, given as for `weights.loading.load`; exit status 0."""
  check(to)
  startup.start()
  found = loading.load(weights, preprocess=preprocess, model=model, view=view)
  print(loading.text(found))
  write(found, to, from_pixels=from_pixels)
  return 0


def check(to: pathlib.Path) -> pathlib.Path:
  """Where to write, before anything is read.

  Raises:
    UserError: the suffix is not known, there is something already, or the directory that it would be in does not exist.
  """
  path = destination.checked(to)
  if path.suffix not in SUFFIXES:
    raise UserError(f'--to: expected a name that ends in {" or ".join(SUFFIXES)}, got {to}. Change it.')
  for one in (path, path.with_name(onnx.beside(path))):
    if one.exists() or one.is_symlink():
      raise UserError(f'--to: expected a path where nothing is, got {to}, and {one.name} exists. Choose another.')
  return path


def write(weights: Weights, to: pathlib.Path, *, from_pixels: bool) -> None:
  """Exports weights, and prints what the file is.

  Args:
    weights: loaded.
    to: a file that is not there yet; its suffix says the format.
    from_pixels: the input is uint8 of the network's size, and normalised inside.

  Raises:
    UserError: as `check`, or the file gives something else than the network; it is not kept then.
  """
  to = check(to)
  subject, about = make_subject(weights, from_pixels=from_pixels), describe(weights, from_pixels=from_pixels)
  with tempfile.TemporaryDirectory(dir=to.parent, prefix='.export') as folder:
    part = pathlib.Path(folder) / to.name
    if to.suffix == '.onnx':
      onnx.write(part, subject.function, inference.parameters(weights), subject.image, output=subject.output,
                        about=about)
      difference = compare(subject, lambda image: onnx.run(part, image))
    else:
      part.write_bytes(to_stablehlo(subject))
      difference = compare(subject, from_stablehlo(part.read_bytes()))
    destination.publish(pathlib.Path(folder), to)
  shape = ', '.join(map(str, subject.image.shape[1:]))
  print(f'{weights.source} is in {to}: image [batch, {shape}] {subject.image.dtype} to {subject.output}. Read back and '
        f'run on {" and ".join(map(str, NUM_IMAGES))} images, it differs from the network by at most {difference:.1e} '
        f'of the largest number (allowed: {TOLERANCE:.0e}).')
  print('\n'.join(f'  {name}: {text if len(text) < 100 else text[:97] + "..."}' for name, text in about.items()),
        flush=True)


def make_subject(weights: Weights, *, from_pixels: bool) -> Subject:
  """The inference function of weights, with their parameters inside."""
  plain = {'dtype': schema.DType.F32} | ({'execution': schema.Execution.UNROLLED} if hasattr(
      weights.model, 'execution') else {})
  weights = weights._replace(model=dataclasses.replace(weights.model, **plain))  # type: ignore[arg-type]
  infer, params, recipe = inference.function(weights), inference.parameters(weights), inference.eval_recipe(weights)

  def function(image: Array) -> Array:
    found = infer(params, transforms.normalize(image, recipe) if from_pixels else image)
    return found.features.pooled if found.logits is None else found.logits

  image = jax.ShapeDtypeStruct((1, *weights.preprocess.image_px, 3), jnp.uint8 if from_pixels else jnp.float32)
  return Subject(function, image, 'logits' if weights.num_classes else 'features')


def describe(weights: Weights, *, from_pixels: bool) -> dict[str, str]:
  """What a user of the file has to know, as properties."""
  how = weights.preprocess
  height, width = how.image_px
  resize = f'short side to {how.resize_px} px, then the middle {height} x {width}' if how.resize_px else \
      f'to {height} x {width} px'
  filtered = f'{how.interpolation.value}{", antialiased" if how.antialias else ""}'
  mean, std = (', '.join(f'{x:g}' for x in three) for three in (how.mean, how.std))
  values = 'RGB from 0 to 255; normalised inside' if from_pixels else f'(RGB / 255 - [{mean}]) / [{std}]'
  return {'source': weights.source, 'resize': f'{resize}, {filtered}', 'values': values,
          'classes': json.dumps(list(weights.class_names)) if weights.class_names else 'not known'}


def compare(subject: Subject, runner: Callable[[HostArray], HostArray]) -> float:
  """The largest difference between an exported file and the network, over its largest number or 1.

  Raises:
    UserError: it is above `TOLERANCE`.
  """
  rng, worst = np.random.default_rng(0), 0.
  for num in NUM_IMAGES:
    pixels = rng.integers(0, 256, (num, *subject.image.shape[1:]), dtype=np.uint8)
    image = pixels if subject.image.dtype == jnp.uint8 else (pixels / 127.5 - 1).astype(np.float32)
    want, got = np.asarray(jax.jit(subject.function)(image)), np.asarray(runner(image))
    if want.shape != got.shape:
      raise UserError(f'the file gives {subject.output} {got.shape} for {num} images, the network {want.shape}')
    worst = float(np.maximum(worst, np.abs(want - got).max() / max(1., np.abs(want).max())))  # nan stays
  if not worst <= TOLERANCE:
    raise UserError(f'the file gives {subject.output} that differ from the network by {worst:.1e} of the largest '
                    f'number; allowed is {TOLERANCE:.0e}. It was not kept.')
  return worst


def to_stablehlo(subject: Subject) -> bytes:
  """The function as `jax.export` serialises it, for any number of images and each of `PLATFORMS`.

  Raises:
    UserError: the parameters are too many for one such file.
  """
  batch, = export.symbolic_shape('batch')
  image = jax.ShapeDtypeStruct((batch, *subject.image.shape[1:]), subject.image.dtype)
  return bytes(export.export(jax.jit(subject.function), platforms=PLATFORMS)(image).serialize())


def from_stablehlo(content: bytes) -> Callable[[HostArray], HostArray]:
  """The function that such bytes hold; needs jax and nothing of this project."""
  call = jax.jit(export.deserialize(bytearray(content)).call)
  return lambda image: np.asarray(call(image))
