"""Reads parts of files by offset, with temporary errors of the storage repeated. Safe for threads.

Every reader of an indexed format (TFRecord, tar, Parquet) reads its records here, so that a new kind of storage is
added in one place.
"""
from __future__ import annotations

import os

from vit_jax.core import retrying
from vit_jax.data.files import open_files


def read(path: str, offset: int, size: int) -> bytes:
  """Returns up to `size` bytes of a file from `offset`; fewer at its end.

  Raises:
    OSError: the file cannot be read.
    TemporaryError: its storage still fails after a time.
  """
  def once() -> bytes:
    with open_files.pool().use(('range', path), lambda: os.open(path, os.O_RDONLY), os.close) as opened:
      return os.pread(opened, size, offset)
  return retrying.retried(once, f'reading {path}')
