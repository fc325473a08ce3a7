"""`vit-jax settings`: what is shown of the settings of a config."""
from __future__ import annotations

import json
import pathlib

import pytest

from vit_jax import main
from vit_jax.config import engine, files, schema
from vit_jax.recipes import sizes


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
  assert main.run(['settings', *words]) == 0
  return capsys.readouterr().out


def entries(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, dict[str, str]]:
  found: dict[str, dict[str, str]] = json.loads(shown(capsys, *words, '--json'))
  return found


def test_every_setting_is_shown_with_what_set_it(capsys: pytest.CaptureFixture[str]) -> None:
  found = entries(capsys, 'digits', '--config.optimizer.lr=0.5')
  config = files.load('digits', [])
  of_parts = {name for name, kind in engine.walk(config) if engine.kinds(kind)}
  assert [name for name in found if name not in of_parts] == [one.name for one in engine.fields(config)]
  assert of_parts < found.keys() and (found['model.pool']['value'], found['model.pool']['default']) == (
      'mean', 'classtoken')
  assert found['model.patch'] == {
      'value': '4', 'part': 'ViT', 'type': 'whole number', 'unit': 'px', 'default': '16', 'allowed': '1 to 65535 px',
      'about': found['model.patch']['about'], 'set_by': 'digits.py'}
  assert found['model.pool']['set_by'] == 'digits.py'
  assert (found['optimizer.lr']['value'], found['optimizer.lr']['set_by']) == ('0.5', 'command line')
  assert found['seed']['set_by'] == 'default'


def test_a_part_of_the_command_line_sets_what_differs_from_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
  found = entries(capsys, 'digits', 'model', '--config.model=S/16')
  assert {name for name, one in found.items() if one['set_by'] == 'command line'} == {
      'model', 'model.width', 'model.heads', 'model.mlp.hidden'}
  assert found['model.width']['value'] == str(sizes.VIT['S'].width)


def test_lines_fit_into_80_columns_and_are_grouped_by_part(capsys: pytest.CaptureFixture[str]) -> None:
  lines = shown(capsys, 'finetune:B/16,pets').splitlines()
  assert max(map(len, lines)) <= 80 and lines[0].split() == ['setting', 'value', 'default', 'set', 'by']
  assert 'optimizer: Sgd' in lines and lines[1] == 'Config'


def test_words_choose_parts_and_names(capsys: pytest.CaptureFixture[str]) -> None:
  text = shown(capsys, '--config=digits', 'schedule', 'lr')
  assert 'optimizer.lr=0.002\n    at the peak of the schedule\n    number: at least 0\n' in text
  assert 'optimizer.schedule.warmup=5 %' in text and 'model.' not in text


def test_only_what_is_not_left_at_its_default_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
  found = entries(capsys, 'digits', '--changed')
  assert 'seed' not in found and 'model.patch' in found and all(one['set_by'] != 'default' for one in found.values())


def test_a_study_shows_its_first_run_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['settings', 'vtab', 'seed']) == 0
  out, err = capsys.readouterr()
  assert out.startswith('seed=') and 'vtab is a study of 57 runs' in err


def test_the_config_of_a_run_names_its_file(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'config.json').write_text(engine.to_json(schema.Config(seed=3)))
  found = entries(capsys, str(tmp_path / 'config.json'))
  assert {name for name, one in found.items() if one['set_by'] == 'config.json'} == {'seed'}


@pytest.mark.parametrize(('words', 'said'), [
    ((), 'settings: expected the name of a config, got none.'),
    (('data.decode',), 'expected the name of a config first, got the setting data.decode. Run vit-jax settings '
     'CONFIG data.decode.'),
    (('digits', 'optimzer'), "expected a part or the name of a setting, got 'optimzer'. Did you mean optimizer?"),
    (('digitz',), 'Did you mean digits?'),
    (('digits', '--config.sed=1'), 'Did you mean')])
def test_what_is_wrong_is_said(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['settings', *words]) == 2
  assert said in capsys.readouterr().err
