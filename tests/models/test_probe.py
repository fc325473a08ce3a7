"""A frozen backbone under a linear probe: no gradients, chosen features, BatchNorm as NumPy has it."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.core import taps
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.jobs import build
from vit_jax.models import efficientnet, probe, resnet, vit
from vit_jax.parallel import mesh as meshes

SETTINGS = schema.ViT(patch=4, width=16, depth=2, heads=2, mlp=16, dropout=.5, drop_path=.5)
MODEL = vit.build(SETTINGS, (8, 8))
IMAGE = jax.random.normal(jax.random.key(0), (6, 8, 8, 3))


def frozen(*, normalize: bool, blocks: tuple[int, ...] = (), patches: bool = False) -> probe.Frozen:
  return probe.Frozen(MODEL, schema.Tap(blocks, patches), normalize)


def test_training_sees_the_features_of_evaluation_by_the_statistics_of_the_batch() -> None:
  model = frozen(normalize=True)
  params, state = model.init(jax.random.key(1), IMAGE)
  plain = np.asarray(MODEL.apply(params, {}, IMAGE, train=False, key=None)[0].pooled, np.float64)
  got, new = model.apply(params, state, IMAGE, train=True, key=jax.random.key(2))
  np.testing.assert_allclose(got.pooled, (plain - plain.mean(0)) / np.sqrt(plain.var(0) + 1e-6), atol=1e-4)
  np.testing.assert_allclose(new['features']['mean'], .1 * plain.mean(0), atol=1e-6)
  np.testing.assert_allclose(new['features']['variance'], .9 + .1 * plain.var(0, ddof=1), atol=1e-6)


def test_evaluation_goes_by_the_running_statistics_and_keeps_them() -> None:
  model = frozen(normalize=True)
  params, state = model.init(jax.random.key(1), IMAGE)
  _, state = model.apply(params, state, IMAGE, train=True, key=None)
  got, same = model.apply(params, state, IMAGE[:2], train=False, key=None)
  plain = MODEL.apply(params, {}, IMAGE[:2], train=False, key=None)[0].pooled
  running = state['features']
  np.testing.assert_allclose(got.pooled, (plain - running['mean'][None]) / np.sqrt(running['variance'] + 1e-6)[None],
                             atol=1e-5)
  assert same is state


def test_chosen_blocks_are_read_and_no_gradient_reaches_the_backbone() -> None:
  model = frozen(normalize=False, blocks=(-2, -1), patches=True)
  params, state = model.init(jax.random.key(1), IMAGE)
  got, _ = model.apply(params, state, IMAGE, train=True, key=jax.random.key(2))
  np.testing.assert_allclose(got.pooled, taps.concatenate(taps.read(MODEL, params, IMAGE, (1, 2)), patches=True))
  assert got.pooled.shape == (6, 48) and state == {}
  grads = jax.grad(lambda p: jnp.square(model.apply(p, {}, IMAGE, train=True, key=None)[0].pooled).sum())(params)
  assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads))


def test_a_network_with_batch_norm_keeps_its_own_statistics() -> None:
  inner = efficientnet.build(schema.EfficientNet(), (32, 32))
  model = probe.Frozen(inner, schema.Tap(), True)
  shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((2, 32, 32, 3)))
  assert set(shapes[1]) == {'backbone', 'features'}
  assert jax.tree.structure(shapes[0]) == jax.tree.structure(
      jax.eval_shape(inner.init, jax.random.key(0), jnp.zeros((2, 32, 32, 3)))[0])


def test_blocks_of_a_network_without_are_refused() -> None:
  model = probe.Frozen(resnet.build(schema.ResNet(layers=(1,), width=32), (32, 32)), schema.Tap((-1,)), True)
  with pytest.raises(UserError, match='ResNet has no blocks to read after; want none'):
    model.init(jax.random.key(0), jnp.zeros((2, 32, 32, 3)))


def test_a_step_trains_the_head_alone_and_the_statistics() -> None:
  config = schema.Config(
      batch_size=8, length='4 steps', image_px=(8, 8), model=SETTINGS,
      head=schema.Head(probe=True, batch_norm=True, tap=schema.Tap((-1,))),
      data=schema.Data(recipe=schema.Recipe(crop=schema.Crop.RESIZE, flip=False)),
      optimizer=schema.Lars(lr=1., rules=(schema.PathRule('backbone/.*', frozen_until='100 %'),),
                            schedule=schema.Schedule(warmup='0 steps')))
  mesh = programs.mesh(programs.MESHES['data=2,tensor=4'])
  parts = build.parts(config, mesh=mesh, num_examples=8, num_classes=7, in_memory=False)
  batch = programs.batch(8) | {'bad': np.zeros(8, bool), 'box': np.zeros((8, 4), np.float32)}
  before = jax.device_get(parts.program.init_fn())
  state, _ = parts.program.step_fn(parts.program.init_fn(), meshes.put_batch(batch, mesh, Shard((0, 1), 2)))
  after = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, after.params['backbone'], before.params['backbone'])
  assert np.abs(after.params['head']['kernel']).max() > 0
  assert (after.extra['model_state']['features']['mean'] != 0).any()
