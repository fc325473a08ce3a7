"""`--job=export`: writes a network as one file that runs without this project, StableHLO or ONNX.

Each file is read back and run on several batch sizes, and must give the same results as the network. Networks are
exported in f32, independent of the dtype that they were trained in; ONNX files can have their products in int8.
"""
from __future__ import annotations

import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from vit_jax.config import files as config_files
from vit_jax.config import schema
from vit_jax.config.schema.checks import kind
from vit_jax.config.schema.data import RGB
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray, Params
from vit_jax.data.device.prepare import normalize
from vit_jax.data.image import transform as transforms
from vit_jax.data.sources import opening
from vit_jax.export import int8, onnx
from vit_jax.jobs import evaluate_weights, flag_names
from vit_jax.jobs import runtime as startup
from vit_jax.record import console, destination
from vit_jax.weights import card, inference, loading
from vit_jax.weights.network import Weights
from vit_jax.weights.reading import Reading

PLATFORMS = ('cpu', 'cuda', 'rocm', 'tpu')
SUFFIXES = ('.stablehlo', '.onnx')
TOLERANCE = 1e-4  # relative to the largest output, or to 1 if that is smaller
NUM_IMAGES = (1, 3)  # batch sizes of the check


class Subject(NamedTuple):
  """The function to export, its input, and the name of its output."""
  function: Callable[[Array], Array]
  image: jax.ShapeDtypeStruct
  output: str
  multiple: int = 0  # px, of any height and width that the function takes; 0 = those of `image` alone


class Calibration(NamedTuple):
  """Images on which the ranges of int8 are measured; see `int8.quantize`."""
  images: HostArray
  min_sqnr: float


def run(weights: str, to: pathlib.Path, *, reading: Reading, from_pixels: bool, any_size: bool, texts: bool = False,
        tokenizer: str = '', quantize: str = '', data: str = '', split: str = '', images: int = 64,
        min_sqnr: float = 20.) -> int:
  """Exports weights, given as for `weights.loading.load`; exit status 0.

  Args:
    weights, reading: see `weights.loading.load`.
    to, from_pixels, any_size: see `write`.
    texts: the text tower and the tokenizer are exported, too.
    tokenizer: a file; '' = the one beside the weights.
    quantize: '' or `int8`, of the products of an ONNX file.
    data, split, images: source, split ('' = `train`) and number of images on which the ranges of int8 are measured.
    min_sqnr: dB, products with a larger error in int8 stay in float32.

  Raises:
    UserError: flags contradict each other, or as `write`.
  """
  _check_flags(to, texts=texts, tokenizer=tokenizer, quantize=quantize, data=data)
  if texts:
    from vit_jax.export import towers  # only here: it reads text towers
    towers.check(to)
  check(to)
  startup.start()
  console.begin_stage('loading the weights')
  found = loading.load(weights, **reading._asdict())
  console.end_stage()
  print(loading.text(found))
  calibration = None
  if quantize:
    console.begin_stage('reading images')
    calibration = Calibration(_read_images(found, data, split or 'train', images, from_pixels=from_pixels), min_sqnr)
    console.end_stage()
  console.begin_stage('exporting, running the result beside the network')
  if texts:
    towers.write(found, to, from_pixels=from_pixels, any_size=any_size, tokenizer=tokenizer)
    return 0
  write(found, to, from_pixels=from_pixels, any_size=any_size, calibration=calibration)
  return 0


def _read_images(weights: Weights, data: str, split: str, number: int, *, from_pixels: bool) -> HostArray:
  """Returns images that lie evenly in a source, `[N, H, W, C]`, as the exported file takes them."""
  if not isinstance(weights.model, schema.ViT | schema.Mixer):
    raise UserError(f'--quantize: expected a Vision Transformer or a Mixer, got {type(weights.model).__name__}, whose '
                    'convolutions stay in float32. Leave --quantize out.')
  config = evaluate_weights.with_weights(config_files.load('evaluate', []), weights, ())
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, source=data))
  with flag_names.shown({'data.source': '--data'}):
    source = opening.open_split(config.data, split, image_px=config.image_px)
  if not len(source):
    raise UserError(f'--data: expected at least one image, got none in {source.name}. Choose another --split.')
  transform = transforms.eval_transform(config.data.recipe, config.image_px)
  rows = np.linspace(0, len(source) - 1, min(number, len(source))).astype(int)
  pixels = np.stack([transform(source[int(row)])['image'] for row in rows])
  return pixels if from_pixels else np.asarray(normalize(jnp.asarray(pixels), inference.eval_recipe(weights)))


