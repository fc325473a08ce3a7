"""BYOL: loss and target against NumPy over three steps, sharding, FLOPs, and the collapse alarm."""
from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import check, schema
from vit_jax.core import axes
from vit_jax.core.axes import labelled
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Key, Params
from vit_jax.jobs import build
from vit_jax.models import cost
from vit_jax.objectives import byol, kinds
from vit_jax.parallel import sharding
from vit_jax.train.step import Program

WIDTH, HIDDEN, OUT = 6, 8, 4
BATCH = {'views_global': np.random.default_rng(0).normal(size=(8, 2, 4, 4, 3)).astype(np.float32)}
MODEL = schema.ViT(patch=4, width=16, depth=1, heads=2, mlp=16, pool=schema.Pool.MEAN)


class Means:
  """A backbone: a linear map of the mean pixel."""

  def init(self, key: Key, image: Array) -> tuple[Params, Any]:
    return {'kernel': labelled(jax.random.normal(key, (3, WIDTH)), (None, None))}, {}

  def apply(self, params: Params, state: Any, image: Array, *, train: bool, key: Key | None) -> tuple[Features, Any]:
    pooled = image.mean((1, 2)) @ params['kernel']
    return Features(pooled[:, None], pooled, (1, 1)), state


def task() -> byol.Byol:
  return byol.Byol(Means(), *[byol.Mlp(HIDDEN, OUT, jnp.float32)] * 2,
                   momentum=lambda step: .5 + .1 * jnp.asarray(step, jnp.float32))


@functools.cache
def program(settings: str = 'one', accumulate: int = 1) -> Program:
  return programs.build(task(), lambda batch, key, step: batch, programs.MESHES[settings], like=BATCH,
                        accumulate=accumulate)


@functools.cache
def run(settings: str = 'one', accumulate: int = 1, steps: int = 3) -> tuple[Any, Any]:
  return programs.run(program(settings, accumulate), programs.MESHES[settings], BATCH, steps)


def numpy_mlp(p: dict, x: np.ndarray) -> np.ndarray:
  x = x @ p['mlp1']['kernel'] + p['mlp1']['bias']
  x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
  return np.maximum(x * p['norm']['scale'] + p['norm']['bias'], 0.) @ p['mlp2']['kernel'] + p['mlp2']['bias']


def unit(x: np.ndarray) -> np.ndarray:
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def numpy_loss(params: Any, target: Any) -> tuple[float, float]:
  """Loss and spread, in float64."""
  params, target = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, target))
  pixels = BATCH['views_global'].astype(np.float64).mean((2, 3))
  q = unit(numpy_mlp(params['predictor'], numpy_mlp(params['projector'], pixels @ params['backbone']['kernel'])))
  z = unit(numpy_mlp(target['projector'], pixels @ target['backbone']['kernel']))
  loss = (2 - 2 * (q[:, 0] * z[:, 1]).sum(-1)) + (2 - 2 * (q[:, 1] * z[:, 0]).sum(-1))
  return loss.mean(), 1 - np.square(z.mean((0, 1))).sum()


def test_loss_spread_and_target_are_those_of_numpy_over_three_steps() -> None:
  state = jax.device_get(program().init_fn())
  target = jax.tree.map(np.asarray, state.extra['teacher'])
  for step in range(3):
    after, metrics = run(steps=step + 1)
    loss, spread = numpy_loss(state.params, target)
    np.testing.assert_allclose(metrics.means['loss'].value, loss, rtol=2e-5)  # unit vectors of 4 f32 numbers
    np.testing.assert_allclose(metrics.means['spread'].value, spread, rtol=2e-4)  # 1 minus a number near 1
    tau = .5 + .1 * step
    target = {name: jax.tree.map(lambda t, p, m=tau: m * t + (1 - m) * p, target[name], after.params[name])
              for name in target}
    programs.assert_close(after.extra['teacher'], target, rtol=1e-5, atol=1e-6)
    state = after


def test_the_gradient_is_that_of_float64_differences() -> None:
  state = jax.device_get(program().init_fn())
  grads = jax.jit(jax.grad(lambda p: task().loss(p, state.extra, BATCH, jax.random.key(0), jnp.asarray(0)).loss.value))(
      state.params)
  for part, layer, name in (('predictor', 'mlp2', 'bias'), ('projector', 'norm', 'scale'),
                            ('projector', 'mlp1', 'kernel')):
    index, ends = (1,) * grads[part][layer][name].ndim, []
    for shift in (1e-5, -1e-5):
      params = jax.tree.map(lambda leaf: np.array(leaf, np.float64), state.params)
      params[part][layer][name][index] += shift
      ends.append(numpy_loss(params, state.extra['teacher'])[0])
    # Two means of 8 f32 losses of about 4; the differences themselves are exact to 1e-9.
    np.testing.assert_allclose(grads[part][layer][name][index], (ends[0] - ends[1]) / 2e-5, rtol=1e-4, atol=1e-6)


