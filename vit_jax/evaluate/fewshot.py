"""Few-shot accuracy by ridge regression on frozen features: the metric of the ViT paper's Figures 3 and 4.

The shots of a class are the first examples in a random order given by a seed, so the 5 shots are among the 10 shots of
the same seed. Every classifier is evaluated on the complete test split.

Differs from big_vision: regressions are solved in float64, there in float32, which changed no accuracy of those that
were compared. With `protocol=run` features, images and shots are those of the run; `protocol=big_vision` has those of
the program.
"""
from __future__ import annotations

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
from vit_jax.evaluate import linear, ridge
from vit_jax.evaluate.features import Split, gather
from vit_jax.evaluate.resources import Make, Resources
from vit_jax.evaluate.results import Measuring, Result, check_counted, mark, named

_MOST_NAMES = 5


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

  Raises:
    UserError: a class has fewer examples than shots, and the protocol is not big_vision.
  """
  is_theirs = protocol is schema.FewShotProtocol.BIG_VISION
  places = [np.flatnonzero(label == c) for c in range(len(class_names))]
  most = max(shots)
  short = [f'{class_names[c]} has {len(p)}' for c, p in enumerate(places) if len(p) < most]
  if short and not is_theirs:
    more = f' and {len(short) - _MOST_NAMES} more classes' if len(short) > _MOST_NAMES else ''
    raise UserError(f'{name}: expected {most} examples of each class, got fewer: {", ".join(short[:_MOST_NAMES])}'
                    f'{more}. Set fewer shots, use more examples, or set protocol=big_vision, which takes what a class '
                    'has.')
  draws = []
  for seed in range(num_seeds):
    rng = np.random.default_rng(seed) if is_theirs else np.random.Generator(np.random.Philox(key=seed))
    orders = [rng.permutation(p)[:most] for p in places]
    draws += [Draw(num, seed, np.concatenate([order[:num] for order in orders])) for num in shots]
  return draws


class FewShot:
  """Evaluator of one view: `5shot` etc., the mean over seeds; with `5shot_std`, and `5shot_seed0` etc.

  With additional penalties there are also `5shot_l2_64` etc., and `5shot_tuned`: the result of the penalty with the
  highest leave-one-out accuracy on the shots, so that the test split is not used to choose.

  Args:
    train: the examples that are shots of any seed.
    whole: the training split that contains them. If its features are stored, those of the shots are taken from there.
    examples: positions of the shots in the training split, ascending.
    test: the test split.
    draws: the result of `draw`.
    num_classes: C.
    penalty: the published one.
    sweep: additional penalties.
    limit: number of examples to which the test split was truncated; 0 = not truncated.
  """
  reuses_features = True  # `results.in_order` runs it after the evaluations that store features

  def __init__(self, train: Split, test: Split, *, whole: Split, examples: HostArray, draws: Sequence[Draw],
               num_classes: int, penalty: float, sweep: Sequence[float] = (), limit: int = 0) -> None:
    self._whole = whole
    self._train, self._test, self._examples, self._draws = train, test, examples, draws
    self._num_classes, self._limit = num_classes, limit
    self._penalties = (penalty, *sweep)

  def measure(self, selected: PyTree) -> Result:
    """Returns the accuracies and the number of test examples."""
    (features, label, is_good), spent_s = self._shots(selected)
    placed = self._test.place(self._test.table(selected))
    scores: dict[str, list[float]] = {}
    for shots in self._draws:
      rows = np.searchsorted(self._examples, shots.examples)
      rows = rows[is_good[rows]]
      check_counted(self._train.name, len(rows), len(shots.examples))
      fitted = ridge.fit(features[rows], label[rows], num_classes=self._num_classes, penalties=self._penalties)
      right, total = self._score(fitted, placed)
      self._test.check_counted(total)
      for name, value in self._names(shots.num, right / total, fitted.left_out):
        scores.setdefault(name, []).append(value)
    headline = f'{max(shots.num for shots in self._draws)}shot'
    return Result(named(summed_up(scores), self._limit), total, None, mark(headline, self._limit),
                  spent_s + self._test.spent_s)

  def _names(self, num: int, accuracy: HostArray, left_out: HostArray) -> list[tuple[str, float]]:
    """Returns names and values of one draw; among penalties with equal accuracy on the shots the largest is chosen."""
    values = [(f'{num}shot', float(accuracy[0]))]
    if len(self._penalties) > 1:
      best = max(range(len(self._penalties)), key=lambda i: (left_out[i], self._penalties[i]))
      values += [(f'{num}shot_l2_{p:g}', float(a)) for p, a in zip(self._penalties, accuracy, strict=True)]
      values.append((f'{num}shot_tuned', float(accuracy[best])))
    return values

  def _shots(self, selected: PyTree) -> tuple[tuple[HostArray, HostArray, HostArray], float]:
    """Returns all shots on every host in the order of the source: `[U, D]`, labels `[U]`, and whether each was decoded.

    Also returns the seconds that computing features took, 0 if they were stored.
    """
    if self._train.stored(selected) is None and (table := self._whole.stored(selected)) is not None:
      return self._in_order(self._whole.place_chosen(table, self._examples), self._examples), 0.
    placed = self._train.place(self._train.table(selected))
    return self._in_order(placed, np.arange(len(self._examples))), self._train.spent_s

  def _in_order(self, placed: dict[str, Array], examples: HostArray) -> tuple[HostArray, HostArray, HostArray]:
    """Returns the shots on every host in the order of `examples [U]`, their positions in the split of `placed`."""
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in gather(placed, self._train.mesh).items()}
    good = flat['mask'] > 0
    features = np.zeros((len(examples), flat['features'].shape[1]), np.float32)
    label, is_good = np.zeros(len(examples), np.int32), np.zeros(len(examples), bool)
    shots = np.searchsorted(examples, flat['example'][good])
    features[shots], label[shots], is_good[shots] = flat['features'][good], flat['label'][good], True
    return features, label, is_good

  def _score(self, fitted: ridge.Fit, placed: dict[str, Array]) -> tuple[HostArray, int]:
    """Returns the number of correct predictions of each penalty's classifier, `[l]`, and the number of examples."""
    if jax.process_count() > 1:  # the last bits of a solution may differ between hosts
      fitted = multihost_utils.broadcast_one_to_all(fitted)
    mean, std, weights = (x.astype(np.float32) for x in (fitted.mean, fitted.std, fitted.weights))
    features = linear.standardize(placed['features'], mean, std)
    counts = jax.device_get([linear.count_right(linear.Linear(w[:-1], ridge.BIAS * w[-1]), features, placed['label'],
                                                placed['mask']) for w in weights])
    return np.array([int(right) for right, _, _ in counts]), int(counts[0][2])


