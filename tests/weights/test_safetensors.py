"""What the format's own reader refuses is refused, and what it reads is read."""
from __future__ import annotations

import json
import pathlib
import struct
from typing import Any

import numpy as np
import pytest

from vit_jax.core.errors import UserError
from vit_jax.weights import files, safetensors

W = {'dtype': 'F32', 'shape': [2], 'data_offsets': [0, 8]}


def write(path: pathlib.Path, header: Any, data: bytes = bytes(8)) -> pathlib.Path:
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path.write_bytes(struct.pack('<Q', len(text)) + text + data)
  return path


REFUSED: list[tuple[Any, str]] = [
    ({'w': W, 'v': W}, 'v begins at byte 0, the tensor before it ends at 8|w begins at byte 0'),
    ({'w': W, 'v': W | {'data_offsets': [4, 12]}}, 'v begins at byte 4, the tensor before it ends at 8'),
    ({'w': W | {'shape': [1], 'data_offsets': [4, 8]}}, 'w begins at byte 4, the tensor before it ends at 0'),
    ({'w': W | {'shape': [1], 'data_offsets': [0, 4]}}, 'its tensors take 4 bytes, and 8 are there'),
    ({'w': W | {'shape': [3], 'data_offsets': [0, 12]}}, 'its tensors take 12 bytes, and 8 are there'),
    ({'w': W | {'shape': [-1, -2]}}, 'a shape or offsets that cannot be'),
    ({'w': W | {'shape': [2.0]}}, 'a shape or offsets that cannot be'),
    ({'w': W | {'shape': [True, 2]}}, 'a shape or offsets that cannot be'),
    ({'w': W | {'shape': [2**62, 2**62]}}, 'takes .* bytes, its offsets give 8'),
    ({'w': W | {'data_offsets': [8, 0]}}, 'takes 8 bytes, its offsets give -8'),
    ({'w': W | {'data_offsets': [0, 8, 16]}}, 'a shape or offsets that cannot be'),
    ({'w': W | {'dtype': 'F99'}}, "w: expected a dtype of F64, .*, got 'F99'"),
    ({'w': W | {'dtype': 'F64'}}, 'takes 16 bytes, its offsets give 8'),
    ({'w': [2]}, 'w is described without'), ({'w': {'dtype': 'F32', 'shape': [2]}}, 'w is described without dtype'),
    (b'{"w": ' + json.dumps(W).encode() + b', "w": ' + json.dumps(W).encode() + b'}', "the field 'w' twice"),
    ({'__metadata__': {'a': 1}, 'w': W}, '__metadata__ is not a table of texts'),
    (b'{"w": ' + b'[' * 200_000, 'nested too deep'), (b'{"w": NaN}', 'JSON with NaN'),
    (b'{"w', 'no JSON at line 1, column 2'), (b'{"w": \xff}', 'text that is not UTF-8 at byte 6')]


@pytest.mark.parametrize(('header', 'says'), REFUSED)
def test_a_header_that_the_format_forbids_is_refused(header: Any, says: str, tmp_path: pathlib.Path) -> None:
  path = write(tmp_path / 'a', header)
  with pytest.raises(UserError, match=f'damaged or cut short: .*({says})'):
    files.read(path)
  with pytest.raises(UserError, match='^the address: expected a whole weight file'):
    files.verify(path, shown_as='the address')


def test_the_format_s_own_reader_decides_alike(tmp_path: pathlib.Path) -> None:
  own = pytest.importorskip('safetensors')
  for i, (header, _) in enumerate(REFUSED):
    path = write(tmp_path / str(i), header)
    if b'"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "w"' in path.read_bytes():
      continue  # forbidden by the format; its reader takes the last
    with pytest.raises((own.SafetensorError, OverflowError)):
      own.deserialize(path.read_bytes())
  for header in ({'w': W}, {'w': W, 'none': W | {'shape': [0, 3], 'data_offsets': [8, 8]}, '__metadata__': {'a': 'b'}},
                 {'w': W | {'note': 1}}):
    path = write(tmp_path / 'good', header)
    assert {name for name, _ in own.deserialize(path.read_bytes())} == files.read(path).keys()


def test_what_is_written_has_the_bytes_of_the_format_s_own_writer(tmp_path: pathlib.Path) -> None:
  own = pytest.importorskip('safetensors.numpy')
  tensors = {'b': np.arange(6, dtype=np.float32).reshape(2, 3), 'a': np.float32(3.)[None][0:0], 'c': np.array(7, '<f4')}
  safetensors.write(tmp_path / 'ours', tensors)
  own.save_file(tensors, tmp_path / 'theirs', {'format': 'pt'})
  assert (tmp_path / 'ours').read_bytes() == (tmp_path / 'theirs').read_bytes()


def test_every_type_is_read_and_bytes_need_not_be_aligned(tmp_path: pathlib.Path) -> None:
  header, data = {}, b''
  for name, dtype in sorted(safetensors.DTYPES.items(), key=lambda one: np.dtype(one[1]).itemsize):
    values = np.array([0, 1, 1]).astype(dtype)
    header[name] = {'dtype': name, 'shape': [3], 'data_offsets': [len(data), len(data) + values.nbytes]}
    data += values.tobytes()
  found = files.read(write(tmp_path / 'a', header, data))
  assert found.keys() == safetensors.DTYPES.keys()
  for name, array in found.items():
    assert array.tolist() == [0, 1, 1] and array.flags.aligned
    assert array.dtype == (np.float32 if name in ('F64', 'F32', 'F16', 'BF16') else safetensors.DTYPES[name])


def test_a_header_longer_than_the_file_or_the_limit_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  path = write(tmp_path / 'a', {'w': W})
  path.write_bytes(struct.pack('<Q', path.stat().st_size - 1) + path.read_bytes()[8:])
  with pytest.raises(UserError, match='its header has .* bytes, the file'):
    files.read(path)
  monkeypatch.setattr(safetensors, 'MOST_HEADER_BYTES', 20)
  with pytest.raises(UserError, match='expected a weight file'):
    files.read(write(tmp_path / 'b', {'w': W}))


@pytest.mark.parametrize('name', ['a\nb', 'a\x1b[2J', 'x' * 600, '\u202e'])
def test_a_name_that_cannot_be_printed_is_refused(name: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='a tensor has the name') as caught:
    files.read(write(tmp_path / 'a', {name: W}))
  assert str(caught.value).isprintable() and len(str(caught.value)) < 400
