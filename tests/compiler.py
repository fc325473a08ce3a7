"""What the installed compiler can do, read before jax is imported."""
from __future__ import annotations

import importlib.util
import mmap
import pathlib


def knows(flag: str) -> bool:
  """Whether this version of XLA has a flag: an unknown one in XLA_FLAGS ends the process.

  The name of a flag is a C string of its own; names of removed flags are still in the text of other definitions.
  """
  spec = importlib.util.find_spec('jaxlib')
  assert spec is not None and spec.origin is not None
  largest = max(pathlib.Path(spec.origin).parent.rglob('*.so'), key=lambda path: path.stat().st_size)
  with open(largest, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
    return text.find(b'\0' + flag.encode() + b'\0') >= 0
