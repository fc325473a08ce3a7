"""`--job=inspect`: the figures of the ViT paper and of later work for any weights, as files and one page.

Writes into a folder: `report.html`, which opens without a network; a PNG for each figure in it; the measurements by
depth as `numbers.csv`; and all arrays as `arrays.npz` (with several weights, names start with that of the weights).
Attention is computed explicitly, layer by layer. For weights with the decoder of a masked autoencoder,
`reconstructions.png` shows the reconstruction of masked images.
"""
from __future__ import annotations

import csv
import io
import logging
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.formats import image_list
from vit_jax.data.image import opencv
from vit_jax.data.image.headers import BadImage
from vit_jax.inspect import dense as pictures
from vit_jax.inspect import embeddings, figures, measurements, page
from vit_jax.inspect.images import decode
from vit_jax.inspect.model import Model
from vit_jax.inspect.page import FILTERS, Inspection
from vit_jax.jobs import report_card, startup
from vit_jax.objectives import mae
from vit_jax.record import console, destination, storage
from vit_jax.weights import inference
from vit_jax.weights.hints import Reading

log = logging.getLogger('vit_jax.jobs')
BATCH = 8  # images: bounds memory, as the attention of a layer is [BATCH, heads, tokens, tokens]
NUM_MAPS = 16  # images with attention maps


def run(weights: str, files: Sequence[str], *, workdir: storage.Path | None, to: pathlib.Path, discard: float,
        of_class: str, reading: Reading, classes: str, follow_links: bool = False, dense: bool = False,
        probe: str = '', masks: str = '', foreground: float = 0., block: int = 0, overwrite: bool = False) -> int:
  """Inspects networks on images.

  Args:
    weights: as `weights.loading.load` takes them; several, separated by commas, are compared.
    files: files and folders of images; without any, only figures that need no images are drawn.
    to: folder to write to; created if missing.
    overwrite: replace files that are there.
    discard: share of the smallest entries of each row that attention rollout discards.
    workdir: a run directory, instead of weights.
    of_class: number or name of the class that relevance is computed for; '' = the predicted one.
    reading: how weights are read, see `weights.loading.load`.
    classes: file of class names, one line for each output; '' = those of the weights.
    follow_links: also read files outside of a folder to which links in it lead.
    dense: draw the patch tokens of each image instead, with the other arguments, which are those of `dense.Options`.

  Returns:
    Exit status: 0, or 2 if an image could not be read.
  """
  if bool(weights) == (workdir is not None):
    raise UserError(f'--weights: expected either --weights or --workdir, got {"both" if weights else "none"}. Set one '
                    'of them to the network to inspect.')
  options = pictures.Options(probe, masks, foreground, block)  # of --dense
  if not dense and options != pictures.Options():
    raise UserError('--probe, --masks, --foreground, --block: expected --dense as well, got them alone. Add --dense.')
  outputs = ('report.html', 'dense.npz') if dense else ('report.html', 'numbers.csv', 'arrays.npz')
  destination.check_free([to / name for name in outputs], setting='--to', overwrite=overwrite)
  destination.check_writable(to, setting='--to', advice='Choose another folder.')
  paths = list(image_list.find(files, follow_links=follow_links))
  startup.start()
  opencv.quieten()
  began_s = time.monotonic()
  console.begin_stage('loading the weights')
  names = report_card.split_weights(weights) if weights else [str(workdir)]
  networks = [Model(inference.load(name, reading, classes=classes)) for name in names]
  if dense:
    return _run_dense(networks, names, paths, to, options, overwrite=overwrite)
  for network in networks:
    log.info('%s', inference.describe_class_names(network.weights, classes=classes))
  class_indexes = [network.find_class(of_class) if of_class else None for network in networks]
  log.info('Attention is computed explicitly, for %d images and one layer at a time.', BATCH)
  console.begin_stage('compiling and measuring')
  inspections, num_bad = [], 0
  for name, network, class_index in zip(_short_names(names), networks, class_indexes, strict=True):
    readable, good_paths = _read(network.prepare, paths)
    images = np.stack(readable) if readable else np.zeros((0, *network.image_px, 3), np.uint8)
    num_bad = len(paths) - len(good_paths)
    inspections.append(_inspect(name, network, images, good_paths, discard=discard, of_class=class_index))
    log.info('%s: %d images, %.0f s so far.', name, len(images), time.monotonic() - began_s)
  with destination.filled(to, overwrite=overwrite) as part:
    _write_numbers(part, inspections)
    page.write(part, inspections)
  console.end_stage()
  print(f'Report: {to / "report.html"}', flush=True)
  return 2 if num_bad else 0


