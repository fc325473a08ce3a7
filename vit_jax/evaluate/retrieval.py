"""Retrieval by cosine similarity: recall@K, the share of queries with an image of their class among the K nearest.

Two protocols, which are part of the names of the metrics:

  loo      leave-one-out: each image of the test split is a query, and all others of this split are the gallery (as on
           CUB-200 and Stanford Online Products, arXiv 1511.06452, section 5).
  gallery  each image of the test split is a query, and the training split is the gallery.

A query whose class has no other image in the gallery counts as a miss. Features are those that the head sees, with norm
1. Among equal similarities, the first example in the order of the gallery is nearer.
"""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core.types import Array, PyTree
from vit_jax.data import opening
from vit_jax.evaluate import knn
from vit_jax.evaluate.features import Split
from vit_jax.evaluate.resources import Make, Resources, check_single
from vit_jax.evaluate.results import Measuring, Result, mark, named

RANKS = (1, 5, 10)
"""Values of K; the first one is the headline."""


class Retrieval:
  """Evaluator of one view: `recall1_loo` and so on for each K.

  Args:
    queries: split of the queries.
    gallery: split to search; None = the queries, each without itself.
    ranks: values of K.
    limit: number of examples to which the splits were truncated; 0 = not truncated.
  """

  def __init__(self, queries: Split, gallery: Split | None, *, ranks: tuple[int, ...], limit: int = 0) -> None:
    self._queries, self._gallery, self._ranks, self._limit = queries, gallery, ranks, limit

  def measure(self, selected: PyTree) -> Result:
    """Returns recall@K and the number of queries."""
    rows = self._queries.place(self._queries.table(selected))
    if self._gallery:
      similarity, label = knn.nearest(self._gallery, selected, rows['features'], max(self._ranks))
    else:  # each query is left out of its own neighbors
      similarity, example = knn.nearest(self._queries, selected, rows['features'], max(self._ranks) + 1, what='example')
      similarity, label = _without_itself(similarity, example, rows['example'], rows['label'],
                                          self._queries.num_examples)
    hits, total = jax.device_get(_count(similarity, label, rows['label'], rows['mask'], self._ranks))
    self._queries.check_counted(int(total))
    protocol = 'gallery' if self._gallery else 'loo'
    metrics = {f'recall{k}_{protocol}': float(hits[i]) / int(total) for i, k in enumerate(self._ranks)}
    spent_s = self._queries.spent_s + (self._gallery.spent_s if self._gallery else 0.)
    return Result(named(metrics, self._limit), int(total), None,
                  mark(f'recall{self._ranks[0]}_{protocol}', self._limit), spent_s)


@functools.partial(jax.jit, static_argnums=4)
def _without_itself(similarity: Array, example: Array, own_GR: Array, label_GR: Array,
                    num_examples: int) -> tuple[Array, Array]:
  """Returns similarity and label of all neighbors but the query itself, or but the last if the query is not in them."""
  label_S = jnp.zeros(num_examples, jnp.int32).at[own_GR.reshape(-1)].set(label_GR.reshape(-1), mode='drop')
  is_own = (example == own_GR[..., None]) & jnp.isfinite(similarity)
  order = jnp.argsort(is_own, axis=-1, stable=True)[..., :-1]
  similarity, example = (jnp.take_along_axis(x, order, -1) for x in (similarity, example))
  return similarity, label_S[example]


@functools.partial(jax.jit, static_argnums=4)
def _count(similarity_GRK: Array, label_GRK: Array, true_GR: Array, mask_GR: Array,
           ranks: tuple[int, ...]) -> tuple[Array, Array]:
  """Returns the number of queries with a hit for each rank, and the number of queries."""
  right_GRK = (label_GRK == true_GR[..., None]) & jnp.isfinite(similarity_GRK)
  hits = [(right_GRK[..., :k].any(-1) & (mask_GR > 0)).sum() for k in ranks]
  return jnp.stack(hits), (mask_GR > 0).sum()


def build(resources: Resources, name: str, settings: schema.Retrieval) -> Make:
  """Builds the evaluator for each view."""
  if settings.gallery is schema.Gallery.TRAIN:
    train, test = resources.sources(name)
  else:
    train, test = None, resources.eval_source(name)
    check_single(f'evals.{name}', test)
    opening.check_learnable(test, learner=f'evals.{name}')

  def make(view: str) -> Measuring:
    return Retrieval(
        resources.split(name, settings, test, view, in_memory=True),
        resources.split(name, settings, train, view, in_memory=False) if train else None,
        ranks=RANKS, limit=settings.limit)
  return make
