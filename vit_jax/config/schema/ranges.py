"""What the numbers of a config may be, declared where a setting is declared, and the checks that follow from it.

`ranged(default, RANGE)` declares a number or a tuple of numbers, `duration(default, …)` a length of time as text.
`problems` checks the fields of one settings dataclass, and `config/check.py` a whole config, also what several settings
must satisfy together. Every number is finite.
"""
import dataclasses
import enum
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vit_jax.config import durations
from vit_jax.config.schema import checks

MOST = 3.4028234663852886e38   # largest float32, in which all numbers are used
LEAST = 1.1754943508222875e-38  # smallest normal float32; what is nearer to 0 counts as 0 on many devices
MOST_INT = 2**31 - 1            # largest int32, which counts steps, examples and shapes


@dataclasses.dataclass(frozen=True)
class Range:
  """Numbers from `low` to `high`; `above` and `below` leave these two out. `also` are allowed beside them."""
  low: float = 0.
  high: float = MOST
  above: bool = False
  below: bool = False
  also: tuple[float, ...] = ()
  unit: str = ''

  def has(self, value: float) -> bool:
    """Returns whether the number is one of them, and finite. Takes integers of any size."""
    if value in self.also:
      return True
    is_finite = isinstance(value, int) or math.isfinite(value)
    return (is_finite and self.low <= value <= self.high and not (self.above and value == self.low)
            and not (self.below and value == self.high) and not 0 < abs(value) < LEAST)

  def __str__(self) -> str:
    low, high = f'{self.low:.10g}', f'{self.high:.10g}'
    if self.high not in (MOST, MOST_INT):
      text = f'{"more than " * self.above}{low} to {"below " * self.below}{high}'
    else:
      text = 'a finite number' if self.low == -MOST else f'{"more than" if self.above else "at least"} {low}'
    return ', or '.join([f'{text} {self.unit}'.strip(), *(f'{value:g}' for value in self.also)])


@dataclasses.dataclass(frozen=True)
class Span:
  """Lengths of time."""
  off: bool = False  # '' is allowed, which switches off
  zero: bool = True  # 0 is allowed
  percent: bool = True  # a share of the run is allowed
  wall: bool = False  # minutes and hours are allowed, too

  def problem(self, text: str) -> str | None:
    """Returns what was expected instead of the text; None if it is one of them."""
    if (self.off and not text) or (self.wall and durations.parse_wall(text)):
      return None
    parsed = durations.read(text)
    if not parsed:
      return durations.EXPECTED + ", or '20 minutes' or '1.5 hours'" * self.wall
    if parsed.unit == '%' and not self.percent:
      return 'steps, epochs or examples, as a percentage is of the run itself'
    if parsed.value == 0 and not self.zero:
      return f'more than 0 {parsed.unit}'
    most = durations.MOST[parsed.unit]
    return f'at most {most:,} {parsed.unit}' if parsed.value > most else None


ANY = Range(-MOST)
NOT_NEGATIVE = Range()
POSITIVE = Range(above=True)
SHARE = Range(0, 1)
BELOW_1 = Range(0, 1, below=True)
INSIDE = Range(0, 1, above=True, below=True)
UP_TO_1 = Range(0, 1, above=True)
COUNT = Range(1, MOST_INT)
COUNT_OR_0 = Range(0, MOST_INT)
SEED = Range(0, 2**32 - 1)      # seeds that jax distinguishes
PX = Range(1, 65_535, unit='px')  # of a side; the most that a JPEG can have
PX_OR_0 = Range(0, 65_535, unit='px')
THREADS = Range(0, 1024)


def ranged(default: Any, allowed: Range) -> Any:
  """Declares a field for a number, or a tuple of numbers, each in that range."""
  return dataclasses.field(default=default, metadata={'allowed': allowed})


def duration(default: str | tuple[str, ...], *, off: bool = False, zero: bool = True, percent: bool = True,
             wall: bool = False) -> Any:
  """Declares a field for a length of time, or a tuple of them."""
  return dataclasses.field(default=default, metadata={'allowed': Span(off, zero, percent, wall)})


class Problem(typing.NamedTuple):
  """A setting with a wrong value; `name` is its dotted path."""
  name: str
  expected: str
  value: Any

  def __str__(self) -> str:
    return checks.problem(self.name, self.expected, self.value)


