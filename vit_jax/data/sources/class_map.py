"""Which classes of a network a class of a source is: by name, by number, or as a file says.

The file is JSON, `{"alarm_clock": "analog clock; digital clock"}`, or has a line for each class of the source,
`alarm_clock: n02708093; n03196217`. Classes that it leaves out have none, so their pictures do not count.
"""
from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from vit_jax.core.errors import UserError
from vit_jax.data.sources import classes

Targets = tuple[tuple[int, ...], ...]
"""For each class of a source, classes of the network, any of which is right."""
_SEPARATOR = ';'
_MOST_NAMES = 5


def find(own: Sequence[str], network: Sequence[str], *, path: str, where: str) -> Targets:
  """What the classes of a source are among those of a network.

  Args:
    own: of the source.
    network: in the order of its outputs.
    path: of a file; '' = they have the same names, or are numbers.
    where: the name of the evaluation, for messages.

  Raises:
    UserError: a name is not known, could be several, or is there twice.
  """
  if twice := sorted({name for name in own if list(own).count(name) > 1}):
    raise UserError(f'{where}: the source has the classes {", ".join(twice[:_MOST_NAMES])} twice; want each once')
  if path:
    return _of_file(own, network, path)
  if tuple(own) == tuple(network):
    return tuple((i,) for i in range(len(own)))
  if all(name.isdecimal() and int(name) < len(network) for name in own):
    return tuple((int(name),) for name in own)
  found = classes.match(own, network, where=f'those of the network, which {where} is of')
  return tuple((i,) for i in found)


def _of_file(own: Sequence[str], network: Sequence[str], path: str) -> Targets:
  listed = read(path)
  if unknown := sorted(set(listed) - set(own)):
    raise UserError(f'{path} maps {len(unknown)} classes that the source has not: {", ".join(unknown[:_MOST_NAMES])}; '
                    f'it has {len(own)} such as {own[0]!r}')
  wanted = list(dict.fromkeys(name for names in listed.values() for name in names))
  numbers = {name: int(name) for name in wanted if name.isdecimal() and int(name) < len(network)}
  by_name = [name for name in wanted if name not in numbers]
  places = numbers | dict(zip(by_name, classes.match(by_name, network, where=f'those of the network, in {path}'),
                              strict=True))
  return tuple(tuple(dict.fromkeys(places[name] for name in listed.get(one, ()))) for one in own)


def read(path: str) -> dict[str, tuple[str, ...]]:
  """Names of classes by class of the source.

  Raises:
    UserError: it cannot be read, has a line of another form, or a class twice.
  """
  try:
    text = pathlib.Path(path).expanduser().read_text()
  except (OSError, UnicodeDecodeError) as error:
    raise UserError(f'{path} cannot be read: {getattr(error, "strerror", None) or error}') from error
  if text.lstrip().startswith('{'):
    try:
      entries = list(json.loads(text, object_pairs_hook=list))
    except ValueError as error:
      raise UserError(f'{path} is no JSON: {error}') from error
  else:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith('#')]
    if wrong := [line for line in lines if ':' not in line]:
      raise UserError(f'{path}: {wrong[0]!r} maps nothing; want lines such as `alarm_clock: n02708093; n03196217`')
    entries = [tuple(part.strip() for part in line.split(':', 1)) for line in lines]
  names = [name for name, _ in entries]
  twice = sorted({name for name in names if names.count(name) > 1})
  if twice or not entries:
    raise UserError(f'{path} ' + (f'maps {", ".join(twice[:_MOST_NAMES])} twice' if entries else 'maps nothing')
                    + '; want a line for each class of the source')
  return {name: tuple(part.strip() for part in str(value).split(_SEPARATOR) if part.strip()) for name, value in entries}
