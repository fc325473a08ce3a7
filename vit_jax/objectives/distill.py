"""Distillation from a trained classifier: DeiT (Touvron et al. 2021, arXiv 2012.12877), and consistent teaching
(Beyer et al. 2022, arXiv 2106.05237).

The teacher sees the prepared images of the student: the same crop, colors and mixing. With `weight` 1 the teacher is
the only source of targets, which is consistent teaching. It needs soft targets and long training.
"""
from __future__ import annotations

from typing import assert_never

import jax
import jax.numpy as jnp

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.config.schema import DistillType, SoftMean
from vit_jax.core.contracts import Backbone, View
from vit_jax.core.numerics import class_targets, counted, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Features, Key, LossOut, Params, PyTree
from vit_jax.models import backbones, heads
from vit_jax.objectives import losses, networks, spec, supervised
from vit_jax.objectives.networks import STATE, Head, NetworkView, OneNetwork, init_backbone, statistics, with_losses
from vit_jax.parallel import sharding

TRAINED = sharding.TRAINED
"""Key of `extra` for the teacher: `backbone`, `head`, `state`. It never changes."""
HEAD_DIST = 'head_dist'
"""Key of the parameters for the head on the distillation token."""


def view(backbone: Backbone, head: Head) -> NetworkView:
  """Returns the view of a classifier that may have a second head, on a distillation token; it predicts their mean."""
  def logits(selected: PyTree, features: Features) -> Array:
    logits_BC = head.apply(selected['head'], features.pooled)
    if features.distilled is None:
      return logits_BC
    return (logits_BC + head.apply(selected[HEAD_DIST], features.distilled)) / 2.

  return NetworkView(backbone, ('head', HEAD_DIST), logits)


class Trained:
  """The teacher of a run: a trained classifier, the normalization that it expects, and that of the student's images."""

  def __init__(self, backbone: Backbone, head: Head, *, normalization: networks.Normalization,
               student: networks.Normalization) -> None:
    self._backbone, self._head, self._view = backbone, head, supervised.view(backbone, head)
    self._normalization, self._student = normalization, student

  def init(self, key: Key, image: Array, num_classes: int) -> PyTree:
    """Returns an untrained network of the same shapes; training starts from a weight file."""
    keys = split_key(key, 'backbone', 'head')
    params, state, features = init_backbone(self._backbone, keys['backbone'], image, adds_losses=True)
    head = self._head.init(keys['head'], features.pooled.shape[1], num_classes)
    return {'backbone': params, 'head': head, **({'state': state} if state else {})}

  def predict(self, teacher: PyTree, image: Array) -> Array:
    """Returns logits `[B, C]` for images that are normalized for the student. No gradient flows through."""
    image = networks.renormalized(image, self._student, self._normalization)
    logits_BC = self._view.predict({'state': {}, **teacher}, image).logits
    assert logits_BC is not None
    return jax.lax.stop_gradient(logits_BC)