def _run_dense(networks: Sequence[Model], names: Sequence[str], paths: Sequence[str], to: pathlib.Path,
               options: pictures.Options, *, overwrite: bool) -> int:
  """Draws the patch tokens of each image; returns the exit status."""
  if len(networks) != 1 or not paths:
    raise UserError(f'--dense: expected one network and at least one image, got {len(networks)} and {len(paths)}. Pass '
                    'one of the --weights, and images after the flags.')
  images, good_paths = _read(lambda path: decode(path, networks[0].decoding), paths)
  if not images:
    raise UserError('--dense: expected at least one image that can be read, got none. See the messages above.')
  console.begin_stage('reading the tokens, drawing')
  with destination.filled(to, overwrite=overwrite) as part:
    summary = pictures.write(networks[0], _short_names(names)[0], images, good_paths, part, options)
  console.end_stage()
  print(f'{summary}\nPictures: {to / "dense"}, report: {to / "report.html"}', flush=True)
  return 2 if len(good_paths) < len(paths) else 0


def _short_names(names: Sequence[str]) -> list[str]:
  """Returns the last parts of paths, numbered where two are equal."""
  return page.distinct([pathlib.Path(name.rstrip('/')).name or name for name in names])


def _read(read: Callable[[str], HostArray], paths: Sequence[str]) -> tuple[list[HostArray], list[str]]:
  """Returns images as `read` gives them, and the paths of those that could be read.

  Raises:
    TemporaryError: storage failed.
  """
  images, good_paths = [], []
  for path in paths:
    try:
      images.append(read(path))
      good_paths.append(path)
    except (BadImage, OSError) as error:
      if failures.is_temporary(error):
        raise failures.unreadable(error, path) from error
      log.error('%s: %s; skipped', path, error)
  return images, good_paths


def _inspect(name: str, network: Model, images: HostArray, paths: list[str], *, discard: float,
             of_class: int | None) -> Inspection:
  """Measures a network on prepared images `[S, H, W, 3]` u8; `of_class` is the index of the class of relevance."""
  driver, grid = network.driver, network.grid
  params = jax.device_get(network.weights.params['backbone'])
  measured = None
  if len(images):
    batches = (np.asarray(network.normalize(images[i:i + BATCH])) for i in range(0, len(images), BATCH))
    patch_px = (network.image_px[0] / grid[0], network.image_px[1] / grid[1])
    measured = measurements.measure(driver, batches, grid=grid, patch_px=patch_px, num_maps=NUM_MAPS, discard=discard,
                                    logits=network.head, of_class=of_class)
  kernel = np.asarray(params.get('stem', {}).get('kernel', 0))
  has_filters = kernel.ndim == 4 and kernel.shape[2] == 3  # [P, P, 3, D] of pixels; not in a hybrid network
  positions = np.asarray(driver.backbone.positions(params, grid))  # type: ignore[attr-defined]
  predictions = []
  if measured is not None and measured.logits is not None:
    predictions = [network.rank(row, top=1)[0].name for row in measured.logits]
  folders = [pathlib.Path(path).parent.name for path in paths]
  return Inspection(
      name=name, family=network.weights.family, shown=images[:NUM_MAPS], paths=paths,
      labels=folders if len(set(folders)) > 1 else [''] * len(paths), predictions=predictions, grid=grid,
      filters=kernel if has_filters else None, positions=positions if positions.any() else None, measured=measured,
      images=images, reconstruction=_reconstruct(network, images[:NUM_MAPS]),
      of_class='' if of_class is None else network.class_names[of_class])


def _reconstruct(network: Model, images: HostArray) -> figures.Reconstruction | None:
  """Reconstructs images `[K, H, W, 3]` u8 with a masked autoencoder; None for weights without its decoder."""
  weights = network.weights
  if weights.decoder is None or 'decoder' not in weights.params or not len(images):
    return None
  task = mae.build(weights.decoder, inference.backbone(weights))
  predicted, hidden = jax.device_get(
      jax.jit(task.reconstruct)(weights.params, network.normalize(images), jax.random.key(0)))
  return figures.reconstruct(predicted, hidden, mean=weights.preprocess.mean, std=weights.preprocess.std)


def _write_numbers(to: pathlib.Path, inspections: Sequence[Inspection]) -> None:
  """Writes `numbers.csv`, a row for each model, block and head, and `arrays.npz`, all measurements."""
  text = io.StringIO()
  table = csv.writer(text)
  table.writerow(['model', 'block', 'head', 'attention_distance_px', 'mutual_information', 'entropy_nats'])
  arrays: dict[str, HostArray] = {}
  for one in inspections:
    found: dict[str, HostArray | None] = {}
    if one.filters is not None:
      found['filter_components'], _ = embeddings.filter_components(one.filters, FILTERS)
    if one.reconstruction is not None:
      found |= one.reconstruction._asdict()
    if one.measured is not None:
      m = one.measured
      found |= m._asdict()
      for (block, head), distance_px in np.ndenumerate(m.distance_px):
        values = distance_px, m.information[block, head], m.entropy[block, head]
        table.writerow([one.name, block + 1, head + 1, *(f'{value:.6g}' for value in values)])
    prefix = '' if len(inspections) == 1 else f'{one.name}/'
    arrays |= {f'{prefix}{name}': array for name, array in found.items() if array is not None}
  (to / 'numbers.csv').write_bytes(storage.encode(text.getvalue()))
  np.savez_compressed(to / 'arrays.npz', **arrays)  # type: ignore[arg-type]
