"""Low-rank adapters of the dense layers in blocks: LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353).

An adapter of a kernel W `[L, *in, *out]` with r the rank and s the scale:

  lora_a [L, *in, r]          uniform in +-1 / sqrt(number of inputs)
  lora_b [L, r, *out]         zero, so that the network is unchanged at initialization
  lora_magnitude [L, *out]    with DoRA: m, at initialization the norm of each output's weights in W

    LoRA:  x (W + s A B)
    DoRA:  x (W + s A B) m / |W + s A B|, the norm over the inputs of each output, without a gradient (section 4.3)

These are the initialization and the formulas of PEFT 0.21. The leaves lie beside the kernel, under the same path, and
a dense layer whose parameters hold an adapter applies it (`product`), so that no block and no network knows of
adapters. `network` makes the parameters for such a pass, and `merge` makes those of a plain network.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.config.schema import Lora
from vit_jax.core import trees
from vit_jax.core.axes import LAYERS, labelled, of_dimensions
from vit_jax.core.types import Array, ArrayLike, Key, Params

A, B, MAGNITUDE = 'lora_a', 'lora_b', 'lora_magnitude'
STORED = (A, B, MAGNITUDE)
"""Leaves of an adapter in the parameters of a run."""
GAIN, KEY, RATE = 'lora_gain', 'lora_key', 'lora_rate'
"""What a network gets beside A and B: `m / |W + s A B|`, and the key and the rate of the dropout."""
USED = (A, B, GAIN, KEY, RATE)
NOT_CAST = (GAIN, KEY, RATE)
BLOCKS = f'backbone/{trees.BLOCKS}/'

Dense = Callable[[Array, Array, Array], Array]


def kernels(leaves: Mapping[str, Any], settings: Lora) -> list[str]:
  """Returns the paths of the layers with an adapter, such as `backbone/blocks/attn/query`, in the order of leaves."""
  layers = [name.removesuffix('/kernel') for name in leaves if name.startswith(BLOCKS) and name.endswith('/kernel')]
  return [layer for layer in layers if settings.is_target(layer.removeprefix(BLOCKS))]


def num_inputs(layer: str) -> int:
  """Returns the number of input axes of a layer's kernel; that of attention's output has heads first."""
  return 2 if layer.endswith('attn/out') else 1


def init(key: Key, backbone: Params, settings: Lora) -> dict[str, Array]:
  """Returns the leaves of new adapters by path, for the kernels of a backbone."""
  leaves = trees.flatten({'backbone': backbone})
  layers = kernels(leaves, settings)
  new = {}
  for layer, layer_key in zip(layers, jax.random.split(key, len(layers)), strict=True):
    path = f'{layer}/kernel'
    kernel = leaves[path]
    first_output = 1 + num_inputs(layer)  # the first axis of outputs; axis 0 is that of layers
    bound = np.prod(kernel.shape[1:first_output]) ** -.5  # PyTorch's kaiming_uniform_(a=sqrt(5)), as in PEFT
    a = jax.random.uniform(layer_key, (*kernel.shape[:first_output], settings.rank), minval=-bound, maxval=bound)
    b = jnp.zeros((kernel.shape[0], settings.rank, *kernel.shape[first_output:]))
    # The inputs of A and the outputs of B are split over devices as those of the kernel.
    inputs, outputs = of_dimensions(path, range(1, first_output)), of_dimensions(path, range(first_output, kernel.ndim))
    new[f'{layer}/{A}'] = labelled(a, (LAYERS, *inputs, 'rank'))
    new[f'{layer}/{B}'] = labelled(b, (LAYERS, 'rank', *outputs))
    if settings.dora:
      new[f'{layer}/{MAGNITUDE}'] = labelled(magnitude(layer, kernel), (LAYERS, *outputs))
  return new


def magnitude(layer: str, kernel: ArrayLike) -> Any:
  """Returns the norm of each output's weights, `[L, *out]`, of a kernel `[L, *in, *out]`; NumPy for NumPy."""
  return (kernel * kernel).sum(tuple(range(1, 1 + num_inputs(layer)))) ** .5


def magnitudes(wanted: Mapping[str, Any], leaves: Mapping[str, ArrayLike]) -> dict[str, Any]:
  """Returns the initial magnitudes by path, of the layers of `wanted` that have one, for the kernels in `leaves`."""
  layers = [name.removesuffix(f'/{MAGNITUDE}') for name in wanted if name.endswith(f'/{MAGNITUDE}')]
  return {f'{layer}/{MAGNITUDE}': magnitude(layer, leaves[f'{layer}/kernel']) for layer in layers}


def plain(params: Params) -> Params:
  """Returns the parameters without adapters."""
  return trees.unflatten({name: leaf for name, leaf in trees.flatten(params).items()
                          if name.rsplit('/', 1)[-1] not in STORED})


def network(params: Params, frozen: Params, settings: Lora, *, key: Key | None) -> Params:
  """Returns the parameters of a network that applies its adapters unmerged.

  Args:
    params: trained: adapters under `backbone`, and heads.
    frozen: the others.
    settings: of the adapters.
    key: for dropout; None = without.
  """
  leaves = {**trees.flatten(frozen), **trees.flatten(params)}
  layers = kernels(leaves, settings)
  for i, layer in enumerate(layers):
    a, b = leaves[f'{layer}/{A}'], leaves[f'{layer}/{B}']
    m = leaves.pop(f'{layer}/{MAGNITUDE}', None)
    leaves[f'{layer}/{B}'] = b * settings.scale
    if m is not None:
      leaves[f'{layer}/{GAIN}'] = m / jax.lax.stop_gradient(_norm(leaves[f'{layer}/kernel'], a, b * settings.scale))
    if key is not None and settings.dropout:
      leaves[f'{layer}/{KEY}'] = jax.random.split(jax.random.fold_in(key, i), a.shape[0])
      leaves[f'{layer}/{RATE}'] = jnp.full(a.shape[0], settings.dropout)
  return trees.unflatten(leaves)