def check(to: pathlib.Path) -> pathlib.Path:
  """Checks the output path before anything is read, and returns it.

  Raises:
    UserError: the suffix is unknown, the file exists, or its directory does not exist.
  """
  path = destination.checked(to)
  if path.suffix not in SUFFIXES:
    raise UserError(f'--to: expected a name that ends in {" or ".join(SUFFIXES)}, got {to}. Change it.')
  for one in (path, path.with_name(onnx.beside(path)), path.with_name(table_name(path))):
    if one.exists() or one.is_symlink():
      raise UserError(f'--to: expected a new path, got {to}, and {one.name} exists. Choose another path.')
  return path


def table_name(path: pathlib.Path) -> str:
  """Returns the name of the file with the errors of products in int8."""
  return f'{path.name}.int8.json'


def _check_flags(to: pathlib.Path, *, texts: bool, tokenizer: str, quantize: str, data: str) -> None:
  """Raises UserError if flags contradict each other."""
  if tokenizer and not texts:
    raise UserError('--tokenizer: expected --texts as well, got --tokenizer alone. Set --texts to export the text '
                    'tower.')
  if texts and quantize:
    raise UserError(f'--quantize: expected an export without --texts, got {quantize}. Leave one of them out.')
  if quantize and to.suffix != '.onnx':
    raise UserError(f'--quantize: expected --to=FILE.onnx, got {to}. StableHLO is exported in float32.')
  if bool(quantize) != bool(data):
    wanted = 'images for' if quantize else 'none without'
    raise UserError(f'--data: expected {wanted} --quantize, got {data or "none"}. ' + (
        'Set --data=folder:PATH, to measure ranges on them.' if quantize else 'Set --quantize=int8.'))


def write(weights: Weights, to: pathlib.Path, *, from_pixels: bool, any_size: bool = False,
          calibration: Calibration | None = None) -> None:
  """Exports weights, and prints a description of the file.

  Args:
    weights: loaded.
    to: a new file; its suffix selects the format.
    from_pixels: the input is uint8 of the network's size, and is normalized inside.
    any_size: the input may have any height and width that the patches tile.
    calibration: products of the ONNX file are in int8, with ranges of these images; None = all of it is in float32.

  Raises:
    UserError: as `check` and `int8.quantize`, the network takes one size of images only, or the results of the file
      differ from those of the network; then no file is kept.
  """
  to = check(to)
  subject = make_subject(weights, from_pixels=from_pixels, any_size=any_size)
  about = describe(weights, from_pixels=from_pixels, multiple=subject.multiple)
  quantized = None
  with tempfile.TemporaryDirectory(dir=to.parent, prefix='.export') as folder, \
      tempfile.TemporaryDirectory(dir=to.parent, prefix='.export_float32') as scratch:
    part = pathlib.Path(folder) / to.name
    exact = pathlib.Path(scratch) / to.name if calibration else part
    difference = write_subject(subject, exact, params=inference.parameters(weights), about=about)
    if calibration:
      quantized = int8.quantize(exact, part, calibration.images, min_sqnr=calibration.min_sqnr)
      part.with_name(table_name(part)).write_text(json.dumps(quantized.plain(), indent=1) + '\n', encoding='utf-8')
    card.place(card.text(weights, to.name, written_as=to.suffix[1:],
                         how=checked(difference, subject.multiple, quantized), from_pixels=from_pixels), part, to)
    sizes = [sum(one.stat().st_size for one in (path, path.with_name(onnx.beside(path))) if one.exists()) / 1e6
             for path in ((exact, part) if calibration else ())]
    destination.publish(pathlib.Path(folder), to)
  console.end_stage()
  shape = ', '.join(map(str, ('height', 'width', weights.channels) if subject.multiple else subject.image.shape[1:]))
  print(f'Exported {weights.source} to {to}: image [batch, {shape}] {subject.image.dtype} to {subject.output}. For '
        f'{" and ".join(map(str, NUM_IMAGES))} images, its results{" in float32" if quantized else ""} differ from '
        f'those of the network by at most {difference:.1e} of the largest value (allowed: {TOLERANCE:.0e}).')
  if quantized:
    print(_int8_text(quantized, sizes, to))
  print('\n'.join(f'  {name}: {text if len(text) < 100 else text[:97] + "..."}' for name, text in about.items()),
        flush=True)


def write_subject(subject: Subject, path: pathlib.Path, *, params: Params, about: Mapping[str, str]) -> float:
  """Writes one function, and returns the largest difference from its results; raises as `compare`."""
  if path.suffix == '.onnx':
    onnx.write(path, subject.function, params, subject.image, output=subject.output, about=about,
               multiple=subject.multiple)
    return compare(subject, lambda image: onnx.run(path, image))
  path.write_bytes(to_stablehlo(subject))
  return compare(subject, from_stablehlo(path.read_bytes()))


