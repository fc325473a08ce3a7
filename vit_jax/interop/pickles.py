"""PyTorch's files without PyTorch, and without running anything that is in them.

They are pickles, which can call any function. The reader here knows a handful of names, all of which become plain
data; any other name is refused before it is even looked up. The writer makes a plain dict of f32 tensors.
"""
from __future__ import annotations

import collections
import io
import pathlib
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from vit_jax.core.types import HostArray, UserError

STORAGES = {
    'FloatStorage': np.float32, 'DoubleStorage': np.float64, 'HalfStorage': np.float16,
    'BFloat16Storage': ml_dtypes.bfloat16, 'LongStorage': np.int64, 'IntStorage': np.int32, 'ShortStorage': np.int16,
    'CharStorage': np.int8, 'ByteStorage': np.uint8, 'BoolStorage': np.bool_,
}
BRANCHES = ('model', 'state_dict', 'model_ema', 'state_dict_ema', 'teacher', 'student', 'module')
"""Where files that hold more than one network keep it; the first that is there is the one for use."""
_MAGIC = 0x1950a86a20f9469cfc6c  # PyTorch's older form begins with it
_PROTOCOL = 1001


class Refused(Exception):
  """A pickle that asks for something it may not have."""


class _Record:
  """Stands for an object whose class is known to be harmless and of no use here: settings, devices, paths."""

  def __init__(self, *args: Any, **kwargs: Any):
    del args, kwargs

  def __setstate__(self, state: Any) -> None:
    del state


class _Storage:
  """The type of a storage, as a pickle names it."""

  def __init__(self, dtype: Any):
    self.dtype = dtype


class _Lazy:
  """A tensor whose bytes may come later in the file."""

  def __init__(self, storage: Callable[[], HostArray], offset: int, size: tuple[int, ...], stride: tuple[int, ...]):
    self._storage, self._offset, self._size, self._stride = storage, offset, size, stride

  def array(self) -> HostArray:
    """The tensor.

    Raises:
      ValueError: it reaches beyond its storage.
    """
    flat = self._storage()
    reach = self._offset + sum((n - 1) * s for n, s in zip(self._size, self._stride, strict=True)) if self._size else (
        self._offset)
    if 0 in self._size:
      return np.zeros(self._size, flat.dtype)
    if min(self._offset, *self._stride, 0) < 0 or reach >= len(flat):
      raise ValueError(f'a tensor of shape {list(self._size)} reaches beyond its {len(flat):,} numbers')
    strides = [s * flat.itemsize for s in self._stride]
    return np.lib.stride_tricks.as_strided(flat[self._offset:], self._size, strides, writeable=False).copy()


def _rebuild(storage: Callable[[], HostArray], offset: int, size: tuple[int, ...], stride: tuple[int, ...],
             *rest: Any) -> _Lazy:
  del rest  # whether it wants a gradient, its hooks
  return _Lazy(storage, offset, tuple(size), tuple(stride))


def _rebuild_parameter(data: _Lazy, *rest: Any) -> _Lazy:
  del rest
  return data


_HARMLESS = ('argparse.Namespace', 'torch.device', 'torch.Size', 'torch.dtype', 'pathlib.PosixPath', 'pathlib.Path',
             'numpy.dtype', 'numpy.core.multiarray.scalar', 'numpy._core.multiarray.scalar', '_codecs.encode',
             'torch.float32', 'torch.float16', 'torch.bfloat16')
_KNOWN: dict[str, Any] = {
    'collections.OrderedDict': collections.OrderedDict,
    'torch._utils._rebuild_tensor_v2': _rebuild,
    'torch._utils._rebuild_parameter': _rebuild_parameter,
    **{f'torch.{name}': _Storage(dtype) for name, dtype in STORAGES.items()},
    **dict.fromkeys(_HARMLESS, _Record),
}


