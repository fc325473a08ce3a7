"""Finding configs, and reading them with overrides."""
from __future__ import annotations

import dataclasses
import json
import pathlib
import typing

import pytest

import vit_jax
from vit_jax.config import check, engine, files, schema
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes


@pytest.mark.parametrize('spec', ['digits', 'digits.py', 'configs/digits.py', './configs/digits.py'])
def test_own_configs_are_found_by_name_from_anywhere(
    spec: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(tmp_path)
  assert files.load(spec, []).name == 'digits'


@pytest.mark.parametrize('spec', ['/nowhere/digits', '/nowhere/my/digits.py', 'my/digits.py', '../digits.py'])
def test_a_missing_path_elsewhere_is_no_name_of_an_own_config(spec: str) -> None:
  with pytest.raises(UserError, match=rf"--config: expected .* got '{spec}'.* Did you mean digits\?"):
    files.load(spec, [])


@pytest.mark.parametrize(('result', 'kind'), [('s.Config()', schema.Config),
                                              ("s.Study('x', {'a': s.Config()})", schema.Study)])
def test_a_file_of_a_run_or_a_study_runs_once(tmp_path: pathlib.Path, result: str, kind: type) -> None:
  (tmp_path / 'mine.py').write_text(
      f'import pathlib\nfrom vit_jax.config import schema as s\n'
      f'def get_config():\n  with open({str(tmp_path / "log")!r}, "a") as f:\n    f.write("x")\n  return {result}\n')
  found = files.load_any(str(tmp_path / 'mine.py'), ['seed=3'])
  assert isinstance(found, kind) and (tmp_path / 'log').read_text() == 'x'
  assert (found if isinstance(found, schema.Config) else found.runs['a']).seed == 3


def test_an_unknown_config_lists_the_known_ones_and_the_nearest() -> None:
  with pytest.raises(UserError,
                     match=r"--config: expected the name .* got 'digit'. Known: .*digits, .* Did you mean digits\?"):
    files.find('digit')


def test_what_a_config_says_of_its_arguments_comes_as_it_is() -> None:
  with pytest.raises(UserError, match=r"^arguments: expected known ones, each once, got 'foo'.\n  'foo': exp"):
    files.load('augreg:foo', [])


def test_a_file_of_ones_own_works_with_arguments(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'mine.py'
  path.write_text('from vit_jax.config import schema as s\n'
                  'def get_config(arg):\n  return s.Config(name=arg)\n')
  assert files.load(f'{path}:a,b=c', []).name == files.load(f'{path}/:a,b=c', []).name == 'a,b=c'


def test_a_path_may_begin_with_the_home_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'mine.py').write_text(
      'from vit_jax.config import schema as s\ndef get_config(x):\n  return s.Config(x)\n')
  (tmp_path / 'config.json').write_text('{"type": "Config", "name": "mine"}')
  assert files.load('~/mine.py:a', []).name == 'a' and files.load('~/config.json', []).name == 'mine'
  with pytest.raises(UserError, match="got '~nobody-here/mine.py'. Known: "):
    files.load('~nobody-here/mine.py', [])


def test_a_file_that_returns_something_else_is_refused(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'mine.py'
  path.write_text('def get_config():\n  return {"a": 1}\n')
  with pytest.raises(UserError, match=r'expected a .*Config or Study, or .*ConfigDict, from get_config\(\), got dict'):
    files.load(str(path), [])


def test_json_holds_every_setting() -> None:
  config = files.load('digits', [])
  saved = json.loads(engine.to_json(config))
  for name, *_ in engine.fields(config):
    node = saved
    for part in name.split('.'):
      node = node[part]
  assert saved['model']['type'] == 'ViT' and saved['model']['pool']['type'] == 'Mean'


CONFIG_DICT = """
import ml_collections
def get_config():
  c = ml_collections.ConfigDict()
  c.name, c.length, c.image_px = 'mine', '3 epochs', (32, 32)
  c.model = ml_collections.ConfigDict({'name': 'S/16', 'dropout': .1, 'pool': 'mean', 'dtype': 'bfloat16'})
  c.optimizer = {'name': 'sgd', 'lr': 1, 'schedule': {'decay': 'linear'}, 'rules': ({'paths': 'head/.*', 'lr': 0.},)}
  c.objective = 'mae'
  c.batch_size = ml_collections.FieldReference(96)
  c.evals = {'fit': {'type': 'Knn', 'neighbors': [5, 20]}}
  return c
"""


def test_a_config_may_be_an_ml_collections_config_dict(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'mine.py'
  path.write_text(CONFIG_DICT)
  config = files.load(str(path), ['optimizer.lr=.5'], models=sizes.model)
  assert config == schema.Config(
      name='mine', length='3 epochs', batch_size=96, image_px=(32, 32), objective=schema.Mae(),
      model=dataclasses.replace(sizes.model('S/16'), dropout=.1, pool=schema.Mean(), dtype=schema.DType.BF16),
      optimizer=schema.Sgd(lr=.5, schedule=schema.Schedule(schema.Decay.LINEAR),
                           rules=(schema.PathRule('head/.*', 0.),)),
      evals={'fit': schema.Knn(neighbors=(5, 20))})


def test_a_config_dict_is_converted_as_strictly(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'mine.py'
  path.write_text('import ml_collections\ndef get_config():\n  return ml_collections.ConfigDict(dict(\n'
                  "      lenght='3 epochs', batch_size='128', optimizer={'name': 'sgdd'}, model={'patch': 8},\n"
                  "      train={'early_stops': True, 'sam': {'rho': None}}, image_px=(1, 2, 3), head={'probe': 1}))\n")
  with pytest.raises(UserError) as error:
    files.load(str(path), [])
  for part in (f'{path}: 8 settings cannot be read:\n',
               "config.lenght: expected the name of a setting, got 'lenght'. Did you mean config.length?",
               'config.batch_size: expected a whole number, got "128".',
               "rmsprop, schedulefree, sgd, or MODULE:CLASS of your own, got 'sgdd'. Did you mean sgd?",
               'config.model: expected settings with a type, one of ViT, ResNet, ',
               "config.train.early_stops: expected the name of a setting, got 'early_stops'. Did you mean "
               'config.train.early_stop?', 'config.train.sam.rho: expected a number, got null.',
               'config.image_px: expected 2 values, got [1, 2, 3].',
               'config.head.probe: expected True or False, got 1.'):
    assert part in str(error.value), part


def test_values_of_another_type_in_a_file_are_listed_with_their_paths_also_beside_overrides(
    tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'mine.py'
  path.write_text('from vit_jax.config import schema as s\ndef get_config():\n  c = s.Config()\n'
                  "  c.batch_size, c.model, c.data.recipe, c.optimizer.lr = '128', 'S/16', None, '1e-3'\n  return c\n")
  config = files.load(str(path), ['seed=3'])
  kinds = ' or '.join(kind.__name__ for kind in typing.get_args(schema.Model))
  assert check.problems(config) == [
      "batch_size: expected a whole number, got '128'.", f"model: expected {kinds}, got 'S/16'.",
      'data.recipe: expected Recipe, got None.', "optimizer.lr: expected a number, got '1e-3'."]


@pytest.mark.parametrize(('study', 'said'), [
    ('"x", [c]', r'runs: expected a dict with names as keys, got \['),
    ('"x", {1: c}', 'runs: expected a dict with names as keys, got {1: '),
    ('"x", {"a": None}', "runs: expected Config, got {'a': None}"),
    ('"x", {"a": s.Study("y")}', 'runs: expected Config, got '),
    ('"x", {"a": c}, then=lambda results: {}', 'then: expected a tuple, got <function'),
    ('"x", {"a": c}, then=(3,)', r'then: expected a tuple, each a function, got \(3,\)'),
    ('"x", {"a": c}, table=3', 'table: expected a function or None, got 3'),
    ('"x", search=3', 'search: expected Search or None, got 3')])
def test_values_of_another_type_in_a_study_are_listed(study: str, said: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'mine.py').write_text(
      f'from vit_jax.config import schema as s\nc = s.Config()\ndef get_config():\n  return s.Study({study})\n')
  with pytest.raises(UserError, match=f'mine.py: expected a study, got problems:\n  {said}'):
    files.load_study(str(tmp_path / 'mine.py'), [])


@pytest.mark.parametrize(('more', 'said'), [('None', 'a dict with names as keys, got None'),
                                            ('{"b": 3}', "Config, got {'b': 3}")])
def test_later_runs_that_are_no_configs_are_refused(more: str, said: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'mine.py').write_text(
      'from vit_jax.config import schema as s\ndef get_config():\n'
      f'  return s.Study("x", {{"a": s.Config()}}, then=(lambda results: {more},))\n')
  with pytest.raises(UserError, match=f'then of x: expected a study, got problems:\n  runs: expected {said}'):
    files.load_study(str(tmp_path / 'mine.py'), []).then[0]({})


def test_configs_are_listed_with_their_arguments() -> None:
  found = {one.name: one for one in vit_jax.list_configs()}
  assert [*found] == files.list_names() and all(one.about and one.path.is_file() for one in found.values())
  assert found['finetune'].arguments[:2] == ('model', 'dataset') and found['digits'].arguments == ()


def test_a_pattern_chooses_configs() -> None:
  assert {one.name for one in vit_jax.list_configs('mae*i1k')} == {'mae_i1k', 'mae_scratch_i1k'}


def test_an_empty_list_of_configs_is_explained_by_a_warning() -> None:
  with pytest.warns(UserWarning, match="list_configs: .* got 'digts'. Did you mean digits"):
    assert vit_jax.list_configs('digts') == []


def test_a_json_config_takes_no_arguments(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'config.json').write_text('{"type": "Config", "name": "mine"}')
  with pytest.raises(UserError, match=r'expected a path without arguments, as a .json file takes none, got :B/16'):
    files.load(f'{tmp_path}/config.json:B/16', [])