@pytest.mark.slow(reason='5 s: three programs; tests/objectives/test_dino.py has views over microbatches and meshes')
def test_microbatches_and_meshes_change_nothing() -> None:
  state, metrics = run()
  for other in (run(accumulate=2), run('data=2,fsdp=2,tensor=2')):
    programs.assert_close(other[0].params, state.params, rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(other[1].means['loss'].value, metrics.means['loss'].value, rtol=1e-5)


def begin(one: byol.Byol) -> tuple[dict, dict]:
  params, extra = map(programs.draw, jax.eval_shape(one.init, jax.random.key(0), BATCH))
  return params, extra


def test_rows_without_a_mask_do_not_count() -> None:
  one = task()
  params, extra = begin(one)
  views, loss = BATCH['views_global'].copy(), jax.jit(one.loss)
  few = loss(params, extra, {'views_global': views[:5]}, jax.random.key(1), jnp.asarray(0))
  views[5:] = np.nan
  masked = loss(params, extra, {'views_global': views, 'mask': jnp.asarray([1.] * 5 + [0.] * 3)}, jax.random.key(1),
                jnp.asarray(0))
  for name, mean in {'loss': few.loss, **few.metrics}.items():
    np.testing.assert_allclose({'loss': masked.loss, **masked.metrics}[name].value, mean.value, rtol=1e-6)


def test_projections_that_are_all_the_same_have_no_spread() -> None:
  one = task()
  params, extra = begin(one)
  extra['teacher']['projector']['mlp2'] = {'kernel': jnp.zeros((HIDDEN, OUT)), 'bias': jnp.ones(OUT)}
  out = jax.jit(one.loss)(params, extra, BATCH, jax.random.key(0), jnp.asarray(0))
  assert abs(float(out.metrics['spread'].value)) < 1e-6


def config(**changes: Any) -> schema.Config:
  views = schema.Views(on=True, num_local=changes.pop('num_local', 0))
  return schema.Config(image_px=(8, 8), batch_size=8, model=changes.pop('model', MODEL),
                       data=schema.Data(recipe=schema.Recipe(views=views)),
                       objective=schema.Byol(**{'hidden_dim': 32, 'out_dim': 8, **changes}))


def test_a_config_gives_the_momentum_of_the_paper_and_axes_for_all_parameters() -> None:
  c = config()
  check.check(c)
  one = build.build_objective(c, build.build_backbone(c), 3, lengths=programs.durations.Lengths(800, 8, 1000))
  for step in (0, 250, 1000):  # 1 - (1 - tau) (cos(pi k / K) + 1) / 2, section 3.2
    np.testing.assert_allclose(one._momentum(step), 1 - (1 - .996) * (np.cos(np.pi * step / 1000) + 1) / 2, rtol=1e-6)
  (params, extra), (labels, _) = axes.trace(one.init, jax.random.key(0), {'views_global': jnp.zeros((1, 2, 8, 8, 3))})
  mesh = programs.mesh(programs.MESHES['data=2,fsdp=2,tensor=2'])
  specs = sharding.param_specs(params, labels, mesh)
  assert specs['projector']['mlp1']['kernel'] == jax.sharding.PartitionSpec('fsdp', 'tensor')
  assert sharding.follow_specs(extra, params, specs)['teacher']['projector'] == specs['projector']
  assert sorted(one.views()) == ['student', 'teacher']


def test_a_step_costs_two_forward_and_backward_passes_and_two_forward_passes() -> None:
  c = config()
  backbone = sum(cost.forward(MODEL, (8, 8), head=schema.Head(), num_classes=0).flops.values())
  project, predict = 2 * (16 * 32 + 32 * 8), 2 * (8 * 32 + 32 * 8)
  assert programs.train_flops(c) == 2 * (3 * (backbone + project + predict) + backbone + project)


def test_a_small_spread_raises_an_alarm_unless_the_threshold_is_0() -> None:
  [watch] = kinds.of(config(collapse=schema.Collapse(.02, '3 steps', '5 steps'))).watches(programs.LENGTHS)
  assert (watch.metric, watch.below, watch.lasting, watch.after, watch.stops) == ('spread', .02, 3, 5, False)
  assert kinds.of(config(collapse=schema.Collapse(0.))).watches(programs.LENGTHS) == []


@pytest.mark.parametrize(('given', 'said'), [
    (config(num_local=2), 'views.num_local: expected 0 for objective Byol, which compares two global crops, got 2'),
    (config(momentum=schema.Ramp(.9, 1.1)), 'objective.momentum.end: expected 0 to 1, got 1.1'),
    (config(model=schema.EfficientNet()), 'model: expected one without BatchNorm for objective Byol'),
    (config(hidden_dim=0), 'objective.hidden_dim: expected at least 1, got 0'),
    (config(out_dim=0), 'objective.out_dim: expected at least 1, got 0')])
def test_settings_that_cannot_work_are_refused(given: schema.Config, said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(given)
  assert said in str(error.value)
