"""Archives give no more than they declare, and declare no more than their size allows."""
from __future__ import annotations

import io
import pathlib
import struct
import zipfile
from typing import Any

import numpy as np
import pytest

from tests.weights import limited
from vit_jax.core import archives
from vit_jax.core.errors import UserError
from vit_jax.weights import files


def npy(array: np.ndarray) -> bytes:
  out = io.BytesIO()
  np.save(out, array)
  return out.getvalue()


def write(path: pathlib.Path, content: bytes, *, name: str = 'a.npy', method: int = zipfile.ZIP_STORED) -> pathlib.Path:
  with zipfile.ZipFile(path, 'w', method) as archive:
    archive.writestr(name, content)
  return path


def zeros(path: pathlib.Path, mebibytes: int) -> None:
  """A compressed member of so many bytes."""
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED, compresslevel=1) as archive, archive.open('a.npy', 'w') as one:
    for _ in range(mebibytes):
      one.write(bytes(1 << 20))


def header(text: str, *, version: int = 1, data: bytes = bytes(8)) -> bytes:
  """An .npy whose header is `text`."""
  length = struct.pack('<H' if version == 1 else '<I', len(text))
  return b'\x93NUMPY' + bytes([version, 0]) + length + text.encode() + data


def test_order_version_and_kind_are_read_as_numpy_reads_them(tmp_path: pathlib.Path) -> None:
  arrays = {'c': np.arange(6.).reshape(2, 3), 'f': np.asfortranarray(np.arange(6.).reshape(2, 3)),
            'none': np.ones((0, 3)), 'scalar': np.array(3), 'swapped': np.arange(3, dtype='>f4'),
            'bool': np.array([True]), 'text': np.array('x'), 'complex': np.ones(2, complex)}
  np.savez(tmp_path / 'a.npz', **arrays)
  found = files.read(tmp_path / 'a.npz')
  assert found.keys() == arrays.keys() - {'text', 'complex'}
  for name, array in found.items():
    np.testing.assert_array_equal(array, arrays[name].astype(np.float32))
  for text in ("{'descr': '<f4', 'fortran_order': False, 'shape': (2L,), }\n",
               "{'shape':(2,),'descr':'<f4','fortran_order':False}"):
    for version in (1, 2):
      write(tmp_path / 'b.npz', header(text, version=version))
      assert files.read(tmp_path / 'b.npz')['a'].tolist() == [0, 0]


@pytest.mark.parametrize(('content', 'says'), [
    (header("{'descr': '<f4', 'fortran_order': False, 'shape': (3,)}"), r'a.npy: float32\[3\] takes 12 bytes'),
    (header("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}"), 'and 8 are there'),
    (header("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, -2)}"), 'describes an impossible array'),
    (header("{'descr': '<f4', 'fortran_order': 0, 'shape': (2,)}"), 'describes an impossible array'),
    (header("{'descr': '<f4', 'shape': (2,)}"), 'its header cannot be read'),
    (header("{'descr': '<q77', 'fortran_order': False, 'shape': (2,)}"), 'its header cannot be read'),
    (header('__import__("os")'), 'its header cannot be read'), (header('(' * 9000), 'its header cannot be read'),
    (header('-' * 9000 + '1'), 'its header cannot be read'), (header(' ' * 20_000), 'at most 10,000 are read'),
    (header("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}"), 'it holds Python objects'),
    (header('{}', version=3), 'it has version 3.0 of the format; 1.0 and 2.0 are read'),
    (b'\x93NUMPY\1', 'does not begin as a NumPy array')])
def test_an_array_that_cannot_be_is_damage(content: bytes, says: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=f'damaged or cut short: .*{says}'):
    files.read(write(tmp_path / 'a.npz', content))


def test_unusual_archives_are_refused(tmp_path: pathlib.Path) -> None:
  path = write(tmp_path / 'a.npz', npy(np.ones(3)), method=zipfile.ZIP_BZIP2)
  with pytest.raises(UserError, match='a.npy is compressed by method 12, and only deflate is read'):
    files.read(path)
  with pytest.warns(UserWarning, match='Duplicate name'), zipfile.ZipFile(path, 'w') as archive:
    for value in (1., 2.):
      archive.writestr('a.npy', npy(np.full(3, value)))
  with pytest.raises(UserError, match='two members of the same name'):
    files.read(path)
  content = bytearray(write(path, npy(np.ones(3))).read_bytes())
  content[6] |= 1
  content[content.rfind(b'PK\1\2') + 8] |= 1
  path.write_bytes(bytes(content))
  with pytest.raises(UserError, match='a.npy is encrypted'):
    files.read(path)


def test_a_network_of_zeros_may_be_compressed_and_a_bomb_not(tmp_path: pathlib.Path) -> None:
  small = tmp_path / 'small.npz'
  np.savez_compressed(small, a=np.zeros(1 << 20, np.float32))
  assert files.read(small)['a'].shape == (1 << 20,)
  large = tmp_path / 'large.npz'
  zeros(large, 70)
  said, = limited.read(large, mebibytes=40)
  assert f'its members hold {70 << 20:,} bytes, and {archives.FREE_BYTES:,} are allowed for a file of this size' in said


