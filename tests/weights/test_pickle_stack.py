"""A pickle makes data of its own read, and can change, import, call or enlarge nothing else."""
from __future__ import annotations

import io
import pathlib
import struct
import zipfile

import numpy as np
import pytest

from tests.weights import limited
from vit_jax.core.errors import UserError
from vit_jax.weights import files, pickle_stack, pickles


def text(value: str) -> bytes:
  return b'X' + struct.pack('<I', len(value.encode())) + value.encode()


def number(value: int) -> bytes:
  return b'J' + struct.pack('<i', value)


STORAGE = b'(' + text('storage') + b'ctorch\nFloatStorage\n' + text('0') + text('cpu') + number(4) + b'tQ'


def tensor(shape: bytes = b'(K\x04t', strides: bytes = b'(K\x01t', *, storage: bytes = STORAGE) -> bytes:
  """A tensor of the storage '0' of four numbers; shape and strides as pickled tuples."""
  return (b'ctorch._utils\n_rebuild_tensor_v2\n(' + storage + number(0) + shape + strides
          + b'\x89ccollections\nOrderedDict\n)RtR')


def write(path: pathlib.Path, pickle: bytes, **storages: np.ndarray) -> pathlib.Path:
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('net/data.pkl', b'\x80\x02' + pickle + b'.')
    for key, numbers in ({'0': np.arange(4, dtype=np.float32)} | storages).items():
      archive.writestr(f'net/data/{key}', numbers.tobytes())
  return path


def named(*tensors: bytes) -> bytes:
  """A dict of tensors w0, w1, …"""
  return b'}(' + b''.join(text(f'w{i}') + one for i, one in enumerate(tensors)) + b'u'


CLEAN = named(tensor())
POISON = [
    b'ctorch\nFloatStorage\n}' + text('dtype') + text('<i4') + b'sb',
    b'ctorch._utils\n_rebuild_tensor_v2\n}' + text('__kwdefaults__') + b'}sb',
    b'ccollections\nOrderedDict\n}' + text('x') + number(1) + b'sb',
    b'ctorch\nFloatStorage\n(N}' + text('full') + text('torch.IntStorage') + b'stb',
    b'cargparse\nNamespace\n}' + text('__init__') + b'Nsb',
    b'(ctorch\nFloatStorage\n' + text('x') + b'la']


@pytest.mark.parametrize('poison', POISON)
def test_one_file_does_not_change_how_the_next_is_read(poison: bytes, tmp_path: pathlib.Path) -> None:
  evil = write(tmp_path / 'evil.pth', b'(' + poison + b'0' + CLEAN + b'l')
  with pytest.raises(UserError, match='a list instead of named tensors|adds to a'):
    files.read(evil)
  assert files.read(write(tmp_path / 'clean.pth', CLEAN))['w0'].tolist() == [0, 1, 2, 3]


def test_nothing_that_a_pickle_reaches_can_be_written_to() -> None:
  for pickle in (b'ctorch\nFloatStorage\n.', STORAGE + b'.', tensor() + b'.', b'cargparse\nNamespace\n)R.'):
    found = pickle_stack.load(io.BytesIO(pickle))
    with pytest.raises(AttributeError):
      found.anything = 1
    assert type(found) in (pickle_stack.Name, pickle_stack.Storage, pickle_stack.Tensor)


def test_two_names_for_one_storage_are_read_and_share_memory(tmp_path: pathlib.Path) -> None:
  found = files.read(write(tmp_path / 'a.pth', named(tensor(), tensor(), tensor(b'(K\x02t'))))
  assert found['w0'].tolist() == found['w1'].tolist() == [0, 1, 2, 3] and found['w2'].tolist() == [0, 1]
  assert np.shares_memory(found['w0'], found['w1'])


