"""Reads weight files: the format is detected from the content, and tensors become named f32 arrays.

Formats: npz (`archives.py`), safetensors, PyTorch's zip and its older format (`pickles.py`). Reading never runs code
from a file, and takes memory in proportion to the file's size. Imports neither jax nor a network.
"""
from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import ml_dtypes
import numpy as np

from vit_jax.core import json_text, os_errors, retrying
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.weights import archives, pickle_stack, pickles, safetensors

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

T = TypeVar('T')
KINDS = 'npz, safetensors, PyTorch (.pth, .pt, .bin)'
MOST_NAME = 500  # characters of a tensor's name
MOST_JSON_BYTES = 16 << 20  # of a file beside the weights: 21,000 class names take 0.5 MB
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, LookupError, TypeError, AttributeError,
           ArithmeticError, RuntimeError)  # RuntimeError: nested too deep, or a zip of another version
"""Errors that readers of damaged files raise, beside OSError with EINVAL (an invalid seek position)."""


def read(path: pathlib.Path, *, branch: str = '') -> dict[str, HostArray]:
  """Returns all numeric tensors of a file by name, in f32.

  Args:
    path: of a file.
    branch: the network to read from a file with several (`student`, `teacher`); '' = the one meant for inference.

  Raises:
    UserError: the file does not exist, is damaged, or holds no weights; the message names what it holds instead.
  """
  with _explained(str(path), size := _size(path)):
    tensors = _repeated(path, lambda file: _read(file, str(path), size, branch))
    for name in tensors:
      if not name.isprintable() or len(name) > MOST_NAME:
        raise ValueError(f'a tensor has the name {ascii(name)[:60]}')
    found = {name: _as_f32(x) for name, x in tensors.items() if x.dtype.kind in 'fiubV'}
  if not found:
    raise UserError(f'{path}: expected tensors, got a file without any. Check the path.')
  return found


def verify(path: pathlib.Path, *, shown_as: str) -> None:
  """Verifies a file and its checksums without keeping its tensors.

  Args:
    path: of a file.
    shown_as: name of the file in messages, such as the address of its download.

  Raises:
    UserError: the file is not a weight file, or is damaged.
  """
  def follow(file: BinaryIO) -> None:
    match _kind(file, shown_as, size):
      case 'zip':
        with archives.opened(file, size) as archive:
          if _is_torch(archive, shown_as):
            pickles.follow_zip(archive)
          archives.verify(archive)
      case 'safetensors':
        safetensors.read_header(file, size)
      case _:
        pickles.follow_old(file, size=size)

  with _explained(shown_as, size := _size(path)):
    _repeated(path, follow)


def read_json(path: pathlib.Path) -> Any:
  """Returns the content of a JSON sidecar.

  Raises:
    ValueError: the file is not JSON, or larger than `MOST_JSON_BYTES`.
    OSError: the file cannot be read.
  """
  data = _repeated(path, lambda file: file.read(MOST_JSON_BYTES + 1))
  if len(data) > MOST_JSON_BYTES:
    raise ValueError(f'it is larger than {MOST_JSON_BYTES >> 20} MiB')
  return json_text.parse(data)


def _repeated(path: pathlib.Path, work: Callable[[BinaryIO], T]) -> T:
  """Returns what `work` makes of the opened file, from its beginning after each temporary error."""
  def once() -> T:
    with open(path, 'rb') as file:
      return work(file)
  return retrying.retried(once, f'reading {path}')


def _size(path: pathlib.Path) -> int:
  def once() -> int:
    with open(path, 'rb') as file:
      return os.fstat(file.fileno()).st_size
  try:
    return retrying.retried(once, f'opening {path}')
  except OSError as error:
    raise os_errors.kind(error)(f'{path}: expected a weight file, got "{error.strerror or error}". Check the '
                                'path.') from error


def _kind(file: BinaryIO, said: str, size: int) -> str:
  """Returns `zip`, `safetensors` or `old`, detected from the first bytes."""
  start = file.read(4096)
  file.seek(0)
  if start[:4] == b'PK\x03\x04':
    return 'zip'
  if safetensors.is_one(start, size):
    return 'safetensors'
  if start[:2] == b'\x80\x02':
    return 'old'
  raise UserError(f'{said}: expected a weight file ({KINDS}) or the directory of a run or a model, got '
                  f'{describe(start, size)}. Check the path.')