def test_a_member_that_holds_more_than_it_declares_is_not_unfolded(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'a.npz'
  zeros(path, 70)
  content = bytearray(path.read_bytes())
  place = content.rfind(b'PK\1\2') + 24
  content[place:place + 4] = struct.pack('<I', 100)
  path.write_bytes(bytes(content))
  said, = limited.read(path, mebibytes=40)
  assert 'damaged or cut short' in said


def without_entry(content: bytes, *, count: bool) -> bytes:
  """An archive whose directory lost its first entry; `count` = the end record knows."""
  start = content.index(b'PK\1\2')
  name, extra, comment = struct.unpack('<HHH', content[start + 28:start + 34])
  length = 46 + name + extra + comment
  end = content.rindex(b'PK\5\6') - length
  found = bytearray(content[:start] + content[start + length:])
  members, size = struct.unpack('<H', found[end + 10:end + 12])[0], struct.unpack('<I', found[end + 12:end + 16])[0]
  found[end + 12:end + 16] = struct.pack('<I', size - length)
  if count:
    found[end + 8:end + 12] = struct.pack('<HH', members - 1, members - 1)
  return bytes(found)


@pytest.mark.parametrize('number', [1, 2, 3])
@pytest.mark.parametrize('method', [np.savez, np.savez_compressed])
def test_arrays_that_the_directory_lost_are_noticed(number: int, method: Any, tmp_path: pathlib.Path) -> None:
  out = io.BytesIO()
  method(out, **{f'a{i}': np.arange(50.) for i in range(number)})
  path = tmp_path / 'a.npz'
  path.write_bytes(out.getvalue())
  assert len(files.read(path)) == number
  path.write_bytes(without_entry(out.getvalue(), count=False))
  with pytest.raises(UserError, match=f'its end record counts {number} members, and its directory lists {number - 1}'):
    files.read(path)
  path.write_bytes(without_entry(out.getvalue(), count=True))
  with pytest.raises(UserError, match='a member at byte 0 is not listed in its directory'):
    files.read(path)
  last = out.getvalue().rindex(b'PK\3\4')
  path.write_bytes(out.getvalue()[:last] + b'XK' + out.getvalue()[last + 2:])
  with pytest.raises(UserError, match='there is no member at byte|got .* bytes that begin'):
    files.read(path)


def test_archives_of_streams_and_with_padding_are_complete(tmp_path: pathlib.Path) -> None:
  """Data descriptors behind members, a comment at the end, and a program before the archive."""
  class Stream(io.RawIOBase):
    content = bytearray()

    def writable(self) -> bool:
      return True

    def write(self, data: Any) -> int:
      self.content += bytes(data)
      return len(bytes(data))

  with zipfile.ZipFile(Stream(), 'w') as archive:
    for name in 'ab':
      archive.writestr(f'{name}.npy', npy(np.ones(3)))
    archive.comment = b'made by a stream'
  (tmp_path / 'a.npz').write_bytes(Stream.content)
  assert sorted(files.read(tmp_path / 'a.npz')) == ['a', 'b']


def test_numbers_that_look_like_signatures_are_none(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """An offset in the end record has the bytes of an end record, and a size in a data descriptor those of a member."""
  path, member = tmp_path / 'a.zip', 40  # bytes of a member: 30, its name and its content
  with open(path, 'wb') as file:
    file.truncate(struct.unpack('<I', b'PK\5\6')[0] - member)  # sparse: something else before the archive
  with zipfile.ZipFile(path, 'a') as archive:
    archive.writestr('a.txt', bytes(member - 35))
  with open(path, 'rb') as file, archives.open_archive(file, path.stat().st_size) as archive:
    assert archive.namelist() == ['a.txt']
    file.seek(-6, io.SEEK_END)
    assert file.read(4) == b'PK\5\6'  # the offset of the directory
  path.unlink()
  size, = struct.unpack('<I', b'PK\3\4')
  monkeypatch.setattr(archives, 'FREE_BYTES', 2 * size)
  with open(path, 'wb') as stream, zipfile.ZipFile(Unseekable(stream), 'w', zipfile.ZIP_DEFLATED) as archive:
    archive.writestr('a', bytes(size), compresslevel=1)
    archive.writestr('b', bytes(5))
  assert path.read_bytes().count(b'PK\3\4') == 4  # two members, and the size in a descriptor and in the directory
  with open(path, 'rb') as file, archives.open_archive(file, path.stat().st_size) as archive:
    assert archive.namelist() == ['a', 'b']


class Unseekable(io.RawIOBase):
  """A stream that cannot seek, into which `zipfile` writes data descriptors behind members."""

  def __init__(self, stream: Any) -> None:
    super().__init__()
    self._stream = stream

  def writable(self) -> bool:
    return True

  def write(self, data: Any) -> int:
    return int(self._stream.write(data))
