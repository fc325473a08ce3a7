"""Indexes of the examples in files: made once, in parallel, kept beside the files, and remade if a file changes.

An index is an Arrow table with a row for each example, such as

    offset  size   label  file        offset, size: the bytes of the example in its file
    512     14082  1      0           label: a number, or a position in `texts`, such as ["cat", "dog"]
    15360   9731   0      0           file: number of the file; and further columns of the format

A format calls `load` when a split is opened, and passes `scan`, a function that yields the rows of one file. If no file
has changed, `load` returns the kept index. Else `load` scans the files (`scan_all`), joins the rows (`_join`), and
keeps the table in a file that all processes map, so that they share one copy in memory. A kept file is sealed: it ends
with the SHA-256 of its name and content (`sealing`, `map_sealed`). If a kept file is damaged, the index is made again.
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
"""The name of the folder for the index, beside the files of the index."""
MIN_EXAMPLES_FOR_PROCESSES = 2**20
"""Expected number of examples from which processes index the files; one core takes 10 to 30 s for so many examples."""
MISSING = -2**62
"""Label of an example whose label is missing or damaged."""
BYTES, LABEL = 'large_binary', 'label'
"""The Arrow type of columns with bytes, and the name of the column with labels."""
Labels = int | str | tuple[int | str | None, ...] | None
"""The labels of an example: a tuple if examples may have several labels. None = the label is missing or damaged."""
Counts = collections.Counter[str]
Scan = Callable[[str, Counts], Iterable[tuple[Any, ...]]]
"""Yields the rows of the file at a path, and counts the ignored parts of the file by name. A row has one value for each
column, in the order of the columns; the value for labels is the result of `encode`. The function can be pickled."""
_MAX_INDEX_BYTES = 2**34  # size of an index in object storage
_SEAL_BYTES = 32
_FILE = 'file'  # name of the column with file numbers
_TEXTS, _IGNORED = b'texts', b'ignored'  # keys in the metadata of a table; the values are JSON
_Result = TypeVar('_Result')


class Index:
  """The rows of all files, file by file. S is the number of examples, L the number of labels of all examples.

  labels: numbers, or positions in `texts`, `[L] i64`; `MISSING` = a missing label. Empty if no example has a label.
  label_ends: where the labels of each example end in `labels`, `[S] i64`; empty if each example has one label.
  texts: the class names, sorted; empty if labels are numbers.
  """

  def __init__(self, rows: pa.Table) -> None:
    """Takes the table that the module docstring describes; each column has at most one chunk."""
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
    """Returns a column of numbers, `[S]`; of a column of bytes, all values joined, `[bytes] u8`."""
    column = self._columns[name]
    if str(column.type) == BYTES:
      return np.frombuffer(column.buffers()[2] or b'', np.uint8)
    return _buffer(column, np.dtype(str(column.type)))

  def ends(self, name: str) -> HostArray:
    """Returns where each value of a column of bytes ends in the joined values, `[S] i64`."""
    return _buffer(self._columns[name], np.int64)[1:]

  def get(self, name: str, row: int) -> Any:
    """Returns the value of a column in one row."""
    return self._columns[name][row].as_py()

  def labels_of(self, row: int) -> list[int]:
    """Returns the labels of an example; [] if no example has a label."""
    if not len(self.label_ends):
      return self.labels[row:row + 1].tolist()
    start = self.label_ends[row - 1] if row else 0
    return self.labels[start:self.label_ends[row]].tolist()


def _buffer(array: pa.Array, dtype: DTypeLike) -> HostArray:
  """Returns the numbers in an Arrow array, `[S]`; for bytes or lists, the offsets of the values, `[S + 1]`."""
  has_offsets = str(array.type) == BYTES or str(array.type).startswith('large_list')
  num_values, content = len(array) + has_offsets, array.buffers()[1]
  return np.zeros(num_values, dtype) if content is None else np.frombuffer(content, dtype, num_values)


@functools.lru_cache(2**12)
def encode(label: Labels) -> bytes:
  """Returns the labels of an example as JSON, the form in which a `Scan` yields labels."""
  return json.dumps(label).encode()


def load(paths: Sequence[str], scan: Scan, key: str, types: Mapping[str, str], *, format_name: str,
         expected: str = '', advice: str = 'Correct the pattern.') -> Index:
  """Returns the index of files: the kept index if no file has changed; else makes the index and keeps it.

  The index is kept in `FOLDER` beside the files, so that all hosts that read the files share the index. If that folder
  cannot be written, the index is kept in the user's cache. The index of objects in object storage is kept in both.

  Args:
    paths: paths of the files, or addresses in object storage.
    scan: yields the rows of a file.
    key: text that names everything that the rows depend on besides the files.
    types: the Arrow type of each column by name, also of `offset` and `size`. The last may be `LABEL`, of type `BYTES`.
    format_name: the format of the files, such as `TFRecord`, for messages and for the name of the user's cache folder.
    expected: what the files must contain, for the message about files without rows; '' = the files may have no rows.
    advice: the last sentence of the message about files without rows.

  Raises:
    TemporaryError, UserError: a file is missing or cannot be read, there are no rows, or `scan` raises the error.
  """
  try:
    index = Index(_read_or_make(
        paths, key, user_files.cache_folder(format_name.lower()), format_name=format_name,
        fits=lambda rows: _fits(rows, types, len(paths)), make=lambda: _make(paths, scan, types, format_name)))
  except OSError as error:
    raise failures.unreadable(error, f'the {format_name} file {error.filename or paths[0]}') from error
  if expected and not len(index):
    raise UserError(f'{paths[0]}: expected {expected}, got none in {len(paths):,} files. {advice}')
  return index


def _make(paths: Sequence[str], scan: Scan, types: Mapping[str, str], format_name: str) -> pa.Table:
  """Scans the files, warns about ignored parts, and returns the table of all rows. See `load` for the arguments."""
  tables = scan_all(functools.partial(_scan_table, scan=scan, types=types), paths, format_name=format_name)
  ignored = Counts()
  for table in tables:
    ignored += Counts(documents.parse(table.schema.metadata[_IGNORED]))  # `+` leaves out counts of 0
  if ignored:
    log.warning('%s: ignored %s', os.path.dirname(paths[0]), ', '.join(
        f'{name} ({count:,})' for name, count in sorted(ignored.items(), key=lambda item: (-item[1], item[0]))))
  return _join(tables)


def _scan_table(path: str, scan: Scan, types: Mapping[str, str]) -> pa.Table:
  """Returns the rows of one file, with labels as a dictionary array of JSON."""
  ignored = Counts()
  columns = list(zip(*scan(path, ignored), strict=True)) or [()] * len(types)
  arrays = {name: _bytes_array(values) if arrow_type == BYTES else _number_array(np.array(values, arrow_type))
            for (name, arrow_type), values in zip(types.items(), columns, strict=True)}
  if LABEL in arrays:  # each distinct label is stored once: there are few of them, and some are long
    arrays[LABEL] = arrays[LABEL].dictionary_encode()
  return pa.table(arrays).replace_schema_metadata({_IGNORED: json.dumps(ignored)})


def _number_array(x: HostArray) -> pa.Array:
  """Returns numbers as an Arrow array. Unlike `pa.array`, this does not import pandas, which takes 0.3 s."""
  return pa.Array.from_buffers(pa.from_numpy_dtype(x.dtype), len(x), [None, pa.py_buffer(np.ascontiguousarray(x))])


def _bytes_array(values: Sequence[bytes]) -> pa.Array:
  ends = np.cumsum([0, *map(len, values)], dtype=np.int64)
  return pa.Array.from_buffers(pa.large_binary(), len(values),
                               [None, pa.py_buffer(ends), pa.py_buffer(b''.join(values))])


def _join(tables: Sequence[pa.Table]) -> pa.Table:
  """Returns the rows of the tables, with a column of file numbers, and with labels as numbers (`_number_labels`)."""
  file_numbers = np.repeat(np.arange(len(tables), dtype=np.int32), [table.num_rows for table in tables])
  rows, texts = pa.concat_tables(tables).append_column(_FILE, _number_array(file_numbers)), list[str]()
  if LABEL in rows.column_names:
    labels, texts = _number_labels(rows.column(LABEL).combine_chunks())
    rows = rows.drop_columns([LABEL]).append_column(LABEL, labels)
  return rows.combine_chunks().replace_schema_metadata({_TEXTS: json.dumps(texts)})


def _number_labels(labels: pa.DictionaryArray) -> tuple[pa.Array, list[str]]:
  """Returns the labels of all examples as numbers, or as lists of numbers if an example has several; and the texts.

  If any label is a text, each number is a position in the texts. The number of a missing label is `MISSING`. Only
  distinct labels become objects of Python: a dataset has few distinct labels, but millions of examples. `labels` has
  the result of `encode` for each example.
  """
  distinct = [documents.parse(encoded.as_py()) for encoded in labels.dictionary]
  codes = _buffer(labels.indices, np.int32)  # the position in `distinct` of the labels of each example
  has_lists = any(isinstance(label, list) and label for label in distinct)
  if not has_lists:  # any list in `distinct` is empty, and an empty list is a missing label
    distinct = [None if isinstance(label, list) else label for label in distinct]
  lists = [label if isinstance(label, list) else [label] for label in distinct]
  flat = [label for labels_of_one in lists for label in labels_of_one]
  texts = list[str]()
  if any(isinstance(label, str) for label in flat):
    texts = sorted({str(label) for label in flat if label is not None})
    positions = {text: position for position, text in enumerate(texts)}
    flat = [None if label is None else positions[str(label)] for label in flat]
  numbers = np.array([MISSING if label is None else label for label in flat], np.int64)
  if not has_lists:
    return _number_array(numbers[codes]), texts
  sizes = np.array([len(labels_of_one) for labels_of_one in lists])
  starts = np.cumsum(sizes) - sizes  # the start of each distinct list in `numbers`
  offsets = np.cumsum(np.append(0, sizes[codes]))  # the start of the list of each example in the result, and the end
  shifts = np.repeat(starts[codes] - offsets[:-1], sizes[codes])
  values = _number_array(numbers[np.arange(offsets[-1]) + shifts])
  return pa.LargeListArray.from_arrays(_number_array(offsets), values), texts


def _fits(rows: pa.Table, types: Mapping[str, str], num_files: int) -> bool:
  """Returns whether a kept table can be the index of `num_files` files; raises ValueError if the table is damaged.

  The table is checked because anybody who can write to a bucket can write an index there.
  """
  rows.validate(full=True)
  kept_types = {field.name: str(field.type) for field in rows.schema}
  if LABEL in types and kept_types.get(LABEL) in ('int64', 'large_list<item: int64>'):
    kept_types[LABEL] = BYTES  # the type that `types` has for labels, before `_number_labels` replaced them by numbers
  has_bad_column = any(column.null_count or column.num_chunks > 1 for column in rows.columns)
  if kept_types != {**types, _FILE: 'int32'} or len(kept_types) != rows.num_columns or has_bad_column:
    return False
  index = Index(rows)
  numbers = index[_FILE]
  are_files_valid = not len(numbers) or (numbers[0] >= 0 and numbers[-1] < num_files and (np.diff(numbers) >= 0).all())
  are_spans_valid = (index['offset'] >= -1).all() and (index['size'] >= 0).all()
  places = index['place'] if 'place' in types else np.zeros(len(index), np.int64)  # 0, 1, 2 ... in each row group
  are_places_valid = ((places == 0) | (places == np.append(-1, places[:-1]) + 1)).all()
  are_texts_valid = all(isinstance(text, str) for text in index.texts)
  return bool(are_files_valid and are_spans_valid and are_places_valid and are_texts_valid)


def _read_or_make(paths: Sequence[str], key: str, cache: pathlib.Path, *, format_name: str,
                  fits: Callable[[pa.Table], bool], make: Callable[[], pa.Table]) -> pa.Table:
  """Returns the kept table of files if no file has changed and the table `fits`; else makes the table and keeps it."""
  kept_paths, address = _choose_kept_paths(paths, key, cache)
  with contextlib.ExitStack() as stack:
    if not any(path.exists() for path in kept_paths):  # one process of this user makes the index, the others wait
      with contextlib.suppress(OSError):  # the cache cannot be written, or has no locks
        cache.mkdir(parents=True, exist_ok=True)
        fcntl.flock(stack.enter_context(open(cache / '.lock', 'wb')), fcntl.LOCK_EX)
    if address and not kept_paths[0].exists():
      with contextlib.suppress(OSError, UserError, TemporaryError):  # no other host has kept the index at the address
        files.replace(kept_paths[0], storage.read_file(address, _MAX_INDEX_BYTES))
    for path in kept_paths:
      with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # the kept file is missing or damaged
        rows = read_sealed(path)
        if fits(rows):
          return rows
    return _keep(make(), kept_paths, format_name, address)


def _choose_kept_paths(paths: Sequence[str], key: str, cache: pathlib.Path) -> tuple[list[pathlib.Path], str]:
  """Returns where the index of files is kept: paths, the preferred path first, and an address in object storage or ''.

  The name of a kept file is a digest of the names and stamps of the files. So a changed file leads to a new name.
  """
  stamped = list(zip(paths, storage.stamps(paths), strict=True))
  in_cache = cache / _kept_name([(path, key, *stamp) for path, stamp in stamped])
  folder = os.path.dirname(paths[0])
  if any(os.path.dirname(path) != folder for path in paths):
    return [in_cache], ''
  if storage.is_address(paths[0]):
    return [in_cache], f'{folder}/{FOLDER}/{in_cache.name}'
  # The name depends on the base names of the files only, because hosts may mount the folder at different paths.
  name = _kept_name([(os.path.basename(path), key, *stamp) for path, stamp in stamped])
  return [pathlib.Path(folder, FOLDER, name), in_cache], ''


def _kept_name(key: object) -> str:
  return f'{hashlib.sha256(repr(key).encode(errors="surrogateescape")).hexdigest()[:32]}.arrow'


def _keep(rows: pa.Table, kept_paths: Sequence[pathlib.Path], format_name: str, address: str) -> pa.Table:
  """Writes the table to the first path that can be written, and to an address if there is one; returns it mapped."""
  for path in kept_paths:
    with contextlib.suppress(OSError):
      write_sealed(path, rows)
      if path is not kept_paths[0]:
        log.info('%s cannot be written: the index of %s files is kept in %s.', kept_paths[0].parent, format_name,
                 path.parent)
      if address:
        try:
          storage.write(address, path.read_bytes())
          log.info('The index of %s files is kept beside them for all hosts, in %s.', format_name, address)
        except (OSError, UserError) as error:
          log.info('The index of %s files is kept in %s, as it cannot be written beside them: %s', format_name,
                   path.parent, str(error).splitlines()[0])
      return read_sealed(path)
  log.warning('%s: expected to keep the index of %s files there, got no permission or space. It will be made '
              'again at the next start.', kept_paths[-1].parent, format_name)
  return rows


def write_sealed(path: pathlib.Path, rows: pa.Table) -> None:
  """Writes a table to a file for `read_sealed`. Raises OSError if the file cannot be written."""
  with sealing(path) as file, pa.ipc.new_file(file, rows.schema) as writer:
    writer.write_table(rows.combine_chunks())


def read_sealed(path: pathlib.Path) -> pa.Table:
  """Returns the table in a file, mapped to memory. Raises OSError or ValueError as `map_sealed` does."""
  return pa.ipc.open_file(pa.py_buffer(map_sealed(path))).read_all()


@contextlib.contextmanager
def sealing(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Yields a file, then appends the SHA-256 of name and content, and moves the file to `path`. May raise OSError."""
  with files.replacing(path) as temporary, open(temporary, 'w+b') as file:
    yield file
    file.seek(0)
    file.write(hashlib.file_digest(file, lambda: hashlib.sha256(os.fsencode(path.name))).digest())


