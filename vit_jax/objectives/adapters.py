"""Training of low-rank adapters (LoRA, DoRA) in place of the backbone, with any objective.

The parameters of the run are the adapters and what the objective has beside the backbone (heads, a decoder, a
projector). The backbone is a part of `extra` that never changes: it has no gradient and no optimizer state. All views
are of plain networks with merged adapters, so that evaluations do not depend on how the network was trained.
"""
from __future__ import annotations

import jax

from vit_jax.config import schema
from vit_jax.core import contracts, trees
from vit_jax.core.contracts import Coupling, Objective, View
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Params, PyTree
from vit_jax.models import adapters
from vit_jax.objectives.networks import InnerView
from vit_jax.parallel.sharding import FROZEN

INNER = 'inner'


class Adapters:
  """Objective: another one, of which only the adapters and what is not the backbone are trained.

  extra: `frozen/backbone`, the backbone; `inner`, the extra of the other objective, if it has any. Objectives whose
  teacher is an EMA of the parameters take the merged ones for it.
  """

  def __init__(self, inner: Objective, settings: schema.Lora) -> None:
    self._inner, self._settings = inner, settings

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    params, extra = self._inner.init(key, batch)
    backbone = params['backbone']
    new = adapters.init(jax.random.fold_in(key, self._settings.rank), backbone, self._settings)
    trained = {**{name: part for name, part in params.items() if name != 'backbone'}, **trees.unflatten(new)}
    return trained, {FROZEN: {'backbone': backbone}, **({INNER: extra} if extra else {})}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    return self._inner.loss(*self._select(params, extra, key), batch, key, step)

  def coupling(self) -> Coupling | None:
    inner = contracts.coupling(self._inner)
    return inner and inner.inside(self._select)

  def _select(self, params: Params, extra: Extra, key: Key) -> tuple[Params, Extra]:
    """Returns parameters, with adapters, and `extra` of the other objective."""
    dropout_key = jax.random.fold_in(key, self._settings.rank) if self._settings.dropout else None
    return adapters.network(params, extra[FROZEN], self._settings, key=dropout_key), extra.get(INNER, {})

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    whole = adapters.merge(params, extra[FROZEN], self._settings)
    inner = self._inner.after_update(whole, extra.get(INNER, {}), stats, step)
    return {FROZEN: extra[FROZEN], **({INNER: inner} if inner else {})}

  def views(self) -> dict[str, View]:
    merge = jax.jit(lambda params, frozen: adapters.merge(params, frozen, self._settings))

    def unwrap(params: Params, extra: Extra) -> tuple[Params, Extra]:
      return merge(params, extra[FROZEN]), extra.get(INNER, {})

    return {name: InnerView(view, unwrap) for name, view in self._inner.views().items()}


def around(objective: Objective, settings: schema.Lora) -> Objective:
  """Returns the objective with adapters if they are configured, else unchanged."""
  return Adapters(objective, settings) if settings.rank else objective
