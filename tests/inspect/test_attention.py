"""Maps of attention against sums written out in NumPy float64."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.inspect import attention as maps
from vit_jax.inspect import attention_stats as numbers

GRID = (2, 3)
NUM_TOKENS = 7  # a class token and 6 patches


def some_attention(seed: int, *, heads: int = 4) -> np.ndarray:
  logits = np.random.default_rng(seed).normal(size=(2, heads, NUM_TOKENS, NUM_TOKENS)) * 2
  weights = np.exp(logits)
  return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


LAYERS = [some_attention(seed) for seed in range(3)]
READING = np.eye(NUM_TOKENS, dtype=np.float32)[[0, 0]]


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
  got = maps.rollout([jnp.asarray(a) for a in LAYERS], jnp.asarray(READING), discard=discard)
  np.testing.assert_allclose(got, want[:, 0], rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(got.sum(-1), 1., rtol=1e-5)


def test_rollout_of_mean_pooling_is_the_mean_of_the_rows() -> None:
  reading = np.full((2, NUM_TOKENS), 1 / 6, np.float32)
  reading[:, 0] = 0
  each = [maps.rollout(LAYERS, jnp.asarray(np.eye(NUM_TOKENS, dtype=np.float32)[[i, i]])) for i in range(1, 7)]
  np.testing.assert_allclose(maps.rollout(LAYERS, jnp.asarray(reading)), np.mean(each, 0), rtol=1e-5)


def test_maps_of_the_last_block_are_the_rows_that_are_read() -> None:
  got = maps.head_maps(jnp.asarray(LAYERS[2]), jnp.asarray(READING), 6)
  np.testing.assert_allclose(got, LAYERS[2][:, :, 0, 1:], rtol=1e-6)


def test_the_fewest_tokens_that_hold_the_mass_are_kept() -> None:
  kept = maps.keep_mass(jnp.asarray([[.1, .35, .05, .3, .2], [.9, .02, .03, .03, .02]]), .6)
  np.testing.assert_array_equal(kept, [[False, True, False, True, False], [True, False, False, False, False]])


def test_relevance_follows_the_published_update_without_products_of_matrices() -> None:
  rng = np.random.default_rng(5)
  gradients = [rng.normal(size=layer.shape).astype(np.float32) for layer in LAYERS]
  want = np.eye(NUM_TOKENS)[None].repeat(2, 0)
  for layer, gradient in zip(LAYERS, gradients, strict=True):
    want = want + np.maximum(layer.astype(np.float64) * gradient, 0).mean(1) @ want
  pairs = [(jnp.asarray(a), jnp.asarray(g)) for a, g in zip(LAYERS, gradients, strict=True)][::-1]
  np.testing.assert_allclose(maps.relevance(pairs, jnp.asarray(READING)), want[:, 0] - READING, rtol=1e-5, atol=1e-6)


def test_attention_distance_is_in_pixels_and_leaves_the_class_token_out() -> None:
  want = np.zeros(4)
  for head in range(4):
    for image in range(2):
      for query in range(6):
        row = LAYERS[0][image, head, 1 + query, 1:].astype(np.float64)
        row /= row.sum()
        for key in range(6):
          down, right = key // 3 - query // 3, key % 3 - query % 3
          want[head] += row[key] * np.sqrt((down * 8)**2 + (right * 16)**2) / 12
  got = numbers.mean_distance(jnp.asarray(LAYERS[0]), numbers.distances_px(GRID, (8, 16)))
  np.testing.assert_allclose(got, want, rtol=1e-5)


def test_mutual_information_is_none_without_dependence_and_one_where_each_query_has_its_key() -> None:
  same = np.broadcast_to(LAYERS[0][:, :, :1], LAYERS[0].shape)
  np.testing.assert_allclose(numbers.mutual_information(jnp.asarray(same), 6), 0., atol=1e-5)
  own = jnp.broadcast_to(jnp.eye(6), (2, 4, 6, 6))
  np.testing.assert_allclose(numbers.mutual_information(own, 6), 1., atol=1e-5)


def test_mutual_information_and_entropy_equal_their_sums() -> None:
  conditional = LAYERS[1][:, :, 1:, 1:].astype(np.float64)
  conditional /= conditional.sum(-1, keepdims=True)
  marginal = conditional.mean(-2, keepdims=True)
  information = (conditional * np.log(conditional / marginal)).sum(-1).mean(-1)
  entropy = -(marginal * np.log(marginal)).sum((-1, -2))
  np.testing.assert_allclose(numbers.mutual_information(jnp.asarray(LAYERS[1]), 6),
                             (information / np.sqrt(np.log(6) * entropy)).mean(0), rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(numbers.entropy(jnp.asarray(LAYERS[1]), 6),
                             -(conditional * np.log(conditional)).sum(-1).mean((0, 2)), rtol=1e-5)


def test_numbers_are_the_same_under_jit() -> None:
  distances = numbers.distances_px(GRID, (8, 8))
  np.testing.assert_allclose(jax.jit(lambda a: numbers.mean_distance(a, distances))(LAYERS[0]),
                             numbers.mean_distance(jnp.asarray(LAYERS[0]), distances), rtol=1e-5)