def _norm(kernel: Array, a: Array, b: Array) -> Array:
  """Returns `|W + A B|` over the inputs, `[L, *out]`, from `|W|^2 + 2 W.(A B) + |A B|^2`, without the sum itself."""
  w_LIO, a_LIR, b_LRO = _matrices(kernel, a, b)
  precise = jax.lax.Precision.HIGHEST
  cross_LRO = jnp.einsum('lir,lio->lro', a_LIR, w_LIO, precision=precise)
  gram_LRR = jnp.einsum('lir,lis->lrs', a_LIR, a_LIR, precision=precise)
  own_LRO = jnp.einsum('lrs,lso->lro', gram_LRR, b_LRO, precision=precise)
  squares_LO = jnp.square(w_LIO).sum(1) + (b_LRO * (2. * cross_LRO + own_LRO)).sum(1)
  return jnp.sqrt(squares_LO).reshape(b.shape[0], *b.shape[2:])


def _matrices(kernel: Any, a: Any, b: Any) -> tuple[Any, Any, Any]:
  """Returns kernel, A and B as matrices of each layer: `[L, I, O]`, `[L, I, R]`, `[L, R, O]`."""
  layers, rank = b.shape[:2]
  a_LIR, b_LRO = a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
  return kernel.reshape(layers, a_LIR.shape[1], b_LRO.shape[2]), a_LIR, b_LRO


def merge(params: Params, frozen: Params, settings: Lora) -> Params:
  """Returns the parameters of the plain network with the same outputs; of NumPy arrays in NumPy."""
  leaves = {**trees.flatten(frozen), **trees.flatten(params)}
  for layer in kernels(leaves, settings):
    a, b = leaves.pop(f'{layer}/{A}'), leaves.pop(f'{layer}/{B}')
    m = leaves.pop(f'{layer}/{MAGNITUDE}', None)
    leaves[f'{layer}/kernel'] = merged(leaves[f'{layer}/kernel'], a, b, m, scale=settings.scale)
  return trees.unflatten(leaves)


def merged(kernel: Any, a: Any, b: Any, m: Any | None, *, scale: float) -> Any:
  """Returns `W + s A B`, with DoRA each output's weights scaled to the norm m; shapes as in the module's text."""
  w_LIO, a_LIR, b_LRO = _matrices(kernel, a, b)
  if isinstance(kernel, np.ndarray):
    w_LIO = w_LIO + np.float32(scale) * np.matmul(a_LIR, b_LRO)
  else:
    w_LIO = w_LIO + scale * jnp.matmul(a_LIR, b_LRO, precision=jax.lax.Precision.HIGHEST)
  if m is not None:
    w_LIO = w_LIO * (m.reshape(m.shape[0], -1) / (w_LIO * w_LIO).sum(1) ** .5)[:, None]
  return w_LIO.reshape(kernel.shape)


def product(dense: Dense, x: Array, kernel: Array, bias: Array, adapter: Mapping[str, Array],
            low_rank: Dense) -> Array:
  """Returns `x W + bias` with the adapter of W applied, unmerged; without an adapter if it is empty.

  Args:
    dense: computes `x W + bias`.
    x: `[*rows, *in]`.
    kernel: `[*in, *out]`, same dtype.
    bias: `[*out]`, same dtype.
    adapter: of `USED`, those that the layer's parameters hold, in any dtype. A and B may have heads split or not.
    low_rank: computes the products with A and B, as `dense`.
  """
  if not adapter:
    return dense(x, kernel, bias)
  rank = adapter[B].shape[0]
  a = adapter[A].astype(x.dtype).reshape(*kernel.shape[:kernel.ndim - bias.ndim], rank)
  b = adapter[B].astype(x.dtype).reshape(rank, *bias.shape)
  dropped = _dropped(x, adapter)
  low = low_rank(low_rank(dropped, a, jnp.zeros(rank, x.dtype)), b, jnp.zeros_like(bias))
  if GAIN not in adapter:
    return dense(x, kernel, bias) + low
  lead = range(low.ndim - bias.ndim)
  gain = jnp.expand_dims(adapter[GAIN].reshape(bias.shape), lead)
  if dropped is x:
    both = (dense(x, kernel, jnp.zeros_like(bias)) + low).astype(jnp.float32)
    return (both * gain).astype(x.dtype) + jnp.expand_dims(bias, lead)
  fixed = dense(dropped, kernel, jnp.zeros_like(bias))  # PEFT drops entries of this product's input too
  change = (gain - 1.) * fixed.astype(jnp.float32) + gain * low.astype(jnp.float32)
  return dense(x, kernel, bias) + change.astype(x.dtype)


def _dropped(x: Array, adapter: Mapping[str, Array]) -> Array:
  """Returns the input of A after dropout; `x` itself if the adapter has no key."""
  if KEY not in adapter:
    return x
  rate = adapter[RATE]
  keep = jax.random.bernoulli(adapter[KEY], 1. - rate, x.shape)
  return jnp.where(keep, x / (1. - rate).astype(x.dtype), jnp.zeros_like(x))
