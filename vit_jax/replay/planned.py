"""What the commands of a record will do, from their words alone: shown before anything is read, imported or run.

A record is a text that anybody may have written. Its commands run with the rights of the person who replays it, so only
jobs that compute results are run, they write below the directory of the replay, and no Python but that of this package
is run unless that person allows it with `--allow_code`.
"""
from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Sequence

from vit_jax.config import files
from vit_jax.core import documents, implementation
from vit_jax.core.errors import UserError, printable
from vit_jax.data import opening
from vit_jax.record import console
from vit_jax.replay import inputs
from vit_jax.replay.records import Record

JOBS = ('train', 'finetune', 'pretrain', 'evaluate', 'study')
OWN_JOBS = (*JOBS, 'convert')
"""Of records of this repository."""
OUTPUTS = ('workdir', 'to', 'csv')
"""Flags of these jobs whose files are written."""
MOST_SHOWN = 1_000
"""Characters of a command in an error message."""
_ADDRESSES = ('mix', 'gs', 's3', 'http', 'https', 'file')
_BELOW = re.compile(rf'\{{{inputs.WORK}\}}(/(?!\.\.(/|$))[^/]*)*')
_PLACE = re.compile(r'[/:{]')


def job(words: Sequence[str]) -> str:
  """Returns the job of a command line."""
  named = [value for name, value in _pairs(words) if name == 'job']
  first = [word for word in words[:1] if not word.startswith('-')]
  return ' and '.join(dict.fromkeys([*first, *named])) or 'train'


def check(record: Record, *, is_own: bool, allow_code: bool) -> None:
  """Checks what the commands of a record would run and write.

  Args:
    record: of anybody.
    is_own: whether it is one of this repository.
    allow_code: whether configs that are not of this package, and modules that the record names, may run.

  Raises:
    UserError: lists all that the commands may not do.
  """
  found = []
  for line, words in zip(record.command, map(_plain, record.words()), strict=True):
    known = OWN_JOBS if is_own else JOBS
    if job(words) not in known or line.split()[0] != 'vit-jax':
      found.append(f'expected jobs that compute a result ({", ".join(known)}), got {documents.describe(job(words))}')
    found += [*_outputs(words), *([] if allow_code else code(words))]
  if found:
    raise UserError('\n'.join([f'{record.id}: expected commands that a replay may run, got others, so nothing was run:',
                               *(f'  {_beginning(printable(one))}.' for one in dict.fromkeys(found)),
                               'Run them yourself if you trust them: '
                               + _beginning(printable(' && '.join(record.command)))]))


def _beginning(text: str) -> str:
  return text if len(text) <= MOST_SHOWN else f'{text[:MOST_SHOWN]}…'


def _plain(words: Sequence[str]) -> list[str]:
  """Returns a command without the switches of messages, which may stand before the job."""
  return console.take(words)[0]


def _outputs(words: Sequence[str]) -> Iterator[str]:
  """Yields what is wrong with the places that a command writes to."""
  for name, value in _pairs(words):
    if name in OUTPUTS and not _BELOW.fullmatch(value):
      yield f'--{name}: expected a path below {{{inputs.WORK}}}, the directory of the replay, got {value}'
    if name.startswith('config.trackers'):
      yield f'--{name}: expected no tracker, which sends results elsewhere'


def code(words: Sequence[str]) -> list[str]:
  """Returns what a command would run that is not of this package: config files, and modules."""
  found = []
  for name, value in _pairs(words):
    if name == 'allow_code':
      found.append('--allow_code: expected nobody to set it but the person who runs the command')
    elif name == 'config' and not is_shipped(path := files.find(value)[0]) and path.suffix != '.json':
      found.append(f'--config: expected a config of this package, got the file {path.absolute()}, which would be run. '
                   'Read it, and add --allow_code if you trust it')
    found += [f'--{name}: expected code of this package, got the module {module}, which would be run. Read it, and add '
              '--allow_code if you trust it' for module in _modules(name, value)]
  return found


def _modules(name: str, value: str) -> list[str]:
  if name == 'config':
    value = files.find(value)[1] or ''
  elif name != 'data' and not name.startswith('config.'):
    return []
  return [one for one in implementation.modules_in(value) if one not in (*opening.KINDS, *_ADDRESSES)]


def is_shipped(path: pathlib.Path) -> bool:
  """Returns whether a config is one of this package."""
  return any(path.resolve().is_relative_to(folder.resolve()) for folder in files.folders())


def text(record: Record, commands: Sequence[Sequence[str]]) -> str:
  """Returns the plan of a replay: each command with the config that it runs, what it reads and what it writes."""
  lines = ['Plan:']
  for words in commands:
    lines.append(f'  vit-jax {" ".join(words)}')
    for name, value in _pairs(words):
      if name == 'config':
        path = files.find(value)[0]
        lines.append(f'      config: {path}' + ', of this package' * is_shipped(path))
      if name in OUTPUTS:
        lines.append(f'      writes: {value}')
      elif _PLACE.search(value):
        lines.append(f'      reads: {value.rpartition("source=")[2]}')
  return '\n'.join(map(printable, lines))


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
  """Yields each flag with its value, which may be the next word, as the command line reads them; '' without one."""
  for word, after in zip(words, [*words[1:], ''], strict=True):
    name, equals, value = word.lstrip('-').partition('=')
    if word.startswith('-'):
      yield name, value if equals else '' if after.startswith('-') else after
