"""Indexes of the examples in files: made once, in parallel, kept beside the files, and made again if a file changes.

An index is an Arrow table with a row for each example. A format calls `load` when a split is opened, and passes `scan`,
a function that yields the rows of one file. `load` returns the kept index if no file has changed. Else it scans the
files (`scan_all`), joins their rows, and keeps the table in a file that all processes map, so that they share one copy
in memory. A kept file ends with the SHA-256 of its name and its bytes (`sealing`, `map_sealed`); a file with anything
wrong is made again. This module knows no format: it sees files, rows and labels only.
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
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from vit_jax.core import documents, failures, files, lazy
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import open_files, storage, user_files

if TYPE_CHECKING:
  import pyarrow as pa

  from vit_jax.core.types import HostArray
else:
  pa = lazy.Module('pyarrow')

log = logging.getLogger('vit_jax.data')

FOLDER = '.vit_jax_index'
"""The folder beside the files in which their index is kept."""
PROCESSES_FROM = 2**20
"""Examples from which processes are started; one core takes 10 to 30 s for them."""
MISSING = -2**62
"""Label of an example whose label is missing or damaged."""
BYTES, LABEL = 'large_binary', 'label'
Labels = int | str | tuple[int | str | None, ...] | None
"""The labels of an example: a tuple if examples may have several. None is a label that is missing or damaged."""
Counts = collections.Counter[str]
Scan = Callable[[str, Counts], Iterable[tuple[Any, ...]]]
"""Yields the rows of a file, and counts what it ignores. Labels come last, as `encode` returns them. Pickles."""
_MOST_BYTES, _SEAL_BYTES, _FILE, _TEXTS, _IGNORED = 2**34, 32, 'file', b'texts', b'ignored'
_Result = TypeVar('_Result')


class Index:
  """The rows of all files, in the order in which they are stored. S is the number of examples, L that of labels.

  labels: numbers, or positions in `texts`, `[L] i64`; `MISSING` if there is none. Empty if no example has a label.
  label_ends: where the labels of each example end in `labels`, `[S] i64`; empty if each example has one label.
  texts: the names of classes, sorted; empty if labels are numbers.
  """

  def __init__(self, rows: Any) -> None:
    """Takes a `pyarrow.Table`, see `load`."""
    self._num_rows = rows.num_rows
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
    return int(self._num_rows)

  def __getitem__(self, name: str) -> HostArray:
    """Returns a column of numbers, `[S]`, or of bytes, one after the other, `[bytes] u8`."""
    column = self._columns[name]
    return (np.frombuffer(column.buffers()[2] or b'', np.uint8) if str(column.type) == BYTES else
            _buffer(column, np.dtype(str(column.type))))

  def ends(self, name: str) -> HostArray:
    """Returns where each value of a column of bytes ends, `[S] i64`."""
    return _buffer(self._columns[name], np.int64)[1:]

  def get(self, name: str, row: int) -> Any:
    """Returns the value of a column in one row."""
    return self._columns[name][row].as_py()

  def labels_of(self, row: int) -> list[int]:
    """Returns the labels of an example; none if no example has a label."""
    if not len(self.label_ends):
      return self.labels[row:row + 1].tolist()
    return self.labels[int(self.label_ends[row - 1]) if row else 0:int(self.label_ends[row])].tolist()


def _array(column: Any) -> Any:
  """Returns a column of at most one chunk as an Arrow array."""
  return column.chunk(0) if column.num_chunks else pa.nulls(0, column.type)


def _buffer(array: Any, dtype: Any) -> HostArray:
  """Returns the numbers of an Arrow array, or its offsets if it has values of several sizes."""
  num = len(array) + (str(array.type) == BYTES or str(array.type).startswith('large_list'))
  content = array.buffers()[1]
  return np.zeros(num, dtype) if content is None else np.frombuffer(content, dtype, num)


@functools.lru_cache(2**12)
def encode(label: Labels) -> bytes:
  """Returns labels as a row of `scan` has them: as JSON."""
  return json.dumps(label).encode()


def load(paths: Sequence[str], scan: Scan, key: str, types: Mapping[str, str], *, what: str, expected: str = '',
         advice: str = 'Correct the pattern.') -> Index:
  """Returns the index of files: a kept one if no file has changed; else it is made and kept.

  The index is kept in `FOLDER` beside the files, so that all hosts that read the files share it, and in the user's
  cache where that folder cannot be written. The index of objects is kept in both.

  Args:
    paths: of the files, or addresses.
    scan: yields the rows of a file.
    key: what the rows depend on besides the files.
    types: the Arrow type of each column by name. `offset` and `size` are required; the type of `LABEL` is `BYTES`.
    what: the kind of the files, for messages.
    expected: what the files must have, for the message if they have no rows; '' = they may be empty.
    advice: for this message.

  Raises:
    TemporaryError, UserError: a file is missing or cannot be read, there are no rows, or what `scan` raises.
  """
  def make() -> Any:
    tables = scan_all(functools.partial(_scanned, scan=scan, types=types), paths, what=what)
    ignored = sum((Counts(documents.parse(table.schema.metadata[_IGNORED])) for table in tables), Counts())
    if ignored:
      log.warning('%s: ignored %s', os.path.dirname(paths[0]), ', '.join(
          f'{name} ({count:,})' for name, count in sorted(ignored.items(), key=lambda item: (-item[1], item[0]))))
    return _joined(tables)
  try:
    loaded = Index(_kept(paths, key, user_files.cache_folder(what.lower()), what=what, make=make,
                         fits=lambda rows: _may_be(rows, types, len(paths))))
  except OSError as error:
    raise failures.unreadable(error, f'the {what} file {error.filename or paths[0]}') from error
  if expected and not len(loaded):
    raise UserError(f'{paths[0]}: expected {expected}, got none in {len(paths):,} files. {advice}')
  return loaded


def _scanned(path: str, scan: Scan, types: Mapping[str, str]) -> Any:
  """Returns the rows of one file as a `pyarrow.Table`."""
  ignored = Counts()
  columns = list(zip(*scan(path, ignored), strict=True)) or [()] * len(types)
  arrays = {name: _bytes(values) if kind == BYTES else _numbers(np.array(values, kind))
            for (name, kind), values in zip(types.items(), columns, strict=True)}
  if LABEL in arrays:  # few labels are different, and some are long
    arrays[LABEL] = arrays[LABEL].dictionary_encode()
  return pa.table(arrays).replace_schema_metadata({_IGNORED: json.dumps(ignored)})


def _numbers(x: HostArray) -> Any:
  """Returns numbers as an Arrow array. Unlike `pa.array`, this does not import pandas, which takes 0.3 s."""
  return pa.Array.from_buffers(pa.from_numpy_dtype(x.dtype), len(x), [None, pa.py_buffer(np.ascontiguousarray(x))])


def _bytes(values: Sequence[bytes]) -> Any:
  ends = np.cumsum([0, *map(len, values)], dtype=np.int64)
  return pa.Array.from_buffers(pa.large_binary(), len(values),
                               [None, pa.py_buffer(ends), pa.py_buffer(b''.join(values))])


def _joined(tables: Sequence[Any]) -> Any:
  """Returns the rows of all files, with the number of the file of each, and labels as `_numbered` returns them."""
  file = np.repeat(np.arange(len(tables), dtype=np.int32), [table.num_rows for table in tables])
  rows, texts = pa.concat_tables(tables).append_column(_FILE, _numbers(file)), list[str]()
  if LABEL in rows.column_names:
    labels, texts = _numbered(rows.column(LABEL).combine_chunks())
    rows = rows.drop_columns([LABEL]).append_column(LABEL, labels)
  return rows.combine_chunks().replace_schema_metadata({_TEXTS: json.dumps(texts)})


def _numbered(labels: Any) -> tuple[Any, list[str]]:
  """Returns labels as an Arrow array of numbers, or of lists of numbers if an example has several; and the texts.

  A number is `MISSING`, or the position in the texts if any label is a text. Only labels that differ become objects of
  Python: a dataset has few of them, but millions of examples.

  Args:
    labels: a `pyarrow.DictionaryArray` of what `encode` returns.
  """
  distinct = [documents.parse(value.as_py()) for value in labels.dictionary]
  codes = _buffer(labels.indices, np.int32)
  is_list = any(isinstance(label, list) and label for label in distinct)
  lists = [(label if is_list else [None]) if isinstance(label, list) else [label] for label in distinct]
  values = [value for label in lists for value in label]
  texts = sorted({str(value) for value in values if value is not None}) if any(
      isinstance(value, str) for value in values) else []
  positions = {text: position for position, text in enumerate(texts)}
  numbers = np.array([MISSING if value is None else positions[str(value)] if texts else value for value in values],
                     np.int64)
  if not is_list:
    return _numbers(numbers[codes]), texts
  sizes = np.array([len(label) for label in lists])
  ends = np.cumsum(np.append(0, sizes[codes]))
  shifts = (np.cumsum(sizes) - sizes)[codes] - ends[:-1]  # from the labels of a row to their numbers
  flat = numbers[np.arange(ends[-1]) + np.repeat(shifts, sizes[codes])]
  return pa.LargeListArray.from_arrays(_numbers(ends), _numbers(flat)), texts


def _may_be(rows: Any, types: Mapping[str, str], num_files: int) -> bool:
  """Returns whether a kept table can be the index of so many files. Anybody who can write a bucket can write its index.

  Raises ValueError if the table is damaged.
  """
  rows.validate(full=True)
  kept = {field.name: str(field.type) for field in rows.schema}
  is_labeled = LABEL in types and kept.get(LABEL) in ('int64', 'large_list<item: int64>')
  if {**kept, **({LABEL: BYTES} if is_labeled else {})} != {**types, _FILE: 'int32'} or any(
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
  """Returns the kept table of files if no file has changed and the table `fits`; else makes it and keeps it."""
  stamped = list(zip(paths, storage.stamps(paths), strict=True))
  places = [cache / _name([(path, key, *stamp) for path, stamp in stamped])]
  folders, shared = {os.path.dirname(p) for p in paths}, ''
  if len(folders) == 1 and storage.is_address(paths[0]):
    shared = f'{folders.pop()}/{FOLDER}/{places[0].name}'
  elif len(folders) == 1:  # by names, as hosts may mount it at other places
    places.insert(0, pathlib.Path(*folders) / FOLDER / _name(
        [(os.path.basename(path), key, *stamp) for path, stamp in stamped]))
  with contextlib.ExitStack() as stack:
    if not any(place.exists() for place in places):  # one process of this user makes the index, and others wait for it
      with contextlib.suppress(OSError):  # the cache cannot be written, or has no locks
        cache.mkdir(parents=True, exist_ok=True)
        fcntl.flock(stack.enter_context(open(cache / '.lock', 'wb')), fcntl.LOCK_EX)
    if shared and not places[0].exists():
      with contextlib.suppress(OSError, UserError, TemporaryError):  # another host may have kept it
        files.replace(places[0], storage.read_file(shared, _MOST_BYTES))
    for place in places:
      with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged
        kept = read_sealed(place)
        if fits(kept):
          return kept
    return _keep(make(), places, what, shared)


def _name(key: object) -> str:
  return f'{hashlib.sha256(repr(key).encode(errors="surrogateescape")).hexdigest()[:32]}.arrow'


def _keep(rows: Any, places: Sequence[pathlib.Path], what: str, shared: str) -> Any:
  """Writes the table to the first place that can be written, and to the address `shared`; returns it mapped."""
  for place in places:
    with contextlib.suppress(OSError):
      write_sealed(place, rows)
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
  return rows


def write_sealed(place: pathlib.Path, rows: Any) -> None:
  """Writes a `pyarrow.Table` that `read_sealed` reads. Raises OSError if it cannot be written."""
  with sealing(place) as file, pa.ipc.new_file(file, rows.schema) as writer:
    writer.write_table(rows.combine_chunks())


def read_sealed(place: pathlib.Path) -> Any:
  """Returns the `pyarrow.Table` in a file, mapped to memory. Raises OSError or ValueError if it is damaged."""
  return pa.ipc.open_file(pa.py_buffer(map_sealed(place))).read_all()


@contextlib.contextmanager
def sealing(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Yields a file that becomes `path` when it is complete, with the SHA-256 of its name and content behind it.

  Raises:
    OSError: it cannot be written.
  """
  with files.replacing(path) as part, open(part, 'w+b') as file:
    yield file
    file.seek(0)
    file.write(hashlib.file_digest(file, lambda: hashlib.sha256(os.fsencode(path.name))).digest())


