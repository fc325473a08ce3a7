"""The files of features, which `vit-jax embed` and evaluations write, and evaluations read: Parquet and NPZ.

| format | target | an example |
|---|---|---|
| `parquet` | a folder of shards, or `FILE.parquet` | `id name label` and a list of fixed size, f32 |
| `npz` | one file | a row of the arrays `id name label` and the values |

`id` is the position in the source. The values have the name of what they are (`features`), and for Parquet one
dimension; `shape` in the info is that of an example. Images that cannot be decoded have no row.

The info is a JSON object that describes the file: `info.json` in a folder, the entry `info` of an NPZ, and the metadata
`vit_jax` of a Parquet file. Its field `sha256` has the SHA-256 of the rest of the info, and in one file of each column;
that of a shard is in the field `shards`. `Written.blocks` compares them. Equal examples give equal bytes, with one
version of the libraries.

`embedding.write` makes these files shard by shard, so that it resumes. `features.Store` writes a Parquet file for each
process with `write_file`. Both read with `open_complete(path).blocks()`. Parquet files are not memory-mapped: their
pages have to be decoded, which takes as long with a memory map.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vit_jax.core import archives, documents, failures, files, lazy
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import HostArray
from vit_jax.data import user_files

if TYPE_CHECKING:
  import pyarrow as pa
  from pyarrow import parquet
else:
  pa, parquet = map(lazy.Module, ('pyarrow', 'pyarrow.parquet'))

FORMAT = 'vit_jax features 1'
INFO, SUMS, SHA256 = 'info.json', 'SHA256SUMS', 'sha256'
_MAX_VALUES = 2**24  # of an example
_DAMAGES = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, EOFError, RuntimeError,
            MemoryError, zipfile.BadZipFile)
"""What the libraries raise for a damaged file."""

Info = Mapping[str, Any]
"""The description of files, as JSON has it."""
Notes = Sequence[Mapping[str, Any]]
"""For each shard `file`, `num_rows`, `num_bytes`, `sha256`, `num_bad` and `name_bytes`."""


@dataclasses.dataclass
class Block:
  """Consecutive examples: `id [n] i64`, name and `label [n] i32` (-1 = unknown), and what a network gives for them.

  values: `[n, …]` f32.    problem: why an image cannot be decoded; '' = it can.
  """
  id: HostArray
  name: list[str]
  label: HostArray
  values: HostArray
  problem: list[str]

  @classmethod
  def empty(cls, rows: range, shape: Sequence[int]) -> Block:
    """Returns the block of a range of examples, to be filled."""
    num = len(rows)
    return cls(id=np.arange(rows.start, rows.stop), name=[''] * num, label=np.full(num, -1, np.int32),
               values=np.zeros((num, *shape), np.float32), problem=[''] * num)

  def good(self) -> Block:
    """Returns the examples that could be decoded."""
    rows = [row for row, problem in enumerate(self.problem) if not problem]
    return Block(self.id[rows], [self.name[row] for row in rows], self.label[rows], self.values[rows], [''] * len(rows))

  def name_bytes(self) -> int:
    """Returns the length of the longest name in UTF-8."""
    return max((len(text(name).encode()) for name in self.name), default=0)


Read = Callable[[pathlib.Path, Info], Iterator[Block]]


@dataclasses.dataclass(frozen=True)
class Format:
  """A format.

  suffix: of a shard's file.
  write: writes a block to a file, and returns the number of its rows.
  finish: makes the target of the folder of shards, given the info and the notes.
  read: yields the blocks of a complete target with this info; None if nothing reads it.
  """
  suffix: str
  write: Callable[[pathlib.Path, Block, Info], int]
  finish: Callable[[pathlib.Path, pathlib.Path, Info, Notes], None]
  read: Read | None = None


def text(name: str) -> str:
  """Returns the name of a file as text that UTF-8 can hold."""
  return name.encode(errors='surrogateescape').decode(errors='backslashreplace')


def choose(target: pathlib.Path, name: str = '') -> Format:
  """Returns the format of a target, by its suffix; a folder is one of Parquet shards. `name` is that of `--format`.

  Raises UserError if the name does not fit the suffix.
  """
  by_suffix = FILES.get(target.suffix)
  if not by_suffix and re.fullmatch(r'\.[a-z][a-z0-9]{1,10}', target.suffix):  # such as `.safetensors`
    raise UserError(f'--to: expected a file that ends in {", ".join(FILES)}, or the name of a folder without an '
                    f'ending, got {target}. Change it.')
  if by_suffix and name not in ('', target.suffix[1:]):
    raise UserError(f'--format: expected {target.suffix[1:]}, the suffix of --to={target}, got {name}. Remove it, or '
                    'give --to a folder.')
  if not by_suffix and name == 'npz':
    raise UserError(f'--to={target}: expected a file with the suffix .npz, which --format=npz writes, got none. '
                    'Change the suffix or --format.')
  return by_suffix or FOLDER


class Written(NamedTuple):
  """Complete files: the path of the file or folder, its info, and its format."""
  path: pathlib.Path
  info: Any
  format: Format

  def blocks(self) -> Iterator[Block]:
    """Yields the examples, and compares all checksums.

    Raises UserError if something differs from what was written. Blocks may have been yielded before.
    """
    path, info = self.path, self.info
    assert self.format.read is not None
    try:
      for shard in info['shards'] if path.is_dir() else ():
        if user_files.sha256(path / shard['file']) != shard[SHA256]:
          raise ValueError(f'another SHA-256 of {shard["file"]}')
      checksums = _Checksums(info['what'])
      for block in self.format.read(path, info):
        checksums.add(block)
        yield block
      if path.is_file() and info[SHA256] != _sealed(info, checksums.digests())[SHA256]:
        raise ValueError('other checksums than were written')
    except OSError as error:
      if error.errno is not None:
        raise failures.unreadable(error, str(path)) from error
      raise _damaged(path, error) from error
    except _DAMAGES as error:
      raise _damaged(path, error) from error


def open_complete(path: pathlib.Path) -> Written:
  """Returns the description of complete files.

  Raises UserError if there is something else, or it has changed since it was written.
  """
  if not path.exists():
    raise UserError(f'{path}: expected the output of vit-jax embed, got no such file or folder. Check the path.')
  format = FILES.get(path.suffix, FOLDER) if path.is_file() else FOLDER
  info = read_info(path)
  if info is None or info['format'] != FORMAT or (path.is_dir() and not list(path.glob(f'*{format.suffix}'))):
    raise UserError(f'{path}: expected the output of vit-jax embed, got another file or folder. Check the path.')
  checksums = info.get(SHA256)
  if checksums is None:
    raise UserError(f'{path}: expected the output of vit-jax embed with its checksums, got a file without them, such '
                    'as a single shard of a folder or the output of an older version. Give the folder, or remove the '
                    'file and run vit-jax embed again.')
  of_columns = ({name: value for name, value in checksums.items() if name != 'info'}
                if isinstance(checksums, dict) else {})
  if _sealed(info, of_columns)[SHA256] != checksums:
    raise _damaged(path, ValueError('another checksum of its description'))
  _check_fields(path, info)
  return Written(path, info, format)


def _check_fields(path: pathlib.Path, info: Info) -> None:
  """Raises UserError if a field of an info is missing, or has another type than it was written with."""
  fields = documents.Field(info, str(path), 'Write the features of the images with vit-jax embed.')
  fields.field('what').text()
  fields.field('features_digest').text()
  fields.field('identity').object()
  fields.field('num_rows').whole()
  fields.field('num_bad').whole()
  shape = fields.field('shape')
  if not 0 < math.prod(size.whole(1, _MAX_VALUES) for size in shape.elements()) <= _MAX_VALUES:
    raise shape.error(f'sizes of at most {_MAX_VALUES:,} values')
  for shard in fields.field('shards').elements() if path.is_dir() else ():
    name = shard.field('file').text()
    if os.path.basename(name) != name:
      raise shard.field('file').error('the name of a file in the folder')
    shard.field('num_rows').whole()
    shard.field(SHA256).text()


def _damaged(path: pathlib.Path, error: Exception) -> UserError:
  if isinstance(error, UserError):
    return error
  # Other types are of libraries, whose texts do not speak of the file.
  why = f' ({str(error).partition(chr(10))[0][:120]})' if type(error) is ValueError else ''
  return UserError(f'{path}: expected the output of vit-jax embed as it was written, got a damaged file{why}. Copy it '
                   'again, or write it again.')


def planned(info: Any) -> Any:
  """Returns an info as it was before anything was computed; None of None."""
  return info and {key: x for key, x in info.items() if key not in ('num_rows', 'num_bad', 'shards', SHA256)}


def _totals(notes: Notes) -> dict[str, int]:
  return {'num_rows': sum(note['num_rows'] for note in notes), 'num_bad': sum(note['num_bad'] for note in notes)}


def read_info(path: pathlib.Path) -> Any:
  """Returns the info of a complete folder or file; None if it is something else, or has no place for an info."""
  try:
    if path.is_file() and path.suffix == '.parquet':
      info = documents.parse((parquet.read_schema(path).metadata or {}).get(b'vit_jax', b'null'))
    elif path.is_file() and path.suffix == '.npz':
      info = documents.parse(str(archives.read_npz(path, ['info'])['info']))
    else:
      info = documents.load(path / INFO)
  except (OSError, ValueError, KeyError, NotImplementedError):
    return None
  return info if isinstance(info, dict) and str(info.get('format')).startswith('vit_jax ') else None


# --- Checksums ---

def _sealed(info: Info, columns: Mapping[str, str]) -> dict[str, Any]:
  """Returns an info with its own checksum and those of the columns."""
  info = {key: x for key, x in info.items() if key != SHA256}
  content = json.dumps({**info, 'columns': columns}, sort_keys=True)
  return {**info, SHA256: {**columns, 'info': hashlib.sha256(content.encode()).hexdigest()}}


class _Checksums:
  """The SHA-256 of each column over the blocks that are added; `what` is the name of the values."""

  def __init__(self, what: str, blocks: Iterable[Block] = ()) -> None:
    self._by_column = {name: hashlib.sha256() for name in ('id', 'name', 'label', what)}
    for block in blocks:
      self.add(block)

  def add(self, block: Block) -> None:
    # An array is hashed without a copy if it has the dtype and the layout already.
    names = ''.join(f'{text(name)}\0' for name in block.name).encode()
    columns: tuple[memoryview | bytes, ...] = (
        np.ascontiguousarray(block.id, '<i8').data, names, np.ascontiguousarray(block.label, '<i4').data,
        np.ascontiguousarray(block.values, '<f4').data)
    for checksum, column in zip(self._by_column.values(), columns, strict=True):
      checksum.update(column)

  def digests(self) -> dict[str, str]:
    """Returns the checksums as hexadecimal digits."""
    return {name: checksum.hexdigest() for name, checksum in self._by_column.items()}


def _finish_file(read: Read, write: Callable[[pathlib.Path, pathlib.Path, Info, Notes], None], part: pathlib.Path,
                 target: pathlib.Path, info: Info, notes: Notes) -> None:
  """Writes all shards to one file, reads it back, and moves it to its place.

  Args:
    read: yields the blocks of the file.
    write: writes the file from the folder of shards, with the complete info.
    part: the folder of shards.
    target: path of the file.
    info: without totals and checksums.
    notes: of the shards.
  """
  what = info['what']
  shards = (block for note in notes for block in _read_parquet(part / note['file'], info))
  expected = _Checksums(what, shards).digests()
  sealed = _sealed({**info, **_totals(notes)}, expected)
  with files.replacing(target, beside=part, is_new=True) as unfinished:
    write(part, unfinished, sealed, notes)
    if _Checksums(what, read(unfinished, sealed)).digests() != expected:
      raise TemporaryError(f'--to={target}: expected the file as it was written, got other values when reading it '
                           'back. Check the disk and the memory, and run the same command again.')


# --- Folder of Parquet shards ---

def _finish_folder(part: pathlib.Path, target: pathlib.Path, info: Info, notes: Notes) -> None:
  """Writes the description of the shards, unless it is there."""
  del target
  if not (part / INFO).is_file():
    shards = [{key: note[key] for key in ('file', 'num_rows', 'num_bytes', SHA256)} for note in notes]
    sealed = _sealed({**info, **_totals(notes), 'shards': shards}, {})
    files.replace(part / SUMS, ''.join(f'{note[SHA256]}  {note["file"]}\n' for note in shards).encode())
    files.replace(part / INFO, json.dumps(sealed, indent=1).encode())


def files_of(folder: pathlib.Path) -> set[str]:
  """Returns the names of the files of a complete folder."""
  shards = documents.read(folder / INFO).field('shards').elements()
  return {INFO, SUMS, *(shard.field('file').text() for shard in shards)}


def _read_folder(folder: pathlib.Path, info: Info) -> Iterator[Block]:
  for shard in info['shards']:
    yield from _read_parquet(folder / shard['file'], info)


# --- Parquet file ---

def _write_parquet(path: pathlib.Path, block: Block, info: Info) -> int:
  table = _to_table(block, info)
  parquet.write_table(table, path, use_dictionary=False)
  return table.num_rows


def _to_table(block: Block, info: Info) -> pa.Table:
  """Returns the examples that could be decoded, with the info as metadata."""
  good = block.good()
  flat = pa.array(np.ascontiguousarray(good.values).reshape(-1))
  width = int(np.prod(good.values.shape[1:]))
  table = pa.table({'id': pa.array(good.id), 'name': pa.array([text(name) for name in good.name], pa.string()),
                    'label': pa.array(good.label), info['what']: pa.FixedSizeListArray.from_arrays(flat, width)})
  return table.replace_schema_metadata({'vit_jax': json.dumps(info)})


def _write_row_groups(path: pathlib.Path, tables: Iterator[pa.Table], info: Info) -> None:
  """Writes at least one table to one Parquet file, a row group each, with the info as metadata."""
  first = next(tables)
  schema = first.schema.with_metadata({'vit_jax': json.dumps(info)})
  with parquet.ParquetWriter(path, schema, use_dictionary=False) as writer:
    for table in itertools.chain([first], tables):
      writer.write_table(table.replace_schema_metadata(schema.metadata))


def write_file(path: pathlib.Path, blocks: Callable[[], Iterator[Block]], info: Info) -> None:
  """Writes all blocks to one Parquet file, a row group each, in place of a file that is there.

  Args:
    path: of the file.
    blocks: yields the same blocks each time, at least one.
    info: what they hold, without checksums.
  """
  sealed = _sealed(info, _Checksums(info['what'], (block.good() for block in blocks())).digests())
  with files.replacing(path) as unfinished:
    _write_row_groups(unfinished, (_to_table(block, sealed) for block in blocks()), sealed)


def join_parquet(part: pathlib.Path, path: pathlib.Path, info: Info, notes: Notes) -> None:
  """Writes one file with a row group for each shard of the folder `part`."""
  _write_row_groups(path, (parquet.read_table(part / note['file']) for note in notes), info)


def _read_parquet(path: pathlib.Path, info: Info) -> Iterator[Block]:
  with parquet.ParquetFile(path) as file:
    for batch in file.iter_batches():
      values = batch.column(info['what']).flatten().to_numpy().reshape(-1, *info['shape'])
      yield Block(batch.column('id').to_numpy(), batch.column('name').to_pylist(), batch.column('label').to_numpy(),
                  values, [''] * len(values))


# --- NPZ ---

def _write_npz(part: pathlib.Path, path: pathlib.Path, info: Info, notes: Notes) -> None:
  """Writes one archive from the shards, an array after the other."""
  num, num_letters = info['num_rows'], max(1, max(note['name_bytes'] for note in notes))
  columns = {'id': ('<i8', (num,)), 'label': ('<i4', (num,)), 'name': (f'<U{num_letters}', (num,)),
             info['what']: ('<f4', (num, *info['shape']))}
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_STORED) as archive:
    def member(name: str) -> IO[bytes]:
      return archive.open(zipfile.ZipInfo(f'{name}.npy'), 'w', force_zip64=True)  # its date is always 1980-01-01

    with member('info') as out:
      np.lib.format.write_array(out, np.array(json.dumps(info)))
    for name, (dtype, shape) in columns.items():
      with member(name) as out:
        np.lib.format.write_array_header_2_0(out, {'descr': dtype, 'fortran_order': False, 'shape': shape})
        for note in notes:
          column = parquet.read_table(part / note['file'], columns=[name])[name].combine_chunks()
          values = (column.flatten() if name == info['what'] else column).to_numpy(zero_copy_only=False)
          out.write(values.astype(dtype).tobytes())


def _read_npz(path: pathlib.Path, info: Info) -> Iterator[Block]:
  file = archives.read_npz(path, ['id', 'name', 'label', info['what']])
  yield Block(file['id'], file['name'].tolist(), file['label'], file[info['what']], [''] * len(file['id']))


FOLDER = Format('.parquet', _write_parquet, _finish_folder, _read_folder)
FILES = {'.parquet': Format('.parquet', _write_parquet, functools.partial(_finish_file, _read_parquet, join_parquet),
                            _read_parquet),
         '.npz': Format('.parquet', _write_parquet, functools.partial(_finish_file, _read_npz, _write_npz), _read_npz)}
"""Formats of single files by suffix."""
