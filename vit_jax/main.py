"""The command line: `python -m vit_jax.main --job=… --config=…`, or `vit-jax JOB …`.

`program` is the entry point. It calls `run`, which reads the command line with the table of jobs in `commands.py`
(`parse`), runs the job (`Command.run`), and turns every exception into a message and an exit status
(`reports.explain`).

This module splits the command line without `argparse`, which stops at the first error and does not know overrides
(`--config.NAME=VALUE`): `parse` lists all problems together. The `argparse` parsers of `parser` only format the help,
and describe the flags for shell completion. jax and the module of a job are imported after the job is chosen, so that
`--help` is instant.
"""
from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import io
import logging
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from vit_jax.commands import JOBS, Command, Flag, Job, find_model
from vit_jax.config import files as configs
from vit_jax.config.overrides import ELSEWHERE
from vit_jax.core import failures, globs, implementation, reports, signals
from vit_jax.core.errors import UserError
from vit_jax.record import console

log = logging.getLogger('vit_jax')
HELP_WORDS = ('-h', '--help', '-help')
HELP = """Vision Transformers in JAX, from raw images to the tables of the paper.

Usage: vit-jax JOB [--flag=VALUE …], or python -m vit_jax.main --job=JOB …

  vit-jax train --config=digits
  vit-jax train --config=from_folder --config.data.source=folder:PATH --workdir=runs/mine
  vit-jax finetune --weights=FILE --data=folder:PATH
  vit-jax evaluate --workdir=runs/digits
  vit-jax predict --weights=runs/digits IMAGES
  vit-jax plan --config=vit_l16_jft --topology=v3:16x16

Jobs (vit-jax JOB --help shows the flags of one; default: train):
{jobs}

--config.NAME=VALUE overrides any setting of the config, for example --config.optimizer.lr=3e-4.
The same command resumes a run that was stopped. --version shows the versions of vit_jax and of what it runs on.
-q shows only warnings, errors and results; -v also messages of libraries, and the traceback of every error, as
VIT_JAX_TRACEBACK=1 in the environment does.

Exit status: 0 done; 2 an error that you can fix, with a message; 70 an error in this program, with a file to report;
75 stopped by SIGTERM, SIGUSR1 or SIGINT after saving, or storage, the network or another host failed: run the same
command again to resume; 130 interrupted without saving; 141 the reader of the output ended. Of replay also 3 to 7: what
differs, see docs/guides/replay.md.
"""
NOT_A_JOB = 'command line: expected a job such as train or a flag such as --config=digits, got {!r}.'
OVERRIDES = """Settings of the config are overridden with --config.NAME=VALUE, for example
  --config.optimizer.lr=3e-4 --config.length='20 epochs'"""


def parse(arguments: Sequence[str]) -> Command:
  """Reads the arguments after the program's name.

  Raises:
    UserError: lists every flag that is unknown, missing, of another job or has a wrong value. If there is one, the
      error also lists all problems of the name of the config and of its overrides.
  """
  name, words, problems = _find_job(arguments)
  job = JOBS[name]
  line = _split_words(job, words)
  values: dict[str, Any] = {flag.name: flag.default if flag.kind else False for flag in job.flags.values()}
  for flag_name, texts in line.texts.items():
    try:
      values[flag_name] = _read_value(job.flags[flag_name], texts)
    except UserError as error:
      problems.append(str(error))
  problems += [_explain_unknown(word, job, str(values.get('config') or job.base)) for word in line.unknown]
  problems += _find_missing_flags(name, line)
  if not job.files:
    problems += [NOT_A_JOB.format(word) + (_suggest_config(job, word) or globs.nearest(word, JOBS))
                 for word in line.files]
  elif not line.files and not job.files.startswith('['):
    problems.append(f'command line: expected {job.files}, got none.')
  problems += _check_repeated_overrides(line.overrides)
  if line.overrides and not job.has_settings:
    problems.append(f'--config.{line.overrides[0]}: expected no override, as vit-jax {name} takes no config. Remove '
                    'it.')
  if problems:
    config = values.get('config') or job.base
    try:
      if config:
        configs.load_study(config, line.overrides, models=find_model)  # raises the problems of the config
    except UserError as error:
      problems.append(str(error))
    raise UserError('\n'.join([*dict.fromkeys(problems), f'See vit-jax {name} --help.']))
  return Command(name, values, tuple(line.overrides), tuple(line.files))


