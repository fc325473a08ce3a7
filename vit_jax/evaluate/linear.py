"""Linear classifiers on frozen features: choosing a setting on held-out examples, and scoring.

Shared by logistic regression (`logistic.py`) and probes (`probe.py`). The images have the preprocessing of evaluation.
MAE (He et al. 2022, Appendix A.1) and DINO (Caron et al. 2021, section 4.1) augment the images of their probes, as the
train job does with `head.probe`. If there are several settings, the best one on held-out training examples is chosen,
and its classifier is trained on all training examples.
"""
from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray, PyTree
from vit_jax.evaluate.features import Split, gather
from vit_jax.evaluate.results import TOP, Result

STD_FLOOR = 1e-5
LOGITS_A_BLOCK = 2**23  # logits of one part that are computed at a time, over all penalties
EXTENSION = 4         # settings added at a time if the best one is at the edge of the grid
MOST_EXTENSIONS = 4   # additions on each side
log = logging.getLogger('vit_jax.evaluate')


class Linear(NamedTuple):
  """A linear classifier `x W + b`, or several with an additional leading axis."""
  kernel: Array
  bias: Array


class Data(NamedTuple):
  """A split on the devices, in G parts of R rows: `features [G, R, D]`, `label weight example [G, R]`.

  weight: 0 for rows to ignore.    example: the position in the source.
  """
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

  Raises UserError if no class has two examples, so no example can be held out.
  """
  setting, held_out, nll = settings[0], math.nan, math.nan
  if len(settings) > 1:
    train_weight, held_out_weight = _divide(data.weight, data.example, hold())

    def score(some: Sequence[float]) -> Scores:
      """Returns the scores of classifiers with some of the settings on the held-out examples."""
      fitted = fit(data._replace(weight=train_weight), some)
      examples = data.features, data.label, held_out_weight
      classifiers = [Linear(fitted.kernel[i], fitted.bias[i]) for i in range(len(some))]
      scores = jax.device_get([(count_right(one, *examples), mean_loss(one, *examples)) for one in classifiers])
      return Scores(np.array([int(right[0]) for right, _ in scores]), np.array([float(nll) for _, nll in scores]))

    grid, scores = _search(score, settings, rank=rank, extend=extend, name=name)
    best = rank(grid, scores)
    setting, nll = grid[best], float(scores.nll[best])
    held_out = float(scores.right[best] / int((held_out_weight > 0).sum()))
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
  num_left = {'below': MOST_EXTENSIONS, 'above': MOST_EXTENSIONS} if extend else {'below': 0, 'above': 0}
  while True:
    best = rank(grid, scores)
    if best == 0 and num_left['below']:
      side, edge, inner = 'below', grid[0], grid[1]
    elif best == len(grid) - 1 and num_left['above']:
      side, edge, inner = 'above', grid[-1], grid[-2]
    else:
      return grid, scores
    num_left[side] -= 1
    more = sorted(edge * (edge / inner)**i for i in range(1, EXTENSION + 1))
    log.info('%s: the setting %g at the edge of the grid is the best on the held-out examples; also trying %s.', name,
             edge, ', '.join(f'{setting:.3g}' for setting in more))
    more_scores = score(more)
    if side == 'below':
      grid, both = [*more, *grid], (more_scores, scores)
    else:
      grid, both = [*grid, *more], (scores, more_scores)
    scores = Scores(np.concatenate([part.right for part in both]), np.concatenate([part.nll for part in both]))


def hold_out(label: HostArray, counts: HostArray, *, part: float, name: str = 'the training split') -> HostArray:
  """Chooses held-out examples, `[S]` bool: deterministically, and the same fraction of every class.

  At least one example of each class is kept for training. The others are ordered by class, at random within a class,
  and evenly spaced ones are held out: the fraction `part` of all examples, and up to rounding of each class.

  Args:
    label: `[S]` i32.
    counts: `[S]` bool, which examples are used.
    part: fraction of held-out examples.
    name: of the split, for messages.

  Raises UserError if no class has two examples.
  """
  shuffled = np.random.Generator(np.random.Philox(key=0)).permutation(len(label))
  shuffled = shuffled[counts[shuffled]]
  by_class = shuffled[np.argsort(label[shuffled], kind='stable')]
  is_first_of_class = np.diff(label[by_class], prepend=-1) != 0
  rest = by_class[~is_first_of_class]
  if not len(rest):
    raise UserError(f'{name}: expected a class with at least two examples, one of which can be held out to choose a '
                    'setting, got one example a class. Give a single setting to choose nothing.')
  number = min(len(rest), max(1, round(part * len(by_class))))
  evenly_spaced = (np.arange(number) * len(rest) + len(rest) // 2) // number
  is_held = np.zeros(len(label), bool)
  is_held[rest[evenly_spaced]] = True
  return is_held


@jax.jit
def _divide(weight: Array, example: Array, held_out_S: Array) -> tuple[Array, Array]:
  """Returns the weights of the examples for training, and of the held-out ones, both `[G, R]`."""
  is_held = held_out_S[example]
  return jnp.where(is_held, 0., weight), jnp.where(is_held, weight, 0.)


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
    features, label, weight = block
    _, top = jax.lax.top_k(predict(linear, features), min(TOP, num_classes))
    is_hit, is_used = top == label[..., None], weight > 0
    right_top1, right_top5 = is_hit[..., 0] & is_used, is_hit.any(-1) & is_used
    return jnp.stack([right_top1.sum(), right_top5.sum(), is_used.sum()]).astype(jnp.int32)

  return jax.lax.map(count, cut((features, label, weight), rows=LOGITS_A_BLOCK // num_classes)).sum(0)


def place(train: Split, test: Split, selected: PyTree, *, is_standardized: bool = True) -> tuple[Data, Data]:
  """Places both splits on the devices, optionally standardized by mean and deviation of the training examples."""
  def place_one(split: Split) -> Data:
    placed = split.place(split.table(selected))
    return Data(placed['features'], placed['label'], placed['mask'], placed['example'])

  train_data, test_data = place_one(train), place_one(test)
  if is_standardized:
    mean, std = moments(train_data.features, train_data.weight)
    train_data = train_data._replace(features=_standardize_in_place(train_data.features, mean, std))
    test_data = test_data._replace(features=_standardize_in_place(test_data.features, mean, std))
  return train_data, test_data


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


@dataclasses.dataclass(frozen=True)
class Evaluator:
  """Evaluator of one view: `top1`, `top5`, the chosen setting, and its accuracy and NLL on the held-out examples.

  train: split to learn from.
  test: split to classify.
  fit: maps data and settings to classifiers, one for each setting.
  settings: to choose from.
  setting: what they are, `l2` or `lr`, for the name of the metric.
  holdout: fraction of held-out training examples, the same of every class.
  rank: chooses the best setting.
  is_standardized: whether features are standardized by the training examples; the grid is then extended, too, if its
    smallest or largest setting is the best.
  """
  train: Split
  test: Split
  fit: Callable[[Data, Sequence[float]], Linear]
  settings: Sequence[float]
  setting: str
  holdout: float
  rank: Rank
  is_standardized: bool

  def measure(self, selected: PyTree) -> Result:
    """Returns the accuracies and the number of test examples."""
    data, test = place(self.train, self.test, selected, is_standardized=self.is_standardized)
    best = choose(self.fit, data, self.settings, name=self.train.name, hold=functools.partial(self._hold, data),
                  rank=self.rank, extend=self.is_standardized)
    right_top1, right_top5, total = jax.device_get(
        count_right(best.linear, test.features, test.label, test.weight)).tolist()
    self.test.check_counted(total)
    metrics = {'top1': right_top1 / total, 'top5': right_top5 / total, self.setting: best.setting}
    if not math.isnan(best.held_out):
      metrics |= {'held_out': best.held_out, 'held_out_nll': best.held_out_nll}
    return Result(metrics, total, None, 'top1', self.train.spent_s + self.test.spent_s)

  def _hold(self, data: Data) -> HostArray:
    """Returns which training examples are held out, `[S]` bool, the same on every host."""
    rows = gather({'label': data.label, 'weight': data.weight, 'example': data.example}, self.train.mesh)
    is_used = rows['weight'] > 0
    example = rows['example'][is_used]
    label, counts = np.zeros(self.train.num_examples, np.int32), np.zeros(self.train.num_examples, bool)
    label[example], counts[example] = rows['label'][is_used], True
    return hold_out(label, counts, part=self.holdout, name=self.train.name)
