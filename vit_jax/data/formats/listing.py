"""Listings of the image files of a folder, which stay small for millions of files and are kept for the next start.

`folder.py` calls `open_listing` when it opens a split, and then `select` for the order of the files of the split. Both
functions return a `Table`: rows of Arrow in memory that loader processes share.

A listing of at least `MIN_KEPT_FILES` files is written to the user's cache, with the modification times of all folders.
A later start, and every process that shares the cache, reads that file in place of the folders. If several processes
start at once, one lists the folders under the lock `NAME.lock`, and the others wait. Files in the cache:

  listings/NAME.arrays  a listing: `path`, `size` and `group` of each file; NAME is a hash of root, folders and rules
  listings/NAME.order   the order of a split: `row` of each file in a listing; NAME is a hash of its token and the split

The folders are listed again if a folder has changed, or one of `NUM_CHECKED_FILES` files has another size. One change
is not noticed: a file that is not checked was overwritten in place, with another size, in a folder without new, removed
or renamed files.

This module does not depend on classes: a class folder is a `prefix`, whose index is the `group` of the files in it.
"""
from __future__ import annotations

import contextlib
import fcntl
import functools
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import pyarrow as pa

from vit_jax.core import documents
from vit_jax.core.types import HostArray
from vit_jax.data import index, user_files
from vit_jax.data.user_files import OWN, Rules

log = logging.getLogger('vit_jax.data')

MIN_KEPT_FILES, NUM_CHECKED_FILES = 10_000, 1_000
_VERSION = 6  # of the files in the cache
_BLOCK_FILES = 2**16  # files in a batch of Arrow
_NOTES_KEY = b'notes'  # in the metadata of a batch
_MIN_AGE_NS = 2 * 10**9
"""A folder that changed less than this time before the listing may change again with the same modification time."""
_FILES = pa.schema([('path', pa.large_binary()), ('size', pa.int64()), ('group', pa.int32())])


class Table:
  """Rows of Arrow, and notes about the rows, in memory that the processes of this machine share.

  The notes are an object of JSON in the metadata of the last, empty batch. A table pickles to a path in `/proc` of this
  process, so another process can unpickle the table while this process lives.
  """

  def __init__(self, content: Any, descriptor: int = -1) -> None:
    """Reads the bytes of an Arrow file; `descriptor` is that of the shared memory with these bytes, -1 = not shared.

    Raises KeyError, TypeError or ValueError if the bytes have another format.
    """
    reader = pa.ipc.open_file(pa.py_buffer(content))
    self.rows = reader.read_all()
    self.content, self._descriptor = content, descriptor
    self._columns = {name: self.rows.column(name) for name in self.rows.column_names}  # a look-up takes 1 us less
    last_batch = reader.get_batch_with_custom_metadata(reader.num_record_batches - 1)
    self.notes: dict[str, Any] = documents.parse(last_batch.custom_metadata[_NOTES_KEY])

  @classmethod
  def share(cls, write: Callable[[IO[bytes]], object]) -> Table:
    """Returns the table that `write` writes, in shared memory if the system has it, else in memory of this process."""
    if not hasattr(os, 'memfd_create'):
      memory = io.BytesIO()
      write(memory)
      return cls(memory.getvalue())
    descriptor = os.memfd_create('listing')
    with open(descriptor, 'wb', closefd=False) as file:
      write(file)
    return cls._from_descriptor(descriptor)

  @classmethod
  def attach(cls, path: str) -> Table:
    """Returns the table in shared memory at the path `/proc/PID/fd/NUMBER` of any process."""
    return cls._from_descriptor(os.open(path, os.O_RDONLY))

  @classmethod
  def _from_descriptor(cls, descriptor: int) -> Table:
    """Returns the table in shared memory; the descriptor is closed when the table is deleted."""
    table = cls(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), descriptor)
    weakref.finalize(table, os.close, descriptor)
    return table

  def __reduce__(self) -> tuple[Any, ...]:
    if self._descriptor < 0:
      return Table, (bytes(self.content),)
    return Table.attach, (f'/proc/{os.getpid()}/fd/{self._descriptor}',)

  def __len__(self) -> int:
    return int(self.rows.num_rows)

  def array(self, name: str) -> HostArray:
    """Returns a column of numbers, `[S]`, with S rows."""
    return self._columns[name].to_numpy()

  def get(self, name: str, row: int) -> Any:
    """Returns the value of a column in one row."""
    return self._columns[name][row].as_py()

  def values(self, name: str) -> Iterator[Any]:
    """Yields the values of a column."""
    for chunk in self._columns[name].chunks:
      yield from chunk.to_pylist()


def read(root: str, prefixes: Sequence[str], rules: Rules = OWN) -> Table:
  """Lists the image files below the folders `prefixes` of `root`; a folder that does not exist has no files.

  Returns:
    `path` (bytes, relative to the root), `size` in bytes and `group` (the index of the prefix) of each file, in the
    order of the walk. The notes have the number of `ignored` files by extension, the `folders`, the modification
    `times` of the folders in ns, and a random `token`, which identifies this listing.

  Raises UserError if a folder cannot be read, or is a link out of `root`.
  """
  finder = user_files.Finder(rules)
  folders = list[str]()
  times_ns = list[int]()

  def walk_files() -> Iterator[tuple[bytes, int, int]]:
    for group, prefix in enumerate(prefixes):
      for folder in finder.walk(root, prefix) if os.path.isdir(os.path.join(root, prefix)) else ():
        folder_prefix = os.fsencode(f'{folder.path}/') if folder.path else b''
        folders.append(folder.path)
        times_ns.append(folder.time_ns)
        yield from ((folder_prefix + name, size, group) for name, size in folder.files)

  def make_batches() -> Iterator[pa.RecordBatch]:
    files = walk_files()
    while block := list(itertools.islice(files, _BLOCK_FILES)):
      yield pa.record_batch(list(zip(*block, strict=True)), schema=_FILES)
  return _write_table(make_batches(), _FILES, lambda: {
      'version': _VERSION, 'ignored': dict(finder.ignored), 'token': uuid.uuid4().hex, 'folders': folders,
      'times': times_ns})


