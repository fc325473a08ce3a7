"""Few-shot accuracy by ridge regression on frozen features: the metric of the ViT paper's Figures 3 and 4.

The shots of a class are the first examples in a random order given by a seed, so the 5 shots are among the 10 shots of
the same seed. Every classifier is evaluated on the complete test split.

The regression to targets of -1 and 1 is solved in closed form, with one eigendecomposition for all penalties. With
standardized features and a constant as rows of X [N, D + 1] and targets Y [N, C],

  W(l) = argmin |X W - Y|^2 + l |W|^2 = (X^T X + l)^-1 X^T Y = X^T (X X^T + l)^-1 Y,

the first form for N >= D + 1, the second otherwise. As in big_vision's few-shot evaluator, the weights of the constant,
100, are penalized too.

Differs from big_vision: regressions are solved in float64 on the host, there in float32, which changed no accuracy of
those that were compared. With `protocol=run` features, images and shots are those of the run; `protocol=big_vision` has
those of the program.
"""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, HostArray, PyTree
from vit_jax.data.source import read_labels, take
from vit_jax.evaluate import linear
from vit_jax.evaluate.features import Split, gather
from vit_jax.evaluate.problems import check_counted
from vit_jax.evaluate.resources import Make, Resources
from vit_jax.evaluate.results import Measuring, Result

BIAS = 100.           # the constant feature (big_vision, fewshot_lsr)
STD_FLOOR = 1e-5      # added to the deviation (big_vision, fewshot_lsr)
_MAX_NAMES = 5        # of classes in a message


class Draw(NamedTuple):
  """Shots of one seed: `num` of each class, as positions in the source, `[C * num]`."""
  num: int
  seed: int
  examples: HostArray


def draw(label: HostArray, class_names: Sequence[str], *, shots: Sequence[int], num_seeds: int,
         name: str, protocol: schema.FewShotProtocol = schema.FewShotProtocol.RUN) -> list[Draw]:
  """Draws shots.

  Args:
    label: `[S]` of the training split.
    class_names: of all classes.
    shots: numbers of shots per class.
    num_seeds: number of seeds, which count from 0.
    name: of the split, for messages.
    protocol: `big_vision` draws what big_vision draws of examples in the same order, and takes all examples of a class
      with fewer than there are shots.

  Raises UserError if a class has fewer examples than shots, and the protocol is not big_vision.
  """
  is_big_vision = protocol is schema.FewShotProtocol.BIG_VISION
  examples_by_class = [np.flatnonzero(label == c) for c in range(len(class_names))]
  most = max(shots)
  short = [f'{class_name} has {len(examples)}'
           for class_name, examples in zip(class_names, examples_by_class, strict=True) if len(examples) < most]
  if short and not is_big_vision:
    more = f' and {len(short) - _MAX_NAMES} more classes' if len(short) > _MAX_NAMES else ''
    raise UserError(f'{name}: expected {most} examples of each class, got fewer: {", ".join(short[:_MAX_NAMES])}'
                    f'{more}. Set fewer shots, use more examples, or set protocol=big_vision, which takes what a class '
                    'has.')
  draws = []
  for seed in range(num_seeds):
    rng = np.random.default_rng(seed) if is_big_vision else np.random.Generator(np.random.Philox(key=seed))
    orders = [rng.permutation(examples)[:most] for examples in examples_by_class]
    draws += [Draw(num, seed, np.concatenate([order[:num] for order in orders])) for num in shots]
  return draws


class Shots(NamedTuple):
  """All shots of all seeds in the order of the source, the same on every host.

  features: `[U, D]` f32.
  label: `[U]` i32.
  is_good: `[U]` bool, whether the image could be decoded.
  """
  features: HostArray
  label: HostArray
  is_good: HostArray


