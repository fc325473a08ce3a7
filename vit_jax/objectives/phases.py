"""An objective that changes during the run: each step has the loss of one of several, which share their parameters.

They differ in the number of tokens that their networks see, so that each has a program of its own. A step runs one of
them, forward and backward: were the choice made in the forward pass alone, every step would write the intermediates of
all of them.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core import contracts
from vit_jax.core.contracts import Coupling, Objective, View
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Params, PyTree


def models(model: schema.Model) -> tuple[schema.Model, ...]:
  """Returns the network of each of the equally long parts of a run; most networks are one in the whole run."""
  if not isinstance(model, schema.ViT) or not model.patch_dropout_parts:
    return (model,)
  return tuple(dataclasses.replace(model, patch_dropout=share, patch_dropout_parts=())
               for share in model.patch_dropout_parts)


def starts(total_steps: int, num_parts: int) -> list[int]:
  """Returns the steps that are done when each of the equally long parts of a run begins."""
  return [-(-total_steps * part // num_parts) for part in range(num_parts)]


def build(model: schema.Model, make: Callable[[schema.Model], Objective], *, total_steps: int) -> Objective:
  """Returns the objective of a run, from a function that makes it with the network of a part of the run."""
  parts = models(model)
  different = {repr(one): one for one in parts}
  made = [make(one) for one in different.values()]
  return Phases(made, [[*different].index(repr(one)) for one in parts], total_steps) if made[1:] else made[0]


class Phases:
  """Objective: in each of the equally long parts of a run another one of several with the same parameters.

  The gradient is that of the sum of the loss (`LossOut.loss.sum`) by the parameters; nothing else of it is
  differentiated.
  """

  def __init__(self, objectives: Sequence[Objective], order: Sequence[int], total_steps: int) -> None:
    self._objectives, self._order = objectives, order
    self._starts = starts(total_steps, len(order))[1:]

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    return self._objectives[0].init(key, batch)

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    def of(objective: Objective, params: Params) -> LossOut:
      return objective.loss(params, extra, batch, key, step)

    def with_gradient(objective: Objective, params: Params) -> tuple[PyTree, LossOut]:
      def total(params: Params) -> tuple[Array, LossOut]:
        out = of(objective, params)
        return out.loss.sum, out
      return jax.grad(total, has_aux=True)(params)

    @jax.custom_vjp
    def run(params: Params) -> LossOut:
      return self._switch(step, [functools.partial(of, one) for one in self._objectives], params)

    def forward(params: Params) -> tuple[LossOut, PyTree]:
      grads, out = self._switch(step, [functools.partial(with_gradient, one) for one in self._objectives], params)
      return out, grads

    def backward(grads: PyTree, cotangent: LossOut) -> tuple[PyTree]:
      return (jax.tree.map(lambda x: x * cotangent.loss.sum.astype(x.dtype), grads),)

    run.defvjp(forward, backward)
    return run(params)

  def coupling(self) -> Coupling | None:
    found = [contracts.coupling(one) for one in self._objectives]
    if not all(found):
      return None
    couplings = [one for one in found if one]

    def embed(params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> tuple[PyTree, PyTree]:
      return self._switch(step, [one.embed for one in couplings], params, extra, batch, key, step)

    return couplings[0]._replace(embed=embed)

  def _switch(self, step: Array, branches: Sequence[Callable[..., Any]], *arguments: Any) -> Any:
    """Returns the result of the function of the part of the run in which a step lies."""
    part = jnp.sum(step >= jnp.array(self._starts))
    return jax.lax.switch(jnp.array(self._order)[part], branches, *arguments)

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    return self._objectives[0].after_update(params, extra, stats, step)

  def views(self) -> dict[str, View]:
    return self._objectives[0].views()
