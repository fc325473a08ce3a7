"""`--job=predict`: classifies image files with any weights, optionally with attention overlays.

Predictions are printed to standard output, one paragraph or one line of JSON per file; everything else goes to standard
error. The first line of JSON has what holds for all files: preprocessing, class names, warnings. With `--to=FILE.csv`
or `FILE.parquet` they are written as a table, which resumes (`predict_table.py`). A file that cannot be read is
reported and skipped; the exit status is then 2, or 75 if a later try may succeed.

`run` checks the flags, loads the weights and classifies the files batch by batch, while threads read the next ones.
"""
from __future__ import annotations

import collections
import concurrent.futures
import itertools
import json
import logging
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from vit_jax.core import documents, failures, files
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.formats import image_list
from vit_jax.data.image import opencv
from vit_jax.data.image import transform as transforms
from vit_jax.data.image.headers import BadImage
from vit_jax.data.text.prompts import PLAIN, given_names
from vit_jax.inspect import figures
from vit_jax.inspect.model import BATCH, Guess, Model
from vit_jax.inspect.zeroshot import ZeroShot
from vit_jax.jobs import runtime as startup
from vit_jax.record import console, destination
from vit_jax.weights import inference, loading
from vit_jax.weights.reading import AS_FOUND, Reading

log = logging.getLogger('vit_jax.jobs')
OVERLAYS = 'overlays'
THREADS = 8


class Prepared(NamedTuple):
  """A file: `image [H, W, 3] u8` as the network receives it, or None and the problem."""
  path: str
  image: HostArray | None
  problem: str = ''
  status: int = failures.USER_ERROR


def run(weights: str, files: Sequence[str], *, names: Sequence[str], prompts: str, tokenizer: str, top: int, json: bool,
        overlay: bool, to: pathlib.Path | None, reading: Reading, classes: str, follow_links: bool = False,
        overwrite: bool = False) -> int:
  """Classifies files and all images in folders, `files`, and returns the exit status.

  It is 0 if all files could be read, 75 if a later try may succeed for all others, else 2.

  Args:
    weights, reading, classes: see `weights.inference.load`.
    names: classes in words, or the list or file that has them, see `prompts.given_names`; none = those of the head.
    prompts, tokenizer: how the names become texts, see `Model.zero_shot`.
    top: number of classes per image.
    json: print one line of JSON per file instead of text.
    overlay: also save each image with its attention overlay, in `to`.
    to: a table, `FILE.csv` or `FILE.parquet`; or the folder of the overlays, None = `overlays`.
    follow_links: also read files outside of a folder to which links in it lead.
    overwrite: replace overlays that are there.
  """
  is_table = to is not None and to.suffix in ('.csv', '.parquet')
  _check_flags(to, is_table, overlay=overlay, json=json, names=names, prompts=prompts, tokenizer=tokenizer,
               classes=classes)
  names = given_names(names, setting='--names')
  paths = list(image_list.find(files, follow_links=follow_links))
  image_list.check_exist(paths)
  targets = name_overlays(paths, to or pathlib.Path(OVERLAYS)) if overlay else {}
  destination.check_free(targets.values(), setting='--to', overwrite=overwrite)
  if overlay:
    destination.check_writable(to or pathlib.Path(OVERLAYS), setting='--to', advice='Choose another folder.')
  startup.start()
  opencv.quieten()
  console.begin_stage('loading the weights')
  network = load(weights, reading, classes=classes, has_names=bool(names))
  classifier: Model | ZeroShot = network
  if names:
    classifier = network.zero_shot(names, prompts=prompts or PLAIN, tokenizer=tokenizer)
    log.info('%s', classifier.probability)
  if is_table and to is not None:
    from vit_jax.jobs import predict_table  # only here: few programs write tables
    return predict_table.write(network, classifier, paths, to, top=top)
  bad: list[int] = []
  console.begin_stage('compiling, reading the first images')
  if json:
    print(_to_json(describe(network, classifier)), flush=True)
  for batch in _batches(network, paths):
    good = [file for file in batch if file.image is not None]
    images = [file.image for file in good if file.image is not None]
    logits = iter(classifier.logits(images, prepared=True) if good else [])
    console.end_stage()
    for file in batch:
      guesses = [] if file.image is None else classifier.rank(next(logits), top=top)
      print(_as_json(file, guesses) if json else _as_text(file, guesses), flush=True,
            file=sys.stderr if file.image is None and not json else sys.stdout)
    bad += [file.status for file in batch if file.image is None]
    if overlay and good:
      _write_overlays(network, good, targets)
  if overlay:
    log.info('Images with attention overlays are in %s', to or OVERLAYS)
  if bad:
    log.error('%s of %s files could not be read and were skipped.', f'{len(bad):,}', f'{len(paths):,}')
  return failures.worst(bad)


