"""Opens sources by name: `KIND:WHERE`, such as `folder:PATH`, or `KIND` alone, such as `digits`.

`KINDS` lists the built-in kinds. Any other kind is the name of a user's Python module, which is found beside the
config, in the current folder or among the installed packages (`core/implementation.py`). The module of a kind has a
function `opener(where, data, image_px)`, which returns a function that opens a complete split by its name:

  where: the text after the colon; '' without a colon.
  data: the settings of the data, such as `data.holdout`.
  image_px: height and width of the images after preprocessing.

Slices such as `train[:98%]`, the classes of `data.classes`, and mixtures `mix:0.7*SOURCE,0.3*SOURCE` (`mixture.py`)
work for every kind. Only the modules of the kinds in use are imported.

A job calls `pin` when a run is configured, `open_sources` for training, and `open_split` for any other split. A job
that learns from the classes then calls `check_learnable`.
"""
from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.config import schema
from vit_jax.core import documents, globs, implementation
from vit_jax.core.errors import UserError
from vit_jax.data import splits, storage
from vit_jax.data.formats import mixture
from vit_jax.data.image.headers import BadImage
from vit_jax.data.labels import classes
from vit_jax.data.source import UNLABELED, Source, first_label, has_masks, origins, title
from vit_jax.data.user_files import Rules

log = logging.getLogger('vit_jax.data')


class Kind(NamedTuple):
  """A built-in kind of source.

  syntax: how to write a source of the kind; with a colon if a text is required after the kind.
  opener: the `opener` function of the kind, as `module:name`.
  """
  syntax: str
  opener: str


_FORMATS, _HUB = 'vit_jax.data.formats', 'hf:'
KINDS = {
    'digits': Kind('digits', f'{_FORMATS}.builtin:digits_opener'),
    'synthetic': Kind('synthetic', f'{_FORMATS}.builtin:synthetic_opener'),
    'folder': Kind('folder:PATH', f'{_FORMATS}.folder:opener'),
    'tfds': Kind('tfds:NAME[/CONFIG][:VERSION]', f'{_FORMATS}.tfds:opener'),
    'vtab': Kind('vtab:TASK', f'{_FORMATS}.vtab:opener'),
    'array_record': Kind('array_record:DIR', f'{_FORMATS}.array_record:opener'),
    'wds': Kind('wds:PATH', f'{_FORMATS}.tar:opener'),
    'tfrecord': Kind('tfrecord:PATH', f'{_FORMATS}.tfrecord:opener'),
    'parquet': Kind('parquet:PATH', f'{_FORMATS}.parquet:opener'),
    'hf': Kind('hf:OWNER/NAME[@REVISION][/SUBSET]', f'{_FORMATS}.hf:opener'),
    'masks': Kind('masks:PATH, masks:tfds:NAME[/CONFIG][:VERSION]', f'{_FORMATS}.masks:opener'),
}
SYNTAX = (f'{", ".join(kind.syntax for kind in KINDS.values())}, mix:WEIGHT*SOURCE,WEIGHT*SOURCE, '
          'MODULE:WHERE of your own')
Opener = Callable[..., Callable[[str], Source]]
_SORTING_KINDS = ('folder', 'wds', 'tfrecord', 'parquet', 'hf')
"""Kinds that sort the names of the classes; their `opener` also takes `order`, the classes of a resumed run."""
_NUMBERING_KINDS = ('digits', 'synthetic', 'tfds', 'vtab')
"""Kinds whose datasets state the number of each class."""
_MAX_CHECKED_LABELS = 1_000  # labels that are read to see whether there are several classes


class Sources(NamedTuple):
  """The sources of a run, and the classes of the training data."""
  train: Source
  eval: Source
  class_names: tuple[str, ...]


def open_sources(data: schema.Data, *, image_px: tuple[int, int], order: Sequence[str] = ()) -> Sources:
  """Opens the training and the evaluation split of `data`; see `open_split` for `order`.

  Raises UserError if the source, a split or a class is missing, or `data.num_classes` has another value.
  """
  train = check_labels(open_split(data, data.train_split, image_px=image_px, order=order), data)
  if has_masks(train):
    raise UserError(f'data.source: expected images with classes to train on, got {train.name}, whose images have '
                    'masks. Set it as the source of an evaluation: --config.evals.NAME.source.')
  evaluation = check_labels(open_split(data, data.eval_split, image_px=image_px, order=order), data)
  if data.num_classes not in (0, len(train.class_names)):
    raise UserError(f'data.num_classes: expected {len(train.class_names)}, the number of classes of {train.name}, got '
                    f'{data.num_classes}. Set it to that, or to 0, which uses the number of the source.')
  if data.pseudo.source:
    from vit_jax.data.formats import pseudo  # only here: few runs have labels of a teacher
    train = pseudo.add_labeled_by_teacher(train, open_unlabeled(data, image_px=image_px), data.pseudo, Rules.of(data))
  return Sources(train, evaluation, train.class_names)


