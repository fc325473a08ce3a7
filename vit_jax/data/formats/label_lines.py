"""Reads the lines of a label file: the path of an image and its classes or captions, from a table or from JSON.

`label_files.py` makes a `LabelLines` for each label file and calls `read`. The first lines of a table (`.csv`, `.tsv`)
show the separator, whether there is a header, and which column has the images, see `LabelLines._detect_form`. A header
with several columns that may have the class is an error, and so are columns of 0 and 1.
"""
from __future__ import annotations

import csv
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.data import user_files
from vit_jax.data.formats.label_paths import ImagePaths

LABELS, CAPTIONS = 'labels', 'captions'
"""Beginnings of the names of label files, and fields of their JSON."""
FLAGS = {'', '0', '1', '0.0', '1.0', 'True', 'False', 'true', 'false'}
"""Cells that say whether an image has the class of their column."""
ADVICE_FOR_FLAGS = ('Write a line for each image with the names of its classes: `cats/1.jpg,cat`; or, for one of these '
                    'columns alone, name it in data.label_column.')
_MAX_COLUMNS_SHOWN = 20  # in a message
_NUM_FIRST_LINES = 20  # that show the form of a table
_SEPARATORS = (',', ';', '\t')
# Names of columns, for `_matches`: of images, such as `image`, `filename` or `imgpath`; of classes, such as `label`,
# `classes` or `category2`; and of row numbers, as pandas writes them.
_IMAGE_COLUMN = re.compile(r'(image|img|file|photo|picture|filename|path|id)((file)?(name|path|id|index)?)?')
_CLASS_COLUMN = re.compile(r'(label|class|tag|categor(y|ie)|target)(e?s)?\d*')
_ROW_NUMBER_COLUMN = re.compile(r'(unnamed0)?')


class Line(NamedTuple):
  """A line of a label file that is not empty: its number from 1, the path of its image, and its classes or captions."""
  number: int
  image: str
  labels: tuple[str, ...] = ()
  captions: tuple[str, ...] = ()


class _TableForm(NamedTuple):
  """How a table is read: columns, counted from 0, with paths of images and with classes."""
  separator: str
  has_header: bool
  image: int = 0
  labels: tuple[int, ...] = ()
  more_labels_from: int = 1  # all cells from this column on are classes, too


