"""Checks what describes a dataset that TFDS prepared, before TFDS reads it and after.

TFDS imports the modules that `features.json` names, reads text files of any size, and takes the names of the shards
from `dataset_info.json`.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from vit_jax.core.errors import UserError
from vit_jax.data.files import json_fields, user_files
from vit_jax.data.files.user_files import Rules

if TYPE_CHECKING:
  from tensorflow_datasets.core import DatasetBuilder

INFO, FEATURES = 'dataset_info.json', 'features.json'
_EXPECTED = f'{INFO} and {FEATURES} as TFDS writes them'
_AGAIN = 'Copy or prepare the dataset again.'
_CLASSES, _OWN = ('pythonClassName', 'python_class_name', 'type', 'proto_cls'), 'tensorflow_datasets.'
_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError, IndexError, AssertionError,
           ImportError, OverflowError, RecursionError, NotImplementedError, UnicodeError)


def check_files(folder: str, rules: Rules) -> None:
  """Checks the files of a description.

  Raises:
    UserError: one is too large, a link out of the folder, or not JSON; or `features.json` names a class that is not one
      of TFDS.
  """
  with os.scandir(folder) as entries:
    for entry in entries:
      if entry.name.endswith(('.json', '.txt')):
        user_files.check_inside(entry.path, folder, rules)
        if not entry.is_file() or entry.stat().st_size > user_files.TEXT_BYTES:
          raise UserError(f'{entry.path}: expected a file of at most {user_files.TEXT_BYTES:,} bytes, got '
                          + (f'{entry.stat().st_size:,}' if entry.is_file() else 'something that is not a file')
                          + f'. {_AGAIN}')
  for name in (INFO, FEATURES):
    found = json_fields.read(os.path.join(folder, name), expected='the description of a dataset', advice=_AGAIN)
    found.object()
    if not json_fields.is_unicode(found.value):  # which protobuf answers with a SystemError
      raise UserError(f'{found.where}: expected text that is valid Unicode, got half of a surrogate pair. {_AGAIN}')
    for place in _objects(found) if name == FEATURES else ():
      _check_classes(place)


def _objects(field: json_fields.Field) -> Iterator[json_fields.Field]:
  """Yields all objects in a value, and itself."""
  if isinstance(field.value, dict):
    yield field
    for _, inner in field.fields():
      yield from _objects(inner)
  elif isinstance(field.value, list):
    for inner in field.items():
      yield from _objects(inner)


def _check_classes(found: json_fields.Field) -> None:
  """Raises UserError if an object names a class of another package; `type` and `proto_cls` are of earlier versions."""
  for name in _CLASSES:
    named = found.optional(name)
    is_other = named is not None and not (isinstance(named.value, str) and named.value.startswith(_OWN))
    if named and is_other and (name != 'type' or 'content' in found.value):
      raise named.error(f'a class of {_OWN.rstrip(".")}')


def open_builder(folder: str, rules: Rules) -> DatasetBuilder:
  """Returns the TFDS builder of a prepared dataset.

  Raises:
    UserError: its description is damaged.
  """
  import tensorflow_datasets as tfds
  from google.protobuf import json_format
  check_files(folder, rules)
  try:
    found = tfds.builder_from_directory(folder)
    problem = ('features by name' if not isinstance(found.info.features, tfds.features.FeaturesDict) else
               'splits' if not dict(found.info.splits) else '')
  except UserError:
    raise
  except (json_format.Error, *_ERRORS) as error:
    damaged(folder, error)
  if problem:
    raise UserError(f'{folder}: expected {_EXPECTED}, got no {problem}. {_AGAIN}')
  return found


def damaged(folder: str, error: Exception) -> NoReturn:
  """Raises the error of a description that TFDS cannot read; `error` says why."""
  raise UserError(f'{folder}: expected {_EXPECTED}, got a description that TFDS cannot read. {_AGAIN}') from error


def shards(builder: DatasetBuilder, split: str, rules: Rules) -> tuple[list[str], list[int]]:
  """Returns the paths of the files of a split, and the number of records of each.

  Raises:
    UserError: a file is outside of the folder, or the description is damaged.
  """
  folder = os.path.abspath(os.fspath(builder.data_dir))
  try:
    info = builder.info.splits[split]
    paths, counts = [os.path.abspath(os.fspath(path)) for path in info.filepaths], [int(n) for n in info.shard_lengths]
  except UserError:
    raise
  except _ERRORS as error:
    damaged(folder, error)
  if not paths or len(paths) != len(counts) or any(count < 0 for count in counts):
    raise UserError(f'{folder}: expected {_EXPECTED}, got {len(paths):,} files with '
                    f'{", ".join(f"{n:,}" for n in counts[:5]) or "no"} records. {_AGAIN}')
  for path in paths:
    if os.path.dirname(path) != folder or not user_files.is_below(os.path.basename(path)):
      raise UserError(f'{folder}: expected files in this folder, got {json_fields.shown(path)}. {_AGAIN}')
    user_files.check_inside(path, folder, rules)
  return paths, counts
