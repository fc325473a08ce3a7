"""Every setting, the test files that name it, and the configs that set it away from its default.

`python -m tests.options` prints the table.
"""
from __future__ import annotations

import dataclasses
import functools
import inspect
import pathlib
import re
from typing import Any, NamedTuple

from vit_jax.config import files, schema

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Option(NamedTuple):
  """A setting: `Class.field`, and where it is tested and used."""
  name: str
  tests: list[str]
  configs: list[str]


def classes() -> list[type]:
  """The dataclasses of the schema."""
  return [c for _, c in inspect.getmembers(schema, dataclasses.is_dataclass)]


def used() -> dict[str, set[str]]:
  """Settings by `Class.field`, with the configs that set them (by default, or with arguments they show)."""
  found: dict[str, set[str]] = {}
  for name in files.list_names():
    for spec in specs(name):
      _collect(files.load(spec, []), spec, found)
  return found


def specs(name: str) -> list[str]:
  """A config as it is, and with every argument its docstring shows after `configs/NAME.py:`."""
  text = pathlib.Path(files.find(name)).read_text()
  arguments = re.findall(rf'configs/{name}\.py:([\w=./,:-]+)', text)
  kinds = re.search(r'^CHANGES = .*?^\}', text, re.MULTILINE | re.DOTALL)
  arguments += [f'change={key}' for key in re.findall(r"^    '(\w+)'", kinds[0], re.MULTILINE)] if kinds else []
  return [name, *(f'{name}:{a.rstrip(".,:")}' for a in dict.fromkeys(arguments))]


def _collect(value: Any, spec: str, found: dict[str, set[str]]) -> None:
  if isinstance(value, dict | tuple | list):
    for item in value.values() if isinstance(value, dict) else value:
      _collect(item, spec, found)
  if not dataclasses.is_dataclass(value):
    return
  plain = type(value)() if all(f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
                               for f in dataclasses.fields(value)) else None
  for f in dataclasses.fields(value):
    now = getattr(value, f.name)
    if plain is None or now != getattr(plain, f.name):
      found.setdefault(f'{type(value).__name__}.{f.name}', set()).add(spec)
    _collect(now, spec, found)


@functools.cache
def table() -> list[Option]:
  """One row a setting, in the order of the schema."""
  texts = {str(p.relative_to(ROOT)): p.read_text() for p in sorted((ROOT / 'tests').rglob('test_*.py'))}
  uses = used()
  rows = []
  for c in classes():
    for f in dataclasses.fields(c):
      named = [path for path, text in texts.items() if re.search(rf'\b{f.name}\b\s*[=.]|\.{f.name}\b', text)]
      rows.append(Option(f'{c.__name__}.{f.name}', named, sorted(uses.get(f'{c.__name__}.{f.name}', ()))))
  return rows


def main() -> None:
  for row in table():
    tests = ', '.join(p.removeprefix('tests/') for p in row.tests[:3]) or '-'
    configs = ', '.join(row.configs[:3]) or '-'
    print(f'{row.name:<32} | {tests:<90} | {configs}')


if __name__ == '__main__':
  main()
