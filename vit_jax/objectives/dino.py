"""DINO: self-distillation without labels (Caron et al. 2021, arXiv 2104.14294), optionally with DINOv2's centering.

The student sees two global and several local crops of an image, the teacher only the global ones. The student learns
to predict from each crop the output of the teacher for another one. The teacher is an EMA of the student.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.config.schema import Centering
from vit_jax.core.contracts import Backbone
from vit_jax.core.numerics import counted, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Mean, Params, PyTree, Schedule
from vit_jax.models import initialization
from vit_jax.models.heads import Projector
from vit_jax.objectives import spec
from vit_jax.objectives.networks import TEACHER, WithTeacher, copied, encode_views, init_backbone, moving_average
from vit_jax.optim import schedules

CENTER = 'center'
"""Key of `extra` for the center of the teacher's outputs, `[1, K]`."""
SINKHORN_ROUNDS = 3  # DINOv2
INFORMATION = 'information'
"""Name of the metric that falls to 0 when the teacher collapses."""


class Rates(NamedTuple):
  """The settings that change over the run, as functions of the step."""
  teacher_temperature: Schedule
  momentum: Schedule


class Dino(WithTeacher):
  """Objective: `L = mean over teacher crops t and other crops s of -sum_k P_t(k) log P_s(k)` (eqs. 1 to 3).

    P_s = softmax(g_s / T_s)        P_t = softmax((g_t - c) / T_t)
    after the update, with m of the step:    teacher <- m teacher + (1 - m) student    (section 3.1)
    c <- m_c c + (1 - m_c) mean of g_t over the whole batch and both crops             (eq. 4)

  With Sinkhorn centering P_t is `sinkhorn(g_t / T_t)` instead, over the whole batch, and c stays 0.

  Metrics beside the loss, in nats: `teacher_entropy`, `student_entropy` (of the large crops), `kl` of the two (loss
  minus teacher's entropy), `information` (`H(mean of P_t) - mean of H(P_t)`: 0 when all outputs of the teacher are the
  same, whether uniform or peaked), `below_uniform` (`ln K - loss`: 0 for uniform outputs). Also `center_norm`, and
  `used_prototypes`: the share of prototypes that are the most likely one of a teacher's output, of as many as the batch
  can have.

  extra: `teacher/{backbone, projector}`, `center [1, K]`.
  """

  def __init__(self, backbone: Backbone, projector: Projector, *, student_temperature: float, rates: Rates,
               centering: Centering, center_momentum: float) -> None:
    self._backbone, self._projector = backbone, projector
    self._momentum, self._teacher_temperature = rates.momentum, rates.teacher_temperature
    self._student_temperature, self._centering = student_temperature, centering
    self._center_momentum = center_momentum

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys, image = split_key(key, 'backbone', 'projector'), batch['views_global'][:, 0]
    backbone, _, features = init_backbone(self._backbone, keys['backbone'], image)
    params = {'backbone': backbone, 'projector': self._projector.init(keys['projector'], features.pooled.shape[-1])}
    return params, {TEACHER: copied(params), CENTER: jnp.zeros((1, self._projector.prototypes))}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    batch, keys = counted(batch), split_key(key, 'global', 'local')
    views, mask_B = batch['views_global'], batch.get('mask')
    student_BVK = self._outputs(params, views, train=True, key=keys['global'])
    if 'views_local' in batch:
      local_BVK = self._outputs(params, batch['views_local'], train=True, key=keys['local'])
      student_BVK = jnp.concatenate([student_BVK, local_BVK], axis=1)
    teacher_BtK = jax.lax.stop_gradient(self._outputs(extra[TEACHER], views, train=False, key=None))
    targets_BtK = self._targets(teacher_BtK, extra[CENTER], mask_B, step)
    log_p_BVK = jax.nn.log_softmax(student_BVK / self._student_temperature)
    loss_B = cross_entropy(targets_BtK, log_p_BVK)
    weight_B = jnp.ones(views.shape[0]) if mask_B is None else mask_B
    stats = {'sum': jnp.where(weight_B[:, None, None] > 0, teacher_BtK, 0.).sum((0, 1))[None],
             'count': teacher_BtK.shape[1] * weight_B.sum()}
    return LossOut(weighted_mean(loss_B, mask_B), self._health(targets_BtK, log_p_BVK, loss_B, extra, mask_B), stats)

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    momentum, center = self._momentum(step), extra[CENTER]
    if self._centering is Centering.MEAN:
      mean_1K = stats['sum'] / jnp.maximum(stats['count'], 1.)
      center = self._center_momentum * center + (1. - self._center_momentum) * mean_1K
    return {TEACHER: moving_average(extra[TEACHER], params, momentum), CENTER: center}

  def _outputs(self, params: Params, views: Array, *, train: bool, key: Key | None) -> Array:
    """Returns the outputs `[B, V, K]` of `views [B, V, H, W, 3]`. The rows of an image stay on its device."""
    pooled = encode_views(self._backbone, params, views, train=train, key=key).pooled
    return self._projector.apply(params['projector'], pooled).reshape(*views.shape[:2], -1)

  def _targets(self, outputs: Array, center_1K: Array, mask: Array | None, step: Array) -> Array:
    """Returns the targets P_t for outputs g_t of the teacher, `[B, t, K]`.

    `mask [B]` or `[B, t]` is 0 for outputs that do not count, whose targets have no meaning; None = all count.
    """
    temperature = self._teacher_temperature(step)
    if self._centering is not Centering.SINKHORN:
      return jax.nn.softmax((outputs - center_1K[None]) / temperature)
    rows_RK = outputs.reshape(-1, outputs.shape[-1]) / temperature
    if mask is not None:
      mask = mask.reshape(-1) if mask.ndim == 2 else jnp.repeat(mask, outputs.shape[1])
    return sinkhorn(rows_RK, mask, rounds=SINKHORN_ROUNDS).reshape(outputs.shape)

  def _health(self, targets_BtK: Array, log_p_BVK: Array, loss_B: Array, extra: Extra,
              mask_B: Array | None) -> dict[str, Mean]:
    """Returns the metrics of the class docstring, from the targets and from the student's `log P_s`."""
    num_teacher = targets_BtK.shape[1]
    own_BtK = log_p_BVK[:, :num_teacher]
    teacher_B, student_B = entropy(targets_BtK).mean(1), -(jnp.exp(own_BtK) * own_BtK).sum(-1).mean(1)
    weight_B = jnp.ones_like(loss_B) if mask_B is None else mask_B
    mean_K = jnp.where(weight_B[:, None] > 0, targets_BtK.mean(1), 0.).sum(0) / jnp.maximum(weight_B.sum(), 1.)
    each = {'teacher_entropy': teacher_B, 'student_entropy': student_B, 'kl': loss_B - teacher_B,
            INFORMATION: entropy(mean_K) - teacher_B,
            'used_prototypes': jnp.broadcast_to(share_used(targets_BtK, weight_B), loss_B.shape),
            'below_uniform': jnp.log(targets_BtK.shape[-1]) - loss_B,
            'center_norm': jnp.broadcast_to(jnp.linalg.norm(extra[CENTER]), loss_B.shape)}
    return {name: weighted_mean(jax.lax.stop_gradient(values_B), mask_B) for name, values_B in each.items()}


