"""Hooks that send images and histograms of parameters to the trackers of a run; `jobs/trackers.py` makes them."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.core import trees
from vit_jax.core.contracts import Prepare
from vit_jax.core.types import Array, Batch, PyTree
from vit_jax.parallel.mesh import replicated
from vit_jax.record.trackers import Histogram, Tracker
from vit_jax.train.loop import Done, Hook
from vit_jax.train.state import TrainState
from vit_jax.train.step import preparing

BINS = 64  # of a histogram
Show = Callable[[Callable[[Tracker], None]], None]  # the type of `Writer.show`


class Images(Hook):
  """Sends images of the first batch of a start as the network receives them: augmented and mixed.

  Args:
    num: number of images, if a batch has so many.
    prepare: of the train step. The hook repeats it with the keys of that step, so every process must have the hook.
    mean, std: of the normalization, which is undone.
    show: `Writer.show`.
    mesh: of the batch.
    seed: of the run.
  """

  def __init__(self, num: int, prepare: Prepare, show: Show, *, mean: tuple[float, ...], std: tuple[float, ...],
               mesh: Mesh, seed: int) -> None:
    self._num, self._show, self._is_done = num, show, False
    mean_C, std_C = (np.asarray(each, np.float32).reshape(1, 1, 1, -1) for each in (mean, std))

    def pixels(batch: Batch, step: Array) -> Array:
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        image = preparing(prepare, seed)(batch, step)[0]['image'][:num].astype(jnp.float32)
      return jnp.clip(jnp.round(255 * (image * std_C + mean_C)), 0, 255).astype(jnp.uint8)

    self._pixels = jax.jit(pixels, out_shardings=replicated(mesh))

  def on_metrics(self, done: Done) -> None:
    if self._is_done:
      return
    self._is_done = True
    images = np.asarray(self._pixels(done.batch, jnp.asarray(done.step - 1, jnp.int32)))
    self._show(lambda tracker: tracker.images(done.step, {'train/images': images}))


class Histograms(Hook):
  """Sends a histogram of each parameter every `every` steps; layers that are stacked in a leaf share a histogram."""

  def __init__(self, every: int, show: Show, *, mesh: Mesh) -> None:
    self.every, self._show = every, show
    self._count = jax.jit(_count, out_shardings=replicated(mesh))

  def on_state(self, step: int, state: TrainState) -> None:
    histograms = jax.device_get(self._count(state.params))
    self._show(lambda tracker: tracker.histograms(step, histograms))


def _count(params: PyTree) -> dict[str, Histogram]:
  """Returns the histogram of the finite values of each parameter, by `params/NAME`."""
  histograms = {}
  for name, leaf in trees.flatten(params).items():
    values = leaf.astype(jnp.float32).ravel()
    finite = jnp.isfinite(values)
    low, high = (jnp.where(finite.any(), f(values, initial=start, where=finite), 0.) for f, start in (
        (jnp.min, jnp.inf), (jnp.max, -jnp.inf)))
    spread = jnp.where(high > low, 0., .5)
    edges = jnp.linspace(low - spread, high + spread, BINS + 1)
    bin_of = jnp.clip(((values - edges[0]) / (edges[-1] - edges[0]) * BINS).astype(jnp.int32), 0, BINS - 1)
    counts = jnp.zeros(BINS, jnp.int32).at[bin_of].add(finite)
    values = jnp.where(finite, values, 0.)
    histograms[f'params/{name}'] = Histogram(counts, edges, values.sum(), (values ** 2).sum())
  return histograms
