"""What the commands of a record will do, from their words alone: shown before anything is read, imported or run.

A record is a text that anybody may have written. Its commands run with the rights of the person who replays it, so only
jobs that compute results are run, they write below the directory of the replay, and no Python but that of this package
is run unless that person allows it with `--allow_code`. `job` prints the `header`, calls `check`, prints the `plan`,
and only then opens data and runs commands. Nothing in this module imports or opens what a record names.
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
SHIPPED_JOBS = (*JOBS, 'convert')
"""The jobs that the records of this package may run."""
OUTPUTS = ('workdir', 'to', 'csv')
"""Flags of these jobs whose files are written."""
MOST_SHOWN = 1_000
"""Characters of a command in an error message."""
_ADDRESSES = ('mix', 'gs', 's3', 'http', 'https', 'file')
_BELOW = re.compile(rf'\{{{inputs.WORK}\}}(/(?!\.\.(/|$))[^/]*)*')
_PLACE = re.compile(r'[/:{]')


def header(record: Record) -> str:
  """Returns the claim of a record, and where the record is from."""
  made = record.made
  machine = made.get('machine', {})
  device = machine.get('device_kind', 'cpu')
  parts = [made.get('date', ''), f'commit {made["commit"][:12]}' if made.get('commit') else '',
           '' if device == 'cpu' else device, machine.get('cpu_model', ''),
           f'{made["processor_s"]:,.0f} processor seconds' if made.get('processor_s') else '']
  return f'{printable(record.sentence)}\nRecorded: {printable(", ".join(filter(None, parts)) or "without a machine")}'


def check(record: Record, *, is_shipped: bool, allow_code: bool) -> None:
  """Checks what the commands of a record would run and write.

  Args:
    record: of anybody.
    is_shipped: whether it is one of this package.
    allow_code: whether configs that are not of this package, and modules that the record names, may run.

  Raises:
    UserError: lists all that the commands may not do.
  """
  known = SHIPPED_JOBS if is_shipped else JOBS
  problems = []
  for line, words in zip(record.command, record.words(), strict=True):
    words = console.take(words)[0]  # -q and -v may stand before the job
    if job(words) not in known or line.split()[0] != 'vit-jax':
      problems.append(
          f'expected jobs that compute a result ({", ".join(known)}), got {documents.describe(job(words))}')
    for name, value in _flags(words):
      if name in OUTPUTS and not _BELOW.fullmatch(value):
        problems.append(
            f'--{name}: expected a path below {{{inputs.WORK}}}, the directory of the replay, got {value}')
      if name.startswith('config.trackers'):
        problems.append(f'--{name}: expected no tracker, which sends results elsewhere')
    problems += [] if allow_code else code(words)
  if not allow_code:  # these are opened before the commands run
    problems += code([f'--data={source}' for source in record.data])
  if problems:
    raise UserError('\n'.join([f'{record.id}: expected commands that a replay may run, got others, so nothing was run:',
                               *(f'  {_beginning(one)}.' for one in dict.fromkeys(problems)),
                               f'Run them yourself if you trust them: {_beginning(" && ".join(record.command))}']))


def job(words: Sequence[str]) -> str:
  """Returns the job of a command line; several names if it has several."""
  named = [value for name, value in _flags(words) if name == 'job']
  first = [word for word in words[:1] if not word.startswith('-')]
  return ' and '.join(dict.fromkeys([*first, *named])) or 'train'


def code(words: Sequence[str]) -> list[str]:
  """Returns what a command would run that is not of this package: config files, and modules.

  `vit-jax check` and `vit-jax record` also use it, for the command of a manifest and that of a run.
  """
  problems = []
  for name, value in _flags(words):
    modules = implementation.modules_in(value) if name == 'data' or name.startswith('config.') else []
    if name == 'allow_code':
      problems.append('--allow_code: expected nobody to set it but the person who runs the command')
    elif name == 'config':
      path, argument = files.find(value)
      modules = implementation.modules_in(argument or '')
      if not _is_shipped(path) and path.suffix != '.json':
        problems.append(f'--config: expected a config of this package, got the file {path.absolute()}, which would be '
                        'run. Read it, and add --allow_code if you trust it')
    problems += [f'--{name}: expected code of this package, got the module {module}, which would be run. Read it, and '
                 'add --allow_code if you trust it' for module in modules
                 if module not in opening.KINDS and module not in _ADDRESSES]
  return problems


def plan(record: Record, commands: Sequence[Sequence[str]]) -> str:
  """Returns the plan of a replay: each command with the config that it runs, what it reads and what it writes.

  The last line has the data that are opened before the first command, by source and split.
  """
  lines = ['Plan:']
  for words in commands:
    lines.append(f'  vit-jax {" ".join(words)}')
    for name, value in _flags(words):
      if name == 'config':
        path = files.find(value)[0]
        lines.append(f'      config: {path}' + ', of this package' * _is_shipped(path))
      if name in OUTPUTS:
        lines.append(f'      writes: {value}')
      elif _PLACE.search(value):
        lines.append(f'      reads: {value.rpartition("source=")[2]}')
  if record.data:
    lines.append(f'  compares before: {", ".join(record.data)}')
  return '\n'.join(map(printable, lines))


def _is_shipped(config: pathlib.Path) -> bool:
  return any(config.resolve().is_relative_to(folder.resolve()) for folder in files.folders())


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
  """Yields each flag with its value, which may be the next word, as the command line reads them; '' without one."""
  for word, after in zip(words, [*words[1:], ''], strict=False):
    name, equals, value = word.lstrip('-').partition('=')
    if word.startswith('-'):
      yield name, value if equals else '' if after.startswith('-') else after


def _beginning(text: str) -> str:
  text = printable(text)
  return text if len(text) <= MOST_SHOWN else f'{text[:MOST_SHOWN]}…'
