"""Images and histograms for trackers."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from vit_jax.record.trackers import Tracker
from vit_jax.train import tracker_hooks
from vit_jax.train.loop import Done


class Seen:
  """A tracker by its calls."""

  def __init__(self) -> None:
    self.calls: list[tuple[str, int, Any]] = []

  def show(self, call: Callable[[Tracker], None]) -> None:
    call(self)  # type: ignore[arg-type]

  def images(self, step: int, values: Any) -> None:
    self.calls.append(('images', step, values))

  def histograms(self, step: int, values: Any) -> None:
    self.calls.append(('histograms', step, values))


@pytest.fixture
def mesh() -> Mesh:
  return jax.make_mesh((1,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))


def test_images_of_the_first_batch_are_shown_once_as_the_network_gets_them(mesh: Mesh) -> None:
  seen, mean, std = Seen(), (.5, .4, .3), (.2, .3, .4)
  pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), np.uint8)

  def prepare(batch: Any, key: Any, step: Any) -> Any:
    del key
    flipped = batch['image'][:, :, ::-1] / 255. * (step == 6)  # the step before the seventh
    mean_C, std_C = (jnp.reshape(jnp.asarray(three), (1, 1, 1, 3)) for three in (mean, std))
    return {'image': (flipped - mean_C) / std_C}
  hook = tracker_hooks.Images(2, prepare, seen.show, mean=mean, std=std, mesh=mesh, seed=3)
  for step in (7, 8):
    hook.on_metrics(Done(step, None, {'image': jnp.asarray(pixels)}, None))  # type: ignore[arg-type]
  ((kind, step, values),) = seen.calls
  assert (kind, step, [*values]) == ('images', 7, ['train/images'])
  np.testing.assert_array_equal(values['train/images'], pixels[:2, :, ::-1])


def test_histograms_count_what_numpy_counts(mesh: Mesh) -> None:
  seen, rng = Seen(), np.random.default_rng(0)
  values = rng.integers(-50, 51, 1000).astype(np.float32)  # sums of whole numbers are exact
  bad = np.array([1., np.nan, 3., np.inf], np.float32)
  params = {'a': {'kernel': jnp.asarray(values.reshape(10, 100)), 'bias': jnp.zeros(3)}, 'bad': jnp.asarray(bad)}
  hook = tracker_hooks.Histograms(5, seen.show, mesh=mesh)
  hook.on_state(10, type('State', (), {'params': params})())  # type: ignore[arg-type]
  ((_, step, found),) = seen.calls
  assert step == 10 and {*found} == {'params/a/kernel', 'params/a/bias', 'params/bad'} and hook.every == 5
  one = found['params/a/kernel']
  assert (one.sum, one.sum_squares, one.counts.sum()) == (values.sum(), (values ** 2).sum(), 1000)
  assert (one.edges[0], one.edges[-1], len(one.counts)) == (values.min(), values.max(), tracker_hooks.BINS)
  expected, _ = np.histogram(values, tracker_hooks.BINS)
  # A value at an edge may fall on either side of it in f32: with 64 bins of 100 / 64, 100 of them lie inside 1e-6.
  assert np.abs(one.counts - expected).sum() <= 2 * sum(np.isclose(values[:, None], one.edges).any(1))
  assert found['params/a/bias'].counts.sum() == 3 and found['params/bad'].counts.sum() == 2
  assert (found['params/bad'].edges[0], found['params/bad'].edges[-1]) == (1., 3.)
