"""Components, similarities and neighbors against scikit-learn and plain loops."""
from __future__ import annotations

import numpy as np

from vit_jax.inspect import embeddings

RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(37, 11))


def test_filter_components_are_principal_components_of_filters() -> None:
  from sklearn.decomposition import PCA

  kernel = RNG.normal(size=(4, 4, 3, 20)).astype(np.float32)
  found, share = embeddings.filter_components(kernel, 6)
  pca = PCA(6).fit(kernel.reshape(48, 20).T.astype(np.float64))
  assert found.shape == (6, 4, 4, 3)
  products = np.abs((found.reshape(6, 48) * pca.components_).sum(1))
  np.testing.assert_allclose(products, 1., rtol=1e-6)  # equal up to sign
  np.testing.assert_allclose(share, pca.explained_variance_ratio_, rtol=1e-6)
  assert all(part.max() >= -part.min() for part in found)


def test_positions_are_compared_tile_by_tile() -> None:
  positions = RNG.normal(size=(6, 5))
  found = embeddings.position_similarity(positions, (2, 3))
  assert found.shape == (2, 3, 2, 3)
  a, b = positions[1 * 3 + 2], positions[0 * 3 + 1]
  np.testing.assert_allclose(found[1, 2, 0, 1], a @ b / np.linalg.norm(a) / np.linalg.norm(b), rtol=1e-9)
  np.testing.assert_allclose([found[i, j, i, j] for i in range(2) for j in range(3)], 1., rtol=1e-9)


def test_cka_knows_rotations_and_scales_and_equals_its_formula() -> None:
  other = RNG.normal(size=(37, 4))
  x, y = FEATURES - FEATURES.mean(0), other - other.mean(0)
  want = np.linalg.norm(y.T @ x)**2 / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)
  np.testing.assert_allclose(embeddings.linear_cka(FEATURES, other), want, rtol=1e-9)
  turned = 3 * FEATURES @ np.linalg.qr(RNG.normal(size=(11, 11)))[0] + 5
  np.testing.assert_allclose(embeddings.linear_cka(FEATURES, turned), 1., rtol=1e-9)


def test_token_colors_are_the_first_components_within_bounds() -> None:
  from sklearn.decomposition import PCA

  tokens = RNG.normal(size=(3, 20, 7)) * np.array([9, 5, 3, .1, .1, .1, .1])
  colors = embeddings.to_unit(embeddings.principal(tokens.reshape(60, 7)).parts).reshape(3, 20, 3)
  parts = PCA(3).fit_transform(tokens.reshape(60, 7))
  assert colors.shape == (3, 20, 3) and colors.min() == 0 and colors.max() == 1
  for i in range(3):
    assert abs(np.corrcoef(colors.reshape(60, 3)[:, i], parts[:, i])[0, 1]) > .98


def test_neighbors_come_nearest_first_and_never_the_image_itself() -> None:
  order, similarity = embeddings.nearest(FEATURES, 4)
  unit = FEATURES / np.linalg.norm(FEATURES, axis=1, keepdims=True)
  for i in range(37):
    want = sorted((-(unit[i] @ unit[j]), j) for j in range(37) if j != i)[:4]
    assert list(order[i]) == [j for _, j in want]
    np.testing.assert_allclose(similarity[i], [-s for s, _ in want], rtol=1e-9)


def test_leaving_one_out_equals_scikit_learn() -> None:
  from sklearn.neighbors import KNeighborsClassifier

  labels = RNG.integers(0, 3, 37)
  features = FEATURES + 2 * np.eye(11)[labels]
  hits = 0
  for i in range(37):
    rest = np.arange(37) != i
    model = KNeighborsClassifier(1, metric='cosine').fit(features[rest], labels[rest])
    hits += model.predict(features[i:i + 1])[0] == labels[i]
  np.testing.assert_allclose(embeddings.leave_one_out(features, labels, 1), hits / 37)
  assert embeddings.leave_one_out(10 * np.eye(11)[labels] + .1 * FEATURES, labels, 5) == 1.


def test_a_flat_map_keeps_groups_apart_and_repeats_itself() -> None:
  labels = np.repeat([0, 1], 12)
  rows = RNG.normal(size=(24, 8)) + 30 * labels[:, None]
  places = embeddings.flat_map(rows, seed=0)
  centers = places[labels == 0].mean(0), places[labels == 1].mean(0)
  spread = np.linalg.norm(places[labels == 0] - centers[0], axis=1).max()
  assert places.shape == (24, 2) and np.linalg.norm(centers[0] - centers[1]) > spread
  np.testing.assert_array_equal(places, embeddings.flat_map(rows, seed=0))


def test_images_with_equal_features_are_at_one_point() -> None:
  np.testing.assert_array_equal(embeddings.flat_map(np.ones((12, 8), np.float32), seed=0), np.zeros((12, 2)))
