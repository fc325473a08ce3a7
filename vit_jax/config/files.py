"""From the command line to a typed config: finds the file, checks every override, and only then parses.

absl stops at the first bad flag with a traceback; here all unknown names (with the nearest known one) and
all values that cannot be read are listed together. The values themselves are parsed by `ml_collections`.
"""
from __future__ import annotations

import copy
import dataclasses
import difflib
import enum
import importlib.util
import pathlib
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags

from vit_jax.config import evaluations, json_files, python_files, schema
from vit_jax.core.errors import UserError

RENAMED = {'position_embeddings': 'ablations:positions'}
"""Configs that another one has replaced."""

UNREADABLE = (flags.Error, ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError, MemoryError)
"""What `ml_collections` raises for values that it cannot read; it evaluates tuples as Python."""


def find(spec: str) -> tuple[pathlib.Path, str | None]:
  """The file of `--config=NAME_OR_PATH[:arguments]`, and its arguments; None without a colon.

  `digits`, `digits.py` and `configs/digits.py` all work from anywhere: a path that does not exist is
  looked up among the project's own configs.

  Raises:
    UserError: there is no such file.
  """
  for end in (*(i for i, letter in enumerate(spec) if letter == ':'), len(spec)):  # a path may hold colons
    if _is_file(path := pathlib.Path(spec[:end])):
      return path, spec[end + 1:] if end < len(spec) else None
  name, colon, arguments = spec.partition(':')
  path = pathlib.Path(name)
  own = [folder / f'{path.name.removesuffix(".py")}.py' for folder in folders()]
  if found := next((p for p in own if _is_file(p)), None):
    return found, arguments if colon else None
  stem = path.name.removesuffix('.py')
  if stem in RENAMED:
    raise UserError(f'--config: expected the name of a config, got {stem!r}, which {RENAMED[stem]} has replaced. Use '
                    f'--config={RENAMED[stem]} with --job=study.')
  known = list_names()
  near = difflib.get_close_matches(stem, known, 1)
  hint = f' Did you mean {near[0]}?' if near else ''
  what = 'is a directory' if _is_folder(path) and name else 'is not a config'
  raise UserError(f'--config={shorten(name)!r} {what}.{hint} Known: {", ".join(known)}; or give the path of a Python '
                  'file.')


def _is_file(path: pathlib.Path) -> bool:
  try:
    return path.is_file()
  except (OSError, ValueError):  # a name that is too long, or has a NUL
    return False


def _is_folder(path: pathlib.Path) -> bool:
  try:
    return path.is_dir()
  except (OSError, ValueError):
    return False


def shorten(text: str, most: int = 80) -> str:
  """A text as it is shown in a message."""
  return text if len(text) <= most else f'{text[:most - 20]}… ({len(text):,} characters)'


def folders() -> list[pathlib.Path]:
  """Where the project's own configs are: in a checkout, or installed as `vit_jax.configs`."""
  found = []
  spec = importlib.util.find_spec('vit_jax.configs')
  if spec and spec.submodule_search_locations:
    found += [pathlib.Path(p) for p in spec.submodule_search_locations]
  found.append(pathlib.Path(__file__).resolve().parents[2] / 'configs')
  return [f for f in dict.fromkeys(found) if f.is_dir()]


def list_names() -> list[str]:
  """Names of the project's own configs."""
  return sorted({p.stem for folder in folders() for p in folder.glob('*.py') if p.stem != '__init__'})


def load(spec: str, overrides: list[str]) -> schema.Config:
  """The config of a file with overrides applied.

  Args:
    spec: name or path, with `:arguments`; or the path of a run's `config.json`.
    overrides: `path.to.field=value` texts.

  Raises:
    UserError: lists every unknown name and every value that cannot be read.
  """
  found = read(spec)
  if isinstance(found, schema.Study):
    raise UserError(f'--config={spec} is a study of several runs; want --job=study, or a config of one run')
  return override({'': found}, overrides)['']


def load_study(spec: str, overrides: list[str]) -> schema.Study:
  """The study of a file, with overrides applied to each of its runs; a config of one run is a study of one.

  Raises:
    UserError: lists every unknown name and every value that cannot be read.
  """
  study = read(spec)
  if isinstance(study, schema.Config):
    study = schema.Study(study.name, {'run': study})

  def later(more: Callable[[schema.Results], dict[str, schema.Config]]) -> Callable[
      [schema.Results], dict[str, schema.Config]]:
    return lambda results: override(more(results), overrides)

  return dataclasses.replace(study, runs=override(study.runs, overrides), then=tuple(map(later, study.then)))


def read(spec: str) -> schema.Config | schema.Study:
  """What the file of a config gives, without overrides.

  Raises:
    UserError: it cannot be run, or gives something else.
  """
  path, arguments = find(spec)
  if path.suffix == '.json':
    return json_files.read(path)
  found = python_files.run(path, arguments)
  if not isinstance(found, schema.Config | schema.Study):
    raise UserError(f'{path}: expected a vit_jax.config.schema.Config or Study from get_config(), got '
                    f'{type(found).__name__}.')
  return found


