"""Listings of image files that stay small for millions of files, and are kept for the next start.

One of at least `KEPT_FILES` files is written to the user's cache, with the modification times of all its folders: a
later start on the same machine, and every process that shares the cache, reads that file in place of the folders. A
listing is read anew if a folder has changed, or one of `CHECKED_FILES` files has another size. What is not noticed: a
file that was overwritten in place, with another size, in a folder without new, removed or renamed files, unless it is
among the checked ones.

Listings and their orders are tables of Arrow, with notes in JSON. They are in memory that loader
processes share.
"""
from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import logging
import mmap
import os
import pathlib
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa

from vit_jax.core import documents
from vit_jax.core.types import HostArray
from vit_jax.data import index, user_files
from vit_jax.data.user_files import OWN, Rules

log = logging.getLogger('vit_jax.data')

KEPT_FILES = 10_000
CHECKED_FILES = 1_000
_VERSION, _BLOCK_FILES, _NOTES = 5, 2**16, 'notes'
_SETTLED_NS = 2 * 10**9
"""A folder that changed later than this before it was read can change again without another modification time."""
_FILES = pa.schema([('path', pa.binary()), ('size', pa.int64()), ('group', pa.int32())])
_ORDER = pa.schema([('row', pa.int64())])


class Table:
  """Columns of Arrow and notes; in the pickled form, shared memory is a few bytes, valid while this process lives."""

  def __init__(self, content: Any, descriptor: int = -1) -> None:
    """Takes the bytes of a file, and the open file if processes can share it. Raises ValueError if it has no table."""
    self._content, self._descriptor = content, descriptor
    reader = pa.ipc.open_file(pa.py_buffer(content))  # raises pa.ArrowInvalid, a ValueError
    last = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    self.notes: dict[str, Any] = documents.parse(last.custom_metadata[_NOTES])
    table = reader.read_all()
    self._columns = {name: table.column(name) for name in table.column_names}
    self._num = table.num_rows

  @classmethod
  def map(cls, descriptor: int) -> Table:
    """Returns the table in an open file, which it closes. Raises ValueError if it has none."""
    found = cls(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), descriptor)
    weakref.finalize(found, os.close, descriptor)
    return found

  def __reduce__(self) -> tuple[Any, ...]:
    if self._descriptor >= 0:
      return _open_memory, (f'/proc/{os.getpid()}/fd/{self._descriptor}',)
    return Table, (bytes(self._content),)

  def __len__(self) -> int:
    return int(self._num)

  def array(self, name: str) -> HostArray:
    """Returns a column of numbers, `[S]`."""
    return self._columns[name].to_numpy()

  def get(self, name: str, row: int) -> Any:
    """Returns a value."""
    return self._columns[name][row].as_py()

  def values(self, name: str) -> Iterator[Any]:
    """Yields the values of a column."""
    for chunk in self._columns[name].chunks:
      yield from chunk.to_pylist()

  def write(self, file: IO[bytes]) -> None:
    """Writes a file with the table."""
    file.write(self._content)


def _open_memory(path: str) -> Table:
  return Table.map(os.open(path, os.O_RDONLY))


def _share(write: Callable[[IO[bytes]], object]) -> Table:
  """Returns the table that is written, in memory that processes share where the platform has such.

  Raises:
    ValueError: it is none.
  """
  if not hasattr(os, 'memfd_create'):
    memory = io.BytesIO()
    write(memory)
    return Table(memory.getvalue())
  descriptor = os.memfd_create('listing')
  with open(descriptor, 'wb', closefd=False) as file:
    write(file)
  return Table.map(descriptor)


def _made(kinds: pa.Schema, blocks: Iterable[Sequence[Any]], notes: Callable[[], Mapping[str, Any]]) -> Table:
  """Returns a table of blocks of columns, with the notes that are known after the last one."""
  def batch(columns: Sequence[Any]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(x, kind) for x, kind in zip(columns, kinds.types, strict=True)], schema=kinds)

  def write(file: IO[bytes]) -> None:
    with pa.ipc.new_file(file, kinds) as writer:
      for columns in blocks:
        writer.write_batch(batch(columns))
      writer.write_batch(batch([()] * len(kinds)), {_NOTES: json.dumps(notes()).encode()})
  return _share(write)


class Selection:
  """Files of a listing in some order; `digest` is the SHA-256 of their paths, sizes and groups."""

  def __init__(self, files: Table, order: Table) -> None:
    self._files, self._order = files, order
    self.digest: str = order.notes['digest']

  def __len__(self) -> int:
    return len(self._order)

  def path(self, place: int) -> bytes:
    """Returns the path of the file at a place of the order, relative to the root."""
    return bytes(self._files.get('path', self._order.get('row', place)))

  def group(self, place: int) -> int:
    """Returns the number of the folder, among those asked for, that the file is in or below."""
    return int(self._files.get('group', self._order.get('row', place)))


