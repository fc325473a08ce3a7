"""Top-1, top-5 and NLL over a split, in which every example counts once; optionally calibration and per-class accuracy.

The prediction for an example with several targets (`label_list`, multi-hot `labels`) is correct if it is any of them;
an example without a target does not count. If only some classes are allowed, the logits of the others are ignored, and
these classes are never correct. Images with several labels also have `map`, `auroc` and `f1` (`targets.py`).
Sums are accumulated in f32 within a batch on the devices and in float64 over batches, and divided at the end, so
metrics do not depend on the batch size.
"""
from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.config import schema
from vit_jax.core.contracts import EvalLoader, Prepare
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import class_targets, weighted_mean
from vit_jax.core.types import Array, Batch, Mean, Outputs, PyTree
from vit_jax.data.labels import classes, real
from vit_jax.data.source import read_labels, title
from vit_jax.evaluate import results, targets
from vit_jax.evaluate.resources import Make, Resources, check_single
from vit_jax.evaluate.results import Guesses, Measuring, Result, mark, named
from vit_jax.parallel import mesh as meshes
from vit_jax.record.progress import TaskProgress

log = logging.getLogger('vit_jax.jobs')

Predict = Callable[[PyTree, Array], Outputs]
Counted = tuple[dict[str, Mean | Array], dict[str, Array]]
"""Sums over a batch, and the predictions for its rows."""
METRICS = ('top1', 'top5', 'nll')
NUM_BINS = 15  # Guo et al. 2017, section 4
_GUESSED = ('index', 'label', 'top', 'probability')
_EXCLUDED = -1e30  # logit of an excluded class: its probability is 0, and 0 times the finite logit is 0


