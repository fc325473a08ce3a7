"""Forms with gradients written by hand against the plain forms that they must equal."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from vit_jax.config.schema import Gelu
from vit_jax.core.types import Array
from vit_jax.models.kernels import attend, dense, norm_act

QKV = tuple(jax.random.normal(jax.random.key(i), (2, m, 3, 8)) for i, m in enumerate((5, 7, 7)))


def gradients(form: Callable[..., Array], *args: Array) -> tuple[Array, ...]:
  return jax.grad(lambda *a: jnp.sin(form(*a).astype(jnp.float32)).sum(), argnums=range(len(args)))(*args)


def assert_same(form: Callable[..., Array], plain: Callable[..., Array], *args: Array, atol: float = 2e-6) -> None:
  np.testing.assert_allclose(form(*args), plain(*args), rtol=1e-5, atol=atol)
  for own, other in zip(gradients(form, *args), gradients(plain, *args), strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-4, atol=4 * atol)


def test_attention_equals_its_plain_form_and_gradient_also_with_other_queries_than_keys() -> None:
  assert_same(attend.attend, attend.plain_attend, *QKV)


def test_attention_with_large_logits_stays_finite_and_right() -> None:
  assert_same(attend.attend, attend.plain_attend, 40. * QKV[0], QKV[1], QKV[2], atol=2e-5)


def test_attention_has_the_gradient_of_finite_differences() -> None:
  check_grads(attend.attend, QKV, order=1, modes=['rev'], atol=2e-2, rtol=2e-2)


def test_attention_in_bf16_is_as_near_to_f32_as_its_plain_form() -> None:
  query, key, value = (jax.random.normal(jax.random.key(i), (4, 50, 3, 64)) for i in range(3))
  low = tuple(x.astype(jnp.bfloat16) for x in (query, key, value))
  exact = tuple(x.astype(jnp.float32) for x in low)

  def errors(form: Callable[..., Array]) -> list[float]:
    pairs = [(form(*low), attend.plain_attend(*exact)),
             *zip(gradients(form, *low), gradients(attend.plain_attend, *exact), strict=True)]
    return [float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)) for a, b in pairs]

  fast, plain = errors(attend.attend), errors(attend.plain_attend)
  assert max(fast) < 2e-2 and max(plain) > 1e-3
  assert all(a < 2 * b + 2e-3 for a, b in zip(fast, plain, strict=True)), (fast, plain)


def test_both_layouts_of_attention_are_the_same() -> None:
  dmixed = jax.random.normal(jax.random.key(3), QKV[0].shape)
  heads, keys = attend._heads_first(*QKV), attend._keys_first(*QKV)
  for own, other in zip(heads, keys, strict=True):
    np.testing.assert_allclose(attend._swapped(own).swapaxes(2, 3), other, rtol=1e-5, atol=1e-6)
  for own, other in zip(attend._pull_heads_first(*QKV, *heads, dmixed), attend._pull_keys_first(*QKV, *keys, dmixed),
                        strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize('shape', [(6, 32), (2, 3, 32)])
def test_layer_norm_equals_its_plain_form_and_gradient(shape: tuple[int, ...]) -> None:
  x = 3. * jax.random.normal(jax.random.key(0), shape) + 5.
  scale, bias = jax.random.normal(jax.random.key(1), (2, 32))
  assert_same(lambda *a: norm_act.layer_norm(*a, 1e-3), lambda *a: norm_act.plain_layer_norm(*a, 1e-3),
              x, scale, bias, atol=1e-5)


@pytest.mark.parametrize('offset', [0., 3., -20.])
def test_one_pass_over_a_row_finds_what_two_find(offset: float) -> None:
  x = jax.random.normal(jax.random.key(0), (6, 1024)) + offset
  for own, other in zip(norm_act._in_one_pass(x, 1e-6), norm_act._in_two_passes(x, 1e-6), strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-6 * (1. + offset ** 2), atol=1e-6)
  mean, inverse = norm_act._in_one_pass(jnp.full((1, 8), 1000.1), 1e-6)
  assert jnp.isfinite(inverse).all() and float(inverse[0, 0]) > 1.


def test_layer_norm_of_bf16_gives_back_a_gradient_of_bf16() -> None:
  x = jax.random.normal(jax.random.key(0), (6, 32), jnp.bfloat16)
  dx, dscale, dbias = gradients(lambda *a: norm_act.layer_norm(*a, 1e-6), x, jnp.ones(32), jnp.zeros(32))
  assert (dx.dtype, dscale.dtype, dbias.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)


@pytest.mark.parametrize('kind', Gelu)
def test_gelu_equals_its_plain_form_and_gradient(kind: Gelu) -> None:
  assert_same(lambda x: norm_act.gelu(x, kind), lambda x: norm_act.plain_gelu(x, kind), jnp.linspace(-6., 6., 101))


@pytest.mark.parametrize('inputs, outputs', [((8,), (2, 3)), ((2, 3), (8,))])
def test_both_layouts_of_the_dense_layer_are_the_same(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
  keys = jax.random.split(jax.random.key(0), 4)
  x, kernel, bias, dy = (jax.random.normal(k, s) for k, s in zip(
      keys, ((2, 5, *inputs), (*inputs, *outputs), outputs, (2, 5, *outputs)), strict=True))
  np.testing.assert_allclose(dense._rows_first(x, kernel, bias), dense.plain_dense(x, kernel, bias), rtol=1e-5,
                             atol=1e-5)
  for own, other in zip(dense._pull_rows_first(x, kernel, dy), dense._pull(x, kernel, dy), strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def test_a_program_holds_only_the_layout_of_its_platform() -> None:
  args = jnp.ones((2, 5, 8)), jnp.ones((8, 3)), jnp.ones(3)
  traced = jax.jit(lambda *a: gradients(dense.dense, *a)).trace(*args)
  texts = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ('cpu', 'tpu')}
  assert all(text.count('stablehlo.dot_general') == 3 for text in texts.values())
  assert 'tensor<10x8xf32>' in texts['cpu'] and 'tensor<10x8xf32>' not in texts['tpu']
