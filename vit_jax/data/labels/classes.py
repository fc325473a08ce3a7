"""Names of classes: their order in a dataset, the classes of a network from a file, and the map between the two.

Sources call `ordered` for the classes that they find. `match` and `renumbered` give a source the classes of a network;
`map_classes` returns, for an evaluation, which classes of the network count as correct. `find` is for a class that a
person names.

Each line of a class file is a class: `n01440764 tench, Tinca tinca`. A folder belongs to the class if its name is the
complete line, the first word (the WordNet id), or the rest. Empty lines and lines that start with # are skipped.

A class map assigns classes of a network to each class of a source. The file is JSON, `{"alarm_clock": "analog clock;
digital clock"}`, or has a line for each class of the source, `alarm_clock: n02708093; n03196217`. Omitted classes have
none, so their images do not count.
"""
from __future__ import annotations

import collections
import itertools
import os
import unicodedata
from collections.abc import Collection, Sequence

from vit_jax.core import documents, globs
from vit_jax.core.documents import shown
from vit_jax.core.errors import UserError
from vit_jax.data import storage, user_files
from vit_jax.data.source import Part, Parts, Source

Targets = tuple[tuple[int, ...], ...]
"""For each class of a source, the classes of the network that count as correct."""
_SEPARATOR = ';'
_SHOWN = 6  # names of a longer list in a message
_LISTED = 20  # classes of a network up to which a message names all of them
_LINE = 100_000  # characters; a class map in JSON may be one line
MOST_CLASSES = 100_000
"""Classes that a description may list for fewer images than classes: 4 times those of ImageNet-21k."""


def ordered(names: Collection[str], recorded: Sequence[str] = ()) -> tuple[str, ...]:
  """Returns names in the order of classes: numbers by their value, as they are class numbers; others by their text.

  `recorded` has the classes of a run that resumes: if they are the same names, their order stays.

  Raises:
    UserError: names are the same number, such as `1` and `01`.
  """
  if sorted(recorded) == sorted(names):
    return tuple(recorded)
  if not all(map(_is_number, names)):
    return tuple(sorted(names))
  found = sorted(names, key=lambda name: (int(name), name))
  if twice := [name for pair in itertools.pairwise(found) if int(pair[0]) == int(pair[1]) for name in pair]:
    raise UserError('classes of the data: expected a number of its own for each class, got names for one number: '
                    f'{_some(list(dict.fromkeys(twice)))}. Give the images of a class one name.')
  return tuple(found)


def numbered(names: Sequence[str]) -> tuple[int, ...]:
  """Returns the numbers that all names are, if these are 0 to one less than the number of names; else ()."""
  numbers = tuple(int(name) for name in names) if all(map(_is_number, names)) else ()
  return numbers if sorted(numbers) == list(range(len(names))) else ()


def composed(name: str) -> str:
  """Returns a name in the Unicode form NFC: file systems and archives of macOS store names in another one."""
  return unicodedata.normalize('NFC', name)


def check_text(names: Sequence[str], *, where: str) -> None:
  """Raises UserError if a name is not text, such as a folder's name in another encoding than UTF-8."""
  for name in names:
    if not documents.is_clean(name):
      raise UserError(f'{where}: expected names of classes in UTF-8, without control characters, got {shown(name)}. '
                      'Rename the class.')


def from_json(listed: documents.Field, *, num_examples: int) -> tuple[str, ...]:
  """Returns the names of classes in a description of `num_examples` images.

  Raises:
    UserError: not a list of names, or far more than images.
  """
  most = max(MOST_CLASSES, num_examples)
  if len(listed.list()) > most:
    raise listed.error(f'at most {most:,} classes for {num_examples:,} images')
  return tuple(name.text() for name in listed.items())