def known_settings(spec: str) -> list[str]:
  """Names of the settings of a config, or of any where there is none of this name, for what a mistake is told."""
  try:
    found = list(load_study(spec, []).runs.values())
  except UserError:
    found = [schema.Config()]
  return list(dict.fromkeys(setting.name for config in found for setting in fields(config)))


def override(configs: Mapping[str, schema.Config], overrides: list[str]) -> dict[str, schema.Config]:
  """Configs by name, with the same overrides applied to each.

  Raises:
    UserError: lists every unknown name and every value that cannot be read, and which of several configs it is for.
  """
  faults: dict[str, list[str]] = {}
  found = {}
  chosen = [one for one in overrides if one.startswith('evals=')]
  for name, config in configs.items():
    wrong = list(_evaluation_faults(config, chosen))
    config = config if wrong else _with_evaluations(config, chosen)
    named = [_by_name(config, one) for one in overrides if one not in chosen]
    wrong += [fault for one in named for fault in _faults(config, one)]
    for fault in wrong:
      faults.setdefault(fault, []).append(name)
    if not wrong:
      found[name] = _parse(config, named) if named else copy.deepcopy(config)
  if faults:
    raise UserError(f'{len(faults)} override{"s" * (len(faults) > 1)} cannot be applied:\n' + '\n'.join(
        f'  {fault}' + (f' (of {", ".join(names)})' if len(names) < len(configs) else '')
        for fault, names in faults.items()))
  return found


def _with_evaluations(config: schema.Config, chosen: list[str]) -> schema.Config:
  """The config with the evaluations that `evals=test,knn` lists: its own by their names, and others by theirs."""
  for one in chosen:
    evals = {name: config.evals.get(name) or evaluations.named(name) for name in _names(one)}
    config = dataclasses.replace(config, evals=evals)
  return config


def _evaluation_faults(config: schema.Config, chosen: list[str]) -> Iterator[str]:
  for one in chosen:
    if unknown := [name for name in _names(one) if name not in config.evals and name not in evaluations.NAMES]:
      yield (f'config.{one}: no such evaluation: {", ".join(unknown)}; there are those of the config, '
             f'{", ".join(config.evals) or "none"}, and {", ".join(evaluations.NAMES)}')


def _names(override: str) -> list[str]:
  return [name.strip() for name in override.partition('=')[2].split(',') if name.strip()]


def _parse(config: schema.Config, overrides: list[str]) -> schema.Config:
  values, argv = flags.FlagValues(), ['vit-jax', *(f'--config.{one}' for one in overrides)]
  holder = config_flags.DEFINE_config_dataclass('config', copy.deepcopy(config), flag_values=values, sys_argv=argv)
  values(argv)
  return holder.value


def _by_name(config: schema.Config, override: str) -> str:
  """The override with a choice spelled as its name, which is what `config_flags` reads, where it gives its value."""
  name, equals, value = override.partition('=')
  now = next((setting.value for setting in fields(config) if setting.name == name), None)
  if isinstance(now, enum.Enum):
    value = next((choice.name for choice in type(now) if choice.value == value.lower()), value)
  return f'{name}{equals}{value}'


def _faults(config: schema.Config, override: str) -> Iterator[str]:
  name, equals, value = override.partition('=')
  known = {setting.name: setting for setting in fields(config)}
  if name not in known:
    near = difflib.get_close_matches(name, known, 1, cutoff=.5)
    yield f'config.{shorten(name)}: no such setting' + (f'; the nearest is config.{near[0]}' if near else '')
  elif not equals:
    yield f'config.{name}: expected a value, got none. Set --config.{name}=VALUE.'
  else:
    now = known[name].value
    try:
      parsed = {setting.name: setting.value for setting in fields(_parse(config, [override]))}
    except UNREADABLE as error:
      yield f'config.{name}: expected {_wanted(now, error)}, got {shorten(value)!r}.'
      return
    if isinstance(now, tuple) and not known[name].is_open and len(parsed[name]) != len(now):
      yield f'config.{name}: expected {_wanted(now, None)}, got {shorten(value)!r}.'


def _wanted(now: Any, error: BaseException | None) -> str:
  match now:
    case enum.Enum():
      return f'one of {", ".join(str(e.value) for e in type(now))}'
    case bool():
      return 'true or false'
    case int():
      return 'a whole number'
    case float():
      return 'a number'
    case tuple():
      return f'{len(now)} values such as {",".join(map(str, now))}' if now else 'values such as 1,2,3'
    case _:
      return f'something else ({error})'


class Setting(NamedTuple):
  """A setting that can be overridden: dotted name, value, and whether it is a tuple of any length."""
  name: str
  value: Any
  is_open: bool


def fields(config: Any, prefix: str = '') -> Iterator[Setting]:
  """Every setting that can be overridden."""
  if isinstance(config, dict):
    items: list[tuple[str, Any, Any]] = [(name, value, None) for name, value in config.items()]
  else:
    items = [(f.name, getattr(config, f.name), f.type) for f in dataclasses.fields(config)]
  for name, value, declared in items:
    if dataclasses.is_dataclass(value) or isinstance(value, dict):
      yield from fields(value, f'{prefix}{name}.')
    else:
      yield Setting(f'{prefix}{name}', value, Ellipsis in typing.get_args(declared))
