"""Storage of run directories: a folder, or object storage, `gs://BUCKET/PATH`, through `etils.epath`.

Object storage writes objects atomically, and cannot append, rename or lock. Growing files are therefore kept locally
and copied at intervals (`Mirror`), and files to replace are written again.

A file that only grows is kept there in blocks of 8 MiB, `metrics.jsonl`, `metrics.jsonl.0001`, …, and complete blocks
are uploaded once. A kill loses what was written in the last `MIRROR_EVERY_S`, except for what `Mirror.settle` has
uploaded.

A bucket that is mounted as a folder (gcsfuse and the like, `mounts.can_append`) is used in the same way: a mount
uploads a file when it is closed, and would lose a record that stays open. The program detects such a mount itself,
instead of launchers passing `gs://…` on, because people also mount buckets by hand, with XPK or in Slurm jobs, and
because the mount has the credentials.
"""
from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, TypeAlias

from vit_jax.core import address, extras, os_errors, retrying
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.record import mounts

if TYPE_CHECKING:
  from etils import epath

  Path: TypeAlias = pathlib.Path | epath.Path

PathLike = str | os.PathLike[str]
REMOTE = 'gs://'
_PACKAGES = ('gcsfs', 'tensorflow')  # `epath` needs one of them for Google Cloud Storage
MIRROR_EVERY_S = 30.
BLOCK_BYTES = 2**23
log = logging.getLogger('vit_jax.record')


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


