"""Finds the files of a dataset by a pattern, and which split each of them belongs to.

A pattern is a path with braces, `{000..999}` or `{a,b}`, and the wildcards `*`, `?` and `[…]`; or a folder, all of
whose files with the extension are meant. `{split}` stands for the name of a split. Without it, the split is the word
`train`, `val`, `valid`, `validation` or `test` in the name of the file, or else in those of its folders below the
pattern's own.
"""
from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from vit_jax.core.errors import UserError
from vit_jax.data.files import access, json_fields, user_files
from vit_jax.data.files.user_files import Rules
from vit_jax.data.sources import splits

SPLIT = '{split}'
_MOST_FILES = 1_000_000
_RANGE = re.compile(r'(?P<first>\d+)\.\.(?P<last>\d+)')
_BRACES = re.compile(r'\{(?!split\})([^{}]*)\}')
_WILD = re.compile(r'[*?\[{]')
_SHOWN = 5


class Shards(NamedTuple):
  """The files of a dataset.

  root: the folder that they are below.
  splits: paths by the name of their split, in order; by '' if the files do not belong to splits.
  """
  root: str
  splits: Mapping[str, tuple[str, ...]]


def defining(names: Iterable[str]) -> str:
  """Returns the split that defines the classes: `train`, or else the first one by name."""
  return 'train' if 'train' in (known := list(names)) else min(known)


def find(where: str, extension: str, *, kind: str, rules: Rules, base: str = '') -> Shards:
  """Returns the files of a pattern or folder.

  Args:
    where: the pattern or folder.
    extension: of the files in a folder, such as `.tar`.
    kind: of the source, for messages, such as `wds`.
    rules: of the data.
    base: the folder that no link may lead out of; '' = that of the pattern.

  Raises:
    UserError: no file, or one that a range names, exists; a file is outside of the folder; or its split is not clear.
  """
  path = access.resolve(where, f'{kind}:PATH')
  if os.path.isdir(path):
    root, by_split = path, _by_words(path, list(_below(path, extension)), where=f'{kind}:{where}')
    if not by_split:
      raise UserError(f'{kind}:{where}: expected files *{extension} in or below this folder, got none. Correct the '
                      'path.')
  else:
    wild = _WILD.search(path)
    root = os.path.dirname(path[:wild.start()] if wild else path)
    patterns = expand(path)
    named = [SPLIT in pattern for pattern in patterns]
    by_split = (_by_name(patterns) if all(named) else
                _by_words(root, [file for pattern in patterns for file in _matches(pattern)], where=f'{kind}:{where}'))
    if not by_split or (any(named) and not all(named)):
      raise UserError(f'{kind}:{where}: expected a pattern of files, with {SPLIT} for the name of the split, got none '
                      'that it fits. Correct the pattern.')
  for file in (file for files in by_split.values() for file in files):
    user_files.check_inside(file, base or root, rules)
  return Shards(root, {name: tuple(files) for name, files in by_split.items()})


def expand(pattern: str) -> list[str]:
  """Returns the patterns that one with braces stands for, in its order; `{split}` stays.

  `{000..102}` has the numbers of that many digits, and `{a,b}` its parts.

  Raises:
    UserError: it stands for too many.
  """
  found = _BRACES.search(pattern)
  if not found:
    return [pattern]
  if numbers := _RANGE.fullmatch(found[1]):
    first, last = numbers['first'], numbers['last']
    width = len(first) if first.startswith('0') or len(first) == len(last) else 0
    if abs(int(last) - int(first)) >= _MOST_FILES:
      raise UserError(f'{pattern}: expected at most {_MOST_FILES:,} files, got the range {found[1]}. Correct it.')
    parts: Sequence[str] = [f'{number:0{width}d}' for number in range(int(first), int(last) + 1)]
  else:
    parts = found[1].split(',')
  rests = expand(pattern[found.end():])
  if len(parts) * len(rests) > _MOST_FILES:
    raise UserError(f'{pattern}: expected at most {_MOST_FILES:,} files, got more. Correct the ranges.')
  return [pattern[:found.start()] + part + rest for part in parts for rest in rests]


def _matches(pattern: str) -> list[str]:
  """Returns the files of a pattern without braces. Raises UserError if there is none."""
  found = sorted(glob.glob(pattern, recursive=True)) if _WILD.search(pattern) else [pattern]
  found = [file for file in found if os.path.isfile(file)]
  if not found:
    raise UserError(f'{pattern}: expected this file, or files of this pattern, got none. Correct the path or range.')
  return found


def _below(folder: str, extension: str) -> Iterator[str]:
  """Yields the files with an extension in and below a folder, in order, without hidden ones."""
  for here, folders, names in os.walk(folder):
    folders[:] = sorted(name for name in folders if not name.startswith('.'))
    for name in sorted(names):
      if name.endswith(extension) and not name.startswith('.'):
        yield os.path.join(here, name)


def _by_name(patterns: Sequence[str]) -> dict[str, list[str]]:
  """Returns the files of patterns with `{split}` by the name of their split; each split has files of each pattern."""
  found: dict[str, list[str]] = {}
  for pattern in patterns:
    before, _, after = pattern.partition(SPLIT)
    wanted = re.compile(f'{_translated(before)}(?P<split>[A-Za-z_]+){_translated(after.replace(SPLIT, "*"))}')
    for file in _matches(pattern.replace(SPLIT, '*')):
      if matched := wanted.fullmatch(file):
        found.setdefault(matched['split'], []).append(file)
  for pattern in patterns:
    for name in found:
      _matches(pattern.replace(SPLIT, name))
  return found


def _translated(pattern: str) -> str:
  """Returns the regular expression of a pattern with wildcards, where `*` does not match a slash."""
  parts = re.split(r'(\*\*/|\*|\?|\[[^\]]*\])', pattern)
  return ''.join({'**/': '(?:.*/)?', '*': '[^/]*', '?': '[^/]'}.get(part) or
                 (part if part.startswith('[') else re.escape(part)) for part in parts)


def _by_words(root: str, files: Sequence[str], *, where: str) -> dict[str, list[str]]:
  """Returns files by the word for a split in their names; all by '' if none has one."""
  found: dict[str, list[str]] = {}
  for file in files:
    name, *folders = reversed(os.path.relpath(file, root).split(os.sep))
    words: set[str] = set()
    for part in (name, *folders):
      words = words or {word for word in re.findall('[a-z]+', part.lower()) if word in splits.NAMES}
    if len(words) > 1:
      raise UserError(f'{where}: expected the name of one split in {file}, got {json_fields.listed(sorted(words), 5)}. '
                      f'Write {SPLIT} where the name of the split stands in the pattern.')
    found.setdefault(next(iter(words), ''), []).append(file)
  if '' in found and len(found) > 1:
    without = [os.path.relpath(file, root) for file in found['']]
    raise UserError(f'{where}: expected the name of a split in all file names or in none, got none in '
                    f'{json_fields.listed(without, _SHOWN)}. Write {SPLIT} where the name of the split stands in the '
                    'pattern, or leave these files out.')
  return found
