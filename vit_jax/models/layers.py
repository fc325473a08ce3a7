"""The smallest parts of networks: norms, dense layers, dropout and stochastic depth.

Activations are `[..., D]`: rows `[R, D]`, or `[B, M, D]`, which is faster where images have tokens (the reason is in
`kernels/dense.py`). Parameters are f32; a dense layer computes in its `dtype`. Randomness comes from explicit keys, so
that these layers need no collection but `params`. `forms` selects the fast or plain form of each operation.
"""
from __future__ import annotations

from math import prod

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.typing import DTypeLike

from vit_jax.config import schema
from vit_jax.core import implementation
from vit_jax.core.axes import Matrix, Names, labelled
from vit_jax.core.types import Array, Key, Params, PyTree
from vit_jax.models import adapters
from vit_jax.models.initialization import Initializer, Linear, zeros
from vit_jax.models.kernels.forms import FAST, Forms


def dropout(x: Array, rate: float, key: Key | None) -> Array:
  """Zeroes entries with probability `rate` and divides the others by `1 - rate`.

  Without a key, or at rate 0, returns `x` unchanged.
  """
  if key is None or rate == 0.:
    return x
  keep = jax.random.bernoulli(key, 1. - rate, x.shape)
  return jnp.where(keep, x / (1. - rate), jnp.zeros_like(x))


def drop_path(x: Array, rate: Array | None, key: Key | None, *, num_images: int) -> Array:
  """Stochastic depth (arXiv 1603.09382): drops a branch for complete images.

  Args:
    x: `[B, M, D]`, the branch, before it is added; the first two axes may be joined.
    rate: f32 scalar below 1, may be traced; kept images are divided by `1 - rate`.
    key: randomness. Without a key or a rate `x` is returned unchanged.
    num_images: B.
  """
  if key is None or rate is None:
    return x
  keep_B = jax.random.bernoulli(key, 1. - rate, (num_images,))
  factor_B = jnp.where(keep_B, 1. / (1. - rate), 0.).astype(x.dtype)
  x_BMD = x.reshape(num_images, -1, x.shape[-1])
  return (x_BMD * factor_B[:, None, None]).reshape(x.shape)


def initial(module: nn.Module, key: Key, *args: PyTree, **kwargs: PyTree) -> Params:
  """Returns initial parameters of a module that is called with these arguments."""
  return module.init(key, *args, **kwargs).get('params', {})


def applied(module: nn.Module, params: Params, *args: PyTree, **kwargs: PyTree) -> PyTree:
  """Returns the result of a module for these parameters and arguments."""
  return module.apply({'params': params}, *args, **kwargs)


def param(module: nn.Module, name: str, init: Initializer, shape: tuple[int, ...], axes: Names,
          matrix: Matrix | None = None) -> Array:
  """Returns `module.param(name, init, shape)`, and states its logical axes, one for each dimension.

  `matrix` has the numbers of input and output axes of a matrix, which are its last ones, such as `(1, 1)` for
  `[experts, inputs, outputs]`: weight decay, Muon and LARS treat matrices in another way.

  The shape of a given parameter is compared without tracing `init`.

  Raises:
    flax.errors.ScopeParamShapeError: the given parameter has another shape.
  """
  if not module.has_variable('params', name):
    return module.param(name, lambda key: labelled(init(key, shape), axes, matrix))
  value: Array = module.get_variable('params', name)
  if value.shape != shape:
    raise flax.errors.ScopeParamShapeError(name, '/'.join(module.path), value.shape, shape)
  return value


class LayerNorm(nn.Module):
  """`layer_norm` with its parameters `scale` and `bias`, both `[D]`, of the logical axis `axis`; f32 out."""
  eps: float
  forms: Forms = FAST
  axis: str = 'embed'

  @nn.compact
  def __call__(self, x: Array) -> Array:
    scale = param(self, 'scale', initializers.ones, (x.shape[-1],), (self.axis,))
    bias = param(self, 'bias', zeros, (x.shape[-1],), (self.axis,))
    return self.forms.layer_norm(x, scale, bias, self.eps)


