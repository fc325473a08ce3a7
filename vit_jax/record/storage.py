"""Storage of run directories: a folder, or object storage, `gs://BUCKET/PATH`, through `etils.epath`.

Object storage writes objects atomically, and cannot append, rename or lock: files to replace are written again. Files
that grow have a module of their own, `growing.py`.
"""
from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from vit_jax.core import address, documents, extras, files
from vit_jax.core.errors import UserError
from vit_jax.record import mounts

if TYPE_CHECKING:
  from etils import epath

  Path: TypeAlias = pathlib.Path | epath.Path

PathLike = str | os.PathLike[str]
REMOTE = 'gs://'
_PACKAGES = ('gcsfs', 'tensorflow')  # `epath` needs one of them for Google Cloud Storage


def is_local(path: PathLike) -> bool:
  """Returns whether a path is on this machine, including mounted file systems."""
  return '://' not in os.fspath(path)


def can_append(path: PathLike) -> bool:
  """Returns whether storage keeps what is appended to an open file: it is neither a bucket nor a mount of one."""
  return is_local(path) and mounts.can_append(path)


def open_path(path: PathLike) -> Path:
  """Returns the absolute path, with `~` expanded; `gs://…` is unchanged.

  Raises:
    UserError: this kind of storage is not supported, or the package for it is not installed.
  """
  text = os.fspath(path)
  address.check(text, 'path')
  if is_local(text):
    return pathlib.Path(text).expanduser().absolute()
  if not text.startswith(REMOTE) or not text.removeprefix(REMOTE).strip('/'):
    raise UserError(f'{text}: expected a folder or {REMOTE}BUCKET/PATH for a run. Correct the address.')
  if not any(importlib.util.find_spec(name) for name in _PACKAGES):
    raise extras.missing('gcsfs', 'gcs', text)
  from etils import epath  # imported here because local runs do not need it
  refresh(text)
  return epath.Path(text)


def refresh(path: PathLike) -> None:
  """Clears the listings of object storage that gcsfs caches, since another process may have written files."""
  if is_local(path) or 'gcsfs' not in sys.modules:
    return
  from etils.epath import backend
  backend.fsspec_backend.fs(path).invalidate_cache()


def write_bytes(path: PathLike, content: bytes) -> None:
  """Creates or replaces a file atomically; its folder is created if missing.

  After a power failure the file is the complete old or new one: the data is synced to disk before the file is renamed,
  and the rename before this function returns. If two processes write the same file, the later one wins.
  """
  place = open_path(path)
  place.parent.mkdir(parents=True, exist_ok=True)
  if not isinstance(place, pathlib.Path):
    place.write_bytes(content)
    return
  files.replace(place, content)


def encode(text: str) -> bytes:
  """Returns a text as UTF-8; of names of files that are not UTF-8, the other bytes as `\\udcNN`, as JSON has them."""
  return text.encode(errors='backslashreplace')


def read_text(path: PathLike) -> str:
  """Returns the text of a file; bytes that are not UTF-8 are replaced.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is too large.
  """
  return documents.read_bytes(open_path(path)).decode('utf-8', errors='replace')


@contextlib.contextmanager
def local(path: PathLike) -> Iterator[pathlib.Path]:
  """Yields a local path of a file: the file itself, or a copy that exists during the `with` statement.

  Raises:
    FileNotFoundError: there is no such file in object storage.
  """
  place = open_path(path)
  if isinstance(place, pathlib.Path):
    yield place
    return
  with tempfile.TemporaryDirectory(prefix='vit_jax_') as folder:
    copied = pathlib.Path(folder, place.name)
    copied.write_bytes(place.read_bytes())
    yield copied


def move(source: PathLike, target: PathLike) -> None:
  """Moves a folder. In object storage, a kill during the move leaves both folders, with complete files only."""
  old, new = open_path(source), open_path(target)
  if isinstance(old, pathlib.Path):
    files.publish(old, pathlib.Path(new))
    return
  copy(old, new)
  old.rmtree()


def copy(source: PathLike, target: PathLike) -> None:
  """Copies a folder with its contents, to or from this machine or within object storage."""
  old, new = open_path(source), open_path(target)
  new.mkdir(parents=True, exist_ok=True)
  for one in sorted(old.iterdir()):
    if one.is_dir():
      copy(one, new / one.name)
    else:
      (new / one.name).write_bytes(one.read_bytes())
