"""Losses against NumPy float64."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.objectives import losses

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(6, 7)) * 4
SOFT = RNG.dirichlet(np.ones(7), size=6)
MULTI = (RNG.random((6, 7)) < .3).astype(float)
f32 = lambda x: np.asarray(x, np.float32)
hit = jax.jit(losses.hit)


def log_softmax(z: np.ndarray) -> np.ndarray:
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


@pytest.mark.parametrize('targets', [SOFT, MULTI, np.eye(7)[[0, 3, 6, 1, 1, 2]]])
def test_softmax_cross_entropy(targets: np.ndarray) -> None:
  want = -(targets * log_softmax(LOGITS)).sum(-1)
  np.testing.assert_allclose(losses.softmax_xent(f32(LOGITS), f32(targets)), want, rtol=1e-5)


@pytest.mark.parametrize('targets', [SOFT, MULTI])
def test_sigmoid_cross_entropy_sums_over_classes(targets: np.ndarray) -> None:
  p = 1 / (1 + np.exp(-LOGITS))
  want = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum(-1)
  np.testing.assert_allclose(losses.sigmoid_xent(f32(LOGITS), f32(targets)), want, rtol=1e-5)


def test_losses_of_huge_logits_are_finite() -> None:
  logits = jnp.array([[1e4, -1e4, 0.]])
  targets = jnp.array([[0., 1., 0.]])
  for loss in (losses.softmax_xent, losses.sigmoid_xent):
    value, grad = jax.jit(jax.value_and_grad(lambda z, loss=loss: loss(z, targets).sum()))(logits)
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_smoothing_keeps_the_total_and_is_off_at_zero() -> None:
  targets = f32(np.eye(7)[:2])
  smooth = losses.smooth(targets, .1)
  np.testing.assert_allclose(smooth.sum(-1), 1., rtol=1e-6)
  assert float(smooth[0, 0]) == pytest.approx(.9 + .1 / 7) and losses.smooth(targets, 0.) is targets


def test_a_hit_is_any_target_of_the_largest_weight() -> None:
  logits = f32([[3, 2, 1], [3, 2, 1], [1, 2, 3], [1, 2, 3]])
  targets = f32([[1, 1, 0], [0, 1, 0], [.4, 0, .6], [0, 0, 0]])
  assert hit(logits, targets).tolist() == [1, 0, 1, 0]


def test_a_target_of_a_smaller_weight_is_no_hit() -> None:
  targets = f32([[.7, .3, 0]] * 3)
  assert hit(f32(np.eye(3)), targets).tolist() == [1., 0., 0.]


@pytest.mark.parametrize('targets', [SOFT, MULTI])
def test_binary_cross_entropy_is_the_mean_over_classes(targets: np.ndarray) -> None:
  p = 1 / (1 + np.exp(-LOGITS))
  want = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).mean(-1)
  np.testing.assert_allclose(losses.binary_xent(f32(LOGITS), f32(targets)), want, rtol=1e-5)


def test_targets_above_the_threshold_become_whole() -> None:
  targets = f32([[.7, .3, 0.], [.9, .1, 0.]])
  assert losses.harden(targets, .2).tolist() == [[1, 1, 0], [1, 0, 0]] and losses.harden(targets, -1.) is targets
  assert losses.harden(targets, 0.).tolist() == [[1, 1, 0], [1, 1, 0]]


def test_an_example_weighs_as_its_classes_do() -> None:
  got = losses.example_weights(f32([[1, 0, 0], [.25, .75, 0], [1, 0, 1], [0, 0, 0]]), (2., 4., 6.))
  assert got.tolist() == [2, 3.5, 4, 0]
