"""`folder:PATH` with a label file: images with any number of classes each, as listed in a file beside them.

PATH has a file for each split, `labels_train`, `labels_val` (or `_valid`, `_validation`) and `labels_test`, or a
single `labels`, of which a part is held out as the test split. The extension selects the format; image paths are
relative to PATH:

  .csv, .tsv  a line for each image, `cats/1.jpg,cat,sofa` or with tabs: the path and then any number of classes.
              A first line whose first cell is `image`, `path` or `file` is a header and skipped.
  .jsonl      a JSON object in each line: {"image": "cats/1.jpg", "labels": ["cat", "sofa"]}

Files named `captions_train.jsonl` and so on, or `captions.jsonl`, have captions of images, and no labels:
{"image": "cats/1.jpg", "captions": ["a cat on a sofa", "a pet"]}.

The classes are those of the training file, or else of the first file by name; they are sorted by name. In training, an
image without a class is an example of no class; in evaluations, it does not count.
"""
from __future__ import annotations

import csv
import functools
import hashlib
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import os_errors
from vit_jax.core.errors import UserError
from vit_jax.data.files import access, json_fields, user_files
from vit_jax.data.files.user_files import OWN, Rules
from vit_jax.data.image.headers import BadImage
from vit_jax.data.source import UNLABELED, Record, Source
from vit_jax.data.sources import splits

EXTENSIONS = ('.csv', '.tsv', '.jsonl')
NAME, CAPTIONS, SINGLE = 'labels', 'captions', ''
_HEADERS = ('image', 'path', 'file')
_SHOWN = 5  # problems in a message
Line = tuple[int, str, tuple[str, ...], tuple[str, ...]]
"""Number of a line, path of its image, classes and captions."""


class Image(NamedTuple):
  """A line of a label file: path relative to the folder, size in bytes, class names, or captions."""
  path: str
  size: int
  labels: tuple[str, ...]
  captions: tuple[str, ...] = ()


class LabeledFiles:
  """Image files below `root`, each with any number of classes, read on access."""

  def __init__(self, root: str, images: Sequence[Image], *, name: str, class_names: tuple[str, ...],
               title: str = '', rules: Rules = OWN) -> None:
    self.name, self.title, self.class_names, self._root, self._rules = name, title, class_names, root, rules
    numbers = {c: i for i, c in enumerate(class_names)}
    encoded = [os.fsencode(image.path) for image in images]
    # Blocks of bytes and integers: many Python objects would pickle slowly to a loader process.
    self._paths, self._path_ends = b''.join(encoded), np.cumsum([0] + [len(p) for p in encoded])
    self._labels = np.array([numbers[c] for image in images for c in image.labels], np.int32)
    self._label_ends = np.cumsum([0] + [len(image.labels) for image in images])
    text = '\n'.join([f'{image.path} {image.size} {image.labels}' for image in images] + [f'{class_names}'])
    self.digest = hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()
    self.most_labels = max(1, *(len(image.labels) for image in images)) if images else 1

  def __len__(self) -> int:
    return len(self._path_ends) - 1

  def __getitem__(self, index: int) -> Record:
    content = user_files.read_image(self.describe(index), self._rules.max_bytes)
    return Record.multilabel(content, self._labels_of(index))

  def label(self, index: int) -> int:
    """Returns the first class of an image; -1 if it has none."""
    return next(iter(self._labels_of(index)), -1)

  def describe(self, index: int) -> str:
    return os.path.join(self._root, os.fsdecode(self._paths[self._path_ends[index]:self._path_ends[index + 1]]))

  def _labels_of(self, index: int) -> list[int]:
    return self._labels[self._label_ends[index]:self._label_ends[index + 1]].tolist()


class CaptionedFiles(LabeledFiles):
  """Image files below `root` with captions and without classes."""

  def __init__(self, root: str, images: Sequence[Image], *, name: str, title: str = '', rules: Rules = OWN) -> None:
    super().__init__(root, images, name=name, class_names=UNLABELED, title=title, rules=rules)
    encoded = [[text.encode(errors='surrogatepass') for text in image.captions] for image in images]
    self._texts = b''.join(text for texts in encoded for text in texts)
    self._text_ends = np.cumsum([0] + [len(text) for texts in encoded for text in texts])
    self._ends = np.cumsum([0] + [len(texts) for texts in encoded])
    self.digest = hashlib.sha256(self.digest.encode() + self._texts + self._text_ends.tobytes()
                                 + self._ends.tobytes()).hexdigest()
    self.most_labels = 0

  def __getitem__(self, index: int) -> Record:
    return Record(user_files.read_image(self.describe(index), self._rules.max_bytes), 0)

  def label(self, index: int) -> int:
    return 0

  def captions(self, index: int) -> tuple[str, ...]:
    """Returns the texts of an image that are not empty. Raises BadImage if one is not valid Unicode."""
    ends = self._text_ends[self._ends[index]:self._ends[index + 1] + 1].tolist()
    try:
      texts = [self._texts[start:end].decode() for start, end in itertools.pairwise(ends)]
    except UnicodeDecodeError:
      raise BadImage('the example: expected captions of valid Unicode, got half of a surrogate pair') from None
    return tuple(text.strip() for text in texts if text.strip())


