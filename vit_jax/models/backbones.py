"""The network of any settings: one `match`, for all who build one."""
from __future__ import annotations

from typing import assert_never

from vit_jax.config import schema
from vit_jax.core.contracts import Backbone
from vit_jax.models import efficientnet, mixer, resnet
from vit_jax.models.vit import vit


def build(model: schema.Model, image_px: tuple[int, int]) -> Backbone:
  """The backbone of these settings for images of `image_px` (height, width).

  Raises:
    UserError: lists all settings that do not fit together.
  """
  match model:
    case schema.ViT():
      return vit.build(model, image_px)
    case schema.ResNet():
      return resnet.build(model, image_px)
    case schema.Mixer():
      return mixer.build(model, image_px)
    case schema.EfficientNet():
      return efficientnet.build(model, image_px)
    case _:
      assert_never(model)
