"""Opens sources by name: `KIND:WHERE`, such as `folder:PATH`, or `KIND` alone, such as `digits`.

`KINDS` lists the built-in kinds. Another kind is a person's own: the name of a Python module, which is found beside the
config, in the current folder or among the installed packages (`core/implementation.py`). A kind is a function
`opener(where, data, image_px)`, which returns a function that opens a complete split by its name:

  where: the text after the colon.
  data: the settings of the data, such as `data.holdout`.
  image_px: height and width that the run gives its images.

Slices such as `train[:98%]`, the classes of `data.classes`, and mixtures `mix:0.7*SOURCE,0.3*SOURCE` (`mixture.py`)
work for every kind. Only the module of the kind in use is imported.
"""
from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.core import implementation
from vit_jax.core.errors import UserError
from vit_jax.data.files import ranges
from vit_jax.data.files.user_files import Rules
from vit_jax.data.labels import classes
from vit_jax.data.source import Source, has_masks, most_labels
from vit_jax.data.sources import mixture, pseudo, splits


class Kind(NamedTuple):
  """A built-in kind of source: its forms, for messages, and its `opener` as `module:name`."""
  forms: str
  opener: str


_HERE, _HUB = 'vit_jax.data.sources', 'hf:'
KINDS = {
    'digits': Kind('digits', f'{_HERE}.builtin:digits_opener'),
    'synthetic': Kind('synthetic', f'{_HERE}.builtin:synthetic_opener'),
    'folder': Kind('folder:PATH', f'{_HERE}.folder:opener'),
    'tfds': Kind('tfds:NAME[/CONFIG][:VERSION]', f'{_HERE}.tfds:opener'),
    'vtab': Kind('vtab:TASK', f'{_HERE}.vtab:opener'),
    'array_record': Kind('array_record:DIR', f'{_HERE}.prepared:opener'),
    'wds': Kind('wds:PATH', f'{_HERE}.wds:opener'),
    'tfrecord': Kind('tfrecord:PATH', f'{_HERE}.tfrecord:opener'),
    'parquet': Kind('parquet:PATH', f'{_HERE}.parquet:opener'),
    'hf': Kind('hf:OWNER/NAME[@REVISION][/SUBSET]', f'{_HERE}.hf:opener'),
    'masks': Kind('masks:PATH, masks:tfds:NAME[/CONFIG][:VERSION]', f'{_HERE}.masked:opener'),
}
FORMS = f'{", ".join(kind.forms for kind in KINDS.values())}, mix:WEIGHT*SOURCE,WEIGHT*SOURCE, MODULE:WHERE of your own'
Opener = Callable[[str, schema.Data, tuple[int, int]], Callable[[str], Source]]


class Sources(NamedTuple):
  """The sources of a run."""
  train: Source
  eval: Source
  class_names: tuple[str, ...]


def open_sources(data: schema.Data, *, image_px: tuple[int, int]) -> Sources:
  """Opens the training and the evaluation split of `data`.

  Raises:
    UserError: the source, a split or a class is missing, or `data.num_classes` has another value.
  """
  train = check_labels(open_split(data, data.train_split, image_px=image_px), data)
  if has_masks(train):
    raise UserError(f'data.source: expected images with classes to train on, got {train.name}, whose images have '
                    'masks. Set it as the source of an evaluation: --config.evals.NAME.source.')
  evaluation = check_labels(open_split(data, data.eval_split, image_px=image_px), data)
  if data.num_classes not in (0, len(train.class_names)):
    raise UserError(f'data.num_classes: expected {len(train.class_names)}, the number of classes of {train.name}, got '
                    f'{data.num_classes}. Set it to that, or to 0, which uses the number of the source.')
  if data.pseudo.source:
    train = pseudo.add(train, open_unlabeled(data, image_px=image_px), data.pseudo, Rules.of(data))
  return Sources(train, evaluation, train.class_names)