def map_sealed(path: pathlib.Path) -> memoryview:
  """Returns the memory map of a file that was written with `sealing`, without the checksum.

  Raises OSError if the file cannot be read, and ValueError if `sealing` did not write this content under this name.
  """
  with open(path, 'rb') as file:
    mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
  content, seal = mapped[:-_SEAL_BYTES], mapped[-_SEAL_BYTES:]
  digest = hashlib.sha256(os.fsencode(path.name))
  digest.update(content)
  if digest.digest() != seal:
    raise ValueError('another checksum')
  return content


def scan_all(scan: Callable[[str], Sized], paths: Sequence[str], *, format_name: str) -> list[Any]:
  """Returns the table of each file, the result of `scan`. Scans in threads, or for many examples in processes.

  The number of all examples is estimated from the first file. `format_name` is the format of the files, for messages.
  """
  began_s = time.monotonic()
  first, others = scan(paths[0]), paths[1:]
  num_expected = len(first) * len(paths)
  if num_expected < MIN_EXAMPLES_FOR_PROCESSES:
    return [first, *in_threads(scan, others)]
  log.info('Indexing %s %s files with about %s examples, once ...', f'{len(paths):,}', format_name, f'{num_expected:,}')
  num_processes = min(open_files.num_threads(0), len(others))
  shares = in_processes(functools.partial(in_threads, scan), others, num_processes) if num_processes > 1 else None
  if shares is None:
    tables = in_threads(scan, others)
  else:
    tables = [shares[i % num_processes][i // num_processes] for i in range(len(others))]
  log.info('Indexed in %.1f s.', time.monotonic() - began_s)
  return [first, *tables]


def in_threads(work: Callable[[str], _Result], paths: Sequence[str]) -> list[_Result]:
  """Returns the result of `work` for each file. The threads mostly wait for the file system, which may be remote."""
  with concurrent.futures.ThreadPoolExecutor(max(1, min(open_files.MAX_THREADS, len(paths)))) as pool:
    return list(pool.map(work, paths))


def in_processes(work: Callable[[Sequence[str]], _Result], paths: Sequence[str], num: int) -> list[_Result] | None:
  """Returns the result of `work` for the files of each of `num` processes; None if processes cannot be started.

  Process i has the files i, i + num, i + 2 num, ...
  """
  context = multiprocessing.get_context('spawn')
  try:
    with concurrent.futures.ProcessPoolExecutor(num, mp_context=context) as pool:
      return list(pool.map(work, [paths[i::num] for i in range(num)]))
  except concurrent.futures.BrokenExecutor as error:  # such as in a script without `if __name__ == '__main__'`
    log.debug('no processes to index files: %s', error)
    return None
