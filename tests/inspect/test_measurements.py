"""One pass over images equals each analysis made on its own, for any batch size."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config import schema
from vit_jax.core.types import Array, Features
from vit_jax.inspect import attention as maps
from vit_jax.inspect import attention_stats as numbers
from vit_jax.inspect import figures, layerwise, measurements, spectra
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


def measured(batch_size: int) -> measurements.Measured:
  batches = [IMAGES[i:i + batch_size] for i in range(0, 5, batch_size)]
  return measurements.measure(DRIVER, batches, grid=GRID, patch_px=(8, 8), num_close=4, discard=0., logits=logits,
                            has_relevance=True)


DRIVER = driver()
WHOLE = measured(5)


def test_batches_change_nothing() -> None:
  for name, one, other in zip(WHOLE._fields, WHOLE, measured(3), strict=True):
    np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-4, err_msg=name)


def test_each_number_is_what_it_is_on_its_own() -> None:
  layers = list(DRIVER.layers(jnp.asarray(IMAGES), capture=True))
  attentions = [layer.attention for layer in layers[1:]]
  distances = numbers.distances_px(GRID, (8, 8))
  np.testing.assert_allclose(WHOLE.distance_px[1], numbers.mean_distance(attentions[1], distances), rtol=1e-4)
  np.testing.assert_allclose(WHOLE.information[2], numbers.mutual_information(attentions[2], 6), rtol=1e-3, atol=1e-6)
  np.testing.assert_allclose(WHOLE.fourier[0], spectra.fourier_amplitude(layers[0].tokens[:, -6:], GRID), rtol=1e-4,
                             atol=1e-5)
  np.testing.assert_allclose(WHOLE.by_depth[3], layers[3].tokens[:, -6:].mean(1), rtol=1e-4, atol=1e-5)
  reading = DRIVER.reading(layers[-1].tokens)
  rolled = maps.rollout(attentions, reading)[:4, -6:].reshape(4, 2, 3)
  np.testing.assert_allclose(WHOLE.rollout, rolled, rtol=1e-4, atol=1e-6)
  np.testing.assert_allclose(WHOLE.heads[:, :, 1, 2], attentions[-1][:4, :, 0, 6], rtol=1e-4, atol=1e-6)
  features = DRIVER.finish(layers[-1].tokens, grid=GRID)
  np.testing.assert_allclose(WHOLE.pooled, features.pooled, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(WHOLE.logits, logits(features), rtol=1e-3, atol=1e-4)


def test_relevance_is_for_the_class_that_is_predicted_unless_another_is_asked_for() -> None:
  chosen = int(np.argmax(WHOLE.logits[0]))
  own = measurements.relevance(DRIVER, IMAGES[:1], grid=GRID, logits=logits, of_class=chosen)
  other = measurements.relevance(DRIVER, IMAGES[:1], grid=GRID, logits=logits, of_class=(chosen + 1) % 7)
  np.testing.assert_allclose(WHOLE.relevance[0], own, rtol=1e-4, atol=1e-6)
  assert np.abs(own - other).max() > 1e-4 and own.min() >= 0


def test_a_few_tokens_that_gather_attention_do_not_hide_the_others() -> None:
  image = np.full((28, 28, 3), 200, np.uint8)
  heat = np.full((14, 14), .1)
  heat[5:8, 5:8], heat[0, 0], heat[0, -1] = .5, 50., 40.
  lit = figures.shade(image, heat)[..., 0]
  assert lit[12, 12] == 200 and lit[0, 0] == 200 and lit[20, 4] == 40
  once = np.zeros((14, 14))
  once[7, 7] = 1.
  assert figures.shade(image, once)[14, 14, 0] > 100 and figures.shade(image, np.zeros((14, 14))).max() == 0
