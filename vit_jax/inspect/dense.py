"""`vit-jax inspect --dense`: pictures of the patch tokens of images, one file for each image, and a page.

- The first three principal components of the tokens of all images together, as red, green and blue; with `foreground`
  also those of the foreground alone, which is where the first component of an image exceeds a threshold (after DINOv2,
  arXiv 2304.07193, Figure 1).
- The classes that a linear probe gives to the pixels, from `vit-jax evaluate --config=dense_probe`.
- Its errors, if there are masks.

Each image is resized to the size of the network's input without preserving its aspect ratio, as in the evaluation with
masks, and drawn in its own.
"""
from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit_jax.core import archives, failures
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.image import geometry, masks
from vit_jax.data.image.decode import Window
from vit_jax.evaluate import pixels
from vit_jax.evaluate.segmentation import Probe
from vit_jax.inspect import embeddings, figures, html_pages
from vit_jax.inspect.model import Model
from vit_jax.inspect.page import Figure
from vit_jax.record import storage
from vit_jax.weights import inference

LONG_PX = 448  # long side of a drawn image
_WRONG = np.array([230, 30, 30])
_SUFFIXES = masks.EXTENSIONS


class Options(NamedTuple):
  """What is drawn: a probe and masks if any, the threshold of the foreground (0 = none), and the block (0 = last)."""
  probe: str = ''
  masks: str = ''
  foreground: float = 0.
  block: int = 0


class Drawn(NamedTuple):
  """The panels of an image by title, the classes of its pixels by title, and the confusion matrix `[C, C]`."""
  before: dict[str, HostArray]
  found: dict[str, HostArray]
  after: dict[str, HostArray]
  matrix: HostArray | None


def write(network: Model, name: str, images: Sequence[HostArray], paths: Sequence[str], to: pathlib.Path,
          options: Options) -> str:
  """Writes `dense/NAME.png` for each image, `dense.npz` and `report.html`; returns a sentence.

  Args:
    network: of any kind that has patch tokens.
    name: of the network, for the page.
    images: `[H, W, 3]` u8 of any sizes.
    paths: of the images.
    to: folder to write to.
    options: what to draw.

  Raises:
    UserError: the probe does not fit to the network, or a mask is missing or does not fit to its image.
  """
  probe = read_probe(options.probe) if options.probe else None
  if options.masks and probe is None:
    raise UserError('--masks: expected --probe as well, whose errors are shown, got --masks alone. Set --probe=RUN to '
                    'a run of vit-jax evaluate --config=dense_probe.')
  stems = [pathlib.Path(path).stem for path in paths]
  if options.masks and (twice := next((stem for stem in stems if stems.count(stem) > 1), None)) is not None:
    raise UserError(f'--masks: expected images of different names, as each has the mask of its name, got several named '
                    f'{twice}. Inspect them in separate commands.')
  resized = np.stack([_resized(network, image) for image in images])
  tokens = network.features(resized, layer=options.block or None, as_grid=True, norm=bool(options.block), prepared=True)
  grids = tokens.shape[:3]
  rows = tokens.reshape(-1, tokens.shape[-1]).astype(np.float64)
  found = embeddings.principal(rows)
  colors = {'principal components': embeddings.to_unit(found.parts).reshape(*grids, 3)}
  if options.foreground:
    colors['foreground alone'] = _of_foreground(tokens, options.foreground)
  scores = None if probe is None else probe.score(_probed(network, resized, probe))
  class_names = () if probe is None else tuple(map(str, probe.class_names))
  drawn = [_draw(image, path, {title: one[i] for title, one in colors.items()}, None if scores is None else scores[i],
                 probe, options.masks, network.image_px)
           for i, (image, path) in enumerate(zip(images, paths, strict=True))]
  matrices = [one.matrix for one in drawn if one.matrix is not None]
  if matrices and not np.any(matrices):
    raise UserError(f'--masks: expected a pixel that counts, got none in the masks of {options.masks}. Choose other '
                    'masks.')
  pictures = _write_pictures(to / 'dense', images, paths, drawn, class_names)
  arrays = {'components': found.parts.reshape(*grids, 3), 'share': found.share}
  np.savez_compressed(to / 'dense.npz', **arrays if scores is None else arrays | {'scores': scores})  # type: ignore[arg-type]
  text = _numbers(found.share, pixels.scores(np.sum(matrices, 0)) if matrices else None)
  _write_page(to, name, network, pictures, text)
  return text


