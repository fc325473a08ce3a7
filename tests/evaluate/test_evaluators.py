"""Evaluations in a run, after it, and of a part: k-NN, few-shot, probes, and sets with other names of classes."""
from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import cv2
import numpy as np
import pytest
import single

from vit_jax import main
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array
from vit_jax.data import opening
from vit_jax.data.source import read_one
from vit_jax.evaluate import linear, logistic, probe, problems
from vit_jax.jobs import report
from vit_jax.record import reader

CONFIG = '''
"""Tiny."""
from vit_jax.config import schema as s

def get_config():
  tap = s.FeatureLayers(blocks=(-2, -1), patches=True)
  return s.Config(
      name='tiny', length='12 steps', batch_size=40, image_px=(8, 8), optimizer=s.AdamW(lr=3e-3),
      data=s.Data(source='digits', train_split='train[:300]', recipe=s.Recipe(crop=s.Crop.RESIZE, flip=False)),
      model=s.ViT(patch=4, width=16, depth=2, heads=2, mlp=s.Mlp(16)), train=s.Train(ema=.9, progress=False),
      checkpoints=s.Checkpoints(every='6 steps'), evals={
          'knn': s.Knn(every='5 steps', split='test[:90]', neighbors=(5, 20), batch_size=80),
          'few': s.FewShot(split='test[:90]', shots=(1, 2), num_seeds=2, batch_size=80, views=('ema',)),
          'test': s.TopK(every='5 steps', batch_size=80),
          'log': s.Logistic(split='test[:90]', l2=(.1,), batch_size=80, views=('ema',), max_steps=20),
          'probe': s.Probe(split='test[:90]', epochs=2, warmup_epochs=0, train_batch_size=64, views=('ema',),
                           features=tap,
                           trust_coefficient=0., batch_norm=False, momentum=.8, base_batch_size=0,
                           learning_rates=(.1,))})
'''


def run(workdir: pathlib.Path, *extra: str, job: str = 'evaluate') -> int:
  return main.run([f'--job={job}', f'--config={workdir.parent / "tiny.py"}', f'--workdir={workdir}', *extra])


@pytest.fixture(scope='module', autouse=True)
def one_device() -> Iterator[None]:
  """The jobs of these tests run on one device; `test_knn`, `test_linear` and others use meshes."""
  with single.one_device():
    yield


