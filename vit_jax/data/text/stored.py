"""Captions as sources store them: bytes or texts, one or several for an image."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vit_jax.data.image.headers import BadImage

MOST_BYTES = 2**20
"""Size above which the captions of an image cannot be used."""
NAMES = ('caption', 'captions', 'text', 'texts')
"""Usual names of columns with captions."""


def texts(values: Iterable[Any], where: str) -> tuple[str, ...]:
  """Returns the captions of an image that are not empty.

  Args:
    values: bytes in UTF-8, or texts; those that are None are missing.
    where: they are, for the message.

  Raises:
    BadImage: one is not UTF-8, not a text, or they are larger than 1 MiB.
  """
  found, num_bytes = [], 0
  for value in values:
    if value is None:
      continue
    try:
      text = value.decode() if isinstance(value, bytes) else value
      num_bytes += len(text.encode())
    except (UnicodeError, AttributeError, TypeError):
      raise BadImage(f'the example: expected captions in UTF-8 in {where}, got others') from None
    found.append(text.strip())
  if num_bytes > MOST_BYTES:
    raise BadImage(f'the example: expected captions of at most 1 MiB in {where}, got {num_bytes:,} bytes')
  return tuple(text for text in found if text)


def field(value: Any, path: Sequence[str]) -> list[Any]:
  """Returns the captions in a field of a JSON value, `a/b`: a text or a list of texts; none if it is missing."""
  for part in path:
    value = value.get(part) if isinstance(value, dict) else None
  return value if isinstance(value, list) else [value]
