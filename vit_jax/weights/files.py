"""Reads weight files: the format is detected from the content, and tensors become named f32 arrays.

Formats: npz (`archives.py`), safetensors, PyTorch's zip and its older format (`pickles.py`), the msgpack of Flax.
Reading never runs code from a file, and takes memory in proportion to the file's size. Imports neither jax nor a
network.
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
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from vit_jax.core import archives, documents, failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.weights import branches, flax_msgpack, pickle_stack, pickles, safetensors
from vit_jax.weights.branches import Chosen, Tensors

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

T = TypeVar('T')
KINDS = 'npz, safetensors, PyTorch (.pth, .pt, .bin), Flax msgpack'
MOST_NAME = 500  # characters of a tensor's name
_DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, LookupError, TypeError, AttributeError,
           ArithmeticError, RuntimeError)  # RuntimeError: nested too deep, or a zip of another version
"""Errors that readers of damaged files raise, beside OSError with EINVAL (an invalid seek position)."""


class Content(NamedTuple):
  """Numeric tensors of a file by name: f32, but integers and floating point of 8 bits as they are in the file.

  chosen: of which network of the file.
  """
  tensors: dict[str, HostArray]
  chosen: Chosen


def read(path: pathlib.Path) -> dict[str, HostArray]:
  """Returns all tensors of a file as `read_network` does; entries of the file are before a `/` in their names."""
  return _content(path, branches.whole).tensors


def read_network(path: pathlib.Path, is_network: Callable[[Tensors], bool], *, view: str = '') -> Content:
  """Returns one network of a file.

  Args:
    path: of a file.
    is_network, view: see `branches.choose`.

  Raises:
    UserError: the file does not exist, is damaged, or holds no weights; the message names what it holds instead.
  """
  return _content(path, lambda tensors: branches.choose(tensors, is_network, view))


def _content(path: pathlib.Path, choose: pickles.Choose) -> Content:
  def checked(tensors: Tensors) -> Chosen:
    for name in tensors:
      if not name.isprintable() or len(name) > MOST_NAME:
        raise ValueError(f'a tensor has the name {ascii(name)[:60]}')
    if not tensors:
      raise UserError(f'{path}: expected tensors, got a file without any. Check the path.')
    return choose(tensors)

  with _explained(str(path), size := _size(path)):
    tensors, chosen = _repeated(path, lambda file: _read(file, str(path), size, checked))
    found = {name: _as_f32(x) for name, x in tensors.items()}
  return Content(found, chosen)


def verify(path: pathlib.Path, shown_as: str) -> None:
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
        with archives.open_archive(file, size) as archive:
          if _is_torch(archive, shown_as):
            pickles.follow_zip(archive)
          archives.verify(archive)
      case 'safetensors':
        safetensors.read_header(file, size)
      case 'msgpack':
        flax_msgpack.read(file, size)
      case _:
        pickles.follow_old(file, size=size)

  with _explained(shown_as, size := _size(path)):
    _repeated(path, follow)


def _repeated(path: pathlib.Path, work: Callable[[BinaryIO], T]) -> T:
  """Returns what `work` makes of the opened file, from its beginning after each temporary error."""
  def once() -> T:
    with documents.open_file(path) as file:
      return work(file)
  return failures.retried(once, f'reading {path}')


def _size(path: pathlib.Path) -> int:
  def once() -> int:
    with documents.open_file(path) as file:
      return os.fstat(file.fileno()).st_size
  try:
    return failures.retried(once, f'opening {path}')
  except OSError as error:
    raise failures.unreadable(error, str(path)) from error


def _kind(file: BinaryIO, said: str, size: int) -> str:
  """Returns `zip`, `safetensors`, `msgpack` or `old`, detected from the first bytes."""
  start = file.read(4096)
  file.seek(0)
  if start[:4] == b'PK\x03\x04':
    return 'zip'
  if safetensors.is_one(start, size):
    return 'safetensors'
  if start[:2] == b'\x80\x02':
    return 'old'
  if flax_msgpack.is_one(start):
    return 'msgpack'
  raise UserError(f'{said}: expected a weight file ({KINDS}) or the directory of a run or a model, got '
                  f'{describe(start, size)}. Check the path.')


def _read(file: BinaryIO, said: str, size: int, choose: pickles.Choose) -> tuple[Tensors, Chosen]:
  match _kind(file, said, size):
    case 'zip':
      with archives.open_archive(file, size) as archive:
        if _is_torch(archive, said):
          return pickles.read_zip(archive, choose)
        found = archives.read_arrays(archive)
    case 'safetensors':
      found = safetensors.read(file, size)
    case 'msgpack':
      found = flax_msgpack.read(file, size)
    case _:
      return pickles.read_old(file, choose, size=size)
  chosen = choose(found)
  return {new: found[name] for new, name in chosen.names.items()}, chosen


def _is_torch(archive: zipfile.ZipFile, said: str) -> bool:
  """Whether an archive is PyTorch's rather than an npz. Raises UserError if it is neither."""
  inside = archive.namelist()
  if any(name == 'data.pkl' or name.endswith('/data.pkl') for name in inside):
    return True
  if any(name.endswith('.npy') for name in inside):
    return False
  shown = ', '.join(ascii(name)[1:-1][:60] for name in inside[:4]) or 'nothing'
  raise UserError(f'{said}: expected a weight file ({KINDS}), got a zip of {shown}. Give the weight file in it.')


