"""Run directories and records of other people: nothing that they name is run, and the message says what to do."""
from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import loaded
import pytest
from data import images

import vit_jax
from vit_jax import main
from vit_jax.config import engine, schema
from vit_jax.core import implementation
from vit_jax.core.errors import UserError
from vit_jax.weights import runs

EVIL = """
import pathlib
pathlib.Path(__file__).with_name('ran').touch()
from vit_jax.config import schema
import dataclasses
from typing import ClassVar

@dataclasses.dataclass
class O(schema.ObjectiveSettings):
  implementation: ClassVar[str] = 'vit_jax.objectives.supervised:Spec'
  strength: float = 1.

def opener(where, data, image_px):
  return None
"""
PLACES: dict[str, Callable[[dict[str, Any]], Any]] = {
    'objective': lambda config: config.update(objective={'type': 'evilmod:O', 'strength': 3}),
    'optimizer': lambda config: config.update(optimizer={'type': 'evilmod:O', 'lr': .1}),
    'evaluation': lambda config: config['evals'].update(more={'type': 'evilmod:O'}),
    'source': lambda config: config['data'].update(source='evilmod:x'),
    'mixture': lambda config: config['data'].update(source='mix:0.5*digits,0.5*evilmod:x'),
    'block': lambda config: config['model'].update(block={'type': 'evilmod:O'}),
    'pool': lambda config: config['model'].update(pool={'type': 'evilmod.sub:O'}),
    'stem': lambda config: config['model'].update(stem={'type': 'evilmod:O'})}


