"""Analyses of the input layer and of feature spaces: principal components, similarities, nearest neighbors.

In NumPy, as each runs once for a model or a folder of images.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vit_jax.core.types import HostArray

EXACT = 100  # images up to which t-SNE sums over all pairs


def filter_components(kernel: HostArray, count: int) -> tuple[HostArray, HostArray]:
  """Returns the principal components of the patch embedding's filters.

  The ViT paper shows 28 of them (Figure 7 left).

  Args:
    kernel: `[P, P, 3, D]`, D filters.
    count: number of components; at most min(3 P^2, D).

  Returns:
    Components `[count, P, P, 3]` f64 of unit length, and the share of the variance that each explains `[count]`. The
    sign of a component is arbitrary; its largest entry is made positive.
  """
  shape = kernel.shape[:3]
  filters = np.asarray(kernel, np.float64).reshape(-1, kernel.shape[-1]).T
  _, values, components = np.linalg.svd(filters - filters.mean(0), full_matrices=False)
  share = values**2 / max((values**2).sum(), 1e-300)
  return signed(components[:count]).reshape(-1, *shape), share[:count]


def signed(components: HostArray) -> HostArray:
  """Returns rows `[n, d]`, each with the sign that makes its largest entry positive."""
  largest = np.take_along_axis(components, np.abs(components).argmax(1, keepdims=True), 1)
  return components * np.where(largest < 0, -1., 1.)


def position_similarity(positions: HostArray, grid: tuple[int, int]) -> HostArray:
  """Returns the cosine similarity of position embeddings (ViT paper, Figure 7 center).

  Args:
    positions: `[N, D]`, of the patch tokens.
    grid: `(h, w)`.

  Returns:
    `[h, w, h, w]` f64; tile (i, j) compares position (i, j) with all.
  """
  unit = unit_rows(np.asarray(positions, np.float64))
  return (unit @ unit.T).reshape(*grid, *grid)


def unit_rows(rows: HostArray) -> HostArray:
  """Returns `[n, d]` with rows scaled to length 1 (zero rows stay zero)."""
  return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


class Principal(NamedTuple):
  """Principal components of rows: `parts [n, 3]` f64, the rows in them, and their shares of the variance `[3]`."""
  parts: HostArray
  share: HostArray


def principal(rows: HostArray) -> Principal:
  """Returns the first three principal components of rows `[n, d]`; each axis has a positive largest entry."""
  centered = rows - rows.mean(0)
  values, vectors = np.linalg.eigh(centered.T @ centered)
  share = np.maximum(values[:-4:-1], 0) / max(values.sum(), 1e-300)
  return Principal(centered @ signed(vectors[:, :-4:-1].T).T, share)


def to_unit(parts: HostArray) -> HostArray:
  """Returns columns of `[n, c]` scaled to [0, 1]; 2 % of the values at each end are clipped.

  The principal components of patch tokens, as red, green and blue, show what is alike (DINOv2, Figure 1).
  """
  low, high = np.percentile(parts, (2, 98), axis=0)
  return np.clip((parts - low) / np.maximum(high - low, 1e-12), 0, 1)


def foreground(tokens: HostArray, threshold: float) -> HostArray:
  """Returns which tokens of an image are in the foreground, `[h, w]` bool, by their first principal component.

  DINOv2 (arXiv 2304.07193, Figure 1) takes one component for several images of the same kind; here each image has its
  own, so that images need not be alike. Which of its ends is the foreground is arbitrary: the tokens at the border of
  the image are taken to be more often background.

  Args:
    tokens: `[h, w, D]`.
    threshold: of the component, scaled to [0, 1] over the image.
  """
  h, w, width = tokens.shape
  first = principal(tokens.reshape(-1, width).astype(np.float64)).parts[:, 0].reshape(h, w)
  scaled = (first - first.min()) / max(float(np.ptp(first)), 1e-12)
  border = np.ones((h, w), bool)
  border[1:-1, 1:-1] = False
  is_reversed = not border.all() and scaled[border].mean() > scaled[~border].mean()
  return (1 - scaled if is_reversed else scaled) > threshold


def linear_cka(x: HostArray, y: HostArray) -> float:
  """Returns the linear centered kernel alignment of two sets of features of the same images.

  Source: arXiv 1905.00414, eq. 6.

  `|Y^T X|^2 / (|X^T X| |Y^T Y|)` with Frobenius norms and centered columns; 1 for features equal up to rotation and
  scale.

  Args:
    x: `[S, D]`.
    y: `[S, E]`.
  """
  kernels = []
  for rows in (x, y):
    centered = np.asarray(rows, np.float64) - np.asarray(rows, np.float64).mean(0)
    kernels.append(centered @ centered.T)  # [S, S]: S images are far fewer than features
  cross = (kernels[0] * kernels[1]).sum()
  return float(cross / max(np.linalg.norm(kernels[0]) * np.linalg.norm(kernels[1]), 1e-300))


def nearest(features: HostArray, count: int) -> tuple[HostArray, HostArray]:
  """Returns the nearest other images by cosine: indices and similarities, both `[S, count]`, the nearest first."""
  unit = unit_rows(np.asarray(features, np.float64))
  similarity = unit @ unit.T
  np.fill_diagonal(similarity, -np.inf)
  order = np.argsort(-similarity, axis=1, kind='stable')[:, :count]
  return order, np.take_along_axis(similarity, order, 1)


def leave_one_out(features: HostArray, labels: HostArray, neighbors: int) -> float:
  """Returns the share of the images whose class is that of most of their nearest other images.

  Ties are decided by the nearest image. A cheap measure of how separable the classes are at a depth.
  """
  order, _ = nearest(features, neighbors)
  hits = 0
  for row, label in zip(labels[order], labels, strict=True):
    classes, first, counts = np.unique(row, return_index=True, return_counts=True)
    hits += classes[np.lexsort((first, -counts))[0]] == label
  return hits / max(len(labels), 1)


def flat_map(features: HostArray, *, seed: int) -> HostArray:
  """Returns coordinates of images in the plane, `[S, 2]`, by principal components and t-SNE (scikit-learn).

  Up to `EXACT` images, gradients are exact sums over pairs in NumPy. The approximation of scikit-learn for more images
  starts all threads of the machine in each of its 1,000 iterations, which takes far longer for few images. Images with
  equal features are all at one point.
  """
  if not np.ptp(features, axis=0).any():
    return np.zeros((len(features), 2))  # t-SNE divides by their deviation
  from sklearn.decomposition import PCA
  from sklearn.manifold import TSNE
  reduced = PCA(min(50, *features.shape), random_state=seed).fit_transform(np.asarray(features, np.float64))
  perplexity = min(30., max(2., (len(features) - 1) / 3))
  method = 'exact' if len(features) <= EXACT else 'barnes_hut'
  return TSNE(perplexity=perplexity, init='pca', random_state=seed, method=method).fit_transform(reduced)
