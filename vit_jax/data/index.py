"""Indexes of the examples in files: made once, in parallel, kept beside the files, and made again if a file changes.

An index is a table of Arrow with a row for each example. A format has a function that scans a file and yields its rows;
here the rows of all files are joined, and kept in a file that all processes map, so that they share one copy in memory.
Behind the table is the SHA-256 of its name and its bytes, and a kept file with anything wrong is made again.
"""
from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import mmap
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from vit_jax.core import documents, failures, files
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import open_files, storage, user_files

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

log = logging.getLogger('vit_jax.data')

FOLDER = '.vit_jax_index'
"""The folder beside the files in which their index is kept."""
PROCESSES_FROM = 2**20
"""Examples from which processes are started; one core takes 10 to 30 s for them."""
MISSING = -2**62
"""Label of an example whose label is missing or damaged."""
BYTES, LABEL = 'large_binary', 'label'
Labels = int | str | tuple[int | str | None, ...] | None
"""Those of an example: a tuple if examples may have several, None if they are missing or damaged, also in a tuple."""
Counts = collections.Counter[str]
Scan = Callable[[str, Counts], Iterable[tuple[Any, ...]]]
"""Yields the rows of a file, and counts what it ignores. Labels come last, as `encode` returns them. Pickles."""
_MOST_BYTES, _SEAL_BYTES, _FILE, _TEXTS, _IGNORED = 2**34, 32, 'file', b'texts', b'ignored'
_Found = TypeVar('_Found')


class Index:
  """The rows of all files, in the order in which they are stored.

  labels: numbers, or places in `texts`, `[L] i64`; `MISSING` if there is none. Empty if no example has a label.
  label_ends: of the labels of each example, `[S] i64`; empty if each has one.
  texts: the names of classes, sorted; empty if labels are numbers.
  """

  def __init__(self, rows: Any) -> None:
    """Takes a `pyarrow.Table`, see `load`."""
    self._num = rows.num_rows
    self._columns = {name: _array(rows.column(name)) for name in rows.column_names}
    self.texts: list[str] = documents.parse(rows.schema.metadata[_TEXTS])
    self.labels = self.label_ends = np.zeros(0, np.int64)
    if (column := self._columns.get(LABEL)) is not None:
      is_list = str(column.type).startswith('large_list')
      self.label_ends = _buffer(column, np.int64)[1:] if is_list else self.label_ends
      values = _buffer(column.values if is_list else column, np.int64)
      self.labels = values if (values != MISSING).any() else values[:0]
      self.label_ends = self.label_ends if len(self.labels) else self.label_ends[:0]

  def __len__(self) -> int:
    return int(self._num)

  def __getitem__(self, name: str) -> HostArray:
    """Returns a column of numbers, `[S]`, or of bytes, one after the other, `[bytes] u8`."""
    found = self._columns[name]
    return (np.frombuffer(found.buffers()[2] or b'', np.uint8) if str(found.type) == BYTES else
            _buffer(found, np.dtype(str(found.type))))

  def ends(self, name: str) -> HostArray:
    """Returns the ends of the values of a column of bytes, `[S] i64`."""
    return _buffer(self._columns[name], np.int64)[1:]

  def get(self, name: str, row: int) -> Any:
    """Returns a value."""
    return self._columns[name][row].as_py()

  def labels_of(self, row: int) -> list[int]:
    """Returns the labels of an example; none if no example has a label."""
    if not len(self.label_ends):
      return self.labels[row:row + 1].tolist()
    return self.labels[int(self.label_ends[row - 1]) if row else 0:int(self.label_ends[row])].tolist()


def _array(column: Any) -> Any:
  import pyarrow as pa
  return column.chunk(0) if column.num_chunks else pa.nulls(0, column.type)


def _buffer(found: Any, kind: Any) -> HostArray:
  """Returns the numbers of an array of Arrow, or its offsets if it has values of several sizes."""
  num = len(found) + (str(found.type) == BYTES or str(found.type).startswith('large_list'))
  content = found.buffers()[1]
  return np.zeros(num, kind) if content is None else np.frombuffer(content, kind, num)


@functools.lru_cache(2**12)
def encode(label: Labels) -> bytes:
  """Returns labels as a row has them."""
  return json.dumps(label).encode()


