"""Finds the files of a dataset by a pattern, and the split that each of them belongs to.

The formats `tar.py`, `tfrecord.py` and `parquet.py` call `find` before anything else, and pass the result to
`indexed.opener`. This module opens no file.

A pattern is a path with braces, `{000..999}` or `{a,b}`, and the wildcards `*`, `?` and `[…]`; or a folder, which
stands for all of its files with the extension. `{split}` stands for the name of a split. Without `{split}`, the split
is the word `train`, `val`, `valid`, `validation` or `test` in the name of the file, or else in the names of its folders
below that of the pattern. A pattern or folder may be in object storage: `gs://BUCKET/DIR/{000..999}.tar`.
"""
from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.data import splits, storage, user_files
from vit_jax.data.user_files import Rules

SPLIT = '{split}'
_MOST_FILES = 1_000_000
_RANGE = re.compile(r'(?P<first>\d+)\.\.(?P<last>\d+)')
_BRACES = re.compile(r'\{(?!split\})([^{}]*)\}')
_WILD = re.compile(r'[*?\[{]')
_SHOWN = 5
_COMPRESSED = ('.gz', '.tgz', '.zst', '.bz2', '.xz', '.zip')
_DECOMPRESS = 'Decompress them: images are compressed already.'


class Files(NamedTuple):
  """The files of a split, in order, and the number of examples of each, if it is known."""
  paths: tuple[str, ...]
  counts: tuple[int, ...] = ()


class Listed(NamedTuple):
  """The files of a dataset.

  root: the folder that has the files, or its address. No link may lead out of it.
  splits: the files by the name of their split; by '' if they do not belong to splits.
  """
  root: str
  splits: Mapping[str, Files]


def find(where: str, extension: str, *, kind: str, rules: Rules,
         fits: Callable[[str], bool] | None = None) -> Listed:
  """Returns the files of a pattern or folder.

  Args:
    where: the pattern or folder.
    extension: of the files in a folder, such as `.tar`.
    kind: of the source, for messages, such as `wds`.
    rules: of the data.
    fits: returns whether a file in a folder is one of the dataset, given its name; None = it ends with the extension.

  Raises:
    UserError: no file exists, or one that a range names is missing; a file is compressed or outside of the folder; or
      its split is not clear.
    TemporaryError: object storage fails.
  """
  path = user_files.locate(where, f'{kind}:PATH')
  wild = _WILD.search(path)
  start = path[:wild.start()] if wild else path
  try:
    files = _open_bucket(path, start) if storage.is_address(path) else _Files()
  except OSError as error:
    raise failures.unreadable(error, f'{kind}:{where}') from error
  is_folder = files.is_folder(path)
  if path.endswith(_COMPRESSED) and not is_folder:
    raise UserError(f'{kind}:{where}: expected {extension} files that are not compressed, which can be read at random, '
                    f'got {os.path.basename(path)}. {_DECOMPRESS}')
  if is_folder:
    fitting = files.below(path, fits or (lambda name: name.endswith(extension)))
    root, by_split = path, _by_words(path, fitting, where=f'{kind}:{where}')
    if not by_split:
      names = [os.path.basename(file) for file in files.below(path, lambda name: True)]
      advice = _DECOMPRESS if any(name.endswith(_COMPRESSED) for name in names) else 'Correct the path.'
      raise UserError(f'{kind}:{where}: expected files *{extension} in or below this folder, got '
                      f'{documents.listed(names, _SHOWN) or "none"}. {advice}')
  else:
    root, patterns = os.path.dirname(start), expand(path)
    have_split = [SPLIT in pattern for pattern in patterns]
    by_split = (_by_name(patterns, files) if all(have_split) else _by_words(
        root, [file for pattern in patterns for file in files.matches(pattern)], where=f'{kind}:{where}'))
    if not by_split or (any(have_split) and not all(have_split)):
      raise UserError(f'{kind}:{where}: expected a pattern of files, with {SPLIT} for the name of the split, got none '
                      'that it fits. Correct the pattern.')
  for file in (file for paths in by_split.values() for file in paths if not storage.is_address(file)):
    user_files.check_inside(file, root, rules)
  return Listed(root, {name: Files(tuple(paths)) for name, paths in by_split.items()})


def folder_of(path: str) -> str:
  """Returns the folder of a pattern, the part before its braces and wildcards; a path without these itself."""
  wild = _WILD.search(path)
  return os.path.dirname(path[:wild.start()]) if wild else path


def expand(pattern: str) -> list[str]:
  """Returns the patterns without braces that a pattern stands for, in order; `{split}` is kept.

  `{000..102}` stands for the numbers from 000 to 102, with as many digits, and `{a,b}` for its parts.

  Raises:
    UserError: it stands for too many patterns, or has braces inside braces.
  """
  braces = _BRACES.search(pattern)
  if not braces:
    return [pattern]
  before, content, after = pattern[:braces.start()], braces[1], pattern[braces.end():]
  if '{' in before.replace(SPLIT, ''):
    raise UserError(f'{pattern}: expected braces that are closed and not nested, got {braces[0]} inside of others. '
                    'List the parts, such as {train-000,val-000}, or use wildcards.')
  if numbers := _RANGE.fullmatch(content):
    first, last = numbers['first'], numbers['last']
    width = len(first) if first.startswith('0') or len(first) == len(last) else 0
    if abs(int(last) - int(first)) >= _MOST_FILES:
      raise UserError(f'{pattern}: expected at most {_MOST_FILES:,} files, got the range {content}. Correct it.')
    parts: Sequence[str] = [f'{number:0{width}d}' for number in range(int(first), int(last) + 1)]
  else:
    parts = content.split(',')
  rests = expand(after)
  if len(parts) * len(rests) > _MOST_FILES:
    raise UserError(f'{pattern}: expected at most {_MOST_FILES:,} files, got more. Correct the ranges.')
  return [before + part + rest for part in parts for rest in rests]


