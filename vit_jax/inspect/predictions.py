"""The predictions of a classifier in a report: confused classes, and images with correct and wrong predictions.

`load` reads `predictions.npz`, which `evaluate.results` writes, and `summarize` returns what the page shows:

  class_names [C]                          text
  index [S]  label [S]                     i32, for each image of a split its position in the source, and its class
  top [S, k]  probability [S, k]           i32 and f32, the k most probable classes
  example_index [E]  example_name [E]      i32 and text, of a few images
  example_image [E, H, W, 3]               u8
  view  split  is_single                   text, and bool: false if some images have several classes
"""
from __future__ import annotations

import collections
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from vit_jax.core import archives
from vit_jax.core.types import HostArray
from vit_jax.evaluate import by_class
from vit_jax.inspect import charts, html_pages

_MAX_MATRIX_CLASSES = 40  # of a legible confusion matrix
_MAX_PAIRS = 15  # in the table of confused pairs
_MAX_CLASSES = 2_000  # in the table of classes
_SMALL_PX = 96  # images up to this side are drawn with square pixels
_PER_IMAGE = ('index', 'label', 'top', 'probability')
_PER_EXAMPLE = ('example_index', 'example_name', 'example_image')


class Confusion(NamedTuple):
  """Which classes are confused, and how often each is recognized.

  num_classes: number of classes.
  chart: the confusion matrix; None with more than `_MAX_MATRIX_CLASSES` classes.
  pairs: the most confused pairs: label, prediction, number of images, their share of the images with this label.
  classes: class, precision, recall, F1, and the images with it and predicted as it, the lowest F1 first; () if images
    have several classes.
  num_measured: the number of such rows before they were cut.
  means: the macro mean and the mean weighted by images of precision, recall and F1, as two sentences.
  """
  num_classes: int
  chart: Markup | None
  pairs: tuple[tuple[str, str, int, str], ...]
  classes: tuple[tuple[str, str, str, str, int, int], ...]
  num_measured: int
  means: str


class Example(NamedTuple):
  """An image file with its class, the predicted one and its probability; `is_small`: drawn with square pixels."""
  label: str
  predicted: str
  probability: float
  name: str
  file: bytes
  is_small: bool


class Group(NamedTuple):
  """Examples of wrong or of correct predictions, whose `kind` is a CSS class, by the title of a class."""
  kind: str
  title: str
  note: str
  by_class: dict[str, list[Example]]


class Predictions(NamedTuple):
  """The section of a report; `folder` is that of all examples, whose names are relative to it."""
  title: str
  confusion: Confusion
  groups: tuple[Group, ...]
  folder: str


def load(path: str | os.PathLike[str]) -> dict[str, HostArray]:
  """Returns the arrays of a `predictions.npz`.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: it cannot be read, or the shapes of its arrays do not match.
  """
  name = os.path.basename(path)
  try:
    arrays = archives.read_npz(path)
  except FileNotFoundError:
    raise
  except (OSError, ValueError) as error:
    got = getattr(error, 'strerror', None) or str(error)
    raise ValueError(f'{name}: could not be read: {got}') from error
  if missing := [key for key in ('class_names', *_PER_IMAGE) if key not in arrays]:
    raise ValueError(f'{name}: expected the arrays {", ".join(("class_names", *_PER_IMAGE))}, got none named '
                     f'{", ".join(missing)}')
  top = arrays['top'].shape
  fits = len(top) == 2 and 0 not in top and arrays['probability'].shape == top
  if not fits or arrays['label'].shape != top[:1] or arrays['index'].shape != top[:1]:
    shapes = ', '.join(f'{key} {arrays[key].shape}' for key in _PER_IMAGE)
    raise ValueError(f'{name}: expected arrays of shapes [S], [S], [S, k], [S, k], got {shapes}')
  return arrays


def summarize(arrays: Mapping[str, HostArray]) -> Predictions:
  """Returns what a report shows of the arrays that `load` returned."""
  origin = ' of '.join(str(arrays[key]) for key in ('view', 'split') if key in arrays)  # such as `ema of test`
  names, folder = [str(name) for name in arrays.get('example_name', ())], ''
  if names and all(name.startswith('/') or '://' in name for name in names):  # paths, and not numbers
    folder = os.path.commonprefix([name[:name.rfind('/') + 1] for name in names]).rpartition('/')[0] + '/'
  return Predictions(f'Predictions ({origin})' if origin else 'Predictions', _summarize_confusion(arrays),
                     _group_examples(arrays, folder), folder)


