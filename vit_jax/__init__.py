"""Vision Transformers in JAX, from image files to the tables of the paper."""
from __future__ import annotations

from typing import Any

__version__ = '0.1.0'
_OF_API = ('load', 'Model')


def __getattr__(name: str) -> Any:
  """What `vit_jax.api` offers, imported when it is first asked for: importing the package starts no jax."""
  if name not in _OF_API:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}; it has {", ".join(_OF_API)}')
  from vit_jax import api
  return getattr(api, name)


def __dir__() -> list[str]:
  return sorted([*globals(), *_OF_API])
