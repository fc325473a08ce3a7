"""Finds names by a pattern with wildcards, as a person types it, and the known names that a misspelt one is similar to.

`nearest` and `hint` return the end of a message about an unknown name, `no_match` all of one about a pattern.
"""
from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable

_SEPARATORS = re.compile(r'[-_/+ .]')


def matches(name: str, pattern: str) -> bool:
  """Returns whether a name matches a pattern such as `*b16*`; one without a wildcard matches names that contain it.

  Case is ignored. `-_/+ .` are compared first, then ignored: `vit-b16` matches `ViT_B/16`.
  """
  name, pattern = name.lower(), pattern.lower()
  if not any(wildcard in pattern for wildcard in '*?['):
    pattern = f'*{pattern}*'
  squeezed = ''.join(part if part.startswith('[') else _SEPARATORS.sub('', part)  # in brackets, `-` is a range
                     for part in re.split(r'(\[[^]]*\])', pattern))
  return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(_SEPARATORS.sub('', name), squeezed)


def similar_names(word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
  """Returns up to `most` known names, the nearest first, whose similarity to a word (0 to 1) is at least `cutoff`."""
  return difflib.get_close_matches(word, list(known), most, cutoff)


def nearest(word: str, known: Iterable[str], *, prefix: str = '') -> str:
  """Returns ` Did you mean PREFIXNAME?` with the name that is most similar to a word, '' if none is."""
  near = similar_names(word, known)
  return f' Did you mean {prefix}{near[0]}?' if near else ''


def no_match(pattern: str, names: Collection[str]) -> str:
  """Returns a sentence for a pattern that matches none of these names, with the most similar ones."""
  return (f'expected a pattern such as *b16* that matches one of {len(names)} names, got {pattern!r}.'
          f'{hint(pattern, names)}')


def hint(pattern: str, names: Iterable[str]) -> str:
  """Returns ` Did you mean A or B or C?` with up to three similar names, '' if there are none; ignores `*?[]-_/+ .`."""
  originals = {_SEPARATORS.sub('', name.lower()): name for name in reversed(list(names))}  # the first of equal ones
  wanted = _SEPARATORS.sub('', re.sub(r'[*?[\]]', '', pattern.lower()))
  near = [originals[key] for key in similar_names(wanted, originals, most=3, cutoff=0.5)]
  return f' Did you mean {" or ".join(near)}?' if near else ''
