"""Kinds of values of flags: how the text of a value is read, what messages expect, and what the help shows.

`commands.py` gives each flag one of these kinds: a constant such as `FILE`, or the result of `whole`, `wholes`,
`choice` or `choices`. `Flag.read` calls `Kind.read` on the text of the command line. If that raises ValueError, it
raises the message `--top: expected a whole number, at least 1, got 'x'`.
"""
from __future__ import annotations

import csv
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from vit_jax.config import searches
from vit_jax.record import storage

T = TypeVar('T')


class Kind(NamedTuple):
  """The type of a flag.

  metavar: stands for the value in the help, such as N.
  expected: describes the value in messages.
  read: converts a text to the value; raises ValueError for others.
  limits: of the value, for the help.
  choices: values that shells complete.
  """
  metavar: str
  expected: str
  read: Callable[[str], Any]
  limits: str = ''
  choices: tuple[str, ...] = ()

  @property
  def is_place(self) -> bool:
    """Whether the value is a path, or several."""
    return self.metavar in ('DIR', 'PATH', 'FILE')


def _checked(convert: Callable[[str], T], is_right: Callable[[T], bool]) -> Callable[[str], T]:
  """Returns a function that converts a text, and raises ValueError if the value is not right."""
  def read(text: str) -> T:
    value = convert(text)
    if not is_right(value):
      raise ValueError(text)
    return value
  return read


def whole(low: int, high: int = 2**31 - 1) -> Kind:
  """Returns the kind of a whole number from `low` to `high`."""
  def read(text: str) -> int:
    if not re.fullmatch(r' *[0-9]{1,12} *', text, re.ASCII) or not low <= int(text) <= high:
      raise ValueError(text)
    return int(text)
  limits = f'{low:,} to {high:,}' if high < 2**31 - 1 else f'at least {low:,}'
  return Kind('N', f'a whole number, {limits}', read, limits)


def wholes(low: int) -> Kind:
  """Returns the kind of whole numbers of at least `low`, separated by commas."""
  each = whole(low)
  return Kind('N,N,…', f'whole numbers with commas, each {each.limits}',
              lambda text: [each.read(part) for part in text.split(',')], f'each {each.limits}')


def choice(*names: str) -> Kind:
  """Returns the kind of one of several names."""
  return Kind(f'{{{",".join(names)}}}', f'one of {", ".join(names)}', _checked(str, lambda text: text in names), '',
              names)


def choices(*names: str) -> Kind:
  """Returns the kind of several of some names, separated by commas."""
  each = choice(*names)
  return Kind('A,B,…', f'some of {", ".join(names)}, with commas',
              lambda text: [each.read(part) for part in text.split(',')], '', names)


def _paths(text: str) -> dict[str, str]:
  """Reads paths by name: `images=/data/a,weights=~/b`."""
  pairs = [part.partition('=') for part in text.split(',')]
  if not all(name and path for name, _, path in pairs) or len({name.strip() for name, _, _ in pairs}) < len(pairs):
    raise ValueError(text)
  return {name.strip(): storage.expand_home(path) for name, _, path in pairs}


def _count(text: str) -> float:
  """Reads a number of parameters: `30M` is 30 million."""
  factor = {'K': 1e3, 'M': 1e6, 'B': 1e9}.get(text[-1:].upper())
  return NUMBER.read(text[:-1]) * factor if factor else NUMBER.read(text)


def _names(text: str) -> list[str]:
  """Splits names at commas; a name in double quotes may contain commas."""
  rows = csv.reader([text], skipinitialspace=True, strict=True)
  try:
    return [name.strip() for row in rows for name in row if name.strip()]
  except csv.Error as error:
    raise ValueError(str(error)) from None


RUNNERS = ('DirectRunner', 'DataflowRunner', 'FlinkRunner', 'SparkRunner', 'PortableRunner', 'PrismRunner')
RUNNER = Kind('NAME', f'one of {", ".join(RUNNERS)}, or another runner as MODULE.CLASS',
              _checked(str, lambda text: '.' in text or text.lower() in map(str.lower, RUNNERS)), '', RUNNERS)
BLOCKS = Kind('N,N,…', 'block numbers with commas, such as -4,-1',  # 0 is the number of no block
              _checked(lambda text: [int(part) if re.fullmatch(r' *-?[0-9]{1,6} *', part, re.ASCII) else 0
                                     for part in text.split(',')], all))
TEXT = Kind('TEXT', 'a value', str)
NAMES = Kind('A,B,…', 'names with commas', _checked(_names, bool))
PATHS = Kind('NAME=PATH,…', 'names with paths, NAME=PATH with commas', _paths)
NUMBER = Kind('X', 'a number, at least 0', _checked(float, lambda x: 0. <= x < float('inf')), 'at least 0')
SHARE = Kind('X', 'a number, 0 to below 1', _checked(float, lambda x: 0. <= x < 1.), '0 to below 1')
COUNT = Kind('N', 'a number of parameters such as 30M or 1.2B', _count, 'such as 30M or 1.2B')
SHARE_OF = Kind('I/N', 'a task and the number of tasks, such as 0/8',
                _checked(lambda text: tuple(map(int, text.split('/'))), lambda x: len(x) == 2 and 0 <= x[0] < x[1]),
                'such as 0/8')
SEARCH = Kind('METHOD', searches.METHODS, searches.parse)
GLOB = Kind('GLOB', 'a pattern such as *b16*', str)
FILE = Kind('FILE', 'a file', storage.expand_home)
LOCAL = Kind('PATH', 'a path on this machine', lambda text: pathlib.Path(
    storage.open_path(_checked(str, storage.is_local)(text))))
STORED = Kind('DIR', 'a directory on this machine or on gs://', storage.open_path)
SEVERAL = Kind('DIR', 'directories with commas',
               lambda text: [storage.open_path(_checked(str, bool)(part)) for part in text.split(',')])
