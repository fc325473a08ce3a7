"""Hooks that send images and histograms of parameters to the trackers of a run. `jobs/trackers.py` makes the hooks."""
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

BINS = 64  # number of bins of a histogram
Show = Callable[[Callable[[Tracker], None]], None]  # the type of `Writer.show`


class Images(Hook):
  """Sends images of the first batch after a start, as the network receives them: augmented and mixed.

  The hook prepares the batch again, with the keys of the train step, so every process must have the hook.

  Args:
    num: number of images; all images of a batch that has fewer.
    prepare, mesh, seed: of the train step.
    show: `Writer.show`.
    mean, std: of the normalization, which the hook undoes.
  """

  def __init__(self, num: int, prepare: Prepare, show: Show, *, mean: tuple[float, ...], std: tuple[float, ...],
               mesh: Mesh, seed: int) -> None:
    self._show, self._has_sent = show, False
    mean_111C = np.asarray(mean, np.float32).reshape(1, 1, 1, -1)
    std_111C = np.asarray(std, np.float32).reshape(1, 1, 1, -1)

    def pixels(batch: Batch, step: Array) -> Array:
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        prepared, _ = preparing(prepare, seed)(batch, step)
        images = prepared['image'][:num].astype(jnp.float32)
      return jnp.clip(jnp.round(255 * (images * std_111C + mean_111C)), 0, 255).astype(jnp.uint8)

    self._pixels = jax.jit(pixels, out_shardings=replicated(mesh))

  def on_metrics(self, done: Done) -> None:
    if self._has_sent:
      return
    self._has_sent = True
    images = np.asarray(self._pixels(done.batch, jnp.asarray(done.step - 1, jnp.int32)))
    self._show(lambda tracker: tracker.images(done.step, {'train/images': images}))


class Histograms(Hook):
  """Sends a histogram of each parameter every `every` steps; layers that are stacked in a leaf share a histogram."""

  def __init__(self, every: int, show: Show, *, mesh: Mesh) -> None:
    self.every, self._show = every, show
    self._compute = jax.jit(_histograms, out_shardings=replicated(mesh))

  def on_state(self, step: int, state: TrainState) -> None:
    histograms = jax.device_get(self._compute(state.params))
    self._show(lambda tracker: tracker.histograms(step, histograms))


def _histograms(params: PyTree) -> dict[str, Histogram]:
  """Returns the histogram of the finite values of each parameter, by `params/NAME`."""
  histograms = {}
  for name, leaf in trees.flatten(params).items():
    values = leaf.astype(jnp.float32).ravel()
    is_finite = jnp.isfinite(values)
    low = jnp.where(is_finite.any(), jnp.min(values, initial=jnp.inf, where=is_finite), 0.)
    high = jnp.where(is_finite.any(), jnp.max(values, initial=-jnp.inf, where=is_finite), 0.)
    margin = jnp.where(high > low, 0., .5)  # so that bins have a width if all values are equal
    edges = jnp.linspace(low - margin, high + margin, BINS + 1)
    bin_of = jnp.clip(((values - edges[0]) / (edges[-1] - edges[0]) * BINS).astype(jnp.int32), 0, BINS - 1)
    counts = jnp.zeros(BINS, jnp.int32).at[bin_of].add(is_finite)
    finite_values = jnp.where(is_finite, values, 0.)
    histograms[f'params/{name}'] = Histogram(counts, edges, finite_values.sum(), (finite_values ** 2).sum())
  return histograms
