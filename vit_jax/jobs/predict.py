"""`--job=predict`: classifies picture files with any weights, and shows where the network looked.

What is found goes to the standard output, a paragraph or a line of JSON for each file; everything else to the
standard error. A file that cannot be read is told and skipped, and the exit status says that there was one.
"""
from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import logging
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit_jax import api
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.image.image_ops import BadImage
from vit_jax.data.pipeline import prefetch, transforms
from vit_jax.data.sources import classes as naming
from vit_jax.data.sources import image_files
from vit_jax.inspect import figures
from vit_jax.jobs import inference
from vit_jax.jobs import runtime as startup
from vit_jax.weights import loading

log = logging.getLogger('vit_jax.jobs')
OVERLAYS = 'overlays'
THREADS = 8


class Seen(NamedTuple):
  """A file: `image [H, W, 3] u8` as the network is given it, or None and why not."""
  path: str
  image: HostArray | None
  wrong: str = ''


def run(where: str, given: Sequence[str], *, top: str, as_json: bool, overlay: bool, to: pathlib.Path | None,
        preprocess: str, model: str, view: str, classes: str) -> int:
  """Classifies files and all pictures in folders.

  Args:
    where: weights, as `weights.loading.load` takes them.
    given: files and folders.
    top: how many classes of each, as text; '' = 5.
    as_json: a line of JSON for each file instead of text.
    overlay: also write each picture with its attention, into `to`.
    to: folder; None = `overlays`.
    preprocess, model, view: as `weights.loading.load` has them.
    classes: file of class names, a line for each output; '' = those of the weights.

  Returns:
    Exit status: 0, or 2 if a file could not be read.
  """
  _check(top, to, overlay=overlay)
  paths = list(find(given))
  startup.start()
  prefetch.quieten_cv2()
  network = load(where, preprocess=preprocess, model=model, view=view, classes=classes)
  targets = name_overlays(paths, to or pathlib.Path(OVERLAYS)) if overlay else {}
  around = describe(network)
  num_wrong = 0
  for batch in _batches(network, paths):
    good = [one for one in batch if one.image is not None]
    images = [one.image for one in good if one.image is not None]
    logits = iter(network.logits(images, prepared=True) if images else [])
    for one in batch:
      found = [] if one.image is None else network.rank(next(logits), top=int(top or 5))
      print(_as_json(one, found, around) if as_json else _as_text(one, found), flush=True,
            file=sys.stdout if as_json or one.image is not None else sys.stderr)
    num_wrong += len(batch) - len(good)
    if overlay and good:
      _write_overlays(network, good, targets)
  if overlay:
    log.info('Pictures with attention rollout are in %s', to or OVERLAYS)
  if num_wrong:
    log.error('%s of %s files could not be read and were skipped.', f'{num_wrong:,}', f'{len(paths):,}')
  return 2 if num_wrong else 0


def _check(top: str, to: pathlib.Path | None, *, overlay: bool) -> None:
  if top and (not top.isdecimal() or not int(top)):
    raise UserError(f'--top={top} is no number of classes; want 1 or more')
  if to is not None and not overlay:
    raise UserError(f'--to={to} is for --overlay; predictions are printed')


def load(where: str, *, preprocess: str, model: str, view: str, classes: str) -> api.Model:
  """The network, with the names of its classes.

  Raises:
    UserError: the weights have no head, or another number of classes than the file names.
  """
  names = naming.read(classes, said='--classes') if classes else ()
  found = loading.load(where, preprocess=preprocess, model=model, view=view)
  log.info('%s', loading.text(found))
  if not found.num_classes:
    raise UserError(f'{where} has no head, so it knows no classes; want weights that were trained or fine-tuned on '
                    'classes')
  found = api.named(found, names, said=f'--classes={classes}')
  if not found.class_names:
    log.warning('These weights do not name their classes, which are numbered here; want --classes=FILE')
  return api.Model(found)


def describe(network: api.Model) -> dict[str, object]:
  """What every line of JSON says of the network: how it prepares images, and the warnings about its weights."""
  recipe = dataclasses.replace(inference.eval_recipe(network.weights), exif_orientation=api.UPRIGHT.upright)
  preprocessing = transforms.eval_summary(recipe, network.image_px)
  return {'preprocessing': {**preprocessing, 'rule': network.weights.preprocess.rule},
          'warnings': list(network.weights.report.warnings)}


def find(given: Sequence[str]) -> Iterator[str]:
  """Files as they are given, and of folders all pictures in and below them, by path.

  Raises:
    UserError: a folder holds no picture.
  """
  for name in given:
    if not os.path.isdir(name):
      yield name
      continue
    finder = image_files.Finder()
    below = sorted(os.path.join(name, found.path) for found in finder.find(name))
    image_files.check(below, finder, name)
    image_files.report(finder.ignored, name)
    yield from below


def name_overlays(paths: Sequence[str], to: pathlib.Path) -> dict[str, pathlib.Path]:
  """Where the overlay of each file goes: `to/NAME.png`, with a number where several files have the name."""
  found: dict[str, pathlib.Path] = {}
  taken: set[str] = set()
  for path in paths:
    stem = pathlib.Path(path).stem
    names = itertools.chain([stem], (f'{stem}_{number}' for number in itertools.count(2)))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    found[path] = to / f'{name}.png'
  return found


def _batches(network: api.Model, paths: Sequence[str]) -> Iterator[list[Seen]]:
  """All files in their order, read ahead by threads."""
  def see(path: str) -> Seen:
    try:
      return Seen(path, network.prepare(path))
    except BadImage as error:
      return Seen(path, None, str(error))
    except OSError as error:
      return Seen(path, None, error.strerror or str(error))

  with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
    starts = range(0, len(paths), api.BATCH)
    ahead = [pool.map(see, paths[start:start + api.BATCH]) for start in starts[:2]]
    for number, _ in enumerate(starts):
      batch = list(ahead[number])
      ahead[number] = iter(())
      if number + 2 < len(starts):
        ahead.append(pool.map(see, paths[starts[number + 2]:starts[number + 2] + api.BATCH]))
      yield batch


def _write_overlays(network: api.Model, good: Sequence[Seen], targets: dict[str, pathlib.Path]) -> None:
  images = [one.image for one in good if one.image is not None]
  for one, image, heat in zip(good, images, network.rollout(images, prepared=True), strict=True):
    target = targets[one.path]
    target.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(figures.overlay(image, heat))).save(target)


def _as_text(one: Seen, found: Sequence[api.Guess]) -> str:
  if one.image is None:
    return f'{one.path}: {one.wrong}'
  return '\n'.join([one.path, *(f'  {100 * guess.probability:6.2f} %  {guess.name}' for guess in found)])


def _as_json(one: Seen, found: Sequence[api.Guess], around: Mapping[str, object]) -> str:
  if one.image is None:
    return json.dumps({'file': one.path, 'error': one.wrong})
  return json.dumps({'file': one.path, 'classes': [guess._asdict() for guess in found], **around}, ensure_ascii=False)
