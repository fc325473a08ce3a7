"""How settings check themselves: the messages that `problems(config, name)` of a settings dataclass yields.

Each settings dataclass may define

    def problems(self, config: Run, name: str) -> Iterator[str]:

which yields one message for each combination of settings that cannot work or has no effect. `config` is the complete
run, in which the value of every single setting is valid (`ranges.py`); `name` is the dotted path of this part, such as
`data.recipe`. `config/check.py` calls it on every part of a config.
"""
import dataclasses
import enum
import re
from collections.abc import Iterable, Iterator
from typing import Any

Run = Any
"""The `schema.Config` that a part belongs to. Its module imports those of the parts, so they cannot name its type."""


def problem(name: str, expected: str, got: Any, advice: str = '') -> str:
  """A message in the form of the project: `data.workers: expected 0 with data.in_memory=yes, got 2. Set it to 0.`"""
  return f'{name}: expected {expected}, got {shown(got)}.{" " * bool(advice)}{advice}'


def shown(value: Any) -> str:
  """A value as messages show it: a choice by its value, a part by its type, at most 80 characters."""
  if isinstance(value, enum.Enum):
    return str(value.value)
  try:
    text = repr(value)
  except ValueError:  # Python writes no integer of more than 4,300 digits
    return f'an integer of {value.bit_length():,} bits' if isinstance(value, int) else f'a {type(value).__name__}'
  return text if len(text) <= 80 else f'{text[:60]}… ({len(text):,} characters)'


def no_effect(part: Any, name: str, settings: Iterable[str], condition: str, advice: str = '') -> Iterator[str]:
  """Problems of settings that differ from their defaults where they have no effect.

  Args:
    part: the settings dataclass, whose type has a default for each of these settings.
    name: its dotted path.
    settings: names of fields.
    condition: where they have no effect, such as `with crop=resize`.
    advice: what to do instead of removing the setting.
  """
  usual = type(part)()
  for setting in settings:
    value, default = getattr(part, setting), getattr(usual, setting)
    if value != default:
      expected = 'the default' if dataclasses.is_dataclass(default) else shown(default)
      yield problem(f'{name}.{setting}', f'{expected} {condition}, where it has no effect', value,
                    advice or 'Remove it.')


def at_most(name: str, value: float, most: float, what: str) -> Iterator[str]:
  """A problem if a number is larger than another setting allows; `what` names that one."""
  if value > most:
    yield problem(name, f'at most {what}={most:g}', value)


def multiple(name: str, value: int | tuple[int, ...], of: int, what: str) -> Iterator[str]:
  """A problem if a number, or one of several, is not a multiple of `of`; `what` says what that is."""
  if any(number % of for number in (value if isinstance(value, tuple) else (value,))):
    yield problem(name, f'a multiple of {what}', value)


def ascending(name: str, pair: tuple[float, float]) -> Iterator[str]:
  """A problem if the first number of a range is the larger one."""
  if pair[0] > pair[1]:
    yield problem(name, 'the smaller number first', pair)


def patterns(name: str, texts: Iterable[str]) -> Iterator[str]:
  """Problems of texts that are not regular expressions."""
  for text in texts:
    try:
      re.compile(text)
    except re.error as error:
      yield problem(name, 'a regular expression', text, f'Python says: {error}.')
