"""Statistics of attention and spectra of tokens against NumPy float64."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.inspect import statistics

GRID = (2, 3)
NUM_TOKENS = 7  # a class token and 6 patches
TOKENS = np.random.default_rng(0).normal(size=(3, 24, 5)).astype(np.float32)


def some_attention(seed: int, *, heads: int = 4) -> np.ndarray:
  logits = np.random.default_rng(seed).normal(size=(2, heads, NUM_TOKENS, NUM_TOKENS)) * 2
  weights = np.exp(logits)
  return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


fourier_amplitude = jax.jit(statistics.fourier_amplitude, static_argnums=1)
mutual_information = jax.jit(statistics.mutual_information, static_argnums=1)
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
  np.testing.assert_allclose(jax.jit(statistics.singular_values)(TOKENS), np.mean(want, 0), rtol=1e-4, atol=1e-5)


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
  got = statistics.mean_distance(jnp.asarray(LAYERS[0]), statistics.distances_px(GRID, (8, 16)))
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
  np.testing.assert_allclose(jax.jit(statistics.entropy, static_argnums=1)(LAYERS[1], 6),
                             -(conditional * np.log(conditional)).sum(-1).mean((0, 2)), rtol=1e-5)


def test_statistics_are_the_same_under_jit() -> None:
  distances = statistics.distances_px(GRID, (8, 8))
  np.testing.assert_allclose(jax.jit(lambda a: statistics.mean_distance(a, distances))(LAYERS[0]),
                             statistics.mean_distance(jnp.asarray(LAYERS[0]), distances), rtol=1e-5)
