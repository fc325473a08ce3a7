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
_WRONG = np.array([230, 30, 30])  # color of wrong pixels, RGB


class Options(NamedTuple):
  """What is drawn: a probe and masks if any, the threshold of the foreground (0 = none), and the block (0 = last)."""
  probe: str = ''
  masks: str = ''
  foreground: float = 0.
  block: int = 0


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

  Raises UserError if the probe does not fit to the network, or a mask is missing or does not fit to its image.
  """
  probe = read_probe(options.probe) if options.probe else None
  if options.masks and probe is None:
    raise UserError('--masks: expected --probe as well, whose errors are shown, got --masks alone. Set --probe=RUN to '
                    'a run of vit-jax evaluate --config=dense_probe.')
  stems = [pathlib.Path(path).stem for path in paths]
  repeated = [stem for stem in stems if stems.count(stem) > 1]
  if options.masks and repeated:
    raise UserError(f'--masks: expected images of different names, as each has the mask of its name, got several named '
                    f'{repeated[0]}. Inspect them in separate commands.')
  resized = np.stack([_resized(network, image) for image in images])
  tokens = network.features(resized, layer=options.block or None, as_grid=True, norm=bool(options.block), prepared=True)
  grids = tokens.shape[:3]
  components = embeddings.principal(tokens.reshape(-1, tokens.shape[-1]).astype(np.float64))
  colors = {'principal components': embeddings.to_unit(components.parts).reshape(*grids, 3)}
  if options.foreground:
    colors['foreground alone'] = _color_foreground(tokens, options.foreground)
  scores = None if probe is None else probe.score(_read_probed_tokens(network, resized, probe))
  matrices, pictures = [], []
  (to / 'dense').mkdir(parents=True, exist_ok=True)
  for i, (image, path, stem) in enumerate(zip(images, paths, _distinct(stems), strict=True)):
    shown = _scaled(image)
    before = {title: figures.blocks(values[i], shown.shape[:2]) for title, values in colors.items()}
    if probe is None or scores is None:
      picture = pixels.draw(shown, {}, (), before=before)
    else:
      predicted = _predict(scores[i], image.shape[:2], network.image_px)
      true = _read_mask(options.masks, path, image.shape[:2], probe) if options.masks else None
      picture = _draw_classes(image, predicted, true, probe, before)
      if true is not None:
        matrices.append(pixels.count(true, predicted, len(probe.class_names)))
    pictures.append(Figure(stem, html_pages.encode(picture), path, is_sheet=True))
    (to / 'dense' / f'{stem}.png').write_bytes(pictures[-1].png)
  if matrices and not np.any(matrices):
    raise UserError(f'--masks: expected a pixel that counts, got none in the masks of {options.masks}. Choose other '
                    'masks.')
  arrays = {'components': components.parts.reshape(*grids, 3), 'share': components.share}
  if scores is not None:
    arrays['scores'] = scores
  np.savez_compressed(to / 'dense.npz', **arrays)  # type: ignore[arg-type]
  shares = ', '.join(f'{share:.1%}' for share in components.share)
  text = f'The three components have {shares} of the variance of the tokens.'
  if matrices:
    total = pixels.scores(np.sum(matrices, 0))
    text += f' Over these images: mIoU {total.miou:.2%}, accuracy {total.accuracy:.2%} of the pixels.'
  page = html_pages.render(
      'inspection.html', title=f'{name} – dense features', names=[name],
      head=['weights', 'family', 'images', 'patches'], sections=[(text, pictures)],
      rows=[[name, network.weights.family, len(pictures), f'{network.grid[0]} × {network.grid[1]}']])
  (to / 'report.html').write_bytes(storage.encode(page))
  return text


def read_probe(where: str) -> Probe:
  """Returns the probe of a run of `vit-jax evaluate`, or of one of the files in its folder `probes`.

  Raises UserError if there is no such file, or it is another one.
  """
  path = pathlib.Path(where)
  files = [path] if path.is_file() else sorted(path.glob('probes/*.npz'))
  if len(files) != 1:
    advice = '. Make one: vit-jax evaluate --config=dense_probe --weights=… --workdir=RUN.'
    if files:
      advice = f': {", ".join(file.name for file in files)}. Name the file.'
    raise UserError(f'--probe: expected a run with one probe in {where}/probes, got {len(files)}{advice}')
  try:
    return Probe(**archives.read_npz(files[0], Probe._fields))
  except OSError as error:
    raise failures.unreadable(error, f'--probe={files[0]}') from error
  except (ValueError, TypeError) as error:
    got = f'which cannot be read ({failures.first_line(error)})'
    if isinstance(error, TypeError):
      got = 'which has other arrays'
    raise UserError(f'--probe: expected a probe of vit-jax evaluate, got {files[0]}, {got}. Run the evaluation '
                    'again.') from error


def _resized(network: Model, image: HostArray) -> HostArray:
  """Returns an image at the size of the network's input, without preserving its aspect ratio."""
  recipe = inference.eval_recipe(network.weights)
  interpolation, antialias = geometry.eval_resampling(recipe)
  return geometry.resize_part(image, network.image_px, Window(0, 0, *network.image_px), antialias=antialias,
                              interpolation=interpolation, truncate=recipe.truncate)


