"""Finds names by a pattern with wildcards, as a person types it, and the name that a misspelt one is nearest to."""
from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable

_SEPARATORS = re.compile(r'[-_/+ .]')
_NEAR = 0.5  # of 1, the least similarity of a name that is suggested
_WILD = ('*', '?', '[')


def matches(name: str, pattern: str) -> bool:
  """Returns whether a name matches a pattern such as `*b16*`.

  Case is ignored and, if that helps, the characters `-_/+ .`.

  A pattern without a wildcard matches names that contain it.
  """
  name, pattern = name.lower(), pattern.lower()
  if not any(wild in pattern for wild in _WILD):
    pattern = f'*{pattern}*'
  squeezed = ''.join(part if part.startswith('[') else _SEPARATORS.sub('', part)  # in brackets, `-` is a range
                     for part in re.split(r'(\[[^]]*\])', pattern))
  return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(_SEPARATORS.sub('', name), squeezed)


def nearest(word: str, known: Iterable[str], *, prefix: str = '') -> str:
  """Returns ` Did you mean PREFIXNAME?` with the name that is most similar to a word, '' if none is."""
  near = difflib.get_close_matches(word, list(known), 1)
  return f' Did you mean {prefix}{near[0]}?' if near else ''


def no_match(pattern: str, names: Iterable[str]) -> str:
  """Returns a sentence for a pattern that matches none of these names, with the most similar ones."""
  names = list(names)
  return (f'expected a pattern such as *b16* that matches one of {len(names)} names, got {pattern!r}.'
          f'{hint(pattern, names)}')


def hint(pattern: str, names: Iterable[str]) -> str:
  """Returns ` Did you mean …?` with the most similar names, '' if there are none."""
  keys = {_SEPARATORS.sub('', name.lower()): name for name in reversed(list(names))}
  wanted = _SEPARATORS.sub('', re.sub(r'[*?[\]]', '', pattern.lower()))
  near = [keys[key] for key in difflib.get_close_matches(wanted, keys, 3, _NEAR)]
  return f' Did you mean {" or ".join(near)}?' if near else ''
