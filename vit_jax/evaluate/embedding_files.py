"""The formats of `vit-jax embed`: Parquet, ArrayRecord, NPZ and safetensors. Each writes, completes and reads files.

| format | target | an example |
|---|---|---|
| `parquet` | a folder of shards, or `FILE.parquet` | `id name label` and a list of fixed size, f32 |
| `array_record` | a folder of shards | a `tf.Example` with `id name label`, and the values as bytes (`<f4`) |
| `npz`, `safetensors` | one file | a row of the arrays `id name label` and the values |

`id` is the position in the source. The values have the name of what they are (`features`), and for Parquet and
ArrayRecord one dimension; `shape` in the info is that of an example. The info is `info.json` in a folder, the entry
`info` of an NPZ, the metadata `info` of a safetensors file, and the metadata `vit_jax` of a Parquet file. Images that
cannot be decoded have no row. Equal examples give equal bytes, with one version of the libraries.
"""
from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from vit_jax.core import extras
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.files import records

FORMAT = 'vit_jax features 1'
INFO, SUMS = 'info.json', 'SHA256SUMS'
_MOST_HEADER = 2**27  # bytes of the header of a safetensors file
_NOT_OURS = 'expected the output of vit-jax embed, got another file or folder. Check the path.'
_ROWS = 1024  # of an ArrayRecord file that are read at a time


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
    return cls(np.arange(rows.start, rows.stop), [''] * num, np.full(num, -1, np.int32),
               np.zeros((num, *shape), np.float32), [''] * num)

  def good(self) -> Block:
    """Returns the examples that could be decoded."""
    rows = [row for row, problem in enumerate(self.problem) if not problem]
    return Block(self.id[rows], [self.name[row] for row in rows], self.label[rows], self.values[rows], [''] * len(rows))

  def name_bytes(self) -> int:
    """Returns the length of the longest name in UTF-8."""
    return max((len(text(name).encode()) for name in self.name), default=0)


Info = Mapping[str, Any]
Notes = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Format:
  """A format.

  suffix: of a shard's file.
  write: writes a block to a file, and returns the number of its rows.
  finish: makes the target of the folder of shards, given the info and a note of each shard.
  read_info: the info of a complete target; None if it is something else, or the format has no place for it.
  read: yields the blocks of a complete target; None if nothing reads it.
  """
  suffix: str
  write: Callable[[pathlib.Path, Block, Info], int]
  finish: Callable[[pathlib.Path, pathlib.Path, Info, Notes], None]
  read_info: Callable[[pathlib.Path], Any]
  read: Callable[[pathlib.Path], Iterator[Block]] | None = None


def text(name: str) -> str:
  """Returns the name of a file as text that UTF-8 can hold."""
  return name.encode(errors='surrogateescape').decode(errors='backslashreplace')


def choose(target: pathlib.Path, name: str = '') -> Format:
  """Returns the format of a target: by its suffix, or of a folder by name ('' = `parquet`).

  Raises:
    UserError: a name that does not fit the suffix, or an optional package is missing.
  """
  by_suffix = FILES.get(target.suffix)
  if not by_suffix and re.fullmatch(r'\.[a-z][a-z0-9]{1,6}', target.suffix):
    raise UserError(f'--to: expected a file that ends in {", ".join(FILES)}, or the name of a folder without an '
                    f'ending, got {target}. Change it.')
  if by_suffix and name not in ('', target.suffix[1:]):
    raise UserError(f'--format: expected {target.suffix[1:]}, the suffix of --to={target}, got {name}. Remove it, or '
                    'give --to a folder.')
  if not by_suffix and name in ('npz', 'safetensors'):
    raise UserError(f'--to={target}: expected a file with the suffix .{name}, which --format={name} writes, got none. '
                    'Change the suffix or --format.')
  chosen = by_suffix or FOLDERS[name or 'parquet']
  if chosen.suffix == '.parquet':
    _pyarrow()
  return chosen