def open_unlabeled(data: schema.Data, *, image_px: tuple[int, int]) -> Source:
  """Opens the images that a teacher labels (`data.pseudo`), with the classes of their source."""
  own = dataclasses.replace(data, source=data.pseudo.source, classes='', num_classes=0, num_examples=0)
  return open_split(own, data.pseudo.split, image_px=image_px)


def open_split(data: schema.Data, split: str, *, image_px: tuple[int, int]) -> Source:
  """Opens one split of `data` by its name or slice; of a mixture, that of each of its sources.

  Raises:
    UserError: the source or the split is missing, the classes of a mixture differ, or the name of a class is not text.
  """
  ranges.configure(ranges.Settings.of(data))
  source = _open(data, split, image_px=image_px)
  classes.check_text(source.class_names, where=source.name)
  return source


def _open(data: schema.Data, split: str, *, image_px: tuple[int, int]) -> Source:
  kind, _, where = data.source.partition(':')
  if kind == 'mix' and where:
    terms = mixture.parse(where)
    found = [_open(dataclasses.replace(data, source=term.source), split, image_px=image_px) for term in terms]
    return mixture.mix(found, [term.weight for term in terms], name=f'{data.source}/{split}',
                       separate=data.mix_classes is schema.MixClasses.SEPARATE)
  source = splits.select(find_opener(data.source)(where, data, image_px), split)
  if not data.classes or has_masks(source):
    return source
  return classes.renumbered(source, classes.read(data.classes), where=f'data.classes={data.classes}')


def pin(source: str, known: Collection[str] = ()) -> str:
  """Returns a source whose content does not change any more: datasets of the hub at a commit, others as they are.

  Args:
    source: as `data.source`.
    known: sources of a run that resumes, whose commits are kept.

  Raises:
    UserError, TemporaryError: a dataset of the hub is not found.
  """
  kind, _, where = source.partition(':')
  if kind == 'mix' and f'*{_HUB}' in source:
    terms, inner = mixture.parse(where), [one.source for each in known if each.startswith('mix:')
                                          for one in mixture.parse(each.partition(':')[2])]
    return 'mix:' + ','.join(f'{term.weight:g}*{pin(term.source, inner)}' for term in terms)
  if source.startswith(_HUB):
    from vit_jax.data.sources import hf
    return f'{_HUB}{hf.pin(where, known)}'
  return source


def find_opener(source: str) -> Opener:
  """Returns the `opener` of the kind of a source; a mixture has none.

  Raises:
    UserError: there is no such kind, or it needs a text after the colon, or takes none.
  """
  name, _, where = source.partition(':')
  kind, expected = KINDS.get(name), f'data.source: expected one of {FORMS}, got {source!r}.'
  if name == 'mix' or not (where if kind is None else bool(where) is (':' in kind.forms)):
    raise UserError(f'{expected}{_nearest_kind(name)}')
  try:
    found: Opener = implementation.load(kind.opener if kind else f'{name}:opener')
  except UserError as error:
    if kind:
      raise
    raise UserError(f'{expected}{_nearest_kind(name)} {error}') from error
  return found


def _nearest_kind(name: str) -> str:
  """Returns the end of a message about an unknown kind: the built-in one with the nearest name, if any."""
  near = difflib.get_close_matches(name, KINDS, 1)
  return f' Did you mean {KINDS[near[0]].forms}?' if near else ''


def check_labels(source: Source, data: schema.Data) -> Source:
  """Returns the source.

  Raises:
    UserError: its images have several labels, or more than `data.max_labels`.
  """
  most = most_labels(source)
  if most and (not data.max_labels or most > data.max_labels):
    expected = f'at least {most}' if most > 0 else 'a number'
    raise UserError(f'data.max_labels: expected {expected}, the largest number of labels of an image of {source.name}, '
                    f'got {data.max_labels}. Set it, and for training objective.loss=sigmoid, so that the classes of '
                    'an image do not exclude each other.')
  return source
