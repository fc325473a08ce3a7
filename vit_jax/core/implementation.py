"""Finds the code that a setting stands for: the objective of `Mae`, the evaluator of `Knn`, a person's own `npz:FILE`.

A settings class names its code in the class attribute `implementation`, as `module:name`. The module is imported when
it is first used, so that a config can be read without JAX, and a run imports only what its config names. A settings
class in a person's own file names that file, and works as the built-in ones do.

Modules are found as Python finds them, then in the folders of the config files that were read, then in the current
folder. Folders are appended to `sys.path`, which loader processes get too; other processes get them by `environment`.
"""
from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Mapping
from typing import Any

from vit_jax.core.errors import UserError

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_NAME = re.compile(r'[^\W\d]\w*(\.[^\W\d]\w*)*')
_LONGEST = 200  # letters of the name of a module
_FOLDERS = 'VIT_JAX_MODULES'
"""Environment variable with the folders of the parent process."""
own_modules: dict[str, None] = {}
"""Names of a person's modules whose code is in use, in the order in which it was found."""
_added: list[str] = []
"""Folders of configs, and the current one where a module was found in it: those that this module appended."""


def of(settings: Any) -> Any:
  """Returns what `settings.implementation` names; the contract of each kind of settings says what that is.

  Raises:
    UserError: a person's module is missing, cannot be imported, or does not have the name.
  """
  return load(type(settings).implementation)


def make(settings: Any, **context: Any) -> Any:
  """Returns `of(settings)` called with the fields of the settings, and with `context`.

  Raises:
    UserError: a person's own code takes other arguments.
  """
  own = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
  found = of(settings)
  if is_own(type(settings)):
    try:
      inspect.signature(found).bind(**own, **context)
    except TypeError as error:
      given = ', '.join([*own, *context])
      raise UserError(f'{type(settings).implementation}: expected code that is called with {given}, got one with other '
                      f'arguments ({error}). Change its arguments.') from None
  return found(**own, **context)


def load(name: str) -> Any:
  """Returns the object that `module:name` names.

  Raises:
    UserError: the module is missing, cannot be imported, or does not have the name.
  """
  path, _, attribute = name.partition(':')
  module = import_module(path)
  if not hasattr(module, attribute):
    near = difflib.get_close_matches(attribute, vars(module), 1)
    raise UserError(f'{path}: expected {attribute!r} in this module, {getattr(module, "__file__", "built in")}, got '
                    'none.' + (f' Did you mean {near[0]}?' if near else f' Define it there, or correct {name!r}.'))
  if is_persons(getattr(module, '__file__', None) or ''):
    own_modules[path] = None
  return getattr(module, attribute)


def import_module(name: str) -> types.ModuleType:
  """Imports a module, which may be a person's own file.

  Raises:
    UserError: there is none of this name, or its code raises an exception; names the line. Modules of Python itself
      are refused: a file of settings of another person cannot have them run.
  """
  first, here = name.partition('.')[0], os.getcwd()
  if not _NAME.fullmatch(name) or len(name) > _LONGEST or first in sys.stdlib_module_names:
    raise UserError(f'{name[:60]!r}: expected the name of a Python module, and not of one that Python itself has. '
                    'Rename it.')
  if first not in sys.modules and any(os.path.exists(os.path.join(here, path)) for path in (first, f'{first}.py')):
    look_in(here)
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name is None or not f'{name}.'.startswith(f'{error.name}.'):
      raise _located(name, error) from error
    raise UserError(f'{name}: expected a Python module, got none. It was looked for among the installed packages and '
                    f'in {", ".join(dict.fromkeys([*_added, here]))}. Put {name.replace(".", "/")}.py beside the '
                    'config, or run the command in its folder.') from None
  except UserError:
    raise
  except Exception as error:  # code of the person may raise anything
    raise _located(name, error) from error


def look_in(folder: str | os.PathLike[str]) -> None:
  """Adds a folder to those where modules are found, after all installed ones."""
  path = os.path.abspath(folder)
  if path not in sys.path:
    sys.path.append(path)
    importlib.invalidate_caches()
  if path not in _added:
    _added.append(path)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
  """Returns an environment in which child processes of this program find the same modules."""
  return {**environ, _FOLDERS: os.pathsep.join(_added)}


def is_own(kind: type) -> bool:
  """Returns whether a class is a person's own, and not one of this package."""
  return kind.__module__.partition('.')[0] != 'vit_jax'


def type_name(kind: type) -> str:
  """Returns the name of a settings class in files: `Mae`, or `module:Class` of a person's own."""
  return f'{kind.__module__}:{kind.__qualname__}' if is_own(kind) else kind.__name__


def is_persons(file: str) -> bool:
  """Returns whether a file is a person's code: below a folder of `look_in`, and not of an installed package."""
  path = pathlib.Path(file)
  return (any(path.is_relative_to(folder) for folder in _added) and 'site-packages' not in path.parts
          and not path.is_relative_to(_PACKAGE))


def _located(name: str, error: Exception) -> UserError:
  """The message for an exception that importing a module raises: the last line in a file of the person."""
  if isinstance(error, SyntaxError):
    where = f'{error.filename}, line {error.lineno}'
  else:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_persons(frame.filename)]
    where = f'{frames[-1].filename}, line {frames[-1].lineno}' if frames else name
  lines = str(error.msg if isinstance(error, SyntaxError) else error).strip().splitlines()
  raised = f'{type(error).__name__}{": " + lines[0][:300] if lines else ""}'
  return UserError(f'{where}: expected a module that can be imported, got {raised}. Correct the error in the module.')


for _folder in filter(None, os.environ.get(_FOLDERS, '').split(os.pathsep)):
  look_in(_folder)