def _read_probed_tokens(network: Model, resized: HostArray, probe: Probe) -> HostArray:
  """Returns the tokens that a probe reads, `[B, h, w, D]`."""
  blocks, norm = [int(block) for block in probe.blocks], bool(probe.norm)
  if not blocks and norm:
    tokens = network.features(resized, as_grid=True, prepared=True)
  else:
    by_block = network.features(resized, layers=blocks or [-1], as_grid=True, norm=norm, prepared=True)
    tokens = np.concatenate(list(by_block), -1)
  if tokens.shape[-1] != len(probe.mean):
    raise UserError(f'--probe: expected a probe of tokens of width {tokens.shape[-1]}, as these weights have them, got '
                    f'one of {len(probe.mean)}. Use the weights that the probe was fitted to.')
  return tokens


def _color_foreground(tokens: HostArray, threshold: float) -> HostArray:
  """Returns the colors `[B, h, w, 3]` of the principal components of the foreground; the background is black."""
  is_foreground = np.stack([embeddings.foreground(tokens_of_image, threshold) for tokens_of_image in tokens])
  colors = np.zeros((*is_foreground.shape, 3))
  if is_foreground.sum() > 3:  # tokens, as there are three components
    colors[is_foreground] = embeddings.to_unit(embeddings.principal(tokens[is_foreground].astype(np.float64)).parts)
  return colors


def _distinct(stems: Sequence[str]) -> list[str]:
  """Returns names of files; equal ones are numbered, and end with `_` where that is the name of another."""
  names = []
  for number, stem in enumerate(stems):
    name = stem if stems.count(stem) == 1 else f'{stem}_{number}'
    while name in stems and name != stem:
      name += '_'
    names.append(name)
  return names


def _predict(scores: HostArray, size: tuple[int, ...], window_px: tuple[int, int]) -> HostArray:
  """Returns the class of each pixel of an image of this size, `[H, W]` i32, from scores of its tokens `[h, w, C]`."""
  rows, columns = (pixels.spans(size[axis], window_px[axis], window_px[axis], window_px[axis], scores.shape[axis])
                   for axis in (0, 1))
  return pixels.upsample(scores[None].astype(np.float32), rows, columns, (size[0], size[1]))


def _draw_classes(image: HostArray, predicted: HostArray, true: HostArray | None, probe: Probe,
                  before: dict[str, HostArray]) -> HostArray:
  """Returns the picture of an image with its predicted classes, and with the true ones and the errors if known.

  Args:
    image: `[H, W, 3]` u8.
    predicted, true: class of each pixel, `[H, W]` i32.
    probe: for the names of the classes.
    before: other pictures of the size of the page, which come first.
  """
  shown, classes, after = _scaled(image), {'prediction': predicted}, {}
  if true is not None:
    classes['labels'] = true
    gray = np.repeat(np.asarray(Image.fromarray(image).convert('L'))[..., None], 3, -1)
    is_wrong = (true >= 0) & (predicted != true)
    errors = np.where(is_wrong[..., None], np.round(.3 * gray + .7 * _WRONG), .6 * gray + 60).astype(np.uint8)
    share = is_wrong.sum() / max((true >= 0).sum(), 1)
    after[f'errors: {share:.1%} of the pixels'] = _scaled(errors)
  return pixels.draw(shown, {title: masks.resize(one, shown.shape[:2]) for title, one in classes.items()},
                     tuple(map(str, probe.class_names)), before=before, after=after)


def _read_mask(folder: str, path: str, size: tuple[int, ...], probe: Probe) -> HostArray:
  """Returns the class of each pixel by the mask of an image, `[H, W]` i32; -1 where it does not count."""
  stem = pathlib.Path(path).stem
  files = [file for suffix in masks.EXTENSIONS if (file := pathlib.Path(folder, f'{stem}{suffix}')).is_file()]
  if not files:
    raise UserError(f'--masks: expected {stem}.png (or {", ".join(masks.EXTENSIONS[1:])}) in {folder}, as for every '
                    'image, got no such file. Add the mask, or leave the image out.')
  file, (first, ignore) = files[0], map(int, probe.values)
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


def _scaled(image: HostArray) -> HostArray:
  """Returns an image `[H, W, 3]` u8 with a long side of `LONG_PX`."""
  factor = LONG_PX / max(image.shape[:2])
  height, width = (max(1, round(side * factor)) for side in image.shape[:2])
  return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
