"""The objective of a config. Only this module knows every kind of objective."""
from __future__ import annotations

from typing import Any, assert_never

from vit_jax.config import schema
from vit_jax.objectives import byol, dino, distill, mae, masked_patch, supervised, token_label
from vit_jax.objectives.spec import Spec


def of(config: schema.Config) -> Spec[Any]:
  """What a run needs to know of its objective."""
  match config.objective:
    case schema.Supervised() as settings:
      return supervised.Spec(config, settings)
    case schema.Mae() as settings:
      return mae.Spec(config, settings)
    case schema.MaskedPatch() as settings:
      return masked_patch.Spec(config, settings)
    case schema.Dino() as settings:
      return dino.Spec(config, settings)
    case schema.Byol() as settings:
      return byol.Spec(config, settings)
    case schema.TokenLabel() as settings:
      return token_label.Spec(config, settings)
    case schema.Distill() as settings:
      return distill.Spec(config, settings)
    case _:
      assert_never(config.objective)
