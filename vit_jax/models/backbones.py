"""The one `match` on the kind of a network: it selects what this kind brings along."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, assert_never

from vit_jax.config import schema
from vit_jax.core.contracts import Backbone
from vit_jax.models import axial_resnet, efficientnet, mixer, resnet
from vit_jax.models.vit import rules as vit_rules
from vit_jax.models.vit import vit
from vit_jax.parallel.rules import Rule

Size = tuple[int, int]
"""(height, width) of an image, px."""


class Room(NamedTuple):
  """build: the backbone; UserError lists all settings that do not fit together.    rules: of sharding.

  """
  build: Callable[[Size], Backbone]
  rules: Callable[[], list[Rule]]


def room(model: schema.Model) -> Room:
  """What the kind of network of these settings brings along."""
  match model:
    case schema.ViT():
      return Room(functools.partial(vit.build, model), functools.partial(vit_rules.rules, model))
    case schema.ResNet():
      return Room(functools.partial(resnet.build, model), lambda: [*resnet.RULES])
    case schema.Mixer():
      return Room(functools.partial(mixer.build, model), lambda: [*mixer.RULES])
    case schema.EfficientNet():
      return Room(functools.partial(efficientnet.build, model), lambda: [*efficientnet.RULES])
    case schema.AxialResNet():
      return Room(functools.partial(axial_resnet.build, model), lambda: [*axial_resnet.RULES])
    case _:
      assert_never(model)


def build(model: schema.Model, image_px: Size) -> Backbone:
  """The backbone of these settings for images of `image_px`.

  Raises:
    UserError: lists all settings that do not fit together.
  """
  return room(model).build(image_px)


def rules(model: schema.Model) -> list[Rule]:
  """The sharding rules of a backbone."""
  return room(model).rules()
