"""Listings of image files that stay small for millions of files, and are kept for the next start.

A listing takes the bytes of the file names and 16 more for each file. One of at least `KEPT_FILES` files is written to
the user's cache, with the modification times of all its folders: a later start on the same machine, and every process
that shares the cache, maps that file to memory instead of reading the folders. A listing is read anew if a folder has
changed, or one of `CHECKED_FILES` files has another size. What is not noticed: a file that was overwritten in place,
with another size, in a folder without new, removed or renamed files, unless it is among the checked ones.

A kept listing is a file with a few NumPy arrays (`Arrays`), which loader processes share: 8 bytes for the length of the
header (little endian), the header in JSON, and the arrays, each from a multiple of 64 bytes.
"""
from __future__ import annotations

import array
import bisect
import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import pathlib
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from vit_jax.core.types import HostArray
from vit_jax.data.files import access, image_files
from vit_jax.data.files.user_files import OWN, Rules

log = logging.getLogger('vit_jax.data')

KEPT_FILES = 10_000
CHECKED_FILES = 1_000
_VERSION, _BLOCK_FILES = 2, 2**16
_ALIGNED = 64  # bytes
_SETTLED_NS = 2 * 10**9
"""A folder that changed later than this before it was read can change again without another modification time."""


class Memory:
  """Memory without a name that other processes open by this process's number and `descriptor`."""

  def __init__(self, descriptor: int) -> None:
    self.descriptor = descriptor
    self._close = weakref.finalize(self, os.close, descriptor)


class Arrays(NamedTuple):
  """Notes, as JSON can express them, and flat arrays by name; `memory` holds them if it can be shared."""
  notes: dict[str, Any]
  arrays: dict[str, HostArray]
  memory: Memory | None = None

  def __reduce__(self) -> tuple[Any, ...]:
    """In the pickled form, shared memory is a few bytes, and valid while this process lives."""
    if self.memory is not None:
      return _open_memory, (f'/proc/{os.getpid()}/fd/{self.memory.descriptor}',)
    return Arrays, (self.notes, self.arrays)


def _open_memory(path: str) -> Arrays:
  return _map(Memory(os.open(path, os.O_RDONLY)), path)


class Listing:
  """The image files below some folders of `root`, in the order in which they were found.

  file: its arrays, where S is the number of files and F that of folders that were read.
    names, name_ends: the S names, one after the other as u8, and one past the last byte of each, `[S] i64`.
    sizes: `[S] i64`, in bytes.
    folders, folder_ends: the F paths relative to the root, with forward slashes, in the same way.
    ends: `[F] i64`, one past the last file of each folder.
    groups: `[F] i32`, the number of the folder, among those asked for, that a folder is in or below.
    times: `[F] i64`, modification times in ns.
  """

  def __init__(self, file: Arrays) -> None:
    self.file = file
    self._views = {name: values.data for name, values in file.arrays.items()}  # read faster than NumPy's scalars

  def __reduce__(self) -> tuple[Any, ...]:
    return Listing, (self.file,)

  def __len__(self) -> int:
    return len(self._views['sizes'])

  @property
  def ignored(self) -> dict[str, int]:
    """The number of files that are no images, by extension."""
    return self.file.notes['ignored']

  @property
  def token(self) -> str:
    """Identity of this listing: one that is read anew has another."""
    return self.file.notes['token']

  def size(self, index: int) -> int:
    return self._views['sizes'][index]

  def group(self, index: int) -> int:
    return self._views['groups'][self._folder_of(index)]

  def path(self, index: int) -> bytes:
    """Returns the path of a file relative to the root."""
    return self._join(self._folder_of(index), index)

  def paths(self) -> Iterator[bytes]:
    """Yields the paths of all files."""
    start = 0
    for folder, end in enumerate(self._views['ends']):
      yield from (self._join(folder, index) for index in range(start, end))
      start = end

  def groups(self) -> HostArray:
    """Returns the group of each file, `[S] i32`."""
    return np.repeat(self.file.arrays['groups'], np.diff(self.file.arrays['ends'], prepend=0))

  def folder(self, number: int) -> bytes:
    """Returns the path of a folder relative to the root."""
    return self._string('folders', 'folder_ends', number)

  def _folder_of(self, index: int) -> int:
    return bisect.bisect_right(self._views['ends'], index)

  def _join(self, folder: int, index: int) -> bytes:
    path, name = self.folder(folder), self._string('names', 'name_ends', index)
    return path + b'/' + name if path else name

  def _string(self, blob: str, ends: str, index: int) -> bytes:
    bounds = self._views[ends]
    return bytes(self._views[blob][bounds[index - 1] if index else 0:bounds[index]])


