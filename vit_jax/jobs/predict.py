"""`--job=predict`: classifies image files with any weights, optionally with attention overlays.

Predictions are printed to standard output; everything else goes to standard error. With `--json`, the first line of the
output describes the weights, and each further line one file:

  {"preprocessing": {…}, "class_names": "given", "warnings": []}
  {"file": "cat.jpg", "classes": [{…}, …]}                            the most probable class is the first
  {"file": "bad.jpg", "error": "…"}                                   this file cannot be read, and is skipped

`commands.Command.run` calls `run`. `run` checks the flags, finds the files and loads the weights. Then it classifies
the files batch by batch and prints their classes, while threads read the next batches. With `--to=FILE.csv` or
`--to=FILE.parquet`, `predict_table.write` writes a table instead.
"""
from __future__ import annotations

import collections
import concurrent.futures
import itertools
import json as json_module
import logging
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit_jax.core import documents, failures
from vit_jax.core import files as core_files
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.formats import image_list
from vit_jax.data.image import opencv
from vit_jax.data.image import transform as transforms
from vit_jax.data.image.headers import BadImage
from vit_jax.data.text.prompts import PLAIN, resolve_names
from vit_jax.inspect import figures
from vit_jax.inspect.model import BATCH, Guess, Model
from vit_jax.inspect.zeroshot import ZeroShot
from vit_jax.jobs import startup
from vit_jax.record import console, destination
from vit_jax.weights import inference, loading
from vit_jax.weights.hints import AS_FOUND, Reading

log = logging.getLogger('vit_jax.jobs')
TABLES = ('.csv', '.parquet')
"""Suffixes of tables, as in `predict_table.SUFFIXES`; `predict_table` is imported only if a table is written."""
OVERLAYS = pathlib.Path('overlays')  # the default folder of attention overlays
_NUM_READ_THREADS = 8
_NUM_BATCHES_AHEAD = 2  # batches in memory: one is classified while the next is read


class Readable(NamedTuple):
  """The path of a file, and its image `[H, W, 3] u8`, resized and cropped as the network receives it."""
  path: str
  image: HostArray


class Unreadable(NamedTuple):
  """The path of a file that could not be read, the problem in words, and the exit status for it, see `run`."""
  path: str
  problem: str
  status: int


def run(weights: str, files: Sequence[str], *, names: Sequence[str], prompts: str, tokenizer: str, top: int, json: bool,
        overlay: bool, to: pathlib.Path | None, reading: Reading, classes: str, follow_links: bool = False,
        overwrite: bool = False) -> int:
  """Classifies image files and all images in folders; prints the classes or writes a table. Returns the exit status.

  The status is 0 if all files could be read, and 75 if all unreadable files may be readable later, such as after a
  network error; else 2. For a table, see `predict_table.write`.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    names: classes in words, or the list or file that has them, see `prompts.resolve_names`; empty = those of the head.
    prompts, tokenizer: how the names become texts, see `Model.zero_shot`.
    top: number of classes per image.
    json: print one line of JSON per file instead of text.
    overlay: also save each image with its attention overlay, in `to`.
    to: a table, `FILE.csv` or `FILE.parquet`, or the folder of the overlays; None = `OVERLAYS`.
    follow_links: also read files outside of a folder to which links in the folder lead.
    overwrite: replace existing overlays.
  """
  table = to if to is not None and to.suffix in TABLES else None
  _check_flags(to, table, overlay=overlay, as_json=json, names=names, prompts=prompts, tokenizer=tokenizer,
               classes=classes, overwrite=overwrite)
  names = resolve_names(names, setting='--names')
  paths = list(image_list.find(files, follow_links=follow_links))
  image_list.check_exist(paths)
  overlay_folder = to or OVERLAYS
  overlay_by_path = name_overlays(paths, overlay_folder) if overlay else {}
  if overlay:
    destination.check_free(overlay_by_path.values(), setting='--to', overwrite=overwrite)
    destination.check_writable(overlay_folder, setting='--to', advice='Choose another folder.')
  startup.start()
  opencv.quieten()
  console.begin_stage('loading the weights')
  model = load(weights, reading, classes=classes, has_names=bool(names))
  classifier: Model | ZeroShot = model
  if names:
    classifier = model.zero_shot(names, prompts=prompts or PLAIN, tokenizer=tokenizer)
    log.info('%s', classifier.probability)
  if table is not None:
    from vit_jax.jobs import predict_table  # imported here, as few commands write tables
    return predict_table.write(model, classifier, paths=paths, to=table, top=top)
  unreadable = _classify(model, classifier, paths=paths, overlay_by_path=overlay_by_path, top=top, as_json=json)
  if overlay:
    log.info('Images with attention overlays are in %s', overlay_folder)
  if unreadable:
    log.error('%s of %s files could not be read and were skipped.', f'{len(unreadable):,}', f'{len(paths):,}')
  return failures.worst([file.status for file in unreadable])