def open_complete(path: pathlib.Path) -> tuple[Any, Format]:
  """Returns the info and the format of what `vit-jax embed` wrote.

  Raises:
    UserError: it is something else.
  """
  kinds = [FILES[path.suffix]] if path.suffix in FILES and path.is_file() else list(FOLDERS.values())
  if not path.exists():
    raise UserError(f'{path}: expected the output of vit-jax embed, got no such file or folder. Check the path.')
  for kind in kinds:
    info = kind.read_info(path)
    if info is not None and info['format'] == FORMAT and (path.is_file() or list(path.glob(f'*{kind.suffix}'))):
      return info, kind
  raise UserError(f'{path}: {_NOT_OURS}')


def finish_folder(part: pathlib.Path, target: pathlib.Path, info: Info, notes: Notes) -> None:
  """Writes the description of the shards and renames the folder. If that was begun before, it is ended."""
  if not (part / INFO).is_file():
    listed = [{key: note[key] for key in ('file', 'num_rows', 'num_bytes', 'sha256')} for note in notes]
    (part / SUMS).write_text(''.join(f'{one["sha256"]}  {one["file"]}\n' for one in listed))
    half = part / f'{INFO}.half'
    half.write_text(json.dumps({**info, **_totals(notes), 'shards': listed}, indent=1))
    half.replace(part / INFO)
  kept = {INFO, SUMS, *(one['file'] for one in json.loads((part / INFO).read_text())['shards'])}
  for path in part.iterdir():
    if path.name not in kept:
      path.unlink()
  if target.is_dir():
    target.rmdir()  # it is empty
  part.rename(target)


def _totals(notes: Notes) -> dict[str, int]:
  return {'num_rows': sum(note['num_rows'] for note in notes), 'num_bad': sum(note['num_bad'] for note in notes)}


def _folder_info(folder: pathlib.Path) -> Any:
  """Returns the info of a complete folder as it was planned, or None."""
  try:
    found = json.loads((folder / INFO).read_text())
  except (OSError, ValueError):
    return None
  return _planned(found)


def _planned(found: Any) -> Any:
  """Returns the info without what is known at the end alone; None if it is not ours."""
  if not isinstance(found, dict) or not str(found.get('format')).startswith('vit_jax '):
    return None
  return {key: value for key, value in found.items() if key not in ('num_rows', 'num_bad', 'shards')}


def _shards(folder: pathlib.Path) -> list[pathlib.Path]:
  return [folder / one['file'] for one in json.loads((folder / INFO).read_text())['shards']]


# --- Parquet ---

def _pyarrow() -> Any:
  extras.load('pyarrow', 'parquet', 'Parquet files')
  extras.load('pyarrow.parquet', 'parquet', 'Parquet files')
  import pyarrow
  return pyarrow


def _write_parquet(path: pathlib.Path, block: Block, info: Info) -> int:
  pa, good = _pyarrow(), block.good()
  flat = pa.array(np.ascontiguousarray(good.values).reshape(-1))
  width = int(np.prod(good.values.shape[1:]))
  table = pa.table({'id': pa.array(good.id), 'name': pa.array([text(name) for name in good.name], pa.string()),
                    'label': pa.array(good.label), info['what']: pa.FixedSizeListArray.from_arrays(flat, width)})
  pa.parquet.write_table(table.replace_schema_metadata({'vit_jax': json.dumps(info)}), path, use_dictionary=False)
  return len(good.id)


def finish_parquet(part: pathlib.Path, target: pathlib.Path, info: Info, notes: Notes) -> None:
  """Writes one file with a row group for each shard."""
  pa = _pyarrow()
  half = part / f'{target.name}.half'
  schema = pa.parquet.read_schema(part / notes[0]['file']).with_metadata(
      {'vit_jax': json.dumps({**info, **_totals(notes)})})
  with pa.parquet.ParquetWriter(half, schema, use_dictionary=False) as writer:
    for note in notes:
      writer.write_table(pa.parquet.read_table(part / note['file']).replace_schema_metadata(schema.metadata))
  half.replace(target)