class _Unpickler(pickle.Unpickler):
  """Knows `_KNOWN`, and nothing else."""

  def __init__(self, file: BinaryIO, storage: Callable[[tuple[Any, ...]], Callable[[], HostArray]]):
    super().__init__(file, encoding='utf-8')
    self._of = storage

  def find_class(self, module: str, name: str) -> Any:
    known = _KNOWN.get(f'{module}.{name}')
    if known is None:
      raise Refused(f'it asks to run {module}.{name}, which loading weights never needs. Files from people you do not '
                    'trust can do harm; nothing of it was run')
    return known

  def persistent_load(self, pid: Any) -> Callable[[], HostArray]:
    if not isinstance(pid, tuple) or pid[0] != 'storage' or not isinstance(pid[1], _Storage):
      raise Refused(f'it refers to {str(pid)[:60]!r}, which is no tensor')
    return self._of(pid[1:])


def _load(file: BinaryIO, storage: Callable[[tuple[Any, ...]], Callable[[], HostArray]]) -> Any:
  try:
    return _Unpickler(file, storage).load()
  except (pickle.UnpicklingError, AttributeError, TypeError, UnicodeDecodeError, OverflowError) as error:
    raise ValueError(f'its pickle cannot be followed: {error}') from error


def read_zip(archive: zipfile.ZipFile, branch: str) -> dict[str, HostArray]:
  """Tensors of PyTorch's zip.

  Raises:
    Refused: the pickle asks for more than tensors.
    ValueError: damaged.
  """
  index = next(name for name in archive.namelist() if name.endswith('data.pkl'))
  folder = index.removesuffix('data.pkl')
  order = archive.read(f'{folder}byteorder') if f'{folder}byteorder' in archive.namelist() else b'little'
  if order != b'little':
    raise ValueError(f'its numbers are in the byte order {order!r}, not little')

  def storage(pid: tuple[Any, ...]) -> Callable[[], HostArray]:
    kind, key = pid[0], str(pid[1])
    return lambda: np.frombuffer(archive.read(f'{folder}data/{key}'), kind.dtype)

  return _tensors(_load(io.BytesIO(archive.read(index)), storage), branch)


def read_old(file: BinaryIO, branch: str) -> dict[str, HostArray]:
  """Tensors of the form that PyTorch wrote before 1.6: pickles one after the other, then the numbers.

  Raises:
    Refused: a pickle asks for more than tensors.
    ValueError: damaged, or another pickle.
  """
  wanted: dict[str, Any] = {}
  held: dict[str, HostArray] = {}

  def storage(pid: tuple[Any, ...]) -> Callable[[], HostArray]:
    kind, key = pid[0], str(pid[1])
    wanted[key] = kind.dtype
    return lambda: held[key]

  if _load(file, storage) != _MAGIC or _load(file, storage) != _PROTOCOL:
    raise ValueError('a pickle, but none of PyTorch')
  _load(file, storage)  # byte order and sizes of the machine
  found = _load(file, storage)
  for key in _load(file, storage):
    count = struct.unpack('<q', file.read(8))[0]
    dtype = np.dtype(wanted[str(key)])
    data = file.read(count * dtype.itemsize)
    if len(data) < count * dtype.itemsize:
      raise ValueError('the numbers end early')
    held[str(key)] = np.frombuffer(data, dtype)
  return _tensors(found, branch)


def _tensors(found: Any, branch: str) -> dict[str, HostArray]:
  """The tensors of the network that is meant."""
  if isinstance(found, Mapping) and branch:
    if branch not in found:
      raise UserError(f'the file has no {branch!r}; it has {", ".join(map(str, list(found)[:8]))}')
    found = found[branch]
  while isinstance(found, Mapping) and not any(isinstance(x, _Lazy) for x in found.values()):
    inner = next((name for name in BRANCHES if isinstance(found.get(name), Mapping)), None)
    if inner is None:
      break
    found = found[inner]
  if not isinstance(found, Mapping):
    raise ValueError(f'it holds a {type(found).__name__} instead of named tensors')
  return {str(name): x.array() for name, x in found.items() if isinstance(x, _Lazy)}


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
