"""Opens sources by name: `_open` has the only `match` on the kinds of sources.

Kinds: `digits`, `synthetic` (`builtin.py`), `folder:PATH` (`folder.py`, `label_file.py`),
`tfds:NAME[/CONFIG][:VERSION]` (`tfds.py`), `vtab:TASK` (`vtab.py`), `array_record:DIR` (`prepared.py`),
`mix:0.7*SOURCE,0.3*SOURCE` (`mixture.py`), and for segmentation `masks:PATH` (`masked.py`). To add a kind, write its
module, and add a `case` and its form to `KINDS`.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data.files.user_files import Rules
from vit_jax.data.labels import classes
from vit_jax.data.source import Source, has_masks, most_labels
from vit_jax.data.sources import builtin, folder, label_file, masked, mixture, prepared, pseudo, splits, tfds, vtab

KINDS = ('digits, synthetic, folder:PATH, tfds:NAME[/CONFIG][:VERSION], vtab:TASK, array_record:DIR, '
         'mix:WEIGHT*SOURCE,WEIGHT*SOURCE, masks:PATH, masks:tfds:NAME[/CONFIG][:VERSION]')


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
    train = pseudo.add(train, open_unlabeled(data, image_px=image_px), data.pseudo, _rules(data))
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
  source = _open(data, split, image_px=image_px)
  classes.check_text(source.class_names, where=source.name)
  return source


def _rules(data: schema.Data) -> Rules:
  return Rules(data.follow_links, data.max_file_mib * 2**20)


def _open(data: schema.Data, split: str, *, image_px: tuple[int, int]) -> Source:
  def open_named(opener: Callable[[str], Source]) -> Source:
    source = splits.select(opener, split)
    return (classes.renumbered(source, classes.read(data.classes), where=f'data.classes={data.classes}')
            if data.classes else source)

  kind, _, where = data.source.partition(':')
  rules = _rules(data)
  match kind, bool(where):
    case 'digits', False:
      return open_named(builtin.open_digits)
    case 'synthetic', False:
      return open_named(builtin.synthetic_opener(num_examples=data.num_examples, num_classes=data.num_classes,
                                                 image_px=image_px))
    case 'folder', True:
      return open_named(label_file.opener(where, holdout=data.holdout, seed=data.holdout_seed, rules=rules)
                        or folder.opener(where, holdout=data.holdout, seed=data.holdout_seed, rules=rules))
    case 'tfds', True:
      return open_named(tfds.opener(where, data_dir=data.data_dir, label_column=data.label_column, rules=rules))
    case 'vtab', True:
      return open_named(vtab.opener(where, data_dir=data.data_dir, rules=rules))
    case 'array_record', True:
      return open_named(prepared.opener(where, verify=data.verify_shards, rules=rules))
    case 'masks', True:
      return splits.select(masked.opener(where, data_dir=data.data_dir, mask_column=data.label_column,
                                         holdout=data.holdout, seed=data.holdout_seed, rules=rules), split)
    case 'mix', True:
      terms = mixture.parse(where)
      found = [_open(dataclasses.replace(data, source=term.source), split, image_px=image_px) for term in terms]
      return mixture.mix(found, [term.weight for term in terms], name=f'{data.source}/{split}',
                         separate=data.mix_classes is schema.MixClasses.SEPARATE)
  raise UserError(f'data.source: expected one of {KINDS}, got {data.source!r}.')


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
