"""The network of a config."""
from __future__ import annotations

import dataclasses

from vit_jax.config import schema
from vit_jax.config.schema import Execution
from vit_jax.core import implementation
from vit_jax.core.contracts import Backbone

Size = tuple[int, int]
"""(height, width) of an image, px."""


def build(model: schema.Model, image_px: Size) -> Backbone:
  """The backbone of these settings for images of `image_px`.

  Raises:
    UserError: lists all settings that do not fit together.
  """
  backbone: Backbone = implementation.of(model)(model, image_px)
  return backbone


def for_evaluation(model: schema.Model, platform: str) -> schema.Model:
  """Returns the model as it is evaluated on devices of a platform, if nothing says how its blocks are run.

  On CPUs the blocks are scanned, which compiles in a third of the time and is as fast. Unrolled, XLA copies the
  parameters of all blocks out of their stack, too, as much memory again.
  """
  if platform != 'cpu' or getattr(model, 'execution', None) is not Execution.AUTO:
    return model
  return dataclasses.replace(model, execution=Execution.SCAN)  # type: ignore[arg-type]
