"""Tests of the dense layer with its own gradient."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from vit_jax.core import numerics
from vit_jax.core.types import Array
from vit_jax.models.kernels.dense import dense, plain_dense, shared

SHAPES = [((5,), (7,)), ((8,), (2, 3)), ((2, 3), (8,)), ((4, 4, 3), (5,))]


def arguments(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> tuple[Array, Array, Array]:
  rng = np.random.default_rng(0)
  x, kernel, bias = (jax.device_put(np.float32(rng.normal(size=s))) for s in (
      (6, *inputs), (*inputs, *outputs), outputs))
  return x, kernel, bias


@pytest.mark.parametrize('inputs, outputs', SHAPES)
def test_dense_is_a_matrix_product_over_any_split_of_axes(
    inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
  x, kernel, bias = arguments(inputs, outputs)
  x_RI, kernel_IO = np.reshape(x, (6, -1)), np.reshape(kernel, (np.prod(inputs), -1))
  expected = (x_RI @ kernel_IO + np.reshape(bias, (1, -1))).reshape(6, *outputs)
  np.testing.assert_allclose(jax.jit(dense)(x, kernel, bias), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('inputs, outputs', SHAPES)
def test_dense_has_the_gradient_of_its_plain_form(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> None:
  args = arguments(inputs, outputs)
  gradients = [jax.jit(jax.grad(lambda *a, form=form: jnp.sin(form(*a)).sum(), argnums=(0, 1, 2)))(*args)
               for form in (dense, plain_dense)]
  for own, plain in zip(*gradients, strict=True):
    np.testing.assert_allclose(own, plain, rtol=1e-5, atol=1e-5)


def test_dense_has_the_gradient_of_finite_differences() -> None:
  check_grads(jax.jit(dense), arguments((2, 3), (4,)), order=1, modes=['rev'], atol=1e-2, rtol=1e-2)


def test_the_gradient_of_dense_transposes_nothing() -> None:
  gradient = jax.grad(lambda *a: jnp.sin(dense(*a)).sum(), argnums=(0, 1, 2))
  program = jax.jit(gradient).lower(*arguments((8,), (2, 3))).as_text()
  assert 'transpose' not in program
  assert program.count('stablehlo.dot_general') == 3


def test_the_bias_gradient_is_summed_in_f32() -> None:
  x, kernel, bias = (jnp.ones(s, jnp.bfloat16) for s in [(1000, 2), (2, 3), (3,)])
  gradient = jax.jit(jax.grad(lambda b: dense(x, kernel, b).sum()))(bias)
  assert gradient.dtype == jnp.bfloat16  # bf16 counts no further than 256 in steps of 1
  np.testing.assert_array_equal(gradient.astype(jnp.float32), 1000.)


@pytest.mark.parametrize(('kind', 'num_barriers'), [('TPU v4', 2), ('TPU v6 lite', 1)])
def test_on_a_tpu_the_input_of_several_products_is_an_array_of_its_own(
    kind: str, num_barriers: int, monkeypatch: pytest.MonkeyPatch) -> None:
  """So is its gradient on v4, where it is rounded as the products are."""
  monkeypatch.setattr(numerics, 'mesh_platform', lambda: 'tpu')
  monkeypatch.setattr(numerics, 'mesh_device_kind', lambda: kind)
  x = jnp.float32([1. + 2.**-10, 3.])
  copies, pull = jax.vjp(lambda x: shared(x, jnp.bfloat16, 3), x)
  for one in copies:
    assert one.dtype == jnp.bfloat16
    np.testing.assert_array_equal(one.astype(jnp.float32), [1., 3.])
  (dx,) = pull(tuple(jnp.full(2, size, jnp.bfloat16) for size in (256., 1., 1.5)))
  assert dx.dtype == jnp.float32
  np.testing.assert_array_equal(dx, 258. if num_barriers == 2 else 258.5)  # in bf16, 256 + 1 is 256
  jaxpr = str(jax.make_jaxpr(lambda x, dys: jax.vjp(lambda x: shared(x, jnp.bfloat16, 3), x)[1](dys))(x, copies))
  assert jaxpr.count('optimization_barrier') == num_barriers


def test_elsewhere_each_product_reads_the_input_itself() -> None:
  x = jnp.ones(2)
  assert all(one is x for one in shared(x, jnp.bfloat16, 3))
