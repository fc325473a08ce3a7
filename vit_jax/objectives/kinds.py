"""The objective of a config."""
from __future__ import annotations

from typing import Any

from vit_jax.config import schema
from vit_jax.core import implementation
from vit_jax.objectives.spec import Spec


def of(config: schema.Config) -> Spec[Any]:
  """Returns what a run needs to know of its objective."""
  spec: Spec[Any] = implementation.of(config.objective)(config, config.objective)
  return spec
