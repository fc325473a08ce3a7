"""`hf:OWNER/NAME[@REVISION][/SUBSET]`: datasets of the Hugging Face hub that are stored as Parquet files.

When a split is opened, its files are downloaded to the cache that other programs share, and read as `parquet:PATH`
(`parquet.py`). The subset and the split of each file are found as by the package `datasets`:

  1. from `configs:` at the beginning of the dataset's README.md;
  2. or from the paths of files: `[data/ or SUBSET/]SPLIT-00000-of-00004.parquet`;
  3. or from the branch `refs/convert/parquet`, where the hub has Parquet files: `SUBSET/SPLIT/0000.parquet`.

`opening.py` calls `pin` when a run begins, and later `opener`. `pin` replaces the revision by a commit. The config of
the run stores the commit, so that a resumed run reads the same files. `core/hub.py` communicates with the hub.
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
_NUM_FILES = re.compile(r'-\d{4,}-of-(\d{4,})')  # in -00000-of-00004
_MAX_FILE_BYTES, _MAX_README_BYTES = 2**40, 2**24
_NUM_THREADS = 8  # downloads at the same time
_MAX_SHOWN = 20  # names in a message

PathsBySubset = Mapping[str, Mapping[str, Sequence[str]]]
"""The paths of files in a repository, by subset and by split."""


class _File(NamedTuple):
  """A file in a repository: its subset, its split ('' = none), and its path."""
  subset: str
  split: str
  path: str


def opener(where: str, data: schema.Data, image_px: tuple[int, int], *,
           order: Sequence[str] = ()) -> Callable[[str], Source]:
  """Returns the function that opens a split of a dataset, after it has downloaded the files of the split.

  `order` has the classes of a run that resumes. Raises UserError if there is no such dataset or subset, the dataset may
  not be read, or it has no Parquet files; and TemporaryError if the hub cannot be reached, and the cache does not have
  the dataset.
  """
  del image_px
  repository, subset = _parse(where)
  repository, paths_by_split = _choose_files(*_find(repository), subset, where)
  if '' in paths_by_split and len(paths_by_split) > 1:  # the package `datasets` leaves out files without a split, too
    unread = paths_by_split['']
    paths_by_split = {split: paths_by_split[split] for split in sorted(paths_by_split) if split}
    warn_once(f'hf:{where}: files are of the splits {documents.listed(list(paths_by_split), _MAX_SHOWN)}; not read: '
              f'{documents.listed(unread, _MAX_SHOWN)}.')

  @functools.cache
  def open_named(split: str) -> Source:
    stored_split = '' if '' in paths_by_split else splits.resolve(split, paths_by_split, source=f'hf:{where}')
    downloaded = {stored_split: _download(repository, paths_by_split[stored_split])}
    if stored_split not in ('', 'train') and 'train' in paths_by_split:
      columns = ParquetSource.choose(downloaded[stored_split], data)
      if columns.label and not columns.names and not data.classes:  # then the training files define the classes
        downloaded['train'] = _download(repository, paths_by_split['train'])
    root = os.path.commonpath([os.path.dirname(path) for paths in downloaded.values() for path in paths])
    listed = shards.Listed(root, {name: shards.Files(paths) for name, paths in downloaded.items()})
    return indexed.opener(ParquetSource, listed, data, name=f'hf:{where}', order=order)(split)
  return open_named


def _parse(where: str) -> tuple[Repository, str]:
  """Returns the repository and the subset in `where`; '' = no subset. Raises UserError if `where` has another form."""
  try:
    return hub.parse(where, kind='dataset')
  except UserError:
    raise UserError(f'data.source: expected hf:OWNER/NAME, hf:OWNER/NAME@REVISION or hf:OWNER/NAME/SUBSET, got '
                    f'hf:{where}. Give one such as hf:uoft-cs/cifar10.') from None


def pin(where: str, recorded_sources: Iterable[str]) -> str:
  """Returns `OWNER/NAME@COMMIT[/SUBSET]` for a dataset `where`, `OWNER/NAME[@REVISION][/SUBSET]`.

  The commit is the one that the revision has now. If `where` has no revision, but `recorded_sources` of a run that
  resumes have the dataset as `hf:OWNER/NAME@COMMIT[/SUBSET]`, that commit is kept. Raises as `opener`.
  """
  repository, subset = _parse(where)
  if _COMMIT.fullmatch(repository.revision):
    return where

  def name_at(commit: str) -> str:
    return f'{repository.owner}/{repository.name}@{commit}' + (f'/{subset}' if subset else '')
  for source in () if '@' in where else recorded_sources:
    commit = source.partition('@')[2].partition('/')[0]
    if commit and source == f'hf:{name_at(commit)}':
      return name_at(commit)
  return name_at(_find(repository)[0].revision)


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


def _choose_files(repository: Repository, paths: Sequence[str], subset: str,
                  where: str) -> tuple[Repository, Mapping[str, Sequence[str]]]:
  """Returns the repository, or its branch `CONVERTED` if it has no Parquet files; and a subset's paths by split."""
  paths_by_subset = _find_parquets(repository, paths)
  if not paths_by_subset and (converted := hub.list_files(repository._replace(revision=CONVERTED))):
    repository = repository._replace(revision=converted.commit)
    converted_paths = [path for path in sorted(converted.files) if path.endswith('.parquet') and path.count('/') == 2]
    paths_by_subset = _group(_File(path.split('/')[0], path.split('/')[1].removeprefix('partial-'), path)
                             for path in converted_paths)
  if not paths_by_subset:
    extensions = sorted({os.path.splitext(path)[1] or path for path in paths})
    raise UserError(f'hf:{where}: expected a dataset with Parquet files, or with the branch {CONVERTED}, got files '
                    f'{documents.listed(extensions, _MAX_SHOWN)}. Download it, and give the path of what it has: '
                    f'huggingface_hub.snapshot_download({f"{repository.owner}/{repository.name}"!r}, '
                    "repo_type='dataset').")
  default = list(paths_by_subset)[0] if len(paths_by_subset) == 1 else _DEFAULT
  if (subset or default) not in paths_by_subset:
    base = where.removesuffix(f'/{subset}') if subset else where
    raise UserError(f'hf:{where}: expected one of the subsets {documents.listed(sorted(paths_by_subset), _MAX_SHOWN)}, '
                    f'got {subset!r}. Write hf:{base}/SUBSET.')
  return repository, paths_by_subset[subset or default]


