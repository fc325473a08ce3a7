"""The layout of a run's checkpoints on disk; reads everything that does not need the library that writes arrays.

A checkpoint is the folder `checkpoints/STEP`. Its item `meta` is JSON: a body, which describes what was saved, and the
SHA-256 of that body. Paths are of `pathlib` or of `etils.epath`; this module does not write files.
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

from vit_jax.core import documents, failures
from vit_jax.core.errors import TemporaryError
from vit_jax.core.failures import Damaged

VERSION = 1
"""Version of the layout; it increases when old checkpoints cannot be read any more."""

META, DATA, LIBRARY = 'meta/metadata', 'data/metadata', '_CHECKPOINT_METADATA'
"""Files of a checkpoint: its description, the order of the data, and those that Orbax's manager reads on opening."""
COMMITTED = 'commit_success.txt'
"""The file that Orbax writes last in object storage, where it cannot rename the folder."""
T = TypeVar('T')


def steps(folder: Any) -> list[int]:
  """Returns the steps of the complete checkpoints in `folder`, oldest first; [] if the folder does not exist.

  Raises:
    UserError: the system does not allow reading the folder.
  """
  try:
    found = failures.retried(lambda: [path for path in folder.iterdir() if is_step(path.name) and path.is_dir()],
                             f'listing {folder}')
    return sorted(int(path.name) for path in found if isinstance(path, pathlib.Path) or (path / COMMITTED).exists())
  except (FileNotFoundError, NotADirectoryError):
    return []
  except OSError as error:
    raise failures.reading(str(folder), error) from error


def is_step(name: str) -> bool:
  """Returns whether this is a valid name for the folder of a checkpoint."""
  return name.isascii() and name.isdecimal() and str(int(name)) == name


def read_meta(checkpoint: Any) -> dict[str, Any]:
  """Returns the verified body of a checkpoint's description, with `version`, `step`, `digests` and `shapes`.

  Raises:
    UserError: the system does not allow reading the file.
    Damaged: the file does not exist, or differs from what was saved.
  """
  record = read_json(checkpoint / META)
  if not isinstance(record.get('body'), dict) or sha256(record['body']) != record.get('sha256'):
    raise Damaged('its description is not the one that was saved')
  return record['body']


def read_json(path: Any) -> dict[str, Any]:
  """Reads a JSON object. Raises the same errors as `read_meta`."""
  found = guard(str(path), lambda: documents.load(path))
  if not isinstance(found, dict):
    raise Damaged(f'{path.parent.name}/{path.name} is not a JSON object')
  return found


def seal(body: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the description to write: the body and its digest."""
  return {'body': dict(body), 'sha256': sha256(body)}


def sha256(value: Any) -> str:
  """Returns the digest of a JSON value."""
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def guard(what: str, action: Callable[[], T]) -> T:
  """Returns the result of reading `what` with a library, and converts its errors as `failures.reading`."""
  try:
    return failures.retried(action, f'reading {what}')
  except TemporaryError:
    raise
  except Exception as error:  # Orbax raises plain Exception for a damaged array; zstd, json and TensorStore their own
    if failures.is_of_runtime(error):
      raise
    found = failures.reading(what, error)
    if isinstance(found, Damaged):  # some errors of libraries say only what their code met
      why = '' if isinstance(error, AttributeError | TypeError | LookupError) else f': {found}'
      found = Damaged(f'{what} is not what was saved there{why}')
    raise found from error


def check_arrays(item: str, found: Iterable[Any], shapes: Mapping[str, str]) -> None:
  """Compares the arrays that an item's files declare with the item's description, before any array is read.

  Without this check, a small compressed file could expand to any size.

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
