"""Configs by name or path: the project's own, which are also listed; a person's file; `config.json` of a run."""
from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vit_jax.config import engine, python_files, schema, searches
from vit_jax.config.schema import ranges
from vit_jax.core import globs, implementation
from vit_jax.core.errors import UserError


def find(spec: str) -> tuple[pathlib.Path, str | None]:
  """Finds the file of `--config=NAME_OR_PATH[:arguments]`, and its arguments; None without a colon.

  `digits`, `digits.py` and `configs/digits.py` all work from anywhere: a path below `configs` that does not exist is
  looked up among the project's own configs. A name of these, such as `digits`, is never a file of the current folder.

  Raises:
    UserError: there is no such file.
  """
  name, colon, arguments = spec.partition(':')
  path = pathlib.Path(name)
  own = [folder / f'{path.name.removesuffix(".py")}.py' for folder in folders()]
  shipped = next((one for one in own if _is(one.is_file)), None)
  if shipped and name == shipped.stem:
    return shipped, arguments if colon else None
  for end in (*(i for i, letter in enumerate(spec) if letter == ':'), len(spec)):  # a path may hold colons
    if _is((file := pathlib.Path(os.path.expanduser(spec[:end]))).is_file):
      return file, spec[end + 1:] if end < len(spec) else None
  if shipped and path.parent in (pathlib.Path(), pathlib.Path('configs')):
    return shipped, arguments if colon else None
  known = list_names()
  what = ', which is a directory' if name and _is(path.is_dir) else ''
  raise UserError(f'--config: expected the name of a config or the path of a Python file, got '
                  f'{engine.shorten(name)!r}{what}. Known: {", ".join(known)}.'
                  f'{globs.nearest(path.name.removesuffix(".py"), known)}')


def _is(kind: Callable[[], bool]) -> bool:
  """Returns whether there is a file or folder, as `path.is_file` and `path.is_dir` say; of any text."""
  try:
    return kind()
  except (OSError, ValueError):  # a name that is too long, or has a NUL
    return False


def folders() -> list[pathlib.Path]:
  """Returns the folders of the configs of this package: in a checkout, or installed as `vit_jax.configs`."""
  found = []
  spec = importlib.util.find_spec('vit_jax.configs')
  if spec and spec.submodule_search_locations:
    found += [pathlib.Path(p) for p in spec.submodule_search_locations]
  found.append(pathlib.Path(__file__).resolve().parents[2] / 'configs')
  return [f for f in dict.fromkeys(found) if f.is_dir()]


def list_names() -> list[str]:
  """Returns the names of the configs of this package."""
  return sorted({p.stem for folder in folders() for p in folder.glob('*.py') if p.stem != '__init__'})


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
  """Returns the configs of this package whose names match a pattern such as `*i1k`. They are not run.

  Without a match, the list is empty and a warning names the most similar ones.
  """
  found = []
  for name in list_names():
    if globs.matches(name, pattern):
      path, _ = find(name)
      tree = ast.parse(path.read_text(encoding='utf-8'))
      calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)
               and (getattr(node.func, 'attr', '') or getattr(node.func, 'id', '')) == 'parse_arg']
      arguments = dict.fromkeys(keyword.arg for call in calls for keyword in call.keywords if keyword.arg)
      found.append(ConfigFile(name, (ast.get_docstring(tree) or '').partition('\n')[0], tuple(arguments), path))
  if not found:
    warnings.warn(f'list_configs: {globs.no_match(pattern, list_names())}', stacklevel=2)
  return found


def load(spec: str, changes: list[str], *, models: engine.Models | None = None) -> schema.Config:
  """Loads the config of a file, with overrides applied.

  Args:
    spec: name or path, with `:arguments`; or the path of a run's `config.json`.
    changes: overrides, `PATH=VALUE` each (`engine.py`).
    models: sizes of models by name, such as `recipes.sizes.model`.

  Raises:
    UserError: lists every unknown name and every value that cannot be read.
  """
  found = read(spec, models=models)
  if isinstance(found, schema.Study):
    raise UserError(f'--config: expected a config of one run, got {spec}, a study of several. Use vit-jax study.')
  return engine.changed({'': found}, changes, models=models)['']


