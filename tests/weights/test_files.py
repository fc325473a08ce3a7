"""Weight files are told apart by what is in them; what is none says what it is instead."""
from __future__ import annotations

import errno
import json
import pathlib
import struct
import zipfile
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from vit_jax.core import failures
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.weights import files

TENSORS = {'a/b': np.arange(6, dtype=np.float32).reshape(2, 3), 'c': np.float32([1.5])}
WRITERS = {'npz': files.write_npz, 'safetensors': files.write_safetensors, 'pth': files.write_torch}


@pytest.mark.parametrize('kind', WRITERS)
@pytest.mark.parametrize('name', ['x.npz', 'x.pth', 'weights'])
def test_a_file_is_known_by_its_content_whatever_it_is_called(kind: str, name: str, tmp_path: pathlib.Path) -> None:
  WRITERS[kind](tmp_path / name, TENSORS)
  found = files.read(tmp_path / name)
  assert found.keys() == TENSORS.keys()
  for key, tensor in TENSORS.items():
    np.testing.assert_array_equal(found[key], tensor)
    assert found[key].dtype == np.float32


def test_numpy_reads_the_npz_and_its_own_is_read(tmp_path: pathlib.Path) -> None:
  files.write_npz(tmp_path / 'a.npz', TENSORS)
  with np.load(tmp_path / 'a.npz') as found:
    assert {k: v.tolist() for k, v in found.items()} == {k: v.tolist() for k, v in TENSORS.items()}
  np.savez_compressed(tmp_path / 'b.npz', **TENSORS)
  assert files.read(tmp_path / 'b.npz').keys() == TENSORS.keys()


def test_half_precision_is_read_exactly_also_where_numpy_has_lost_its_name(tmp_path: pathlib.Path) -> None:
  values = np.float32([1., -2.5, 3e-5])
  half = values.astype(ml_dtypes.bfloat16)
  np.savez(tmp_path / 'a.npz', bf16=half, void=half.view('V2'), f16=values.astype(np.float16), f64=values.astype(float))
  found = files.read(tmp_path / 'a.npz')
  np.testing.assert_array_equal(found['bf16'], half.astype(np.float32))
  np.testing.assert_array_equal(found['void'], half.astype(np.float32))
  np.testing.assert_array_equal(found['f16'], values.astype(np.float16).astype(np.float32))
  np.testing.assert_array_equal(found['f64'], values)


def test_safetensors_of_other_types_and_order_are_read(tmp_path: pathlib.Path) -> None:
  data = np.float16([1, 2]).tobytes() + np.int64([7]).tobytes()
  header = json.dumps({'__metadata__': {'a': 'b'}, 'n': {'dtype': 'I64', 'shape': [1], 'data_offsets': [4, 12]},
                       'h': {'dtype': 'F16', 'shape': [2], 'data_offsets': [0, 4]}}).encode()
  (tmp_path / 'a').write_bytes(struct.pack('<Q', len(header)) + header + data)
  found = files.read(tmp_path / 'a')
  assert found['h'].tolist() == [1, 2] and found['n'].tolist() == [7]


