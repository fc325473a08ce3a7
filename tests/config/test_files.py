"""Finding configs and applying overrides: everything that is wrong is said at once."""
from __future__ import annotations

import json
import pathlib

import pytest

from vit_jax.config import files, json_files, schema
from vit_jax.core.errors import UserError


@pytest.mark.parametrize('spec', ['digits', 'digits.py', 'configs/digits.py', '/nowhere/digits'])
def test_own_configs_are_found_by_name_from_anywhere(
    spec: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(tmp_path)
  assert files.load(spec, []).name == 'digits'


def test_an_unknown_config_lists_the_known_ones_and_the_nearest() -> None:
  with pytest.raises(UserError, match=r"--config='digit' is not a config. Did you mean digits\? Known: .*digits"):
    files.find('digit')


def test_overrides_are_parsed_by_type() -> None:
  config = files.load('digits', [
      'model.width=64', 'model.pool=cls', 'optimizer.lr=3e-4', 'length=20 epochs', 'image_px=16,24',
      'model.dtype=bfloat16', 'evals.test.every=3 epochs', 'train.progress=false', 'data.recipe.mean=.1,.2,.3',
      'data.source=folder:a=b,c'])
  assert config.model.width == 64 and config.model.pool is schema.Pool.CLS and config.optimizer.lr == 3e-4
  assert config.model.dtype is schema.DType.BF16 and files.load('digits', ['model.dtype=bf16']) == files.load(
      'digits', ['model.dtype=BFloat16'])
  assert config.image_px == (16, 24) and config.evals['test'].every == '3 epochs' and config.train.progress is False
  assert config.data.recipe.mean == (.1, .2, .3) and config.data.source == 'folder:a=b,c'


def test_all_bad_overrides_are_listed_at_once() -> None:
  with pytest.raises(UserError) as error:
    files.load('digits', ['modle.width=3', 'model.width=x', 'model.pool=middle', 'optimizer.lr=fast', 'seed',
                          'train.progress=maybe', 'optimizer.momentum=.9', 'model=3', 'image_px=3'])
  text = str(error.value)
  for part in ('9 overrides', 'config.modle.width: no such setting; the nearest is config.model.width',
               "config.model.width: expected a whole number, got 'x'.",
               "config.model.pool: expected one of cls, mean, patches, first, map, got 'middle'.",
               "config.optimizer.lr: expected a number, got 'fast'.", 'config.seed: expected a value, got none.',
               "config.train.progress: expected true or false, got 'maybe'.",
               'config.optimizer.momentum: no such setting', 'config.model: no such setting',
               "config.image_px: expected 2 values such as 16,16, got '3'."):
    assert part in text, part


def test_what_a_config_says_of_its_arguments_comes_as_it_is() -> None:
  with pytest.raises(UserError, match=r"^config arguments 'foo':\n  'foo' is not known\nKnown:\n  size=B/16 \| Ti/16"):
    files.load('augreg:foo', [])


def test_a_file_of_ones_own_works_with_arguments(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'mine.py'
  path.write_text('from vit_jax.config import schema as s\n'
                  'def get_config(arg):\n  return s.Config(name=arg)\n')
  assert files.load(f'{path}:a,b=c', []).name == 'a,b=c'


def test_a_file_that_returns_something_else_is_refused(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'mine.py'
  path.write_text('def get_config():\n  return {"a": 1}\n')
  with pytest.raises(UserError, match=r'expected a .*Config or Study from get_config\(\), got dict'):
    files.load(str(path), [])


def test_json_holds_every_setting() -> None:
  config = files.load('digits', [])
  saved = json.loads(json_files.to_json(config))
  for name, *_ in files.fields(config):
    node = saved
    for part in name.split('.'):
      node = node[part]
  assert saved['model']['type'] == 'ViT' and saved['model']['pool'] == 'mean'
