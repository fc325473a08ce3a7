"""Modules of other packages that are imported when one of their attributes is first read.

For packages that take long to import, or that a run may do without. A module that uses one shows its name and its types
to type checkers with an import under `TYPE_CHECKING`:

    if TYPE_CHECKING:
      import cv2
    else:
      cv2 = lazy.Module('cv2')

The project's own modules are imported at the top of a file, except those that few runs need.
"""
from __future__ import annotations

import importlib
import types
from typing import Any


class Module:
  """Stands for the module `name`; reading an attribute imports it, from any thread. It pickles as its name.

  It keeps no attributes of the module, so that a change to one is seen.
  """

  def __init__(self, name: str) -> None:
    self._name = name
    self._module: types.ModuleType | None = None

  def __getattr__(self, attribute: str) -> Any:
    if attribute.startswith('__'):  # what copying and pickling look for
      raise AttributeError(attribute)
    if self._module is None:
      self._module = importlib.import_module(self._name)  # waits while another thread imports it
    return getattr(self._module, attribute)

  def __reduce__(self) -> tuple[type[Module], tuple[str]]:
    return Module, (self._name,)
