"""Attention maps equal sums in NumPy float64; one pass over images equals each analysis alone, for any batch size."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.core.types import Array, Features
from vit_jax.inspect import layerwise, measurements
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
  product = functools.reduce(measurements.roll, attentions, None)
  return {'distance': measurements.mean_distance(attentions[0], measurements.distances_px(GRID, (8, 8))),
          'information': measurements.mutual_information(attentions[1], 6),
          'fourier': measurements.fourier_amplitude(layers[0].tokens[:, -6:], GRID),
          'by_depth': layers[2].tokens[:, -6:].mean(1),
          'rollout': jnp.einsum('bm,bmk->bk', readout, product)[:4, -6:].reshape(4, 2, 3)}


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


NUM_TOKENS = 7  # a class token and 6 patches
TOKENS = np.random.default_rng(0).normal(size=(3, 24, 5)).astype(np.float32)


def some_attention(seed: int, *, heads: int = 4) -> np.ndarray:
  logits = np.random.default_rng(seed).normal(size=(2, heads, NUM_TOKENS, NUM_TOKENS)) * 2
  weights = np.exp(logits)
  return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


fourier_amplitude = jax.jit(measurements.fourier_amplitude, static_argnums=1)
mutual_information = jax.jit(measurements.mutual_information, static_argnums=1)
LAYERS = [some_attention(seed) for seed in range(2)]


def test_fourier_amplitude_follows_the_diagonal_from_zero_frequency() -> None:
  maps = TOKENS.astype(np.float64).reshape(3, 4, 6, 5)
  want = []
  for frequency in range(3):
    wave = np.exp(-2j * np.pi * (frequency * np.arange(4)[:, None] / 4 + frequency * np.arange(6)[None] / 6))
    want.append(np.log(np.abs((maps * wave[None, :, :, None]).sum((1, 2))) + 1e-6).mean())
  np.testing.assert_allclose(fourier_amplitude(jnp.asarray(TOKENS), (4, 6)), np.array(want) - want[0],
                             rtol=1e-4, atol=1e-5)


def test_a_smooth_map_has_less_of_high_frequencies_than_a_chequered_one() -> None:
  rows, columns = np.indices((8, 8))
  smooth, chequered = ((x.reshape(1, 64, 1)).astype(np.float32) for x in (rows + columns, (rows + columns) % 2 + 1))
  ends = [float(fourier_amplitude(jnp.asarray(x), (8, 8))[-1]) for x in (smooth, chequered)]
  assert ends[0] < -5 < ends[1]


def test_singular_values_are_those_of_centered_tokens() -> None:
  want = []
  for tokens in TOKENS.astype(np.float64):
    values = np.sqrt(np.linalg.eigvalsh((tokens - tokens.mean(0)).T @ (tokens - tokens.mean(0)))[::-1])
    want.append(np.log(values / values[0]))
  np.testing.assert_allclose(jax.jit(measurements.singular_values)(TOKENS), np.mean(want, 0), rtol=1e-4, atol=1e-5)


def test_attention_distance_is_in_pixels_and_ignores_the_class_token() -> None:
  want = np.zeros(4)
  for head in range(4):
    for image in range(2):
      for query in range(6):
        row = LAYERS[0][image, head, 1 + query, 1:].astype(np.float64)
        row /= row.sum()
        for key in range(6):
          down, right = key // 3 - query // 3, key % 3 - query % 3
          want[head] += row[key] * np.sqrt((down * 8)**2 + (right * 16)**2) / 12
  got = measurements.mean_distance(jnp.asarray(LAYERS[0]), measurements.distances_px(GRID, (8, 16)))
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_mutual_information_is_zero_without_dependence_and_one_if_each_query_has_its_own_key() -> None:
  same = np.broadcast_to(LAYERS[0][:, :, :1], LAYERS[0].shape)
  np.testing.assert_allclose(mutual_information(jnp.asarray(same), 6), 0., atol=1e-5)
  own = np.broadcast_to(np.eye(6, dtype=np.float32), (2, 4, 6, 6))
  np.testing.assert_allclose(mutual_information(own, 6), 1., atol=1e-5)


def test_mutual_information_and_entropy_equal_their_sums() -> None:
  conditional = LAYERS[1][:, :, 1:, 1:].astype(np.float64)
  conditional /= conditional.sum(-1, keepdims=True)
  marginal = conditional.mean(-2, keepdims=True)
  information = (conditional * np.log(conditional / marginal)).sum(-1).mean(-1)
  entropy = -(marginal * np.log(marginal)).sum((-1, -2))
  np.testing.assert_allclose(mutual_information(jnp.asarray(LAYERS[1]), 6),
                             (information / np.sqrt(np.log(6) * entropy)).mean(0), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(jax.jit(measurements.entropy, static_argnums=1)(LAYERS[1], 6),
                             -(conditional * np.log(conditional)).sum(-1).mean((0, 2)), rtol=1e-5)


def test_statistics_are_the_same_under_jit() -> None:
  distances = measurements.distances_px(GRID, (8, 8))
  np.testing.assert_allclose(jax.jit(lambda a: measurements.mean_distance(a, distances))(LAYERS[0]),
                             measurements.mean_distance(jnp.asarray(LAYERS[0]), distances), rtol=1e-5)


NUM_TOKENS = 7  # a class token and 6 patches


def some_attention(seed: int, *, heads: int = 4) -> np.ndarray:
  logits = np.random.default_rng(seed).normal(size=(2, heads, NUM_TOKENS, NUM_TOKENS)) * 2
  weights = np.exp(logits)
  return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


LAYERS = [some_attention(seed) for seed in range(3)]
READOUT = np.eye(NUM_TOKENS, dtype=np.float32)[[0, 0]]


@pytest.mark.parametrize('discard', [0., .5])
def test_rollout_is_the_product_of_all_layers(discard: float) -> None:
  want = np.eye(NUM_TOKENS)[None].repeat(2, 0)
  for layer in LAYERS:
    mixed = layer.astype(np.float64).mean(1)
    for image in mixed:
      for row in image:
        row[np.argsort(row)[:int(discard * NUM_TOKENS)]] = 0
        row /= row.sum()
    want = (mixed / 2 + np.eye(NUM_TOKENS) / 2) @ want
  got = functools.reduce(functools.partial(measurements.roll, discard=discard), map(jnp.asarray, LAYERS), None)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(got.sum(-1), 1., rtol=1e-5)


def test_maps_of_the_last_block_are_the_rows_that_are_read() -> None:
  got = measurements.head_maps(jnp.asarray(LAYERS[2]), jnp.asarray(READOUT), 6)
  np.testing.assert_allclose(got, LAYERS[2][:, :, 0, 1:], rtol=1e-6)


def test_the_fewest_tokens_that_hold_the_mass_are_kept() -> None:
  kept = measurements.keep_mass(np.array([[.1, .35, .05, .3, .2], [.9, .02, .03, .03, .02]]), .6)
  np.testing.assert_array_equal(kept, [[False, True, False, True, False], [True, False, False, False, False]])


def test_relevance_follows_the_published_update_without_products_of_matrices() -> None:
  rng = np.random.default_rng(5)
  gradients = [rng.normal(size=layer.shape).astype(np.float32) for layer in LAYERS]
  want = np.eye(NUM_TOKENS)[None].repeat(2, 0)
  for layer, gradient in zip(LAYERS, gradients, strict=True):
    want = want + np.maximum(layer.astype(np.float64) * gradient, 0).mean(1) @ want
  pairs = [(jnp.asarray(a), jnp.asarray(g)) for a, g in zip(LAYERS, gradients, strict=True)][::-1]
  got = measurements.relevance_of_tokens(pairs, jnp.asarray(READOUT))
  np.testing.assert_allclose(got, want[:, 0] - READOUT, rtol=1e-5, atol=1e-6)
