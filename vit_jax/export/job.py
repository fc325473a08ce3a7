"""`--job=export`: writes a network as one file that runs without this project, StableHLO or ONNX.

Each file is read back and run on several batch sizes, and must give the same results as the network. Networks are
exported in f32, independent of the dtype that they were trained in; ONNX files can have their products in int8.
"""
from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from vit_jax.config import files as config_files
from vit_jax.config import schema
from vit_jax.core import failures, files
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import opening, orientation, splits
from vit_jax.data.device.prepare import normalize
from vit_jax.data.image import transform as transforms
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import read_one, reading_error
from vit_jax.export import functions, int8, onnx
from vit_jax.jobs import evaluate, flag_names, startup
from vit_jax.record import console, destination
from vit_jax.weights import card, inference, loading
from vit_jax.weights.hints import Reading
from vit_jax.weights.network import Weights

IMAGES, MIN_SQNR = 64, 20.
"""Images on which ranges are measured, and dB of error up to which a product is in int8, unless flags say otherwise."""


class Calibration(NamedTuple):
  """Images on which the ranges of int8 are measured; see `int8.quantize`."""
  images: HostArray
  min_sqnr: float


def run(weights: str, to: pathlib.Path, *, reading: Reading, from_pixels: bool, any_size: bool, texts: bool = False,
        tokenizer: str = '', quantize: str = '', data: str = '', split: str = '', images: int | None = None,
        min_sqnr: float | None = None) -> int:
  """Exports weights, given as for `weights.loading.load`; exit status 0.

  Args:
    weights, reading: see `weights.loading.load`.
    to, from_pixels, any_size: see `write`.
    texts: the text tower and the tokenizer are exported, too.
    tokenizer: a file; '' = the one beside the weights.
    quantize: '' or `int8`, of the products of an ONNX file.
    data, split: source and split ('' = `train`) of the images on which the ranges of int8 are measured.
    images: their number; None = 64.
    min_sqnr: dB, products with a larger error in int8 stay in float32; None = 20.

  Raises UserError if flags contradict each other, and as `write` does.
  """
  _check_flags(to, texts=texts, tokenizer=tokenizer, quantize=quantize, data=data,
               of_int8={'split': split or None, 'images': images, 'min_sqnr': min_sqnr})
  if texts:
    from vit_jax.export import towers  # only here: it reads text towers
    towers.check(to)
  functions.check(to)
  startup.start()
  console.begin_stage('loading the weights')
  loaded = loading.load(weights, **reading._asdict())
  console.end_stage()
  print(loading.text(loaded))
  calibration = None
  if quantize:
    console.begin_stage('reading images')
    measured = _read_images(loaded, data, split or 'train', IMAGES if images is None else images,
                            from_pixels=from_pixels)
    calibration = Calibration(measured, MIN_SQNR if min_sqnr is None else min_sqnr)
    console.end_stage()
  console.begin_stage('exporting, running the result beside the network')
  if texts:
    towers.write(loaded, to, from_pixels=from_pixels, any_size=any_size, tokenizer=tokenizer)
  else:
    write(loaded, to, from_pixels=from_pixels, any_size=any_size, calibration=calibration)
  return 0


def _read_images(weights: Weights, data: str, split: str, number: int, *, from_pixels: bool) -> HostArray:
  """Returns images that lie evenly in a source, `[N, H, W, C]`, as the exported file takes them."""
  if not isinstance(weights.model, schema.ViT | schema.Mixer):
    raise UserError(f'--quantize: expected a Vision Transformer or a Mixer, got {type(weights.model).__name__}, whose '
                    'convolutions stay in float32. Leave --quantize out.')
  config = evaluate.with_weights(config_files.load('evaluate', []), weights, ())
  config = dataclasses.replace(config, data=dataclasses.replace(config.data, source=data))
  with flag_names.naming_flags({'data.source': '--data', splits.SETTINGS: '--split'}):
    source = opening.open_split(config.data, split, image_px=config.image_px)
  if not len(source):
    raise UserError(f'--data: expected at least one image, got none in {source.name}. Choose another --split.')
  recipe = orientation.decide(config.data.recipe, source)
  transform = transforms.eval_transform(recipe, config.image_px)
  rows = np.linspace(0, len(source) - 1, min(number, len(source))).astype(int)

  def read(row: int) -> HostArray:
    try:
      example = failures.retried(lambda: transform(read_one(source, row)), f'reading {source.describe(row)}')
      return np.asarray(example['image'])
    except (BadImage, OSError) as error:
      raise reading_error(error, source, row, expected='an image') from error

  pixels = np.stack([read(int(row)) for row in rows])
  return pixels if from_pixels else np.asarray(normalize(jnp.asarray(pixels), inference.eval_recipe(weights)))


