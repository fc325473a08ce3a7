"""Decides whether the folders in an image folder are splits or classes, by their names and by the inner folders.

`folder.py` calls `find` before it opens a split. This module reads the names in folders, but no image. Examples of what
`find` returns:

  train/{cat,dog}, test/{cat,dog}           splits: the names are exact names of splits
  Training/{cat,dog}, Test_images/{cat}     splits: each name has a whole word for another split
  mytrain/{cat,dog}, mytest/{cat,dog}       splits: each name contains such a word, and the inner folders are the same
  cat, dog                                  classes
  2023/{cat,dog}, 2024/{cat,dog}            classes, with a doubt: the inner folders are the same

A doubt is a message: the class folders are probably something else, such as splits with other names. `folder.py` stores
the doubt in the source, and `opening.check_learnable` raises it as an error in jobs that learn from the classes.
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

_MAX_SAMPLED = 16  # class folders that are opened: a few show what all have in common
_MAX_DEPTH = 8  # of folders inside one another
_MAX_SHOWN = 5  # names in a message
_INNER = 'If the inner ones are the classes, name the outer ones train and test, or move the images to PATH/CLASS'
_ANYWAY = '. If the outer folders are the classes, list their names in a file and set data.classes=FILE.'
_METADATA = '__MACOSX'  # archives that macOS makes have this folder beside the content
_SPLIT_BY_TEXT = {'train': 'train', 'test': 'test', 'val': 'val', 'dev': 'val'}
"""The split that each text in the name of a folder stands for."""
# A word for a split, such as `train`, `validation`, `testset` or `trainimages`:
_SPLIT_WORD = re.compile('(train|training|test|testing|val|valid|validation|validate|dev|eval|evaluation)'
                         '(set|data|images?|imgs?|photos|pics)?')


class Layout(NamedTuple):
  """The layout of an image folder.

  splits: the folder of each split, relative to the root; empty = the folders in the root are the classes.
  doubt: the message why the class folders are probably something else; '' = no doubt.
  """
  splits: Mapping[str, str]
  doubt: str = ''


def find(root: str) -> Layout:
  """Returns the layout of a folder. Raises UserError if a split has two folders, or one inner folder has the splits."""
  names = subfolders(root)
  exact_names = [name for name in names if name.lower() in splits.NAMES]
  folder_by_split = {name.lower(): name for name in exact_names}
  if len(folder_by_split) < len(exact_names):
    raise UserError(f'{root}: expected one folder for each split, got '
                    f'{documents.listed(sorted(exact_names), _MAX_SHOWN)}. Rename one of them.')
  if len(names) == 1 and not folder_by_split:
    path, inner = _innermost(root, names[0])
    if inner_splits := _split_names(inner):
      raise UserError(f'{root}: expected the folders train and test, or a folder for each class, got one folder, '
                      f'{documents.shown(path)}, which has the splits {documents.listed(inner_splits, _MAX_SHOWN)}. '
                      f'Name that folder: folder:{os.path.join(root, documents.shown(path))}.')
  if folder_by_split:
    further = _further_splits(root, names, folder_by_split)
    _warn_about_words(root, further, unread=())
    folder_by_split |= further
  else:
    folder_by_split = _splits_by_words(root, names)
  # The folder whose inner folders define the classes, '' = the root:
  defining_folder = folder_by_split.get('train', min(folder_by_split.values())) if folder_by_split else ''
  return Layout(folder_by_split, _doubt(root, defining_folder))


def subfolders(folder: str) -> list[str]:
  """Returns the names of the folders in a folder, except hidden ones, `__MACOSX` and links to a parent folder."""
  try:
    with os.scandir(folder) as entries:
      return sorted(entry.name for entry in entries
                    if not entry.name.startswith('.') and entry.name != _METADATA and user_files.is_folder(entry)
                    and not (entry.is_symlink() and not user_files.leads_out(folder, os.path.realpath(entry.path))))
  except OSError as error:
    raise failures.unreadable(error, folder) from error


def _further_splits(root: str, names: Sequence[str], folder_by_split: Mapping[str, str]) -> dict[str, str]:
  """Returns the folders of splits that are not in `folder_by_split`, by words in their names and by inner folders."""
  inner_keys = {_key(name) for folder in folder_by_split.values() for name in _innermost(root, folder)[1]}
  excluded_splits = {'', *folder_by_split}
  if excluded_splits & set(splits.SYNONYMS):
    excluded_splits.add('val')
  others = [name for name in names if name not in folder_by_split.values() and split_of(name) not in excluded_splits]
  return _one_per_split([name for name in others if inner_keys & set(map(_key, _innermost(root, name)[1]))])


def _splits_by_words(root: str, names: Sequence[str]) -> dict[str, str]:
  """Returns the folder of each split, by words in the names and by inner folders, and warns; {} = they are classes."""
  if not 2 <= len(names) <= _MAX_SAMPLED:
    return {}
  name_by_split = _one_per_split(names)
  if not name_by_split or not all(map(_has_split_word, names)):
    nested = _nested(root, names)
    name_by_split = _one_per_split(list(nested)) if _have_common(names, nested) else {}
  _warn_about_words(root, name_by_split, unread=[name for name in names if name not in name_by_split.values()])
  return {split: f'{name}/{name}' if subfolders(os.path.join(root, name)) == [name] else name  # as in some archives
          for split, name in name_by_split.items()}


def _warn_about_words(root: str, name_by_split: Mapping[str, str], *, unread: Sequence[str]) -> None:
  """Warns which folders are taken as splits by words in their names, if there are any."""
  if name_by_split:
    taken = ', '.join(f'{documents.shown(name)} = {split}' for split, name in sorted(name_by_split.items()))
    not_read = f' Not read: {documents.listed(unread, _MAX_SHOWN)}.' if unread else ''
    warn_once(f'{root}: folders are taken as splits by their names: {taken}.{not_read}')


def _doubt(root: str, split_folder: str) -> str:
  """Returns the doubt about the class folders of a split, or in the root if `split_folder` is ''; '' = no doubt."""
  folder = os.path.join(root, split_folder) if split_folder else root
  names = subfolders(folder)
  if len(names) == 1:
    path, inner = _innermost(folder, names[0])
    if len(inner) < 2:
      return ''
    to_set = f'folder:{os.path.join(folder, documents.shown(path))}'
    advice = 'Move these folders up.' if split_folder else f'If they are the classes, set {to_set}.'
    return (f'{folder}: expected a folder for each of at least two classes, got one folder, which holds others: '
            f'{documents.shown(path)} has {documents.listed(inner, _MAX_SHOWN)}. {advice}')
  nested = _nested(folder, names)
  for name, inner in nested.items():
    if inner_splits := _split_names(inner):
      return (f'{folder}: expected folders of classes, got {documents.shown(name)}, which has the splits '
              f'{documents.listed(inner_splits, _MAX_SHOWN)}. If that is the dataset, set '
              f'folder:{os.path.join(folder, documents.shown(name))}; else move the images to PATH/train/CLASS and '
              f'PATH/test/CLASS{_ANYWAY}')
  if not split_folder and all(map(_has_split_word, names)) and len({split_of(name) for name in names}) > 1:
    return (f'{folder}: expected folders of classes, or one folder for each split, got several folders with words for '
            f'splits: {documents.listed(names, _MAX_SHOWN)}. Move the images to PATH/train/CLASS and PATH/test/CLASS'
            f'{_ANYWAY}')
  if not _have_common(names, nested):
    return _doubt_of_some(folder, names)
  first_inner = next(iter(nested.values()))
  return (f'{folder}: expected folders of classes, got folders with the same folders in each: '
          f'{documents.listed(list(nested), _MAX_SHOWN)} have {documents.listed(first_inner, _MAX_SHOWN)}. '
          f'{_INNER}{_ANYWAY}')


def _doubt_of_some(folder: str, names: Sequence[str]) -> str:
  """Returns the doubt about class folders that have only some inner folders in common; '' = no doubt.

  An inner folder is common if all class folders with inner folders have it; or if two have it, and the names of all
  differ in numbers alone, as years do. There is a doubt if at least half of them have a common inner folder.
  """
  inner = dict[str, set[str]]()  # for each class folder, the keys of the folders in its chain and in the last of these
  with_siblings = set[str]()  # the keys of inner folders that are not alone in their folder
  for name in names[:_MAX_SAMPLED]:
    chain = list(itertools.islice(_chain(folder, name), _MAX_DEPTH))
    last = subfolders(os.path.join(folder, chain[-1]))
    if (len(chain) > 1 or last) and not any(user_files.images_in(os.path.join(folder, name))):
      inner[name] = {_key(os.path.basename(path)) for path in (*chain[1:], *last)}
      with_siblings |= set(map(_key, last)) if len(last) > 1 else set()
  if len(inner) < 2 or 2 * len(inner) < min(len(names), _MAX_SAMPLED):
    return ''
  counts = collections.Counter(name for inner_names in inner.values() for name in inner_names & with_siblings)
  are_numbered = len({re.sub(r'\d+', '0', name) for name in inner}) == 1
  common = {name for name, count in counts.items() if count == len(inner) or (are_numbered and count > 1)}
  with_common = [name for name, inner_names in inner.items() if inner_names & common]
  if 2 * len(with_common) < len(inner) or not common:
    return ''
  return (f'{folder}: expected folders of classes, got folders that share some folders: '
          f'{documents.listed(with_common, _MAX_SHOWN)} have {documents.listed(sorted(common), _MAX_SHOWN)}. '
          f'{_INNER}{_ANYWAY}')


def _nested(root: str, names: Sequence[str]) -> dict[str, list[str]]:
  """Returns the inner folders of each of the first `_MAX_SAMPLED` folders, without the folders that have none."""
  nested = {name: _innermost(root, name)[1] for name in names[:_MAX_SAMPLED]}
  return {name: inner for name, inner in nested.items() if inner}


def _have_common(names: Sequence[str], nested: Mapping[str, Sequence[str]]) -> bool:
  """Returns whether at least half of the folders have inner folders, and these have at least two in common."""
  if len(nested) < 2 or 2 * len(nested) < min(len(names), _MAX_SAMPLED):
    return False
  return len(set.intersection(*(set(map(_key, inner)) for inner in nested.values()))) > 1


def _innermost(root: str, name: str) -> tuple[str, list[str]]:
  """Returns the path of the last folder in the chain of `name`, see `_chain`, and the names of the folders in it."""
  *_, last = itertools.islice(_chain(root, name), _MAX_DEPTH)
  inner = subfolders(os.path.join(root, last))
  return (name, []) if len(inner) == 1 else (last, inner)  # a single folder is beside images, or nested too deep


def _chain(root: str, name: str) -> Iterator[str]:
  """Yields `a`, `a/b`, `a/b/c` and so on for the name `a`, while a folder has a single inner folder and no images."""
  path = name
  while True:
    yield path
    inner = subfolders(os.path.join(root, path))
    if len(inner) != 1 or any(user_files.images_in(os.path.join(root, path))):
      return
    path = f'{path}/{inner[0]}'


def _split_names(names: Sequence[str]) -> list[str]:
  """Returns the names that are exact names of splits, or else those with words for splits; [] if fewer than two."""
  exact_names = [name for name in names if name.lower() in splits.NAMES]
  if len(exact_names) > 1:
    return exact_names
  by_words = [name for name in _one_per_split(names).values() if _has_split_word(name)]
  return by_words if len(by_words) > 1 else []


def _one_per_split(names: Sequence[str]) -> dict[str, str]:
  """Returns the name for each split; {} unless each name contains a word for another split."""
  by_split = {split_of(name): name for name in names}
  return by_split if len(by_split) == len(names) and '' not in by_split else {}


def split_of(name: str) -> str:
  """Returns the split for which a name contains a word, such as `mytrain`; '' if there is none, or several."""
  matching = {split for text, split in _SPLIT_BY_TEXT.items() if text in name.lower()}
  return matching.pop() if len(matching) == 1 else ''


def _has_split_word(name: str) -> bool:
  """Returns whether a name has a whole word for a split, as `Test_images` has, and `contest` has not."""
  words = re.findall('[A-Z]?[a-z]+|[A-Z]+', name)
  return any(_SPLIT_WORD.fullmatch(word.lower()) for word in (*words, name))


def _key(name: str) -> str:
  """Returns the key by which names are compared: in lower case and composed Unicode form."""
  return classes.composed(name.casefold())