def open_unlabeled(data: schema.Data, *, image_px: tuple[int, int]) -> Source:
  """Opens the images that a teacher labels (`data.pseudo`), with the classes of their source."""
  unlabeled = dataclasses.replace(data, source=data.pseudo.source, classes='', num_classes=0, num_examples=0)
  return open_split(unlabeled, data.pseudo.split, image_px=image_px)


def open_split(data: schema.Data, split: str, *, image_px: tuple[int, int], order: Sequence[str] = ()) -> Source:
  """Opens one split of `data`; for a mixture, this split of each of its sources.

  `split` is a name or a slice; `image_px` is the height and width of the images after preprocessing. `order` has the
  classes of a run that resumes: if the source has the same classes, the classes keep this order.

  Raises:
    UserError: the source or the split is missing, the classes of a mixture differ, or the name of a class is not text.
  """
  storage.configure(storage.Settings.of(data))
  source = _open(data, split, image_px=image_px, order=order)
  classes.check_text(source.class_names, where=source.name)
  return source


def open_every(data: schema.Data, *, image_px: tuple[int, int], setting: str) -> Source:
  """Opens all images of a source. If the source has splits, opens `train` and logs the names of the other splits.

  `setting` is the setting or flag that selects a split, for the log. Raises the errors of `open_split`.
  """
  try:
    return open_split(data, splits.ALL, image_px=image_px)
  except splits.NoSplit as error:
    if others := [name for name in error.known if name != 'train']:
      log.warning('%s: only the split train is read; left out: %s. Set %s to read another one.', data.source,
                  documents.listed(others, 20), setting)
  except UserError:  # a user's own kind may not know the split `all`
    pass
  return open_split(data, 'train', image_px=image_px)


def _open(data: schema.Data, split: str, *, image_px: tuple[int, int], order: Sequence[str] = ()) -> Source:
  """Opens one split as `open_split` does; for a mixture, calls itself for each of the sources."""
  kind, _, where = data.source.partition(':')
  if kind == 'mix' and where:
    terms = mixture.parse(where)
    sources = [_open(dataclasses.replace(data, source=term.source), split, image_px=image_px, order=order)
               for term in terms]
    return mixture.mix(sources, [term.weight for term in terms], name=f'{data.source}/{split}',
                       separate=data.mix_classes is schema.MixClasses.SEPARATE)
  options = {'order': order} if kind in _SORTING_KINDS else {}
  source = splits.select(find_opener(data.source)(where, data, image_px, **options), split)
  if not data.classes or has_masks(source):
    return source
  return classes.renumbered(source, classes.read(data.classes), where=f'data.classes={data.classes}')


def pin(source: str, pinned: Collection[str] = ()) -> str:
  """Returns the source with the commit of each dataset of the Hugging Face hub, so that the data stay the same.

  Args:
    source: a value of `data.source`.
    pinned: the pinned sources of a run that resumes; a dataset in them keeps its commit.

  Raises:
    UserError, TemporaryError: a dataset of the hub is not found.
  """
  kind, _, where = source.partition(':')
  if kind == 'mix' and _HUB in where and any(term.source.startswith(_HUB) for term in mixture.parse(where)):
    pinned_terms = [term.source for name in pinned if name.startswith('mix:')
                    for term in mixture.parse(name.partition(':')[2])]
    # `mixture.parse` cannot read weights such as 1e+06, so the weights are written without an exponent.
    return 'mix:' + ','.join(f'{np.format_float_positional(term.weight, trim="-")}*{pin(term.source, pinned_terms)}'
                             for term in mixture.parse(where))
  if source.startswith(_HUB):
    from vit_jax.data.formats import hf
    return f'{_HUB}{hf.pin(where, pinned)}'
  return source


