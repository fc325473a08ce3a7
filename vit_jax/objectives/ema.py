"""A moving average of the parameters beside any objective, as one more view."""
from __future__ import annotations

import jax

from vit_jax.core.api import Objective, View
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Outputs, Params, PyTree

AVERAGE, INNER = 'ema', 'inner'


class Averaged:
  """The `student` of an objective with averaged parameters."""

  def __init__(self, student: View):
    self._student = student

  def select(self, params: Params, extra: Extra) -> PyTree:
    del params
    return self._student.select(extra[AVERAGE], extra.get(INNER, {}))

  def predict(self, selected: PyTree, image: Array) -> Outputs:
    return self._student.predict(selected, image)


class _Unwrapped:
  """A view of the inner objective, which knows nothing of the average."""

  def __init__(self, view: View):
    self._view = view

  def select(self, params: Params, extra: Extra) -> PyTree:
    return self._view.select(params, extra.get(INNER, {}))

  def predict(self, selected: PyTree, image: Array) -> Outputs:
    return self._view.predict(selected, image)


class Ema:
  """Objective: another one, with `average <- decay * average + (1 - decay) * params` after each update.

  Early on the decay is `min(decay, (1 + step) / (10 + step))`, so that the random start is soon forgotten
  (the rule of TensorFlow's ExponentialMovingAverage).
  """

  def __init__(self, inner: Objective, decay: float):
    self._inner, self._decay = inner, decay

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    params, extra = self._inner.init(key, batch)
    return params, {AVERAGE: jax.tree.map(lambda x: x + 0., params), **({INNER: extra} if extra else {})}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    return self._inner.loss(params, extra.get(INNER, {}), batch, key, step)

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    inner = self._inner.after_update(params, extra.get(INNER, {}), stats, step)
    step = step.astype('float32')
    decay = jax.numpy.minimum(self._decay, (1. + step) / (10. + step))
    average = jax.tree.map(lambda a, p: a + (1. - decay) * (p - a), extra[AVERAGE], params)
    return {AVERAGE: average, **({INNER: inner} if inner else {})}

  def views(self) -> dict[str, View]:
    inner = self._inner.views()
    return {**{name: _Unwrapped(view) for name, view in inner.items()}, 'ema': Averaged(inner['student'])}
