"""Reads and writes PyTorch's files without PyTorch, and without running code from them.

They contain pickles, which can call any function; `pickle_stack.py` interprets them without calling any. The writer
saves a plain dict of f32 tensors.
"""
from __future__ import annotations

import io
import math
import pathlib
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import ml_dtypes
import numpy as np

from vit_jax.core import archives
from vit_jax.weights import pickle_stack
from vit_jax.weights.branches import Chosen
from vit_jax.weights.pickle_stack import Storage, Tensor

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

Choose = Callable[[dict[str, 'HostArray']], Chosen]
"""Chooses from stand-ins of all tensors of a file, which have no memory of their own."""

DTYPES = {name: np.dtype(dtype) for name, dtype in zip(pickle_stack.STORAGES, (
    np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_),
    strict=True)}
MOST_SHARING = 4
"""Limit of the ratio of the bytes of all tensors to those of their storages. Tied weights use one storage twice, and a
new EMA uses each twice; without a limit, a small file with many tensors of one storage could fill the memory."""
_MOST_REPEATED = 16  # the same ratio for all networks of a file, of which one is read
_MOST_DEPTH = 8  # of dicts in dicts
_MAGIC = 0x1950a86a20f9469cfc6c  # PyTorch's older form begins with it
_PROTOCOL = 1001


def read_zip(archive: zipfile.ZipFile, choose: Choose) -> tuple[dict[str, HostArray], Chosen]:
  """Returns the chosen tensors of PyTorch's zip in their own dtypes; those that share a storage share memory.

  Raises:
    Refused: the pickle needs more than tensors and plain data.
    ValueError: the file is damaged, or its tensors take more than `MOST_SHARING` times the bytes of their storages.
  """
  found, folder = follow_zip(archive)
  lengths = {name.removeprefix(f'{folder}data/'): info.file_size for name, info in archive.NameToInfo.items()
             if name.startswith(f'{folder}data/')}
  return _arrays(found, choose, lengths, lambda key: archives.read_member(archive, f'{folder}data/{key}'))


def follow_zip(archive: zipfile.ZipFile) -> tuple[Any, str]:
  """Returns the object that the pickle of PyTorch's zip describes, and the pickle's folder inside the zip.

  Raises: as `read_zip`.
  """
  index = next(name for name in archive.namelist() if name == 'data.pkl' or name.endswith('/data.pkl'))
  folder = index.removesuffix('data.pkl')
  if f'{folder}byteorder' in archive.namelist():
    order = bytes(archives.read_member(archive, f'{folder}byteorder'))
    if order != b'little':
      raise ValueError(f'its numbers are in the byte order {order[:20]!r}, not little')
  return pickle_stack.load(io.BytesIO(archives.read_member(archive, index))), folder


def read_old(file: BinaryIO, choose: Choose, *, size: int) -> tuple[dict[str, HostArray], Chosen]:
  """Returns the tensors of a file in the format of PyTorch before 1.6: several pickles, then the data.

  Args:
    file: at its start.
    choose: see `Choose`.
    size: of the file, bytes.

  Raises: as `read_zip`.
  """
  found, places = follow_old(file, size=size)

  def data(key: str) -> bytes:
    start, length = places[key]
    file.seek(start)
    return file.read(length)

  return _arrays(found, choose, {key: length for key, (_, length) in places.items()}, data)


def follow_old(file: BinaryIO, *, size: int) -> tuple[Any, dict[str, tuple[int, int]]]:
  """Returns the object that the pickles describe, and the offset and the bytes of each storage.

  Raises: as `read_old`.
  """
  kinds: dict[str, str] = {}
  if pickle_stack.load(file) != _MAGIC or pickle_stack.load(file) != _PROTOCOL:
    raise ValueError('a pickle, but none of PyTorch')
  pickle_stack.load(file)  # byte order and sizes of the machine
  found, keys = pickle_stack.load(file, kinds), pickle_stack.load(file)
  if type(keys) is not list or not all(type(key) in (str, int) and str(key) in kinds for key in keys):
    raise ValueError('its list of storages names others than its tensors do')
  places = {}
  for key in map(str, keys):
    count = struct.unpack('<q', file.read(8))[0]
    start, itemsize = file.tell(), DTYPES[kinds[key]].itemsize
    if not 0 <= count <= (size - start) // itemsize:
      raise ValueError('the numbers end early')
    places[key] = start, count * itemsize
    file.seek(start + count * itemsize)
  if file.tell() != size:
    raise ValueError(f'{size - file.tell():,} bytes follow its numbers')
  return found, places


