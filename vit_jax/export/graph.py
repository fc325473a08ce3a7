"""Converts a traced function to the nodes of an ONNX graph.

The network is traced once with a symbolic number of images, and on request with symbolic height and width, and each
operation of the trace becomes ONNX nodes. Values that depend only on parameters (standardized kernels, summed
positions, slices of stacked blocks) are computed here and stored. All families therefore use the same rules, and no
model is written twice.

The package jax2onnx 0.17.1 is not used: it needs an older Orbax, has no rule for `lax.platform_dependent`, which every
network here uses, and its MaxPool files are refused by onnxruntime. It wrote 388 nodes for a small ViT, this module 94.

A dimension that is unknown while the network is traced is a polynomial in the symbols of the trace, such as `batch`, or
`rows*columns + 1`. The symbols are computed once from the shape of the input; a dimension is then arithmetic on them.
"""
from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core

from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray

INLINED = {'jit': 'jaxpr', 'remat2': 'jaxpr', 'checkpoint': 'jaxpr', 'closed_call': 'call_jaxpr',
           'core_call': 'call_jaxpr', 'custom_jvp_call': 'call_jaxpr', 'custom_vjp_call': 'call_jaxpr'}
"""Operations that contain another trace, and the parameter that holds it."""
MOVES: dict[str, Callable[[HostArray, Mapping[str, Any]], Any]] = {
    'squeeze': lambda x, s: np.squeeze(x, s['dimensions']),
    'transpose': lambda x, s: np.transpose(x, s['permutation']),
    'split': lambda x, s: np.split(x, np.cumsum(s['sizes'])[:-1], s['axis']),
    'broadcast_in_dim': lambda x, s: _stretched(x, s['shape'], s['broadcast_dimensions']),
    'slice': lambda x, s: x[tuple(map(slice, s['start_indices'], s['limit_indices'], s['strides'] or [None] * x.ndim))]}
"""Operations that only move elements: NumPy runs them on arrays at once, and jax would compile a program for each."""
AS_IS = ('name', 'stop_gradient', 'copy', 'copy_p', 'optimization_barrier', 'sharding_constraint')
Node = Callable[..., str]
"""Adds a node with one result `[1]` i64: `(operation, *inputs, **settings)` to its name."""
Tensor = Callable[[Any], str]
"""Stores a tensor, and returns its name."""

_OPERATIONS = {ast.Add: 'Add', ast.Sub: 'Sub', ast.Mult: 'Mul', ast.Pow: 'Pow'}
_FUNCTIONS = {'floordiv': 'Div', 'mod': 'Mod', 'max': 'Max', 'min': 'Min'}


class Value(NamedTuple):
  """A tensor of the graph.

  name: of the node's output or the stored tensor.
  shape: in the graph; a dimension of 1 may be wider in the trace, as arithmetic broadcasts it.
  """
  name: str
  shape: tuple[Any, ...]


class Rules(NamedTuple):
  """How operations of the trace are converted, by name.

  same_name: the ONNX operation, for operations without settings that broadcast over dimensions of 1.
  by_name: `(writer, equation, *operands)` to the results.
  functions: likewise for functions with a custom gradient, by the name of the function.
  """
  same_name: Mapping[str, str]
  by_name: Mapping[str, Callable[..., list[Value]]]
  functions: Mapping[str, Callable[..., list[Value]]]


