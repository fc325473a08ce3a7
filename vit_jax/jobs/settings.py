"""`--job=settings`: every setting of a config with its value, type, unit, default and range, and what set it.

    vit-jax settings digits                    # a line for each setting
    vit-jax settings digits optimizer lr       # a paragraph for each setting of `optimizer`, and each one named `lr`

`commands.Command.run` calls `run`: `of` lists the settings, `select` keeps the settings that the words name, and
`table` or `paragraphs` makes the lines. `config/describe.py` describes each setting as a `Described`.
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
_SETTING_NAME = re.compile(r'(?!.*\.(py|json)$)\w+(\.\w+)+')  # such as `optimizer.lr`, not the file `own.py`
_LINE_WIDTH = 80  # characters; a wider terminal has longer lines in the table
_MAX_WIDTHS = (21, 18, 15)  # characters of a name, a value and a default in the table
_HEADINGS = ('setting', 'value', 'default', 'set by')


class Setting(NamedTuple):
  """A setting, and the origin of its value: the name of the config's file, `command line` or `default`."""
  described: Described
  set_by: str


def run(files: Sequence[str], *, config: schema.Config | schema.Study | None, source: str, changes: Sequence[str],
        json: bool, changed: bool) -> int:
  """Prints the settings; returns the exit status 0.

  Args:
    files: parts or names of settings; no words = all settings. Without `--config`, the first word names the config.
    config: the config of `--config`; None = the flag is not given.
    source: the flag itself, `--config=NAME`; '' = not given. The config is read again from this name.
    changes: overrides of the command line, each PATH=VALUE.
    json: whether to print one JSON object, with the settings by name, instead of text.
    changed: whether to print only settings that the config or the command line sets.

  Raises UserError if there is no config, or no such setting.
  """
  words = list(files)
  if config is None and not words:
    raise UserError('settings: expected the name of a config, got none. Run vit-jax settings CONFIG.')
  if config is None and _SETTING_NAME.fullmatch(words[0]):
    raise UserError(f'settings: expected the name of a config first, got the setting {words[0]}. Run vit-jax settings '
                    f'CONFIG {" ".join(words)}.')
  spec = words.pop(0) if config is None else source.removeprefix('--config=')
  settings = [setting for setting in of(spec, changes) if not changed or setting.set_by != DEFAULT]
  chosen = select(settings, words)
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

  Raises UserError if there is no such config, or an override cannot be applied.
  """
  config = files.read(spec, models=sizes.model)
  if isinstance(config, schema.Study):
    num_runs = len(config.runs)
    name, config = next(iter(config.runs.items()))
    print(f'{spec} is a study of {num_runs:,} runs. These are the settings of the first, {name}.', file=sys.stderr)
  file_name = files.find(spec)[0].name
  value_by_name = {item.name: item.value for item in describe.settings(config)}  # without the overrides
  overridden = overrides.changed({'': config}, list(changes), models=sizes.model)['']
  overridden_names = [change.partition('=')[0] for change in changes]
  settings = []
  for item in describe.settings(overridden):
    if item.name in overridden_names:
      set_by = COMMAND_LINE
    elif any(item.name.startswith(f'{name}.') for name in overridden_names):  # an override replaced the part
      set_by = DEFAULT if item.value == item.default else COMMAND_LINE
    else:
      set_by = DEFAULT if value_by_name.get(item.name, item.default) == item.default else file_name
    settings.append(Setting(item, set_by))
  return settings


def select(settings: Sequence[Setting], words: Sequence[str]) -> list[Setting]:
  """Returns the settings whose dotted name contains one of the words, such as `optimizer`; all settings without words.

  Raises UserError if no setting has one of the words; the message suggests the nearest word.
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
  lines = [_join(_HEADINGS, widths)]
  last_path = None
  for setting, row in zip(settings, rows, strict=True):
    path = setting.described.name.rpartition('.')[0]
    if path != last_path:
      lines.append(f'{path}: {setting.described.part}' if path else setting.described.part)
      last_path = path
    lines.append(_join(row, widths))
  return [_shorten(line, max(_LINE_WIDTH, terminal_width)) for line in lines]


def _join(row: tuple[str, ...], widths: Sequence[int]) -> str:
  """Returns a line of the table. Cells are shortened or padded to the widths, except the last cell (`set by`)."""
  cells = [_shorten(cell, width).ljust(width) for cell, width in zip(row, widths, strict=False)]
  return f'  {"  ".join([*cells, row[-1]])}'


def paragraphs(settings: Sequence[Setting]) -> list[str]:
  """Returns lines of at most 80 characters for each setting: value, purpose, type, default and origin."""
  lines = []
  for setting in settings:
    item = setting.described
    type_text = f'{item.type}: {item.allowed}' if item.allowed else item.type
    unit = f' ({item.unit})' if item.unit and item.unit not in item.allowed and item.type != 'length' else ''
    lines += [f'{item.name}={describe.text(item.value)}']
    for text in (item.about, f'{type_text}{unit}', f'default {describe.text(item.default)}; set by: {setting.set_by}'):
      lines += textwrap.wrap(text, _LINE_WIDTH, initial_indent='    ', subsequent_indent='    ')
  return lines


def _shorten(text: str, width: int) -> str:
  return text if len(text) <= width else f'{text[:width - 1]}…'
