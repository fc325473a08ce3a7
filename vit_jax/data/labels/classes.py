"""Names of classes: their order in a dataset, the classes of a network from a file, and the map between the two.

A source calls `ordered` for the classes that it finds. `match` and `renumbered` number the classes of a source as a
class file does. `map_classes` returns which classes of a network count as correct in an evaluation. `find` returns the
class that a user names.

Class file: each line is a class, `n01440764 tench, Tinca tinca`. A folder with images belongs to the class if its name
is the complete line, the first word (the WordNet id), or the rest of the line. Empty lines and lines that start with #
are skipped.

Class map: assigns classes of a network to each class of a source, in one of two forms. Classes of the source that are
left out have no class of the network, and their images do not count.

  JSON    {"alarm_clock": "analog clock; digital clock"}
  lines   alarm_clock: n02708093; n03196217
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
_MAX_NAMES = 6  # that a message names of a longer list
_MAX_KNOWN = 20  # classes of a network, for a message to name all of them
_MAX_LINE = 100_000  # characters; a class map in JSON may be one line
MOST_CLASSES = 100_000
"""Most classes that a dataset may list if it has fewer images: 4 times the number of ImageNet-21k."""


def ordered(names: Collection[str], recorded: Sequence[str] = ()) -> tuple[str, ...]:
  """Returns the names of classes in the order of their indices.

  If all names are numbers, they are sorted by value, else as text. `recorded` has the classes of a run that is resumed;
  if these are the same names, they are returned, in their order.

  Raises:
    UserError: two names are the same number, such as `1` and `01`.
  """
  if sorted(recorded) == sorted(names):
    return tuple(recorded)
  if not all(map(_is_number, names)):
    return tuple(sorted(names))
  in_order = sorted(names, key=lambda name: (int(name), name))
  equal = [pair for pair in itertools.pairwise(in_order) if int(pair[0]) == int(pair[1])]
  if equal:
    raise UserError('classes of the data: expected a number of its own for each class, got names for one number: '
                    f'{_listed(list(dict.fromkeys(itertools.chain(*equal))))}. Give the images of a class one name.')
  return tuple(in_order)


def numbered(names: Sequence[str]) -> tuple[int, ...]:
  """Returns names as numbers, if they are 0 to `len(names) - 1` in any order; else ()."""
  numbers = tuple(int(name) for name in names) if all(map(_is_number, names)) else ()
  return numbers if sorted(numbers) == list(range(len(names))) else ()


def composed(name: str) -> str:
  """Returns a name in the Unicode form NFC, since file systems and archives of macOS store names in the form NFD."""
  return unicodedata.normalize('NFC', name)


def check_text(names: Sequence[str], *, where: str) -> None:
  """Raises UserError if a name is not text, for example the name of a folder that is not in UTF-8."""
  for name in names:
    if not documents.is_clean(name):
      raise UserError(f'{where}: expected names of classes in UTF-8, without control characters, got {shown(name)}. '
                      'Rename the class.')


def from_json(listed: documents.Field, *, num_examples: int) -> tuple[str, ...]:
  """Returns the names of classes in a JSON list that describes `num_examples` images.

  Raises:
    UserError: it is not a list of names, or has more than `MOST_CLASSES` and more than images.
  """
  most = max(MOST_CLASSES, num_examples)
  if len(listed.list()) > most:
    raise listed.error(f'at most {most:,} classes for {num_examples:,} images')
  return tuple(name.text() for name in listed.items())


def read(path: str, *, setting: str = 'data.classes') -> tuple[str, ...]:
  """Returns the lines of a class file, in order; messages name `setting`, the setting or flag with the path.

  Two lines may be equal, such as `crane` and `maillot` in lists of ImageNet. `match` raises for such a class.

  Raises:
    UserError: the file cannot be read, or lists no class.
  """
  names = tuple(_lines(path, f'{setting}={path}'))
  if not names:
    raise UserError(f'{setting}={path}: expected one line for each class, in the order of the outputs, got no class. '
                    'Write the names into the file.')
  return names


def match(own: Sequence[str], names: Sequence[str], *, where: str) -> tuple[int, ...]:
  """Returns the index of the line of a class file to which each class of a source belongs.

  Args:
    own: names of the classes of the source.
    names: lines of the class file.
    where: description of the class file, for messages.

  Raises:
    UserError: a class matches no line, or several; the message lists such classes.
  """
  if tuple(own) == tuple(names):
    return tuple(range(len(names)))
  by_line, by_part = collections.defaultdict[str, set[int]](set), collections.defaultdict[str, set[int]](set)
  for index, name in enumerate(names):
    by_line[_key(name)].add(index)
    for part in _parts(name):
      by_part[part].add(index)
  matches = [sorted(by_line[_key(name)] or by_part[_key(name)]) for name in own]
  missing = [name for name, indexes in zip(own, matches, strict=True) if not indexes]
  ambiguous = [name for name, indexes in zip(own, matches, strict=True) if len(indexes) > 1]
  if missing or ambiguous:
    problems, advice = [], ''
    if missing:
      problems.append(f'{len(missing)} of {len(own)} that are not there: {_listed(missing)}')
    if ambiguous:
      problems.append(f'{len(ambiguous)} that match several: {_listed(ambiguous)}')
      advice = ' Of lines that are alike, make each one different.' if _repeated(names) else ''
    raise UserError(f'classes of the data: expected classes of {where}, got ' + '; '.join(problems)
                    + f'. It has {len(names)} lines such as {documents.describe(names[0])}. Name the folders by '
                    f'complete lines, their first words, or the rest of the lines.{advice}')
  return tuple(indexes[0] for indexes in matches)


def find(names: Sequence[str], named: int | str, *, count: int) -> int:
  """Returns the index of a class that a user gives: by number, by a name as for folders, or by a synonym in the line.

  Args:
    names: lines of the class file, or () if they are not known.
    named: a number from 0, or a name. A name that is a complete line belongs to that line only.
    count: the number of classes.

  Raises:
    UserError: there is no such class, or the name belongs to several.
  """
  if isinstance(named, int) or _is_number(named):
    if 0 <= int(named) < count:
      return int(named)
    raise UserError(f'class: expected 0 to {count - 1}, as the network has {count} classes, got {named}. '
                    'Choose another class.')
  wanted = _key(named)
  called = []  # for each class, the names by which it can be given
  for name in names:
    synonyms = [*name.split(','), *name.partition(' ')[2].split(',')]  # of the line, and of it without its first word
    called.append(_parts(name) | {_key(synonym) for synonym in synonyms})
  found = [index for index, name in enumerate(names) if _key(name) == wanted]
  found = found or [index for index, keys in enumerate(called) if wanted in keys]
  if len(found) == 1:
    return found[0]
  several = ', '.join(f'{index} ({shown(names[index])})' for index in found[:_MAX_NAMES])
  near = [] if found else globs.similar_names(wanted, sorted(set().union(*called)), most=3)
  raise UserError(f'class: expected a number or the name of one class, got {documents.describe(named)}, the name of '
                  f'{len(found) or "none"}' + (f': {several}' if several else '') + '.'
                  + ('' if names else ' These weights have no class names; set them with classes=FILE.')
                  + (f' Did you mean {_listed(near)}?' if near else
                     f' Known: {", ".join(map(shown, names))}.' if not found and 0 < len(names) <= _MAX_KNOWN else ''))


def renumbered(source: Source, names: tuple[str, ...], *, where: str) -> Source:
  """Returns the source with labels that are indices of `names`, the lines of a class file. Raises as `match`."""
  return Parts([Part(source, labels=match(source.class_names, names, where=where))], class_names=tuple(names))


def map_classes(own: Sequence[str], network: Sequence[str], *, path: str, where: str) -> Targets:
  """Returns the outputs of a network that count as correct for each class of a source.

  A name that is a number stands for the class of the network with this name, if all names of the network are numbers;
  else it is the index of an output. Other names are matched as by `match`.

  Args:
    own: names of the classes of the source.
    network: names of the outputs of the network, in their order.
    path: of a class map; '' = each class of the source is matched with a class of the network.
    where: the name of the evaluation, for messages.

  Raises:
    UserError: a name is unknown, ambiguous, or repeated.
  """
  if twice := _repeated(own):
    raise UserError(f'{where}: expected each class of the source once, got {_listed(twice)} twice. '
                    'Remove the repeated lines.')
  numbers = map(int, network) if all(map(_is_number, network)) else range(len(network))
  by_number = {number: output for output, number in enumerate(numbers)}
  if not path:
    if tuple(own) != tuple(network) and all(_is_number(name) and int(name) in by_number for name in own):
      return tuple((by_number[int(name)],) for name in own)
    return tuple((output,) for output in match(own, network, where=f'the network of {where}'))
  class_map = read_map(path)
  if unknown := sorted(set(class_map) - set(own)):
    raise UserError(f'{path}: expected classes of the source, which has {len(own)} such as '
                    f'{documents.describe(own[0])}, got {len(unknown)} others: {_listed(unknown)}.')
  targets = list(dict.fromkeys(itertools.chain(*class_map.values())))
  outputs = {name: by_number[int(name)] for name in targets if _is_number(name) and int(name) in by_number}
  other_names = [name for name in targets if name not in outputs]
  outputs |= zip(other_names, match(other_names, network, where=f'the network, in {path}'), strict=True)
  return tuple(tuple(dict.fromkeys(outputs[target] for target in class_map.get(name, ()))) for name in own)


def read_map(path: str) -> dict[str, tuple[str, ...]]:
  """Returns a class map: for each class of the source that it has, the names of classes of the network.

  Raises:
    UserError: the file cannot be read, a line has another form, or a class is listed twice.
  """
  lines = _lines(path, path)
  if lines and lines[0].startswith('{'):
    advice = 'Write {"alarm_clock": "analog clock; digital clock"}.'
    content = documents.field('\n'.join(lines), path, expected='JSON', advice=advice)
    entries = [(name, value.text()) for name, value in content.fields()]
  else:
    if wrong := [line for line in lines if ':' not in line]:
      raise UserError(f'{path}: expected lines such as `alarm_clock: n02708093; n03196217`, got '
                      f'{documents.describe(wrong[0])}. Correct the line.')
    entries = [(name.strip(), value.strip()) for name, _, value in (line.partition(':') for line in lines)]
  twice = _repeated([name for name, _ in entries])
  if twice or not entries:
    raise UserError(f'{path}: expected one line for each class of the source, got '
                    + (f'{_listed(twice)} twice.' if twice else 'none.'))
  return {name: tuple(part.strip() for part in value.split(_SEPARATOR) if part.strip()) for name, value in entries}


def _lines(path: str, what: str) -> list[str]:
  """Returns the lines of a text file, stripped, without empty lines and comments; messages begin with `what`."""
  lines = []
  for number, line in enumerate(user_files.split_lines(storage.read_text(os.path.expanduser(path), what)), 1):
    if line.strip() and not line.lstrip().startswith('#'):
      if not documents.is_clean(line.strip()) or len(line) > _MAX_LINE:
        raise UserError(f'{what}, line {number:,}: expected at most {_MAX_LINE:,} characters, none of them control '
                        f'characters, got {documents.describe(line)}. Correct the line.')
      lines.append(line.strip())
  return lines


def _is_number(name: str) -> bool:
  return name.isdecimal() and len(name) < 10  # fits into 32 bits


def _repeated(names: Sequence[str]) -> list[str]:
  return sorted(name for name, count in collections.Counter(names).items() if count > 1)


def _parts(line: str) -> set[str]:
  """Returns the keys of the names that a folder of a class may have: the complete line, its first word, or the rest."""
  first_word, _, other_words = line.partition(' ')
  return {_key(name) for name in (line, first_word, other_words) if name.strip()}


def _key(name: str) -> str:
  """Returns the form in which names are compared: without differences of case, underscores and Unicode forms."""
  return composed(name.strip().casefold().replace('_', ' '))


def _listed(names: Sequence[str]) -> str:
  return documents.listed(names, _MAX_NAMES)
