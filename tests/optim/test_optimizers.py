"""Each optimizer against its recurrence in NumPy float64."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.optim import masks, optimizers

RATE = .01
LENGTHS = Lengths(num_examples=370, batch_size=37, total_steps=100)
Tree = dict[str, np.ndarray]


def schedule(step: jax.Array | int) -> jax.Array:
  return jnp.asarray(RATE * (1. + step))


def params() -> dict[str, dict[str, jax.Array]]:
  rng = np.random.default_rng(0)
  return {'blocks': {'kernel': jax.device_put(np.float32(rng.normal(size=(3, 4, 5))))},
          'head': {'kernel': jax.device_put(np.float32(rng.normal(size=(4, 7)))), 'bias': jnp.ones(7)}}


def gradients(step: int) -> dict[str, dict[str, jax.Array]]:
  rng = np.random.default_rng(step + 1)
  return jax.tree.map(lambda x: jax.device_put(np.float32(rng.normal(size=x.shape))), params())


def take(config: optimizers.Kind, now: object, grads: Callable[[int], object],
         num_steps: int = 3) -> tuple[Tree, object]:
  """Parameters by path and the optimizer's state after some steps."""
  optimizer = optimizers.build(config, schedule, lengths=LENGTHS)
  state = jax.jit(optimizer.init)(now)

  @jax.jit
  def after(g: Any, s: Any, p: Any, step: Any) -> tuple[Any, Any]:
    updates, s = optimizer.update(g, s, p, step=step, grad_norm=optax.tree.norm(g))
    return optax.apply_updates(p, updates), s

  for step in range(num_steps):
    now, state = after(grads(step), state, now, step)
  return {k: np.asarray(v) for k, v in trees.flatten(now).items()}, state


def train(config: optimizers.Kind, num_steps: int = 3) -> Tree:
  return take(config, params(), gradients, num_steps)[0]


def clipped(step: int, limit: float) -> Tree:
  grads = {k: np.asarray(v, np.float64) for k, v in trees.flatten(gradients(step)).items()}
  norm = np.sqrt(sum((g ** 2).sum() for g in grads.values()))
  return {k: g * min(1, limit / norm) for k, g in grads.items()}


def follow(rule: Callable[[str, np.ndarray, np.ndarray, dict[str, np.ndarray], int], np.ndarray], limit: float = 1e9,
           num_steps: int = 3) -> Tree:
  """`w <- w - rate * rule(name, gradient, w, memory of the tensor, t from 1)`, each layer for itself, in float64."""
  now = {k: np.asarray(v, np.float64) for k, v in trees.flatten(params()).items()}
  memories: dict[str, dict[str, np.ndarray]] = {}
  for step in range(num_steps):
    for k, grad in clipped(step, limit).items():
      layers = range(len(grad)) if trees.is_stacked(k) else [...]
      for i in layers:
        memory = memories.setdefault(f'{k}{i}', {})
        now[k][i] = now[k][i] - RATE * (1 + step) * rule(k, grad[i], now[k][i], memory, step + 1)
  return now


def assert_same(got: Tree, want: Tree, rtol: float = 2e-5) -> None:
  for k in want:
    np.testing.assert_allclose(got[k], want[k], rtol=rtol, atol=2e-6, err_msg=k)


def adam(g: np.ndarray, memory: dict[str, np.ndarray], t: int, b1: float, b2: float, eps: float) -> np.ndarray:
  memory['m'] = b1 * memory.get('m', 0) + (1 - b1) * g
  memory['v'] = b2 * memory.get('v', 0) + (1 - b2) * g ** 2
  return memory['m'] / (1 - b1 ** t) / (np.sqrt(memory['v'] / (1 - b2 ** t)) + eps)


def kernel(name: str) -> bool:
  return name.endswith('kernel')


@pytest.mark.parametrize('limit', [1., 1e6])
def test_adamw_follows_its_recurrence(limit: float) -> None:
  config = schema.AdamW(b1=.8, b2=.95, eps=1e-6, weight_decay=.3, clip_norm=limit)
  want = follow(lambda k, g, w, s, t: adam(g, s, t, .8, .95, 1e-6) + .3 * w * kernel(k), limit)
  assert_same(train(config), want)


def test_decay_by_the_schedule_does_not_know_the_peak() -> None:
  config = schema.AdamW(lr=.05, weight_decay=.003, decay_by=schema.DecayBy.SCHEDULE, clip_norm=0.)
  want = follow(lambda k, g, w, s, t: adam(g, s, t, .9, .999, 1e-8) + .003 / .05 * w * kernel(k))
  assert_same(train(config), want)
  scaled = dataclasses.replace(config, lr=.05 * 256 / 37, base_batch_size=256)
  assert_same(train(scaled), want)


def test_adam_takes_the_decay_through_its_moments() -> None:
  config = schema.Adam(b1=.8, b2=.95, eps=1e-6, weight_decay=.3, clip_norm=0.)
  assert_same(train(config), follow(lambda k, g, w, s, t: adam(g + .3 * w * kernel(k), s, t, .8, .95, 1e-6)))


