"""Reads zip archives, and NumPy arrays in `.npz` and `.npy`, with limits: a small file cannot fill the memory.

`read_npz` and `map_npy` read files by their path. For an archive that holds more than arrays, `opened` checks its
members, and `read`, `read_arrays` or `verify` then read them: the declared sizes are compared with the size of the file
before anything is decompressed, and no member is decompressed beyond its declared size. No other module reads such
files (`tests/test_house.py`), and this one does not know what the arrays are for.
"""
from __future__ import annotations

import ast
import contextlib
import math
import mmap
import os
import pathlib
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from vit_jax.core import documents

if TYPE_CHECKING:
  from vit_jax.core.types import HostArray

MOST_EXPANSION = 16
"""Limit of the ratio of an archive's contents to its size. Trained f32 weights compress by a factor of about 1.1, a
network with 90 % zeros by 10; deflate can reach 1,000."""
FREE_BYTES = 64 << 20
"""Contents that an archive of any size may have, such as an array of zeros or a tiny network at initialization."""
MOST_HEADER_BYTES = 10_000  # of an array, as NumPy's own limit
MOST_AXES = 64  # as in NumPy
_PIECE = 1 << 20
_LOCAL, _MOST_GAP = b'PK\3\4', 64 << 10  # between two members, such as a data descriptor
_MAGIC = b'\x93NUMPY'
_LENGTHS = {(1, 0): '<H', (2, 0): '<I'}  # of the header; version 3 is for structured arrays, which weights do not use


@contextlib.contextmanager
def opened(file: BinaryIO, size: int) -> Iterator[zipfile.ZipFile]:
  """Opens an archive after checking that its members are safe to read.

  Args:
    file: at its start.
    size: of the file, bytes.

  Raises:
    ValueError: members are encrypted, share a name, use an unsupported compression, are missing in the directory, or
      are larger than `MOST_EXPANSION` and `FREE_BYTES` allow.
    zipfile.BadZipFile: the archive is damaged.
  """
  with zipfile.ZipFile(file) as archive:
    members = archive.infolist()
    for member in members:
      if member.flag_bits & 0x1:
        raise ValueError(f'{documents.shown(member.filename)} is encrypted')
      if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f'{documents.shown(member.filename)} is compressed by method {member.compress_type}, and only '
                         'deflate is read')
    if len({member.filename for member in members}) < len(members):
      raise ValueError('it has two members of the same name')
    _check_complete(file, archive, size)
    inside, packed = sum(member.file_size for member in members), sum(member.compress_size for member in members)
    if packed > size:
      raise ValueError(f'its members take {packed:,} of its {size:,} bytes: they overlap')
    if inside > (most := max(FREE_BYTES, MOST_EXPANSION * size)):
      raise ValueError(f'its members hold {inside:,} bytes, and {most:,} are allowed for a file of this size '
                       f'({MOST_EXPANSION} times as many); save it without compression')
    yield archive


def _check_complete(file: BinaryIO, archive: zipfile.ZipFile, size: int) -> None:
  """Raises ValueError if the directory lists other members than the end record counts, or not all that are there.

  `zipfile` compares neither: a file whose directory was damaged would be read without some of its arrays.
  """
  file.seek(max(0, size - 2**16 - 200))
  tail = file.read()
  end = tail.rfind(b'PK\5\6')  # the end record
  count, = struct.unpack('<H', tail[end + 10:end + 12])
  large = tail.rfind(b'PK\6\6', 0, end)
  if count == 0xFFFF and large >= 0:
    count, = struct.unpack('<Q', tail[large + 32:large + 40])
  members = sorted(archive.infolist(), key=lambda one: one.header_offset)
  if count != len(members):
    raise ValueError(f'its end record counts {count:,} members, and its directory lists {len(members):,}')
  at = members[0].header_offset if members else archive.start_dir
  if at:
    file.seek(0)
    if file.read(4) == _LOCAL:
      at = 0
  for offset, length in [*((one.header_offset, one.compress_size) for one in members), (archive.start_dir, -1)]:
    if at < offset:
      file.seek(at)
      if _LOCAL in file.read(min(offset - at, _MOST_GAP)):
        raise ValueError(f'a member at byte {at:,} is not listed in its directory')
    if length >= 0:
      file.seek(offset)
      header = file.read(30)
      if len(header) < 30 or header[:4] != _LOCAL:
        raise ValueError(f'there is no member at byte {offset:,}')
      at = offset + 30 + sum(struct.unpack('<HH', header[26:])) + length
      if at > archive.start_dir:
        raise ValueError(f'the member at byte {offset:,} ends behind the directory')


def read(archive: zipfile.ZipFile, name: str) -> bytearray:
  """Returns the contents of a member and verifies its checksum.

  Raises:
    KeyError: there is no member of this name.
    ValueError: the member is shorter than declared.
    zipfile.BadZipFile: the checksum differs.
  """
  found, at = bytearray(archive.getinfo(name).file_size), 0
  whole = memoryview(found)
  for piece in _pieces(archive, name):
    whole[at:at + len(piece)] = piece
    at += len(piece)
  return found


