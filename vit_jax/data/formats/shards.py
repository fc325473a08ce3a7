"""Finds the files of a dataset by a pattern, and the split that each of them belongs to.

The formats `tar.py`, `tfrecord.py` and `parquet.py` call `find` before anything else, and pass the result to
`indexed.opener`. This module opens no file.

A pattern is a path with braces, `{000..999}` or `{a,b}`, and the wildcards `*`, `**/`, `?` and `[…]`. A folder stands
for the files of the format in and below the folder. Both may be in object storage: `gs://BUCKET/DIR/{000..999}.tar`.

`{split}` in a pattern stands for the name of a split. Without it, the split is the word `train`, `val`, `valid`,
`validation` or `test` in the name of the file, or else in the name of a folder below that of the pattern.
"""
from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.data import splits, storage, user_files
from vit_jax.data.user_files import Rules

SPLIT = '{split}'
_MAX_FILES = 1_000_000
_RANGE = re.compile(r'(?P<first>\d+)\.\.(?P<last>\d+)')  # such as 000..102
_BRACES = re.compile(r'\{(?!split\})([^{}]*)\}')  # such as {000..102} and {a,b}, but not {split}
_WILDCARD_START = re.compile(r'[*?\[{]')  # the first character of a wildcard or of braces
_WILDCARD = re.compile(r'(\*\*/|\*|\?|\[[^\]]*\])')  # such as **/, *, ? and [a-z]
_MAX_LISTED = 5  # names in a message
_COMPRESSED = ('.gz', '.tgz', '.zst', '.bz2', '.xz', '.zip')
_DECOMPRESS = 'Decompress them: images are compressed already.'


class Files(NamedTuple):
  """The files of a split, in order, and the number of examples of each file; no counts if they are not known."""
  paths: tuple[str, ...]
  counts: tuple[int, ...] = ()


class Listed(NamedTuple):
  """The files of a dataset.

  root: the folder with the files, or the address of the folder. No link may lead out of the folder.
  splits: the files of each split by its name; all files by '' if the files do not belong to splits.
  """
  root: str
  splits: Mapping[str, Files]


def find(where: str, extension: str, *, prefix: str, rules: Rules,
         fits: Callable[[str], bool] | None = None) -> Listed:
  """Returns the files of a pattern or folder.

  Args:
    where: the pattern or folder.
    extension: the extension of the files in a folder, such as `.tar`.
    prefix: the first part of `data.source`, for messages, such as `wds`.
    rules: whether links may lead out of the folder.
    fits: returns whether a file belongs to the dataset, given its name; None = the name must end with the extension.

  Raises:
    UserError: no file exists, or a file that a range names is missing; a file is compressed or outside of the folder;
      or the split of a file is not clear.
    TemporaryError: object storage fails.
  """
  source = f'{prefix}:{where}'
  path = user_files.locate(where, f'{prefix}:PATH')
  start = _WILDCARD_START.split(path, maxsplit=1)[0]  # the path up to its first wildcard
  try:
    files = _list_bucket(path, start) if storage.is_address(path) else _LocalFiles()
  except OSError as error:
    raise failures.unreadable(error, source) from error
  if files.is_folder(path):
    root = path
    paths_by_split = _find_in_folder(path, files, extension, fits or (lambda name: name.endswith(extension)),
                                     source=source)
  elif path.endswith(_COMPRESSED):
    raise UserError(f'{source}: expected {extension} files that are not compressed, which can be read at random, '
                    f'got {os.path.basename(path)}. {_DECOMPRESS}')
  else:
    root = os.path.dirname(start)
    paths_by_split = _find_by_pattern(path, files, root, source=source)
  if not storage.is_address(path):
    for file in itertools.chain.from_iterable(paths_by_split.values()):
      user_files.check_inside(file, root, rules)
  return Listed(root, {name: Files(tuple(paths)) for name, paths in paths_by_split.items()})


def _find_in_folder(folder: str, files: _LocalFiles, extension: str, fits: Callable[[str], bool], *,
                    source: str) -> dict[str, list[str]]:
  """Returns the files of a folder by split. Raises UserError if the folder has no files whose names fit."""
  paths_by_split = _group_by_word(folder, files.list_below(folder, fits), source=source)
  if not paths_by_split:
    names = [os.path.basename(file) for file in files.list_below(folder, lambda name: True)]
    advice = _DECOMPRESS if any(name.endswith(_COMPRESSED) for name in names) else 'Correct the path.'
    raise UserError(f'{source}: expected files *{extension} in or below this folder, got '
                    f'{documents.listed(names, _MAX_LISTED) or "none"}. {advice}')
  return paths_by_split


