"""A frozen backbone under a linear probe: no gradients, chosen features, BatchNorm as NumPy has it."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import vits

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Features, Shard
from vit_jax.jobs import build
from vit_jax.models import intermediates, probe
from vit_jax.models.vit import vit
from vit_jax.parallel import mesh as meshes

SETTINGS = schema.ViT(patch=4, width=16, depth=2, heads=2, mlp=schema.Mlp(16), dropout=.5, drop_path=.5)
MODEL = vit.build(SETTINGS, (8, 8))
IMAGE = np.random.default_rng(0).normal(size=(6, 8, 8, 3)).astype(np.float32)


@pytest.fixture(scope='module')
def params() -> dict:
  return vits.drawn(jax.eval_shape(MODEL.init, jax.random.key(0), IMAGE)[0], deviation=.3)


@pytest.fixture(scope='module')
def plain(params: dict) -> np.ndarray:
  """What the head of the backbone itself sees in evaluation."""
  features = jax.jit(lambda p: MODEL.apply(p, {}, IMAGE, train=False, key=None)[0].pooled)(params)
  return np.asarray(features, np.float64)


@pytest.mark.slow(reason='3 s: two programs')
def test_training_goes_by_the_batch_and_evaluation_by_the_running_statistics(params: dict, plain: np.ndarray) -> None:
  model = probe.Frozen(MODEL, schema.FeatureLayers(), True)
  shapes, state = jax.eval_shape(model.init, jax.random.key(1), IMAGE)
  assert jax.tree.map(np.shape, shapes) == jax.tree.map(np.shape, params)
  assert state['features']['mean'].shape == (16,)
  state = {'features': {'mean': np.zeros(16, np.float32), 'variance': np.ones(16, np.float32)}}
  apply = jax.jit(lambda s, train: model.apply(params, s, IMAGE, train=train, key=None), static_argnums=1)
  got, new = apply(state, True)
  np.testing.assert_allclose(got.pooled, (plain - plain.mean(0)) / np.sqrt(plain.var(0) + 1e-6), atol=1e-4)
  running = new['features']
  np.testing.assert_allclose(running['mean'], .1 * plain.mean(0), atol=1e-6)
  np.testing.assert_allclose(running['variance'], .9 + .1 * plain.var(0, ddof=1), atol=1e-6)
  got, same = apply(new, False)
  want = (plain - np.asarray(running['mean'])) / np.sqrt(np.asarray(running['variance']) + 1e-6)
  np.testing.assert_allclose(got.pooled, want, atol=1e-4)
  chex.assert_trees_all_equal(same, new)


@pytest.mark.slow(reason='2 s: a gradient')
def test_chosen_blocks_are_read_and_no_gradient_reaches_the_backbone(params: dict) -> None:
  model = probe.Frozen(MODEL, schema.FeatureLayers((-2, -1), True), False)

  def loss(params: dict) -> tuple[jax.Array, jax.Array]:
    features, state = model.apply(params, {}, IMAGE, train=True, key=jax.random.key(2))
    assert state == {}
    return jnp.square(features.pooled).sum(), features.pooled

  grads, got = jax.jit(jax.grad(loss, has_aux=True))(params)
  want = jax.jit(lambda p: intermediates.concatenate(intermediates.read(MODEL, p, IMAGE, (1, 2)), patches=True))(params)
  np.testing.assert_allclose(got, want, atol=1e-5)
  assert got.shape == (6, 48) and all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads))


class Counting:
  """A backbone without blocks whose state counts what it sees in training."""

  def init(self, key: jax.Array, image: jax.Array) -> tuple[dict, dict]:
    return {'kernel': jnp.ones((3, 4))}, {'seen': jnp.zeros(())}

  def apply(self, params: dict, state: dict, image: jax.Array, *, train: bool,
            key: jax.Array | None) -> tuple[Features, dict]:
    pooled = image.mean((1, 2)) @ params['kernel']
    return Features(pooled[:, None], pooled, (1, 1)), {'seen': state['seen'] + float(train)}


def test_a_network_with_statistics_keeps_its_own_as_they_are() -> None:
  model = probe.Frozen(Counting(), schema.FeatureLayers(), True)
  params, state = model.init(jax.random.key(0), IMAGE)
  assert set(state) == {'backbone', 'features'}
  _, new = model.apply(params, state, IMAGE, train=True, key=None)
  assert float(new['backbone']['seen']) == 0. and (np.asarray(new['features']['mean']) != 0).all()


def test_blocks_of_a_network_without_are_refused() -> None:
  with pytest.raises(UserError, match=r'head.features.blocks: expected \(\) for Counting, which has no blocks to '
                                      'read after, got'):
    probe.Frozen(Counting(), schema.FeatureLayers((-1,)), True).init(jax.random.key(0), IMAGE)


@pytest.mark.slow(reason='6 s: compiles a train step; the gradient of the backbone is a test above')
def test_a_step_trains_the_head_alone_and_the_statistics() -> None:
  config = schema.Config(
      batch_size=8, length='4 steps', image_px=(8, 8), model=SETTINGS,
      head=schema.Head(probe=True, batch_norm=True, features=schema.FeatureLayers((-1,))),
      data=schema.Data(recipe=schema.Recipe(crop=schema.Crop.RESIZE, flip=False)),
      optimizer=schema.Lars(lr=1., rules=(schema.PathRule('backbone/.*', frozen_until='100 %'),),
                            schedule=schema.Schedule(warmup='0 steps')))
  mesh = programs.mesh(programs.MESHES['data=2,tensor=4'])
  parts = build.parts(config, mesh=mesh, num_examples=8, num_classes=7, in_memory=False)
  batch = programs.batch(8) | {'bad': np.zeros(8, bool), 'box': np.zeros((8, 4), np.float32)}
  before = jax.device_get(parts.program.init_fn())
  program = parts.program
  state, _ = program.step_fn(program.init_fn(), meshes.put_batch(batch, mesh, Shard((0, 1), 2)))
  after = jax.device_get(state)
  chex.assert_trees_all_equal(after.params['backbone'], before.params['backbone'])
  assert np.abs(after.params['head']['kernel']).max() > 0
  assert (after.extra['model_state']['features']['mean'] != 0).any()
