"""`folder:PATH` with a label file: images with any number of classes each, as listed in a file beside them.

PATH has a file for each split, `labels_train`, `labels_val` (or `_valid`, `_validation`) and `labels_test`, or a
single `labels`, of which a part is held out as the test split. The extension selects the format; image paths are
relative to PATH:

  .csv, .tsv  a line for each image, `cats/1.jpg,cat,sofa` or with tabs: the path and then any number of classes. The
              file itself decides: its separator, whether its first line is a header, and in which column images are
              that exist. What it leaves open is refused: columns beside that of the class, and columns of 0 and 1.
  .jsonl      a JSON object in each line: {"image": "cats/1.jpg", "labels": ["cat", "sofa"]}

Files named `captions_train.jsonl` and so on, or `captions.jsonl`, have captions of images, and no labels:
{"image": "cats/1.jpg", "captions": ["a cat on a sofa", "a pet"]}.

The classes are those of the training file, or else of the first file by name, in the order of `classes.ordered`. If
each image has one class, classes exclude each other. Else, in training, an image without a class is an example of no
class; in evaluations, it does not count.

`folder.py` calls `opener` before it looks at the folders, and opens the folder itself if there is no label file. For
each split a `_File` reads the lines, `label_paths.py` finds the image of each, and `LabeledFiles` has the result.
"""
from __future__ import annotations

import csv
import functools
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import splits, user_files
from vit_jax.data.formats import folder_layout
from vit_jax.data.formats.label_paths import Inside
from vit_jax.data.image.headers import BadImage
from vit_jax.data.labels import classes
from vit_jax.data.source import UNLABELED, Record, Rows, Source, warn_once
from vit_jax.data.user_files import OWN, Rules

EXTENSIONS = ('.csv', '.tsv', '.jsonl')
NAME, CAPTIONS, SINGLE = 'labels', 'captions', ''
_FRACTION = r'[+-]?(\d+\.\d*|\.\d+|\d+e[+-]?\d+)(e[+-]?\d+)?'
_SHOWN, _COLUMNS_SHOWN = 5, 20  # problems and columns in a message
_PEEKED = 20  # rows that show the form of a file
_SEPARATORS = (',', ';', '\t')
_IMAGE = re.compile(r'(image|img|file|photo|picture|filename|path|id)((file)?(name|path|id|index)?)?')
_CLASS = re.compile(r'(label|class|tag|categor(y|ie)|target)(e?s)?\d*')
_INDEX = ('', 'unnamed0')
"""Names of a column of row numbers, as pandas writes it."""
_FLAGS = {'', '0', '1', '0.0', '1.0', 'True', 'False', 'true', 'false'}
"""Cells that say whether an image has the class of the column."""
_NO_FLAGS = ('Write a line for each image with the names of its classes: `cats/1.jpg,cat`; or, for one of these '
             'columns alone, name it in data.label_column.')


class Image(NamedTuple):
  """An image of a label file: its path relative to the folder, size in bytes, and class names or captions."""
  path: str
  size: int
  labels: tuple[str, ...] = ()
  captions: tuple[str, ...] = ()


class _Texts:
  """Texts as one block of bytes, as many Python objects would pickle slowly to a loader process."""

  def __init__(self, texts: Sequence[bytes]) -> None:
    self.content, self.ends = b''.join(texts), np.cumsum([0] + [len(text) for text in texts])

  def __getitem__(self, row: int) -> bytes:
    return self.content[self.ends[row]:self.ends[row + 1]]


class LabeledFiles(Rows):
  """Image files below `root`, each with any number of classes, or with captions, read on access."""

  own_files = True

  def __init__(self, root: str, images: Sequence[Image], *, name: str, class_names: tuple[str, ...],
               title: str = '', rules: Rules = OWN, is_single: bool = False) -> None:
    self.name, self.title, self.class_names, self._root, self._rules = name, title, class_names, root, rules
    is_labeled, numbers = class_names != UNLABELED, {name: number for number, name in enumerate(class_names)}
    self._paths = _Texts([os.fsencode(image.path) for image in images])
    self._labels = np.array([numbers[name] for image in images for name in image.labels], np.int32)
    self._label_ends = np.cumsum([0] + [len(image.labels) for image in images])
    self._texts = _Texts([text.encode(errors='surrogatepass') for image in images for text in image.captions])
    self._text_ends = np.cumsum([0] + [len(image.captions) for image in images])
    text = '\n'.join([f'{image.path} {image.size} {image.labels}' for image in images] + [f'{class_names}'])
    self.digest = hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()
    if not is_labeled:
      self.digest = hashlib.sha256(self.digest.encode() + self._texts.content + self._texts.ends.tobytes()
                                   + self._text_ends.tobytes()).hexdigest()
    self.most_labels = 0 if is_single or not is_labeled else max([1, *(len(image.labels) for image in images)])

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
      texts = [self._texts[number].decode() for number in range(self._text_ends[row], self._text_ends[row + 1])]
    except UnicodeDecodeError:
      raise BadImage('the example: expected captions of valid Unicode, got half of a surrogate pair') from None
    return tuple(text.strip() for text in texts if text.strip())

  def path(self, row: int) -> str:
    return os.path.join(self._root, os.fsdecode(self._paths[row]))

  def describe(self, row: int) -> str:
    return self.path(row)