def _int8_text(found: int8.Quantized, sizes: Sequence[float], to: pathlib.Path) -> str:
  kept = sum(one.sqnr < found.min_sqnr for one in found.products)
  return (f'{len(found.products) - kept} of {len(found.products)} products are in int8, with ranges of '
          f'{found.num_images} images, on which {found.agreement:.1%} of the predictions are those of float32 (output '
          f'signal-to-noise ratio {found.sqnr:.1f} dB). The file has {sizes[1]:.1f} MB, in float32 {sizes[0]:.1f}.\n'
          f'Signal-to-noise ratio of each product alone, in dB (* below {found.min_sqnr:g}: stays in float32), also in '
          f'{table_name(to)}:\n{found.table()}')


def checked(difference: float, multiple: int, quantized: int8.Quantized | None = None) -> str:
  """Returns what was checked of a file, for its card."""
  sizes = f', and any height and width that are multiples of {multiple} px' if multiple else ''
  more = (f' Then products were quantized to int8: {quantized.agreement:.1%} of the predictions for '
          f'{quantized.num_images} images are those of float32.') if quantized else ''
  return (f'Exported by vit_jax in float32 for any batch size{sizes}: the largest difference from the network is '
          f'{difference:.0e} of the largest output.{more}')


def make_subject(weights: Weights, *, from_pixels: bool, any_size: bool = False) -> Subject:
  """Returns the inference function of weights, with their parameters inside.

  Raises:
    UserError: `any_size`, and the network takes one size of images only.
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
  plain = {'dtype': schema.DType.F32} | ({'execution': schema.Execution.UNROLLED} if hasattr(
      weights.model, 'execution') else {})
  weights = weights._replace(model=dataclasses.replace(weights.model, **plain))  # type: ignore[arg-type]
  infer, params, recipe = inference.function(weights), inference.parameters(weights), inference.eval_recipe(weights)

  def function(image: Array) -> Array:
    found = infer(params, normalize(image, recipe) if from_pixels else image)
    return found.features.pooled if found.logits is None or is_pooled else found.logits

  return function


def _multiple(weights: Weights) -> int:
  """Returns the px of which sides of images are multiples.

  Raises:
    UserError: the network takes one size of images only.
  """
  m = weights.model
  if isinstance(m, schema.ViT) and isinstance(m.stem, schema.PatchStem) and m.positions.is_resizable:
    return m.patch
  what = f'{kind(m.positions)} positions' if isinstance(m, schema.ViT) and not m.positions.is_resizable else \
      'a stem of convolutions' if isinstance(m, schema.ViT) else f'the network {type(m).__name__}'
  raise UserError(f'--any_size: expected a Vision Transformer of patches whose positions can be resized, got {what}. '
                  'Export it for one size, which --preprocess=image=HEIGHTxWIDTH sets where it can be set.')


def describe(weights: Weights, *, from_pixels: bool, multiple: int = 0) -> dict[str, str]:
  """Returns what a user of the file needs to know, as properties."""
  how = weights.preprocess
  height, width = how.image_px
  resize = f'short side to {how.resize_px} px, then center crop of {height} x {width}' if how.resize_px else \
      f'to {height} x {width} px'
  filtered = f'{how.interpolation.value}{", antialiased" if how.antialias else ""}'
  mean, std = (', '.join(f'{x:g}' for x in three) for three in (how.mean, how.std))
  values = 'RGB from 0 to 255; normalized inside' if from_pixels else f'(RGB / 255 - [{mean}]) / [{std}]'
  if weights.channels != RGB:
    values = f'(channels - [{mean}]) / [{std}]'
  resize = f'any height and width that are multiples of {multiple} px; of the weights: {resize}' if multiple else resize
  return {'source': weights.source, 'resize': f'{resize}, {filtered}', 'values': values,
          'classes': json.dumps(list(weights.class_names)) if weights.class_names else 'not known'}


def compare(subject: Subject, runner: Callable[[HostArray], HostArray]) -> float:
  """Returns the largest difference between an exported file and the network, relative to the largest output or 1.

  Raises:
    UserError: the shapes differ, or the difference is above `TOLERANCE`.
  """
  rng, worst = np.random.default_rng(0), 0.
  function = jax.jit(subject.function)
  for side in sizes(subject):
    pixels = rng.integers(0, 256, (max(NUM_IMAGES), *side, subject.image.shape[-1]), dtype=np.uint8)
    image = pixels if subject.image.dtype == jnp.uint8 else (pixels / 127.5 - 1).astype(np.float32)
    whole = np.asarray(function(image))  # compiled once a size, as results do not depend on the batch
    for num in NUM_IMAGES:
      got = np.asarray(runner(image[:num]))
      worst = float(np.maximum(worst, difference(whole[:num], got, what=subject.output)))  # keeps nan
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