def _find_job(arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
  """Returns the name of the job (`train` if none is given), the other arguments, and the problem of several names.

  Raises UserError if there is no such job.
  """
  words = list(arguments)
  if words and words[0] in JOBS:
    words[0] = f'--job={words[0]}'
  chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  chooser.add_argument('--job', '-job', nargs='?', const='', action='append', default=[])
  chosen, other_words = chooser.parse_known_args(words)
  if not chosen.job and other_words and not other_words[0].startswith('-'):  # perhaps a misspelled name of a job
    suggestion = globs.nearest(other_words[0], JOBS)
    if suggestion and not _suggest_config(JOBS['train'], other_words[0]):
      raise UserError(NOT_A_JOB.format(other_words[0]) + suggestion)  # without problems that `train` would have
  names = list(dict.fromkeys(chosen.job)) or ['train']
  for name in names:
    if name not in JOBS:
      raise UserError(f'--job: expected one of {", ".join(JOBS)}, got {name or "none"}.{globs.nearest(name, JOBS)}')
  problems = [f'--job: expected one job, got {" and ".join(names)}.'] if len(names) > 1 else []
  return names[0], other_words, problems


class _Line(NamedTuple):
  """The words of a command line after the name of the job, sorted."""
  texts: dict[str, list[str]]  # values of a flag, in the order of the command line, by its name; [] for a switch
  files: list[str]  # words that are not flags
  overrides: list[str]  # settings of the config, `name=value` each
  unknown: list[str]  # names of flags that the job does not have, and `name=value` of switches, which take no value


def _split_words(job: Job, words: Sequence[str]) -> _Line:
  """Sorts the words of a command line. A flag and its value are one word (`--top=3`) or two words (`--top 3`)."""
  line = _Line({}, [], [], [])
  switches = {flag.name for other in JOBS.values() for flag in other.flags.values() if not flag.kind}
  queue = list(words)
  while queue:
    word = queue.pop(0)
    name, equals, value = word.lstrip('-').partition('=')
    if not word.startswith('-'):
      line.files.append(word)
      continue
    if not equals and name not in switches and queue and not queue[0].startswith('-'):
      equals, value = '=', queue.pop(0)
    if name.startswith('config.'):
      line.overrides.append(f'{name.removeprefix("config.")}{equals}{value}')
    elif name not in job.flags:
      line.unknown.append(name)
    elif job.flags[name].kind:
      line.texts.setdefault(name, []).append(value if equals else job.flags[name].bare_value)
    elif equals:
      line.unknown.append(f'{name}={value}')
    else:
      line.texts[name] = []
  return line


def _find_missing_flags(name: str, line: _Line) -> list[str]:
  """Returns a problem for each required flag of a job that is not given and for which no word is a misspelling."""
  job = JOBS[name]
  misspelled = {flag_name for word in line.unknown for flag_name in globs.similar_names(word, job.flags)}
  if any(_suggest_config(job, word) for word in line.files):
    misspelled.add('config')
  return [f'--{flag.name}: expected {flag.kind.expected}, got none. The {name} job needs '
          f'--{flag.name}={flag.kind.metavar}: {flag.help}.'
          for flag in job.required if flag.kind and flag.name not in misspelled | line.texts.keys()]


def _read_value(flag: Flag, texts: list[str]) -> Any:
  """Returns the value of a flag that is given once, or several times with the same text; True for a switch."""
  if not flag.kind:
    return True
  values = list(dict.fromkeys(texts))
  if len(values) > 1:
    raise UserError(f'--{flag.name}: expected one value, got {_quoted(values)}. Set one, and quote a range in braces.')
  return flag.read(texts[0])


def _check_repeated_overrides(overrides: Sequence[str]) -> list[str]:
  """Returns a problem for each setting with several paths or sources, and warns of other settings with several values.

  The last value is used, so that a script can change its own defaults. Several paths are a problem, because the shell
  turns `x-{0..9}.tar` without quotes into several arguments.
  """
  values_by_setting: dict[str, list[str]] = {}
  for name, _, value in (override.partition('=') for override in overrides):
    values = values_by_setting.setdefault(name, [])
    if value not in values:
      values.append(value)
  problems = []
  for name, values in values_by_setting.items():
    if len(values) > 1 and any('/' in value or ':' in value for value in values):
      problems.append(f'--config.{name}: expected one value, got {_quoted(values)}. Set one, and quote a range in '
                      'braces.')
    elif len(values) > 1:
      log.warning('--config.%s: got %s. The last one is used.', name, _quoted(values))
  return problems


def _quoted(values: Sequence[str]) -> str:
  """Returns up to four values as `'a' and 'b'`; of more values, the first three and the number of other values."""
  more = f' and {len(values) - 3:,} more' if len(values) > 4 else ''
  return ' and '.join(map(repr, values[:3] if more else values)) + more


def _explain_unknown(word: str, job: Job, config: str) -> str:
  """Returns the problem of a word in `_Line.unknown`, with the most similar flag of the job or setting of `config`."""
  name, equals, value = word.partition('=')
  if equals:
    return f'--{name}: expected no value, got {value!r}. Set --{name} alone.'
  if owners := [other for other, other_job in JOBS.items() if name in other_job.flags]:
    return f'--{name}: expected a flag of this job, got one of {", ".join(owners)}. Remove it, or run one of these.'
  name_here = ELSEWHERE.get(name.replace('-', '_'), name.replace('-', '_'))  # the name in this package
  suggestion = globs.nearest(name_here, job.flags, prefix='--')
  settings = configs.known_settings(config) if job.has_settings else []
  similar = [setting for setting in settings if f'.{setting}'.endswith(f'.{name_here}')]  # optimizer.lr for lr
  if not similar and not suggestion:
    last_parts = globs.similar_names(
        name_here.split('.')[-1], {setting.split('.')[-1] for setting in settings}, cutoff=0.75)
    similar = [setting for setting in settings if setting.split('.')[-1] in last_parts]
  if similar:
    suggestion = f' Did you mean the setting --config.{" or --config.".join(similar[:3])}?'
  return f'--{name}: expected a known flag, got --{name}.{suggestion}'


def _suggest_config(job: Job, word: str) -> str:
  """Returns ` Did you mean --config=WORD?` if the job takes a config, and a config has this name; else ''."""
  is_config = 'config' in job.flags and pathlib.PurePath(word.partition(':')[0]).stem in configs.list_names()
  return f' Did you mean --config={word}?' if is_config else ''


def parser(name: str) -> argparse.ArgumentParser:
  """Returns a parser with the flags of a job, for the help and for shell completion; `parse` does not use it."""
  job = JOBS[name]
  required = [f'--{flag.name}={flag.kind.metavar}' for flag in job.required if flag.kind]
  usage = ['vit-jax', name, *required, *(['[--flag=VALUE …]'] if job.optional else []), job.files]
  result = argparse.ArgumentParser(
      usage=' '.join(usage).rstrip(), description=job.summary, epilog=OVERRIDES if job.has_settings else None,
      add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS,
      formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=40))
  for title, flags in (('required', job.required), ('optional', job.optional)):
    group = result.add_argument_group(title)
    for flag in flags:
      if flag.kind:
        metavar = f'[{flag.kind.metavar}]' if flag.bare_value else flag.kind.metavar
        group.add_argument(f'--{flag.name}', action='append', metavar=metavar, help=_flag_help(flag))
      else:
        group.add_argument(f'--{flag.name}', action='store_true', help=flag.help)
  return result


