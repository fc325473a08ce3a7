"""Reads zip archives, and NumPy arrays in `.npz` and `.npy`, with limits: a small file cannot fill the memory.

Callers with the path of such a file, such as `data/answers.py`, call `read_npz` or `map_npy`. `weights/files.py` and
`weights/pickles.py` read archives that hold more than arrays: `open_archive` checks the members, and `read_member`,
`read_arrays` or `verify` then read them. `data/image/channels.py` has the bytes of an `.npy` and calls `parse_npy`.

Declared sizes are compared with the size of the file before anything is decompressed, and no member is decompressed
beyond its declared size. No other module reads such files (`tests/test_house.py`), and this one does not know what the
arrays are for.

Formats: PKWARE's APPNOTE.TXT, section 4.3; numpy.lib.format.
"""
from __future__ import annotations

import ast
import contextlib
import itertools
import math
import mmap
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Sequence
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
_PIECE_BYTES = 1 << 20
_MEMBER, _MEMBER_BYTES = b'PK\3\4', 30  # the local header of a member: its signature, and its size without the name
_DESCRIPTOR, _MOST_DESCRIPTOR_BYTES = b'PK\7\10', 24  # behind a member that was written to a stream
_END, _END_BYTES = b'PK\5\6', 22  # the end record: its signature, and its size without a comment
_END_64 = b'PK\6\6'  # the end record of ZIP64
_MOST_END_BYTES = 2**16 + 200  # the longest comment, both end records and the locator between them
_MOST_GAP_BYTES = 64 << 10  # bytes behind a member in which another one is looked for
_NPY = b'\x93NUMPY'
_NPY_LENGTHS = {1: '<H', 2: '<I'}  # of the header by version; 3 is for structured arrays, which weights do not use


@contextlib.contextmanager
def open_archive(file: BinaryIO, size: int) -> Iterator[zipfile.ZipFile]:
  """Opens an archive after checking that its members are safe to read.

  Args:
    file: at its start.
    size: of the file, bytes.

  Raises:
    ValueError: members are encrypted, share a name, use an unsupported compression, are not listed in the directory, or
      are larger than `MOST_EXPANSION` and `FREE_BYTES` allow.
    zipfile.BadZipFile: the archive is damaged.
  """
  with zipfile.ZipFile(file) as archive:
    _check_members(archive.infolist(), size)
    _check_directory(file, archive, size=size)
    yield archive


def _check_members(members: Sequence[zipfile.ZipInfo], size: int) -> None:
  """Raises ValueError if members in a file of `size` bytes are of an unsupported form, or hold more than is allowed."""
  for member in members:
    if member.flag_bits & 0x1:
      raise ValueError(f'{documents.shown(member.filename)} is encrypted')
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
      raise ValueError(f'{documents.shown(member.filename)} is compressed by method {member.compress_type}, and only '
                       'deflate is read')
  if len({member.filename for member in members}) < len(members):
    raise ValueError('it has two members of the same name')
  packed, unpacked = sum(member.compress_size for member in members), sum(member.file_size for member in members)
  if packed > size:
    raise ValueError(f'its members take {packed:,} of its {size:,} bytes: they overlap')
  if unpacked > (most := max(FREE_BYTES, MOST_EXPANSION * size)):
    raise ValueError(f'its members hold {unpacked:,} bytes, and {most:,} are allowed for a file of this size '
                     f'({MOST_EXPANSION} times as many); save it without compression')


def _check_directory(file: BinaryIO, archive: zipfile.ZipFile, *, size: int) -> None:
  """Raises ValueError if the directory does not list exactly the members that are in the file.

  `zipfile` does not check it: a file whose directory was damaged would be read without some of its arrays. The number
  of listed members is compared with that in the end record, and the bytes between the listed members must not contain
  another one. Before the first member there may be a program, so that only the start of the file is compared.
  """
  file.seek(max(0, size - _MOST_END_BYTES))
  count, members = _count_members(file.read()), sorted(archive.infolist(), key=lambda member: member.header_offset)
  if count != len(members):
    raise ValueError(f'its end record counts {count:,} members, and its directory lists {len(members):,}')
  end = members[0].header_offset if members else archive.start_dir
  file.seek(0)
  if end and file.read(len(_MEMBER)) == _MEMBER:
    raise ValueError('a member at byte 0 is not listed in its directory')
  for member in members:
    _check_gap(file, end, member.header_offset)
    end = _find_end(file, member)
    if end > archive.start_dir:
      raise ValueError(f'the member at byte {member.header_offset:,} ends behind the directory')
  _check_gap(file, end, archive.start_dir)


