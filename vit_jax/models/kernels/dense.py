"""The affine map of all layers, `y = x W + b`: plain, with a gradient written by hand, or quantized; and shared inputs.

The first two forms compute the same; networks use the second. The fastest order of axes differs by platform, and is
chosen when a program is lowered for one:

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
    not compiled.

The third form has products in int8 or fp8, forward and backward (`model.quantize`). An array is quantized
symmetrically by its largest magnitudes, anew in each step (absolute maximum, no calibration): of activations and
gradients one scale for each token, of a kernel one for each output. With q(a) the entries of a, as the narrow dtype
holds them, and s(a) the scales:

    y  = s(x) s(W) (q(x) q(W)) + b
    dx = s(g) (q(g) q(W)^T) with g = s(W) dy, so that the kernel is quantized once for both products
    dW = x^T dy, in the dtype of the layer

The gradient of a kernel sums over all tokens of a batch, and keeps its precision for that reason: it is SwitchBack
(arXiv 2304.13013, section 2.2), with a scale for each output of the kernel in place of one for all. int8 is summed in
int32, without rounding; fp8 is float8_e4m3fn, for gradients too, and is summed in f32. Rounding has the gradient of the
identity. This module knows nothing of parameters.
"""
from __future__ import annotations

import functools
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from vit_jax.config.schema import Quantize
from vit_jax.core import numerics
from vit_jax.core.types import Array

SMALLEST = 1e-30
"""The least absolute maximum: smaller entries are quantized to 0, and nothing is divided by 0."""
FUSE_GRADIENT = ('TPU v5 lite', 'TPU v6 lite')
"""Kinds of TPUs on which the gradient of a shared input is not an array of its own."""


