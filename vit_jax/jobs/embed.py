"""`--job=embed`: writes features, probabilities or tokens of any number of images as files."""
from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Collection, Sequence

import jax

from vit_jax.config import check, overrides
from vit_jax.config import files as config_files
from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.data.image import opencv
from vit_jax.data.labels import classes as naming
from vit_jax.data.source import Source
from vit_jax.data.sources import image_list, opening
from vit_jax.inspect import many_images
from vit_jax.inspect.many_images import Stopped, Wanted
from vit_jax.jobs import evaluate_weights, flag_names
from vit_jax.jobs import runtime as startup
from vit_jax.recipes import sizes
from vit_jax.record import console
from vit_jax.weights import inference
from vit_jax.weights.reading import AS_FOUND, Reading

log = logging.getLogger('vit_jax.jobs')


def run(weights: str, to: pathlib.Path, *, files: Sequence[str] = (), data: str = '', split: str = '',
        what: str = many_images.FEATURES, blocks: Sequence[int] = (), format: str = '', classes: str = '',
        follow_links: bool = False, reading: Reading = AS_FOUND, changes: Sequence[str] = (),
        overridden: Collection[str] = ()) -> int:
  """Writes what weights give for images; exit status 0, or 75 after a signal to stop.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    to, format: see `many_images.embed`.
    files: files and folders of images.
    data, split: a source in place of files, and its split; '' = `train`.
    what, blocks: see `many_images.Wanted`.
    follow_links: also read files outside of a folder to which links in it lead.
    changes: overrides of the config `evaluate`, `NAME=VALUE` each: `data`, `batch_size`, `image_px`.
    overridden: their names.

  Raises:
    UserError: the weights, the images or an override cannot be used, or `to` has other content.
  """
  if bool(files) == bool(data):
    raise UserError(f'--data: expected either a source or files, got {"both" if data else "none"}. Name files and '
                    'folders, or set --data=folder:PATH.')
  if split and not data:
    raise UserError(f'--split: expected --data as well, got --split={split} alone. Files have no splits.')
  evaluate_weights.check_overridden(overridden)
  config = overrides.apply({'': config_files.load('evaluate', [])}, list(changes), models=sizes.model)['']
  source = _open_files(files, follow_links) if files else None
  startup.start(config.train)
  opencv.quieten()
  found = evaluate_weights.load(config, evaluate_weights.WeightsSpec(weights, reading), overridden)
  if classes:
    found = inference.with_class_names(found, naming.read(classes, setting='--classes'), source=f'--classes={classes}')
  config = evaluate_weights.with_weights(config, found, overridden)
  check.check(config)
  if source is None:
    config = dataclasses.replace(config, data=dataclasses.replace(
        config.data, source=data, follow_links=config.data.follow_links or follow_links))
    console.begin_stage('opening the data')
    with flag_names.shown({'data.source': '--data'}):
      source = opening.open_split(config.data, split or 'train', image_px=config.image_px)
  elif 'data.recipe.exif_orientation' not in overridden:
    config = dataclasses.replace(config, data=dataclasses.replace(
        config.data, recipe=dataclasses.replace(config.data.recipe, exif_orientation=True)))
  console.begin_stage('compiling, reading the first images')
  try:
    notes = many_images.embed(
        found, source, to, wanted=Wanted(what, tuple(blocks)), recipe=config.data.recipe, format=format,
        batch_size=config.batch_size, threads=config.data.threads, shown=config.train.progress)
  except Stopped as stopped:
    log.warning('Stopped by %s. The same command resumes.', stopped)
    return failures.TRY_AGAIN
  console.end_stage()
  if jax.process_index() == 0:
    bad = sum(note['num_bad'] for note in notes or ())
    print(f'{"Already in" if notes is None else "Written to"} {to}: {what} of {len(source):,} images'
          + (f', {bad:,} of which could not be decoded and have no row.' if bad else '.'), flush=True)
  return 0


def _open_files(given: Sequence[str], follow_links: bool) -> Source:
  paths = list(image_list.find(given, follow_links=follow_links))
  image_list.check_exist(paths)
  return image_list.ImageList(paths)
