"""The predictions of a classifier in a report: confused classes, and images with correct and wrong predictions.

Reads `predictions.npz`: `class_names [C]` text; for each image of a split `index [S]` i32 (position in the
source), `label [S]` i32, and the k most probable classes `top [S, k]` i32 with `probability [S, k]` f32; for a few of
them `example_index [E]` i32 (as in `index`), `example_name [E]` text, `example_image [E, H, W, 3]` uint8;
`view` and `split`, text; `is_single`, bool, false if some images have several classes.
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

_MAX_CLASSES = 40  # of a legible matrix
_MAX_ROWS = 15  # of the table of pairs
_MAX_BY_CLASS = 2_000  # rows of the table of classes
_PER_IMAGE = ('index', 'label', 'top', 'probability')
_PER_EXAMPLE = ('example_index', 'example_name', 'example_image')


class Confusion(NamedTuple):
  """Which classes are confused, and how often each is recognized.

  chart: the confusion matrix; None with more than `_MAX_CLASSES` classes.
  pairs: the most confused pairs: label, prediction, number of images, their share of the images with this label.
  classes: class, precision, recall, F1, and the images with it and predicted as it, the lowest F1 first; () if images
    have several classes.    num_measured: the number of such rows before they were cut.
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
  of = ' of '.join(str(arrays[key]) for key in ('view', 'split') if key in arrays)
  names, folder = [str(name) for name in arrays.get('example_name', ())], ''
  if names and all(name.startswith('/') or '://' in name for name in names):  # paths, and not numbers
    folder = os.path.commonprefix([name[:name.rfind('/') + 1] for name in names]).rpartition('/')[0] + '/'
  return Predictions(f'Predictions ({of})' if of else 'Predictions', _confusion(arrays),
                     _group_examples(arrays, folder), folder)


def _confusion(arrays: Mapping[str, HostArray]) -> Confusion:
  names = [str(name) for name in np.atleast_1d(arrays['class_names'])]
  both = np.stack([arrays['label'], arrays['top'][:, 0]], 1).astype(np.int64)
  both = both[np.all((both >= 0) & (both < len(names)), axis=1)]
  sizes = np.bincount(both[:, 0], minlength=len(names))
  pairs, counts = np.unique(both, axis=0, return_counts=True)
  rows = [(names[label], names[predicted], count, f'{100 * count / sizes[label]:.1f} %')
          for (label, predicted), count in zip(pairs.tolist(), counts.tolist(), strict=True) if label != predicted]
  chart = None
  if len(pairs) and len(names) <= _MAX_CLASSES:
    matrix = np.zeros((len(names), len(names)), np.int64)
    matrix[pairs[:, 0], pairs[:, 1]] = counts
    chart = charts.draw_confusion(matrix, names)
  found = Confusion(len(names), chart, tuple(sorted(rows, key=lambda row: -row[2])[:_MAX_ROWS]), (), 0, '')
  has_classes = len(both) and arrays.get('is_single', True)
  return _with_classes(found, by_class.measure(*both.T), names) if has_classes else found


def _with_classes(found: Confusion, scores: by_class.ByClass, names: Sequence[str]) -> Confusion:
  """Adds precision, recall and F1 by class."""
  def shown(means: Mapping[str, float]) -> str:
    return ', '.join(f'{name.replace("f1", "F1")} {100 * value:.1f} %' for name, value in means.items())
  rows = []
  for row in np.lexsort((-scores.num_images, scores.f1))[:_MAX_BY_CLASS]:
    precision, recall, f1 = (f'{100 * share[row]:.1f} %' for share in (scores.precision, scores.recall, scores.f1))
    rows.append((names[scores.label[row]], precision, recall, f1, int(scores.num_images[row]),
                 int(scores.num_predicted[row])))
  return found._replace(
      classes=tuple(rows), num_measured=len(scores.label),
      means=f'Macro mean of {len(scores.label):,} classes: {shown(scores.mean())}. '
            f'Weighted by images: {shown(scores.weighted_mean())}.')


def _group_examples(arrays: Mapping[str, HostArray], folder: str) -> tuple[Group, ...]:
  """Returns examples of wrong predictions by class, the most confident first, and of correct ones."""
  if any(key not in arrays for key in _PER_EXAMPLE):
    return ()
  images = arrays['example_image']
  if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape:
    return ()
  row_of = {int(index): row for row, index in enumerate(arrays['index'])}
  examples = [(row_of[int(index)], str(name).removeprefix(folder), image) for index, name, image
              in zip(*(arrays[key] for key in _PER_EXAMPLE), strict=False) if int(index) in row_of]
  is_correct = arrays['top'][:, 0] == arrays['label']
  wrong = sorted((e for e in examples if not is_correct[e[0]]), key=lambda e: -arrays['probability'][e[0], 0])
  correct = [_example(arrays, *e) for e in examples if is_correct[e[0]]]
  num_wrong = int(np.sum(~is_correct))
  titles = [f'{kind}: {num:,} of {len(is_correct):,} images' for kind, num in (
      ('Wrong', num_wrong), ('Correct', len(is_correct) - num_wrong))]
  note = f'The {len(wrong):,} shown are the most confident ones of each class.' if len(wrong) < num_wrong else ''
  return (Group('wrong', titles[0], note, _by_class(arrays, wrong)),
          Group('correct', titles[1], '', {'': correct} if correct else {}))


def _by_class(arrays: Mapping[str, HostArray], wrong: Sequence[tuple[int, str, HostArray]]) -> dict[str, list[Example]]:
  """Returns examples by the title of their class, first the class with the most mistakes."""
  labels, is_wrong = arrays['label'].tolist(), arrays['top'][:, 0] != arrays['label']
  mistakes, sizes = collections.Counter(arrays['label'][is_wrong].tolist()), collections.Counter(labels)
  found: dict[str, list[Example]] = {}
  for row, name, image in sorted(wrong, key=lambda one: (-mistakes[labels[one[0]]], labels[one[0]])):  # stable
    label = labels[row]
    title = f'{_name_class(arrays, label)}: {mistakes[label]:,} of {sizes[label]:,} wrong'
    found.setdefault(title, []).append(_example(arrays, row, name, image))
  return found


def _example(arrays: Mapping[str, HostArray], row: int, name: str, image: HostArray) -> Example:
  label, predicted = (_name_class(arrays, int(number)) for number in (arrays['label'][row], arrays['top'][row, 0]))
  is_small = max(image.shape[:2]) <= 96
  return Example(label, predicted, float(arrays['probability'][row, 0]), name,
                 html_pages.encode(image, 'png' if is_small else 'jpeg'), is_small)


def _name_class(arrays: Mapping[str, HostArray], number: int) -> str:
  return by_class.name_of(np.atleast_1d(arrays['class_names']).tolist(), number)