class LabelLines:
  """The lines of the label file `path`, whose images `image_paths` finds. Each call of `read` reads all lines."""

  def __init__(self, path: str, image_paths: ImagePaths, data: schema.Data) -> None:
    self.has_captions = os.path.basename(path).startswith(CAPTIONS)
    self.advice = ('Write lines as {"image": "cats/1.jpg", "captions": ["a cat on a sofa", "a pet"]}.'
                   if self.has_captions else
                   'Write lines of .csv as `cats/1.jpg,cat,sofa`, of .tsv the same with tabs, of .jsonl '
                   '{"image": "cats/1.jpg", "labels": ["cat", "sofa"]}.')
    self._path, self._image_paths = path, image_paths
    self._image_column, self._label_column = data.image_column, data.label_column  # or fields of JSON; '' = not set

  def read(self) -> Iterator[Line]:
    """Yields each line that is not empty, even if its image is missing. Raises UserError if the form is wrong."""
    user_files.check_inside(self._path, self._image_paths.root, self._image_paths.rules)
    yield from self._read_json() if self._path.endswith('.jsonl') else self._read_table()

  def _read_text(self) -> Iterator[str]:
    return user_files.read_lines(self._path, self._path, expected='a text file in UTF-8', advice=self.advice)

  def _read_json(self) -> Iterator[Line]:
    name = CAPTIONS if self.has_captions else self._label_column or LABELS
    for number, text in enumerate(self._read_text(), 1):
      if not text.strip():
        continue
      entry = documents.field(text, f'{self._path}, line {number:,}', nan=True, advice=self.advice,
                              expected=f'an object with `image` and `{name}`')
      field = entry.field(name)
      is_single_text = self._label_column and isinstance(field.value, str)
      items = [field] if is_single_text else list(field.elements())
      image = entry.field(self._image_column or 'image').text()
      if self.has_captions:  # `text` refuses half of a surrogate pair, but `LabeledFiles.captions` handles it
        captions = [item.value if isinstance(item.value, str) else item.text() for item in items]
        yield Line(number, image, captions=tuple(captions))
      else:
        yield Line(number, image, _distinct(label.text().strip() for label in items))

  def _read_table(self) -> Iterator[Line]:
    first_lines = itertools.islice(self._read_text(), _NUM_FIRST_LINES)
    form = self._detect_form([line for line in first_lines if line.strip()])
    rows = self._split_rows(self._read_text(), form.separator)
    if form.has_header:
      next(rows, None)
    for number, cells in rows:
      image = cells[form.image] if form.image < len(cells) else ''
      labels = [cells[column] for column in form.labels if column < len(cells)] + cells[form.more_labels_from:]
      yield Line(number, image, _distinct(labels))

  def _split_rows(self, lines: Iterator[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and the cells of each row that is neither empty nor a comment."""
    rows = csv.reader(lines, delimiter=separator)
    try:
      for row in rows:
        cells = [cell.strip() for cell in row]
        if any(cells) and not self._is_comment(cells):
          yield rows.line_num, cells
    except csv.Error:  # a cell is too long
      raise UserError(f'{self._path}, line {rows.line_num:,}: expected cells of at most {csv.field_size_limit():,} '
                      'characters, got a longer one, perhaps after a quotation mark that is not closed. Close it.'
                      ) from None

  def _is_comment(self, cells: Sequence[str]) -> bool:
    """Returns whether a row begins with `#`, and is no header, such as `#image,label`, and not that of an image."""
    if not cells[0].startswith('#') or self._is_image(cells[0]):
      return False
    return len(cells) == 1 or not _matches(_IMAGE_COLUMN, cells[0])

  def _detect_form(self, lines: Sequence[str]) -> _TableForm:
    """Returns the form of the table that begins with these lines.

    The first row is a header if a setting names a column. Else it is a header if it has no path of an image itself, and
    the column of images is found by its name or by the images below. Raises UserError if there is no column of the name
    that a setting has, or several columns may have the class.
    """
    separator = _detect_separator(lines, usual='\t' if self._path.endswith('.tsv') else ',')
    rows = [cells for _, cells in self._split_rows(iter(lines), separator)]
    header = [cell.lstrip('# ') for cell in rows[0]] if rows else []  # the first row, which may be no header
    image_columns = self._find_image_columns(header, rows[1:])
    is_column_set = bool(self._image_column or self._label_column)
    if not is_column_set and (not image_columns or self._has_image(header)):
      return _TableForm(separator, has_header=False)
    if self._image_column:
      image = self._find_column(header, self._image_column, setting='data.image_column')
    else:
      image = image_columns[0] if image_columns else 0
    if self._label_column:
      label = self._find_column(header, self._label_column, setting='data.label_column')
      return _TableForm(separator, True, image, (label,), more_labels_from=sys.maxsize)
    labels = self._find_label_columns(header, rows[1:], image)
    return _TableForm(separator, True, image, labels, more_labels_from=len(header))

  def _find_image_columns(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Returns the columns that have a name for images and an image that exists, or else those with one of the two."""
    row_with_image = next((cells for cells in rows if any(map(self._is_image, cells))), [])
    with_image = [column for column, cell in enumerate(row_with_image) if self._is_image(cell)]
    with_name = [column for column, name in enumerate(header) if _matches(_IMAGE_COLUMN, name)]
    return [column for column in with_name if column in with_image] or with_image or with_name

  def _find_label_columns(self, header: Sequence[str], rows: Sequence[Sequence[str]], image: int) -> tuple[int, ...]:
    """Returns the columns with classes. Raises UserError if there are several, and a name is not one for classes."""
    columns = [column for column, name in enumerate(header)
               if column != image and not _matches(_ROW_NUMBER_COLUMN, name)]
    if len(columns) < 2 or all(_matches(_CLASS_COLUMN, header[column]) for column in columns):
      return tuple(columns)
    listed = documents.listed([header[column] for column in columns], _MAX_COLUMNS_SHOWN)
    cells = {row[column] for row in rows for column in columns if column < len(row)} - {''}
    if cells and cells <= FLAGS:
      raise UserError(f'{self._path}: expected the names of classes, got {len(columns):,} columns of 0 and 1: '
                      f'{listed}. {ADVICE_FOR_FLAGS}')
    raise UserError(f'{self._path}: expected one column with the class of each image, got {len(columns):,} beside that '
                    f'of the images: {listed}. Set data.label_column to the one with the class.')

  def _find_column(self, header: Sequence[str], name: str, *, setting: str) -> int:
    """Returns the column with the name that a setting has. Raises UserError unless exactly one column has it."""
    if header.count(name) != 1:
      raise UserError(f'{setting}: expected one of the columns of {self._path}, '
                      f'{documents.listed(header, _MAX_COLUMNS_SHOWN)}, got {documents.describe(name)}. Correct it.')
    return header.index(name)

  def _has_image(self, cells: Sequence[str]) -> bool:
    """Returns whether a cell is the path of an image that exists, or has the extension of an image."""
    return any(self._is_image(cell) or os.path.splitext(cell)[1].lower() in user_files.EXTENSIONS for cell in cells)

  def _is_image(self, cell: str) -> bool:
    """Returns whether a cell is the path of an image that exists."""
    return not isinstance(self._image_paths.find(cell), str)


def _detect_separator(lines: Sequence[str], *, usual: str) -> str:
  """Returns `usual` if a line has it; else the separator that all lines have, if there is one. Comments are skipped."""
  without_comments = [line for line in lines if not line.lstrip().startswith('#')] or lines
  if not without_comments or any(usual in line for line in without_comments):
    return usual
  return next((separator for separator in _SEPARATORS if all(separator in line for line in without_comments)), usual)


def _distinct(labels: Iterable[str]) -> tuple[str, ...]:
  """Returns the labels that are not empty, each once."""
  return tuple(dict.fromkeys(filter(None, labels)))


def _matches(pattern: re.Pattern[str], name: str) -> bool:
  """Returns whether the letters and digits of the name of a column, in lower case, match a pattern."""
  return pattern.fullmatch(re.sub('[^a-z0-9]', '', name.lower())) is not None
