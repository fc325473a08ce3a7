"""Indexes of the examples in files: made once, in parallel, kept beside the files, and made again if a file changes.

An index is an Arrow table with a row for each example, such as

    offset  size   label  file        offset, size: the bytes of the example in its file
    512     14082  1      0           label: a number, or a position in `texts`, such as ["cat", "dog"]
    15360   9731   0      0           file: number of the file; and further columns of the format

A format calls `load` when a split is opened, and passes `scan`, a function that yields the rows of one file. `load`
returns the kept index if no file has changed. Else it scans the files (`scan_all`), joins their rows, and keeps the
table in a file that all processes map, so that they share one copy in memory. A kept file ends with the SHA-256 of its
name and its bytes (`sealing`, `map_sealed`). If a kept file is damaged, the index is made again.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from vit_jax.core import documents, failures, files, lazy
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import open_files, storage, user_files

if TYPE_CHECKING:
  import pyarrow as pa
  from numpy.typing import DTypeLike

  from vit_jax.core.types import HostArray
else:
  pa = lazy.Module('pyarrow')

log = logging.getLogger('vit_jax.data')

FOLDER = '.vit_jax_index'
"""The folder beside the files in which their index is kept."""
PROCESSES_FROM = 2**20
"""Expected number of examples from which processes index files; one core takes 10 to 30 s for so many."""
MISSING = -2**62
"""Label of an example whose label is missing or damaged."""
BYTES, LABEL = 'large_binary', 'label'
"""The Arrow type of columns with bytes, and the name of the column with labels."""
Labels = int | str | tuple[int | str | None, ...] | None
"""The labels of an example: a tuple if examples may have several. None is a label that is missing or damaged."""
Counts = collections.Counter[str]
Scan = Callable[[str, Counts], Iterable[tuple[Any, ...]]]
"""Yields the rows of the file at a path, and counts by name what it ignores. The values of a row have the order of the
columns; labels are as `encode` returns them. It pickles."""
_MOST_BYTES = 2**34  # of an index in object storage
_SEAL_BYTES = 32
_FILE = 'file'
_TEXTS, _IGNORED = b'texts', b'ignored'  # metadata of a table, as JSON
_Result = TypeVar('_Result')


class Index:
  """The rows of all files, in the order in which they are stored. S is the number of examples, L that of labels.

  labels: numbers, or positions in `texts`, `[L] i64`; `MISSING` if there is none. Empty if no example has a label.
  label_ends: where the labels of each example end in `labels`, `[S] i64`; empty if each example has one label.
  texts: the names of classes, sorted; empty if labels are numbers.
  """

  def __init__(self, rows: pa.Table) -> None:
    """Takes the table that the module describes; its columns have at most one chunk."""
    self._num_rows = rows.num_rows
    self._columns = {name: column.chunk(0) if column.num_chunks else pa.nulls(0, column.type)
                     for name, column in zip(rows.column_names, rows.columns, strict=True)}
    self.texts: list[str] = documents.parse(rows.schema.metadata[_TEXTS])
    self.labels = self.label_ends = np.zeros(0, np.int64)
    if LABEL in self._columns:
      column = self._columns[LABEL]
      is_list = str(column.type).startswith('large_list')
      labels = _buffer(column.values if is_list else column, np.int64)
      if (labels != MISSING).any():
        self.labels = labels
        if is_list:
          self.label_ends = _buffer(column, np.int64)[1:]

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


def _buffer(array: pa.Array, dtype: DTypeLike) -> HostArray:
  """Returns the numbers of an Arrow array; of bytes or lists, which have several sizes, the offsets `[S + 1]`."""
  num = len(array) + (str(array.type) == BYTES or str(array.type).startswith('large_list'))
  content = array.buffers()[1]
  return np.zeros(num, dtype) if content is None else np.frombuffer(content, dtype, num)


@functools.lru_cache(2**12)
def encode(label: Labels) -> bytes:
  """Returns the labels of an example as JSON, as `scan` yields them."""
  return json.dumps(label).encode()


def load(paths: Sequence[str], scan: Scan, key: str, types: Mapping[str, str], *, what: str, expected: str = '',
         advice: str = 'Correct the pattern.') -> Index:
  """Returns the index of files: a kept one if no file has changed; else it is made and kept.

  The index is kept in `FOLDER` beside the files, so that all hosts that read the files share it. If that folder cannot
  be written, it is kept in the user's cache. The index of objects is kept in both.

  Args:
    paths: of the files, or addresses.
    scan: yields the rows of a file.
    key: what the rows depend on besides the files.
    types: the Arrow type of each column of `scan` by name, in their order. `offset` and `size` are required. The type
      of `LABEL`, if there are labels, is `BYTES`, and it is the last one.
    what: the kind of the files, for messages.
    expected: what the files must have, for the message if they have no rows; '' = they may be empty.
    advice: the last sentence of this message.

  Raises:
    TemporaryError, UserError: a file is missing or cannot be read, there are no rows, or what `scan` raises.
  """
  def make() -> pa.Table:
    tables = scan_all(functools.partial(_scan_table, scan=scan, types=types), paths, what=what)
    ignored = Counts()
    for table in tables:
      ignored += Counts(documents.parse(table.schema.metadata[_IGNORED]))  # `+` leaves out counts of 0
    if ignored:
      log.warning('%s: ignored %s', os.path.dirname(paths[0]), ', '.join(
          f'{name} ({count:,})' for name, count in sorted(ignored.items(), key=lambda item: (-item[1], item[0]))))
    return _join(tables)
  try:
    index = Index(_read_or_make(paths, key, user_files.cache_folder(what.lower()), what=what, make=make,
                                fits=lambda rows: _fits(rows, types, len(paths))))
  except OSError as error:
    raise failures.unreadable(error, f'the {what} file {error.filename or paths[0]}') from error
  if expected and not len(index):
    raise UserError(f'{paths[0]}: expected {expected}, got none in {len(paths):,} files. {advice}')
  return index


def _scan_table(path: str, scan: Scan, types: Mapping[str, str]) -> pa.Table:
  """Returns the rows of one file, with labels as a dictionary array of JSON."""
  ignored = Counts()
  columns = list(zip(*scan(path, ignored), strict=True)) or [()] * len(types)
  arrays = {name: _bytes(values) if kind == BYTES else _numbers(np.array(values, kind))
            for (name, kind), values in zip(types.items(), columns, strict=True)}
  if LABEL in arrays:  # few labels are different, and some are long
    arrays[LABEL] = arrays[LABEL].dictionary_encode()
  return pa.table(arrays).replace_schema_metadata({_IGNORED: json.dumps(ignored)})


def _numbers(x: HostArray) -> pa.Array:
  """Returns numbers as an Arrow array. Unlike `pa.array`, this does not import pandas, which takes 0.3 s."""
  return pa.Array.from_buffers(pa.from_numpy_dtype(x.dtype), len(x), [None, pa.py_buffer(np.ascontiguousarray(x))])


def _bytes(values: Sequence[bytes]) -> pa.Array:
  ends = np.cumsum([0, *map(len, values)], dtype=np.int64)
  return pa.Array.from_buffers(pa.large_binary(), len(values),
                               [None, pa.py_buffer(ends), pa.py_buffer(b''.join(values))])


def _join(tables: Sequence[pa.Table]) -> pa.Table:
  """Returns the rows of all files, with the number of the file of each, and labels as `_number_labels` returns them."""
  file = np.repeat(np.arange(len(tables), dtype=np.int32), [table.num_rows for table in tables])
  rows, texts = pa.concat_tables(tables).append_column(_FILE, _numbers(file)), list[str]()
  if LABEL in rows.column_names:
    labels, texts = _number_labels(rows.column(LABEL).combine_chunks())
    rows = rows.drop_columns([LABEL]).append_column(LABEL, labels)
  return rows.combine_chunks().replace_schema_metadata({_TEXTS: json.dumps(texts)})


def _number_labels(labels: pa.DictionaryArray) -> tuple[pa.Array, list[str]]:
  """Returns the labels of all examples as numbers, or as lists of numbers if an example has several; and the texts.

  A number is `MISSING`, or the position in the texts if any label is a text. Only distinct labels become objects of
  Python: a dataset has few of them, but millions of examples.

  Args:
    labels: what `encode` returns for each example.
  """
  distinct = [documents.parse(encoded.as_py()) for encoded in labels.dictionary]
  codes = _buffer(labels.indices, np.int32)  # the position in `distinct` of each example's labels
  is_list = any(isinstance(label, list) and label for label in distinct)
  if is_list:
    lists = [label if isinstance(label, list) else [label] for label in distinct]
  else:  # the only lists are empty ones
    lists = [[None] if isinstance(label, list) else [label] for label in distinct]
  flat = [label for labels_of_one in lists for label in labels_of_one]
  texts = list[str]()
  if any(isinstance(label, str) for label in flat):
    texts = sorted({str(label) for label in flat if label is not None})
    positions = {text: position for position, text in enumerate(texts)}
    flat = [None if label is None else positions[str(label)] for label in flat]
  numbers = np.array([MISSING if label is None else label for label in flat], np.int64)
  if not is_list:
    return _numbers(numbers[codes]), texts
  sizes = np.array([len(labels_of_one) for labels_of_one in lists])
  starts = np.cumsum(sizes) - sizes  # of each distinct list in `numbers`
  ends = np.cumsum(np.append(0, sizes[codes]))  # of the list of each example, after a 0
  shifts = np.repeat(starts[codes] - ends[:-1], sizes[codes])
  return pa.LargeListArray.from_arrays(_numbers(ends), _numbers(numbers[np.arange(ends[-1]) + shifts])), texts


def _fits(rows: pa.Table, types: Mapping[str, str], num_files: int) -> bool:
  """Returns whether a kept table can be the index of so many files. Anybody who can write a bucket can write its index.

  Raises ValueError if the table is damaged.
  """
  rows.validate(full=True)
  kept_types = {field.name: str(field.type) for field in rows.schema}
  if LABEL in types and kept_types.get(LABEL) in ('int64', 'large_list<item: int64>'):
    kept_types[LABEL] = BYTES  # as it was before `_number_labels`
  if kept_types != {**types, _FILE: 'int32'} or len(kept_types) != rows.num_columns or any(
      column.null_count or column.num_chunks > 1 for column in rows.columns):
    return False
  index = Index(rows)
  file = index[_FILE]
  files_fit = not len(file) or (file[0] >= 0 and file[-1] < num_files and (np.diff(file) >= 0).all())
  sizes_fit = (index['offset'] >= -1).all() and (index['size'] >= 0).all()
  place = index['place'] if 'place' in types else np.zeros(len(file), np.int64)  # of a row in its row group
  places_fit = ((place == 0) | (place == np.append(-1, place[:-1]) + 1)).all()  # 0 1 2 ... in each row group
  return bool(files_fit and sizes_fit and places_fit and all(isinstance(text, str) for text in index.texts))


def _read_or_make(paths: Sequence[str], key: str, cache: pathlib.Path, *, what: str,
                  fits: Callable[[pa.Table], bool], make: Callable[[], pa.Table]) -> pa.Table:
  """Returns the kept table of files if no file has changed and the table `fits`; else makes it and keeps it.

  The name of a kept file is a digest of the names and stamps of the files, so another one is looked for after a change.
  """
  stamped = list(zip(paths, storage.stamps(paths), strict=True))
  kept_paths = [cache / _name([(path, key, *stamp) for path, stamp in stamped])]  # the preferred one first
  folders, address = {os.path.dirname(path) for path in paths}, ''
  if len(folders) == 1 and storage.is_address(paths[0]):
    address = f'{folders.pop()}/{FOLDER}/{kept_paths[0].name}'
  elif len(folders) == 1:  # by the names of the files, as hosts may mount the folder at other places
    kept_paths.insert(0, pathlib.Path(*folders) / FOLDER / _name(
        [(os.path.basename(path), key, *stamp) for path, stamp in stamped]))
  with contextlib.ExitStack() as stack:
    if not any(path.exists() for path in kept_paths):  # one process of this user makes the index; others wait for it
      with contextlib.suppress(OSError):  # the cache cannot be written, or has no locks
        cache.mkdir(parents=True, exist_ok=True)
        fcntl.flock(stack.enter_context(open(cache / '.lock', 'wb')), fcntl.LOCK_EX)
    if address and not kept_paths[0].exists():
      with contextlib.suppress(OSError, UserError, TemporaryError):  # another host may have kept it
        files.replace(kept_paths[0], storage.read_file(address, _MOST_BYTES))
    for path in kept_paths:
      with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # missing or damaged
        rows = read_sealed(path)
        if fits(rows):
          return rows
    return _keep(make(), kept_paths, what, address)


def _name(key: object) -> str:
  return f'{hashlib.sha256(repr(key).encode(errors="surrogateescape")).hexdigest()[:32]}.arrow'


def _keep(rows: pa.Table, kept_paths: Sequence[pathlib.Path], what: str, address: str) -> pa.Table:
  """Writes the table to the first path that can be written, and to the address if there is one; returns it mapped."""
  for path in kept_paths:
    with contextlib.suppress(OSError):
      write_sealed(path, rows)
      if path is not kept_paths[0]:
        log.info('%s cannot be written: the index of %s files is kept in %s.', kept_paths[0].parent, what, path.parent)
      if address:
        try:
          storage.write(address, path.read_bytes())
          log.info('The index of %s files is kept beside them for all hosts, in %s.', what, address)
        except (OSError, UserError) as error:
          log.info('The index of %s files is kept in %s, as it cannot be written beside them: %s', what, path.parent,
                   str(error).splitlines()[0])
      return read_sealed(path)
  log.warning('%s: expected to keep the index of %s files there, got no permission or space. It will be made '
              'again at the next start.', kept_paths[-1].parent, what)
  return rows


def write_sealed(path: pathlib.Path, rows: pa.Table) -> None:
  """Writes a table that `read_sealed` reads. Raises OSError if it cannot be written."""
  with sealing(path) as file, pa.ipc.new_file(file, rows.schema) as writer:
    writer.write_table(rows.combine_chunks())


def read_sealed(path: pathlib.Path) -> pa.Table:
  """Returns the table in a file, mapped to memory. Raises OSError or ValueError if it is damaged."""
  return pa.ipc.open_file(pa.py_buffer(map_sealed(path))).read_all()


@contextlib.contextmanager
def sealing(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Yields a file that becomes `path` when it is complete; then appends the SHA-256 of its name and content.

  Raises:
    OSError: it cannot be written.
  """
  with files.replacing(path) as temporary, open(temporary, 'w+b') as file:
    yield file
    file.seek(0)
    file.write(hashlib.file_digest(file, lambda: hashlib.sha256(os.fsencode(path.name))).digest())


