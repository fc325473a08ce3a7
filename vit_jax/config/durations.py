"""Lengths of time in a run, as text with a unit: `'90 epochs'`, `'20_000 steps'`, `'30e6 examples'`, `'10 %'`.

Differs from the programs in PyTorch: an epoch has examples / batch steps without rounding down, 1,251.1 of ImageNet-1k
with a batch of 1,024, where they drop the rest and have 1,251. 300 epochs are 42 steps longer (0.01 %), and a rate that
changes once an epoch has a last stair of these: at any update, rates of DeiT and LV-ViT differ by at most 0.05 % of
their peak, those of DINO by 0.02 %.
"""
from __future__ import annotations

import re
from typing import NamedTuple

from vit_jax.core.errors import UserError

MOST = {'steps': 2**31 - 1, 'epochs': 10**9, 'examples': 10**15, '%': 100}
"""The longest durations. Steps are counted in int32."""
EXPECTED = "a number and a unit, such as '90 epochs', '20_000 steps', '30e6 examples' or '10 %'"
_DURATION = re.compile(r'\s*([0-9][0-9_]*\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+)\s*(steps?|epochs?|examples?|%)\s*',
                       re.ASCII)  # number and unit, as in '20_000 steps' or '30e6 examples'
_WALL_TIME = re.compile(r'\s*([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)\s*(minutes?|hours?)\s*', re.ASCII)  # '1.5 hours'
MOST_WALL_S = 3600. * 10_000
"""The longest wall time in seconds: 10,000 hours."""


class Duration(NamedTuple):
  """A number and its unit, one of `MOST`."""
  value: float
  unit: str


def parse(text: str) -> Duration:
  """Reads a duration.

  Raises:
    UserError: it is not one, or longer than `MOST`.
  """
  duration = read(text)
  if not duration:
    raise UserError(f'expected {EXPECTED}, got {text[:60]!r}. Write a number and a unit.')
  most = MOST[duration.unit]
  if duration.value > most:
    raise UserError(f'expected at most {most:,} {duration.unit}, got {text[:60]!r}. Set a shorter duration.')
  return duration


def read(text: str) -> Duration | None:
  """Reads a duration, however long; None if the text is not one."""
  match = _DURATION.fullmatch(text)
  if not match:
    return None
  number, unit = match.groups()
  return Duration(float(number.replace('_', '')), unit if unit == '%' else unit.rstrip('s') + 's')


def parse_wall(text: str) -> float | None:
  """Reads a wall time, such as `'20 minutes'` or `'1.5 hours'`, in seconds; None if the text is not one."""
  match = _WALL_TIME.fullmatch(text)
  if not match:
    return None
  number, unit = match.groups()
  seconds = float(number.replace('_', '')) * (60. if unit.startswith('minute') else 3600.)
  return seconds if 0. < seconds <= MOST_WALL_S else None


def in_steps(text: str, *, num_examples: int, batch_size: int, total_steps: int | None = None) -> int:
  """Returns a duration in steps, rounded to the nearest.

  Args:
    text: the duration; `%` is of `total_steps`.
    num_examples: examples an epoch.
    batch_size: examples a step, over all devices.
    total_steps: length of the run, where it is known.

  Raises:
    UserError: it is more steps than can be counted, or a percentage without a length.
  """
  value, unit = parse(text)
  match unit:
    case 'steps':
      steps = value
    case 'epochs':
      steps = value * num_examples / batch_size
    case 'examples':
      steps = value / batch_size
    case _:
      if total_steps is None:
        raise UserError('length: expected steps, epochs or examples, as a percentage is of the run itself, got '
                        f'{text!r}. Set the length of the run in one of these units.')
      steps = value / 100 * total_steps
  if steps > MOST['steps']:
    setting = 'length: ' if total_steps is None else ''
    raise UserError(f'{setting}expected at most {MOST["steps"]:,} steps, got {text!r}, which is {steps:,.0f} steps of '
                    f'{batch_size:,} examples. Set a shorter duration.')
  return int(steps + .5)


def parse_steps(text: str) -> tuple[int, int] | None:
  """Reads a range of steps, `first..last` from 1, both included; None for ''.

  Raises:
    UserError: says what a range looks like.
  """
  if not text:
    return None
  match = re.fullmatch(r'\s*([0-9][0-9_]{0,15})\s*\.\.\s*([0-9][0-9_]{0,15})\s*', text, re.ASCII)
  if not match or not 1 <= int(match[1]) <= int(match[2]) <= MOST['steps']:
    raise UserError(f"expected first..last, from 1 and in order, such as '100..105', got {text[:60]!r}. "
                    'Write two numbers of steps.')
  return int(match[1]), int(match[2])


class Lengths(NamedTuple):
  """The scale that a run's durations are measured on."""
  num_examples: int  # an epoch
  batch_size: int    # a step, over all devices
  total_steps: int

  def steps(self, text: str) -> int:
    """Returns a duration of this run in steps: 0 only if it says 0, else at least 1."""
    steps = in_steps(text, num_examples=self.num_examples, batch_size=self.batch_size,
                     total_steps=self.total_steps)
    return max(1, steps) if parse(text).value else 0

  @property
  def steps_an_epoch(self) -> float:
    return self.num_examples / self.batch_size


def lengths(length: str, *, num_examples: int, batch_size: int) -> Lengths:
  """Returns the lengths of a run of `length`."""
  total = in_steps(length, num_examples=num_examples, batch_size=batch_size)
  return Lengths(num_examples, batch_size, max(1, total))