def plain_dense(x: Array, kernel: Array, bias: Array) -> Array:
  """Returns `y[r, o] = sum_i x[r, i] W[i, o] + b[o]`, where `r`, `i` and `o` may each be several axes.

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
  """Returns `plain_dense`; reverse-mode differentiation only."""
  return lax.platform_dependent(x, kernel, bias, cpu=_rows_first, cuda=_rows_first, default=plain_dense)


def _rows_first(x: Array, kernel: Array, bias: Array) -> Array:
  """Returns the product of matrices `[rows, in]` and `[in, out]`, with the shape of `plain_dense`."""
  lead = x.ndim - (kernel.ndim - bias.ndim)
  y = plain_dense(x.reshape(prod(x.shape[:lead]), -1), kernel.reshape(-1, bias.size), bias.reshape(-1))
  return y.reshape(*x.shape[:lead], *bias.shape)


def _forward(x: Array, kernel: Array, bias: Array) -> tuple[Array, tuple[Array, Array]]:
  return dense(x, kernel, bias), (x, kernel)


def _backward(saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array, Array]:
  """Returns `dx = dy W^T`, `dW = x^T dy`, `db = sum_r dy` (the sum in f32)."""
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
  """Returns the input of several products, once for each.

  Args:
    x: `[*rows, D]`, f32 or the compute dtype.
    dtype: the compute dtype, to which each product casts its own.
    count: number of products.

  Returns:
    `count` times `x`.
  """
  return (x,) * count


def shared(x: Array, dtype: DTypeLike, count: int) -> tuple[Array, ...]:
  """Returns `plain_shared`, but on GPUs and TPUs in `dtype`, with gradients summed in f32; reverse-mode only there."""
  platform = numerics.mesh_platform()
  if platform not in ('gpu', 'tpu'):
    return plain_shared(x, dtype, count)
  is_whole = platform == 'tpu' and not any(kind in numerics.mesh_device_kind() for kind in FUSE_GRADIENT)
  return _materialized(x, dtype, count, is_whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _materialized(x: Array, dtype: DTypeLike, count: int, is_whole: bool) -> tuple[Array, ...]:
  """Returns `count` times `x`, as one array; `is_whole`: whether its gradient is an array of its own, too."""
  return (lax.optimization_barrier(x.astype(dtype)),) * count


def _share(x: Array, dtype: DTypeLike, count: int, is_whole: bool) -> tuple[tuple[Array, ...], Array]:
  return _materialized(x, dtype, count, is_whole), jnp.zeros(0, x.dtype)


def _collect(dtype: DTypeLike, count: int, is_whole: bool, like: Array, dys: tuple[Array, ...]) -> tuple[Array]:
  """Returns the sum of the gradients of all products, in the dtype of `like`."""
  total = sum((dy.astype(jnp.float32) for dy in dys[1:]), dys[0].astype(jnp.float32))
  if is_whole:
    total = lax.optimization_barrier(total.astype(dtype))
  return (total.astype(like.dtype),)


_materialized.defvjp(_share, _collect)


class Narrow(NamedTuple):
  """A dtype of quantized entries, its largest value, and the dtype that products are summed in."""
  dtype: DTypeLike
  largest: float
  sums: DTypeLike


NARROW = {Quantize.INT8: Narrow(jnp.int8, 127., jnp.int32),
          Quantize.FP8: Narrow(jnp.float8_e4m3fn, 448., jnp.float32)}


def quantized(x: Array, axes: range, narrow: Narrow) -> tuple[Array, Array]:
  """Returns the entries of an array in a narrow dtype, and f32 scales with the size 1 along `axes`.

  An entry that is not finite makes its scale NaN or infinite, so that no product hides it.
  """
  x = x.astype(jnp.float32)
  most = jnp.maximum(jnp.abs(x).max(tuple(axes), keepdims=True), SMALLEST)
  scaled = x * (narrow.largest / most)
  whole = jnp.round(scaled) if jnp.issubdtype(narrow.dtype, jnp.integer) else scaled
  return whole.astype(narrow.dtype), most / narrow.largest


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def quantized_dense(x: Array, kernel: Array, bias: Array, how: Quantize) -> Array:
  """Returns `y[r, o] = sum_i x[r, i] W[i, o] + b[o]`, with quantized products; reverse-mode differentiation only.

  Args:
    x: `[*rows, *in]`.
    kernel: `[*in, *out]`, same dtype.
    bias: `[*out]`, same dtype; its rank says how many axes are `out`.
    how: the narrow dtype.

  Returns:
    `[*rows, *out]`, same dtype.
  """
  narrow, num_in = NARROW[how], kernel.ndim - bias.ndim
  rows = range(x.ndim - num_in)
  x_scaled, x_scale = quantized(x, range(len(rows), x.ndim), narrow)
  w_scaled, w_scale = quantized(kernel, range(num_in), narrow)
  sums = contract(x_scaled, w_scaled, range(len(rows), x.ndim), range(num_in), narrow.sums).astype(jnp.float32)
  y = sums * x_scale.reshape(*x.shape[:len(rows)], *(1,) * bias.ndim) * jnp.expand_dims(w_scale[(0,) * num_in], rows)
  return y.astype(x.dtype) + jnp.expand_dims(bias, rows)


def _quantized_forward(x: Array, kernel: Array, bias: Array, how: Quantize) -> tuple[Array, tuple[Array, Array]]:
  return quantized_dense(x, kernel, bias, how), (x, kernel)


def _quantized_backward(how: Quantize, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array, Array]:
  """Returns the gradients of input, kernel and bias; that of the bias is summed in f32."""
  (x, kernel), narrow = saved, NARROW[how]
  num_in = (x.ndim + kernel.ndim - dy.ndim) // 2
  rows, outputs = range(x.ndim - num_in), range(num_in, kernel.ndim)
  w_scaled, w_scale = quantized(kernel, range(num_in), narrow)
  g = dy.astype(jnp.float32) * jnp.expand_dims(w_scale[(0,) * num_in], rows)
  g_scaled, g_scale = quantized(g, range(len(rows), dy.ndim), narrow)
  sums = contract(g_scaled, w_scaled, range(len(rows), dy.ndim), outputs, narrow.sums).astype(jnp.float32)
  dx = sums * g_scale.reshape(*dy.shape[:len(rows)], *(1,) * num_in)
  dbias = dy.sum(tuple(rows), dtype=jnp.float32).astype(dy.dtype)
  return dx.astype(x.dtype), contract(x, dy, rows, rows), dbias


quantized_dense.defvjp(_quantized_forward, _quantized_backward)
