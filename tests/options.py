"""Every setting, the test files that name it, and the configs that set it away from its default.

`python -m tests.options` prints the table.
"""
from __future__ import annotations

import ast
import dataclasses
import functools
import pathlib
import re
import typing
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

from vit_jax.config import engine, files, schema
from vit_jax.core.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[1]
MOST_RUNS = 4  # of a study
MOST_VALUES = 8  # of an argument, such as the size of a network

ONLY_WITH: dict[str, Callable[[Any], bool]] = {
    'Schedule.timescale': lambda schedule: schedule.decay is schema.Decay.RSQRT,
    'Schedule.gamma': lambda schedule: schedule.decay in (schema.Decay.STEPS, schema.Decay.EXPONENTIAL),
    'Schedule.every': lambda schedule: schedule.decay is schema.Decay.EXPONENTIAL,
    'Recipe.mix_probability': lambda recipe: bool(recipe.mixup or recipe.cutmix),
    'Recipe.cutmix_share': lambda recipe: bool(recipe.mixup and recipe.cutmix),
    'Recipe.crop_aspect': lambda recipe: recipe.crop is schema.Crop.INCEPTION,
}
"""Settings that are in use, whatever their value, where another one of their part says so."""

OFF = (schema.RandAugment, schema.Jitter, schema.Erase, schema.Views, schema.Sam, schema.EarlyStop, schema.Ramp,
       schema.Pseudo, schema.Lora)
"""Parts that do nothing as they are by default: all settings of one that is switched on are in use."""


class Option(NamedTuple):
  """A setting: `Class.field`, and where it is tested and used."""
  name: str
  tests: list[str]
  configs: list[str]


def classes() -> list[type]:
  """The dataclasses that a config is made of, in the order they are met."""
  found: dict[type, None] = {}

  def walk(declared: Any) -> None:
    for part in typing.get_args(declared):
      walk(part)
    if dataclasses.is_dataclass(declared) and isinstance(declared, type) and declared not in found:
      found[declared] = None
      for f in dataclasses.fields(declared):
        walk(f.type)

  walk(schema.Config)
  return list(found)


@functools.cache
def owner(kind: type, field: str) -> type:
  """The class that a setting is listed under: the one that all which have it are made from."""
  return next(c for c in reversed(kind.__mro__) if field in getattr(c, '__dataclass_fields__', {}))


