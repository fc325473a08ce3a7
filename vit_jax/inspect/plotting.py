"""Imports matplotlib for figures that are drawn into files, whichever backend the environment names.

Figures use the Agg canvas of `sheets.encode` and no window. A notebook names its own backend in `MPLBACKEND`, and
matplotlib cannot be imported in an environment that lacks this backend.
"""
from __future__ import annotations

import contextlib
import functools
import os
from types import ModuleType

COLORS = ('#0a84c6', '#e0731d', '#159f78', '#c565a0', '#8c74d6', '#b08a00', '#56b4e9', '#d64545')
"""Readable on white and on near-black: Okabe and Ito 2008, without black and yellow, blue first."""


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
