"""What can be said of checkpoints from their names and JSON files."""
from __future__ import annotations

import json
import pathlib
import types

import numpy as np
import pytest

from vit_jax.core.failures import Damaged
from vit_jax.record import checkpoint_files


def test_steps_are_folders_that_are_called_like_numbers(tmp_path: pathlib.Path) -> None:
  for name in ('10', '2', '007', '3.orbax-checkpoint-tmp', 'x', '٣'):
    (tmp_path / name).mkdir()
  (tmp_path / '5').write_text('')
  assert checkpoint_files.steps(tmp_path) == [2, 10]
  assert checkpoint_files.steps(tmp_path / 'absent') == checkpoint_files.steps(tmp_path / '5') == []


def test_a_description_is_read_if_its_digest_fits(tmp_path: pathlib.Path) -> None:
  path = tmp_path / checkpoint_files.META
  path.parent.mkdir()
  path.write_text(json.dumps(checkpoint_files.seal({'step': 3})))
  assert checkpoint_files.read_meta(tmp_path) == {'step': 3}
  for text in (path.read_text().replace('3', '4', 1), '[]', '{}', '', '{"body": 1}', '[' * 100_000):
    path.write_text(text)
    with pytest.raises(Damaged):
      checkpoint_files.read_meta(tmp_path)


def test_arrays_must_be_those_of_the_description() -> None:
  def array(shape: tuple[int, ...], chunk: tuple[int, ...], dtype: str = 'float32') -> types.SimpleNamespace:
    return types.SimpleNamespace(shape=shape, dtype=np.dtype(dtype), storage=types.SimpleNamespace(chunk_shape=chunk))

  shapes = {'a': 'float32[4, 3]', 'b': 'float32[]'}
  checkpoint_files.check_arrays('params', [array((4, 3), (2, 3)), array((), ())], shapes)
  for found, says in (([array((4, 30), (2, 3)), array((), ())], r'other arrays .*: float32\[4, 30\]'),
                      ([array((4, 3), (2, 3), 'float64'), array((), ())], 'other arrays .*: float64'),
                      ([array((4, 3), (2, 3))], 'only 1 arrays'),
                      ([array((4, 3), (1 << 40, 3)), array((), ())], 'is larger than its array')):
    with pytest.raises(Damaged, match=says):
      checkpoint_files.check_arrays('params', found, shapes)


def test_an_unknown_error_of_the_runtime_does_not_make_a_checkpoint_damaged() -> None:
  def fail() -> None:
    raise type('JaxRuntimeError', (RuntimeError,), {})('INTERNAL: stream did not block')

  with pytest.raises(RuntimeError, match='^INTERNAL: stream did not block$'):
    checkpoint_files.guard('checkpoint 3', fail)
