"""Learning from a trained classifier: DeiT's distillation (Touvron et al. 2021, arXiv 2012.12877), and consistent
teaching (Beyer et al. 2022, arXiv 2106.05237).

The teacher sees the prepared images of the student, with the same crop, colours and mixing. With `weight` 1 it is the
only source of targets: that is consistent teaching; it wants soft targets and patience.
"""
from __future__ import annotations

from typing import assert_never

import jax
import jax.numpy as jnp

from vit_jax.config.schema import DistillType, SoftMean
from vit_jax.core.contracts import Backbone, View
from vit_jax.core.numerics import class_targets, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Features, Key, LossOut, Outputs, Params, PyTree
from vit_jax.objectives import losses
from vit_jax.objectives.supervised import STATE, Classifier, Head

TRAINED = 'trained'
"""Key of `extra` under which the teacher is: `backbone`, `head`, `state`. It never changes."""
HEAD_DIST = 'head_dist'

Pixels = tuple[float, float, float]


class Trained:
  """The teacher of a run: a classifier, and what it wants pictures to be normalised with."""

  def __init__(self, backbone: Backbone, head: Head, *, mean: Pixels, std: Pixels, seen_mean: Pixels,
               seen_std: Pixels):
    """`seen_mean` and `seen_std` are what the student's pictures are normalised with."""
    self._backbone, self._head, self._view = backbone, head, Classifier(backbone, head)
    self._mean, self._std, self._seen_mean, self._seen_std = (
        jnp.array(x, jnp.float32).reshape(1, 1, 1, 3) for x in (mean, std, seen_mean, seen_std))

  def init(self, key: Key, image: Array, num_classes: int) -> PyTree:
    """Untrained, for its shapes: training begins from a weight file."""
    keys = split_key(key, 'backbone', 'head')
    params, state = self._backbone.init(keys['backbone'], image)
    width = jax.eval_shape(lambda: self._backbone.apply(params, state, image, train=False, key=None)[0].pooled).shape[1]
    head = self._head.init(keys['head'], width, num_classes)
    return {'backbone': params, 'head': head, **({'state': state} if state else {})}

  def predict(self, teacher: PyTree, image: Array) -> Array:
    """Logits `[B, C]` for pictures as the student gets them; no gradient goes through."""
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
               weight: float, temperature: float, label_smoothing: float, soft_mean: SoftMean):
    self._backbone, self._head, self._teacher, self._num_classes = backbone, head, teacher, num_classes
    self._teach, self._weight, self._temperature, self._smoothing = teach, weight, temperature, label_smoothing
    self._soft_mean = soft_mean

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys, image = split_key(key, 'backbone', 'head', 'head_dist', 'teacher'), batch['image']
    params, state = self._backbone.init(keys['backbone'], image)

    def summaries() -> tuple[Array, Array | None]:
      features, _ = self._backbone.apply(params, state, image, train=False, key=None)
      return features.pooled, features.distilled

    pooled, distilled = jax.eval_shape(summaries)
    heads = {'head': pooled, **({} if distilled is None else {HEAD_DIST: distilled})}
    teacher = self._teacher.init(keys['teacher'], image, self._num_classes)
    return ({'backbone': params, **{name: self._head.init(keys[name], x.shape[-1], self._num_classes)
                                    for name, x in heads.items()}},
            {TRAINED: teacher, **({STATE: state} if state else {})})

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del step
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
    return LossOut(weighted_mean((1. - self._weight) * labels_B + self._weight * taught_B, mask_B),
                   {name: weighted_mean(values_B, mask_B) for name, values_B in metrics.items()},
                   {STATE: state} if state else {})

  def _taught(self, logits_BC: Array, teacher_BC: Array) -> Array:
    """D of each example, `[B]`."""
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
    return {**extra, **stats} if stats else extra

  def views(self) -> dict[str, View]:
    return {'student': Student(self._backbone, self._head)}


class Student:
  """A view on a classifier that may have a second head, on a distillation token."""

  def __init__(self, backbone: Backbone, head: Head):
    self._backbone, self._head = backbone, head

  def select(self, params: Params, extra: Extra) -> PyTree:
    heads = {name: params[name] for name in ('head', HEAD_DIST) if name in params}
    return {'backbone': params['backbone'], **heads, 'state': extra.get(STATE, {})}

  def predict(self, selected: PyTree, image: Array) -> Outputs:
    features, _ = self._backbone.apply(selected['backbone'], selected['state'], image, train=False, key=None)
    return Outputs(self.classify(selected, features), features)

  def classify(self, selected: PyTree, features: Features) -> Array:
    """`[B, C]` logits of what the backbone gave; the mean of both heads where there are two."""
    logits_BC = self._head.apply(selected['head'], features.pooled)
    if features.distilled is None:
      return logits_BC
    return (logits_BC + self._head.apply(selected[HEAD_DIST], features.distilled)) / 2.
