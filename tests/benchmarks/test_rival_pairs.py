"""big_vision's losses over all pairs: those of a checkout's trainer and utilities, with its towers."""
from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

from benchmarks import pair_losses, rival_pairs
from vit_jax.config.schema import PairForm, PairLoss
from vit_jax.core.errors import UserError
from vit_jax.plan import compile

TRAINER = """
import a_package_that_is_missing

def main():
  model = a_package_that_is_missing.model()

  def update_fn(state, rng_model, images, labels):
    def loss_fn(params):
      zimg, ztxt, found = model.apply({'params': params}, images, labels, train=True, rngs={'dropout': rng_model})
      return jnp.sum(zimg * ztxt) * found['t'] + jax.nn.relu(found['b'])
    return loss_fn(state)
"""
UTILS = """
def bidirectional_contrastive_loss(zimg, ztxt, t, mask=None, reduction=False):
  assert reduction
  return (zimg - ztxt).sum() * t, {}
"""
TOWERS = """
import jax.numpy as jnp

class Model:
  def __init__(self, image, text, out_dim, temperature_init, bias_init):
    blocks = {'scan': True, 'depth': 12}
    assert image == {'variant': 'B/16', 'pool_type': 'map', 'dtype_mm': 'bfloat16'} | blocks, image
    assert text == {'variant': 'B', 'vocab_size': 32_000} | blocks and out_dim == (None, 768), (text, out_dim)
    assert (temperature_init, bias_init) == (10., -10.)

  def init(self, key, image, text):
    return {'params': {'kernel': jnp.zeros((image.shape[-1], 8)), 't': jnp.zeros(()), 'b': jnp.zeros(())}}

  def apply(self, variables, image, text, train, rngs):
    p = variables['params']
    return image.mean((1, 2)) @ p['kernel'], jnp.sin(text[:, :8].astype('float32')), {'t': p['t'], 'b': p['b']}
"""
OPTIMIZER = """
import optax

def make(config, params, *, sched_kw):
  assert config.get('optax') == {'b2': .95}, config
  return optax.adam(config.lr, **config.get('optax', {})), []
"""
SHARDING = """
import jax

def infer_sharding(state, strategy, mesh):
  return jax.tree.map(lambda x: jax.NamedSharding(mesh, jax.P()), state)
"""


@pytest.fixture
def checkout(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
  """A program with the names and calls of big_vision."""
  files = {rival_pairs.TRAINER: TRAINER, 'big_vision/utils.py': UTILS, 'big_vision/optax.py': OPTIMIZER,
           'big_vision/sharding.py': SHARDING, 'big_vision/models/vit.py': '',
           'big_vision/models/proj/image_text/two_towers.py': TOWERS,
           'big_vision/models/proj/image_text/text_transformer.py': ''}
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  monkeypatch.setattr(sys, 'path', [*sys.path])
  yield str(tmp_path)
  for name in [name for name in sys.modules if name.partition('.')[0] == 'big_vision']:
    del sys.modules[name]


def test_the_losses_are_those_of_the_checkout(checkout: str) -> None:
  image, text = jnp.arange(4.).reshape(2, 2), jnp.ones((2, 2))
  own = {'zimg': image, 'ztxt': text, 't': jnp.float32(3.), 'b': jnp.float32(.5)}
  for loss, expected in ((PairLoss.SIGMOID, 6 * 3 + .5), (PairLoss.SOFTMAX, 2 * 3)):
    request = pair_losses.Request('cpu:1', 2, 2, loss, PairForm.MATRIX, 'float32', checkout)
    given = {name: own[name] for name in own if name != 'b' or loss is PairLoss.SIGMOID}
    value, gradient = pair_losses.lower(request, jax.devices()[:1]).compile()(given)
    assert value == expected and gradient['t'] == (6 if loss is PairLoss.SIGMOID else 2)


def test_the_step_has_the_towers_of_the_checkout_and_splits_pairs(checkout: str) -> None:
  devices = jax.devices()[:2 if jax.device_count() > 1 else 1]
  request = rival_pairs.Request(checkout, f'cpu:{len(devices)}', 4, PairLoss.SIGMOID, scan=True)
  (state, _, images, texts), _ = rival_pairs.lower(request, devices).in_avals
  assert images.shape == (4, 224, 224, 3) and texts.shape == (4, 64) and texts.dtype == 'int32'
  assert state['params']['kernel'].shape == (3, 8)


def test_a_quick_step_is_on_the_line_through_shallow_programs(monkeypatch: pytest.MonkeyPatch) -> None:
  asked = []

  def ask(request: rival_pairs.Request) -> compile.Answer:
    asked.append(request.depth)
    return compile.Answer(peak_bytes=100 + 10 * request.depth)

  monkeypatch.setattr(rival_pairs, 'ask', ask)
  request = rival_pairs.Request('', 'v5e:4x4', 64, PairLoss.SIGMOID)
  assert rival_pairs.ask_quick(request).peak_bytes == 220 and asked == [2, 4]
  assert rival_pairs.ask_quick(request._replace(scan=True)).peak_bytes == 220 and asked == [2, 4, 12]


def test_a_checkout_without_the_trainer_is_refused(checkout: str) -> None:
  pathlib.Path(checkout, rival_pairs.TRAINER).write_text('def other(): pass')
  with pytest.raises(UserError, match='--big_vision: expected one function loss_fn in .*siglip.py, got 0'):
    rival_pairs.mean_loss(checkout, PairLoss.SIGMOID, lambda *_, **__: None)(None, None, None, None)
