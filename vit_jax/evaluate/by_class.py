"""Precision, recall and F1 of each class, of images with one class each; as text and as CSV.

Precision is the share of the images predicted as a class that have it, recall the share of the images of a class that
are predicted as it, and F1 their harmonic mean. A quotient of nothing is 0: the recall of a class without images, and
the precision of one that is never predicted. The numbers, and which classes count in the means, are those of
`sklearn.metrics.classification_report(label, predicted, zero_division=0)`: all classes that are the label or the
prediction of an image.
"""
from __future__ import annotations

import csv
import io
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.evaluate.results import Guesses
from vit_jax.record import destination, storage

_SEVERAL_CLASSES = 'expected images with one class each, got {}, whose images have several. Remove the flag.'
COLUMNS = ('class', 'label', 'precision', 'recall', 'f1', 'images', 'predicted')
"""The columns of the CSV file: name and number of the class, fractions, images with it, and images predicted as it."""


class Wanted(NamedTuple):
  """The flags for scores by class: whether a table is printed, and the CSV file to write."""
  is_printed: bool = False
  csv: pathlib.Path | None = None

  @property
  def flag(self) -> str:
    """The flag that was set, for messages; '' if none was."""
    if self.is_printed:
      return '--by_class'
    return f'--csv={self.csv}' if self.csv else ''


NOTHING = Wanted()


class ByClass(NamedTuple):
  """Arrays `[K]` over the K classes that are the label or the prediction of an image, in their order.

  label: numbers of the classes, i64.
  precision, recall, f1: fractions, f64.
  num_images, num_predicted: number of images with the class, and of images that were predicted as it, i64.
  """
  label: HostArray
  precision: HostArray
  recall: HostArray
  f1: HostArray
  num_images: HostArray
  num_predicted: HostArray

  def mean(self) -> dict[str, float]:
    """Returns the macro means: every class counts the same."""
    return {name: float(getattr(self, name).mean()) for name in ('precision', 'recall', 'f1')}

  def weighted_mean(self) -> dict[str, float]:
    """Returns the means in which every class counts by its number of images."""
    return {name: float(np.average(getattr(self, name), weights=self.num_images))
            for name in ('precision', 'recall', 'f1')}


def measure(label: HostArray, predicted: HostArray) -> ByClass:
  """Returns the scores of predictions `[S]` of images with the classes `label [S]`, whole numbers from 0; S > 0."""
  classes, numbers = np.unique(np.concatenate([label, predicted]), return_inverse=True)
  true, guess = np.split(numbers, [len(label)])  # positions in `classes`
  num_images, num_predicted, num_right = (np.bincount(rows, minlength=len(classes))
                                          for rows in (true, guess, true[true == guess]))
  return ByClass(
      classes.astype(np.int64), precision=num_right / np.maximum(num_predicted, 1),
      recall=num_right / np.maximum(num_images, 1), f1=2 * num_right / (num_images + num_predicted),
      num_images=num_images, num_predicted=num_predicted)


def check(wanted: Wanted, config: schema.Config) -> None:
  """Checks before anything is read that the main result will have predictions of one class for each image.

  Raises UserError if it will not, or the file cannot be written.
  """
  if not wanted.flag:
    return
  name, first = next(iter(config.evals.items()), ('none', None))
  if not isinstance(first, schema.TopK) or isinstance(first, schema.Real):
    raise UserError(f'{wanted.flag}: expected a first evaluation that predicts a class for each image, such as topk, '
                    f'got {name}. Set --config.evals=topk.')
  if config.data.max_labels:
    raise UserError(f'{wanted.flag}: {_SEVERAL_CLASSES.format(config.data.source)}')
  if wanted.csv:
    if wanted.csv.suffix != '.csv' or not wanted.csv.parent.is_dir():
      raise UserError(f'--csv: expected FILE.csv in a folder that exists, got {wanted.csv}. Choose another path.')
    destination.check_writable(wanted.csv.parent, setting='--csv', advice='Choose another path.')


def show(wanted: Wanted, guesses: Guesses | None, names: Sequence[str], of: str) -> None:
  """Prints a table of the classes, or writes it as CSV, if a person wants it; `of` names the evaluation.

  Raises UserError if images have several classes.
  """
  if not wanted.flag:
    return
  if guesses is None or not guesses.is_single:
    raise UserError(f'{wanted.flag}: {_SEVERAL_CLASSES.format(of)}')
  scores = measure(guesses.label, guesses.top[:, 0])
  if wanted.is_printed:
    print(f'By class ({of}):\n{text(scores, names)}', flush=True)
  if wanted.csv:
    storage.write_bytes(wanted.csv, storage.encode(to_csv(scores, names)))
    print(f'Written to {wanted.csv}', flush=True)


def text(scores: ByClass, names: Sequence[str]) -> str:
  """Returns a table with a line for each class, and the means; `names` are those of all classes."""
  rows: list[tuple[str, ...]] = [('class', 'precision', 'recall', 'F1', 'images', 'predicted')]
  for label, *shares, num_images, num_predicted in zip(*scores, strict=True):
    rows.append((name_of(names, label), *map(_percent, shares), f'{num_images:,}', f'{num_predicted:,}'))
  for title, means in ('macro mean', scores.mean()), ('weighted mean', scores.weighted_mean()):
    rows.append((title, *map(_percent, means.values()), f'{scores.num_images.sum():,}',
                 f'{scores.num_predicted.sum():,}'))
  return align(rows)


def align(rows: Sequence[Sequence[str]]) -> str:
  """Returns a table as text: the first column is aligned left, the others right."""
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  lines = []
  for first, *others in rows:
    aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
    lines.append('  '.join([first.ljust(widths[0]), *aligned]))
  return '\n'.join(lines)


def to_csv(scores: ByClass, names: Sequence[str]) -> str:
  """Returns a CSV file with `COLUMNS` and a row for each class."""
  out = io.StringIO()
  writer = csv.writer(out, lineterminator='\n')
  writer.writerow(COLUMNS)
  for label, *numbers in zip(*(column.tolist() for column in scores), strict=True):
    writer.writerow((name_of(names, label), label, *numbers))
  return out.getvalue()


def name_of(names: Sequence[str], label: int) -> str:
  """Returns the name of a class; one beyond the names is called by its number."""
  return str(names[label]) if 0 <= label < len(names) else f'class {label}'


def _percent(share: float) -> str:
  return f'{100 * share:.2f} %'