def opener(where: str, data: schema.Data, image_px: tuple[int, int]) -> Callable[[str], Source] | None:
  """Opens the splits of a folder with label files; None if it has none.

  `data.holdout` of the images is held out as `test` if there is a single file.

  Raises:
    UserError: a split has several files, or (when opening) a file has a problem.
  """
  del image_px
  root, rules = os.path.abspath(os.path.expanduser(where)), Rules.of(data)
  found = _find(root)
  if not found:
    return None
  train = found.get('train') or found.get(SINGLE) or found[min(found)]
  train_names = functools.cache(lambda: _class_names(root, train, rules))

  @functools.cache
  def open_named(split: str) -> Source:
    if SINGLE in found:
      return _open_single(root, found[SINGLE], split, train_names(), holdout=data.holdout,
                          seed=data.holdout_seed, rules=rules)
    name = splits.resolve(split, found, source=f'folder:{root}')
    images = list(read(root, found[name], rules))
    if extra := sorted({c for image in images for c in image.labels} - set(train_names())):
      raise UserError(f'{os.path.join(root, found[name])}: expected the classes of {train}, which defines them, '
                      f'got {len(extra)} others: {json_fields.listed(extra, _SHOWN)}. Correct their names, or add them '
                      f'to {train}.')
    return _source(root, images, name, train_names(), seed=0, rules=rules)
  return open_named


def _find(root: str) -> dict[str, str]:
  """Returns the label files by split. Raises UserError if a split has several."""
  found: dict[str, list[str]] = {}
  for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
    stem, ending = os.path.splitext(name)
    start, _, split = stem.partition('_')
    endings = {NAME: EXTENSIONS, CAPTIONS: ('.jsonl',)}.get(start, ())
    if ending in endings and (split in splits.NAMES or stem == start):
      found.setdefault(split, []).append(name)
  if any(len(names) > 1 for names in found.values()) or (SINGLE in found and len(found) > 1):
    listed = ', '.join(name for names in found.values() for name in names)
    raise UserError(f'folder:{root}: expected one label file for each split, or only {NAME}, got {listed}. Remove '
                    'the others.')
  return {split: names[0] for split, names in found.items()}


def _open_single(root: str, file: str, split: str, class_names: tuple[str, ...], *, holdout: float,
                 seed: int, rules: Rules) -> Source:
  """Opens `train` or `test` of a single label file."""
  name = splits.resolve_part(split, source=f'folder:{root}')
  images = list(read(root, file, rules))
  order = splits.scattered([image.path for image in images], seed=seed)
  num_held = round(len(images) * holdout)
  if not 0 < num_held < len(images):
    raise UserError(f'data.holdout: expected a fraction that leaves images to train and to test on, of the '
                    f'{len(images)} in {os.path.join(root, file)}, got {holdout}. Set another one.')
  chosen = order[num_held:] if name == 'train' else order[:num_held]
  return _source(root, [images[i] for i in sorted(chosen)], name, class_names, seed=seed, rules=rules,
                 title=splits.part_title(f'folder:{root}/{file}', name, holdout))


def _source(root: str, images: Sequence[Image], name: str, class_names: tuple[str, ...], *, seed: int,
            rules: Rules, title: str = '') -> Source:
  order = splits.scattered([image.path for image in images], seed=seed)
  if class_names == UNLABELED:
    return CaptionedFiles(root, [images[i] for i in order], name=f'folder:{root}/{name}', title=title, rules=rules)
  return LabeledFiles(root, [images[i] for i in order], name=f'folder:{root}/{name}', class_names=class_names,
                       title=title, rules=rules)


def _class_names(root: str, file: str, rules: Rules) -> tuple[str, ...]:
  if _is_captions(file):
    return UNLABELED
  names = tuple(sorted({c for _, _, labels, _ in _lines(os.path.join(root, file), root, rules) for c in labels}))
  if not names:
    raise UserError(f'{os.path.join(root, file)}: expected at least one class, got none. {_form(file)}')
  return names


