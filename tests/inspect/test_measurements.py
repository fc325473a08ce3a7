"""One pass over images equals each analysis on its own, for any batch size."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.core.types import Array, Features
from vit_jax.inspect import attention as maps
from vit_jax.inspect import layerwise, measurements, statistics
from vit_jax.models.vit import vit

PX, GRID = (16, 24), (2, 3)
IMAGES = np.random.default_rng(1).normal(size=(5, *PX, 3)).astype(np.float32)
HEAD = np.random.default_rng(2).normal(size=(16, 7)).astype(np.float32)


@functools.cache
def driver() -> layerwise.Driver:
  model, rng = schema.ViT(patch=8, width=16, depth=2, heads=4, mlp=schema.Mlp(24)), np.random.default_rng(0)
  backbone = vit.build(model, PX)
  shapes, _ = jax.eval_shape(backbone.init, jax.random.key(0), jnp.asarray(IMAGES))
  params = jax.tree.map(lambda x: rng.normal(size=x.shape, scale=.3).astype(np.float32), shapes)
  return layerwise.Driver(backbone, params)


@jax.jit
def logits(features: Features) -> Array:
  return features.pooled @ HEAD


@functools.cache
def measured(batch_size: int) -> measurements.Measurements:
  batches = [IMAGES[i:i + batch_size] for i in range(0, 5, batch_size)]
  return measurements.measure(driver(), batches, grid=GRID, patch_px=(8, 8), num_maps=4, discard=0., logits=logits)


@pytest.mark.slow(reason='4 s: all measurements for two batch sizes')
def test_the_batch_size_does_not_change_the_measurements() -> None:
  """The last of three batches has no image with maps."""
  for name, one, other in zip(measurements.Measurements._fields, measured(5), measured(2), strict=True):
    np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4, err_msg=name)


@jax.jit
def by_analysis(layers: list[layerwise.Layer], readout: Array) -> dict[str, Array]:
  attentions = [layer.attention for layer in layers[1:]]
  return {'distance': statistics.mean_distance(attentions[0], statistics.distances_px(GRID, (8, 8))),
          'information': statistics.mutual_information(attentions[1], 6),
          'fourier': statistics.fourier_amplitude(layers[0].tokens[:, -6:], GRID),
          'by_depth': layers[2].tokens[:, -6:].mean(1),
          'rollout': maps.rollout(attentions, readout)[:4, -6:].reshape(4, 2, 3)}


@pytest.mark.slow(reason='3 s: all measurements')
def test_each_measurement_equals_the_analysis_on_its_own() -> None:
  found = measured(5)
  layers = list(driver().layers(jnp.asarray(IMAGES), capture=True))
  want = by_analysis(layers, driver().readout_weights(layers[-1].tokens))
  np.testing.assert_allclose(found.distance_px[0], want['distance'], rtol=1e-4)
  np.testing.assert_allclose(found.information[1], want['information'], rtol=1e-3, atol=1e-6)
  np.testing.assert_allclose(found.fourier[0], want['fourier'], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(found.by_depth[2], want['by_depth'], rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(found.rollout, want['rollout'], rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(found.heads[:, :, 1, 2], np.asarray(layers[-1].attention)[:4, :, 0, 6], rtol=1e-4,
                             atol=1e-6)
  features = driver().finish(layers[-1].tokens, grid=GRID)
  np.testing.assert_allclose(found.pooled, features.pooled, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(found.logits, logits(features), rtol=1e-3, atol=1e-4)


@pytest.mark.slow(reason='3 s; tests/inspect/test_model.py has the relevance of a class')
def test_relevance_is_for_the_predicted_class_unless_another_is_chosen() -> None:
  chosen = int(np.argmax(measured(5).logits[0]))
  own = measurements.relevance(driver(), IMAGES[:1], grid=GRID, logits=logits, of_class=chosen)
  other = measurements.relevance(driver(), IMAGES[:1], grid=GRID, logits=logits, of_class=(chosen + 1) % 7)
  np.testing.assert_allclose(measured(5).relevance[0], own, rtol=1e-4, atol=1e-6)
  assert np.abs(own - other).max() > 1e-4 and own.min() >= 0
