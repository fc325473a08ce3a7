"""How the checkpoints of a run lie on disk, as far as it can be read without the library that writes arrays.

A checkpoint is the folder `checkpoints/STEP`. Its item `meta` is JSON: a body, which says what was saved, and the
SHA-256 of that body. Paths are of `pathlib` or of `etils.epath`; nothing here writes.
"""
from __future__ import annotations

import collections
import hashlib
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from vit_jax.core import os_errors
from vit_jax.core.os_errors import Damaged

VERSION = 1
"""Layout of what is saved; a change that old checkpoints do not survive raises it."""

META, DATA, LIBRARY = 'meta/metadata', 'data/metadata', '_CHECKPOINT_METADATA'
"""Files of a checkpoint: its description, the order of the data, and what Orbax's manager reads when it is opened."""
COMMITTED = 'commit_success.txt'
"""In object storage, which cannot rename, the file that Orbax writes last."""
T = TypeVar('T')


def steps(folder: Any) -> list[int]:
  """Steps of the checkpoints in `folder` that were written to their end, oldest first; none if it is not there.

  Raises:
    UserError: the system does not let the folder be read.
  """
  try:
    found = [path for path in folder.iterdir() if is_step(path.name) and path.is_dir()]
    return sorted(int(path.name) for path in found if isinstance(path, pathlib.Path) or (path / COMMITTED).exists())
  except (FileNotFoundError, NotADirectoryError):
    return []
  except OSError as error:
    raise os_errors.reading(str(folder), error) from error


def is_step(name: str) -> bool:
  """Whether the folder of a checkpoint may have this name."""
  return name.isascii() and name.isdecimal() and str(int(name)) == name


def read_meta(checkpoint: Any) -> dict[str, Any]:
  """The verified body of a checkpoint's description, with `version`, `step`, `digests` and `shapes`.

  Raises:
    UserError: the system does not let it be read.
    Damaged: it is not what was saved, or not there.
  """
  record = read_json(checkpoint / META)
  if not isinstance(record.get('body'), dict) or sha256(record['body']) != record.get('sha256'):
    raise Damaged('its description is not the one that was saved')
  return record['body']


def read_json(path: Any) -> dict[str, Any]:
  """A JSON object. Raises as `read_meta`."""
  found = guard(str(path), lambda: json.loads(path.read_text()))
  if not isinstance(found, dict):
    raise Damaged(f'{path.parent.name}/{path.name} is not a JSON object')
  return found


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
  """What is written as the description."""
  return {'body': dict(body), 'sha256': sha256(body)}


def sha256(value: Any) -> str:
  """Digest of a value that JSON can hold."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def guard(what: str, action: Callable[[], T]) -> T:
  """The result of reading `what` with a library, whose errors become `Damaged` or `Obstacle`."""
  try:
    return action()
  except Exception as error:  # Orbax raises Exception itself for a damaged array; zstd, json and TensorStore their own
    raise os_errors.reading(what, error) from error


def check_arrays(item: str, found: Iterable[Any], shapes: Mapping[str, str]) -> None:
  """Compares the arrays that an item's files declare with its description, before any array is read.

  Arrays are compressed, so that a small file could otherwise expand to any size.

  Args:
    item: name of the item, for the message.
    found: metadata of its arrays, with `shape`, `dtype` and `storage.chunk_shape`.
    shapes: `float32[16, 7]` by path name, from the description.

  Raises:
    Damaged: the arrays have other shapes or dtypes, or one has a chunk that is larger than the array.
  """
  arrays = list(found)
  declared = collections.Counter(f'{np.dtype(one.dtype)}{list(one.shape)}' for one in arrays)
  if declared != (saved := collections.Counter(shapes.values())):
    shown = ', '.join(sorted((declared - saved).keys())[:4]) or f'only {len(arrays)} arrays'
    raise Damaged(f'{item} holds other arrays than its description: {shown}')
  for one in arrays:
    chunk = getattr(one.storage, 'chunk_shape', None) or ()
    if math.prod(chunk) > max(1, math.prod(one.shape)):
      raise Damaged(f'{item}: a chunk of {list(chunk)} is larger than its array {list(one.shape)}')
