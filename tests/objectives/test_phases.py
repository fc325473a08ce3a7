"""An objective that changes between parts of a run: which step has which, values, gradients, cost, and limits."""
from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import check, schema
from vit_jax.core.contracts import Coupling
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import weighted_mean
from vit_jax.core.types import LossOut
from vit_jax.jobs import build
from vit_jax.objectives import phases
from vit_jax.objectives.sam import Sam

X, Y = np.arange(12.).reshape(4, 3), np.ones(4)
BATCH = {'x': X.astype(np.float32), 'y': Y.astype(np.float32)}
MODEL = schema.ViT(patch=8, width=16, depth=1, heads=2, mlp=schema.Mlp(16), pool=schema.Mean())


class Powers:
  """Loss `|x . w - y| ** power` per example; its rows of a comparison are `power x . w`."""

  def __init__(self, power: int) -> None:
    self.power = power

  def init(self, key: Any, batch: Any) -> tuple[Any, Any]:
    return {'w': jnp.ones(3)}, {}

  def loss(self, params: Any, extra: Any, batch: Any, key: Any, step: Any) -> LossOut:
    loss_B = jnp.abs(batch['x'] @ params['w'] - batch['y']) ** self.power
    return LossOut(weighted_mean(loss_B, None), {'step': weighted_mean(loss_B * 0 + step, None)}, {'at': params['w']})

  def coupling(self) -> Coupling:
    return Coupling(lambda params, extra, batch, key, step: (self.power * batch['x'] @ params['w'], {}), self.loss)


def made(*powers: int, total_steps: int = 10) -> phases.Phases:
  kinds = list(dict.fromkeys(powers))
  return phases.Phases([Powers(one) for one in kinds], [kinds.index(one) for one in powers], total_steps)


def value_and_grad(task: Any, step: int) -> tuple[float, np.ndarray]:
  def run(params: Any, step: Any) -> Any:
    out = task.loss(params, {}, BATCH, jax.random.key(0), step)
    return 3. * out.loss.sum / out.loss.weight, out
  grads, out = jax.jit(jax.grad(run, has_aux=True))({'w': jnp.array([1., -2., .5])}, jnp.asarray(step))
  assert float(out.metrics['step'].value) == step and out.stats['at'].shape == (3,)
  return float(out.loss.value), np.asarray(grads['w'])


def test_each_part_of_the_run_has_the_loss_and_the_gradient_of_its_objective() -> None:
  task = made(1, 2, 1)  # of 10 steps, the parts begin at 0, 4 and 7
  for step, power in enumerate([1, 1, 1, 1, 2, 2, 2, 1, 1, 1]):
    value, grads = value_and_grad(task, step)
    want, want_grads = value_and_grad(Powers(power), step)
    assert value == want
    np.testing.assert_allclose(grads, want_grads, rtol=1e-6)


def test_sharpness_takes_both_gradients_of_the_part() -> None:
  for step, power in ((0, 3), (9, 2)):
    got, want = (value_and_grad(Sam(one, rho=lambda step: jnp.asarray(.1), alpha=0.), step)
                 for one in (made(3, 2), Powers(power)))
    assert got[0] == pytest.approx(want[0], rel=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)


def test_the_rows_of_a_comparison_are_those_of_the_part() -> None:
  coupling = made(1, 2).coupling()
  assert coupling is not None
  for step, power in ((4, 1), (5, 2)):
    rows, _ = coupling.embed({'w': jnp.ones(3)}, {}, BATCH, jax.random.key(0), jnp.asarray(step))
    np.testing.assert_array_equal(rows, power * X.sum(1))


def config(**model: Any) -> schema.Config:
  return schema.Config(image_px=(32, 32), model=dataclasses.replace(MODEL, **model), length='8 steps', batch_size=4,
                       train=schema.Train(accumulate=1))


def test_a_run_is_built_with_an_objective_for_each_share_and_costs_their_mean() -> None:
  def cost(**model: Any) -> float:
    return programs.train_flops(config(**model), 10)

  assert cost(patch_dropout_parts=(.75, .75, .5, 0.)) == pytest.approx(
      (2 * cost(patch_dropout=.75) + cost(patch_dropout=.5) + cost()) / 4, rel=1e-9)
  lengths = build.durations.lengths('8 steps', num_examples=100, batch_size=4)
  alike = config(patch_dropout_parts=(.5, .5))
  task = build.build_objective(alike, build.build_backbone(alike), 10, lengths=lengths)
  assert not isinstance(task, phases.Phases)  # one program is enough


def test_shares_that_contradict_or_cannot_be_are_refused() -> None:
  for settings, message in (
      ({'patch_dropout': .5, 'patch_dropout_parts': (.5, 0.)},
       r'model.patch_dropout: expected 0 with model.patch_dropout_parts, which take its place, got 0.5. Set one'),
      ({'patch_dropout_parts': (.5, 1.)}, r'model.patch_dropout_parts: expected numbers, each 0 to below 1, got'),
      ({'patch_dropout_parts': (.5, 0.), 'positions': schema.Relative()},
       r'model.patch_dropout_parts: expected 0 with model.positions=relative, which needs all patches, got \(0.5,')):
    with pytest.raises(UserError, match=message):
      check.check(config(**settings))
