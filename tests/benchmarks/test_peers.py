"""Other programs beside `benchmarks.bench`: those that can and those that cannot be timed."""
from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest
import single

from benchmarks import bench, bench_parts, child, peers, timing
from vit_jax.config import files
from vit_jax.core.errors import UserError
from vit_jax.record import machine

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ['--config=bench', '--config.image_px=16,16', '--config.model.patch=8', '--config.model.width=16',
        '--config.model.depth=1', '--config.model.heads=2', '--config.model.mlp.hidden=16', '--config.batch_size=8',
        '--config.data.num_classes=3', '--config.data.recipe.eval_resize_px=16']
PEER = """
import einops
import ml_collections as mlc
import tensorflow.io.gfile as gfile
import jax, jax.numpy as jnp

def load(path, config: mlc.ConfigDict, read=gfile.GFile):
  raise AssertionError('no file is read')

class Network:
  def __init__(self, classes, patch_size, width, depth, mlp_dim, num_heads, pool_type, dtype_mm):
    assert (patch_size, width, depth, mlp_dim, num_heads, pool_type) == ((8, 8), 16, 1, 16, 2, 'tok')
    self.classes = classes

  def init(self, key, image):
    return {'params': {'kernel': jax.random.normal(key, (image.shape[-1], self.classes))}}

  def apply(self, variables, image, train=False, rngs=None):
    return image.mean((1, 2)) @ variables['params']['kernel'], {}

Model = Network
"""


@pytest.fixture
def soon_done(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Turns as short as can be, a large product that is not, and one device."""
  monkeypatch.setattr(timing, 'MIN_S', .001)
  monkeypatch.setitem(bench_parts.MATMUL_SIDE, 'cpu', 64)
  with single.one_device():
    yield


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
  """A program with the names, imports and calls of big_vision, and another network."""
  folder = tmp_path / 'checkout'
  (folder / 'big_vision' / 'models').mkdir(parents=True)
  (folder / 'big_vision' / 'models' / 'vit.py').write_text(PEER)
  return folder


@pytest.mark.slow(reason='14 s: the parts of two networks are compiled; tables and ratios have tests below')
def test_all_parts_are_timed_also_beside_a_peer_and_one_that_is_not_there_is_told(
    soon_done: None, checkout: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  (tmp_path / 'empty').mkdir()
  to = tmp_path / 'out'
  words = f'big_vision={checkout},big_vision={tmp_path / "empty"}'
  assert bench.main([*TINY, '--turns=2', f'--against={words}', f'--to={to}']) == 2
  shown, said = capsys.readouterr()
  assert 'error: --against=big_vision: expected a network to time, got ModuleNotFoundError: No module named' in said
  found = json.loads((to / 'bench.json').read_text())
  network = found['networks'][0]
  by_part = {one['part']: one for one in network['parts']}
  beside = {part for part in by_part if 'big_vision (jax ' in part}
  assert set(by_part) - beside == set(bench.PARTS)
  assert {part.split(' of ')[0] for part in beside} == {'forward', 'gradient', 'step'}
  for one in by_part.values():
    assert len(one['processor_s']) == len(one['seconds']) == 2 and min(one['processor_s']) > 0
    assert one['images_per_s'] == pytest.approx(8 / one['median_s'])
    assert (one['ratio'] is None) == (one['processor_ratio'] is None) == (one['part'] not in beside)
  step, peer = by_part['step'], next(by_part[p] for p in beside if p.startswith('step'))
  for ratio, of in (('ratio', 'seconds'), ('processor_ratio', 'processor_s')):
    assert peer[ratio] == pytest.approx(sum(b / a for a, b in zip(step[of], peer[of], strict=True)) / 2)
  assert network['cold_s'] > 0 and network['cached_s'] > 0 and network['bytes'] > 10_000
  assert network['matmul_flops'] > 1e7 and found['versions']['jax'] and found['device_kind'] == 'cpu'
  assert found['processor'] == machine.cpu_model() and found['processor'] in shown
  assert (to / 'bench.md').read_text().strip() in shown and 'compiling the step: cold' in shown


def test_a_peer_in_torch_names_its_matrix_library() -> None:
  assert child.torch_blas('  - LAPACK\n  - Build settings: BLAS_INFO=mkl, BUILD_TYPE=Release') == ', BLAS: mkl'
  assert child.torch_blas('PyTorch built with: GCC 13.3') == ''


@pytest.mark.parametrize(('words', 'said'), [
    (['--against=tim'], '--against: expected some of timm, timm-compiled'),
    (['--against=timm=/nothing/here'], 'Python that has timm, or of a checkout, got /nothing/here'),
    (['--against=timm', '--config.model.registers=2'], '--against: expected a plain ViT'),
])
def test_what_cannot_be_timed_is_said(words: list[str], said: str, caplog: pytest.LogCaptureFixture,
                                      capsys: pytest.CaptureFixture[str]) -> None:
  assert bench.main([*TINY, *words]) == 2
  assert said in capsys.readouterr().err + caplog.text


def test_peers_are_only_compared_with_what_they_have() -> None:
  config = files.load('bench', ['model.mlp=swiglu'])
  with pytest.raises(UserError, match='expected a plain ViT .* Use --config=bench'):
    peers.settings(config, 3)


def test_jax_is_imported_after_the_command_line_has_chosen_the_platform() -> None:
  code = "import sys, benchmarks.bench; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=False).returncode == 0
