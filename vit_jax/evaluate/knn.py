"""Nearest neighbors by the cosine of features: weighted k-NN classification, and retrieval.

Classification is that of DINO (Caron et al. 2021, section 3; after Wu et al. 2018). The k training examples whose
features have the largest cosine similarity s_i to a test example vote for their classes with weight exp(s_i / T). A
class without a neighbor has no vote and is never correct, so top-5 has as many answers as the neighbors have classes.

Differs from DINO's program: its top-5 fills the places that no neighbor voted for with the classes of the lowest
numbers, and top-1 to top-k if k is less than 5.

Retrieval measures recall@K, the share of queries with an image of their class among the K nearest. It has two
protocols, which are part of the names of the metrics:

  loo      leave-one-out: each image of the test split is a query, and all others of this split are the gallery (as on
           CUB-200 and Stanford Online Products, arXiv 1511.06452, section 5).
  gallery  each image of the test split is a query, and the training split is the gallery.

A query whose class has no other image in the gallery counts as a miss.

Features are those that the head sees, with norm 1. Among equal similarities, the first example in the order of the
searched split is nearer. The test split is distributed over the devices with the best neighbors so far; the searched
split is processed in blocks that are replicated on all devices. So no host or device ever holds the complete searched
split. A split has G parts of R rows (`features.Layout`).
"""
from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.types import Array, PyTree
from vit_jax.data import opening
from vit_jax.evaluate.features import Split
from vit_jax.evaluate.linear import cut
from vit_jax.evaluate.problems import check_single
from vit_jax.evaluate.resources import Make, Resources
from vit_jax.evaluate.results import TOP, Measuring, Result
from vit_jax.parallel import mesh as meshes
from vit_jax.record.progress import TaskProgress

log = logging.getLogger('vit_jax.evaluate')

BLOCK = 8192       # examples of the searched split at a time
TEST_ROWS = 1024   # test examples of a part at a time: similarities take 32 MiB a device
RANKS = (1, 5, 10)
"""Values of K in recall@K; the first one is the headline."""


class Neighbors(NamedTuple):
  """The k nearest examples of each row of a split, best first: `[G, R, k]`.

  similarity: cosines; -inf for missing neighbors.    label: classes of the neighbors, or their positions in the source.
  """
  similarity: Array
  label: Array


@dataclasses.dataclass(frozen=True)
class Knn:
  """Evaluator of one view: `top1_k20` and `top5_k20` for each k.

  train: split whose examples vote.
  test: split to classify.
  num_classes: C.
  neighbors: values of k; a value above the number of training examples means all of them.
  temperature: T.
  headline: the k of the headline metric.
  """
  train: Split
  test: Split
  num_classes: int
  neighbors: Sequence[int]
  temperature: float
  headline: int

  def measure(self, selected: PyTree) -> Result:
    """Returns the accuracies and the number of test examples."""
    test = self.test.place(self.test.table(selected))
    found = nearest(self.train, selected, test['features'], max(self.neighbors))
    right, total = jax.device_get(_count_right(
        found, test['label'], test['mask'], tuple(self.neighbors), self.num_classes, self.temperature))
    self.test.check_counted(int(total))
    metrics = {}
    for (right_top1, right_top5), k in zip(right.tolist(), self.neighbors, strict=True):
      metrics[f'top1_k{k}'] = right_top1 / int(total)
      metrics[f'top5_k{k}'] = right_top5 / int(total)
    return Result(metrics, int(total), None, f'top1_k{self.headline}', self.train.spent_s + self.test.spent_s)


@dataclasses.dataclass(frozen=True)
class Retrieval:
  """Evaluator of one view: `recall1_loo` and so on for each K.

  queries: split of the queries.
  gallery: split to search; None = the queries, each without itself.
  ranks: values of K.
  """
  queries: Split
  gallery: Split | None
  ranks: tuple[int, ...]

  def measure(self, selected: PyTree) -> Result:
    """Returns recall@K and the number of queries."""
    rows = self.queries.place(self.queries.table(selected))
    if self.gallery:
      protocol, spent_s = 'gallery', self.gallery.spent_s
      found = nearest(self.gallery, selected, rows['features'], max(self.ranks))
    else:  # each query is left out of its own neighbors
      protocol, spent_s = 'loo', 0.
      found = nearest(self.queries, selected, rows['features'], max(self.ranks) + 1, what='example')
      found = _without_itself(found, rows['example'], rows['label'], self.queries.num_examples)
    hits, total = jax.device_get(_count_hits(found, rows['label'], rows['mask'], self.ranks))
    self.queries.check_counted(int(total))
    metrics = {f'recall{k}_{protocol}': float(hits[i]) / int(total) for i, k in enumerate(self.ranks)}
    return Result(metrics, int(total), None, f'recall{self.ranks[0]}_{protocol}', self.queries.spent_s + spent_s)


