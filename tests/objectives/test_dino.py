"""DINO: loss, center and teacher against NumPy over three steps, the projector, Sinkhorn, and health signals."""
from __future__ import annotations

import functools
import json
import pathlib
from math import erf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from tests.objectives import make_golden_dino as made
from vit_jax.config import schema
from vit_jax.config.schema import Centering
from vit_jax.core import axes, trees
from vit_jax.core.axes import labelled
from vit_jax.core.types import Array, Features, Key, Params
from vit_jax.jobs import build
from vit_jax.models.heads import Projector
from vit_jax.objectives import dino, kinds
from vit_jax.parallel import sharding
from vit_jax.train.step import Program

K, WIDTH, CENTER_MOMENTUM = 11, 6, .8
RNG = np.random.default_rng(0)
BATCH = {'views_global': RNG.normal(size=(8, 2, 4, 4, 3)).astype(np.float32),
         'views_local': RNG.normal(size=(8, 3, 2, 2, 3)).astype(np.float32)}


class Means:
  """A backbone for views of any size: a linear map of the mean pixel."""

  def init(self, key: Key, image: Array) -> tuple[Params, Any]:
    return {'kernel': labelled(jax.random.normal(key, (3, WIDTH)), (None, None))}, {}

  def apply(self, params: Params, state: Any, image: Array, *, train: bool, key: Key | None) -> tuple[Features, Any]:
    pooled = image.mean((1, 2)) @ params['kernel']
    return Features(pooled[:, None], pooled, (1, 1)), state


def task(centering: Centering = Centering.MEAN, *, learned_norm: bool = False) -> dino.Dino:
  rates = dino.Rates(teacher_temperature=lambda s: .04 + .01 * jnp.asarray(s, jnp.float32),
                     momentum=lambda s: .5 + .1 * jnp.asarray(s, jnp.float32))
  return dino.Dino(Means(), Projector(K, 5, 4, learned_norm, jnp.float32), student_temperature=.1, rates=rates,
                   centering=centering, center_momentum=CENTER_MOMENTUM)




MESHES = {**programs.MESHES, 'data=2': schema.Mesh(2, 1, 1)}


@functools.cache
def program(settings: str = 'one', accumulate: int = 1) -> Program:
  return programs.build(task(), lambda batch, key, step: batch, MESHES[settings], like=BATCH,
                        accumulate=accumulate)


def run(settings: str, accumulate: int = 1) -> tuple[Any, Any]:
  """State and last metrics after three steps."""
  return programs.run(program(settings, accumulate), MESHES[settings], BATCH, 3)


def _erf_gelu(x: np.ndarray) -> np.ndarray:
  return x / 2 * (1 + np.vectorize(erf)(x / np.sqrt(2)))


def numpy_outputs(p: dict, views: np.ndarray) -> np.ndarray:
  """`[B, V, K]` in float64."""
  x = views.astype(np.float64).mean((2, 3)) @ p['backbone']['kernel']
  for name in ('mlp1', 'mlp2', 'mlp3'):
    x = x @ p['projector'][name]['kernel'] + p['projector'][name]['bias']
    x = _erf_gelu(x) if name != 'mlp3' else x
  w = p['projector']['prototypes']['kernel']
  return x / np.linalg.norm(x, axis=-1, keepdims=True) @ (w / np.linalg.norm(w, axis=0))


def softmax(x: np.ndarray) -> np.ndarray:
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def numpy_loss(params: dict, extra: dict, step: int) -> tuple[float, np.ndarray, dict[str, float]]:
  """Loss, mean of the teacher's outputs, and health, by loops over pairs."""
  student = np.concatenate([numpy_outputs(params, BATCH[n]) for n in ('views_global', 'views_local')], 1)
  teacher = numpy_outputs(extra['teacher'], BATCH['views_global'])
  p_t, log_p = softmax((teacher - extra['center'][0]) / (.04 + .01 * step)), np.log(softmax(student / .1))
  pairs = [-(p_t[:, t] * log_p[:, s]).sum(-1).mean() for t in range(2) for s in range(5) if s != t]
  assert len(pairs) == 8
  entropy = -(p_t * np.log(p_t)).sum(-1).mean()
  mean = p_t.mean((0, 1))
  return float(np.mean(pairs)), teacher.mean((0, 1)), {
      'teacher_entropy': entropy, 'kl': np.mean(pairs) - entropy, 'below_uniform': np.log(K) - np.mean(pairs),
      'student_entropy': -(np.exp(log_p[:, :2]) * log_p[:, :2]).sum(-1).mean(),
      'used_prototypes': len(set(p_t.argmax(-1).ravel())) / min(K, p_t[..., 0].size),
      'information': -(mean * np.log(mean)).sum() - entropy, 'center_norm': np.linalg.norm(extra['center'])}


