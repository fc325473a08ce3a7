"""`hf:OWNER/NAME[@REVISION][/SUBSET]`: datasets of the Hugging Face hub that are stored as Parquet files.

When a split is opened, its files are downloaded to the cache that other programs share, and read as `parquet:PATH`
(`parquet.py`). The subset and the split of each file are found as by the package `datasets`:

  1. from `configs:` at the beginning of the dataset's README.md;
  2. or from the paths of files: `[data/ or SUBSET/]SPLIT-00000-of-00004.parquet`;
  3. or from the branch `refs/convert/parquet`, where the hub has Parquet files: `SUBSET/SPLIT/0000.parquet`.

`opening.py` calls `pin` when a run begins, and later `opener`. `pin` replaces the revision by a commit, which
the config of the run then has, so that a resumed run reads the same files. `core/hub.py` talks to the hub.
"""
from __future__ import annotations

import concurrent.futures
import fnmatch
import functools
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vit_jax.config import schema
from vit_jax.core import documents, hub
from vit_jax.core.errors import UserError
from vit_jax.core.hub import Repository
from vit_jax.data import splits
from vit_jax.data.formats import indexed, shards
from vit_jax.data.formats.parquet import ParquetSource
from vit_jax.data.source import Source, warn_once

log = logging.getLogger('vit_jax.data')

CONVERTED = 'refs/convert/parquet'
"""The branch in which the hub keeps Parquet files that it has made of a dataset of another format."""
_DEFAULT = 'default'
_COMMIT = re.compile(r'[0-9a-f]{40}')
_SPLIT = re.compile(r'(?P<split>\w+(?:\.\w+)*?)-\d{4,}(?:-of-\d{4,}).*\.parquet')  # train-00000-of-00004.parquet
_NUMBERED = re.compile(r'-\d{4,}-of-(\d{4,})')  # the part -00000-of-00004
_MOST_BYTES, _MOST_README = 2**40, 2**24  # bytes of a file, and of README.md
_THREADS, _SHOWN = 8, 20  # downloads at the same time; names in a message

Names = Mapping[str, Mapping[str, Sequence[str]]]
"""The paths of files in a repository, by subset and by split."""


class _Listed(NamedTuple):
  """The path of a file in a repository, with its subset and its split, '' = none."""
  subset: str
  split: str
  name: str


def opener(where: str, data: schema.Data, image_px: tuple[int, int], *,
           order: Sequence[str] = ()) -> Callable[[str], Source]:
  """Returns the function that opens a split of a dataset, after it has downloaded the files of the split.

  Raises UserError if there is no such dataset or subset, it may not be read, or it has no Parquet files; and
  TemporaryError if the hub cannot be reached, and the cache does not have the dataset.
  """
  del image_px
  repository, subset = _parse(where)
  repository, by_split = _choose(*_find(repository), subset, where)
  if '' in by_split and len(by_split) > 1:  # as the package `datasets` does, files without a split are left out
    named = {split: by_split[split] for split in sorted(by_split) if split}
    warn_once(f'hf:{where}: files are of the splits {documents.listed(list(named), _SHOWN)}; not read: '
              f'{documents.listed(by_split[""], _SHOWN)}.')
    by_split = named

  @functools.cache
  def open_named(split: str) -> Source:
    stored = '' if '' in by_split else splits.resolve(split, by_split, source=f'hf:{where}')
    downloaded = {stored: _download(repository, by_split[stored])}
    if stored and stored != 'train' and 'train' in by_split:
      columns = ParquetSource.choose(downloaded[stored], data)
      if columns.label and not columns.names and not data.classes:  # then the training files define the classes
        downloaded['train'] = _download(repository, by_split['train'])
    root = os.path.commonpath([os.path.dirname(path) for paths in downloaded.values() for path in paths])
    listed = shards.Listed(root, {name: shards.Files(paths) for name, paths in downloaded.items()})
    return indexed.opener(ParquetSource, listed, data, name=f'hf:{where}', order=order)(split)
  return open_named


def _parse(where: str) -> tuple[Repository, str]:
  """Returns the repository and the subset of a source, '' = not given. Raises UserError if it has another form."""
  try:
    return hub.parse(where, kind='dataset')
  except UserError:
    raise UserError(f'data.source: expected hf:OWNER/NAME, hf:OWNER/NAME@REVISION or hf:OWNER/NAME/SUBSET, got '
                    f'hf:{where}. Give one such as hf:uoft-cs/cifar10.') from None


def pin(where: str, known: Iterable[str]) -> str:
  """Returns `OWNER/NAME@COMMIT[/SUBSET]` for a dataset `where`, `OWNER/NAME[@REVISION][/SUBSET]`.

  The commit is that of the revision now. Without a revision, it is that of the same dataset in `known`, the sources of
  a run that resumes, `hf:OWNER/NAME@COMMIT[/SUBSET]`, if it is there. Raises UserError and TemporaryError as `opener`.
  """
  repository, subset = _parse(where)
  if _COMMIT.fullmatch(repository.revision):
    return where

  def at(commit: str) -> str:
    return f'{repository.owner}/{repository.name}@{commit}' + (f'/{subset}' if subset else '')
  if '@' not in where:
    for source in known:
      if (commit := source.partition('@')[2].partition('/')[0]) and source == f'hf:{at(commit)}':
        return at(commit)
  return at(_find(repository)[0].revision)


