"""Indexes of files: made once, in parallel, kept beside the files, and made again if a file changes.

An index is one `.npy` file, which all processes map, so that they share one copy in memory. `pack` puts several arrays
into one. Imports no jax, as processes that read files start with this module.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import hashlib
import json
import logging
import multiprocessing
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from vit_jax.data.files import access, open_files, ranges, remote

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

log = logging.getLogger('vit_jax.data')

FOLDER = '.vit_jax_index'
"""The folder beside the files in which their index is kept."""
_ALIGN, _MOST_HEADER = 64, 2**20  # bytes
_File = TypeVar('_File')
_Found = TypeVar('_Found')


def load(paths: Sequence[str], details: Sequence[object], cache: pathlib.Path, *, what: str,
         make: Callable[[], HostArray], is_valid: Callable[[HostArray], bool]) -> HostArray:
  """Returns a kept index if no file has changed; else makes it and keeps it.

  The index is kept in `FOLDER` beside the files, so that all hosts that share them share it, or in `cache` where that
  folder cannot be written, and for objects.

  Args:
    paths: of the files, or addresses.
    details: for each file, what its part of the index depends on beside the file.
    cache: the folder for indexes of objects, and of files whose folder cannot be written.
    what: the kind of the files, for messages.
    make: makes the index.
    is_valid: whether an array that was kept can be the index.

  Raises:
    OSError, TemporaryError, UserError: a file is missing or cannot be read.
  """
  found = list(zip(paths, details, ranges.stamps(paths), strict=True))
  places = [cache / _name([(p, n, *stamp) for p, n, stamp in found])]
  folders = {os.path.dirname(p) for p in paths}
  if len(folders) == 1 and not remote.is_address(paths[0]):  # by names, as hosts may mount it at other places
    places.insert(0, pathlib.Path(*folders) / FOLDER / _name([(os.path.basename(p), n, *s) for p, n, s in found]))
  with _lock(cache, places):
    if (kept := _open_kept(places, is_valid)) is not None:
      return kept
    return _keep(make(), places, what)


def _name(key: object) -> str:
  return f'{hashlib.sha256(repr(key).encode(errors="surrogateescape")).hexdigest()[:32]}.npy'


@contextlib.contextmanager
def _lock(cache: pathlib.Path, places: Sequence[pathlib.Path]) -> Iterator[None]:
  """Lets one process of this user make an index that is not there, while others wait for it."""
  with contextlib.ExitStack() as stack:
    if not any(place.exists() for place in places):
      with contextlib.suppress(OSError):  # the cache cannot be written, or has no locks
        cache.mkdir(parents=True, exist_ok=True)
        fcntl.flock(stack.enter_context(open(cache / '.lock', 'wb')), fcntl.LOCK_EX)
    yield


def _open_kept(places: Sequence[pathlib.Path], is_valid: Callable[[HostArray], bool]) -> HostArray | None:
  for place in places:
    with contextlib.suppress(OSError, ValueError, EOFError):  # missing or damaged
      kept = np.load(place, mmap_mode='r')
      if is_valid(kept):
        return kept
  return None


def _keep(index: HostArray, places: Sequence[pathlib.Path], what: str) -> HostArray:
  """Writes the index to the first place that can be written, and returns it as processes share it."""
  for place in places:
    with contextlib.suppress(OSError):
      with access.replacing(place) as file:
        np.save(file, index)
      return np.load(place, mmap_mode='r')
  log.warning('%s: expected to keep the index of %s files there, got no permission or space. It will be made '
              'again at the next start.', places[-1].parent, what)
  return index


def in_threads(work: Callable[[_File], _Found], files: Sequence[_File]) -> list[_Found]:
  """Returns the result of each file. Threads wait for the file system, which may be far away."""
  with concurrent.futures.ThreadPoolExecutor(max(1, min(open_files.MAX_THREADS, len(files)))) as pool:
    return list(pool.map(work, files))


def in_processes(work: Callable[[Sequence[_File]], _Found], files: Sequence[_File], cores: int) -> list[_Found] | None:
  """Returns the result of each share of the files, every `cores`-th one; None if processes cannot be started."""
  context = multiprocessing.get_context('spawn')
  try:
    with concurrent.futures.ProcessPoolExecutor(cores, mp_context=context) as pool:
      return list(pool.map(work, [files[i::cores] for i in range(cores)]))
  except concurrent.futures.BrokenExecutor as error:  # such as a script that runs at import
    log.debug('no processes to index files: %s', error)
    return None


def pack(arrays: Mapping[str, HostArray]) -> HostArray:
  """Returns arrays as one, `[bytes] u8`."""
  places: dict[str, tuple[str, list[int], int]] = {}
  at = 0
  for name, array in arrays.items():
    places[name] = (array.dtype.str, list(array.shape), at)
    at += -(-array.nbytes // _ALIGN) * _ALIGN
  header = json.dumps(places).encode()
  start = -(-(8 + len(header)) // _ALIGN) * _ALIGN
  packed = np.zeros(start + at, np.uint8)
  packed[:8 + len(header)] = np.frombuffer(len(header).to_bytes(8, 'little') + header, np.uint8)
  for name, array in arrays.items():
    begin = start + places[name][2]
    packed[begin:begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  return packed


def unpack(packed: HostArray) -> dict[str, HostArray]:
  """Returns the arrays in what `pack` has returned, without copying them.

  Raises:
    ValueError: it is something else.
  """
  plain = packed.view(np.ndarray)  # reading a part of a memory map takes longer
  if plain.dtype != np.uint8 or plain.ndim != 1 or len(plain) < 8:
    raise ValueError('not packed arrays')
  size = int.from_bytes(plain[:8].tobytes(), 'little')
  if size > min(len(plain) - 8, _MOST_HEADER):
    raise ValueError('a header that is too long')
  start = -(-(8 + size) // _ALIGN) * _ALIGN
  try:
    places = json.loads(plain[8:8 + size].tobytes())
    found = {}
    for name, (kind, shape, at) in places.items():
      dtype = np.dtype(str(kind))
      if dtype.kind not in 'iuSb' or not all(type(n) is int and n >= 0 for n in [*shape, at]):
        raise ValueError('arrays of another kind')
      found[name] = np.ndarray(tuple(shape), dtype, buffer=plain, offset=start + at)
    return found
  except (TypeError, AttributeError, OverflowError, UnicodeDecodeError, RecursionError) as error:
    raise ValueError('not packed arrays') from error
