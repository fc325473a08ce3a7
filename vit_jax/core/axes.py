"""Logical axes of parameters: they are stated where a parameter is created, and read from a trace of that function.

A network calls `labelled(value, ('embed', 'mlp'))` for each new parameter, which names its dimensions. This adds an
operation to the trace that returns its operand, so that parameters stay plain arrays, also below `vmap` and nested
modules; the compiled program does not contain it. `trace(init, …)` then returns the shapes of all parameters and the
`Axes` of each. `parallel/sharding.py` maps these logical axes to axes of the mesh.
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
LAYERS = 'layers'
"""The axis that `vmap` adds in front, over which the parameters of blocks are stacked."""


@dataclasses.dataclass(frozen=True)
class Axes:
  """The logical axes of one parameter, a leaf of a tree; None = nothing states them."""
  names: Names | None


def labelled(value: Array, names: Names) -> Array:
  """Returns a new parameter unchanged, after its dimensions were given names.

  Raises:
    UserError: there is not one name for each dimension.
  """
  if len(names) != value.ndim:
    raise UserError(f'logical axes: expected {value.ndim} for a parameter of shape {value.shape}, got {names}. State '
                     'one name or None for each dimension.')
  return _LABEL.bind(value, names=tuple(names))


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
  axes = [Axes(_names(jaxpr, variable, equations)) for variable in jaxpr.outvars]
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

  return {path: axes if axes.names is None else Axes(tuple(resolve(name, path) for name in axes.names))
          for path, axes in axes_of.items()}


def _names(jaxpr: Any, variable: Any, equations: Mapping[Any, Any]) -> Names | None:
  """Returns the names with which a variable of a jaxpr was labelled, or None; follows it back through its equations.

  `equations` is `_equation_of(jaxpr)`.
  """
  equation = None if isinstance(variable, jax.extend.core.Literal) else equations.get(variable)
  if equation is None:
    return None
  if equation.primitive is _LABEL:
    return equation.params['names']
  if equation.primitive.name == 'broadcast_in_dim':  # `vmap` stacks what is equal for all layers
    return _stacked(_names(jaxpr, equation.invars[0], equations), equation)
  if equation.primitive.name == 'transpose':  # `vmap` moves the axis of a stack to the front
    names = _names(jaxpr, equation.invars[0], equations)
    return None if names is None else tuple(names[i] for i in equation.params['permutation'])
  inner = equation.params.get('jaxpr')  # of a call, such as that of `nn.remat`
  inner = getattr(inner, 'jaxpr', inner)
  if inner is None or len(inner.outvars) != len(equation.outvars):
    return None
  output = inner.outvars[equation.outvars.index(variable)]
  if output in inner.invars:  # the call returns its argument
    return _names(jaxpr, equation.invars[inner.invars.index(output)], equations)
  return _names(inner, output, _equation_of(inner))


def _equation_of(jaxpr: Any) -> dict[Any, Any]:
  """Returns the equation that computes each variable of a jaxpr."""
  return {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}


def _stacked(names: Names | None, equation: Any) -> Names | None:
  """Returns the names after a `broadcast_in_dim` that adds the axis of layers in front; None for another one."""
  shape, kept = equation.params['shape'], equation.params['broadcast_dimensions']
  is_stack = tuple(kept) == tuple(range(1, len(shape))) and shape[1:] == equation.invars[0].aval.shape
  return None if names is None or not is_stack else (LAYERS, *names)


def _batched(args: tuple[Any], dims: tuple[int], *, names: Names) -> tuple[Array, int]:
  """Labels a parameter below `vmap`, which adds the axis of layers at position `dims[0]`."""
  position = dims[0]
  return _LABEL.bind(args[0], names=(*names[:position], LAYERS, *names[position:])), position


_LABEL = jax.extend.core.Primitive('logical_axes')
_LABEL.def_impl(lambda value, *, names: value)
_LABEL.def_abstract_eval(lambda value, *, names: value)
mlir.register_lowering(_LABEL, lambda ctx, value, *, names: [value])
batching.primitive_batchers[_LABEL] = _batched
