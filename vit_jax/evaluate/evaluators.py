"""Builds the evaluators of a config."""
from __future__ import annotations

from vit_jax.core import implementation
from vit_jax.core.errors import UserError
from vit_jax.evaluate.resources import Make, Resources
from vit_jax.evaluate.results import Measuring


def build(resources: Resources) -> dict[str, dict[str, Measuring]]:
  """Returns the evaluators by evaluation and view. They share loaders, and features of the same weights.

  The `implementation` of the settings of an evaluation is a function `build(resources, name, settings)`. It returns the
  function that builds the evaluator of a view.

  Raises:
    UserError: an evaluation names a view that the objective does not have, or cannot be built.
  """
  found: dict[str, dict[str, Measuring]] = {}
  for name, settings in resources.config.evals.items():
    chosen = settings.views or tuple(resources.views)
    if not set(chosen) <= set(resources.views):
      raise UserError(f'evals.{name}.views: expected some of {", ".join(resources.views)}, got {", ".join(chosen)}. '
                      'Set some of these views.')
    make: Make = implementation.of(settings)(resources, name, settings)
    found[name] = {view: make(view) for view in chosen}
  return found