def _count_members(tail: bytes) -> int:
  """Returns the number of members in the end record, given the end of the file."""
  end = len(tail) - _END_BYTES  # of an archive without a comment; the record itself may contain the signature
  if tail[end:end + len(_END)] != _END or tail[-2:] != b'\0\0':
    end = tail.rfind(_END)
  count, = struct.unpack_from('<H', tail, end + 10)
  end_64 = tail.rfind(_END_64, 0, end)
  if count == 0xFFFF and end_64 >= 0:
    count, = struct.unpack_from('<Q', tail, end_64 + 32)
  return int(count)


def _check_gap(file: BinaryIO, start: int, stop: int) -> None:
  """Raises ValueError if a member begins between two members, within the first `_MOST_GAP_BYTES`."""
  if start < stop:
    file.seek(start)
    if _MEMBER in file.read(min(stop - start, _MOST_GAP_BYTES)):
      raise ValueError(f'a member at byte {start:,} is not listed in its directory')


def _find_end(file: BinaryIO, member: zipfile.ZipInfo) -> int:
  """Returns the byte behind a member and its data descriptor. Raises ValueError if there is no member at its offset."""
  file.seek(member.header_offset)
  header = file.read(_MEMBER_BYTES)
  if len(header) < _MEMBER_BYTES or not header.startswith(_MEMBER):
    raise ValueError(f'there is no member at byte {member.header_offset:,}')
  end = member.header_offset + _MEMBER_BYTES + sum(struct.unpack_from('<HH', header, 26)) + member.compress_size
  file.seek(end)
  following = file.read(_MOST_DESCRIPTOR_BYTES) if member.flag_bits & 0x8 else b''
  sizes = (member.compress_size, member.file_size)
  for signature, num_bytes in itertools.product((_DESCRIPTOR, b''), (8, 4)):  # both are optional in the format
    numbers = b''.join(size.to_bytes(8, 'little')[:num_bytes] for size in sizes)
    descriptor = signature + member.CRC.to_bytes(4, 'little') + numbers
    if following.startswith(descriptor):
      return end + len(descriptor)
  return end


def read_member(archive: zipfile.ZipFile, name: str) -> bytearray:
  """Returns the contents of a member and verifies its checksum.

  Raises:
    KeyError: there is no member of this name.
    ValueError: the member is shorter than declared.
    zipfile.BadZipFile: the checksum differs.
  """
  contents, offset = bytearray(archive.getinfo(name).file_size), 0
  view = memoryview(contents)
  for piece in _pieces(archive, name):
    view[offset:offset + len(piece)] = piece
    offset += len(piece)
  return contents


def verify(archive: zipfile.ZipFile) -> None:
  """Verifies the checksums of all members without keeping their contents. Raises the same errors as `read_member`."""
  for name in archive.namelist():
    for _ in _pieces(archive, name):
      pass


def _pieces(archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
  """Yields a member's bytes up to its declared size, piece by piece: one read would first decompress all of them."""
  declared, num_bytes = archive.getinfo(name).file_size, 0
  with archive.open(name) as member:
    while piece := member.read(_PIECE_BYTES):
      num_bytes += len(piece)
      yield piece
  if num_bytes < declared:
    raise ValueError(f'{documents.shown(name)} ends after {num_bytes:,} of {declared:,} bytes')


def read_npz(path: str | os.PathLike[str], names: Collection[str] | None = None) -> dict[str, HostArray]:
  """Returns the arrays of an `.npz`, also those of text, by name.

  Args:
    path: of the file.
    names: the arrays that are read, as far as the file has them; None = all.

  Raises:
    OSError: it cannot be read.
    ValueError: it is damaged, exceeds a limit, or holds Python objects.
  """
  with documents.open_file(path) as file:
    try:
      with open_archive(file, os.fstat(file.fileno()).st_size) as archive:
        return {name.removesuffix('.npy'): parse_npy(read_member(archive, name)) for name in archive.namelist()
                if name.endswith('.npy') and (names is None or name.removesuffix('.npy') in names)}
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError) as error:
      raise ValueError(f'a damaged archive: {error}') from None