_TEXTS = {
    (b'<!doctype', b'<html', b'<head', b'<?xml'):
        'a web page, as a server sends it for a file that is missing or not public',
    (b'version https://git-lfs',): 'a pointer of Git LFS; fetch the file itself with `git lfs pull`',
    (b'{', b'['): 'JSON'}
_BINARIES = {
    b'\x93NUMPY': 'a single NumPy array', b'\x89HDF': 'HDF5, as Keras writes it',
    b'GGUF': 'GGUF, whose weights are quantized; use those from before the quantization',
    b'\x1f\x8b': 'a file compressed by gzip'}
"""Files that hold no weights by their first bytes; those of `_TEXTS` in lower case and without space before them."""


def describe(start: bytes, size: int) -> str:
  """Returns a description of a file that holds no weights, detected from its first bytes."""
  if not size:
    return 'an empty file'
  text = start.lstrip(b'\xef\xbb\xbf \t\r\n').lower()
  for prefixes, what in _TEXTS.items():
    if text.startswith(prefixes):
      return what
  for prefix, what in _BINARIES.items():
    if start.startswith(prefix):
      return what
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
      raise failures.unreadable(error, said) from error
    reason = (str(error) or type(error).__name__).rstrip('.')
    raise UserError(f'{said}: expected a whole weight file, got {size:,} bytes that are damaged or cut short: '
                    f'{reason}. Fetch it again.') from error


def _as_f32(array: HostArray) -> HostArray:
  """Returns an array of floating point in f32, others as they are.

  Two-byte void arrays are bf16 that NumPy saved without its dtype. Integers and floating point of 8 bits can be numbers
  that mean something with a scale only, which `tables.read` refuses as parameters.
  """
  if array.dtype.kind == 'V' and array.dtype.itemsize == 2 and array.dtype != ml_dtypes.bfloat16:
    array = array.view(ml_dtypes.bfloat16)
  if array.dtype.kind in 'iub' or array.dtype.itemsize < 2:
    return np.require(array, None, ['C', 'A'])
  with np.errstate(over='ignore'):  # values beyond f32 become infinite; `loading` warns about them
    return np.require(array, np.float32, ['C', 'A'])


def write_npz(path: pathlib.Path, tensors: Mapping[str, HostArray]) -> None:
  """Writes an npz as NumPy does, uncompressed."""
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_STORED, allowZip64=True) as archive:
    for name, tensor in tensors.items():
      with archive.open(f'{name}.npy', 'w', force_zip64=True) as member:
        np.lib.format.write_array(member, tensor, allow_pickle=False)


write_safetensors, write_torch = safetensors.write, pickles.write_zip
