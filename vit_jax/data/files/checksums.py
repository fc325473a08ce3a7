"""SHA-256 checksums of files, computed once: verified files are noted in the user's cache, by path, size and time."""
from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import os
import pathlib
import time
from collections.abc import Mapping

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


def find_changed(folder: pathlib.Path, expected: Mapping[str, str], *, setting: str) -> dict[str, str]:
  """Returns the files with another SHA-256, and what it is; files that were verified before are not read.

  Args:
    folder: of the files.
    expected: SHA-256 by file name.
    setting: the setting that skips the comparison; named in the log.

  Raises:
    UserError: a file cannot be read.
  """
  try:
    found = {name: (folder / name).stat() for name in expected}
    stamps = {name: [found[name].st_size, found[name].st_mtime_ns, digest] for name, digest in expected.items()}
    notes = access.cache_folder('checksums') / f'{hashlib.sha256(os.fsencode(folder)).hexdigest()[:32]}.json'
    known = _read(notes)
    new = [name for name, stamp in stamps.items() if known.get(name) != stamp]
    digests = dict(zip(new, _hash_all(folder, new, setting), strict=True))
  except OSError as error:
    raise access.unreadable(error, str(error.filename or folder)) from error
  changed = {name: digest for name, digest in digests.items() if digest != expected[name]}
  if len(changed) < len(new):
    verified = known | {name: stamps[name] for name in new if name not in changed}
    try:
      with access.replacing(notes) as file:
        file.write(json.dumps(verified).encode())
    except OSError as error:
      log.warning('%s: expected to write which files are verified, got "%s". They will be compared again.', notes,
                  error.strerror)
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
  """Returns size, time and SHA-256 of the files that were verified, by name."""
  try:
    found = json.loads(notes.read_text())
  except (OSError, ValueError):  # missing or damaged: the files are compared again
    return {}
  return found if isinstance(found, dict) else {}
