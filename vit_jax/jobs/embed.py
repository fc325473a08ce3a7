"""`--job=embed`: writes features, probabilities or tokens of any number of images, or the vectors of texts, as files.

`commands.Command.run` calls `run`, in every process. `run` checks the flags, opens image files or a file of texts,
loads the weights, opens the split of a source, and calls `many_images`, which computes and writes part by part, so that
the same command resumes. Texts are the lines of a file or the captions of a source. This module does not know the
formats of the files.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
from vit_jax.evaluate import caption_retrieval, embedding, store
from vit_jax.inspect import many_images
from vit_jax.jobs import build, evaluate, flag_names, startup
from vit_jax.recipes import sizes
from vit_jax.record import console
from vit_jax.weights import inference
from vit_jax.weights.hints import AS_FOUND, Reading
from vit_jax.weights.network import Weights

if TYPE_CHECKING:
  from vit_jax.weights.text_encoder import TextEncoder

log = logging.getLogger('vit_jax.jobs')

TEXTS = 'texts'  # a value of --what
TEXT_FILE_PREFIX = 'texts:'  # of --data=texts:FILE
_MAX_CAPTIONS = 1_000  # of an image


class Texts(NamedTuple):
  """Texts to embed.

  texts: lines of a file or captions of a source, without empty ones.
  ids: `[T] i64`, for each text the index of its line in the file, or of its image in the source.
  source: `texts:FILE`, or the name of the source.
  """
  texts: list[str]
  ids: HostArray
  source: str


def run(weights: str, to: pathlib.Path, *, files: Sequence[str] = (), data: str = '', split: str = '',
        what: str = '', blocks: Sequence[int] = (), format: str = '', classes: str = '',
        follow_links: bool = False, tokenizer: str = '', reading: Reading = AS_FOUND, changes: Sequence[str] = (),
        overridden: Collection[str] = ()) -> int:
  """Writes the outputs of a network for images or texts. Returns the exit status 0, or 75 after a signal to stop.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    to, format: see `many_images.embed`.
    files: files and folders of images.
    data: a source in place of files, or `texts:FILE`, a file with a text in each line.
    split: the split of the source; '' = `train`, or all images of a source without splits.
    what: `features`, `probabilities`, `tokens` or `vectors` of images (see `many_images.Wanted`), or `texts`, the
      vectors of the captions of a source; '' = `features`, or `texts` for a file of texts.
    blocks: see `many_images.Wanted`.
    tokenizer: the tokenizer file for `texts` and `vectors`; '' = the one beside the weights.
    follow_links: whether to read files outside of a folder to which links in the folder lead.
    changes: overrides of the config `evaluate`, `NAME=VALUE` each: `data`, `batch_size`, `image_px`.
    overridden: the names of the overridden settings.

  Raises UserError if the weights, the images or an override cannot be used, or `to` has other content.
  """
  what = what or (TEXTS if data.startswith(TEXT_FILE_PREFIX) else many_images.FEATURES)
  _check_flags(files, data, split=split, what=what, blocks=blocks, classes=classes, follow_links=follow_links,
               tokenizer=tokenizer)
  evaluate.check_overridden(overridden)
  config = overrides.changed({'': config_files.load('evaluate', [])}, list(changes), models=sizes.model)['']
  texts = _read_lines(data) if data.startswith(TEXT_FILE_PREFIX) else None
  images: Source | None = None
  if files:
    paths = list(image_list.find(files, follow_links=follow_links))
    image_list.check_exist(paths)
    images = image_list.ImageList(paths)
  startup.start(config.train)
  opencv.quieten()
  config, loaded = _load(config, weights, reading=reading, classes=classes, overridden=overridden)
  if texts is None and images is None:
    config, images = _open_split(config, data, split=split, follow_links=follow_links)
  if images is not None:
    config = build.with_orientation(config, images)
    texts = _read_captions(images) if what == TEXTS else None
  try:
    if texts is not None:
      return _write_texts(loaded, texts, to, config=config, format=format, tokenizer=tokenizer)
    assert images is not None
    return _write_images(loaded, images, to, what=what, blocks=blocks, tokenizer=tokenizer, config=config,
                         format=format)
  except many_images.Stopped as stopped:
    log.warning('Stopped by %s. The same command resumes.', stopped)
    return failures.TRY_AGAIN


def _check_flags(files: Sequence[str], data: str, *, split: str, what: str, blocks: Sequence[int], classes: str,
                 follow_links: bool, tokenizer: str) -> None:
  """Raises UserError if flags cannot be combined, or if a flag has no effect on the output."""
  is_text_file = data.startswith(TEXT_FILE_PREFIX)
  if bool(files) == bool(data):
    raise UserError(f'--data: expected either a source or files, got {"both" if data else "none"}. Name files and '
                    'folders, or set --data=folder:PATH.')
  if split and not data:
    raise UserError(f'--split: expected --data as well, got --split={split} alone. Files have no splits.')
  if what == TEXTS and files:
    raise UserError('--what: expected --data with texts, got files, which have no captions. Set --data to a source '
                    'with captions, or write the texts into a file, a text in each line, and set --data=texts:FILE.')
  if is_text_file and what != TEXTS:
    raise UserError(f'--what: expected texts with --data=texts:FILE, got {what}. Remove --what.')
  if is_text_file and split:
    raise UserError(f'--split: expected none with --data=texts:FILE, got {split}. Remove it.')
  if what == TEXTS:
    value_by_flag = {'blocks': ','.join(map(str, blocks)), 'classes': classes}  # these flags are for images alone
    if follow_links and is_text_file:  # a folder of images and captions may have links
      value_by_flag['follow_links'] = 'true'
    if problems := [f'--{name}: expected none with texts, got {value}. Remove it.'
                    for name, value in value_by_flag.items() if value]:
      raise UserError('\n'.join(problems))
  elif tokenizer and what != many_images.VECTORS:
    raise UserError(f'--tokenizer: expected --what=texts or vectors, got --what={what}. Remove --tokenizer.')


def _read_lines(data: str) -> Texts:
  """Returns the lines of the file in `texts:FILE`, without empty lines, and without spaces around a text."""
  path = data.removeprefix(TEXT_FILE_PREFIX)
  if not os.path.exists(os.path.expanduser(path)):  # This message is plainer than that of the operating system.
    raise UserError(f'--data={data}: expected a file with a text in each line, got no file of this name. Correct the '
                    'path.')
  content = documents.read_text(path, f'--data={data}', expected='a text in each line, in UTF-8',
                                advice='Correct the file.')
  lines = [line.strip() for line in user_files.split_lines(content)]
  ids = [line_id for line_id, line in enumerate(lines) if line]
  if not ids:
    raise UserError(f'--data={data}: expected a text in each line, got none. Correct the file.')
  return Texts([lines[line_id] for line_id in ids], np.array(ids, np.int64), data)


def _read_captions(images: Source) -> Texts:
  """Returns all captions of all images of a source."""
  advice = ('Name another source with --data, or write the texts into a file, a text in each line, and set '
            '--data=texts:FILE.')
  captions_by_image = caption_retrieval.read_texts(images, TextRule.NONE, _MAX_CAPTIONS, '--what=texts', advice=advice)
  ids = [image_id for image_id, captions in enumerate(captions_by_image) for _ in captions]
  return Texts([text for captions in captions_by_image for text in captions], np.array(ids, np.int64), images.name)


def _open_split(config: schema.Config, data: str, *, split: str, follow_links: bool) -> tuple[schema.Config, Source]:
  """Returns the config with the source `data` in place of its own source, and the split of the source."""
  config = dataclasses.replace(config, data=dataclasses.replace(
      config.data, source=data, follow_links=config.data.follow_links or follow_links))
  console.begin_stage('opening the data')
  with flag_names.naming_flags({'data.source': '--data', splits.SETTINGS: '--split'}):
    if not split:
      return config, opening.open_every(config.data, image_px=config.image_px, setting='--split')
    return config, opening.open_split(config.data, split, image_px=config.image_px)


def _load(config: schema.Config, weights: str, *, reading: Reading, classes: str,
          overridden: Collection[str]) -> tuple[schema.Config, Weights]:
  """Returns the config with the network of the weights, and the weights with the class names of the file `classes`."""
  names = naming.read(classes, setting='--classes') if classes else ()
  loaded = inference.with_class_names(
      evaluate.load_weights(config, weights, reading, overridden), names, source=f'--classes={classes}')
  config = evaluate.with_weights(config, loaded, overridden)
  check.check(config)
  return config, loaded


def _load_encoder(weights: Weights, tokenizer: str) -> TextEncoder:
  """Returns the text tower of weights. Raises UserError if the weights have none."""
  from vit_jax.weights import text_encoder  # only here: most runs of this job need no text tower
  console.begin_stage('loading the text tower')
  return text_encoder.load(weights.given or weights.source, weights, tokenizer_file=tokenizer)


def _write_images(weights: Weights, images: Source, to: pathlib.Path, *, what: str, blocks: Sequence[int],
                  tokenizer: str, config: schema.Config, format: str) -> int:
  """Writes features, probabilities, tokens or vectors of images; returns 0. Raises `many_images.Stopped`."""
  # The projection of features to vectors comes with the text tower.
  project = _load_encoder(weights, tokenizer).project if what == many_images.VECTORS else None
  console.begin_stage('compiling, reading the first images')
  notes = many_images.embed(
      weights, images, to, wanted=many_images.Wanted(what, tuple(blocks), project), recipe=config.data.recipe,
      format=format, batch_size=config.batch_size, threads=config.data.threads, shown=config.train.progress)
  return _report(notes, to, content=f'{what} of {len(images):,} images')


def _write_texts(weights: Weights, texts: Texts, to: pathlib.Path, *, config: schema.Config, format: str,
                 tokenizer: str) -> int:
  """Writes the vectors of texts; returns 0. Raises `many_images.Stopped`."""
  encoder = _load_encoder(weights, tokenizer)
  console.begin_stage('compiling')
  info = _describe_texts(weights, texts, encoder, config=config)
  rows = embedding.TextRows(encoder.embed, texts.texts, texts.ids,
                            simplify=lambda text: prompts.simplify(text, encoder.rule))
  work = embedding.Work(to, info, store.choose(to, format))
  notes = many_images.write(work, rows, shown=config.train.progress)
  return _report(notes, to, content=f'vectors of {len(texts.texts):,} texts')


def _describe_texts(weights: Weights, texts: Texts, encoder: TextEncoder, *, config: schema.Config) -> dict[str, Any]:
  """Returns the description of the files, `embedding.Work.info`; files with another description are not resumed."""
  shape = encoder.embed(texts.texts[:1]).shape[1:]  # embeds a text, as an encoder does not have the shape of a vector
  num_texts = len(texts.texts)
  digest = hashlib.sha256(json.dumps([texts.ids.tolist(), texts.texts]).encode()).hexdigest()
  return {'format': store.FORMAT, 'what': TEXTS, 'shape': list(shape), 'dtype': 'float32', 'blocks': [],
          'num_examples': num_texts, 'per_shard': embedding.shard_size(num_texts, shape, config.batch_size),
          'batch_size': config.batch_size, 'source': texts.source, 'class_names': [], 'output_names': [],
          'texts_digest': digest, 'text_tower': encoder.digest, 'scale': encoder.scale, 'bias': encoder.bias,
          **many_images.describe(weights, config.data.recipe), 'identity': '', 'features_digest': ''}


def _report(notes: store.Notes | None, to: pathlib.Path, *, content: str) -> int:
  """Prints that `to` has the content, and returns 0; `notes` is None if all files were complete before this start."""
  console.end_stage()
  if jax.process_index() == 0:
    num_bad = sum(note['num_bad'] for note in notes or ())
    print(f'{"Already in" if notes is None else "Written to"} {to}: {content}'
          + (f', {num_bad:,} of which could not be decoded and have no row.' if num_bad else '.'), flush=True)
  return 0
