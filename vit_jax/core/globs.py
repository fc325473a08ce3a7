"""Finds names by a pattern with wildcards, as a person types it."""
from __future__ import annotations

import fnmatch
import re

_SEPARATORS = re.compile(r'[-_/+ .]')
_WILD = ('*', '?', '[')


def matches(name: str, pattern: str) -> bool:
  """Whether a name matches a pattern such as `*b16*`, ignoring case and, if that helps, the characters `-_/+ .`.

  A pattern without a wildcard matches names that contain it.
  """
  name, pattern = name.lower(), pattern.lower()
  if not any(wild in pattern for wild in _WILD):
    pattern = f'*{pattern}*'
  return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(_SEPARATORS.sub('', name),
                                                                   _squeezed(pattern))


def _squeezed(pattern: str) -> str:
  """The pattern without separators outside of brackets, in which `-` is a range."""
  return ''.join(part if part.startswith('[') else _SEPARATORS.sub('', part)
                 for part in re.split(r'(\[[^]]*\])', pattern))