def load(paths: Sequence[str], scan: Scan, key: str, types: Mapping[str, str], *, what: str,
         cache: pathlib.Path | None = None) -> Index:
  """Returns the index of files: a kept one if no file has changed; else it is made and kept.

  The index is kept in `FOLDER` beside the files, so that all hosts that share them share it, and in `cache` where that
  folder cannot be written. That of objects is kept in both.

  Args:
    paths: of the files, or addresses.
    scan: yields the rows of a file.
    key: what the rows depend on beside the files.
    types: the names and the types of Arrow of the columns, among them `offset` and `size`; that of `LABEL` is `BYTES`.
    what: the kind of the files, for messages.
    cache: the folder for indexes of objects, and of files whose folder cannot be written; None = the user's.

  Raises:
    TemporaryError, UserError: a file is missing or cannot be read, or what `scan` raises.
  """
  def make() -> Any:
    found = scan_all(functools.partial(_scanned, scan=scan, types=types), paths, what=what)
    ignored = sum((Counts(documents.parse(one.schema.metadata[_IGNORED])) for one in found), Counts())
    if ignored:
      log.warning('%s: ignored %s', os.path.dirname(paths[0]), ', '.join(
          f'{name} ({count:,})' for name, count in sorted(ignored.items(), key=lambda one: (-one[1], one[0]))))
    return _joined(found)
  try:
    return Index(_kept(paths, key, cache or user_files.cache_folder(what.lower()), what=what, make=make,
                       fits=lambda rows: _may_be(rows, types, len(paths))))
  except OSError as error:
    raise failures.unreadable(error, f'the {what} file {error.filename or paths[0]}') from error


def _scanned(path: str, scan: Scan, types: Mapping[str, str]) -> Any:
  """Returns the rows of one file as a `pyarrow.Table`."""
  import pyarrow as pa
  ignored = Counts()
  columns = list(zip(*scan(path, ignored), strict=True)) or [()] * len(types)
  made = {name: _codes(values) if name == LABEL else _bytes(values) if kind == BYTES else _numbers(
      np.array(values, kind)) for (name, kind), values in zip(types.items(), columns, strict=True)}
  return pa.table(made).replace_schema_metadata({_IGNORED: json.dumps(ignored)})


def _codes(values: Sequence[bytes]) -> Any:
  """Returns bytes as places in a dictionary, as Arrow has them: few labels are different, and some are long."""
  import pyarrow as pa
  places = dict[bytes, int]()
  codes = np.array([places.setdefault(value, len(places)) for value in values], np.int32)
  return pa.DictionaryArray.from_arrays(_numbers(codes), _bytes(list(places)))


def _numbers(x: HostArray) -> Any:
  """Returns numbers as Arrow has them. Unlike `pa.array`, this does not import pandas, which takes 0.3 s."""
  import pyarrow as pa
  return pa.Array.from_buffers(pa.from_numpy_dtype(x.dtype), len(x), [None, pa.py_buffer(np.ascontiguousarray(x))])


def _bytes(found: Sequence[bytes]) -> Any:
  import pyarrow as pa
  ends = np.cumsum([0, *map(len, found)], dtype=np.int64)
  return pa.Array.from_buffers(pa.large_binary(), len(found), [None, pa.py_buffer(ends), pa.py_buffer(b''.join(found))])


def _joined(tables: Sequence[Any]) -> Any:
  """Returns the rows of all files, with the number of the file of each, and labels as numbers or places in texts."""
  import pyarrow as pa
  file = np.repeat(np.arange(len(tables), dtype=np.int32), [one.num_rows for one in tables])
  columns = [name for name in tables[0].column_names if name != LABEL]
  rows = pa.concat_tables([one.select(columns) for one in tables]).append_column(_FILE, _numbers(file))
  texts = list[str]()
  if LABEL in tables[0].column_names:
    labels = list[Any]()
    for column in (_array(one.column(LABEL)) for one in tables):
      own = [documents.parse(value.as_py()) for value in column.dictionary]
      labels += [own[code] for code in _buffer(column.indices, np.int32).tolist()]
    is_list = any(isinstance(label, list) and label for label in labels)
    lists = [(label if is_list else [None]) if isinstance(label, list) else [label] for label in labels]
    flat = [value for values in lists for value in values]
    if any(isinstance(value, str) for value in flat):
      texts = sorted({str(value) for value in flat if value is not None})
    places = {text: place for place, text in enumerate(texts)}
    column = _numbers(np.array([MISSING if value is None else places[str(value)] if texts else value
                                for value in flat], np.int64))
    if is_list:
      ends = np.cumsum([0, *map(len, lists)])
      column = pa.LargeListArray.from_arrays(_numbers(ends), column)
    rows = rows.append_column(LABEL, column)
  return rows.combine_chunks().replace_schema_metadata({_TEXTS: json.dumps(texts)})


