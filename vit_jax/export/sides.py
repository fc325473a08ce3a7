"""Sides of tensors that are unknown while a network is traced, as values in an ONNX graph.

A side is a polynomial in the symbols of the trace, such as `batch`, or `rows*columns + 1`. The symbols are computed
once from the shape of the input; a side is then arithmetic on them.
"""
from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.core.errors import UserError

Node = Callable[..., str]
"""Adds a node with one result `[1]` i64: `(operation, *inputs, **settings)` to its name."""
Tensor = Callable[[Any], str]
"""Stores a tensor, and returns its name."""

_OPERATIONS = {ast.Add: 'Add', ast.Sub: 'Sub', ast.Mult: 'Mul', ast.Pow: 'Pow'}
_FUNCTIONS = {'floordiv': 'Div', 'mod': 'Mod', 'max': 'Max', 'min': 'Min'}


class Sides:
  """Computes sides of tensors in the graph; each expression has one node."""

  def __init__(self, node: Node, tensor: Tensor) -> None:
    self._node, self._tensor = node, tensor
    self._known: dict[str, str] = {}

  def read(self, name: str, shape: Sequence[Any], factors: Mapping[str, int]) -> None:
    """Adds the nodes that compute each symbol from the shape of the input.

    Args:
      name: of the input.
      shape: of the input; each symbol is a side of it, or a side is a multiple of a symbol.
      factors: for each symbol, the multiple.
    """
    whole = self._node('Shape', name)
    for symbol, factor in factors.items():
      axis = next(i for i, side in enumerate(shape) if not isinstance(side, int) and symbol in str(side))
      side = self._node('Gather', whole, self._number(axis), axis=0)
      self._known[symbol] = side if factor == 1 else self._node('Div', side, self._number(factor))

  def value(self, side: Any) -> str:
    """Returns the name of a side as a value `[1]` i64."""
    return self._number(side) if isinstance(side, int) else self._expression(
        ast.parse(str(side).replace('^', '**'), mode='eval').body)

  def shape(self, sides: Sequence[Any]) -> str:
    """Returns the name of the sides as a value `[rank]` i64."""
    if all(isinstance(side, int) for side in sides):
      return self._tensor(np.array(sides, np.int64))
    return self._node('Concat', *map(self.value, sides), axis=0)

  def _expression(self, one: ast.expr) -> str:
    text = ast.unparse(one)
    if text not in self._known:
      self._known[text] = self._made(one)
    return self._known[text]

  def _made(self, one: ast.expr) -> str:
    match one:
      case ast.Constant(value=int(number)):
        return self._number(number)
      case ast.UnaryOp(op=ast.USub(), operand=operand):
        return self._node('Neg', self._expression(operand))
      case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
        return self._node(_OPERATIONS[type(operation)], self._expression(left), self._expression(right))
      case ast.Call(func=ast.Name(id=function), args=args) if function in _FUNCTIONS:
        return self._node(_FUNCTIONS[function], *map(self._expression, args))
    raise UserError(f'--to: expected sides of tensors made of the sides of the input, got {ast.unparse(one)}. Export '
                    'this network as .stablehlo.')

  def _number(self, number: int) -> str:
    return self._tensor(np.array([number], np.int64))
