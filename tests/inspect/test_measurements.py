"""One pass over images equals each analysis on its own, for any batch size."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.core.types import Array, Features
from vit_jax.inspect import attention as maps
from vit_jax.inspect import layerwise, measurements, statistics
from vit_jax.models.vit import vit

PX, GRID = (16, 24), (2, 3)
IMAGES = np.asarray(jax.random.normal(jax.random.key(1), (5, *PX, 3)))
HEAD = jax.random.normal(jax.random.key(2), (32, 7))


def driver() -> layerwise.Driver:
  backbone = vit.build(schema.ViT(patch=8, width=32, depth=3, heads=4, mlp=48), PX)
  params, _ = backbone.init(jax.random.key(0), jnp.asarray(IMAGES))
  return layerwise.Driver(backbone, jax.tree.map(
      lambda x: x + .05 * jax.random.normal(jax.random.key(x.size), x.shape), params))


def logits(features: Features) -> Array:
  return features.pooled @ HEAD


def measured(batch_size: int) -> measurements.Measurements:
  batches = [IMAGES[i:i + batch_size] for i in range(0, 5, batch_size)]
  return measurements.measure(DRIVER, batches, grid=GRID, patch_px=(8, 8), num_maps=4, discard=0., logits=logits)


DRIVER = driver()
ALL = measured(5)


def test_the_batch_size_does_not_change_the_measurements() -> None:
  for name, one, other in zip(ALL._fields, ALL, measured(3), strict=True):
    np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4, err_msg=name)


def test_each_measurement_equals_the_analysis_on_its_own() -> None:
  layers = list(DRIVER.layers(jnp.asarray(IMAGES), capture=True))
  attentions = [layer.attention for layer in layers[1:]]
  distances = statistics.distances_px(GRID, (8, 8))
  np.testing.assert_allclose(ALL.distance_px[1], statistics.mean_distance(attentions[1], distances), rtol=1e-4)
  np.testing.assert_allclose(ALL.information[2], statistics.mutual_information(attentions[2], 6), rtol=1e-3, atol=1e-6)
  np.testing.assert_allclose(ALL.fourier[0], statistics.fourier_amplitude(layers[0].tokens[:, -6:], GRID), rtol=1e-4,
                             atol=1e-5)
  np.testing.assert_allclose(ALL.by_depth[3], layers[3].tokens[:, -6:].mean(1), rtol=1e-4, atol=1e-5)
  readout = DRIVER.readout_weights(layers[-1].tokens)
  rolled = maps.rollout(attentions, readout)[:4, -6:].reshape(4, 2, 3)
  np.testing.assert_allclose(ALL.rollout, rolled, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(ALL.heads[:, :, 1, 2], attentions[-1][:4, :, 0, 6], rtol=1e-4, atol=1e-6)
  features = DRIVER.finish(layers[-1].tokens, grid=GRID)
  np.testing.assert_allclose(ALL.pooled, features.pooled, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(ALL.logits, logits(features), rtol=1e-3, atol=1e-4)


def test_relevance_is_for_the_predicted_class_unless_another_is_chosen() -> None:
  chosen = int(np.argmax(ALL.logits[0]))
  own = measurements.relevance(DRIVER, IMAGES[:1], grid=GRID, logits=logits, of_class=chosen)
  other = measurements.relevance(DRIVER, IMAGES[:1], grid=GRID, logits=logits, of_class=(chosen + 1) % 7)
  np.testing.assert_allclose(ALL.relevance[0], own, rtol=1e-4, atol=1e-6)
  assert np.abs(own - other).max() > 1e-4 and own.min() >= 0