def _flag_help(flag: Flag) -> str:
  """Returns the help of a flag, with the limits and the default of its value."""
  default = flag.default_text or ('' if flag.default in (None, '', []) else str(flag.default))
  notes = '; '.join(filter(None, [flag.kind.limits if flag.kind else '', f'default: {default}' if default else '']))
  return (f'{flag.help} ({notes})' if notes else flag.help).replace('%', '%%')


def help_text(arguments: Sequence[str] = ()) -> str:
  """Returns the help of the job that the arguments name, or of the program; raises UserError for an unknown job."""
  words = [word for word in arguments if word not in HELP_WORDS]
  if words:
    return parser(_find_job(words)[0]).format_help()
  width = max(map(len, JOBS)) + 2
  return HELP.format(jobs='\n'.join(f'  {name:<{width}}{job.summary}' for name, job in JOBS.items()))


def run(arguments: Sequence[str] | None = None) -> int:
  """Runs a command line and returns the exit status; every exception becomes a message, see `core/reports.py`.

  `arguments` are the words after the program's name; None = the arguments of this process.
  """
  words = list(sys.argv[1:] if arguments is None else arguments)
  try:
    words, verbosity = console.split_switches(words)
  except UserError as error:
    print(reports.explain(error, words).message, file=sys.stderr)
    return failures.USER_ERROR
  with console.verbosity_set(verbosity):
    return _run_words(words)


