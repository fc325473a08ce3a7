"""Finds names by a pattern with wildcards, as a person types it, and known names that are similar to a misspelt name.

`nearest` and `hint` return the end of a message about an unknown name, `no_match` a message about a pattern.
"""
from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable

_SEPARATORS = re.compile(r'[-_/+ .]')


def matches(name: str, pattern: str) -> bool:
  """Returns whether a name matches a pattern such as `*b16*`; a pattern without wildcard matches names that contain it.

  Case is ignored. The texts are compared with the separators `-_/+ .`, then without: `vit-b16` matches `ViT_B/16`.
  """
  name, pattern = name.lower(), pattern.lower()
  if not any(wildcard in pattern for wildcard in '*?['):
    pattern = f'*{pattern}*'
  parts = re.split(r'(\[[^]]*\])', pattern)  # in brackets, `-` is a range and no separator
  squeezed = ''.join(part if part.startswith('[') else _SEPARATORS.sub('', part) for part in parts)
  return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(_SEPARATORS.sub('', name), squeezed)


def similar_names(word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
  """Returns up to `most` known names, the nearest first, whose similarity to a word (0 to 1) is at least `cutoff`."""
  return difflib.get_close_matches(word, list(known), most, cutoff)


def nearest(word: str, known: Iterable[str], *, prefix: str = '') -> str:
  """Returns ` Did you mean PREFIXNAME?` with the known name that is nearest to a word; '' if no name is similar."""
  similar = similar_names(word, known)
  return f' Did you mean {prefix}{similar[0]}?' if similar else ''


def no_match(pattern: str, names: Collection[str]) -> str:
  """Returns the end of a message about a pattern that matches none of these names, with the most similar names."""
  return (f'expected a pattern such as *b16* that matches one of {len(names)} names, got {pattern!r}.'
          f'{hint(pattern, names)}')


def hint(pattern: str, names: Iterable[str]) -> str:
  """Returns ` Did you mean A or B or C?` with up to three similar names; '' if no name is similar.

  Wildcards and separators (`*?[]-_/+ .`) and case are ignored. Of names that are equal then, the first one is kept.
  """
  name_by_squeezed = {_SEPARATORS.sub('', name.lower()): name for name in reversed(list(names))}
  squeezed_pattern = _SEPARATORS.sub('', re.sub(r'[*?[\]]', '', pattern.lower()))
  similar = similar_names(squeezed_pattern, name_by_squeezed, most=3, cutoff=0.5)
  return f' Did you mean {" or ".join(name_by_squeezed[name] for name in similar)}?' if similar else ''