def test_loss_center_and_teacher_are_those_of_numpy_over_three_steps() -> None:
  placed = programs.meshes.put_batch(BATCH, programs.mesh(programs.MESHES['one']), programs.Shard((0,), 1))
  state = program().init_fn()
  extra = jax.tree.map(lambda x: np.asarray(x, np.float64), state.extra)
  assert not extra['center'].any()
  programs.assert_close(extra['teacher'], state.params)
  for step in range(3):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    loss, mean, health = numpy_loss(params, extra, step)
    state, metrics = program().step_fn(state, placed)
    got = {name: float(m.value) for name, m in metrics.unpack().means.items()}
    assert got.pop('loss') == pytest.approx(loss, rel=1e-4) and got == pytest.approx(health, rel=1e-3, abs=1e-5)
    momentum, after = .5 + .1 * step, jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    extra = {'center': CENTER_MOMENTUM * extra['center'] + (1 - CENTER_MOMENTUM) * mean[None],
             'teacher': jax.tree.map(lambda t, s, m=momentum: m * t + (1 - m) * s, extra['teacher'], after)}
    programs.assert_close(state.extra, extra, rtol=1e-4, atol=1e-6)
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), extra['teacher'], state.params)
  assert min(jax.tree.leaves(moved)) > 0


@pytest.mark.quick('data=2-4', reason='2 s each: a program; the third has both, and others know sums over devices')
@pytest.mark.parametrize(('settings', 'accumulate'), [('data=8', 1), ('one', 4), ('data=2', 4)])
def test_several_devices_and_four_microbatches_take_the_steps_of_one(settings: str, accumulate: int) -> None:
  state, metrics = run('one')
  other, others = run(settings, accumulate)
  programs.assert_close(other, state, rtol=1e-3, atol=1e-5)
  # What the whole batch has in common is measured in each microbatch for itself.
  same = {k: v for k, v in metrics.means.items() if accumulate == 1 or k not in ('information', 'used_prototypes')}
  programs.assert_close({k: others.means[k] for k in same}, same, rtol=1e-3, atol=1e-4)


def test_prototypes_have_unit_length_whatever_their_kernel_and_norms_can_be_learned() -> None:
  projector = Projector(K, 5, 4, True, jnp.float32)
  apply = jax.jit(projector.apply)
  params = programs.draw(jax.eval_shape(lambda key: projector.init(key, WIDTH), jax.random.key(0)))
  x = RNG.normal(size=(3, WIDTH)).astype(np.float32)
  got = apply(params, x)
  params['prototypes']['kernel'] = params['prototypes']['kernel'] * 7.
  np.testing.assert_allclose(apply(params, x), got, rtol=1e-5, atol=1e-6)
  fixed = jax.jit(Projector(K, 5, 4, False, jnp.float32).apply)(params, x)
  np.testing.assert_allclose(got, fixed * params['prototypes']['norm'][None], rtol=1e-5, atol=1e-6)
  assert float(jnp.abs(fixed).max()) <= 1 + 1e-6
  zero = jax.tree.map(jnp.zeros_like, params)
  gradient = jax.jit(jax.grad(lambda p: projector.apply(p, x).sum()))(zero)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize(('width', 'want'), [(384, 22_352_128), (768, 23_138_560)])
def test_the_projector_has_the_size_of_the_authors(width: int, want: int) -> None:
  projector = Projector(65_536, 2048, 256, True, jnp.float32)
  shapes = jax.eval_shape(lambda key: projector.init(key, width), jax.random.key(0))
  assert trees.num_elements(shapes) == want


def test_sinkhorn_is_that_of_the_authors_and_takes_large_logits() -> None:
  logits = RNG.normal(size=(6, K))
  q = np.exp(logits).T / np.exp(logits).sum()
  for _ in range(3):  # DINOv2: rows are prototypes
    q = q / q.sum(1, keepdims=True) / K
    q = q / q.sum(0, keepdims=True) / 6
  sinkhorn = jax.jit(dino.sinkhorn, static_argnames='rounds')
  got = sinkhorn(jnp.asarray(logits), rounds=3)
  np.testing.assert_allclose(got, (q * 6).T, rtol=1e-4)
  masked = sinkhorn(np.concatenate([logits, np.full((2, K), 5e3)]), np.array([1.] * 6 + [0.] * 2), rounds=3)
  np.testing.assert_allclose(masked[:6], got, rtol=1e-4)
  large = sinkhorn(logits * 1e4, rounds=3)
  assert np.isfinite(large).all()
  np.testing.assert_allclose(large.sum(1), 1., rtol=1e-5)
  many = sinkhorn(logits, rounds=8)  # in float64 within 1.5e-6; the logarithms, up to 4, are rounded 16 times
  np.testing.assert_allclose(many.sum(0), 6 / K, rtol=1.5e-6 + 16 * 4 * 2.**-24)


def begin(one: dino.Dino) -> tuple[dict, dict]:
  params, extra = map(programs.draw, jax.eval_shape(one.init, jax.random.key(0), BATCH))
  return params, {**extra, 'center': np.zeros_like(extra['center'])}


