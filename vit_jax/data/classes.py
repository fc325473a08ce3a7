"""The classes of a network's outputs, in their order, from a file, and sources whose classes are only some of them.

A line is a class: `n01440764 tench, Tinca tinca`. A folder belongs to it if it is called like the whole line, like its
first word (the WordNet id), or like what follows. Empty lines and lines that begin with # do not count.
"""
from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np

from vit_jax.core.types import UserError
from vit_jax.data.mixture import Relabelled
from vit_jax.data.sources import Source


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
    first, _, rest = name.partition(' ')
    for key in {name, first, rest.strip()} - {''}:
      places.setdefault(_key(key), set()).add(i)
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
