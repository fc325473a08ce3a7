"""Vision Transformers in JAX, from image files to the tables of the paper."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from vit_jax.api import Model as Model
  from vit_jax.api import load as load
  from vit_jax.config.catalog import list_configs as list_configs
  from vit_jax.recipes.catalog import list_models as list_models
  from vit_jax.weights.catalog import list_weights as list_weights

__version__ = '0.1.0'
_OFFERED = {'load': 'api', 'Model': 'api', 'list_models': 'recipes.catalog', 'list_weights': 'weights.catalog',
            'list_configs': 'config.catalog'}
"""Modules of what the package offers, imported when it is first used: importing the package starts no jax."""


def __getattr__(name: str) -> Any:
  if name not in _OFFERED:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}; it has {", ".join(_OFFERED)}')
  return getattr(importlib.import_module(f'{__name__}.{_OFFERED[name]}'), name)


def __dir__() -> list[str]:
  return sorted([*globals(), *_OFFERED])
