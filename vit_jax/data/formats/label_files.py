"""`folder:PATH` with a label file: images with any number of classes each, as listed in a file beside them.

PATH has a file for each split, `labels_train`, `labels_val` (or `_valid`, `_validation`) and `labels_test`; or a single
file `labels`, of which a part is held out as the test split. The extension selects the format. Image paths are relative
to PATH:

  .csv, .tsv  a line for each image, `cats/1.jpg,cat,sofa` or with tabs: the path and then any number of classes.
  .jsonl      a JSON object in each line: {"image": "cats/1.jpg", "labels": ["cat", "sofa"]}

The first lines of a table show its separator, whether it has a header, and which column has the images, as these exist
(`_LabelFile._find_form`). A header with several columns that may have the class is an error, and so are columns of 0
and 1. Files named `captions_train.jsonl` and so on, or `captions.jsonl`, have captions of images, and no labels:
{"image": "cats/1.jpg", "captions": ["a cat on a sofa", "a pet"]}.

The classes are those of the training file, or else of the first file by name, in the order of `classes.ordered`. If
each image has one class, classes exclude each other. Else, in training, an image without a class is an example of no
class; in evaluations, it does not count.

`folder.py` calls `opener` first; it returns None if there is no label file. For each split a `_LabelFile` reads the
lines, `label_paths.py` finds the image of each, and `LabeledFiles` is the source with the result.
"""
from __future__ import annotations

import csv
import functools
import hashlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.data import splits, user_files
from vit_jax.data.formats import folder_layout
from vit_jax.data.formats.label_paths import ImagePaths
from vit_jax.data.image.headers import BadImage
from vit_jax.data.labels import classes
from vit_jax.data.source import UNLABELED, Record, Rows, Source, warn_once
from vit_jax.data.user_files import OWN, Rules

EXTENSIONS = ('.csv', '.tsv', '.jsonl')
LABELS, CAPTIONS = 'labels', 'captions'
"""Beginnings of the names of label files, and fields of their JSON."""
_NO_SPLIT = ''  # stands for the split of a single label file
_FRACTION = r'[+-]?(\d+\.\d*|\.\d+|\d+e[+-]?\d+)(e[+-]?\d+)?'  # such as 0.5, 1., .5 or 1e-3
_SHOWN, _COLUMNS_SHOWN = 5, 20  # problems and columns in a message
_FIRST_LINES = 20  # that show the form of a table
_SEPARATORS = (',', ';', '\t')
# Names of columns as `_plain` returns them: of images, such as `image`, `filename` or `imgpath`; of classes, such as
# `label`, `classes` or `category2`; and of row numbers, as pandas writes them.
_IMAGE_COLUMN = re.compile(r'(image|img|file|photo|picture|filename|path|id)((file)?(name|path|id|index)?)?')
_CLASS_COLUMN = re.compile(r'(label|class|tag|categor(y|ie)|target)(e?s)?\d*')
_NUMBER_COLUMNS = ('', 'unnamed0')
_FLAGS = {'', '0', '1', '0.0', '1.0', 'True', 'False', 'true', 'false'}
"""Cells that say whether an image has the class of their column."""
_NO_FLAGS = ('Write a line for each image with the names of its classes: `cats/1.jpg,cat`; or, for one of these '
             'columns alone, name it in data.label_column.')


class Image(NamedTuple):
  """An image of a label file: its path relative to the folder, size in bytes, and class names or captions."""
  path: str
  size: int
  labels: tuple[str, ...] = ()
  captions: tuple[str, ...] = ()


class _Texts:
  """Texts as one block of bytes: a loader process gets a copy of it, and many Python objects would pickle slowly."""

  def __init__(self, texts: Sequence[bytes]) -> None:
    self.content, self.ends = b''.join(texts), np.cumsum([0] + [len(text) for text in texts])

  def __getitem__(self, row: int) -> bytes:
    return self.content[self.ends[row]:self.ends[row + 1]]


