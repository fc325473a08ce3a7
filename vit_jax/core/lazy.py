"""Modules of other packages that are imported when one of their attributes is first read.

They are for packages that take long to import, or that a run may not need. A module that uses such a package also
imports the package under `TYPE_CHECKING`, for type checkers:

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
  """Stands for the module `name`, which is imported when an attribute is first read, in any thread. It pickles by name.

  Each read of an attribute goes to the imported module, so that later changes of the module are seen.
  """

  def __init__(self, name: str) -> None:
    self._name = name
    self._module: types.ModuleType | None = None

  def __getattr__(self, attribute: str) -> Any:
    if attribute.startswith('__'):  # copying and pickling look for such attributes
      raise AttributeError(attribute)
    if self._module is None:
      self._module = importlib.import_module(self._name)  # waits while another thread imports it
    return getattr(self._module, attribute)

  def __reduce__(self) -> tuple[type[Module], tuple[str]]:
    return Module, (self._name,)
