"""An exponential moving average (EMA) of the parameters of any objective, as one more view.

Differs from the ViT paper and the MAE paper, which do not mention it: unless a recipe states `ema_warmup`, the decay
grows to its value as min(d, (1 + s) / (10 + s)), as TensorFlow's averages do. Of 20,000 steps with 0.9999 the last
2,200 count most, without the growth the last 10,000, and with them 14 % of the weights at initialization.
"""
from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.core import contracts, trees
from vit_jax.core.contracts import Coupling, Objective, View
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Params, PyTree
from vit_jax.objectives.networks import InnerView

AVERAGE, INNER, MEMORY = 'ema', 'inner', 'ema_memory'
"""Keys of `extra` for the average, the extra of the inner objective (if it has any), and the memory of the law."""


class Law(Protocol):
  """The decay of an average at each update. Its memory is a tree of scalars, `{}` for none."""

  def init(self) -> PyTree:
    """Returns the memory before the first update."""
    ...

  def decay(self, memory: PyTree, step: Array) -> tuple[Array, PyTree]:
    """Returns the decay after update number `step`, from 0, scalar f32, and the new memory."""
    ...


class Growing:
  """A decay that is constant, but for its growth at the start."""

  def __init__(self, decay: float, warmup: schema.EmaWarmup = schema.EmaWarmup.RATIO) -> None:
    self._decay, self._warmup = decay, warmup

  def init(self) -> PyTree:
    return {}

  def decay(self, memory: PyTree, step: Array) -> tuple[Array, PyTree]:
    s = step.astype(jnp.float32)
    match self._warmup:
      case schema.EmaWarmup.RATIO:
        return jnp.minimum(self._decay, (1. + s) / (10. + s)), memory  # TensorFlow's ExponentialMovingAverage
      case schema.EmaWarmup.POWER:
        return jnp.minimum(self._decay, 1. - (1. + s) ** (-2 / 3)), memory  # timm's ModelEmaV3: gamma 1, power 2/3
      case schema.EmaWarmup.NONE:
        return jnp.full((), self._decay), memory


class Ema:
  """Objective: another one, with `average <- decay * average + (1 - decay) * params` after each update.

  The law may lower the decay at the start, so that the initialization soon loses its weight.
  """

  def __init__(self, inner: Objective, law: Law) -> None:
    self._inner, self._law = inner, law

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    params, extra = self._inner.init(key, batch)
    return params, _extra(jax.tree.map(lambda x: x + 0., params), extra, self._law.init())

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    return self._inner.loss(params, extra.get(INNER, {}), batch, key, step)

  def coupling(self) -> Coupling | None:
    inner = contracts.coupling(self._inner)
    return inner and inner.inside(lambda params, extra, key: (params, extra.get(INNER, {})))

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    inner = self._inner.after_update(params, extra.get(INNER, {}), stats, step)
    decay, memory = self._law.decay(extra.get(MEMORY, {}), step)
    return _extra(trees.map_once(lambda a, p: a + (1. - decay) * (p - a), extra[AVERAGE], params), inner, memory)

  def views(self) -> dict[str, View]:
    inner = self._inner.views()
    views: dict[str, View] = {name: InnerView(view, lambda params, extra: (params, extra.get(INNER, {})))
                              for name, view in inner.items()}
    views['ema'] = InnerView(inner['student'], lambda params, extra: (extra[AVERAGE], extra.get(INNER, {})))
    return views


def _extra(average: PyTree, inner: Extra, memory: PyTree) -> Extra:
  """Returns the extra of `Ema`, without keys for what is empty."""
  return {AVERAGE: average, **({INNER: inner} if inner else {}), **({MEMORY: memory} if memory else {})}
