"""Tests of LayerNorm, GELU, dropout, stochastic depth and initialization."""
from __future__ import annotations

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config.schema import Gelu
from vit_jax.models import initialization, layers
from vit_jax.models.kernels import norm_act


@pytest.mark.parametrize('eps', [1e-6, 1e-1])
def test_layer_norm_equals_numpy_in_float64(eps: float) -> None:
  x = jax.random.normal(jax.random.key(0), (6, 32)) * 3. + 5.
  scale, bias = jax.random.normal(jax.random.key(1), (2, 32))
  x64 = np.asarray(x, np.float64)
  expected = (x64 - x64.mean(-1, keepdims=True)) / np.sqrt(x64.var(-1, keepdims=True) + eps)
  expected = expected * np.asarray(scale, np.float64) + np.asarray(bias, np.float64)
  np.testing.assert_allclose(norm_act.layer_norm(x, scale, bias, eps), expected, rtol=1e-4, atol=1e-5)


def test_layer_norm_of_bf16_computes_and_returns_f32() -> None:
  x = (jax.random.normal(jax.random.key(0), (6, 32)) + 300.).astype(jnp.bfloat16)
  y = norm_act.layer_norm(x, jnp.ones(32), jnp.zeros(32), 1e-6)
  assert y.dtype == jnp.float32
  np.testing.assert_allclose(jnp.square(y).mean(-1), 1., rtol=1e-3)


@pytest.mark.parametrize('kind', Gelu)
def test_gelu_equals_its_formula(kind: Gelu) -> None:
  x = np.linspace(-6, 6, 101)
  exact = np.array([v / 2 * (1 + math.erf(v / math.sqrt(2))) for v in x])
  tanh = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))
  expected = {Gelu.EXACT: exact, Gelu.TANH: tanh, Gelu.QUICK: x / (1 + np.exp(-1.702 * x))}[kind]
  np.testing.assert_allclose(norm_act.gelu(jnp.asarray(x, jnp.float32), kind), expected, rtol=1e-5, atol=2e-6)
  assert np.abs(exact - tanh).max() > 1e-4  # so that the two cannot be taken for each other


def test_dropout_keeps_the_expectation_and_scales_what_it_keeps() -> None:
  y = layers.dropout(jnp.ones((200, 100)), .25, jax.random.key(0))
  values, counts = np.unique(y, return_counts=True)
  np.testing.assert_allclose(values, [0., 1 / .75], rtol=1e-6)
  np.testing.assert_allclose(counts / 20_000, [.25, .75], atol=.015)


def test_dropout_without_key_or_rate_changes_nothing() -> None:
  x = jnp.ones((2, 3))
  assert layers.dropout(x, .5, None) is x
  assert layers.dropout(x, 0., jax.random.key(0)) is x


def test_drop_path_drops_whole_images_and_scales_the_others() -> None:
  x = jax.random.normal(jax.random.key(0), (40 * 5, 3)) + 10.
  y = layers.drop_path(x, jnp.float32(.4), jax.random.key(1), num_images=40)
  ratio_BR = np.reshape(y / x, (40, 15))
  np.testing.assert_allclose(ratio_BR, np.broadcast_to(ratio_BR[:, :1], (40, 15)), rtol=1e-6)
  np.testing.assert_allclose(np.unique(np.round(ratio_BR, 4)), [0., np.round(1 / .6, 4)], rtol=1e-5)


def test_drop_path_keeps_the_expectation() -> None:
  y = layers.drop_path(jnp.ones((4000 * 2, 1)), jnp.float32(.3), jax.random.key(1), num_images=4000)
  np.testing.assert_allclose(y.mean(), 1., atol=.04)  # standard error sqrt(.3 / .7 / 4000) = .0104


def test_drop_path_at_rate_zero_keeps_every_image() -> None:
  y = layers.drop_path(jnp.ones((600, 2), jnp.bfloat16), jnp.float32(0.), jax.random.key(0), num_images=300)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_array_equal(y.astype(jnp.float32), 1.)


def test_kernels_are_initialized_as_matrices() -> None:
  module = layers.Dense(features=(4, 16), axes=('embed', 'heads', 'head'), dtype=jnp.float32, law=initialization.XAVIER)
  kernel = layers.initial(module, jax.random.key(0), jnp.zeros((1, 32)))['kernel']
  assert kernel.shape == (32, 4, 16)
  limit = math.sqrt(6 / (32 + 64))  # Glorot and Bengio 2010, eq. 16, fans of the matrix [32, 64]
  assert .98 * limit < jnp.abs(kernel).max() <= limit


def test_a_module_without_parameters_has_none() -> None:
  class Twice(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
      return 2. * x

  assert layers.initial(Twice(), jax.random.key(0), jnp.ones(3)) == {}
  np.testing.assert_array_equal(layers.applied(Twice(), {}, jnp.ones(3)), 2.)