def _group(files: Iterable[_File]) -> PathsBySubset:
  """Returns the paths of files by subset and by split."""
  grouped = dict[str, dict[str, list[str]]]()
  for file in files:
    grouped.setdefault(file.subset, {}).setdefault(file.split, []).append(file.path)
  return grouped


def _find_parquets(repository: Repository, paths: Sequence[str]) -> PathsBySubset:
  """Returns the Parquet files of a dataset: those that README.md lists, or else all, by their paths."""
  parquets = sorted(path for path in paths if path.endswith('.parquet'))
  if parquets and 'README.md' in paths and (listed := _group(_read_readme(repository, parquets))):
    return listed

  def subset_of(path: str) -> str:
    folder = path.partition('/')[0] if '/' in path else 'data'
    return _DEFAULT if folder in ('data', *splits.NAMES) else folder
  return _group(_File(subset_of(path), _split_of(path), path) for path in parquets)


def _split_of(path: str) -> str:
  """Returns the split that the name or the folder of a file names; '' if they name none."""
  if match := _SPLIT.fullmatch(path.rpartition('/')[2]):
    return match['split']
  words = shards.split_words(path)
  return words[0] if words else ''


def _read_readme(repository: Repository, paths: Sequence[str]) -> Iterator[_File]:
  """Yields those of the files `paths` that `configs:` at the beginning of README.md lists.

  An item is {config_name: SUBSET, default: true, data_files: [{split: train, path: train/*}, …]}; `data_files` and
  `path` may also be a pattern or a list of patterns.
  """
  readme = hub.fetch(repository, 'README.md', most_bytes=_MAX_README_BYTES)
  for config in _configs(readme.path.read_text(errors='replace')) if readme else ():
    subsets = {str(config.get('config_name', _DEFAULT))}
    if config.get('default') is True:
      subsets.add(_DEFAULT)
    entries = config.get('data_files')
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
      entries = [{'path': entries}]
    for entry in entries:
      listed = entry['path'] if isinstance(entry.get('path'), list) else [entry.get('path')]
      patterns = [pattern for pattern in listed if isinstance(pattern, str)]
      for path in paths:
        if any(fnmatch.fnmatch(path, pattern) for pattern in patterns):
          split = str(entry['split']) if 'split' in entry else _split_of(path)
          yield from (_File(subset, split, path) for subset in subsets)


def _configs(text: str) -> list[dict[str, Any]]:
  """Returns `configs` in the YAML between two lines `---` at the beginning of a README.md; [] if there is none."""
  import yaml  # huggingface_hub installs it
  parts = text.split('---\n', 2)
  try:
    head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
  except (yaml.YAMLError, RecursionError, ValueError):
    return []
  configs = head.get('configs') if isinstance(head, dict) else None
  return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []


def _download(repository: Repository, paths: Sequence[str]) -> tuple[str, ...]:
  """Downloads the files that the cache lacks, and returns the path of each file in the cache."""
  numbered = [(path, int(match[1])) for path in paths if (match := _NUM_FILES.search(path))]
  for path, num_files in numbered:
    if len(numbered) < num_files:
      raise UserError(f'{repository}: expected the {num_files:,} files of the split of {path}, got '
                      f'{len(numbered):,}. Download the dataset again without HF_HUB_OFFLINE=1.')

  def fetch(path: str) -> str:
    fetched = hub.fetch(repository, path, most_bytes=_MAX_FILE_BYTES)
    if fetched is None:
      raise UserError(f'{repository}/{path}: expected this file in the cache, as HF_HUB_OFFLINE=1, got none. Unset it '
                      'once to download the dataset.')
    return os.fspath(fetched.path)
  log.info('%s: opening %s Parquet files, downloaded unless the cache has them.', repository, f'{len(paths):,}')
  with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as pool:
    return tuple(pool.map(fetch, paths))
