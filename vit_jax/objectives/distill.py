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
from vit_jax.objectives import losses, spec, supervised
from vit_jax.objectives.networks import STATE, Head, NetworkView, init_backbone, statistics, with_losses
from vit_jax.parallel import sharding

TRAINED = sharding.TRAINED
"""Key of `extra` for the teacher: `backbone`, `head`, `state`. It never changes."""
HEAD_DIST = 'head_dist'


Pixels = tuple[float, ...]


def view(backbone: Backbone, head: Head) -> NetworkView:
  """Returns the view of a classifier that may have a second head, on a distillation token.

  It predicts the mean of both heads.
  """
  def logits(selected: PyTree, features: Features) -> Array:
    logits_BC = head.apply(selected['head'], features.pooled)
    if features.distilled is None:
      return logits_BC
    return (logits_BC + head.apply(selected[HEAD_DIST], features.distilled)) / 2.

  return NetworkView(backbone, ('head', HEAD_DIST), logits)


class Trained:
  """The teacher of a run: a trained classifier, and the normalization of images that it expects."""

  def __init__(self, backbone: Backbone, head: Head, *, mean: Pixels, std: Pixels, seen_mean: Pixels,
               seen_std: Pixels) -> None:
    """`seen_mean` and `seen_std` are what the student's images are normalized with."""
    self._backbone, self._head, self._view = backbone, head, supervised.view(backbone, head)
    self._mean, self._std, self._seen_mean, self._seen_std = (
        jnp.array(x, jnp.float32).reshape(1, 1, 1, 3) for x in (mean, std, seen_mean, seen_std))

  def init(self, key: Key, image: Array, num_classes: int) -> PyTree:
    """Returns an untrained network of the same shapes; training starts from a weight file."""
    keys = split_key(key, 'backbone', 'head')
    params, state, features = init_backbone(self._backbone, keys['backbone'], image, adds_losses=True)
    head = self._head.init(keys['head'], features.pooled.shape[1], num_classes)
    return {'backbone': params, 'head': head, **({'state': state} if state else {})}

  def predict(self, teacher: PyTree, image: Array) -> Array:
    """Returns logits `[B, C]` for images that are normalized for the student. No gradient flows through."""
    own = (image * self._seen_std + self._seen_mean - self._mean) / self._std
    logits_BC = self._view.predict({'state': {}, **teacher}, own).logits
    assert logits_BC is not None
    return jax.lax.stop_gradient(logits_BC)


class Distill:
  """Objective, in nats, with w = `weight`, t = `temperature`, z_t the teacher's logits:

    L = (1 - w) H(y, softmax(z)) + w D
    soft: D = t^2 KL(softmax(z_t / t), softmax(z' / t))  (DeiT, eq. 2); with `soft_mean` CODE, D / C for C classes:
          DeiT's program divides by the number of logits (`losses.py`), so its teacher weighs C times less
    hard: D = H(onehot argmax z_t, softmax(z'))          (DeiT, eq. 3)

  z' is `head_dist` on the distillation token if the backbone has one, and then inference takes the mean of z and z';
  else z' is z.
  """

  def __init__(self, backbone: Backbone, head: Head, teacher: Trained, *, num_classes: int, teach: DistillType,
               weight: float, temperature: float, label_smoothing: float, soft_mean: SoftMean) -> None:
    self._backbone, self._head, self._teacher, self._num_classes = backbone, head, teacher, num_classes
    self._teach, self._weight, self._temperature, self._smoothing = teach, weight, temperature, label_smoothing
    self._soft_mean = soft_mean

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys, image = split_key(key, 'backbone', 'head', 'head_dist', 'teacher'), batch['image']
    params, state, features = init_backbone(self._backbone, keys['backbone'], image, adds_losses=True)
    inputs = {'head': features.pooled} | ({} if features.distilled is None else {HEAD_DIST: features.distilled})
    teacher = self._teacher.init(keys['teacher'], image, self._num_classes)
    return ({'backbone': params, **{name: self._head.init(keys[name], x.shape[-1], self._num_classes)
                                    for name, x in inputs.items()}}, {TRAINED: teacher, **statistics(state)})

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del step
    batch = counted(batch)
    image, mask_B = batch['image'], batch.get('mask')
    features, state = self._backbone.apply(params['backbone'], extra.get(STATE, {}), image, train=True, key=key)
    logits_BC = self._head.apply(params['head'], features.pooled)
    taught_BC = logits_BC
    if features.distilled is not None:
      taught_BC = self._head.apply(params[HEAD_DIST], features.distilled)
    teacher_BC = self._teacher.predict(extra[TRAINED], image)
    targets_BC = class_targets(batch, self._num_classes)
    labels_B = losses.softmax_xent(logits_BC, losses.smooth(targets_BC, self._smoothing))
    taught_B = self._taught(taught_BC, teacher_BC)
    agrees_B = (jnp.argmax(taught_BC, -1) == jnp.argmax(teacher_BC, -1)).astype(jnp.float32)
    metrics = {'accuracy': losses.hit(logits_BC, targets_BC), 'teacher_accuracy': losses.hit(teacher_BC, targets_BC),
               'agreement': agrees_B, 'labels_loss': labels_B, 'teacher_loss': taught_B}
    loss = weighted_mean((1. - self._weight) * labels_B + self._weight * taught_B, mask_B)
    means = {name: weighted_mean(values_B, mask_B) for name, values_B in metrics.items()}
    return with_losses(LossOut(loss, means, statistics(state)), features)

  def _taught(self, logits_BC: Array, teacher_BC: Array) -> Array:
    """Returns D of each example, `[B]`."""
    match self._teach:
      case DistillType.SOFT:
        t = self._temperature
        log_t_BC, log_s_BC = (jax.nn.log_softmax(z.astype(jnp.float32) / t) for z in (teacher_BC, logits_BC))
        divergence_BC = t ** 2 * jnp.exp(log_t_BC) * (log_t_BC - log_s_BC)
        return divergence_BC.mean(-1) if self._soft_mean is SoftMean.CODE else divergence_BC.sum(-1)
      case DistillType.HARD:
        return losses.softmax_xent(logits_BC, jax.nn.one_hot(jnp.argmax(teacher_BC, -1), logits_BC.shape[-1]))
      case _:
        assert_never(self._teach)

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    del params, step
    return {**extra, **stats}

  def views(self) -> dict[str, View]:
    return {'student': view(self._backbone, self._head)}


class Spec(spec.Spec[schema.Distill]):
  """Builds `Distill` from a config."""

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Distill:
    s, t, recipe = self.settings, self.settings.teacher, self.config.data.recipe
    teacher = Trained(backbones.build(t.model, self.config.image_px), heads.build(t.head, t.model), mean=t.mean,
                      std=t.std, seen_mean=recipe.mean, seen_std=recipe.std)
    return Distill(
        backbone, heads.build(self.config.head, self.config.model), teacher, num_classes=num_classes,
        teach=s.distill_type, weight=s.weight, temperature=s.temperature, label_smoothing=s.label_smoothing,
        soft_mean=s.soft_mean)

  def models(self) -> dict[str, schema.Model]:
    return {**super().models(), 'objective.teacher.model': self.settings.teacher.model}

  def begins_with(self) -> dict[str, spec.Begin]:
    t = self.settings.teacher
    return {'teacher': spec.Begin(t.weights, TRAINED, t.model, self.config.image_px, required='a weight file',
                                  normalization=(t.mean, t.std))}