def open_listing(root: str, prefixes: Sequence[str], rules: Rules = OWN) -> Table:
  """Returns the listing of the folders `prefixes` of `root`: the kept one if nothing has changed, else as `read`."""
  rules_text = f'{rules.follow_links} with arrays' if rules.arrays else f'{rules.follow_links}'
  path = _cache_path('arrays', os.path.realpath(root), rules_text, *prefixes)
  is_current = functools.partial(_is_current, root)
  if (kept := _open_kept(path, is_current)) is not None:
    return kept
  with _lock(path):
    if (kept := _open_kept(path, is_current)) is not None:  # another process has listed the folders meanwhile
      return kept
    started_ns = time.time_ns()
    files = read(root, prefixes, rules)
    is_settled = len(files) >= MIN_KEPT_FILES and max(files.notes['times']) < started_ns - _MIN_AGE_NS
    return _keep(files, path if is_settled else None)


def select(files: Table, name: str, choose: Callable[[], HostArray]) -> Table:
  """Returns an order of some files of a listing; the order is kept in the cache if the listing is large enough.

  The table has the column `row`, the row of each file in the listing; the notes have the `digest`: the SHA-256 of
  paths, sizes and groups in this order. `choose` returns the rows, `[N]`; it is called unless an order of this name is
  kept. So the name, with the listing, must determine the rows.
  """
  path = _cache_path('order', files.notes['token'], name)
  is_kept = len(files) >= MIN_KEPT_FILES
  kept = _open_kept(path, lambda order: 'digest' in order.notes) if is_kept else None
  if kept is not None:
    return kept
  rows = choose().astype(np.int64)
  batch = pa.record_batch({'row': rows})
  order = _write_table([batch], batch.schema, lambda: {'digest': _digest(files, rows)})
  return _keep(order, path if is_kept else None)


def _write_table(batches: Iterable[pa.RecordBatch], schema: pa.Schema, notes: Callable[[], dict[str, Any]]) -> Table:
  """Returns a table of batches; calls `notes` after the last batch. Needs memory for one batch beside the table."""
  def write(file: IO[bytes]) -> None:
    with pa.ipc.new_file(file, schema) as writer:
      for batch in batches:
        writer.write_batch(batch)
      writer.write_batch(pa.RecordBatch.from_pylist([], schema), {_NOTES_KEY: json.dumps(notes()).encode()})
  return Table.share(write)


def _digest(files: Table, rows: HostArray) -> str:
  """Returns the SHA-256 of the lines `PATH SIZE GROUP` of files, joined by newlines."""
  digest = hashlib.sha256()
  sizes, groups = files.array('size'), files.array('group')
  for start in range(0, len(rows), _BLOCK_FILES):
    block = rows[start:start + _BLOCK_FILES]
    lines = [b'%s %d %d' % (files.get('path', row), size, group) for row, size, group in zip(
        block.tolist(), sizes[block].tolist(), groups[block].tolist(), strict=True)]
    digest.update((b'\n' if start else b'') + b'\n'.join(lines))
  return digest.hexdigest()


def _cache_path(extension: str, *identity: str) -> pathlib.Path:
  """Returns the path in the user's cache of a listing (`arrays`) or an `order` that these texts identify."""
  name = hashlib.sha256(b'\0'.join(map(os.fsencode, identity))).hexdigest()[:32]
  return user_files.cache_folder('listings') / f'{name}.{extension}'


def _open_kept(path: pathlib.Path, is_valid: Callable[[Table], bool]) -> Table | None:
  """Returns a copy of a kept table in memory; None if the file is missing, damaged or not valid."""
  with contextlib.suppress(OSError, ValueError, KeyError, IndexError, TypeError):
    content = index.map_sealed(path)
    table = Table.share(lambda file: file.write(content))  # a copy, as the file may be replaced
    return table if is_valid(table) else None
  return None


def _keep(table: Table, path: pathlib.Path | None) -> Table:
  """Writes a table to `path` if possible, None = nowhere; returns the table."""
  if path is not None:
    try:
      with index.sealing(path) as file:
        file.write(table.content)
    except OSError as error:
      log.info('%s is not kept for the next start: %s', path, error)
  return table


def _is_current(root: str, files: Table) -> bool:
  """Returns whether all folders and some files are as they were when listed. Raises OSError if one is missing."""
  if files.notes['version'] != _VERSION:
    return False
  for folder, time_ns in zip(files.notes['folders'], files.notes['times'], strict=True):
    if os.stat(os.path.join(root, folder)).st_mtime_ns != time_ns:
      return False
  checked_rows = np.unique(np.linspace(0, len(files) - 1, NUM_CHECKED_FILES).astype(np.int64)).tolist()
  return all(os.stat(os.path.join(os.fsencode(root), files.get('path', row))).st_size == files.get('size', row)
             for row in checked_rows)


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
