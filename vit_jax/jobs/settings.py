"""`--job=settings`: every setting of a config with its value, type, unit, default and range, and where it was set.

    vit-jax settings digits                    # a line for each
    vit-jax settings digits optimizer lr       # all about the settings of a part, and about those with a name
"""
from __future__ import annotations

import dataclasses
import json as json_lib
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from vit_jax.config import describe, files, origins, overrides, parts, schema
from vit_jax.config.describe import Described
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes

DEFAULT, COMMAND_LINE = 'default', 'command line'
_SETTING = re.compile(r'(?!.*\.(py|json)$)\w+(\.\w+)+')
_COLUMNS = 80  # where the output is not a terminal
_WIDEST = (21, 18, 15)  # columns of names, values and defaults
HEAD = ('setting', 'value', 'default', 'set by')


class Setting(NamedTuple):
  """A setting, and where it was set: a line of a config file, `command line` or `default`."""
  described: Described
  set_by: str


def run(files: Sequence[str], *, config: schema.Config | schema.Study | None, source: str, changes: Sequence[str],
        json: bool, changed: bool) -> int:
  """Prints the settings; exit status 0.

  Args:
    files: the config, unless `source` says which one `config` is; then parts or names of settings, without which all
      are shown.
    config: of `--config`, read once more to see where its settings are set; or None.
    source: `--config=NAME`, or ''.
    changes: overrides of the command line, PATH=VALUE each.
    json: print one JSON object, with an entry by the name of each setting.
    changed: only settings that the config or the command line sets.

  Raises:
    UserError: there is no config, or no such setting.
  """
  words = list(files)
  if config is None and not words:
    raise UserError('settings: expected the name of a config, got none. Run vit-jax settings CONFIG.')
  if config is None and _SETTING.fullmatch(words[0]):
    raise UserError(f'settings: expected the name of a config first, got the setting {words[0]}. Run vit-jax settings '
                    f'CONFIG {" ".join(words)}.')
  spec = words.pop(0) if config is None else source.removeprefix('--config=')
  found = [one for one in of(spec, changes) if not changed or one.set_by != DEFAULT]
  chosen = select(found, words)
  if json:
    print(json_lib.dumps({one.described.name: _plain(one) for one in chosen}, indent=1, ensure_ascii=False))
  else:
    print('\n'.join(paragraphs(chosen) if words else table(chosen)))
  return 0


def of(spec: str, changes: Sequence[str]) -> list[Setting]:
  """Returns the settings of a config with overrides; of a study, those of its first run.

  Raises:
    UserError: there is no such config, or an override cannot be applied.
  """
  watched = origins.Origins()
  read = watched.watch(lambda: files.read(spec, models=sizes.model))
  if isinstance(read, schema.Study):
    name, config = next(iter(read.runs.items()))
    print(f'{spec} is a study of {len(read.runs):,} runs. These are the settings of the first, {name}.',
          file=sys.stderr)
  else:
    config = read
  places = dict(_places(config, watched, '', files.find(spec)[0].name))
  now = overrides.apply({'': config}, list(changes), models=sizes.model)['']
  given = [one.partition('=')[0] for one in changes]
  return [Setting(one, _set_by(one, places.get(one.name, ''), given)) for one in describe.settings(now)]


def _places(part: Any, watched: origins.Origins, prefix: str, file: str) -> Iterator[tuple[str, str]]:
  """The place of each setting that a config file sets: FILE:LINE, or FILE where the line is not known.

  A line that only makes the part of a setting counts with `~` before it.
  """
  for field in dataclasses.fields(part):
    value, name = getattr(part, field.name), f'{prefix}{field.name}'
    inside = value if isinstance(value, dict) else {'': value} if dataclasses.is_dataclass(value) else {}
    for key, one in inside.items():
      yield from _places(one, watched, f'{name}.{key}.' if key else f'{name}.', file)
    if not inside or parts.kinds(field.type):
      line = watched.of(part, field.name)
      yield name, f'{"" if line.is_named else "~"}{line}' if line else f'~{file}'


def _set_by(one: Described, place: str, given: Sequence[str]) -> str:
  if any(one.name == name for name in given):
    return COMMAND_LINE
  is_usual = one.value == one.default
  if any(one.name.startswith(f'{name}.') for name in given):
    return DEFAULT if is_usual else COMMAND_LINE
  return DEFAULT if is_usual and (not place or place.startswith('~')) else place.removeprefix('~')


def select(found: Sequence[Setting], words: Sequence[str]) -> list[Setting]:
  """Returns the settings whose path has one of the words as a part of it; all without words.

  Raises:
    UserError: a word is in no path; suggests the nearest.
  """
  for word in words:
    if not any(_is_of(one, word) for one in found):
      known = dict.fromkeys(part for one in found for part in (*one.described.name.split('.'), one.described.name))
      raise UserError(f'settings: expected a part or the name of a setting, got {word!r}.'
                      + schema.checks.nearest(word, known))
  return [one for one in found if not words or any(_is_of(one, word) for word in words)]


def _is_of(one: Setting, word: str) -> bool:
  return f'.{word}.' in f'.{one.described.name}.'


def table(found: Sequence[Setting]) -> list[str]:
  """Returns a line for each setting below the path of its part: last name, value, default, and where it was set."""
  rows = [_row(one) for one in found]
  widths = [min(most, max(len(row[i]) for row in (HEAD, *rows))) for i, most in enumerate(_WIDEST)]
  most = shutil.get_terminal_size((_COLUMNS, 24)).columns if sys.stdout.isatty() else _COLUMNS
  lines, last = [_line(HEAD, widths)], None
  for one, row in zip(found, rows, strict=True):
    path = one.described.name.rpartition('.')[0]
    if path != last:
      lines.append(f'{path}: {one.described.part}' if path else one.described.part)
      last = path
    lines.append(_line(row, widths))
  return [_cut(line, max(_COLUMNS, most)) for line in lines]


def _row(one: Setting) -> tuple[str, str, str, str]:
  told = one.described
  return told.name.rpartition('.')[2], describe.text(told.value), describe.text(told.default), one.set_by


def _line(row: tuple[str, ...], widths: Sequence[int]) -> str:
  cells = [f'{_cut(cell, width):<{width}}' for cell, width in zip(row, widths, strict=False)]
  return f'  {"  ".join([*cells, row[-1]])}'


def paragraphs(found: Sequence[Setting]) -> list[str]:
  """Returns all about each setting, in lines of 80 columns."""
  lines = []
  for one in found:
    told = one.described
    kind = f'{told.type}: {told.allowed}' if told.allowed else told.type
    unit = f' ({told.unit})' if told.unit and told.unit not in told.allowed and told.type != 'length' else ''
    lines += [f'{told.name}={describe.text(told.value)}']
    for text in (told.about, f'{kind}{unit}', f'default {describe.text(told.default)}; set by: {one.set_by}'):
      lines += textwrap.wrap(text, _COLUMNS, initial_indent='    ', subsequent_indent='    ')
  return lines


def _cut(text: str, most: int) -> str:
  return text if len(text) <= most else f'{text[:most - 1]}…'


def _plain(one: Setting) -> dict[str, object]:
  """A setting as JSON; values are texts as they are typed on the command line."""
  told = one.described
  return {'value': describe.text(told.value), 'part': told.part, 'type': told.type, 'unit': told.unit,
          'default': None if told.default is describe.REQUIRED else describe.text(told.default),
          'allowed': told.allowed, 'about': told.about, 'set_by': one.set_by}
