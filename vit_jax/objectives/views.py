"""Views on a backbone alone, for tasks without classes."""
from __future__ import annotations

from vit_jax.core.contracts import Backbone
from vit_jax.core.types import Array, Extra, Outputs, Params, PyTree


class Encoder:
  """A view on the backbone of the parameters, or of a part of `extra`: features, and no logits."""

  def __init__(self, backbone: Backbone, *, under: str = ''):
    """`under` names the part of `extra`; '' = the parameters."""
    self._backbone, self._under = backbone, under

  def select(self, params: Params, extra: Extra) -> PyTree:
    return {'backbone': (extra[self._under] if self._under else params)['backbone']}

  def predict(self, selected: PyTree, image: Array) -> Outputs:
    features, _ = self._backbone.apply(selected['backbone'], {}, image, train=False, key=None)
    return Outputs(None, features)
