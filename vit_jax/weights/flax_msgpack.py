"""Reads the msgpack of `flax.serialization`, as in `checkpoint_N` of vision_transformer and `flax_model.msgpack`.

The format is maps of texts, numbers and arrays. An array is the extension 1: shape, name of the dtype, bytes; one above
1 GiB is a map of several. Reading runs nothing, and limits what a small file can claim.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import msgpack
import numpy as np

from vit_jax.weights import safetensors

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

DTYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in safetensors.DTYPES.values()}
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # extensions of Flax
_MOST_ITEMS = 1_000_000  # values of all maps and lists
_MOST_LIST = 1000  # the reader allocates a list before it has its values
_MOST_MAP = 10_000
_CHUNKED = '__msgpack_chunked_array__'


def is_one(start: bytes) -> bool:
  """Returns whether a file that starts with `start` begins as a map whose first key is a text."""
  header = {**dict.fromkeys(range(0x81, 0x90), 1), 0xde: 3, 0xdf: 5}.get(start[0] if start else 0, 0)
  first = start[header] if 0 < header < len(start) else 0
  return 0xa0 <= first <= 0xbf or first in (0xd9, 0xda, 0xdb)


def read(file: BinaryIO, size: int) -> dict[str, HostArray]:
  """Returns all arrays of a file in their own dtypes; `/` in names is between the keys of maps in maps.

  Args:
    file: at its start.
    size: of the file, bytes.

  Raises:
    ValueError: the file is damaged, or has something that Flax does not write.
  """
  left = [_MOST_ITEMS]

  def count(items: Any) -> Any:
    left[0] -= 1 + len(items)
    if left[0] < 0:
      raise ValueError(f'it has more than {_MOST_ITEMS:,} values')
    return items

  unpacker = msgpack.Unpacker(
      file, raw=False, ext_hook=_extension, object_hook=count, list_hook=count, max_buffer_size=max(size, 1),
      max_array_len=_MOST_LIST, max_map_len=_MOST_MAP, max_ext_len=size, max_str_len=size, max_bin_len=size)
  try:
    content = unpacker.unpack()
  except msgpack.exceptions.OutOfData:
    raise ValueError('its values end early') from None
  except msgpack.exceptions.UnpackException as error:
    raise ValueError(f'no msgpack: {error or type(error).__name__}') from None
  if unpacker.tell() != size:
    raise ValueError(f'{size - unpacker.tell():,} bytes follow its values')
  found: dict[str, HostArray] = {}
  for name, array in _flat(content, ''):
    if name in found:
      raise ValueError(f'it has {name[:60]!r} twice')
    found[name] = array
  return found


def _flat(content: Any, path: str) -> Iterator[tuple[str, HostArray]]:
  if isinstance(content, np.ndarray):
    yield path.removesuffix('/'), content
  elif isinstance(content, dict) and _CHUNKED in content:
    yield path.removesuffix('/'), _joined(content)
  elif isinstance(content, dict):
    for key, value in content.items():
      if not isinstance(key, str):
        raise ValueError(f'it has a key that is no text: {key[:20]!r}')
      yield from _flat(value, f'{path}{key}/')
  elif isinstance(content, msgpack.Timestamp):
    raise ValueError('it has a time, which Flax does not write')


def _extension(code: int, data: bytes) -> Any:
  """Returns the value of an extension; only arrays and single numbers of NumPy are used."""
  if code == _COMPLEX:
    return None
  if code not in (_ARRAY, _SCALAR):
    raise ValueError(f'it has the extension {code}, which Flax does not write')
  parts = msgpack.unpackb(data, max_array_len=safetensors.MOST_AXES, max_map_len=0, raw=False)
  if type(parts) is not list or len(parts) != 3:
    raise ValueError('it has an array that is not a shape, a dtype and numbers')
  shape, kind, numbers = parts
  if type(shape) is not list or not all(type(n) is int and 0 <= n < 2**63 for n in shape):
    raise ValueError(f'it has an array with a shape that cannot be: {ascii(shape)[:60]}')
  dtype = DTYPES.get(kind) if isinstance(kind, str) else None
  if dtype is None or type(numbers) is not bytes:
    raise ValueError(f'it has an array of the dtype {ascii(kind)[:40]}; known are {", ".join(DTYPES)}')
  if math.prod(shape) * dtype.itemsize != len(numbers):
    raise ValueError(f'{dtype} {shape} takes {math.prod(shape) * dtype.itemsize:,} bytes, and {len(numbers):,} are '
                     'there')
  return np.frombuffer(numbers, dtype).reshape(shape)


def _joined(content: dict[Any, Any]) -> HostArray:
  """Returns an array that Flax wrote in pieces of 1 GiB."""
  shape, chunks = content.get('shape'), content.get('chunks')
  if not isinstance(shape, dict) or not isinstance(chunks, dict) or not chunks or not all(
      isinstance(n, int) for n in shape.values()) or not all(
          isinstance(x, np.ndarray) and x.ndim == 1 for x in chunks.values()):
    raise ValueError('it has an array in pieces that are not as Flax writes them')
  flat = np.concatenate([chunks[str(i)] for i in range(len(chunks))])
  return flat.reshape([shape[str(i)] for i in range(len(shape))])