def _open_bucket(path: str, start: str) -> _Objects:
  """Returns the objects whose addresses begin with `start`, the part of an address before the first wildcard.

  Raises:
    OSError, TemporaryError: they cannot be listed.
    UserError: the wildcard is in the name of the bucket, or they may not be listed.
  """
  if start == path and ((inside := _Objects(f'{path}/')).is_folder(path) or not storage.split(path)[2]):
    return inside  # without objects beside the folder, such as PATH-large/
  if not re.match('[a-z0-9]+://[^/]+/', start):
    raise UserError(f'{path}: expected the name of a bucket before wildcards, such as '
                    f'{storage.split(path)[0]}://BUCKET/DIR/*.tar, got a pattern of buckets. Correct the address.')
  return _Objects(start)


class _Files:
  """The files of this machine; `_Objects` has the same methods for object storage."""

  def is_folder(self, path: str) -> bool:
    return os.path.isdir(path)

  def matches(self, pattern: str) -> list[str]:
    """Returns the files of a pattern without braces, in order. Raises UserError if there is none."""
    if not (files := self._find(pattern)):
      raise UserError(f'{pattern}: expected this file, or files of this pattern, got none. Correct the path or range.')
    return files

  def below(self, folder: str, fits: Callable[[str], bool]) -> list[str]:
    """Returns the files in and below a folder whose names fit, in order, without hidden ones."""
    files = []
    for here, folders, names in os.walk(folder):
      folders[:] = sorted(name for name in folders if not name.startswith('.'))
      files += [os.path.join(here, name) for name in sorted(names) if fits(name) and not name.startswith('.')]
    return files

  def _find(self, pattern: str) -> list[str]:
    paths = sorted(glob.glob(pattern, recursive=True)) if _WILD.search(pattern) else [pattern]
    return [path for path in paths if os.path.isfile(path)]


class _Objects(_Files):
  """The objects whose addresses begin with a text, listed once."""

  def __init__(self, start: str) -> None:
    """Lists them. Raises OSError, TemporaryError or UserError if they cannot be listed."""
    self._folder, _, name = start.rpartition('/')
    self._addresses = {f'{self._folder}/{one}': None for one in storage.list_names(self._folder, name)}  # in order

  def is_folder(self, path: str) -> bool:
    return path not in self._addresses and any(one.startswith(f'{path}/') for one in self._addresses)

  def below(self, folder: str, fits: Callable[[str], bool]) -> list[str]:
    names = [one.removeprefix(f'{folder}/').split('/') for one in self._addresses if one.startswith(f'{folder}/')]
    return [f'{folder}/{"/".join(parts)}' for parts in names
            if fits(parts[-1]) and not any(part.startswith('.') for part in parts)]

  def _find(self, pattern: str) -> list[str]:
    if not _WILD.search(pattern):
      return [pattern] if pattern in self._addresses else []
    wanted = re.compile(_translated(pattern))
    return [one for one in self._addresses if wanted.fullmatch(one) and '/.' not in one[len(self._folder):]]


def _by_name(patterns: Sequence[str], files: _Files) -> dict[str, list[str]]:
  """Returns the files of patterns with `{split}` by the name of their split; each split has files of each pattern."""
  by_split: dict[str, list[str]] = {}
  for pattern in patterns:
    before, _, after = pattern.partition(SPLIT)
    wanted = re.compile(f'{_translated(before)}(?P<split>[A-Za-z_]+){_translated(after.replace(SPLIT, "*"))}')
    for file in files.matches(pattern.replace(SPLIT, '*')):
      if match := wanted.fullmatch(file):
        by_split.setdefault(match['split'], []).append(file)
  for pattern in patterns:
    for name in by_split:
      files.matches(pattern.replace(SPLIT, name))
  return by_split


def _translated(pattern: str) -> str:
  """Returns the regular expression of a pattern with wildcards, where `*` does not match a slash."""
  parts = re.split(r'(\*\*/|\*|\?|\[[^\]]*\])', pattern)
  return ''.join({'**/': '(?:.*/)?', '*': '[^/]*', '?': '[^/]'}.get(part) or
                 (f'(?!/){fnmatch.translate(part)[4:-3]}' if part.startswith('[') else re.escape(part))
                 for part in parts)  # `translate` returns `(?s:…)\Z`


def split_words(path: str) -> list[str]:
  """Returns the names of splits in the name of a file, or else in the nearest of its folders that has one."""
  for part in reversed(path.split('/')):
    if words := [word for word in re.findall('[a-z]+', part.lower()) if word in splits.NAMES]:
      return words
  return []


def _by_words(root: str, files: Sequence[str], *, where: str) -> dict[str, list[str]]:
  """Returns files by the word for a split in their names; all by '' if no name has such a word."""
  by_split: dict[str, list[str]] = {}
  for file in files:
    words = set(split_words(os.path.relpath(file, root)))
    if len(words) > 1:
      raise UserError(f'{where}: expected the name of one split in {file}, got {documents.listed(sorted(words), 5)}. '
                      f'Write {SPLIT} where the name of the split stands in the pattern.')
    by_split.setdefault(next(iter(words), ''), []).append(file)
  if '' in by_split and len(by_split) > 1:
    without = [os.path.relpath(file, root) for file in by_split['']]
    raise UserError(f'{where}: expected the name of a split in all file names or in none, got none in '
                    f'{documents.listed(without, _SHOWN)}. Write {SPLIT} where the name of the split stands in the '
                    'pattern, or leave these files out.')
  return by_split