class LabeledFiles(Rows):
  """Image files below `root`, each with any number of classes, or with captions, read on access."""

  own_files = True

  def __init__(self, root: str, images: Sequence[Image], *, name: str, class_names: tuple[str, ...],
               title: str = '', rules: Rules = OWN, is_single: bool = False) -> None:
    """Takes the images in the order of their rows; `is_single` = each has one class, and classes exclude each other."""
    self.name, self.title, self.class_names, self._root, self._rules = name, title, class_names, root, rules
    numbers = {name: number for number, name in enumerate(class_names)}
    self._paths = _Texts([os.fsencode(image.path) for image in images])
    self._labels = np.array([numbers[name] for image in images for name in image.labels], np.int32)
    self._label_ends = np.cumsum([0] + [len(image.labels) for image in images])
    self._captions = _Texts([text.encode(errors='surrogatepass') for image in images for text in image.captions])
    self._caption_ends = np.cumsum([0] + [len(image.captions) for image in images])
    text = '\n'.join([f'{image.path} {image.size} {image.labels}' for image in images] + [f'{class_names}'])
    self.digest = hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()
    if class_names == UNLABELED:
      self.digest = hashlib.sha256(self.digest.encode() + self._captions.content + self._captions.ends.tobytes()
                                   + self._caption_ends.tobytes()).hexdigest()
    has_one_class = is_single or class_names == UNLABELED
    self.most_labels = 0 if has_one_class else max([1, *(len(image.labels) for image in images)])

  def __len__(self) -> int:
    return len(self._label_ends) - 1

  def example(self, row: int) -> Record:
    return Record(user_files.read_image(self.path(row), self._rules.max_bytes), self.labels(row))

  def labels(self, row: int) -> tuple[int, ...]:
    if self.class_names == UNLABELED:
      return (0,)
    return tuple(self._labels[self._label_ends[row]:self._label_ends[row + 1]].tolist())

  def captions(self, row: int) -> tuple[str, ...]:
    """Returns the texts of an image that are not empty. Raises BadImage if one is not valid Unicode."""
    try:
      texts = [self._captions[i].decode() for i in range(self._caption_ends[row], self._caption_ends[row + 1])]
    except UnicodeDecodeError:
      raise BadImage('the example: expected captions of valid Unicode, got half of a surrogate pair') from None
    return tuple(text.strip() for text in texts if text.strip())

  def path(self, row: int) -> str:
    return os.path.join(self._root, os.fsdecode(self._paths[row]))

  def describe(self, row: int) -> str:
    return self.path(row)


def opener(where: str, data: schema.Data, *, order: Sequence[str] = ()) -> Callable[[str], Source] | None:
  """Returns the function that opens a split of a folder with label files; None if it has no such file.

  `data.holdout` of the images is held out as `test` if there is a single file. `data.label_column` and
  `data.image_column` name columns of a file with a header, or fields of JSON. `order` has the classes of a run that
  resumes. Raises UserError if a split has several files, or (when opening) a file has a problem.
  """
  root = os.path.abspath(os.path.expanduser(where))
  names = _find(root)
  if not names:
    if data.image_column or data.label_column:
      raise UserError(f'data.label_column: expected a label file in {root}, such as labels.csv, got none'
                      f'{beside(root)}. Name the file so, or leave the column out.')
    return None
  label_file = functools.cache(lambda split: _LabelFile(root, names[split], data))
  defining = 'train' if 'train' in names else min(names)  # the split whose file defines the classes
  define = functools.cache(lambda: label_file(defining).define_classes(order))

  def source(images: Sequence[Image], split: str, title: str = '') -> Source:
    class_names, is_single = define()
    return LabeledFiles(root, images, name=f'folder:{root}/{split}', class_names=class_names, title=title,
                        rules=Rules.of(data), is_single=is_single and all(len(image.labels) == 1 for image in images))

  def open_part(split: str) -> Source:  # of a single label file
    file = label_file(_NO_SPLIT)
    images = _scattered(file.images(define()[0]), data.holdout_seed)
    used = {os.path.normpath(image.path).split('/')[0] for image in images}
    if unread := [name for name in folder_layout.subfolders(root) if name not in used]:
      warn_once(f'{root}: images are those that {names[_NO_SPLIT]} lists; not read: the folders '
                f'{documents.listed(unread, _SHOWN)}.')
    part = splits.resolve_part(split, source=f'folder:{root}')
    if part != splits.ALL:
      num_held = round(len(images) * data.holdout)
      if not 0 < num_held < len(images):
        raise UserError(f'data.holdout: expected a fraction that leaves images to train and to test on, of the '
                        f'{len(images)} in {file.path}, got {data.holdout}. Set another one.')
      images = images[num_held:] if part == 'train' else images[:num_held]
    return source(images, part, splits.part_title(f'folder:{root}/{names[_NO_SPLIT]}', part, data.holdout))

  def open_split(split: str) -> Source:
    split = splits.resolve(split, names, source=f'folder:{root}')
    file, class_names = label_file(split), define()[0]
    images = file.images(class_names)
    if extra := sorted({name for image in images for name in image.labels} - set(class_names)):
      raise UserError(f'{file.path}: expected the classes of {names[defining]}, which defines them, '
                      f'got {len(extra)} others: {documents.listed(extra, _SHOWN)}. Correct their names, or add them '
                      f'to {names[defining]}.')
    if defining == 'train' and split != 'train':
      paths = {os.path.normpath(image.path) for image in images}
      if num := len(paths & label_file('train').find_paths()):
        warn_once(f'{file.path}: {num:,} of its {len(paths):,} images are in {names["train"]} too, so a score '
                  'on them says little about other images.')
    return source(_scattered(images, seed=0), split)
  return functools.cache(open_part if _NO_SPLIT in names else open_split)