def find_opener(source: str) -> Opener:
  """Returns the `opener` of the kind of a source, which is not a mixture.

  Raises UserError if there is no such kind, or the text after the colon is missing or not allowed.
  """
  name, _, where = source.partition(':')
  kind = KINDS.get(name)
  expected = f'data.source: expected one of {SYNTAX}, got {source!r}.'
  needs_where = kind is None or ':' in kind.syntax
  if name == 'mix' or bool(where) != needs_where:
    raise UserError(f'{expected}{_nearest_kind(name)}')
  if kind:
    opener: Opener = implementation.load(kind.opener)
    return opener
  try:
    opener = implementation.load(f'{name}:opener', from_command_line=implementation.is_from_command_line(name))
  except UserError as error:
    raise UserError(f'{expected}{_nearest_kind(name)} {error}') from error
  return opener


def _nearest_kind(name: str) -> str:
  """Returns the end of a message about an unknown kind: the built-in kind with a similar name; '' if there is none."""
  similar = globs.similar_names(name, KINDS)
  return f' Did you mean {KINDS[similar[0]].syntax}?' if similar else ''


def check_learnable(source: Source, *, learner: str) -> Source:
  """Returns the source if a model can learn from its classes. `learner` names the objective or evaluation in messages.

  Raises UserError if images have no labels, all images have one class, or the folders may not be classes.
  """
  name, stored_sources = title(source), origins(source)
  for stored in stored_sources:
    if stored.class_names != UNLABELED:
      continue
    contents = getattr(stored, 'describe_contents', str)()  # a sentence about other contents of the files, or ''
    unlabeled = name if source.class_names == UNLABELED else title(stored)
    raise UserError(f'data.source: expected images with labels for {learner}, got {unlabeled}, whose images have none. '
                    f'{f"{contents} " if contents else ""}Set data.label_column if they have labels elsewhere, or '
                    'train a self-supervised objective.')
  for stored in stored_sources:
    if doubt := getattr(stored, 'doubt', ''):  # the message for files whose folders may not be classes
      raise UserError(doubt)
  only_class = _find_only_class(source)
  if only_class is not None:
    raise UserError(f'data.source: expected images of at least two classes for {learner}, got {name}, whose '
                    f'{len(source):,} images all have the class {documents.describe(source.class_names[only_class])}, '
                    f'such as {source.describe(0)}. Use data with a folder or a label for each class.')
  return source


def _find_only_class(source: Source) -> int | None:
  """Returns the class of all images; None if the classes differ, no label can be read, or there is only one image.

  Compares the first image with evenly spaced images. The last of them comes first, as images are often sorted by class.
  """
  if len(source.class_names) < 2:
    return 0
  if source.most_labels or len(source) == 1:
    return None
  rows = np.unique(np.linspace(0, len(source) - 1, min(len(source), _MAX_CHECKED_LABELS)).astype(int)).tolist()
  labels = set[int]()
  for row in rows[:1] + rows[1:][::-1]:
    with contextlib.suppress(BadImage, OSError):  # damaged examples are reported when the job reads them
      labels.add(first_label(source, row))
    if len(labels) > 1:
      return None
  return labels.pop() if labels else None


def is_order_known(class_names: Sequence[str], data: schema.Data) -> bool:
  """Returns whether class i of the data can be output i of pretrained weights without class names.

  True if a file or the dataset lists the classes, or if the classes are the numbers from 0; False if the classes are
  sorted by name. A mixture has the classes of the first source; with separate classes, those of all sources.
  """
  kind, _, where = data.source.partition(':')
  if kind == 'mix' and not data.classes:
    terms = mixture.parse(where)
    if data.mix_classes is schema.MixClasses.SEPARATE:
      return all(term.source.partition(':')[0] in _NUMBERING_KINDS for term in terms)
    return is_order_known(class_names, dataclasses.replace(data, source=terms[0].source))
  if data.classes or kind in _NUMBERING_KINDS or classes.numbered(class_names) == tuple(range(len(class_names))):
    return True
  return kind != 'folder' and tuple(class_names) != classes.ordered(class_names)


def check_labels(source: Source, data: schema.Data) -> Source:
  """Returns the source.

  Raises:
    UserError: an image has several labels, and `data.max_labels` is not set or is smaller than the number of labels.
  """
  max_labels = source.most_labels
  if max_labels and (not data.max_labels or max_labels > data.max_labels):
    expected = f'at least {max_labels}' if max_labels > 0 else 'a number'  # `UNKNOWN` is negative
    reason = ', as images without a label have none of the classes' if max_labels == 1 else ''
    raise UserError(f'data.max_labels: expected {expected}, the largest number of labels of an image of {source.name}, '
                    f'got {data.max_labels}. Set it, and for training objective.loss=sigmoid, so that the classes of '
                    f'an image do not exclude each other{reason}.')
  return source
