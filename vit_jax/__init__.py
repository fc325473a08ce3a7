"""Vision Transformers in JAX, from image files to the tables of the paper.

`__all__` is the public Python API. Its names are imported when they are first used, so that importing the package does
not import jax.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from vit_jax.api import Guess, Model, load
  from vit_jax.config.files import list_configs
  from vit_jax.core.errors import UserError
  from vit_jax.recipes.catalog import list_models
  from vit_jax.weights.published import list_weights

__version__ = '0.1.0'
__all__ = ('Guess', 'Model', 'UserError', 'list_configs', 'list_models', 'list_weights', 'load')
_MODULE_BY_NAME = {'Guess': 'api', 'Model': 'api', 'UserError': 'core.errors',
                   'list_configs': 'config.files', 'list_models': 'recipes.catalog',
                   'list_weights': 'weights.published', 'load': 'api'}


def __getattr__(name: str) -> Any:
  if name not in _MODULE_BY_NAME:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}; it has {", ".join(__all__)}')
  return getattr(importlib.import_module(f'{__name__}.{_MODULE_BY_NAME[name]}'), name)


def __dir__() -> list[str]:
  return sorted([*__all__, '__version__'])