def _find(root: str) -> dict[str, str]:
  """Returns the name of the label file of each split. Raises UserError if a split has several."""
  by_split: dict[str, list[str]] = {}
  for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
    stem, extension = os.path.splitext(name)
    kind, _, split = stem.partition('_')  # `labels_train` or `labels`
    extensions = {LABELS: EXTENSIONS, CAPTIONS: ('.jsonl',)}.get(kind, ())
    if extension in extensions and (split in splits.NAMES or stem == kind):
      by_split.setdefault(split, []).append(name)
  if any(len(names) > 1 for names in by_split.values()) or (_NO_SPLIT in by_split and len(by_split) > 1):
    listed = ', '.join(name for names in by_split.values() for name in names)
    raise UserError(f'folder:{root}: expected one label file for each split, or only {LABELS}, got {listed}. Remove '
                    'the others.')
  return {split: names[0] for split, names in by_split.items()}


def beside(root: str) -> str:
  """Returns the part of a message about tables in a folder that are not named as label files; '' if there are none."""
  read = set(_find(root).values())
  names = [name for name in sorted(os.listdir(root)) if name.lower().endswith(EXTENSIONS) and name not in read]
  return (f'; not read: {documents.listed(names, _SHOWN)}, as label files are named labels.csv, or labels_train.csv '
          'and labels_test.csv') if names else ''


def _scattered(images: Sequence[Image], seed: int) -> Sequence[Image]:
  """Returns images in an order that depends only on their paths and the seed."""
  order = splits.scattered((os.fsencode(image.path) for image in images), len(images), seed=seed)
  return [images[i] for i in order.tolist()]


class _Line(NamedTuple):
  """A line of a label file that is not empty: its number, the path of its image, and its classes or captions."""
  number: int
  image: str
  labels: tuple[str, ...] = ()
  captions: tuple[str, ...] = ()


class _Form(NamedTuple):
  """The form of a table: `image` is the column of paths; `labels`, and those from `more_from` on, have classes."""
  separator: str
  has_header: bool
  image: int = 0
  labels: tuple[int, ...] = ()
  more_from: int = 1


