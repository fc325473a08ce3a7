"""Runs on images with other channels than RGB: prepared, trained, resumed, evaluated; and what is refused by name."""
from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from vit_jax import main
from vit_jax.config import check, files, schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.formats import array_record
from vit_jax.data.source import read_one
from vit_jax.jobs import build
from vit_jax.recipes import sizes
from vit_jax.train.stopping import StopRequest

pytestmark = pytest.mark.usefixtures('one_device', 'no_page')
BANDS = 13
TINY = ('--config=from_folder', f'--config.data.channels={BANDS}', '--config.image_px=16,16', '--config.model.patch=8',
        '--config.data.recipe.eval_resize_px=18', '--config.model.width=16', '--config.model.depth=1',
        '--config.model.heads=2', '--config.model.mlp.hidden=16', '--config.length=8 steps', '--config.batch_size=8',
        '--config.checkpoints.every=2 steps', '--config.evals.test.every=8 steps', '--config.train.progress=false')


@pytest.fixture(scope='module')
def bands(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """24 + 8 images of two classes, `.npy` of uint16 with 13 channels."""
  root, rng = tmp_path_factory.mktemp('bands'), np.random.default_rng(0)
  for split, num in (('train', 24), ('test', 8)):
    for i in range(num):
      image = rng.integers(0, 3_000, (20, 24, BANDS)) + 500 * np.arange(BANDS) + 5_000 * (i % 2)
      path = root / split / f'class{i % 2}' / f'{i}.npy'
      path.parent.mkdir(parents=True, exist_ok=True)
      np.save(path, image.astype(np.uint16))
  return root


@pytest.fixture(scope='module')
def shards(bands: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  to = tmp_path_factory.mktemp('shards') / 'set'
  assert main.run(['prepare', f'--data=folder:{bands}', f'--channels={BANDS}', '--shards=3', f'--to={to}']) == 0
  return to


def final(workdir: pathlib.Path) -> dict[str, Any]:
  found: dict[str, Any] = json.loads((workdir / 'final.json').read_text())
  return found


def test_prepare_keeps_the_files_and_measures_the_training_split(bands: pathlib.Path, shards: pathlib.Path) -> None:
  info = json.loads((shards / 'info.json').read_text())
  stored = [np.load(path) for path in sorted((bands / 'train').rglob('*.npy'))]
  pixels = np.concatenate([image.reshape(-1, BANDS) for image in stored]).astype(np.float64)
  assert info['channels'] == BANDS
  np.testing.assert_allclose(info['mean'], pixels.mean(0), rtol=1e-12)
  np.testing.assert_allclose(info['std'], pixels.std(0), rtol=1e-9)
  source = opening.open_split(schema.Data(source=f'array_record:{shards}', channels=BANDS), 'train', image_px=(8, 8))
  found = {read_one(source, i).image for i in range(len(source))}
  assert found == {path.read_bytes() for path in (bands / 'train').rglob('*.npy')}


@pytest.mark.slow(reason='three runs, an evaluation and an export: 3 s on an idle core; fine-tuning below trains, too')
def test_a_run_learns_resumes_bit_for_bit_and_is_evaluated(
    shards: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  words = ['train', *TINY, f'--config.data.source=array_record:{shards}']
  assert main.run([*words, f'--workdir={tmp_path / "whole"}']) == 0
  with monkeypatch.context() as patch:
    patch.setattr(StopRequest, 'reason', lambda self, step: 'SIGTERM' if step == 3 else '')
    assert main.run([*words, f'--workdir={tmp_path / "stopped"}']) == 75
  assert main.run([*words, f'--workdir={tmp_path / "stopped"}']) == 0
  whole, stopped = final(tmp_path / 'whole'), final(tmp_path / 'stopped')
  assert whole['params_digest'] == stopped['params_digest'] and whole['metrics'] == stopped['metrics']
  recipe = json.loads((tmp_path / 'whole' / 'config.json').read_text())['data']['recipe']
  assert len(recipe['mean']) == BANDS and recipe['mean'] == json.loads((shards / 'info.json').read_text())['mean']
  weights = f'--weights={tmp_path / "whole"}'
  assert main.run(['evaluate', weights, f'--config.data.source=array_record:{shards}',
                   f'--workdir={tmp_path / "e"}']) == 0
  found = json.loads((tmp_path / 'e' / 'evaluate.json').read_text())
  assert found['top1'] == whole['metrics']['test/top1@ema']
  assert main.run(['embed', weights, f'--data=array_record:{shards}', '--split=test',
                   f'--to={tmp_path / "x.npz"}']) == 0
  with np.load(tmp_path / 'x.npz') as embedded:
    assert embedded['features'].shape == (8, 16)
  assert main.run(['export', weights, f'--to={tmp_path / "x.stablehlo"}']) == 0
  assert 'image [batch, 16, 16, 13] float32' in capsys.readouterr().out
  assert main.run(['predict', weights, str(shards / 'info.json')]) == 2
  assert 'expected weights for RGB images, got weights for 13 channels' in capsys.readouterr().err


def test_rgb_weights_are_fine_tuned_with_adapters(shards: pathlib.Path, tmp_path: pathlib.Path) -> None:
  from tests.weights import made
  from vit_jax.weights import saving
  saving.save(made.network(), str(tmp_path / 'rgb.npz'))
  assert main.run(['finetune', f'--weights={tmp_path / "rgb.npz"}', f'--data=array_record:{shards}', '--lora=2',
                   f'--config.data.channels={BANDS}', '--config.length=2 steps', '--config.batch_size=8',
                   '--config.evals.val.every=2 steps', '--config.checkpoints.every=2 steps',
                   f'--workdir={tmp_path / "run"}']) == 0
  record = json.loads((tmp_path / 'run' / 'init.json').read_text())
  assert '3 channels to 13: repeated, times 3 / 13' in json.dumps(record)
  recipe = json.loads((tmp_path / 'run' / 'config.json').read_text())['data']['recipe']
  assert len(recipe['mean']) == BANDS  # measured, not those of the weights


def load(*changes: str) -> schema.Config:
  return files.load('from_folder', ['data.channels=13', *changes], models=sizes.model)


@pytest.mark.parametrize(('changes', 'said'), [
    (['data.recipe.randaugment.layers=2'], 'data.recipe.randaugment.layers: expected 0 with data.channels=13'),
    (['data.recipe.three_augment=true'], 'data.recipe.three_augment: expected False with data.channels=13'),
    (['data.recipe.jitter.brightness=.1', 'data.recipe.jitter.probability=.5'], 'data.recipe.jitter: expected none'),
    (['data.recipe.rotate_degrees=3'], 'data.recipe.rotate_degrees: expected 0 with data.channels=13'),
    (['data.recipe.mean=1,2,3'], 'data.recipe.mean: expected 13 values, one for each of data.channels'),
    (['objective=mae'], 'objective: expected Supervised with data.channels=13'),
    (['trackers.images=4'], 'trackers.images: expected 0 with data.channels=13'),
    (['data.decode=crop'], 'data.decode: expected auto or full with data.channels=13'),
    (['evals=test,segmentation'], 'evals.segmentation: expected another evaluation with data.channels=13')])
def test_what_is_for_rgb_images_is_refused_by_name(changes: list[str], said: str) -> None:
  assert said in '\n'.join(check.problems(load(*changes)))


def test_rgb_images_have_three_values() -> None:
  config = files.load('from_folder', ['data.recipe.mean=1,2'], models=sizes.model)
  assert 'data.recipe.mean: expected 3 values, one for each of data.channels' in '\n'.join(check.problems(config))
  assert not check.problems(load('data.recipe.mean=' + ','.join('1' * 13), 'data.recipe.std=' + ','.join('1' * 13)))


def test_the_number_of_channels_is_that_of_the_dataset(shards: pathlib.Path, bands: pathlib.Path) -> None:
  for num in (3, 4):
    with pytest.raises(UserError, match='data.channels: expected 13, the number of channels of the images of'):
      opening.open_split(schema.Data(source=f'array_record:{shards}', channels=num), 'train', image_px=(8, 8))
  config = load(f'data.source=folder:{bands}')
  with pytest.raises(UserError, match='data.recipe.mean: expected mean and std of 13 channels, got none'):
    build.with_statistics(config, build.open_data(config).train)
  mixture = load(f'data.source=mix:0.5*array_record:{shards},0.5*array_record:{shards}')
  with pytest.raises(UserError, match='data.recipe.mean: expected mean and std of 13 channels, got none'):
    build.with_statistics(mixture, build.open_data(mixture).train)
  with pytest.raises(UserError, match='got none in 2 of 2 classes'):  # arrays are no images of an RGB run
    opening.open_split(schema.Data(source=f'folder:{bands}'), 'train', image_px=(8, 8))


def test_prepare_refuses_what_it_cannot_do(bands: pathlib.Path, tmp_path: pathlib.Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
  for words in (['--short_px=8', f'--data=folder:{bands}'], ['--data=mnist'],
                ['--runner=DirectRunner', f'--data=folder:{bands}']):
    assert main.run(['prepare', *words, '--channels=13', f'--to={tmp_path / "x"}']) == 2
    assert '--channels: expected 3 with --' in capsys.readouterr().err
  flat = tmp_path / 'flat' / 'train' / 'a'
  flat.mkdir(parents=True)
  np.save(flat / '0.npy', np.stack([np.arange(16.).reshape(4, 4), np.ones((4, 4))], -1))
  assert main.run(['prepare', f'--data=folder:{tmp_path / "flat"}', '--splits=train', '--channels=2',
                   f'--to={tmp_path / "y"}']) == 2
  assert 'expected channels whose values differ, got 1 (counted from 0) with one value' in capsys.readouterr().err


def test_the_plan_of_rgb_images_is_as_before(tmp_path: pathlib.Path) -> None:
  from tests.data.images import encode, random_image
  path = tmp_path / 'rgb' / 'train' / 'a' / '0.png'
  path.parent.mkdir(parents=True)
  path.write_bytes(encode(random_image(0, height=8, width=8), '.png'))
  assert main.run(['prepare', f'--data=folder:{tmp_path / "rgb"}', '--splits=train', f'--to={tmp_path / "x"}']) == 0
  info = json.loads((tmp_path / 'x' / 'info.json').read_text())
  assert set(info) == {'format', 'made', 'class_names', 'splits'}
  assert list(info['made']) == ['from', 'digests', 'short_px', 'quality', 'num_shards', 'seed']
  assert array_record.read_info(tmp_path / 'x').statistics is None
