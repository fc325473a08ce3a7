"""Weighted k-nearest-neighbor classification as in DINO (Caron et al. 2021, section 3; after Wu et al. 2018).

The k training examples whose features have the largest cosine similarity s_i to a test example vote for their classes
with weight exp(s_i / T). Among equal similarities, the first example in the order of the training split is chosen. A
class without a neighbor has no vote and is never correct, so top-5 has as many answers as the neighbors have classes.

Differs from DINO's program: its top-5 fills the places that no neighbor voted for with the classes of the lowest
numbers, and top-1 to top-k if k is less than 5.

The test split is distributed over the devices with the best `max(k)` neighbors so far; the training split is processed
in blocks that are replicated on all devices. So no host or device ever holds the complete training split.
"""
from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.types import Array, PyTree
from vit_jax.evaluate.features import Split
from vit_jax.evaluate.linear import cut
from vit_jax.evaluate.resources import Make, Resources
from vit_jax.evaluate.results import TOP, Measuring, Result, mark, named
from vit_jax.parallel import mesh as meshes
from vit_jax.record.progress import TaskProgress

log = logging.getLogger('vit_jax.evaluate')

BLOCK = 8192       # training examples at a time
TEST_ROWS = 1024   # test examples of a part at a time: similarities take 32 MiB a device


class Knn:
  """Evaluator of one view: `top1_k20` and `top5_k20` for each k.

  Args:
    train: split whose examples vote.
    test: split to classify.
    num_classes: C.
    neighbors: values of k; a value above the number of training examples means all of them.
    temperature: T.
    headline: the k of the headline metric.
    limit: number of examples to which the splits were truncated; 0 = not truncated.
  """

  def __init__(self, train: Split, test: Split, *, num_classes: int, neighbors: Sequence[int], temperature: float,
               headline: int, limit: int = 0) -> None:
    self._train, self._test, self._num_classes = train, test, num_classes
    self._ks, self._temperature, self._limit = tuple(neighbors), temperature, limit
    self._headline = headline

  def measure(self, selected: PyTree) -> Result:
    """Returns the accuracies and the number of test examples."""
    test = self._test.place(self._test.table(selected))
    similarity, label = nearest(self._train, selected, test['features'], max(self._ks))
    right, total = jax.device_get(_count_right(
        similarity, label, test['label'], test['mask'], self._ks, self._num_classes, self._temperature))
    self._test.check_counted(int(total))
    metrics = {f'{name}_k{k}': float(right[i, j]) / int(total) for i, k in enumerate(self._ks)
               for j, name in enumerate(('top1', 'top5'))}
    return Result(named(metrics, self._limit), int(total), None, mark(f'top1_k{self._headline}', self._limit),
                  self._train.spent_s + self._test.spent_s)


