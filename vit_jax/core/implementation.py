"""Finds the code that a settings class stands for: the objective of `Mae`, the evaluator of `Knn`, a person's own code.

A settings class names its code in the class attribute `implementation`, as `module:name`. `of` imports the module and
returns the named object; `make` also calls the object. So a config can be read without JAX, and a run imports only the
modules that the config names. A settings class in a person's own file names that file.

Importing a module runs its code. So the origin of a name decides where the module is looked for:

| The name comes from                          | Installed packages, trusted folders | The current folder         |
|----------------------------------------------|-------------------------------------|----------------------------|
| the command line, such as `mine:Turn`        | yes                                 | yes; it is trusted then    |
| a file, such as another person's config.json | yes                                 | only if it is trusted      |

Trusted folders are folders that the person has named: the folder of a config in Python (`--config=FILE.py`), and the
current folder after `--allow_code` or after a name on the command line. A name read from a file never makes the current
folder trusted; once the command line has made it trusted, all its modules can be imported. Trusted folders are at the
end of `sys.path`, which loader processes get too; other processes get them by `environment`. "Own" code is code that a
person wrote: a module or a file in a trusted folder, or a settings class outside this package.
"""
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from typing import Any

from vit_jax.core import failures, globs
from vit_jax.core.errors import UserError

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_MODULE = re.compile(r'[^\W\d]\w*(\.[^\W\d]\w*)*')
_MAX_MODULE_CHARACTERS = 200  # of a name
_MODULE_IN_TEXT = re.compile(r'(?:^|[=,]|\*\s*)([^\W\d][\w.]*):')  # mine of data.source=mine:x or mix:0.5* mine:x
_TRUSTED_BY_PARENT = 'VIT_JAX_MODULES'
"""Environment variable with the trusted folders of the parent process."""
own_modules: dict[str, None] = {}
"""Names of a person's own modules from which `load` returned an object, in the order of the calls: an ordered set."""
_trusted_folders: list[str] = []
"""Folders that the person has named, and that `trust_folder` added to `sys.path`."""
_command_line_modules: set[str] = set()
"""Modules and packages that the command line names: `mine` for `mine:x` and for `mine.deep:x`."""


def of(settings: Any) -> Any:
  """Returns the object that `settings.implementation` names, such as the class of an objective.

  Raises:
    UserError: a person's module is missing, cannot be imported, or does not have the name.
  """
  return load(type(settings).implementation)


def make(settings: Any, **context: Any) -> Any:
  """Calls `of(settings)` with the fields of the settings and with `context`, and returns the result.

  Raises:
    UserError: a person's own code takes other arguments.
  """
  fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
  code = of(settings)
  if is_own_type(type(settings)):
    try:
      inspect.signature(code).bind(**fields, **context)
    except TypeError as error:
      names = ', '.join([*fields, *context])
      raise UserError(f'{type(settings).implementation}: expected code that is called with {names}, got one with other '
                      f'arguments ({error}). Change its arguments.') from None
  return code(**fields, **context)


def load(name: str, *, from_command_line: bool = False) -> Any:
  """Returns the object that `module:name` names.

  Args:
    name: the module and the object, as `module:name`.
    from_command_line: whether the name comes from the command line; then the module may be in the current folder.

  Raises:
    UserError: the module is missing, cannot be imported, or does not have the name.
  """
  module_name, _, attribute = name.partition(':')
  module = import_module(module_name, from_command_line=from_command_line)
  if not hasattr(module, attribute):
    advice = globs.nearest(attribute, vars(module)) or f' Define it there, or correct {name!r}.'
    raise UserError(f'{module_name}: expected {attribute!r} in this module, {getattr(module, "__file__", "built in")}, '
                    f'got none.{advice}')
  if is_own_file(getattr(module, '__file__', None) or ''):
    own_modules[module_name] = None
  return getattr(module, attribute)


def import_module(name: str, *, from_command_line: bool = False) -> types.ModuleType:
  """Imports a module, which may be a person's own file, and returns the module.

  Args:
    name: the full name of the module, with dots.
    from_command_line: whether the name comes from the command line; then a current folder with the module gets trusted.

  Raises:
    UserError: no module has this name, or the code of the module raises an exception (the message has the line). Python
      itself has the module, or the module is in the current folder, which is not trusted, and a file names it.
  """
  top_name = name.partition('.')[0]
  is_of_python = top_name in sys.stdlib_module_names or '__main__' in name.split('.')
  if not _MODULE.fullmatch(name) or len(name) > _MAX_MODULE_CHARACTERS or is_of_python:
    raise UserError(f'{name[:60]!r}: expected the name of a Python module, and not of one that Python itself has. '
                    'Rename it.')
  here = os.getcwd()
  is_in_current_folder = any(os.path.exists(os.path.join(here, path)) for path in (top_name, f'{top_name}.py'))
  if from_command_line and is_in_current_folder:
    trust_folder(here)
  try:
    with _with_trusted_path():
      return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name is None or not f'{name}.'.startswith(f'{error.name}.'):  # the module itself imports a missing one
      raise _failed_import(name, error) from error
    searched = ' and in '.join(['among the installed packages', *_trusted_folders])
    if is_in_current_folder and os.path.realpath(here) not in map(os.path.realpath, _trusted_folders):
      raise UserError(f'{name}: expected a Python module that is installed, or beside a config that the command line '
                      f'names, got one of the current folder, {here}, which was not run, because a file names it. It '
                      f'was looked for {searched}. If you trust this folder, add --allow_code.') from None
    raise UserError(f'{name}: expected a Python module, got none. It was looked for {searched}. Put '
                    f'{name.replace(".", "/")}.py beside the config of --config=FILE.py, or in the current folder and '
                    'add --allow_code.') from None
  except UserError:
    raise
  except Exception as error:  # a person's own code may raise any exception
    raise _failed_import(name, error) from error


