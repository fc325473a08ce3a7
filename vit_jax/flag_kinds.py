"""The kinds of values that flags have: how a text becomes a value, and the words for the value in messages and help.

`commands.py` gives each flag a kind: a constant such as `FILE`, or the result of `whole`, `wholes`, `choice` or
`choices`. `Flag.read` calls `Kind.convert` with the text from the command line. If `convert` raises ValueError,
`Flag.read` raises a UserError such as `--top: expected a whole number, at least 1, got 'x'`.
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
_MAX_WHOLE = 2**31 - 1  # the largest i32


class Kind(NamedTuple):
  """The kind of value that a flag has."""
  metavar: str  # stands for the value in the help, such as N
  expected: str  # describes the value in messages
  convert: Callable[[str], Any]  # converts a text to the value; raises ValueError if the text is of another kind
  limits: str = ''  # of the value, for the help
  choices: tuple[str, ...] = ()  # values that shells complete
  is_path: bool = False  # whether the value is a path, which shells complete, or several paths with commas
  is_utf8: bool = False  # whether a path must be text in UTF-8, as some libraries need it


def whole(low: int, high: int = _MAX_WHOLE) -> Kind:
  """Returns the kind of a whole number from `low` to `high`."""
  def convert(text: str) -> int:
    if not re.fullmatch(r' *[0-9]{1,12} *', text, re.ASCII) or not low <= int(text) <= high:
      raise ValueError(text)
    return int(text)
  limits = f'{low:,} to {high:,}' if high < _MAX_WHOLE else f'at least {low:,}'
  return Kind('N', f'a whole number, {limits}', convert, limits)


def wholes(low: int) -> Kind:
  """Returns the kind of whole numbers of at least `low`, separated by commas."""
  number = whole(low)
  return Kind('N,N,…', f'whole numbers with commas, each {number.limits}',
              lambda text: [number.convert(part) for part in text.split(',')], f'each {number.limits}')


def choice(*names: str) -> Kind:
  """Returns the kind of one of several names."""
  return Kind(f'{{{",".join(names)}}}', f'one of {", ".join(names)}', _checked(str, lambda text: text in names),
              choices=names)


def choices(*names: str) -> Kind:
  """Returns the kind of some of several names, separated by commas."""
  name = choice(*names)
  return Kind('A,B,…', f'some of {", ".join(names)}, with commas',
              lambda text: [name.convert(part) for part in text.split(',')], choices=names)


def _checked(convert: Callable[[str], T], is_valid: Callable[[T], bool]) -> Callable[[str], T]:
  """Returns a function that converts a text like `convert`, and raises ValueError if the value is not valid."""
  def convert_and_check(text: str) -> T:
    value = convert(text)
    if not is_valid(value):
      raise ValueError(text)
    return value
  return convert_and_check


def _split_names(text: str) -> list[str]:
  """Splits names at commas; a name in double quotes may contain commas."""
  rows = csv.reader([text], skipinitialspace=True, strict=True)
  try:
    return [name.strip() for row in rows for name in row if name.strip()]
  except csv.Error as error:
    raise ValueError(str(error)) from None


def _to_path_by_name(text: str) -> dict[str, str]:
  """Converts `images=/data/a,weights=~/b` to a path for each name."""
  pairs = [part.partition('=') for part in text.split(',')]
  path_by_name = {name.strip(): path for name, _, path in pairs if name and path}
  if len(path_by_name) < len(pairs):  # a name or a path is missing, or a name is given twice
    raise ValueError(text)
  return {name: storage.expand_home(path) for name, path in path_by_name.items()}


def _to_num_params(text: str) -> float:
  """Converts a number of parameters: `30M` is 30 million."""
  factor = {'K': 1e3, 'M': 1e6, 'B': 1e9}.get(text[-1:].upper())
  return NUMBER.convert(text[:-1]) * factor if factor else NUMBER.convert(text)


def _to_task(text: str) -> tuple[int, int]:
  """Converts `0/8` to the index of a task and the number of tasks."""
  task, num_tasks = map(int, text.split('/'))
  if not 0 <= task < num_tasks:
    raise ValueError(text)
  return task, num_tasks


def _to_blocks(text: str) -> list[int]:
  """Converts `1,-1` to numbers of blocks, from 1 on or from the end; no block has the number 0."""
  parts = text.split(',')
  if not all(re.fullmatch(r' *-?[0-9]{1,6} *', part, re.ASCII) and int(part) for part in parts):
    raise ValueError(text)
  return [int(part) for part in parts]


RUNNERS = ('DirectRunner', 'DataflowRunner', 'FlinkRunner', 'SparkRunner', 'PortableRunner', 'PrismRunner')
RUNNER = Kind('NAME', f'one of {", ".join(RUNNERS)}, or another runner as MODULE.CLASS',
              _checked(str, lambda text: '.' in text or text.lower() in map(str.lower, RUNNERS)), choices=RUNNERS)
BLOCKS = Kind('N,N,…', 'block numbers with commas, such as -4,-1', _to_blocks)
TEXT = Kind('TEXT', 'a value', str)
NAMES = Kind('A,B,…', 'names with commas', _checked(_split_names, bool))
PATHS = Kind('NAME=PATH,…', 'names with paths, NAME=PATH with commas', _to_path_by_name)
NUMBER = Kind('X', 'a number, at least 0', _checked(float, lambda number: 0. <= number < float('inf')), 'at least 0')
FRACTION = Kind('X', 'a number, 0 to below 1', _checked(float, lambda number: 0. <= number < 1.), '0 to below 1')
NUM_PARAMS = Kind('N', 'a number of parameters such as 30M or 1.2B', _to_num_params, 'such as 30M or 1.2B')
TASK = Kind('I/N', 'a task and the number of tasks, such as 0/8', _to_task, 'such as 0/8')
SEARCH = Kind('METHOD', searches.METHODS, searches.parse)
GLOB = Kind('GLOB', 'a pattern such as *b16*', str)
FILE = Kind('FILE', 'a file', storage.expand_home, is_path=True)
LOCAL_PATH = Kind('PATH', 'a path on this machine', lambda text: pathlib.Path(
    storage.open_path(_checked(str, storage.is_local)(text))), is_path=True, is_utf8=True)
DIRECTORY = Kind('DIR', 'a directory on this machine or on gs://', storage.open_path, is_path=True, is_utf8=True)
DIRECTORIES = Kind('DIR', 'directories with commas', lambda text: [
    storage.open_path(_checked(str, bool)(part)) for part in text.split(',')], is_path=True, is_utf8=True)