class TopK:
  """Evaluator of one view on one split. Every process creates and runs one.

  Args:
    predict: of the view.
    prepare: of the images.
    loader: of the split.
    mesh: of the parameters, and of the batches.
    metrics: additional metrics of `FURTHER`.
    num_classes: of the labels and of the logits.
    allowed: `[C]` bool, the classes that can be predicted; None = all.
    several: whether each class is a decision of its own, which has the metrics of `targets.py`.
    limit: number of examples to which the split was truncated; 0 = not truncated.
    name: of the evaluation and its data, for messages.
    bar: whether progress may be shown as a bar.
  """

  def __init__(self, predict: Predict, prepare: Prepare, loader: EvalLoader, *, mesh: Mesh, metrics: tuple[str, ...],
               num_classes: int, allowed: np.ndarray | None = None, several: bool = False, limit: int = 0,
               name: str = 'the split', bar: bool = False) -> None:
    results.check_size(name, loader.num_examples)
    self._predict, self._prepare, self._loader, self._mesh = predict, prepare, loader, mesh
    self._rows, self._more = meshes.local_shard(mesh), metrics
    self._allowed = np.ones(num_classes, bool) if allowed is None else allowed
    self._limit, self._name, self._bar = limit, name, bar
    size = targets.num_bytes(loader.num_examples, num_classes)
    self._several = several and size <= targets.MOST_BYTES
    if several and not self._several:
      log.warning('%s: map, auroc and f1 are left out: the scores of %s images and %s classes take %.1f GiB. Set limit '
                  'to measure them on a part.', name, f'{loader.num_examples:,}', f'{num_classes:,}', size / 2**30)

  def measure(self, selected: PyTree) -> Result:
    """Returns metrics, counts and predictions. `selected` and the batches must be on the same mesh.

    Raises:
      UserError: the logits have another number of classes or are not finite, or there is no valid example.
    """
    totals: dict[str, np.ndarray] = {}
    parts: list[dict[str, np.ndarray]] = []
    scores: list[tuple[np.ndarray, np.ndarray]] = []
    self._is_single = True
    done, total = 0, self._loader.num_examples
    with TaskProgress(self._name, total, unit='images', bar=self._bar, active=jax.process_index() == 0) as progress:
      started = results.started_ahead(self._begin(selected, batch) for batch in self._loader.batches())
      for sums, rows in map(jax.device_get, started):
        results.check_finite(self._name, int(sums.pop('broken')), selected)
        for name, values in sums.items():
          totals[name] = totals.get(name, 0.) + np.asarray(values, np.float64)
        if self._several:
          valid = rows['valid'] > 0
          scores.append((rows['score'][valid], rows['target'][valid]))
        kept = rows['mask'] > 0
        parts.append({name: rows[name][kept] for name in _GUESSED})
        done += len(rows['mask'])
        progress.update(done)
    num_counted = round(totals['top1'][1])
    results.check_counted(self._name, num_counted, total)
    metrics = {name: float(totals[name][0] / totals[name][1]) for name in METRICS}
    metrics |= {name: FURTHER[name].finish(totals[name]) for name in self._more}
    if self._several:
      metrics |= targets.measure(*(np.concatenate(columns) for columns in zip(*scores, strict=True)))
    guesses = Guesses(**{name: np.concatenate([part[name] for part in parts]) for name in _GUESSED},
                      is_single=self._is_single)
    return Result(named(metrics, self._limit), num_counted, guesses, mark('top1', self._limit))

  def _begin(self, selected: PyTree, batch: Batch) -> Counted:
    self._is_single = self._is_single and has_one_target(batch)
    placed = meshes.put_batch(batch, self._mesh, self._rows)
    try:
      return _evaluate(self._predict, self._prepare, self._mesh, self._more, self._several, selected, self._allowed,
                       placed)
    except UserError as error:  # raised while tracing, from shapes
      raise UserError(f'{self._name}: {error}') from None


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _evaluate(predict: Predict, prepare: Prepare, mesh: Mesh, more: tuple[str, ...], several: bool, selected: PyTree,
              allowed_C: Array, batch: Batch) -> Counted:
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    prepared = prepare(batch, jax.random.key(0), jnp.zeros((), jnp.int32))
    logits_BC = predict(selected, prepared['image']).logits
    if logits_BC is None:
      raise UserError('expected weights with a head, got a backbone that predicts no classes. Use weights with a head, '
                      'or k-NN, few-shot or probes, which need none.')
    if (predicted := logits_BC.shape[-1]) != (known := len(allowed_C)):
      raise UserError(f'expected weights that predict the {known:,} classes of the data, got a head of {predicted:,}. '
                      'Use weights with a head for these classes, or data whose class names are among theirs.')
    broken_B = ~jnp.isfinite(logits_BC).all(-1) & (batch['mask'] > 0)
    counts, rows = count(jnp.where(allowed_C[None], logits_BC.astype(jnp.float32), _EXCLUDED), batch, more)
    if several:
      rows |= {'valid': batch['mask'], 'score': logits_BC.astype(jnp.float32),
               'target': class_targets(batch, len(allowed_C)) > 0}
  whole = meshes.replicated(mesh)
  return ({**counts, 'broken': broken_B.sum()},
          {name: jax.lax.with_sharding_constraint(x, whole) for name, x in rows.items()})


def count(logits_BC: Array, batch: Batch, more: tuple[str, ...] = ()) -> Counted:
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
  means: dict[str, Mean | Array] = {
      'top1': weighted_mean(hits_BK[:, 0], mask_B), 'top5': weighted_mean(hits_BK.max(-1), mask_B),
      'nll': weighted_mean(nll_B, mask_B),
      **{name: FURTHER[name].collect(jnp.exp(log_p_top_BK[:, 0]), hits_BK[:, 0], target_BC, mask_B) for name in more}}
  label_B = batch['label'] if 'label' in batch else jnp.argmax(target_BC, -1)
  if 'label_list' in batch or 'labels' in batch:  # the predicted class if it is a target: the row counts as correct
    label_B = jnp.where(hits_BK[:, 0] > 0, top_BK[:, 0], label_B)
  return means, {'mask': mask_B, 'index': batch['index'], 'label': label_B, 'top': top_BK,
                 'probability': jnp.exp(log_p_top_BK)}


def has_one_target(batch: Batch) -> bool:
  """Returns whether no example of a batch on the host has several targets."""
  several = [np.sum(batch['label_list'] >= 0, -1)] if 'label_list' in batch else []
  several += [np.sum(batch['labels'] > 0, -1)] if 'labels' in batch else []
  return all(int(counts.max(initial=0)) <= 1 for counts in several)


