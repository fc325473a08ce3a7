"""Settings classes in a person's own file: in configs, on the command line, and in the `config.json` of a run."""
from __future__ import annotations

import json
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest

from vit_jax import main
from vit_jax.config import check, engine, files, overrides, schema
from vit_jax.core import implementation, reports
from vit_jax.core.errors import UserError
from vit_jax.jobs import settings

MODULE = """
from __future__ import annotations
import dataclasses
from typing import ClassVar
from vit_jax.config import schema

@dataclasses.dataclass
class Turn(schema.ObjectiveSettings):
  implementation: ClassVar[str] = 'turning:Spec'
  has_head: ClassVar[bool] = False
  turns: int = schema.ranged(4, schema.Range(2, 4))  # rotations to tell apart
  share: float = .5
  crops: tuple[int, ...] = (1, 2)

@dataclasses.dataclass
class Count(schema.Evaluation):
  implementation: ClassVar[str] = 'turning:build'
  bins: int = 3

class Undecorated(schema.ObjectiveSettings):
  implementation: ClassVar[str] = 'turning:Spec'

@dataclasses.dataclass
class Nameless(schema.ObjectiveSettings):
  pass

class Spec:
  pass
"""
CONFIG = """
import turning
from vit_jax.config import schema as s

def get_config():
  return s.Config(objective=turning.Turn(), evals={'count': turning.Count()})
"""


