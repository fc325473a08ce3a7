"""Compares the SHA-256 of files in the background, each at its first use, while a run reads them.

One thread reads one file after the other, slowly, so that the run keeps the disk and the cores: 10 TB take 14 hours of
a run, and no start waits for them. Several processes of a machine share the work.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data.files import access
from vit_jax.data.files.checksums import Expected

log = logging.getLogger('vit_jax.data')

BYTES_PER_S = 200e6
"""Bytes that are read in a second, at most: SHA-256 takes about a tenth of a core for them."""
POLL_S = 10.
"""Seconds until a file is looked at again that another process was reading."""
_BLOCK_BYTES = 2**22
_CLOSING_S = 10.  # longer reads, of storage that does not respond, end with the process


class File(NamedTuple):
  """A file of a folder whose checksums are expected; `number` is its place there."""
  expected: Expected
  name: str
  number: int


class Background:
  """Verifies files in a thread, in the order in which they come.

  Args:
    files: in the order of their first use.
  """

  def __init__(self, files: Iterator[File]) -> None:
    self._files, self._closed, self._hurried = files, threading.Event(), threading.Event()
    self._error: UserError | TemporaryError | None = None
    self._thread = threading.Thread(target=self._run, name='verify', daemon=True)
    self._thread.start()

  def check(self) -> None:
    """Raises UserError if a file was found that has another checksum, or that cannot be read."""
    if self._error:
      raise self._error

  def finish(self) -> None:
    """Waits until all files are verified, which are now read as fast as possible; raises as `check`."""
    self._hurried.set()
    self._thread.join()
    self.check()

  def close(self) -> None:
    """Ends the thread."""
    self._closed.set()
    self._hurried.set()
    self._thread.join(_CLOSING_S)

  def _run(self) -> None:
    waiting: list[File] = []
    known: dict[str, set[str]] = {}  # by folder: files that need no comparison
    try:
      for file in self._files:
        if self._closed.is_set():
          return
        if not self._compare(file, known):
          waiting.append(file)
      while waiting and not self._closed.wait(POLL_S):
        known.clear()
        waiting = [file for file in waiting if not self._compare(file, known)]
    except (UserError, TemporaryError) as error:
      self._error = error
    except OSError as error:
      self._error = access.unreadable(error, f'the checksum of {error.filename}')

  def _compare(self, file: File, known: dict[str, set[str]]) -> bool:
    """Compares a file unless it is verified; returns False if another process is reading it."""
    expected, folder = file.expected, str(file.expected.folder)
    if folder not in known:
      known[folder] = set(expected.digests) - set(expected.find_new())
    if file.name in known[folder]:
      return True
    with _claim(file) as is_mine:
      if not is_mine:
        return False
      digest = self._digest(os.path.join(folder, file.name))
      if digest is None:  # closed
        return True
      if digest != expected.digests[file.name]:
        raise UserError(changed(expected, {file.name: digest}))
      expected.note([file.name])
      known[folder].add(file.name)
    return True

  def _digest(self, path: str) -> str | None:
    """Returns the SHA-256 of a file, read slowly; None if the thread should end."""
    found, done, started_s = hashlib.sha256(), 0, time.monotonic()
    with open(path, 'rb', buffering=0) as file:
      while block := file.read(_BLOCK_BYTES):
        found.update(block)
        done += len(block)
        self._hurried.wait(max(0., started_s + done / BYTES_PER_S - time.monotonic()))
        if self._closed.is_set():
          return None
    return found.hexdigest()


@contextlib.contextmanager
def _claim(file: File) -> Iterator[bool]:
  """Yields whether no other process of this machine compares the file now; the lock ends with the process."""
  with contextlib.ExitStack() as stack:
    path = file.expected.notes.with_suffix('.lock')
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      lock = stack.enter_context(open(path, 'ab'))
      fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, file.number)
    except BlockingIOError:
      yield False
      return
    except OSError:  # no locks here: two processes may compare the same file
      pass
    yield True


def changed(expected: Expected, found: dict[str, str]) -> str:
  """Returns the message about files whose SHA-256 is `found` and not the expected one."""
  shown = '; '.join(f'{name}: expected SHA-256 {expected.digests[name][:12]}…, got {digest[:12]}…'
                    for name, digest in list(found.items())[:5])
  return (f'{expected.folder}: expected unchanged shards, got {len(found)} of {len(expected.digests)} with another '
          f'checksum: {shown}. Copy them again, or prepare the dataset again; data.verify_shards=no reads them '
          'anyway, and counts damaged records as bad images.')
