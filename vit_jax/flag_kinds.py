"""Kinds of values of flags: how a text is read, what is expected, and what the help shows."""
from __future__ import annotations

import csv
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from vit_jax.config import searches
from vit_jax.record import storage


class Kind(NamedTuple):
  """The type of a flag: `read` turns its text into a value, or raises ValueError where it is not `expected`.

  `limits` is shown in the help.
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


def whole(low: int, high: int = 2**31 - 1) -> Kind:
  """A whole number within limits."""
  def read(text: str) -> int:
    if not re.fullmatch(r' *[0-9]{1,12} *', text, re.ASCII) or not low <= int(text) <= high:
      raise ValueError
    return int(text)
  limits = f'{low:,} to {high:,}' if high < 2**31 - 1 else f'at least {low:,}'
  return Kind('N', f'a whole number, {limits}', read, limits)


def wholes(low: int, high: int = 2**31 - 1) -> Kind:
  """Whole numbers within limits, separated by commas."""
  one = whole(low, high)
  return Kind('N,N,…', f'whole numbers with commas, each {one.limits}',
              lambda text: [one.read(part) for part in text.split(',')], f'each {one.limits}')


def choice(*names: str) -> Kind:
  """One of several names."""
  def read(text: str) -> str:
    if text not in names:
      raise ValueError
    return text
  return Kind(f'{{{",".join(names)}}}', f'one of {", ".join(names)}', read, '', names)


def choices(*names: str) -> Kind:
  """Several of some names, separated by commas."""
  one = choice(*names)
  return Kind('A,B,…', f'some of {", ".join(names)}, with commas', lambda text: [one.read(x) for x in text.split(',')],
              '', names)


def _share(text: str) -> float:
  if not 0. <= float(text) < 1.:
    raise ValueError
  return float(text)


def _read_paths(text: str) -> dict[str, str]:
  pairs = [part.partition('=') for part in text.split(',')]
  if not all(name and path for name, _, path in pairs):
    raise ValueError
  return {name.strip(): os.path.expanduser(path) for name, _, path in pairs}


def _read_number(text: str) -> float:
  if not 0. <= (found := float(text)) < float('inf'):
    raise ValueError
  return found


def _read_count(text: str) -> float:
  factor = {'K': 1e3, 'M': 1e6, 'B': 1e9}.get(text[-1:].upper())
  return _read_number(text[:-1]) * factor if factor else _read_number(text)


def _read_blocks(text: str) -> list[int]:
  found = [int(part) for part in text.split(',') if re.fullmatch(r' *-?[0-9]{1,6} *', part, re.ASCII)]
  if len(found) != text.count(',') + 1 or 0 in found:
    raise ValueError
  return found


def _read_share(text: str) -> tuple[int, int]:
  index, count = (int(part) for part in text.split('/'))
  if not 0 <= index < count:
    raise ValueError
  return index, count


def _local_path(text: str) -> pathlib.Path:
  if not storage.is_local(text):
    raise ValueError
  return pathlib.Path(storage.open_path(text))


def _names(text: str) -> list[str]:
  """Splits names at commas; those inside of double quotes are part of a name."""
  rows = csv.reader([text], skipinitialspace=True, strict=True)
  try:
    return [name.strip() for row in rows for name in row if name.strip()]
  except csv.Error as error:
    raise ValueError(str(error)) from None


def _read_runner(text: str) -> str:
  if '.' not in text and text.lower() not in map(str.lower, RUNNERS):
    raise ValueError
  return text


RUNNERS = ('DirectRunner', 'DataflowRunner', 'FlinkRunner', 'SparkRunner', 'PortableRunner', 'PrismRunner')
RUNNER = Kind('NAME', f'one of {", ".join(RUNNERS)}, or another runner as MODULE.CLASS', _read_runner, '', RUNNERS)
BLOCKS = Kind('N,N,…', 'block numbers with commas, such as -4,-1', _read_blocks)
TEXT = Kind('TEXT', 'a value', str)
NAMES = Kind('A,B,…', 'names with commas', _names)
PATHS = Kind('NAME=PATH,…', 'names with paths, NAME=PATH with commas', _read_paths)
NUMBER = Kind('X', 'a number, at least 0', _read_number, 'at least 0')
SHARE = Kind('X', 'a number, 0 to below 1', _share, '0 to below 1')
COUNT = Kind('N', 'a number of parameters such as 30M or 1.2B', _read_count, 'such as 30M or 1.2B')
SHARE_OF = Kind('I/N', 'a task and the number of tasks, such as 0/8', _read_share, 'such as 0/8')
SEARCH = Kind('METHOD', searches.METHODS, searches.parse)
GLOB = Kind('GLOB', 'a pattern such as *b16*', str)
FILE = Kind('FILE', 'a file', os.path.expanduser)
LOCAL = Kind('PATH', 'a path on this machine', _local_path)
STORED = Kind('DIR', 'a directory on this machine or on gs://', storage.open_path)
SEVERAL = Kind('DIR', 'directories with commas', lambda text: [storage.open_path(part) for part in text.split(',')])