def opener(where: str, data: schema.Data, *, order: Sequence[str] = ()) -> Callable[[str], Source] | None:
  """Opens the splits of a folder with label files; None if it has none.

  `data.holdout` of the images is held out as `test` if there is a single file. `data.label_column` and
  `data.image_column` name columns of a file with a header, or fields of JSON. `order` has the classes of a run that
  resumes.

  Raises:
    UserError: a split has several files, or (when opening) a file has a problem.
  """
  root = os.path.abspath(os.path.expanduser(where))
  names, columns, rules = _find(root), (data.image_column, data.label_column), Rules.of(data)
  if not names:
    if any(columns):
      raise UserError(f'data.label_column: expected a label file in {root}, such as labels.csv, got none'
                      f'{beside(root)}. Name the file so, or leave the column out.')
    return None
  files = functools.cache(lambda split: _File(root, names[split], rules, *columns))
  defining = 'train' if 'train' in names else SINGLE if SINGLE in names else min(names)
  define = functools.cache(lambda: files(defining).define_classes(order))

  def source(images: Sequence[Image], split: str, *, seed: int, title: str = '') -> Source:
    class_names, is_single = define()
    images = [images[i] for i in _scattered(images, seed).tolist()]
    return LabeledFiles(root, images, name=f'folder:{root}/{split}', class_names=class_names, title=title, rules=rules,
                        is_single=is_single and all(len(image.labels) == 1 for image in images))

  @functools.cache
  def open_named(split: str) -> Source:
    if SINGLE in names:
      images = files(SINGLE).images(define()[0])
      listed = {os.path.normpath(image.path).split('/')[0] for image in images}
      if unread := [name for name in folder_layout.subfolders(root) if name not in listed]:
        warn_once(f'{root}: images are those that {names[SINGLE]} lists; not read: the folders '
                  f'{documents.listed(unread, _SHOWN)}.')
      part = splits.resolve_part(split, source=f'folder:{root}')
      title = splits.part_title(f'folder:{root}/{names[SINGLE]}', part, data.holdout)
      return source(_part(images, part, data, files(SINGLE).path), part, seed=data.holdout_seed, title=title)
    split, class_names = splits.resolve(split, names, source=f'folder:{root}'), define()[0]
    images = files(split).images(class_names)
    if extra := sorted({name for image in images for name in image.labels} - set(class_names)):
      raise UserError(f'{files(split).path}: expected the classes of {names[defining]}, which defines them, '
                      f'got {len(extra)} others: {documents.listed(extra, _SHOWN)}. Correct their names, or add them '
                      f'to {names[defining]}.')
    if split != defining == 'train':
      paths = {image.path for image in images}
      if num := len({line.image for line in files('train').lines() if line.image in paths}):
        warn_once(f'{files(split).path}: {num:,} of its {len(paths):,} images are in {names["train"]} too, so a score '
                  'on them says little about other images.')
    return source(images, split, seed=0)
  return open_named


def _find(root: str) -> dict[str, str]:
  """Returns the name of the label file of each split. Raises UserError if a split has several."""
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


def beside(root: str) -> str:
  """Returns what a message says of tables in a folder that have another name than label files; or ''."""
  read = set(_find(root).values())
  names = [name for name in sorted(os.listdir(root)) if name.lower().endswith(EXTENSIONS) and name not in read]
  return (f'; not read: {documents.listed(names, _SHOWN)}, as label files are named labels.csv, or labels_train.csv '
          'and labels_test.csv') if names else ''


def _scattered(images: Sequence[Image], seed: int) -> HostArray:
  return splits.scattered((os.fsencode(image.path) for image in images), len(images), seed=seed)


