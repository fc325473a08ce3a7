"""big_vision's step: built from a checkout without TensorFlow, split and updated as its trainer does."""
from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Iterator

import jax
import pytest

from benchmarks import child, rival
from vit_jax.core.errors import UserError

NETWORK = """
import einops
import ml_collections as mlc
import tensorflow.io.gfile as gfile
import jax, jax.numpy as jnp

def load(path, config: mlc.ConfigDict, read=gfile.GFile):
  raise AssertionError('no file is read')

class Model:
  def __init__(self, classes, **given):
    assert given == dict(patch_size=(4, 4), width=16, depth=2, mlp_dim=32, num_heads=2, pool_type='gap', scan=True,
                         dtype_mm='bfloat16'), given
    self.classes = classes

  def init(self, key, image):
    return {'params': {'kernel': jnp.zeros((image.shape[-1], self.classes))}}

  def apply(self, variables, image, train, rngs):
    return image.mean((1, 2)) @ variables['params']['kernel'], {}
"""
OPTIMIZER = """
import optax

def make(config, params, *, sched_kw):
  assert config.optax_name == 'scale_by_adam' and config.get('grad_clip_norm') == 1. and config.get('lr_mults') is None
  return optax.adam(config.lr, **config.get('optax', {})), []
"""
SHARDING = """
import jax

def infer_sharding(state, strategy, mesh):
  assert strategy == [('.*', "fsdp(axis='data', min_size_to_shard_mb=4)")], strategy
  return jax.tree.map(lambda x: jax.NamedSharding(mesh, jax.P(None, 'data') if x.ndim == 2 else jax.P()), state)
"""
SIZES = {'width': 16, 'depth': 2, 'mlp': 32, 'heads': 2, 'patch': 4, 'px': 8, 'classes': 4}


@pytest.fixture
def checkout(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
  """A program with the names and calls of big_vision."""
  folder = tmp_path / 'big_vision'
  (folder / 'models').mkdir(parents=True)
  for name, text in (('models/vit.py', NETWORK), ('optax.py', OPTIMIZER), ('sharding.py', SHARDING)):
    (folder / name).write_text(text)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  yield tmp_path
  for name in [name for name in sys.modules if name.partition('.')[0] == 'big_vision']:
    del sys.modules[name]


def test_the_step_has_the_checkouts_network_optimizer_and_shardings(checkout: pathlib.Path) -> None:
  if jax.device_count() < 4:
    pytest.skip('needs four devices, as are simulated on a CPU')
  lowered = rival.lower(rival.Request(str(checkout), 'cpu:4', SIZES, 8, scan=True), jax.devices()[:4])
  (state, key, images, labels), _ = lowered.in_avals
  assert images.shape == (8, 8, 8, 3) and labels.shape == (8, 4)
  assert state['params']['kernel'].shape == (3, 4) and state['opt'][0].mu['kernel'].dtype == 'bfloat16'
  (new, found), text = lowered.out_info, lowered.as_text()
  assert new['params']['kernel'].shape == (3, 4) and [one.shape for one in found] == [()] * 4
  assert 'tf.aliasing_output' in text or 'jax.buffer_donor' in text
  assert importlib.util.find_spec('big_vision.sharding') is not None


def test_packages_that_are_missing_are_missing_again_afterwards() -> None:
  absent = [name for name in child.UNUSED if '.' not in name and importlib.util.find_spec(name) is None]
  before = set(sys.modules)
  with child.without_unused():
    import tensorflow.io.gfile as gfile  # type: ignore[import-not-found,import-untyped]
    assert gfile.GFile
  assert all(importlib.util.find_spec(name) is None for name in absent)
  assert not {name for name in set(sys.modules) - before if name.partition('.')[0] in absent}


def test_a_folder_without_big_vision_is_refused(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='--big_vision: expected a folder with the package big_vision, got '):
    rival.ask(rival.Request(str(tmp_path), 'v6e:4x4', SIZES, 8))
