"""Learning from labels: a backbone, a head and a classification loss."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax

from vit_jax.config import schema
from vit_jax.core.contracts import Backbone, View
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import class_targets, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Outputs, Params, PyTree
from vit_jax.objectives import losses

STATE = 'model_state'
"""Key of `extra` under which running statistics of a backbone are kept, if it has any."""


class Head(Protocol):
  """Features to logits."""

  def init(self, key: Key, width: int, num_classes: int) -> Params:
    ...

  def apply(self, params: Params, pooled: Array) -> Array:
    ...


class Classifier:
  """A view on a backbone and a head: selects them by name, predicts logits."""

  def __init__(self, backbone: Backbone, head: Head):
    self._backbone, self._head = backbone, head

  def select(self, params: Params, extra: Extra) -> PyTree:
    return {'backbone': params['backbone'], 'head': params['head'], 'state': extra.get(STATE, {})}

  def predict(self, selected: PyTree, image: Array) -> Outputs:
    features, _ = self._backbone.apply(selected['backbone'], selected['state'], image, train=False, key=None)
    return Outputs(self._head.apply(selected['head'], features.pooled), features)


class Supervised:
  """Objective: classify the image; targets are classes, or weights over classes.

  With class weights the loss is `sum_i w_i l_i / sum_i w_i` over the whole batch, w_i the weight of the class of
  example i (of a mixture, the mean); accuracy stays unweighted.

  Raises:
    UserError: if there are class weights, but not one for each class.
  """

  def __init__(self, backbone: Backbone, head: Head, *, num_classes: int, loss: schema.Loss,
               label_smoothing: float, threshold: float = -1., class_weights: Sequence[float] = ()):
    if class_weights and len(class_weights) != num_classes:
      raise UserError(f'objective.class_weights has {len(class_weights)} numbers; want one for each of the '
                      f'{num_classes} classes')
    self._backbone, self._head, self._num_classes = backbone, head, num_classes
    self._loss, self._smoothing, self._threshold = loss, label_smoothing, threshold
    self._class_weights = class_weights

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys = split_key(key, 'backbone', 'head')
    params, state = self._backbone.init(keys['backbone'], batch['image'])
    features = jax.eval_shape(
        lambda: self._backbone.apply(params, state, batch['image'], train=False, key=None)[0].pooled)
    head = self._head.init(keys['head'], features.shape[-1], self._num_classes)
    return {'backbone': params, 'head': head}, ({STATE: state} if state else {})

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del step
    features, state = self._backbone.apply(
        params['backbone'], extra.get(STATE, {}), batch['image'], train=True, key=key)
    logits_BC = self._head.apply(params['head'], features.pooled)
    targets_BC = class_targets(batch, self._num_classes)
    mask_B = batch.get('mask')
    wanted_BC = losses.smooth(losses.harden(targets_BC, self._threshold), self._smoothing)
    loss = weighted_mean(self._per_example(logits_BC, wanted_BC), self._weights(targets_BC, mask_B))
    metrics = {'accuracy': weighted_mean(losses.hit(logits_BC, targets_BC), mask_B)}
    return LossOut(loss, metrics, {STATE: state} if state else {})

  def _weights(self, targets_BC: Array, mask_B: Array | None) -> Array | None:
    if not self._class_weights:
      return mask_B
    weights_B = losses.example_weights(targets_BC, self._class_weights)
    return weights_B if mask_B is None else weights_B * mask_B

  def _per_example(self, logits_BC: Array, targets_BC: Array) -> Array:
    match self._loss:
      case schema.Loss.SOFTMAX:
        return losses.softmax_xent(logits_BC, targets_BC)
      case schema.Loss.SIGMOID:
        return losses.sigmoid_xent(logits_BC, targets_BC)
      case schema.Loss.BCE:
        return losses.binary_xent(logits_BC, targets_BC)

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    del params, step
    return {**extra, **stats} if stats else extra

  def views(self) -> dict[str, View]:
    return {'student': Classifier(self._backbone, self._head)}
