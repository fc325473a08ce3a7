"""Finds the code that a setting stands for: the objective of `Mae`, the evaluator of `Knn`, a person's own `npz:FILE`.

A settings class names its code in the class attribute `implementation`, as `module:name`; `of` and `make` return it.
The module is imported when it is first used, so that a config can be read without JAX, and a run imports only what its
config names. A settings class in a person's own file names that file, and works as the built-in ones do.

Importing a module runs its code. So the place from which a name comes decides where its module is looked for:

| The name comes from                          | Installed packages, trusted folders | The current folder         |
|----------------------------------------------|-------------------------------------|----------------------------|
| the command line, such as `mine:Turn`        | yes                                 | yes; it is trusted then    |
| a file, such as another person's config.json | yes                                 | only if it is trusted      |

Trusted folders are those that the person has named: the folder of a config in Python (`--config=FILE.py`), and the
current folder after `--allow_code` or after a name on the command line. A name read from a file never makes the current
folder trusted; once the command line has trusted it, all its modules can be imported. Trusted folders are at the end of
`sys.path`, which loader processes get too; other processes get them by `environment`. "Own" is what a person wrote: a
module or a file in a trusted folder, a settings class that is not of this package.
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
_MOST_LETTERS = 200  # of the name of a module
_MODULE_IN_TEXT = re.compile(r'(?:^|[=,]|\*\s*)([^\W\d][\w.]*):')  # mine of data.source=mine:x or mix:0.5* mine:x
_TRUSTED_BY_PARENT = 'VIT_JAX_MODULES'
"""Environment variable with the trusted folders of the parent process."""
own_modules: dict[str, None] = {}
"""Names of a person's own modules whose code is in use, in the order in which it was found: a set with an order."""
_trusted_folders: list[str] = []
"""Folders that the person has named, which this module appended to `sys.path`."""
_command_line_modules: set[str] = set()
"""Modules that the command line names: `mine` for `mine:x` and for `mine.deep:x`."""


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
  fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
  code = of(settings)
  if is_own_type(type(settings)):
    try:
      inspect.signature(code).bind(**fields, **context)
    except TypeError as error:
      given = ', '.join([*fields, *context])
      raise UserError(f'{type(settings).implementation}: expected code that is called with {given}, got one with other '
                      f'arguments ({error}). Change its arguments.') from None
  return code(**fields, **context)


def load(name: str, *, from_command_line: bool = False) -> Any:
  """Returns the object that `module:name` names.

  Args:
    name: of the object.
    from_command_line: whether the name comes from the command line; then its module may be in the current folder.

  Raises:
    UserError: the module is missing, cannot be imported, or does not have the name.
  """
  path, _, attribute = name.partition(':')
  module = import_module(path, from_command_line=from_command_line)
  if not hasattr(module, attribute):
    todo = globs.nearest(attribute, vars(module)) or f' Define it there, or correct {name!r}.'
    raise UserError(f'{path}: expected {attribute!r} in this module, {getattr(module, "__file__", "built in")}, got '
                    f'none.{todo}')
  if is_own_file(getattr(module, '__file__', None) or ''):
    own_modules[path] = None
  return getattr(module, attribute)


def import_module(name: str, *, from_command_line: bool = False) -> types.ModuleType:
  """Imports a module, which may be a person's own file.

  Args:
    name: of the module, with dots.
    from_command_line: whether the name comes from the command line; then the current folder is trusted if it has it.

  Raises:
    UserError: there is no module of this name, or its code raises an exception (the message has the line). Also for a
      module of Python itself, and for one in the current folder if a file names it and the folder is not trusted.
  """
  words, here = name.split('.'), os.getcwd()
  is_of_python = words[0] in sys.stdlib_module_names or '__main__' in words
  if not _MODULE.fullmatch(name) or len(name) > _MOST_LETTERS or is_of_python:
    raise UserError(f'{name[:60]!r}: expected the name of a Python module, and not of one that Python itself has. '
                    'Rename it.')
  is_in_current_folder = any(os.path.exists(os.path.join(here, path)) for path in (words[0], f'{words[0]}.py'))
  if from_command_line and is_in_current_folder:
    trust_folder(here)
  try:
    with _with_trusted_path():
      return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name is None or not f'{name}.'.startswith(f'{error.name}.'):
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
  except Exception as error:  # code of the person may raise anything
    raise _failed_import(name, error) from error


