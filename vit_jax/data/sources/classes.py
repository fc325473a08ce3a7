"""The classes of a network's outputs, in their order, from a file, and sources whose classes are only some of them.

A line is a class: `n01440764 tench, Tinca tinca`. A folder belongs to it if it is called like the whole line, like its
first word (the WordNet id), or like what follows. Empty lines and lines that begin with # do not count.
"""
from __future__ import annotations

import difflib
import pathlib
from collections.abc import Sequence

import numpy as np

from vit_jax.core.errors import UserError
from vit_jax.data.source import Source
from vit_jax.data.sources.mixture import Relabelled


def read(path: str, *, said: str = 'data.classes') -> tuple[str, ...]:
  """The classes that a file lists, in order; `said` is the setting or flag that a person named it by.

  Raises:
    UserError: it cannot be read, lists none, or one twice.
  """
  try:
    text = pathlib.Path(path).expanduser().read_text()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'{said}={path} cannot be read: {getattr(error, "strerror", None) or error}') from error
  names = tuple(line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith('#'))
  twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
  if twice or not names:
    raise UserError(f'{said}={path} ' + (f'lists {", ".join(twice[:5])} twice' if twice else 'lists no class')
                    + '; want a line for each class, in the order of the outputs')
  return names


def match(own: Sequence[str], names: Sequence[str], *, where: str) -> tuple[int, ...]:
  """For each of a source's classes its place among `names`.

  Raises:
    UserError: lists classes that are not there, or that could be several.
  """
  places: dict[str, set[int]] = {}
  for i, name in enumerate(names):
    for key in _parts(name):
      places.setdefault(key, set()).add(i)
  whole = {_key(name): i for i, name in enumerate(names)}
  found = [{whole[key]} if (key := _key(name)) in whole else places.get(key, set()) for name in own]
  missing = [name for name, at in zip(own, found, strict=True) if not at]
  several = [name for name, at in zip(own, found, strict=True) if len(at) > 1]
  if missing or several:
    faults = [f'{len(missing)} of its {len(own)} classes are not there: {_some(missing)}'] if missing else []
    faults += [f'{len(several)} could be several: {_some(several)}'] if several else []
    raise UserError(f'the classes of the data do not match {where}: ' + '; '.join(faults)
                    + f'. It has {len(names)} lines such as {names[0]!r}; want names of folders that are whole lines, '
                    'their first words, or what follows these')
  return tuple(next(iter(at)) for at in found)


def find(names: Sequence[str], named: int | str, *, count: int) -> int:
  """The number of one class, that a person gives by number or by name: as folders are matched, or a synonym alone.

  Args:
    names: of the classes, or () where they are not known.
    named: a number from 0, or a name: the whole of it is looked for first.
    count: how many classes there are.

  Raises:
    UserError: there is no such class, or there are several.
  """
  if isinstance(named, int) or named.isdecimal():
    if 0 <= int(named) < count:
      return int(named)
    raise UserError(f'class {named}: the network has {count}; want 0 to {count - 1}')
  wanted = _key(named)
  called = [_parts(name) | {_key(one) for one in name.partition(' ')[2].split(',')} |
            {_key(one) for one in name.split(',')} for name in names]
  found = ([i for i, name in enumerate(names) if _key(name) == wanted]
           or [i for i, parts in enumerate(called) if wanted in parts])
  if len(found) == 1:
    return found[0]
  shown = ', '.join(f'{i} ({names[i]})' for i in found[:6])
  near = difflib.get_close_matches(wanted, sorted(set().union(*called)), n=3)
  raise UserError(f'{len(found) or "no"} classes are called {named!r}' + (f': {shown}' if shown else '')
                  + '; want a number, or the name of one' + (f', such as {", ".join(near)}' if near else '')
                  + ('' if names else '; these weights have no names, which classes=FILE may give them'))


def _parts(name: str) -> set[str]:
  """What a folder of a class may be called: the whole line, its first word, or what follows."""
  first, _, rest = name.partition(' ')
  return {_key(one) for one in (name, first, rest) if one.strip()}


def _key(name: str) -> str:
  return name.strip().casefold().replace('_', ' ')


def _some(names: Sequence[str]) -> str:
  return ', '.join(names[:6]) + (f' and {len(names) - 6} more' if len(names) > 6 else '')


def renumbered(source: Source, names: tuple[str, ...], *, where: str) -> Source:
  """The source with labels that are places among `names`.

  Raises:
    UserError: a class of it is not there.
  """
  places = np.array(match(source.class_names, names, where=where), np.int32)
  return Relabelled(source, places, tuple(names))
