"""`--job=embed`: writes features, probabilities or tokens of any number of images, or the vectors of texts, as files.

`run` opens the weights and what they are applied to: image files, a split of a source, or texts, which are the captions
of a source or the lines of a file. `many_images` computes and writes, part by part, so that the same command resumes.
"""
from __future__ import annotations

import dataclasses
import hashlib
import logging
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from vit_jax.config import check, overrides, schema
from vit_jax.config import files as config_files
from vit_jax.config.schema import TextRule
from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import opening, splits, user_files
from vit_jax.data.formats import image_list
from vit_jax.data.image import opencv
from vit_jax.data.labels import classes as naming
from vit_jax.data.source import Source
from vit_jax.data.text import prompts
from vit_jax.evaluate import caption_retrieval, embedding, embedding_files
from vit_jax.evaluate.embedding import TextRows
from vit_jax.evaluate.embedding_files import Notes
from vit_jax.inspect import many_images
from vit_jax.inspect.many_images import Stopped, Wanted
from vit_jax.jobs import build, evaluate, flag_names
from vit_jax.jobs import runtime as startup
from vit_jax.recipes import sizes
from vit_jax.record import console
from vit_jax.weights import inference
from vit_jax.weights.network import Weights
from vit_jax.weights.reading import AS_FOUND, Reading

if TYPE_CHECKING:
  from vit_jax.weights.text_encoder import TextEncoder

log = logging.getLogger('vit_jax.jobs')

LINES, TEXTS = 'texts:', 'texts'
_MOST_CAPTIONS = 1_000  # of an image


def run(weights: str, to: pathlib.Path, *, files: Sequence[str] = (), data: str = '', split: str = '',
        what: str = '', blocks: Sequence[int] = (), format: str = '', classes: str = '',
        follow_links: bool = False, tokenizer: str = '', reading: Reading = AS_FOUND, changes: Sequence[str] = (),
        overridden: Collection[str] = ()) -> int:
  """Writes what weights give for images; exit status 0, or 75 after a signal to stop.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    to, format: see `many_images.embed`.
    files: files and folders of images.
    data, split: a source in place of files, and its split; '' = `train`, or all images of a source without splits.
    what, blocks: see `many_images.Wanted`, '' = `features`; and `texts`, the vectors of the captions of a source.
      `data=texts:FILE` has a text in each line.
    tokenizer: the tokenizer file for `texts` and `vectors`; '' = the one beside the weights.
    follow_links: also read files outside of a folder to which links in it lead.
    changes: overrides of the config `evaluate`, `NAME=VALUE` each: `data`, `batch_size`, `image_px`.
    overridden: their names.

  Raises:
    UserError: the weights, the images or an override cannot be used, or `to` has other content.
  """
  what = _check_flags(files, data, split, what, blocks=blocks, classes=classes, follow_links=follow_links,
                      tokenizer=tokenizer)
  evaluate.check_overridden(overridden)
  config = overrides.apply({'': config_files.load('evaluate', [])}, list(changes), models=sizes.model)['']
  source: Source | None = None
  if files:
    paths = list(image_list.find(files, follow_links=follow_links))
    image_list.check_exist(paths)
    source = image_list.ImageList(paths)
  startup.start(config.train)
  opencv.quieten()
  loaded = evaluate.load_weights(config, weights, reading, overridden)
  if classes:
    names = naming.read(classes, setting='--classes')
    loaded = inference.with_class_names(loaded, names, source=f'--classes={classes}')
  config = evaluate.with_weights(config, loaded, overridden)
  check.check(config)
  if data.startswith(LINES):
    return _write_texts(loaded, _lines(data.removeprefix(LINES)), data, to, config=config, format=format,
                        tokenizer=tokenizer)
  if source is None:
    config, source = _open_split(config, data, split, follow_links)
  config = build.oriented(config, source)
  if what == TEXTS:
    return _write_texts(loaded, _captions(source), source.name, to, config=config, format=format, tokenizer=tokenizer)
  project = _encoder(loaded, tokenizer).project if what == many_images.VECTORS else None
  return _write(to, f'{what} of {len(source):,} images', lambda: many_images.embed(
      loaded, source, to, wanted=Wanted(what, tuple(blocks), project), recipe=config.data.recipe, format=format,
      batch_size=config.batch_size, threads=config.data.threads, shown=config.train.progress),
      stage='compiling, reading the first images')


def _write(to: pathlib.Path, content: str, write: Callable[[], Notes | None], *, stage: str) -> int:
  """Calls `write`, and prints that `to` has the content; exit status as of `run`."""
  console.begin_stage(stage)
  try:
    notes = write()
  except Stopped as stopped:
    log.warning('Stopped by %s. The same command resumes.', stopped)
    return failures.TRY_AGAIN
  console.end_stage()
  if jax.process_index() == 0:
    bad = sum(note['num_bad'] for note in notes or ())
    print(f'{"Already in" if notes is None else "Written to"} {to}: {content}'
          + (f', {bad:,} of which could not be decoded and have no row.' if bad else '.'), flush=True)
  return 0


