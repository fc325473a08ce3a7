"""Attention of whole images as one Pallas kernel, for TPUs from v4 on.

A grid step holds one image: queries, keys and values `[B, N, D]`, D being all heads after each other, so that nothing
is transposed or padded in memory. The weights `[N, N]` of a head never leave the chip, neither forwards nor backwards:
the backward kernel computes them again from queries and keys. It also sums the gradients of the biases of query, key
and value, which XLA would do in three passes over memory.

A head of K channels rarely fills tiles of 128 lanes. Its window is the tiles that it lies in: for K = 64 one tile, with
another head. Queries are zero outside the head's own lanes, so that a product over the window is one over the head; of
a result, the head's own lanes are kept. Tokens are padded to whole tiles on the chip only, and padding is masked.

Softmax and all sums are in f32; products take the compute dtype and accumulate in f32. Knows nothing of parameters,
positions or dropout.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vit_jax.core.types import Array

LANES = 128
ROWS = 16
"""Tokens in a tile of bf16, and a multiple of those in one of f32."""
CORES = 2
"""Parts of the grid that a chip with two cores runs side by side; others run them one after the other."""
LOWEST = -1e30
SMALL_VMEM = 14 * 2**20
"""On-chip memory that every TPU gives to a kernel by default, less what the compiler needs."""
LARGE_VMEM = 64 * 2**20
"""What v5e, v5p and v6e give if a kernel asks for it."""


class Shape(NamedTuple):
  """Sizes of one image: tokens N, heads A, and channels K of a head."""
  tokens: int
  heads: int
  channels: int

  @property
  def rows(self) -> int:
    """Tokens with padding."""
    return -(-self.tokens // ROWS) * ROWS

  def vmem_bytes(self, itemsize: int) -> int:
    """On-chip memory that the backward kernel needs: seven images, each twice, and the weights of a head."""
    image = self.rows * -(-self.heads * self.channels // LANES) * LANES * itemsize
    return 14 * image + 6 * 4 * self.rows * (-(-self.rows // LANES) * LANES)

  def window(self, head: int) -> tuple[int, int]:
    """The lanes of the tiles that a head lies in, from the first up to the last; of one tile if all heads fit in it."""
    width, begin, end = self.heads * self.channels, head * self.channels, (head + 1) * self.channels
    return begin // LANES * LANES, min(-(-end // LANES) * LANES, width)


class Window(NamedTuple):
  """The part of an image that one head needs. `own [1, w]`: which of its lanes are the head's."""
  begin: int
  end: int
  own: Array

  def load(self, ref: Any, real: Array | None, *, is_own: bool = False) -> Array:
    """`[rows, w]` of an image in the compute dtype, zero in padding, and if `is_own` outside the head."""
    x = ref[0, :, self.begin:self.end]
    if is_own:
      x = jnp.where(self.own, x, jnp.zeros((), x.dtype))
    return x if real is None else jnp.where(real, x, jnp.zeros((), x.dtype))


def _window(shape: Shape, head: int) -> Window:
  begin, end = shape.window(head)
  lane = begin + lax.broadcasted_iota(jnp.int32, (1, end - begin), 1)
  return Window(begin, end, (lane >= head * shape.channels) & (lane < (head + 1) * shape.channels))


def _real(shape: Shape, axis: int) -> Array | None:
  """Which rows (axis 0, `[rows, 1]`) or columns (axis 1, `[1, rows]`) are tokens; None if all are."""
  if shape.rows == shape.tokens:
    return None
  sides = (shape.rows, 1) if axis == 0 else (1, shape.rows)
  return lax.broadcasted_iota(jnp.int32, sides, axis) < shape.tokens


def _dot(a: Array, b: Array, of_a: int, of_b: int) -> Array:
  """The product over axis `of_a` of `a` and `of_b` of `b`, f32."""
  exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), precision=exact, preferred_element_type=jnp.float32)


def _scaled(x: Array, shape: Shape) -> Array:
  return (x.astype(jnp.float32) * shape.channels ** -.5).astype(x.dtype)


class _Tiles:
  """Collects the results of heads in windows that may overlap, and stores each tile when no other head adds to it."""

  def __init__(self, ref: Any, shape: Shape):
    self._ref, self._shape = ref, shape
    self._open: dict[int, Array] = {}

  def add(self, window: Window, values: Array, head: int) -> None:
    """Adds `values [rows, w]` f32, which are zero outside the head."""
    following = self._shape.window(head + 1)[0] if head + 1 < self._shape.heads else window.end
    for begin in range(window.begin, window.end, LANES):
      end = min(begin + LANES, window.end)
      part = values[:, begin - window.begin:end - window.begin]
      total = self._open.pop(begin) + part if begin in self._open else part
      if begin < following or head + 1 == self._shape.heads:
        self._ref[0, :, begin:end] = total.astype(self._ref.dtype)
      else:
        self._open[begin] = total


def _forward_kernel(query: Any, key: Any, value: Any, out: Any, *, shape: Shape) -> None:
  """`softmax(q k^T / sqrt K) v` of one image."""
  tiles, real, real_key = _Tiles(out, shape), _real(shape, 0), _real(shape, 1)
  for head in range(shape.heads):
    window = _window(shape, head)
    logits_QM = _dot(_scaled(window.load(query, real, is_own=True), shape), window.load(key, real), 1, 1)
    if real_key is not None:
      logits_QM = jnp.where(real_key, logits_QM, LOWEST)
    weights_QM = jnp.exp(logits_QM - logits_QM.max(1, keepdims=True))
    inverse_Q1 = 1. / weights_QM.sum(1, keepdims=True)
    mixed_QW = _dot(weights_QM.astype(query.dtype), window.load(value, real), 1, 0) * inverse_Q1
    tiles.add(window, jnp.where(window.own, mixed_QW, 0.), head)