class Selection:
  """Files of a listing in some order, `rows [N]`; `digest` is the SHA-256 of their paths, sizes and groups."""

  def __init__(self, listing: Listing, file: Arrays) -> None:
    self.listing, self._file, self._rows = listing, file, file.arrays['rows'].data
    self.digest: str = file.notes['digest']

  def __reduce__(self) -> tuple[Any, ...]:
    return Selection, (self.listing, self._file)

  def __len__(self) -> int:
    return len(self._rows)

  def row(self, index: int) -> int:
    """Returns the file of the listing at a place of the order."""
    return self._rows[index]


def read(root: str, prefixes: Sequence[str], rules: Rules = OWN) -> Listing:
  """Lists the image files below the folders `prefixes` of `root`; those that do not exist have none.

  Raises:
    UserError: a folder cannot be read, or is a link out of `root`.
  """
  names, folders = bytearray(), bytearray()
  name_ends, sizes, folder_ends, ends, times = (array.array('q') for _ in range(5))
  groups, finder = array.array('i'), image_files.Finder(rules)
  for group, prefix in enumerate(prefixes):
    if not os.path.isdir(os.path.join(root, prefix)):
      continue
    for folder in finder.walk(root, prefix):
      for name, size in folder.files:
        names += name
        name_ends.append(len(names))
        sizes.append(size)
      folders += os.fsencode(folder.path)
      folder_ends.append(len(folders))
      ends.append(len(sizes))
      times.append(folder.time_ns)
      groups.append(group)
  arrays: dict[str, array.array[int] | bytearray] = {
      'names': names, 'name_ends': name_ends, 'sizes': sizes, 'folders': folders, 'folder_ends': folder_ends,
      'ends': ends, 'groups': groups, 'times': times}
  notes = {'version': _VERSION, 'ignored': dict(finder.ignored), 'token': uuid.uuid4().hex}
  views = {name: np.asarray(memoryview(numbers)) for name, numbers in arrays.items()}
  return Listing(Arrays(notes, views))


def open_listing(root: str, prefixes: Sequence[str], rules: Rules = OWN) -> Listing:
  """Returns the kept listing of the folders `prefixes` of `root` if it is still right; else lists and keeps them.

  Of several processes that need the same listing, on one machine or with a shared cache, one reads the folders.

  Raises:
    UserError: a folder cannot be read.
  """
  rule = f'{rules.follow_links}{" with arrays" * rules.arrays}'
  path = access.cache_folder('listings') / f'{_hash(os.path.realpath(root), rule, *prefixes)}.arrays'
  if kept := _open_kept(root, path):
    return kept
  with _lock(path):
    if kept := _open_kept(root, path):
      return kept
    started_ns = time.time_ns()
    found = read(root, prefixes, rules)
    if len(found) < KEPT_FILES:
      return found
    is_settled = found.file.arrays['times'].max() < started_ns - _SETTLED_NS
    return Listing(_keep(found.file, path if is_settled else None))


def _keep(made: Arrays, path: pathlib.Path | None) -> Arrays:
  """Returns a shared copy; writes the arrays to `path` if possible."""
  if path is not None:
    try:
      write_arrays(made, path)
    except OSError as error:
      log.info('%s is not kept for the next start: %s', path, error)
  return share(made)


def _hash(*texts: str) -> str:
  return hashlib.sha256(b'\0'.join(map(os.fsencode, texts))).hexdigest()[:32]


def _open_kept(root: str, path: pathlib.Path) -> Listing | None:
  try:
    found = Listing(read_arrays(path))
    return found if found.file.notes['version'] == _VERSION and _is_current(root, found) else None
  except (OSError, ValueError, KeyError, IndexError):
    return None