@pytest.fixture(scope='module')
def done(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A run with all evaluations. The two solvers, which have tests of their own, only return zeros here."""
  folder = tmp_path_factory.mktemp('measures')
  (folder / 'tiny.py').write_text(CONFIG)

  def solve(features: Array, *more: Array, num_classes: int, **_: object) -> linear.Linear:
    num = len(more[2]) if len(more) == 3 else len(more[3])  # of penalties, or of learning rates
    return linear.Linear(np.zeros((num, features.shape[-1], num_classes), np.float32),
                         np.zeros((num, num_classes), np.float32))

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(logistic, 'fit', lambda *a, **k: logistic.Solution(solve(*a, **k), np.zeros(1), np.zeros(1)))
    patch.setattr(probe, 'train', solve)
    patch.setattr(report, 'write_report', lambda workdir: '')
    assert run(folder / 'run', job='train') == 0
  return folder / 'run'


def load(path: pathlib.Path) -> dict:
  return json.loads(path.read_text())


@pytest.mark.slow(
    reason='13 s with the run that it reads; tests/jobs/test_evaluate_weights.py evaluates features by the job')
def test_evaluations_run_now_and_then_and_at_the_end(done: pathlib.Path) -> None:
  rows = reader.read(done).rows
  assert [int(row['step']) for row in rows if 'knn/top1_k20@ema' in row] == [5, 10, 12]
  assert [int(row['step']) for row in rows if 'log/top1@ema' in row] == [12]
  final, evaluation = load(done / 'final.json'), load(done / 'evaluate.json')
  assert final['num_examples'] == {'knn': 90, 'few': 90, 'test': 360, 'log': 90, 'probe': 90}
  assert evaluation['metric'] == 'top1_k20' and evaluation['top1'] == final['metrics']['knn/top1_k20@ema']
  assert evaluation['partial'] is False
  seconds, of_features = evaluation['seconds'], evaluation['feature_seconds']
  assert set(seconds) == set(of_features) == set(final['num_examples']) and of_features['test'] == 0
  assert all(0 < of_features[name] < seconds[name] for name in ('knn', 'probe'))
  assert of_features['few'] == 0  # its shots are among what k-NN stored
  assert {'knn/top5_k5', 'few/2shot_std@ema', 'few/1shot_seed1@ema', 'probe/lr@ema'} <= set(final['metrics'])
  assert final['metrics']['knn/top1_k5'] > .3 and not (done / 'predictions.npz').exists()


@pytest.mark.slow(
    reason='13 s with the run that it reads; tests/jobs/test_evaluate_weights.py evaluates features by the job')
def test_features_of_the_newest_weights_stay_beside_the_run(done: pathlib.Path) -> None:
  folders = list((done / 'features').iterdir())
  # Both views on test and train, where few-shot finds its shots; what the probe reads of two blocks.
  assert len(folders) == 4 + 2 and all(len(list(folder.iterdir())) == 1 for folder in folders)


@pytest.mark.slow(
    reason='13 s with the run that it reads; tests/jobs/test_evaluate_weights.py evaluates features by the job')
def test_evaluating_again_gives_the_same_and_reads_features_from_disk(
    done: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
  before = load(done / 'evaluate.json')['metrics']
  files = {path: path.stat().st_mtime_ns for path in (done / 'features').rglob('*.parquet')}
  assert run(done, '--config.evals=knn,few') == 0
  after = load(done / 'evaluate.json')['metrics']
  assert after == {name: value for name, value in before.items() if name.startswith(('knn', 'few'))}
  assert files == {path: path.stat().st_mtime_ns for path in (done / 'features').rglob('*.parquet')}
  out = capsys.readouterr().out
  assert 'knn (ema, 90 images): top1_k5' in out and '2shot_std' in out and '_seed' not in out
  assert 'knn took ' in out and 'of which features' not in out


@pytest.mark.slow(
    reason='13 s with the run that it reads; tests/jobs/test_evaluate_weights.py evaluates features by the job')
def test_a_quick_look_is_marked_in_every_output(done: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
  assert run(done, '--config.evals=test,knn', '--config.evals.test.limit=50', '--config.evals.knn.limit=30') == 0
  evaluation = load(done / 'evaluate.json')
  assert evaluation['partial'] is True and evaluation['metric'] == 'top1.partial50'
  assert all('.partial' in name for name in evaluation['metrics']) and evaluation['num_examples'] == 50
  out = capsys.readouterr().out
  assert 'test (ema, 50 images, a part of the split): top1.partial50' in out
  assert 'knn (ema, 30 images, a part of the split)' in out
  page = main.run(['--job=report', f'--workdir={done}'])
  assert page == 0 and 'top1.partial50' in (done / 'report.html').read_text()


def write_digits(folder: pathlib.Path, names: dict[int, str]) -> None:
  source = opening.open_split(schema.Data(source='digits'), 'test', image_px=(8, 8))
  for i in range(120):
    record = read_one(source, i)
    (label,) = record.labels
    if label in names:
      path = folder / 'test' / names[label] / f'{i}.png'
      path.parent.mkdir(parents=True, exist_ok=True)
      cv2.imwrite(str(path), record.image)


@pytest.mark.slow(
    reason='13 s with the run that it reads; tests/jobs/test_evaluate_weights.py evaluates features by the job')
def test_a_set_with_some_of_the_classes_is_measured_among_these(done: pathlib.Path, tmp_path: pathlib.Path) -> None:
  write_digits(tmp_path / 'some', {3: '3', 7: '7', 8: '8'})
  write_digits(tmp_path / 'other', {3: 'three', 7: 'seven'})
  (tmp_path / 'map.txt').write_text('three: 3\nseven: 7; 1\n')
  config = (done.parent / 'tiny.py').read_text()
  (tmp_path / 'tiny.py').write_text(config[:config.index('evals={')] + f"""evals={{
      'all': s.TopK(source='folder:{tmp_path}/some', batch_size=80, views=('ema',)),
      'some': s.TopK(source='folder:{tmp_path}/some', batch_size=80, views=('ema',), only_present=True),
      'any': s.TopK(source='folder:{tmp_path}/other', batch_size=80, views=('ema',), classes='{tmp_path}/map.txt')}})
""")
  assert main.run(['--job=evaluate', f'--config={tmp_path}/tiny.py', f'--workdir={done}']) == 0
  metrics = load(done / 'evaluate.json')['metrics']
  assert metrics['some/top1@ema'] >= metrics['all/top1@ema'] and metrics['some/top1@ema'] > 1 / 3
  with np.load(done / 'predictions.npz') as saved:
    assert set(saved['label'].tolist()) == {3, 7, 8} and str(saved['split']) == 'all'
  assert 0 <= metrics['any/top1@ema'] <= 1


@pytest.mark.slow(
    reason='13 s with the run that it reads; tests/jobs/test_evaluate_weights.py evaluates features by the job')
def test_a_set_of_other_classes_and_a_split_without_any_are_refused(
    done: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture) -> None:
  write_digits(tmp_path / 'odd', {3: 'drei'})
  assert run(done, '--config.evals=test', f'--config.evals.test.source=folder:{tmp_path}/odd') == 2
  assert 'expected classes of the network of evals.test, got 1 of 1 that are not there' in (
      capsys.readouterr().err)
  assert run(done, '--config.evals=few', '--config.evals.few.shots=40') == 2
  assert 'evals.few: digits/train[:300]: expected 40 examples of each class' in capsys.readouterr().err
  assert run(done, '--config.evals=test', '--config.evals.test.split=test[5:5]') == 2
  assert 'split test[5:5]: expected at least one of 360 examples, got 5 to 5.' in capsys.readouterr().err


def test_two_splits_of_other_classes_do_not_go_together() -> None:
  one, two = (opening.open_split(schema.Data(source='synthetic', num_classes=n, num_examples=20), 'train',
                                 image_px=(8, 8)) for n in (3, 4))
  with pytest.raises(UserError, match='evals.knn: expected two splits with the same classes, got synthetic/train with'):
    problems.check_same('knn', one, two)