def read(path: str, *, setting: str = 'data.classes') -> tuple[str, ...]:
  """Returns the classes that a file lists, in order; `setting` is the setting or flag that gives the path.

  Classes may share a name, as `crane` and `maillot` of ImageNet do; `match` refuses a class of the data with such a
  name.

  Raises:
    UserError: the file cannot be read, or is empty.
  """
  names = tuple(_lines(path, f'{setting}={path}'))
  if not names:
    raise UserError(f'{setting}={path}: expected one line for each class, in the order of the outputs, got no class. '
                    'Write the names into the file.')
  return names


def match(own: Sequence[str], names: Sequence[str], *, where: str) -> tuple[int, ...]:
  """Returns the index among `names` of each class of a source.

  Raises:
    UserError: lists the classes that are missing or ambiguous.
  """
  if tuple(own) == tuple(names):
    return tuple(range(len(names)))
  by_line, by_part = collections.defaultdict[str, set[int]](set), collections.defaultdict[str, set[int]](set)
  for i, name in enumerate(names):
    by_line[_key(name)].add(i)
    for part in _parts(name):
      by_part[part].add(i)
  found = [by_line[_key(name)] or by_part[_key(name)] for name in own]
  missing = [name for name, indexes in zip(own, found, strict=True) if not indexes]
  several = [name for name, indexes in zip(own, found, strict=True) if len(indexes) > 1]
  if missing or several:
    problems = [f'{len(missing)} of {len(own)} that are not there: {_some(missing)}'] if missing else []
    problems += [f'{len(several)} that match several: {_some(several)}'] if several else []
    alike = ' Of lines that are alike, make each one different.' if several and _repeated(names) else ''
    raise UserError(f'classes of the data: expected classes of {where}, got ' + '; '.join(problems)
                    + f'. It has {len(names)} lines such as {documents.describe(names[0])}. Name the folders by '
                    f'complete lines, their first words, or the rest of the lines.{alike}')
  return tuple(next(iter(indexes)) for indexes in found)


def find(names: Sequence[str], named: int | str, *, count: int) -> int:
  """Returns the index of a class that a person gives by number, by name as folders are matched, or by one synonym.

  Args:
    names: of the classes, or () if they are not known.
    named: a number from 0, or a name: the complete line is tried first.
    count: the number of classes.

  Raises:
    UserError: there is no such class, or there are several.
  """
  if isinstance(named, int) or _is_number(named):
    if 0 <= int(named) < count:
      return int(named)
    raise UserError(f'class: expected 0 to {count - 1}, as the network has {count} classes, got {named}. '
                    'Choose another class.')
  wanted = _key(named)
  called = [_parts(name) | {_key(one) for one in name.partition(' ')[2].split(',')} |
            {_key(one) for one in name.split(',')} for name in names]
  found = ([i for i, name in enumerate(names) if _key(name) == wanted]
           or [i for i, parts in enumerate(called) if wanted in parts])
  if len(found) == 1:
    return found[0]
  several = ', '.join(f'{i} ({shown(names[i])})' for i in found[:_SHOWN])
  near = [] if found else globs.similar_names(wanted, sorted(set().union(*called)), most=3)
  raise UserError(f'class: expected a number or the name of one class, got {documents.describe(named)}, the name of '
                  f'{len(found) or "none"}' + (f': {several}' if several else '') + '.'
                  + ('' if names else ' These weights have no class names; set them with classes=FILE.')
                  + (f' Did you mean {_some(near)}?' if near else
                     f' Known: {", ".join(map(shown, names))}.' if not found and 0 < len(names) <= _LISTED else ''))


def renumbered(source: Source, names: tuple[str, ...], *, where: str) -> Source:
  """Returns the source with labels that are indexes of `names`.

  Raises:
    UserError: `names` does not have one of its classes.
  """
  return Parts([Part(source, labels=match(source.class_names, names, where=where))], class_names=tuple(names))


