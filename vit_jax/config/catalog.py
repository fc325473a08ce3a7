"""The project's own configs: `vit_jax.list_configs()`. They are read as text, and not run."""
from __future__ import annotations

import ast
import pathlib
import warnings
from typing import NamedTuple

from vit_jax.config import files
from vit_jax.core import globs


class ConfigFile(NamedTuple):
  """A config of the project.

  name: for `--config=NAME`.
  about: the first line of its docstring.
  arguments: kinds of the arguments that may follow the name, as in `NAME:B/16,px=224`.
  path: of its file.
  """
  name: str
  about: str
  arguments: tuple[str, ...]
  path: pathlib.Path


def list_configs(pattern: str = '*') -> list[ConfigFile]:
  """Returns the configs of this package whose names match a pattern such as `*i1k`.

  Without a match, the list is empty and a warning names the most similar ones.
  """
  found = [_read(name) for name in files.list_names() if globs.matches(name, pattern)]
  if not found:
    warnings.warn(f'list_configs: {globs.no_match(pattern, files.list_names())}', stacklevel=2)
  return found


def _read(name: str) -> ConfigFile:
  path, _ = files.find(name)
  tree = ast.parse(path.read_text(encoding='utf-8'))
  calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)
           and (getattr(node.func, 'attr', '') or getattr(node.func, 'id', '')) == 'parse_arg']
  arguments = dict.fromkeys(keyword.arg for call in calls for keyword in call.keywords if keyword.arg)
  return ConfigFile(name, (ast.get_docstring(tree) or '').partition('\n')[0], tuple(arguments), path)