class Dimensions:
  """Computes dimensions of tensors in the graph; each expression has one node."""

  def __init__(self, node: Node, tensor: Tensor) -> None:
    self._node, self._tensor = node, tensor
    self._known: dict[str, str] = {}

  def read(self, name: str, shape: Sequence[Any], factors: Mapping[str, int]) -> None:
    """Adds the nodes that compute each symbol from the shape of the input.

    Args:
      name: of the input.
      shape: of the input; each symbol is a dimension of it, or a dimension is a multiple of a symbol.
      factors: for each symbol, the multiple.
    """
    whole = self._node('Shape', name)
    for symbol, factor in factors.items():
      axis = next(i for i, size in enumerate(shape) if not isinstance(size, int) and symbol in str(size))
      size = self._node('Gather', whole, self._number(axis), axis=0)
      self._known[symbol] = size if factor == 1 else self._node('Div', size, self._number(factor))

  def value(self, size: Any) -> str:
    """Returns the name of a dimension as a value `[1]` i64."""
    if isinstance(size, int):
      return self._number(size)
    return self._expression(ast.parse(str(size).replace('^', '**'), mode='eval').body)  # such as `rows*columns + 1`

  def shape(self, dimensions: Sequence[Any]) -> str:
    """Returns the name of the dimensions as a value `[rank]` i64."""
    if all(isinstance(size, int) for size in dimensions):
      return self._tensor(np.array(dimensions, np.int64))
    return self._node('Concat', *map(self.value, dimensions), axis=0)

  def _expression(self, expression: ast.expr) -> str:
    """Returns the name of an expression as a value; the first time its nodes are added."""
    text = ast.unparse(expression)
    if text not in self._known:
      self._known[text] = self._add_expression(expression)
    return self._known[text]

  def _add_expression(self, expression: ast.expr) -> str:
    match expression:
      case ast.Constant(value=int(number)):
        return self._number(number)
      case ast.UnaryOp(op=ast.USub(), operand=operand):
        return self._node('Neg', self._expression(operand))
      case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
        return self._node(_OPERATIONS[type(operation)], self._expression(left), self._expression(right))
      case ast.Call(func=ast.Name(id=function), args=args) if function in _FUNCTIONS:
        return self._node(_FUNCTIONS[function], *map(self._expression, args))
    raise UserError('--to: expected dimensions of tensors that follow from those of the input, got '
                    f'{ast.unparse(expression)}. Export this network as .stablehlo.')

  def _number(self, number: int) -> str:
    return self._tensor(np.array([number], np.int64))