@dataclasses.dataclass(frozen=True)
class FewShot:
  """Evaluator of one view: `5shot` etc., the mean over seeds; with `5shot_std`, and `5shot_seed0` etc.

  With several penalties there are also `5shot_l2_64` etc., and `5shot_tuned`: the result of the penalty with the
  highest leave-one-out accuracy on the shots, so that the test split is not used to choose.

  train: the examples that are shots of any seed.
  test: the test split.
  whole: the training split that contains the shots. If its features are stored, those of the shots are taken from
    there.
  examples: positions of the shots in the training split, ascending.
  draws: the result of `draw`.
  num_classes: C.
  penalties: l; the first one is that of the headline, `5shot`.
  """
  train: Split
  test: Split
  whole: Split
  examples: HostArray
  draws: Sequence[Draw]
  num_classes: int
  penalties: Sequence[float]
  reuses_features = True  # `results.in_order` runs it after the evaluations that store features

  def measure(self, selected: PyTree) -> Result:
    """Returns the accuracies and the number of test examples."""
    if self.train.stored(selected) is None and (table := self.whole.stored(selected)) is not None:
      shots, spent_s = self._gather_shots(self.whole.place_chosen(table, self.examples), self.examples), 0.
    else:
      placed = self.train.place(self.train.table(selected))
      shots, spent_s = self._gather_shots(placed, np.arange(len(self.examples))), self.train.spent_s
    test = self.test.place(self.test.table(selected))
    scores: dict[str, list[float]] = {}
    for drawn in self.draws:
      rows = np.searchsorted(self.examples, drawn.examples)
      rows = rows[shots.is_good[rows]]
      check_counted(self.train.name, len(rows), len(drawn.examples))
      fitted = fit(shots.features[rows], shots.label[rows], num_classes=self.num_classes, penalties=self.penalties)
      num_right, num_examples = _score(fitted, test)
      self.test.check_counted(num_examples)
      for name, value in self._name_scores(drawn.num, num_right / num_examples, fitted.left_out).items():
        scores.setdefault(name, []).append(value)
    headline = f'{max(drawn.num for drawn in self.draws)}shot'
    return Result(summed_up(scores), num_examples, None, headline, spent_s + self.test.spent_s)

  def _name_scores(self, num: int, accuracy: HostArray, left_out: HostArray) -> dict[str, float]:
    """Returns the accuracies of one draw by name.

    Args:
      num: shots of a class.
      accuracy: on the test split, `[l]`.
      left_out: leave-one-out accuracy on the shots, `[l]`; among penalties with equal ones the largest is chosen.
    """
    scores = {f'{num}shot': float(accuracy[0])}
    if len(self.penalties) > 1:
      scores |= {f'{num}shot_l2_{p:g}': float(a) for p, a in zip(self.penalties, accuracy, strict=True)}
      best = max(range(len(self.penalties)), key=lambda i: (left_out[i], self.penalties[i]))
      scores[f'{num}shot_tuned'] = float(accuracy[best])
    return scores

  def _gather_shots(self, placed: dict[str, Array], examples: HostArray) -> Shots:
    """Returns the shots; `examples [U]` are their positions in the split of `placed`, ascending."""
    rows = {name: x.reshape(-1, *x.shape[2:]) for name, x in gather(placed, self.train.mesh).items()}
    is_valid = rows['mask'] > 0
    shots = Shots(np.zeros((len(examples), rows['features'].shape[1]), np.float32),
                  np.zeros(len(examples), np.int32), np.zeros(len(examples), bool))
    where = np.searchsorted(examples, rows['example'][is_valid])
    shots.features[where], shots.label[where] = rows['features'][is_valid], rows['label'][is_valid]
    shots.is_good[where] = True
    return shots


