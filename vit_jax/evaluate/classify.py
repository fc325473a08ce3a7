"""Top-1, top-5 and NLL over a split, in which every example counts once; optionally calibration and per-class accuracy.

The prediction for an example with several targets (`label_list`, multi-hot `labels`) is correct if it is any of them;
an example without a target does not count. If only some classes are allowed, the logits of the others are ignored, and
these classes are never correct. Sums are accumulated in f32 within a batch on the devices and in float64 over batches,
and divided at the end, so metrics do not depend on the batch size.

Images with several labels also have three metrics in which each class is a decision of its own, as in training with
`objective.loss=sigmoid` or `bce`. Each is a mean over classes (macro). With the logit z_c of an image, in the order of
decreasing z_c and with equal logits at once:

  map    the mean over classes of `sum_n (R_n - R_(n-1)) P_n`, precision P and recall R after the n-th logit
  auroc  the mean over classes of the share of pairs of an image with the class and one without, of which the first has
         the larger logit; a pair of equal logits counts half
  f1     the mean over classes of `2 TP / (2 TP + FP + FN)`, where a class is predicted if its probability
         `sigmoid(z_c)` is above 0.5, so if z_c is above 0

They are those of scikit-learn with `average='macro'`: `average_precision_score` and `roc_auc_score` of the classes that
have an image with and one without (auroc), and `f1_score(zero_division=nan)`. Without an image, a class has no average
precision and no AUROC, and no F1 either if it is not predicted: such classes are left out of the mean. All images that
can be decoded count, those without a label as well.
"""
from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.config import schema
from vit_jax.core.contracts import EvalLoader, Prepare
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import class_targets, weighted_mean
from vit_jax.core.types import Array, Batch, HostArray, Mean, Outputs, PyTree
from vit_jax.data.labels import classes, real
from vit_jax.data.source import read_labels, title
from vit_jax.evaluate import results
from vit_jax.evaluate.problems import check_counted, check_finite, check_single, check_size
from vit_jax.evaluate.resources import Make, Resources
from vit_jax.evaluate.results import Guesses, Measuring, Result
from vit_jax.parallel import mesh as meshes
from vit_jax.record.progress import TaskProgress

log = logging.getLogger('vit_jax.jobs')

Predict = Callable[[PyTree, Array], Outputs]
Counted = tuple[dict[str, Mean | Array], dict[str, Array]]
"""Sums over a batch by metric, and the predictions for its rows by field, such as `top [B, k]`."""
Lists = Sequence[Sequence[int]]
"""A list of correct classes for each class of a source, or for each example."""
METRICS = ('top1', 'top5', 'nll')
MAX_SCORE_BYTES = 2**31
"""The most memory on a host for the scores of a split; they are needed all at once, to be sorted."""
NUM_BINS = 15  # Guo et al. 2017, section 4
_GUESSED = ('index', 'label', 'top', 'probability')
_EXCLUDED = -1e30  # logit of an excluded class: its probability is 0, and 0 times the finite logit is 0


