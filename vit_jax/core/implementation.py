"""Finds the code that a settings class stands for: the objective of `Mae`, the block of `Axial`, and so on.

A settings class names its code in the class attribute `implementation`, as `module:name`. The module is imported when
it is first used, so that a config can be read without JAX, and a run imports only what its config names. A settings
class in a person's own file names that file, and works as the built-in ones do.
"""
from __future__ import annotations

import importlib
from typing import Any


def of(settings: Any) -> Any:
  """Returns what `settings.implementation` names; the contract of each kind of settings says what that is."""
  module, _, name = type(settings).implementation.partition(':')
  return getattr(importlib.import_module(module), name)