def map_sealed(path: pathlib.Path) -> memoryview:
  """Returns the memory map of a file that was written with `sealing`, without the checksum.

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


def scan_all(scan: Callable[[str], Sized], paths: Sequence[str], *, what: str) -> list[Any]:
  """Returns the table that `scan` makes of each file: in threads, or for many examples in processes.

  The number of all examples is estimated from the first file. `what` is the kind of the files, for messages.
  """
  began_s = time.monotonic()
  first, others = scan(paths[0]), paths[1:]
  num_processes, num_expected = min(open_files.num_threads(0), len(others)), len(first) * len(paths)
  if num_expected < PROCESSES_FROM:
    return [first, *in_threads(scan, others)]
  log.info('Indexing %s %s files with about %s examples, once ...', f'{len(paths):,}', what, f'{num_expected:,}')
  shares = in_processes(functools.partial(in_threads, scan), others, num_processes) if num_processes > 1 else None
  if shares is None:
    tables = in_threads(scan, others)
  else:
    tables = [shares[i % num_processes][i // num_processes] for i in range(len(others))]
  log.info('Indexed in %.1f s.', time.monotonic() - began_s)
  return [first, *tables]


def in_threads(work: Callable[[str], _Result], paths: Sequence[str]) -> list[_Result]:
  """Returns the result of `work` for each file. Threads wait for the file system, which may be far away."""
  with concurrent.futures.ThreadPoolExecutor(max(1, min(open_files.MAX_THREADS, len(paths)))) as pool:
    return list(pool.map(work, paths))


def in_processes(work: Callable[[Sequence[str]], _Result], paths: Sequence[str], num: int) -> list[_Result] | None:
  """Returns the result of `work` for each of `num` shares of the files: share i has every `num`-th file from i on.

  Returns None if processes cannot be started.
  """
  context = multiprocessing.get_context('spawn')
  try:
    with concurrent.futures.ProcessPoolExecutor(num, mp_context=context) as pool:
      return list(pool.map(work, [paths[i::num] for i in range(num)]))
  except concurrent.futures.BrokenExecutor as error:  # such as a script that runs at import
    log.debug('no processes to index files: %s', error)
    return None
