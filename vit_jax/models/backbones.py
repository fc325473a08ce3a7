"""Builds the network of a config."""
from __future__ import annotations

from vit_jax.config import check, schema
from vit_jax.core import implementation
from vit_jax.core.contracts import Backbone


def build(model: schema.Model, image_px: tuple[int, int]) -> Backbone:
  """Returns the backbone of these settings for images of `image_px` (height, width).

  Raises:
    UserError: lists all settings that do not fit together.
  """
  check.check_model(model, image_px)
  backbone: Backbone = implementation.of(model)(model, (int(image_px[0]), int(image_px[1])))
  return backbone