def load_any(spec: str, changes: list[str], *, models: engine.Models | None = None) -> schema.Config | schema.Study:
  """Loads what a file has: the config of a run, as `load` does, or a study, as `load_study` does."""
  found = read(spec, models=models)
  if isinstance(found, schema.Study):
    return _changed(found, changes, models)
  return engine.changed({'': found}, changes, models=models)['']


def load_study(spec: str, changes: list[str], *, models: engine.Models | None = None) -> schema.Study:
  """Loads the study of a file, with overrides applied to each of its runs; a config of one run is a study of one.

  Raises:
    UserError: lists every unknown name and every value that cannot be read.
  """
  study = read(spec, models=models)
  if isinstance(study, schema.Config):
    study = schema.Study(study.name, {'run': study})
  return _changed(study, changes, models)


def _changed(study: schema.Study, changes: list[str], models: engine.Models | None) -> schema.Study:
  """Returns a study with overrides applied to each of its runs, and to those that follow from results."""
  def later(more: Callable[[schema.Results], dict[str, schema.Config]]) -> Callable[
      [schema.Results], dict[str, schema.Config]]:
    return lambda results: engine.changed(
        _checked(schema.Study(runs=more(results)), f'then of {study.name}').runs, changes, models=models)

  if study.search:
    study = searches.expanded(study, changes, models=models)
  else:
    study = dataclasses.replace(study, runs=engine.changed(study.runs, changes, models=models))
  return dataclasses.replace(study, then=tuple(map(later, study.then)))


def read(spec: str, *, models: engine.Models | None = None) -> schema.Config | schema.Study:
  """Reads the config of a file, without overrides.

  Raises:
    UserError: it cannot be run, or returns something else.
  """
  path, arguments = find(spec)
  if path.suffix == '.json':
    if arguments is not None:
      raise UserError(f'--config={spec}: expected a path without arguments, as a .json file takes none, got '
                      f':{arguments}. Remove them.')
    return engine.read_file(path)
  implementation.note_command_line(arguments or '')
  found = python_files.run(path, arguments)
  if _is_config_dict(found):
    try:
      return engine.read(_plain(found), models=models)
    except UserError as error:
      raise UserError(f'{path}: {error}') from None
  if not isinstance(found, schema.Config | schema.Study):
    raise UserError(f'{path}: expected a vit_jax.config.schema.Config or Study, or an ml_collections.ConfigDict, from '
                    f'get_config(), got {type(found).__name__}. Return one of these.')
  if isinstance(found, schema.Study):
    _checked(found, str(path))
    if found.search and found.runs:
      raise UserError(f'{path}: expected a study with runs or with a search, got both. Remove one of them.')
    explained = python_files.explained(path)
    found = dataclasses.replace(
        searches.expanded(found, models=models), then=tuple(map(explained, found.then)),
        table=found.table and explained(found.table), curves=found.curves and explained(found.curves))
  for config in found.runs.values() if isinstance(found, schema.Study) else [found]:
    for name, part in ranges.walk(config):
      if type(part).__module__ == python_files.MODULE:  # a run could not read its config again
        raise UserError(f'{path}: expected settings classes from modules, got {type(part).__name__} of '
                        f'{name.rstrip(".")}, which this file defines. Move it to a file beside this one, and import '
                        'it here.')
  return found


def _checked(study: schema.Study, where: str) -> schema.Study:
  """Returns a study. Raises UserError, which begins with `where`, if a value is not of the type of its setting."""
  if wrong := [f'  {problem}' for problem in ranges.problems(study)]:
    raise UserError('\n'.join([f'{where}: expected a study, got problems:', *wrong, 'Correct these values.']))
  return study


def _is_config_dict(value: Any) -> bool:
  """Returns whether a value is a ConfigDict, whose package is imported only by files that use it."""
  package = sys.modules.get('ml_collections')
  return package is not None and isinstance(value, package.ConfigDict)


def _plain(value: Any) -> Any:
  """Converts a ConfigDict to nested dicts and lists."""
  if _is_config_dict(value) or isinstance(value, Mapping):
    return {name: _plain(one) for name, one in value.items()}
  return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def known_settings(spec: str) -> list[str]:
  """Returns the names of the settings of a config, or of the default one if there is no config of this name."""
  try:
    found = list(load_study(spec, []).runs.values())
  except UserError:
    found = [schema.Config()]
  return list(dict.fromkeys(setting.name for config in found for setting in engine.fields(config)))
