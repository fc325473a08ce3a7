"""What jobs write: prepared shards with their info, evaluations of a stored run, its features and its predictions."""
from __future__ import annotations

import csv
import hashlib
import http.client
import json
import pathlib
import tarfile

import numpy as np
import pytest
from pyarrow import parquet

from tests.golden import sets, surface, test_sources
from tests.jobs import test_serve
from vit_jax import main

pytestmark = pytest.mark.usefixtures('one_device', 'no_page')
ONE_IMAGE = 1 / 360
"""Of the test images of digits; a rounding on another processor may move a prediction."""
EVALUATED = {
    'topk': {'top1': .1389, 'top5': .5500, 'nll': 2.2994},
    'knn': {'top1_k10': .5056, 'top1_k20': .5056, 'top1_k100': .4194, 'top1_k200': .3694},
    'fewshot': {'1shot': .1713, '5shot': .2333, '10shot': .2963, '25shot': .3306},
    'logistic': {'top1': .5472},
    'retrieval': {'recall1_loo': .3889, 'recall5_loo': .7389, 'recall10_loo': .8667},
}


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  return sets.write(tmp_path_factory.mktemp('sets'))


@pytest.fixture(scope='module')
def first(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """The run directory of `test_runs`."""
  folder = tmp_path_factory.mktemp('weights')
  with tarfile.open(pathlib.Path(__file__).with_name('first_run.tar.xz')) as archive:
    archive.extractall(folder, filter='data')
  return folder / 'first'


@pytest.fixture(scope='module')
def best(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """The run directory of `test_runs` whose best checkpoint is of step 6, and the latest of step 7."""
  folder = tmp_path_factory.mktemp('weights')
  with tarfile.open(pathlib.Path(__file__).with_name('best_run.tar.xz')) as archive:
    archive.extractall(folder, filter='data')
  return folder / 'best'


def sha256s(folder: pathlib.Path) -> dict[str, str]:
  return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())
          if path.is_file()}


def test_prepared_shards_have_the_stored_bytes_and_checksums(root: pathlib.Path) -> None:
  found = sha256s(root / 'array_record')
  shards = {name: value for name, value in found.items() if 'array_record' in name}
  info = json.loads((root / 'array_record' / 'info.json').read_text())
  assert len(shards) >= 4 and all(value in json.dumps(info) for value in shards.values())
  assert info['class_names'] == list(sets.NAMES)
  surface.stored('prepare/folder', lambda: surface.text_digest(json.dumps(shards)))


def test_images_that_prepare_makes_smaller_have_the_stored_pixels(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
  to = tmp_path / 'small'
  assert main.run(['--job=prepare', f'--data=wds:{root}/wds', '--label_column=json/label', f'--to={to}', '--shards=2',
                   '--short_px=24']) == 0
  surface.stored('prepare/short_px', lambda: surface.text_digest(json.dumps(
      {name: value for name, value in sha256s(to).items() if 'array_record' in name})))


def test_evaluations_of_a_stored_run_have_their_numbers(first: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert main.run(['--job=evaluate', f'--weights={first}', '--config=features', '--config.data.source=digits',
                   '--config.image_px=16,16', f'--config.evals={",".join(EVALUATED)}', f'--to={tmp_path}/e']) == 0
  found = json.loads((tmp_path / 'e' / 'evaluate.json').read_text())['metrics']
  for name, expected in EVALUATED.items():
    for metric, value in expected.items():
      assert found[f'{name}/{metric}'] == pytest.approx(value, abs=1.5 * ONE_IMAGE), f'{name}/{metric}'


def test_the_best_checkpoint_stands_for_a_run(best: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert main.run(['--job=evaluate', f'--weights={best}', '--config=features', '--config.data.source=digits',
                   '--config.image_px=16,16', '--config.evals=topk', f'--to={tmp_path}/e']) == 0
  found = json.loads((tmp_path / 'e' / 'evaluate.json').read_text())['metrics']
  assert found['topk/nll'] == pytest.approx(2.3088, abs=5e-3)  # that of step 7 is 2.3467


@pytest.mark.slow(reason='5 s: two programs')
def test_a_segmentation_has_its_numbers(first: pathlib.Path, tmp_path: pathlib.Path) -> None:
  test_sources.write_masks(tmp_path / 'masks')
  assert main.run(['--job=evaluate', '--config=dense_probe', f'--weights={first}', '--config.image_px=16,16',
                   f'--config.data.source=masks:{tmp_path}/masks', '--config.data.eval_split=val',
                   '--config.evals.dense.l2=1e-2', '--config.evals.dense.neighbors=5', f'--to={tmp_path}/e']) == 0
  found = json.loads((tmp_path / 'e' / 'evaluate.json').read_text())['metrics']
  known = surface.known('segmentation', found)
  assert found.keys() == known.keys() and found == pytest.approx(known, abs=.01)


@pytest.mark.slow(reason='10 s: a process')
def test_a_server_answers_with_the_classes_of_an_image(root: pathlib.Path, first: pathlib.Path) -> None:
  image = min((root / 'folder' / 'test').glob('*/*.png')).read_bytes()
  with test_serve.serving(f'--weights={first}') as (_, url):
    connection = http.client.HTTPConnection(url.removeprefix('http://'), timeout=120)
    connection.request('POST', '/classify', image, {'X-Vit-Jax': '1'})
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.request('POST', '/classify', b'no image', {'X-Vit-Jax': '1'})
    refused = connection.getresponse()
    assert answer.status == 200 and refused.status == 415 and 'error' in json.loads(refused.read())
  assert sorted(found) == ['classes', 'has_attention', 'image', 'seconds', 'size', 'weights']
  assert (found['size'], found['weights']) == ('55 × 69 px', str(first)) and found['image'].startswith('data:image/png')
  for given, known in zip(found['classes'], surface.known('serve', found['classes']), strict=True):
    assert given == {**known, 'probability': pytest.approx(known['probability'], rel=1e-4)}


def test_features_and_predictions_of_a_stored_run_have_their_values(
    root: pathlib.Path, first: pathlib.Path, tmp_path: pathlib.Path) -> None:
  images = sorted(str(path) for path in (root / 'folder' / 'test').glob('*/*'))
  assert main.run(['--job=embed', f'--weights={first}', f'--to={tmp_path}/x.parquet', *images]) == 0
  table = parquet.read_table(tmp_path / 'x.parquet')
  features = np.stack(table['features'].to_numpy(zero_copy_only=False)).astype(np.float64)
  assert features.shape == (len(images), 16)
  np.testing.assert_allclose(np.abs(features).mean(), surface.known('features', np.abs(features).mean()), rtol=1e-5)
  assert main.run(['--job=predict', f'--weights={first}', f'--to={tmp_path}/p.csv', '--top=2', *images]) == 0
  rows = list(csv.reader((tmp_path / 'p.csv').open()))
  assert len(rows) == len(images) + 1
  surface.stored('predict/columns', lambda: surface.text_digest(','.join(rows[0])), {})
