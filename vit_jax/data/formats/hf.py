"""`hf:OWNER/NAME[@REVISION][/SUBSET]`: datasets of the Hugging Face hub that are stored as Parquet files.

When a split is opened, its files are downloaded to the cache that other programs share, and read as `parquet:PATH`
(`parquet.py`). The files of each subset and split are listed at the beginning of the dataset's README.md (`configs:`),
or follow from their names, as for the package `datasets`: `SPLIT-00000-of-00004.parquet` in the folder `data` or in one
with the name of the subset. If a dataset has no Parquet files, those that the hub has made are read, in the branch
`refs/convert/parquet`: `SUBSET/SPLIT/0000.parquet`.

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
from typing import Any

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
_SPLIT = re.compile(r'(?P<split>\w+(?:\.\w+)*?)-\d{4,}(?:-of-\d{4,}).*\.parquet')
_NUMBERED = re.compile(r'-\d{4,}-of-(\d{4,})')
_MOST_BYTES, _MOST_README = 2**40, 2**24
_THREADS, _SHOWN = 8, 20

Names = Mapping[str, Mapping[str, Sequence[str]]]
"""Names of files by subset and split."""


def opener(where: str, data: schema.Data, image_px: tuple[int, int], *,
           order: Sequence[str] = ()) -> Callable[[str], Source]:
  """Opens the splits of a dataset; the files of a split are downloaded when it is opened.

  Raises:
    UserError: there is no such dataset or subset, it may not be read, or it has no Parquet files.
    TemporaryError: the hub cannot be reached, and the cache does not have the dataset.
  """
  del image_px
  repository, subset = _parse(where)
  repository, by_split = _choose(*_find(repository), subset, where)
  if '' in by_split and len(by_split) > 1:  # as the package `datasets` reads them
    names = sorted(set(by_split) - {''})
    warn_once(f'hf:{where}: files are of the splits {documents.listed(names, _SHOWN)}; not read: '
              f'{documents.listed(by_split[""], _SHOWN)}.')
    by_split = {name: by_split[name] for name in names}

  @functools.cache
  def open_named(split: str) -> Source:
    wanted = '' if '' in by_split else splits.resolve(split, by_split, source=f'hf:{where}')
    downloaded = {wanted: _download(repository, by_split[wanted])}
    if wanted and wanted != 'train' and 'train' in by_split:
      columns = ParquetSource.choose(downloaded[wanted], data)
      if columns.label and not columns.names and not data.classes:  # the training files define the classes
        downloaded['train'] = _download(repository, by_split['train'])
    root = os.path.commonpath([os.path.dirname(path) for paths in downloaded.values() for path in paths])
    listed = shards.Listed(root, {name: shards.Files(paths) for name, paths in downloaded.items()})
    return indexed.opener(ParquetSource, listed, data, name=f'hf:{where}', order=order)(split)
  return open_named


def _parse(where: str) -> tuple[Repository, str]:
  """Returns the repository, and the subset or ''. Raises UserError if the name has another form."""
  try:
    return hub.parse(where, kind='dataset')
  except UserError:
    raise UserError(f'data.source: expected hf:OWNER/NAME, hf:OWNER/NAME@REVISION or hf:OWNER/NAME/SUBSET, got '
                    f'hf:{where}. Give one such as hf:uoft-cs/cifar10.') from None


def pin(where: str, known: Iterable[str]) -> str:
  """Returns the dataset at a commit: that of the same dataset in `known` if no revision is given, or the present one.

  Args:
    where: `OWNER/NAME[@REVISION][/SUBSET]`.
    known: the sources of a run that resumes, which have commits.

  Raises:
    UserError, TemporaryError: as `opener`.
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
  """Returns the repository at a commit, and the names of its files."""
  commit = hub.find(repository)
  if commit is None:
    if hub.is_offline():
      raise UserError(f'{repository}: expected a dataset and revision in the cache, since HF_HUB_OFFLINE=1, got '
                      f'revision {repository.revision!r}, which is not there. Unset it to download the dataset.')
    raise UserError(f'{repository}: expected a branch, tag or commit of {repository.page}, got '
                    f'{repository.revision!r}, which it does not have. Correct it, or leave it out for the newest one.')
  return repository._replace(revision=commit.commit), commit.files