@contextlib.contextmanager
def _with_trusted_path() -> Iterator[None]:
  """Removes the current folder from `sys.path` during an import, unless it is trusted.

  Folders that the imported module adds to `sys.path` stay there.
  """
  before = sys.path[:]
  if not is_trusted_folder(here := os.getcwd()):
    sys.path[:] = _path_without(here)
    importlib.invalidate_caches()
  try:
    yield
  finally:
    sys.path[:] = [*before, *(folder for folder in sys.path if folder not in before)]


def _path_without(folder: str) -> list[str]:
  """Returns `sys.path` without a folder, also under another name of it, and without '', the current folder."""
  return [path for path in sys.path if path and os.path.realpath(path) != os.path.realpath(folder)]


def modules_in(text: str) -> list[str]:
  """Returns the names in a text that may be those of modules: `mine` of `mine:x` and of `mix:0.5*mine:x`."""
  return _MODULE_IN_TEXT.findall(text)


def note_command_line(text: str) -> None:
  """Notes the modules that a text of the command line names, such as `mine` in `data.source=mine:x`.

  A source is opened later, by its name in the config. Then `is_from_command_line` returns whether it was noted here.
  """
  _command_line_modules.update(name.partition('.')[0] for name in modules_in(text))


def is_from_command_line(name: str) -> bool:
  """Returns whether a text that was given to `note_command_line` names this module."""
  return name.partition('.')[0] in _command_line_modules


def is_trusted_folder(folder: str) -> bool:
  """Returns whether all modules of a folder may be run.

  They may if it was given to `trust_folder`, or if it is that of this package or of installed packages: those are in
  `sys.path` from Python's own library on. The current folder is before that library.
  """
  standard = os.path.dirname(os.__file__)
  installed = sys.path[sys.path.index(standard):] if standard in sys.path else []
  trusted = filter(None, [*_trusted_folders, str(_PACKAGE.parent), *installed])
  return os.path.realpath(folder) in map(os.path.realpath, trusted)


def leave_current_folder() -> None:
  """Removes the current folder from the module paths of this process and of its children, unless it is trusted.

  `python -m` puts it first. So a file of another person there would be imported in place of a package.
  """
  if not is_trusted_folder(here := os.getcwd()):
    sys.path[:] = _path_without(here)
    os.environ['PYTHONSAFEPATH'] = '1'


def trust_folder(folder: str | os.PathLike[str]) -> None:
  """Adds a folder that the person has named at the end of `sys.path`, and trusts it."""
  path = os.path.abspath(folder)
  if path not in sys.path:
    sys.path.append(path)
    importlib.invalidate_caches()
  if path not in _trusted_folders:
    _trusted_folders.append(path)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
  """Returns an environment in which child processes of this program find the same modules."""
  return {**environ, _TRUSTED_BY_PARENT: os.pathsep.join(_trusted_folders)}


def is_own_type(kind: type) -> bool:
  """Returns whether a class is a person's own, and not one of this package."""
  return kind.__module__.partition('.')[0] != 'vit_jax'


def type_name(kind: type) -> str:
  """Returns the name of a settings class in files: `Mae`, or `module:Class` of a person's own."""
  return f'{kind.__module__}:{kind.__qualname__}' if is_own_type(kind) else kind.__name__


def is_own_file(file: str) -> bool:
  """Returns whether a file is a person's own: below a trusted folder, and not of this or an installed package."""
  path = pathlib.Path(file)
  return (any(path.is_relative_to(folder) for folder in _trusted_folders) and 'site-packages' not in path.parts
          and not path.is_relative_to(_PACKAGE))


def _failed_import(name: str, error: Exception) -> UserError:
  """Returns the error about an exception in the code of a module; it names the last line in a file of the person."""
  if isinstance(error, SyntaxError):
    where = f'{error.filename}, line {error.lineno}'
  else:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own_file(frame.filename)]
    where = f'{frames[-1].filename}, line {frames[-1].lineno}' if frames else name
  raised = failures.typed_line(error, is_located=True)
  return UserError(f'{where}: expected a module that can be imported, got {raised}. Correct the error in the module.')


for _folder in filter(None, os.environ.get(_TRUSTED_BY_PARENT, '').split(os.pathsep)):
  trust_folder(_folder)
