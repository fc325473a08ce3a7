"""FLOPs and kept bytes of any JAX function, read from its traced program (jaxpr). Nothing is compiled or allocated.

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

_REMAT = ('checkpoint', 'remat', 'remat2')  # names of the primitive of `jax.checkpoint`


def flops(function: Callable[..., Any], *args: PyTree) -> dict[str, int]:
  """Returns the FLOPs of one call by scope, two per multiply-add; `args` may be shapes (`jax.ShapeDtypeStruct`).

  Matrix products and convolutions count, elementwise work does not, as in the papers. A convolution counts the products
  with its padding, and of a dilated input those with its elements alone. A scan counts its body once per iteration. Of
  two branches, one of which has no FLOPs, the other counts: a part that is computed only from some step on.
  The scope of an operation is the path of modules and `jax.named_scope` names around it, such as `blocks/attn/query`.

  Raises:
    ValueError: the program has a loop or a branch whose FLOPs are not determined by its shapes, or a custom kernel.
  """
  flops_by_scope: collections.Counter[str] = collections.Counter()
  _count(jax.make_jaxpr(function)(*args).jaxpr, 1, '', flops_by_scope)
  return {scope: round(count) for scope, count in flops_by_scope.items()}


def _count(jaxpr: Any, times: int, outer: str, flops_by_scope: collections.Counter[str]) -> None:
  """Adds the FLOPs of a program that runs `times` times inside of the scope `outer`."""
  for eqn in jaxpr.eqns:
    scope, params = f'{outer}/{eqn.source_info.name_stack}', eqn.params
    match eqn.primitive.name:
      case 'dot_general':
        contracted = params['dimension_numbers'][0][0]
        depth = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
        flops_by_scope[_readable(scope)] += times * 2 * depth * eqn.outvars[0].aval.size
      case 'conv_general_dilated':
        kernel, outputs = eqn.invars[1].aval, params['dimension_numbers'].rhs_spec[0]
        macs = kernel.size // kernel.shape[outputs] * eqn.outvars[0].aval.size  # multiply-adds
        flops_by_scope[_readable(scope)] += times * 2 * macs // math.prod(params['lhs_dilation'])
      case 'scan':
        _count(params['jaxpr'].jaxpr, times * params['length'], scope, flops_by_scope)
      case 'cond':
        branches = [collections.Counter[str]() for _ in params['branches']]
        for branch, of_branch in zip(params['branches'], branches, strict=True):
          _count(branch.jaxpr, times, scope, of_branch)
        costly = [of_branch for of_branch in branches if of_branch] or branches
        if any(of_branch != costly[0] for of_branch in costly):
          raise ValueError(f'{scope}: expected branches with equal FLOPs or none, got {branches}.')
        flops_by_scope.update(costly[0])
      case 'while':  # the number of its iterations is not known
        of_loop = collections.Counter[str]()
        _count(params['cond_jaxpr'].jaxpr, 1, scope, of_loop)
        _count(params['body_jaxpr'].jaxpr, 1, scope, of_loop)
        if of_loop:
          raise ValueError(f'{scope}: expected a loop without FLOPs, got {of_loop} in each iteration.')
      case 'pallas_call':
        raise ValueError(f'{scope}: expected operations of XLA, got a custom kernel.')
      case _:
        for inner in _inner(eqn):
          _count(inner, times, scope, flops_by_scope)


def _inner(eqn: Any) -> Iterator[Any]:
  """Yields the programs that an operation calls."""
  for value in eqn.params.values():
    for one in value if isinstance(value, tuple | list) else (value,):
      if isinstance(one, core.ClosedJaxpr | core.Jaxpr):
        yield one.jaxpr if isinstance(one, core.ClosedJaxpr) else one


def _readable(scope: str) -> str:
  """Returns the names of a scope without those of classes, methods and einsum expressions."""
  return '/'.join(part for part in scope.split('/') if re.fullmatch('[a-z][a-z0-9_]*', part))


def kept_bytes(loss: Callable[..., Any], *args: PyTree) -> int:
  """Returns the bytes that are in memory when the backward pass of `loss` by its first argument begins.

  They are the residuals of `jax.vjp`, without the arguments themselves. `jax.checkpoint` computes some parts again: the
  largest residuals of such a part are added. XLA's temporary memory is larger by its work space, and smaller where
  arrays share memory.
  """
  parts = {_signature(eqn): eqn for eqn in _rematerialized(jax.make_jaxpr(loss)(*args).jaxpr)}
  return _residual_bytes(loss, *args) + max([0, *map(_recomputed_bytes, parts.values())])


def _residual_bytes(function: Callable[..., Any], first: PyTree, *rest: PyTree) -> int:
  """Returns the bytes that `jax.vjp` of a function by its first argument keeps, without the arguments."""
  def differentiated(first: PyTree, *rest: PyTree) -> Any:
    return jax.vjp(lambda first: function(first, *rest), first)[1]

  jaxpr = jax.make_jaxpr(differentiated)(first, *rest).jaxpr
  kept = {var: var.aval for var in jaxpr.outvars if not isinstance(var, core.Literal)}
  return sum(aval.size * aval.dtype.itemsize for var, aval in kept.items() if var not in jaxpr.invars)


def _rematerialized(jaxpr: Any) -> Iterator[Any]:
  """Yields the operations of `jax.checkpoint`, at any depth but not inside of one another."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name in _REMAT:
      yield eqn
    else:
      for inner in _inner(eqn):
        yield from _rematerialized(inner)


def _signature(eqn: Any) -> str:
  """Returns a text that is equal for the equal blocks of a network, whose residuals are computed once."""
  return f'{len(eqn.params["jaxpr"].eqns)} {[str(var.aval) for var in eqn.invars]}'


def _recomputed_bytes(eqn: Any) -> int:
  """Returns the bytes of a part's residuals that its policy does not save, and that are therefore computed again."""
  part = core.jaxpr_as_fun(core.ClosedJaxpr(eqn.params['jaxpr'], ()))
  saved = jax.checkpoint(part, policy=eqn.params['policy'])
  return max(0, _residuals_of(part, eqn) - _residuals_of(saved, eqn))


def _residuals_of(part: Callable[..., Any], eqn: Any) -> int:
  """Returns the residuals of a part, in bytes, for the inputs of an operation, of which only floats have gradients."""
  shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]
  floats = [i for i, shape in enumerate(shapes) if jnp.issubdtype(shape.dtype, jnp.floating)]

  def of_floats(values: list[Any], shapes: list[Any]) -> Any:
    both = dict(zip(floats, values, strict=True))
    return part(*(both.get(i, shape) for i, shape in enumerate(shapes)))

  return _residual_bytes(of_floats, [shapes[i] for i in floats], shapes)
