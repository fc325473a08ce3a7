"""`--job=inspect`: the pictures of the ViT paper and of what followed, of any weights, as files and one page.

Writes into a folder `report.html`, which opens without a network, a PNG for each picture in it, the numbers by depth as
`numbers.csv` and everything as `arrays.npz` (with several weights, names begin with the model's). Attention is
collected on the explicit path, layer by layer; training and evaluation are not touched by any of it. Weights with
the decoder of a masked autoencoder also paint what is hidden from them, as `reconstructions.png`.
"""
from __future__ import annotations

import csv
import io
import logging
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.image.image_ops import BadImage
from vit_jax.data.pipeline import prefetch
from vit_jax.inspect import embeddings, measurements, reconstruction
from vit_jax.inspect import page as inspection_page
from vit_jax.inspect.model import Model
from vit_jax.jobs import predict
from vit_jax.jobs import runtime as startup
from vit_jax.objectives import mae
from vit_jax.weights import inference

log = logging.getLogger('vit_jax.jobs')
BATCH = 8  # of images at a time: bounds memory, as attention of a layer is [BATCH, heads, tokens, tokens]
CLOSE = 16  # images that are shown one by one
FILTERS = 28  # ViT paper, Figure 7


class Pictures(NamedTuple):
  """Files that could be read. labels: their folders' names, or '' where all lie in one."""
  paths: list[str]
  labels: list[str]


def run(where: str, given: Sequence[str], *, to: pathlib.Path, discard: str, of_class: str, preprocess: str, model: str,
        view: str, classes: str) -> int:
  """Inspects networks on pictures.

  Args:
    where: weights as `weights.loading.load` takes them; several with commas are compared.
    given: files and folders of pictures; none = only what needs no picture.
    to: folder to write to; made if missing.
    discard: of attention rollout, share of each row's smallest entries that is left out, as text; '' = 0.
    of_class: number or name of the class that relevance is for; '' = the predicted one.
    preprocess, model, view: as `weights.loading.load` has them.
    classes: file of class names, a line for each output; '' = those of the weights.

  Returns:
    Exit status: 0, or 2 if a picture could not be read.
  """
  share = _parse_share(discard)
  paths = list(predict.find(given))
  startup.start()
  prefetch.quieten_cv2()
  began = time.monotonic()
  names = [part.strip() for part in where.split(',') if part.strip()]
  networks = [Model(inference.load(name, preprocess=preprocess, model=model, view=view, classes=classes))
              for name in names]
  of_classes = [network.find_class(of_class) if of_class else None for network in networks]
  log.info('Attention is collected on the explicit path, one layer of %d images at a time.', BATCH)
  to.mkdir(parents=True, exist_ok=True)
  seen, num_bad = [], 0
  for name, network, number in zip(_short_names(names), networks, of_classes, strict=True):
    images, pictures, num_bad = _read(network, paths)
    seen.append(_inspect(name, network, images, pictures, discard=share, of_class=number))
    log.info('%s: %d pictures, %.0f s so far.', name, len(images), time.monotonic() - began)
  _write_numbers(to, seen)
  page = inspection_page.write(to, seen)
  print(f'Report: {page}', flush=True)
  return 2 if num_bad else 0


def _parse_share(text: str) -> float:
  try:
    share = float(text or 0.)
  except ValueError:
    share = -1.
  if not 0. <= share < 1.:
    raise UserError(f'--discard={text} is no share; want a number from 0 to below 1, such as .9')
  return share


def _short_names(names: Sequence[str]) -> list[str]:
  """Names of the last parts of paths; numbered where two are the same."""
  short = [pathlib.Path(name.rstrip('/')).name or name for name in names]
  return [name if short.count(name) == 1 else f'{name} ({i + 1})' for i, name in enumerate(short)]


