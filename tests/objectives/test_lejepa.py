"""LeJEPA: statistic, loss and gradient against NumPy and stable-pretraining, sharding, and the collapse alarm."""
from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from tests.objectives import make_golden_lejepa as made
from vit_jax.config import check, schema
from vit_jax.core import axes
from vit_jax.core.axes import labelled
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Key, Params
from vit_jax.jobs import build
from vit_jax.models import cost
from vit_jax.models.heads import normalize
from vit_jax.objectives import kinds, lejepa
from vit_jax.parallel import sharding
from vit_jax.train.step import Program

WIDTH, HIDDEN, OUT = 6, 8, 4
RNG = np.random.default_rng(0)
BATCH = {'views_global': RNG.normal(size=(8, 2, 4, 4, 3)).astype(np.float32),
         'views_local': RNG.normal(size=(8, 3, 2, 2, 3)).astype(np.float32)}
MODEL = schema.ViT(patch=4, width=16, depth=1, heads=2, mlp=schema.Mlp(16), pool=schema.Mean())
SETTINGS = schema.LeJepa(hidden_dim=HIDDEN, out_dim=OUT, directions=5, weight=.1)
LAST_STEP = np.zeros((), np.int32)


class Means:
  """A backbone for views of any size: a linear map of the mean pixel."""

  def init(self, key: Key, image: Array) -> tuple[Params, Any]:
    return {'kernel': labelled(jax.random.normal(key, (3, WIDTH)), (None, None))}, {}

  def apply(self, params: Params, state: Any, image: Array, *, train: bool, key: Key | None) -> tuple[Features, Any]:
    pooled = image.mean((1, 2)) @ params['kernel']
    return Features(pooled[:, None], pooled, (1, 1)), state


def task(settings: schema.LeJepa = SETTINGS) -> lejepa.LeJepa:
  return lejepa.LeJepa(Means(), lejepa.Projector(HIDDEN, OUT, jnp.float32), settings)


@functools.cache
def program(settings: str = 'one') -> Program:
  return programs.build(task(), lambda batch, key, step: batch, programs.MESHES[settings], like=BATCH)


@functools.cache
def run(settings: str = 'one', steps: int = 2) -> tuple[Any, Any]:
  return programs.run(program(settings), programs.MESHES[settings], BATCH, steps)


@functools.cache
def begin() -> Any:
  params, _ = jax.eval_shape(task().init, jax.random.key(0), BATCH)
  return programs.draw(params)


def numpy_statistic(x: np.ndarray) -> float:
  """The paper's Algorithm 1 for samples `x [N]`: 17 points on [-5, 5], trapezoid rule, float64."""
  t = np.linspace(-5., 5., 17)
  phi = np.exp(-t ** 2 / 2)
  error = np.abs(np.exp(1j * x[:, None] * t).mean(0) - phi) ** 2 * phi
  return float(((error[1:] + error[:-1]) / 2 * (t[1] - t[0])).sum() * len(x))


