"""Where run directories lie: in a local folder, or in object storage, `gs://BUCKET/PATH`, through `etils.epath`.

An object store writes objects whole or not at all, and can neither append, nor rename, nor lock. What grows is
therefore kept locally and copied now and then (`mirror`), and what is to be replaced is written once more.
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

from vit_jax.core.errors import UserError

if TYPE_CHECKING:
  from etils import epath

  Path: TypeAlias = pathlib.Path | epath.Path

PathLike = str | os.PathLike[str]
REMOTE = 'gs://'
_PACKAGES = ('gcsfs', 'tensorflow')  # either lets `epath` reach Google Cloud Storage


def is_local(path: PathLike) -> bool:
  """Whether a path is one of this machine, a mounted file system included."""
  return '://' not in os.fspath(path)


def open_path(path: PathLike) -> Path:
  """The path from the root: `~` and the current folder are filled in; `gs://…` stays as it is.

  Raises:
    UserError: another kind of storage, or what reaches this one is not installed.
  """
  text = os.fspath(path)
  if is_local(text):
    return pathlib.Path(text).expanduser().absolute()
  if not text.startswith(REMOTE) or not text.removeprefix(REMOTE).strip('/'):
    raise UserError(f'{text}: expected a folder or {REMOTE}BUCKET/PATH for a run.')
  if not any(importlib.util.find_spec(name) for name in _PACKAGES):
    raise UserError(f"{text} needs the package gcsfs, which is not installed; `pip install 'vit-jax[gcs]'` adds it")
  from etils import epath  # not needed, and not imported, by local runs
  refresh(text)
  return epath.Path(text)


def refresh(path: PathLike) -> None:
  """Forgets the listings of object storage that gcsfs keeps: another process may have written there since."""
  if is_local(path) or 'gcsfs' not in sys.modules:
    return
  from etils.epath import backend
  backend.fsspec_backend.fs(path).invalidate_cache()


def faults() -> tuple[type[BaseException], ...]:
  """What a store may raise for a while and not the next: those of its client are no `OSError`."""
  found: list[type[BaseException]] = [OSError, RuntimeError]
  for module, name in (('gcsfs.retry', 'HttpError'), ('aiohttp', 'ClientError'), ('tensorflow.errors', 'OpError')):
    if (loaded := sys.modules.get(module)) is not None:
      found.append(getattr(loaded, name))
  return tuple(found)


def write_bytes(path: PathLike, content: bytes) -> None:
  """Makes or replaces a file at once; its folder is made if missing.

  After a power cut the file is the old one or the new one, whole: it is on the disk before it gets its name, and the
  name is before this returns. Two processes may write the same file; the later one stays.
  """
  place = open_path(path)
  place.parent.mkdir(parents=True, exist_ok=True)
  if not isinstance(place, pathlib.Path):
    place.write_bytes(content)
    return
  part = place.with_name(f'{place.name}.{os.getpid()}.part')
  try:
    with open(part, 'wb') as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    part.replace(place)
  except OSError:
    part.unlink(missing_ok=True)
    raise
  _sync_folder(place.parent)


def _sync_folder(folder: pathlib.Path) -> None:
  """Brings the names in a folder to the disk, where the file system can."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):  # some network file systems sync no folders
      os.fsync(descriptor)
  finally:
    os.close(descriptor)


def read_text(path: PathLike) -> str:
  """A whole file; bytes that are no UTF-8 are replaced.

  Raises:
    FileNotFoundError: there is no such file.
  """
  return open_path(path).read_bytes().decode('utf-8', errors='replace')


@contextlib.contextmanager
def local(path: PathLike) -> Iterator[pathlib.Path]:
  """A file under a local path: itself, or a copy that lasts as long as the `with` statement.

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
  """Moves a folder. In object storage: file after file; a kill on the way leaves both, and nothing half-written."""
  old, new = open_path(source), open_path(target)
  if isinstance(old, pathlib.Path):
    old.rename(new)
    return
  copy(old, new)
  old.rmtree()


def copy(source: PathLike, target: PathLike) -> None:
  """Copies a folder with all that is in it, to or from this machine or within object storage."""
  old, new = open_path(source), open_path(target)
  new.mkdir(parents=True, exist_ok=True)
  for one in sorted(old.iterdir()):
    if one.is_dir():
      copy(one, new / one.name)
    else:
      (new / one.name).write_bytes(one.read_bytes())
