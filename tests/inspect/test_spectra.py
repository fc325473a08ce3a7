"""Spectra of tokens against NumPy float64."""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from vit_jax.inspect import spectra

TOKENS = np.random.default_rng(0).normal(size=(3, 24, 5)).astype(np.float32)


def test_fourier_amplitude_follows_the_diagonal_from_zero_frequency() -> None:
  maps = TOKENS.astype(np.float64).reshape(3, 4, 6, 5)
  want = []
  for frequency in range(3):
    wave = np.exp(-2j * np.pi * (frequency * np.arange(4)[:, None] / 4 + frequency * np.arange(6)[None] / 6))
    want.append(np.log(np.abs((maps * wave[None, :, :, None]).sum((1, 2))) + 1e-6).mean())
  np.testing.assert_allclose(spectra.fourier_amplitude(jnp.asarray(TOKENS), (4, 6)), np.array(want) - want[0],
                             rtol=1e-4, atol=1e-5)


def test_a_smooth_map_has_less_of_high_frequencies_than_a_chequered_one() -> None:
  rows, columns = np.indices((8, 8))
  smooth, chequered = ((x.reshape(1, 64, 1)).astype(np.float32) for x in (rows + columns, (rows + columns) % 2 + 1))
  ends = [float(spectra.fourier_amplitude(jnp.asarray(x), (8, 8))[-1]) for x in (smooth, chequered)]
  assert ends[0] < -5 < ends[1]


def test_singular_values_are_those_of_centred_tokens() -> None:
  want = []
  for tokens in TOKENS.astype(np.float64):
    values = np.sqrt(np.linalg.eigvalsh((tokens - tokens.mean(0)).T @ (tokens - tokens.mean(0)))[::-1])
    want.append(np.log(values / values[0]))
  np.testing.assert_allclose(spectra.singular_values(jnp.asarray(TOKENS)), np.mean(want, 0), rtol=1e-4, atol=1e-5)
