"""The networks of an objective: a backbone, with or without heads, as parameters to train and as views to evaluate."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from vit_jax.core.contracts import Backbone
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Extra, Features, Key, LossOut, Mean, Outputs, Params, PyTree

STATE = 'model_state'
"""Key of `extra` for the running statistics of a backbone that has any."""


class Head(Protocol):
  """Features to logits."""

  def init(self, key: Key, width: int, num_classes: int) -> Params:
    ...

  def apply(self, params: Params, pooled: Array) -> Array:
    ...


def init_backbone(backbone: Backbone, key: Key, image: Array, *,
                  adds_losses: bool = False) -> tuple[Params, PyTree, Features]:
  """Returns parameters and state for images like `image [B, H, W, 3]`, and the shapes of the features.

  Raises:
    UserError: blocks of the network state losses, and the objective does not add them (`adds_losses`).
  """
  params, state = backbone.init(key, image)
  features = jax.eval_shape(lambda: backbone.apply(params, state, image, train=False, key=None)[0])
  if features.losses and not adds_losses:
    raise UserError(f'objective: expected one that adds the losses of the network ({", ".join(features.losses)}), such '
                    'as Supervised, Distill or FeatureDistill, got one that would leave them out. Choose another '
                    'objective, or a network whose blocks state no losses.')
  return params, state, features


def with_losses(out: LossOut, features: Features) -> LossOut:
  """Returns the output of a loss with the losses that the blocks of the network state added, and as metrics."""
  total, weight, metrics = out.loss.sum, out.loss.weight, dict(out.metrics)
  for name, value in (features.losses or {}).items():
    total = total + value * weight
    metrics[name] = Mean(jax.lax.stop_gradient(value) * weight, weight)
  return out._replace(loss=Mean(total, weight), metrics=metrics)


def statistics(state: PyTree) -> dict[str, Any]:
  """Returns the part of `extra`, and of the `stats` of a loss, that holds the state of a backbone.

  It is empty if the backbone has none.
  """
  return {STATE: state} if state else {}


class NetworkView:
  """The view of one network.

  Args:
    backbone: of the network.
    heads: names of heads in the parameters; those that the parameters do not have are left out.
    logits: from what `select` returns and features to logits `[B, C]`; None: the network predicts no classes.
    under: the part of `extra` that holds the network; '' = the parameters of the run.
  """

  def __init__(self, backbone: Backbone, heads: Sequence[str] = (),
               logits: Callable[[PyTree, Features], Array] | None = None, *, under: str = '') -> None:
    self._backbone, self._heads, self._under = backbone, heads, under
    self.logits = logits

  def select(self, params: Params, extra: Extra) -> PyTree:
    own = extra[self._under] if self._under else params
    return {'backbone': own['backbone'], **{name: own[name] for name in self._heads if name in own},
            'state': extra.get(STATE, {})}

  def predict(self, selected: PyTree, image: Array) -> Outputs:
    features, _ = self._backbone.apply(selected['backbone'], selected['state'], image, train=False, key=None)
    return Outputs(self.logits(selected, features) if self.logits else None, features)