def read_probe(where: str) -> Probe:
  """Returns the probe of a run of `vit-jax evaluate`, or of one of the files in its folder `probes`.

  Raises:
    UserError: there is no such file, or it is another one.
  """
  path = pathlib.Path(where)
  files = [path] if path.is_file() else sorted(path.glob('probes/*.npz'))
  if len(files) != 1:
    raise UserError(f'--probe: expected a run with one probe in {where}/probes, got {len(files)}'
                    + (f': {", ".join(file.name for file in files)}. Name the file.' if files else
                       '. Make one: vit-jax evaluate --config=dense_probe --weights=… --workdir=RUN.'))
  try:
    return Probe(**archives.read_npz(files[0], Probe._fields))
  except OSError as error:
    raise failures.unreadable(error, f'--probe={files[0]}') from error
  except (ValueError, TypeError) as error:
    got = ('which has other arrays' if isinstance(error, TypeError) else
           f'which cannot be read ({failures.first_line(error)})')
    raise UserError(f'--probe: expected a probe of vit-jax evaluate, got {files[0]}, {got}. Run the evaluation '
                    'again.') from error


def _resized(network: Model, image: HostArray) -> HostArray:
  """Returns an image at the size of the network's input, without preserving its aspect ratio."""
  recipe = inference.eval_recipe(network.weights)
  interpolation, antialias = geometry.eval_resampling(recipe)
  return geometry.resize_part(image, network.image_px, Window(0, 0, *network.image_px), antialias=antialias,
                              interpolation=interpolation, truncate=recipe.truncate)


def _probed(network: Model, resized: HostArray, probe: Probe) -> HostArray:
  """Returns the tokens that a probe reads, `[B, h, w, D]`."""
  blocks, norm = [int(block) for block in probe.blocks], bool(probe.norm)
  if not blocks and norm:
    found = network.features(resized, as_grid=True, prepared=True)
  else:
    found = network.features(resized, layers=blocks or [-1], as_grid=True, norm=norm, prepared=True)
    found = np.concatenate(list(found), -1)
  if found.shape[-1] != len(probe.mean):
    raise UserError(f'--probe: expected a probe of tokens of width {found.shape[-1]}, as these weights have them, got '
                    f'one of {len(probe.mean)}. Use the weights that the probe was fitted to.')
  return found


def _of_foreground(tokens: HostArray, threshold: float) -> HostArray:
  """Returns the colors `[B, h, w, 3]` of the principal components of the foreground; the background is black."""
  is_in = np.stack([embeddings.foreground(one, threshold) for one in tokens])
  colors = np.zeros((*is_in.shape, 3))
  if is_in.sum() > len(colors[0, 0, 0]):
    colors[is_in] = embeddings.to_unit(embeddings.principal(tokens[is_in].astype(np.float64)).parts)
  return colors


def _draw(image: HostArray, path: str, colors: dict[str, HostArray], scores: HostArray | None, probe: Probe | None,
          folder: str, window: tuple[int, int]) -> Drawn:
  size = _drawn_px(image)
  before = {title: figures.blocks(values, size) for title, values in colors.items()}
  if scores is None or probe is None:
    return Drawn(before, {}, {}, None)
  predicted = _at_pixels(scores, image.shape[:2], window)
  found = {'prediction': predicted}
  after: dict[str, HostArray] = {}
  matrix = None
  if folder:
    true = _read_mask(folder, path, image.shape[:2], probe)
    found['labels'] = true
    matrix = pixels.count(true, predicted, len(probe.class_names))
    gray = np.repeat(np.asarray(Image.fromarray(image).convert('L'))[..., None], 3, -1)
    wrong = (true >= 0) & (predicted != true)
    errors = np.where(wrong[..., None], np.round(.3 * gray + .7 * _WRONG), .6 * gray + 60).astype(np.uint8)
    share = wrong.sum() / max((true >= 0).sum(), 1)
    after[f'errors: {share:.1%} of the pixels'] = _at(errors, size)
  return Drawn(before, {title: masks.resize(one, size) for title, one in found.items()}, after, matrix)


