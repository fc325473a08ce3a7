"""Forms with gradients written by hand against the plain forms that they must equal."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from vit_jax.config.schema import Gelu
from vit_jax.core import numerics
from vit_jax.core.types import Array
from vit_jax.models.kernels import attend, dense, norm_act


def normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.fixture(scope='module')
def qkv() -> tuple[Array, ...]:
  return tuple(normal(i, (2, m, 3, 8)) for i, m in enumerate((5, 7, 7)))


def gradients(form: Callable[..., Array], *args: Array) -> tuple[Array, ...]:
  return jax.grad(lambda *a: jnp.sin(form(*a).astype(jnp.float32)).sum(), argnums=range(len(args)))(*args)


@functools.partial(jax.jit, static_argnums=0)
def both(form: Callable[..., Array], *args: Array) -> tuple[Array, tuple[Array, ...]]:
  """The result and the gradient."""
  return form(*args), gradients(form, *args)


def assert_same(form: Callable[..., Array], plain: Callable[..., Array], *args: Array, atol: float = 2e-6) -> None:
  (value, found), (expected, wanted) = (both(f, *args) for f in (form, plain))
  np.testing.assert_allclose(value, expected, rtol=1e-5, atol=atol)
  for own, other in zip(found, wanted, strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-4, atol=4 * atol)


def test_attention_equals_its_plain_form_and_gradient_also_with_other_queries_than_keys(qkv: tuple[Array, ...]) -> None:
  assert_same(attend.xla_attend, attend.plain_attend, *qkv)


def test_attention_with_large_logits_stays_finite_and_right(qkv: tuple[Array, ...]) -> None:
  assert_same(attend.xla_attend, attend.plain_attend, 40. * qkv[0], qkv[1], qkv[2], atol=2e-5)


def test_attention_has_the_gradient_of_finite_differences(qkv: tuple[Array, ...]) -> None:
  check_grads(jax.jit(attend.xla_attend), qkv, order=1, modes=['rev'], atol=2e-2, rtol=2e-2)


def test_attention_in_bf16_is_as_near_to_f32_as_its_plain_form() -> None:
  query, key, value = (normal(i, (4, 50, 3, 64)) for i in range(3))
  low = tuple(x.astype(jnp.bfloat16) for x in (query, key, value))
  exact = tuple(x.astype(jnp.float32) for x in low)

  def errors(form: Callable[..., Array]) -> list[float]:
    pairs = zip(*map(jax.tree.leaves, (both(form, *low), both(attend.plain_attend, *exact))), strict=True)
    return [float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)) for a, b in pairs]

  fast, plain = errors(attend.xla_attend), errors(attend.plain_attend)
  assert max(fast) < 2e-2 and max(plain) > 1e-3
  assert all(a < 2 * b + 2e-3 for a, b in zip(fast, plain, strict=True)), (fast, plain)


def test_both_layouts_of_attention_are_the_same(qkv: tuple[Array, ...]) -> None:
  dmixed = normal(3, qkv[0].shape)
  heads, keys = jax.jit(attend._heads_first)(*qkv), jax.jit(attend._keys_first)(*qkv)
  for own, other in zip(heads, keys, strict=True):
    np.testing.assert_allclose(attend._swapped(own).swapaxes(2, 3), other, rtol=1e-5, atol=1e-6)
  for own, other in zip(jax.jit(attend._pull_heads_first)(*qkv, *heads, dmixed),
                        jax.jit(attend._pull_keys_first)(*qkv, *keys, dmixed), strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-5, atol=2e-6)


def test_attention_that_keeps_logits_is_the_same(qkv: tuple[Array, ...], monkeypatch: pytest.MonkeyPatch) -> None:
  found = both(functools.partial(attend.xla_attend), *qkv)
  monkeypatch.setattr(numerics, 'mesh_device_kind', lambda: 'TPU v6 lite')
  kept = jax.eval_shape(lambda *a: attend._forward(*a)[1], *qkv)
  assert [x.shape for x in kept] == [*(x.shape for x in qkv), (2, 3, 7, 5), (2, 3, 1, 5), (2, 3, 1, 5), (2, 3, 8, 5)]
  monkeypatch.setattr(attend.lax, 'platform_dependent', lambda *args, default, **others: default(*args))
  for own, other in zip(jax.tree.leaves(both(functools.partial(attend.xla_attend), *qkv)), jax.tree.leaves(found),
                        strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize('kind, num_kept', [
    ('TPU v6 lite', 7), ('TPU v5 lite', 6), ('TPU v3', 6), ('NVIDIA H200', 6), ('', 6)])
def test_only_the_tpu_that_it_was_compiled_for_keeps_logits(
    kind: str, num_kept: int, qkv: tuple[Array, ...], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(numerics, 'mesh_device_kind', lambda: kind)
  assert len(jax.eval_shape(lambda *a: attend._forward(*a)[1], *qkv)) == num_kept


def test_the_kind_of_devices_is_that_of_the_current_mesh() -> None:
  assert numerics.mesh_device_kind() == ''
  device = jax.sharding.AbstractDevice('TPU v6 lite', None, 'tpu')
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ('data',), abstract_device=device)):
    assert numerics.mesh_device_kind() == 'TPU v6 lite'


@pytest.mark.parametrize('shape', [(6, 32), (2, 3, 32)])
def test_layer_norm_equals_its_plain_form_and_gradient(shape: tuple[int, ...]) -> None:
  x = 3. * normal(0, shape) + 5.
  scale, bias = normal(1, (2, 32))
  assert_same(lambda *a: norm_act.layer_norm(*a, 1e-3), lambda *a: norm_act.plain_layer_norm(*a, 1e-3),
              x, scale, bias, atol=1e-5)


@pytest.mark.parametrize('offset', [0., 3., -20.])
def test_one_pass_over_a_row_finds_what_two_find(offset: float) -> None:
  x = normal(0, (6, 1024)) + offset
  in_one_pass, in_two_passes = map(jax.jit, (norm_act._in_one_pass, norm_act._in_two_passes))
  for own, other in zip(in_one_pass(x, 1e-6), in_two_passes(x, 1e-6), strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-6 * (1. + offset ** 2), atol=1e-6)
  mean, inverse = in_one_pass(jnp.full((1, 8), 1000.1), 1e-6)
  assert jnp.isfinite(inverse).all() and float(inverse[0, 0]) > 1.


def test_layer_norm_of_bf16_gives_back_a_gradient_of_bf16() -> None:
  x = normal(0, (6, 32), jnp.bfloat16)
  dx, dscale, dbias = jax.eval_shape(functools.partial(gradients, lambda *a: norm_act.layer_norm(*a, 1e-6)), x,
                                     jnp.ones(32), jnp.zeros(32))
  assert (dx.dtype, dscale.dtype, dbias.dtype) == (jnp.bfloat16, jnp.float32, jnp.float32)


@pytest.mark.parametrize('kind', Gelu)
def test_gelu_equals_its_plain_form_and_gradient(kind: Gelu) -> None:
  assert_same(lambda x: norm_act.gelu(x, kind), lambda x: norm_act.plain_gelu(x, kind), jnp.linspace(-6., 6., 101))


@pytest.mark.parametrize('inputs, outputs', [((8,), (2, 3)), ((2, 3), (8,))])
def test_both_layouts_of_the_dense_layer_are_the_same(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
  x, kernel, bias, dy = (normal(i, shape) for i, shape in enumerate((
      (2, 5, *inputs), (*inputs, *outputs), outputs, (2, 5, *outputs))))
  np.testing.assert_allclose(*(jax.jit(form)(x, kernel, bias) for form in (dense._rows_first, dense.plain_dense)),
                             rtol=1e-5, atol=1e-5)
  for own, other in zip(*(jax.jit(form)(x, kernel, dy) for form in (dense._pull_rows_first, dense._pull)), strict=True):
    np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow(reason='2 s: lowers a network twice')
def test_a_program_holds_only_the_layout_of_its_platform() -> None:
  args = jnp.ones((2, 5, 8)), jnp.ones((8, 3)), jnp.ones(3)
  traced = jax.jit(lambda *a: gradients(dense.dense, *a)).trace(*args)
  texts = {name: traced.lower(lowering_platforms=(name,)).as_text() for name in ('cpu', 'tpu')}
  assert all(text.count('stablehlo.dot_general') == 3 for text in texts.values())
  assert 'tensor<10x8xf32>' in texts['cpu'] and 'tensor<10x8xf32>' not in texts['tpu']


def test_the_short_slope_of_gelu_is_the_slope() -> None:
  x = jnp.linspace(-8., 8., 4_001)
  # `1 + t` and `1 - t^2` are rounded by up to 2**-24, and then multiplied with up to 61 and 31, at -8.
  np.testing.assert_allclose(norm_act._short_slope(x), norm_act.slope_of_gelu(x, Gelu.TANH), rtol=0, atol=92 * 2**-24)
  program = jax.jit(jax.grad(lambda x: norm_act.gelu(x, Gelu.TANH).sum())).trace(x)
  by_platform = [program.lower(lowering_platforms=(name,)).as_text().count('multiply') for name in ('tpu', 'cpu')]
  assert by_platform[0] < by_platform[1], 'only a TPU has the short form'
