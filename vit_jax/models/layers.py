"""The smallest parts: LayerNorm, dense layer, GELU, dropout, stochastic depth.

Activations are 2-D, rows first: `[R, D]` with `R = B * M` (the reason is in `dense.py`). Parameters are
f32; a dense layer computes in its `dtype`. Randomness comes from explicit keys, so these layers need no
collection but `params`. Each operation is one function, so that a faster form can take its place.
"""
from __future__ import annotations

from collections.abc import Callable
from math import prod

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config.schema import Gelu
from vit_jax.core.types import Array, Key, Params, PyTree
from vit_jax.models.dense import dense

Initializer = Callable[..., Array]
"""`(key, shape) -> f32 array`."""

zeros = initializers.zeros
xavier_uniform = initializers.xavier_uniform()


def layer_norm(x: Array, scale: Array, bias: Array, *, eps: float) -> Array:
  """`(x - mean) / sqrt(var + eps) * scale + bias` over the last axis (arXiv 1607.06450).

  Args:
    x: `[R, D]`, or `[R, A, K]` with K as D; any float dtype.
    scale: `[D]` f32.
    bias: `[D]` f32.
    eps: added to the variance, which is the mean of squares (divided by D).

  Returns:
    The shape of `x`, f32; all of it is computed in f32.
  """
  scale, bias = (jnp.expand_dims(a, range(x.ndim - 1)) for a in (scale, bias))
  x = x.astype(jnp.float32)
  x = x - x.mean(-1, keepdims=True)
  inverse = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)
  return x * inverse * scale + bias


def gelu(x: Array, kind: Gelu) -> Array:
  """GELU in the dtype of `x` (arXiv 1606.08415).

  EXACT: `x / 2 * (1 + erf(x / sqrt 2))`;
  TANH: `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.
  """
  return jax.nn.gelu(x, approximate=kind is Gelu.TANH)


def dropout(x: Array, rate: float, key: Key | None) -> Array:
  """Zeroes entries with probability `rate` and divides the others by `1 - rate`.

  Without a key, or at rate 0, `x` is returned as it is.
  """
  if key is None or rate == 0.:
    return x
  keep = jax.random.bernoulli(key, 1. - rate, x.shape)
  return jnp.where(keep, x / (1. - rate), jnp.zeros_like(x))


def drop_path(x: Array, rate: Array | None, key: Key | None, *, num_images: int) -> Array:
  """Stochastic depth (arXiv 1603.09382): drops a branch for whole images.

  Args:
    x: `[B * M, D]`, the branch, before it is added.
    rate: f32 scalar below 1, may be traced; kept images are divided by `1 - rate`.
    key: randomness. Without a key or a rate `x` is returned as it is.
    num_images: B.
  """
  if key is None or rate is None:
    return x
  keep_B = jax.random.bernoulli(key, 1. - rate, (num_images,))
  factor_B = jnp.where(keep_B, 1. / (1. - rate), 0.).astype(x.dtype)
  x_BMD = x.reshape(num_images, -1, x.shape[-1])
  return (x_BMD * factor_B[:, None, None]).reshape(x.shape)


def initial(module: nn.Module, key: Key, *args: PyTree, **kwargs: PyTree) -> Params:
  """Parameters of a module called with these arguments."""
  return module.init(key, *args, **kwargs)['params']


def applied(module: nn.Module, params: Params, *args: PyTree, **kwargs: PyTree) -> PyTree:
  """What a module returns for these parameters and arguments."""
  return module.apply({'params': params}, *args, **kwargs)


class LayerNorm(nn.Module):
  """`layer_norm` with its parameters `scale` and `bias`, both `[D]`; f32 out."""
  eps: float

  @nn.compact
  def __call__(self, x: Array) -> Array:
    scale = self.param('scale', initializers.ones, (x.shape[-1],))
    bias = self.param('bias', zeros, (x.shape[-1],))
    return layer_norm(x, scale, bias, eps=self.eps)


class Dense(nn.Module):
  """A dense layer from `[R, *in]` to `[R, *features]` with `kernel [*in, *features]`, `bias [*features]`.

  The kernel is initialised as the matrix `[prod(in), prod(features)]`, then given its shape. Input and
  parameters are cast to `dtype`.
  """
  features: tuple[int, ...]
  dtype: DTypeLike
  kernel_init: Initializer
  bias_init: Initializer = zeros

  @nn.compact
  def __call__(self, x: Array) -> Array:
    inputs = x.shape[1:]

    def init_kernel(key: Key) -> Array:
      return self.kernel_init(key, (prod(inputs), prod(self.features))).reshape(*inputs, *self.features)

    kernel = self.param('kernel', init_kernel)
    bias = self.param('bias', self.bias_init, self.features)
    return dense(*(a.astype(self.dtype) for a in (x, kernel, bias)))
