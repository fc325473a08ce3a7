"""`--job=list`: all configs, each with the first line of its docstring."""
from __future__ import annotations

import ast
import pathlib

from vit_jax.config import files


def run() -> int:
  """Prints the table; exit status 0."""
  print(table())
  return 0


def table() -> str:
  """Returns the names of configs with one line each, read without running the configs."""
  names = files.list_names()
  width = max(map(len, names), default=0) + 2
  return '\n'.join(f'{name:<{width}}{_first_line(files.find(name)[0])}' for name in names)


def _first_line(path: pathlib.Path) -> str:
  doc = ast.get_docstring(ast.parse(path.read_text()))
  return doc.splitlines()[0] if doc else ''
