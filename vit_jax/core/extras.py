"""Packages that few jobs need: which extra has them, and the command that installs them.

vit_jax is on no package index, so its extras cannot be installed by its name. The command names the packages of the
extra instead, from the metadata of the installed vit_jax. It is the same for a checkout and for a wheel.
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
  except metadata.PackageNotFoundError:  # the source is on `sys.path`, and vit_jax is not installed
    matches = []
  packages = [match['package'].strip() for match in matches if match and match['extra'] == extra]
  if not packages:
    return f"pip install -e '.[{extra}]' in the checkout of vit_jax"
  return shlex.join(['pip', 'install', *packages])


def load(module: str, extra: str, why: str) -> Any:
  """Returns a module of an optional package.

  Args:
    module: its name.
    extra: the extra of vit_jax that has the package.
    why: the setting, flag or file that needs it, for the message.

  Raises:
    UserError: it is not installed, or cannot be imported.
  """
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise missing(module, extra, why, error) from error


def missing(module: str, extra: str, why: str, error: ImportError | None = None) -> UserError:
  """Returns the error about a package that is not installed, or that cannot be imported because of `error`."""
  got = 'none' if error is None or isinstance(error, ModuleNotFoundError) else f'an error when it is imported ({error})'
  return UserError(f'{why}: expected the Python package {module.partition(".")[0]}, got {got}. Run: {install(extra)}')
