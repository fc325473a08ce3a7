"""Optional packages: importing them, and the command that installs them.

An extra of vit_jax is a named group of such packages. vit_jax is on no package index, so pip cannot install an extra by
its name. The command lists the packages of the extra instead, from the metadata of the installed vit_jax.
"""
from __future__ import annotations

import importlib
import re
import shlex
from importlib import metadata
from typing import Any

from vit_jax.core.errors import UserError

_REQUIREMENT = re.compile(r'(?P<package>[^;]+);.*\bextra *== *["\'](?P<extra>[\w-]+)["\']')  # gcsfs>=1; extra == "gcs"


def install(extra: str) -> str:
  """Returns the command that installs the packages of an extra."""
  try:
    matches = [_REQUIREMENT.match(text) for text in metadata.requires('vit-jax') or ()]
  except metadata.PackageNotFoundError:  # vit_jax is imported from its source, and is not installed
    matches = []
  packages = [match['package'].strip() for match in matches if match and match['extra'] == extra]
  if not packages:
    return f"pip install -e '.[{extra}]' in the checkout of vit_jax"
  return shlex.join(['pip', 'install', *packages])


def load(module: str, extra: str, why: str) -> Any:
  """Returns a module of an optional package.

  Args:
    module: the name of the module.
    extra: the extra of vit_jax that has the package.
    why: the setting, flag or file that needs the package; the message begins with it.

  Raises:
    UserError: the package is not installed, or cannot be imported.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise missing(module, extra, why, error) from error


def missing(module: str, extra: str, why: str, error: ImportError | None = None) -> UserError:
  """Returns the error about a package that is not installed, or whose import raised `error`; arguments as in `load`."""
  got = 'none' if error is None or isinstance(error, ModuleNotFoundError) else f'an error when it is imported ({error})'
  return UserError(f'{why}: expected the Python package {module.partition(".")[0]}, got {got}. Run: {install(extra)}')
