"""`--job=inspect`: the page and files of one network and of two, with and without pictures."""
from __future__ import annotations

import csv
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from vit_jax import main
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.interop import names
from vit_jax.jobs import inspect
from vit_jax.models import vit

RNG = np.random.default_rng(0)


@pytest.fixture(scope='module')
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
  """Two files of tiny networks of the original layout."""
  folder, found = tmp_path_factory.mktemp('weights'), []
  backbone = vit.build(schema.ViT(patch=8, width=32, depth=2, heads=2, mlp=48), (32, 32))
  for seed in range(2):
    params, _ = backbone.init(jax.random.key(seed), jnp.zeros((1, 32, 32, 3)))
    blocks, flat = params['blocks'], {}
    flat |= {'cls': params['cls'], 'embedding/kernel': params['stem']['kernel'],
             'embedding/bias': params['stem']['bias'],
             'Transformer/posembed_input/pos_embedding': params['positions'],
             'Transformer/encoder_norm/scale': params['norm']['scale'],
             'Transformer/encoder_norm/bias': params['norm']['bias'],
             'head/kernel': jax.random.normal(jax.random.key(seed), (32, 3)), 'head/bias': jnp.zeros(3)}
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
  assert names.FAMILIES  # the layout is one of these
  return found


@pytest.fixture(scope='module')
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
  root = tmp_path_factory.mktemp('pictures')
  for i in range(13):
    path = root / f'class{i % 2}' / f'{i}.png'
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(RNG.integers(0, 256, (40, 48, 3), np.uint8)).save(path)
  return str(root)


def test_a_page_with_all_pictures_and_numbers(weights: list[str], pictures: str, tmp_path: pathlib.Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
  assert main.run(['inspect', f'--weights={weights[0]}', '--model=heads=2', '--preprocess=image=32,resize=36',
                   f'--to={tmp_path}', pictures]) == 0
  assert f'Report: {tmp_path}/report.html' in capsys.readouterr().out
  drawn = {'filters', 'positions', 'maps', 'heads', 'distance', 'information', 'entropy', 'fourier', 'singular', 'cka',
           'separable', 'map', 'neighbours'}
  assert {p.stem for p in tmp_path.glob('*.png')} == drawn
  assert (tmp_path / 'report.html').read_text().count('<img src="data:image/png;base64,') == len(drawn)
  rows = list(csv.DictReader((tmp_path / 'numbers.csv').open()))
  assert [(row['block'], row['head']) for row in rows] == [('1', '1'), ('1', '2'), ('2', '1'), ('2', '2')]
  arrays = np.load(tmp_path / 'arrays.npz')
  np.testing.assert_allclose(arrays['distance_px'].reshape(-1), [float(r['attention_distance_px']) for r in rows],
                             rtol=1e-5)
  assert arrays['by_depth'].shape == (3, 13, 32) and arrays['rollout'].shape == (13, 4, 4)


def test_two_networks_are_compared_and_a_bad_file_is_told(weights: list[str], pictures: str, tmp_path: pathlib.Path,
                                                          caplog: pytest.LogCaptureFixture) -> None:
  bad = tmp_path / 'bad.jpg'
  bad.write_text('no picture')
  assert main.run(['inspect', f'--weights={",".join(weights)}', '--model=heads=2', '--preprocess=image=32,resize=36',
                   f'--to={tmp_path / "out"}', pictures, str(bad)]) == 2
  assert 'bad.jpg' in caplog.text and 'skipped' in caplog.text
  assert {'maps-1', 'maps-2', 'filters-2', 'distance'} <= {p.stem for p in (tmp_path / 'out').glob('*.png')}
  assert {'net0.npz/pooled', 'net1.npz/pooled'} <= set(np.load(tmp_path / 'out' / 'arrays.npz').files)


def test_without_pictures_the_input_layer_is_shown(weights: list[str], tmp_path: pathlib.Path) -> None:
  assert main.run(['inspect', f'--weights={weights[0]}', '--model=heads=2', '--preprocess=image=32,resize=36',
                   f'--to={tmp_path}']) == 0
  assert {p.stem for p in tmp_path.glob('*.png')} == {'filters', 'positions'}


def test_a_share_that_is_none_and_a_missing_network_are_told(tmp_path: pathlib.Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
  with pytest.raises(UserError, match='--discard=1.5 is no share; want a number from 0 to below 1'):
    inspect._parse_share('1.5')
  assert main.run(['inspect', f'--to={tmp_path}']) == 2
  assert 'needs either --weights=… or --workdir=…' in capsys.readouterr().err