def _find_by_pattern(pattern: str, files: _LocalFiles, root: str, *, source: str) -> dict[str, list[str]]:
  """Returns the files of a pattern by split. Raises UserError if there are none, or their split is not clear."""
  patterns = expand(pattern)
  num_with_split = sum(SPLIT in expanded for expanded in patterns)
  if num_with_split == len(patterns):
    paths_by_split = _group_by_name(patterns, files)
  else:
    paths = [file for expanded in patterns for file in files.list_matches(expanded)]
    paths_by_split = _group_by_word(root, paths, source=source)
  if not paths_by_split or 0 < num_with_split < len(patterns):
    raise UserError(f'{source}: expected a pattern of files, with {SPLIT} for the name of the split, got none '
                    'that it fits. Correct the pattern.')
  return paths_by_split


def folder_of(path: str) -> str:
  """Returns the folder of a pattern, such as `a/b` of `a/b/*/c`; a path without braces and wildcards is not changed."""
  start = _WILDCARD_START.split(path, maxsplit=1)[0]
  return path if start == path else os.path.dirname(start)


def expand(pattern: str) -> list[str]:
  """Returns the patterns without braces that a pattern stands for, in order; `{split}` is kept.

  `{000..102}` stands for 000, 001 and so on to 102, and `{a,b}` for a and b. Raises UserError if the pattern stands for
  too many patterns, or has braces inside braces.
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
    if abs(int(last) - int(first)) >= _MAX_FILES:
      raise UserError(f'{pattern}: expected at most {_MAX_FILES:,} files, got the range {content}. Correct it.')
    parts: Sequence[str] = [f'{number:0{width}d}' for number in range(int(first), int(last) + 1)]
  else:
    parts = content.split(',')
  endings = expand(after)
  if len(parts) * len(endings) > _MAX_FILES:
    raise UserError(f'{pattern}: expected at most {_MAX_FILES:,} files, got more. Correct the ranges.')
  return [before + part + ending for part in parts for ending in endings]


def _list_bucket(path: str, start: str) -> _Objects:
  """Lists the objects that a pattern, a folder or an object may stand for. `start` is `path` up to its first wildcard.

  Raises UserError if the wildcard is in the name of the bucket. Raises as `_Objects` if objects cannot be listed.
  """
  if start == path:  # without wildcards, the path is a folder, the whole bucket, or one object
    _, _, name = storage.split(path)
    objects_below = _Objects(f'{path}/')  # without objects beside the folder, such as PATH-large/
    if objects_below.is_folder(path) or not name:
      return objects_below
  if not re.match('[a-z0-9]+://[^/]+/', start):
    raise UserError(f'{path}: expected the name of a bucket before wildcards, such as '
                    f'{storage.split(path)[0]}://BUCKET/DIR/*.tar, got a pattern of buckets. Correct the address.')
  return _Objects(start)


class _LocalFiles:
  """The files of this machine; `_Objects` has the same methods for object storage."""

  def is_folder(self, path: str) -> bool:
    return os.path.isdir(path)

  def list_matches(self, pattern: str) -> list[str]:
    """Returns the files of a pattern without braces, in order. Raises UserError if there is none."""
    if not (files := self._match(pattern)):
      raise UserError(f'{pattern}: expected this file, or files of this pattern, got none. Correct the path or range.')
    return files

  def list_below(self, folder: str, fits: Callable[[str], bool]) -> list[str]:
    """Returns the files in and below a folder whose names fit, in order, without hidden files."""
    files = []
    for parent, folders, names in os.walk(folder):
      folders[:] = sorted(name for name in folders if not name.startswith('.'))  # `os.walk` visits these next
      files += [os.path.join(parent, name) for name in sorted(names) if fits(name) and not name.startswith('.')]
    return files

  def _match(self, pattern: str) -> list[str]:
    """Returns the files of a pattern without braces, in order; [] if there is none."""
    paths = sorted(glob.glob(pattern, recursive=True)) if _WILDCARD_START.search(pattern) else [pattern]
    return [path for path in paths if os.path.isfile(path)]


class _Objects(_LocalFiles):
  """The objects whose addresses begin with `start`, in place of the files of this machine."""

  def __init__(self, start: str) -> None:
    """Lists the objects once. Raises OSError, TemporaryError or UserError if they cannot be listed."""
    self._folder, _, start_of_name = start.rpartition('/')
    names = storage.list_names(self._folder, start_of_name)
    self._addresses = dict.fromkeys(f'{self._folder}/{name}' for name in names)  # a set that keeps the order

  def is_folder(self, path: str) -> bool:
    return path not in self._addresses and any(address.startswith(f'{path}/') for address in self._addresses)

  def list_below(self, folder: str, fits: Callable[[str], bool]) -> list[str]:
    files = []
    for address in self._addresses:
      parts = address.removeprefix(f'{folder}/').split('/')
      is_hidden = any(part.startswith('.') for part in parts)
      if address.startswith(f'{folder}/') and fits(parts[-1]) and not is_hidden:
        files.append(address)
    return files

  def _match(self, pattern: str) -> list[str]:
    if not _WILDCARD_START.search(pattern):
      return [pattern] if pattern in self._addresses else []
    regex = re.compile(_to_regex(pattern))
    return [address for address in self._addresses
            if regex.fullmatch(address) and '/.' not in address[len(self._folder):]]  # without hidden objects


def _group_by_name(patterns: Sequence[str], files: _LocalFiles) -> dict[str, list[str]]:
  """Returns the files of patterns with `{split}` by split. Raises UserError if a pattern has no files of a split."""
  paths_by_split: dict[str, list[str]] = {}
  for pattern in patterns:
    before, _, after = pattern.partition(SPLIT)
    regex = re.compile(f'{_to_regex(before)}(?P<split>[A-Za-z_]+){_to_regex(after.replace(SPLIT, "*"))}')
    for file in files.list_matches(pattern.replace(SPLIT, '*')):
      if match := regex.fullmatch(file):
        paths_by_split.setdefault(match['split'], []).append(file)
  for pattern in patterns:
    for name in paths_by_split:
      files.list_matches(pattern.replace(SPLIT, name))  # raises UserError if this split has no files of the pattern
  return paths_by_split


def _to_regex(pattern: str) -> str:
  """Returns the regular expression of a pattern with wildcards. `*` stands for characters other than a slash."""
  regexes = {'**/': '(?:.*/)?', '*': '[^/]*', '?': '[^/]'}
  parts = []
  for part in _WILDCARD.split(pattern):
    if part.startswith('['):
      parts.append(f'(?!/){fnmatch.translate(part)[4:-3]}')  # without `(?s:` and `)\Z`, which `translate` adds
    else:
      parts.append(regexes.get(part) or re.escape(part))
  return ''.join(parts)


def split_words(path: str) -> list[str]:
  """Returns the names of splits in the name of a file; if it has none, those in the name of the nearest folder."""
  for part in reversed(path.split('/')):
    if words := [word for word in re.findall('[a-z]+', part.lower()) if word in splits.NAMES]:
      return words
  return []


def _group_by_word(root: str, files: Sequence[str], *, source: str) -> dict[str, list[str]]:
  """Returns files by the split that their paths below `root` name, or all by ''. Raises UserError if it is unknown."""
  paths_by_split: dict[str, list[str]] = {}
  for file in files:
    words = sorted(set(split_words(os.path.relpath(file, root))))
    if len(words) > 1:
      raise UserError(f'{source}: expected the name of one split in {file}, got {documents.listed(words, 5)}. '
                      f'Write {SPLIT} where the name of the split stands in the pattern.')
    paths_by_split.setdefault(words[0] if words else '', []).append(file)
  if '' in paths_by_split and len(paths_by_split) > 1:
    unnamed = [os.path.relpath(file, root) for file in paths_by_split['']]
    raise UserError(f'{source}: expected the name of a split in all file names or in none, got none in '
                    f'{documents.listed(unnamed, _MAX_LISTED)}. Write {SPLIT} where the name of the split stands in '
                    'the pattern, or leave these files out.')
  return paths_by_split
