"""What the commands of a record will do, as far as their arguments tell: shown and checked before anything is run.

Anybody may have written a record, and its commands run with the rights of the person who replays it. So only jobs that
compute results are run, they write only below the directory of the replay, and Python that is not of this package is
run only with `--allow_code`. `job` prints the `header`, calls `check`, prints the `plan`, and only then opens data and
runs commands. Nothing in this module imports or opens what a record names.
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
SHIPPED_JOBS = (*JOBS, 'convert')  # of the records of this package
OUTPUTS = ('workdir', 'to', 'csv')  # flags of these jobs with paths that are written
MOST_SHOWN = 1_000  # characters of a command in an error message
_ADDRESSES = ('mix', 'gs', 's3', 'http', 'https', 'file')  # `gs:…` and the like name no module
_BELOW = re.compile(rf'\{{{inputs.WORK}\}}(/(?!\.\.(/|$))[^/]*)*')  # '{work}/a/b', without '..'
_PATH = re.compile(r'[/:{]')  # in the value of a flag that is a path, an address or a name of one


def header(record: Record) -> str:
  """Returns two lines: the claim of a record; and its date, commit, device, processor and cost."""
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
    record: from any source.
    is_shipped: whether it is a record of this package.
    allow_code: whether configs and modules that the record names and that are not of this package may run.

  Raises:
    UserError: the commands do something that they may not do; the message lists all of it.
  """
  known = SHIPPED_JOBS if is_shipped else JOBS
  problems = []
  for line, words in zip(record.command, record.words(), strict=True):
    words = console.split_switches(words)[0]  # -q and -v may stand before the job
    if job(words) not in known or line.split()[0] != 'vit-jax':
      problems.append(
          f'expected jobs that compute a result ({", ".join(known)}), got {documents.describe(job(words))}')
    for name, value in _flags(words):
      if name in OUTPUTS and not _BELOW.fullmatch(value):
        problems.append(
            f'--{name}: expected a path below {{{inputs.WORK}}}, the directory of the replay, got {value}')
      if name.startswith('config.trackers'):
        problems.append(f'--{name}: expected no tracker, which sends results elsewhere')
    if not allow_code:
      problems += code(words)
  if not allow_code:  # the data are opened before the commands run
    problems += code([f'--data={source}' for source in record.data])
  if problems:
    raise UserError('\n'.join([f'{record.id}: expected commands that a replay may run, got others, so nothing was run:',
                               *(f'  {_shortened(problem)}.' for problem in dict.fromkeys(problems)),
                               f'Run them yourself if you trust them: {_shortened(" && ".join(record.command))}']))


def job(words: Sequence[str]) -> str:
  """Returns the job of a command line: its first word, or the value of `--job`; 'a and b' if these differ."""
  first = [word for word in words[:1] if not word.startswith('-')]
  of_flags = [value for name, value in _flags(words) if name == 'job']
  return ' and '.join(dict.fromkeys([*first, *of_flags])) or 'train'


def code(words: Sequence[str]) -> list[str]:
  """Returns a text for each config file and module that a command would run and that is not of this package.

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
  """Returns the plan of a replay: each command with its config, what it reads, and what it writes.

  The last line names the data that are read and compared before the first command.
  """
  lines = ['Plan:']
  for words in commands:
    lines.append(f'  vit-jax {" ".join(words)}')
    for name, value in _flags(words):
      if name == 'config':
        path, _ = files.find(value)
        lines.append(f'      config: {path}{", of this package" if _is_shipped(path) else ""}')
      if name in OUTPUTS:
        lines.append(f'      writes: {value}')
      elif _PATH.search(value):
        lines.append(f'      reads: {value.rpartition("source=")[2]}')
  if record.data:
    lines.append(f'  compares before: {", ".join(record.data)}')
  return '\n'.join(map(printable, lines))


def _is_shipped(config: pathlib.Path) -> bool:
  """Returns whether a config file is in a folder of configs of this package."""
  return any(config.resolve().is_relative_to(folder.resolve()) for folder in files.folders())


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
  """Yields the name and the value of each flag, of `--name=value` or `--name value`; the value is '' if it has none."""
  for word, following in zip(words, [*words[1:], ''], strict=False):
    name, equals, value = word.lstrip('-').partition('=')
    if not equals and not following.startswith('-'):
      value = following
    if word.startswith('-'):
      yield name, value


def _shortened(text: str) -> str:
  """Returns the first `MOST_SHOWN` characters of a text, without control characters."""
  text = printable(text)
  return text if len(text) <= MOST_SHOWN else f'{text[:MOST_SHOWN]}…'
