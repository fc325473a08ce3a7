"""Linear classifiers on frozen features: choosing a setting on held-out examples, and scoring.

Shared by logistic regression (`logistic.py`) and probes (`probe.py`). The images have the preprocessing of evaluation.
MAE (He et al. 2022, Appendix A.1) and DINO (Caron et al. 2021, section 4.1) augment the images of their probes, as the
train job does with `head.probe`. If there are several settings, the best one on held-out training examples is chosen,
and its classifier is trained on all training examples.
"""
from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray, PyTree
from vit_jax.evaluate.features import Split, gather
from vit_jax.evaluate.results import TOP, Result, mark, named

STD_FLOOR = 1e-5
LOGITS_A_BLOCK = 2**23  # elements of one part, over all penalties
EXTENSION = 4         # settings added at a time if the best one is at the edge of the grid
MOST_EXTENSIONS = 4   # on each side
log = logging.getLogger('vit_jax.evaluate')


class Linear(NamedTuple):
  """A linear classifier `x W + b`, or several with an additional leading axis."""
  kernel: Array
  bias: Array


class Data(NamedTuple):
  """A split on the devices: `features [G, R, D]`, `label weight example [G, R]`."""
  features: Array
  label: Array
  weight: Array
  example: Array


class Choice(NamedTuple):
  """A classifier, its setting, and accuracy and NLL (nats) of that setting on the held-out examples.

  Both are nan for a single setting, for which no examples are held out.
  """
  linear: Linear
  setting: float
  held_out: float
  held_out_nll: float


class Scores(NamedTuple):
  """Results of n settings on the held-out examples, `[n]` each: number of correct predictions, and mean NLL in nats."""
  right: HostArray
  nll: HostArray


Rank = Callable[[Sequence[float], Scores], int]
"""Maps settings and their scores to the index of the best one."""


def choose(fit: Callable[[Data, Sequence[float]], Linear], data: Data, settings: Sequence[float], *, name: str,
           hold: Callable[[], HostArray], rank: Rank, extend: bool = False) -> Choice:
  """Trains a classifier on all training examples with the setting that is best on held-out ones.

  Args:
    fit: maps data and settings to classifiers, one for each setting.
    data: the complete training split.
    settings: to choose from; for a single setting no examples are held out.
    name: of the training split, for messages.
    hold: returns which examples are held out, `[S]` bool by their positions in the source.
    rank: chooses the best setting.
    extend: whether to extend the grid while its smallest or largest setting is the best.

  Raises:
    UserError: no class has two examples, so no example can be held out.
  """
  setting, held_out, nll = settings[0], math.nan, math.nan
  if len(settings) > 1:
    kept, chooses = _divide(data.weight, data.example, hold())

    def score(some: Sequence[float]) -> Scores:
      fitted = fit(data._replace(weight=kept), some)
      return _score([Linear(fitted.kernel[i], fitted.bias[i]) for i in range(len(some))],
                    data._replace(weight=chooses))

    grid, scores = _search(score, settings, rank=rank, extend=extend, name=name)
    best = rank(grid, scores)
    setting, held_out, nll = grid[best], float(scores.right[best] / int((chooses > 0).sum())), float(scores.nll[best])
  fitted = fit(data, [setting])
  return Choice(Linear(fitted.kernel[0], fitted.bias[0]), setting, held_out, nll)


def by_nll(settings: Sequence[float], scores: Scores) -> int:
  """Chooses the smallest NLL, and the largest setting among equal ones; losses that are not finite are excluded."""
  return min(range(len(settings)), key=lambda i: (np.nan_to_num(scores.nll[i], nan=np.inf), -settings[i]))


def by_accuracy(settings: Sequence[float], scores: Scores) -> int:
  """Chooses the highest accuracy, and the smallest setting among equal ones."""
  return min(range(len(settings)), key=lambda i: (-scores.right[i], settings[i]))