@dataclasses.dataclass(frozen=True)
class TopK:
  """Evaluator of one view on one split. Every process creates and runs one.

  predict: of the view.
  prepare: of the images.
  loader: of the split.
  mesh: of the parameters, and of the batches.
  metrics: additional ones, of `MORE_METRICS`.
  num_classes: of the labels and of the logits.
  allowed: `[C]` bool, the classes that can be predicted; None = all.
  several: whether each class is a decision of its own, which has the metrics of `measure_classes`.
  name: of the evaluation and its data, for messages.
  bar: whether progress may be shown as a bar.
  """
  predict: Predict
  prepare: Prepare
  loader: EvalLoader
  mesh: Mesh
  metrics: tuple[str, ...]
  num_classes: int
  allowed: np.ndarray | None = None
  several: bool = False
  name: str = 'the split'
  bar: bool = False

  def __post_init__(self) -> None:
    check_size(self.name, self.loader.num_examples)
    if self.several and not self._keeps_scores:
      log.warning('%s: map, auroc and f1 are left out: the scores of %s images and %s classes take %.1f GiB. Set limit '
                  'to measure them on a part.', self.name, f'{self.loader.num_examples:,}', f'{self.num_classes:,}',
                  self._score_bytes / 2**30)

  @property
  def _score_bytes(self) -> int:
    """The memory for the scores, f32, and the targets, bool, of all examples."""
    return self.loader.num_examples * self.num_classes * 5

  @property
  def _keeps_scores(self) -> bool:
    """Whether all scores are kept, for `measure_classes`."""
    return self.several and self._score_bytes <= MAX_SCORE_BYTES

  def measure(self, selected: PyTree) -> Result:
    """Returns metrics, counts and predictions. `selected` and the batches must be on the same mesh.

    Raises UserError if the logits have another number of classes or are not finite, or there is no valid example.
    """
    totals: dict[str, np.ndarray] = {}
    guesses: list[dict[str, np.ndarray]] = []
    scores: list[tuple[np.ndarray, np.ndarray]] = []
    is_single = True
    num_done, num_examples = 0, self.loader.num_examples
    with TaskProgress(self.name, num_examples, unit='images', bar=self.bar, active=not jax.process_index()) as progress:
      counted = results.started_ahead((self._count(selected, batch), has_one_target(batch))
                                      for batch in self.loader.batches())
      for on_devices, batch_is_single in counted:
        sums, rows = jax.device_get(on_devices)
        is_single = is_single and batch_is_single
        check_finite(self.name, int(sums.pop('broken')), selected)
        for name, values in sums.items():
          totals[name] = totals.get(name, 0.) + np.asarray(values, np.float64)
        if self._keeps_scores:
          is_decoded = rows['valid'] > 0
          scores.append((rows['score'][is_decoded], rows['target'][is_decoded]))
        is_counted = rows['mask'] > 0
        guesses.append({name: rows[name][is_counted] for name in _GUESSED})
        num_done += len(rows['mask'])
        progress.update(num_done)
    num_counted = round(totals['top1'][1])
    check_counted(self.name, num_counted, num_examples)
    metrics = {name: float(totals[name][0] / totals[name][1]) for name in METRICS}
    metrics |= {name: MORE_METRICS[name](totals[name]) for name in self.metrics}
    if self._keeps_scores:
      metrics |= measure_classes(*(np.concatenate(columns) for columns in zip(*scores, strict=True)))
    columns = {name: np.concatenate([part[name] for part in guesses]) for name in _GUESSED}
    return Result(metrics, num_counted, Guesses(**columns, is_single=is_single), 'top1')

  def _count(self, selected: PyTree, batch: Batch) -> Counted:
    placed = meshes.put_batch(batch, self.mesh, meshes.local_shard(self.mesh))
    allowed_C = np.ones(self.num_classes, bool) if self.allowed is None else self.allowed
    try:
      return _evaluate(self.predict, self.prepare, self.mesh, self.metrics, self._keeps_scores, selected, allowed_C,
                       placed)
    except UserError as error:  # raised while tracing, from shapes
      raise UserError(f'{self.name}: {error}') from None


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _evaluate(predict: Predict, prepare: Prepare, mesh: Mesh, metrics: tuple[str, ...], keeps_scores: bool,
              selected: PyTree, allowed_C: Array, batch: Batch) -> Counted:
  """Returns the sums and rows of `count` for a batch, with the number of broken rows, and the scores if kept."""
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    prepared = prepare(batch, jax.random.key(0), jnp.zeros((), jnp.int32))
    logits_BC = predict(selected, prepared['image']).logits
    if logits_BC is None:
      raise UserError('expected weights with a head, got a backbone that predicts no classes. Use weights with a head, '
                      'or k-NN, few-shot or probes, which need none.')
    num_logits, num_classes = logits_BC.shape[-1], len(allowed_C)
    if num_logits != num_classes:
      raise UserError(f'expected weights that predict the {num_classes:,} classes of the data, got a head of '
                      f'{num_logits:,}. Use weights with a head for these classes, or data whose class names are among '
                      'theirs.')
    broken_B = ~jnp.isfinite(logits_BC).all(-1) & (batch['mask'] > 0)
    sums, rows = count(jnp.where(allowed_C[None], logits_BC.astype(jnp.float32), _EXCLUDED), batch, metrics)
    if keeps_scores:
      rows |= {'valid': batch['mask'], 'score': logits_BC.astype(jnp.float32),
               'target': class_targets(batch, num_classes) > 0}
  replicated = meshes.replicated(mesh)
  return ({**sums, 'broken': broken_B.sum()},
          {name: jax.lax.with_sharding_constraint(x, replicated) for name, x in rows.items()})