def _arrays(found: Any, choose: Choose, lengths: Mapping[str, int], data: Callable[[str], bytes | bytearray]
            ) -> tuple[dict[str, HostArray], Chosen]:
  """Returns the chosen tensors as views of their storages; their bounds were checked when the pickle was interpreted.

  Args:
    found: the object that a pickle describes.
    choose: see `Choose`.
    lengths: bytes of the storages in the file, by key.
    data: returns the storage of a key.

  Raises:
    ValueError: a storage has another size than its tensors expect, or tensors do not respect `MOST_SHARING`.
  """
  if type(found) is not dict:
    raise ValueError(f'it holds a {type(found).__name__} instead of named tensors')
  tensors = dict(_flat(found, '', set(), _MOST_DEPTH))
  for storage in {x.storage for x in tensors.values()}:
    wanted = storage.size * DTYPES[storage.kind].itemsize
    if (has := lengths.get(storage.key, wanted)) != wanted:
      raise ValueError(f'storage {storage.key[:20]!r} has {has:,} bytes, its {storage.size:,} numbers take {wanted:,}')
  tensors = {name: x for name, x in tensors.items() if x.storage.key in lengths}
  _check_sharing(tensors, _MOST_REPEATED)
  chosen = choose({name: np.broadcast_to(np.zeros((), DTYPES[x.storage.kind]), x.shape) for name, x in tensors.items()})
  kept = {new: tensors[name] for new, name in chosen.names.items()}
  _check_sharing(kept, MOST_SHARING)
  held: dict[Storage, HostArray] = {}
  arrays: dict[str, HostArray] = {}
  for name, x in kept.items():
    dtype = DTYPES[x.storage.kind]
    if x.storage not in held:
      if len(content := data(x.storage.key)) != x.storage.size * dtype.itemsize:
        raise ValueError(f'storage {x.storage.key[:20]!r} has {len(content):,} bytes, its {x.storage.size:,} numbers '
                         f'take {x.storage.size * dtype.itemsize:,}')
      held[x.storage] = np.frombuffer(content, dtype)
    arrays[name] = np.zeros(x.shape, dtype) if 0 in x.shape else np.lib.stride_tricks.as_strided(
        held[x.storage][x.offset:], x.shape, [s * dtype.itemsize for s in x.strides], writeable=False)
  return arrays, chosen


def _flat(found: dict[str, Any], path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
  """Yields the tensors of dicts in dicts, each dict once, as one can contain itself."""
  seen.add(id(found))
  for name, x in found.items():
    if type(x) is Tensor:
      yield path + name, x
    elif type(x) is dict and depth and id(x) not in seen:
      yield from _flat(x, f'{path}{name}/', seen, depth - 1)


def _check_sharing(tensors: Mapping[str, Tensor], most: int) -> None:
  held = {x.storage: x.storage.size * DTYPES[x.storage.kind].itemsize for x in tensors.values()}
  taken = sum(math.prod(x.shape) * DTYPES[x.storage.kind].itemsize for x in tensors.values())
  if taken > most * sum(held.values()):
    raise ValueError(f'its {len(tensors):,} tensors share storages and would take {taken:,} bytes for the '
                     f'{sum(held.values()):,} that are there, more than {most} times as many')


def write_zip(path: pathlib.Path, tensors: Mapping[str, HostArray]) -> None:
  """Writes a dict of f32 tensors that `torch.load(path, weights_only=True)` can read."""
  out = io.BytesIO()
  out.write(b'\x80\x02}(')  # protocol 2, a dict, and a mark before its items
  for key, (name, tensor) in enumerate(tensors.items()):
    _text(out, name)
    out.write(b'ctorch._utils\n_rebuild_tensor_v2\n((')
    _text(out, 'storage')
    out.write(b'ctorch\nFloatStorage\n')
    for word in (str(key), 'cpu'):
      _text(out, word)
    _number(out, tensor.size)
    out.write(b'tQ')  # a tuple: the persistent id of a storage
    _number(out, 0)
    strides = [int(np.prod(tensor.shape[i + 1:], dtype=np.int64)) for i in range(tensor.ndim)]
    for numbers in (tensor.shape, strides):
      out.write(b'(')
      for number in numbers:
        _number(out, number)
      out.write(b't')
    out.write(b'\x89ccollections\nOrderedDict\n)RtR')  # no gradient and no hooks, then the call
  out.write(b'u.')
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_STORED, allowZip64=True) as archive:
    archive.writestr('archive/data.pkl', out.getvalue())
    archive.writestr('archive/byteorder', 'little')
    for key, tensor in enumerate(tensors.values()):
      archive.writestr(f'archive/data/{key}', np.ascontiguousarray(tensor, '<f4').tobytes())
    archive.writestr('archive/version', '3\n')


def _text(out: BinaryIO, text: str) -> None:
  encoded = text.encode()
  out.write(b'X' + struct.pack('<I', len(encoded)) + encoded)


def _number(out: BinaryIO, number: int) -> None:
  out.write(b'J' + struct.pack('<i', number) if number < 2**31 else b'\x8a\x08' + struct.pack('<q', number))