def _read(file: BinaryIO, said: str, size: int, branch: str) -> Mapping[str, HostArray]:
  match _kind(file, said, size):
    case 'zip':
      with archives.opened(file, size) as archive:
        return pickles.read_zip(archive, branch) if _is_torch(archive, said) else archives.read_arrays(archive)
    case 'safetensors':
      return safetensors.read(file, size)
    case _:
      return pickles.read_old(file, branch, size=size)


def _is_torch(archive: zipfile.ZipFile, said: str) -> bool:
  """Whether an archive is PyTorch's rather than an npz. Raises UserError if it is neither."""
  inside = archive.namelist()
  if any(name == 'data.pkl' or name.endswith('/data.pkl') for name in inside):
    return True
  if any(name.endswith('.npy') for name in inside):
    return False
  shown = ', '.join(ascii(name)[1:-1][:60] for name in inside[:4]) or 'nothing'
  raise UserError(f'{said}: expected a weight file ({KINDS}), got a zip of {shown}. Give the weight file in it.')


def describe(start: bytes, size: int) -> str:
  """Returns a description of a file that holds no weights, detected from its first bytes."""
  text = start.lstrip(b'\xef\xbb\xbf \t\r\n').lower()
  if not size:
    return 'an empty file'
  if text.startswith((b'<!doctype', b'<html', b'<head', b'<?xml')):
    return 'a web page, as a server sends it for a file that is missing or not public'
  if text.startswith(b'version https://git-lfs'):
    return 'a pointer of Git LFS; fetch the file itself with `git lfs pull`'
  if text.startswith((b'{', b'[')):
    return 'JSON'
  if start.startswith(b'\x93NUMPY'):
    return 'a single NumPy array'
  if start.startswith(b'\x89HDF'):
    return 'HDF5, as Keras writes it'
  if start.startswith(b'\x1f\x8b'):
    return 'a file compressed by gzip'
  with contextlib.suppress(UnicodeDecodeError):
    return f'text: {" ".join(start[:400].decode().split())[:60]!r}'
  return f'{size:,} bytes that begin with {start[:8]!r}'


@contextlib.contextmanager
def _explained(said: str, size: int) -> Iterator[None]:
  """Converts the errors of readers about damaged files to `UserError`."""
  try:
    yield
  except (UserError, TemporaryError):
    raise
  except pickle_stack.Refused as error:
    raise UserError(f'{said}: expected weights alone, got {error}') from None
  except (*_DAMAGE, OSError) as error:
    if isinstance(error, OSError) and error.errno != errno.EINVAL:
      raise os_errors.kind(error)(f'{said}: expected to read it, got "{error.strerror or error}". '
                                  f'{os_errors.find(error) or "Run the same command again."}') from error
    reason = (str(error) or type(error).__name__).rstrip('.')
    raise UserError(f'{said}: expected a whole weight file, got {size:,} bytes that are damaged or cut short: '
                    f'{reason}. Fetch it again.') from error


def _as_f32(array: HostArray) -> HostArray:
  """Returns the array in f32; two-byte void arrays are bf16 that NumPy saved without its dtype."""
  if array.dtype.kind == 'V' and array.dtype.itemsize == 2 and array.dtype != ml_dtypes.bfloat16:
    array = array.view(ml_dtypes.bfloat16)
  with np.errstate(over='ignore'):  # values beyond f32 become infinite; `loading` warns about them
    return np.require(array, np.float32, ['C', 'A'])


def write_npz(path: pathlib.Path, tensors: Mapping[str, HostArray]) -> None:
  """Writes an npz as NumPy does, uncompressed."""
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_STORED, allowZip64=True) as archive:
    for name, tensor in tensors.items():
      with archive.open(f'{name}.npy', 'w', force_zip64=True) as member:
        np.lib.format.write_array(member, tensor, allow_pickle=False)


def write_safetensors(path: pathlib.Path, tensors: Mapping[str, HostArray]) -> None:
  """Writes f32 tensors in the safetensors format in the order of their names, marked as PyTorch's."""
  safetensors.write(path, tensors)


def write_torch(path: pathlib.Path, tensors: Mapping[str, HostArray]) -> None:
  """Writes f32 tensors as `torch.save` of a plain dict does."""
  pickles.write_zip(path, tensors)
