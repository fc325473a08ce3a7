"""Sharpness-aware minimization of any objective: the gradient is taken where the loss near the parameters is largest.

SAM: Foret et al. 2021 (arXiv 2010.01412). GSAM: Zhuang et al. 2022 (arXiv 2203.08065). The perturbation is computed
inside `loss`, so the train step does not depend on it. A step costs two forward and backward passes.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

from vit_jax.core.contracts import Objective, View
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Mean, Params, PyTree, Schedule

TINY = 1e-12
"""Added to norms, so that a zero gradient gives no perturbation."""


class Sam:
  """Objective: another one, with the gradient of its largest value within `rho` of the parameters, to first order.

    g = grad L(w),   eps = rho(step) * g / |g|,   h = grad L(w + eps)
    SAM: h           GSAM: h - alpha * (g - (<g, h> / |h|^2) h)

  GSAM descends the surrogate gap L(w + eps) - L(w) too: it *subtracts* the part of g orthogonal to h (eq. 9 and
  Algorithm 1). Both passes use the same random key, so the same dropout. The reported loss is that at w + eps;
  `sharpness` is its difference to L(w). Running statistics and other `stats` are those of the pass at w. Norms are over
  all parameters, in f32. With accumulation each microbatch has its own eps (m-sharpness, Foret et al., section 3.3):
  unlike for other objectives, the result then depends on the number of microbatches, but never on that of devices.
  """

  def __init__(self, inner: Objective, *, rho: Schedule, alpha: float) -> None:
    self._inner, self._rho, self._alpha = inner, rho, alpha

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    return self._inner.init(key, batch)

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    def mean(params: Params) -> tuple[Array, LossOut]:
      out = self._inner.loss(params, extra, batch, key, step)
      return out.loss.value, out

    here = jax.lax.stop_gradient(params)
    (clean, out), g = jax.value_and_grad(mean, has_aux=True)(here)
    out = jax.lax.stop_gradient(out)
    length = self._rho(step) / (_norm(g) + TINY)
    shift = jax.tree.map(lambda x: jax.lax.stop_gradient(length.astype(x.dtype) * x), g)
    if self._alpha:
      worst, h = jax.value_and_grad(lambda p: mean(p)[0])(jax.tree.map(jnp.add, here, shift))
      share = _dot(g, h) / (_dot(h, h) + TINY ** 2)
      descent = jax.tree.map(lambda g, h: h - self._alpha * (g - share.astype(h.dtype) * h), g, h)
      slope = _dot(jax.lax.stop_gradient(descent), params)  # its gradient is `descent`; its value cancels
      worst = jax.lax.stop_gradient(worst) + (slope - jax.lax.stop_gradient(slope))
    else:
      worst = mean(jax.tree.map(jnp.add, params, shift))[0]
    weight = out.loss.weight
    sharpness = Mean(jax.lax.stop_gradient(worst - clean) * weight, weight)
    return LossOut(Mean(worst * weight, weight), {**out.metrics, 'sharpness': sharpness}, out.stats)

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    return self._inner.after_update(params, extra, stats, step)

  def views(self) -> dict[str, View]:
    return self._inner.views()


def follow_rate(schedule: Schedule, *, peak: float, end: float, rho: float, rho_end: float) -> Schedule:
  """Returns the radius: `rho` at the peak of the learning rate, `rho_end` at its end (GSAM, Algorithm 1).

  It is linear in the learning rate in between.
  """
  def value(step: Array | int) -> Array:
    t = jnp.clip((schedule(step) - end) / (peak - end), 0., 1.) if peak > end else jnp.ones(())
    return rho_end + (rho - rho_end) * t

  return value


def _dot(a: PyTree, b: PyTree) -> Array:
  products = jax.tree.map(lambda x, y: (x.astype(jnp.float32) * y.astype(jnp.float32)).sum(), a, b)
  return sum(jax.tree.leaves(products), jnp.zeros(()))


def _norm(tree: PyTree) -> Array:
  return jnp.sqrt(_dot(tree, tree))
