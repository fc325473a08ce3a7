"""Decides whether the folders in an image folder are splits or classes, by their names and by the folders in them.

`folder.py` calls `find` before it opens a split. This module reads the names in folders, but no image. What `find`
returns for some folders:

  train/{cat,dog}, test/{cat,dog}           splits: these are exact names of splits
  Training/{cat,dog}, Test_images/{cat}     splits: each name has a whole word for another split
  mytrain/{cat,dog}, mytest/{cat,dog}       splits: each name contains such a word, and the folders in them are the same
  cat, dog                                  classes
  2023/{cat,dog}, 2024/{cat,dog}            classes, with a doubt: the folders in them are the same

A doubt is a message: the class folders are probably something else, such as splits with other names. `folder.py` keeps
it in its source. `opening.check_learnable` raises it in jobs that learn from the classes.
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

_SAMPLED = 16  # class folders that are opened: a few show what all have in common
_MOST_NESTED = 8  # folders in one another
_SHOWN = 5  # names in a message
_INNER = 'If the inner ones are the classes, name the outer ones train and test, or move the images to PATH/CLASS'
_ANYWAY = '. If the outer folders are the classes, list their names in a file and set data.classes=FILE.'
_METADATA = '__MACOSX'  # archives that macOS makes have this folder beside the content
_SPLIT_BY_TEXT = {'train': 'train', 'test': 'test', 'val': 'val', 'dev': 'val'}
"""Texts in the names of folders, and the split that each stands for."""
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
  exact = [name for name in names if name.lower() in splits.NAMES]
  folders = {name.lower(): name for name in exact}
  if len(folders) < len(exact):
    raise UserError(f'{root}: expected one folder for each split, got {documents.listed(sorted(exact), _SHOWN)}. '
                    'Rename one of them.')
  if len(names) == 1 and not folders:
    path, inner = _innermost(root, names[0])
    if inner_splits := _split_names(inner):
      raise UserError(f'{root}: expected the folders train and test, or a folder for each class, got one folder, '
                      f'{documents.shown(path)}, which has the splits {documents.listed(inner_splits, _SHOWN)}. Name '
                      f'that folder: folder:{os.path.join(root, documents.shown(path))}.')
  if folders:
    folders |= _further_splits(root, names, folders)
  else:
    folders = _splits_by_words(root, names)
  defining = folders.get('train', min(folders.values())) if folders else ''  # the folder that has the class folders
  return Layout(folders, _doubt(root, defining))


def subfolders(folder: str) -> list[str]:
  """Returns the names of the folders in a folder, except hidden ones, `__MACOSX` and links to a parent folder."""
  try:
    with os.scandir(folder) as entries:
      return sorted(entry.name for entry in entries
                    if not entry.name.startswith('.') and entry.name != _METADATA and user_files.is_folder(entry)
                    and not (entry.is_symlink() and not user_files.leads_out(folder, os.path.realpath(entry.path))))
  except OSError as error:
    raise failures.unreadable(error, folder) from error


def _further_splits(root: str, names: Sequence[str], folders: Mapping[str, str]) -> dict[str, str]:
  """Returns the folders of splits that are not in `folders`, by words in their names and by folders in common."""
  inner = {_comparable(name) for folder in folders.values() for name in _innermost(root, folder)[1]}
  known = {'', *folders}
  if known & set(splits.SYNONYMS):
    known.add('val')
  others = [name for name in names if name not in folders.values() and split_of(name) not in known]
  further = _one_per_split([name for name in others if inner & set(map(_comparable, _innermost(root, name)[1]))])
  _report(root, further, ())
  return further


def _splits_by_words(root: str, names: Sequence[str]) -> dict[str, str]:
  """Returns the folders of splits by words in their names, and by the folders in them; {} = they are classes."""
  if not 2 <= len(names) <= _SAMPLED:
    return {}
  folders = _one_per_split(names)
  if not folders or not all(map(_has_split_word, names)):
    nested = _nested(root, names)
    folders = _one_per_split(list(nested)) if _have_common(names, nested) else {}
  _report(root, folders, [name for name in names if name not in folders.values()])
  return {split: f'{name}/{name}' if subfolders(os.path.join(root, name)) == [name] else name  # as in some archives
          for split, name in folders.items()}


def _report(root: str, folders: Mapping[str, str], ignored: Sequence[str]) -> None:
  """Warns which folders are taken as splits, if there are any."""
  if folders:
    unread = f' Not read: {documents.listed(ignored, _SHOWN)}.' if ignored else ''
    taken = ', '.join(f'{documents.shown(name)} = {split}' for split, name in sorted(folders.items()))
    warn_once(f'{root}: folders are taken as splits by their names: {taken}.{unread}')


def _doubt(root: str, split_folder: str) -> str:
  """Returns why the folders in a split, or in the root if `split_folder` is '', are probably no classes; '' if none."""
  folder = os.path.join(root, split_folder) if split_folder else root
  names = subfolders(folder)
  if len(names) == 1:
    path, inner = _innermost(folder, names[0])
    if len(inner) < 2:
      return ''
    to_set = f'folder:{os.path.join(folder, documents.shown(path))}'
    advice = 'Move these folders up.' if split_folder else f'If they are the classes, set {to_set}.'
    return (f'{folder}: expected a folder for each of at least two classes, got one folder, which holds others: '
            f'{documents.shown(path)} has {documents.listed(inner, _SHOWN)}. {advice}')
  nested = _nested(folder, names)
  for name, inner in nested.items():
    if inner_splits := _split_names(inner):
      return (f'{folder}: expected folders of classes, got {documents.shown(name)}, which has the splits '
              f'{documents.listed(inner_splits, _SHOWN)}. If that is the dataset, set '
              f'folder:{os.path.join(folder, documents.shown(name))}; else move the images to PATH/train/CLASS and '
              f'PATH/test/CLASS{_ANYWAY}')
  if not split_folder and all(map(_has_split_word, names)) and len({split_of(name) for name in names}) > 1:
    return (f'{folder}: expected folders of classes, or one folder for each split, got several folders with words for '
            f'splits: {documents.listed(names, _SHOWN)}. Move the images to PATH/train/CLASS and PATH/test/CLASS'
            f'{_ANYWAY}')
  if not _have_common(names, nested):
    return _doubt_of_some(folder, names)
  outer = list(nested)
  return (f'{folder}: expected folders of classes, got folders with the same folders in each: '
          f'{documents.listed(outer, _SHOWN)} have {documents.listed(nested[outer[0]], _SHOWN)}. {_INNER}{_ANYWAY}')


def _doubt_of_some(folder: str, names: Sequence[str]) -> str:
  """Returns why folders that have only some inner folders in common are probably no classes; '' if nothing says so.

  An inner folder counts as common if all of them have it; or if two have it, and their names differ in numbers alone,
  as years do. There is a doubt if at least half of them have such an inner folder.
  """
  inner = dict[str, set[str]]()  # names of the folders in each folder, at any depth while there is one in each
  with_siblings = set[str]()  # those names of folders that are not alone in their folder
  for name in names[:_SAMPLED]:
    chain = list(itertools.islice(_chain(folder, name), _MOST_NESTED))
    last = subfolders(os.path.join(folder, chain[-1]))
    if (len(chain) > 1 or last) and not any(user_files.images_in(os.path.join(folder, name))):
      inner[name] = {_comparable(os.path.basename(path)) for path in (*chain[1:], *last)}
      with_siblings |= set(map(_comparable, last)) if len(last) > 1 else set()
  if len(inner) < 2 or 2 * len(inner) < min(len(names), _SAMPLED):
    return ''
  counts = collections.Counter(name for inner_names in inner.values() for name in inner_names & with_siblings)
  are_numbered = len({re.sub(r'\d+', '0', name) for name in inner}) == 1
  common = {name for name, count in counts.items() if count == len(inner) or (are_numbered and count > 1)}
  having = [name for name, inner_names in inner.items() if inner_names & common]
  if 2 * len(having) < len(inner) or not common:
    return ''
  return (f'{folder}: expected folders of classes, got folders that share some folders: '
          f'{documents.listed(having, _SHOWN)} have {documents.listed(sorted(common), _SHOWN)}. {_INNER}{_ANYWAY}')


def _nested(root: str, names: Sequence[str]) -> dict[str, list[str]]:
  """Returns the names of the folders in each of the first `_SAMPLED` folders, without the folders that have none."""
  nested = {name: _innermost(root, name)[1] for name in names[:_SAMPLED]}
  return {name: inner for name, inner in nested.items() if inner}


def _have_common(names: Sequence[str], nested: Mapping[str, Sequence[str]]) -> bool:
  """Returns whether at least half of the folders `names` have folders, and at least two of these are in each."""
  if len(nested) < 2 or 2 * len(nested) < min(len(names), _SAMPLED):
    return False
  return len(set.intersection(*(set(map(_comparable, inner)) for inner in nested.values()))) > 1


def _innermost(root: str, name: str) -> tuple[str, list[str]]:
  """Returns the path of the last folder in the chain of `name`, and the names of the folders in it."""
  *_, last = itertools.islice(_chain(root, name), _MOST_NESTED)
  inner = subfolders(os.path.join(root, last))
  return (name, []) if len(inner) == 1 else (last, inner)  # one folder is beside images, or nested too deep


def _chain(root: str, name: str) -> Iterator[str]:
  """Yields `a`, `a/b`, `a/b/c` and so on for the name `a`, while the last one has a single folder and no images."""
  path = name
  while True:
    yield path
    inner = subfolders(os.path.join(root, path))
    if len(inner) != 1 or any(user_files.images_in(os.path.join(root, path))):
      return
    path = f'{path}/{inner[0]}'


def _split_names(names: Sequence[str]) -> list[str]:
  """Returns the names that stand for splits, exact ones or else those with words; [] if these are fewer than two."""
  exact = [name for name in names if name.lower() in splits.NAMES]
  if len(exact) > 1:
    return exact
  by_words = [name for name in _one_per_split(names).values() if _has_split_word(name)]
  return by_words if len(by_words) > 1 else []


def _one_per_split(names: Sequence[str]) -> dict[str, str]:
  """Returns the name for each split; {} unless each name contains a word for another split."""
  by_split = {split_of(name): name for name in names}
  return by_split if len(by_split) == len(names) and '' not in by_split else {}


def split_of(name: str) -> str:
  """Returns the split of a name that contains a word for it, such as `mytrain`; '' if it has none or several."""
  found = {split for text, split in _SPLIT_BY_TEXT.items() if text in name.lower()}
  return found.pop() if len(found) == 1 else ''


def _has_split_word(name: str) -> bool:
  """Returns whether a name has a whole word for a split, as `Test_images` has, and `contest` has not."""
  words = re.findall('[A-Z]?[a-z]+|[A-Z]+', name)
  return any(_SPLIT_WORD.fullmatch(word.lower()) for word in (*words, name))


def _comparable(name: str) -> str:
  """Returns a name in lower case and composed Unicode form, in which names are compared."""
  return classes.composed(name.casefold())