@pytest.mark.quick('Centering.MEAN', reason='1 s: another program')
@pytest.mark.parametrize('centering', Centering)
def test_the_center_moves_only_where_it_is_used(centering: Centering) -> None:
  one = task(centering)
  params, extra = begin(one)
  out = jax.jit(one.loss)(params, extra, BATCH, jax.random.key(1), jnp.asarray(0))
  after = jax.jit(one.after_update)(params, extra, out.stats, jnp.asarray(0))
  assert np.isfinite(float(out.loss.value)) and bool(after['center'].any()) is (centering is Centering.MEAN)


@pytest.mark.slow(reason='1 s: another program')
def test_rows_that_do_not_count_change_nothing() -> None:
  one = task()
  params, extra = begin(one)
  short = {k: v[:6] for k, v in BATCH.items()}
  longer = {k: np.concatenate([v[:6], np.full_like(v[:2], np.nan)]) for k, v in BATCH.items()} | {
      'mask': np.array([1.] * 6 + [0.] * 2, np.float32)}
  loss = jax.jit(one.loss)
  a, b = (loss(params, extra, batch, jax.random.key(1), jnp.asarray(0)) for batch in (short, longer))
  programs.assert_close({k: v.value for k, v in a.metrics.items()}, {k: v.value for k, v in b.metrics.items()})
  programs.assert_close(a.stats, b.stats)
  assert float(a.loss.value) == pytest.approx(float(b.loss.value), rel=1e-5)


@pytest.mark.slow(reason='2 s: traces the whole network')
def test_a_config_has_the_schedules_of_the_paper_and_its_parameters() -> None:
  config = schema.Config(
      batch_size=8, image_px=(16, 16), model=schema.ViT(patch=8, width=8, depth=1, heads=2, mlp=schema.Mlp(8)),
      objective=schema.Dino(out_dim=K, hidden_dim=5, bottleneck_dim=4, norm_last_layer=False))
  one = kinds.of(config).build(build.build_backbone(config), 3, lengths=programs.durations.Lengths(800, 8, 10_000))
  temperature, momentum = one._teacher_temperature, one._momentum
  assert [round(float(temperature(s)), 4) for s in (0, 1500, 3000, 9000)] == [.04, .055, .07, .07]
  assert [round(float(momentum(s)), 4) for s in (0, 5000, 10_000)] == [.996, .998, 1.]
  views = {'views_global': jnp.zeros((8, 2, 16, 16, 3)), 'views_local': jnp.zeros((8, 2, 8, 8, 3))}
  (params, extra), (labels, _) = axes.trace(lambda: one.init(jax.random.key(0), views))
  sharding.param_specs(params, labels, programs.mesh(programs.MESHES['one']))
  assert set(extra) == {'teacher', 'center'} and set(one.views()) == {'student', 'teacher'}


class Given:
  """A backbone and a projector whose outputs are the image, times a parameter."""
  prototypes = made.PROTOTYPES

  def apply(self, params: Params, *inputs: Any, train: bool = False, key: Key | None = None) -> Any:
    if len(inputs) == 1:
      return inputs[0]
    return Features(inputs[1][:, 0], params * inputs[1][:, 0, 0], (1, 1)), {}


def test_loss_and_center_are_those_of_the_authors_class() -> None:
  rates = dino.Rates(teacher_temperature=lambda s: jnp.asarray([one['temperature'] for one in golden])[s],
                     momentum=lambda s: jnp.asarray(1.))
  golden = json.loads(pathlib.Path(__file__).with_name('golden_dino.json').read_text())
  given: Any = Given()
  one = dino.Dino(given, given, student_temperature=.1, rates=rates, centering=Centering.MEAN, center_momentum=.9)
  params = {'backbone': jnp.asarray(1.), 'projector': {}}
  extra = {'teacher': {'backbone': jnp.asarray(made.SCALE), 'projector': {}}, 'center': jnp.zeros((1, made.PROTOTYPES))}

  @jax.jit
  def take(extra: Any, views: Array, step: Array) -> tuple[Array, Any]:
    batch = {'views_global': views[:, :made.GLOBAL], 'views_local': views[:, made.GLOBAL:]}
    out = one.loss(params, extra, batch, jax.random.key(0), step)
    return out.loss.value, one.after_update(params, extra, out.stats, step)

  for step, want in enumerate(golden):
    loss, extra = take(extra, made.outputs(step)[:, :, None, None], jnp.asarray(step))
    np.testing.assert_allclose(float(loss), want['loss'], rtol=1e-5)  # f32 on both sides, 500 terms
    np.testing.assert_allclose(extra['center'][0], want['center'], atol=1e-7)


def test_pairs_with_a_local_crop_have_their_weight() -> None:
  """The division is by all pairs, with and without the weight: in DINOv3's program, too."""
  rng = np.random.default_rng(0)
  targets, log_p = np.abs(rng.normal(size=(3, 2, 5))), rng.normal(size=(3, 6, 5))
  pairs = -np.einsum('btk,bvk->btv', targets, log_p)
  globally = pairs[:, 0, 1] + pairs[:, 1, 0]
  for weight in (1., .5):
    want = (globally + weight * pairs[:, :, 2:].sum((1, 2))) / 10
    np.testing.assert_allclose(dino.cross_entropy(targets, log_p, local_weight=weight), want, rtol=1e-5)
