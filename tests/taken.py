"""Functions of the authors' programs, run from their files without what the rest of a file imports."""
from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable
from typing import Any


def taken(path: pathlib.Path, *names: str, **known: Any) -> Callable[..., Any]:
  """The last of some functions or classes of a file, with what they need of other modules."""
  for node in ast.parse(path.read_text()).body:
    if getattr(node, 'name', None) in names:
      exec(compile(ast.Module([node], []), str(path), 'exec'), known)
  return known[names[-1]]  # type: ignore[no-any-return]