def faults() -> tuple[type[BaseException], ...]:
  """Returns the types of temporary storage errors; those of the client library are not `OSError`."""
  found: list[type[BaseException]] = [OSError, RuntimeError]
  for module, name in (('gcsfs.retry', 'HttpError'), ('aiohttp', 'ClientError'), ('tensorflow.errors', 'OpError')):
    if (loaded := sys.modules.get(module)) is not None:
      found.append(getattr(loaded, name))
  return tuple(found)


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
  """Syncs the entries of a folder to disk if the file system supports it."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):  # some network file systems cannot sync folders
      os.fsync(descriptor)
  finally:
    os.close(descriptor)


def encode(text: str) -> bytes:
  """Returns a text as UTF-8; of names of files that are not UTF-8, the other bytes as `\\udcNN`, as JSON has them."""
  return text.encode(errors='backslashreplace')


def read_text(path: PathLike) -> str:
  """Returns the text of a file; bytes that are not UTF-8 are replaced.

  Raises:
    FileNotFoundError: there is no such file.
  """
  return open_path(path).read_bytes().decode('utf-8', errors='replace')


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
    old.rename(new)
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


def read_growing(path: PathLike) -> bytes:
  """Returns the contents of a growing file, from all its blocks.

  Raises:
    FileNotFoundError: there is no such file.
  """
  place = open_path(path)
  blocks = [place.read_bytes()]
  while len(blocks[-1]) == BLOCK_BYTES and (block := _block(place, len(blocks))).exists():
    blocks.append(block.read_bytes())
  return b''.join(blocks)


def open_growing(path: PathLike) -> IO[bytes]:
  """Opens a growing file for reading: the file itself if it is a local one without further blocks.

  Raises:
    FileNotFoundError: there is no such file.
  """
  place = open_path(path)
  if isinstance(place, pathlib.Path) and not _block(place, 1).exists():
    return open(place, 'rb')
  return io.BytesIO(read_growing(place))


def join_growing(path: PathLike) -> None:
  """Joins the blocks of a growing file, if it has several, so that it can be appended to.

  A kill leaves the old blocks, or the new file and blocks that nothing reads.
  """
  place = open_path(path)
  if _block(place, 1).exists():
    write_bytes(place, read_growing(place))
    for block in reversed(blocks(place)[1:]):
      block.unlink()


def _block(path: Path, number: int) -> Path:
  return path.with_name(f'{path.name}.{number:04d}') if number else path


def blocks(path: PathLike) -> list[Path]:
  """Returns the blocks of a growing file that exist, in their order."""
  place = open_path(path)
  found: list[Path] = []
  while (block := _block(place, len(found))).exists():
    found.append(block)
  return found


class Mirror:
  """A local folder whose changed files are copied to `target` by a separate thread.

  A failed copy is repeated with the next one; if the last one fails, the folder is kept and a message names it. Folders
  in the folder, which some trackers write, are copied at the end.

  Args:
    target: a folder in object storage, or on a mount of it.
    growing: names of files that only grow, which are kept in blocks.
    check: is called before every copy, and raises UserError if nothing may be written any more.
    every_s: seconds between two copies.
  """

  def __init__(self, target: PathLike, *, growing: Sequence[str] = (), check: Callable[[], object] = lambda: None,
               every_s: float = MIRROR_EVERY_S) -> None:
    self.folder = pathlib.Path(tempfile.mkdtemp(prefix='vit_jax_run_'))
    self._target, self._check, self._every_s = open_path(target), check, every_s
    self._copied: dict[str, tuple[int, int]] = {}
    self._blocks: dict[str, list[int]] = {name: [] for name in growing}  # checksums of what was uploaded
    self._lock, self._closed = threading.Lock(), threading.Event()
    self._thread = threading.Thread(target=self._run, name='mirror', daemon=True)
    self._thread.start()

  def fetch(self, *names: str) -> None:
    """Downloads those of these growing files that exist in the target."""
    for name in names:
      path = self._target / name
      if path.exists():
        content = read_growing(path)
        (self.folder / name).write_bytes(content)
        if len(content) <= BLOCK_BYTES or _block(path, 1).exists():  # else a file that was copied there
          self._blocks[name] = [zlib.crc32(block) for block in _split(content)]

  def push(self) -> None:
    """Copies changed files; raises an error of `faults` if that fails, and that of `check`."""
    with self._lock:
      for path in sorted(self.folder.iterdir()):
        state = path.stat()
        version = (state.st_size, state.st_mtime_ns)
        if path.is_file() and self._copied.get(path.name) != version:
          self._check()
          self._upload(path)
          self._copied[path.name] = version

  def settle(self) -> None:
    """Copies changed files, which then survive a kill; tries again after temporary errors.

    Raises:
      TemporaryError: the storage still fails after a time.
      UserError: the files cannot be written.
    """
    try:
      retrying.retried(self.push, f'writing {self._target}')
    except (UserError, TemporaryError):
      raise
    except faults() as error:
      raise os_errors.writing(str(self._target), error) from error

  def _upload(self, path: pathlib.Path) -> None:
    """Uploads a file; of one that grows, the blocks from the last known one on."""
    target = self._target / path.name
    if path.name not in self._blocks:
      write_bytes(target, path.read_bytes())
      return
    known = self._blocks[path.name]
    first = max(0, len(known) - 2)  # a resume may cut an incomplete end, which can be in two blocks
    with open(path, 'rb') as file:
      file.seek(first * BLOCK_BYTES)
      content = _split(file.read())
    if not known or first + len(content) < len(known):  # of an earlier, longer file
      del known[first + len(content):]
      for block in reversed(blocks(target)[first + len(content):]):
        block.unlink()
    if not known:  # the first block last, as it ends what is read of a file that was copied there as a whole
      for number in reversed(range(len(content))):
        write_bytes(_block(target, number), content[number])
      known.extend(map(zlib.crc32, content))
    for number, new in enumerate(content, first):
      if number >= len(known) or known[number] != zlib.crc32(new):
        write_bytes(_block(target, number), new)
        known[number:] = [zlib.crc32(new)]

  def close(self) -> None:
    """Copies a last time, unless nothing may be written any more, and removes the local folder."""
    self._closed.set()
    self._thread.join()
    try:
      with contextlib.suppress(UserError):  # of `check`
        self.push()
        for folder in (path for path in self.folder.iterdir() if path.is_dir()):
          copy(folder, self._target / folder.name)
    except faults() as error:
      log.warning('The last files could not be written (%s). The files missing in %s are in %s.', error, self._target,
                  self.folder)
    else:
      shutil.rmtree(self.folder)

  def _run(self) -> None:
    while not self._closed.wait(self._every_s):
      try:
        self.push()
      except UserError:  # of `check`, which the run raises as well
        return
      except faults() as error:
        log.warning('%s could not be written to, and is tried again: %s', self._target, error)


def _split(content: bytes) -> list[bytes]:
  return [content[start:start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)] or [b'']