def read(root: str, prefixes: Sequence[str], rules: Rules = OWN) -> Table:
  """Lists the image files below the folders `prefixes` of `root`; those that do not exist have none.

  Returns:
    `path`, relative to the root, `size` in bytes and `group` of each file, in the order in which they were found; the
    notes have the number of `ignored` files by extension, the folders with their times, and a `token`, which a listing
    that is read anew has another of.

  Raises:
    UserError: a folder cannot be read, or is a link out of `root`.
  """
  finder, folders, times = user_files.Finder(rules), list[str](), list[int]()

  def rows() -> Iterator[tuple[bytes, int, int]]:
    for group, prefix in enumerate(prefixes):
      for folder in finder.walk(root, prefix) if os.path.isdir(os.path.join(root, prefix)) else ():
        start = os.fsencode(f'{folder.path}/') if folder.path else b''
        folders.append(folder.path)
        times.append(folder.time_ns)
        yield from ((start + name, size, group) for name, size in folder.files)

  found = rows()
  blocks = (tuple(zip(*block, strict=True)) for block in iter(lambda: list(itertools.islice(found, _BLOCK_FILES)), []))
  return _made(_FILES, blocks, lambda: {'version': _VERSION, 'ignored': dict(finder.ignored),
                                        'token': uuid.uuid4().hex, 'folders': folders, 'times': times})


def open_listing(root: str, prefixes: Sequence[str], rules: Rules = OWN) -> Table:
  """Returns the kept listing of the folders `prefixes` of `root` if it is still right; else lists and keeps them.

  Of several processes that need the same listing, on one machine or with a shared cache, one reads the folders.

  Raises:
    UserError: a folder cannot be read.
  """
  rule = f'{rules.follow_links}{" with arrays" * rules.arrays}'
  path = _place('arrays', os.path.realpath(root), rule, *prefixes)
  if kept := _open_kept(path, lambda found: _is_current(root, found)):
    return kept
  with _lock(path):
    if kept := _open_kept(path, lambda found: _is_current(root, found)):
      return kept
    started_ns = time.time_ns()
    found = read(root, prefixes, rules)
    is_kept = len(found) >= KEPT_FILES and max(found.notes['times']) < started_ns - _SETTLED_NS
    return _keep(found, path if is_kept else None)


def select(files: Table, name: str, choose: Callable[[], HostArray]) -> Selection:
  """Returns files of a listing in an order, which is kept with the listing.

  Args:
    files: the listing.
    name: of the order; with the listing, it determines what `choose` returns.
    choose: returns the files `[N]` by their place in the listing; is called if there is none of this name yet.
  """
  path, is_kept = _place('order', files.notes['token'], name), len(files) >= KEPT_FILES
  if is_kept and (kept := _open_kept(path, lambda found: 'digest' in found.notes)):
    return Selection(files, kept)
  rows = choose().astype(np.int64)
  return Selection(files, _keep(_made(_ORDER, [[rows]], lambda: {'digest': _digest(files, rows)}),
                                path if is_kept else None))


def _digest(files: Table, rows: HostArray) -> str:
  found, sizes, groups = hashlib.sha256(), files.array('size'), files.array('group')
  for start in range(0, len(rows), _BLOCK_FILES):
    block = rows[start:start + _BLOCK_FILES]
    lines = [b'%s %d %d' % (files.get('path', row), size, group) for row, size, group in zip(
        block.tolist(), sizes[block].tolist(), groups[block].tolist(), strict=True)]
    found.update((b'\n' if start else b'') + b'\n'.join(lines))
  return found.hexdigest()


def _place(kind: str, *texts: str) -> pathlib.Path:
  name = hashlib.sha256(b'\0'.join(map(os.fsencode, texts))).hexdigest()[:32]
  return user_files.cache_folder('listings') / f'{name}.{kind}'


def _open_kept(path: pathlib.Path, is_right: Callable[[Table], bool]) -> Table | None:
  """Returns a kept table in memory, so that a file that is replaced later changes nothing; None if there is none."""
  with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
    content = index.map_sealed(path)
    found = _share(lambda file: file.write(content))
    return found if is_right(found) else None
  return None


def _keep(made: Table, path: pathlib.Path | None) -> Table:
  """Returns a table, which is written to `path` if possible."""
  if path is not None:
    try:
      with index.sealing(path) as file:
        made.write(file)
    except OSError as error:
      log.info('%s is not kept for the next start: %s', path, error)
  return made


def _is_current(root: str, files: Table) -> bool:
  """Raises OSError if a folder or a file is gone."""
  notes, base = files.notes, os.fsencode(root)
  if notes['version'] != _VERSION or any(os.stat(os.path.join(root, folder)).st_mtime_ns != time_ns for folder, time_ns
                                         in zip(notes['folders'], notes['times'], strict=True)):
    return False
  checked = np.unique(np.linspace(0, len(files) - 1, CHECKED_FILES).astype(np.int64)).tolist()
  return all(os.stat(os.path.join(base, files.get('path', row))).st_size == files.get('size', row) for row in checked)


@contextlib.contextmanager
def _lock(path: pathlib.Path) -> Iterator[None]:
  """Holds the lock of a listing, if the cache can be written and has locks."""
  with contextlib.ExitStack() as stack:
    with contextlib.suppress(OSError):
      path.parent.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context(open(path.with_suffix('.lock'), 'wb'))
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        log.info('Another process is listing the same files; waiting for it ...')
        fcntl.flock(file, fcntl.LOCK_EX)
    yield