def summed_up(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
  """Returns the mean of each number over seeds; for `…shot` also the sample deviation and the value of each seed."""
  metrics: dict[str, float] = {}
  for name, values in scores.items():
    metrics[name] = statistics.fmean(values)
    if name.endswith('shot') and len(values) > 1:
      metrics[f'{name}_std'] = statistics.stdev(values)
      metrics |= {f'{name}_seed{seed}': value for seed, value in enumerate(values)}
  return metrics


class Fit(NamedTuple):
  """Linear classifiers of one set of shots, one for each penalty.

  mean, std: `[D]`, for standardizing features.
  weights: `[l, D + 1, C]`; the last row is multiplied by the constant.
  left_out: `[l]`, leave-one-out accuracy on the shots.
  """
  mean: HostArray
  std: HostArray
  weights: HostArray
  left_out: HostArray


def fit(features: HostArray, label: HostArray, *, num_classes: int, penalties: Sequence[float]) -> Fit:
  """Fits classifiers for all penalties.

  Leave-one-out predictions need no other fits: with h the diagonal of the hat matrix X (X^T X + l)^-1 X^T, the
  prediction for example i is y_i - (y_i - f_i) / (1 - h_i). Mean and deviation are those of all shots.

  Args:
    features: `[N, D]`.
    label: `[N]`.
    num_classes: C.
    penalties: l, each positive.
  """
  features = np.asarray(features, np.float64)
  mean, std = features.mean(0), features.std(0) + STD_FLOOR
  x = extend((features - mean) / std)
  y = np.where(np.arange(num_classes) == np.asarray(label)[:, None], 1., -1.)
  has_primal_form = x.shape[0] >= x.shape[1]
  # X^T X = V S V^T in the primal form, X X^T = U S U^T in the dual one.
  values, vectors = np.linalg.eigh(x.T @ x if has_primal_form else x @ x.T)
  values = np.maximum(values, 0.)
  inverse = 1. / (values + np.asarray(penalties, np.float64)[:, None])
  if has_primal_form:
    basis, targets = vectors, vectors.T @ (x.T @ y)
    hat = inverse @ ((x @ vectors)**2).T  # diagonals, [l, N]
  else:
    basis, targets = x.T @ vectors, vectors.T @ y
    hat = (values * inverse) @ (vectors**2).T
  weights = np.stack([basis @ (i[:, None] * targets) for i in inverse])
  left_out = []
  for w, h in zip(weights, hat, strict=True):
    predicted = y - (y - x @ w) / np.maximum(1. - h, 1e-12)[:, None]
    left_out.append(float((predicted.argmax(1) == y.argmax(1)).mean()))
  return Fit(mean, std, weights, np.array(left_out))


def extend(standardized: HostArray) -> HostArray:
  """Appends the constant to features, `[N, D + 1]`."""
  return np.concatenate([standardized, np.full((len(standardized), 1), BIAS)], 1)


def _score(fitted: Fit, placed: dict[str, Array]) -> tuple[HostArray, int]:
  """Returns the number of correct predictions of each penalty's classifier, `[l]`, and the number of examples."""
  if jax.process_count() > 1:  # the last bits of a solution may differ between hosts
    fitted = multihost_utils.broadcast_one_to_all(fitted)
  mean, std, weights = (x.astype(np.float32) for x in (fitted.mean, fitted.std, fitted.weights))
  features = linear.standardize(placed['features'], mean, std)
  counts = jax.device_get([linear.count_right(linear.Linear(w[:-1], BIAS * w[-1]), features, placed['label'],
                                              placed['mask']) for w in weights])
  return np.array([int(right) for right, _, _ in counts]), int(counts[0][2])


def build(resources: Resources, name: str, settings: schema.FewShot) -> Make:
  """Builds the evaluator for each view.

  Unless the features of the training split are stored, only the examples drawn by a seed are read.
  """
  train, test = resources.sources(name)
  draws = draw(read_labels(train), train.class_names, shots=settings.shots, num_seeds=settings.num_seeds,
               name=f'evals.{name}: {train.name}', protocol=settings.protocol)
  examples = np.unique(np.concatenate([drawn.examples for drawn in draws]))
  shots = take(train, examples, name=f'{train.name}, {len(examples):,} shots')

  def make(view: str) -> Measuring:
    return FewShot(
        *resources.splits(name, settings, shots, test, view),
        whole=resources.split(name, settings, train, view, in_memory=False), examples=examples, draws=draws,
        num_classes=len(train.class_names), penalties=(settings.l2, *settings.l2_sweep))
  return make