@pytest.mark.parametrize('work', [files.read, lambda path: files.verify(path, str(path))])
def test_an_error_while_reading_is_not_one_of_the_path(
    work: Callable[[pathlib.Path], object], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  files.write_npz(tmp_path / 'a.npz', TENSORS)

  def fail(*_: object) -> None:
    raise OSError(errno.EIO, 'Input/output error')

  monkeypatch.setattr(failures, 'PATIENCE_S', 0.)
  monkeypatch.setattr(files, '_kind', fail)
  with pytest.raises(TemporaryError, match=r'a\.npz: expected to read it, got "Input/output error"\. The disk or'):
    work(tmp_path / 'a.npz')
  with pytest.raises(UserError, match=r'b\.npz: expected to read it, got "No such file or directory"\. Check the'):
    work(tmp_path / 'b.npz')


def cut(path: pathlib.Path, kind: str, keep: float) -> None:
  WRITERS[kind](path, {f'layer{i}': np.random.default_rng(i).random((40, 5)).astype(np.float32) for i in range(9)})
  content = path.read_bytes()
  path.write_bytes(content[:int(len(content) * keep)])


@pytest.mark.parametrize('kind', WRITERS)
@pytest.mark.parametrize('keep', [.02, .5, .999])
def test_a_truncated_file_is_said_to_be_one(kind: str, keep: float, tmp_path: pathlib.Path) -> None:
  cut(tmp_path / 'a.npz', kind, keep)
  with pytest.raises(UserError, match='damaged or cut short|expected a weight file') as caught:
    files.read(tmp_path / 'a.npz')
  if keep > .1:
    assert 'damaged or cut short: ' in str(caught.value) and str(caught.value).endswith('Fetch it again.')


@pytest.mark.parametrize('kind', ['npz', 'pth'])
def test_a_flipped_byte_is_noticed(kind: str, tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'a'
  cut(path, kind, 1.)
  content = bytearray(path.read_bytes())
  at = content.find(np.random.default_rng(4).random((40, 5)).astype(np.float32).tobytes())
  content[at + 100] ^= 1
  path.write_bytes(bytes(content))
  with pytest.raises(UserError, match='damaged or cut short'):
    files.read(path)


@pytest.mark.parametrize(('content', 'says'), [
    (b'', 'an empty file'),
    (b'<!DOCTYPE html><html><body>404</body></html>', 'a web page, as a server sends it for a file that is missing'),
    (b'\n  <html>', 'a web page'),
    (b'version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n', 'a pointer of Git LFS'),
    (b'{"model_type": "vit"}', 'JSON'),
    (b'These are notes, not weights.\n', "text: 'These are notes, not weights.'"),
    (b'\x93NUMPY\x01\x00', 'a single NumPy array'),
    (b'\x89HDF\r\n', 'HDF5'),
    (b'\x1f\x8b\x08\x00', 'a file compressed by gzip'),
    (b'GGUF\x03\x00', 'GGUF, whose weights are quantized'),
    (b'\xff\xd8\xff\xe0\x00\x10JFIF', '10 bytes that begin with')])
def test_what_is_no_weight_file_says_what_it_is(content: bytes, says: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'a.npz').write_bytes(content)
  with pytest.raises(UserError, match=rf'expected a weight file \(npz, safetensors, PyTorch .*, got {says}'):
    files.read(tmp_path / 'a.npz')


def test_a_zip_of_other_things_and_an_array_of_objects_are_refused(tmp_path: pathlib.Path) -> None:
  with zipfile.ZipFile(tmp_path / 'a.npz', 'w') as archive:
    archive.writestr('holiday.jpg', b'')
  with pytest.raises(UserError, match='got a zip of holiday.jpg'):
    files.read(tmp_path / 'a.npz')
  np.savez(tmp_path / 'b.npz', a=np.array([{'x': 1}], object))
  with pytest.raises(UserError, match='a.npy: it holds Python objects, which are not read'):
    files.read(tmp_path / 'b.npz')


def safetensors(path: pathlib.Path, **entry: object) -> None:
  header = json.dumps({'w': {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8]} | entry}).encode()
  path.write_bytes(struct.pack('<Q', len(header)) + header + bytes(8))


@pytest.mark.parametrize('entry', [
    {'data_offsets': 'here'}, {'data_offsets': [0, 9]}, {'data_offsets': [0, 7]}, {'shape': [3]}, {'shape': 'two'}])
def test_a_header_that_cannot_be_is_damage(entry: dict, tmp_path: pathlib.Path) -> None:
  safetensors(tmp_path / 'a')
  assert files.read(tmp_path / 'a')['w'].tolist() == [0, 0]
  safetensors(tmp_path / 'a', **entry)
  with pytest.raises(UserError, match='damaged or cut short'):
    files.read(tmp_path / 'a')


def test_a_missing_file_and_one_without_tensors_are_said(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='expected to read it, got "No such file or directory"'):
    files.read(tmp_path / 'no.npz')
  np.savez(tmp_path / 'a.npz', note=np.array('text'))
  with pytest.raises(UserError, match='expected tensors, got a file without any'):
    files.read(tmp_path / 'a.npz')
