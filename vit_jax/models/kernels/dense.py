"""The affine map of all layers, `y = x W + b`, in a plain form and with a gradient written by hand; and its input.

Both forms compute the same; the second is the one in use. What is fastest differs by platform and is chosen when a
program is lowered for one:

  CPU: rows first, `[rows, in]` times `[in, out]`. Autodiff gives the gradient of a stack of layers through transposed
    copies of the residual gradient; XLA's CPU compiler fuses these copies into all their users and so computes the sum
    over the later layers again in each of them, which halves the speed of training. Here nothing is transposed.
  GPU: rows first, too. cuBLAS adds a bias, and computes GELU, within a product only where the bias is a vector; and it
    lays the arrays between the blocks out as they are, where XLA would transpose them before and after each norm.
  TPU: axes as they are. A TPU lays out the last two axes in tiles, of which a number of tokens is rarely a
    multiple: to join images and tokens into rows, and to part them again, is then a copy each time.
  TPU, where several products have one input (`shared`): it is an array of its own. The compiler would compute the norm
    before them again in each product, forward and backward. On TPUs other than v5e and v6e its gradient is an array,
    too: on v3 and v4 the sums of the norm's gradient take longer within the last product than after it; others were
    not compiled (BENCHMARKS.md).

Knows nothing of parameters or modules.
"""
from __future__ import annotations

import functools
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from vit_jax.core import numerics
from vit_jax.core.types import Array

FUSE_GRADIENT = ('TPU v5 lite', 'TPU v6 lite')
"""Kinds of TPUs on which the gradient of a shared input is not an array of its own."""


def plain_dense(x: Array, kernel: Array, bias: Array) -> Array:
  """`y[r, o] = sum_i x[r, i] W[i, o] + b[o]`, where `r`, `i` and `o` may each be several axes.

  Args:
    x: `[*rows, *in]`.
    kernel: `[*in, *out]`, same dtype; the product accumulates in f32 and is rounded to this dtype.
    bias: `[*out]`, same dtype; its rank says how many axes are `out`.

  Returns:
    `[*rows, *out]`, same dtype.
  """
  lead = x.ndim - (kernel.ndim - bias.ndim)
  y = contract(x, kernel, range(lead, x.ndim), range(x.ndim - lead))
  return y + jnp.expand_dims(bias, range(lead))


@jax.custom_vjp
def dense(x: Array, kernel: Array, bias: Array) -> Array:
  """Equal to `plain_dense`; reverse-mode differentiation only."""
  return lax.platform_dependent(x, kernel, bias, cpu=_rows_first, cuda=_rows_first, default=plain_dense)


def _rows_first(x: Array, kernel: Array, bias: Array) -> Array:
  lead = x.ndim - (kernel.ndim - bias.ndim)
  y = plain_dense(x.reshape(prod(x.shape[:lead]), -1), kernel.reshape(-1, bias.size), bias.reshape(-1))
  return y.reshape(*x.shape[:lead], *bias.shape)


def _forward(x: Array, kernel: Array, bias: Array) -> tuple[Array, tuple[Array, Array]]:
  return dense(x, kernel, bias), (x, kernel)


def _backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array, Array]:
  """`dx = dy W^T`, `dW = x^T dy`, `db = sum_r dy` (the sum in f32)."""
  return lax.platform_dependent(*saved, dy, cpu=_pull_rows_first, cuda=_pull_rows_first, default=_pull)


def _pull(x: Array, kernel: Array, dy: Array) -> tuple[Array, Array, Array]:
  num_in = (x.ndim + kernel.ndim - dy.ndim) // 2
  rows = range(x.ndim - num_in)
  dx = contract(dy, kernel, range(len(rows), dy.ndim), range(num_in, kernel.ndim))
  return dx, contract(x, dy, rows, rows), dy.sum(tuple(rows), dtype=jnp.float32).astype(dy.dtype)


def _pull_rows_first(x: Array, kernel: Array, dy: Array) -> tuple[Array, Array, Array]:
  num_in = (x.ndim + kernel.ndim - dy.ndim) // 2
  rows = prod(x.shape[:x.ndim - num_in])
  x_RI, dy_RO = x.reshape(rows, -1), dy.reshape(rows, -1)
  dx, dkernel, dbias = _pull(x_RI, kernel.reshape(x_RI.shape[1], -1), dy_RO)
  return dx.reshape(x.shape), dkernel.reshape(kernel.shape), dbias.reshape(kernel.shape[num_in:])


def contract(a: Array, b: Array, of_a: range, of_b: range, sums: DTypeLike | None = None) -> Array:
  """Returns the product of two arrays over these axes of both; `sums` is its dtype, None = that of the arrays."""
  return lax.dot_general(a, b, ((tuple(of_a), tuple(of_b)), ((), ())), preferred_element_type=sums)


dense.defvjp(_forward, _backward)


def plain_shared(x: Array, dtype: DTypeLike, count: int) -> tuple[Array, ...]:
  """The input of several products, once for each.

  Args:
    x: `[*rows, D]`, f32 or the compute dtype.
    dtype: the compute dtype, to which each product casts its own.
    count: number of products.

  Returns:
    So many times `x`.
  """
  return (x,) * count


def shared(x: Array, dtype: DTypeLike, count: int) -> tuple[Array, ...]:
  """Equal to `plain_shared`, but on TPUs in `dtype`, with gradients that are summed in f32; reverse-mode only there."""
  if (platform := numerics.mesh_platform()) not in ('gpu', 'tpu'):
    return plain_shared(x, dtype, count)
  is_whole = platform == 'tpu' and not any(kind in numerics.mesh_device_kind() for kind in FUSE_GRADIENT)
  return _materialized(x, dtype, count, is_whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _materialized(x: Array, dtype: DTypeLike, count: int, is_whole: bool) -> tuple[Array, ...]:
  """`is_whole`: whether the gradient is an array of its own, too."""
  return (lax.optimization_barrier(x.astype(dtype)),) * count


def _share(x: Array, dtype: DTypeLike, count: int, is_whole: bool) -> tuple[tuple[Array, ...], Array]:
  return _materialized(x, dtype, count, is_whole), jnp.zeros(0, x.dtype)


def _collect(dtype: DTypeLike, count: int, is_whole: bool, like: Array, dys: tuple[Array, ...]) -> tuple[Array]:
  total = sum((dy.astype(jnp.float32) for dy in dys[1:]), dys[0].astype(jnp.float32))
  return ((lax.optimization_barrier(total.astype(dtype)) if is_whole else total).astype(like.dtype),)


_materialized.defvjp(_share, _collect)
