"""Shows and checks the commands of a record, from their arguments alone, before any command is run.

Anybody may have written a record, and its commands run with the rights of the person who replays the record. So a
replay runs only jobs that compute results and write below the directory of the replay. Python code that is not of this
package is run only with `--allow_code`. `job` prints the `header`, calls `check`, prints the `plan`, and only then
opens data and runs commands. This module does not import or open the files and modules that a record names.
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
SHIPPED_JOBS = (*JOBS, 'convert')  # allowed in the records of this package
OUTPUT_FLAGS = ('workdir', 'to', 'csv')  # flags of these jobs with paths that are written
MAX_SHOWN = 1_000  # characters of a command in an error message
_ADDRESSES = ('mix', 'gs', 's3', 'http', 'https', 'file')  # words before a colon that are not modules, as in `gs://…`
_BELOW_WORK = re.compile(rf'\{{{inputs.WORK}\}}(/(?!\.\.(/|$))[^/]*)*')  # '{work}/a/b', without '..'
_PATH_CHARACTER = re.compile(r'[/:{]')  # in a flag's value that is a path, an address or a placeholder


def header(record: Record) -> str:
  """Returns two lines of text: the claim of a record; and the date, commit, device, processor and cost."""
  made = record.made
  machine = made.get('machine', {})
  device = machine.get('device_kind', 'cpu')
  facts = [made.get('date', ''), f'commit {made["commit"][:12]}' if made.get('commit') else '',
           '' if device == 'cpu' else device, machine.get('cpu_model', ''),
           f'{made["processor_s"]:,.0f} processor seconds' if made.get('processor_s') else '']
  return f'{printable(record.sentence)}\nRecorded: {printable(", ".join(filter(None, facts)) or "without a machine")}'


def check(record: Record, *, is_shipped: bool, allow_code: bool) -> None:
  """Checks what the commands of a record would run and write.

  Args:
    is_shipped: whether the record is one of this package.
    allow_code: whether configs and modules that are not of this package may run.

  Raises:
    UserError: the commands do something that is not allowed; the message lists all problems.
  """
  allowed_jobs = SHIPPED_JOBS if is_shipped else JOBS
  problems = []
  for line, words in zip(record.command, record.words(), strict=True):
    words = console.split_switches(words)[0]  # -q and -v may stand before the job
    job = job_of(words)
    if job not in allowed_jobs or line.split()[0] != 'vit-jax':
      shown = documents.describe(job)
      problems.append(f'expected jobs that compute a result ({", ".join(allowed_jobs)}), got {shown}')
    for name, value in _flags(words):
      if name in OUTPUT_FLAGS and not _BELOW_WORK.fullmatch(value):
        problems.append(
            f'--{name}: expected a path below {{{inputs.WORK}}}, the directory of the replay, got {value}')
      if name.startswith('config.trackers'):
        problems.append(f'--{name}: expected no tracker, which sends results elsewhere')
    if not allow_code:
      problems += find_foreign_code(words)
  if not allow_code:  # the data are opened before the commands run
    problems += find_foreign_code([f'--data={source}' for source in record.data])
  if problems:
    raise UserError('\n'.join([f'{record.id}: expected commands that a replay may run, got others, so nothing was run:',
                               *(f'  {_shortened(problem)}.' for problem in dict.fromkeys(problems)),
                               f'Run them yourself if you trust them: {_shortened(" && ".join(record.command))}']))


def job_of(words: Sequence[str]) -> str:
  """Returns the job of a command: the first argument, or the value of `--job`; 'a and b' if both differ."""
  jobs = [word for word in words[:1] if not word.startswith('-')]
  jobs += [value for name, value in _flags(words) if name == 'job']
  return ' and '.join(dict.fromkeys(jobs)) or 'train'


def find_foreign_code(words: Sequence[str]) -> list[str]:
  """Returns a problem for each config file and module that a command would run and that is not of this package.

  `vit-jax check` calls this function for the command of a manifest, and `vit-jax record` for the command of a run.
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
  """Returns the text of the plan of a replay: each command with its config, and the paths that it reads and writes.

  The last line lists the data that are read and compared with the record before the first command.
  """
  lines = ['Plan:']
  for words in commands:
    lines.append(f'  vit-jax {" ".join(words)}')
    for name, value in _flags(words):
      if name == 'config':
        path, _ = files.find(value)
        lines.append(f'      config: {path}{", of this package" if _is_shipped(path) else ""}')
      if name in OUTPUT_FLAGS:
        lines.append(f'      writes: {value}')
      elif _PATH_CHARACTER.search(value):
        lines.append(f'      reads: {value.rpartition("source=")[2]}')
  if record.data:
    lines.append(f'  compares before: {", ".join(record.data)}')
  return '\n'.join(map(printable, lines))


def _is_shipped(config: pathlib.Path) -> bool:
  """Returns whether a config file is in a folder of configs of this package."""
  return any(config.resolve().is_relative_to(folder.resolve()) for folder in files.folders())


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
  """Yields the name and the value of each flag, `--name=value`, `--name value` or `--name`, whose value is ''."""
  for word, next_word in zip(words, [*words[1:], ''], strict=False):
    if word.startswith('-'):
      name, equals, value = word.lstrip('-').partition('=')
      if not equals and not next_word.startswith('-'):
        value = next_word
      yield name, value


def _shortened(text: str) -> str:
  """Returns the first `MAX_SHOWN` characters of a text, without control characters."""
  text = printable(text)
  return text if len(text) <= MAX_SHOWN else f'{text[:MAX_SHOWN]}…'