def _find(repository: Repository) -> tuple[Repository, tuple[str, ...]]:
  """Returns the repository at the commit of its revision, and the paths of its files."""
  commit = hub.list_files(repository)
  if commit is None:
    if hub.is_offline():
      raise UserError(f'{repository}: expected a dataset and revision in the cache, since HF_HUB_OFFLINE=1, got '
                      f'revision {repository.revision!r}, which is not there. Unset it to download the dataset.')
    raise UserError(f'{repository}: expected a branch, tag or commit of {repository.page}, got '
                    f'{repository.revision!r}, which it does not have. Correct it, or leave it out for the newest one.')
  return repository._replace(revision=commit.commit), commit.files


def _choose(repository: Repository, names: Sequence[str], subset: str,
            where: str) -> tuple[Repository, Mapping[str, Sequence[str]]]:
  """Returns the repository, or its branch `CONVERTED` if it has no Parquet files, and a subset's files by split."""
  files = _subsets(repository, names)
  if not files and (converted := hub.list_files(repository._replace(revision=CONVERTED))):
    repository = repository._replace(revision=converted.commit)
    parts = [name.split('/') for name in sorted(converted.files) if name.endswith('.parquet')]
    files = _grouped(_Listed(path[0], path[1].removeprefix('partial-'), '/'.join(path)) for path in parts
                     if len(path) == 3)
  if not files:
    kinds = sorted({os.path.splitext(name)[1] or name for name in names})
    raise UserError(f'hf:{where}: expected a dataset with Parquet files, or with the branch {CONVERTED}, got files '
                    f'{documents.listed(kinds, _SHOWN)}. Download it, and give the path of what it has: '
                    f'huggingface_hub.snapshot_download({f"{repository.owner}/{repository.name}"!r}, '
                    "repo_type='dataset').")
  chosen = subset or (list(files)[0] if len(files) == 1 else _DEFAULT)
  if chosen not in files:
    base = where.removesuffix(f'/{subset}') if subset else where
    raise UserError(f'hf:{where}: expected one of the subsets {documents.listed(sorted(files), _SHOWN)}, got '
                    f'{subset!r}. Write hf:{base}/SUBSET.')
  return repository, files[chosen]


def _grouped(files: Iterable[_Listed]) -> Names:
  """Returns files by subset and by split."""
  grouped: dict[str, dict[str, list[str]]] = {}
  for file in files:
    grouped.setdefault(file.subset, {}).setdefault(file.split, []).append(file.name)
  return grouped


def _subsets(repository: Repository, names: Sequence[str]) -> Names:
  """Returns the Parquet files of a dataset, as its README.md lists them, or by their names."""
  parquets = sorted(name for name in names if name.endswith('.parquet'))
  if parquets and 'README.md' in names and (listed := _grouped(_listed(repository, parquets))):
    return listed

  def subset(name: str) -> str:
    folder = name.partition('/')[0] if '/' in name else 'data'
    return _DEFAULT if folder in ('data', *splits.NAMES) else folder
  return _grouped(_Listed(subset(name), _split(name), name) for name in parquets)


def _split(name: str) -> str:
  """Returns the split of a file by its name or folder; '' if they have no name of a split."""
  if match := _SPLIT.fullmatch(name.rpartition('/')[2]):
    return match['split']
  words = shards.split_words(name)
  return words[0] if words else ''


def _listed(repository: Repository, names: Sequence[str]) -> Iterator[_Listed]:
  """Yields those of the files `names` that `configs:` at the beginning of README.md lists.

  An item is {config_name: SUBSET, default: true, data_files: [{split: train, path: train/*}, …]}; `data_files` and
  `path` may also be a pattern or a list of patterns.
  """
  readme = hub.fetch(repository, 'README.md', most_bytes=_MOST_README)
  for config in _configs(readme.path.read_text(errors='replace')) if readme else ():
    subsets = {str(config.get('config_name', _DEFAULT))}
    if config.get('default') is True:
      subsets.add(_DEFAULT)
    parts = config.get('data_files')
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
      parts = [{'path': parts}]
    for part in parts:
      path = part.get('path')
      patterns = [pattern for pattern in (path if isinstance(path, list) else [path]) if isinstance(pattern, str)]
      for name in names:
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
          split = str(part['split']) if 'split' in part else _split(name)
          yield from (_Listed(subset, split, name) for subset in subsets)


def _configs(text: str) -> list[dict[str, Any]]:
  """Returns `configs` of the YAML between two lines `---` at the beginning of a README.md; [] if there is none."""
  import yaml  # huggingface_hub installs it
  parts = text.split('---\n', 2)
  try:
    head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
  except (yaml.YAMLError, RecursionError, ValueError):
    return []
  configs = head.get('configs') if isinstance(head, dict) else None
  return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []


def _download(repository: Repository, names: Sequence[str]) -> tuple[str, ...]:
  """Returns the paths of files in the cache, after those that are missing have been downloaded."""
  numbered = [(name, match) for name in names if (match := _NUMBERED.search(name))]
  for name, match in numbered:
    if len(numbered) < int(match[1]):
      raise UserError(f'{repository}: expected the {int(match[1]):,} files of the split of {name}, got '
                      f'{len(numbered):,}. Download the dataset again without HF_HUB_OFFLINE=1.')

  def fetch(name: str) -> str:
    fetched = hub.fetch(repository, name, most_bytes=_MOST_BYTES)
    if fetched is None:
      raise UserError(f'{repository}/{name}: expected this file in the cache, as HF_HUB_OFFLINE=1, got none. Unset it '
                      'once to download the dataset.')
    return os.fspath(fetched.path)
  log.info('%s: opening %s Parquet files, downloaded unless the cache has them.', repository, f'{len(names):,}')
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    return tuple(pool.map(fetch, names))
