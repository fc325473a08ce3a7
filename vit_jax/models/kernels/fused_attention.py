"""Attention of whole images as one Pallas kernel, for TPUs from v4 on.

A grid step holds one image: queries, keys and values `[B, N, D]`, D being all heads after each other, so that nothing
is transposed or padded in memory. The weights `[N, N]` of a head never leave the chip, neither forwards nor backwards:
the backward kernel computes them again from queries, keys and the logarithm of the sum that softmax divided by, and
takes `sum_k p dp` as `sum_k o do` (FlashAttention-2, arXiv 2307.08691, section 3.1): so no step of it waits for a sum
over all keys, and it runs row by row. It also sums the gradients of the biases of query, key and value, which XLA would
do in three passes over memory.

A head of K channels rarely fills tiles of 128 lanes. Its window is the tiles that it lies in: for K = 64 one tile, with
another head. Queries are zero outside the head's own lanes, so that a product over the window is one over the head; of
a result, the head's own lanes are kept. Tokens are padded to whole tiles on the chip only, and padding is masked.

Softmax and all sums are in f32; products take the compute dtype and accumulate in f32. Knows nothing of parameters,
positions or dropout.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from vit_jax.core import lazy
from vit_jax.core.types import Array

if TYPE_CHECKING:
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu
else:
  pl, pltpu = lazy.Module('jax.experimental.pallas'), lazy.Module('jax.experimental.pallas.tpu')

# LANES, ROWS, `padded` and `dot` are for every Pallas kernel for TPUs: tiles of on-chip memory, and a product.
LANES = 128
ROWS = 16
"""Rows in a tile of bf16, and a multiple of those in one of f32."""
CORES = 2
"""Parts of the grid that a chip with two cores runs side by side; others run them one after the other."""
FORWARD_GROUP, BACKWARD_GROUP = 4, 8
"""Most heads that a kernel computes step by step together: the compiler fills the waits of one with work of others.
By bundles of 64 images of L/16 on v6e: backward 437,082, 422,298, 351,194, 331,034, 341,338 for groups of 1, 2, 4, 8,
16; forward 211,211, 263,947, 203,723 for 1, 2, 4."""
LOWEST = -1e30
SMALL_VMEM = 14 * 2**20
"""On-chip memory that every TPU gives to a kernel by default, less what the compiler needs; all that v4 has."""
LARGE_VMEM = 64 * 2**20
"""What v5e, v5p and v6e give if a kernel asks for it."""


def padded(size: int, multiple: int) -> int:
  """Returns the least multiple of a number that is not smaller than `size`."""
  return -(-size // multiple) * multiple


def dot(a: Array, b: Array, of_a: int, of_b: int) -> Array:
  """Returns the product over axis `of_a` of `a` and `of_b` of `b`, f32."""
  exact = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return lax.dot_general(a, b, (((of_a,), (of_b,)), ((), ())), precision=exact, preferred_element_type=jnp.float32)


class Shape(NamedTuple):
  """Sizes of one image: tokens N, heads A, and channels K of a head."""
  tokens: int
  heads: int
  channels: int

  @property
  def rows(self) -> int:
    """Number of tokens with padding."""
    return padded(self.tokens, ROWS)

  def vmem_bytes(self, itemsize: int, group: int = 1) -> int:
    """Returns the bytes on the chip of the backward kernel: 8 images, each twice, and weights of a group of heads."""
    image = self.rows * padded(self.heads * self.channels, LANES) * itemsize
    return 16 * image + (3 + 3 * group) * 4 * self.rows * padded(self.rows, LANES)

  def group(self, itemsize: int, vmem_bytes: int) -> int:
    """Returns how many heads the backward kernel computes together in so much memory on the chip."""
    sizes = (BACKWARD_GROUP >> i for i in range(BACKWARD_GROUP.bit_length()))
    return next((size for size in sizes if self.vmem_bytes(itemsize, size) <= vmem_bytes), 1)

  def window(self, head: int) -> tuple[int, int]:
    """Returns begin and end of the tiles that a head lies in, in lanes; the last tile ends with the last head."""
    width, begin, end = self.heads * self.channels, head * self.channels, (head + 1) * self.channels
    return begin // LANES * LANES, min(padded(end, LANES), width)


class Window(NamedTuple):
  """The w lanes of an image from `begin` to `end`, those of one head's tiles; `is_own [1, w]`: which are the head's."""
  begin: int
  end: int
  is_own: Array

  def load(self, ref: Any, real: Array | None, *, only_own: bool = False) -> Array:
    """Returns `[rows, w]` of an image in the compute dtype, 0 in padding and with `only_own` outside the head."""
    x = ref[0, :, self.begin:self.end]
    if only_own:
      x = jnp.where(self.is_own, x, jnp.zeros((), x.dtype))
    return _filled(x, real, 0.)


def _window(shape: Shape, head: int) -> Window:
  """Returns the window of a head."""
  begin, end = shape.window(head)
  lane = begin + lax.broadcasted_iota(jnp.int32, (1, end - begin), 1)
  return Window(begin, end, (lane >= head * shape.channels) & (lane < (head + 1) * shape.channels))


def _real(shape: Shape, axis: int) -> Array | None:
  """Returns which rows (axis 0, `[n, 1]`) or columns (axis 1, `[1, n]`) of the last tile are tokens; None = all."""
  if shape.rows == shape.tokens:
    return None
  first = (shape.rows - 1) // (ROWS, LANES)[axis] * (ROWS, LANES)[axis]
  sides = [1, 1]
  sides[axis] = shape.rows - first
  return first + lax.broadcasted_iota(jnp.int32, tuple(sides), axis) < shape.tokens


def _filled(x: Array, real: Array | None, value: float) -> Array:
  """Returns `x` with a value in padding rows or columns, which are only in the last tile: others are not selected."""
  if real is None:
    return x
  axis = 0 if real.shape[1] == 1 else 1
  first, last = jnp.split(x, [x.shape[axis] - real.shape[axis]], axis)
  last = jnp.where(real, last, jnp.full((), value, x.dtype))
  return jnp.concatenate([first, last], axis) if first.size else last


def _scaled(x: Array, shape: Shape) -> Array:
  """Returns `x / sqrt(K)` in the dtype of `x`."""
  return (x.astype(jnp.float32) * shape.channels ** -.5).astype(x.dtype)


class _Tiles:
  """Collects the results of heads in windows that may overlap, and stores each tile when no other head adds to it.

  The tile is multiplied with `scale`. Its sums over tokens are added to row `row` of `sums [1, 3, D]`, if it is given.
  """

  def __init__(self, ref: Any, shape: Shape, *, scale: float = 1., sums: Any = None, row: int = 0) -> None:
    self._ref, self._shape, self._scale, self._sums, self._row = ref, shape, scale, sums, row
    self._open: dict[int, Array] = {}

  def add(self, window: Window, values: Array, head: int) -> None:
    """Adds `values [rows, w]` f32, which are zero outside the head."""
    following = self._shape.window(head + 1)[0] if head + 1 < self._shape.heads else window.end
    for begin in range(window.begin, window.end, LANES):
      end = min(begin + LANES, window.end)
      part = values[:, begin - window.begin:end - window.begin]
      total = self._open.pop(begin) + part if begin in self._open else part
      if begin < following or head + 1 == self._shape.heads:
        self._store(begin, end, total if self._scale == 1. else total * self._scale)
      else:
        self._open[begin] = total

  def _store(self, begin: int, end: int, total: Array) -> None:
    self._ref[0, :, begin:end] = total.astype(self._ref.dtype)
    if self._sums is not None:
      self._sums[0, self._row:self._row + 1, begin:end] += total.sum(0, keepdims=True)


def _groups(shape: Shape, size: int) -> Iterator[tuple[range, list[Window]]]:
  """Yields heads that are computed together, and their windows."""
  for first in range(0, shape.heads, size):
    heads = range(first, min(first + size, shape.heads))
    yield heads, [_window(shape, head) for head in heads]


def _forward_kernel(query: Any, key: Any, value: Any, out: Any, logsum: Any, *, shape: Shape, group: int) -> None:
  """`softmax(q k^T / sqrt K) v` of one image, and `log sum_k exp(q k^T / sqrt K)`, `[1, A, rows]` f32."""
  tiles, real, real_key = _Tiles(out, shape), _real(shape, 0), _real(shape, 1)
  lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
  largest_QA = sum_QA = jnp.ones((shape.rows, LANES), jnp.float32)
  for heads, windows in _groups(shape, min(group, FORWARD_GROUP)):
    queries = [_scaled(window.load(query, real, only_own=True), shape) for window in windows]
    logits = [_filled(dot(query_QW, window.load(key, real), 1, 1), real_key, LOWEST)
              for query_QW, window in zip(queries, windows, strict=True)]
    largest = [logits_QM.max(1, keepdims=True) for logits_QM in logits]
    weights = [jnp.exp(logits_QM - largest_Q1) for logits_QM, largest_Q1 in zip(logits, largest, strict=True)]
    sums = [weights_QM.sum(1, keepdims=True) for weights_QM in weights]
    for i, head in enumerate(heads):
      mixed_QW = dot(weights[i].astype(query.dtype), windows[i].load(value, real, only_own=True), 1, 0)
      tiles.add(windows[i], mixed_QW * (1. / sums[i]), head)
      largest_QA = jnp.where(lane == head, largest[i], largest_QA)
      sum_QA = jnp.where(lane == head, sums[i], sum_QA)
  logsum[0] = dot(_eye(shape.heads), largest_QA + jnp.log(sum_QA), 1, 1)


def _eye(heads: int) -> Array:
  """Returns a unit matrix `[A, LANES]` f32; a product with it transposes exactly."""
  row, lane = (lax.broadcasted_iota(jnp.int32, (heads, LANES), axis) for axis in (0, 1))
  return (row == lane).astype(jnp.float32)


def _backward_kernel(query: Any, key: Any, value: Any, out: Any, logsum: Any, dout: Any, dquery: Any, dkey: Any,
                     dvalue: Any, dbias: Any, *, shape: Shape, group: int) -> None:
  """Gradients of one image; keys are the rows of the weights, so that only one product needs a transposed operand."""
  @pl.when(pl.program_id(1) == 0)
  def _() -> None:
    dbias[...] = jnp.zeros(dbias.shape, dbias.dtype)

  scale = shape.channels ** -.5
  results = [_Tiles(dquery, shape, scale=scale, sums=dbias, row=0), _Tiles(dkey, shape, sums=dbias, row=1),
             _Tiles(dvalue, shape, sums=dbias, row=2)]
  real, shared_AQ = _real(shape, 0), _shared(out, dout, shape)
  for heads, windows in _groups(shape, group):
    queries, keys, douts = ([window.load(ref, real, only_own=True) for window in windows] for ref in (query, key, dout))
    queries = [_scaled(query_QW, shape) for query_QW in queries]
    logits = [_filled(dot(key_MW, query_QW, 1, 1), real, LOWEST)
              for key_MW, query_QW in zip(keys, queries, strict=True)]
    dweights = [dot(window.load(value, real), dout_QW, 1, 1) for window, dout_QW in zip(windows, douts, strict=True)]
    weights = [jnp.exp(logits_MQ - logsum[0, head:head + 1]) for head, logits_MQ in zip(heads, logits, strict=True)]
    dlogits = [(weights[i] * (dweights[i] - shared_AQ[head:head + 1])).astype(query.dtype)
               for i, head in enumerate(heads)]
    for i, head in enumerate(heads):
      gradients = (dot(dlogits[i], keys[i], 0, 0), dot(dlogits[i], queries[i], 1, 0),
                   dot(weights[i].astype(query.dtype), douts[i], 1, 0))
      for tiles, values in zip(results, gradients, strict=True):
        tiles.add(windows[i], values, head)


def _shared(out: Any, dout: Any, shape: Shape) -> Array:
  """Returns `sum_k o do` of each head, `[A, rows]` f32: a product with a matrix of zeros and ones sums and transposes.

  In bf16 the remainder of the first rounding is summed, too, so that 16 bits of the product count.
  """
  real, width = _real(shape, 0), shape.heads * shape.channels
  total_AQ = jnp.zeros((shape.heads, shape.rows), jnp.float32)
  for begin in range(0, width, 2 * LANES):
    window = Window(begin, min(begin + 2 * LANES, width), jnp.ones((), bool))
    sides = (shape.heads, window.end - begin)
    head, lane = (lax.broadcasted_iota(jnp.int32, sides, axis) for axis in (0, 1))
    is_own = (begin + lane >= head * shape.channels) & (begin + lane < (head + 1) * shape.channels)
    left_QW = window.load(out, real).astype(jnp.float32) * window.load(dout, real).astype(jnp.float32)
    for _ in range(1 if out.dtype == jnp.float32 else 2):
      part_QW = left_QW.astype(out.dtype)
      total_AQ += dot(is_own.astype(out.dtype), part_QW, 1, 1)
      left_QW -= part_QW.astype(jnp.float32)
  return total_AQ


def _call(kernel: Any, heads: int, arrays: tuple[Array, ...], kinds: str, *, vmem_bytes: int,
          interpret: bool, name: str) -> list[Array]:
  """Runs a kernel image by image on `arrays`, and returns its results.

  `kinds` has a letter for each array, then for each result: `i` is `[B, N, D]` of images, `h` `[B, A, rows]` f32 of
  heads, and `b` `[cores, 3, D]` f32 of biases. So `iiiih` is a kernel with three arrays of images, and with the results
  `[B, N, D]` and `[B, A, rows]`.
  """
  num_images, tokens, width = arrays[0].shape
  shape = Shape(tokens, heads, width // heads)
  cores = CORES if num_images % CORES == 0 else 1
  each = num_images // cores
  group = shape.group(arrays[0].dtype.itemsize, vmem_bytes)
  by_image = functools.partial(pl.BlockSpec, index_map=lambda core, i: (core * each + i, 0, 0))
  known = {'i': (by_image((1, shape.rows, width)), (num_images, tokens, width), arrays[0].dtype),
           'h': (by_image((1, shape.heads, shape.rows)), (num_images, shape.heads, shape.rows), jnp.float32),
           'b': (pl.BlockSpec((1, 3, width), lambda core, i: (core, 0, 0)), (cores, 3, width), jnp.float32)}
  blocks = [known[kind][0] for kind in kinds]
  return pl.pallas_call(
      functools.partial(kernel, shape=shape, group=group), grid=(cores, each), in_specs=blocks[:len(arrays)],
      out_specs=blocks[len(arrays):], interpret=interpret, name=name,
      out_shape=[jax.ShapeDtypeStruct(*known[kind][1:]) for kind in kinds[len(arrays):]],
      compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary'),
                                           vmem_limit_bytes=vmem_bytes if vmem_bytes > SMALL_VMEM else None)
  )(*arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def attend(query: Array, key: Array, value: Array, biases: Array, heads: int, vmem_bytes: int = SMALL_VMEM,
           interpret: bool = False) -> Array:
  """Attention of each image within its tokens. The result is named `attention` for rematerialization.

  Args:
    query: `[B, N, D]`, any float dtype; head `a` has the channels from `a D / A` on.
    key: `[B, N, D]`, same dtype.
    value: `[B, N, D]`, same dtype.
    biases: `[3, D]`, same dtype: added to query, key and value first, which are then named after themselves.
    heads: A.
    vmem_bytes: on-chip memory of the device that the kernels may use; with more, more heads are computed together.
    interpret: runs the kernel's Python on any device, slowly.

  Returns:
    `[B, N, D]`, same dtype.
  """
  return _forward(query, key, value, biases, heads, vmem_bytes, interpret)[0]


def _forward(query: Array, key: Array, value: Array, biases: Array, heads: int, vmem_bytes: int,
             interpret: bool) -> tuple[Array, tuple[Array, ...]]:
  inputs = tuple(checkpoint_name(x + bias[None, None], name) for x, bias, name in zip(
      (query, key, value), biases, ('query', 'key', 'value'), strict=True))
  results = _call(_forward_kernel, heads, inputs, 'iiiih', vmem_bytes=vmem_bytes, interpret=interpret,
                  name='fused_attention')
  out, logsum = (checkpoint_name(x, 'attention') for x in results)
  return out, (*inputs, out, logsum)


def _backward(heads: int, vmem_bytes: int, interpret: bool, saved: tuple[Array, ...], dout: Array) -> tuple[Array, ...]:
  *dinputs, dbiases = _call(_backward_kernel, heads, (*saved, dout), 'iiiihiiiib', vmem_bytes=vmem_bytes,
                            interpret=interpret, name='fused_attention_backward')
  return (*dinputs, dbiases.sum(0).astype(dout.dtype))


attend.defvjp(_forward, _backward)
