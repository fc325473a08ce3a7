"""What the folders of an image folder are: splits, or classes; from their names and from the folders in them.

Folders named `train`, `val` and `test` are splits. Others are splits if their names contain these words, such as
`Training` and `Test_images`, and they have the same folders in each. Class folders may have folders of their own; where
these have names in common, or the names of splits, the class folders are probably something else, such as splits
with other names. That is a doubt: `folder.py` calls `find` before it opens a split, and keeps the doubt in its source;
`opening.check_learnable` raises it for whatever learns from the classes. This module reads folders, but no image.
"""
from __future__ import annotations

import collections
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError
from vit_jax.data import splits, user_files
from vit_jax.data.labels import classes
from vit_jax.data.source import warn_once

_SAMPLED = 16  # class folders that are looked into: what they have in common, a few show
_MOST_WRAPPERS = 8  # folders in one another
_SHOWN = 5
_INNER = 'If the inner ones are the classes, name the outer ones train and test, or move the images to PATH/CLASS'
_ANYWAY = '. If the outer folders are the classes, list their names in a file and set data.classes=FILE.'
_OF_ARCHIVES = '__MACOSX'  # a folder of metadata that archives of macOS have beside the content
_WORDS = {'train': 'train', 'test': 'test', 'val': 'val', 'dev': 'val'}
"""Beginnings of words for splits, and the split that each is for."""
_WORD = re.compile('(train|training|test|testing|val|valid|validation|validate|dev|eval|evaluation)'
                   '(set|data|images?|imgs?|photos|pics)?')


class Layout(NamedTuple):
  """The splits of an image folder, and what speaks against its class folders.

  splits: the folder of each split, relative to the root; empty = the folders of the root are the classes.
  doubt: a message that says why the class folders are probably something else; '' = nothing says so.
  """
  splits: Mapping[str, str]
  doubt: str = ''


def find(root: str) -> Layout:
  """Returns the layout of a folder of images.

  Raises:
    UserError: a split has two folders, or all images are in one folder that has the splits.
  """
  names = subfolders(root)
  exact = [name for name in names if name.lower() in splits.NAMES]
  folders = {name.lower(): name for name in exact}
  if len(folders) < len(exact):
    raise UserError(f'{root}: expected one folder for each split, got {documents.listed(sorted(exact), _SHOWN)}. '
                    'Rename one of them.')
  if len(names) == 1 and not folders:
    path, below = _inside(root, names[0])
    if inner := _splits_in(below):
      raise UserError(f'{root}: expected the folders train and test, or a folder for each class, got one folder, '
                      f'{documents.shown(path)}, which has the splits {documents.listed(inner, _SHOWN)}. Name that '
                      f'folder: folder:{os.path.join(root, documents.shown(path))}.')
  folders = folders | _alike(root, names, folders) if folders else _by_words(root, names)
  return Layout(folders, _doubt(root, folders.get('train', min(folders.values())) if folders else ''))


def subfolders(folder: str) -> list[str]:
  """Returns the names of the folders in a folder, without hidden ones, `__MACOSX` and links to a parent folder.

  Raises:
    UserError: it cannot be read.
  """
  try:
    with os.scandir(folder) as entries:
      return sorted(entry.name for entry in entries
                    if not entry.name.startswith('.') and entry.name != _OF_ARCHIVES and user_files.is_folder(entry)
                    and not (entry.is_symlink() and not user_files.leads_out(folder, os.path.realpath(entry.path))))
  except OSError as error:
    raise failures.unreadable(error, folder) from error


def _alike(root: str, names: Sequence[str], folders: Mapping[str, str]) -> dict[str, str]:
  """Returns further splits: folders with a word for a split, which have folders in common with those of splits."""
  inner = {_key(name) for folder in folders.values() for name in _inside(root, folder)[1]}
  others = [name for name in names
            if (split := split_of(name)) and name not in folders.values() and split not in folders
            and not (split == 'val' and set(splits.SYNONYMS) & set(folders))]
  further = _by_split([name for name in others if inner & {_key(below) for below in _inside(root, name)[1]}])
  _report(root, further, ())
  return further


def _by_words(root: str, names: Sequence[str]) -> dict[str, str]:
  """Returns the folders that are splits by words in their names and by what is in them; {} = they are classes."""
  if len(names) < 2 or len(names) > _SAMPLED:
    return {}
  folders = _by_split(names)
  if not folders or not all(_is_word(name) for name in names):
    nested = _nested(root, names)
    folders = _by_split(list(nested)) if _is_repeated(names, nested) else {}
  _report(root, folders, [name for name in names if name not in folders.values()])
  return {split: f'{name}/{name}' if subfolders(os.path.join(root, name)) == [name] else name  # as in some archives
          for split, name in folders.items()}


def _report(root: str, folders: Mapping[str, str], ignored: Sequence[str]) -> None:
  """Logs which folders are taken as splits, if there are any."""
  if folders:
    rest = f' Not read: {documents.listed(ignored, _SHOWN)}.' if ignored else ''
    taken = ', '.join(f'{documents.shown(name)} = {split}' for split, name in sorted(folders.items()))
    warn_once(f'{root}: folders are taken as splits by their names: {taken}.{rest}')


