"""FLOPs and kept bytes of any JAX function, computed from its jaxpr (traced program), without compiling or allocating.

`vit-jax plan` and the reports of networks call `flops` for a forward pass or a step, `kept_bytes` for a loss.
"""
from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from vit_jax.core.types import PyTree

_CHECKPOINT_PRIMITIVES = ('checkpoint', 'remat', 'remat2')  # names of the primitive of `jax.checkpoint`


def flops(function: Callable[..., Any], *args: PyTree) -> dict[str, int]:
  """Returns the FLOPs of one call by scope, two per multiply-add; `args` may be shapes (`jax.ShapeDtypeStruct`).

  Matrix products and convolutions count, elementwise work does not, as in the papers. Products with the padding of a
  convolution count, products with the zeros inside a dilated input do not. The body of a scan counts in each iteration.
  Branches must have equal FLOPs or none: a part that is computed only from some step on counts as always computed.
  The scope of an operation is the path of modules and `jax.named_scope` names around it, such as `blocks/attn/query`.

  Raises:
    ValueError: the program has a loop or a branch whose FLOPs the shapes do not determine, or a custom kernel.
  """
  flops_by_scope: collections.Counter[str] = collections.Counter()
  _add_flops(jax.make_jaxpr(function)(*args).jaxpr, 1, '', flops_by_scope)
  return {scope: round(count) for scope, count in flops_by_scope.items()}


def _add_flops(jaxpr: Any, num_runs: int, outer: str, flops_by_scope: collections.Counter[str]) -> None:
  """Adds the FLOPs of a jaxpr that runs `num_runs` times in the scope `outer` to `flops_by_scope`."""
  for eqn in jaxpr.eqns:
    scope = f'{outer}/{eqn.source_info.name_stack}'
    params = eqn.params
    match eqn.primitive.name:
      case 'dot_general':
        contracted = params['dimension_numbers'][0][0]
        depth = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
        flops_by_scope[_readable(scope)] += num_runs * 2 * depth * eqn.outvars[0].aval.size
      case 'conv_general_dilated':
        kernel = eqn.invars[1].aval
        num_output_channels = kernel.shape[params['dimension_numbers'].rhs_spec[0]]
        multiply_adds = kernel.size // num_output_channels * eqn.outvars[0].aval.size
        flops_by_scope[_readable(scope)] += num_runs * 2 * multiply_adds // math.prod(params['lhs_dilation'])
      case 'scan':
        _add_flops(params['jaxpr'].jaxpr, num_runs * params['length'], scope, flops_by_scope)
      case 'cond':
        branches = [collections.Counter[str]() for _ in params['branches']]
        for branch, branch_flops in zip(params['branches'], branches, strict=True):
          _add_flops(branch.jaxpr, num_runs, scope, branch_flops)
        costly = [branch_flops for branch_flops in branches if branch_flops] or branches
        if any(branch_flops != costly[0] for branch_flops in costly):
          raise ValueError(f'{scope}: expected branches with equal FLOPs or none, got {branches}.')
        flops_by_scope.update(costly[0])
      case 'while':  # the number of iterations is not known
        loop_flops = collections.Counter[str]()
        _add_flops(params['cond_jaxpr'].jaxpr, 1, scope, loop_flops)
        _add_flops(params['body_jaxpr'].jaxpr, 1, scope, loop_flops)
        if loop_flops:
          raise ValueError(f'{scope}: expected a loop without FLOPs, got {loop_flops} in each iteration.')
      case 'pallas_call':
        raise ValueError(f'{scope}: expected operations of XLA, got a custom kernel.')
      case _:
        for inner in _called_jaxprs(eqn):
          _add_flops(inner, num_runs, scope, flops_by_scope)


def _called_jaxprs(eqn: Any) -> Iterator[Any]:
  """Yields the jaxprs that an operation calls."""
  for value in eqn.params.values():
    for item in value if isinstance(value, tuple | list) else (value,):
      if isinstance(item, core.ClosedJaxpr | core.Jaxpr):
        yield item.jaxpr if isinstance(item, core.ClosedJaxpr) else item


def _readable(scope: str) -> str:
  """Returns a scope without the names of classes and methods, and without einsum expressions."""
  return '/'.join(name for name in scope.split('/') if re.fullmatch('[a-z][a-z0-9_]*', name))


def kept_bytes(loss: Callable[..., Any], *args: PyTree) -> int:
  """Returns the bytes that are in memory when the backward pass of `loss` by its first argument begins.

  These bytes are the residuals of `jax.vjp`, without the arguments of `loss`. A part in `jax.checkpoint` is computed
  again in the backward pass: the residuals of the largest such part are added. XLA's temporary memory is larger by its
  work space, and smaller where arrays share memory.
  """
  parts = {_signature(eqn): eqn for eqn in _checkpointed(jax.make_jaxpr(loss)(*args).jaxpr)}
  return _residual_bytes(loss, *args) + max([0, *map(_recomputed_bytes, parts.values())])


def _residual_bytes(function: Callable[..., Any], first: PyTree, *rest: PyTree) -> int:
  """Returns the bytes that `jax.vjp` of a function by its first argument keeps, without the function's arguments."""
  def differentiated(first: PyTree, *rest: PyTree) -> Any:
    return jax.vjp(lambda first: function(first, *rest), first)[1]

  jaxpr = jax.make_jaxpr(differentiated)(first, *rest).jaxpr
  kept = {var: var.aval for var in jaxpr.outvars if not isinstance(var, core.Literal)}
  return sum(aval.size * aval.dtype.itemsize for var, aval in kept.items() if var not in jaxpr.invars)


def _checkpointed(jaxpr: Any) -> Iterator[Any]:
  """Yields the operations of `jax.checkpoint` in a jaxpr and in the jaxprs that it calls, but none inside another."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name in _CHECKPOINT_PRIMITIVES:
      yield eqn
    else:
      for inner in _called_jaxprs(eqn):
        yield from _checkpointed(inner)


def _signature(eqn: Any) -> str:
  """Returns a text that is the same for all equal blocks of a network, whose residuals are computed only once."""
  return f'{len(eqn.params["jaxpr"].eqns)} {[str(var.aval) for var in eqn.invars]}'


def _recomputed_bytes(eqn: Any) -> int:
  """Returns the residual bytes of a `jax.checkpoint` that are not saved by its policy, and so are computed again."""
  function = core.jaxpr_as_fun(core.ClosedJaxpr(eqn.params['jaxpr'], ()))
  checkpointed = jax.checkpoint(function, policy=eqn.params['policy'])
  return max(0, _residual_bytes_of_call(function, eqn) - _residual_bytes_of_call(checkpointed, eqn))


def _residual_bytes_of_call(function: Callable[..., Any], eqn: Any) -> int:
  """Returns the residual bytes of a call with the inputs of an operation, of which only floats have gradients."""
  shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
  positions = [i for i, shape in enumerate(shapes) if jnp.issubdtype(shape.dtype, jnp.floating)]

  def of_floats(floats: list[Any], inputs: list[Any]) -> Any:
    float_by_position = dict(zip(positions, floats, strict=True))
    return function(*(float_by_position.get(i, value) for i, value in enumerate(inputs)))

  return _residual_bytes(of_floats, [shapes[i] for i in positions], shapes)
