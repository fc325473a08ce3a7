"""Weight files of any kind: told apart by what is in them, read into named f32 arrays, written whole or not at all.

Kinds: npz, safetensors, PyTorch's zip and its older form (`pickles.py`). Reading never runs code from a file.
"""
from __future__ import annotations

import contextlib
import json
import os
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from vit_jax.core.types import HostArray, UserError
from vit_jax.interop import pickles

KINDS = 'npz, safetensors, PyTorch (.pth, .pt, .bin)'
SAFETENSORS = {'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16, 'I64': np.int64,
               'I32': np.int32, 'I16': np.int16, 'I8': np.int8, 'U8': np.uint8, 'BOOL': np.bool_}
_MOST_HEADER_BYTES = 100_000_000  # safetensors' own limit


def read(path: pathlib.Path, *, branch: str = '') -> dict[str, HostArray]:
  """All floating tensors of a file, by its names, in f32.

  Args:
    path: of a file.
    branch: which network of a file that holds several (`student`, `teacher`); '' = the one that is meant for use.

  Raises:
    UserError: there is no such file, it is damaged, or it holds no weights; says what it holds instead.
  """
  try:
    with open(path, 'rb') as file:
      tensors = _read(file, path, branch)
  except OSError as error:
    raise UserError(f'{path} cannot be read: {error.strerror or error}') from error
  found = {name: _as_f32(x) for name, x in tensors.items() if _is_number(x)}
  if not found:
    raise UserError(f'{path} holds no tensors')
  return found


def _read(file: BinaryIO, path: pathlib.Path, branch: str) -> Mapping[str, HostArray]:
  size = os.fstat(file.fileno()).st_size
  start = file.read(4096)
  file.seek(0)
  if start[:4] == b'PK\x03\x04':
    return _read_zip(file, path, size, branch)
  if len(start) > 9 and struct.unpack('<Q', start[:8])[0] < min(size, _MOST_HEADER_BYTES) and start[8:9] == b'{':
    return _read_safetensors(file, path, size)
  if start[:2] == b'\x80\x02':
    with _explained(path, size):
      return pickles.read_old(file, branch)
  raise UserError(f'{path} is no weight file: {describe(start, size)}; want {KINDS}, or the directory of a run or of '
                  'a model')


def describe(start: bytes, size: int) -> str:
  """What a file that holds no weights is, from its first bytes."""
  text = start.lstrip(b'\xef\xbb\xbf \t\r\n').lower()
  if not size:
    return 'it is empty'
  if text.startswith((b'<!doctype', b'<html', b'<head', b'<?xml')):
    return 'it is a web page, as a server sends it instead of a file that is not there or not public'
  if text.startswith(b'version https://git-lfs'):
    return 'it is a pointer of Git LFS; fetch the file itself with `git lfs pull`'
  if text.startswith((b'{', b'[')):
    return 'it is JSON'
  if start.startswith(b'\x93NUMPY'):
    return 'it is a single NumPy array'
  if start.startswith(b'\x89HDF'):
    return 'it is HDF5, as Keras writes it'
  if start.startswith(b'\x1f\x8b'):
    return 'it is compressed by gzip'
  with contextlib.suppress(UnicodeDecodeError):
    shown = ' '.join(start[:400].decode().split())[:60]
    return f'it is text: {shown!r}'
  return f'{size:,} bytes, beginning {start[:8]!r}'


@contextlib.contextmanager
def _explained(path: pathlib.Path, size: int) -> Iterator[None]:
  """Turns what readers raise about damaged files into a message."""
  try:
    yield
  except pickles.Refused as error:
    raise UserError(f'{path} is refused: {error}') from None
  except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError,
          struct.error, RuntimeError, MemoryError) as error:  # RuntimeError: encrypted, nested too deep
    if isinstance(error, UserError):
      raise
    raise UserError(f'{path} is damaged or cut short ({size:,} bytes): {str(error) or type(error).__name__}; fetch it '
                    'again') from error


def _read_zip(file: BinaryIO, path: pathlib.Path, size: int, branch: str) -> Mapping[str, HostArray]:
  """npz, or PyTorch's zip."""
  with _explained(path, size), zipfile.ZipFile(file) as archive:
    inside = archive.namelist()
    if any(name.endswith('/data.pkl') or name == 'data.pkl' for name in inside):
      return pickles.read_zip(archive, branch)
    if any(name.endswith('.npy') for name in inside):
      return {name.removesuffix('.npy'): _read_npy(archive, name) for name in inside if name.endswith('.npy')}
  raise UserError(f'{path} is a zip of {", ".join(inside[:4]) or "nothing"}, and no weight file; want {KINDS}')


def _read_npy(archive: zipfile.ZipFile, name: str) -> HostArray:
  with archive.open(name) as member:
    array = np.lib.format.read_array(member, allow_pickle=False)
    member.read()  # to the end, where the checksum is compared
  return array


def _read_safetensors(file: BinaryIO, path: pathlib.Path, size: int) -> dict[str, HostArray]:
  with _explained(path, size):
    length = struct.unpack('<Q', file.read(8))[0]
    header = json.loads(file.read(length))
    header.pop('__metadata__', None)
    data = np.fromfile(file, np.uint8)
    found = {}
    for name, entry in header.items():
      if entry['dtype'] not in SAFETENSORS:
        raise UserError(f'{path}: {name} is of type {entry["dtype"]}; known are {", ".join(SAFETENSORS)}')
      first, last = entry['data_offsets']
      if not 0 <= first <= last <= len(data):
        raise ValueError(f'{name} lies at bytes {first:,} to {last:,} of {len(data):,}')
      found[name] = data[first:last].view(SAFETENSORS[entry['dtype']]).reshape(entry['shape'])
    return found


def _is_number(array: HostArray) -> bool:
  return array.dtype.kind in 'fiubV' or array.dtype == ml_dtypes.bfloat16


def _as_f32(array: HostArray) -> HostArray:
  """In f32; bf16 that NumPy has kept as two bytes without a meaning is what it was."""
  if array.dtype.kind == 'V' and array.dtype.itemsize == 2 and array.dtype != ml_dtypes.bfloat16:
    array = array.view(ml_dtypes.bfloat16)
  return np.ascontiguousarray(array, np.float32).reshape(array.shape)


def write_npz(path: pathlib.Path, tensors: Mapping[str, HostArray]) -> None:
  """Writes an npz as NumPy does, uncompressed."""
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_STORED, allowZip64=True) as archive:
    for name, tensor in tensors.items():
      with archive.open(f'{name}.npy', 'w', force_zip64=True) as member:
        np.lib.format.write_array(member, tensor, allow_pickle=False)


def write_safetensors(path: pathlib.Path, tensors: Mapping[str, HostArray]) -> None:
  """Writes f32 tensors in safetensors' format, in the order of their names, as PyTorch ones."""
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  place = 0
  for name in sorted(tensors):
    header[name] = {'dtype': 'F32', 'shape': list(tensors[name].shape),
                    'data_offsets': [place, place + tensors[name].nbytes]}
    place += tensors[name].nbytes
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  with open(path, 'wb') as file:
    file.write(struct.pack('<Q', len(text)) + text)
    for name in sorted(tensors):
      file.write(np.ascontiguousarray(tensors[name], '<f4').tobytes())


def write_torch(path: pathlib.Path, tensors: Mapping[str, HostArray]) -> None:
  """Writes f32 tensors as `torch.save` of a plain dict does."""
  pickles.write_zip(path, tensors)