def _is_current(root: str, listing: Listing) -> bool:
  """Raises OSError if a folder or a file is gone."""
  base = os.fsencode(root)
  for number, time_ns in enumerate(listing.file.arrays['times'].tolist()):
    if os.stat(os.path.join(base, listing.folder(number))).st_mtime_ns != time_ns:
      return False
  checked = np.unique(np.linspace(0, len(listing) - 1, CHECKED_FILES).astype(np.int64)).tolist()
  return all(os.stat(os.path.join(base, listing.path(i))).st_size == listing.size(i) for i in checked)


@contextlib.contextmanager
def _lock(path: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a listing, if the cache can be written and has locks."""
  with contextlib.ExitStack() as stack:
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context(open(path.with_suffix('.lock'), 'wb'))
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        log.info('Another process is listing the same files; waiting for it ...')
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
      pass
    yield


def select(listing: Listing, name: str, choose: Callable[[], HostArray]) -> Selection:
  """Returns files of a listing in an order, which is kept with the listing.

  Args:
    listing: the files.
    name: of the order; with the listing, it determines what `choose` returns.
    choose: returns the files `[N]` by their place in the listing; is called if there is none of this name yet.
  """
  path = access.cache_folder('listings') / f'{_hash(listing.token, name)}.order'
  is_kept = len(listing) >= KEPT_FILES
  if is_kept:
    with contextlib.suppress(OSError, ValueError, KeyError):
      return Selection(listing, read_arrays(path))
  rows = choose()
  small = rows.astype(np.int32 if len(listing) < 2**31 else np.int64)
  made = Arrays({'digest': _digest(listing, small)}, {'rows': small})
  return Selection(listing, _keep(made, path) if is_kept else made)


def _digest(listing: Listing, rows: HostArray) -> str:
  found = hashlib.sha256()
  for start in range(0, len(rows), _BLOCK_FILES):
    lines = [b'%s %d %d' % (listing.path(row), listing.size(row), listing.group(row))
             for row in rows[start:start + _BLOCK_FILES].tolist()]
    found.update((b'\n' if start else b'') + b'\n'.join(lines))
  return found.hexdigest()


def share(made: Arrays) -> Arrays:
  """Returns a copy in memory that loader processes share; where the platform has none, the same."""
  if not hasattr(os, 'memfd_create'):
    return made
  memory = Memory(os.memfd_create('arrays'))
  with open(memory.descriptor, 'wb', closefd=False) as file:
    _write(made, file)
  return _map(memory, 'memory')


def read_arrays(path: pathlib.Path) -> Arrays:
  """Reads a file, into memory that loader processes share: a file that is replaced later changes nothing.

  Raises:
    OSError: it cannot be read.
    ValueError: it is damaged or of another kind.
  """
  if not hasattr(os, 'memfd_create'):
    return _map(Memory(os.open(path, os.O_RDONLY)), str(path))._replace(memory=None)
  memory = Memory(os.memfd_create('arrays'))
  with open(path, 'rb') as source, open(memory.descriptor, 'wb', closefd=False) as file:
    shutil.copyfileobj(source, file, 2**22)
  return _map(memory, str(path))


def write_arrays(made: Arrays, path: pathlib.Path) -> None:
  """Writes a file, which appears complete or not at all; its folder is created.

  Raises:
    OSError: it cannot be written.
  """
  with access.replacing(path) as file:
    _write(made, file)


def _write(made: Arrays, file: IO[bytes]) -> None:
  described = {name: (array.dtype.str, len(array)) for name, array in made.arrays.items()}
  header = json.dumps({'notes': made.notes, 'arrays': described}).encode()
  file.write(len(header).to_bytes(8, 'little') + header)
  for values in made.arrays.values():
    file.write(bytes(-file.tell() % _ALIGNED))
    file.write(np.ascontiguousarray(values).data)


def _map(memory: Memory, name: str) -> Arrays:
  try:
    data = mmap.mmap(memory.descriptor, 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], 'little')
    header = json.loads(data[8:start])
    notes, arrays = header['notes'], {}
    for key, (dtype, length) in header['arrays'].items():
      start += -start % _ALIGNED
      arrays[key] = np.frombuffer(data, np.dtype(dtype), length, start)
      start += arrays[key].nbytes
  except (KeyError, TypeError, AttributeError, ValueError) as error:
    raise ValueError(f'{name}: expected arrays behind a header, got {error}') from error
  return Arrays(notes, arrays, memory)