def _at_pixels(scores: HostArray, size: tuple[int, ...], window: tuple[int, int]) -> HostArray:
  """Returns the class of each pixel of an image, `[H, W]` i32, from scores of tokens `[h, w, C]`."""
  rows, columns = (pixels.spans(size[axis], window[axis], window[axis], window[axis], scores.shape[axis])
                   for axis in (0, 1))
  return pixels.upsample(scores[None].astype(np.float32), rows, columns, (size[0], size[1]))


def _read_mask(folder: str, path: str, size: tuple[int, ...], probe: Probe) -> HostArray:
  """Returns the class of each pixel by the mask of an image, `[H, W]` i32; -1 where it does not count."""
  stem = pathlib.Path(path).stem
  file = next((one for suffix in _SUFFIXES if (one := pathlib.Path(folder, f'{stem}{suffix}')).is_file()), None)
  if file is None:
    raise UserError(f'--masks: expected {stem}.png (or {", ".join(_SUFFIXES[1:])}) in {folder}, as for every image, '
                    'got no such file. Add the mask, or leave the image out.')
  first, ignore = (int(value) for value in probe.values)
  try:
    content = file.read_bytes()
  except OSError as error:
    raise failures.unreadable(error, str(file)) from error
  try:
    values = masks.decode(content, size=(size[0], size[1]))
    return masks.classes(values, masks.MaskValues(first, ignore, len(probe.class_names)))
  except masks.WrongSize as error:
    raise UserError(f'{file}: expected {size[0]} x {size[1]} px, the size of {path}, got {error}. '
                    'Make the mask in the size of its image.') from error
  except masks.BadMask as error:
    raise UserError(f'{file}: {error}.') from error


def _drawn_px(image: HostArray) -> tuple[int, int]:
  factor = LONG_PX / max(image.shape[:2])
  return max(1, round(image.shape[0] * factor)), max(1, round(image.shape[1] * factor))


def _at(image: HostArray, size: tuple[int, int]) -> HostArray:
  return np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BICUBIC))


def _write_pictures(folder: pathlib.Path, images: Sequence[HostArray], paths: Sequence[str], drawn: Sequence[Drawn],
                    class_names: Sequence[str]) -> list[Figure]:
  """Writes a picture for each image, and returns them for the page; files of equal names are numbered."""
  folder.mkdir(parents=True, exist_ok=True)
  stems = [pathlib.Path(path).stem for path in paths]
  found = []
  for number, (image, one) in enumerate(zip(images, drawn, strict=True)):
    stem = stems[number] if stems.count(stems[number]) == 1 else f'{stems[number]}_{number}'
    while stem in stems and stem != stems[number]:
      stem += '_'
    picture = pixels.draw(_at(image, _drawn_px(image)), one.found, class_names, before=one.before,
                                after=one.after)
    png = html_pages.to_png(picture)
    (folder / f'{stem}.png').write_bytes(png)
    found.append(Figure(stem, png, paths[number], is_sheet=True))
  return found


def _numbers(share: HostArray, scores: pixels.Scores | None) -> str:
  text = f'The three components have {", ".join(f"{part:.1%}" for part in share)} of the variance of the tokens.'
  return text if scores is None else (
      f'{text} Over these images: mIoU {scores.miou:.2%}, accuracy {scores.accuracy:.2%} of the pixels.')


def _write_page(to: pathlib.Path, name: str, network: Model, pictures: Sequence[Figure], text: str) -> None:
  rows = [[name, network.weights.family, len(pictures), f'{network.grid[0]} × {network.grid[1]}']]
  page = html_pages.render('inspection.html', title=f'{name} – dense features', names=[name],
                           head=['weights', 'family', 'images', 'patches'], rows=rows, sections=[(text, pictures)])
  (to / 'report.html').write_bytes(storage.encode(page))
