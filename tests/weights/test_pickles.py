"""PyTorch's files are read without running anything that is in them."""
from __future__ import annotations

import argparse
import collections
import io
import os
import pathlib
import pickle
import struct
import zipfile
from typing import Any

import numpy as np
import pytest

from vit_jax.core.errors import UserError
from vit_jax.weights import files


def named(module: str, name: str) -> Any:
  """A class that a pickle names as one of PyTorch."""
  return type(name, (), {'__module__': module, '__qualname__': name})


REBUILD, PARAMETER, FLOATS, HALVES = (named(*where) for where in (
    ('torch._utils', '_rebuild_tensor_v2'), ('torch._utils', '_rebuild_parameter'), ('torch', 'FloatStorage'),
    ('torch', 'HalfStorage')))


class Tensor:
  """Pickles as a tensor does: a view of a storage."""

  def __init__(self, storage: np.ndarray, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> None:
    self.storage, self.shape, self.stride, self.offset = storage, shape, stride, offset


class Pickler(pickle._Pickler):
  """Writes `Tensor` as PyTorch writes its own; classes go by name, whether they can be imported or not."""

  def __init__(self, file: Any, *, old: bool) -> None:
    super().__init__(file, protocol=2)
    self.storages: dict[str, np.ndarray] = {}
    self._old = old

  def save(self, value: Any, save_persistent_id: bool = True) -> None:
    if isinstance(value, type) and value.__module__.startswith('torch'):
      self.write(b'c' + value.__module__.encode() + b'\n' + value.__qualname__.encode() + b'\n')
    elif isinstance(value, Tensor):
      self.save(REBUILD)
      self.save((value.storage, value.offset, value.shape, value.stride, False, collections.OrderedDict()))
      self.write(b'R')
    else:
      super().save(value, save_persistent_id)

  def persistent_id(self, value: Any) -> Any:
    if not isinstance(value, np.ndarray):
      return None
    key = next((k for k, x in self.storages.items() if x is value), str(len(self.storages)))
    self.storages[key] = value
    kind = HALVES if value.dtype == np.float16 else FLOATS
    return ('storage', kind, key, 'cpu', value.size, *([None] if self._old else []))


def write(path: pathlib.Path, content: Any, *, old: bool = False) -> None:
  out = io.BytesIO()
  pickler = Pickler(out, old=old)
  pickler.dump(content)
  if not old:
    with zipfile.ZipFile(path, 'w') as archive:
      archive.writestr('net/data.pkl', out.getvalue())
      for key, storage in pickler.storages.items():
        archive.writestr(f'net/data/{key}', storage.tobytes())
    return
  parts = [pickle.dumps(x, 2) for x in (0x1950a86a20f9469cfc6c, 1001, {'little_endian': True})]
  parts += [out.getvalue(), pickle.dumps(list(pickler.storages), 2)]
  parts += [struct.pack('<q', storage.size) + storage.tobytes() for storage in pickler.storages.values()]
  path.write_bytes(b''.join(parts))


STORAGE = np.arange(12, dtype=np.float32)
NET = {'w': Tensor(STORAGE, (2, 3), (3, 1)), 't': Tensor(STORAGE, (3, 2), (1, 3), 6),
       'h': Tensor(np.float16([.5, 2]), (2,), (1,)), 's': Tensor(STORAGE, (), (), 4), 'steps': 3}


@pytest.mark.parametrize('old', [False, True])
@pytest.mark.parametrize('inside', ['', 'model', 'state_dict'])
def test_tensors_are_views_of_storages_and_may_lie_inside_of_other_things(
    old: bool, inside: str, tmp_path: pathlib.Path) -> None:
  content = {inside: NET, 'epoch': 7, 'args': argparse.Namespace(lr=.1), 'optimizer': {'state': {0: NET['w']}}}
  write(tmp_path / 'a.pth', content if inside else collections.OrderedDict(NET), old=old)
  found = files.read_network(tmp_path / 'a.pth', lambda tensors: 'w' in tensors).tensors
  assert found.keys() == {'w', 't', 'h', 's'}
  assert found['w'].tolist() == [[0, 1, 2], [3, 4, 5]] and found['t'].tolist() == [[6, 9], [7, 10], [8, 11]]
  assert found['h'].tolist() == [.5, 2] and found['s'] == 4


def test_of_several_networks_the_one_for_use_is_read_or_the_one_asked_for(tmp_path: pathlib.Path) -> None:
  one, two = Tensor(STORAGE, (1,), (1,)), Tensor(STORAGE, (2,), (1,))
  write(tmp_path / 'a.pth', {'student': {'a': one}, 'teacher': {'b': two}})
  def read(view: str = '') -> files.Content:
    return files.read_network(tmp_path / 'a.pth', lambda tensors: not tensors.keys().isdisjoint({'a', 'b'}), view=view)

  assert (read().tensors.keys(), read().chosen.path, read().chosen.others) == ({'b'}, 'teacher', ('student',))
  assert read('student').tensors.keys() == {'a'}
  with pytest.raises(UserError, match=r"--view: expected one of the networks .*\(student, teacher\), got 'ema'"):
    read('ema')


class Evil:
  """Runs a command when it is unpickled by who trusts it."""

  def __init__(self, mark: pathlib.Path) -> None:
    self.mark = mark

  def __reduce__(self) -> Any:
    return os.system, (f'touch {self.mark}',)


@pytest.mark.parametrize('old', [False, True])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(old: bool, tmp_path: pathlib.Path) -> None:
  mark = tmp_path / 'ran'
  write(tmp_path / 'a.pth', {'model': NET, 'args': Evil(mark)}, old=old)
  with pytest.raises(UserError, match='expected weights alone, got a pickle that asks to run posix.system. Nothing'):
    files.read(tmp_path / 'a.pth')
  assert not mark.exists()


@pytest.mark.parametrize('name', [b'builtins\neval', b'torch.hub\nload', b'numpy\nload', b'vit_jax.main\nrun'])
def test_no_name_is_looked_up_that_is_not_on_the_list(name: bytes, tmp_path: pathlib.Path) -> None:
  with zipfile.ZipFile(tmp_path / 'a.pth', 'w') as archive:
    archive.writestr('net/data.pkl', b'\x80\x02c' + name + b'\n.')
  with pytest.raises(UserError, match='a pickle that asks to run ' + name.decode().replace('\n', '.')):
    files.read(tmp_path / 'a.pth')


@pytest.mark.parametrize(('name', 'says'), [
    (b'torch._utils\n_rebuild_qtensor', 'quantized tensors'), (b'torch._utils\n_rebuild_tensor_v3', 'others of 8 bits'),
    (b'torch\nqint8', 'Use the weights from before the quantization'),
    (b'__torch__.net\nNet', r"a whole model or TorchScript, .*torch.save\(model.state_dict\(\), 'weights.pth'\)")])
def test_quantized_tensors_and_whole_models_say_what_to_use(name: bytes, says: str, tmp_path: pathlib.Path) -> None:
  with zipfile.ZipFile(tmp_path / 'a.pth', 'w') as archive:
    archive.writestr('net/data.pkl', b'\x80\x02c' + name + b'\n.')
  with pytest.raises(UserError, match=says):
    files.read(tmp_path / 'a.pth')


@pytest.mark.parametrize(('content', 'says'), [
    ({'w': Tensor(STORAGE, (5, 3), (3, 1))}, 'reaches beyond its 12 numbers'),
    ({'w': Tensor(STORAGE, (2,), (-3,), 6)}, 'a shape or strides that cannot be'),
    ([1, 2], 'it holds a list instead of named tensors')])
def test_tensors_that_cannot_be_are_damage(content: Any, says: str, tmp_path: pathlib.Path) -> None:
  write(tmp_path / 'a.pth', content)
  with pytest.raises(UserError, match=says):
    files.read(tmp_path / 'a.pth')


def test_another_pickle_is_told(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'a.pkl').write_bytes(pickle.dumps({'a': 1}, 2))
  with pytest.raises(UserError, match='a pickle, but none of PyTorch'):
    files.read(tmp_path / 'a.pkl')