@pytest.fixture(scope='module')
def originals(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Runs: `usual`, and `objective` with an objective that is not of this package, as its checkpoint says too."""
  folder = tmp_path_factory.mktemp('originals')
  found = loaded.weights('vit')
  config = schema.Config(model=found.model, head=found.head, image_px=loaded.PX)
  plain = json.loads(engine.to_json(config))
  PLACES['objective'](plain)
  for name, one in (('usual', config), ('objective', engine.from_json(json.dumps(plain), code='model'))):
    runs.write(folder / name, one, found.params, {}, class_names=found.class_names, image_px=loaded.PX)
  return folder


@pytest.fixture
def stranger(originals: pathlib.Path, tmp_path: pathlib.Path,
             monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
  """A run directory with `evilmod.py`, which is the current folder, and first in sys.path, as `python -m` has it."""
  folder = tmp_path / 'stranger'
  shutil.copytree(originals / 'usual', folder)
  (folder / 'x.png').write_bytes(images.encode(images.random_image(0)))
  (folder / 'evilmod.py').write_text(EVIL)
  (folder / 'metrics.jsonl').write_text('{"event": "start", "time_s": 0.0, "resumed_from": null}\n')
  monkeypatch.chdir(folder)
  monkeypatch.setattr(sys, 'path', [str(folder), '', *sys.path])
  monkeypatch.setattr(implementation, '_trusted_folders', [])
  monkeypatch.setattr(implementation, '_command_line_modules', set())
  yield folder
  sys.modules.pop('evilmod', None)


@pytest.fixture
def hide(stranger: pathlib.Path, originals: pathlib.Path) -> Callable[[str], None]:
  """Returns a function that names `evilmod` in `config.json`."""
  def hidden(place: str) -> None:
    if place == 'objective':
      shutil.rmtree(stranger / 'checkpoints')
      shutil.copytree(originals / 'objective', stranger, dirs_exist_ok=True)
    else:
      config = json.loads((stranger / 'config.json').read_text())
      PLACES[place](config)
      (stranger / 'config.json').write_text(json.dumps(config))
  return hidden


def has_run(folder: pathlib.Path) -> bool:
  return (folder / 'ran').exists()


@pytest.mark.parametrize('place', ['objective', 'optimizer', 'evaluation', 'source', 'mixture'])
@pytest.mark.parametrize('words', [
    ['predict', '--weights=.', 'x.png'], ['convert', '--weights=.', '--to=../a.npz'],
    ['report', '--workdir=.']])
def test_jobs_that_need_the_network_alone_run_no_other_code(
    stranger: pathlib.Path, hide: Callable[[str], None], place: str, words: list[str]) -> None:
  hide(place)
  assert main.run(words) == 0 and not has_run(stranger)


@pytest.mark.parametrize(('place', 'words'), [
    *((place, ['predict', '--weights=.', 'x.png']) for place in ('block', 'pool', 'stem')),
    *((place, ['check', '--config=config.json']) for place in PLACES),
    *((place, ['evaluate', '--workdir=.', '--to=../out']) for place in ('objective', 'evaluation', 'source', 'block')),
    ('pool', ['finetune', '--weights=.', '--data=digits', '--workdir=../mine']),
    ('stem', ['inspect', '--weights=.', '--to=../page']), ('block', ['plan', '--workdir=.', '--topology=cpu:1']),
    ('objective', ['settings', 'config.json']), ('optimizer', ['study', '--config=config.json', '--workdir=../mine']),
    ('mixture', ['train', '--config=./config.json', '--workdir=../mine'])])
def test_code_that_a_file_names_is_refused_with_the_flag_that_allows_it(
    stranger: pathlib.Path, hide: Callable[[str], None], capsys: pytest.CaptureFixture[str], place: str,
    words: list[str]) -> None:
  hide(place)
  assert main.run(words) == 2 and not has_run(stranger)
  said = capsys.readouterr().err
  assert 'got one of the current folder' in said and 'If you trust this folder, add --allow_code.' in said


def test_the_api_runs_no_code_of_a_run(
    stranger: pathlib.Path, hide: Callable[[str], None]) -> None:
  hide('objective')
  assert vit_jax.load('.').classify('x.png') and not has_run(stranger)
  hide('block')
  with pytest.raises(UserError, match='add --allow_code'):
    vit_jax.load('.')
  assert not has_run(stranger)


def test_a_person_allows_the_code_by_a_flag_a_name_or_a_config(
    stranger: pathlib.Path, hide: Callable[[str], None]) -> None:
  hide('objective')
  words = ['settings', 'config.json', '--changed']
  assert main.run([*words, '--allow_code']) == 0 and has_run(stranger)
  implementation._trusted_folders.clear()
  sys.modules.pop('evilmod')
  assert main.run(words) == 2
  assert main.run(['settings', 'digits', '--config.objective=evilmod:O']) == 0
  implementation._trusted_folders.clear()
  sys.modules.pop('evilmod')
  (stranger.parent / 'mine').mkdir()
  (stranger / 'evilmod.py').rename(stranger.parent / 'mine' / 'evilmod.py')
  (stranger.parent / 'mine' / 'own.py').write_text(
      'import evilmod\nfrom vit_jax.config import schema\ndef get_config():\n  return schema.Config()\n')
  assert main.run(['settings', str(stranger.parent / 'mine' / 'own.py')]) == 0
  assert main.run(words) == 0, 'it is found beside the config that the command line named'


@pytest.mark.parametrize('name', ['vit_jax.__main__', 'setuptools.__main__', 'os', 'digits', 'folder'])
def test_modules_of_other_kinds_are_no_parts(stranger: pathlib.Path, name: str,
                                             capsys: pytest.CaptureFixture[str]) -> None:
  """A name that the command line has as a kind of source is not trusted as a module."""
  (stranger / f'{name}.py').write_text(EVIL)
  config = json.loads((stranger / 'config.json').read_text())
  (stranger / 'config.json').write_text(json.dumps(config | {'objective': {'type': f'{name}:O'}}))
  assert main.run(['evaluate', '--workdir=.', '--to=../out', '--config.data.source=folder:../photos']) == 2
  assert not has_run(stranger) and f'{name}' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['digits', 'evaluate', 'finetune', 'finetune:B'])
def test_a_file_with_the_name_of_a_config_of_the_package_is_not_run(stranger: pathlib.Path, name: str) -> None:
  path = stranger / name
  if ':' in name:
    path.mkdir()
    path = path / '16,own'
  path.write_text(f'import pathlib\npathlib.Path({str(stranger / "ran")!r}).touch()\n')
  assert main.run(['settings', name.replace('finetune:B', 'finetune:B/16,own')]) in (0, 2)
  assert main.run(['evaluate', '--weights=.', '--config.data.source=folder:nothing']) == 2
  assert not has_run(stranger)


@pytest.mark.slow(reason='4 s: starts the program')
def test_the_program_takes_no_package_from_the_current_folder(
    stranger: pathlib.Path, hide: Callable[[str], None]) -> None:
  """`python -m` puts the current folder first; a package that is not installed is not taken from it."""
  for name in ('optional_package', 'evilmod', 'tokenizers', 'tifffile'):
    (stranger / f'{name}.py').write_text(EVIL)
  hide('objective')
  root = str(pathlib.Path(vit_jax.__file__).parents[1])
  for words in (['predict', '--weights=.', 'x.png'], ['evaluate', '--workdir=.', '--to=../out']):
    done = subprocess.run([sys.executable, '-m', 'vit_jax.main', *words], capture_output=True, text=True,
                          env={**os.environ, 'PYTHONPATH': root})
    assert done.returncode == (0 if words[0] == 'predict' else 2), done.stderr
    assert not has_run(stranger)


def test_a_manifest_runs_no_config_that_it_names(stranger: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  template = (pathlib.Path(__file__).resolve().parents[1] / 'launch' / 'k8s.yaml').read_text()
  for old, new in (('REGION-docker.pkg.dev/PROJECT/REPOSITORY/', 'eu-docker.pkg.dev/p/r/'), ('MY-DATA-BUCKET', 'data'),
                   ('MY-RUNS-BUCKET', 'runs'), ('--config=vit_s16_i1k', '--config=evilmod.py')):
    assert old in template
    template = template.replace(old, new)
  (stranger / 'run.yaml').write_text(template)
  assert main.run(['check', '--manifest=run.yaml']) == 2 and not has_run(stranger)
  said = capsys.readouterr().err
  assert f'run.yaml: --config: expected a config of this package, got the file {stranger}/evilmod.py' in said
  assert main.run(['check', '--manifest=run.yaml', '--allow_code']) == 2 and has_run(stranger)


def test_a_table_of_a_study_runs_no_code(stranger: pathlib.Path, hide: Callable[[str], None]) -> None:
  hide('objective')
  run = stranger / 'runs' / 'one'
  run.mkdir(parents=True)
  (run / 'config.json').write_bytes((stranger / 'config.json').read_bytes())
  (stranger / 'config.json').unlink()
  (run / 'final.json').write_text(json.dumps({'step': 1, 'seconds': 1., 'num_params': 3, 'exaflops': 0.,
                                              'params_digest': 'a', 'metrics': {'test/top1': .5}}))
  assert main.run(['report', '--workdir=.']) in (0, 2) and not has_run(stranger)
  assert main.run(['report', '--workdir=runs/one,runs/one']) in (0, 2) and not has_run(stranger)
