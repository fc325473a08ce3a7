"""`--job=settings`: every setting of a config with its value, type, unit, default and range, and what set it.

    vit-jax settings digits                    # a line for each
    vit-jax settings digits optimizer lr       # a paragraph for each setting of a part, and for each with a name

`run` is the entry point: `of` lists the settings, `select` keeps those with the words, and `table` or `paragraphs`
makes the lines. `Described`, from `config/describe.py`, is a setting without what set it.
"""
from __future__ import annotations

import json as json_lib
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.config import describe, files, overrides, schema
from vit_jax.config.describe import Described
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes

DEFAULT, COMMAND_LINE = 'default', 'command line'
_SETTING = re.compile(r'(?!.*\.(py|json)$)\w+(\.\w+)+')  # such as `optimizer.lr`, not the file `own.py`
_LINE_WIDTH = 80  # characters, where the output is not a terminal
_MAX_WIDTHS = (21, 18, 15)  # characters of a name, a value and a default in the table
_HEADINGS = ('setting', 'value', 'default', 'set by')


class Setting(NamedTuple):
  """A setting, and what set it: the name of the config's file, `command line`, or `default` for the default value."""
  described: Described
  set_by: str


def run(files: Sequence[str], *, config: schema.Config | schema.Study | None, source: str, changes: Sequence[str],
        json: bool, changed: bool) -> int:
  """Prints the settings; exit status 0.

  Args:
    files: parts or names of settings, none for all; without `--config` after the name of the config.
    config: the config of `--config`; None = the flag is not given.
    source: the flag itself, `--config=NAME`, by which the config is read once more; '' = not given.
    changes: overrides of the command line, PATH=VALUE each.
    json: whether to print one JSON object, with the settings by name, instead of text.
    changed: whether to print only settings that the config or the command line sets.

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
  chosen = select([setting for setting in of(spec, changes) if not changed or setting.set_by != DEFAULT], words)
  if json:
    print(json_lib.dumps({item.name: {
        'value': describe.text(item.value), 'part': item.part, 'type': item.type, 'unit': item.unit,
        'default': None if item.default is describe.REQUIRED else describe.text(item.default), 'allowed': item.allowed,
        'about': item.about, 'set_by': set_by} for item, set_by in chosen}, indent=1, ensure_ascii=False))
  else:
    print('\n'.join(paragraphs(chosen) if words else table(chosen)))
  return 0


def of(spec: str, changes: Sequence[str]) -> list[Setting]:
  """Returns the settings of a config with overrides; of a study, those of its first run.

  Raises:
    UserError: there is no such config, or an override cannot be applied.
  """
  read = files.read(spec, models=sizes.model)
  if isinstance(read, schema.Study):
    name, config = next(iter(read.runs.items()))
    print(f'{spec} is a study of {len(read.runs):,} runs. These are the settings of the first, {name}.',
          file=sys.stderr)
  else:
    config = read
  file_name, values = files.find(spec)[0].name, {item.name: item.value for item in describe.settings(config)}
  changed = overrides.apply({'': config}, list(changes), models=sizes.model)['']
  changed_names = [change.partition('=')[0] for change in changes]
  settings = []
  for item in describe.settings(changed):
    if item.name in changed_names:
      set_by = COMMAND_LINE
    elif any(item.name.startswith(f'{name}.') for name in changed_names):  # of a part that was replaced
      set_by = DEFAULT if item.value == item.default else COMMAND_LINE
    else:
      set_by = DEFAULT if values.get(item.name, item.default) == item.default else file_name
    settings.append(Setting(item, set_by))
  return settings


def select(settings: Sequence[Setting], words: Sequence[str]) -> list[Setting]:
  """Returns the settings whose path has one of the words as a part of it; all without words.

  Raises:
    UserError: a word is in no path; suggests the nearest.
  """
  def has(setting: Setting, word: str) -> bool:
    return f'.{word}.' in f'.{setting.described.name}.'

  chosen = [setting for setting in settings if not words or any(has(setting, word) for word in words)]
  for word in words:
    if not any(has(setting, word) for setting in chosen):
      names = [setting.described.name for setting in settings]
      known = dict.fromkeys(part for name in names for part in (*name.split('.'), name))
      raise UserError(f'settings: expected a part or the name of a setting, got {word!r}.'
                      + schema.checks.nearest(word, known))
  return chosen


def table(settings: Sequence[Setting]) -> list[str]:
  """Returns a line for each setting below the path of its part: last name, value, default, and what set it."""
  rows = [(setting.described.name.rpartition('.')[2], describe.text(setting.described.value),
           describe.text(setting.described.default), setting.set_by) for setting in settings]
  widths = [min(max_width, max(len(row[i]) for row in (_HEADINGS, *rows))) for i, max_width in enumerate(_MAX_WIDTHS)]
  terminal_width = shutil.get_terminal_size((_LINE_WIDTH, 24)).columns if sys.stdout.isatty() else 0
  lines, last_path = [_join(_HEADINGS, widths)], None
  for setting, row in zip(settings, rows, strict=True):
    path = setting.described.name.rpartition('.')[0]
    if path != last_path:
      lines.append(f'{path}: {setting.described.part}' if path else setting.described.part)
      last_path = path
    lines.append(_join(row, widths))
  return [_shorten(line, max(_LINE_WIDTH, terminal_width)) for line in lines]


def _join(row: tuple[str, ...], widths: Sequence[int]) -> str:
  """Returns a line of the table; the last cell, which says what set the setting, has any width."""
  cells = [_shorten(cell, width).ljust(width) for cell, width in zip(row, widths, strict=False)]
  return f'  {"  ".join([*cells, row[-1]])}'


def paragraphs(settings: Sequence[Setting]) -> list[str]:
  """Returns lines of at most 80 characters for each setting: its value, what it does, its type, default and origin."""
  lines = []
  for setting in settings:
    item = setting.described
    kind = f'{item.type}: {item.allowed}' if item.allowed else item.type
    unit = f' ({item.unit})' if item.unit and item.unit not in item.allowed and item.type != 'length' else ''
    lines += [f'{item.name}={describe.text(item.value)}']
    for text in (item.about, f'{kind}{unit}', f'default {describe.text(item.default)}; set by: {setting.set_by}'):
      lines += textwrap.wrap(text, _LINE_WIDTH, initial_indent='    ', subsequent_indent='    ')
  return lines


def _shorten(text: str, width: int) -> str:
  return text if len(text) <= width else f'{text[:width - 1]}…'
