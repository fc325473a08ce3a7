"""ImageNet-ReaL (arXiv 2006.07159): the classes that people see in each validation image of ILSVRC 2012.

`real.json` is a list of 50,000 lists of classes, in the order of the images' numbers. 3,163 of the lists are empty, and
their images do not count. The number in its file name identifies an image, so the order of a source does not matter.
`evaluate/classify.py` calls `of_source` for the labels of an evaluation, and `count` to describe them.

`python -m vit_jax.data.labels.real real.json PREDICTIONS` scores the predictions of any program: one line per image,
with its name and a class.
"""
from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.core import documents, failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import HostArray
from vit_jax.data import user_files
from vit_jax.data.source import Source, find_origin

NUM_IMAGES, NUM_CLASSES = 50_000, 1_000
FEATURE = 'real_label'
"""The feature of the TFDS dataset imagenet2012_real that has the labels."""
_IMAGE_NUMBER = re.compile(r'ILSVRC2012_val_(\d{8})')  # such as `ILSVRC2012_val_00000293`; the first image is 1
_NAME_FEATURES = ('file_name', 'image/filename', 'filename')  # in which datasets store the name of the original file

Labels = tuple[tuple[int, ...], ...]
"""The classes of each image, from 0 to `NUM_CLASSES` - 1; () = the image has no label."""


class Counts(NamedTuple):
  """Numbers of images and labels of ReaL.

  num_scored, num_empty: images with and without labels.
  num_labels: labels of all images together.
  most: largest number of labels of an image.
  """
  num_scored: int
  num_empty: int
  num_labels: int
  most: int


def read(path: str) -> Labels:
  """Returns the lists of the file `real.json` at `path`.

  Raises:
    UserError: the file cannot be read, or has other content.
  """
  lists = documents.read(path, expected='real.json of the authors of ImageNet-ReaL', advice='Download it from '
                           'github.com/google-research/reassessed-imagenet.').value

  def is_class_list(labels: object) -> bool:
    return isinstance(labels, list) and all(type(label) is int and 0 <= label < NUM_CLASSES for label in labels)
  if not isinstance(lists, list) or len(lists) != NUM_IMAGES or not all(map(is_class_list, lists)):
    size = f'{len(lists):,} entries' if isinstance(lists, list) else documents.describe(lists)
    raise UserError(f'{path}: expected a list of {NUM_IMAGES:,} lists of classes from 0 to {NUM_CLASSES - 1}, got '
                    f'{size}. Download real.json again.')
  return tuple(tuple(labels) for labels in lists)


def count(labels: Labels) -> Counts:
  """Returns the numbers of images with and without labels, and of labels."""
  sizes = [len(image_labels) for image_labels in labels]
  return Counts(sum(size > 0 for size in sizes), sizes.count(0), sum(sizes), max(sizes, default=0))


def score(predicted: HostArray, labels: Labels) -> float:
  """Returns the fraction of the images with labels for which the class in `predicted [S] int` is one of the labels."""
  hits = [int(label) in image_labels for label, image_labels in zip(predicted, labels, strict=True) if image_labels]
  return float(np.mean(hits))


def read_predictions(path: str) -> HostArray:
  """Returns the classes `[50,000]` of a file with lines such as `ILSVRC2012_val_00000293.JPEG 65`.

  Raises:
    UserError: the file cannot be read, a line has another form, or an image is missing or listed twice.
  """
  lines = user_files.split_lines(documents.read_text(path, path))
  predicted = np.full(NUM_IMAGES, -1)
  for line_number, line in enumerate(lines, 1):
    match = _IMAGE_NUMBER.search(line)
    index = int(match[1]) - 1 if match else -1
    last_word = line.replace(',', ' ').split()[-1] if match else ''
    is_class = last_word.isdecimal() and len(last_word) < 10 and int(last_word) < NUM_CLASSES
    if not (0 <= index < NUM_IMAGES and is_class):
      raise UserError(f'{path}, line {line_number}: expected an image and its class, from 0 to {NUM_CLASSES - 1}, such '
                      f'as `ILSVRC2012_val_00000293.JPEG 65`, got {line[:80]!r}. Correct the line.')
    if predicted[index] >= 0:
      raise UserError(f'{path}, line {line_number}: expected one line for each image, got a second one for '
                      f'{index + 1:08}. Remove one of them.')
    predicted[index] = int(last_word)
  missing = np.flatnonzero(predicted < 0)
  if missing.size:
    raise UserError(f'{path}: expected a line for each of {NUM_IMAGES:,} images, got none for {missing.size:,}, such '
                    f'as ILSVRC2012_val_{missing[0] + 1:08}. Add the missing lines.')
  return predicted