def test_rmsprop_has_the_rate_in_its_momentum_eps_below_the_root_and_squares_that_begin_at_one() -> None:
  def rule(k: str, g: np.ndarray, w: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    g, rate = g + .1 * w * kernel(k), RATE * t  # tf.train.RMSPropOptimizer, with the L2 penalty's gradient
    s['v'] = .8 * s.get('v', 1.) + .2 * g ** 2
    s['m'] = .7 * s.get('m', 0) + rate * g / np.sqrt(s['v'] + .01)
    return s['m'] / rate

  config = schema.RMSProp(b2=.8, eps=.01, momentum=.7, weight_decay=.1)
  assert_same(train(config, 6), follow(rule, num_steps=6))
  halves = schema.RMSProp(b2=.8, eps=.01 / 4, initial_scale=1 / 4, momentum=.7)  # of a loss twice as large
  doubled = take(schema.RMSProp(b2=.8, eps=.01, momentum=.7), params(), lambda t: jax.tree.map(
      lambda g: 2. * g, gradients(t)))[0]
  assert_same(train(halves), {k: v.astype(np.float64) for k, v in doubled.items()})


@pytest.mark.parametrize('skipped', [0, 3])
def test_rmsprop_warms_up_from_zero_and_keeps_its_momentum_over_a_step_without_an_update(skipped: int) -> None:
  rate = lambda step: .01 * jnp.asarray(step, jnp.float32)
  optimizer = optimizers.build(schema.RMSProp(b2=.8, eps=.01, momentum=.7), rate, lengths=LENGTHS)
  x = {'head': {'kernel': jnp.ones((2, 3))}}
  state, m, v = optimizer.init(x), 0., 1.
  for step in range(6):
    g = .1 * (step + 1)
    updates, state = optimizer.update(jax.tree.map(lambda leaf, g=g: g * leaf, x), state, x, step=jnp.asarray(step),
                                      grad_norm=jnp.ones(()), ok=jnp.asarray(not skipped or step != skipped))
    if skipped and step == skipped:
      continue
    v = .8 * v + .2 * g ** 2
    m = .7 * m + .01 * step * g / np.sqrt(v + .01)
    np.testing.assert_allclose(updates['head']['kernel'], -m, rtol=1e-5, atol=1e-9)


def test_lamb_scales_to_the_norm_of_each_layer() -> None:
  def rule(k: str, g: np.ndarray, w: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    u = adam(g, s, t, .9, .99, 1e-6) + .1 * w * kernel(k)
    return u * np.linalg.norm(w) / np.linalg.norm(u)

  assert_same(train(schema.Lamb(b2=.99, weight_decay=.1, clip_norm=0.)), follow(rule))


def test_lars_scales_kernels_before_the_momentum_and_leaves_the_rest() -> None:
  def rule(k: str, g: np.ndarray, w: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    u = g + .1 * w if kernel(k) else g
    u = u * (.02 * np.linalg.norm(w) / np.linalg.norm(u) if kernel(k) else 1)
    s['m'] = .9 * s.get('m', 0) + u
    return s['m']

  assert_same(train(schema.Lars(trust_coefficient=.02, weight_decay=.1)), follow(rule))


@pytest.mark.parametrize('config', [schema.Lamb(weight_decay=0.), schema.Lars()], ids=['lamb', 'lars'])
def test_zeros_have_a_trust_ratio_of_one(config: optimizers.Kind) -> None:
  zeros = {'head': {'kernel': jnp.zeros((4, 7))}}
  moved, _ = take(config, zeros, lambda step: {'head': {'kernel': jnp.full((4, 7), 2.)}}, 1)
  step = 1. if isinstance(config, schema.Lamb) else 2.
  np.testing.assert_allclose(moved['head/kernel'], -RATE * step, rtol=5e-5)  # 1 - .999 in f32 is off by 1e-5
  still, _ = take(config, params(), lambda step: jax.tree.map(jnp.zeros_like, params()), 1)
  assert all(np.isfinite(v).all() for v in still.values())


def test_lion_takes_the_sign_of_the_mixed_moment() -> None:
  def rule(k: str, g: np.ndarray, w: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    m = s.get('m', 0)
    s['m'] = .95 * m + .05 * g
    return np.sign(.8 * m + .2 * g) + .3 * w * kernel(k)

  assert_same(train(schema.Lion(b1=.8, b2=.95, weight_decay=.3, clip_norm=0.)), follow(rule))


def adafactor(k: str, g: np.ndarray, w: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
  beta = min(.5, 1 - t ** -.8)
  square = g ** 2 + 1e-30
  mix = lambda name, new: s.__setitem__(name, beta * s.get(name, 0) + (1 - beta) * new)
  if min(g.shape) >= 4 and g.ndim == 2:
    mix('r', square.mean(1))
    mix('c', square.mean(0))
    u = g / np.sqrt(np.outer(s['r'], s['c']) / s['r'].mean())
  else:
    mix('v', square)
    u = g / np.sqrt(s['v'])
  s['m'] = .9 * s.get('m', 0) + .1 * u
  return s['m'] + .3 * w * kernel(k)


def test_adafactor_factors_large_matrices_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr('vit_jax.optim.adafactor.LEAST', 4)
  config = schema.Adafactor(b2_cap=.5, weight_decay=.3, clip_norm=0., mu_dtype=schema.DType.F32)
  assert_same(train(config), follow(adafactor))
  state = take(config, params(), gradients)[1][0][0]
  assert state.rows['blocks']['kernel'].shape == (3, 4) and state.columns['blocks']['kernel'].shape == (3, 5)
  assert state.full['blocks']['kernel'].shape == (3,) and state.full['head']['bias'].shape == (7,)


def test_sgd_adds_decay_to_the_gradient_and_keeps_momentum() -> None:
  def rule(k: str, g: np.ndarray, w: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    s['m'] = .9 * s.get('m', 0) + g + .1 * w * kernel(k)
    return s['m']

  assert_same(train(schema.Sgd(momentum=.9, weight_decay=.1, clip_norm=0.)), follow(rule))


@pytest.mark.parametrize(('by', 'weight_decay'), [(schema.DecayBy.LR, .1), (schema.DecayBy.SCHEDULE, .1 * .05)])
def test_sgd_can_decay_beside_its_momentum(by: schema.DecayBy, weight_decay: float) -> None:
  # timm's SGDW: w times 1 - lr * decay, then lr * m off; big_vision's momentum_hp: decay is a product with the peak.
  def rule(k: str, g: np.ndarray, w: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    s['m'] = .9 * s.get('m', 0) + g
    return s['m'] + .1 * w * kernel(k)

  assert_same(train(schema.Sgd(lr=.05, weight_decay=weight_decay, clip_norm=0., decay_by=by)), follow(rule))


def rounded(x: np.ndarray) -> np.ndarray:
  return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def test_a_bf16_moment_is_rounded_only_where_it_is_kept() -> None:
  def sgd(k: str, g: np.ndarray, w: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    u = .9 * s.get('m', 0) + g
    s['m'] = rounded(u)
    return u

  def adamw(k: str, g: np.ndarray, w: np.ndarray, s: dict[str, np.ndarray], t: int) -> np.ndarray:
    u = adam(g, s, t, .9, .999, 1e-8)
    s['m'] = rounded(s['m'])
    return u

  bf16 = schema.DType.BF16
  # A value near the middle of two bf16 numbers may round the other way from float64: one part in 2 ** 9 of a step.
  assert_same(train(schema.Sgd(clip_norm=0., mu_dtype=bf16)), follow(sgd), rtol=3e-4)
  assert_same(train(schema.AdamW(clip_norm=0., weight_decay=0., mu_dtype=bf16)), follow(adamw), rtol=3e-4)
  for config in (schema.AdamW(mu_dtype=bf16), schema.Lion(mu_dtype=bf16), schema.Lamb(mu_dtype=bf16),
                 schema.Adafactor(),
                 schema.Lars(mu_dtype=bf16), schema.RMSProp(mu_dtype=bf16), schema.Sgd(mu_dtype=bf16)):
    state = take(config, params(), gradients)[1]
    kept = [leaf for name, leaf in trees.flatten(state).items() if '/'.join(name.split('/')[-3:]) in (
        'mu/head/kernel', 'trace/head/kernel', 'ema/head/kernel')]
    assert [x.dtype for x in kept] == [jnp.bfloat16], config


def test_the_mask_goes_by_whole_path_names() -> None:
  assert trees.flatten(masks.mask(params(), ['.*/kernel'], what='x')) == {
      'blocks/kernel': True, 'head/bias': False, 'head/kernel': True}
  assert not any(trees.flatten(masks.mask(params(), [], what='x')).values())


def test_a_pattern_that_matches_nothing_is_an_error_that_shows_names() -> None:
  for config, said in [
      (schema.AdamW(weight_decay=.1, weight_decay_mask=('kernel',)),
       r"optimizer.weight_decay_mask: 'kernel' matches no parameter.*blocks/kernel"),
      (schema.Sgd(clip_norm=1., clip_parts=('kernel',)), "optimizer.clip_parts: 'kernel' matches no parameter"),
      (schema.Lars(trust_ratio_mask=('kernel',)), "optimizer.trust_ratio_mask: 'kernel' matches no parameter"),
      (schema.Sgd(rules=(schema.PathRule('.*'), schema.PathRule('head/.*'))),
       "optimizer.rules: 'head/.*' decides no parameter.*the first rule that matches decides")]:
    with pytest.raises(UserError, match=said):
      optimizers.build(config, schedule, lengths=LENGTHS).init(params())
