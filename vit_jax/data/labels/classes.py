"""Names of classes: the order in a dataset, the classes of a network from a file, and the map between the two.

A source calls `ordered` for the classes that are in the data. `match` and `renumbered` number the classes of a source
as a class file does. `map_classes` returns which classes of a network count as correct in an evaluation. `find` returns
the class that a user names.

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
_MAX_SHOWN = 6  # names in a message
_MAX_ALL_SHOWN = 20  # classes of a network, if a message shows the names of all of them
_MAX_LINE_CHARS = 100_000  # a class map in JSON may be one line
MAX_CLASSES = 100_000
"""Largest number of classes that a dataset may list if it has fewer images: 4 times the number of ImageNet-21k."""


def ordered(names: Collection[str], recorded: Sequence[str] = ()) -> tuple[str, ...]:
  """Returns the names of classes in the order of their indices.

  If all names are numbers, they are sorted by value, else as text. `recorded` has the classes of a run that is resumed;
  if `recorded` has the same names, they keep that order.

  Raises:
    UserError: two names are the same number, such as `1` and `01`.
  """
  if sorted(recorded) == sorted(names):
    return tuple(recorded)
  if not all(map(_is_number, names)):
    return tuple(sorted(names))
  in_order = sorted(names, key=lambda name: (int(name), name))
  equal_pairs = [pair for pair in itertools.pairwise(in_order) if int(pair[0]) == int(pair[1])]
  if equal_pairs:
    equal_names = list(dict.fromkeys(itertools.chain(*equal_pairs)))
    raise UserError('classes of the data: expected a number of its own for each class, got names for one number: '
                    f'{_listed(equal_names)}. Give the images of a class one name.')
  return tuple(in_order)


def numbered(names: Sequence[str]) -> tuple[int, ...]:
  """Returns the names as numbers if these are 0 to `len(names) - 1` in any order; else ()."""
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
    UserError: `listed` is not a list of names, or has more than `MAX_CLASSES` names and more names than images.
  """
  max_names = max(MAX_CLASSES, num_examples)
  if len(listed.list()) > max_names:
    raise listed.error(f'at most {max_names:,} classes for {num_examples:,} images')
  return tuple(name.text() for name in listed.elements())


def read(path: str, *, setting: str = 'data.classes') -> tuple[str, ...]:
  """Returns the lines of a class file, in order; `setting`, for messages, is the setting or flag that has the path.

  Two lines may be equal, such as `crane` and `maillot` in lists of ImageNet. `match` raises UserError for such a class.

  Raises:
    UserError: the file cannot be read, or lists no class.
  """
  names = tuple(_read_lines(path, f'{setting}={path}'))
  if not names:
    raise UserError(f'{setting}={path}: expected one line for each class, in the order of the outputs, got no class. '
                    'Write the names into the file.')
  return names


def match(source_names: Sequence[str], names: Sequence[str], *, where: str) -> tuple[int, ...]:
  """Returns the index of the line of a class file to which each class of a source belongs.

  Args:
    source_names: names of the classes of the source.
    names: lines of the class file.
    where: description of the class file, for messages.

  Raises:
    UserError: a class matches no line, or several lines; the message lists such classes.
  """
  if tuple(source_names) == tuple(names):
    return tuple(range(len(names)))
  indexes_by_line = collections.defaultdict[str, set[int]](set)
  indexes_by_part = collections.defaultdict[str, set[int]](set)
  for index, name in enumerate(names):
    indexes_by_line[_key(name)].add(index)
    for part in _parts(name):
      indexes_by_part[part].add(index)
  matches = [sorted(indexes_by_line[_key(name)] or indexes_by_part[_key(name)]) for name in source_names]
  missing = [name for name, indexes in zip(source_names, matches, strict=True) if not indexes]
  ambiguous = [name for name, indexes in zip(source_names, matches, strict=True) if len(indexes) > 1]
  if not missing and not ambiguous:
    return tuple(indexes[0] for indexes in matches)
  problems = []
  if missing:
    problems.append(f'{len(missing)} of {len(source_names)} that are not there: {_listed(missing)}')
  if ambiguous:
    problems.append(f'{len(ambiguous)} that match several: {_listed(ambiguous)}')
  advice = ' Of lines that are alike, make each one different.' if ambiguous and _repeated(names) else ''
  raise UserError(f'classes of the data: expected classes of {where}, got {"; ".join(problems)}. It has {len(names)} '
                  f'lines such as {documents.describe(names[0])}. Name the folders by complete lines, their first '
                  f'words, or the rest of the lines.{advice}')


def find(names: Sequence[str], wanted: int | str, *, num_classes: int) -> int:
  """Returns the index of a class that a user names: by number, by a name as for folders, or by a synonym in the line.

  Args:
    names: lines of the class file; () if no names are known.
    wanted: a number from 0, or a name. A name that is a complete line belongs to that line only.
    num_classes: the number of classes of the network.

  Raises:
    UserError: there is no such class, or several classes have the name.
  """
  if isinstance(wanted, int) or _is_number(wanted):
    if 0 <= int(wanted) < num_classes:
      return int(wanted)
    raise UserError(f'class: expected 0 to {num_classes - 1}, as the network has {num_classes} classes, got {wanted}. '
                    'Choose another class.')
  keys_of_classes = list[set[str]]()  # for each class, the keys of all names that a user may give
  for line in names:
    synonyms = [*line.split(','), *line.partition(' ')[2].split(',')]  # also without the first word of the line
    keys_of_classes.append(_parts(line) | {_key(synonym) for synonym in synonyms})
  wanted_key = _key(wanted)
  indexes = [index for index, line in enumerate(names) if _key(line) == wanted_key]
  if not indexes:
    indexes = [index for index, keys in enumerate(keys_of_classes) if wanted_key in keys]
  if len(indexes) == 1:
    return indexes[0]
  problem = f'class: expected a number or the name of one class, got {documents.describe(wanted)}, the name of'
  if indexes:
    several = ', '.join(f'{index} ({shown(names[index])})' for index in indexes[:_MAX_SHOWN])
    raise UserError(f'{problem} {len(indexes)}: {several}.')
  if not names:
    raise UserError(f'{problem} none. These weights have no class names; set them with classes=FILE.')
  if similar := globs.similar_names(wanted_key, sorted(set().union(*keys_of_classes)), most=3):
    raise UserError(f'{problem} none. Did you mean {_listed(similar)}?')
  known = f' Known: {", ".join(map(shown, names))}.' if len(names) <= _MAX_ALL_SHOWN else ''
  raise UserError(f'{problem} none.{known}')