@pytest.mark.parametrize(('pickle', 'says'), [
    (named(tensor(b'(K\x05t')), r'a tensor of shape \[5\] reaches beyond its 4 numbers'),
    (named(tensor(b'(J\0\0\0\x40t', b'(K\0t')), r'a tensor of shape \[1073741824\] repeats its 4 numbers'),
    (named(tensor(b'(K\x03K\x03t', b'(K\x01K\0t')), 'repeats its 4 numbers'),
    (named(tensor(b'(J\xff\xff\xff\xfft')), 'a shape or strides that cannot be'),
    (named(tensor(b'(\x88t')), 'a shape or strides that cannot be'),
    (named(tensor(b'(' + b'K\x01' * 65 + b't', b'(' + b'K\x01' * 65 + b't')), 'a shape or strides that cannot be'),
    (named(*[tensor()] * 17), 'its 17 tensors share storages and would take 272 bytes for the 16'),
    (named(tensor(storage=STORAGE.replace(number(4), number(5)))), "storage '0' has 16 bytes, its 5 numbers take 20"),
    (named(tensor(), tensor(storage=STORAGE.replace(b'Float', b'Half'))), "storage '0' is of two kinds"),
    (b'}' + text('model') + b'h\0s.', 'object 0 before it was memorized'),
    (b'}q\0' + text('model') + b'h\0s', 'expected tensors, got a file without any'),
    (b'Nr\xff\xff\xff\x7f', 'a NoneType instead of named tensors'),
    (b'Np2305843009213693951\n', 'memorizes an object that is not there'),
    (b')' * 10 + b'N' * 10 + b'\x96' + struct.pack('<Q', 2**40), 'bytearray8|BYTEARRAY8'),
    (b'\x8d' + struct.pack('<Q', 2**40) + b'x', 'remain'),
    (b'((((', 'empty stack'), (b'R', 'empty stack'), (b'(R', 'empty stack'), (b't', 'no mark'),
    (b'}K\x01u', 'no mark'), (b'}(K\x01u', 'a key without a value'), (b'N(K\x01e', 'adds to a NoneType'),
    (b'NN\x85R', 'calls a NoneType'), (b'ccollections\nOrderedDict\nK\x01\x85R', 'something else than pairs'),
    (b'K\x01Q', 'refers to a storage by a int'), (b'ctorch\nFloatStorage\n)R', 'with other arguments'),
    (b'2', 'DUP')])
def test_a_pickle_that_cannot_be_is_damage(pickle: bytes, says: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=says):
    files.read(write(tmp_path / 'a.pth', pickle))


def test_a_nested_object_is_never_unfolded() -> None:
  """Forty levels of pairs, each the one below twice: 2^40 leaves for who prints, hashes or compares them."""
  nested = b'N' + b''.join(b'q' + bytes([i]) + b'h' + bytes([i]) + b'\x86' for i in range(40))
  for pickle, kind in ((b'}' + nested + b'Ns.', dict), (nested + b'.', tuple),
                       (b'\x8f(' + nested + b'\x90.', pickle_stack.Name)):
    assert type(pickle_stack.load(io.BytesIO(pickle))) is kind
  for pickle, says in ((nested + b'Q.', 'refers to a storage by a tuple'),
                       (b'ctorch\nFloatStorage\n' + nested + b'R.', 'calls torch.FloatStorage with other arguments'),
                       (b'ctorch._utils\n_rebuild_tensor_v2\n' + nested + b'R.', 'describes a tensor that cannot be')):
    with pytest.raises(ValueError, match=says) as error:
      pickle_stack.load(io.BytesIO(pickle))
    assert len(str(error.value)) < 200


def test_work_and_size_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(pickle_stack, 'MOST_STEPS', 50)
  with pytest.raises(ValueError, match='takes more than 50 steps'):
    pickle_stack.load(io.BytesIO(b'N' * 51))
  pairs = b'](' + b'(K\x01K\x01t' * 9 + b'e'
  with pytest.raises(ValueError, match='takes more than 50 steps'):
    pickle_stack.load(io.BytesIO(b'ccollections\nOrderedDict\n(' + pairs + b'tR.'))
  monkeypatch.setattr(pickle_stack, 'MOST_BYTES', 1 << 20)
  with pytest.raises(ValueError, match='longer than 1 MiB'):
    pickle_stack.load(io.BytesIO(b'B' + struct.pack('<I', 2**21) + bytes(2**21)))


def test_small_pickles_take_little_memory_and_time(tmp_path: pathlib.Path) -> None:
  memo = write(tmp_path / 'memo.pth', b'Nr\xff\xff\xff\x0f0' + CLEAN)  # index 2^28 - 1
  repeated = write(tmp_path / 'repeated.pth', named(tensor(b'(J\0\0\0\x20t', b'(K\0t')))
  half = b'(' + text('storage') + b'ctorch\nByteStorage\n' + text('0') + text('cpu') + number(1 << 22) + b'tQ'
  whole = tensor(b'(J\0\0\x40\0t', storage=half)
  shared = write(tmp_path / 'shared.pth', named(*[whole] * 100), **{'0': np.zeros(1 << 22, np.uint8)})
  old = tmp_path / 'old.pth'
  magic = b'\x80\x02\x8a\x0a' + pickles._MAGIC.to_bytes(10, 'little') + b'.\x80\x02M\xe9\x03.\x80\x02}.\x80\x02'
  old.write_bytes(magic + CLEAN + b'.\x80\x02](' + text('0') + b'e.' + struct.pack('<q', 2**40) + bytes(16))
  said = limited.read(memo, repeated, shared, old)
  assert said[0] == "read {'w0': (4,)}"
  for one, part in zip(said[1:], ('repeats its 4 numbers', 'its 100 tensors share storages', 'the numbers end early'),
                       strict=True):
    assert part in one
