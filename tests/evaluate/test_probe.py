"""Linear probes: SGD and LARS against NumPy, on any batch size and mesh."""
from __future__ import annotations

import math

import jax
import numpy as np
import programs
import pytest

from tests.evaluate import rows
from tests.evaluate.test_linear import CLASSES, TRAIN, WIDTH, splits
from vit_jax.config import schema
from vit_jax.evaluate import probe


def by_hand(recipe: probe.Recipe, rate: float, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Kernel and bias after the same training in float64, from the same start."""
  x, y = TRAIN[0].astype(np.float64), TRAIN[1]
  kernel = .01 * np.asarray(jax.random.normal(jax.random.key(0), (WIDTH, CLASSES)), np.float64)
  bias, velocity, step = np.zeros(CLASSES), [np.zeros((WIDTH, CLASSES)), np.zeros(CLASSES)], 0
  mean, variance = np.zeros(WIDTH), np.ones(WIDTH)
  places = np.flatnonzero(keep)
  size = min(recipe.batch_size, len(places))
  total = recipe.epochs * (len(places) // size)
  warmup = recipe.warmup_epochs * total // recipe.epochs
  for epoch in range(recipe.epochs):
    order = np.random.Generator(np.random.Philox(key=epoch)).permutation(places)
    for at in range(0, len(places) // size * size, size):
      batch, true = x[order[at:at + size]], y[order[at:at + size]]
      if recipe.normalize:
        mean, variance = .9 * mean + .1 * batch.mean(0), .9 * variance + .1 * batch.var(0, ddof=1)
        batch = (batch - batch.mean(0)) / np.sqrt(batch.var(0) + 1e-6)
      logits = batch @ kernel + bias
      p = np.exp(logits - logits.max(1, keepdims=True))
      error = (p / p.sum(1, keepdims=True) - np.eye(CLASSES)[true]) / size
      grads = [batch.T @ error, error.sum(0)]
      if recipe.trust_coefficient:
        grads[0] *= recipe.trust_coefficient * np.linalg.norm(kernel) / np.linalg.norm(grads[0])
      velocity = [recipe.momentum * v + g for v, g in zip(velocity, grads, strict=True)]
      at = step // (total // recipe.epochs) * (total // recipe.epochs) if recipe.by_epoch else step
      now = at / warmup if at < warmup else (1 + math.cos(math.pi * (at - warmup) / (total - warmup))) / 2
      kernel, bias = kernel - rate * now * velocity[0], bias - rate * now * velocity[1]
      step += 1
  if recipe.normalize:
    kernel = kernel / np.sqrt(variance + 1e-6)[:, None]
    bias = bias - mean @ kernel
  return kernel, bias


DINO = probe.Recipe(epochs=3, batch_size=16, momentum=.9, warmup_epochs=0, trust_coefficient=0., normalize=False,
                    by_epoch=True)
MAE = probe.Recipe(epochs=4, batch_size=20, momentum=.9, warmup_epochs=1, trust_coefficient=.001, normalize=True,
                   by_epoch=False)


@pytest.mark.quick('recipe1-rates1-16-data=2,tensor=4', reason='2 s: a program for each mesh')
@pytest.mark.parametrize(('recipe', 'rates', 'size', 'mesh'), [
    (DINO, (.01, .1), 6, 'one'), (DINO, (.01, .1), 16, 'data=2,tensor=4'), (MAE, (1., 4.), 8, 'data=2')])
def test_training_is_that_of_numpy(recipe: probe.Recipe, rates: tuple[float, ...], size: int, mesh: str) -> None:
  bad = (3, 60)
  keep = np.ones(101, bool)
  keep[list(bad)] = False
  split = splits(size, mesh, bad)['train']
  placed = split.place(split.table(rows.weights()))
  steps: list[int] = []
  found = probe.train(placed['features'], placed['label'], placed['mask'], placed['example'],
                           np.array(rates, np.float32), recipe, num_classes=CLASSES,
                           mesh=programs.mesh(rows.MESHES[mesh]), on_step=steps.append)
  for i, rate in enumerate(rates):
    kernel, bias = by_hand(recipe, rate, keep)
    np.testing.assert_allclose(found.kernel[i], kernel, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.bias[i], bias, rtol=1e-3, atol=1e-4)
  assert steps[-1] == recipe.num_steps(keep.sum()) and len(steps) == recipe.epochs


def test_a_probe_chooses_its_rate_and_learns() -> None:
  split = splits(16, 'one')
  result = probe.evaluator(split['train'], split['test'], num_classes=CLASSES, recipe=DINO, rates=(1e-6, .1),
                           holdout=.2).measure(rows.weights())
  assert result.metrics['lr'] == .1 and result.metrics['top1'] > .35 and result.metrics['held_out'] > .35


def test_dino_lowers_the_rate_once_an_epoch_and_mae_at_every_step() -> None:
  dino, mae = schema.EVALUATIONS['probe_dino'](), schema.EVALUATIONS['probe_mae']()
  assert isinstance(dino, schema.Probe) and isinstance(mae, schema.Probe)
  assert (dino.rate_by_epoch, mae.rate_by_epoch) == (True, False)