class Further(NamedTuple):
  """A metric that is not a plain mean over examples.

  collect: maps probability of the prediction [B], its correctness [B], targets [B, C] in {0, 1} and mask [B] to sums.
  finish: maps the sums of all batches, float64, to the value.
  """
  collect: Callable[[Array, Array, Array, Array], Array]
  finish: Callable[[np.ndarray], float]


def _count_bins(p_B: Array, hit_B: Array, target_BC: Array, mask_B: Array) -> Array:
  """Returns `[3, bins]`: examples, sum of probabilities, correct predictions. Bin i of n is (i / n, (i + 1) / n]."""
  del target_BC
  p_B = jnp.where(mask_B > 0, p_B, 1.)
  bin_B = jnp.clip(jnp.ceil(p_B * NUM_BINS).astype(jnp.int32) - 1, 0, NUM_BINS - 1)
  within_BG = jax.nn.one_hot(bin_B, NUM_BINS) * mask_B[:, None]
  return jnp.stack([jnp.ones_like(p_B), p_B, jnp.where(mask_B > 0, hit_B, 0.)]) @ within_BG


def _find_calibration_error(sums: np.ndarray) -> float:
  """Returns the expected calibration error (Guo et al. 2017, eq. 3).

  It is `sum_bins |correct predictions - sum of probabilities| / examples`, with softmax probabilities for any loss.
  """
  return float(np.abs(sums[2] - sums[1]).sum() / max(sums[0].sum(), 1e-12))


def _count_classes(p_B: Array, hit_B: Array, target_BC: Array, mask_B: Array) -> Array:
  """Returns `[2, C]`: examples and correct predictions by class; several classes of an example get equal shares."""
  del p_B
  share_BC = target_BC * (mask_B / jnp.maximum(target_BC.sum(-1), 1.))[:, None]
  return jnp.stack([jnp.ones_like(hit_B), jnp.where(mask_B > 0, hit_B, 0.)]) @ share_BC


def _find_class_mean(sums: np.ndarray) -> float:
  """Returns the mean per-class accuracy over the classes that occur (Pets, Flowers)."""
  occurs = sums[0] > 0
  return float((sums[1][occurs] / sums[0][occurs]).mean()) if occurs.any() else 0.


FURTHER = {
    'ece': Further(_count_bins, _find_calibration_error),
    'class_mean': Further(_count_classes, _find_class_mean),
}
"""Metrics that `TopK.metrics` of a config may name."""


def build(resources: Resources, name: str, settings: schema.TopK) -> Make:
  """Builds the evaluator for each view; the classes of its source may have other names than the network's."""
  source = resources.eval_source(name)
  network, where = resources.class_names, f'evals.{name}'
  by_class = classes.map_classes(source.class_names, network, path=settings.classes, where=where)
  inner = resources.loader(source, resources.batch_size(name, settings), in_memory=True)
  by_example: real.Labels | None = None
  if isinstance(settings, schema.Real):
    by_example = real.of_source(source, settings.labels)
    counts = real.count(by_example)
    log.info('%s: %s images have %s ReaL labels, %s have none and do not count.', where, f'{counts.num_scored:,}',
             f'{counts.num_labels:,}', f'{counts.num_empty:,}')
  is_same = by_class == tuple((i,) for i in range(len(network))) and by_example is None
  loader = inner if is_same else targets.Retargeted(
      inner, by_class=by_class, num_classes=len(network), by_example=by_example)
  if settings.only_present:
    check_single(f'{where}.only_present', source)
  is_each = by_example is None and all(len(meant) == 1 for meant in by_class)  # none means several
  several = is_each and source.most_labels not in (0, 1)
  allowed = targets.present(by_class, read_labels(source), len(network)) if settings.only_present else None
  if (len(network) if allowed is None else int(allowed.sum())) < 2:
    raise UserError(f'{where}: expected guesses among at least two classes, got one, by which each image is right. '
                    'Leave this evaluation out with --config.evals=…, or set only_present=false.')

  def make(view: str) -> Measuring:
    return TopK(
        resources.views[view].predict, resources.prepare, loader, mesh=resources.mesh, metrics=settings.metrics,
        num_classes=len(network), allowed=allowed, several=several, limit=settings.limit,
        name=f'{where} ({title(source)}, {view})', bar=resources.bar)
  return make