class Writer:
  """Collects nodes and stored tensors.

  Args:
    helper: `onnx.helper`.
    names: of parameters, by `digest`; a stored tensor with the elements of a parameter gets its name.
    rules: how each operation is converted.
  """

  def __init__(self, helper: Any, names: Mapping[str, str], rules: Rules) -> None:
    self.helper, self._names, self._rules = helper, names, rules
    self.nodes: list[Any] = []
    self.stored: dict[str, HostArray] = {}
    self._counts: dict[str, int] = {}
    self._known: dict[tuple[str, str, tuple[int, ...]], str] = {}
    self.dimensions = Dimensions(self._dimension, self.tensor)

  def write(self, jaxpr: core.Jaxpr, constants: Sequence[Any], arguments: Sequence[Value | HostArray]) -> list[Any]:
    """Adds a trace and returns its results; those that do not depend on the input are arrays."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *arguments), strict=True))

    def read(variable: Any) -> Any:
      if isinstance(variable, core.Literal):
        return np.asarray(variable.val, variable.aval.dtype)  # type: ignore[attr-defined]
      return values[variable]

    for equation in jaxpr.eqns:
      operands = [read(variable) for variable in equation.invars]
      for variable, result in zip(equation.outvars, self._equation(equation, operands), strict=True):
        values[variable] = result
    return [read(variable) for variable in jaxpr.outvars]

  def _equation(self, equation: Any, operands: list[Any]) -> list[Any]:
    """Adds an operation of the trace, and returns its results."""
    name = equation.primitive.name
    function = self._rules.functions.get(_function_name(equation)) if name == 'custom_vjp_call' else None
    if function and any(isinstance(operand, Value) for operand in operands):
      return function(self, equation, *operands)
    if name in INLINED:
      inner = equation.params[INLINED[name]]
      jaxpr, constants = (inner.jaxpr, inner.consts) if hasattr(inner, 'jaxpr') else (inner, ())
      return self.write(jaxpr, constants, operands)
    if name in AS_IS:
      return operands
    if name == 'platform_index':  # selects the form for any device
      return [np.array(equation.params['platforms'].index(None), np.int32)]
    if name == 'cond' and not isinstance(operands[0], Value):
      chosen = equation.params['branches'][int(operands[0])]
      return self.write(chosen.jaxpr, chosen.consts, operands[1:])
    result_sizes = [size for variable in equation.outvars for size in variable.aval.shape]
    has_symbols = name == 'dim_as_value' or any(not isinstance(size, int) for size in result_sizes)
    if not has_symbols and not any(isinstance(operand, Value) for operand in operands):  # computed here
      if name in MOVES:
        moved = MOVES[name](np.asarray(operands[0]), equation.params)
        return moved if isinstance(moved, list) else [moved]
      results = equation.primitive.bind(*operands, **equation.params)
      return list(map(np.asarray, results if equation.primitive.multiple_results else [results]))
    if name in self._rules.same_name:
      return [self.arithmetic(self._rules.same_name[name], operands)]
    if name not in self._rules.by_name:
      raise UserError(f'--to: expected operations that have an ONNX rule, got {name!r}. Export this network as '
                      '.stablehlo.')
    return self._rules.by_name[name](self, equation, *operands)

  def node(self, kind: str, *inputs: str, shape: Sequence[Any], outputs: int = 1, **settings: Any) -> Value:
    """Adds a node and returns its first output, of `shape`."""
    self._counts[kind] = self._counts.get(kind, 0) + 1
    name = f'{kind}_{self._counts[kind]}'
    names = [name] if outputs == 1 else [f'{name}_{i}' for i in range(outputs)]
    self.nodes.append(self.helper.make_node(kind, list(inputs), names, name=name, **settings))
    return Value(names[0], tuple(shape))

  def tensor(self, array: Any) -> str:
    """Stores a tensor and returns its name; equal tensors are stored once."""
    array = np.asarray(array)
    key = digest(array), str(array.dtype), array.shape
    if key not in self._known:
      name = self._names.get(key[0], 'tensor')
      is_new = name != 'tensor' and name not in self.stored
      self._known[key] = name if is_new else f'{name}_{len(self._known)}'
      self.stored[self._known[key]] = array
    return self._known[key]

  def value(self, operand: Any) -> Value:
    """Returns a value of the graph; arrays are stored."""
    if isinstance(operand, Value):
      return operand
    array = np.asarray(operand)
    return Value(self.tensor(array), array.shape)

  def reshaped(self, value: Value, shape: Sequence[Any]) -> Value:
    if value.shape == tuple(shape):
      return value
    is_one = sum(not isinstance(size, int) for size in shape) == 1
    sizes = [-1 if is_one and not isinstance(size, int) else size for size in shape]  # -1: Reshape computes it
    return self.node('Reshape', value.name, self.dimensions.shape(sizes), shape=shape)

  def transposed(self, value: Value, order: Sequence[int]) -> Value:
    if list(order) == sorted(order):
      return value
    return self.node('Transpose', value.name, shape=[value.shape[i] for i in order], perm=list(order))

  def expanded(self, operand: Any, shape: Sequence[Any]) -> Value:
    """Returns the value with the shape of the trace."""
    value = self.value(operand)
    if value.shape == tuple(shape):
      return value
    target = [1 if not isinstance(size, int) and value.shape[i] == size else size for i, size in enumerate(shape)]
    return self.node('Expand', value.name, self.dimensions.shape(target), shape=shape)

  def _dimension(self, kind: str, *inputs: str, **settings: Any) -> str:
    return self.node(kind, *inputs, shape=(1,), **settings).name

  def arithmetic(self, kind: str, operands: Sequence[Any], **settings: Any) -> Value:
    values = [self.value(operand) for operand in operands]
    return self.node(kind, *(value.name for value in values), shape=_broadcast([v.shape for v in values]), **settings)


def _function_name(equation: Any) -> str:
  """Returns the name of a function with a custom gradient; '' if the trace has none, and the function is inlined."""
  info = getattr(equation.params['call_jaxpr'].jaxpr, 'debug_info', None)
  return str(getattr(info, 'func_src_info', None) or '').partition(' ')[0]


def _stretched(x: HostArray, shape: Sequence[int], axes: Sequence[int]) -> HostArray:
  """Returns `x` with its axes at `axes` of `shape`, repeated along the others."""
  sizes = [1] * len(shape)
  for axis, size in zip(axes, x.shape, strict=True):
    sizes[axis] = size
  return np.broadcast_to(x.reshape(sizes), shape)


def digest(array: Any) -> str:
  """Returns a digest of an array's elements in order, independent of its shape."""
  return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _broadcast(shapes: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
  """Returns the shape of arithmetic on tensors of these shapes; scalars broadcast."""
  rank = max(map(len, shapes))
  rows = [shape for shape in shapes if len(shape) == rank]
  return tuple(next((row[i] for row in rows if not isinstance(row[i], int) or row[i] != 1), 1) for i in range(rank))
