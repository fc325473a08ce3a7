"""Storage of run directories: a folder on this machine, or object storage, `gs://BUCKET/PATH`, by `etils.epath`.

Every module that reads or writes a run uses this module. `open_path` checks an address and returns a path of `pathlib`
or of `epath`; both have the same methods.

Object storage writes whole objects atomically, and cannot append, rename or lock. Buckets that are mounted as a folder
(gcsfuse, s3fs, Mountpoint, blobfuse) upload a file when it is closed or synced: a file that stays open is lost with the
host, and each sync uploads the whole file again. `can_append` is false for buckets and their mounts, where `growing.py`
writes files that grow. Where other hosts can write (`is_shared`), file locks do not suffice, as they hold for one host
or one mount. `can_append` and `is_shared` depend on the type of the file system in the kernel's table of mounts, so a
person who mounts a bucket has nothing to set. On systems without this table, every path counts as on a local disk.
"""
from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from vit_jax.core import address, documents, extras, files
from vit_jax.core.errors import UserError

if TYPE_CHECKING:
  from etils import epath

  Path: TypeAlias = pathlib.Path | epath.Path

PathLike = str | os.PathLike[str]
REMOTE = 'gs://'
MOUNTS = '/proc/self/mountinfo'  # lines such as '27 1 8:1 / /home rw shared:1 - ext4 /dev/vda rw' (proc(5) of Linux)
_PACKAGES = ('gcsfs', 'tensorflow')  # `epath` needs one of these packages for Google Cloud Storage
_NETWORK = ('nfs', 'nfs4', 'lustre', 'ceph', 'gpfs', 'beegfs', 'glusterfs', 'cifs', 'smb3', 'wekafs', 'panfs', 'pvfs2',
            'afs', 'ocfs2', 'gfs2', '9p', 'virtiofs', 'vboxsf')
_LOCAL_FUSE = ('fuseblk', 'fuse.fuse-overlayfs', 'fuse.mergerfs', 'fuse.bindfs', 'fuse.gocryptfs', 'fuse.encfs')
_ESCAPE = re.compile(r'\\([0-7]{3})')  # an escaped character in the table of mounts, such as '\040' for a space


class UnknownHome(UserError):
  """A path begins with `~` or `~NAME`, and there is no such home directory."""


def is_local(path: PathLike) -> bool:
  """Returns whether a path is on this machine, including mounted file systems."""
  return '://' not in os.fspath(path)


def is_shared(path: PathLike) -> bool:
  """Returns whether other hosts may write to the storage of a path."""
  if not is_local(path):
    return True
  file_system_type = file_system(path)
  return file_system_type in _NETWORK or _is_bucket(file_system_type)


def can_append(path: PathLike) -> bool:
  """Returns whether a process can append to a file at this path: it is not in a bucket or the mount of a bucket."""
  return is_local(path) and not _is_bucket(file_system(path))


def _is_bucket(file_system_type: str) -> bool:
  """Returns whether a file system may be a mount of object storage: any FUSE that is not known to be local."""
  return file_system_type.startswith('fuse') and file_system_type not in _LOCAL_FUSE


def file_system(path: PathLike) -> str:
  """Returns the type of the file system of a path, which need not exist, such as `fuse.gcsfuse`; '' = not known."""
  resolved = os.path.realpath(path)
  file_system_type, longest = '', -1  # of the deepest mount that the path is in: its type, the length of its folder
  try:
    with open(MOUNTS, encoding='utf-8', errors='surrogateescape') as file:
      lines = file.read().splitlines()
  except OSError:
    return ''
  for line in lines:
    left, _, right = line.partition(' - ')
    fields = left.split(' ')
    if len(fields) < 5 or not right:
      continue
    folder = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
    is_inside = resolved == folder or resolved.startswith(folder.rstrip('/') + '/')
    if is_inside and len(folder) >= longest:  # the last of several mounts of one folder covers the others
      file_system_type, longest = right.split(' ')[0], len(folder)
  return file_system_type


def expand_home(path: PathLike, setting: str = 'path') -> str:
  """Returns a path with the home directory in place of `~` or `~NAME` at its start.

  Raises UnknownHome if there is no such home directory, nor a file or folder with the name `~NAME`.
  """
  text = os.path.expanduser(os.fspath(path))
  if text.startswith('~') and not os.path.lexists(text.partition('/')[0]):
    raise UnknownHome(f'{setting}: expected a path, got {text!r}, whose home directory is not known. Correct the path.')
  return text


def open_path(path: PathLike) -> Path:
  """Returns the absolute path, with `~` expanded; `gs://…` is unchanged.

  Raises:
    UserError: this kind of storage is not supported, or the package for it is not installed.
    UnknownHome: there is no such home directory.
  """
  text = os.fspath(path)
  address.check(text, 'path')
  if is_local(text):
    return pathlib.Path(expand_home(text)).absolute()
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
  """Creates or replaces a file atomically, also at a power failure; its folder is created if missing."""
  opened = open_path(path)
  if isinstance(opened, pathlib.Path):
    files.replace(opened, content)
  else:
    opened.parent.mkdir(parents=True, exist_ok=True)
    opened.write_bytes(content)


def encode(text: str) -> bytes:
  """Returns a text as UTF-8. Bytes of file names that are not UTF-8 become `\\udcNN`, as in JSON."""
  return text.encode(errors='backslashreplace')


def read_text(path: PathLike) -> str:
  """Returns the text of a file; bytes that are not UTF-8 are replaced.

  Raises FileNotFoundError if there is no such file, and ValueError if it is too large (`documents.MAX_BYTES`).
  """
  return documents.read_bytes(open_path(path)).decode('utf-8', errors='replace')


@contextlib.contextmanager
def local(path: PathLike) -> Iterator[pathlib.Path]:
  """Yields a local path of a file: that of the file, or in object storage that of a copy for the time inside."""
  opened = open_path(path)
  if isinstance(opened, pathlib.Path):
    yield opened
    return
  with tempfile.TemporaryDirectory(prefix='vit_jax_') as folder:
    copied = pathlib.Path(folder, opened.name)
    copied.write_bytes(opened.read_bytes())
    yield copied


def move(source: PathLike, target: PathLike) -> None:
  """Moves a folder. In object storage, a kill during the move leaves both folders, with complete files only."""
  old, new = open_path(source), open_path(target)
  if isinstance(old, pathlib.Path):
    files.publish(old, pathlib.Path(new))
  else:
    copy(old, new)
    old.rmtree()


def copy(source: PathLike, target: PathLike) -> None:
  """Copies a folder with its contents, to or from this machine or within object storage; files are overwritten."""
  old, new = open_path(source), open_path(target)
  new.mkdir(parents=True, exist_ok=True)
  for entry in sorted(old.iterdir()):
    if entry.is_dir():
      copy(entry, new / entry.name)
    else:
      (new / entry.name).write_bytes(entry.read_bytes())
