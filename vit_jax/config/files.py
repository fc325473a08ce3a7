"""Configs by name or path: the project's own, which are also listed; a person's file; `config.json` of a run.

`--config=SPEC` names a config: `digits`, `configs/digits.py`, `finetune:B/16,px=224` (with arguments after the colon),
or `runs/digits/config.json`. `find` finds the file of a spec, `read` also reads its config, and `load`, `load_any` and
`load_study` apply overrides, too.
"""
from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vit_jax.config import engine, overrides, python_files, schema, searches
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
  name, *words = spec.split(':')
  path = pathlib.Path(name)
  stem = path.name.removesuffix('.py')
  shipped = next(filter(os.path.isfile, (folder / f'{stem}.py' for folder in folders())), None)
  if shipped and name == shipped.stem:
    return shipped, _joined(words)
  for num_words in range(len(words) + 1):  # a path may hold colons
    file = pathlib.Path(os.path.expanduser(':'.join([name, *words[:num_words]])))
    if os.path.isfile(file):
      return file, _joined(words[num_words:])
  if shipped and path.parent in (pathlib.Path(), pathlib.Path('configs')):
    return shipped, _joined(words)
  known = list_names()
  note = ', which is a directory' if name and os.path.isdir(path) else ''
  raise UserError(f'--config: expected the name of a config or the path of a Python file, got '
                  f'{overrides.shorten(name)!r}{note}. Known: {", ".join(known)}.{globs.nearest(stem, known)}')


def _joined(words: list[str]) -> str | None:
  """Returns the arguments of a config, which `find` has split at colons; None without any."""
  return ':'.join(words) if words else None


def folders() -> list[pathlib.Path]:
  """Returns the folders of the configs of this package: in a checkout, or installed as `vit_jax.configs`."""
  spec = importlib.util.find_spec('vit_jax.configs')
  paths = [*(spec.submodule_search_locations or ())] if spec else []
  in_checkout = pathlib.Path(__file__).resolve().parents[2] / 'configs'
  return [folder for folder in dict.fromkeys([*map(pathlib.Path, paths), in_checkout]) if folder.is_dir()]


def list_names() -> list[str]:
  """Returns the names of the configs of this package."""
  return sorted({path.stem for folder in folders() for path in folder.glob('*.py') if path.stem != '__init__'})


class ConfigFile(NamedTuple):
  """A config of the project."""
  name: str  # for `--config=NAME`
  about: str  # the first line of its docstring
  arguments: tuple[str, ...]  # kinds of the arguments that may follow the name, as in `NAME:B/16,px=224`
  path: pathlib.Path  # of its file


def list_configs(pattern: str = '*') -> list[ConfigFile]:
  """Returns the configs of this package whose names match a pattern such as `*i1k`. They are not run.

  Without a match, the list is empty and a warning names the most similar ones.
  """
  configs = [_describe(name) for name in list_names() if globs.matches(name, pattern)]
  if not configs:
    warnings.warn(f'list_configs: {globs.no_match(pattern, list_names())}', stacklevel=2)
  return configs


def _describe(name: str) -> ConfigFile:
  """Reads the docstring of a config, and the keywords with which the config calls `parse_arg`, such as `px`."""
  path, _ = find(name)
  tree = ast.parse(path.read_text(encoding='utf-8'))
  arguments: dict[str, None] = {}  # an ordered set
  for node in ast.walk(tree):
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition('.')[2] == 'parse_arg':
      arguments |= {keyword.arg: None for keyword in node.keywords if keyword.arg}
  return ConfigFile(name, (ast.get_docstring(tree) or '').partition('\n')[0], tuple(arguments), path)


def load(spec: str, changes: list[str], *, models: engine.Models | None = None) -> schema.Config:
  """Loads the config of a file, with overrides applied.

  Args:
    spec: name or path, with `:arguments`; or the path of a run's `config.json`.
    changes: overrides, `PATH=VALUE` each (`overrides.py`).
    models: sizes of models by name, such as `recipes.sizes.model`.

  Raises:
    UserError: lists every unknown name and every value that cannot be read.
  """
  config = read(spec, models=models)
  if isinstance(config, schema.Study):
    raise UserError(f'--config: expected a config of one run, got {spec}, a study of several. Use vit-jax study.')
  return overrides.changed({'': config}, changes, models=models)['']


