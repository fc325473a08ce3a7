"""Runs a config that is a Python file: finds its `get_config`, and turns exceptions in it into messages.

A message names the file and the line of the person's own code. A config may import modules beside it, as a script may.
"""
from __future__ import annotations

import contextlib
import inspect
import linecache
import pathlib
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

from vit_jax.config.schema.checks import UnknownSetting
from vit_jax.core import failures, implementation
from vit_jax.core.errors import TemporaryError, UserError

MODULE = 'vit_jax_config'
"""Name under which the file of a config is imported; its dataclasses look for their module there."""


def run(path: pathlib.Path, arguments: str | None) -> Any:
  """Returns what `get_config()` of a Python file returns, or `get_config(arguments)`.

  Args:
    path: of the file.
    arguments: what stands behind the colon of `--config=FILE:ARGUMENTS`; None = there is no colon.

  Raises:
    UserError: the file cannot be read or run, has no `get_config`, or does not take these arguments.
  """
  module = _load(path)
  get_config = getattr(module, 'get_config', None)
  if not callable(get_config):
    raise UserError(f'{path}: expected a function get_config() that returns a vit_jax.config.schema.Config, got none. '
                    'Add one; configs/digits.py is an example.')
  given = _arguments(path, get_config, arguments)
  with explained(path):
    return get_config(*given)


@contextlib.contextmanager
def explained(path: pathlib.Path) -> Iterator[None]:
  """Raises UserError with the line of the person's own code in place of what this code raises, also as a decorator."""
  try:
    yield
  except UnknownSetting as error:
    raise _located(path, error, str(error)) from None
  except (UserError, TemporaryError):
    raise
  except (Exception, SystemExit) as error:  # code of the person may raise anything
    wrong = _located(path, error, f'expected a config that runs, got {failures.typed_line(error, is_located=True)}.')
    raise failures.error_class(error)(str(wrong)) if isinstance(error, OSError) else wrong from error


def _load(path: pathlib.Path) -> types.ModuleType:
  """Loads the file as a module, without a compiled copy beside it."""
  try:
    text = path.read_bytes()
  except OSError as error:
    raise failures.unreadable(error, str(path)) from error
  implementation.trust_folder(path.parent)
  module = types.ModuleType(MODULE)
  module.__file__ = str(path)
  sys.modules[MODULE] = module
  linecache.checkcache(str(path))
  with explained(path):
    exec(compile(text, str(path), 'exec', dont_inherit=True), module.__dict__)
  return module


def _arguments(path: pathlib.Path, get_config: Any, arguments: str | None) -> tuple[str, ...]:
  """Returns what `get_config` is called with."""
  try:
    parameters = list(inspect.signature(get_config).parameters.values())
  except (TypeError, ValueError):
    return () if arguments is None else (arguments,)
  positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY and p.kind is not p.VAR_KEYWORD]
  if arguments is not None and not positional:
    if not arguments:
      return ()
    raise UserError(f'--config: expected {path.stem} alone, as it takes no arguments, got {arguments[:60]!r} behind '
                    f'the colon. Set --config={path.stem}, and single settings by --config.NAME=VALUE.')
  if arguments is None and positional and positional[0].default is inspect.Parameter.empty and (
      positional[0].kind is not inspect.Parameter.VAR_POSITIONAL):
    raise UserError(f'--config={path}: expected arguments after a colon, as get_config({positional[0].name}) takes '
                    f'them, got none. Set --config={path}:{positional[0].name.upper()}.')
  return () if arguments is None else (arguments,)


def _located(path: pathlib.Path, error: BaseException, message: str) -> UserError:
  """Returns an error whose message begins with the line of the file that raised another error.

  It ends with the text of this line.
  """
  def is_persons(file: str) -> bool:
    return file == str(path) or implementation.is_own_file(file)

  file, number, function = str(path), 0, ''
  if isinstance(error, SyntaxError) and error.filename in (None, '<unknown>'):
    number = error.lineno or 0
  elif isinstance(error, SyntaxError) and is_persons(error.filename or ''):
    file, number = error.filename or '', error.lineno or 0
  else:
    for frame in traceback.extract_tb(error.__traceback__):  # the last frame in the person's code counts
      if is_persons(frame.filename):
        file, number, function = frame.filename, frame.lineno or 0, frame.name
  location = file
  if number:
    location += f', line {number}'
  if function not in ('', '<module>'):
    location += f', in {function}'
  code = linecache.getline(file, number).strip()[:120] if number else ''
  return UserError(f'{location}: {message}' + (f'\n    {code}' if code else ''))

