"""Logical axes of parameters, stated where a parameter is created and read from the trace of what creates it.

`labelled(value, ('embed', 'mlp'))` notes the names of a new parameter's dimensions. The note is an operation that
returns its operand: it is part of a trace, so that it survives `vmap`, nested modules and dicts, and it is no part of
the compiled program. Parameters are plain arrays everywhere. `trace` returns the shapes of what a function creates
together with the axes of each of its leaves. `parallel/sharding.py` has the table from logical axes to those of the
mesh.
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
  makers = _makers(jaxpr)
  found = [Axes(_names(jaxpr, variable, makers)) for variable in jaxpr.outvars]
  return shapes, jax.tree.unflatten(jax.tree.structure(shapes), found)


def resolved(labels: PyTree) -> dict[str, Axes]:
  """Returns the axes by path name, with names of the form `path:i` replaced by what they stand for.

  Raises:
    UserError: there is no such parameter, or it has no such dimension.
  """
  found: dict[str, Axes] = trees.flatten(labels)

  def resolve(name: str | None, path: str) -> str | None:
    other, _, dimension = (name or '').partition(':')
    if not dimension:
      return name
    names = found[other].names if other in found else None
    if names is None or int(dimension) >= len(names):
      raise UserError(f'{path}: expected the axis of a parameter, got {name!r}, which does not exist. '
                      'Use the name of an axis in vit_jax/core/axes.py, or None.')
    return names[int(dimension)]

  return {path: axes if axes.names is None else Axes(tuple(resolve(name, path) for name in axes.names))
          for path, axes in found.items()}


def _names(jaxpr: Any, variable: Any, makers: Mapping[Any, Any]) -> Names | None:
  """Returns the names with which a variable of a jaxpr was labelled, or None. `makers` are its equations."""
  equation = None if isinstance(variable, jax.extend.core.Literal) else makers.get(variable)
  if equation is None:
    return None
  if equation.primitive is _LABEL:
    return equation.params['names']
  if equation.primitive.name == 'broadcast_in_dim':  # `vmap` stacks what is equal for all layers
    return _stacked(_names(jaxpr, equation.invars[0], makers), equation)
  if equation.primitive.name == 'transpose':  # `vmap` moves the axis of a stack to the front
    names = _names(jaxpr, equation.invars[0], makers)
    return None if names is None else tuple(names[i] for i in equation.params['permutation'])
  inner = equation.params.get('jaxpr')  # of a call, such as that of `nn.remat`
  inner = getattr(inner, 'jaxpr', inner)
  if inner is None or len(inner.outvars) != len(equation.outvars):
    return None
  output = inner.outvars[next(i for i, out in enumerate(equation.outvars) if out is variable)]
  passed = next((i for i, one in enumerate(inner.invars) if one is output), None)
  return _names(inner, output, _makers(inner)) if passed is None else _names(jaxpr, equation.invars[passed], makers)


def _makers(jaxpr: Any) -> dict[Any, Any]:
  """Returns the equation that makes each variable of a jaxpr."""
  return {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}


def _stacked(names: Names | None, equation: Any) -> Names | None:
  shape, kept = equation.params['shape'], equation.params['broadcast_dimensions']
  is_stack = tuple(kept) == tuple(range(1, len(shape))) and shape[1:] == equation.invars[0].aval.shape
  return None if names is None or not is_stack else (LAYERS, *names)


def _batched(args: tuple[Any], dims: tuple[int], *, names: Names) -> tuple[Array, int]:
  at = dims[0]
  return _LABEL.bind(args[0], names=(*names[:at], LAYERS, *names[at:])), at


_LABEL = jax.extend.core.Primitive('logical_axes')
_LABEL.def_impl(lambda value, *, names: value)
_LABEL.def_abstract_eval(lambda value, *, names: value)
mlir.register_lowering(_LABEL, lambda ctx, value, *, names: [value])
batching.primitive_batchers[_LABEL] = _batched