def _may_be(rows: Any, types: Mapping[str, str], num_files: int) -> bool:
  """Returns whether a table can be the index of so many files: whoever may write a bucket may write its index.

  Raises ValueError if it is damaged.
  """
  rows.validate(full=True)
  found = {one.name: str(one.type) for one in rows.schema}
  is_labeled = LABEL in types and found.get(LABEL) in ('int64', 'large_list<item: int64>')
  if {**found, **({LABEL: BYTES} if is_labeled else {})} != {**types, _FILE: 'int32'} or any(
      column.null_count or column.num_chunks > 1 for column in rows.columns):
    return False
  index = Index(rows)
  file = index[_FILE]
  is_there = not len(file) or (file[0] >= 0 and file[-1] < num_files and (np.diff(file) >= 0).all())
  is_inside = (index['offset'] >= -1).all() and (index['size'] >= 0).all()
  place = index['place'] if 'place' in types else np.zeros(len(file), np.int64)  # of a row in its row group
  is_counted = ((place == 0) | (place == np.append(-1, place[:-1]) + 1)).all()
  return bool(is_there and is_inside and is_counted and all(isinstance(text, str) for text in index.texts))


def _kept(paths: Sequence[str], key: str, cache: pathlib.Path, *, what: str,
          fits: Callable[[Any], bool], make: Callable[[], Any]) -> Any:
  """Returns the kept table of files if no file has changed and it `fits`; else makes it and keeps it."""
  found = list(zip(paths, storage.stamps(paths), strict=True))
  places = [cache / _name([(path, key, *stamp) for path, stamp in found])]
  folders, shared = {os.path.dirname(p) for p in paths}, ''
  if len(folders) == 1 and storage.is_address(paths[0]):
    shared = f'{folders.pop()}/{FOLDER}/{places[0].name}'
  elif len(folders) == 1:  # by names, as hosts may mount it at other places
    places.insert(0, pathlib.Path(*folders) / FOLDER / _name(
        [(os.path.basename(path), key, *stamp) for path, stamp in found]))
  with _lock(cache, places):
    if shared and not places[0].exists():
      with contextlib.suppress(OSError, UserError, TemporaryError):  # another host may have kept it
        content = storage.read_file(shared, _MOST_BYTES)
        files.replace(places[0], content)
    for place in places:
      with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged
        kept = read_sealed(place)
        if fits(kept):
          return kept
    return _keep(make(), places, what, shared)


def _name(key: object) -> str:
  return f'{hashlib.sha256(repr(key).encode(errors="surrogateescape")).hexdigest()[:32]}.arrow'


@contextlib.contextmanager
def _lock(cache: pathlib.Path, places: Sequence[pathlib.Path]) -> Iterator[None]:
  """Lets one process of this user make an index that is not there, while others wait for it."""
  with contextlib.ExitStack() as stack:
    if not any(place.exists() for place in places):
      with contextlib.suppress(OSError):  # the cache cannot be written, or has no locks
        cache.mkdir(parents=True, exist_ok=True)
        fcntl.flock(stack.enter_context(open(cache / '.lock', 'wb')), fcntl.LOCK_EX)
    yield


def _keep(made: Any, places: Sequence[pathlib.Path], what: str, shared: str) -> Any:
  """Writes the table to the first place that can be written, and returns it as processes share it."""
  for place in places:
    with contextlib.suppress(OSError):
      write_sealed(place, made)
      if place is not places[0]:
        log.info('%s cannot be written: the index of %s files is kept in %s.', places[0].parent, what, place.parent)
      if shared:
        try:
          storage.write(shared, place.read_bytes())
          log.info('The index of %s files is kept beside them for all hosts, in %s.', what, shared)
        except (OSError, UserError) as error:
          log.info('The index of %s files is kept in %s, as it cannot be written beside them: %s', what, place.parent,
                   str(error).splitlines()[0])
      return read_sealed(place)
  log.warning('%s: expected to keep the index of %s files there, got no permission or space. It will be made '
              'again at the next start.', places[-1].parent, what)
  return made