def nearest(split: Split, selected: PyTree, features: Array, k: int, *, what: str = 'label') -> Neighbors:
  """Returns the k nearest examples of a split to each of `features [G, R, D]`.

  Args:
    split: the searched split.
    selected: parameters of the view.
    features: split over the mesh by G.
    k: number of neighbors.
    what: `label` or `example`, which the neighbors have as `label`.
  """
  table, layout = split.table(selected), split.layout
  num_rows = min(max(1, BLOCK // layout.batch_size) * layout.size, layout.num_rows)
  starts = range(0, layout.num_rows, num_rows)

  def blocks(progress: TaskProgress) -> Iterator[tuple[Array, Array, Array]]:
    for i, start in enumerate(starts):
      block = split.place(table, start, start + num_rows)
      yield block['features'], block[what], block['mask']
      progress.update(i + 1)

  with split.count('blocks', len(starts)) as progress:
    return search(features, blocks(progress), k, mesh=split.mesh, size=layout.size)


def search(features: Array, blocks: Iterable[tuple[Array, Array, Array]], k: int, *, mesh: jax.sharding.Mesh,
           size: int) -> Neighbors:
  """Returns the k best neighbors of `features [G, R, D]` in all blocks.

  Args:
    features: split over the mesh by G.
    blocks: of the searched examples: features `[G', r, D]`, label and mask `[G', r]`, in the order of the examples.
    k: number of neighbors.
    mesh: of the features.
    size: number of consecutive rows of a part that are of one batch.
  """
  best = _begin(features, k)
  features = _normalize(features)
  for block in blocks:
    best = _visit(best, features, *block, mesh, size)
  return best


@functools.partial(jax.jit, static_argnums=1)
def _begin(features: Array, k: int) -> Neighbors:
  shape = (*features.shape[:2], k)
  return Neighbors(jnp.full(shape, -jnp.inf), jnp.zeros(shape, jnp.int32))


@jax.jit
def _normalize(x: Array) -> Array:
  return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


@functools.partial(jax.jit, static_argnums=(5, 6), donate_argnums=0)
def _visit(best: Neighbors, features_GRD: Array, block_GrD: Array, label_Gr: Array, mask_Gr: Array,
           mesh: jax.sharding.Mesh, size: int) -> Neighbors:
  """Merges the best neighbors so far with those of a block; `size` consecutive rows of a part are of one batch."""
  replicated = meshes.replicated(mesh)

  def in_order(x: Array) -> Array:
    """Returns `[G, n * size, …]` in the order of the source, `[G * n * size, …]`, replicated."""
    x = jax.lax.with_sharding_constraint(x, replicated)
    x = x.reshape(x.shape[0], -1, size, *x.shape[2:]).swapaxes(0, 1)
    return x.reshape(-1, *x.shape[3:])

  block_SD, label_S, mask_S = _normalize(in_order(block_GrD)), in_order(label_Gr), in_order(mask_Gr)

  def merge(rows: tuple[Array, Array, Array]) -> Neighbors:
    similarity_GrK, label_GrK, x_GrD = rows
    new_GrS = jnp.einsum('grd,sd->grs', x_GrD, block_SD, precision=jax.lax.Precision.HIGHEST)
    new_GrS = jnp.where(mask_S[None, None] > 0, new_GrS, -jnp.inf)
    labels = jnp.concatenate([label_GrK, jnp.broadcast_to(label_S[None, None], new_GrS.shape)], -1)
    values, where = jax.lax.top_k(jnp.concatenate([similarity_GrK, new_GrS], -1), similarity_GrK.shape[-1])
    return Neighbors(values, jnp.take_along_axis(labels, where, -1))

  return Neighbors(*_by_rows(merge, (*best, features_GRD)))


def _by_rows(function: Callable[..., tuple[Array, ...]], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
  """Applies a function to `TEST_ROWS` rows of each part at a time: `[G, R, …]`."""
  num_rows = arrays[0].shape[1]
  blocks = jax.lax.map(function, cut(arrays, rows=TEST_ROWS))
  return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :num_rows], blocks)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _count_right(found: Neighbors, true: Array, mask: Array, ks: tuple[int, ...], num_classes: int,
                 temperature: float) -> tuple[Array, Array]:
  """Returns the number of correct predictions, `[k, 2]` i32 for top-1 and top-5, and the number of valid examples."""
  def find_hits(rows: tuple[Array, ...]) -> tuple[Array]:
    similarity_GrK, label_GrK, true_Gr = rows
    hits = []
    for k in ks:
      votes_GrC = log_votes(similarity_GrK[..., :k], label_GrK[..., :k], num_classes, temperature)
      votes_GrT, top_GrT = jax.lax.top_k(votes_GrC, min(TOP, num_classes))
      hit_GrT = (top_GrT == true_Gr[..., None]) & jnp.isfinite(votes_GrT)
      hits.append(jnp.stack([hit_GrT[..., 0], hit_GrT.any(-1)], -1))
    return (jnp.stack(hits, -2),)

  (hits_GRk2,) = _by_rows(find_hits, (*found, true))
  is_valid = mask > 0
  return (hits_GRk2 & is_valid[..., None, None]).sum((0, 1)), is_valid.sum()


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


@functools.partial(jax.jit, static_argnums=3)
def _without_itself(found: Neighbors, query_GR: Array, label_GR: Array, num_examples: int) -> Neighbors:
  """Returns similarity and class of all neighbors but the query itself, or but the last if the query is not in them.

  `found` has the positions of neighbors in a split of `num_examples`, of which `query_GR` are all, with their classes.
  """
  label_S = jnp.zeros(num_examples, jnp.int32).at[query_GR.reshape(-1)].set(label_GR.reshape(-1), mode='drop')
  is_query = (found.label == query_GR[..., None]) & jnp.isfinite(found.similarity)
  order = jnp.argsort(is_query, axis=-1, stable=True)[..., :-1]
  similarity, example = (jnp.take_along_axis(x, order, -1) for x in found)
  return Neighbors(similarity, label_S[example])


@functools.partial(jax.jit, static_argnums=3)
def _count_hits(found: Neighbors, true_GR: Array, mask_GR: Array, ranks: tuple[int, ...]) -> tuple[Array, Array]:
  """Returns the number of queries with a hit for each rank, and the number of queries."""
  right_GRK = (found.label == true_GR[..., None]) & jnp.isfinite(found.similarity)
  hits = [(right_GRK[..., :k].any(-1) & (mask_GR > 0)).sum() for k in ranks]
  return jnp.stack(hits), (mask_GR > 0).sum()


def build(resources: Resources, name: str, settings: schema.Knn) -> Make:
  """Builds the k-NN classifier for each view."""
  train, test = resources.sources(name)
  if (most := max(settings.neighbors)) > len(train):
    log.warning('evals.%s: %s has %s examples, fewer than k=%s: all of them are neighbors then. Set '
                'evals.%s.neighbors, or evals.%s.train_split to more images.', name, train.name, f'{len(train):,}',
                most, name, name)

  def make(view: str) -> Measuring:
    return Knn(*resources.splits(name, settings, train, test, view), num_classes=len(train.class_names),
               neighbors=settings.neighbors, temperature=settings.temperature, headline=settings.headline)
  return make


def build_retrieval(resources: Resources, name: str, settings: schema.Retrieval) -> Make:
  """Builds the evaluator of retrieval for each view."""
  if settings.gallery is schema.Gallery.TRAIN:
    train, test = resources.sources(name)
  else:
    train, test = None, resources.eval_source(name)
    check_single(f'evals.{name}', test)
    opening.check_learnable(test, learner=f'evals.{name}')

  def make(view: str) -> Measuring:
    queries = resources.split(name, settings, test, view, in_memory=True)
    gallery = resources.split(name, settings, train, view, in_memory=False) if train else None
    return Retrieval(queries, gallery, RANKS)
  return make
