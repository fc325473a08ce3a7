"""Files of a run that only grow: `metrics.jsonl`, and the event files of trackers.

`writer.py` appends to the record with `Appender` on disks and network file systems. In buckets of object storage and
their mounts, nothing can be appended (`storage.can_append`). There, the files grow in a folder on this machine, and a
`Mirror` copies the files at intervals. It copies the record in blocks, so that only new parts are uploaded again:

  metrics.jsonl, metrics.jsonl.0001, metrics.jsonl.0002, …     each of 8 MiB, except the last block

Complete blocks are uploaded once. A kill loses the lines of the last `MIRROR_EVERY_S` seconds, except for lines that
`Mirror.settle` has uploaded. `reader.py` reads the blocks as one file (`open_file`).
"""
from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import pathlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO

from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.record import storage

MIRROR_EVERY_S = 30.
BLOCK_BYTES = 2**23  # another size could not read the records of earlier runs
log = logging.getLogger('vit_jax.record')


class Appender:
  """Appends to a local file, which is created if it is missing, also when the storage fails for a while.

  Bytes that cannot be written for a temporary reason are kept in memory, and the next call writes these bytes first. So
  the file has all bytes in order, even if a call wrote only a part of its bytes.
  """

  def __init__(self, path: str) -> None:
    self._path = path
    self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    self._waiting = b''  # bytes that are not written yet
    self._failed_s = -1.  # the time of the first failure since the last success; -1 = the last write succeeded

  def fileno(self) -> int:
    """Returns the descriptor of the open file."""
    return self._descriptor

  def write(self, content: bytes) -> None:
    """Appends bytes, now or in a later call.

    Raises OSError if the storage does not allow it, or has failed for longer than `failures.patience()`.
    """
    self._waiting += content
    try:
      self._drain()
    except OSError as error:
      is_first = self._failed_s < 0
      if is_first:
        self._failed_s = time.monotonic()
      if not failures.is_worth(error) or self._patience_left_s() <= 0:
        raise
      if is_first:
        log.warning('%s cannot be written now (%s). The lines are kept in memory and written later; the run '
                    'continues.', self._path, failures.first_line(error))

  def settle(self) -> None:
    """Makes all bytes durable on the disk, and repeats this for up to `failures.patience()`; raises as `write`."""
    def drain_and_sync() -> None:
      self._drain()
      os.fsync(self._descriptor)
    failures.retried(drain_and_sync, f'writing {self._path}')

  def close(self) -> None:
    """Writes the bytes that wait, and closes the file; raises as `write`. It may be called twice."""
    try:
      if self._waiting:
        failures.retried(self._drain, f'writing {self._path}', patience_s=max(0., self._patience_left_s()))
    finally:
      if self._descriptor >= 0:
        os.close(self._descriptor)
      self._descriptor, self._waiting = -1, b''

  def _patience_left_s(self) -> float:
    return failures.patience() - (time.monotonic() - self._failed_s if self._failed_s >= 0 else 0.)

  def _drain(self) -> None:
    """Writes `_waiting`, which becomes shorter by the bytes that each call of `os.write` has written."""
    try:
      while self._waiting:
        self._waiting = self._waiting[os.write(self._descriptor, self._waiting):]
    except OSError as error:
      if error.errno == errno.ESTALE:  # a network file system lost the file
        lost, self._descriptor = self._descriptor, os.open(self._path, os.O_WRONLY | os.O_APPEND)
        os.close(lost)
      raise
    if self._failed_s >= 0:
      log.warning('%s can be written again, and is complete.', self._path)
      self._failed_s = -1.