class _LabelFile:
  """The label file `name` in `root`."""

  def __init__(self, root: str, name: str, data: schema.Data) -> None:
    self.path, self._image_paths = os.path.join(root, name), ImagePaths(root, Rules.of(data))
    self._has_captions = name.startswith(CAPTIONS)
    self._image, self._label = data.image_column, data.label_column  # columns that settings name, '' = not set
    self._advice = ('Write lines as {"image": "cats/1.jpg", "captions": ["a cat on a sofa", "a pet"]}.'
                    if self._has_captions else
                    'Write lines of .csv as `cats/1.jpg,cat,sofa`, of .tsv the same with tabs, of .jsonl '
                    '{"image": "cats/1.jpg", "labels": ["cat", "sofa"]}.')

  def define_classes(self, order: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Returns the classes of the file, and whether each of its images has one of them.

    `order` has the classes of a run that resumes. Raises UserError if the file has none, or fractions.
    """
    if self._has_captions:
      return UNLABELED, False
    names, counts = dict[str, str](), set[int]()
    for line in self.lines():
      counts |= {len(line.labels)} if line.image or line.labels else set()
      for label in line.labels:
        names.setdefault(classes.composed(label), label)
    if not names:
      raise UserError(f'{self.path}: expected at least one class, got none. {self._advice}')
    if max(counts) > 1 and _FLAGS.issuperset(names):
      raise UserError(f'{self.path}: expected the names of classes, got cells of {" and ".join(sorted(names))} for '
                      f'each of several classes. {_NO_FLAGS}')
    if all(re.fullmatch(_FRACTION, name) for name in names):
      raise UserError(f'{self.path}: expected names or whole numbers of classes, got fractions such as {min(names)}. '
                      'Write the class of each image as a name or a whole number.')
    return classes.ordered(list(names.values()), order), counts == {1}

  def images(self, class_names: Sequence[str]) -> list[Image]:
    """Returns the images, in order; their classes have the Unicode form that `class_names` have.

    Raises UserError if a line has another form, or an image is missing, outside of the folder, or listed twice.
    """
    forms = {classes.composed(name): name for name in class_names}
    images = dict[str, Image]()  # by path
    problems, num_problems = list[str](), 0
    missing = list[tuple[str, ...]]()  # cells of the first lines whose image is not found
    for line in self.lines():
      file = self._image_paths.find(line.image)
      if isinstance(file, str):
        problem = f', {file}'
        if len(missing) < _SHOWN:
          missing.append((line.image, *line.labels))
      elif os.path.normpath(file.path) in images:
        problem = ' twice'
      else:
        labels = dict.fromkeys(forms.get(classes.composed(label), label) for label in line.labels)
        images[os.path.normpath(file.path)] = Image(file.path, file.size, tuple(labels), line.captions)
        continue
      num_problems += 1
      if len(problems) < _SHOWN:
        problems.append(f'line {line.number:,}: {documents.describe(line.image)}{problem}')
    root = self._image_paths.root
    if problems and not images:
      raise UserError(f'{self.path}: expected images below {root}, got {num_problems:,} lines that name none, such as '
                      f'{problems[0]}. {self._image_paths.explain_missing(missing)} {self._advice}')
    if problems or not images:
      more = f'; and {num_problems - _SHOWN:,} more' if num_problems > _SHOWN else ''
      raise UserError(f'{self.path}: expected each image below {root} at most once, got '
                      f'{"; ".join(problems) or "no image"}{more}. {self._advice}')
    return list(images.values())

  def find_paths(self) -> set[str]:
    """Returns the paths of the images that are there, in the form by which images of two files are compared."""
    files = (self._image_paths.find(line.image) for line in self.lines())
    return {os.path.normpath(file.path) for file in files if not isinstance(file, str)}

  def lines(self) -> Iterator[_Line]:
    """Yields each line that is not empty, even if its image is missing. Raises UserError if it has another form."""
    user_files.check_inside(self.path, self._image_paths.root, self._image_paths.rules)
    yield from self._json_lines() if self.path.endswith('.jsonl') else self._table_lines()

  def _read(self) -> Iterator[str]:
    return user_files.read_lines(self.path, self.path, expected='a text file in UTF-8', advice=self._advice)

  def _json_lines(self) -> Iterator[_Line]:
    name = CAPTIONS if self._has_captions else self._label or LABELS
    for number, line in enumerate(self._read(), 1):
      if not line.strip():
        continue
      entry = documents.field(line, f'{self.path}, line {number:,}', nan=True, advice=self._advice,
                              expected=f'an object with `image` and `{name}`')
      field = entry.field(name)
      items = [field] if self._label and isinstance(field.value, str) else list(field.items())
      image = entry.field(self._image or 'image').text()
      if self._has_captions:  # `text` refuses half of a surrogate pair, but `LabeledFiles.captions` handles it
        captions = [item.value if isinstance(item.value, str) else item.text() for item in items]
        yield _Line(number, image, captions=tuple(captions))
      else:
        yield _Line(number, image, _distinct(label.text().strip() for label in items))

  def _table_lines(self) -> Iterator[_Line]:
    form = self._find_form([line for line in itertools.islice(self._read(), _FIRST_LINES) if line.strip()])
    rows = self._rows(self._read(), form.separator)
    if form.has_header:
      next(rows, None)
    for number, cells in rows:
      labels = [cells[column] for column in form.labels if column < len(cells)] + cells[form.more_from:]
      yield _Line(number, cells[form.image] if form.image < len(cells) else '', _distinct(labels))

  def _rows(self, lines: Iterator[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the number and the cells of each row that is neither empty nor a comment."""
    rows = csv.reader(lines, delimiter=separator)
    try:
      for row in rows:
        cells = [cell.strip() for cell in row]
        is_comment = cells and cells[0].startswith('#') and not self._exists(cells[0]) and (
            len(cells) < 2 or not _IMAGE_COLUMN.fullmatch(_plain(cells[0])))
        if any(cells) and not is_comment:
          yield rows.line_num, cells
    except csv.Error:  # a cell is too long
      raise UserError(f'{self.path}, line {rows.line_num:,}: expected cells of at most {csv.field_size_limit():,} '
                      'characters, got a longer one, perhaps after a quotation mark that is not closed. Close it.'
                      ) from None

  def _find_form(self, lines: Sequence[str]) -> _Form:
    """Returns the form of a table, given its first lines, by the columns that settings name or by what the lines have.

    The first line is a header if a setting names a column. Else it is a header unless it has an image itself, or
    neither the name of an image column is in it nor an image that exists below it. Raises UserError if there is no
    column of the name that a setting has, or several columns may have the classes.
    """
    usual = '\t' if self.path.endswith('.tsv') else ','
    separator = usual
    without_comments = [line for line in lines if not line.lstrip().startswith('#')] or lines
    if without_comments and not any(usual in line for line in without_comments):
      separator = next((mark for mark in _SEPARATORS if all(mark in line for line in without_comments)), usual)
    rows = [cells for _, cells in self._rows(iter(lines), separator)]
    header = [cell.lstrip('# ') for cell in rows[0]] if rows else []
    image_row = next((cells for cells in rows[1:] if any(map(self._exists, cells))), [])
    named = [column for column, name in enumerate(header) if _IMAGE_COLUMN.fullmatch(_plain(name))]
    existing = [column for column, cell in enumerate(image_row) if self._exists(cell)]
    is_image = not header or any(map(self._exists, header)) or any(
        os.path.splitext(cell)[1].lower() in user_files.EXTENSIONS for cell in header)
    if not (self._image or self._label) and (is_image or not (named or existing)):
      return _Form(separator, has_header=False)
    if self._image:
      image = self._column(header, self._image, 'image')
    else:
      image = ([column for column in named if column in existing] or existing or named or [0])[0]
    if self._label:
      return _Form(separator, True, image, (self._column(header, self._label, 'label'),), more_from=sys.maxsize)
    others = [column for column, name in enumerate(header) if column != image and _plain(name) not in _NUMBER_COLUMNS]
    if len(others) > 1 and not all(_CLASS_COLUMN.fullmatch(_plain(header[column])) for column in others):
      listed = documents.listed([header[column] for column in others], _COLUMNS_SHOWN)
      values = {row[column] for row in rows[1:] for column in others if column < len(row)} - {''}
      if values and values <= _FLAGS:
        raise UserError(f'{self.path}: expected the names of classes, got {len(others):,} columns of 0 and 1: '
                        f'{listed}. {_NO_FLAGS}')
      raise UserError(f'{self.path}: expected one column with the class of each image, got {len(others):,} beside that '
                      f'of the images: {listed}. Set data.label_column to the one with the class.')
    return _Form(separator, True, image, tuple(others), more_from=len(header))

  def _column(self, header: Sequence[str], name: str, what: str) -> int:
    """Returns the column of this name, which the setting `data.{what}_column` has."""
    if header.count(name) != 1:
      raise UserError(f'data.{what}_column: expected one of the columns of {self.path}, '
                      f'{documents.listed(header, _COLUMNS_SHOWN)}, got {documents.describe(name)}. Correct it.')
    return header.index(name)

  def _exists(self, cell: str) -> bool:
    """Returns whether a cell is the path of an image."""
    return not isinstance(self._image_paths.find(cell), str)


def _distinct(labels: Iterable[str]) -> tuple[str, ...]:
  """Returns the labels that are not empty, each once."""
  return tuple(dict.fromkeys(filter(None, labels)))


def _plain(name: str) -> str:
  """Returns the letters and digits of the name of a column, in lower case."""
  return re.sub('[^a-z0-9]', '', name.lower())
