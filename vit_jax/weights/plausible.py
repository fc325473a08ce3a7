"""Whether the numbers that a file beside weights gives can be: it is as little trusted as the weights themselves."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vit_jax.weights.infer import Hints
from vit_jax.weights.preprocess import Said

MOST_PX = 16_384  # a side of an image; networks for larger ones would not fit
MOST_HEADS = 4096
MOST_CLASSES = 1_000_000


def check(hints: Hints, rules: Sequence[Said], class_names: Sequence[str]) -> None:
  """Compares sizes, normalisation and numbers of heads with what a network can have.

  Raises:
    ValueError: names the first value that cannot be.
  """
  for name in ('heads', 'decoder_heads'):
    if not 0 <= getattr(hints, name) <= MOST_HEADS:
      raise ValueError(f'{name}: expected 0 to {MOST_HEADS:,}, got {getattr(hints, name)}')
  if not 0 <= hints.norm_eps < 1:
    raise ValueError(f'epsilon of the norms: expected 0 to 1, got {hints.norm_eps}')
  if len(class_names) > MOST_CLASSES or not all(isinstance(name, str) for name in class_names):
    raise ValueError(f'class names: expected up to {MOST_CLASSES:,} texts')
  for size in (hints.image_px, *(rule.values.get('image_px') for rule in rules)):
    if size is not None and not (_is_list(size, 2) and all(type(px) is int and 1 <= px <= MOST_PX for px in size)):
      raise ValueError(f'size of the images: expected two numbers from 1 to {MOST_PX:,} px, got {ascii(size)[:60]}')
  for rule in rules:
    _check_rule(rule)


def _check_rule(rule: Said) -> None:
  for name, least in (('mean', -1e3), ('std', 1e-6)):
    found = rule.values.get(name)
    if found is not None and not (_is_list(found, 3) and all(_is_within(x, least, 1e3) for x in found)):
      raise ValueError(f'{name}: expected three numbers from {least:g} to 1,000, got {ascii(found)[:60]}')
  resize = rule.values.get('resize')
  if resize is not None and not (_is_within(resize, .01, 10.) if isinstance(resize, float) else
                                 _is_within(resize, 0, MOST_PX)):
    raise ValueError(f'size before the crop: expected 0 to {MOST_PX:,} px or a part of 0.01 to 10, got {resize}')


def _is_list(value: Any, length: int) -> bool:
  return isinstance(value, (list, tuple)) and len(value) == length


def _is_within(value: Any, least: float, most: float) -> bool:
  return type(value) in (int, float) and math.isfinite(value) and least <= value <= most
