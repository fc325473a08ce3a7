"""Reads zip archives, and NumPy arrays in `.npz` and `.npy`, with limits: a small file cannot fill the memory.

Callers with the path of such a file, such as `data/answers.py`, call `read_npz` or `map_npy`. `weights/files.py` and
`weights/pickles.py` read archives that hold more than arrays: `open_archive` checks the members, and `read_member`,
`read_arrays` or `verify` then read them. `data/image/channels.py` has the bytes of an `.npy` and calls `parse_npy`.

The sizes that an archive declares for its members are compared with the size of the file before any decompression, and
no member is decompressed beyond its declared size. No other module reads such files (`tests/test_house.py`).
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

MAX_EXPANSION = 16
"""Limit of the ratio of an archive's decompressed size to its size. Trained f32 weights compress by a factor of about
1.1, a network with 90 % zeros by 10; deflate can reach 1,000."""
FREE_BYTES = 64 << 20
"""Decompressed size that every archive may have. Small files hold an array of zeros, or a network at initialization."""
MAX_NPY_HEADER_BYTES = 10_000  # as in NumPy
MAX_AXES = 64  # as in NumPy
_PIECE_BYTES = 1 << 20  # decompressed at once
_MEMBER_SIGNATURE = b'PK\3\4'  # the first bytes of the local header of a member
_MEMBER_HEADER_BYTES = 30  # without the name and the extra fields
_DESCRIPTOR_SIGNATURE, _MAX_DESCRIPTOR_BYTES = b'PK\7\10', 24  # of the data behind a member written to a stream
_END_SIGNATURE, _END_64_SIGNATURE = b'PK\5\6', b'PK\6\6'  # of the end record, the last part of the file; for ZIP64
_END_BYTES = 22  # the end record without its comment
_MAX_END_BYTES = 2**16 + 200  # the longest comment, both end records and the locator between them
_MAX_GAP_BYTES = 64 << 10  # bytes behind a member in which an unlisted member is looked for
_NPY_SIGNATURE = b'\x93NUMPY'
_LENGTH_FORMAT_BY_VERSION = {1: '<H', 2: '<I'}  # the header's length; version 3 is for field names that are not ASCII


@contextlib.contextmanager
def open_archive(file: BinaryIO, size: int) -> Iterator[zipfile.ZipFile]:
  """Opens an archive, and yields it after checking that its members are safe to read.

  Args:
    file: an open file at position 0.
    size: the size of the file in bytes.

  Raises:
    ValueError: members are encrypted, share a name, use an unsupported compression, are not listed in the directory, or
      are larger than `MAX_EXPANSION` and `FREE_BYTES` allow.
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
  packed_bytes = sum(member.compress_size for member in members)
  if packed_bytes > size:
    raise ValueError(f'its members take {packed_bytes:,} of its {size:,} bytes: they overlap')
  unpacked_bytes = sum(member.file_size for member in members)
  max_unpacked_bytes = max(FREE_BYTES, MAX_EXPANSION * size)
  if unpacked_bytes > max_unpacked_bytes:
    raise ValueError(f'its members hold {unpacked_bytes:,} bytes, and {max_unpacked_bytes:,} are allowed for a file of '
                     f'this size ({MAX_EXPANSION} times as many); save it without compression')


def _check_directory(file: BinaryIO, archive: zipfile.ZipFile, *, size: int) -> None:
  """Raises ValueError if the directory does not list exactly the members that are in the file.

  `zipfile` reads only the members in the directory, so a file with a damaged directory would lack some arrays. The end
  record must have the number of listed members, and no unlisted member may begin between them. A program may precede
  the first member, so only the first bytes of the file are compared there.
  """
  file.seek(max(0, size - _MAX_END_BYTES))
  num_members = _read_num_members(file.read())
  members = sorted(archive.infolist(), key=lambda member: member.header_offset)
  if num_members != len(members):
    raise ValueError(f'its end record counts {num_members:,} members, and its directory lists {len(members):,}')
  end = members[0].header_offset if members else archive.start_dir
  file.seek(0)
  if end and file.read(len(_MEMBER_SIGNATURE)) == _MEMBER_SIGNATURE:
    raise ValueError('a member at byte 0 is not listed in its directory')
  for member in members:
    _check_gap(file, end, member.header_offset)
    end = _find_end(file, member)
    if end > archive.start_dir:
      raise ValueError(f'the member at byte {member.header_offset:,} ends behind the directory')
  _check_gap(file, end, archive.start_dir)


