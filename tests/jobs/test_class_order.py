"""The order of the classes of a run: what it began with is kept, and evaluations follow it by name."""
from __future__ import annotations

import json
import pathlib

import pytest

from tests.data.images import encode, random_image
from vit_jax import main
from vit_jax.data.labels import classes
from vit_jax.record import checkpoint_files

pytestmark = pytest.mark.usefixtures('one_device', 'no_page')
NUMBERS = [str(i) for i in range(11)]
TINY = ('--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2', '--config.model.mlp.hidden=16',
        '--config.model.patch=8', '--config.image_px=16,16', '--config.batch_size=8', '--config.optimizer.lr=1e-3',
        '--config.data.recipe.eval_resize_px=16', '--config.train.log_every=1 steps', '--config.train.progress=false')


def make(root: pathlib.Path, names: list[str]) -> pathlib.Path:
  for name in names:
    (root / name).mkdir(parents=True)
    for i in range(2):
      (root / name / f'{i}.png').write_bytes(encode(random_image(20 * int(name) + i)))
  return root


def saved(workdir: pathlib.Path) -> list[str]:
  """The classes in the newest checkpoint."""
  folder = workdir / 'checkpoints'
  return list(checkpoint_files.read_meta(folder / str(checkpoint_files.steps(folder)[-1]))['class_names'])


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  root = tmp_path_factory.mktemp('data')
  make(root / 'train', NUMBERS)
  make(root / 'test', NUMBERS)
  return root


def train(data: pathlib.Path, workdir: pathlib.Path, steps: int) -> int:
  return main.run(['train', '--config=from_folder', f'--config.data.source=folder:{data}', f'--workdir={workdir}',
                   *TINY, f'--config.length={steps} steps'])


def test_an_evaluation_needs_no_training_split(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  make(tmp_path / 'set' / 'test', ['0', '1'])
  (tmp_path / 'run' / 'checkpoints').mkdir(parents=True)
  words = ['evaluate', '--config=from_folder', f'--workdir={tmp_path / "run"}', *TINY,
           f'--config.data.source=folder:{tmp_path / "set"}']
  assert main.run(words) == 2
  assert 'got one that has no complete checkpoint yet' in capsys.readouterr().err  # all else is opened before
  assert main.run([*words, '--config.data.eval_split=val']) == 2
  assert "expected one of test, got 'val'" in capsys.readouterr().err


@pytest.mark.slow(reason='10 s: trains in two starts; tests/data/test_layouts.py has the order and the digest')
def test_a_run_keeps_the_order_of_numbered_classes_with_which_it_began(
    data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(classes, 'ordered', lambda names, recorded=(): tuple(sorted(names)))  # as earlier versions
    assert train(data, tmp_path / 'run', 1) == 0
  assert saved(tmp_path / 'run') == sorted(NUMBERS) != NUMBERS
  assert train(data, tmp_path / 'run', 2) == 0
  assert saved(tmp_path / 'run') == sorted(NUMBERS)
  accuracy = json.loads((tmp_path / 'run/evaluate.json').read_text())['metrics']
  assert main.run(['evaluate', f'--workdir={tmp_path / "run"}', f'--to={tmp_path / "to"}']) == 0
  assert json.loads((tmp_path / 'to/evaluate.json').read_text())['metrics'] == accuracy

  only = make(tmp_path / 'only' / 'test', ['10', '2'])  # no training split, and some of the classes
  words = ['evaluate', f'--workdir={tmp_path / "run"}', f'--config.data.source=folder:{only.parent}']
  assert main.run([*words, f'--to={tmp_path / "only_to"}']) == 0
  found = json.loads((tmp_path / 'only_to/evaluate.json').read_text())
  assert found['num_examples'] == 4
  make(only, ['77'])
  capsys.readouterr()
  assert main.run([*words, f'--to={tmp_path / "other"}']) == 2
  assert 'expected some of the 11 classes that the run was trained on, 0, 1, 10, ' in (text := capsys.readouterr().err)
  assert 'got 3 classes, of which these are others: 77. Use data with the classes of the run.' in text
