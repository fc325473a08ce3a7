"""The networks of objectives: how they begin, how they are applied to several crops, averaged and evaluated.

`OneNetwork` and `WithTeacher` are bases of most objectives: they provide `after_update` and `views`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from vit_jax.core.contracts import Backbone, View
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Extra, Features, Key, LossOut, Mean, Outputs, Params, PyTree, Schedule

TEACHER = 'teacher'
"""Key of `extra` for an EMA of the trained network, also if a paper calls it the target network."""
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


def encode_views(backbone: Backbone, params: Params, views: Array, *, train: bool, key: Key | None) -> Features:
  """Returns the features of `views [B, V, H, W, 3]` as those of B * V images; the rows of an image stay together."""
  images = views.reshape(-1, *views.shape[2:])
  return backbone.apply(params['backbone'], {}, images, train=train, key=key)[0]


def copied(tree: PyTree) -> PyTree:
  """Returns a copy of all arrays, so that a state does not have one array twice."""
  return jax.tree.map(lambda x: x + 0., tree)


def moving_average(average: PyTree, new: PyTree, momentum: Array) -> PyTree:
  """Returns `momentum * average + (1 - momentum) * new` for all arrays."""
  return jax.tree.map(lambda a, b: momentum * a + (1. - momentum) * b, average, new)


class Normalization(NamedTuple):
  """Mean and standard deviation of images by channel, with which they are normalized."""
  mean: tuple[float, ...]
  std: tuple[float, ...]


def renormalized(image: Array, old: Normalization, new: Normalization) -> Array:
  """Returns images `[B, H, W, 3]` that are normalized with `old`, normalized with `new` instead."""
  old_mean, old_std, new_mean, new_std = (np.array(x, np.float32).reshape(1, 1, 1, 3) for x in (*old, *new))
  return (image * old_std + old_mean - new_mean) / new_std


class InnerView:
  """A view of an objective that is wrapped by another one.

  Args:
    view: of the inner objective.
    unwrap: takes params and extra of the outer objective, and returns those of the inner one.
  """

  def __init__(self, view: View, unwrap: Callable[[Params, Extra], tuple[Params, Extra]]) -> None:
    self._view, self._unwrap = view, unwrap
    self.predict = view.predict  # itself, so that the views of a network share the programs that predict

  def select(self, params: Params, extra: Extra) -> PyTree:
    """Returns what the inner view selects."""
    return self._view.select(*self._unwrap(params, extra))


class OneNetwork:
  """Base of objectives that train `self._backbone`, and have nothing else to evaluate."""
  _backbone: Backbone

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    """Returns `extra` with the running statistics of the step, if there are some."""
    del params, step
    return {**extra, **stats}

  def views(self) -> dict[str, View]:
    """Returns the trained network."""
    return {'student': NetworkView(self._backbone)}


class WithTeacher:
  """Base of objectives with an EMA of the network in `extra`, `teacher <- m teacher + (1 - m) student`."""
  _backbone: Backbone
  _momentum: Schedule

  def after_update(self, params: Params, extra: Extra, stats: PyTree, step: Array) -> Extra:
    """Returns `extra` with the next teacher; it averages the parameters of the names that it has itself."""
    del stats
    teacher = extra[TEACHER]
    student = {name: params[name] for name in teacher}
    return {**extra, TEACHER: moving_average(teacher, student, self._momentum(step))}

  def views(self) -> dict[str, View]:
    """Returns the trained network and its EMA."""
    return {'student': NetworkView(self._backbone), 'teacher': NetworkView(self._backbone, under=TEACHER)}


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
    """Returns backbone, heads and running statistics of the network."""
    network = extra[self._under] if self._under else params
    heads = {name: network[name] for name in self._heads if name in network}
    return {'backbone': network['backbone'], **heads, 'state': extra.get(STATE, {})}

  def predict(self, selected: PyTree, image: Array) -> Outputs:
    """Returns features, and logits if the network has some."""
    features, _ = self._backbone.apply(selected['backbone'], selected['state'], image, train=False, key=None)
    return Outputs(self.logits(selected, features) if self.logits else None, features)
