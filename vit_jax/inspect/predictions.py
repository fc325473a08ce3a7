"""The predictions of a classifier in a report: confused classes, and images with correct and wrong predictions.

Reads `predictions.npz`: `class_names [C]` text; for each image of a split `index [S]` i32 (position in the
source), `label [S]` i32, and the k most probable classes `top [S, k]` i32 with `probability [S, k]` f32; for a few of
them `example_index [E]` i32 (as in `index`), `example_name [E]` text, `example_image [E, H, W, 3]` uint8;
`view` and `split`, text.
"""
from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from vit_jax.core.types import HostArray
from vit_jax.inspect import charts, html_pages

_MAX_CLASSES = 40  # of a legible matrix
_MAX_ROWS = 15  # of a table
_MAX_EXAMPLES = 12  # of each kind
_PER_IMAGE = ('index', 'label', 'top', 'probability')
_PER_EXAMPLE = ('example_index', 'example_name', 'example_image')


class Confusion(NamedTuple):
  """Which classes are confused, and how often each is recognized.

  chart: the confusion matrix; None with more than `_MAX_CLASSES` classes.
  pairs: the most confused pairs: label, prediction, number of images, their share of the images with this label.
  classes: accuracy by class, the lowest first: label, percent, number of images.
  mean: mean of the accuracies of all classes that occur, in percent.
  """
  num_classes: int
  chart: Markup | None
  pairs: tuple[tuple[str, str, int, str], ...]
  classes: tuple[tuple[str, str, int], ...]
  mean: str


class Example(NamedTuple):
  """An image as PNG with its class, the predicted one and its probability; `is_small`: drawn with square pixels."""
  label: str
  predicted: str
  probability: float
  name: str
  png: bytes
  is_small: bool


class Predictions(NamedTuple):
  """The section of a report; `groups`: (CSS class, title, examples) of wrong and of correct predictions."""
  title: str
  confusion: Confusion
  groups: tuple[tuple[str, str, list[Example]], ...]


def load(path: str | os.PathLike[str]) -> dict[str, HostArray]:
  """Returns the arrays of a `predictions.npz`.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: it cannot be read, or the shapes of its arrays do not match.
  """
  name = os.path.basename(path)
  try:
    with open(path, 'rb') as file:  # NumPy does not close a damaged file that it opened itself
      archive = np.load(file, allow_pickle=False)
      arrays = {key: archive[key] for key in archive.files}
  except FileNotFoundError:
    raise
  except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
    got = getattr(error, 'strerror', None) or f'{os.path.getsize(path):,} damaged bytes'
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
  of = ' of '.join(str(arrays[key]) for key in ('view', 'split') if key in arrays)
  return Predictions(f'Predictions ({of})' if of else 'Predictions', _confusion(arrays), _group_examples(arrays))


def _confusion(arrays: Mapping[str, HostArray]) -> Confusion:
  names = [str(name) for name in np.atleast_1d(arrays['class_names'])]
  pairs, counts, sizes = _count_pairs(arrays, len(names))
  rows = [(names[t], names[p], int(n), f'{100 * n / sizes[t]:.1f} %') for (t, p), n in zip(pairs, counts, strict=True)
          if t != p]
  right = np.zeros(len(names), np.int64)
  same = pairs[:, 0] == pairs[:, 1]
  right[pairs[same, 0]] = counts[same]
  share = 100 * right / np.maximum(sizes, 1)
  occur = np.flatnonzero(sizes)
  lowest = sorted(occur, key=lambda c: (share[c], -sizes[c]))[:_MAX_ROWS]
  return Confusion(
      len(names), _matrix(pairs, counts, names) if len(pairs) and len(names) <= _MAX_CLASSES else None,
      tuple(sorted(rows, key=lambda row: -row[2])[:_MAX_ROWS]),
      tuple((names[c], f'{share[c]:.1f} %', int(sizes[c])) for c in lowest),
      f'{share[occur].mean():.2f} %' if len(occur) else '')


def _matrix(pairs: HostArray, counts: HostArray, names: Sequence[str]) -> Markup:
  matrix = np.zeros((len(names), len(names)), np.int64)
  matrix[pairs[:, 0], pairs[:, 1]] = counts
  return charts.draw_confusion(matrix, names)


def _group_examples(arrays: Mapping[str, HostArray]) -> tuple[tuple[str, str, list[Example]], ...]:
  """Returns examples of wrong predictions, the most confident first, and of correct ones."""
  if any(key not in arrays for key in _PER_EXAMPLE):
    return ()
  images = arrays['example_image']
  if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape:
    return ()
  row_of = {int(index): row for row, index in enumerate(arrays['index'])}
  examples = [(row_of[int(index)], str(name), image) for index, name, image
              in zip(*(arrays[key] for key in _PER_EXAMPLE), strict=False) if int(index) in row_of]
  is_correct = arrays['top'][:, 0] == arrays['label']
  wrong = sorted((e for e in examples if not is_correct[e[0]]), key=lambda e: -arrays['probability'][e[0], 0])
  correct = [e for e in examples if is_correct[e[0]]]
  return tuple((kind, f'{kind.capitalize()}: {num:,} of {len(is_correct):,} images',
                [_example(arrays, *example) for example in some[:_MAX_EXAMPLES]])
               for kind, some, num in (('wrong', wrong, np.sum(~is_correct)), ('correct', correct, np.sum(is_correct))))


def _count_pairs(arrays: Mapping[str, HostArray], num_classes: int) -> tuple[HostArray, HostArray, HostArray]:
  """Returns the pairs (label, predicted) that occur, their counts, and the number of images with each label."""
  pairs = np.stack([arrays['label'], arrays['top'][:, 0]], 1).astype(np.int64)
  pairs = pairs[np.all((pairs >= 0) & (pairs < num_classes), axis=1)]
  sizes = np.bincount(pairs[:, 0], minlength=num_classes)
  unique, counts = np.unique(pairs, axis=0, return_counts=True)
  return unique, counts, sizes


def _example(arrays: Mapping[str, HostArray], row: int, name: str, image: HostArray) -> Example:
  label, predicted = (_name_class(arrays, int(number)) for number in (arrays['label'][row], arrays['top'][row, 0]))
  return Example(label, predicted, float(arrays['probability'][row, 0]), name, html_pages.to_png(image),
                 is_small=max(image.shape[:2]) <= 96)


def _name_class(arrays: Mapping[str, HostArray], number: int) -> str:
  names = np.atleast_1d(arrays['class_names'])
  return str(names[number]) if 0 <= number < len(names) else f'class {number}'