def count(logits_BC: Array, batch: Batch, metrics: tuple[str, ...] = ()) -> Counted:
  """Returns means of a batch with the sums of additional metrics, and the predictions for each row.

  NLL is that of the softmax, averaged over the targets of an example with several.
  """
  log_p_BC = jax.nn.log_softmax(logits_BC.astype(jnp.float32))
  num_classes = logits_BC.shape[-1]
  target_BC = (class_targets(batch, num_classes) > 0).astype(jnp.float32)
  num_targets_B = target_BC.sum(-1)
  mask_B = batch['mask'] * (num_targets_B > 0)
  log_p_top_BK, top_BK = jax.lax.top_k(log_p_BC, min(results.TOP, num_classes))
  hits_BK = jnp.where(log_p_top_BK > _EXCLUDED / 2, jnp.take_along_axis(target_BC, top_BK, -1), 0.)
  nll_B = -(target_BC * log_p_BC).sum(-1) / jnp.maximum(num_targets_B, 1.)
  sums: dict[str, Mean | Array] = {
      'top1': weighted_mean(hits_BK[:, 0], mask_B),
      'top5': weighted_mean(hits_BK.max(-1), mask_B),
      'nll': weighted_mean(nll_B, mask_B)}
  if 'ece' in metrics:
    sums['ece'] = _count_bins(jnp.exp(log_p_top_BK[:, 0]), hits_BK[:, 0], mask_B)
  if 'class_mean' in metrics:
    sums['class_mean'] = _count_classes(hits_BK[:, 0], target_BC, mask_B)
  label_B = batch['label'] if 'label' in batch else jnp.argmax(target_BC, -1)
  if 'label_list' in batch or 'labels' in batch:  # the predicted class if it is a target: the row counts as correct
    label_B = jnp.where(hits_BK[:, 0] > 0, top_BK[:, 0], label_B)
  return sums, {'mask': mask_B, 'index': batch['index'], 'label': label_B, 'top': top_BK,
                'probability': jnp.exp(log_p_top_BK)}


def has_one_target(batch: Batch) -> bool:
  """Returns whether no example of a batch on the host has several targets."""
  num_targets = []  # `[B]` each
  if 'label_list' in batch:
    num_targets.append(np.sum(batch['label_list'] >= 0, -1))
  if 'labels' in batch:
    num_targets.append(np.sum(batch['labels'] > 0, -1))
  return all(int(counts.max(initial=0)) <= 1 for counts in num_targets)


def _count_bins(p_B: Array, hit_B: Array, mask_B: Array) -> Array:
  """Returns `[3, bins]`: examples, sum of probabilities, correct predictions. Bin i of n is (i / n, (i + 1) / n]."""
  p_B = jnp.where(mask_B > 0, p_B, 1.)
  bin_B = jnp.clip(jnp.ceil(p_B * NUM_BINS).astype(jnp.int32) - 1, 0, NUM_BINS - 1)
  within_BG = jax.nn.one_hot(bin_B, NUM_BINS) * mask_B[:, None]
  return jnp.stack([jnp.ones_like(p_B), p_B, jnp.where(mask_B > 0, hit_B, 0.)]) @ within_BG


def _find_calibration_error(sums: np.ndarray) -> float:
  """Returns the expected calibration error (Guo et al. 2017, eq. 3) from the sums of `_count_bins`.

  It is `sum_bins |correct predictions - sum of probabilities| / examples`, with softmax probabilities for any loss.
  """
  return float(np.abs(sums[2] - sums[1]).sum() / max(sums[0].sum(), 1e-12))


def _count_classes(hit_B: Array, target_BC: Array, mask_B: Array) -> Array:
  """Returns `[2, C]`: examples and correct predictions by class; several classes of an example get equal shares."""
  share_BC = target_BC * (mask_B / jnp.maximum(target_BC.sum(-1), 1.))[:, None]
  return jnp.stack([jnp.ones_like(hit_B), jnp.where(mask_B > 0, hit_B, 0.)]) @ share_BC


def _find_class_mean(sums: np.ndarray) -> float:
  """Returns the mean per-class accuracy over the classes that occur (Pets, Flowers), from `_count_classes`."""
  occurs = sums[0] > 0
  return float((sums[1][occurs] / sums[0][occurs]).mean()) if occurs.any() else 0.


MORE_METRICS: dict[str, Callable[[np.ndarray], float]] = {
    'ece': _find_calibration_error, 'class_mean': _find_class_mean}
"""Metrics that `TopK.metrics` of a config may name, each with the function from its sums over all batches, float64."""


class Retargeted:
  """An `EvalLoader` whose batches have `labels [B, C]`, 1 for each correct class, instead of the source's targets.

  An example with an empty list of correct classes does not count.

  Args:
    inner: the loader.
    by_class: the correct classes of the network for each class of the source.
    by_example: the correct classes for each example, instead of `by_class`; None = use `by_class`.
    num_classes: C.
  """

  def __init__(self, inner: EvalLoader, *, by_class: Lists, num_classes: int, by_example: Lists | None = None) -> None:
    assert by_example is None or len(by_example) == inner.num_examples
    self.num_examples = inner.num_examples
    self._inner, self._by_example, self._num_classes = inner, by_example, num_classes
    self._by_class = by_class
    self._first = np.array([meant[0] if meant else 0 for meant in by_class], np.int32)

  @property
  def num_bad(self) -> int:
    """Number of images that could not be decoded so far."""
    return self._inner.num_bad

  def batches(self) -> Iterator[Batch]:
    """Yields the batches of the inner loader; `label` is the (first) class of the network for the example."""
    for batch in self._inner.batches():
      if self._by_example is not None:
        classes_by_key, keys = self._by_example, batch['index'][:, None]
      elif 'label_list' in batch:
        classes_by_key, keys = self._by_class, batch['label_list']  # padded with -1
      else:
        classes_by_key, keys = self._by_class, batch['label'][:, None]
      labels = np.zeros((len(keys), self._num_classes), np.float32)
      for row, keys_of_row in enumerate(keys.tolist()):
        for key in keys_of_row:
          if key >= 0:
            labels[row, list(classes_by_key[key])] = 1.
      others = {name: x for name, x in batch.items() if name != 'label_list'}
      yield {**others, 'label': self._first[batch['label']], 'labels': labels}

  def describe(self, index: int) -> str:
    """Returns a name by which a user can find the example."""
    return self._inner.describe(index)

  def close(self) -> None:
    """Stops workers and frees their resources."""
    self._inner.close()


