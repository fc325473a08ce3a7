"""Tests of FLOPs and kept bytes that are read from traced programs: computations by hand, and what XLA allocates."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from vit_jax.core import traced_costs
from vit_jax.core.types import Array

X, W = jax.ShapeDtypeStruct((3, 5), jnp.float32), jax.ShapeDtypeStruct((5, 5), jnp.float32)
IMAGE, KERNEL = jax.ShapeDtypeStruct((1, 8, 6, 4), jnp.float32), jax.ShapeDtypeStruct((3, 3, 2, 6), jnp.float32)


def total(function: Callable[..., Any], *args: Any) -> int:
  return sum(traced_costs.flops(function, *args).values())


def convolve(x: Array, kernel: Array, **more: Any) -> Array:
  return lax.conv_general_dilated(x, kernel, **{'window_strides': (2, 2), 'padding': 'SAME', **more},
                                  dimension_numbers=('NHWC', 'HWIO', 'NHWC'))


def test_a_product_costs_two_flops_for_each_multiplication() -> None:
  assert total(jnp.matmul, X, W) == 2 * 3 * 5 * 5
  batched = jax.ShapeDtypeStruct((7, 3, 5), jnp.float32), jax.ShapeDtypeStruct((7, 4, 5), jnp.float32)
  assert total(lambda a, b: jnp.einsum('bij,bkj->bik', a, b), *batched) == 2 * 7 * 3 * 4 * 5
  assert total(lambda x: jnp.tanh(x) * x + x.sum(), X) == 0


def test_a_convolution_costs_its_kernel_at_each_output_in_both_directions() -> None:
  def run(x: Array, kernel: Array) -> Array:
    return convolve(x, kernel, feature_group_count=2)

  forward = 2 * (4 * 3) * 6 * (3 * 3 * 2)  # outputs 4 x 3, 6 channels, of 2 input channels each
  assert total(run, IMAGE, KERNEL) == forward
  # The gradient by the image is a convolution of dilated maps, of which only the elements count.
  assert total(jax.value_and_grad(lambda x, k: jnp.square(run(x, k)).sum()), IMAGE, KERNEL) == 2 * forward


def test_a_scan_costs_its_body_in_each_iteration_and_a_call_what_it_calls() -> None:
  def run(x: Array, w: Array) -> Array:
    step = jax.checkpoint(jax.jit(lambda x, _: (jnp.tanh(x @ w), None)))
    return lax.scan(step, x, None, length=6)[0]

  assert total(run, X, W) == 6 * 2 * 3 * 5 * 5
  assert total(jax.grad(lambda x, w: run(x, w).sum(), argnums=(0, 1)), X, W) == 4 * 6 * 2 * 3 * 5 * 5  # one anew


def test_scopes_name_the_parts() -> None:
  def run(x: Array, w: Array) -> Array:
    with jax.named_scope('first'):
      x = jnp.einsum('ij,jk->ik', x, w)
    with jax.named_scope('second'), jax.named_scope('inner'):
      return x @ w @ w

  assert traced_costs.flops(run, X, W) == {'first': 150, 'second/inner': 300}


def test_branches_count_once_if_they_cost_the_same_and_are_refused_otherwise() -> None:
  def branching(other: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: other(x @ w))

  assert total(branching(jnp.tanh), X, W) == 150
  assert total(lambda x, w: lax.cond(x[0, 0] > 0, lambda: x, lambda: x @ w @ w), X, W) == 300  # not from the start
  with pytest.raises(ValueError, match='expected branches with equal FLOPs or none'):
    total(lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w), X, W)
  with pytest.raises(ValueError, match='expected a loop without FLOPs'):
    total(lambda x, w: lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ w, x), X, W)


def test_kept_bytes_are_the_residuals_without_arguments() -> None:
  def loss(w: Array, x: Array) -> Array:
    return jnp.sin(jnp.sin(x @ w) @ w).sum()  # kept: the input of the second product, and both cosines

  assert traced_costs.kept_bytes(loss, W, X) == 3 * (3 * 5) * 4


def test_what_is_computed_again_is_kept_for_one_part_at_a_time() -> None:
  def loss(policy: Any) -> Callable[[Array, Array], Array]:
    def layer(x: Array, w: Array) -> Array:
      return jnp.sin(jnp.sin(x @ w) @ w)

    def run(w: Array, x: Array) -> Array:
      step = jax.checkpoint(layer, policy=policy) if policy else layer
      return lax.scan(lambda x, _: (step(x, w), None), x, None, length=8)[0].sum()
    return run

  one = 3 * 5 * 4
  everything = traced_costs.kept_bytes(loss(None), W, X)
  assert everything == 8 * 4 * one  # of each layer its input, the input of its second product, two cosines
  nothing = jax.checkpoint_policies.nothing_saveable
  assert traced_costs.kept_bytes(loss(nothing), W, X) == 8 * one + 3 * one  # each input, and the rest of one layer


@pytest.mark.slow(reason='4 s: compiles four gradients')
@pytest.mark.parametrize('remat', [False, True])
def test_xla_allocates_what_is_kept_and_its_work_space(remat: bool) -> None:
  def loss(w: Array, x: Array) -> Array:
    def layer(x: Array, _: None) -> tuple[Array, None]:
      return jnp.sin(jnp.sin(x @ w) @ w), None
    return lax.scan(jax.checkpoint(layer) if remat else layer, x, None, length=24)[0].sum()

  w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  xs = [jax.ShapeDtypeStruct((rows, 64), jnp.float32) for rows in (512, 1024)]
  few, more = (jax.jit(jax.grad(loss)).lower(w, x).compile().memory_analysis().temp_size_in_bytes for x in xs)
  kept = traced_costs.kept_bytes(loss, w, xs[1]) - traced_costs.kept_bytes(loss, w, xs[0])
  assert 1. <= (more - few) / kept < 1.3
