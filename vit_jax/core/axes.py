"""Logical axes of parameters: they are stated where a parameter is created, and read from a trace of that function.

A network calls `labelled(value, ('embed', 'mlp'), matrix=(1, 1))` for each new parameter, which names its dimensions
and says which of them are those of a matrix. This adds an operation to the trace that returns its operand, so that
parameters stay plain arrays, also below `vmap` and nested modules; the compiled program does not contain it.
`trace(init, …)` then returns the shapes of all parameters and the `Axes` of each. `parallel/sharding.py` maps these
logical axes to axes of the mesh, and the optimizers ask which parameters are matrices.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.extend
from jax.interpreters import batching, mlir

from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, PyTree

Names = tuple[str | None, ...]
"""A name for each dimension, or None for one that is never split.

`path:i` stands for the axis of dimension i of the parameter at this path.
"""
Matrix = tuple[int, int]
"""Numbers of the input axes and of the output axes of a matrix, see `Axes`."""
LAYERS = 'layers'
"""The axis that `vmap` adds in front, over which the parameters of blocks are stacked."""


@dataclasses.dataclass(frozen=True)
class Axes:
  """What is stated of one parameter, a leaf of a tree: its logical axes (None = nothing states them), and its matrix.

  matrix: for a parameter `[..., *inputs, *outputs]` that is a matrix from inputs to outputs, how many axes are inputs
    and how many are outputs. The axes before these count matrices, such as those of layers or of experts. None = the
    parameter is not a matrix.
  """
  names: Names | None
  matrix: Matrix | None = None


def labelled(value: Array, names: Names, matrix: Matrix | None = None) -> Array:
  """Returns a new parameter unchanged, after its dimensions were given names.

  Args:
    value: the parameter.
    names: a name or None for each of its dimensions.
    matrix: how many of its last axes are inputs and outputs of a matrix, see `Axes`; None = it is not a matrix.

  Raises:
    UserError: there is not one name for each dimension, or the matrix has more axes than the parameter.
  """
  if matrix is not None and (min(matrix) < 1 or sum(matrix) > value.ndim):
    raise UserError(f'matrix: expected numbers of input and output axes of a parameter of shape {value.shape}, got '
                    f'{matrix}. State at least 1 for each, and at most {value.ndim} together.')
  if len(names) != value.ndim:
    raise UserError(f'logical axes: expected {value.ndim} for a parameter of shape {value.shape}, got {names}. State '
                     'one name or None for each dimension.')
  return _LABEL.bind(value, names=tuple(names), matrix=matrix)


def of_dimensions(path: str, dimensions: Iterable[int]) -> Names:
  """Returns names that stand for the axes of these dimensions of the parameter at `path`."""
  return tuple(f'{path}:{i}' for i in dimensions)


def trace(function: Callable[..., Any], *args: Any) -> tuple[PyTree, PyTree]:
  """Returns shapes and axes of what a function creates; a later `jax.jit` of the function finds this trace again.

  Returns:
    The shapes and dtypes of its result, and a tree of the same structure with the `Axes` of each leaf.
  """
  traced = jax.jit(function).trace(*args)
  shapes, jaxpr = traced.out_info, traced.jaxpr.jaxpr
  equations = _equation_of(jaxpr)
  axes = [_stated(jaxpr, variable, equations) for variable in jaxpr.outvars]
  return shapes, jax.tree.unflatten(jax.tree.structure(shapes), axes)


def resolved(labels: PyTree) -> dict[str, Axes]:
  """Returns the axes by path name, with names of the form `path:i` replaced by what they stand for.

  Raises:
    UserError: there is no such parameter, or it has no such dimension.
  """
  axes_of: dict[str, Axes] = trees.flatten(labels)

  def resolve(name: str | None, path: str) -> str | None:
    other, _, dimension = (name or '').partition(':')
    if not dimension:
      return name
    names = axes_of[other].names if other in axes_of else None
    if names is None or int(dimension) >= len(names):
      raise UserError(f'{path}: expected the axis of a parameter, got {name!r}, which does not exist. '
                      'Use the name of an axis in vit_jax/core/axes.py, or None.')
    return names[int(dimension)]

  return {path: axes if axes.names is None else dataclasses.replace(axes, names=tuple(
      resolve(name, path) for name in axes.names)) for path, axes in axes_of.items()}


def matrices(labels: PyTree) -> dict[str, Matrix]:
  """Returns the numbers of input and output axes of each parameter that is a matrix, by path name."""
  return {path: axes.matrix for path, axes in trees.flatten(labels).items() if axes.matrix is not None}


def _stated(jaxpr: Any, variable: Any, equations: Mapping[Any, Any]) -> Axes:
  """Returns what a variable of a jaxpr was labelled with; follows the variable back through its equations.

  `equations` is `_equation_of(jaxpr)`.
  """
  equation = None if isinstance(variable, jax.extend.core.Literal) else equations.get(variable)
  if equation is None:
    return Axes(None)
  if equation.primitive is _LABEL:
    return Axes(equation.params['names'], equation.params['matrix'])
  if equation.primitive.name == 'broadcast_in_dim':  # `vmap` stacks what is equal for all layers
    return _stacked(_stated(jaxpr, equation.invars[0], equations), equation)
  if equation.primitive.name == 'transpose':  # `vmap` moves the axis of a stack to the front
    axes = _stated(jaxpr, equation.invars[0], equations)
    return axes if axes.names is None else dataclasses.replace(
        axes, names=tuple(axes.names[i] for i in equation.params['permutation']))
  inner = equation.params.get('jaxpr')  # of a call, such as that of `nn.remat`
  inner = getattr(inner, 'jaxpr', inner)
  if inner is None or len(inner.outvars) != len(equation.outvars):
    return Axes(None)
  output = inner.outvars[equation.outvars.index(variable)]
  if output in inner.invars:  # the call returns its argument
    return _stated(jaxpr, equation.invars[inner.invars.index(output)], equations)
  return _stated(inner, output, _equation_of(inner))


def _equation_of(jaxpr: Any) -> dict[Any, Any]:
  """Returns the equation that computes each variable of a jaxpr."""
  return {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}


def _stacked(axes: Axes, equation: Any) -> Axes:
  """Returns the axes after a `broadcast_in_dim` that adds the axis of layers in front; none for another one."""
  shape, kept = equation.params['shape'], equation.params['broadcast_dimensions']
  is_stack = tuple(kept) == tuple(range(1, len(shape))) and shape[1:] == equation.invars[0].aval.shape
  return Axes(None) if axes.names is None or not is_stack else dataclasses.replace(axes, names=(LAYERS, *axes.names))


def _batched(args: tuple[Any], dims: tuple[int], *, names: Names, matrix: Matrix | None) -> tuple[Array, int]:
  """Labels a parameter below `vmap`, which adds the axis of layers at position `dims[0]`."""
  position = dims[0]
  return _LABEL.bind(args[0], names=(*names[:position], LAYERS, *names[position:]), matrix=matrix), position


_LABEL = jax.extend.core.Primitive('logical_axes')
_LABEL.def_impl(lambda value, **_: value)
_LABEL.def_abstract_eval(lambda value, **_: value)
mlir.register_lowering(_LABEL, lambda ctx, value, **_: [value])
batching.primitive_batchers[_LABEL] = _batched