def _run_words(arguments: list[str]) -> int:
  """Does the work of `run` for a command line from which -q and -v have been removed."""
  try:
    if isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(errors='backslashreplace')  # names of files may be other bytes than UTF-8
    if arguments in (['--version'], ['version']):
      print(reports.versions())
      status = 0
    elif not {*arguments}.isdisjoint(HELP_WORDS) or arguments[:1] == ['help']:
      print(help_text(arguments), end='')
      status = 0
    elif not arguments:
      print(f'{help_text()}\nerror: expected a job, got none. Start with vit-jax train --config=digits.',
            file=sys.stderr)
      status = failures.USER_ERROR
    else:
      status = parse(arguments).run(parse)
    sys.stdout.flush()
    return status
  except SystemExit:
    raise
  except BaseException as error:
    failure = reports.explain(error, arguments)
  reports.drop_output()
  if failure.message and (failure.status != signals.INTERRUPTED or signals.ending().claim()):
    with contextlib.suppress(OSError):
      print(failure.message, file=sys.stderr, flush=True)
  if 'vit_jax.parallel.hosts' in sys.modules:
    sys.modules['vit_jax.parallel.hosts'].leave(failure.status)  # a normal exit would wait for the other processes
  return failure.status


def open_streams() -> None:
  """Opens the null device as each standard stream that is closed, as in cron jobs and daemons.

  Otherwise the next file that is opened would get the stream's file descriptor, and the output of libraries would be
  written into that file.
  """
  for descriptor in range(3):
    try:
      os.fstat(descriptor)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is `descriptor`
  for name in ('stdout', 'stderr'):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, 'w', encoding='utf-8', errors='backslashreplace'))


def program() -> None:
  """Runs the command line of this process and exits. A second Ctrl-C exits at once, without closing anything."""
  open_streams()
  implementation.leave_current_folder()
  gc.set_threshold(50_000, 20, 50)  # with the defaults, garbage collection takes 10 % of the time to the first step
  os.environ.setdefault('PYTHONWARNINGS', 'ignore:resource_tracker')  # of semaphores that an interrupt leaves open
  signals.watch()
  statuses = list[int]()
  atexit.register(_end_at_once, statuses)  # registered before all libraries, so called after their functions
  status = run()
  if status == signals.INTERRUPTED:  # a normal exit would wait for threads and for saves
    for child in multiprocessing.active_children():
      child.terminate()
    os._exit(status)
  statuses.append(status)
  sys.exit(status)


def _end_at_once(statuses: list[int]) -> None:
  """Ends this process with the last of `statuses`, if there is one, without the steps of Python that would follow.

  These steps end the threads that still run. A thread that is inside a library in C++ then aborts the process, for
  example the thread `feed` while it places a batch.
  """
  if statuses:
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError):  # the reader has gone, or the stream is closed
        stream.flush()
    os._exit(statuses[-1])


if __name__ == '__main__':
  program()