def _search(score: Callable[[Sequence[float]], Scores], settings: Sequence[float], *, rank: Rank, extend: bool,
            name: str) -> tuple[list[float], Scores]:
  """Returns settings in ascending order with their scores; `extend` adds settings if the best one is at the edge."""
  grid = sorted(settings)
  scores = score(grid)
  left = {'below': MOST_EXTENSIONS, 'above': MOST_EXTENSIONS} if extend else {}
  while side := {0: 'below', len(grid) - 1: 'above'}.get(rank(grid, scores)):
    if not left.get(side):
      break
    left[side] -= 1
    edge, inner = (grid[0], grid[1]) if side == 'below' else (grid[-1], grid[-2])
    more = sorted(edge * (edge / inner)**i for i in range(1, EXTENSION + 1))
    log.info('%s: the setting %g at the edge of the grid is the best on the held-out examples; also trying %s.', name,
             edge, ', '.join(f'{setting:.3g}' for setting in more))
    parts = [(more, score(more)), (grid, scores)]
    (low, low_scores), (high, high_scores) = parts if side == 'below' else reversed(parts)
    grid = [*low, *high]
    scores = Scores(*(np.concatenate(both) for both in zip(low_scores, high_scores, strict=True)))
  return grid, scores


def hold_out(label: HostArray, counts: HostArray, *, part: float, name: str = 'the training split') -> HostArray:
  """Chooses held-out examples, `[S]` bool: deterministically, and the same fraction of every class.

  At least one example of each class is kept for training. The others are ordered by class, at random within a class,
  and evenly spaced ones are held out: the fraction `part` of all examples, and up to rounding of each class.

  Args:
    label: `[S]` i32.
    counts: `[S]` bool, which examples are used.
    part: fraction of held-out examples.
    name: of the split, for messages.

  Raises:
    UserError: no class has two examples.
  """
  mixed = np.random.Generator(np.random.Philox(key=0)).permutation(len(label))
  mixed = mixed[counts[mixed]]
  ordered = mixed[np.argsort(label[mixed], kind='stable')]
  is_first = np.diff(label[ordered], prepend=-1) != 0
  rest = ordered[~is_first]
  if not len(rest):
    raise UserError(f'{name}: expected a class with at least two examples, one of which can be held out to choose a '
                    'setting, got one example a class. Give a single setting to choose nothing.')
  number = min(len(rest), max(1, round(part * len(ordered))))
  is_held = np.zeros(len(label), bool)
  is_held[rest[(np.arange(number) * len(rest) + len(rest) // 2) // number]] = True
  return is_held


@jax.jit
def _divide(weight: Array, example: Array, held_out_S: Array) -> tuple[Array, Array]:
  """Returns the weights of the examples for training, and of the held-out ones."""
  chooses = held_out_S[example]
  return jnp.where(chooses, 0., weight), jnp.where(chooses, weight, 0.)


def cut(arrays: tuple[Array, ...], *, rows: int) -> tuple[Array, ...]:
  """Splits all parts into blocks of at most `rows` rows, `[G, R, …]` to `[blocks, G, r, …]`, padded with zeros."""
  num_rows = arrays[0].shape[1]
  size = max(1, min(rows, num_rows))
  extra = -num_rows % size
  padded = (jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2)) for x in arrays)
  return tuple(x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1) for x in padded)


def block_loss(linear: Linear, block: tuple[Array, Array, Array]) -> Array:
  """Returns the sum of weighted cross-entropies of a block."""
  features, label, weight = block
  log_p = jax.nn.log_softmax(predict(linear, features))
  return -(jnp.take_along_axis(log_p, label[..., None], -1)[..., 0] * weight).sum()