def _summarize_confusion(arrays: Mapping[str, HostArray]) -> Confusion:
  names = [str(name) for name in np.atleast_1d(arrays['class_names'])]
  both = np.stack([arrays['label'], arrays['top'][:, 0]], 1).astype(np.int64)  # label and prediction, `[S, 2]`
  both = both[np.all((both >= 0) & (both < len(names)), axis=1)]
  num_images = np.bincount(both[:, 0], minlength=len(names))
  pairs, counts = np.unique(both, axis=0, return_counts=True)
  mistakes = [(names[label], names[predicted], count, f'{100 * count / num_images[label]:.1f} %')
              for (label, predicted), count in zip(pairs.tolist(), counts.tolist(), strict=True) if label != predicted]
  chart = None
  if len(pairs) and len(names) <= _MAX_MATRIX_CLASSES:
    matrix = np.zeros((len(names), len(names)), np.int64)
    matrix[pairs[:, 0], pairs[:, 1]] = counts
    chart = charts.draw_confusion(matrix, names)
  rows, num_measured, means = [], 0, ''
  if len(both) and arrays.get('is_single', True):
    scores = by_class.measure(*both.T)
    num_measured = len(scores.label)
    means = (f'Macro mean of {num_measured:,} classes: {_format_means(scores.mean())}. '
             f'Weighted by images: {_format_means(scores.weighted_mean())}.')
    for row in np.lexsort((-scores.num_images, scores.f1))[:_MAX_CLASSES]:
      precision, recall, f1 = (f'{100 * share[row]:.1f} %' for share in (scores.precision, scores.recall, scores.f1))
      rows.append((names[scores.label[row]], precision, recall, f1, int(scores.num_images[row]),
                   int(scores.num_predicted[row])))
  mistakes.sort(key=lambda row: -row[2])
  return Confusion(num_classes=len(names), chart=chart, pairs=tuple(mistakes[:_MAX_PAIRS]), classes=tuple(rows),
                   num_measured=num_measured, means=means)


def _format_means(means: Mapping[str, float]) -> str:
  return ', '.join(f'{name.replace("f1", "F1")} {100 * value:.1f} %' for name, value in means.items())


def _group_examples(arrays: Mapping[str, HostArray], folder: str) -> tuple[Group, ...]:
  """Returns examples of wrong predictions by class, the most confident first, and of correct ones."""
  if any(key not in arrays for key in _PER_EXAMPLE):
    return ()
  images = arrays['example_image']
  if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape:
    return ()
  row_of_index = {int(index): row for row, index in enumerate(arrays['index'])}
  is_correct = arrays['top'][:, 0] == arrays['label']
  correct: list[tuple[int, Example]] = []  # rows with their examples
  wrong: list[tuple[int, Example]] = []
  for index, name, image in zip(*(arrays[key] for key in _PER_EXAMPLE), strict=False):
    row = row_of_index.get(int(index))
    if row is not None:
      example = _make_example(arrays, row, str(name).removeprefix(folder), image)
      (correct if is_correct[row] else wrong).append((row, example))
  wrong.sort(key=lambda item: -arrays['probability'][item[0], 0])
  num_correct, num = int(np.sum(is_correct)), len(is_correct)
  num_wrong = num - num_correct
  note = f'The {len(wrong):,} shown are the most confident ones of each class.' if len(wrong) < num_wrong else ''
  return (Group('wrong', f'Wrong: {num_wrong:,} of {num:,} images', note, _group_by_class(arrays, wrong)),
          Group('correct', f'Correct: {num_correct:,} of {num:,} images', '',
                {'': [example for _, example in correct]} if correct else {}))


def _group_by_class(arrays: Mapping[str, HostArray],
                    wrong: Sequence[tuple[int, Example]]) -> dict[str, list[Example]]:
  """Returns examples by the title of their class, first the class with the most mistakes; `wrong` has rows, too."""
  labels, is_wrong = arrays['label'].tolist(), arrays['top'][:, 0] != arrays['label']
  num_wrong, num_images = collections.Counter(arrays['label'][is_wrong].tolist()), collections.Counter(labels)
  groups: dict[str, list[Example]] = {}
  for row, example in sorted(wrong, key=lambda item: (-num_wrong[labels[item[0]]], labels[item[0]])):  # stable
    label = labels[row]
    groups.setdefault(f'{example.label}: {num_wrong[label]:,} of {num_images[label]:,} wrong', []).append(example)
  return groups


def _make_example(arrays: Mapping[str, HostArray], row: int, name: str, image: HostArray) -> Example:
  class_names = np.atleast_1d(arrays['class_names']).tolist()
  is_small = max(image.shape[:2]) <= _SMALL_PX
  return Example(label=by_class.name_of(class_names, int(arrays['label'][row])),
                 predicted=by_class.name_of(class_names, int(arrays['top'][row, 0])),
                 probability=float(arrays['probability'][row, 0]), name=name,
                 file=html_pages.encode(image, 'png' if is_small else 'jpeg'), is_small=is_small)
