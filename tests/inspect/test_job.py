"""`--job=inspect`: the page and files of one network and of two, with and without images."""
from __future__ import annotations

import csv
import errno
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax import main
from vit_jax.config import schema
from vit_jax.core.types import Params
from vit_jax.data import user_files
from vit_jax.inspect import measurements
from vit_jax.jobs import build
from vit_jax.models.vit import vit
from vit_jax.objectives import mae
from vit_jax.weights import runs

RNG = np.random.default_rng(0)


def draw(init: Callable[..., tuple[Params, Params]], image: object, *, deviation: float, seed: int) -> Params:
  """Returns parameters of the shapes of `init`, drawn in NumPy: its own would compile a program for each kind."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda x: np.asarray(deviation * rng.normal(size=x.shape), np.float32),
                      jax.eval_shape(init, jax.random.key(0), image)[0])


@pytest.fixture(scope='module')
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
  """Two files of tiny networks of the original layout."""
  folder, found = tmp_path_factory.mktemp('weights'), []
  backbone = vit.build(schema.ViT(patch=8, width=16, depth=2, heads=2, mlp=schema.Mlp(24)), (32, 32))
  for seed in range(2):
    params = draw(backbone.init, jnp.zeros((1, 32, 32, 3)), deviation=.3, seed=seed)
    blocks, flat = params['blocks'], {}
    flat |= {'cls': params['cls'], 'embedding/kernel': params['stem']['kernel'],
             'embedding/bias': params['stem']['bias'],
             'Transformer/posembed_input/pos_embedding': params['positions'],
             'Transformer/encoder_norm/scale': params['norm']['scale'],
             'Transformer/encoder_norm/bias': params['norm']['bias'],
             'head/kernel': np.random.default_rng(seed).normal(size=(16, 3)).astype(np.float32),
             'head/bias': np.zeros(3)}
    for i in range(2):
      at = f'Transformer/encoderblock_{i}'
      for ours, theirs in (('norm1', 'LayerNorm_0'), ('norm2', 'LayerNorm_2')):
        flat |= {f'{at}/{theirs}/{leaf}': blocks[ours][leaf][i] for leaf in ('scale', 'bias')}
      for part in ('query', 'key', 'value', 'out'):
        flat |= {f'{at}/MultiHeadDotProductAttention_1/{part}/{leaf}': blocks['attn'][part][leaf][i]
                 for leaf in ('kernel', 'bias')}
      for ours, theirs in (('up', 'Dense_0'), ('down', 'Dense_1')):
        flat |= {f'{at}/MlpBlock_3/{theirs}/{leaf}': blocks['mlp'][ours][leaf][i] for leaf in ('kernel', 'bias')}
    path = folder / f'net{seed}.npz'
    np.savez(path, **{name: np.asarray(leaf) for name, leaf in flat.items()})  # type: ignore[arg-type]
    found.append(str(path))
  return found


@pytest.fixture(scope='module')
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
  root = tmp_path_factory.mktemp('images')
  for i in range(16):
    path = root / f'class{i % 2}' / f'{i}.png'
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(RNG.integers(0, 256, (40, 48, 3), np.uint8)).save(path)
  return str(root)


@pytest.mark.slow(reason='9 s: all figures are computed and drawn; each has tests of its own')
def test_one_network_gets_a_page_with_all_figures_and_numbers(weights: list[str], images: str, tmp_path: pathlib.Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['inspect', f'--weights={weights[0]}', '--model=heads=2', '--preprocess=image=32,resize=36',
                   f'--to={tmp_path}', images]) == 0
  assert f'Report: {tmp_path}/report.html' in capsys.readouterr().out
  drawn = {'filters', 'positions', 'maps', 'heads', 'distance', 'information', 'entropy', 'fourier', 'singular', 'cka',
           'separable', 'map', 'neighbors'}
  assert {p.stem for p in tmp_path.glob('*.png')} == drawn
  assert (tmp_path / 'report.html').read_text().count('<img src="data:image/png;base64,') == len(drawn)
  rows = list(csv.DictReader((tmp_path / 'numbers.csv').open()))
  assert [(row['block'], row['head']) for row in rows] == [('1', '1'), ('1', '2'), ('2', '1'), ('2', '2')]
  arrays = np.load(tmp_path / 'arrays.npz')
  np.testing.assert_allclose(arrays['distance_px'].reshape(-1), [float(r['attention_distance_px']) for r in rows],
                             rtol=1e-5)
  assert arrays['by_depth'].shape == (3, 16, 16) and arrays['rollout'].shape == (16, 4, 4)


@pytest.mark.slow(reason='6 s: two pages')
def test_two_networks_are_compared_and_a_bad_file_is_reported(
    weights: list[str], images: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture) -> None:
  monkeypatch.setattr(measurements, 'relevance', lambda *_, grid, **__: np.ones(grid))
  bad = tmp_path / 'bad.jpg'
  bad.write_text('no picture')
  assert main.run(['inspect', f'--weights={",".join(weights)}', '--model=heads=2', '--preprocess=image=32,resize=36',
                   f'--to={tmp_path / "out"}', *few(images), str(bad)]) == 2
  assert 'bad.jpg' in caplog.text and 'skipped' in caplog.text
  assert {'maps-1', 'maps-2', 'filters-2', 'distance'} <= {p.stem for p in (tmp_path / 'out').glob('*.png')}
  assert {'net0.npz/pooled', 'net1.npz/pooled'} <= set(np.load(tmp_path / 'out' / 'arrays.npz').files)


def few(images: str) -> list[str]:
  """Two of the images: too few for a map of all."""
  return sorted(map(str, pathlib.Path(images).rglob('*.png')))[:2]


@pytest.mark.slow(reason='4 s: a page; tests/inspect/test_model.py has the relevance of a class')
def test_relevance_can_be_for_a_chosen_class(weights: list[str], images: str, tmp_path: pathlib.Path,
                                             monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(measurements, 'relevance', lambda *_, grid, logits, of_class: np.full(grid, 10. + of_class))
  assert main.run(['inspect', f'--weights={weights[0]}', '--model=heads=2', '--preprocess=image=32,resize=36',
                   '--of_class=2', f'--to={tmp_path / "2"}', *few(images)]) == 0
  assert (np.load(tmp_path / '2' / 'arrays.npz')['relevance'] == 12).all()
  assert 'relevance of patches for class 2' in (tmp_path / '2' / 'report.html').read_text()
  assert main.run(['inspect', f'--weights={weights[0]}', '--model=heads=2', '--of_class=3', f'--to={tmp_path}']) == 2
  assert 'class: expected 0 to 2, as the network has 3 classes, got 3' in capsys.readouterr().err


def test_an_image_that_storage_does_not_give_now_ends_the_inspection(
    weights: list[str], images: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str]) -> None:
  def lost(path: str) -> bytes:
    raise OSError(errno.ESTALE, 'Stale file handle')

  monkeypatch.setattr(user_files, 'read_image', lost)
  for more in [], ['--dense']:
    assert main.run(['inspect', f'--weights={weights[0]}', f'--to={tmp_path / "out"}', *more, images]) == 75
    assert 'expected to read it, got "Stale file handle". The network file system lost' in capsys.readouterr().err
  assert not (tmp_path / 'out').exists()


def test_without_images_only_the_input_layer_is_drawn(weights: list[str], tmp_path: pathlib.Path) -> None:
  assert main.run(['inspect', f'--weights={weights[0]}', '--model=heads=2', '--preprocess=image=32,resize=36',
                   f'--to={tmp_path}']) == 0
  assert {p.stem for p in tmp_path.glob('*.png')} == {'filters', 'positions'}


@pytest.mark.slow(reason='3 s; tests/inspect/test_figures.py draws the columns')
def test_a_masked_autoencoder_reconstructs_masked_patches(tmp_path: pathlib.Path) -> None:
  mean, std = np.array([.4, .5, .6]), np.array([.3, .2, .25])
  config = schema.Config(
      image_px=(32, 32), data=schema.Data(recipe=schema.Recipe(mean=tuple(mean), std=tuple(std))),
      model=schema.ViT(patch=8, width=16, depth=1, heads=2, mlp=schema.Mlp(16), pool=schema.Mean(),
                       positions=schema.SinCos(schema.Frequencies.MAE)),
      objective=schema.Mae(mask_ratio=.5, decoder_width=16, decoder_depth=1, decoder_heads=2))
  task = mae.build(config.objective, build.build_backbone(config))
  params = draw(task.init, {'image': jnp.zeros((1, 32, 32, 3))}, deviation=.02, seed=0)
  runs.write(tmp_path / 'run', config, params, {}, class_names=('a', 'b'), image_px=(32, 32))
  pixels, paths = RNG.integers(0, 256, (2, 32, 32, 3), np.uint8), [str(tmp_path / f'{i}.png') for i in range(2)]
  for image, path in zip(pixels, paths, strict=True):
    Image.fromarray(image).save(path)
  assert main.run(['inspect', f'--workdir={tmp_path / "run"}', f'--to={tmp_path / "out"}', *paths]) == 0
  assert {'reconstructions', 'heads', 'maps'} <= {p.stem for p in (tmp_path / 'out').glob('*.png')}
  assert '50% of the patches are masked' in (tmp_path / 'out' / 'report.html').read_text()
  arrays = np.load(tmp_path / 'out' / 'arrays.npz')
  assert arrays['predicted'].shape == pixels.shape and arrays['predicted'].dtype == np.uint8
  by_patch = arrays['hidden'].reshape(2, 4, 8, 4, 8)
  assert (by_patch.min((2, 4)) == by_patch.max((2, 4))).all() and (by_patch.mean((1, 2, 3, 4)) == .5).all()
  means = [((x / 255 - mean) / std).reshape(2, 4, 8, 4, 8, 3).mean((2, 4, 5)) for x in (arrays['predicted'], pixels)]
  np.testing.assert_allclose(means[0], means[1], atol=.08)  # as true patches have a mean, and predictions nearly 0


def test_an_invalid_share_and_missing_weights_are_errors(tmp_path: pathlib.Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['inspect', f'--to={tmp_path}', '--discard=1.5']) == 2
  assert "--discard: expected a number, 0 to below 1, got '1.5'." in capsys.readouterr().err
  assert main.run(['inspect', f'--to={tmp_path}']) == 2
  assert '--weights: expected either --weights or --workdir, got none' in capsys.readouterr().err
