"""Evaluations in which each image would be right, as there is one class, are refused."""
from __future__ import annotations

import pathlib

import pytest

from tests.data.images import encode, random_image
from tests.weights import made
from vit_jax import main
from vit_jax.weights import saving

pytestmark = pytest.mark.usefixtures('one_device', 'no_page')


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Images of one class, and weights of one and of two classes."""
  root = tmp_path_factory.mktemp('one')
  for split in ('train', 'test'):
    (root / 'set' / split / 'cat').mkdir(parents=True)
    for i in range(4):
      (root / 'set' / split / 'cat' / f'{i}.png').write_bytes(encode(random_image(i)))
  saving.save(made.network(num_classes=1, class_names=('cat',)), str(root / 'one.npz'))
  saving.save(made.network(num_classes=2, class_names=('cat', 'dog')), str(root / 'two.npz'))
  return root


@pytest.mark.parametrize(('weights', 'words', 'says'), [
    *((name, [f'--config.evals={kind}'], f'at least two classes for evals.{kind}, got folder:PATH/set/')
      for name, kind in (('two', 'knn'), ('one', 'fewshot'), ('two', 'logistic'), ('two', 'retrieval'))),
    ('two', ['--config.evals=zeroshot'], 'evals.zeroshot: expected guesses among at least two classes, got one'),
    ('one', [], 'evals.test: expected guesses among at least two classes, got one, by which each image is right.'),
    ('two', ['--config.evals.test.only_present=true'], 'expected guesses among at least two classes, got one')])
def test_an_evaluation_of_one_class_is_refused(weights: str, words: list[str], says: str, root: pathlib.Path,
                                               tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['evaluate', f'--weights={root / weights}.npz', f'--config.data.source=folder:{root / "set"}',
                   '--config.batch_size=4', f'--workdir={tmp_path / "out"}', *words]) == 2
  assert says in capsys.readouterr().err.replace(str(root), 'PATH')


def test_images_of_one_of_several_classes_are_evaluated(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert main.run(['evaluate', f'--weights={root / "two.npz"}', f'--config.data.source=folder:{root / "set"}',
                   '--config.batch_size=4', f'--workdir={tmp_path / "out"}']) == 0


@pytest.mark.parametrize('command', ['finetune', 'train', 'check'])
def test_one_class_is_not_learned(command: str, root: pathlib.Path, tmp_path: pathlib.Path,
                                  capsys: pytest.CaptureFixture[str]) -> None:
  data = (['finetune', f'--weights={root / "two.npz"}', f'--data=folder:{root / "set"}'] if command == 'finetune' else
          [command, '--config=from_folder', f'--config.data.source=folder:{root / "set"}', '--config.batch_size=4'])
  assert main.run([*data, f'--workdir={tmp_path / "run"}']) == 2
  text = capsys.readouterr().err.replace(str(root), 'PATH')
  assert "got folder:PATH/set/train, whose 4 images all have the class 'cat', such as PATH/set/train/cat/" in text
