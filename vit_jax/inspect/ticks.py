"""Ticks of an axis: round values within a range, and their texts."""
from __future__ import annotations

import math

_SUPERSCRIPTS = str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹')


def linear(low: float, high: float, *, most: int = 6, whole: bool = False) -> list[float]:
  """Returns at most `most` multiples of 1, 2, 2.5 or 5 times a power of ten between `low` and `high`.

  Args:
    low, high: the range, `low < high`.
    most: number of ticks, at least 2.
    whole: whole numbers only.
  """
  least = (high - low) / (most - 1)
  power = 10. ** math.floor(math.log10(least))
  steps = [factor * power for factor in (1., 2., 2.5, 5., 10.)]
  step = next(step for step in steps if step >= least * (1 - 1e-9))
  if whole:
    step = max(1., next(step for step in steps if step >= least * (1 - 1e-9) and (step < 1 or step == round(step))))
  first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
  return [number * step for number in range(first, last + 1)]


def logarithmic(low: float, high: float, *, most: int = 6) -> list[float]:
  """Returns at most `most` values between `low` and `high`: powers of ten, with round multiples if few.

  Args:
    low, high: the range, `0 < low < high`.
    most: number of ticks, at least 2.
  """
  powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
  for factors, stride in (((1., 2., 5.), 1), ((1., 3.), 1), *(((1.,), stride) for stride in range(1, len(powers) + 1))):
    found = [factor * 10. ** power for power in powers if power % stride == 0 for factor in factors]
    inside = [tick for tick in found if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    if len(inside) <= most:
      break
  return inside if len(inside) > 1 else linear(low, high, most=most)


def text(value: float) -> str:
  """Returns a tick as text: 0.25, 1,500, 20k, 3M, 2·10⁻⁵."""
  size = abs(value)
  if value and size < 1e-4:
    power = math.floor(math.log10(size) + 1e-9)
    factor = f'{value / 10. ** power:.3g}'
    return f'{"" if factor == "1" else factor + "·"}10{str(power).translate(_SUPERSCRIPTS)}'
  for unit, name in ((1e9, 'G'), (1e6, 'M'), (1e4, 'k')):
    if size >= unit:
      return f'{value / (1e3 if name == "k" else unit):.4g}{name}'
  return f'{value:,.6g}'
