"""SHA-256 checksums of files, computed once: verified files are noted in the user's cache, by path, size and time."""
from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import logging
import os
import pathlib
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vit_jax.data.files import access, open_files

log = logging.getLogger('vit_jax.data')
_BLOCK_BYTES = 2**22
_LOGGED_BYTES = 2**28


def sha256(path: str | os.PathLike[str]) -> str:
  """Returns the SHA-256 of a file, in hexadecimal digits."""
  found = hashlib.sha256()
  with open(path, 'rb', buffering=0) as file:
    while block := file.read(_BLOCK_BYTES):
      found.update(block)
  return found.hexdigest()


class Expected(NamedTuple):
  """The files of a folder: the SHA-256 of each by its name."""
  folder: pathlib.Path
  digests: Mapping[str, str]

  def find_new(self) -> list[str]:
    """Returns the files that have not been verified as they are now. Raises OSError if one cannot be found."""
    known = _read(self.notes)
    return [name for name in self.digests if known.get(name) != self.stamp(name)]

  def note(self, names: Iterable[str]) -> None:
    """Notes files as verified: one line each, at the end of the notes, so that several processes may do so."""
    text = ''.join(f'{json.dumps([name, *self.stamp(name)])}\n' for name in names)
    if not text:
      return
    try:
      self.notes.parent.mkdir(parents=True, exist_ok=True)
      with open(self.notes, 'ab', buffering=0) as file:
        file.write(f'\n{text}'.encode())  # a kill may have left half of a line
    except OSError as error:
      log.warning('%s: expected to write which files are verified, got "%s". They will be compared again.', self.notes,
                  error.strerror)

  @property
  def notes(self) -> pathlib.Path:
    """The file that has the verified files."""
    return access.cache_folder('checksums') / f'{hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:32]}.jsonl'

  def stamp(self, name: str) -> list[object]:
    """Returns size, time and expected SHA-256 of a file."""
    found = (self.folder / name).stat()
    return [found.st_size, found.st_mtime_ns, self.digests[name]]


def find_changed(folder: pathlib.Path, expected: Mapping[str, str], *, setting: str) -> dict[str, str]:
  """Returns the files with another SHA-256, and what it is; files that were verified before are not read.

  Args:
    folder: of the files.
    expected: SHA-256 by file name.
    setting: the setting that skips the comparison; named in the log.

  Raises:
    UserError: a file cannot be read.
  """
  files = Expected(folder, expected)
  try:
    new = files.find_new()
    digests = dict(zip(new, _hash_all(folder, new, setting), strict=True))
  except OSError as error:
    raise access.unreadable(error, str(error.filename or folder)) from error
  changed = {name: digest for name, digest in digests.items() if digest != expected[name]}
  files.note(name for name in new if name not in changed)
  return changed


def _hash_all(folder: pathlib.Path, names: list[str], setting: str) -> list[str]:
  size, started_s = sum((folder / name).stat().st_size for name in names), time.monotonic()
  is_long = size >= _LOGGED_BYTES
  if is_long:
    log.info('Comparing the checksums of %s files of %s (%.1f GB), once; %s skips this.', f'{len(names):,}',
             folder, size / 1e9, setting)
  with concurrent.futures.ThreadPoolExecutor(open_files.num_threads(0)) as pool:
    found = list(pool.map(lambda name: sha256(folder / name), names))
  if is_long:
    seconds = max(time.monotonic() - started_s, 1e-9)
    log.info('Compared in %.1f s (%.2f GB/s).', seconds, size / 1e9 / seconds)
  return found


def _read(notes: pathlib.Path) -> dict[str, list[object]]:
  """Returns size, time and SHA-256 of the files that were verified, by name; those of damaged lines are not."""
  found = {}
  with contextlib.suppress(OSError):  # no notes
    for line in notes.read_bytes().splitlines():
      with contextlib.suppress(ValueError, TypeError):
        name, *stamp = json.loads(line)
        if isinstance(name, str):
          found[name] = stamp
  return found