def _backward_kernel(query: Any, key: Any, value: Any, dout: Any, dquery: Any, dkey: Any, dvalue: Any, dbias: Any, *,
                     shape: Shape) -> None:
  """Gradients of one image; keys are the rows of the weights, so that only one product needs a transposed operand."""
  results = [_Tiles(ref, shape) for ref in (dquery, dkey, dvalue)]
  real = _real(shape, 0)
  sums: list[Array] = []
  for head in range(shape.heads):
    window = _window(shape, head)
    query_QW, dout_QW = (window.load(ref, real, is_own=True) for ref in (query, dout))
    query_QW, key_MW, value_MW = _scaled(query_QW, shape), window.load(key, real), window.load(value, real)
    logits_MQ = _dot(key_MW, query_QW, 1, 1)
    if real is not None:
      logits_MQ = jnp.where(real, logits_MQ, LOWEST)
    weights_MQ = jnp.exp(logits_MQ - logits_MQ.max(0, keepdims=True))
    weights_MQ = weights_MQ * (1. / weights_MQ.sum(0, keepdims=True))
    dweights_MQ = _dot(value_MW, dout_QW, 1, 1)
    shared_1Q = (weights_MQ * dweights_MQ).sum(0, keepdims=True)
    dlogits_MQ = (weights_MQ * (dweights_MQ - shared_1Q)).astype(query.dtype)
    found = (jnp.where(window.own, _dot(dlogits_MQ, key_MW, 0, 0) * shape.channels ** -.5, 0.),
             _dot(dlogits_MQ, query_QW, 1, 0), _dot(weights_MQ.astype(query.dtype), dout_QW, 1, 0))
    for tiles, values in zip(results, found, strict=True):
      tiles.add(window, values, head)
    sums.append(jnp.concatenate([x.sum(0, keepdims=True) for x in found], 0))
  _add_biases(dbias, sums, shape)


def _add_biases(dbias: Any, sums: list[Array], shape: Shape) -> None:
  """Adds each head's `[3, w]` to the sums over the images before, `[1, 3, D]` f32, which begin with zeros."""
  @pl.when(pl.program_id(1) == 0)
  def _() -> None:
    dbias[...] = jnp.zeros(dbias.shape, dbias.dtype)

  for head, part in enumerate(sums):
    begin, end = shape.window(head)
    dbias[0, :, begin:end] += part


def _call(kernel: Any, shape: Shape, arrays: tuple[Array, ...], results: int, *, has_biases: bool,
          interpret: bool, name: str) -> list[Array]:
  """Runs a kernel image by image on arrays `[B, N, D]`; `results` of its outputs have that shape too."""
  num_images, tokens, width = arrays[0].shape
  cores = CORES if num_images % CORES == 0 else 1
  each = num_images // cores
  limit = LARGE_VMEM if shape.vmem_bytes(arrays[0].dtype.itemsize) > SMALL_VMEM else None
  block = pl.BlockSpec((1, shape.rows, width), lambda core, i: (core * each + i, 0, 0))
  out_specs = [block] * results
  out_shape = [jax.ShapeDtypeStruct((num_images, tokens, width), arrays[0].dtype)] * results
  if has_biases:
    out_specs.append(pl.BlockSpec((1, 3, width), lambda core, i: (core, 0, 0)))
    out_shape.append(jax.ShapeDtypeStruct((cores, 3, width), jnp.float32))
  return pl.pallas_call(
      functools.partial(kernel, shape=shape), out_shape=out_shape, grid=(cores, each), in_specs=[block] * len(arrays),
      out_specs=out_specs, interpret=interpret, name=name,
      compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=limit)
  )(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def attend(query: Array, key: Array, value: Array, biases: Array, heads: int, interpret: bool = False) -> Array:
  """Attention of each image within its tokens. The result is named `attention` for rematerialisation.

  Args:
    query: `[B, N, D]`, any float dtype; head `a` has the channels from `a D / A` on.
    key: `[B, N, D]`, same dtype.
    value: `[B, N, D]`, same dtype.
    biases: `[3, D]`, same dtype: added to query, key and value first, which are then named after themselves.
    heads: A.
    interpret: runs the kernel's Python on any device, slowly.

  Returns:
    `[B, N, D]`, same dtype.
  """
  return _forward(query, key, value, biases, heads, interpret)[0]


def _shape(query: Array, heads: int) -> Shape:
  return Shape(query.shape[1], heads, query.shape[2] // heads)


def _forward(query: Array, key: Array, value: Array, biases: Array, heads: int,
             interpret: bool) -> tuple[Array, tuple[Array, ...]]:
  inputs = tuple(checkpoint_name(x + bias[None, None], name) for x, bias, name in zip(
      (query, key, value), biases, ('query', 'key', 'value'), strict=True))
  out, = _call(_forward_kernel, _shape(query, heads), inputs, 1, has_biases=False, interpret=interpret,
               name='fused_attention')
  return checkpoint_name(out, 'attention'), inputs


def _backward(heads: int, interpret: bool, inputs: tuple[Array, ...], dout: Array) -> tuple[Array, ...]:
  *dinputs, dbiases = _call(_backward_kernel, _shape(dout, heads), (*inputs, dout), 3, has_biases=True,
                            interpret=interpret, name='fused_attention_backward')
  return (*dinputs, dbiases.sum(0).astype(dout.dtype))


attend.defvjp(_forward, _backward)
