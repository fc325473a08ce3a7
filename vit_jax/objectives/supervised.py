"""Supervised classification: a backbone, a head and a classification loss."""
from __future__ import annotations

from collections.abc import Sequence

from vit_jax.config import schema
from vit_jax.config.durations import Lengths
from vit_jax.core.contracts import Backbone, View
from vit_jax.core.errors import UserError
from vit_jax.core.numerics import class_targets, counted, split_key, weighted_mean
from vit_jax.core.types import Array, Batch, Extra, Key, LossOut, Params
from vit_jax.models import heads
from vit_jax.objectives import losses, spec
from vit_jax.objectives.networks import STATE, Head, NetworkView, OneNetwork, init_backbone, statistics, with_losses

LOSSES = {schema.Loss.SOFTMAX: losses.softmax_xent, schema.Loss.SIGMOID: losses.sigmoid_xent,
          schema.Loss.BCE: losses.binary_xent}


def view(backbone: Backbone, head: Head) -> NetworkView:
  """Returns the view of a classifier with one head."""
  return NetworkView(backbone, ('head',), lambda selected, features: head.apply(selected['head'], features.pooled))


class Supervised(OneNetwork):
  """Objective: classify the image. Targets are classes, or weights over classes.

  With class weights the loss is `sum_i w_i l_i / sum_i w_i` over the whole batch, w_i the weight of the class of
  example i (of a mixture, the mean); accuracy stays unweighted.

  Raises:
    UserError: there are class weights, but not one for each class.
  """

  def __init__(self, backbone: Backbone, head: Head, *, num_classes: int, loss: schema.Loss,
               label_smoothing: float, threshold: float = -1., class_weights: Sequence[float] = ()) -> None:
    if class_weights and len(class_weights) != num_classes:
      raise UserError(f'objective.class_weights: expected a number for each of the {num_classes} classes, got '
                      f'{len(class_weights)}. Give them in the order of the classes, or leave them out.')
    self._backbone, self._head, self._num_classes = backbone, head, num_classes
    self._loss, self._smoothing, self._threshold = loss, label_smoothing, threshold
    self._class_weights = class_weights

  def init(self, key: Key, batch: Batch) -> tuple[Params, Extra]:
    keys = split_key(key, 'backbone', 'head')
    params, state, features = init_backbone(self._backbone, keys['backbone'], batch['image'], adds_losses=True)
    head = self._head.init(keys['head'], features.pooled.shape[-1], self._num_classes)
    return {'backbone': params, 'head': head}, statistics(state)

  def loss(self, params: Params, extra: Extra, batch: Batch, key: Key, step: Array) -> LossOut:
    del step
    batch = counted(batch)
    features, state = self._backbone.apply(params['backbone'], extra.get(STATE, {}), batch['image'], train=True,
                                           key=key)
    logits_BC = self._head.apply(params['head'], features.pooled)
    targets_BC = class_targets(batch, self._num_classes)
    mask_B = batch.get('mask')
    smooth_BC = losses.smooth(losses.harden(targets_BC, self._threshold), self._smoothing)
    loss = weighted_mean(LOSSES[self._loss](logits_BC, smooth_BC), self._weights(targets_BC, mask_B))
    metrics = {'accuracy': weighted_mean(losses.hit(logits_BC, targets_BC), mask_B)}
    return with_losses(LossOut(loss, metrics, statistics(state)), features)

  def _weights(self, targets_BC: Array, mask_B: Array | None) -> Array | None:
    """Returns the weight of each example in the loss, `[B]`; None = 1."""
    if not self._class_weights:
      return mask_B
    weights_B = losses.example_weights(targets_BC, self._class_weights)
    return weights_B if mask_B is None else weights_B * mask_B

  def views(self) -> dict[str, View]:
    return {'student': view(self._backbone, self._head)}


class Spec(spec.Spec[schema.Supervised]):
  """Builds `Supervised` from a config."""

  def build(self, backbone: Backbone, num_classes: int, *, lengths: Lengths) -> Supervised:
    s = self.settings
    return Supervised(
        backbone, heads.build(self.config.head, self.config.model), num_classes=num_classes, loss=s.loss,
        label_smoothing=s.label_smoothing, threshold=s.threshold, class_weights=s.class_weights)