class RMSNorm(nn.Module):
  """`x / sqrt(mean(x^2) + eps) * scale` over the last axis (arXiv 1910.07467), with `scale [D]`; f32 out."""
  eps: float
  forms: Forms = FAST
  axis: str = 'embed'

  @nn.compact
  def __call__(self, x: Array) -> Array:
    scale = param(self, 'scale', initializers.ones, (x.shape[-1],), (self.axis,))
    x = x.astype(jnp.float32)
    unit = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
    return unit * jnp.expand_dims(scale, range(x.ndim - 1))


def norm(settings: schema.NormSettings, forms: Forms = FAST, *, axis: str = 'embed',
         name: str | None = None) -> nn.Module:
  """Returns a norm with these settings over a logical axis: from `[..., D]` to the same shape in f32.

  Contract of a kind of norm: a module `(…fields of its settings…, forms=…, axis=…, name=…)` that is called with
  activations, and whose parameters have the logical axis `axis`.
  """
  module: nn.Module = implementation.make(settings, forms=forms, axis=axis, name=name)
  return module


class Dense(nn.Module, kw_only=True):
  """A dense layer from `[R, *in]` to `[R, *features]` with `kernel [*in, *features]`, and `bias [*features]` if any.

  Attributes:
    features: sizes of the output axes.
    axes: logical axes of the kernel; the bias has those of `features`.
    dtype: input and parameters are cast to it.
    law: initial values; the kernel is initialized as the matrix `[prod(in), prod(features)]`, then given its shape.
    has_bias: whether there is a bias.
    num_batch_dims: number of axes before those of the input: 1 for rows `[R, *in]`, 2 for `[B, M, *in]`.
    flat: whether the product is one of matrices, with the result `[R, prod(features)]`.
    forms: fast or plain forms of the operations.
  """
  features: tuple[int, ...]
  axes: Names
  dtype: DTypeLike
  law: Linear
  has_bias: bool = True
  num_batch_dims: int = 1
  flat: bool = False
  forms: Forms = FAST

  @nn.compact
  def __call__(self, x: Array) -> Array:
    return adapters.product(self.forms.dense, *self._operands(x), self._adapter(), self.forms.low_rank)

  def _operands(self, x: Array) -> tuple[Array, Array, Array]:
    """Returns input, kernel and bias in the compute dtype."""
    kernel, bias = self._weights(x.shape[self.num_batch_dims:])
    if self.flat:
      x = x.reshape(*x.shape[:self.num_batch_dims], -1)
    return x.astype(self.dtype), kernel, bias

  def _weights(self, inputs: tuple[int, ...]) -> tuple[Array, Array]:
    """Returns kernel and bias in the compute dtype, for inputs with these sizes."""

    def init_kernel(key: Key, shape: tuple[int, ...]) -> Array:
      return self.law.kernel(key, (prod(inputs), prod(self.features))).reshape(shape)

    kernel = param(self, 'kernel', init_kernel, (*inputs, *self.features), self.axes,
                   matrix=(len(inputs), len(self.features)))
    bias = (param(self, 'bias', self.law.bias(prod(inputs)), self.features, self.axes[-len(self.features):])
            if self.has_bias else jnp.zeros(self.features))
    if self.flat:
      kernel, bias = kernel.reshape(prod(inputs), -1), bias.reshape(-1)
    return kernel.astype(self.dtype), bias.astype(self.dtype)

  def _adapter(self) -> Params:
    """Returns the adapter that the given parameters hold beside the kernel; {} in `init`, which makes none."""
    return {name: self.get_variable('params', name) for name in adapters.USED if self.has_variable('params', name)}


class Projection(Dense, kw_only=True):
  """A flat dense layer whose caller adds the bias: returns `[R, prod(features)]` without the bias, and the bias."""
  flat: bool = True

  @nn.compact
  def __call__(self, x: Array) -> tuple[Array, Array]:  # type: ignore[override]
    x, kernel, bias = self._operands(x)
    return adapters.product(self.forms.dense, x, kernel, jnp.zeros_like(bias), self._adapter(),
                            self.forms.low_rank), bias


class Weights(Dense, kw_only=True):
  """A dense layer whose caller computes the product: returns kernel and bias in the compute dtype."""

  @nn.compact
  def __call__(self, num_inputs: int) -> tuple[Array, Array]:  # type: ignore[override]
    return self._weights((num_inputs,))