def present(by_class: Lists, label: np.ndarray, num_classes: int) -> np.ndarray:
  """Returns which classes of the network occur for the examples with these labels, `[C]` bool."""
  return np.isin(np.arange(num_classes), [c for source in np.unique(label).tolist() for c in by_class[source]])


def measure_classes(score_SC: HostArray, target_SC: HostArray) -> dict[str, float]:
  """Returns `map`, `auroc` and `f1` of logits `[S, C]` f32 and targets `[S, C]` bool, those that a class has."""
  by_metric = np.array([_measure_class(*columns) for columns in zip(score_SC.T, target_SC.T, strict=True)]).T
  return {name: float(np.nanmean(values)) for name, values in zip(('map', 'auroc', 'f1'), by_metric, strict=True)
          if not np.isnan(values).all()}


def _measure_class(score_S: HostArray, target_S: HostArray) -> tuple[float, float, float]:
  """Returns average precision, area under the ROC curve and F1 of a class; nan where it has none."""
  order = np.argsort(-score_S, kind='stable')
  score_S, target_S = score_S[order], target_S[order]
  last_of_equal = np.append(np.flatnonzero(np.diff(score_S)), len(score_S) - 1)
  # Images with and without the class up to each score.
  num_with = np.cumsum(target_S, dtype=np.float64)[last_of_equal]
  num_without = last_of_equal + 1 - num_with
  all_with, all_without = num_with[-1], num_without[-1]
  average_precision = area = f1 = np.nan
  if all_with:
    precision_of_new = np.diff(num_with, prepend=0.) * num_with / (num_with + num_without)
    average_precision = float(precision_of_new.sum() / all_with)
  if all_with and all_without:
    num_before = (num_with + np.append(0., num_with[:-1])) / 2  # equal scores count half
    area = float((np.diff(num_without, prepend=0.) * num_before).sum() / (all_with * all_without))
  is_predicted = score_S > 0
  if is_predicted.sum() + all_with:
    f1 = 2 * int(target_S[is_predicted].sum()) / (int(is_predicted.sum()) + all_with)
  return average_precision, area, f1


def build(resources: Resources, name: str, settings: schema.TopK) -> Make:
  """Builds the evaluator for each view; the classes of its source may have other names than the network's."""
  source = resources.eval_source(name)
  class_names, where = resources.class_names, f'evals.{name}'
  by_class = classes.map_classes(source.class_names, class_names, path=settings.classes, where=where)
  loader: EvalLoader = resources.loader(source, resources.batch_size(name, settings), in_memory=True)
  by_example: real.Labels | None = None
  if isinstance(settings, schema.Real):
    by_example = real.of_source(source, settings.labels)
    counts = real.count(by_example)
    log.info('%s: %s images have %s ReaL labels, %s have none and do not count.', where, f'{counts.num_scored:,}',
             f'{counts.num_labels:,}', f'{counts.num_empty:,}')
  has_same_classes = by_class == tuple((i,) for i in range(len(class_names)))
  if by_example is not None or not has_same_classes:
    loader = Retargeted(loader, by_class=by_class, num_classes=len(class_names), by_example=by_example)
  if settings.only_present:
    check_single(f'{where}.only_present', source)
  has_one_meaning = by_example is None and all(len(meant) == 1 for meant in by_class)
  several = has_one_meaning and source.most_labels not in (0, 1)
  allowed = present(by_class, read_labels(source), len(class_names)) if settings.only_present else None
  num_allowed = len(class_names) if allowed is None else int(allowed.sum())
  if num_allowed < 2:
    raise UserError(f'{where}: expected guesses among at least two classes, got one, by which each image is right. '
                    'Leave this evaluation out with --config.evals=…, or set only_present=false.')

  def make(view: str) -> Measuring:
    return TopK(
        resources.views[view].predict, resources.prepare, loader, mesh=resources.mesh, metrics=settings.metrics,
        num_classes=len(class_names), allowed=allowed, several=several, name=f'{where} ({title(source)}, {view})',
        bar=resources.bar)
  return make