def _check_flags(to: pathlib.Path | None, is_table: bool, *, overlay: bool, json: bool, names: Sequence[str],
                 prompts: str, tokenizer: str, classes: str) -> None:
  """Raises UserError if flags do not fit together."""
  if to is not None and not overlay and not is_table:
    raise UserError(f'--to: expected a table, FILE.csv or FILE.parquet, or --overlay as well, got --to={to} alone. '
                    'Name a table, or add --overlay.')
  if is_table and (overlay or json):
    raise UserError(f'--to: expected neither --overlay nor --json with a table, got --to={to}. Remove them, or '
                    '--to.')
  for flag, value in (('prompts', prompts), ('tokenizer', tokenizer)):
    if value and not names:
      raise UserError(f'--{flag}: expected --names as well, got --{flag}={value} alone. It is for classification '
                      'by texts.')
  if names and classes:
    raise UserError(f'--classes: expected none with --names, got {classes}. The names are the classes.')


def load(where: str, reading: Reading = AS_FOUND, *, classes: str = '', has_names: bool = False) -> Model:
  """Loads a network with a classification head, or any network if names of classes are given.

  Raises:
    UserError: the weights cannot be read, have no head, or have another number of classes than the file of names.
  """
  loaded = inference.load(where, reading, classes=classes)
  log.info('%s', loading.text(loaded))
  if has_names:
    return Model(loaded)
  if not loaded.num_classes or not loaded.head.bias:
    got = f'a projection to {loaded.num_classes} numbers' if loaded.num_classes else 'weights without one'
    raise UserError(f'--weights={where}: expected weights with a classification head, got {got}. Use weights that were '
                    'trained or fine-tuned on classes, or, for weights with a text tower, --names=cat,dog.')
  log.log(logging.INFO if loaded.class_names else logging.WARNING, '%s',
          inference.describe_class_names(loaded, classes=classes))
  return Model(loaded)


def describe(network: Model, classifier: Model | ZeroShot | None = None) -> dict[str, object]:
  """Returns the first line of JSON, about the network: preprocessing, whose class names, and warnings.

  With names of a person, or sigmoids, also what the probabilities are.
  """
  preprocessing = transforms.eval_summary(network.recipe, network.image_px)
  names = f'{network.assumed_classes}, assumed' if network.assumed_classes else (
      'given' if network.weights.class_names else 'not known')
  texts = {'class_names': 'given', 'probability': classifier.probability} if isinstance(classifier, ZeroShot) else (
      {'probability': inference.SIGMOID} if network.weights.is_sigmoid else {})
  return {'preprocessing': {**preprocessing, 'rule': network.weights.preprocess.rule}, 'class_names': names, **texts,
          'warnings': list(network.weights.report.warnings)}


def name_overlays(paths: Sequence[str], to: pathlib.Path) -> dict[str, pathlib.Path]:
  """Maps each file to the path of its overlay: `to/NAME.png`, numbered where several files share the name."""
  targets: dict[str, pathlib.Path] = {}
  taken: set[str] = set()
  for path in paths:
    stem = pathlib.Path(path).stem
    names = itertools.chain([stem], (f'{stem}_{number}' for number in itertools.count(2)))
    name = next(name for name in names if name not in taken)
    taken.add(name)
    targets[path] = to / f'{name}.png'
  return targets


def _batches(network: Model, paths: Sequence[str]) -> Iterator[list[Prepared]]:
  """Yields all files in order, in batches that threads read ahead."""
  def prepare(path: str) -> Prepared:
    try:
      return Prepared(path, network.prepare(path))
    except BadImage as error:
      return Prepared(path, None, str(error))
    except OSError as error:
      status = failures.TRY_AGAIN if failures.is_temporary(error) else failures.USER_ERROR
      return Prepared(path, None, error.strerror or str(error), status)

  with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
    begun = (pool.map(prepare, paths[start:start + BATCH]) for start in range(0, len(paths), BATCH))
    ahead = collections.deque(itertools.islice(begun, 2))
    while ahead:
      batch = list(ahead.popleft())
      ahead.extend(itertools.islice(begun, 1))
      yield batch


def _write_overlays(network: Model, good: Sequence[Prepared], targets: dict[str, pathlib.Path]) -> None:
  images = [file.image for file in good if file.image is not None]
  for file, image, heat in zip(good, images, network.rollout(images, prepared=True), strict=True):
    target = targets[file.path]
    with files.replacing(target) as part:
      Image.fromarray(np.asarray(figures.overlay(image, heat))).save(part, 'png')


def _as_text(file: Prepared, guesses: Sequence[Guess]) -> str:
  if file.image is None:
    return f'{file.path}: {file.problem}'
  shares = ['' if guess.share is None else f'  (share {100 * guess.share:6.2f} %)' for guess in guesses]
  return '\n'.join([file.path, *(f'  {100 * guess.probability:6.2f} %{share}  {guess.name}'
                                for guess, share in zip(guesses, shares, strict=True))])


def _as_json(file: Prepared, guesses: Sequence[Guess]) -> str:
  if file.image is None:
    return json.dumps({'file': file.path, 'error': file.problem})
  return _to_json({'file': file.path, 'classes': [guess.plain() for guess in guesses]})


def _to_json(content: Mapping[str, object]) -> str:
  return json.dumps(documents.finite(content), ensure_ascii=False, allow_nan=False)
