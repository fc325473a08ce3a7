"""Splits whose pictures are their own features, `[B, 1, 1, D]`, for tests of what is done with features."""
from __future__ import annotations

import pathlib
from collections.abc import Iterator

import jax
import numpy as np
import programs

from vit_jax.config import schema
from vit_jax.core.types import Array, Batch, Features, Outputs, PyTree
from vit_jax.evaluate.features import Split, Store

MESHES = programs.MESHES | {'data=2': schema.Mesh(2, 1, 1)}


class Loader:
  """Rows of features and labels, padded with rows that are not finite; those in `bad` cannot be decoded."""
  num_bad = 0

  def __init__(self, features: np.ndarray, label: np.ndarray, size: int, *, bad: tuple[int, ...] = ()) -> None:
    self.features, self.label, self.size, self.bad = features, label, size, bad
    self.num_examples, self.passes = len(label), 0

  def batches(self) -> Iterator[Batch]:
    self.passes += 1
    for at in range(0, self.num_examples, self.size):
      rows = np.arange(at, at + self.size)
      mask = (rows < self.num_examples) & ~np.isin(rows, self.bad)
      rows = np.where(rows < self.num_examples, rows, 0)
      image = np.where(mask[:, None], self.features[rows], np.nan).astype(np.float32)
      yield {'image': image[:, None, None], 'label': self.label[rows], 'index': rows.astype(np.int32),
             'mask': mask.astype(np.float32)}

  def describe(self, index: int) -> str:
    return f'row {index}'

  def close(self) -> None:
    pass


def read(selected: PyTree, image: Array) -> Array:
  return image[:, 0, 0] * selected['backbone']['scale']


def predict(selected: PyTree, image: Array) -> Outputs:
  return Outputs(image[:, 0, 0], Features(image[:, 0], image[:, 0, 0], (1, 1)))


def prepare(batch: Batch, key: Array, step: Array) -> Batch:
  return batch


def weights(scale: float = 1.) -> PyTree:
  return {'backbone': {'scale': jax.numpy.float32(scale)}, 'state': {}}


def split(loader: Loader, mesh: str = 'one', *, folder: pathlib.Path | None = None, store: Store | None = None,
          name: str = 'the split', **identity: str) -> Split:
  return Split(read, prepare, loader, batch_size=loader.size, mesh=programs.mesh(MESHES[mesh]),
               store=store or Store(folder), identity={'data': name, **identity}, name=name)


def clusters(num: int, *, classes: int, width: int, seed: int, spread: float = 2.) -> tuple[np.ndarray, np.ndarray]:
  """Features and labels of overlapping classes."""
  rng = np.random.default_rng(seed)
  centers = np.random.default_rng(99).normal(size=(classes, width))
  label = rng.integers(0, classes, num).astype(np.int32)
  return (centers[label] + spread * rng.normal(size=(num, width))).astype(np.float32), label