def map_classes(own: Sequence[str], network: Sequence[str], *, path: str, where: str) -> Targets:
  """Returns the classes of a network for each class of a source.

  Args:
    own: names of the source.
    network: names in the order of its outputs.
    path: of a class map; '' = the names are equal, or are numbers of classes of the network: their names, if all of
      these are numbers, else their places.
    where: the name of the evaluation, for messages.

  Raises:
    UserError: a name is unknown, ambiguous, or repeated.
  """
  if twice := _repeated(own):
    raise UserError(f'{where}: expected each class of the source once, got {_some(twice)} twice. '
                    'Remove the repeated lines.')
  numbers = map(int, network) if all(map(_is_number, network)) else range(len(network))
  places = {number: place for place, number in enumerate(numbers)}
  if not path:
    if tuple(own) != tuple(network) and all(_is_number(name) and int(name) in places for name in own):
      return tuple((places[int(name)],) for name in own)
    return tuple((i,) for i in match(own, network, where=f'the network of {where}'))
  listed = read_map(path)
  if unknown := sorted(set(listed) - set(own)):
    raise UserError(f'{path}: expected classes of the source, which has {len(own)} such as '
                    f'{documents.describe(own[0])}, got {len(unknown)} others: {_some(unknown)}.')
  targets = list(dict.fromkeys(name for names in listed.values() for name in names))
  indexes = {name: places[int(name)] for name in targets if _is_number(name) and int(name) in places}
  by_name = [name for name in targets if name not in indexes]
  indexes |= zip(by_name, match(by_name, network, where=f'the network, in {path}'), strict=True)
  return tuple(tuple(dict.fromkeys(indexes[name] for name in listed.get(one, ()))) for one in own)


def read_map(path: str) -> dict[str, tuple[str, ...]]:
  """Returns the names in a class map by class of the source.

  Raises:
    UserError: the file cannot be read, a line has another form, or a class is listed twice.
  """
  lines = _lines(path, path)
  if lines and lines[0].startswith('{'):
    advice = 'Write {"alarm_clock": "analog clock; digital clock"}.'
    found = documents.field('\n'.join(lines), path, expected='JSON', advice=advice)
    entries = [(name, value.text()) for name, value in found.fields()]
  else:
    if wrong := [line for line in lines if ':' not in line]:
      raise UserError(f'{path}: expected lines such as `alarm_clock: n02708093; n03196217`, got '
                      f'{documents.describe(wrong[0])}. Correct the line.')
    entries = [(name.strip(), rest.strip()) for name, _, rest in (line.partition(':') for line in lines)]
  twice = _repeated([name for name, _ in entries])
  if twice or not entries:
    raise UserError(f'{path}: expected one line for each class of the source, got '
                    + (f'{_some(twice)} twice.' if twice else 'none.'))
  return {name: tuple(part.strip() for part in value.split(_SEPARATOR) if part.strip()) for name, value in entries}


def _lines(path: str, what: str) -> list[str]:
  """Returns the lines of a text file, stripped, without empty lines and comments."""
  found = []
  for number, line in enumerate(user_files.split_lines(storage.read_text(os.path.expanduser(path), what)), 1):
    if line.strip() and not line.lstrip().startswith('#'):
      if not documents.is_clean(line.strip()) or len(line) > _LINE:
        raise UserError(f'{what}, line {number:,}: expected at most {_LINE:,} characters, none of them control '
                        f'characters, got {documents.describe(line)}. Correct the line.')
      found.append(line.strip())
  return found


def _is_number(name: str) -> bool:
  return name.isdecimal() and len(name) < 10


def _repeated(names: Sequence[str]) -> list[str]:
  return sorted(name for name, count in collections.Counter(names).items() if count > 1)


def _parts(name: str) -> set[str]:
  """Returns the names that a folder of a class may have: the complete line, its first word, or the rest."""
  first, _, rest = name.partition(' ')
  return {_key(one) for one in (name, first, rest) if one.strip()}


def _key(name: str) -> str:
  return composed(name.strip().casefold().replace('_', ' '))


def _some(names: Sequence[str]) -> str:
  return documents.listed(names, _SHOWN)
