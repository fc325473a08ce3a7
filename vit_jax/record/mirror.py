"""Local copies of growing files for object storage, which cannot append: what is new is uploaded at intervals.

A file that only grows is kept there in blocks of 8 MiB, `metrics.jsonl`, `metrics.jsonl.0001`, …, and complete blocks
are uploaded once. A kill loses what was written in the last `EVERY_S`, except for what `push` has uploaded.
"""
from __future__ import annotations

import logging
import pathlib
import shutil
import tempfile
import threading
import zlib
from collections.abc import Sequence

from vit_jax.record import storage

EVERY_S = 30.
BLOCK_BYTES = 2**23
log = logging.getLogger('vit_jax.record')


def read(path: storage.PathLike) -> bytes:
  """Returns the contents of a growing file in object storage, from all its blocks.

  Raises:
    FileNotFoundError: there is no such file.
  """
  place = storage.open_path(path)
  blocks = [place.read_bytes()]
  while len(blocks[-1]) == BLOCK_BYTES and (block := _block(place, len(blocks))).exists():
    blocks.append(block.read_bytes())
  return b''.join(blocks)


def _block(path: storage.Path, number: int) -> storage.Path:
  return path.with_name(f'{path.name}.{number:04d}') if number else path


class Mirror:
  """A local folder whose changed files are copied to `target` by a separate thread.

  A failed copy is repeated with the next one; if the last one fails, the folder is kept and a message names it.

  Args:
    target: a folder in object storage.
    growing: names of files that only grow, which are kept in blocks.
    every_s: seconds between two copies.
  """

  def __init__(self, target: storage.PathLike, *, growing: Sequence[str] = (), every_s: float = EVERY_S) -> None:
    self.folder = pathlib.Path(tempfile.mkdtemp(prefix='vit_jax_run_'))
    self._target, self._every_s = storage.open_path(target), every_s
    self._copied: dict[str, tuple[int, int]] = {}
    self._blocks: dict[str, list[int]] = {name: [] for name in growing}  # checksums of what was uploaded
    self._lock, self._closed = threading.Lock(), threading.Event()
    self._thread = threading.Thread(target=self._run, name='mirror', daemon=True)
    self._thread.start()

  def fetch(self, *names: str) -> None:
    """Downloads those of these growing files that exist in the target."""
    for name in names:
      if (self._target / name).exists():
        content = read(self._target / name)
        (self.folder / name).write_bytes(content)
        self._blocks[name] = [zlib.crc32(block) for block in _split(content)]

  def push(self) -> bool:
    """Copies changed files; logs a warning and returns False if that fails."""
    with self._lock:
      try:
        for path in sorted(self.folder.iterdir()):
          state = path.stat()
          version = (state.st_size, state.st_mtime_ns)
          if self._copied.get(path.name) != version:
            self._upload(path)
            self._copied[path.name] = version
      except storage.faults() as error:
        log.warning('%s could not be written to, and is tried again: %s', self._target, error)
        return False
      return True

  def _upload(self, path: pathlib.Path) -> None:
    """Uploads a file; of one that grows, the blocks from the last known one on."""
    if path.name not in self._blocks:
      storage.write_bytes(self._target / path.name, path.read_bytes())
      return
    known = self._blocks[path.name]
    first = max(0, len(known) - 2)  # a resume may cut an incomplete end, which can be in two blocks
    with open(path, 'rb') as file:
      file.seek(first * BLOCK_BYTES)
      for number, block in enumerate(_split(file.read()), first):
        if number >= len(known) or known[number] != zlib.crc32(block):
          storage.write_bytes(_block(self._target / path.name, number), block)
          known[number:] = [zlib.crc32(block)]

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


def _split(content: bytes) -> list[bytes]:
  return [content[start:start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)] or [b'']