def _doubt(root: str, where: str) -> str:
  """Returns why the folders in `root/where` are probably no classes; '' if nothing says so."""
  folder = os.path.join(root, where) if where else root
  names = subfolders(folder)
  if len(names) == 1:
    path, below = _inside(folder, names[0])
    inner = os.path.join(folder, documents.shown(path))
    advice = 'Move these folders up.' if where else f'If they are the classes, set folder:{inner}.'
    return (f'{folder}: expected a folder for each of at least two classes, got one folder, which holds others: '
            f'{documents.shown(path)} has {documents.listed(below, _SHOWN)}. {advice}') if len(below) > 1 else ''
  nested = _nested(folder, names)
  for name, below in nested.items():
    if has := _splits_in(below):
      return (f'{folder}: expected folders of classes, got {documents.shown(name)}, which has the splits '
              f'{documents.listed(has, _SHOWN)}. If that is the dataset, set '
              f'folder:{os.path.join(folder, documents.shown(name))}; else move the images to PATH/train/CLASS and '
              f'PATH/test/CLASS{_ANYWAY}')
  if not where and all(map(_is_word, names)) and len({split_of(name) for name in names}) > 1:
    return (f'{folder}: expected folders of classes, or one folder for each split, got several folders with words for '
            f'splits: {documents.listed(names, _SHOWN)}. Move the images to PATH/train/CLASS and PATH/test/CLASS'
            f'{_ANYWAY}')
  if not _is_repeated(names, nested):
    return _doubt_of_shared(folder, names)
  first = next(iter(nested.values()))
  return (f'{folder}: expected folders of classes, got folders with the same folders in each: '
          f'{documents.listed(list(nested), _SHOWN)} have {documents.listed(first, _SHOWN)}. {_INNER}{_ANYWAY}')


def _doubt_of_shared(folder: str, names: Sequence[str]) -> str:
  """Returns why folders that have some folders in common are probably no classes; '' if nothing says so.

  All have one in common, or most have one that another has, and their names differ in numbers alone, as years do.
  """
  inner, several = dict[str, set[str]](), set[str]()  # folders in each; those with a folder beside them
  for name in names[:_SAMPLED]:
    first, *wrappers = itertools.islice(_wrappers(folder, name), _MOST_WRAPPERS)
    below = subfolders(os.path.join(folder, wrappers[-1] if wrappers else first))
    if (wrappers or below) and not any(user_files.images_in(os.path.join(folder, name))):
      inner[name] = {_key(os.path.basename(path)) for path in (*wrappers, *below)}
      several |= {_key(path) for path in below if len(below) > 1}
  if len(inner) < 2 or 2 * len(inner) < min(len(names), _SAMPLED):
    return ''
  counts = collections.Counter(key for keys in inner.values() for key in keys if key in several)
  are_numbered = len({re.sub(r'\d+', '0', name) for name in inner}) == 1
  shared = {key for key, count in counts.items() if count == len(inner) or (are_numbered and count > 1)}
  having = [name for name, keys in inner.items() if keys & shared]
  if 2 * len(having) < len(inner) or not shared:
    return ''
  return (f'{folder}: expected folders of classes, got folders that share some folders: '
          f'{documents.listed(having, _SHOWN)} have {documents.listed(sorted(shared), _SHOWN)}. {_INNER}{_ANYWAY}')


def _nested(root: str, names: Sequence[str]) -> dict[str, list[str]]:
  """Returns the first folders with the folders in them; a folder that is alone in another one counts as that one."""
  return {name: below for name in names[:_SAMPLED] if (below := _inside(root, name)[1])}


def _is_repeated(names: Sequence[str], nested: Mapping[str, Sequence[str]]) -> bool:
  """Returns whether at least half of the folders have at least two folders of the same names in each."""
  if len(nested) < 2 or 2 * len(nested) < min(len(names), _SAMPLED):
    return False
  return len(set.intersection(*({_key(name) for name in below} for below in nested.values()))) > 1


def _inside(root: str, name: str) -> tuple[str, list[str]]:
  """Returns the first folder in or below `name` that has more than one other folder, and the folders in it."""
  for path in itertools.islice(_wrappers(root, name), _MOST_WRAPPERS):
    below = subfolders(os.path.join(root, path))
    if len(below) != 1:
      return path, below
  return name, []


def _wrappers(root: str, name: str) -> Iterator[str]:
  """Yields a folder, and then the only one in it, as long as there is nothing else."""
  path = name
  while True:
    yield path
    below = subfolders(os.path.join(root, path))
    if len(below) != 1 or any(user_files.images_in(os.path.join(root, path))):
      return
    path = f'{path}/{below[0]}'


def _splits_in(names: Sequence[str]) -> list[str]:
  """Returns the names that are those of splits, if there are at least two."""
  exact = [name for name in names if name.lower() in splits.NAMES]
  meant = exact if len(exact) > 1 else [name for name in _by_split(names).values() if _is_word(name)]
  return meant if len(meant) > 1 else []


def _by_split(names: Sequence[str]) -> dict[str, str]:
  """Returns the name with a word for each split; {} unless each name has a word for another split."""
  folders = {split_of(name): name for name in names}
  return folders if len(folders) == len(names) and '' not in folders else {}


def split_of(name: str) -> str:
  """Returns the split that a name has a word for; '' if it has none, or words for several."""
  meant = {split for word, split in _WORDS.items() if word in name.lower()}
  return meant.pop() if len(meant) == 1 else ''


def _is_word(name: str) -> bool:
  """Returns whether a name has a complete word for a split, so that it hardly is the name of a class."""
  words = re.findall('[A-Z]?[a-z]+|[A-Z]+', name)
  return any(_WORD.fullmatch(word.lower()) for word in (*words, name))


def _key(name: str) -> str:
  """Returns what names have in common that differ in case or in their Unicode form."""
  return classes.composed(name.casefold())
