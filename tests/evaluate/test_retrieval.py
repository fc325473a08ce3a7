"""Recall@K against the nearest neighbors of scikit-learn, with both protocols, over any batch size and mesh."""
from __future__ import annotations

import numpy as np
import pytest

from tests.evaluate import rows
from vit_jax.evaluate import knn

RANKS = (1, 4, 10)
TRAIN = rows.clusters(61, classes=7, width=12, seed=1)
TEST = rows.clusters(37, classes=7, width=12, seed=2)
TEST[1][0] = 99  # a class with one image


def recall(queries: tuple[np.ndarray, np.ndarray], gallery: tuple[np.ndarray, np.ndarray], *,
           skip: int) -> list[float]:
  """Of scikit-learn's neighbors without the first `skip`, the query itself."""
  from sklearn.neighbors import NearestNeighbors
  search = NearestNeighbors(n_neighbors=max(RANKS) + skip, metric='cosine', algorithm='brute').fit(gallery[0])
  found = gallery[1][search.kneighbors(queries[0])[1][:, skip:]]
  return [float((found[:, :k] == queries[1][:, None]).any(1).mean()) for k in RANKS]


def evaluator(size: int, mesh: str, *, gallery: bool, bad: tuple[int, ...] = ()) -> knn.Retrieval:
  return knn.Retrieval(
      rows.split(rows.Loader(*TEST, size, bad=bad), mesh, name='test'),
      rows.split(rows.Loader(*TRAIN, size), mesh, name='train') if gallery else None, ranks=RANKS)


@pytest.mark.dear('False-8-data=2', 'True-6-one', reason='1 s each: other programs; each mesh and protocol is in one')
@pytest.mark.parametrize(('size', 'mesh'), [(6, 'one'), (8, 'data=2')])
@pytest.mark.parametrize('gallery', [False, True])
def test_it_equals_scikit_learn(size: int, mesh: str, gallery: bool, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(knn, 'BLOCK', 24)  # several blocks
  result = evaluator(size, mesh, gallery=gallery).measure(rows.weights())
  want = recall(TEST, TRAIN if gallery else TEST, skip=0 if gallery else 1)
  name = 'gallery' if gallery else 'loo'
  assert result.metrics == pytest.approx({f'recall{k}_{name}': x for k, x in zip(RANKS, want, strict=True)})
  assert result.num_examples == len(TEST[1]) and result.headline == f'recall1_{name}'
  assert .1 < result.score < result.metrics[f'recall10_{name}'] < 1


def test_an_image_that_cannot_be_decoded_is_neither_query_nor_neighbor() -> None:
  kept = np.delete(np.arange(len(TEST[1])), [3, 20])
  rest = (TEST[0][kept], TEST[1][kept])
  result = evaluator(6, 'one', gallery=False, bad=(3, 20)).measure(rows.weights())
  assert list(result.metrics.values()) == pytest.approx(recall(rest, rest, skip=1)) and result.num_examples == len(kept)
