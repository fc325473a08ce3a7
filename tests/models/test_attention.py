"""Tests of self-attention."""
from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.config.schema import Kernels
from vit_jax.core import numerics
from vit_jax.core.types import Array, Params
from vit_jax.models import layers
from vit_jax.models.kernels import forms
from vit_jax.models.kernels.attend import attention_weights, combine, xla_attend
from vit_jax.models.vit.attention import Attention
from vit_jax.models.vit.context import Context
from vit_jax.models.vit.positions import relative_logits


def projections(dtype: jnp.dtype = jnp.float32) -> tuple[Array, Array, Array]:
  q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 8)).astype(dtype)
  return q, k, v


def initial(module: Attention, *args: Array, **options: Any) -> Params:
  return jax.jit(lambda *a: layers.initial(module, *a, **options))(*args)


def applied(module: Attention, *args: Array, **options: Any) -> tuple[Array, dict[str, Array]]:
  return jax.jit(lambda *a: layers.applied(module, *a, **options))(*args)


CONTEXT = Context(norm=schema.LayerNorm(), gelu=schema.Gelu.TANH, dtype=jnp.float32)


def plain(**options: object) -> Attention:
  return Attention(**{'heads': 4, 'laws': CONTEXT.laws.attention, 'context': CONTEXT, **options})


def test_attend_equals_numpy_in_float64() -> None:
  q, k, v = (np.asarray(a, np.float64) for a in projections())
  logits = np.einsum('bqak,bmak->baqm', q, k) / np.sqrt(8)
  weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  np.testing.assert_allclose(
      xla_attend(*projections()), np.einsum('baqm,bmak->bqak', weights, v), rtol=1e-4, atol=1e-5)


def test_attention_rows_sum_to_one_in_f32_even_for_bf16() -> None:
  q, k, _ = projections(jnp.bfloat16)
  weights = attention_weights(q * 30, k)
  assert weights.dtype == jnp.float32 and weights.shape == (2, 4, 5, 5)
  np.testing.assert_allclose(weights.sum(-1), 1., rtol=1e-6)


def test_attention_stays_finite_for_large_logits() -> None:
  q, k, v = projections()
  assert jnp.isfinite(xla_attend(q * 1e4, k * 1e4, v)).all()


@pytest.mark.slow(reason='1 s; block by block in test_vit.py captures attention')
def test_captured_weights_reproduce_the_output() -> None:
  module = plain()
  x = jax.random.normal(jax.random.key(1), (2 * 5, 32))
  params = initial(module, jax.random.key(0), x, x, num_sequences=2, dropout_key=None, capture=False)
  y, nothing = applied(module, params, x, x, num_sequences=2, dropout_key=None, capture=False)
  y_captured, captured = applied(module, params, x, x, num_sequences=2, dropout_key=None, capture=True)
  assert not nothing and set(captured) == {'attention'}
  np.testing.assert_allclose(y_captured, y, rtol=1e-6, atol=1e-6)
  value = jnp.einsum('rd,dak->rak', x, params['value']['kernel']).reshape(2, 5, 4, 8)
  mixed = combine(captured['attention'], value)
  by_hand = jnp.einsum('bmak,akd->bmd', mixed, params['out']['kernel']).reshape(10, 32)
  np.testing.assert_allclose(y, by_hand, rtol=1e-5, atol=1e-5)


def test_images_do_not_attend_to_each_other() -> None:
  module = plain()
  x = jax.random.normal(jax.random.key(1), (2 * 5, 32))
  params = initial(module, jax.random.key(0), x, x, num_sequences=2, dropout_key=None, capture=False)
  both, _ = applied(module, params, x, x, num_sequences=2, dropout_key=None, capture=False)
  second, _ = applied(module, params, x[5:], x[5:], num_sequences=1, dropout_key=None, capture=False)
  np.testing.assert_allclose(both[5:], second, rtol=1e-5, atol=1e-6)


def test_relative_logits_are_products_with_the_key_of_the_offset() -> None:
  query = jax.random.normal(jax.random.key(0), (2, 2 + 5, 4, 8))  # two tokens without a place, five with
  table = jax.random.normal(jax.random.key(1), (9, 4, 8))
  expected = np.zeros((2, 4, 7, 7))
  for i in range(5):
    for j in range(5):
      key_of_offset = np.asarray(table)[5 - 1 - (i - j)]  # [A, K]; row t is the offset N - 1 - t
      expected[:, :, 2 + i, 2 + j] = (np.asarray(query)[:, 2 + i] * key_of_offset[None]).sum(-1)
  np.testing.assert_allclose(relative_logits(query, table), expected, rtol=1e-4, atol=1e-5)