def map_npy(path: str | os.PathLike[str]) -> HostArray:
  """Returns the array of an `.npy` file as a read-only memory map.

  Raises:
    OSError: it cannot be read.
    ValueError: it is damaged, empty, or holds Python objects.
  """
  with documents.open_file(path) as file:
    if not os.fstat(file.fileno()).st_size:
      raise ValueError('it is empty')
    return parse_npy(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_arrays(archive: zipfile.ZipFile) -> dict[str, HostArray]:
  """Returns the arrays of real numbers of an `.npz` by name. Others are skipped: text, dates, complex and structured.

  Raises:
    ValueError: an array is damaged, or holds Python objects.
    zipfile.BadZipFile: a checksum differs.
  """
  arrays: dict[str, HostArray] = {}
  for name in archive.namelist():
    if name.endswith('.npy'):
      try:
        array = parse_npy(read_member(archive, name))
      except ValueError as error:
        raise ValueError(f'{documents.shown(name)}: {error}') from None
      dtype = array.dtype  # NumPy saves bf16 and floats of 8 bits, which are of ml_dtypes, as plain bytes (`V`)
      is_of_ml_dtypes = dtype.kind == 'V' and dtype.itemsize in (1, 2) and not dtype.names and not dtype.subdtype
      if dtype.kind in 'fiub' or is_of_ml_dtypes:
        arrays[name.removesuffix('.npy')] = array
  return arrays


def parse_npy(data: bytearray | bytes | mmap.mmap | memoryview) -> HostArray:
  """Returns the array of an `.npy` file as a view of its bytes, which is read-only if they are.

  Raises:
    ValueError: it is damaged, or holds Python objects.
  """
  if data[:6] != _NPY or len(data) <= 12:
    raise ValueError('it does not begin as a NumPy array')
  length = _NPY_LENGTHS.get(data[6]) if data[7] == 0 else None
  if not length:
    raise ValueError(f'it has version {data[6]}.{data[7]} of the format; 1.0 and 2.0 are read')
  header_bytes, = struct.unpack_from(length, data, 8)
  if header_bytes > MOST_HEADER_BYTES:
    raise ValueError(f'its header takes {header_bytes:,} bytes; at most {MOST_HEADER_BYTES:,} are read')
  start = 8 + struct.calcsize(length)
  end = start + header_bytes
  dtype, is_fortran, shape = _parse_header(bytes(data[start:end]).decode('latin-1'))
  if dtype.hasobject:
    raise ValueError('it holds Python objects, which are not read')
  size = math.prod(shape)
  if size * dtype.itemsize != len(data) - end:
    raise ValueError(f'{dtype}{list(shape)} takes {size * dtype.itemsize:,} bytes, and {len(data) - end:,} are there')
  flat = np.frombuffer(data, dtype, size, end) if size else np.zeros(0, dtype)  # `frombuffer` refuses empty arrays
  return flat.reshape(shape, order='F' if is_fortran else 'C')


def _parse_header(text: str) -> tuple[np.dtype[Any], bool, tuple[int, ...]]:
  """Returns the dtype, whether the order is Fortran's, and the shape. Raises ValueError if they cannot be read."""
  try:
    header = ast.literal_eval(re.sub(r'(?<=\d)L\b', '', text.strip()))  # Python 2's suffix of long integers
    descr, is_fortran, shape = header['descr'], header['fortran_order'], header['shape']
    dtype = np.dtype([tuple(field) for field in descr] if type(descr) is list else descr)
  except (ValueError, SyntaxError, TypeError, KeyError, IndexError, RecursionError, MemoryError) as error:
    raise ValueError(f'its header cannot be read: {text[:60]!r}') from error
  if type(is_fortran) is not bool or type(shape) is not tuple or len(shape) > MOST_AXES or not all(
      type(side) is int and 0 <= side < 2**63 for side in shape):  # `type`, as a bool is an instance of int
    raise ValueError(f'its header describes an impossible array: {text[:60]!r}')
  return dtype, is_fortran, shape
