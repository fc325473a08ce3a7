"""A file that only grows, whose bytes wait in memory while its storage fails."""
from __future__ import annotations

import errno
import logging
import os
import time

from vit_jax.core import os_errors, retrying

log = logging.getLogger('vit_jax.record')


class Appender:
  """Appends to a file of a run, which need not stop where its storage fails for a time.

  What cannot be written for a temporary reason is kept, and written before anything else, in the same order and
  without a gap, even if a part of it had been written.

  Args:
    path: of an existing file.
    descriptor: of the file, opened for writing at its end; it belongs to the appender.
  """

  def __init__(self, path: str, descriptor: int) -> None:
    self._path, self._descriptor = path, descriptor
    self._waiting = b''
    self._failed_s: float | None = None

  def fileno(self) -> int:
    return self._descriptor

  def write(self, content: bytes) -> None:
    """Appends bytes, at once if possible.

    Raises:
      OSError: the storage does not allow it, or has failed for longer than `retrying.patience()`.
    """
    self._waiting += content
    try:
      self._drain()
    except OSError as error:
      now_s = time.monotonic()
      is_first = self._failed_s is None
      self._failed_s = now_s if self._failed_s is None else self._failed_s
      if not retrying.is_worth(error) or now_s - self._failed_s >= retrying.patience():
        raise
      if is_first:
        log.warning('%s cannot be written now (%s). The lines are kept in memory and written later; the run '
                    'continues.', self._path, os_errors.first_line(error))

  def settle(self) -> None:
    """Makes everything durable, waiting for the storage up to `retrying.patience()`; raises as `write`."""
    def once() -> None:
      self._drain()
      os.fsync(self._descriptor)
    retrying.retried(once, f'writing {self._path}')

  def close(self) -> None:
    """Writes what waits, and closes the file; raises as `write`."""
    if self._descriptor < 0:
      return
    try:
      if self._waiting:
        gone_s = 0. if self._failed_s is None else time.monotonic() - self._failed_s
        retrying.retried(self._drain, f'writing {self._path}', patience_s=max(0., retrying.patience() - gone_s))
    finally:
      os.close(self._descriptor)
      self._descriptor = -1

  def _drain(self) -> None:
    try:
      while self._waiting:
        self._waiting = self._waiting[os.write(self._descriptor, self._waiting):]
    except OSError as error:
      if error.errno == errno.ESTALE:  # a network file system lost the file
        fresh = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        os.close(self._descriptor)
        self._descriptor = fresh
      raise
    if self._failed_s is not None:
      log.warning('%s can be written again, and is complete.', self._path)
      self._failed_s = None
