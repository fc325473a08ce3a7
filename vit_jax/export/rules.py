"""The ONNX form of each operation in a trace, for the operations that the networks of this project use.

A rule `_reshape(w, equation, x)` gets the writer of the graph, the equation of the trace, and its operands: values of
the graph, or arrays that do not depend on the input. It adds nodes and returns the results. A side is a dimension of a
tensor.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.export.graph import Rules, Value, Writer
from vit_jax.models.kernels.norm_act import QUICK

OPSET = 20  # the first with GELU; supported by onnxruntime 1.17 and later
SAME_NAME = {
    'add': 'Add', 'sub': 'Sub', 'mul': 'Mul', 'div': 'Div', 'max': 'Max', 'neg': 'Neg', 'exp': 'Exp', 'tanh': 'Tanh',
    'logistic': 'Sigmoid', 'sqrt': 'Sqrt', 'erf': 'Erf', 'min': 'Min', 'abs': 'Abs', 'sin': 'Sin', 'cos': 'Cos',
    'eq': 'Equal', 'lt': 'Less', 'gt': 'Greater', 'and': 'And'}
"""Operations without settings that broadcast over dimensions of 1."""


def _square(w: Writer, equation: Any, x: Value) -> list[Value]:
  return [w.arithmetic('Mul', [x, x])]


def _rsqrt(w: Writer, equation: Any, x: Value) -> list[Value]:
  return [w.arithmetic('Reciprocal', [w.arithmetic('Sqrt', [x])])]


def _erfc(w: Writer, equation: Any, x: Value) -> list[Value]:
  return [w.arithmetic('Sub', [np.ones((), np.float32), w.arithmetic('Erf', [x])])]


def _integer_pow(w: Writer, equation: Any, x: Value) -> list[Value]:
  return [w.arithmetic('Pow', [x, np.array(equation.params['y'], np.float32)])]


def _convert_element_type(w: Writer, equation: Any, x: Value) -> list[Value]:
  kind = w.helper.np_dtype_to_tensor_dtype(np.dtype(equation.params['new_dtype']))
  return [w.arithmetic('Cast', [x], to=kind)]


def _rem(w: Writer, equation: Any, x: Any, y: Any) -> list[Value]:
  return [w.arithmetic('Mod', [x, y], fmod=1)]  # the sign of the dividend, as in the trace


def _dim_as_value(w: Writer, equation: Any) -> list[Value]:
  side = w.reshaped(Value(w.dimensions.value(equation.params['dim']), (1,)), ())
  return [w.node('Cast', side.name, shape=(), to=_kind(w, equation))]


def _iota(w: Writer, equation: Any) -> list[Value]:
  shape = equation.outvars[0].aval.shape
  if len(shape) > 1:
    raise UserError(f'--to: expected ranges along one axis, got one of {shape}. Export this network as .stablehlo.')
  first, step = w.tensor(np.zeros((), np.int64)), w.tensor(np.ones((), np.int64))
  stop = w.reshaped(Value(w.dimensions.value(shape[0]), (1,)), ())
  numbers = w.node('Range', first, stop.name, step, shape=shape)
  return [w.node('Cast', numbers.name, shape=shape, to=_kind(w, equation))]


def _kind(w: Writer, equation: Any) -> int:
  """Returns the number of the dtype of the result."""
  return int(w.helper.np_dtype_to_tensor_dtype(np.dtype(equation.outvars[0].aval.dtype)))


def _select_n(w: Writer, equation: Any, which: Any, no: Any, yes: Any) -> list[Value]:
  which, no, yes = (w.expanded(x, variable.aval.shape)
                    for x, variable in zip((which, no, yes), equation.invars, strict=True))
  return [w.node('Where', which.name, yes.name, no.name, shape=equation.outvars[0].aval.shape)]


def _reshape(w: Writer, equation: Any, x: Any) -> list[Value]:
  shape = equation.outvars[0].aval.shape
  return [w.reshaped(w.expanded(x, equation.invars[0].aval.shape), shape)]


def _broadcast_in_dim(w: Writer, equation: Any, x: Any) -> list[Value]:
  value, shape = w.value(x), [1] * len(equation.outvars[0].aval.shape)
  for place, side in zip(equation.params['broadcast_dimensions'], value.shape, strict=True):
    shape[place] = side
  return [w.reshaped(value, shape)]


def _transpose(w: Writer, equation: Any, x: Any) -> list[Value]:
  return [w.transposed(w.value(x), equation.params['permutation'])]


def _concatenate(w: Writer, equation: Any, *parts: Any) -> list[Value]:
  whole = [w.expanded(part, variable.aval.shape) for part, variable in zip(parts, equation.invars, strict=True)]
  return [w.node('Concat', *(value.name for value in whole), shape=equation.outvars[0].aval.shape,
                    axis=equation.params['dimension'])]


def _slice(w: Writer, equation: Any, x: Any) -> list[Value]:
  shape = equation.invars[0].aval.shape
  starts, stops = equation.params['start_indices'], equation.params['limit_indices']
  strides = equation.params['strides'] or [1] * len(shape)
  return [_cut(w, w.expanded(x, shape), starts, stops, strides, equation.outvars[0].aval.shape)]


def _cut(w: Writer, x: Value, starts: Sequence[Any], stops: Sequence[Any], strides: Sequence[int],
         shape: Sequence[Any]) -> Value:
  """Returns a part of a tensor, or the tensor if the part is all of it."""
  axes = [i for i, side in enumerate(x.shape) if (starts[i], stops[i], strides[i]) != (0, side, 1)]
  if not axes:
    return x
  bounds = [w.dimensions.shape([values[i] for i in axes]) for values in (starts, stops)]
  steps = w.tensor(np.array([strides[i] for i in axes], np.int64))
  return w.node('Slice', x.name, *bounds, w.tensor(np.array(axes, np.int64)), steps, shape=shape)


def _split(w: Writer, equation: Any, x: Any) -> list[Value]:
  axis, sizes, shape = equation.params['axis'], equation.params['sizes'], list(equation.invars[0].aval.shape)
  whole, ends = w.expanded(x, shape), np.cumsum([0, *sizes])
  cut = []
  for variable, start, stop in zip(equation.outvars, ends[:-1], ends[1:], strict=True):
    starts, stops = [0] * len(shape), list(shape)
    starts[axis], stops[axis] = int(start), int(stop)
    cut.append(_cut(w, whole, starts, stops, [1] * len(shape), variable.aval.shape))
  return cut


def _gather(w: Writer, equation: Any, x: Any, indices: Any) -> list[Value]:
  """Gathers from constant indices that form a grid, as in `x[:, 0]` and `x[:, ::2, ::2]`; or rows of a table."""
  numbers, sizes = equation.params['dimension_numbers'], equation.params['slice_sizes']
  sides_by_axis: dict[int, int] | None = None
  if not isinstance(indices, Value):
    sides_by_axis = _find_grid(np.asarray(indices), numbers.start_index_map)
  elif rows := _rows(w, equation, x, indices):
    return [rows]
  if sides_by_axis is None or not set(sides_by_axis.values()) <= set(numbers.collapsed_slice_dims):
    raise UserError('--to: expected gathers from a grid of indices, got other indices. Export as .stablehlo.')
  shape, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
  picked = set(sides_by_axis.values())  # sides of the tensor with indices of their own; the others have one slice
  starts, stops = [0] * len(shape), list(shape)
  first = np.reshape(indices, (-1, np.shape(indices)[-1]))[0]
  for side, start in zip(numbers.start_index_map, first, strict=True):
    if side not in picked:
      starts[side], stops[side] = int(start), int(start) + sizes[side]
  cut_shape = [shape[side] if side in picked else sizes[side] for side in range(len(shape))]
  value = _cut(w, w.expanded(x, shape), starts, stops, [1] * len(shape), cut_shape)
  for axis, side in sides_by_axis.items():
    along_axis = np.moveaxis(indices, axis, 0).reshape(np.shape(indices)[axis], -1, np.shape(indices)[-1])
    places = along_axis[:, 0, numbers.start_index_map.index(side)].astype(np.int64)
    sides = [len(places) if i == side else size for i, size in enumerate(value.shape)]
    value = w.node('Gather', value.name, w.tensor(places), axis=side, shape=sides)
  kept = [side for side in range(len(shape)) if side in picked or side not in numbers.collapsed_slice_dims]
  value = w.reshaped(value, [value.shape[side] for side in kept])
  # The result has the sides of slices at `offset_dims`, and those of the grid, by axis, at the others.
  slices = iter([i for i, side in enumerate(kept) if side not in picked])
  grid = iter([kept.index(sides_by_axis[axis]) for axis in sorted(sides_by_axis)])
  order = list(range(len(kept)))
  if sides_by_axis:
    order = [next(slices) if i in numbers.offset_dims else next(grid) for i in range(len(out))]
  return [w.reshaped(w.transposed(value, order), out)]


def _rows(w: Writer, equation: Any, x: Any, indices: Value) -> Value | None:
  """Gathers rows of a table, `x[i]`, or a row of each example, `x[b, i_b]`; None for other gathers.

  Indices are inside of the table; where they are not, the trace has NaN, and the file an error.
  """
  numbers, shape, out = equation.params['dimension_numbers'], equation.invars[0].aval.shape, equation.outvars[0].aval
  num_batch = len(numbers.operand_batching_dims)  # sides that the table and the indices share
  has_batch_first = (num_batch < 2 and numbers.operand_batching_dims == numbers.start_indices_batching_dims
                     == tuple(range(num_batch)))
  indexes_next_side = numbers.start_index_map == numbers.collapsed_slice_dims == (num_batch,)
  takes_whole_rows = tuple(equation.params['slice_sizes']) == (1,) * (num_batch + 1) + tuple(shape[num_batch + 1:])
  num_row_sides = len(shape) - num_batch - 1
  ends_with_rows = numbers.offset_dims == tuple(range(len(out.shape) - num_row_sides, len(out.shape)))
  if not (has_batch_first and indexes_next_side and takes_whole_rows and ends_with_rows):
    return None
  whole, places = w.expanded(x, shape), w.expanded(indices, equation.invars[1].aval.shape)
  wide = w.node('Cast', places.name, shape=places.shape, to=w.helper.np_dtype_to_tensor_dtype(np.dtype(np.int64)))
  return w.node('GatherND', whole.name, wide.name, shape=out.shape, batch_dims=num_batch)


def _argmax(w: Writer, equation: Any, x: Any) -> list[Value]:
  axis, = equation.params['axes']
  whole = w.expanded(x, equation.invars[0].aval.shape)
  found = w.node('ArgMax', whole.name, shape=equation.outvars[0].aval.shape, axis=axis, keepdims=0)
  return [w.node('Cast', found.name, shape=found.shape, to=_kind(w, equation))]


def _find_grid(indices: np.ndarray, sides: Sequence[int]) -> dict[int, int] | None:
  """Returns for each axis of a grid of indices the side of the tensor that it indexes; None if they form no grid.

  Args:
    indices: `[*grid, len(sides)]`.
    sides: of the tensor, in the order of the last axis of `indices`.
  """
  sides_by_axis: dict[int, int] = {}
  for number, side in enumerate(sides):
    of_side = indices[..., number]
    axes = [axis for axis in range(of_side.ndim) if np.any(of_side != np.take(of_side, [0], axis))]  # where it varies
    if len(axes) > 1 or (axes and axes[0] in sides_by_axis):
      return None
    sides_by_axis |= {axis: side for axis in axes}
  is_grid = all(size == 1 or axis in sides_by_axis for axis, size in enumerate(indices.shape[:-1]))
  return sides_by_axis if is_grid else None


def _pad(w: Writer, equation: Any, x: Any, fill: Any) -> list[Value]:
  low, high, inner = zip(*equation.params['padding_config'], strict=True)
  if any(inner) or min(*low, *high) < 0 or isinstance(fill, Value):
    raise UserError('--to: expected padding at the edges, got interior or negative padding. Export as .stablehlo.')
  whole = w.expanded(x, equation.invars[0].aval.shape)
  return [w.node('Pad', whole.name, w.tensor(np.array([*low, *high], np.int64)), w.tensor(fill),
                    shape=equation.outvars[0].aval.shape)]


def _reduce(kind: str, w: Writer, equation: Any, x: Any) -> list[Value]:
  whole = w.expanded(x, equation.invars[0].aval.shape)
  axes = w.tensor(np.array(equation.params['axes'], np.int64))
  return [w.node(kind, whole.name, axes, shape=equation.outvars[0].aval.shape, keepdims=0)]


def _dot_general(w: Writer, equation: Any, x: Any, y: Any) -> list[Value]:
  (contract_x, contract_y), (batch_x, batch_y) = equation.params['dimension_numbers']
  (shape_x, shape_y), shape = (variable.aval.shape for variable in equation.invars), equation.outvars[0].aval.shape
  if not batch_x and tuple(contract_x) == (len(shape_x) - 1,) and not isinstance(y, Value):  # tokens with a kernel
    left = w.expanded(x, shape_x)
  else:
    left = _matrices(w, x, shape_x, batch_x, contract_x, contract_last=True)
  right = _matrices(w, y, shape_y, batch_y, contract_y, contract_last=False)
  product = w.node('MatMul', left.name, right.name, shape=(*left.shape[:-1], right.shape[-1]))
  return [w.reshaped(product, shape)]


def _matrices(w: Writer, operand: Any, shape: Sequence[Any], batch: Sequence[int], contract: Sequence[int], *,
              contract_last: bool) -> Value:
  """`[*batch, free, contracted]`, or contracted before free, with free and contracted sides flattened."""
  free = [i for i in range(len(shape)) if i not in (*batch, *contract)]
  order = [*batch, *free, *contract] if contract_last else [*batch, *contract, *free]
  sides = [math.prod([shape[i] for i in group]) for group in (free, contract)]
  flat = [*(shape[i] for i in batch), *(sides if contract_last else sides[::-1])]
  if not isinstance(operand, Value):
    return w.value(np.asarray(operand).transpose(order).reshape(flat))
  return w.reshaped(w.transposed(w.expanded(operand, shape), order), flat)


def _conv_general_dilated(w: Writer, equation: Any, x: Any, kernel: Any) -> list[Value]:
  settings, numbers = equation.params, equation.params['dimension_numbers']
  if isinstance(kernel, Value) or set(settings['lhs_dilation']) != {1} or settings['batch_group_count'] != 1:
    raise UserError('--to: expected a convolution with a constant kernel, got another one. Export as .stablehlo.')
  low, high = zip(*settings['padding'], strict=True)
  image = w.transposed(w.expanded(x, equation.invars[0].aval.shape), numbers.lhs_spec)
  weights = w.tensor(np.ascontiguousarray(np.asarray(kernel).transpose(numbers.rhs_spec)))
  out = equation.outvars[0].aval.shape
  found = w.node('Conv', image.name, weights, shape=[out[i] for i in numbers.out_spec], pads=[*low, *high],
                    strides=list(settings['window_strides']), dilations=list(settings['rhs_dilation']),
                    group=settings['feature_group_count'])
  return [w.transposed(found, np.argsort(numbers.out_spec).tolist())]


def _reduce_window_max(w: Writer, equation: Any, x: Any, *_: Any) -> list[Value]:
  settings = equation.params
  (_, _), (low_h, high_h), (low_w, high_w), (_, _) = settings['padding']
  if (settings['window_dimensions'][0], settings['window_dimensions'][3]) != (1, 1):
    raise UserError('--to: expected pooling over pixels, got pooling over images or channels. Export as .stablehlo.')
  # onnxruntime 1.31 moves a zero padding before MaxPool into it, where it means -inf (its optimizer Pad_Fusion);
  # not past this maximum, which changes nothing. To go when test_export passes for BiT without it.
  whole = w.arithmetic('Max', [w.expanded(x, equation.invars[0].aval.shape), np.finfo(np.float32).min])
  image = w.transposed(whole, (0, 3, 1, 2))
  out = equation.outvars[0].aval.shape
  found = w.node('MaxPool', image.name, shape=[out[i] for i in (0, 3, 1, 2)],
                    kernel_shape=list(settings['window_dimensions'][1:3]),
                    strides=list(settings['window_strides'][1:3]), pads=[low_h, low_w, high_h, high_w])
  return [w.transposed(found, (0, 2, 3, 1))]


def _layer_norm(w: Writer, equation: Any, x: Any, scale: Any, bias: Any) -> list[Value]:
  """`models.kernels.norm_act.layer_norm`; its epsilon is the constant that the trace adds before the square root."""
  eps = next(v.val for e in _inner(equation.params['call_jaxpr']) if e.primitive.name == 'add'
             for v in e.invars if hasattr(v, 'val'))
  whole = w.expanded(x, equation.invars[0].aval.shape)
  return [w.node('LayerNormalization', whole.name, w.value(scale).name, w.value(bias).name, shape=whole.shape,
                 axis=-1, epsilon=float(eps))]


def _inner(jaxpr: Any) -> Iterator[Any]:
  """Yields the equations of a traced function, with those of its branches for platforms and of functions it calls."""
  for equation in jaxpr.eqns:
    yield equation
    if 'jaxpr' in equation.params:
      yield from _inner(equation.params['jaxpr'])
    for branch in equation.params.get('branches', ()):
      yield from _inner(branch.jaxpr)


def _gelu(w: Writer, equation: Any, x: Any) -> list[Value]:
  """`models.kernels.norm_act.gelu`, in the form of the trace."""
  used = {e.primitive.name for e in _inner(equation.params['call_jaxpr'])}
  if 'logistic' in used:
    return [w.arithmetic('Mul', [x, w.arithmetic('Sigmoid', [w.arithmetic('Mul', [x, np.float32(QUICK)])])])]
  return [w.arithmetic('Gelu', [x], approximate='tanh' if 'tanh' in used else 'none')]


def _attend(w: Writer, equation: Any, *operands: Any) -> list[Value]:
  """`models.kernels.attend.xla_attend` of query, key and value `[B, M, A, K]`, in the form of `plain_attend`."""
  query, key, value = (w.expanded(x, v.aval.shape) for x, v in zip(operands, equation.invars, strict=True))
  num_images, num_queries, heads, side = query.shape
  scaled = w.arithmetic('Mul', [w.transposed(query, (0, 2, 1, 3)), np.float32(side ** -.5)])
  keys, num_keys = w.transposed(key, (0, 2, 3, 1)), key.shape[1]
  logits = w.node('MatMul', scaled.name, keys.name, shape=(num_images, heads, num_queries, num_keys))
  weights = w.node('Softmax', logits.name, shape=logits.shape, axis=-1)
  values = w.transposed(value, (0, 2, 1, 3))
  mixed = w.node('MatMul', weights.name, values.name, shape=(num_images, heads, num_queries, side))
  return [w.transposed(mixed, (0, 2, 1, 3))]


RULES = Rules(SAME_NAME, {
    'square': _square,
    'rsqrt': _rsqrt,
    'erfc': _erfc,
    'integer_pow': _integer_pow,
    'rem': _rem,
    'dim_as_value': _dim_as_value,
    'iota': _iota,
    'convert_element_type': _convert_element_type,
    'select_n': _select_n,
    'reshape': _reshape,
    'broadcast_in_dim': _broadcast_in_dim,
    'transpose': _transpose,
    'concatenate': _concatenate,
    'slice': _slice,
    'split': _split,
    'gather': _gather,
    'argmax': _argmax,
    'pad': _pad,
    'reduce_sum': functools.partial(_reduce, 'ReduceSum'),
    'reduce_max': functools.partial(_reduce, 'ReduceMax'),
    'dot_general': _dot_general,
    'conv_general_dilated': _conv_general_dilated,
    'reduce_window_max': _reduce_window_max,
    'squeeze': _reshape,
    'expand_dims': _reshape,
}, {'layer_norm': _layer_norm, 'gelu': _gelu, 'attend': _attend})