def _part(images: Sequence[Image], part: str, data: schema.Data, path: str) -> Sequence[Image]:
  """Returns the images of `train`, `test` or `all` of the single label file `path`."""
  if part == splits.ALL:
    return images
  order, num_held = _scattered(images, data.holdout_seed).tolist(), round(len(images) * data.holdout)
  if not 0 < num_held < len(images):
    raise UserError(f'data.holdout: expected a fraction that leaves images to train and to test on, of the '
                    f'{len(images)} in {path}, got {data.holdout}. Set another one.')
  return [images[i] for i in sorted(order[num_held:] if part == 'train' else order[:num_held])]


class _Line(NamedTuple):
  """A line of a label file that is not empty: its number, the path of its image, and its classes or captions."""
  number: int
  image: str
  labels: tuple[str, ...] = ()
  captions: tuple[str, ...] = ()


class _Form(NamedTuple):
  """The form of a table.

  image: column of the paths.
  labels: columns of classes; all columns from `rest` on have classes, too.
  """
  separator: str
  has_header: bool
  image: int = 0
  labels: tuple[int, ...] = ()
  rest: int = 1


class _File:
  """The label file `name` in `root`; `image` and `label` are the columns that settings name, '' = the file decides."""

  def __init__(self, root: str, name: str, rules: Rules, image: str, label: str) -> None:
    self.path, self._inside = os.path.join(root, name), Inside(root, rules)
    self.has_captions = name.startswith(CAPTIONS)
    self._image, self._label = image, label
    self.form = ('Write lines as {"image": "cats/1.jpg", "captions": ["a cat on a sofa", "a pet"]}.' if
                 self.has_captions else
                 'Write lines of .csv as `cats/1.jpg,cat,sofa`, of .tsv the same with tabs, of .jsonl '
                 '{"image": "cats/1.jpg", "labels": ["cat", "sofa"]}.')

  def define_classes(self, order: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Returns the classes of the file, and whether each of its images has one of them.

    `order` has the classes of a run that resumes.

    Raises:
      UserError: it has none, or numbers that are no classes.
    """
    if self.has_captions:
      return UNLABELED, False
    names, counts = dict[str, str](), set[int]()
    for line in self.lines():
      counts |= {len(line.labels)} if line.image or line.labels else set()
      for label in line.labels:
        names.setdefault(classes.composed(label), label)
    if not names:
      raise UserError(f'{self.path}: expected at least one class, got none. {self.form}')
    if max(counts) > 1 and _FLAGS.issuperset(names):
      raise UserError(f'{self.path}: expected the names of classes, got cells of {" and ".join(sorted(names))} for '
                      f'each of several classes. {_NO_FLAGS}')
    if all(re.fullmatch(_FRACTION, name) for name in names):
      raise UserError(f'{self.path}: expected names or whole numbers of classes, got fractions such as {min(names)}. '
                      'Write the class of each image as a name or a whole number.')
    return classes.ordered(list(names.values()), order), counts == {1}

  def images(self, class_names: Sequence[str]) -> list[Image]:
    """Returns the images, in order; their classes have the Unicode form that `class_names` have.

    Raises:
      UserError: a line has another form, or lists an image that is missing, outside of the folder, or listed before.
    """
    forms = {classes.composed(name): name for name in class_names}
    images = dict[str, Image]()
    problems, missing, num_problems = list[str](), list[tuple[str, ...]](), 0
    for line in self.lines():
      file = self._inside.find(line.image)
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
    root = self._inside.root
    if problems and not images:
      raise UserError(f'{self.path}: expected images below {root}, got {num_problems:,} lines that name none, such as '
                      f'{problems[0]}. {self._inside.cause(missing)} {self.form}')
    if problems or not images:
      raise UserError(f'{self.path}: expected each image below {root} at most once, got '
                      + ('; '.join(problems) or 'no image')
                      + (f'; and {num_problems - _SHOWN:,} more' if num_problems > _SHOWN else '') + f'. {self.form}')
    return list(images.values())

  def lines(self) -> Iterator[_Line]:
    """Yields each line that is not empty.

    Raises:
      UserError: a line has another form. Whether its image exists is not checked.
    """
    user_files.check_inside(self.path, self._inside.root, self._inside.rules)
    yield from self._json_lines() if self.path.endswith('.jsonl') else self._table_lines()

  def _read(self) -> Iterator[str]:
    return user_files.read_lines(self.path, self.path, expected='a text file in UTF-8', advice=self.form)

  def _json_lines(self) -> Iterator[_Line]:
    name = CAPTIONS if self.has_captions else self._label or NAME
    for number, line in enumerate(self._read(), 1):
      if not line.strip():
        continue
      entry = documents.field(line, f'{self.path}, line {number:,}', nan=True, advice=self.form,
                              expected=f'an object with `image` and `{name}`')
      field = entry.field(name)
      items = [field] if self._label and isinstance(field.value, str) else list(field.items())
      image = entry.field(self._image or 'image').text()
      if self.has_captions:  # which may have half of a surrogate pair, unlike other texts
        yield _Line(number, image, (), tuple(item.value if isinstance(item.value, str) else item.text()
                                             for item in items))
      else:
        yield _Line(number, image, _distinct(label.text().strip() for label in items))

  def _table_lines(self) -> Iterator[_Line]:
    peeked = [line for line in itertools.islice(self._read(), _PEEKED) if line.strip()]
    form = self._find_form(peeked)
    for number, cells in itertools.islice(self._rows(self._read(), form.separator), int(form.has_header), None):
      labels = [cells[column] for column in form.labels if column < len(cells)] + cells[form.rest:]
      yield _Line(number, cells[form.image] if form.image < len(cells) else '', _distinct(labels))

  def _rows(self, lines: Iterator[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the number and the cells of each row that is neither empty nor a comment."""
    rows = csv.reader(lines, delimiter=separator)
    try:
      for row in rows:
        cells = [cell.strip() for cell in row]
        is_comment = cells and cells[0].startswith('#') and not self._exists(cells[0]) and (
            len(cells) < 2 or not _IMAGE.fullmatch(_plain(cells[0])))
        if any(cells) and not is_comment:
          yield rows.line_num, cells
    except csv.Error:  # a cell is too long
      raise UserError(f'{self.path}, line {rows.line_num:,}: expected cells of at most {csv.field_size_limit():,} '
                      'characters, got a longer one, perhaps after a quotation mark that is not closed. Close it.'
                      ) from None

  def _find_form(self, peeked: Sequence[str]) -> _Form:
    """Returns the form of a table, as its first lines have it, or the columns that settings name.

    The first line is a header, unless it has an image itself, or neither it nor the first image names a column.

    Raises:
      UserError: there is no column of the name that a setting has, or several columns may have the classes.
    """
    usual = '\t' if self.path.endswith('.tsv') else ','  # by the extension, or else the one that all lines have
    separator = usual if any(usual in line for line in peeked) else next(
        (mark for mark in _SEPARATORS if peeked and all(mark in line for line in peeked)), usual)
    rows = [cells for _, cells in self._rows(iter(peeked), separator)]
    header = [cell.lstrip('# ') for cell in rows[0]] if rows else []
    first = next((cells for cells in rows[1:] if any(map(self._exists, cells))), [])  # row with an image that exists
    by_name = [column for column, name in enumerate(header) if _IMAGE.fullmatch(_plain(name))]
    by_file = [column for column, cell in enumerate(first) if self._exists(cell)]
    is_image = not header or any(map(self._exists, header)) or any(
        os.path.splitext(cell)[1].lower() in user_files.EXTENSIONS for cell in header)
    if not (self._image or self._label) and (is_image or not (by_name or by_file)):
      return _Form(separator, False)
    image = self._column(header, self._image, 'image') if self._image else next(
        (column for column in by_name if column in by_file), next(iter(by_file or by_name), 0))
    if self._label:
      return _Form(separator, True, image, (self._column(header, self._label, 'label'),), 10**6)
    others = [column for column, name in enumerate(header) if column != image and _plain(name) not in _INDEX]
    if len(others) > 1 and not all(_CLASS.fullmatch(_plain(header[column])) for column in others):
      listed = documents.listed([header[column] for column in others], _COLUMNS_SHOWN)
      values = {row[column] for row in rows[1:] for column in others if column < len(row)} - {''}
      if values and values <= _FLAGS:
        raise UserError(f'{self.path}: expected the names of classes, got {len(others):,} columns of 0 and 1: '
                        f'{listed}. {_NO_FLAGS}')
      raise UserError(f'{self.path}: expected one column with the class of each image, got {len(others):,} beside that '
                      f'of the images: {listed}. Set data.label_column to the one with the class.')
    return _Form(separator, True, image, tuple(others), len(header))

  def _column(self, header: Sequence[str], name: str, what: str) -> int:
    if header.count(name) != 1:
      raise UserError(f'data.{what}_column: expected one of the columns of {self.path}, '
                      f'{documents.listed(header, _COLUMNS_SHOWN)}, got {documents.describe(name)}. Correct it.')
    return header.index(name)

  def _exists(self, cell: str) -> bool:
    return not isinstance(self._inside.find(cell), str)


def _distinct(labels: Iterable[str]) -> tuple[str, ...]:
  """Returns the labels that are not empty, each once."""
  return tuple(dict.fromkeys(filter(None, labels)))


def _plain(name: str) -> str:
  return re.sub('[^a-z0-9]', '', name.lower())