def numpy_embeddings(params: Any, batch: dict[str, np.ndarray] = BATCH) -> np.ndarray:
  """`[B, V, E]` in float64."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  pixels = np.concatenate([batch[name].astype(np.float64).mean((2, 3)) for name in ('views_global', 'views_local')], 1)
  x = (pixels @ p['backbone']['kernel']).reshape(-1, WIDTH)
  for number in '12':
    mlp, norm = p['projector'][f'mlp{number}'], p['projector'][f'norm{number}']
    x = x @ mlp['kernel'] + mlp['bias']
    x = np.maximum((x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * norm['scale'] + norm['bias'], 0.)
  last = p['projector']['mlp3']
  return (x @ last['kernel'] + last['bias']).reshape(*pixels.shape[:2], -1)


def numpy_loss(z: np.ndarray, directions: np.ndarray, weight: float) -> tuple[float, float, float]:
  """Loss, invariance and SIGReg of the paper, by loops over views and directions."""
  invariance = np.mean([np.square(z[i, v] - z[i, :2].mean(0)).mean() for i in range(len(z)) for v in range(z.shape[1])])
  sigreg = np.mean([numpy_statistic(z[:, v] @ directions[:, m])
                    for v in range(z.shape[1]) for m in range(directions.shape[1])])
  return (1 - weight) * invariance + weight * sigreg, float(invariance), float(sigreg)


def directions_of(key: Key) -> np.ndarray:
  """What the loss draws from its key."""
  own = jax.random.split(key, 3)[2]
  return np.asarray(normalize(jax.random.normal(own, (OUT, SETTINGS.directions)), axis=0), np.float64)


@functools.cache
def loss_and_gradient() -> tuple[Any, Any]:
  def total(params: Params) -> tuple[Array, Any]:
    out = task().loss(params, {}, BATCH, jax.random.key(3), LAST_STEP)
    return out.loss.value, {'loss': out.loss, **out.metrics}
  grads, out = jax.jit(jax.grad(total, has_aux=True))(begin())
  return {name: float(mean.value) for name, mean in out.items()}, grads


def test_loss_and_metrics_are_those_of_numpy() -> None:
  z = numpy_embeddings(begin())
  loss, invariance, sigreg = numpy_loss(z, directions_of(jax.random.key(3)), SETTINGS.weight)
  want = {'loss': loss, 'invariance': invariance, 'sigreg': sigreg, 'deviation': z.reshape(-1, OUT).std(0).mean()}
  assert loss_and_gradient()[0] == pytest.approx(want, rel=2e-5)  # f32 sums of 40 rows, through two norms


def test_the_gradient_is_that_of_float64_differences() -> None:
  _, grads = loss_and_gradient()
  directions = directions_of(jax.random.key(3))
  for part, layer, name in (('backbone', '', 'kernel'), ('projector', 'mlp1', 'kernel'),
                            ('projector', 'norm2', 'scale'), ('projector', 'mlp3', 'bias')):
    ends = []
    for shift in (1e-5, -1e-5):
      params = jax.tree.map(lambda leaf: np.array(leaf, np.float64), begin())
      leaf = params[part][layer][name] if layer else params[part][name]
      leaf[(1,) * leaf.ndim] += shift
      ends.append(numpy_loss(numpy_embeddings(params), directions, SETTINGS.weight)[0])
    got = grads[part][layer][name] if layer else grads[part][name]
    # The gradient is a sum of some 40 f32 terms that cancel in the norms; the differences are exact to 1e-9.
    np.testing.assert_allclose(got[(1,) * got.ndim], (ends[0] - ends[1]) / 2e-5, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize('grid', made.GRIDS)
def test_terms_and_gradient_are_those_of_stable_pretraining(grid: str) -> None:
  golden = json.loads(pathlib.Path(__file__).with_name('golden_lejepa.json').read_text())[grid]
  t_max, points = made.GRIDS[grid]
  directions = jnp.asarray(golden['directions'])

  def total(z: Array) -> tuple[Array, dict[str, Array]]:
    """Their loss: a sum that is not convex, with the embeddings of all views as one sample."""
    invariance = lejepa.terms(z, jnp.ones(made.NUM), directions, SETTINGS)[1]['invariance']
    rows = z.reshape(-1, made.WIDTH) @ directions
    sigreg = lejepa.epps_pulley(rows, jnp.ones(len(rows)), t_max, points).mean()
    return invariance + made.WEIGHT * sigreg, {'invariance': invariance, 'sigreg': sigreg}

  (loss, found), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(
      jnp.asarray(made.embeddings(), jnp.float32))
  got = {'loss': float(loss)} | {name: float(value) for name, value in found.items()}
  assert got == pytest.approx({name: golden[name] for name in got}, rel=1e-5)
  np.testing.assert_allclose(gradient, golden['gradient'], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(('t_max', 'points', 'want'), [(3., 17, (102.9, 60.7)), (5., 9, (104.7, 61.4))])
def test_the_statistic_of_constants_and_of_twice_a_normal_has_its_known_value(t_max: float, points: int,
                                                                              want: tuple[float, float]) -> None:
  # 256 samples at 0, and 256 quantiles of N(0, 2^2); a sample of N(0, 1) has about 0.14.
  quantiles = np.quantile(np.random.default_rng(0).normal(size=1_000_000), (np.arange(256) + .5) / 256)
  statistic = jax.jit(lejepa.epps_pulley, static_argnums=(2, 3))
  got = statistic(jnp.asarray(np.stack([np.zeros(256), 2 * quantiles, quantiles], 1)), jnp.ones(256), t_max, points)
  assert float(got[0]) == pytest.approx(want[0], abs=.05) and float(got[1]) == pytest.approx(want[1], rel=.02)
  assert float(got[2]) < .05
  if t_max == 5.:
    assert float(got[1]) == pytest.approx(numpy_statistic(2 * quantiles), rel=1e-4)


def test_every_step_has_its_own_directions() -> None:
  one = program()
  state, values = jax.device_get(one.init_fn()), []
  for step in (0, 1):
    placed = programs.meshes.put_batch(BATCH, programs.mesh(programs.MESHES['one']), programs.Shard((0,), 1))
    start = jax.device_put(state._replace(step=np.asarray(step, np.int32)), one.shardings)
    values.append(one.step_fn(start, placed)[1].unpack().means)
  assert float(values[0]['invariance'].value) == float(values[1]['invariance'].value)  # the same parameters and images
  assert float(values[0]['sigreg'].value) != float(values[1]['sigreg'].value)


@pytest.mark.parametrize('settings', ['data=8', pytest.param('data=2,fsdp=2,tensor=2', marks=pytest.mark.slow(
    reason='3 s: a program; the first has sums over devices'))])
def test_eight_devices_take_the_steps_of_one(settings: str) -> None:
  state, metrics = run()
  other, others = run(settings)
  programs.assert_close(other.params, state.params, rtol=1e-3, atol=1e-5)
  programs.assert_close(others.means, metrics.means, rtol=1e-4)


def test_rows_without_a_mask_do_not_count() -> None:
  one, loss = task(), jax.jit(task().loss)
  few = loss(begin(), {}, {name: views[:5] for name, views in BATCH.items()}, jax.random.key(1), LAST_STEP)
  padded = {name: np.concatenate([views[:5], np.full_like(views[5:], np.nan)]) for name, views in BATCH.items()}
  masked = loss(begin(), {}, {**padded, 'mask': jnp.asarray([1.] * 5 + [0.] * 3)}, jax.random.key(1), LAST_STEP)
  for name, mean in {'loss': few.loss, **few.metrics}.items():
    np.testing.assert_allclose({'loss': masked.loss, **masked.metrics}[name].value, mean.value, rtol=1e-5, err_msg=name)
  assert one.after_update({}, {}, {}, LAST_STEP) == {}


def test_embeddings_that_are_all_the_same_have_no_deviation() -> None:
  params = begin()
  params['projector']['mlp3'] = {'kernel': jnp.zeros((HIDDEN, OUT)), 'bias': jnp.ones(OUT)}
  out = jax.jit(task().loss)(params, {}, BATCH, jax.random.key(0), LAST_STEP)
  assert abs(float(out.metrics['deviation'].value)) < 1e-6
  begin.cache_clear()


def config(**changes: Any) -> schema.Config:
  views = schema.Views(on=True, num_local=changes.pop('num_local', 2), local_px=4)
  return schema.Config(image_px=(8, 8), batch_size=8, model=changes.pop('model', MODEL),
                       train=schema.Train(accumulate=changes.pop('accumulate', 1)),
                       data=schema.Data(recipe=schema.Recipe(views=views)),
                       objective=schema.LeJepa(**{'hidden_dim': 32, 'out_dim': 8, **changes}))


def test_a_config_gives_axes_for_all_parameters_and_one_view() -> None:
  c = config(directions=3, t_max=3., t_points=17)
  check.check(c)
  one = build.build_objective(c, build.build_backbone(c), 3, lengths=programs.LENGTHS)
  (params, extra), (labels, _) = axes.trace(one.init, jax.random.key(0), {
      'views_global': jnp.zeros((1, 2, 8, 8, 3)), 'views_local': jnp.zeros((1, 2, 4, 4, 3))})
  specs = sharding.param_specs(params, labels, programs.mesh(programs.MESHES['data=2,fsdp=2,tensor=2']))
  assert specs['projector']['mlp1']['kernel'] == jax.sharding.PartitionSpec('fsdp', 'tensor')
  assert not extra and list(one.views()) == ['student']


def test_a_step_costs_three_passes_for_every_view() -> None:
  c = config(num_local=0)
  backbone = sum(cost.forward(MODEL, (8, 8), head=schema.Head(), num_classes=0).flops.values())
  project, directions = 2 * (16 * 32 + 32 * 32 + 32 * 8), 2 * 8 * 1024  # which have no gradient
  assert programs.train_flops(c) == 2 * (3 * (backbone + project) + 2 * directions)


def test_a_small_deviation_raises_an_alarm_unless_the_threshold_is_0() -> None:
  [watch] = kinds.of(config(collapse=schema.Collapse(.02, '3 steps', '5 steps'))).watches(programs.LENGTHS)
  assert (watch.metric, watch.below, watch.lasting, watch.after, watch.stops) == ('deviation', .02, 3, 5, False)
  assert kinds.of(config(collapse=schema.Collapse(0.))).watches(programs.LENGTHS) == []


@pytest.mark.parametrize(('given', 'said'), [
    (config(model=schema.EfficientNet()), 'model: expected one without BatchNorm for objective LeJepa'),
    (config(weight=1.), 'objective.weight: expected more than 0 to below 1, got 1'),
    (config(t_points=1), 'objective.t_points: expected 2 to 10000, got 1'),
    (config(t_max=0.), 'objective.t_max: expected more than 0, got 0'),
    (config(directions=0), 'objective.directions: expected at least 1, got 0')])
def test_settings_that_cannot_work_are_refused(given: schema.Config, said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(given)
  assert said in str(error.value)