def verify(archive: zipfile.ZipFile) -> None:
  """Verifies the checksums of all members without keeping their contents. Raises the same errors as `read`."""
  for name in archive.namelist():
    for _ in _pieces(archive, name):
      pass


def _pieces(archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
  """Yields a member's bytes up to its declared size, piece by piece: one read would first decompress all of them."""
  declared, num = archive.getinfo(name).file_size, 0
  with archive.open(name) as member:
    while piece := member.read(_PIECE):
      num += len(piece)
      yield piece
  if num < declared:
    raise ValueError(f'{documents.shown(name)} ends after {num:,} of {declared:,} bytes')


def read_npz(path: str | os.PathLike[str], names: Collection[str] | None = None) -> dict[str, HostArray]:
  """Returns the arrays of an `.npz`, also those of text, by name. `names`: those that are read; None = all.

  Raises:
    OSError: it cannot be read.
    ValueError: it is damaged, exceeds a limit, or holds Python objects.
  """
  with documents.open_file(path) as file:
    try:
      with opened(file, os.fstat(file.fileno()).st_size) as archive:
        return {name.removesuffix('.npy'): array(read(archive, name)) for name in archive.namelist()
                if name.endswith('.npy') and (names is None or name.removesuffix('.npy') in names)}
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError) as error:
      raise ValueError(f'a damaged archive: {error}') from None


def map_npy(path: str | os.PathLike[str]) -> HostArray:
  """Returns the memory map of the array of an `.npy` file.

  Raises:
    OSError: it cannot be read.
    ValueError: it is damaged, empty, or holds Python objects.
  """
  with documents.open_file(path) as file:
    if not pathlib.Path(path).is_file() or not os.fstat(file.fileno()).st_size:
      raise ValueError('it is empty, or not a file')
    return array(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_arrays(archive: zipfile.ZipFile) -> dict[str, HostArray]:
  """Returns the numeric arrays of an npz by name; arrays of text and dates are skipped.

  Raises:
    ValueError: an array is damaged, or holds Python objects.
    zipfile.BadZipFile: a checksum differs.
  """
  found: dict[str, HostArray] = {}
  for name in archive.namelist():
    if name.endswith('.npy'):
      try:
        one = array(read(archive, name))
      except ValueError as error:
        raise ValueError(f'{documents.shown(name)}: {error}') from None
      kind = one.dtype
      is_short = kind.kind == 'V' and kind.itemsize in (1, 2) and not kind.names and not kind.subdtype  # of ml_dtypes
      found |= {name.removesuffix('.npy'): one} if kind.kind in 'fiub' or is_short else {}
  return found


def array(data: bytearray | bytes | mmap.mmap | memoryview) -> HostArray:
  """Returns the array of an `.npy` file as a view of its bytes.

  Raises:
    ValueError: it is damaged, or holds Python objects.
  """
  length = _LENGTHS.get((data[6], data[7])) if data[:6] == _MAGIC and len(data) > 12 else None
  if not length:
    raise ValueError('it does not begin as a NumPy array')
  start = 8 + struct.calcsize(length)
  count, = struct.unpack_from(length, data, 8)
  if count > MOST_HEADER_BYTES:
    raise ValueError(f'its header takes {count:,} bytes; at most {MOST_HEADER_BYTES:,} are read')
  dtype, is_fortran, shape = _header(bytes(data[start:start + count]).decode('latin-1'))
  if dtype.hasobject:
    raise ValueError('it holds Python objects, which are not read')
  if math.prod(shape) * dtype.itemsize != len(data) - start - count:
    raise ValueError(f'{dtype}{list(shape)} takes {math.prod(shape) * dtype.itemsize:,} bytes, and '
                     f'{len(data) - start - count:,} are there')
  flat = np.frombuffer(data, dtype, math.prod(shape), start + count) if math.prod(shape) else np.zeros(0, dtype)
  return flat.reshape(shape, order='F' if is_fortran else 'C')


def _header(text: str) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
  """Returns the dtype, whether the order is Fortran's, and the shape."""
  try:
    found = ast.literal_eval(re.sub(r'(?<=\d)L\b', '', text.strip()))  # Python 2's suffix of long integers
    descr, is_fortran, shape = found['descr'], found['fortran_order'], found['shape']
    dtype = np.dtype([tuple(field) for field in descr] if type(descr) is list else descr)
  except (ValueError, SyntaxError, TypeError, KeyError, IndexError, RecursionError, MemoryError) as error:
    raise ValueError(f'its header cannot be read: {text[:60]!r}') from error
  if type(is_fortran) is not bool or type(shape) is not tuple or len(shape) > MOST_AXES or not all(
      type(n) is int and 0 <= n < 2**63 for n in shape):
    raise ValueError(f'its header describes an array that cannot be: {text[:60]!r}')
  return dtype, is_fortran, shape
