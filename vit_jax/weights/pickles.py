"""PyTorch's files without PyTorch, and without running anything that is in them.

They are pickles, which can call any function; `pickle_stack.py` follows them without. The writer makes a plain dict of
f32 tensors.
"""
from __future__ import annotations

import io
import math
import pathlib
import struct
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

import ml_dtypes
import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.weights import archives, pickle_stack
from vit_jax.weights.pickle_stack import Storage, Tensor

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

DTYPES = {name: np.dtype(dtype) for name, dtype in zip(pickle_stack.STORAGES, (
    np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_),
    strict=True)}
BRANCHES = ('model', 'state_dict', 'model_ema', 'state_dict_ema', 'teacher', 'student', 'module')
"""Where files that hold more than one network keep it; the first that is there is the one for use."""
MOST_SHARING = 4
"""Limit of the bytes of all tensors over the bytes of their storages. Tied weights name one storage twice, and a new
EMA all of them; names without end for one storage would fill the memory from a small file."""
_MAGIC = 0x1950a86a20f9469cfc6c  # PyTorch's older form begins with it
_PROTOCOL = 1001


def read_zip(archive: zipfile.ZipFile, branch: str) -> dict[str, HostArray]:
  """Tensors of PyTorch's zip, each in its own dtype; those that share a storage share memory.

  Raises:
    Refused: the pickle asks for more than tensors.
    ValueError: damaged, or its tensors take more than `MOST_SHARING` times their storages.
  """
  found, folder = follow_zip(archive)
  held: dict[Storage, HostArray] = {}

  def flat(storage: Storage) -> HostArray:
    if storage not in held:
      data = archives.read(archive, f'{folder}data/{storage.key}')
      held[storage] = _numbers(data, storage)
    return held[storage]

  return {name: _view(flat(x.storage), x) for name, x in _tensors(found, branch).items()}


def follow_zip(archive: zipfile.ZipFile) -> tuple[Any, str]:
  """What the pickle of PyTorch's zip describes, and the folder inside of the zip that it lies in.

  Raises: as `read_zip`.
  """
  index = next(name for name in archive.namelist() if name == 'data.pkl' or name.endswith('/data.pkl'))
  folder = index.removesuffix('data.pkl')
  if f'{folder}byteorder' in archive.namelist():
    order = bytes(archives.read(archive, f'{folder}byteorder'))
    if order != b'little':
      raise ValueError(f'its numbers are in the byte order {order[:20]!r}, not little')
  return pickle_stack.load(io.BytesIO(archives.read(archive, index))), folder


def read_old(file: BinaryIO, branch: str, *, size: int) -> dict[str, HostArray]:
  """Tensors of the form that PyTorch wrote before 1.6: pickles one after the other, then the numbers.

  Args:
    file: at its start.
    branch: which network of several; '' = the one that is meant for use.
    size: of the file, bytes.

  Raises: as `read_zip`.
  """
  found, places = follow_old(file, size=size)
  held: dict[Storage, HostArray] = {}

  def flat(storage: Storage) -> HostArray:
    if storage not in held:
      if storage.key not in places:
        raise ValueError(f'it has no storage {storage.key[:20]!r}')
      start, count = places[storage.key]
      if count != storage.size:
        raise ValueError(f'storage {storage.key[:20]!r} has {count:,} numbers, its tensors expect {storage.size:,}')
      file.seek(start)
      held[storage] = _numbers(file.read(count * DTYPES[storage.kind].itemsize), storage)
    return held[storage]

  return {name: _view(flat(x.storage), x) for name, x in _tensors(found, branch).items()}


def follow_old(file: BinaryIO, *, size: int) -> tuple[Any, dict[str, tuple[int, int]]]:
  """What the pickles describe, and of each storage where its numbers begin and how many they are.

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
    places[key] = start, count
    file.seek(start + count * itemsize)
  if file.tell() != size:
    raise ValueError(f'{size - file.tell():,} bytes follow its numbers')
  return found, places


def _numbers(data: bytes | bytearray, storage: Storage) -> HostArray:
  dtype = DTYPES[storage.kind]
  if len(data) != storage.size * dtype.itemsize:
    raise ValueError(f'storage {storage.key[:20]!r} has {len(data):,} bytes, its {storage.size:,} numbers take '
                     f'{storage.size * dtype.itemsize:,}')
  return np.frombuffer(data, dtype)


def _view(flat: HostArray, tensor: Tensor) -> HostArray:
  """The tensor, whose place in `flat` was checked when its pickle was followed."""
  if 0 in tensor.shape:
    return np.zeros(tensor.shape, flat.dtype)
  strides = [s * flat.itemsize for s in tensor.strides]
  return np.lib.stride_tricks.as_strided(flat[tensor.offset:], tensor.shape, strides, writeable=False)


def _tensors(found: Any, branch: str) -> dict[str, Tensor]:
  """The tensors of the network that is meant, which take no more memory than the file allows."""
  if type(found) is dict and branch and branch not in found:
    shown = ', '.join(ascii(name)[1:-1] for name in found)[:300]
    raise UserError(f'--view: expected one of the networks in the file ({shown}), got {branch!r}. Choose one.')
  tensors = _chosen(found, branch)
  held = {x.storage: x.storage.size * DTYPES[x.storage.kind].itemsize for x in tensors.values()}
  taken = sum(math.prod(x.shape) * DTYPES[x.storage.kind].itemsize for x in tensors.values())
  if taken > MOST_SHARING * sum(held.values()):
    raise ValueError(f'its {len(tensors):,} tensors share storages and would take {taken:,} bytes for the '
                     f'{sum(held.values()):,} that are there, more than {MOST_SHARING} times as many')
  return tensors


def _chosen(found: Any, branch: str) -> dict[str, Tensor]:
  """The tensors of a branch, or of the first of `BRANCHES` that is there. Raises ValueError if there are none."""
  found = found[branch] if type(found) is dict and branch else found
  for _ in range(8):  # a dict may hold itself
    if type(found) is not dict or any(type(x) is Tensor for x in found.values()):
      break
    inner = next((name for name in BRANCHES if type(found.get(name)) is dict), None)
    if inner is None:
      break
    found = found[inner]
  if type(found) is not dict:
    raise ValueError(f'it holds a {type(found).__name__} instead of named tensors')
  return {name: x for name, x in found.items() if type(x) is Tensor}


def write_zip(path: pathlib.Path, tensors: Mapping[str, HostArray]) -> None:
  """Writes what `torch.load(path, weights_only=True)` reads as a dict of f32 tensors."""
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
    out.write(b'tQ')  # a tuple, which names a storage
    _number(out, 0)
    strides = [int(np.prod(tensor.shape[i + 1:], dtype=np.int64)) for i in range(tensor.ndim)]
    for numbers in (tensor.shape, strides):
      out.write(b'(')
      for number in numbers:
        _number(out, number)
      out.write(b't')
    out.write(b'\x89ccollections\nOrderedDict\n)RtR')  # no gradient, no hooks; call
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
