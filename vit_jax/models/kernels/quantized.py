"""The dense layer with products in int8 or fp8: `y = x W + b`, forward and backward (`model.quantize`).

An array is quantized symmetrically by its largest magnitudes, anew in each step (absolute maximum, no calibration): of
activations and gradients one scale for each token, of a kernel one for each output. With q(a) the entries of a, as the
narrow dtype holds them, and s(a) the scales:

    y  = s(x) s(W) (q(x) q(W)) + b
    dx = s(g) (q(g) q(W)^T) with g = s(W) dy, so that the kernel is quantized once for both products
    dW = x^T dy, in the dtype of the layer

The gradient of a kernel sums over all tokens of a batch, and keeps its precision for that reason: it is SwitchBack
(arXiv 2304.13013, section 2.2), with a scale for each output of the kernel in place of one for all. int8 is summed in
int32, without rounding; fp8 is float8_e4m3fn, for gradients too, and is summed in f32. What is rounded away has the
gradient of what is kept. Knows nothing of parameters or modules.
"""
from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from vit_jax.config.schema import Quantize
from vit_jax.core.types import Array
from vit_jax.models.kernels.dense import contract

SMALLEST = 1e-30
"""The least absolute maximum: smaller entries are quantized to 0, and nothing is divided by 0."""


class Narrow(NamedTuple):
  """A dtype of quantized entries: its largest value, and the dtype that products are summed in."""
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
def dense(x: Array, kernel: Array, bias: Array, how: Quantize) -> Array:
  """`y[r, o] = sum_i x[r, i] W[i, o] + b[o]`, with quantized products; reverse-mode differentiation only.

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


def _forward(x: Array, kernel: Array, bias: Array, how: Quantize) -> tuple[Array, tuple[Array, Array]]:
  return dense(x, kernel, bias, how), (x, kernel)


def _backward(how: Quantize, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array, Array]:
  """The three gradients; the bias is summed in f32."""
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


dense.defvjp(_forward, _backward)