def write_sealed(place: pathlib.Path, rows: Any) -> None:
  """Writes a `pyarrow.Table` that `read_sealed` reads. Raises OSError if it cannot be written."""
  import pyarrow as pa
  with sealing(place) as file, pa.ipc.new_file(file, rows.schema) as writer:
    writer.write_table(rows.combine_chunks())


def read_sealed(place: pathlib.Path) -> Any:
  """Returns the `pyarrow.Table` in a file, mapped to memory. Raises OSError or ValueError if it is damaged."""
  import pyarrow as pa
  return pa.ipc.open_file(pa.py_buffer(map_sealed(place))).read_all()


@contextlib.contextmanager
def sealing(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Yields a file that becomes `path` when it is complete, with the SHA-256 of its name and content behind it.

  Raises:
    OSError: it cannot be written.
  """
  with files.replacing(path) as part, open(part, 'wb') as file:
    sealed = _Sealed(file, hashlib.sha256(os.fsencode(path.name)))
    yield cast(IO[bytes], sealed)
    file.write(sealed.found.digest())


class _Sealed(NamedTuple):
  """What Arrow needs of a file that is written."""
  file: IO[bytes]
  found: hashlib._Hash
  closed: bool = False

  def write(self, content: bytes) -> int:
    self.found.update(content)
    return self.file.write(content)

  def tell(self) -> int:
    return self.file.tell()

  def flush(self) -> None:
    self.file.flush()


def map_sealed(path: pathlib.Path) -> memoryview:
  """Returns the memory map of what was written with `sealing`.

  Raises:
    OSError: it cannot be read.
    ValueError: it is something else, was changed, or has another name.
  """
  with open(path, 'rb') as file:
    found = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
  content, seal = found[:-_SEAL_BYTES], found[-_SEAL_BYTES:]
  digest = hashlib.sha256(os.fsencode(path.name))
  digest.update(content)
  if digest.digest() != seal:
    raise ValueError('another checksum')
  return content


def scan_all(scan: Callable[[str], Any], files: Sequence[str], *, what: str) -> list[Any]:
  """Returns the table that `scan` makes of each file: in threads, or for many examples in processes.

  The first file says how many examples all have, about.
  """
  began_s = time.monotonic()
  found, rest = [scan(files[0])], files[1:]
  cores, expected = min(open_files.num_threads(0), len(rest)), len(found[0]) * len(files)
  if expected < PROCESSES_FROM:
    return found + in_threads(scan, rest)
  log.info('Indexing %s %s files with about %s examples, once ...', f'{len(files):,}', what, f'{expected:,}')
  shares = in_processes(functools.partial(in_threads, scan), rest, cores) if cores > 1 else None
  found += in_threads(scan, rest) if shares is None else [shares[i % cores][i // cores] for i in range(len(rest))]
  log.info('Indexed in %.1f s.', time.monotonic() - began_s)
  return found


def in_threads(work: Callable[[str], _Found], files: Sequence[str]) -> list[_Found]:
  """Returns the result of each file. Threads wait for the file system, which may be far away."""
  with concurrent.futures.ThreadPoolExecutor(max(1, min(open_files.MAX_THREADS, len(files)))) as pool:
    return list(pool.map(work, files))


def in_processes(work: Callable[[Sequence[str]], _Found], files: Sequence[str], cores: int) -> list[_Found] | None:
  """Returns the result of each share of the files, every `cores`-th one; None if processes cannot be started."""
  context = multiprocessing.get_context('spawn')
  try:
    with concurrent.futures.ProcessPoolExecutor(cores, mp_context=context) as pool:
      return list(pool.map(work, [files[i::cores] for i in range(cores)]))
  except concurrent.futures.BrokenExecutor as error:  # such as a script that runs at import
    log.debug('no processes to index files: %s', error)
    return None