def read_parquet_info(path: pathlib.Path) -> Any:
  """Returns the info in the metadata of a Parquet file; None if it is something else."""
  pa = _pyarrow()
  try:
    metadata = pa.parquet.read_schema(path).metadata or {}
    return _planned(json.loads(metadata.get(b'vit_jax', b'null')))
  except (OSError, ValueError):
    return None


def _read_parquet(path: pathlib.Path) -> Iterator[Block]:
  pa = _pyarrow()
  info = open_complete(path)[0]
  for file in _shards(path) if path.is_dir() else [path]:
    for batch in pa.parquet.ParquetFile(file).iter_batches():
      values = batch.column(info['what']).flatten().to_numpy().reshape(-1, *info['shape'])
      yield Block(batch.column('id').to_numpy(), batch.column('name').to_pylist(), batch.column('label').to_numpy(),
                  values, [''] * len(values))


# --- ArrayRecord ---

def _write_records(path: pathlib.Path, block: Block, info: Info) -> int:
  from array_record.python import array_record_module
  good = block.good()
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for number, name, label, values in zip(good.id.tolist(), good.name, good.label.tolist(), good.values, strict=True):
    writer.write(records.encode({'id': number, 'name': os.fsencode(name), 'label': label,
                                 info['what']: values.astype('<f4').tobytes()}))
  writer.close()
  return len(good.id)


def _read_records(path: pathlib.Path) -> Iterator[Block]:
  info = json.loads((path / INFO).read_text())
  for shard in info['shards']:
    opened = records.ArrayRecords([str(path / shard['file'])], [shard['num_rows']])
    for start in range(0, len(opened), _ROWS):
      rows = [records.parse(opened[i]) for i in range(start, min(start + _ROWS, len(opened)))]
      values = np.frombuffer(b''.join(records.encoded(row, info['what']) for row in rows), '<f4')
      yield Block(np.array([records.first(row, 'id') for row in rows], np.int64),
                  [os.fsdecode(records.encoded(row, 'name')) for row in rows],
                  np.array([records.first(row, 'label') for row in rows], np.int32),
                  values.reshape(-1, *info['shape']), [''] * len(rows))


# --- NPZ and safetensors ---

def _write_npz(path: pathlib.Path, block: Block, info: Info) -> int:
  good = block.good()
  with open(path, 'wb') as file:
    np.savez(file, id=good.id, name=np.array([text(name) for name in good.name], np.str_), label=good.label,
             **{info['what']: good.values})  # type: ignore[arg-type]
  return len(good.id)


def _columns(info: Info, notes: Notes) -> Iterator[tuple[str, np.dtype, tuple[int, ...]]]:
  """Yields name, dtype and shape of the arrays of a complete file; names as UTF-8, padded with zeros."""
  num = _totals(notes)['num_rows']
  yield 'id', np.dtype('<i8'), (num,)
  yield 'label', np.dtype('<i4'), (num,)
  yield 'name', np.dtype('u1'), (num, max(1, max(note['name_bytes'] for note in notes)))
  yield info['what'], np.dtype('<f4'), (num, *info['shape'])


def _parts_of(part: pathlib.Path, notes: Notes, name: str) -> Iterator[HostArray]:
  """Yields one array of each shard."""
  for note in notes:
    with np.load(part / note['file']) as shard:
      yield shard[name]


def _finish_npz(part: pathlib.Path, target: pathlib.Path, info: Info, notes: Notes) -> None:
  half = part / f'{target.name}.half'
  with zipfile.ZipFile(half, 'w', zipfile.ZIP_STORED) as archive:
    def member(name: str) -> IO[bytes]:
      return archive.open(zipfile.ZipInfo(f'{name}.npy'), 'w', force_zip64=True)  # its date is always 1980-01-01

    with member('info') as out:
      np.lib.format.write_array(out, np.array(json.dumps({**info, **_totals(notes)})))
    for name, dtype, shape in _columns(info, notes):
      if name == 'name':
        dtype, shape = np.dtype(f'<U{shape[1]}'), shape[:1]
      with member(name) as out:
        np.lib.format.write_array_header_2_0(
            out, {'descr': np.lib.format.dtype_to_descr(dtype), 'fortran_order': False, 'shape': shape})
        for piece in _parts_of(part, notes, name):
          out.write(np.ascontiguousarray(piece.astype(dtype)).tobytes())
  half.replace(target)


