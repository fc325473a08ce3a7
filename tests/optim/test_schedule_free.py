"""Schedule-free AdamW against the three sequences of its algorithm in NumPy float64, and against optax."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core.errors import UserError
from vit_jax.objectives.ema import Ema
from vit_jax.optim import optimizers, schedule_free

LENGTHS = Lengths(num_examples=370, batch_size=37, total_steps=100)
B1, B2, EPS, DECAY, WARMUP = .8, .95, 1e-6, .3, 4
CONFIG = schema.ScheduleFree(b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)
RNG = np.random.default_rng(0)
START = np.float32(RNG.normal(size=(3, 4)))
SCALES = np.float32(RNG.uniform(.5, 2., size=(12, 3, 4)))


class Task:
  """An objective without a loss, whose average is kept."""

  def init(self, key: object, batch: object) -> tuple[object, dict[str, object]]:
    del key, batch
    return {'head': {'kernel': jnp.asarray(START)}}, {}

  def after_update(self, params: object, extra: dict[str, object], stats: object, step: object) -> dict[str, object]:
    del params, stats, step
    return extra


def warm(step: jax.Array) -> jax.Array:
  """Warms up, and falls to a quarter after 8 steps: the weight of a step has the largest rate so far."""
  return .02 * jnp.minimum((step + 1) / WARMUP, 1.) * jnp.where(step < 8, 1., .25)


def gradient(y: np.ndarray, step: int) -> np.ndarray:
  return SCALES[step] * y + .1


def follow(num_steps: int) -> tuple[np.ndarray, np.ndarray]:
  """x and y after some updates, in the form of the authors' program (`AdamWScheduleFree`), float64."""
  x, y, z = (START.astype(np.float64) for _ in range(3))
  v, largest, total = 0., 0., 0.
  for step in range(num_steps):
    rate, g = .02 * min((step + 1) / WARMUP, 1.) * (1. if step < 8 else .25), gradient(y, step)
    v = B2 * v + (1 - B2) * g**2
    moved = g / (np.sqrt(v / (1 - B2**(step + 1))) + EPS) + DECAY * y
    largest = max(largest, rate)
    total += largest**2
    c = largest**2 / total
    z = z - rate * moved
    x = (1 - c) * x + c * z
    y = (1 - B1) * z + B1 * x
  return x, y


def train(num_steps: int, *, bad: int = -1) -> tuple[np.ndarray, np.ndarray]:
  optimizer = optimizers.build(CONFIG, warm, lengths=LENGTHS)
  task = Ema(Task(), schedule_free.Average(CONFIG, warm))  # type: ignore[arg-type]
  params, extra = task.init(jax.random.key(0), {})
  state = optimizer.init(params)

  @jax.jit
  def after(params: object, state: object, extra: object, grads: object, step: int, ok: bool) -> tuple[object, ...]:
    updates, state = optimizer.update(grads, state, params, step=step, grad_norm=jnp.ones(()), ok=ok)
    new = jax.tree.map(lambda p, u: p + jnp.where(ok, u, -0.), params, updates)
    averaged = task.after_update(new, extra, {}, step)
    return new, state, jax.tree.map(lambda a, b: jnp.where(ok, a, b), averaged, extra)

  done = 0
  for step in range(num_steps + (bad >= 0)):
    ok = step != bad
    grad = gradient(np.asarray(params['head']['kernel']), done) * (1. if ok else np.nan)
    grads = {'head': {'kernel': jnp.asarray(grad)}}
    params, state, extra = after(params, state, extra, grads, jnp.asarray(done), jnp.asarray(ok))
    done += ok
  return np.asarray(extra['ema']['head']['kernel']), np.asarray(params['head']['kernel'])


@pytest.mark.parametrize('num_steps', [1, 2, 12])
def test_parameters_and_average_are_y_and_x_of_the_algorithm(num_steps: int) -> None:
  for got, want in zip(train(num_steps), follow(num_steps), strict=True):
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=1e-7)


def test_an_update_that_is_not_finite_is_as_if_it_had_not_been() -> None:
  for got, want in zip(train(6, bad=3), train(6), strict=True):
    np.testing.assert_array_equal(got, want)


def test_without_warmup_ten_steps_are_those_of_optax() -> None:
  """With it, the learning rate of optax's steps is one update behind that of its weights."""
  theirs = optax.contrib.schedule_free_adamw(.02, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)
  config = schema.ScheduleFree(b1=B1, b2=B2, eps=EPS, weight_decay=DECAY)
  ours = optimizers.build(config, lambda step: jnp.asarray(.02), lengths=LENGTHS)
  mine = other = {'head': {'kernel': jnp.asarray(START)}}
  state, their_state = ours.init(mine), theirs.init(other)
  for step in range(10):
    updates, state = ours.update(jax.tree.map(lambda y, step=step: SCALES[step] * y, mine), state, mine,
                                 step=jnp.asarray(step), grad_norm=jnp.ones(()))
    mine = optax.apply_updates(mine, updates)
    updates, their_state = theirs.update(jax.tree.map(lambda y, step=step: SCALES[step] * y, other), their_state, other)
    other = optax.apply_updates(other, updates)
  np.testing.assert_allclose(mine['head']['kernel'], other['head']['kernel'], rtol=3e-6, atol=1e-6)


def test_frozen_parameters_begin_later_as_at_the_start() -> None:
  config = schema.ScheduleFree(weight_decay=.3, rules=(schema.PathRule('.*kernel', frozen_until='5 steps'),))
  optimizer = optimizers.build(config, lambda step: jnp.asarray(.02), lengths=LENGTHS)
  params = {'head': {'kernel': jnp.asarray(START)}}
  state = optimizer.init(params)
  for step in range(5):
    updates, state = optimizer.update(params, state, params, step=jnp.asarray(step), grad_norm=jnp.ones(()))
    assert not np.asarray(updates['head']['kernel']).any()
  updates, _ = optimizer.update(params, state, params, step=jnp.asarray(5), grad_norm=jnp.ones(()))
  want = -.02 * (np.sign(START) + .3 * START) * (1 - .9 * (1 - 1 / 6))  # the average has six z, five of them equal
  np.testing.assert_allclose(updates['head']['kernel'], want, rtol=1e-4)


@pytest.mark.parametrize(('settings', 'message'), [
    ({'optimizer': schema.ScheduleFree(schedule=schema.Schedule(schema.Decay.COSINE))},
     'optimizer.schedule: expected decay=constant and no cooldown for ScheduleFree'),
    ({'optimizer': schema.ScheduleFree(), 'train': schema.Train(ema=.99)}, 'train.ema: expected 0 with optimizer')])
def test_a_decay_or_a_second_average_is_refused(settings: dict[str, object], message: str) -> None:
  from vit_jax.config import check
  with pytest.raises(UserError, match=message):
    check.check(schema.Config(**settings))  # type: ignore[arg-type]


def test_its_average_may_be_evaluated() -> None:
  config = schema.Config(optimizer=schema.ScheduleFree())
  assert config.has_average and not schema.Config().has_average