def problems(part: Any, prefix: str = '') -> Iterator[Problem]:
  """Yields problems of the fields that a settings dataclass has itself: values of another type, or out of range."""
  for field in dataclasses.fields(part):
    value, allowed = getattr(part, field.name), field.metadata.get('allowed')
    expected = _type_problem(value, field.type)
    for item in value if isinstance(value, tuple) else (value,):
      if expected or dataclasses.is_dataclass(item):  # a dataclass, such as a ramp in place of a number, checks itself
        continue
      if isinstance(allowed, Span):
        expected = allowed.problem(item)
      elif allowed and not allowed.has(item):
        expected = ('numbers, each ' if isinstance(value, tuple) else '') + _closer(item, allowed)
    if expected:
      yield Problem(f'{prefix}{field.name}', expected, value)


def walk(part: Any, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yields a settings dataclass and all parts of it, each with the prefix of its settings: `optimizer.schedule.`."""
  yield prefix, part
  for name in checks.names(part.__class__):
    value = getattr(part, name)
    if isinstance(value, str | int | float):
      continue
    items = {'': value}
    if isinstance(value, tuple):
      items = {f'[{i}]': item for i, item in enumerate(value)}
    elif isinstance(value, Mapping):
      items = {f'.{key}': item for key, item in value.items()}
    for suffix, item in items.items():
      if dataclasses.is_dataclass(item) and not isinstance(item, type):
        yield from walk(item, f'{prefix}{name}{suffix}.')


def _closer(value: float, allowed: Range) -> str:
  """Returns what was expected, with the limits of float32 where these are the reason."""
  if 0 < abs(value) < LEAST:
    return f'{allowed}, and 0 or at least {LEAST:.2g} (float32)'
  if allowed.high == MOST and (isinstance(value, int) or math.isfinite(value)) and abs(value) > MOST:
    return f'{allowed}, and at most {MOST:.2g} (float32)'
  if allowed.high == MOST_INT and isinstance(value, int) and value > MOST_INT:
    return f'{allowed}, and at most {MOST_INT:,} (int32)'
  return f'{allowed}, and finite' if isinstance(value, float) and not math.isfinite(value) else str(allowed)


def _type_problem(value: Any, declared: Any) -> str | None:
  """Returns what was expected if a value is not of the declared type.

  Items of tuples and dicts are checked too, but not the fields of dataclasses.
  """
  if type(value) is declared and declared is not str:  # most are, and the rest takes 5 times as long
    return None
  arguments = typing.get_args(declared)
  if isinstance(declared, types.UnionType):
    problems_by_type = [_type_problem(value, kind) for kind in arguments]
    return None if None in problems_by_type else ' or '.join(map(str, problems_by_type))
  origin = typing.get_origin(declared)
  if origin is tuple:
    has_any_length = arguments[-1] is Ellipsis
    if not isinstance(value, tuple) or not has_any_length and len(value) != len(arguments):
      return 'a tuple' if has_any_length else f'a tuple of {len(arguments)} values'
    item_types = arguments[:1] * len(value) if has_any_length else arguments
    wrong = [problem for problem in map(_type_problem, value, item_types) if problem]
    return f'a tuple, each {wrong[0]}' if wrong else None
  if origin is dict:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
      return 'a dict with names as keys'
    return next(filter(None, (_type_problem(item, arguments[1]) for item in value.values())), None)
  if origin is Callable:
    return None if callable(value) else 'a function'
  allowed = (int, float) if declared is float else declared
  if isinstance(value, bool) and declared is not bool or not isinstance(value, allowed):
    return type_text(declared)
  if isinstance(value, checks.Settings) and type(value) is not declared and not (
      '__dataclass_fields__' in vars(type(value)) and hasattr(value, 'implementation')):
    return f"a {declared.__name__} with @dataclasses.dataclass and implementation = 'module:name'"
  return 'text without NUL characters' if isinstance(value, str) and '\0' in value else None


def type_text(declared: type) -> str:
  """Returns the values of a type, for messages."""
  if issubclass(declared, enum.Enum):
    return f'one of {", ".join(f"{declared.__name__}.{choice.name}" for choice in declared)}'
  return {float: 'a number', int: 'a whole number', bool: 'True or False', str: 'text', types.NoneType: 'None'}.get(
      declared, declared.__name__)
