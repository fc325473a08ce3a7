"""Logical axes of parameters: a name for each dimension, stated where a parameter is created, and read from a trace.

A network calls `labelled(value, ('embed', 'mlp'))` for each new parameter. The call adds an operation to the trace that
returns its operand, and that the compiled program does not contain. So parameters stay plain arrays, also below `vmap`
and in nested modules. `trace(init, …)` then returns the shapes of all parameters and the `Axes` of each parameter.
`parallel/sharding.py` maps the logical axes to axes of the mesh.
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
"""A name for each dimension of a parameter, or None for a dimension that is never split.

The name `path:i` stands for the name of dimension i of the parameter at this path; `resolved` replaces it.
"""
LAYERS = 'layers'
"""The axis that `vmap` adds in front, along which the parameters of all blocks are stacked."""


@dataclasses.dataclass(frozen=True)
class Axes:
  """The logical axes of one parameter, as a leaf of a tree. `names` is None if the parameter was not labelled."""
  names: Names | None


def labelled(value: Array, names: Names) -> Array:
  """Returns the parameter `value` unchanged, and records the names of its dimensions in the trace.

  Raises:
    UserError: the number of names is not the number of dimensions.
  """
  if len(names) != value.ndim:
    raise UserError(f'logical axes: expected {value.ndim} for a parameter of shape {value.shape}, got {names}. State '
                     'one name or None for each dimension.')
  return _LABEL.bind(value, names=tuple(names))


def of_dimensions(path: str, dimensions: Iterable[int]) -> Names:
  """Returns names of the form `path:i` for these dimensions of the parameter at `path`."""
  return tuple(f'{path}:{i}' for i in dimensions)


def trace(function: Callable[..., Any], *args: Any) -> tuple[PyTree, PyTree]:
  """Returns the shapes and axes of the parameters that a function creates. A later `jax.jit` reuses the trace.

  Returns:
    The shapes and dtypes of the function's result, and a tree of the same structure with the `Axes` of each leaf.
  """
  traced = jax.jit(function).trace(*args)
  jaxpr = traced.jaxpr.jaxpr
  equations = _equation_by_variable(jaxpr)
  axes = [Axes(_find_names(jaxpr, variable, equations)) for variable in jaxpr.outvars]
  return traced.out_info, jax.tree.unflatten(jax.tree.structure(traced.out_info), axes)


def resolved(labels: PyTree) -> dict[str, Axes]:
  """Returns the axes by path name, with each name of the form `path:i` replaced by the name of that dimension.

  Raises:
    UserError: `path:i` names a parameter or a dimension that does not exist.
  """
  axes_by_path: dict[str, Axes] = trees.flatten(labels)

  def resolve(name: str | None, path: str) -> str | None:
    source, _, dimension = (name or '').partition(':')
    if not dimension:
      return name
    names = axes_by_path[source].names if source in axes_by_path else None
    if names is None or int(dimension) >= len(names):
      raise UserError(f'{path}: expected the axis of a parameter, got {name!r}, which does not exist. '
                      'Use the name of an axis in vit_jax/core/axes.py, or None.')
    return names[int(dimension)]

  return {path: axes if axes.names is None else Axes(tuple(resolve(name, path) for name in axes.names))
          for path, axes in axes_by_path.items()}


def _find_names(jaxpr: Any, variable: Any, equations: Mapping[Any, Any]) -> Names | None:
  """Returns the names that `labelled` gave a variable of a jaxpr; None if the variable was not labelled.

  The function follows the variable back through `equations`, which are `_equation_by_variable(jaxpr)`.
  """
  equation = None if isinstance(variable, jax.extend.core.Literal) else equations.get(variable)
  if equation is None:
    return None
  if equation.primitive is _LABEL:
    return equation.params['names']
  if equation.primitive.name == 'broadcast_in_dim':  # `vmap` stacks a value that is equal for all layers
    return _stacked(_find_names(jaxpr, equation.invars[0], equations), equation)
  if equation.primitive.name == 'transpose':  # `vmap` moves the axis of a stack to the front
    names = _find_names(jaxpr, equation.invars[0], equations)
    return None if names is None else tuple(names[i] for i in equation.params['permutation'])
  closed = equation.params.get('jaxpr')  # the function of a call, such as a call of `nn.remat`
  inner = getattr(closed, 'jaxpr', closed)
  if inner is None or len(inner.outvars) != len(equation.outvars):
    return None
  output = inner.outvars[equation.outvars.index(variable)]
  if output in inner.invars:  # the call returns its argument
    return _find_names(jaxpr, equation.invars[inner.invars.index(output)], equations)
  return _find_names(inner, output, _equation_by_variable(inner))


def _equation_by_variable(jaxpr: Any) -> dict[Any, Any]:
  """Returns the equation that computes each variable of a jaxpr."""
  return {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}


def _stacked(names: Names | None, equation: Any) -> Names | None:
  """Returns the names after a `broadcast_in_dim` that adds the axis of layers in front; None after any other."""
  shape = equation.params['shape']
  positions = tuple(equation.params['broadcast_dimensions'])  # of the operand's dimensions in the result
  is_stack = positions == tuple(range(1, len(shape))) and shape[1:] == equation.invars[0].aval.shape
  return (LAYERS, *names) if is_stack and names is not None else None


def _batched(args: tuple[Any], dims: tuple[int], *, names: Names) -> tuple[Array, int]:
  """Labels a parameter below `vmap`, which adds the axis of layers at position `dims[0]`."""
  position = dims[0]
  return _LABEL.bind(args[0], names=(*names[:position], LAYERS, *names[position:])), position


_LABEL = jax.extend.core.Primitive('logical_axes')
_LABEL.def_impl(lambda value, *, names: value)
_LABEL.def_abstract_eval(lambda value, *, names: value)
mlir.register_lowering(_LABEL, lambda ctx, value, *, names: [value])
batching.primitive_batchers[_LABEL] = _batched
