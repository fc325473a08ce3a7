"""How weights are read, as a person sets it; imports nothing, so that the command line can use it at once."""
from __future__ import annotations

from typing import NamedTuple


class Reading(NamedTuple):
  """The options of `loading.load`, which explains them; jobs get them from flags of these names."""
  preprocess: str = ''
  model: str = ''
  view: str = ''
  allow_download: bool = False
  allow_nonfinite: bool = False


AS_FOUND = Reading()
"""Nothing is set: everything is detected from the weights."""
