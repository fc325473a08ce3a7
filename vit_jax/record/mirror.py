"""Local copies of growing files for object storage, which cannot append: complete files are uploaded at intervals.

A kill loses what was written in the last `EVERY_S`, except for what `push` has uploaded.
"""
from __future__ import annotations

import logging
import pathlib
import shutil
import tempfile
import threading

from vit_jax.record import storage

EVERY_S = 30.
log = logging.getLogger('vit_jax.record')


class Mirror:
  """A local folder whose changed files are copied to `target` by a separate thread.

  A failed copy is repeated with the next one; if the last one fails, the folder is kept and a message names it.

  Args:
    target: a folder in object storage.
    every_s: seconds between two copies.
  """

  def __init__(self, target: storage.PathLike, *, every_s: float = EVERY_S):
    self.folder = pathlib.Path(tempfile.mkdtemp(prefix='vit_jax_run_'))
    self._target, self._every_s = storage.open_path(target), every_s
    self._copied: dict[str, tuple[int, int]] = {}
    self._lock, self._closed = threading.Lock(), threading.Event()
    self._thread = threading.Thread(target=self._run, name='mirror', daemon=True)
    self._thread.start()

  def fetch(self, name: str) -> None:
    """Downloads a file of the target if it exists."""
    if (self._target / name).exists():
      (self.folder / name).write_bytes((self._target / name).read_bytes())

  def push(self) -> bool:
    """Copies changed files; logs a warning and returns False if that fails."""
    with self._lock:
      try:
        for path in sorted(self.folder.iterdir()):
          state = path.stat()
          version = (state.st_size, state.st_mtime_ns)
          if self._copied.get(path.name) != version:
            storage.write_bytes(self._target / path.name, path.read_bytes())
            self._copied[path.name] = version
      except storage.faults() as error:
        log.warning('%s could not be written to, and is tried again: %s', self._target, error)
        return False
      return True

  def close(self) -> None:
    """Copies a last time, and removes the local folder."""
    self._closed.set()
    self._thread.join()
    if self.push():
      shutil.rmtree(self.folder)
    else:
      log.warning('The files missing in %s are in %s.', self._target, self.folder)

  def _run(self) -> None:
    while not self._closed.wait(self._every_s):
      self.push()