def _check_flags(to: pathlib.Path | None, table: pathlib.Path | None, *, overlay: bool, as_json: bool,
                 names: Sequence[str], prompts: str, tokenizer: str, classes: str, overwrite: bool) -> None:
  """Raises UserError if flags cannot be combined; `table` is `to` if `to` names a table, else None."""
  if to is not None and not overlay and table is None:
    raise UserError(f'--to: expected a table, FILE.csv or FILE.parquet, or --overlay as well, got --to={to} alone. '
                    'Name a table, or add --overlay.')
  if table is not None and (overlay or as_json):
    raise UserError(f'--to: expected neither --overlay nor --json with a table, got --to={to}. Remove them, or '
                    '--to.')
  if overwrite and not overlay:
    raise UserError('--overwrite: expected --overlay as well, whose files it replaces, got --overwrite alone. Remove '
                    'it; to write a table again, remove the table.')
  for flag, value in (('prompts', prompts), ('tokenizer', tokenizer)):
    if value and not names:
      raise UserError(f'--{flag}: expected --names as well, got --{flag}={value} alone. It is for classification '
                      'by texts.')
  if names and classes:
    raise UserError(f'--classes: expected none with --names, got {classes}. The names are the classes.')


def name_overlays(paths: Sequence[str], to: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the path of each file's overlay: `to/NAME.png`, and `to/NAME_2.png` for another file of the same name."""
  overlay_by_path: dict[str, pathlib.Path] = {}
  taken_names: set[str] = set()
  last_number_by_stem: dict[str, int] = {}  # so that many files of the same name do not try all numbers again
  for path in dict.fromkeys(paths):  # without repeated paths
    stem = pathlib.Path(path).stem
    number = last_number_by_stem.get(stem, 0) + 1
    name = stem if number == 1 else f'{stem}_{number}'
    while name in taken_names:
      number += 1
      name = f'{stem}_{number}'
    last_number_by_stem[stem] = number
    taken_names.add(name)
    overlay_by_path[path] = to / f'{name}.png'
  return overlay_by_path


def load(weights: str, reading: Reading = AS_FOUND, *, classes: str = '', has_names: bool = False) -> Model:
  """Loads a network with a classification head, or any network if `has_names`: then texts name the classes.

  Raises UserError if the weights cannot be read, lack the head, or have another number of classes than `classes`.
  """
  loaded = inference.load(weights, reading, classes=classes)
  log.info('%s', loading.text(loaded))
  if has_names:
    return Model(loaded)
  if not loaded.num_classes or not loaded.head.bias:
    got = f'a projection to {loaded.num_classes} numbers' if loaded.num_classes else 'weights without one'
    raise UserError(f'--weights={weights}: expected weights with a classification head, got {got}. Use weights that '
                    'were trained or fine-tuned on classes, or, for weights with a text tower, --names=cat,dog.')
  log.log(logging.INFO if loaded.class_names else logging.WARNING, '%s',
          inference.describe_class_names(loaded, classes=classes))
  return Model(loaded)


def describe(model: Model, classifier: Model | ZeroShot | None = None) -> dict[str, object]:
  """Returns the first line of JSON: the preprocessing, the origin of the class names, and warnings about the weights.

  If a `ZeroShot` classifies, or the head has sigmoids, the line also says what the probabilities mean.
  """
  content: dict[str, object] = {'preprocessing': {
      **transforms.eval_summary(model.recipe, model.image_px), 'rule': model.weights.preprocess.rule}}
  if isinstance(classifier, ZeroShot):
    content |= {'class_names': 'given', 'probability': classifier.probability}
  else:
    stored = 'given' if model.weights.class_names else 'not known'
    content['class_names'] = f'{model.assumed_classes}, assumed' if model.assumed_classes else stored
    if model.weights.is_sigmoid:
      content['probability'] = inference.SIGMOID
  return content | {'warnings': list(model.weights.report.warnings)}


def _classify(model: Model, classifier: Model | ZeroShot, *, paths: Sequence[str],
              overlay_by_path: Mapping[str, pathlib.Path], top: int, as_json: bool) -> list[Unreadable]:
  """Prints the classes of each file, writes the overlays that have a path, and returns the unreadable files."""
  unreadable: list[Unreadable] = []
  console.begin_stage('compiling, reading the first images')
  if as_json:
    print(_to_json(describe(model, classifier)), flush=True)
  for batch in _read_batches(model, paths):
    readable = [file for file in batch if isinstance(file, Readable)]
    images = [file.image for file in readable]
    logits = iter(classifier.logits(images, prepared=True) if images else ())  # one row per readable file
    console.end_stage()  # ends the stage in the first batch, and does nothing in later batches
    for file in batch:
      if isinstance(file, Readable):
        _print_classes(file, classifier.rank(next(logits), top=top), as_json=as_json)
      else:
        unreadable.append(file)
        if as_json:
          print(json_module.dumps({'file': file.path, 'error': file.problem}), flush=True)
        else:
          print(f'{file.path}: {file.problem}', file=sys.stderr, flush=True)
    if overlay_by_path and readable:
      for file, heat in zip(readable, model.rollout(images, prepared=True), strict=True):
        with core_files.replacing(overlay_by_path[file.path]) as part:
          Image.fromarray(np.asarray(figures.overlay(file.image, heat))).save(part, 'png')
  return unreadable


def _read_batches(model: Model, paths: Sequence[str]) -> Iterator[list[Readable | Unreadable]]:
  """Yields all files in order, in batches that threads read ahead."""
  def read(path: str) -> Readable | Unreadable:
    try:
      return Readable(path, model.prepare(path))
    except BadImage as error:
      return Unreadable(path, str(error), failures.USER_ERROR)
    except OSError as error:
      status = failures.TRY_AGAIN if failures.is_temporary(error) else failures.USER_ERROR
      return Unreadable(path, error.strerror or str(error), status)

  with concurrent.futures.ThreadPoolExecutor(_NUM_READ_THREADS) as pool:
    # `pool.map` submits the files of a batch to the threads when `islice` takes the batch from this generator.
    batches = (pool.map(read, paths[start:start + BATCH]) for start in range(0, len(paths), BATCH))
    ahead = collections.deque(itertools.islice(batches, _NUM_BATCHES_AHEAD))
    while ahead:
      batch = list(ahead.popleft())
      ahead.extend(itertools.islice(batches, 1))
      yield batch


def _print_classes(file: Readable, guesses: Sequence[Guess], *, as_json: bool) -> None:
  if as_json:
    print(_to_json({'file': file.path, 'classes': [guess.plain() for guess in guesses]}), flush=True)
    return
  lines = [file.path]
  for guess in guesses:
    share = '' if guess.share is None else f'  (share {100 * guess.share:6.2f} %)'
    lines.append(f'  {100 * guess.probability:6.2f} %{share}  {guess.name}')
  print('\n'.join(lines), flush=True)


def _to_json(content: Mapping[str, object]) -> str:
  return json_module.dumps(documents.finite(content), ensure_ascii=False, allow_nan=False)
