"""Top-1, top-5 and NLL over a split, every example counted once; on demand calibration and accuracy by class.

An example with several targets (multi-hot `labels`) is right if the guess is any of them; one without a
target does not count. Sums are added in f32 on the devices for a batch and in float64 over batches, and divided
at the end, so that no metric depends on the batch size.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.core.api import EvalLoader, Prepare
from vit_jax.core.numerics import weighted_mean
from vit_jax.core.types import Array, Batch, Mean, Outputs, PyTree
from vit_jax.parallel import mesh as meshes

Predict = Callable[[PyTree, Array], Outputs]
TOP = 5
METRICS = ('top1', 'top5', 'nll')
NUM_BINS = 15  # Guo et al. 2017, section 4


@dataclasses.dataclass(frozen=True)
class Guesses:
  """Of each example: position in the source, label, most likely classes `[S, k]`, their probabilities."""
  index: np.ndarray
  label: np.ndarray
  top: np.ndarray
  probability: np.ndarray


_GUESSED = tuple(field.name for field in dataclasses.fields(Guesses))


class Result(NamedTuple):
  """Metrics by name (fractions; NLL in nats), how many examples they are over, and the guesses."""
  metrics: dict[str, float]
  num_examples: int
  guesses: Guesses


class TopK:
  """Evaluator of one view on one split. Every process makes one and runs it."""

  def __init__(self, predict: Predict, prepare: Prepare, loader: EvalLoader, *, mesh: Mesh,
               metrics: tuple[str, ...] = ()):
    self._predict, self._prepare, self._loader, self._mesh = predict, prepare, loader, mesh
    self._rows, self._more = meshes.local_rows(mesh), metrics

  def run(self, selected: PyTree, step: int) -> dict[str, float]:
    """`top1`, `top5`, `nll` and the further `metrics` of the view's `selected` parameters."""
    del step
    return self.measure(selected).metrics

  def measure(self, selected: PyTree) -> Result:
    """Metrics, counts and guesses. The mesh of `selected` and that of the batches is the same."""
    totals: dict[str, np.ndarray] = {}
    parts: list[dict[str, np.ndarray]] = []
    for batch in self._loader.batches():
      placed = meshes.put_batch(batch, self._mesh, self._rows)
      sums, rows = jax.device_get(_evaluate(self._predict, self._prepare, self._mesh, self._more, selected, placed))
      for name, one in sums.items():
        totals[name] = totals.get(name, 0.) + np.asarray(one, np.float64)
      kept = rows['mask'] > 0
      parts.append({name: rows[name][kept] for name in _GUESSED})
    weight = totals['top1'][1] if totals else 0
    metrics = {name: float(totals[name][0] / max(totals[name][1], 1e-12)) for name in METRICS}
    metrics |= {name: FURTHER[name].finish(totals[name]) for name in self._more}
    guesses = Guesses(**{name: np.concatenate([part[name] for part in parts]) for name in _GUESSED})
    return Result(metrics, round(weight), guesses)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _evaluate(predict: Predict, prepare: Prepare, mesh: Mesh, more: tuple[str, ...], selected: PyTree,
              batch: Batch) -> tuple[dict[str, Mean | Array], dict[str, Array]]:
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    prepared = prepare(batch, jax.random.key(0), jnp.zeros((), jnp.int32))
    logits_BC = predict(selected, prepared['image']).logits
    assert logits_BC is not None, 'a view without a head predicts no classes'
    counts, rows = count(logits_BC, batch, more)
  whole = meshes.replicated(mesh)
  return counts, {name: jax.lax.with_sharding_constraint(x, whole) for name, x in rows.items()}