def _check_flags(to: pathlib.Path, *, texts: bool, tokenizer: str, quantize: str, data: str,
                 of_int8: Mapping[str, object]) -> None:
  """Raises UserError if flags contradict each other; `of_int8` has flags that need --quantize, None = not set."""
  if tokenizer and not texts:
    raise UserError('--tokenizer: expected --texts as well, got --tokenizer alone. Set --texts to export the text '
                    'tower.')
  if texts and quantize:
    raise UserError(f'--quantize: expected an export without --texts, got {quantize}. Leave one of them out.')
  if quantize and to.suffix != '.onnx':
    raise UserError(f'--quantize: expected --to=FILE.onnx, got {to}. StableHLO is exported in float32.')
  if quantize and not data:
    raise UserError('--data: expected images for --quantize, got none. Set --data=folder:PATH, to measure ranges on '
                    'them.')
  if data and not quantize:
    raise UserError(f'--data: expected none without --quantize, got {data}. Set --quantize=int8.')
  for name, value in of_int8.items():
    if value is not None and not quantize:
      raise UserError(f'--{name}: expected --quantize=int8 as well, got --{name}={value} alone. Remove it, or set '
                      '--quantize=int8 and --data.')


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
  to = functions.check(to)
  subject = functions.make_subject(weights, from_pixels=from_pixels, any_size=any_size)
  about = functions.describe(weights, from_pixels=from_pixels, multiple=subject.multiple)
  quantized = None
  with destination.staged(to, shown=str(to), is_ours=card.is_ours) as folder, files.staged(to.parent) as scratch:
    part = folder / to.name
    exact = scratch / to.name if calibration else part
    difference = functions.write_subject(subject, exact, params=inference.parameters(weights), about=about)
    if calibration:
      quantized = int8.quantize(exact, part, calibration.images, min_sqnr=calibration.min_sqnr)
      table = part.with_name(functions.table_name(part))
      table.write_text(json.dumps(quantized.plain(), indent=1) + '\n', encoding='utf-8')
    how = _describe_check(difference, subject.multiple, quantized)
    card.place(card.text(weights, to.name, written_as=to.suffix[1:], how=how, from_pixels=from_pixels), part, to)
    sizes_mb = [_size_mb(path) for path in ((exact, part) if calibration else ())]
  console.end_stage()
  shape = ', '.join(map(str, ('height', 'width', weights.channels) if subject.multiple else subject.image.shape[1:]))
  print(f'Exported {weights.source} to {to}: image [batch, {shape}] {subject.image.dtype} to {subject.output}. For '
        f'{" and ".join(map(str, functions.NUM_IMAGES))} images, its results{" in float32" * bool(quantized)} differ '
        f'from those of the network by at most {difference:.1e} of the largest value (allowed: '
        f'{functions.TOLERANCE:.0e}).')
  if quantized:
    print(_describe_int8(quantized, sizes_mb, to))
  print('\n'.join(f'  {name}: {text if len(text) < 100 else text[:97] + "..."}' for name, text in about.items()),
        flush=True)


def _size_mb(path: pathlib.Path) -> float:
  """Returns the size of an exported file, with that of the file of its parameters if there is one."""
  paths = (path, path.with_name(onnx.beside(path)))
  return sum(one.stat().st_size for one in paths if one.exists()) / 1e6


def _describe_check(difference: float, multiple: int, quantized: int8.Quantized | None) -> str:
  """Returns what was checked of the file, for its card."""
  text = functions.checked(difference, multiple)
  if quantized:
    text += (f' Then products were quantized to int8: {quantized.agreement:.1%} of the predictions for '
             f'{quantized.num_images} images are those of float32.')
  return text


def _describe_int8(quantized: int8.Quantized, sizes_mb: Sequence[float], to: pathlib.Path) -> str:
  """Returns what is printed of the products; `sizes_mb` are those of the files in float32 and in int8."""
  num_products = len(quantized.products)
  num_int8 = num_products - sum(product.sqnr < quantized.min_sqnr for product in quantized.products)
  return (f'{num_int8} of {num_products} products are in int8, with ranges of {quantized.num_images} images, on which '
          f'{quantized.agreement:.1%} of the predictions are those of float32 (output signal-to-noise ratio '
          f'{quantized.sqnr:.1f} dB). The file has {sizes_mb[1]:.1f} MB, in float32 {sizes_mb[0]:.1f}.\n'
          f'Signal-to-noise ratio of each product alone, in dB (* below {quantized.min_sqnr:g}: stays in float32), '
          f'also in {functions.table_name(to)}:\n{quantized.table()}')