def _read(network: Model, paths: Sequence[str]) -> tuple[HostArray, Pictures, int]:
  """Pictures `[S, H, W, 3]` u8 as the network is given them, and how many could not be read."""
  images, good = [], []
  for path in paths:
    try:
      images.append(network.prepare(path))
      good.append(path)
    except (BadImage, OSError) as error:
      log.error('%s: %s; skipped', path, error)
  folders = [pathlib.Path(path).parent.name for path in good]
  labels = folders if len(set(folders)) > 1 else [''] * len(good)
  shape = (0, *network.image_px, 3)
  return np.stack(images) if images else np.zeros(shape, np.uint8), Pictures(good, labels), len(paths) - len(good)


def _inspect(name: str, network: Model, images: HostArray, pictures: Pictures, *,
             discard: float, of_class: int | None) -> inspection_page.Seen:
  driver, grid = network.driver, network.grid
  params = jax.device_get(network.weights.params['backbone'])
  measured = None
  if len(images):
    batches = (np.asarray(network.normalize(images[i:i + BATCH])) for i in range(0, len(images), BATCH))
    patch_px = (network.image_px[0] / grid[0], network.image_px[1] / grid[1])
    measured = measurements.measure(driver, batches, grid=grid, patch_px=patch_px, num_close=CLOSE, discard=discard,
                                  logits=network.head, has_relevance=True, of_class=of_class)
  positions = np.asarray(driver.backbone.positions(params, grid))  # type: ignore[attr-defined]
  guesses = []
  if measured is not None and measured.logits is not None:
    guesses = [network.rank(row, top=1)[0].name for row in measured.logits]
  return inspection_page.Seen(name, network.weights.family, images[:CLOSE], pictures.paths, pictures.labels, guesses,
                              grid, _filters(params), positions if positions.any() else None, measured, images,
                              _paint(network, images[:CLOSE]),
                              '' if of_class is None else network.class_names[of_class])


def _paint(network: Model, images: HostArray) -> reconstruction.Painted | None:
  """What a masked autoencoder makes of pictures `[K, H, W, 3]` u8; None of weights without its decoder."""
  weights = network.weights
  if weights.decoder is None or 'decoder' not in weights.params or not len(images):
    return None
  task = mae.build(weights.decoder, inference.backbone(weights))
  found = jax.jit(task.reconstruct)(weights.params, network.normalize(images), jax.random.key(0))
  return reconstruction.paint(*jax.device_get(found), mean=weights.preprocess.mean, std=weights.preprocess.std)


def _filters(params: dict) -> HostArray | None:
  """The kernel `[P, P, 3, D]` of a patch embedding that sees pixels; None of a hybrid."""
  kernel = np.asarray(params['stem']['kernel']) if 'kernel' in params.get('stem', {}) else None
  return kernel if kernel is not None and kernel.ndim == 4 and kernel.shape[2] == 3 else None


def _write_numbers(to: pathlib.Path, seen: Sequence[inspection_page.Seen]) -> None:
  """`numbers.csv`: a row for each model, block and head; `arrays.npz`: all that was measured."""
  text = io.StringIO()
  table = csv.writer(text)
  table.writerow(['model', 'block', 'head', 'attention_distance_px', 'mutual_information', 'entropy_nats'])
  arrays: dict[str, HostArray] = {}
  for one in seen:
    prefix = '' if len(seen) == 1 else f'{one.name}/'
    if one.filters is not None:
      arrays[f'{prefix}filter_components'], _ = embeddings.filter_components(one.filters, FILTERS)
    if one.painted is not None:
      arrays |= {f'{prefix}{key}': value for key, value in one.painted._asdict().items()}
    if one.measured is None:
      continue
    arrays |= {f'{prefix}{key}': value for key, value in one.measured._asdict().items() if value is not None}
    m = one.measured
    for block, rows in enumerate(zip(m.distance_px, m.information, m.entropy, strict=True), 1):
      for head, values in enumerate(zip(*rows, strict=True), 1):
        table.writerow([one.name, block, head, *(f'{value:.6g}' for value in values)])
  (to / 'numbers.csv').write_text(text.getvalue())
  np.savez_compressed(to / 'arrays.npz', **arrays)  # type: ignore[arg-type]
