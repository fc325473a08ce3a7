"""Files that grow, for a folder in object storage, which cannot append: kept locally, and copied whole now and then.

What was written in the last `EVERY_S` before a kill is lost; what a caller `push`es is not.
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
  """A local folder whose files are copied to `target`, those that have changed, from a thread of its own.

  A copy that fails is tried again with the next; if the last one fails, the folder stays, and a message names it.

  Args:
    target: a folder in object storage.
    every_s: between two copies.
  """

  def __init__(self, target: storage.PathLike, *, every_s: float = EVERY_S):
    self.folder = pathlib.Path(tempfile.mkdtemp(prefix='vit_jax_run_'))
    self._target, self._every_s = storage.open_path(target), every_s
    self._copied: dict[str, tuple[int, int]] = {}
    self._lock, self._closed = threading.Lock(), threading.Event()
    self._thread = threading.Thread(target=self._run, name='mirror', daemon=True)
    self._thread.start()

  def fetch(self, name: str) -> None:
    """Brings a file of the target here, if it is there."""
    if (self._target / name).exists():
      (self.folder / name).write_bytes((self._target / name).read_bytes())

  def push(self) -> bool:
    """Copies what has changed; False if that failed, with a warning."""
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
    """Copies for the last time, and removes the local folder."""
    self._closed.set()
    self._thread.join()
    if self.push():
      shutil.rmtree(self.folder)
    else:
      log.warning('The files missing in %s are in %s.', self._target, self.folder)

  def _run(self) -> None:
    while not self._closed.wait(self._every_s):
      self.push()