def main(arguments: Sequence[str]) -> int:
  """Scores a file of predictions; returns the exit status."""
  try:
    if len(arguments) != 2:
      raise UserError(f'expected two files, got {len(arguments)}. Run python -m vit_jax.data.labels.real real.json '
                      'PREDICTIONS.')
    labels = read(arguments[0])
    predicted = read_predictions(arguments[1])
  except (UserError, TemporaryError) as error:
    print(f'error: {error}', file=sys.stderr)
    return failures.USER_ERROR if isinstance(error, UserError) else failures.TRY_AGAIN
  num_scored, num_empty, num_labels, _ = count(labels)
  print(f'ReaL top-1 {score(predicted, labels):.6f}: {num_scored:,} images scored by {num_labels:,} labels, '
        f'{num_empty:,} without labels')
  return 0


def of_source(source: Source, path: str) -> Labels:
  """Returns the classes of each example of a source, in the order of the examples.

  Args:
    source: validation images of ILSVRC 2012, all or some of them.
    path: the path of `real.json`; '' = the source itself stores the labels.

  Raises:
    UserError: the name of an image has no number, or the source stores no such labels.
  """
  origins = [find_origin(source, index) for index in range(len(source))]
  if not path:
    return tuple(_stored_labels(origin, row, source.name) for origin, row in origins)
  lists = read(path)
  labels: list[tuple[int, ...]] = []
  for origin, row in origins:
    name = _file_name(origin, row)
    match = _IMAGE_NUMBER.search(name)
    if match is None or not 1 <= int(match[1]) <= NUM_IMAGES:
      raise UserError(f'{source.name}: expected validation images of ILSVRC 2012, named ILSVRC2012_val_00000001.JPEG '
                      f'to …00050000, got {name}, for which {path} has no labels. Use such files, or the split '
                      'validation of tfds:imagenet2012.')
    labels.append(lists[int(match[1]) - 1])
  return tuple(labels)


def _file_name(source: Source, row: int) -> str:
  """Returns the name of the original file of an example if the source stores the name, else the description."""
  features = getattr(source, 'features', None)
  if features is None:
    return source.describe(row)
  record = features(row)
  name = next((record[feature][0] for feature in _NAME_FEATURES if record.get(feature)), '')
  return name.decode(errors='replace') if isinstance(name, bytes) else str(name)


def _stored_labels(source: Source, row: int, name: str) -> tuple[int, ...]:
  """Returns the ReaL labels that a source stores with an example; `name` begins messages."""
  features = getattr(source, 'features', None)
  record = features(row) if features else {}
  if FEATURE not in record:
    raise UserError(f'{name}: expected the feature {FEATURE}, which it does not have. Use '
                    'tfds:imagenet2012_real, or set evals.….labels=real.json with the validation images.')
  labels = record[FEATURE]
  if not all(isinstance(label, int) and 0 <= label < NUM_CLASSES for label in labels):
    raise UserError(f'{name}: expected classes from 0 to {NUM_CLASSES - 1} in the feature {FEATURE}, got '
                    f'others in {source.describe(row)}. Prepare the dataset again.')
  return tuple(labels)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