def summed_up(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
  """Returns the mean of each number over seeds; for `…shot` also the sample deviation and the value of each seed."""
  metrics: dict[str, float] = {}
  for name, values in scores.items():
    metrics[name] = statistics.fmean(values)
    if name.endswith('shot') and len(values) > 1:
      metrics[f'{name}_std'] = statistics.stdev(values)
      metrics |= {f'{name}_seed{seed}': value for seed, value in enumerate(values)}
  return metrics


def build(resources: Resources, name: str, settings: schema.FewShot) -> Make:
  """Builds the evaluator for each view.

  Unless the features of the training split are stored, only the examples drawn by a seed are read.
  """
  train, test = resources.sources(name)
  draws = draw(read_labels(train), train.class_names, shots=settings.shots, num_seeds=settings.num_seeds,
               name=f'evals.{name}: {train.name}', protocol=settings.protocol)
  examples = np.unique(np.concatenate([shots.examples for shots in draws]))
  shots = take(train, examples, name=f'{train.name}, {len(examples):,} shots')

  def make(view: str) -> Measuring:
    return FewShot(
        *resources.splits(name, settings, shots, test, view),
        whole=resources.split(name, settings, train, view, in_memory=False), examples=examples, draws=draws,
        num_classes=len(train.class_names), penalty=settings.l2, sweep=settings.l2_sweep, limit=settings.limit)
  return make