@contextlib.contextmanager
def _with_trusted_path() -> Iterator[None]:
  """Removes the current folder from `sys.path` during an import, unless it is trusted.

  Folders that the imported module adds to `sys.path` stay there.
  """
  before = sys.path[:]
  here = os.getcwd()
  if not is_trusted_folder(here):
    sys.path[:] = _sys_path_without(here)
    importlib.invalidate_caches()
  try:
    yield
  finally:
    sys.path[:] = [*before, *(folder for folder in sys.path if folder not in before)]


def _sys_path_without(folder: str) -> list[str]:
  """Returns `sys.path` without a folder, also where a link names the folder, and without '' (the current folder)."""
  return [path for path in sys.path if path and os.path.realpath(path) != os.path.realpath(folder)]


def modules_in(text: str) -> list[str]:
  """Returns the words in a text that may name modules: `mine` in `mine:x`, `mix` and `mine` in `mix:0.5*mine:x`."""
  return _MODULE_IN_TEXT.findall(text)


def note_command_line(text: str) -> None:
  """Notes the modules that a text of the command line names, such as `mine` in `data.source=mine:x`.

  A source is opened later, by its name in the config; `is_from_command_line` then returns whether it was noted here.
  """
  _command_line_modules.update(name.partition('.')[0] for name in modules_in(text))


def is_from_command_line(name: str) -> bool:
  """Returns whether a text that was given to `note_command_line` names this module."""
  return name.partition('.')[0] in _command_line_modules


def is_trusted_folder(folder: str) -> bool:
  """Returns whether all modules of a folder may be run.

  They may be run if the folder was given to `trust_folder`, or has this package or installed packages. In `sys.path`,
  Python's standard library precedes the folders of installed packages, and follows the current folder.
  """
  standard = os.path.dirname(os.__file__)
  installed = sys.path[sys.path.index(standard):] if standard in sys.path else []
  trusted = filter(None, [*_trusted_folders, str(_PACKAGE.parent), *installed])
  return os.path.realpath(folder) in map(os.path.realpath, trusted)


def leave_current_folder() -> None:
  """Removes the current folder from the module paths of this process and of its children, unless it is trusted."""
  here = os.getcwd()  # `python -m` puts this folder first, so that a stranger's file could replace a package
  if not is_trusted_folder(here):
    sys.path[:] = _sys_path_without(here)
    os.environ['PYTHONSAFEPATH'] = '1'


def trust_folder(folder: str | os.PathLike[str]) -> None:
  """Makes a folder that the person has named trusted, and adds it at the end of `sys.path`."""
  path = os.path.abspath(folder)
  if path not in sys.path:
    sys.path.append(path)
    importlib.invalidate_caches()
  if path not in _trusted_folders:
    _trusted_folders.append(path)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
  """Returns an environment in which child processes of this program find the same modules."""
  return {**environ, _TRUSTED_BY_PARENT: os.pathsep.join(_trusted_folders)}


def is_own_type(cls: type) -> bool:
  """Returns whether a class is a person's own, and not a class of this package."""
  return cls.__module__.partition('.')[0] != 'vit_jax'


def type_name(cls: type) -> str:
  """Returns the name of a settings class in files: `Mae`, or `module:Class` for a person's own class."""
  return f'{cls.__module__}:{cls.__qualname__}' if is_own_type(cls) else cls.__name__


def is_own_file(file: str) -> bool:
  """Returns whether a file is a person's own: below a trusted folder, and not part of this or an installed package."""
  path = pathlib.Path(file)
  return (any(path.is_relative_to(folder) for folder in _trusted_folders) and 'site-packages' not in path.parts
          and not path.is_relative_to(_PACKAGE))


def _failed_import(name: str, error: Exception) -> UserError:
  """Returns the error about an exception in the code of a module. The message names the last line in an own file."""
  if isinstance(error, SyntaxError):
    where = f'{error.filename}, line {error.lineno}'
  else:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own_file(frame.filename)]
    where = f'{frames[-1].filename}, line {frames[-1].lineno}' if frames else name
  raised = failures.typed_line(error, is_located=True)
  return UserError(f'{where}: expected a module that can be imported, got {raised}. Correct the error in the module.')


for _folder in filter(None, os.environ.get(_TRUSTED_BY_PARENT, '').split(os.pathsep)):
  trust_folder(_folder)