class Distill(OneNetwork):
  """Objective, in nats, with w = `weight`, t = `temperature`, z_t the teacher's logits:

    L = (1 - w) H(y, softmax(z)) + w D
    soft: D = t^2 KL(softmax(z_t / t), softmax(z' / t))  (DeiT, eq. 2); with `soft_mean` CODE, D / C for C classes:
          DeiT's program divides by the number of logits (`losses.py`), so its teacher weighs C times less
    hard: D = H(onehot argmax z_t, softmax(z'))          (DeiT, eq. 3)

  z' is `head_dist` on the distillation token if the backbone has one, and then inference takes the mean of z and z';
  else z' is z.
  """

  def __init__(self, backbone: Backbone, head: Head, teacher: Trained, settings: schema.Distill, *,
               num_classes: int) -> None:
    self._backbone, self._head, self._teacher = backbone, head, teacher
    self._settings, self._num_classes = settings, num_classes

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys, image = split_key(key, 'backbone', 'head', 'head_dist', 'teacher'), batch['image']
    params, state, features = init_backbone(self._backbone, keys['backbone'], image, adds_losses=True)
    inputs = {'head': features.pooled}
    if features.distilled is not None:
      inputs[HEAD_DIST] = features.distilled
    teacher = self._teacher.init(keys['teacher'], image, self._num_classes)
    heads = {name: self._head.init(keys[name], x.shape[-1], self._num_classes) for name, x in inputs.items()}
    return {'backbone': params, **heads}, {TRAINED: teacher, **statistics(state)}

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del step
    batch, s = counted(batch), self._settings
    image, mask_B = batch['image'], batch.get('mask')
    features, state = self._backbone.apply(params['backbone'], extra.get(STATE, {}), image, train=True, key=key)
    logits_BC = self._head.apply(params['head'], features.pooled)
    taught_BC = logits_BC
    if features.distilled is not None:
      taught_BC = self._head.apply(params[HEAD_DIST], features.distilled)
    teacher_BC = self._teacher.predict(extra[TRAINED], image)
    targets_BC = class_targets(batch, self._num_classes)
    labels_B = losses.softmax_xent(logits_BC, losses.smooth(targets_BC, s.label_smoothing))
    taught_B = self._taught(taught_BC, teacher_BC)
    agrees_B = (jnp.argmax(taught_BC, -1) == jnp.argmax(teacher_BC, -1)).astype(jnp.float32)
    metrics = {'accuracy': losses.hit(logits_BC, targets_BC), 'teacher_accuracy': losses.hit(teacher_BC, targets_BC),
               'agreement': agrees_B, 'labels_loss': labels_B, 'teacher_loss': taught_B}
    loss = weighted_mean((1. - s.weight) * labels_B + s.weight * taught_B, mask_B)
    means = {name: weighted_mean(values_B, mask_B) for name, values_B in metrics.items()}
    return with_losses(LossOut(loss, means, statistics(state)), features)

  def _taught(self, logits_BC: Array, teacher_BC: Array) -> Array:
    """Returns D of each example, `[B]`."""
    s = self._settings
    match s.distill_type:
      case DistillType.SOFT:
        t = s.temperature
        log_t_BC, log_s_BC = (jax.nn.log_softmax(z.astype(jnp.float32) / t) for z in (teacher_BC, logits_BC))
        divergence_BC = t ** 2 * jnp.exp(log_t_BC) * (log_t_BC - log_s_BC)
        return divergence_BC.mean(-1) if s.soft_mean is SoftMean.CODE else divergence_BC.sum(-1)
      case DistillType.HARD:
        return losses.softmax_xent(logits_BC, jax.nn.one_hot(jnp.argmax(teacher_BC, -1), logits_BC.shape[-1]))
      case _:
        assert_never(s.distill_type)

  def views(self) -> dict[str, View]:
    return {'student': view(self._backbone, self._head)}


class Spec(spec.Spec[schema.Distill]):
  """Builds `Distill` from a config."""

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Distill:
    t, recipe = self.settings.teacher, self.config.data.recipe
    teacher = Trained(backbones.build(t.model, self.config.image_px), heads.build(t.head, t.model),
                      normalization=networks.Normalization(t.mean, t.std),
                      student=networks.Normalization(recipe.mean, recipe.std))
    head = heads.build(self.config.head, self.config.model)
    return Distill(backbone, head, teacher, self.settings, num_classes=num_classes)

  def models(self) -> dict[str, schema.Model]:
    return {**super().models(), 'objective.teacher.model': self.settings.teacher.model}

  def begins_with(self) -> dict[str, spec.Begin]:
    t = self.settings.teacher
    return {'teacher': spec.Begin(weights=t.weights, part=TRAINED, model=t.model, image_px=self.config.image_px,
                                  required='a weight file', normalization=(t.mean, t.std))}