def map_sealed(path: pathlib.Path) -> memoryview:
  """Returns the memory map of what was written with `sealing`, without the checksum.

  Raises:
    OSError: it cannot be read.
    ValueError: it is something else, was changed, or has another name.
  """
  with open(path, 'rb') as file:
    mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
  content, seal = mapped[:-_SEAL_BYTES], mapped[-_SEAL_BYTES:]
  digest = hashlib.sha256(os.fsencode(path.name))
  digest.update(content)
  if digest.digest() != seal:
    raise ValueError('another checksum')
  return content


def scan_all(scan: Callable[[str], Any], files: Sequence[str], *, what: str) -> list[Any]:
  """Returns the table that `scan` makes of each file: in threads, or for many examples in processes.

  The number of all examples is estimated from the first file.
  """
  began_s = time.monotonic()
  tables, rest = [scan(files[0])], files[1:]
  cores, num_expected = min(open_files.num_threads(0), len(rest)), len(tables[0]) * len(files)
  if num_expected < PROCESSES_FROM:
    return tables + in_threads(scan, rest)
  log.info('Indexing %s %s files with about %s examples, once ...', f'{len(files):,}', what, f'{num_expected:,}')
  shares = in_processes(functools.partial(in_threads, scan), rest, cores) if cores > 1 else None
  tables += in_threads(scan, rest) if shares is None else [shares[i % cores][i // cores] for i in range(len(rest))]
  log.info('Indexed in %.1f s.', time.monotonic() - began_s)
  return tables


def in_threads(work: Callable[[str], _Result], files: Sequence[str]) -> list[_Result]:
  """Returns the result of `work` for each file. Threads wait for the file system, which may be far away."""
  with concurrent.futures.ThreadPoolExecutor(max(1, min(open_files.MAX_THREADS, len(files)))) as pool:
    return list(pool.map(work, files))


def in_processes(work: Callable[[Sequence[str]], _Result], files: Sequence[str], cores: int) -> list[_Result] | None:
  """Returns the result of `work` for each of `cores` shares of the files: share i has every `cores`-th file from i on.

  Returns None if processes cannot be started.
  """
  context = multiprocessing.get_context('spawn')
  try:
    with concurrent.futures.ProcessPoolExecutor(cores, mp_context=context) as pool:
      return list(pool.map(work, [files[i::cores] for i in range(cores)]))
  except concurrent.futures.BrokenExecutor as error:  # such as a script that runs at import
    log.debug('no processes to index files: %s', error)
    return None