def cross_entropy(targets_BtK: Array, log_p_BVK: Array, *, local_weight: float = 1.) -> Array:
  """Returns `[B]`: the mean of `-sum_k P_t log P_s` over pairs of a teacher crop and a different student crop.

  Pairs with a local crop, one that the teacher does not see, are multiplied by `local_weight`.
  """
  pairs_BtV = -jnp.einsum('btk,bvk->btv', targets_BtK, log_p_BVK, precision=jax.lax.Precision.HIGHEST)
  num_teacher, num_student = pairs_BtV.shape[1:]
  counts_tV = 1. - jnp.eye(num_teacher, num_student)
  weights_tV = counts_tV if local_weight == 1. else counts_tV.at[:, num_teacher:].multiply(local_weight)
  return (pairs_BtV * weights_tV[None]).sum((1, 2)) / counts_tV.sum()


def share_used(targets_BtK: Array, weight_B: Array) -> Array:
  """Returns the share of prototypes that are the largest of a target, of as many as B t targets can have."""
  num_images, num_crops, num = targets_BtK.shape
  counts_R = jnp.repeat((weight_B > 0).astype(jnp.float32), num_crops)
  used_K = jnp.zeros(num).at[targets_BtK.argmax(-1).reshape(-1)].max(counts_R)
  return used_K.sum() / min(num, num_images * num_crops)


def entropy(p: Array) -> Array:
  """Returns `-sum_k p log p` over the last axis, in nats; 0 log 0 is 0."""
  return -(p * jnp.log(jnp.where(p > 0., p, 1.))).sum(-1)


def sinkhorn(logits_RK: Array, mask_R: Array | None = None, *, rounds: int) -> Array:
  """Returns probabilities `[R, K]` close to `exp(logits)` with nearly equal column sums (Sinkhorn-Knopp).

  Each round divides the columns by their sums and then the rows by theirs. The logarithm of all is used, so that no
  temperature overflows. Rows with mask 0 do not contribute to the sums of the columns; if no row contributes, only rows
  are divided.
  """
  out_R1 = jnp.zeros((logits_RK.shape[0], 1)) if mask_R is None else jnp.where(mask_R > 0, 0., -jnp.inf)[:, None]
  log_q_RK = logits_RK
  for _ in range(rounds):
    sums_1K = jax.nn.logsumexp(log_q_RK + out_R1, axis=0, keepdims=True)
    log_q_RK = log_q_RK - (sums_1K if mask_R is None else jnp.where(jnp.isfinite(sums_1K), sums_1K, 0.))
    log_q_RK = log_q_RK - jax.nn.logsumexp(log_q_RK, axis=1, keepdims=True)
  return jnp.exp(log_q_RK)


class Spec(spec.Spec[schema.Dino]):
  """Builds `Dino` from a config."""
  collapse_advice = ('All outputs are the same. Try a lower objective.teacher_temperature, objective.centering=mean, a '
                     'lower optimizer.lr, or objective.momentum closer to 1')

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Dino:
    s = self.settings
    return Dino(backbone, self.projector(s.out_dim, s.bottleneck_dim), rates=self.rates(lengths),
                student_temperature=s.student_temperature, centering=s.centering, center_momentum=s.center_momentum)

  def projector(self, prototypes: int, bottleneck: int) -> Projector:
    """Returns a head with so many outputs and so wide a bottleneck."""
    s, model = self.settings, self.config.model
    return Projector(prototypes, s.hidden_dim, bottleneck, not s.norm_last_layer, jnp.dtype(model.dtype.value),
                     model.kernels, initialization.laws(model).projector)

  def rates(self, lengths: Lengths) -> Rates:
    """Returns the settings that change over the run, as functions of the step."""
    s = self.settings
    return Rates(teacher_temperature=schedules.ramp(s.teacher_temperature, lengths=lengths),
                 momentum=schedules.ramp(s.momentum, lengths=lengths))

  def collapse_metrics(self) -> tuple[str, ...]:
    return (INFORMATION,)
