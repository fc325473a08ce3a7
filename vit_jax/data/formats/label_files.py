"""`folder:PATH` with a label file: images with any number of classes each, which a file beside the images lists.

PATH has a file for each split, `labels_train`, `labels_val` (or `_valid`, `_validation`) and `labels_test`; or a single
file `labels`, and then a fraction of its images is held out as the test split. The extension selects the format. Image
paths are relative to PATH:

  .csv, .tsv  a line for each image, `cats/1.jpg,cat,sofa` or with tabs: the path and then any number of classes.
  .jsonl      a JSON object in each line: {"image": "cats/1.jpg", "labels": ["cat", "sofa"]}

Files named `captions_train.jsonl` and so on, or `captions.jsonl`, have captions of images, and no labels:
{"image": "cats/1.jpg", "captions": ["a cat on a sofa", "a pet"]}.

The classes are those of the training file, or else of the first file by name, in the order of `classes.ordered`. If
each image has one class, classes exclude each other. Else, in training, an image without a class is an example of no
class; in evaluations, the image does not count.

`folder.py` first calls `opener`, which returns None if there is no label file. `_LabeledFolder` opens the splits. For
each split, a `_LabelFile` reads the lines with `label_lines.py` and finds the images with `label_paths.py`, and
`LabeledFiles` is the source with these images.
"""
from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents
from vit_jax.core.errors import UserError
from vit_jax.data import splits, user_files
from vit_jax.data.formats import folder_layout, label_lines
from vit_jax.data.formats.label_lines import CAPTIONS, LABELS, LabelLines, Line
from vit_jax.data.formats.label_paths import ImagePaths
from vit_jax.data.image.headers import BadImage
from vit_jax.data.labels import classes
from vit_jax.data.source import UNLABELED, Record, Rows, Source, warn_once
from vit_jax.data.user_files import OWN, Rules

EXTENSIONS = ('.csv', '.tsv', '.jsonl')
_NO_SPLIT = ''  # stands for the split of a single label file
_FRACTION = re.compile(r'[+-]?(\d+\.\d*|\.\d+|\d+e[+-]?\d+)(e[+-]?\d+)?')  # such as 0.5, 1., .5 or 1e-3
_MAX_SHOWN = 5  # problems or names in a message


class Image(NamedTuple):
  """An image of a label file: its path relative to the folder, size in bytes, and class names or captions."""
  path: str
  size: int
  labels: tuple[str, ...] = ()
  captions: tuple[str, ...] = ()


class _Texts:
  """Texts as one block of bytes. A loader process gets a pickled copy, and many Python objects would pickle slowly."""

  def __init__(self, texts: Sequence[bytes]) -> None:
    self.content = b''.join(texts)
    self.ends = np.cumsum([0] + [len(text) for text in texts])  # text i is `content[ends[i]:ends[i + 1]]`

  def __getitem__(self, index: int) -> bytes:
    return self.content[self.ends[index]:self.ends[index + 1]]


class LabeledFiles(Rows):
  """Image files below `root`, each with any number of classes, or with captions, read on access."""

  own_files = True

  def __init__(self, root: str, images: Sequence[Image], *, name: str, class_names: tuple[str, ...],
               title: str = '', rules: Rules = OWN, is_single: bool = False) -> None:
    """Takes the images in the order of their rows; `is_single` = each has one class, and classes exclude each other."""
    self.name, self.title, self.class_names = name, title, class_names
    self._root, self._rules = root, rules
    class_by_name = {name: index for index, name in enumerate(class_names)}
    self._paths = _Texts([os.fsencode(image.path) for image in images])
    self._labels = np.array([class_by_name[label] for image in images for label in image.labels], np.int32)
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
  """Returns the function that opens a split of a folder with label files; None if the folder has no such file.

  If there is a single file, the fraction `data.holdout` of its images is held out as `test`. `data.label_column` and
  `data.image_column` name columns of a file with a header, or fields of JSON. `order` has the classes of a run that
  resumes. Raises UserError if a split has several files, or (when a split is opened) a file has a problem.
  """
  root = os.path.abspath(os.path.expanduser(where))
  file_by_split = _find_files(root)
  if file_by_split:
    folder = _LabeledFolder(root, file_by_split, data, order)
    return functools.cache(folder.open_part if _NO_SPLIT in file_by_split else folder.open_split)
  if data.image_column or data.label_column:
    raise UserError(f'data.label_column: expected a label file in {root}, such as labels.csv, got none'
                    f'{beside(root)}. Name the file so, or leave the column out.')
  return None