def _read_num_members(tail: bytes) -> int:
  """Returns the number of members that the end record states, given the last bytes of the file."""
  record = len(tail) - _END_BYTES  # the position of the record if the archive has no comment
  if tail[record:record + len(_END_SIGNATURE)] != _END_SIGNATURE or tail[-2:] != b'\0\0':
    record = tail.rfind(_END_SIGNATURE)  # behind a comment; other parts of the record may contain the signature
  num_members, = struct.unpack_from('<H', tail, record + 10)
  record_64 = tail.rfind(_END_64_SIGNATURE, 0, record)
  if num_members == 0xFFFF and record_64 >= 0:
    num_members, = struct.unpack_from('<Q', tail, record_64 + 32)
  return int(num_members)


def _check_gap(file: BinaryIO, start: int, stop: int) -> None:
  """Raises ValueError if a member begins in the first `_MAX_GAP_BYTES` between `start` and `stop`."""
  if start < stop:
    file.seek(start)
    if _MEMBER_SIGNATURE in file.read(min(stop - start, _MAX_GAP_BYTES)):
      raise ValueError(f'a member at byte {start:,} is not listed in its directory')


def _find_end(file: BinaryIO, member: zipfile.ZipInfo) -> int:
  """Returns the byte behind a member and its data descriptor. Raises ValueError if there is no member at its offset."""
  file.seek(member.header_offset)
  header = file.read(_MEMBER_HEADER_BYTES)
  if len(header) < _MEMBER_HEADER_BYTES or not header.startswith(_MEMBER_SIGNATURE):
    raise ValueError(f'there is no member at byte {member.header_offset:,}')
  end = member.header_offset + _MEMBER_HEADER_BYTES + sum(struct.unpack_from('<HH', header, 26)) + member.compress_size
  file.seek(end)
  following = file.read(_MAX_DESCRIPTOR_BYTES) if member.flag_bits & 0x8 else b''
  # A data descriptor may lack its signature, and has sizes of 8 or 4 bytes.
  for signature, num_bytes in itertools.product((_DESCRIPTOR_SIGNATURE, b''), (8, 4)):
    sizes = [size.to_bytes(8, 'little')[:num_bytes] for size in (member.compress_size, member.file_size)]
    descriptor = b''.join([signature, member.CRC.to_bytes(4, 'little'), *sizes])
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
  contents = bytearray(archive.getinfo(name).file_size)
  view, offset = memoryview(contents), 0
  for piece in _read_pieces(archive, name):
    view[offset:offset + len(piece)] = piece
    offset += len(piece)
  return contents


def verify(archive: zipfile.ZipFile) -> None:
  """Verifies the checksums of all members without keeping their contents. Raises the same errors as `read_member`."""
  for name in archive.namelist():
    for _ in _read_pieces(archive, name):
      pass