class Mirror:
  """A local folder whose changed files are copied to `target`, at intervals in a thread, and by `push` and `settle`.

  The writer calls `fetch` at the start, writes files in `folder`, calls `settle` where the files must be durable, and
  `close` at the end. The next copy repeats a copy that failed. If the last copy fails, the folder is kept and a message
  names the folder. Subfolders, which some trackers write, are copied at the end.

  Args:
    target: a folder in object storage, or on a mount of it.
    growing: the name of the file that only grows, which is copied in blocks; '' = none.
    check: is called before every copy, and raises UserError if nothing may be written any more.
    every_s: seconds between two copies.
  """

  def __init__(self, target: storage.PathLike, *, growing: str = '', check: Callable[[], object] = lambda: None,
               every_s: float = MIRROR_EVERY_S) -> None:
    self.folder = pathlib.Path(tempfile.mkdtemp(prefix='vit_jax_run_'))
    self._target = storage.open_path(target)
    self._check, self._every_s, self._growing = check, every_s, growing
    self._copied: dict[str, tuple[int, int]] = {}  # by name: size and time of change of the version that was copied
    self._num_copied_bytes = 0  # of the growing file
    self._copying, self._closed = threading.Lock(), threading.Event()
    self._thread = threading.Thread(target=self._run, name='mirror', daemon=True)
    self._thread.start()

  def fetch(self) -> None:
    """Downloads the growing file if it exists in the target."""
    path = self._target / self._growing
    if path.exists():
      content = read(path)
      (self.folder / self._growing).write_bytes(content)
      is_in_blocks = len(content) <= BLOCK_BYTES or _block(path, 1).exists()  # else a person has copied a whole file
      self._num_copied_bytes = len(content) if is_in_blocks else 0

  def push(self) -> None:
    """Copies changed files once. Raises UserError of `check`, or errors for which `failures.is_of_storage` is true."""
    with self._copying:
      for path in sorted(self.folder.iterdir()):
        status = path.stat()
        version = (status.st_size, status.st_mtime_ns)
        if path.is_file() and self._copied.get(path.name) != version:
          self._check()
          if path.name == self._growing:
            self._push_blocks(path)
          else:
            storage.write_bytes(self._target / path.name, path.read_bytes())
          self._copied[path.name] = version

  def settle(self) -> None:
    """Copies changed files, which then survive a kill; repeats the copy after temporary errors.

    Raises:
      TemporaryError: the storage still fails after `failures.patience()`.
      UserError: the files cannot be written.
    """
    failures.stored(self.push, str(self._target))

  def close(self) -> None:
    """Ends the thread, copies a last time unless `check` raises an error, and removes the local folder."""
    self._closed.set()
    self._thread.join()
    try:
      with contextlib.suppress(UserError):  # of `check`
        self.push()
        for folder in (path for path in self.folder.iterdir() if path.is_dir()):
          storage.copy(folder, self._target / folder.name)
    except Exception as error:
      if not failures.is_of_storage(error):
        raise
      log.warning('The last files could not be written (%s). The files missing in %s are in %s.', error, self._target,
                  self.folder)
    else:
      shutil.rmtree(self.folder)

  def _push_blocks(self, path: pathlib.Path) -> None:
    """Uploads the blocks of the growing file, beginning with the last one that was incomplete."""
    target = self._target / path.name
    first = self._num_copied_bytes // BLOCK_BYTES
    with open(path, 'rb') as file:
      file.seek(first * BLOCK_BYTES)
      content = file.read()
    numbered = [(first + start // BLOCK_BYTES, content[start:start + BLOCK_BYTES])
                for start in range(0, len(content), BLOCK_BYTES)]
    if not self._num_copied_bytes:
      for block in reversed(blocks(target)[max(1, len(numbered)):]):  # of an earlier, longer file
        block.unlink()
      numbered.reverse()  # block 0 last: a whole file that a person copied there is read alone until then
    for number, block_content in numbered:
      storage.write_bytes(_block(target, number), block_content)
    self._num_copied_bytes = first * BLOCK_BYTES + len(content)

  def _run(self) -> None:
    """Copies at intervals until the mirror is closed; runs in the thread."""
    while not self._closed.wait(self._every_s):
      try:
        self.push()
      except UserError:  # of `check`; the writer calls the same check and raises the error in the main thread
        return
      except Exception as error:
        if not failures.is_of_storage(error):
          raise
        log.warning('%s could not be written to, and is tried again: %s', self._target, error)


def blocks(path: storage.PathLike) -> list[storage.Path]:
  """Returns the blocks of a growing file that exist, in their order."""
  first = storage.open_path(path)
  existing: list[storage.Path] = []
  while (block := _block(first, len(existing))).exists():
    existing.append(block)
  return existing


def read(path: storage.PathLike) -> bytes:
  """Returns the content of a growing file, from all blocks. Raises FileNotFoundError if there is no such file."""
  with open_file(path) as file:
    return file.read()


def open_file(path: storage.PathLike) -> IO[bytes]:
  """Opens a growing file for reading. Raises FileNotFoundError if there is no such file.

  Only a block of `BLOCK_BYTES` is followed by another block: blocks after a shorter or longer one are not read.
  """
  first = storage.open_path(path)
  if isinstance(first, pathlib.Path) and not _block(first, 1).exists():
    return documents.open_file(first)
  contents = [_content(first)]
  while len(contents[-1]) == BLOCK_BYTES and (block := _block(first, len(contents))).exists():
    contents.append(_content(block))
  return io.BytesIO(b''.join(contents))


def join(path: storage.PathLike) -> None:
  """Joins the blocks of a growing file, if it has several, so that a process can append to the file.

  After a kill inside, there are the old blocks, or the joined file and old blocks that are not read (`open_file`).
  """
  first = storage.open_path(path)
  if _block(first, 1).exists():
    storage.write_bytes(first, read(first))
    for block in reversed(blocks(first)[1:]):
      block.unlink()


def _block(path: storage.Path, number: int) -> storage.Path:
  """Returns the path of a block of a growing file; that of block 0 is the path of the file."""
  return path.with_name(f'{path.name}.{number:04d}') if number else path


def _content(path: storage.Path) -> bytes:
  if not isinstance(path, pathlib.Path):
    return path.read_bytes()
  with documents.open_file(path) as file:
    return file.read()