def _check_flags(files: Sequence[str], data: str, split: str, what: str, *, blocks: Sequence[int], classes: str,
                 follow_links: bool, tokenizer: str) -> str:
  """Returns what is to be written. Raises UserError if flags cannot be combined."""
  if bool(files) == bool(data):
    raise UserError(f'--data: expected either a source or files, got {"both" if data else "none"}. Name files and '
                    'folders, or set --data=folder:PATH.')
  if split and not data:
    raise UserError(f'--split: expected --data as well, got --split={split} alone. Files have no splits.')
  if is_lines := data.startswith(LINES):
    if what not in ('', TEXTS):
      raise UserError(f'--what: expected texts with --data=texts:FILE, got {what}. Remove --what.')
    if split:
      raise UserError(f'--split: expected none with --data=texts:FILE, got {split}. Remove it.')
    what = TEXTS
  what = what or many_images.FEATURES
  if what == TEXTS:  # whose vectors do not depend on flags of images
    given = {'blocks': ','.join(map(str, blocks)), 'classes': classes,
             'follow_links': 'true' * (follow_links and is_lines)}
    if problems := [f'--{name}: expected none with texts, got {value}. Remove it.'
                    for name, value in given.items() if value]:
      raise UserError('\n'.join(problems))
  if tokenizer and what not in (TEXTS, many_images.VECTORS):
    raise UserError(f'--tokenizer: expected --what=texts or vectors, got --what={what}. Remove --tokenizer.')
  return what


def _open_split(config: schema.Config, data: str, split: str, follow_links: bool) -> tuple[schema.Config, Source]:
  """Returns the config with a source in place of its own, and a split of that source."""
  config = dataclasses.replace(config, data=dataclasses.replace(
      config.data, source=data, follow_links=config.data.follow_links or follow_links))
  console.begin_stage('opening the data')
  with flag_names.naming_flags({'data.source': '--data', splits.SETTINGS: '--split'}):
    if not split:
      return config, opening.open_every(config.data, image_px=config.image_px, setting='--split')
    return config, opening.open_split(config.data, split, image_px=config.image_px)


def _encoder(weights: Weights, tokenizer: str) -> TextEncoder:
  """Returns the text side of weights. Raises UserError if they have none."""
  from vit_jax.weights import text_encoder  # only here: most weights are read without it
  console.begin_stage('loading the text tower')
  return text_encoder.load(weights.given or weights.source, weights, tokenizer_file=tokenizer)


def _lines(path: str) -> tuple[list[str], HostArray]:
  """Returns the lines of a file that are not empty, and their numbers from 0."""
  if not pathlib.Path(path).expanduser().exists():
    raise UserError(f'--data=texts:{path}: expected a file with a text in each line, got no file of this name. Correct '
                    'the path.')
  text = documents.read_text(path, f'--data=texts:{path}', expected='a text in each line, in UTF-8',
                             advice='Correct the file.')
  lines = user_files.split_lines(text)
  numbers = [number for number, line in enumerate(lines) if line.strip()]
  if not numbers:
    raise UserError(f'--data=texts:{path}: expected a text in each line, got none. Correct the file.')
  return [lines[number].strip() for number in numbers], np.array(numbers, np.int64)


def _captions(source: Source) -> tuple[list[str], HostArray]:
  """Returns all captions of a source, and the number of the image of each; images without any are left out."""
  advice = ('Name another source with --data, or write the texts into a file, a text in each line, and set '
            '--data=texts:FILE.')
  by_image = caption_retrieval.read_texts(source, TextRule.NONE, _MOST_CAPTIONS, '--what=texts', advice=advice)
  pairs = [(text, index) for index, texts in enumerate(by_image) for text in texts]
  return [text for text, _ in pairs], np.array([index for _, index in pairs], np.int64)


def _write_texts(weights: Weights, numbered: tuple[list[str], HostArray], source: str, to: pathlib.Path, *,
                 config: schema.Config, format: str, tokenizer: str) -> int:
  """Writes the vectors of texts, `numbered` with the line or image of each; exit status as of `run`."""
  (texts, ids), encoder = numbered, _encoder(weights, tokenizer)
  shape = encoder.embed(texts[:1]).shape[1:]
  info = {'format': embedding_files.FORMAT, 'what': TEXTS, 'shape': list(shape), 'dtype': 'float32', 'blocks': [],
          'num_examples': len(texts), 'per_shard': embedding.shard_size(len(texts), shape, config.batch_size),
          'batch_size': config.batch_size, 'source': source, 'class_names': [], 'output_names': [],
          'texts_digest': hashlib.sha256('\0'.join(texts).encode(errors='surrogatepass')).hexdigest(),
          'scale': encoder.scale, 'bias': encoder.bias,
          **many_images.describe(weights, config.data.recipe), 'identity': '', 'features_digest': ''}
  rows = TextRows(encoder.embed, texts, ids, lambda text: prompts.simplify(text, encoder.rule))
  return _write(to, f'vectors of {len(texts):,} texts', lambda: many_images.write(
      embedding.Work(to, info, embedding_files.choose(to, format)), rows, shown=config.train.progress),
      stage='compiling')