@jax.jit
def mean_loss(linear: Linear, features: Array, label: Array, weight: Array) -> Array:
  """Returns the weighted mean of the cross-entropies of examples `[G, R]` for one classifier, in nats."""
  blocks = cut((features, label, weight), rows=LOGITS_A_BLOCK // linear.bias.shape[0])
  return jax.lax.map(functools.partial(block_loss, linear), blocks).sum() / weight.sum()


def predict(linear: Linear, features: Array) -> Array:
  """Returns logits `[G, R, C]`, computed in full f32 precision on every accelerator."""
  product = jnp.einsum('grd,dc->grc', features, linear.kernel, precision=jax.lax.Precision.HIGHEST)
  return product + linear.bias[None, None]


@jax.jit
def count_right(linear: Linear, features: Array, label: Array, weight: Array) -> Array:
  """Returns `[3]` i32: top-1 correct, top-5 correct and all of the examples `[G, R]` with nonzero weight."""
  num_classes = linear.bias.shape[0]

  def count(block: tuple[Array, ...]) -> Array:
    x, true, w = block
    _, top = jax.lax.top_k(predict(linear, x), min(TOP, num_classes))
    hit, counts = top == true[..., None], w > 0
    return jnp.stack([(hit[..., 0] & counts).sum(), (hit.any(-1) & counts).sum(), counts.sum()]).astype(jnp.int32)

  return jax.lax.map(count, cut((features, label, weight), rows=LOGITS_A_BLOCK // num_classes)).sum(0)


def _score(fitted: Iterable[Linear], data: Data) -> Scores:
  """Returns the scores of classifiers on the examples with nonzero weight."""
  examples = data.features, data.label, data.weight
  scores = jax.device_get([(count_right(linear, *examples), mean_loss(linear, *examples)) for linear in fitted])
  return Scores(np.array([int(right[0]) for right, _ in scores]), np.array([float(nll) for _, nll in scores]))


def place(train: Split, test: Split, selected: PyTree, *, is_standardized: bool = True) -> tuple[Data, Data]:
  """Places both splits on the devices, optionally standardized by mean and deviation of the training examples."""
  both = []
  for split in (train, test):
    placed = split.place(split.table(selected))
    both.append(Data(placed['features'], placed['label'], placed['mask'], placed['example']))
  if is_standardized:
    mean, std = moments(both[0].features, both[0].weight)
    both = [data._replace(features=_standardize_in_place(data.features, mean, std)) for data in both]
  return both[0], both[1]


@jax.jit
def moments(features: Array, weight: Array) -> tuple[Array, Array]:
  """Returns mean and deviation `[D]` of the examples `[G, R, D]` with weights `[G, R]`."""
  w, total = weight[..., None], weight.sum()
  mean = (features * w).sum((0, 1)) / total
  return mean, jnp.sqrt((jnp.square(features - mean[None, None]) * w).sum((0, 1)) / total) + STD_FLOOR


def _standardize(features: Array, mean: Array, std: Array) -> Array:
  return (features - mean[None, None]) / std[None, None]


standardize = jax.jit(_standardize)
"""Maps features `[G, R, D]`, mean and deviation `[D]` to standardized features."""
_standardize_in_place = jax.jit(_standardize, donate_argnums=0)


class Evaluator:
  """Evaluator of one view: `top1`, `top5`, the chosen setting, and its accuracy and NLL on the held-out examples.

  Args:
    train: split to learn from.
    test: split to classify.
    fit: maps data and settings to classifiers, one for each setting.
    settings: to choose from.
    setting: what they are, for the name of the metric.
    holdout: fraction of held-out training examples, the same of every class.
    rank: chooses the best setting.
    is_standardized: whether features are standardized by the training examples; the grid is then extended, too, if its
      smallest or largest setting is the best.
    limit: number of examples to which the splits were truncated; 0 = not truncated.
  """

  def __init__(self, train: Split, test: Split, fit: Callable[[Data, Sequence[float]], Linear],
               settings: Sequence[float], *, setting: str, holdout: float, rank: Rank, is_standardized: bool,
               limit: int) -> None:
    self._train, self._test, self._fit, self._settings, self._setting = train, test, fit, settings, setting
    self._holdout, self._rank, self._is_standardized, self._limit = holdout, rank, is_standardized, limit

  def measure(self, selected: PyTree) -> Result:
    """Returns the accuracies and the number of test examples."""
    data, test = place(self._train, self._test, selected, is_standardized=self._is_standardized)
    best = choose(self._fit, data, self._settings, name=self._train.name, hold=functools.partial(self._hold, data),
                  rank=self._rank, extend=self._is_standardized)
    right, top, total = jax.device_get(count_right(best.linear, test.features, test.label, test.weight)).tolist()
    self._test.check_counted(total)
    metrics = {'top1': right / total, 'top5': top / total, self._setting: best.setting}
    if not math.isnan(best.held_out):
      metrics |= {'held_out': best.held_out, 'held_out_nll': best.held_out_nll}
    return Result(named(metrics, self._limit), total, None, mark('top1', self._limit),
                  self._train.spent_s + self._test.spent_s)

  def _hold(self, data: Data) -> HostArray:
    """Returns which training examples are held out, `[S]` bool, the same on every host."""
    rows = gather({'label': data.label, 'weight': data.weight, 'example': data.example}, self._train.mesh)
    size = self._train.num_examples
    label, counts, good = np.zeros(size, np.int32), np.zeros(size, bool), rows['weight'] > 0
    label[rows['example'][good]], counts[rows['example'][good]] = rows['label'][good], True
    return hold_out(label, counts, part=self._holdout, name=self._train.name)
