"""Attention maps against sums written out in NumPy float64."""
from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.inspect import attention as maps

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
  got = functools.reduce(functools.partial(maps.roll, discard=discard), map(jnp.asarray, LAYERS), None)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(got.sum(-1), 1., rtol=1e-5)


def test_maps_of_the_last_block_are_the_rows_that_are_read() -> None:
  got = maps.head_maps(jnp.asarray(LAYERS[2]), jnp.asarray(READOUT), 6)
  np.testing.assert_allclose(got, LAYERS[2][:, :, 0, 1:], rtol=1e-6)


def test_the_fewest_tokens_that_hold_the_mass_are_kept() -> None:
  kept = maps.keep_mass(np.array([[.1, .35, .05, .3, .2], [.9, .02, .03, .03, .02]]), .6)
  np.testing.assert_array_equal(kept, [[False, True, False, True, False], [True, False, False, False, False]])


def test_relevance_follows_the_published_update_without_products_of_matrices() -> None:
  rng = np.random.default_rng(5)
  gradients = [rng.normal(size=layer.shape).astype(np.float32) for layer in LAYERS]
  want = np.eye(NUM_TOKENS)[None].repeat(2, 0)
  for layer, gradient in zip(LAYERS, gradients, strict=True):
    want = want + np.maximum(layer.astype(np.float64) * gradient, 0).mean(1) @ want
  pairs = [(jnp.asarray(a), jnp.asarray(g)) for a, g in zip(LAYERS, gradients, strict=True)][::-1]
  np.testing.assert_allclose(maps.relevance(pairs, jnp.asarray(READOUT)), want[:, 0] - READOUT, rtol=1e-5, atol=1e-6)
