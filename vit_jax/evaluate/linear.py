"""Linear probes: how well a linear classifier does on frozen features, cached or taken for the purpose.

`Logistic` goes to the optimum of logistic regression; `Probe` trains as MAE (He et al. 2022, Appendix A.1) or DINO
(Caron et al. 2021, section 4.1) do, but on the features of pictures as evaluation sees them: their protocols
augment the pictures, which is what the train job with `head.probe` does. Where there are several settings, a part of
the training examples that takes no part in training chooses; then all train with the best.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.types import Array, HostArray, PyTree
from vit_jax.evaluate import faults, logistic
from vit_jax.evaluate.features import Split
from vit_jax.evaluate.logistic import Linear
from vit_jax.evaluate.results import Result, mark, named
from vit_jax.evaluate.stochastic import Recipe, train

STD_FLOOR = 1e-5
TOP = 5
SOLVER_BYTES = 2**31  # of kernels and what L-BFGS keeps of them, for the penalties that are fitted at once


class Data(NamedTuple):
  """A training split on the devices: `features [G, R, D]`, `label weight example [G, R]`."""
  features: Array
  label: Array
  weight: Array
  example: Array


class Choice(NamedTuple):
  """A classifier, the setting it was trained with, and how that did on what was held out (nan: it was the only one)."""
  linear: Linear
  setting: float
  held_out: float


class Logistic:
  """Evaluator of one view: `top1`, `top5`, the penalty `l2` and its accuracy on what was held out, `held_out`.

  Args:
    train: to fit on.
    test: to measure on.
    num_classes: C.
    penalties: to choose from, per example (see `logistic`).
    holdout: part of the training examples that chooses.
    max_steps: of L-BFGS.
    tolerance: largest gradient entry at the end.
    limit: to how many examples the splits were cut; 0 = they were not.
  """

  def __init__(self, train: Split, test: Split, *, num_classes: int, penalties: Sequence[float], holdout: float,
               max_steps: int, tolerance: float, limit: int = 0):
    self._train, self._test, self._num_classes, self._limit = train, test, num_classes, limit
    self._penalties, self._holdout = tuple(penalties), holdout
    self._max_steps, self._tolerance = max_steps, tolerance

  def run(self, selected: PyTree, step: int) -> dict[str, float]:
    """Accuracies of the view's `selected` parameters."""
    del step
    return self.measure(selected).metrics

  def measure(self, selected: PyTree) -> Result:
    """Accuracies, and over how many test examples."""
    data, test = _place(self._train, self._test, selected)
    best = choose(self._fit, data, self._penalties, num_examples=self._train.num_examples, holdout=self._holdout,
                  prefer=max)
    return _result(self._train, self._test, test, best, 'l2', self._limit)

  def _fit(self, data: Data, penalties: Sequence[float]) -> Linear:
    """Classifiers for all penalties, as many at once as fit."""
    room = 4 * data.features.shape[-1] * self._num_classes * (2 * logistic.MEMORY + 5)
    size = max(1, SOLVER_BYTES // room)
    found = [logistic.fit(
        data.features, data.label, data.weight, np.asarray(penalties[at:at + size], np.float32),
        num_classes=self._num_classes, max_steps=self._max_steps, tolerance=self._tolerance).linear
        for at in range(0, len(penalties), size)]
    return Linear(*(jnp.concatenate(x) for x in zip(*found, strict=True)))


class Probe:
  """Evaluator of one view: `top1`, `top5`, the learning rate `lr` and its accuracy on what was held out.

  Args:
    train: to train on.
    test: to measure on.
    num_classes: C.
    recipe: how to train.
    rates: peak learning rates to choose from, for the batch size of the recipe.
    holdout: part of the training examples that chooses, where there are several.
    limit: to how many examples the splits were cut; 0 = they were not.
  """

  def __init__(self, train: Split, test: Split, *, num_classes: int, recipe: Recipe, rates: Sequence[float],
               holdout: float, limit: int = 0):
    self._train, self._test, self._num_classes, self._limit = train, test, num_classes, limit
    self._recipe, self._rates, self._holdout = recipe, tuple(rates), holdout

  def run(self, selected: PyTree, step: int) -> dict[str, float]:
    """Accuracies of the view's `selected` parameters."""
    del step
    return self.measure(selected).metrics

  def measure(self, selected: PyTree) -> Result:
    """Accuracies, and over how many test examples."""
    data, test = _place(self._train, self._test, selected, standardize=False)
    best = choose(self._fit, data, self._rates, num_examples=self._train.num_examples, holdout=self._holdout,
                  prefer=min)
    return _result(self._train, self._test, test, best, 'lr', self._limit)

  def _fit(self, data: Data, rates: Sequence[float]) -> Linear:
    with self._train.count('steps', self._recipe.num_steps(int(data.weight.sum()))) as tally:
      return train(data.features, data.label, data.weight, data.example, np.asarray(rates, np.float32), self._recipe,
                   num_classes=self._num_classes, mesh=self._train.mesh, on_step=tally.update)


def choose(fit: Callable[[Data, Sequence[float]], Linear], data: Data, settings: Sequence[float], *,
           num_examples: int, holdout: float, prefer: Callable[..., float]) -> Choice:
  """A classifier by all training examples with the setting that does best on those held out.

  Args:
    fit: from data and settings to classifiers, one for each.
    data: all of the training split.
    settings: to choose from; where there is one, nothing is held out.
    num_examples: of the training split.
    holdout: part of them.
    prefer: `min` or `max`: which of equally good settings.
  """
  setting, held_out = settings[0], math.nan
  if len(settings) > 1:
    kept, chooses = _divide(data.weight, data.example, hold_out(num_examples, holdout))
    fitted = fit(data._replace(weight=kept), settings)
    counts = [count_right(Linear(fitted.kernel[i], fitted.bias[i]), data.features, data.label, chooses)
              for i in range(len(settings))]
    right = [int(one[0]) for one in jax.device_get(counts)]
    setting = prefer(s for s, r in zip(settings, right, strict=True) if r == max(right))
    held_out = max(right) / max(1, int(counts[0][2]))
  fitted = fit(data, [setting])
  return Choice(Linear(fitted.kernel[0], fitted.bias[0]), setting, held_out)


def hold_out(num_examples: int, part: float) -> HostArray:
  """Which examples are held out, `[S]` bool: the same ones always."""
  found = np.zeros(num_examples, bool)
  mixed = np.random.Generator(np.random.Philox(key=0)).permutation(num_examples)
  found[mixed[:math.ceil(part * num_examples)]] = True
  return found


@jax.jit
def _divide(weight: Array, example: Array, held_out_S: Array) -> tuple[Array, Array]:
  """Weights of the examples that are trained on, and of those held out."""
  chooses = held_out_S[example]
  return jnp.where(chooses, 0., weight), jnp.where(chooses, weight, 0.)


@jax.jit
def count_right(linear: Linear, features: Array, label: Array, weight: Array) -> Array:
  """`[3]` i32: of the examples `[G, R]` with a weight those right at first guess, among the best five, and all."""
  num_classes = linear.bias.shape[0]

  def count(block: tuple[Array, ...]) -> Array:
    x, true, w = block
    _, top = jax.lax.top_k(logistic.predict(linear, x), min(TOP, num_classes))
    hit, counts = top == true[..., None], w > 0
    return jnp.stack([(hit[..., 0] & counts).sum(), (hit.any(-1) & counts).sum(), counts.sum()]).astype(jnp.int32)

  return jax.lax.map(count, logistic.cut((features, label, weight), rows=logistic.LOGITS_A_BLOCK // num_classes)).sum(0)


def _place(train_split: Split, test_split: Split, selected: PyTree, *, standardize: bool = True) -> tuple[Data, Data]:
  """Both splits on the devices; standardised by mean and deviation of the training examples, if asked for."""
  found = []
  for one in (train_split, test_split):
    placed = one.place(one.table(selected))
    found.append(Data(placed['features'], placed['label'], placed['mask'], placed['example']))
  train_data, test_data = found
  if standardize:
    mean, std = _moments(train_data.features, train_data.weight)
    train_data, test_data = (x._replace(features=_standardize(x.features, mean, std)) for x in found)
  return train_data, test_data


@jax.jit
def _moments(features: Array, weight: Array) -> tuple[Array, Array]:
  w, total = weight[..., None], weight.sum()
  mean = (features * w).sum((0, 1)) / total
  return mean, jnp.sqrt((jnp.square(features - mean[None, None]) * w).sum((0, 1)) / total) + STD_FLOOR


@functools.partial(jax.jit, donate_argnums=0)
def _standardize(features: Array, mean: Array, std: Array) -> Array:
  return (features - mean[None, None]) / std[None, None]


def _result(train_split: Split, split: Split, test: Data, best: Choice, name: str, limit: int) -> Result:
  right, top, total = jax.device_get(count_right(best.linear, test.features, test.label, test.weight)).tolist()
  faults.check_counted(split.name, total, split.num_examples)
  metrics = {'top1': right / total, 'top5': top / total, name: best.setting}
  if not math.isnan(best.held_out):
    metrics['held_out'] = best.held_out
  return Result(named(metrics, limit), total, None, mark('top1', limit), train_split.spent_s + split.spent_s)
