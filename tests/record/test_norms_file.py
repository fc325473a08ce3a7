"""Norms come back as they were written, without what was lost, after kills and resumes."""
from __future__ import annotations

import pathlib

import numpy as np
import pytest

from vit_jax.record import norms_file

NORMS = {'grad': {'head/bias': np.float32(.1), 'blocks/kernel': np.array([1., np.nan, 3.], np.float32)},
         'update': {'head/bias': 2}}


def write(path: pathlib.Path, steps: list[int], *, is_new: bool = False, norms: norms_file.Norms = NORMS) -> None:
  file = norms_file.NormsFile(str(path / norms_file.FILE), is_new=is_new)
  for step in steps:
    file.write(step, norms)
  file.close()


def steps(path: pathlib.Path) -> list[int]:
  return [event['step'] for event in norms_file.read(path)]


def test_norms_come_back_by_kind_path_and_layer(tmp_path: pathlib.Path) -> None:
  write(tmp_path, [5])
  [found] = norms_file.read(tmp_path)
  assert found['step'] == 5 and found['param'] == {} and found['update'] == {'head/bias': 2.}
  assert found['grad']['head/bias'] == float(np.float32(.1))
  np.testing.assert_array_equal(found['grad']['blocks/kernel'], [1., np.nan, 3.])
  assert (tmp_path / norms_file.FILE).stat().st_size < 100 + 8 + 5 * 4


def test_work_that_was_lost_and_repeated_is_left_out(tmp_path: pathlib.Path) -> None:
  write(tmp_path, [1, 10, 20, 30])
  write(tmp_path, [15, 20, 25])  # resumed from step 10
  assert steps(tmp_path) == [1, 10, 15, 20, 25]
  write(tmp_path, [3], is_new=True)
  assert steps(tmp_path) == [3]


@pytest.mark.parametrize('cut', [1, 5, 27])
def test_a_record_that_a_kill_left_incomplete_is_cut(tmp_path: pathlib.Path, cut: int) -> None:
  write(tmp_path, [1, 2, 3])
  path = tmp_path / norms_file.FILE
  path.write_bytes(path.read_bytes()[:-cut])
  assert steps(tmp_path) == [1, 2]
  write(tmp_path, [3, 4])
  assert steps(tmp_path) == [1, 2, 3, 4]


def test_norms_of_another_network_begin_a_new_file(tmp_path: pathlib.Path) -> None:
  write(tmp_path, [1, 2])
  write(tmp_path, [3], norms={'grad': {'other': 1.}})
  [found] = norms_file.read(tmp_path)
  assert found['grad'] == {'other': 1.}


def test_no_file_has_no_norms_and_a_damaged_one_is_named(tmp_path: pathlib.Path) -> None:
  assert not norms_file.read(tmp_path)
  (tmp_path / norms_file.FILE).write_bytes(b'{"leaves": 3}\n')
  with pytest.raises(ValueError, match='norms.f32: expected norms behind a header'):
    norms_file.read(tmp_path)
