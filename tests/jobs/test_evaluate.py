"""Evaluating a run: where results go, and networks with values that are not finite."""
from __future__ import annotations

import errno
import json
import math
import pathlib
import types
from typing import Any

import jax.numpy as jnp
import pytest

from vit_jax import main
from vit_jax.config import files
from vit_jax.core.errors import UserError
from vit_jax.evaluate import by_class, results
from vit_jax.inspect.model import Guess
from vit_jax.jobs import evaluate, predict
from vit_jax.record import destination, run_directory
from vit_jax.train.state import TrainState


def forbid(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
  """A file system on which no file can be created."""
  def refuse(**_: Any) -> None:
    raise OSError(number, 'Read-only file system')

  monkeypatch.setattr(destination.tempfile, 'mkstemp', refuse)


def test_a_place_that_cannot_be_written_is_an_error_before_anything_is_computed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  destination.check_writable(tmp_path / 'a' / 'b', setting='--to', advice='')
  assert not list(tmp_path.iterdir())
  (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
  monkeypatch.setattr(evaluate.build, 'open_data', lambda config: pytest.fail('it began'))
  forbid(monkeypatch, errno.EROFS)
  words = ['evaluate', '--config=digits', f'--workdir={tmp_path / "run"}']
  assert main.run(words) == 2
  said = capsys.readouterr().err
  assert f'--workdir={tmp_path / "run"}: expected a directory that can be written, got Read-only file system. ' in said
  assert 'Set --to=DIR to write the results elsewhere.' in said
  assert main.run([*words, f'--to={tmp_path / "other"}']) == 2
  assert f'--to={tmp_path / "other"}: expected a directory that can be written' in capsys.readouterr().err


def test_the_numbers_are_printed_before_they_are_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
  def full(*_: Any, **__: Any) -> None:
    raise UserError('the disk is full')

  monkeypatch.setattr(results, 'write', full)
  monkeypatch.setattr(evaluate.resources, 'eval_source', lambda *_: None)
  monkeypatch.setattr(results, 'show', lambda *_, **__: print('top1 50 %'))
  state: Any = TrainState(jnp.ones(()), {}, {}, {})
  data: Any = types.SimpleNamespace(class_names=('a', 'b'))
  found: Any = types.SimpleNamespace(config=files.load('digits', []), state=state, digest='')
  with pytest.raises(UserError, match='the disk is full'):
    evaluate.write_results(results.Final({}, None, '', '', {}), found, data, tmp_path, {}, by_class.NOTHING)
  assert capsys.readouterr().out == 'top1 50 %\n'


@pytest.mark.parametrize('value', [math.nan, math.inf])
@pytest.mark.parametrize('place', ['params', 'extra'])
def test_a_network_with_values_that_are_not_finite_is_not_evaluated(value: float, place: str) -> None:
  good = {'a': jnp.ones(3), 'n': jnp.arange(2)}
  evaluate.check_finite(TrainState(jnp.zeros(()), good, {'mu': jnp.array(value)}, {'ema': good}), 'r')
  bad = {'a': jnp.array([1., value, 0.]), 'n': jnp.arange(2)}
  state = TrainState(jnp.zeros(()), bad if place == 'params' else good, {}, {'ema': bad if place == 'extra' else good})
  name = 'params/a' if place == 'params' else 'extra/ema/a'
  with pytest.raises(UserError, match=f'^r: expected a network with finite values, got .* in {name}. Use .* or add '
                     '--allow_nonfinite'):
    evaluate.check_finite(state, 'r')


def test_numbers_that_are_not_finite_are_null_in_json(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  def refuse(word: str) -> float:
    raise AssertionError(word)

  run_directory.write_json(tmp_path / 'a.json', {'metrics': {'top1': math.nan, 'nll': [1., math.inf]}, 'step': 3})
  assert json.loads((tmp_path / 'a.json').read_text(), parse_constant=refuse) == {
      'metrics': {'top1': None, 'nll': [1., None]}, 'step': 3}
  file = predict.Readable('a.jpg', jnp.zeros(1))  # type: ignore[arg-type]
  predict._print_classes(file, [Guess(0, 'cat', math.nan)], as_json=True)
  assert json.loads(capsys.readouterr().out, parse_constant=refuse)['classes'][0]['probability'] is None
