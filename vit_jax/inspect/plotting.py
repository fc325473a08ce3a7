"""Imports matplotlib for figures that are drawn into files, whichever backend the environment names.

Figures use the Agg canvas of `sheets.encode` and no window. A notebook names its own backend in `MPLBACKEND`, and
matplotlib cannot be imported in an environment that lacks this backend.
"""
from __future__ import annotations

import contextlib
import functools
import os
from types import ModuleType


@functools.cache
def load() -> ModuleType:
  """Returns the module matplotlib; the backend of the environment is chosen afterwards, if it exists."""
  named = os.environ.pop('MPLBACKEND', None)
  try:
    import matplotlib
  finally:
    if named is not None:
      os.environ['MPLBACKEND'] = named
  if named:
    with contextlib.suppress(ValueError):  # there is no such backend
      matplotlib.rcParams['backend'] = named
  return matplotlib