def used() -> dict[str, set[str]]:
  """Settings by `Class.field`, with the configs and studies that use them (by default, or with arguments they show).

  A setting is used where it is not at its default; where the docstring of a config shows an override of it; and where a
  run has a part of its class and runs are without one by default: an optimizer, a task, or a part that is switched on.
  What the code makes itself counts for an optimizer too, such as the linear probe's LARS. Of a study with very many
  runs, which differ in a rate or a seed, four are looked at.
  """
  found = _made_by_code()
  for name in files.list_names():
    for spec in specs(name):
      try:
        runs = runs_of(spec)
      except UserError:  # an argument that goes only with others
        continue
      for config in list(runs.values())[::-(-len(runs) // MOST_RUNS)]:
        _collect(config, spec, found)
      for option in shown_overrides(name, next(iter(runs.values()))):
        found.setdefault(option, set()).add(name)
  return found


def runs_of(spec: str) -> dict[str, schema.Config]:
  """The runs of a config or study, as its file makes them."""
  found = files.read(spec)
  return found.runs if isinstance(found, schema.Study) else {'run': found}


def _made_by_code() -> dict[str, set[str]]:
  found: dict[str, set[str]] = {}
  kinds = {kind.__name__: kind for kind in engine.kinds(schema.AnyOptimizer).values()}
  for path in sorted((ROOT / 'vit_jax').rglob('*.py')):
    where = str(path.relative_to(ROOT / 'vit_jax'))
    made = set(re.findall(r'\bschema\.(\w+)\(\w', path.read_text())) & kinds.keys()
    for name in made if not where.startswith('config') else ():
      for f in dataclasses.fields(kinds[name]):
        if owner(kinds[name], f.name) is kinds[name]:
          found.setdefault(f'{name}.{f.name}', set()).add(where)
  return found


def specs(name: str) -> list[str]:
  """A config as it is, with every argument its docstring shows after `configs/NAME.py:`, and with values of each of
  its arguments."""
  text = files.find(name)[0].read_text()
  shown = re.findall(rf'configs/{name}\.py:([\w=./,:-]+)', text)
  return [name, *dict.fromkeys(f'{name}:{a.rstrip(".,:")}' for a in [*shown, *choices(name)])]


def shown_overrides(name: str, config: schema.Config) -> set[str]:
  """Settings by `Class.field` that the docstring of a config shows how to override, as far as this run has them."""
  doc = ast.get_docstring(ast.parse(files.find(name)[0].read_text())) or ''
  found = set()
  for path in re.findall(r'--config\.([a-z_0-9.]+)=', doc):
    value: Any = config
    for part in path.split('.'):
      if part not in value if isinstance(value, dict) else not hasattr(value, part):
        break  # with another argument the config makes a run of another kind
      if dataclasses.is_dataclass(value):
        found.add(f'{owner(type(value), part).__name__}.{part}')
      value = value[part] if isinstance(value, dict) else getattr(value, part)
  return found


def choices(name: str) -> list[str]:
  """The arguments of a config that have a list of values, each with its values but the default, a few of very many."""
  kinds: dict[str, tuple[str, ...]] = {}

  def spy(text: str, **known: tuple[str, ...]) -> dict[str, str]:
    kinds.update(known)
    return read(text, **known)

  read = schema.parse_arg
  with mock.patch.object(schema, 'parse_arg', spy):
    files.read(name)
  return [f'{kind}={value}' for kind, values in kinds.items() for value in values[1::1 + len(values) // MOST_VALUES]]


NAMES: dict[str, frozenset[str]] = {}
"""Settings in use in a part of a config, by how the part is written: most runs have most parts in common."""


def _collect(value: Any, spec: str, found: dict[str, set[str]]) -> None:
  for name in _names(value):
    found.setdefault(name, set()).add(spec)


def _names(value: Any) -> frozenset[str]:
  """Settings by `Class.field` that are in use in a value and its parts."""
  if isinstance(value, dict | tuple | list):
    return frozenset().union(*map(_names, value.values() if isinstance(value, dict) else value))
  if not dataclasses.is_dataclass(value):
    return frozenset()
  if isinstance(value, schema.Config) or (key := repr(value)) not in NAMES:
    fields = dataclasses.fields(value)
    own = frozenset(f'{owner(type(value), f.name).__name__}.{f.name}' for f in fields if _is_used(value, f))
    names = own.union(*(_names(getattr(value, f.name)) for f in fields))
    if isinstance(value, schema.Config):
      return names
    NAMES[key] = names
  return NAMES[key]


def _is_used(value: Any, field: dataclasses.Field[Any]) -> bool:
  kind, now = type(value), getattr(value, field.name)
  own = owner(kind, field.name)
  if ONLY_WITH.get(f'{own.__name__}.{field.name}', lambda part: False)(value):
    return True
  if kind in OFF:
    return now != getattr(kind(), field.name) or value != kind()
  if own is kind and kind is not schema.PathRule and kind not in usual():
    return True
  if field.default_factory is not dataclasses.MISSING:
    return now != _default(kind, field.name)
  return field.default is dataclasses.MISSING or now != field.default


@functools.cache
def _default(kind: type, name: str) -> Any:
  return next(f.default_factory for f in dataclasses.fields(kind) if f.name == name)()


@functools.cache
def usual() -> frozenset[type]:
  """The classes of the parts that a run has by default."""
  found: set[type] = set()

  def walk(value: Any) -> None:
    if dataclasses.is_dataclass(value):
      found.add(type(value))
      for f in dataclasses.fields(value):
        walk(getattr(value, f.name))

  walk(schema.Config(evals={}))
  return frozenset(found)


def _set_or_read(text: str) -> set[str]:
  """Words before `=` or a dot, and after a dot."""
  return {*re.findall(r'(\w+)\s*[=.]', text), *re.findall(r'\.(\w+)', text)}


@functools.cache
def named() -> dict[str, list[str]]:
  """Every setting as `Class.field`, in the order of the schema, and the test files that name it."""
  words = {str(p.relative_to(ROOT)): _set_or_read(p.read_text()) for p in sorted((ROOT / 'tests').rglob('test_*.py'))}
  return {f'{owner(kind, f.name).__name__}.{f.name}': [path for path, found in words.items() if f.name in found]
          for kind in classes() for f in dataclasses.fields(kind)}


@functools.cache
def table() -> list[Option]:
  """One row a setting, in the order of the schema."""
  uses = used()
  return [Option(name, tests, sorted(uses.get(name, ()), key=lambda spec: (len(spec), spec)))
          for name, tests in named().items()]


def main() -> None:
  for row in table():
    tests = ', '.join(p.removeprefix('tests/') for p in row.tests[:3]) or '-'
    configs = ', '.join(row.configs[:3]) or '-'
    print(f'{row.name:<32} | {tests:<90} | {configs}')


if __name__ == '__main__':
  main()
