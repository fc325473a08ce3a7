"""What a classifier predicted, for a person: which classes it confuses, and pictures it got right and wrong.

Reads `predictions.npz`: `class_names [C]` text; for each image of a split `index [S]` i32 (position in the
source), `label [S]` i32, and the best k classes `top [S, k]` i32 with `probability [S, k]` f32; for a few of
them `example_index [E]` i32 (as in `index`), `example_name [E]` text, `example_image [E, H, W, 3]` uint8;
`view` and `split`, text.
"""
from __future__ import annotations

import html
import os
import zipfile
from collections.abc import Mapping

import numpy as np

from vit_jax.core.types import HostArray
from vit_jax.inspect import render

_MAX_CLASSES = 40  # of a matrix that can still be read
_MAX_PAIRS = 30
_MAX_EXAMPLES = 12  # of each kind
_PER_IMAGE = ('index', 'label', 'top', 'probability')
_PER_EXAMPLE = ('example_index', 'example_name', 'example_image')


def load(path: str | os.PathLike[str]) -> dict[str, HostArray]:
  """The arrays of a `predictions.npz`.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it cannot be read, or its arrays do not fit each other.
  """
  name = os.path.basename(path)
  try:
    with open(path, 'rb') as file:  # numpy leaves a damaged file open that it opened itself
      archive = np.load(file, allow_pickle=False)
      arrays = {key: archive[key] for key in archive.files}
  except FileNotFoundError:
    raise
  except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
    raise ValueError(f'{name}: could not be read ({error})') from error
  lacking = [key for key in ('class_names', *_PER_IMAGE) if key not in arrays]
  if lacking:
    raise ValueError(f'{name}: has no {", ".join(lacking)}')
  top = arrays['top'].shape
  fits = len(top) == 2 and 0 not in top and arrays['probability'].shape == top
  if not fits or arrays['label'].shape != top[:1] or arrays['index'].shape != top[:1]:
    shapes = ', '.join(f'{key} {arrays[key].shape}' for key in _PER_IMAGE)
    raise ValueError(f'{name}: shapes do not fit: {shapes}; want [S], [S], [S, k], [S, k]')
  return arrays


def render_confusion(arrays: Mapping[str, HostArray]) -> str:
  """The confusion matrix; with many classes a table of the pairs that are confused most."""
  names = [str(name) for name in np.atleast_1d(arrays['class_names'])]
  pairs, counts, sizes = _count_pairs(arrays, len(names))
  if len(names) <= _MAX_CLASSES:
    matrix = np.zeros((len(names), len(names)), np.int64)
    matrix[pairs[:, 0], pairs[:, 1]] = counts
    return render.draw_confusion(matrix, names) if len(pairs) else ''
  rows = [(names[t], names[p], int(n), f'{n / sizes[t]:.1%}') for (t, p), n in zip(pairs, counts, strict=True)
          if t != p]
  rows = sorted(rows, key=lambda row: -row[2])[:_MAX_PAIRS]
  if not rows:
    return ''
  table = render.make_table(['true', 'predicted', 'images', 'of the true class'], rows)
  return f'<h3>Most confused of {len(names):,} classes</h3>{table}'


def render_examples(arrays: Mapping[str, HostArray]) -> str:
  """Pictures with true and predicted class: wrong ones, the most certain first, then right ones."""
  if any(key not in arrays for key in _PER_EXAMPLE):
    return ''
  images = arrays['example_image']
  if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or 0 in images.shape:
    return ''
  row_of = {int(index): row for row, index in enumerate(arrays['index'])}
  examples = [(row_of[int(index)], str(name), image) for index, name, image
              in zip(*(arrays[key] for key in _PER_EXAMPLE), strict=False) if int(index) in row_of]
  is_right = arrays['top'][:, 0] == arrays['label']
  wrong = sorted((e for e in examples if not is_right[e[0]]), key=lambda e: -arrays['probability'][e[0], 0])
  right = [e for e in examples if is_right[e[0]]]
  parts = []
  for kind, some, total in (('wrong', wrong, np.sum(~is_right)), ('right', right, np.sum(is_right))):
    cards = ''.join(_render_card(arrays, *example) for example in some[:_MAX_EXAMPLES])
    title = f'{kind.capitalize()}: {total:,} of {len(is_right):,} images'
    if cards:
      parts.append(f'<h3 class="{kind}">{title}</h3><div class="examples">{cards}</div>')
  return ''.join(parts)


def _count_pairs(arrays: Mapping[str, HostArray], num_classes: int) -> tuple[HostArray, HostArray, HostArray]:
  """Pairs (true, predicted) that occur, how often, and the images of each true class."""
  pairs = np.stack([arrays['label'], arrays['top'][:, 0]], 1).astype(np.int64)
  pairs = pairs[np.all((pairs >= 0) & (pairs < num_classes), axis=1)]
  sizes = np.bincount(pairs[:, 0], minlength=num_classes)
  unique, counts = np.unique(pairs, axis=0, return_counts=True)
  return unique, counts, sizes


def _render_card(arrays: Mapping[str, HostArray], row: int, name: str, image: HostArray) -> str:
  true = _name_class(arrays, int(arrays['label'][row]))
  predicted = _name_class(arrays, int(arrays['top'][row, 0]))
  says = f'<b>{html.escape(true)}</b>' if true == predicted else (
    f'<b class="wrong">{html.escape(predicted)}</b>, truly <b>{html.escape(true)}</b>')
  picture = render.embed_image(image, alt=f'{true}, predicted {predicted}')
  return (f'<figure>{picture}<figcaption>{says} · {float(arrays["probability"][row, 0]):.1%}'
          f'<br>{render.break_path(name)}</figcaption></figure>')


def _name_class(arrays: Mapping[str, HostArray], number: int) -> str:
  names = np.atleast_1d(arrays['class_names'])
  return str(names[number]) if 0 <= number < len(names) else f'class {number}'
