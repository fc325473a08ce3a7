"""Reads and writes the safetensors format: a JSON header, then the bytes of all tensors in sequence.

The reader refuses what the reader of the package `safetensors` refuses (README of the format, "Format"): offsets that
overlap, leave gaps or do not end with the file, sizes that do not match dtype and shape, and large headers. It also
refuses duplicate names, which the format forbids; the package uses the last one.

The package itself (0.8.0) is not used: it allows headers of 100 MB, does not name the wrong tensor, needs twice the
memory, cannot read 8-bit floats into NumPy, and reports a full disk without an `OSError`.
"""
from __future__ import annotations

import json
import math
import pathlib
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from vit_jax.core import documents
from vit_jax.weights.pickle_stack import Refused

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

DTYPES: dict[str, Any] = {
    'F64': np.float64, 'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16, 'I64': np.int64,
    'I32': np.int32, 'I16': np.int16, 'I8': np.int8, 'U64': np.uint64, 'U32': np.uint32, 'U16': np.uint16,
    'U8': np.uint8, 'BOOL': np.bool_, 'F8_E4M3': ml_dtypes.float8_e4m3fn, 'F8_E5M2': ml_dtypes.float8_e5m2}
_SHORT = ('F4', 'F6_', 'F8_E8', 'I4', 'U4')
MOST_HEADER_BYTES = 16 << 20
"""Enough for about 100,000 tensors. The format allows 100 MB, for which Python's JSON can need 2 GB of memory."""
MOST_AXES = 64  # as in NumPy


class Entry(NamedTuple):
  """A tensor in a header; its bytes are `start` to `end` of the data."""
  name: str
  dtype: np.dtype[Any]
  shape: tuple[int, ...]
  start: int
  end: int


def is_one(start: bytes, size: int) -> bool:
  """Whether a file of `size` bytes that begins with `start` may be in the safetensors format."""
  return len(start) > 9 and struct.unpack('<Q', start[:8])[0] < min(size, MOST_HEADER_BYTES) and start[8:9] == b'{'


def read(file: BinaryIO, size: int) -> dict[str, HostArray]:
  """Returns all tensors as views of one array of the file's bytes.

  Args:
    file: at its start.
    size: of the file, bytes.

  Raises:
    ValueError: the file is damaged, or violates the format.
  """
  entries = read_header(file, size)
  data = np.fromfile(file, np.uint8)
  if entries and len(data) < entries[-1].end:
    raise ValueError('it became shorter while it was read')
  return {e.name: data[e.start:e.end].view(e.dtype).reshape(e.shape) for e in entries}


def read_header(file: BinaryIO, size: int) -> list[Entry]:
  """Returns the tensors in the order of their bytes; the file is then at the first of these. Raises as `read`."""
  start = file.read(8)
  length = struct.unpack('<Q', start)[0] if len(start) == 8 else size
  if length > min(size - 8, MOST_HEADER_BYTES):
    raise ValueError(f'its header has {length:,} bytes, the file {size:,}; at most {MOST_HEADER_BYTES:,} are read')
  text = file.read(length)
  try:
    header = documents.parse(text)
  except ValueError as error:
    raise ValueError(f'a header with {error}') from None
  if type(header) is not dict:
    raise ValueError('its header is not a JSON object')
  notes = header.pop('__metadata__', None) or {}
  if type(notes) is not dict or not all(type(value) is str for value in notes.values()):
    raise ValueError('its __metadata__ is not a table of texts')
  entries = sorted((_entry(name, value) for name, value in header.items()), key=lambda e: (e.start, e.end))
  at = 0
  for entry in entries:
    if entry.start != at:
      raise ValueError(f'{entry.name} begins at byte {entry.start:,}, the tensor before it ends at {at:,}')
    at = entry.end
  if at != size - 8 - length:
    raise ValueError(f'its tensors take {at:,} bytes, and {size - 8 - length:,} are there')
  return entries


def _entry(name: str, value: Any) -> Entry:
  """Parses one item of a header. Raises ValueError."""
  if type(value) is not dict or not {'dtype', 'shape', 'data_offsets'} <= value.keys():
    raise ValueError(f'{name} is described without dtype, shape or data_offsets')
  kind, shape, offsets = value['dtype'], value['shape'], value['data_offsets']
  if type(kind) is str and kind.startswith(_SHORT):
    raise Refused(f'a tensor of the dtype {ascii(kind)[1:-1][:20]}: the file is quantized. Use the weights from before '
                  'the quantization.')
  if type(kind) is not str or kind not in DTYPES:
    raise ValueError(f'{name}: expected a dtype of {", ".join(DTYPES)}, got {ascii(kind)[:40]}')
  if not _are_sizes(shape) or not _are_sizes(offsets) or len(shape) > MOST_AXES or len(offsets) != 2:
    raise ValueError(f'{name} has a shape or offsets that cannot be: {ascii(shape)[:60]}, {ascii(offsets)[:60]}')
  dtype = np.dtype(DTYPES[kind])
  if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
    raise ValueError(f'{name}: {kind} {shape} takes {math.prod(shape) * dtype.itemsize:,} bytes, its offsets give '
                     f'{offsets[1] - offsets[0]:,}')
  return Entry(name, dtype, tuple(shape), *offsets)


def _are_sizes(values: Any) -> bool:
  return type(values) is list and len(values) <= MOST_AXES and all(type(n) is int and 0 <= n < 2**63 for n in values)


def write(path: pathlib.Path, tensors: Mapping[str, HostArray]) -> None:
  """Writes f32 tensors in the order of their names, marked as PyTorch's."""
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