def renumbered(source: Source, names: tuple[str, ...], *, where: str) -> Source:
  """Returns the source with labels that are indices of `names`, the lines of a class file. Raises as `match`."""
  return Parts([Part(source, labels=match(source.class_names, names, where=where))], class_names=tuple(names))


def map_classes(source_names: Sequence[str], network_names: Sequence[str], *, path: str, where: str) -> Targets:
  """Returns the outputs of a network that count as correct for each class of a source.

  A name that is a number stands for the class of the network with this name if all names of the network are numbers,
  else for the output with this index. `match` finds the classes for other names.

  Args:
    source_names: names of the classes of the source.
    network_names: names of the outputs of the network, in the order of the outputs.
    path: the path of a class map; '' = each class of the source is matched with a class of the network.
    where: the name of the evaluation, for messages.

  Raises:
    UserError: a name is unknown, ambiguous, or repeated.
  """
  if repeated := _repeated(source_names):
    raise UserError(f'{where}: expected each class of the source once, got {_listed(repeated)} twice. '
                    'Remove the repeated lines.')
  numbers = map(int, network_names) if all(map(_is_number, network_names)) else range(len(network_names))
  output_by_number = {number: output for output, number in enumerate(numbers)}

  def outputs_by_number(names: Sequence[str]) -> dict[str, int]:
    return {name: output_by_number[int(name)] for name in names if _is_number(name) and int(name) in output_by_number}

  if not path:
    output_by_name = outputs_by_number(source_names)
    if tuple(source_names) != tuple(network_names) and len(output_by_name) == len(source_names):
      return tuple((output_by_name[name],) for name in source_names)
    return tuple((output,) for output in match(source_names, network_names, where=f'the network of {where}'))
  class_map = read_map(path)
  if unknown := sorted(set(class_map) - set(source_names)):
    raise UserError(f'{path}: expected classes of the source, which has {len(source_names)} such as '
                    f'{documents.describe(source_names[0])}, got {len(unknown)} others: {_listed(unknown)}.')
  targets = list(dict.fromkeys(itertools.chain(*class_map.values())))
  output_by_target = outputs_by_number(targets)
  other_targets = [target for target in targets if target not in output_by_target]
  other_outputs = match(other_targets, network_names, where=f'the network, in {path}')
  output_by_target |= zip(other_targets, other_outputs, strict=True)
  return tuple(tuple(dict.fromkeys(output_by_target[target] for target in class_map.get(name, ())))
               for name in source_names)


def read_map(path: str) -> dict[str, tuple[str, ...]]:
  """Returns a class map: for each class of the source in the file, the names of classes of the network.

  Raises:
    UserError: the file cannot be read, a line has another form, or a class is listed twice.
  """
  lines = _read_lines(path, path)
  if lines and lines[0].startswith('{'):
    advice = 'Write {"alarm_clock": "analog clock; digital clock"}.'
    content = documents.field('\n'.join(lines), path, expected='JSON', advice=advice)
    entries = [(name, value.text()) for name, value in content.fields()]
  else:
    if wrong := [line for line in lines if ':' not in line]:
      raise UserError(f'{path}: expected lines such as `alarm_clock: n02708093; n03196217`, got '
                      f'{documents.describe(wrong[0])}. Correct the line.')
    entries = [(name.strip(), value.strip()) for name, _, value in (line.partition(':') for line in lines)]
  repeated = _repeated([name for name, _ in entries])
  if repeated or not entries:
    raise UserError(f'{path}: expected one line for each class of the source, got '
                    + (f'{_listed(repeated)} twice.' if repeated else 'none.'))
  return {name: tuple(part.strip() for part in value.split(_SEPARATOR) if part.strip()) for name, value in entries}


def _read_lines(path: str, title: str) -> list[str]:
  """Returns the lines of a text file, stripped, without empty lines and comments; messages begin with `title`."""
  lines = []
  for number, line in enumerate(user_files.split_lines(storage.read_text(os.path.expanduser(path), title)), 1):
    if not line.strip() or line.lstrip().startswith('#'):
      continue
    if not documents.is_clean(line.strip()) or len(line) > _MAX_LINE_CHARS:
      raise UserError(f'{title}, line {number:,}: expected at most {_MAX_LINE_CHARS:,} characters, none of them '
                      f'control characters, got {documents.describe(line)}. Correct the line.')
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
  """Returns the key by which names are compared: without differences of case, underscores and Unicode forms."""
  return composed(name.strip().casefold().replace('_', ' '))


def _listed(names: Sequence[str]) -> str:
  return documents.listed(names, _MAX_SHOWN)