def _find_files(root: str) -> dict[str, str]:
  """Returns the name of the label file of each split. Raises UserError if a split has several."""
  names_by_split = dict[str, list[str]]()
  for name in sorted(os.listdir(root)) if os.path.isdir(root) else []:
    stem, extension = os.path.splitext(name)
    content, _, split = stem.partition('_')  # `labels_train` or `labels`
    is_label_file = (content == LABELS and extension in EXTENSIONS) or (content == CAPTIONS and extension == '.jsonl')
    if is_label_file and (split in splits.NAMES or stem == content):
      names_by_split.setdefault(split, []).append(name)
  has_several_of_split = any(len(names) > 1 for names in names_by_split.values())
  if has_several_of_split or (_NO_SPLIT in names_by_split and len(names_by_split) > 1):
    listed = ', '.join(name for names in names_by_split.values() for name in names)
    raise UserError(f'folder:{root}: expected one label file for each split, or only {LABELS}, got {listed}. Remove '
                    'the others.')
  return {split: names[0] for split, names in names_by_split.items()}


def beside(root: str) -> str:
  """Returns the part of a message about tables in a folder that are not named as label files; '' if there are none."""
  label_files = set(_find_files(root).values())
  unread = [name for name in sorted(os.listdir(root)) if name.lower().endswith(EXTENSIONS) and name not in label_files]
  if not unread:
    return ''
  return (f'; not read: {documents.listed(unread, _MAX_SHOWN)}, as label files are named labels.csv, or '
          'labels_train.csv and labels_test.csv')


class _LabeledFolder:
  """A folder with label files. `open_split` opens its splits; if there is a single file, `open_part` opens them."""

  def __init__(self, root: str, file_by_split: Mapping[str, str], data: schema.Data, order: Sequence[str]) -> None:
    """Takes the name of the label file of each split; `order` has the classes of a run that resumes. Reads no file."""
    self._root, self._data, self._order = root, data, order
    self._file_by_split = {split: _LabelFile(root, name, data) for split, name in file_by_split.items()}
    defining_split = 'train' if 'train' in file_by_split else min(file_by_split)  # whose file defines the classes
    self._defining_file = self._file_by_split[defining_split]

  def open_split(self, split: str) -> Source:
    """Opens a split that has a label file. Raises UserError if a class is not one of the file that defines them."""
    split = splits.resolve(split, self._file_by_split, source=f'folder:{self._root}')
    file = self._file_by_split[split]
    class_names = self._classes.names
    images = file.images(class_names)
    if unknown := sorted({label for image in images for label in image.labels} - set(class_names)):
      defining = self._defining_file.name
      raise UserError(f'{file.path}: expected the classes of {defining}, which defines them, got {len(unknown)} '
                      f'others: {documents.listed(unknown, _MAX_SHOWN)}. Correct their names, or add them to '
                      f'{defining}.')
    if split != 'train' and 'train' in self._file_by_split:
      training_file = self._file_by_split['train']
      paths = {os.path.normpath(image.path) for image in images}
      if num_common := len(paths & training_file.find_paths()):
        warn_once(f'{file.path}: {num_common:,} of its {len(paths):,} images are in {training_file.name} too, so a '
                  'score on them says little about other images.')
    return self._make_source(_scattered(images, seed=0), split)

  def open_part(self, split: str) -> Source:
    """Opens `train`, `test` or `all` of the single label file. Raises UserError if a part has no image."""
    file = self._defining_file
    images = _scattered(file.images(self._classes.names), self._data.holdout_seed)
    folders_with_images = {os.path.normpath(image.path).split('/')[0] for image in images}
    if unread := [name for name in folder_layout.subfolders(self._root) if name not in folders_with_images]:
      warn_once(f'{self._root}: images are those that {file.name} lists; not read: the folders '
                f'{documents.listed(unread, _MAX_SHOWN)}.')
    part = splits.resolve_part(split, source=f'folder:{self._root}')
    title = splits.part_title(f'folder:{self._root}/{file.name}', part, self._data.holdout)
    if part == splits.ALL:
      return self._make_source(images, part, title)
    num_test = round(len(images) * self._data.holdout)
    if not 0 < num_test < len(images):
      raise UserError(f'data.holdout: expected a fraction that leaves images to train and to test on, of the '
                      f'{len(images)} in {file.path}, got {self._data.holdout}. Set another one.')
    return self._make_source(images[num_test:] if part == 'train' else images[:num_test], part, title)

  @functools.cached_property
  def _classes(self) -> _Classes:
    return self._defining_file.read_classes(self._order)

  def _make_source(self, images: Sequence[Image], split: str, title: str = '') -> Source:
    is_single = self._classes.is_single and all(len(image.labels) == 1 for image in images)
    return LabeledFiles(self._root, images, name=f'folder:{self._root}/{split}', class_names=self._classes.names,
                        title=title, rules=Rules.of(self._data), is_single=is_single)


