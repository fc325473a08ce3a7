"""What follows from the names and JSON files of checkpoints, and which of them stands for a run."""
from __future__ import annotations

import json
import pathlib
import types
from typing import Any

import numpy as np
import pytest

from vit_jax.core.failures import Damaged
from vit_jax.record import checkpoint_files, reader


def write(run: pathlib.Path, checkpoints: dict[int, Any], rows: dict[int, dict[str, Any]]) -> None:
  """Writes descriptions of checkpoints with these `metrics`, None = of an older version, and a record."""
  for step, metrics in checkpoints.items():
    body = {'step': step} | ({} if metrics is None else {'metrics': metrics})
    (run / 'checkpoints' / str(step) / 'meta').mkdir(parents=True)
    (run / 'checkpoints' / str(step) / checkpoint_files.META).write_text(json.dumps(checkpoint_files.seal(body)))
  lines = [{'step': step, 'time_s': 0., **row} for step, row in rows.items()]
  (run / 'metrics.jsonl').write_text(''.join(f'{json.dumps(line)}\n' for line in lines))


@pytest.mark.parametrize(('metric', 'step'), [
    ('', 9), ('val/top1', 6), ('val/nll', 3), ('val/nll.partial500', 3), ('own/loss', 9), ('val/other', 9)])
def test_the_best_checkpoint_stands_for_the_run_or_else_the_newest(metric: str, step: int,
                                                                   tmp_path: pathlib.Path) -> None:
  rows = {1: {'val/top1': 1., 'val/nll': 0.}, 3: {'val/top1': .5, 'val/nll': .1, 'val/nll.partial500': .1},
          6: {'val/top1': .7, 'val/nll': .2, 'val/nll.partial500': .2}, 9: {'val/top1': 'nan', 'own/loss': .1}}
  write(tmp_path / 'new', {3: {**rows[3]}, 6: {**rows[6]}, 9: {'own/loss': .1}}, {})
  write(tmp_path / 'old', {3: None, 6: None, 9: None}, rows)  # step 1 has no checkpoint
  for name in ('new', 'old'):
    found = checkpoint_files.choose(tmp_path / name, metric)
    assert found is not None and (found.step, found.newest) == (step, 9), name


def test_of_equal_values_the_newest_is_the_best_and_a_description_decides_over_the_record(
    tmp_path: pathlib.Path) -> None:
  write(tmp_path, {3: {'a/b': .5}, 6: {'a/b': .5}, 9: {'a/b': .25}}, {3: {'a/b': .75}, 6: {'a/c': .1}})
  assert checkpoint_files.choose(tmp_path, 'a/b') == checkpoint_files.Chosen(6, 9, 'a/b', .5)
  assert checkpoint_files.measured(tmp_path, 3) == {'a/b': .5}
  assert checkpoint_files.measured(tmp_path, 6) == {'a/b': .5, 'a/c': .1}
  assert checkpoint_files.choose(tmp_path / 'absent', 'a/b') is None


@pytest.mark.parametrize('metrics', [[], 'x', {'a/b': 'x'}, {'a/b': None}, {'a/b': 10**400}, {'a/b': True}])
def test_metrics_of_another_kind_are_never_the_best(metrics: object, tmp_path: pathlib.Path) -> None:
  write(tmp_path, {3: {'a/b': .5}, 6: metrics}, {})
  found = checkpoint_files.choose(tmp_path, 'a/b')
  assert found is not None and found.step == 3


def test_a_damaged_description_is_not_chosen(tmp_path: pathlib.Path) -> None:
  write(tmp_path, {3: {'a/b': .5}, 6: {'a/b': .75}}, {})
  (tmp_path / 'checkpoints' / '6' / checkpoint_files.META).write_text('{')
  assert checkpoint_files.choose(tmp_path, 'a/b') == checkpoint_files.Chosen(3, 6, 'a/b', .5)


@pytest.mark.parametrize(('metric', 'expected'), [
    ('test/nll@ema', True), ('val/loss.partial500', True), ('x/held_out_nll', True), ('health/alignment@ema', True),
    ('health/uniformity', True), ('test/top1', False), ('few/10shot', False), ('own/closs', False)])
def test_the_direction_of_a_metric_does_not_depend_on_its_view_or_limit(metric: str, *, expected: bool) -> None:
  assert reader.is_lower_better(metric) is expected


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
    checkpoint_files.guarded_read('checkpoint 3', fail)