def nearest(split: Split, selected: PyTree, features: Array, k: int, *, what: str = 'label') -> tuple[Array, Array]:
  """Returns similarity and `label` or `example` of the k nearest examples of a split: `[G, R, k]` each, best first.

  Missing neighbors of `features [G, R, D]` have similarity -inf.
  """
  table, layout = split.table(selected), split.layout
  stride = min(max(1, BLOCK // layout.batch_size) * layout.size, layout.num_rows)
  starts = range(0, layout.num_rows, stride)

  def blocks(progress: TaskProgress) -> Iterator[tuple[Array, Array, Array]]:
    for number, start in enumerate(starts):
      block = split.place(table, start, start + stride)
      yield block['features'], block[what], block['mask']
      progress.update(number + 1)

  with split.count('blocks', len(starts)) as progress:
    return search(features, blocks(progress), k, mesh=split.mesh, size=layout.size)


def search(features: Array, blocks: Iterable[tuple[Array, Array, Array]], k: int, *, mesh: jax.sharding.Mesh,
           size: int) -> tuple[Array, Array]:
  """Returns similarity and label of the k best neighbors of `features [G, R, D]`: `[G, R, k]` each, best first.

  Args:
    features: split over the mesh by G.
    blocks: of the training examples: features `[G', r, D]`, label and mask `[G', r]`, in the order of the examples.
    k: missing neighbors have similarity -inf.
    mesh: of the features.
    size: number of consecutive rows of a part that are of one batch.
  """
  best = _begin(features, k)
  features = _normalize(features)
  for block in blocks:
    best = _visit(best, features, *block, mesh, size)
  return best


@functools.partial(jax.jit, static_argnums=1)
def _begin(features: Array, k: int) -> tuple[Array, Array]:
  shape = (*features.shape[:2], k)
  return jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32)


@jax.jit
def _normalize(x: Array) -> Array:
  return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@functools.partial(jax.jit, static_argnums=(5, 6), donate_argnums=0)
def _visit(best: tuple[Array, Array], features_GRD: Array, block_GrD: Array, label_Gr: Array, mask_Gr: Array,
           mesh: jax.sharding.Mesh, size: int) -> tuple[Array, Array]:
  """Merges the best neighbors so far with those of a block; `size` consecutive rows of a part are of one batch."""
  whole = meshes.replicated(mesh)

  def in_order(x: Array) -> Array:
    """Returns `[G, n * size, …]` in the order of the source, replicated."""
    x = jax.lax.with_sharding_constraint(x, whole)
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)
    return x.reshape(-1, *x.shape[3:])

  block_SD, label_S, mask_S = _normalize(in_order(block_GrD)), in_order(label_Gr), in_order(mask_Gr)

  def look(rows: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    similarity_GrK, label_GrK, x_GrD = rows
    new_GrS = jnp.einsum('grd,sd->grs', x_GrD, block_SD, precision=jax.lax.Precision.HIGHEST)
    new_GrS = jnp.where(mask_S[None, None] > 0, new_GrS, -jnp.inf)
    labels = jnp.concatenate([label_GrK, jnp.broadcast_to(label_S[None, None], new_GrS.shape)], -1)
    values, where = jax.lax.top_k(jnp.concatenate([similarity_GrK, new_GrS], -1), similarity_GrK.shape[-1])
    return values, jnp.take_along_axis(labels, where, -1)

  values, labels = _by_rows(look, (*best, features_GRD))
  return values, labels


def _by_rows(function: Callable[..., tuple[Array, ...]], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
  """Applies a function to `TEST_ROWS` rows of each part at a time: `[G, R, …]`."""
  num_rows = arrays[0].shape[1]
  done = jax.lax.map(function, cut(arrays, rows=TEST_ROWS))
  return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :num_rows], done)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _count_right(similarity: Array, label: Array, true: Array, mask: Array, ks: tuple[int, ...], num_classes: int,
                 temperature: float) -> tuple[Array, Array]:
  """Returns the number of correct predictions, `[k, 2]` i32 for top-1 and top-5, and the number of valid examples."""
  def look(rows: tuple[Array, ...]) -> tuple[Array]:
    similarity_GrK, label_GrK, true_Gr = rows
    hits = []
    for k in ks:
      votes_GrC = log_votes(similarity_GrK[..., :k], label_GrK[..., :k], num_classes, temperature)
      votes_GrT, top_GrT = jax.lax.top_k(votes_GrC, min(TOP, num_classes))
      hit_GrT = (top_GrT == true_Gr[..., None]) & jnp.isfinite(votes_GrT)
      hits.append(jnp.stack([hit_GrT[..., 0], hit_GrT.any(-1)], -1))
    return (jnp.stack(hits, -2),)

  (hits_GRk2,) = _by_rows(look, (similarity, label, true))
  counts = mask > 0
  return (hits_GRk2 & counts[..., None, None]).sum((0, 1)), counts.sum()


def log_votes(similarity: Array, label: Array, num_classes: int, temperature: float) -> Array:
  """Returns the logarithms of the votes for classes `[G, r, C]` of neighbors `[G, r, k]`; -inf without a neighbor.

  A vote is `sum_i exp(s_i / T) [label_i = c]`. The largest term of each class is factored out, so that no temperature
  makes a vote overflow, or vanish beside those of other classes.
  """
  s_GrK = similarity / temperature
  num_parts, num_rows, _ = s_GrK.shape
  g, r = jnp.meshgrid(jnp.arange(num_parts), jnp.arange(num_rows), indexing='ij')
  of_class = (g[..., None], r[..., None], label)
  largest_GrC = jnp.full((num_parts, num_rows, num_classes), -jnp.inf).at[of_class].max(s_GrK)
  weight_GrK = jnp.exp(jnp.where(jnp.isfinite(s_GrK), s_GrK - largest_GrC[of_class], -jnp.inf))
  return largest_GrC + jnp.log(jnp.zeros_like(largest_GrC).at[of_class].add(weight_GrK))


def build(resources: Resources, name: str, settings: schema.Knn) -> Make:
  """Builds the evaluator for each view."""
  train, test = resources.sources(name)
  if (most := max(settings.neighbors)) > len(train):
    log.warning('evals.%s: %s has %s examples, fewer than k=%s: all of them are neighbors then. Set '
                'evals.%s.neighbors, or evals.%s.train_split to more images.', name, train.name, f'{len(train):,}',
                most, name, name)

  def make(view: str) -> Measuring:
    return Knn(
        *resources.splits(name, settings, train, test, view),
        num_classes=len(train.class_names), neighbors=settings.neighbors, temperature=settings.temperature,
        headline=settings.headline, limit=settings.limit)
  return make