def read(root: str, file: str, rules: Rules = OWN) -> Iterator[Image]:
  """Yields the images of a label file, in its order.

  Raises:
    UserError: a line has another form, or lists an image that is missing, outside of the folder, or listed before.
  """
  path, seen, problems, inside = os.path.join(root, file), set[str](), list[str](), _Inside(root, rules)
  for number, image, labels, captions in _lines(path, root, rules):
    if (name := os.path.normpath(image)) in seen:
      problems.append(f'line {number:,}: {json_fields.describe(image)} twice')
    elif isinstance(found := inside.size(image), str):
      problems.append(f'line {number:,}: {json_fields.describe(image)}, {found}')
    else:
      seen.add(name)
      yield Image(image, found, labels, captions)
  if problems or not seen:
    raise UserError(f'{path}: expected each image below {root} at most once, got '
                    + ('; '.join(problems[:_SHOWN]) or 'no image')
                    + (f'; and {len(problems) - _SHOWN:,} more' if len(problems) > _SHOWN else '') + f'. {_form(path)}')


class _Inside:
  """The files below a folder. Links are resolved once for each folder, as a list may have millions of files."""

  def __init__(self, root: str, rules: Rules) -> None:
    self._root, self._base, self._rules = root, os.path.realpath(root), rules
    self._leads_out: dict[str, bool] = {}

  def size(self, image: str) -> int | str:
    """Returns the size of a file in bytes, or why it is not read."""
    if not user_files.is_below(image):
      return 'which is not a path inside of the folder'
    path, is_outside = os.path.join(self._root, image), False
    try:
      found = os.lstat(path)
      if stat.S_ISLNK(found.st_mode):
        is_outside = not self._rules.follow_links and user_files.leads_out(path, self._base)
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):
      return 'which does not exist'
    except OSError as error:
      if os_errors.is_temporary(error):
        raise access.unreadable(error, path) from error
      return f'which cannot be read: "{error.strerror or error}"'
    if not stat.S_ISREG(found.st_mode):
      return 'which is not a file'
    folder = os.path.dirname(path)
    if folder not in self._leads_out:
      self._leads_out[folder] = not self._rules.follow_links and user_files.leads_out(folder, self._base)
    if is_outside or self._leads_out[folder]:
      return f'a link out of the folder (to read it, {user_files.FOLLOW})'
    return found.st_size


def _is_captions(path: str) -> bool:
  return os.path.basename(path).startswith(CAPTIONS)


def _form(path: str) -> str:
  """Returns how to write the lines of a file."""
  if _is_captions(path):
    return 'Write lines as {"image": "cats/1.jpg", "captions": ["a cat on a sofa", "a pet"]}.'
  return ('Write lines of .csv as `cats/1.jpg,cat,sofa`, of .tsv the same with tabs, of .jsonl '
          '{"image": "cats/1.jpg", "labels": ["cat", "sofa"]}.')


def _lines(path: str, root: str, rules: Rules) -> Iterator[Line]:
  """Yields each line that is not empty."""
  user_files.check_inside(path, root, rules)
  lines = user_files.read_lines(path, path, expected='a text file in UTF-8', advice=_form(path))
  yield from _json_lines(path, lines) if path.endswith('.jsonl') else _cells(path, lines)


def _cells(path: str, lines: Iterator[str]) -> Iterator[Line]:
  rows = csv.reader(lines, delimiter='\t' if path.endswith('.tsv') else ',')
  try:
    for row in rows:
      cells = [cell.strip() for cell in row]
      if any(cells) and not (rows.line_num == 1 and cells[0].lower() in _HEADERS):
        yield rows.line_num, cells[0], tuple(dict.fromkeys(cell for cell in cells[1:] if cell)), ()
  except csv.Error:  # a cell is too long
    raise UserError(f'{path}, line {rows.line_num:,}: expected cells of at most {csv.field_size_limit():,} characters, '
                    'got a longer one, perhaps after a quotation mark that is not closed. Close it.') from None


def _json_lines(path: str, lines: Iterator[str]) -> Iterator[Line]:
  name = CAPTIONS if _is_captions(path) else NAME
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    entry = json_fields.parse(line, f'{path}, line {number:,}', expected=f'an object with `image` and `{name}`',
                              advice=_form(path))
    items = list(entry.field(name).items())
    image = entry.field('image').text()
    if name == CAPTIONS:
      yield number, image, (), tuple(item.value if isinstance(item.value, str) else item.text() for item in items)
    else:
      labels = [label.text().strip() for label in items]
      yield number, image, tuple(dict.fromkeys(label for label in labels if label)), ()
