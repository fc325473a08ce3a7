"""A bounded folder with parts of remote objects, which the processes of a machine share.

Each object has one file, with holes where nothing is kept: a part lies at its own offset, and its mark, with its
offset, size and CRC-32C, at `_MARKS` + 1/32 of its offset. A part is written before its mark, and is compared with its
mark whenever it is read, so that a kill or a full disk leaves no part that is returned incomplete.

A random order visits each example once an epoch, so a full cache that replaces the oldest parts would replace each part
before its next use. A full cache therefore keeps what it has, and removes only the folders of objects that no process
uses now, the least recently used first.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import pathlib
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from vit_jax.core import lazy
from vit_jax.data.files import open_files

if TYPE_CHECKING:
  import google_crc32c
else:
  google_crc32c = lazy.Module('google_crc32c')

log = logging.getLogger('vit_jax.data')

_MARKS = 2**40  # offset of the marks in a file
_PER_MARK = 512  # bytes of an object that share a mark: of several parts that begin there, the last one is kept
_MARK = struct.Struct('<QII')
_UNIT = 2**20  # bytes for each byte of the file `used`
_LOCK, _USED = '.lock', 'used'
_AGAIN_S = 60.  # until a full cache looks again for folders to remove


class Cache:
  """Parts of objects in a folder of at most about `max_bytes`. Safe for threads and processes.

  Raises:
    OSError: the folder cannot be written.
  """

  def __init__(self, folder: pathlib.Path, max_bytes: int) -> None:
    self.folder, self._max_bytes = folder, max_bytes
    folder.mkdir(parents=True, exist_ok=True)
    self._lock, self._pending, self._full_s, self._is_broken = threading.Lock(), 0, -_AGAIN_S, False
    self._groups: dict[str, IO[bytes]] = {}  # that this process uses, with their locks
    self._used = os.open(folder / _USED, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    with self._alone() as is_alone:
      if is_alone:
        self._recount()

  def get(self, path: str, generation: bytes, offset: int, size: int) -> bytes | None:
    """Returns a part of an object; None if it is not kept, or not as it was."""
    try:
      with open_files.pool().use(('kept', path, generation), lambda: self._open(path, generation), os.close) as file:
        mark = os.pread(file, _MARK.size, _place(offset))
        if len(mark) < _MARK.size or (found := _MARK.unpack(mark))[:2] != (offset, size):
          return None
        content = os.pread(file, size, offset)
        return content if google_crc32c.value(content) == found[2] else None
    except OSError as error:
      self._give_up(error)
      return None

  def has(self, path: str, generation: bytes, offset: int, size: int) -> bool:
    """Returns whether a part is kept, without reading it."""
    try:
      with open_files.pool().use(('kept', path, generation), lambda: self._open(path, generation), os.close) as file:
        mark = os.pread(file, _MARK.size, _place(offset))
        return len(mark) == _MARK.size and _MARK.unpack(mark)[:2] == (offset, size)
    except OSError:
      return False

  def put(self, path: str, generation: bytes, offset: int, content: bytes) -> None:
    """Keeps a part of an object if there is space."""
    if self._is_broken or not content or not self._has_space(len(content)):
      return
    try:
      with open_files.pool().use(('kept', path, generation), lambda: self._open(path, generation), os.close) as file:
        if os.pwrite(file, content, offset) == len(content):
          os.pwrite(file, _MARK.pack(offset, len(content), google_crc32c.value(content)), _place(offset))
      self._count(len(content))
    except OSError as error:
      self._give_up(error)

  def _open(self, path: str, generation: bytes) -> int:
    group = hashlib.sha256(path.rpartition('/')[0].encode()).hexdigest()[:32]
    with self._lock:
      if group not in self._groups or not (self.folder / group).is_dir():
        self._groups[group] = self._enter(self.folder / group)
    name = hashlib.sha256(path.encode() + b'\0' + generation).hexdigest()[:32]
    return os.open(self.folder / group / name, os.O_RDWR | os.O_CREAT, 0o644)

  def _enter(self, group: pathlib.Path) -> IO[bytes]:
    """Creates the folder of a group, and returns its lock, which keeps other processes from removing it."""
    while True:
      group.mkdir(exist_ok=True)
      lock = open(group / _LOCK, 'ab')
      fcntl.flock(lock, fcntl.LOCK_SH)
      if os.fstat(lock.fileno()).st_nlink:
        os.utime(lock.fileno())
        return lock
      lock.close()  # the folder was removed before the lock was taken

  def _has_space(self, size: int) -> bool:
    if os.fstat(self._used).st_size * _UNIT + self._pending + size <= self._max_bytes:
      return True
    with self._lock:
      if time.monotonic() - self._full_s < _AGAIN_S:
        return False
      self._full_s = time.monotonic()
    with self._alone() as is_alone:
      return is_alone and self._remove_unused()

  def _remove_unused(self) -> bool:
    """Removes the least recently used folder of objects that no process uses; returns whether there was one."""
    groups = [path for path in self.folder.iterdir() if path.is_dir() and path.name not in self._groups]
    for group in sorted(groups, key=lambda path: (path / _LOCK).stat().st_mtime if (path / _LOCK).exists() else 0):
      with contextlib.suppress(OSError), open(group / _LOCK, 'ab') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        freed = _num_bytes(group)
        shutil.rmtree(group)
        self._recount()
        log.info('%s: removed %.1f MiB of data that no process uses.', self.folder, freed / 2**20)
        self._full_s = -_AGAIN_S
        return True
    return False

  def _recount(self) -> None:
    """Sets the bytes of the folder to those that its files take now."""
    os.ftruncate(self._used, -(-sum(map(_num_bytes, self.folder.iterdir())) // _UNIT))

  def _count(self, size: int) -> None:
    """Adds to the bytes of the folder: a byte of the file `used` for each MiB, which every process appends."""
    with self._lock:
      self._pending += size
      units, self._pending = divmod(self._pending, _UNIT)
    if units:
      os.write(self._used, bytes(units))

  @contextlib.contextmanager
  def _alone(self) -> Iterator[bool]:
    """Yields whether this process may change the count; one of them does at a time."""
    with open(self.folder / _LOCK, 'ab') as lock:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError:
        yield False
        return
      yield True

  def _give_up(self, error: OSError) -> None:
    if not self._is_broken:
      self._is_broken = True
      log.warning('data.cache_dir: expected to keep data in %s, got "%s". This process keeps no more.', self.folder,
                  error.strerror)


def _place(offset: int) -> int:
  return _MARKS + offset // _PER_MARK * _MARK.size


def _num_bytes(path: pathlib.Path) -> int:
  """Returns the bytes that a file, or the files in a folder, take on the disk."""
  try:
    return sum(map(_num_bytes, path.iterdir())) if path.is_dir() else path.stat().st_blocks * 512
  except OSError:  # removed now
    return 0