def _read_pieces(archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
  """Yields a member's bytes up to its declared size in pieces: a single `read` would first decompress all bytes."""
  declared_bytes = archive.getinfo(name).file_size
  num_bytes = 0
  with archive.open(name) as member:
    while piece := member.read(_PIECE_BYTES):
      num_bytes += len(piece)
      yield piece
  if num_bytes < declared_bytes:
    raise ValueError(f'{documents.shown(name)} ends after {num_bytes:,} of {declared_bytes:,} bytes')


def read_npz(path: str | os.PathLike[str], names: Collection[str] | None = None) -> dict[str, HostArray]:
  """Returns the arrays of an `.npz` by name, including arrays of text.

  Args:
    path: the path of the file.
    names: the arrays to read, if the file has them; None = all arrays.

  Raises:
    OSError: the file cannot be read.
    ValueError: the file is damaged, exceeds a limit, or holds Python objects.
  """
  with documents.open_file(path) as file:
    try:
      with open_archive(file, os.fstat(file.fileno()).st_size) as archive:
        stored = [name.removesuffix('.npy') for name in archive.namelist() if name.endswith('.npy')]
        return {name: parse_npy(read_member(archive, f'{name}.npy'))
                for name in stored if names is None or name in names}
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError) as error:
      raise ValueError(f'a damaged archive: {error}') from None


def map_npy(path: str | os.PathLike[str]) -> HostArray:
  """Returns the array of an `.npy` file as a read-only memory map.

  Raises:
    OSError: the file cannot be read.
    ValueError: the file is damaged, empty, or holds Python objects.
  """
  with documents.open_file(path) as file:
    if not os.fstat(file.fileno()).st_size:
      raise ValueError('it is empty')
    return parse_npy(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_arrays(archive: zipfile.ZipFile) -> dict[str, HostArray]:
  """Returns the arrays of real numbers and booleans of an `.npz` by name, and skips arrays of all other types.

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
      dtype = array.dtype  # NumPy saves bf16 and 8-bit floats (the types of ml_dtypes) as plain bytes, of the kind V
      is_narrow_float = dtype.kind == 'V' and dtype.itemsize in (1, 2) and not dtype.names and not dtype.subdtype
      if dtype.kind in 'fiub' or is_narrow_float:
        arrays[name.removesuffix('.npy')] = array
  return arrays


def parse_npy(data: bytearray | bytes | mmap.mmap | memoryview) -> HostArray:
  """Returns the array of an `.npy` file as a view of the file's bytes `data`; the array is read-only if `data` is.

  Raises:
    ValueError: the file is damaged, or holds Python objects.
  """
  if data[:6] != _NPY_SIGNATURE or len(data) <= 12:
    raise ValueError('it does not begin as a NumPy array')
  length_format = _LENGTH_FORMAT_BY_VERSION.get(data[6]) if data[7] == 0 else None
  if not length_format:
    raise ValueError(f'it has version {data[6]}.{data[7]} of the format; 1.0 and 2.0 are read')
  header_bytes, = struct.unpack_from(length_format, data, 8)
  if header_bytes > MAX_NPY_HEADER_BYTES:
    raise ValueError(f'its header takes {header_bytes:,} bytes; at most {MAX_NPY_HEADER_BYTES:,} are read')
  start = 8 + struct.calcsize(length_format)
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
  """Returns dtype, whether the order is Fortran's, and shape, given the header. Raises ValueError if it is invalid."""
  try:
    header = ast.literal_eval(re.sub(r'(?<=\d)L\b', '', text.strip()))  # Python 2's suffix of long integers
    is_fortran, shape = header['fortran_order'], header['shape']
    descr = header['descr']  # NumPy's description of the dtype: a text, or a list of fields
    dtype = np.dtype([tuple(field) for field in descr] if type(descr) is list else descr)
  except (ValueError, SyntaxError, TypeError, KeyError, IndexError, RecursionError, MemoryError) as error:
    raise ValueError(f'its header cannot be read: {text[:60]!r}') from error
  has_shape = type(shape) is tuple and len(shape) <= MAX_AXES and all(
      type(side) is int and 0 <= side < 2**63 for side in shape)  # not `isinstance`: a bool is an instance of int
  if not has_shape or type(is_fortran) is not bool:
    raise ValueError(f'its header describes an impossible array: {text[:60]!r}')
  return dtype, is_fortran, shape
