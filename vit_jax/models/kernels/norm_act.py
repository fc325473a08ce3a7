"""LayerNorm and GELU with gradients written by hand, each beside the plain form that it equals.

The plain forms let autodiff decide what is kept for the backward pass: several arrays in f32, where the input (in the
compute dtype) and a number for each row would do. The forms here permit reverse-mode differentiation only.
"""
from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from vit_jax.config.schema import Gelu
from vit_jax.core.types import Array

CUBIC = .044715  # of the tanh form, arXiv 1606.08415, section 2
QUICK = 1.702    # of the form with a sigmoid, likewise
SLOPE = math.sqrt(2 / math.pi)  # of u, the argument of tanh, at 0


def plain_layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
  """Returns `(x - mean) / sqrt(var + eps) * scale + bias` over the last axis (arXiv 1607.06450).

  Args:
    x: `[..., D]`, any float dtype.
    scale: `[D]` f32.
    bias: `[D]` f32.
    eps: added to the variance, which is the mean of squares (divided by D).

  Returns:
    The shape of `x`, f32; all of it is computed in f32.
  """
  x = x.astype(jnp.float32)
  mean, inverse = _in_two_passes(x, eps)
  return (x - mean) * inverse * _last(scale, x) + _last(bias, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
  """Returns `plain_layer_norm`; keeps `x` unchanged, its mean and its deviation for the backward pass.

  Except on CPUs both are computed in one pass over `x`, which a compiler can fuse with the operation that makes `x`.
  """
  return _norm_forward(x, scale, bias, eps)[0]


def _in_two_passes(x: Array, eps: float) -> tuple[Array, Array]:
  """Returns mean and inverse deviation of f32 rows."""
  mean = x.mean(-1, keepdims=True)
  return mean, jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + eps)


def _in_one_pass(x: Array, eps: float) -> tuple[Array, Array]:
  """Returns both by `var = E[x^2] - E[x]^2`: less exact by about `1 + mean^2 / var` times the rounding of f32."""
  mean = x.mean(-1, keepdims=True)
  variance = jnp.maximum(jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean), 0.)
  return mean, jax.lax.rsqrt(variance + eps)


def _last(vector: Array, x: Array) -> Array:
  """Returns a vector over the last axis of `x`, with the rank of `x`."""
  return jnp.expand_dims(vector, range(x.ndim - 1))


def _norm_forward(x: Array, scale: Array, bias: Array, eps: float) -> tuple[Array, tuple[Array, ...]]:
  wide = x.astype(jnp.float32)
  mean, inverse = jax.lax.platform_dependent(
      wide, cpu=functools.partial(_in_two_passes, eps=eps), default=functools.partial(_in_one_pass, eps=eps))
  return (wide - mean) * inverse * _last(scale, x) + _last(bias, x), (x, scale, mean, inverse)


def _norm_backward(eps: float, saved: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array]:
  """Returns the gradients: `dx = (g - mean(g) - unit mean(g unit)) / deviation` with `g = dy scale`."""
  del eps
  x, scale, mean, inverse = saved
  unit = (x.astype(jnp.float32) - mean) * inverse
  g = dy * _last(scale, x)
  dx = (g - g.mean(-1, keepdims=True) - unit * (g * unit).mean(-1, keepdims=True)) * inverse
  rows = tuple(range(x.ndim - 1))
  return dx.astype(x.dtype), (dy * unit).sum(rows), dy.sum(rows)


layer_norm.defvjp(_norm_forward, _norm_backward)


def plain_gelu(x: Array, kind: Gelu) -> Array:
  """Returns GELU in the dtype of `x` (arXiv 1606.08415).

  EXACT: `x / 2 * (1 + erf(x / sqrt 2))`;
  TANH: `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`;
  QUICK: `x sigmoid(1.702 x)`.
  """
  if kind is Gelu.QUICK:
    return x * jax.nn.sigmoid(QUICK * x)
  return jax.nn.gelu(x, approximate=kind is Gelu.TANH)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gelu(x: Array, kind: Gelu) -> Array:
  """Returns `plain_gelu`; keeps only `x` for the backward pass, and computes the slope from it in f32."""
  return plain_gelu(x, kind)


def slope_of_gelu(x: Array, kind: Gelu) -> Array:
  """Returns the derivative of GELU, f32.

  EXACT: `Phi(x) + x phi(x)`;
  TANH: `(1 + t) / 2 + x / 2 (1 - t^2) u'`, `t = tanh u`;
  QUICK: `s + 1.702 x s (1 - s)`, `s = sigmoid(1.702 x)`.
  """
  x = x.astype(jnp.float32)
  if kind is Gelu.QUICK:
    s = jax.nn.sigmoid(QUICK * x)
    return s + QUICK * x * s * (1. - s)
  if kind is Gelu.EXACT:
    return .5 * (1. + jax.lax.erf(x / math.sqrt(2))) + x * jnp.exp(-.5 * x * x) / math.sqrt(2 * math.pi)
  t = jnp.tanh(SLOPE * (x + CUBIC * x * x * x))
  return .5 * (1. + t) + .5 * x * (1. - t * t) * SLOPE * (1. + 3. * CUBIC * x * x)


def _short_slope(x: Array) -> Array:
  """Returns `slope_of_gelu` of TANH as `(1 + t) (1/2 + x / 2 u' (1 - t))`, with fewer operations.

  The vector unit of a TPU computes the slope after the matrix product that it is fused with, so that each operation on
  it counts: 8 multiplications and 5 additions, and not 13 and 5.
  """
  x = x.astype(jnp.float32)
  square = x * x
  t = jnp.tanh(x * (SLOPE * CUBIC * square + SLOPE))
  return (1. + t) * (.5 + x * (1.5 * SLOPE * CUBIC * square + .5 * SLOPE) * (1. - t))


def _gelu_forward(x: Array, kind: Gelu) -> tuple[Array, Array]:
  return plain_gelu(x, kind), x


def _gelu_backward(kind: Gelu, x: Array, dy: Array) -> tuple[Array]:
  slope = functools.partial(slope_of_gelu, kind=kind)
  if kind is Gelu.TANH:
    slope = functools.partial(jax.lax.platform_dependent, tpu=_short_slope, default=slope)
  return ((slope(x) * dy.astype(jnp.float32)).astype(x.dtype),)


gelu.defvjp(_gelu_forward, _gelu_backward)