def count(logits_BC: Array, batch: Batch,
          more: tuple[str, ...] = ()) -> tuple[dict[str, Mean | Array], dict[str, Array]]:
  """Means of a batch with the sums of further metrics, and its guesses row by row.

  NLL is that of the softmax; with several targets, the mean over them.
  """
  log_p_BC = jax.nn.log_softmax(logits_BC.astype(jnp.float32))
  num_classes = logits_BC.shape[-1]
  if 'labels' in batch:
    target_BC = (batch['labels'] > 0).astype(jnp.float32)
  else:
    target_BC = jax.nn.one_hot(batch['label'], num_classes, dtype=jnp.float32)
  num_targets_B = target_BC.sum(-1)
  mask_B = batch['mask'] * (num_targets_B > 0)
  log_p_top_BK, top_BK = jax.lax.top_k(log_p_BC, min(TOP, num_classes))
  hits_BK = jnp.take_along_axis(target_BC, top_BK, -1)
  nll_B = -(target_BC * log_p_BC).sum(-1) / jnp.maximum(num_targets_B, 1.)
  means: dict[str, Mean | Array] = {
      'top1': weighted_mean(hits_BK[:, 0], mask_B), 'top5': weighted_mean(hits_BK.max(-1), mask_B),
      'nll': weighted_mean(nll_B, mask_B),
      **{name: FURTHER[name].collect(jnp.exp(log_p_top_BK[:, 0]), hits_BK[:, 0], target_BC, mask_B) for name in more}}
  label_B = batch['label'] if 'label' in batch else jnp.argmax(target_BC, -1)
  return means, {'mask': mask_B, 'index': batch['index'], 'label': label_B, 'top': top_BK,
                 'probability': jnp.exp(log_p_top_BK)}


class Further(NamedTuple):
  """A metric that is no plain mean over examples.

  collect: probability of the guess [B], whether it is right [B], targets [B, C] in {0, 1} and mask [B] to sums.
  finish: the sums of all batches, float64, to the value.
  """
  collect: Callable[[Array, Array, Array, Array], Array]
  finish: Callable[[np.ndarray], float]


def _count_bins(p_B: Array, hit_B: Array, target_BC: Array, mask_B: Array) -> Array:
  """`[3, bins]`: examples, sum of probabilities, sum of hits. Bin i of n is (i / n, (i + 1) / n]."""
  del target_BC
  p_B = jnp.where(mask_B > 0, p_B, 1.)
  bin_B = jnp.clip(jnp.ceil(p_B * NUM_BINS).astype(jnp.int32) - 1, 0, NUM_BINS - 1)
  within_BG = jax.nn.one_hot(bin_B, NUM_BINS) * mask_B[:, None]
  return jnp.stack([jnp.ones_like(p_B), p_B, jnp.where(mask_B > 0, hit_B, 0.)]) @ within_BG


def _find_calibration_error(sums: np.ndarray) -> float:
  """Expected calibration error: `sum_bins |sum of hits - sum of probabilities| / examples` (Guo et al. 2017, eq. 3).

  The probability is the softmax's, whatever the loss was.
  """
  return float(np.abs(sums[2] - sums[1]).sum() / max(sums[0].sum(), 1e-12))


def _count_classes(p_B: Array, hit_B: Array, target_BC: Array, mask_B: Array) -> Array:
  """`[2, C]`: examples and hits of each class; an example of several classes counts to each in equal parts."""
  del p_B
  share_BC = target_BC * (mask_B / jnp.maximum(target_BC.sum(-1), 1.))[:, None]
  return jnp.stack([jnp.ones_like(hit_B), jnp.where(mask_B > 0, hit_B, 0.)]) @ share_BC


def _find_class_mean(sums: np.ndarray) -> float:
  """Mean over the classes that occur of the part of their examples that are guessed right (Pets, Flowers)."""
  occurs = sums[0] > 0
  return float((sums[1][occurs] / sums[0][occurs]).mean()) if occurs.any() else 0.


FURTHER = {
    'ece': Further(_count_bins, _find_calibration_error),
    'class_mean': Further(_count_classes, _find_class_mean),
}
"""Metrics that `TopK.metrics` of a config may name."""