def _scattered(images: Sequence[Image], seed: int) -> Sequence[Image]:
  """Returns images in an order that depends only on their paths and the seed."""
  order = splits.scattered((os.fsencode(image.path) for image in images), len(images), seed=seed)
  return [images[i] for i in order.tolist()]


class _Classes(NamedTuple):
  """The classes that a label file defines; `is_single` = each image of the file has exactly one of the classes."""
  names: tuple[str, ...]
  is_single: bool


class _LabelFile:
  """The label file `name` in `root`. Each method reads it from the beginning."""

  def __init__(self, root: str, name: str, data: schema.Data) -> None:
    self.name = name
    self.path = os.path.join(root, name)
    self._image_paths = ImagePaths(root, Rules.of(data))
    self._lines = LabelLines(self.path, self._image_paths, data)

  def read_classes(self, order: Sequence[str]) -> _Classes:
    """Returns the classes of the file. Raises UserError if there are none, or fractions or flags in place of names."""
    if self._lines.has_captions:
      return _Classes(UNLABELED, is_single=False)
    name_by_key = dict[str, str]()  # the key is the composed Unicode form of the name
    label_counts = set[int]()  # how many classes an image has
    for line in self._lines.read():
      if line.image or line.labels:
        label_counts.add(len(line.labels))
      for label in line.labels:
        name_by_key.setdefault(classes.composed(label), label)
    if not name_by_key:
      raise UserError(f'{self.path}: expected at least one class, got none. {self._lines.advice}')
    if max(label_counts) > 1 and label_lines.FLAGS.issuperset(name_by_key):
      raise UserError(f'{self.path}: expected the names of classes, got cells of {" and ".join(sorted(name_by_key))} '
                      f'for each of several classes. {label_lines.ADVICE_FOR_FLAGS}')
    if all(map(_FRACTION.fullmatch, name_by_key)):
      raise UserError(f'{self.path}: expected names or whole numbers of classes, got fractions such as '
                      f'{min(name_by_key)}. Write the class of each image as a name or a whole number.')
    return _Classes(classes.ordered(list(name_by_key.values()), order), is_single=label_counts == {1})

  def images(self, class_names: Sequence[str]) -> list[Image]:
    """Returns the images, in order; their classes have the Unicode form that `class_names` have.

    Raises UserError if a line has another form, or an image is missing, outside of the folder, or listed twice.
    """
    name_by_key = {classes.composed(name): name for name in class_names}
    image_by_path = dict[str, Image]()  # the paths are normalized
    problems = list[tuple[Line, str]]()  # the first lines with a problem, and the text about it in a message
    num_problems = 0
    for line in self._lines.read():
      file = self._image_paths.find(line.image)
      if isinstance(file, str):
        problem = f', {file}'
      elif os.path.normpath(file.path) in image_by_path:
        problem = ' twice'
      else:
        labels = dict.fromkeys(name_by_key.get(classes.composed(label), label) for label in line.labels)
        image_by_path[os.path.normpath(file.path)] = Image(file.path, file.size, tuple(labels), line.captions)
        continue
      num_problems += 1
      if len(problems) < _MAX_SHOWN:
        problems.append((line, problem))
    if problems or not image_by_path:
      raise self._images_error(problems, num_problems, has_images=bool(image_by_path))
    return list(image_by_path.values())

  def _images_error(self, problems: Sequence[tuple[Line, str]], num_problems: int, *, has_images: bool) -> UserError:
    """Returns the error about lines with a problem; `problems` has the first ones, or none in a file without images."""
    root = self._image_paths.root
    texts = [f'line {line.number:,}: {documents.describe(line.image)}{problem}' for line, problem in problems]
    if problems and not has_images:
      reason = self._image_paths.explain_missing([(line.image, *line.labels) for line, _ in problems])
      return UserError(f'{self.path}: expected images below {root}, got {num_problems:,} lines that name none, such as '
                       f'{texts[0]}. {reason} {self._lines.advice}')
    more = f'; and {num_problems - _MAX_SHOWN:,} more' if num_problems > _MAX_SHOWN else ''
    return UserError(f'{self.path}: expected each image below {root} at most once, got '
                     f'{"; ".join(texts) or "no image"}{more}. {self._lines.advice}')

  def find_paths(self) -> set[str]:
    """Returns the normalized paths of the images that exist; other lines are skipped."""
    files = (self._image_paths.find(line.image) for line in self._lines.read())
    return {os.path.normpath(file.path) for file in files if not isinstance(file, str)}
