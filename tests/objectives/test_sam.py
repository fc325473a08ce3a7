"""SAM and GSAM by hand on a small problem, and through the real step: meshes, averages, views, microbatches."""
from __future__ import annotations

import functools
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.core.numerics import weighted_mean
from vit_jax.core.types import LossOut
from vit_jax.objectives.ema import Ema, Growing
from vit_jax.objectives.sam import Sam, follow_rate
from vit_jax.objectives.supervised import Supervised

RNG = np.random.default_rng(0)
X, Y, W = RNG.normal(size=(6, 4)), RNG.normal(size=6), RNG.normal(size=4)
MASK = np.array([1, 1, 0, 1, 1, 0.])
DATA = programs.batch(size=16)


class Cubes:
  """Loss `|x . w - y| ** 3` per example: its gradient is no straight line."""

  def loss(self, params: Any, extra: Any, batch: Any, key: Any, step: Any) -> LossOut:
    loss_B = jnp.abs(batch['x'] @ params['w'] - batch['y']) ** 3
    return LossOut(weighted_mean(loss_B, batch.get('mask')), {}, {'at': params['w']})


def gradient(w: np.ndarray) -> np.ndarray:
  r = X @ w - Y
  return (MASK[:, None] * 3 * r[:, None] * np.abs(r)[:, None] * X).sum(0) / MASK.sum()


def value(w: np.ndarray) -> float:
  return float((MASK * np.abs(X @ w - Y) ** 3).sum() / MASK.sum())


@pytest.mark.parametrize('alpha', [0., .4])
def test_gradient_loss_and_stats_are_those_of_the_papers(alpha: float) -> None:
  g = gradient(W)
  shifted = W + .3 * g / np.linalg.norm(g)
  h = gradient(shifted)
  want = h - alpha * (g - (g @ h) / (h @ h) * h)
  task = Sam(Cubes(), rho=lambda step: jnp.asarray(.1) * step, alpha=alpha)
  batch = {'x': jnp.asarray(X, jnp.float32), 'y': jnp.asarray(Y, jnp.float32), 'mask': jnp.asarray(MASK, jnp.float32)}

  def total(w: jax.Array) -> tuple[jax.Array, LossOut]:
    out = task.loss({'w': w}, {}, batch, jax.random.key(0), jnp.asarray(3))
    return out.loss.sum, out

  got, out = jax.jit(jax.grad(total, has_aux=True))(jnp.asarray(W, jnp.float32))
  np.testing.assert_allclose(got / MASK.sum(), want, rtol=2e-5)
  assert float(out.loss.value) == pytest.approx(value(shifted), rel=1e-5)
  assert float(out.metrics['sharpness'].value) == pytest.approx(value(shifted) - value(W), rel=1e-4)
  np.testing.assert_allclose(out.stats['at'], W, rtol=1e-6)


def classifier() -> Supervised:
  return Supervised(fakes.BatchNormNet(), fakes.LinearHead(), num_classes=7, loss=schema.Loss.SOFTMAX,
                    label_smoothing=.1)


def after(task: Any, settings: str = 'one', accumulate: int = 1) -> Any:
  mesh = programs.MESHES[settings]
  program = programs.build(task, fakes.normalize, mesh, like=DATA, accumulate=accumulate)
  return programs.run(program, mesh, DATA, 2)[0]


def wrapped(alpha: float = .3) -> Sam:
  return Sam(Ema(classifier(), Growing(.9)), rho=lambda step: jnp.asarray(.5), alpha=alpha)


@functools.cache
def after_wrapped(alpha: float) -> Any:
  return after(wrapped(alpha))


@pytest.mark.slow(reason='5 s: two programs')
@pytest.mark.parametrize('alpha', [.3, pytest.param(0., marks=pytest.mark.slow(reason='3 s'))])
def test_the_result_does_not_depend_on_the_mesh(alpha: float) -> None:
  want = after_wrapped(alpha)
  for settings in ('data=8', 'data=2,fsdp=2,tensor=2'):
    programs.assert_close(after(wrapped(alpha), settings), want)


@pytest.mark.slow(reason='2 s: two programs')
def test_it_goes_around_an_average_or_into_it_and_views_pass_through() -> None:
  inside = Ema(Sam(classifier(), rho=lambda step: jnp.asarray(.5), alpha=.3), Growing(.9))
  programs.assert_close(after(inside), after_wrapped(.3), rtol=1e-6)
  assert set(wrapped().views()) == {'student', 'ema'} == set(inside.views())
  plain = after(Ema(classifier(), Growing(.9)))
  assert np.abs(plain.params['head']['kernel'] - after_wrapped(.3).params['head']['kernel']).max() > 1e-4


@pytest.mark.slow(reason='3 s: another program')
def test_microbatches_are_perturbed_each_for_itself() -> None:
  task = Sam(Supervised(fakes.PlainNet(), fakes.LinearHead(), num_classes=7, loss=schema.Loss.SOFTMAX,
                        label_smoothing=0.), rho=lambda step: jnp.asarray(.5), alpha=0.)
  whole, split = after(task), after(task, accumulate=2)
  assert np.abs(whole.params['head']['kernel'] - split.params['head']['kernel']).max() > 1e-4
  programs.assert_close(split, after(task, 'data=8', accumulate=2))


def test_where_the_gradient_is_zero_nothing_is_perturbed() -> None:
  task = Sam(Cubes(), rho=lambda step: jnp.asarray(.3), alpha=.4)
  batch = {'x': jnp.zeros((2, 4)), 'y': jnp.ones(2)}
  grad = jax.jit(jax.grad(lambda w: task.loss({'w': w}, {}, batch, jax.random.key(0), jnp.asarray(0)).loss.sum))(
      jnp.ones(4))
  np.testing.assert_array_equal(grad, np.zeros(4))


def test_rho_follows_the_learning_rate() -> None:
  rho = follow_rate(lambda step: jnp.asarray([.0, .1, 3., 1.55, .1])[step], peak=3., end=.1, rho=.6, rho_end=.1)
  assert [float(rho(s)) for s in range(5)] == pytest.approx([.1, .1, .6, .35, .1])