@pytest.fixture
def config(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
  """A config whose objective and evaluation are in `turning.py` beside it."""
  monkeypatch.setattr(sys, 'path', [*sys.path])
  monkeypatch.setattr(implementation, '_trusted_folders', [])
  (tmp_path / 'turning.py').write_text(MODULE)
  (tmp_path / 'mine.py').write_text(CONFIG)
  yield tmp_path / 'mine.py'
  sys.modules.pop('turning', None)


def test_a_config_uses_a_class_of_a_file_beside_it(config: pathlib.Path) -> None:
  found = files.load(str(config), [])
  assert type(found.objective).__name__ == 'Turn' and isinstance(found.objective, schema.ObjectiveSettings)
  check.check(found)
  assert implementation.of(found.objective) is sys.modules['turning'].Spec
  assert str(config.parent) in sys.path  # loader processes get it


def test_its_settings_are_overridden_checked_and_described(config: pathlib.Path) -> None:
  found = files.load(str(config), ['objective.turns=3', 'objective.crops=5,6,7', 'evals.count.bins=4'])
  assert found.objective.turns == 3 and found.objective.crops == (5, 6, 7) and found.evals['count'].bins == 4
  with pytest.raises(UserError, match=r'config.objective.trns: .*Did you mean config.objective.turns\?'):
    files.load(str(config), ['objective.trns=3'])
  with pytest.raises(UserError, match='objective.turns: expected 2 to 4, got 7'):
    check.check(files.load(str(config), ['objective.turns=7']))
  one, = [s.described for s in settings.of(str(config), []) if s.described.name == 'objective.turns']
  assert (one.part, one.type, one.allowed, one.about) == ('Turn', 'whole number', '2 to 4', 'rotations to tell apart')


def test_checks_of_the_base_class_hold_for_it(config: pathlib.Path) -> None:
  with pytest.raises(UserError, match='data.recipe.mixup: expected 0 for objective Turn, which has no head'):
    check.check(files.load(str(config), ['data.recipe.mixup=0.2']))


def test_the_file_of_a_run_names_its_module_and_comes_back(config: pathlib.Path) -> None:
  found = files.load(str(config), ['objective.turns=3'])
  text = engine.to_json(found)
  assert json.loads(text)['objective']['type'] == 'turning:Turn'
  assert json.loads(text)['evals']['count']['type'] == 'turning:Count'
  again = engine.from_json(text)
  assert again == found and type(again.objective) is type(found.objective)


def test_a_missing_module_is_a_message_that_says_where_it_was_looked_for(
    config: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  saved = tmp_path / 'run' / 'config.json'
  saved.parent.mkdir()
  saved.write_text(engine.to_json(files.load(str(config), [])))
  monkeypatch.setattr(sys, 'path', [one for one in sys.path if one != str(tmp_path)])
  monkeypatch.setattr(implementation, '_trusted_folders', [])
  sys.modules.pop('turning')
  monkeypatch.chdir(saved.parent)
  with pytest.raises(UserError) as error:
    engine.read_file(saved)
  assert 'config.objective: turning: expected a Python module, got none.' in str(error.value)
  assert 'It was looked for among the installed packages. Put turning.py beside the config of' in str(error.value)
  monkeypatch.chdir(tmp_path)
  with pytest.raises(UserError, match=f'got one of the current folder, {tmp_path}, which was not run'):
    engine.read_file(saved)
  files.load('digits', ['objective=turning:Turn'])  # the command line names the module, and with it the folder
  assert type(engine.read_file(saved).objective).__name__ == 'Turn'


def test_a_config_that_is_read_for_its_network_keeps_parts_whose_code_is_not_there(config: pathlib.Path) -> None:
  text = engine.to_json(files.load(str(config), ['objective.turns=3']))
  sys.modules.pop('turning')
  (config.parent / 'turning.py').unlink()
  found = engine.from_json(text, code='model')
  assert isinstance(found.objective, schema.ObjectiveSettings) and isinstance(found.evals['count'], schema.Evaluation)
  assert engine.flat(json.loads(engine.to_json(found))) == engine.flat(json.loads(text))
  plain = json.loads(text)
  plain['objective'] |= {'not a name': 1, 'problems': 2, 'class': 3}
  with pytest.raises(UserError, match='3 settings cannot be read:'):
    engine.read(plain, code='model')


def test_the_command_line_names_it_for_any_config(config: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir(config.parent)
  found = files.load('digits', ['objective=turning:Turn', 'objective.turns=2'])
  assert type(found.objective).__name__ == 'Turn' and found.objective.turns == 2
  with pytest.raises(UserError, match="expected 'Trun' in this module, .*turning.py, got none. Did you mean Turn"):
    files.load('digits', ['objective=turning:Trun'])


@pytest.mark.parametrize('name', ['jax:jit', 'turning:Spec', 'turning:Nameless', 'turning:Count', 'numpy:ndarray'])
def test_only_settings_classes_of_the_part_are_taken(config: pathlib.Path, name: str) -> None:
  files.load(str(config), [])
  for read in (lambda: overrides.changed({'': schema.Config()}, [f'objective={name}']),
               lambda: engine.read({'objective': {'type': name}})):
    with pytest.raises(UserError, match='objective: expected a dataclass that inherits from ObjectiveSettings and '
                                        f'names its implementation, got {name}'):
      read()


@pytest.mark.parametrize('name', ['antigravity:Turn', 'os.path:join', ':', 'x:', '..:x', f'{"x" * 300}:y', 'a b:c'])
def test_a_file_of_settings_runs_no_module_of_python_and_no_name_breaks_it(
    name: str, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(implementation, '_trusted_folders', [])  # folders of other tests
  with pytest.raises(UserError) as error:
    engine.read({'objective': {'type': name}})
  assert 'config.objective: ' in str(error.value) and len(str(error.value)) < 600
  assert 'antigravity' not in sys.modules


@pytest.mark.parametrize('kind', ['Undecorated', 'Nameless'])
def test_a_class_without_decorator_or_implementation_is_a_problem(config: pathlib.Path, kind: str) -> None:
  config.write_text(CONFIG.replace('Turn()', f'{kind}()'))
  found = files.load(str(config), [])
  with pytest.raises(UserError, match="with @dataclasses.dataclass and implementation = 'module:name'"):
    check.check(found)


def test_a_class_in_the_config_itself_is_refused(config: pathlib.Path) -> None:
  config.write_text(MODULE + CONFIG.replace('import turning', '').replace('turning.', ''))
  with pytest.raises(UserError, match='expected settings classes from modules, got Turn of objective, which this file '
                                      'defines. Move it to a file beside this one'):
    files.load(str(config), [])


def test_an_error_in_the_file_is_a_message_with_its_line(config: pathlib.Path) -> None:
  (config.parent / 'turning.py').write_text('x = 1\ny = x / 0\n')
  with pytest.raises(UserError, match=r'turning.py, line 2: expected a config that runs, got ZeroDiv.*\n    y = '):
    files.load(str(config), [])
  with pytest.raises(UserError, match='turning.py, line 2: expected a module that can be imported, got ZeroDiv'):
    implementation.load('turning:Turn')
  (config.parent / 'turning.py').write_text('import no_such_package\n')
  with pytest.raises(UserError, match="turning.py, line 1: .*No module named 'no_such_package'"):
    implementation.load('turning:Turn')


def test_the_base_of_own_types_is_no_type_to_choose() -> None:
  declared = {field.name: field.type for field in schema.Config.__dataclass_fields__.values()}
  assert engine.base(declared['objective']) is schema.ObjectiveSettings
  assert 'objectivesettings' not in engine.kinds(declared['objective'])
  assert engine.base(schema.Eval) is schema.Evaluation and 'evaluation' not in engine.kinds(schema.Eval)
  with pytest.raises(UserError, match='expected supervised, mae, .*, or MODULE:CLASS of your own, got'):
    engine.by_name(declared['objective'], 'objectivesettings', None)


def test_child_processes_find_the_same_modules(config: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.chdir('/')
  found = files.load(str(config), [])
  code = 'import sys, pickle; from vit_jax.core import implementation; print(pickle.load(sys.stdin.buffer).objective)'
  done = subprocess.run([sys.executable, '-c', code], input=pickle.dumps(found), capture_output=True,
                        env=implementation.environment(os.environ))
  assert done.stdout.decode().startswith('Turn(turns=4'), done.stderr.decode()


def test_an_exception_in_own_code_is_an_error_of_the_user(config: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'turning.py').write_text(f'{MODULE}\ndef fail():\n  return {{}}["x"]\n')
  files.load(str(config), [])
  with pytest.raises(KeyError) as error:
    sys.modules['turning'].fail()
  failure = reports.explain(error.value, ['train'], {'XDG_STATE_HOME': str(tmp_path)})
  number = len(MODULE.splitlines()) + 3
  assert failure.status == 2 and failure.message.startswith(
      f"error: {tmp_path}/turning.py, line {number}, in fail: expected code that runs, got KeyError: 'x'.\n    return ")
  assert 'report' not in failure.message and 'holds the traceback' in failure.message
  assert list((tmp_path / 'vit_jax').glob('failure-*.txt'))
  with_traceback = reports.explain(error.value, ['train'], {'VIT_JAX_TRACEBACK': '1'})
  assert with_traceback.status == 2 and with_traceback.message.startswith('Traceback')
  assert "in fail: expected code that runs, got KeyError: 'x'." in with_traceback.message


def test_own_code_that_takes_other_arguments_is_named(config: pathlib.Path) -> None:
  found = files.read(str(config))
  assert isinstance(found, schema.Config)
  with pytest.raises(UserError, match='turning:Spec: expected code that is called with turns, share, crops, grid'):
    implementation.make(found.objective, grid=(2, 3))


WORKING = """
from vit_jax.config import schema
from vit_jax.objectives import supervised

def Spec(config, settings, own=None):
  return supervised.Spec(config, schema.Supervised()) if own is None else lambda view: None
"""
"""Code of both an objective and an evaluation."""


@pytest.mark.parametrize('code, said', [
    (WORKING, ''), ('import nothing_here', 'got ModuleNotFoundError: No module named'),
    ('Spec = 1 / 0', 'codes.py, line 1: expected a module that can be imported, got ZeroDivisionError'),
    ('Spce = 1', "objective: codes: expected 'Spec' in this module")])
def test_check_imports_the_code_that_settings_name(config: pathlib.Path, tmp_path: pathlib.Path, code: str, said: str,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
  changed = MODULE.replace('turning:Spec', 'codes:Spec').replace('turning:build', 'codes:Spec')
  (tmp_path / 'turning.py').write_text(changed)
  (tmp_path / 'codes.py').write_text(code)
  try:
    assert main.run(['check', f'--config={config}']) == (2 if said else 0)
  finally:
    sys.modules.pop('codes', None)
  assert said in capsys.readouterr().err


def test_an_unforeseen_error_beside_own_code_names_it_first(config: pathlib.Path, tmp_path: pathlib.Path) -> None:
  files.read(str(config))
  implementation.load('turning:Turn')
  error = AttributeError("'Pool' object has no attribute 'pooled'")
  said = reports.explain(error, [], {'XDG_STATE_HOME': str(tmp_path)})
  assert 'Compare your code in ' in said.message and 'turning' in said.message
