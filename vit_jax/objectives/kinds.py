"""The objective of a config."""
from __future__ import annotations

from typing import Any

from vit_jax.config import schema
from vit_jax.core import implementation
from vit_jax.objectives.spec import Begin, Spec


def of(config: schema.Config) -> Spec[Any]:
  """Returns what a run needs to know of its objective."""
  spec: Spec[Any] = implementation.of(config.objective)(config, config.objective)
  return spec


def begins_with(config: schema.Config) -> dict[str, Begin]:
  """Returns the networks of the objective that begin with weights, or must do so, as `Spec.begins_with`."""
  return {name: begin for name, begin in of(config).begins_with().items() if begin.weights or begin.required}