def _finish_safetensors(part: pathlib.Path, target: pathlib.Path, info: Info, notes: Notes) -> None:
  half, place = part / f'{target.name}.half', 0
  kinds = {'<i8': 'I64', '<i4': 'I32', '|u1': 'U8', '<f4': 'F32'}
  header: dict[str, Any] = {'__metadata__': {'info': json.dumps({**info, **_totals(notes)})}}
  columns = sorted(_columns(info, notes), key=lambda column: -column[1].itemsize)  # so that each is aligned
  for name, dtype, shape in columns:
    size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    header[name] = {'dtype': kinds[dtype.str], 'shape': list(shape), 'data_offsets': [place, place + size]}
    place += size
  encoded = json.dumps(header).encode()
  encoded += b' ' * (-len(encoded) % 8)
  with open(half, 'wb') as out:
    out.write(len(encoded).to_bytes(8, 'little') + encoded)
    for name, dtype, shape in columns:
      for piece in _parts_of(part, notes, name):
        out.write(_padded(piece, shape[1]) if name == 'name' else piece.astype(dtype).tobytes())
  half.replace(target)


def _padded(names: HostArray, width: int) -> bytes:
  return b''.join(name.encode().ljust(width, b'\0') for name in names.tolist())


def _npz_info(path: pathlib.Path) -> Any:
  try:
    with np.load(path) as file:
      return _planned(json.loads(str(file['info'])))
  except (OSError, ValueError, KeyError, zipfile.BadZipFile):
    return None


def _read_npz(path: pathlib.Path) -> Iterator[Block]:
  what = open_complete(path)[0]['what']
  with np.load(path) as file:
    yield Block(file['id'], file['name'].tolist(), file['label'], file[what], [''] * len(file['id']))


def _safetensors_header(path: pathlib.Path) -> tuple[Any, int]:
  """Returns the header and the position of the first tensor."""
  with open(path, 'rb') as file:
    size = int.from_bytes(file.read(8), 'little')
    return json.loads(file.read(min(size, _MOST_HEADER))), 8 + size


def _safetensors_info(path: pathlib.Path) -> Any:
  try:
    return _planned(json.loads(_safetensors_header(path)[0]['__metadata__']['info']))
  except (OSError, ValueError, KeyError, TypeError):
    return None


def _read_safetensors(path: pathlib.Path) -> Iterator[Block]:
  header, start = _safetensors_header(path)

  def array(name: str, dtype: str) -> HostArray:
    one = header[name]
    return np.memmap(path, dtype, 'r', start + one['data_offsets'][0], tuple(one['shape']))

  names = [bytes(row).rstrip(b'\0').decode() for row in array('name', 'u1')]
  what = json.loads(header['__metadata__']['info'])['what']
  yield Block(array('id', '<i8'), names, array('label', '<i4'), array(what, '<f4'), [''] * len(names))


FOLDERS = {'parquet': Format('.parquet', _write_parquet, finish_folder, _folder_info, _read_parquet),
           'array_record': Format('.array_record', _write_records, finish_folder, _folder_info, _read_records)}
"""Formats of folders by name."""
FILES = {'.parquet': Format('.parquet', _write_parquet, finish_parquet, read_parquet_info, _read_parquet),
         '.npz': Format('.npz', _write_npz, _finish_npz, _npz_info, _read_npz),
         '.safetensors': Format('.npz', _write_npz, _finish_safetensors, _safetensors_info, _read_safetensors)}
"""Formats of single files by suffix."""