def load_any(spec: str, changes: list[str], *, models: engine.Models | None = None) -> schema.Config | schema.Study:
  """Loads what a file has: the config of a run, as `load` does, or a study, as `load_study` does."""
  config_or_study = read(spec, models=models)
  if isinstance(config_or_study, schema.Study):
    return _changed(config_or_study, changes, models)
  return overrides.changed({'': config_or_study}, changes, models=models)['']


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
  if study.search:
    study = searches.expanded(study, changes, models=models)
  else:
    study = dataclasses.replace(study, runs=overrides.changed(study.runs, changes, models=models))
  return dataclasses.replace(study, then=tuple(
      functools.partial(_run_stage, stage=stage, study_name=study.name, changes=changes, models=models)
      for stage in study.then))


def _run_stage(results: schema.Results, *, stage: Callable[[schema.Results], dict[str, schema.Config]],
               study_name: str, changes: list[str], models: engine.Models | None) -> dict[str, schema.Config]:
  """Returns the runs that a stage of a study makes from results, with overrides applied to each."""
  runs = stage(results)
  _check_study(schema.Study(runs=runs), f'then of {study_name}')
  return overrides.changed(runs, changes, models=models)


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
  returned = python_files.run(path, arguments)
  if _is_config_dict(returned):
    try:
      return engine.read(_plain(returned), models=models)
    except UserError as error:
      raise UserError(f'{path}: {error}') from None
  if isinstance(returned, schema.Study):
    returned = _complete_study(returned, path, models)
  if not isinstance(returned, schema.Config | schema.Study):
    raise UserError(f'{path}: expected a vit_jax.config.schema.Config or Study, or an ml_collections.ConfigDict, from '
                    f'get_config(), got {type(returned).__name__}. Return one of these.')
  for config in returned.runs.values() if isinstance(returned, schema.Study) else [returned]:
    for prefix, part in ranges.walk(config):
      if type(part).__module__ == python_files.MODULE:  # a run could not read its config again
        raise UserError(f'{path}: expected settings classes from modules, got {type(part).__name__} of '
                        f'{prefix.rstrip(".")}, which this file defines. Move it to a file beside this one, and import '
                        'it here.')
  return returned


def _complete_study(study: schema.Study, path: pathlib.Path, models: engine.Models | None) -> schema.Study:
  """Returns a study of a file with the runs of its search, and with errors that name the line of its functions."""
  _check_study(study, str(path))
  if study.search and study.runs:
    raise UserError(f'{path}: expected a study with runs or with a search, got both. Remove one of them.')
  explained = python_files.explained(path)
  return dataclasses.replace(
      searches.expanded(study, models=models), then=tuple(map(explained, study.then)),
      table=study.table and explained(study.table), curves=study.curves and explained(study.curves))


def _check_study(study: schema.Study, where: str) -> None:
  """Raises UserError, which begins with `where`, if a value of a study is not of the type of its setting."""
  if problems := [f'  {problem}' for problem in ranges.problems(study)]:
    raise UserError('\n'.join([f'{where}: expected a study, got problems:', *problems, 'Correct these values.']))


def _is_config_dict(value: Any) -> bool:
  """Returns whether a value is a ConfigDict, whose package is imported only by files that use it."""
  package = sys.modules.get('ml_collections')
  return package is not None and isinstance(value, package.ConfigDict)


def _plain(value: Any) -> Any:
  """Converts a ConfigDict to nested dicts and lists."""
  if _is_config_dict(value) or isinstance(value, Mapping):
    return {name: _plain(item) for name, item in value.items()}
  return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def known_settings(spec: str) -> list[str]:
  """Returns the names of the settings of a config, or of the default one if there is no config of this name."""
  try:
    configs = list(load_study(spec, []).runs.values())
  except UserError:
    configs = [schema.Config()]
  return list(dict.fromkeys(setting.name for config in configs for setting in engine.fields(config)))