def _choose(repository: Repository, names: Sequence[str], subset: str,
            where: str) -> tuple[Repository, Mapping[str, Sequence[str]]]:
  """Returns the repository, at `CONVERTED` if it has no Parquet files, and the files of a subset by split.

  Raises:
    UserError: neither has Parquet files, or there is no such subset.
  """
  files = _subsets(repository, names)
  if not files and (converted := hub.find(repository._replace(revision=CONVERTED))):
    repository = repository._replace(revision=converted.commit)
    parts = [(name, name.split('/')) for name in sorted(converted.files) if name.endswith('.parquet')]
    files = _grouped((folders[0], folders[1].removeprefix('partial-'), name) for name, folders in parts
                     if len(folders) == 3)
  if not files:
    kinds = sorted({os.path.splitext(name)[1] or name for name in names})
    raise UserError(f'hf:{where}: expected a dataset with Parquet files, or with the branch {CONVERTED}, got files '
                    f'{documents.listed(kinds, _SHOWN)}. Download it, and give the path of what it has: '
                    f'huggingface_hub.snapshot_download({f"{repository.owner}/{repository.name}"!r}, '
                    "repo_type='dataset').")
  chosen = subset or (_DEFAULT if _DEFAULT in files else next(iter(files)) if len(files) == 1 else '')
  if chosen not in files:
    base = where.removesuffix(f'/{subset}') if subset else where
    raise UserError(f'hf:{where}: expected one of the subsets {documents.listed(sorted(files), _SHOWN)}, got '
                    f'{subset!r}. Write hf:{base}/SUBSET.')
  return repository, files[chosen]


def _grouped(files: Iterable[tuple[str, str, str]]) -> Names:
  """Returns names of files, given the subset, the split and the name of each."""
  grouped: dict[str, dict[str, list[str]]] = {}
  for subset, split, name in files:
    grouped.setdefault(subset, {}).setdefault(split, []).append(name)
  return grouped


def _subsets(repository: Repository, names: Sequence[str]) -> Names:
  """Returns the Parquet files of a dataset, as its README.md lists them, or by their names."""
  parquets = sorted(name for name in names if name.endswith('.parquet'))
  if parquets and 'README.md' in names and (listed := _grouped(_listed(repository, parquets))):
    return listed

  def subset(name: str) -> str:
    folder = name.partition('/')[0] if '/' in name else ''
    return _DEFAULT if folder in ('', 'data') or folder in splits.NAMES else folder
  return _grouped((subset(name), _split(name), name) for name in parquets)


def _split(name: str) -> str:
  """Returns the split of a file by its name or folder; '' if they have no name of a split."""
  if match := _SPLIT.fullmatch(name.rpartition('/')[2]):
    return match['split']
  return next(iter(shards.split_words(name)), '')


def _listed(repository: Repository, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
  """Yields subset, split and name of the files that `configs:` at the beginning of README.md lists."""
  readme = hub.fetch(repository, 'README.md', most_bytes=_MOST_README)
  for config in _configs(readme.path.read_text(errors='replace')) if readme else ():
    subsets = {str(config.get('config_name', _DEFAULT)), *[_DEFAULT] * (config.get('default') is True)}
    files = config.get('data_files')
    if not isinstance(files, list) or not all(isinstance(part, dict) for part in files):
      files = [{'path': files}]  # without splits
    for part in files:
      patterns = part.get('path')
      patterns = [pattern for pattern in (patterns if isinstance(patterns, list) else [patterns])
                  if isinstance(pattern, str)]
      for name in (name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)):
        yield from ((subset, str(part['split']) if 'split' in part else _split(name), name) for subset in subsets)


def _configs(text: str) -> list[dict[str, Any]]:
  """Returns `configs` of the YAML at the beginning of a README.md; [] if it has none, or is damaged."""
  import yaml  # which huggingface_hub needs
  parts = text.split('---\n', 2)
  try:
    head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
  except (yaml.YAMLError, RecursionError, ValueError):
    return []
  configs = head.get('configs') if isinstance(head, dict) else None
  return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []


def _download(repository: Repository, names: Sequence[str]) -> tuple[str, ...]:
  """Returns the paths of files in the cache, after those that are missing have been downloaded."""
  for name in names:
    if (numbered := _NUMBERED.search(name)) and (
        count := sum(bool(_NUMBERED.search(other)) for other in names)) < int(numbered[1]):
      raise UserError(f'{repository}: expected the {int(numbered[1]):,} files of the split of {name}, got {count:,}. '
                      'Download the dataset again without HF_HUB_OFFLINE=1.')

  def fetch(name: str) -> str:
    fetched = hub.fetch(repository, name, most_bytes=_MOST_BYTES)
    if fetched is None:
      raise UserError(f'{repository}/{name}: expected this file in the cache, as HF_HUB_OFFLINE=1, got none. Unset it '
                      'once to download the dataset.')
    return os.fspath(fetched.path)
  log.info('%s: opening %s Parquet files, downloaded unless the cache has them.', repository, f'{len(names):,}')
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    return tuple(pool.map(fetch, names))