def test_relative_logits_are_divided_like_the_others_and_move_the_attention() -> None:
  q, k, _ = projections()
  table = jax.random.normal(jax.random.key(1), (9, 4, 8))
  logits = np.einsum('bqak,bmak->baqm', q, k) + np.asarray(relative_logits(q, table))
  weights = np.exp(logits / np.sqrt(8))
  np.testing.assert_allclose(attention_weights(q, k, relative=relative_logits(q, table)),
                             weights / weights.sum(-1, keepdims=True), rtol=1e-4, atol=1e-6)


def test_normed_queries_and_keys_bound_the_logits() -> None:
  x = jax.random.normal(jax.random.key(1), (2 * 5, 32))
  for module, is_bounded in ((plain(qk_norm=True), True), (plain(), False)):
    params = initial(module, jax.random.key(0), x, x, num_sequences=2, dropout_key=None, capture=True)
    _, captured = applied(module, params, 1e3 * x, 1e3 * x, num_sequences=2, dropout_key=None, capture=True)
    # |q . k| / sqrt(K) <= sqrt(K) after LayerNorm with unit scale.
    assert bool(captured['attention'].min() > np.exp(-2 * np.sqrt(8)) / 5) is is_bounded
    assert ('query_norm' in params and 'key_norm' in params) is is_bounded and 'value_norm' not in params


@pytest.mark.slow(reason='2 s: two programs')
def test_attention_dropout_drops_weights_and_keeps_the_expectation() -> None:
  module = plain(dropout=.4)
  x = jax.random.normal(jax.random.key(1), (5, 32))
  params = initial(module, jax.random.key(0), x, x, num_sequences=1, dropout_key=None, capture=False)
  run = jax.jit(jax.vmap(lambda key: applied(
      module, params, x, x, num_sequences=1, dropout_key=key, capture=False)[0]))
  many = run(jax.random.split(jax.random.key(2), 3000))
  still, _ = applied(module, params, x, x, num_sequences=1, dropout_key=None, capture=False)
  np.testing.assert_allclose(many.mean(0), still, atol=5 * float(many.std(0).max()) / np.sqrt(3000))
  assert float(many.std(0).min()) > 1e-3


def test_a_query_may_ask_another_sequence() -> None:
  module, x = plain(), jax.random.normal(jax.random.key(1), (2 * 5, 32))
  params = initial(module, jax.random.key(0), x, x, num_sequences=2, dropout_key=None, capture=False)
  asked, captured = applied(module, params, x[jnp.asarray([1, 7])], x, num_sequences=2, dropout_key=None, capture=True)
  whole, _ = applied(module, params, x, x, num_sequences=2, dropout_key=None, capture=False)
  np.testing.assert_allclose(asked, whole[jnp.asarray([1, 7])], rtol=1e-4, atol=1e-5)
  assert captured['attention'].shape == (2, 4, 1, 5)


@pytest.mark.parametrize(('kernels', 'num_barriers'), [(Kernels.FAST, 1), (Kernels.PLAIN, 0)])
def test_on_a_tpu_the_projections_of_self_attention_read_one_array(
    kernels: Kernels, num_barriers: int, monkeypatch: pytest.MonkeyPatch) -> None:
  """A barrier before them; none if keys and values have another input, or if forward-mode must work."""
  x = jax.random.normal(jax.random.key(1), (2, 5, 32))
  module = plain(context=dataclasses.replace(CONTEXT, forms=forms.select(kernels)))
  options = {'num_sequences': 2, 'dropout_key': None, 'capture': False}
  params = initial(module, jax.random.key(0), x, x, **options)
  wanted = applied(module, params, x, x, **options)[0]

  def own(x: Array) -> Array:
    return layers.applied(module, params, x, x, **options)[0]

  def other(x: Array) -> Array:
    return layers.applied(module, params, x, x + 0., **options)[0]

  monkeypatch.setattr(numerics, 'mesh_platform', lambda: 'tpu')
  monkeypatch.setattr(numerics, 'mesh_device_kind', lambda: 'TPU v4')
  counts = [str(jax.make_jaxpr(run)(x)).count('optimization_barrier') for run in (own, other)]
  assert counts == [num_barriers, 0]
  np.testing.assert_array_equal(jax.jit(own)(x), wanted)
