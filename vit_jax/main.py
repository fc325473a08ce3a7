"""The command line: `python -m vit_jax.main --job=… --config=…`, or `vit-jax JOB …`.

`program` is the entry point. It calls `run`, which reads the command line by the table of jobs in `commands.py`
(`parse`), runs the job (`Command.run`), and turns every exception into a message and an exit status
(`reports.explain`).

The command line is split here and not by `argparse`, which stops at the first error and does not know overrides
(`--config.NAME=VALUE`): all problems are listed together. `argparse` formats the help of a job, and the package shtab
reads its parsers. Neither jax nor a job is imported before a job is chosen, so that `--help` is instant.
"""
from __future__ import annotations

import argparse
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
OVERRIDES = """Settings of the config are overridden with --config.NAME=VALUE, for example
  --config.optimizer.lr=3e-4 --config.length='20 epochs'"""


def parse(arguments: Sequence[str]) -> Command:
  """Reads the arguments after the program's name.

  Raises:
    UserError: lists every flag that is unknown, missing, of another job or has a wrong value, and all problems of the
      config's name and its overrides.
  """
  name, words, problems = _find_job(arguments)
  job = JOBS[name]
  line = _split(job, words)
  values: dict[str, Any] = {flag.name: flag.default if flag.kind else False for flag in job.flags.values()}
  for flag_name, texts in line.texts.items():
    try:
      values[flag_name] = _value(job.flags[flag_name], texts)
    except UserError as error:
      problems.append(str(error))
  problems += [_explain(word, job, str(values.get('config') or job.base)) for word in line.unknown]
  problems += _missing(name, line)
  if not job.words:
    problems += [f'{_not_a_job(word)}{_as_config(job, word) or globs.nearest(word, JOBS)}' for word in line.files]
  elif not line.files and not job.words.startswith('['):
    problems.append(f'command line: expected {job.words}, got none.')
  overrides = line.overrides
  problems += _repeated(overrides)
  if overrides and not job.has_settings:
    problems.append(f'--config.{overrides[0]}: expected no override, as vit-jax {name} takes no config. Remove it.')
  if problems:
    try:
      if config := values.get('config') or job.base:
        configs.load_study(config, overrides, models=find_model)
    except UserError as error:
      problems.append(str(error))
    raise UserError('\n'.join([*dict.fromkeys(problems), f'See vit-jax {name} --help.']))
  return Command(name, values, tuple(overrides), tuple(line.files))


def _find_job(arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
  """Returns the name of the job (`train` if none is given), the other arguments, and problems.

  Raises:
    UserError: there is no such job.
  """
  words = list(arguments)
  if words and words[0] in JOBS:
    words[0] = f'--job={words[0]}'
  chooser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
  chooser.add_argument('--job', '-job', nargs='?', const='', action='append', default=[])
  found, rest = chooser.parse_known_args(words)
  first = rest[0] if rest and not found.job and not rest[0].startswith('-') else ''
  if not _as_config(JOBS['train'], first) and (near := globs.nearest(first, JOBS)):
    raise UserError(_not_a_job(first) + near)  # the only problem: all others would be those of the default job
  jobs = list(dict.fromkeys(found.job)) or ['train']
  for job in jobs:
    if job not in JOBS:
      raise UserError(f'--job: expected one of {", ".join(JOBS)}, got {job or "none"}.{globs.nearest(job, JOBS)}')
  return jobs[0], rest, [f'--job: expected one job, got {" and ".join(jobs)}.'] * (len(jobs) > 1)


class _Line(NamedTuple):
  """The words of a command line after its job.

  texts: the values of each flag as they were given, by its name; [] for a switch.
  files: words that are no flags.
  overrides: settings of the config, as `name=value`.
  unknown: names of flags that the job does not have, and `name=value` of switches, which take no value.
  """
  texts: dict[str, list[str]]
  files: list[str]
  overrides: list[str]
  unknown: list[str]


def _split(job: Job, words: Sequence[str]) -> _Line:
  """Sorts the words of a command line. A flag and its value are one word, `--top=3`, or two, `--top 3`."""
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
      line.texts.setdefault(name, []).append(value if equals else job.flags[name].alone)
    elif equals:
      line.unknown.append(f'{name}={value}')
    else:
      line.texts[name] = []
  return line


def _missing(name: str, line: _Line) -> list[str]:
  """Returns the problems of required flags that are not given, except flags that an unknown word probably means."""
  job = JOBS[name]
  meant = {flag for word in line.unknown for flag in globs.similar_names(word, job.flags)}
  if any(_as_config(job, word) for word in line.files):
    meant.add('config')
  return [f'--{flag.name}: expected {flag.kind.expected}, got none. The {name} job needs '
          f'--{flag.name}={flag.kind.metavar}: {flag.help}.'
          for flag in job.needs if flag.kind and flag.name not in meant | line.texts.keys()]


def _value(flag: Flag, texts: list[str]) -> Any:
  """Returns the value of a flag that is given once, or several times with the same text; True for a switch."""
  if not flag.kind:
    return True
  if len(values := list(dict.fromkeys(texts))) > 1:
    raise UserError(f'--{flag.name}: expected one value, got {_quoted(values)}. Set one, and quote a range in braces.')
  return flag.read(texts[0])


def _repeated(overrides: Sequence[str]) -> list[str]:
  """Returns the problems of settings that are given several paths or sources; warns of several values of other ones.

  A later value overrides an earlier one, so that a script can change its own defaults. For a path this is an error: if
  `x-{0..9}.tar` is not quoted, the shell makes several arguments of it.
  """
  values_of: dict[str, list[str]] = {}
  for name, _, value in (override.partition('=') for override in overrides):
    values_of.setdefault(name, []).append(value)
  problems = []
  for name, texts in values_of.items():
    values = list(dict.fromkeys(texts))
    listed = _quoted(values)
    if len(values) > 1 and any('/' in value or ':' in value for value in values):
      problems.append(f'--config.{name}: expected one value, got {listed}. Set one, and quote a range in braces.')
    elif len(values) > 1:
      log.warning('--config.%s: got %s. The last one is used.', name, listed)
  return problems


def _quoted(values: Sequence[str]) -> str:
  """Returns up to four values as `'a' and 'b'`; of more than four the first three and the number of the others."""
  more = f' and {len(values) - 3:,} more' if len(values) > 4 else ''
  return ' and '.join(map(repr, values[:3] if more else values)) + more


def _explain(word: str, job: Job, config: str) -> str:
  """Returns the problem of a word in `_Line.unknown`, with the flag or the setting that was probably meant.

  Args:
    word: the name of a flag, or `name=value` of a switch.
    job: the job, which does not have this flag.
    config: name of the config whose settings may be meant.
  """
  name, equals, value = word.partition('=')
  if equals:
    return f'--{name}: expected no value, got {value!r}. Set --{name} alone.'
  if owners := [other for other, other_job in JOBS.items() if name in other_job.flags]:
    return f'--{name}: expected a flag of this job, got one of {", ".join(owners)}. Remove it, or run one of these.'
  wanted = ELSEWHERE.get(name.replace('-', '_'), name.replace('-', '_'))
  near = globs.nearest(wanted, job.flags, prefix='--')
  settings = configs.known_settings(config) if job.has_settings else []
  meant = [setting for setting in settings if f'.{setting}'.endswith(f'.{wanted}')]  # lr means optimizer.lr
  if not meant and not near:
    last_parts = {setting.split('.')[-1] for setting in settings}
    similar = globs.similar_names(wanted.split('.')[-1], last_parts, cutoff=0.75)
    meant = [setting for setting in settings if setting.split('.')[-1] in similar]
  if meant:
    near = f' Did you mean the setting --config.{" or --config.".join(meant[:3])}?'
  return f'--{name}: expected a known flag, got --{name}.{near}'


def _not_a_job(word: str) -> str:
  return f'command line: expected a job such as train or a flag such as --config=digits, got {word!r}.'


def _as_config(job: Job, word: str) -> str:
  """Returns a hint if the job takes a config, and the word names one; else ''."""
  is_config = 'config' in job.flags and pathlib.PurePath(word.partition(':')[0]).stem in configs.list_names()
  return f' Did you mean --config={word}?' if is_config else ''


def parser(name: str) -> argparse.ArgumentParser:
  """Returns the parser of a job, for its help and for shell completion; it converts nothing."""
  job = JOBS[name]
  needs = [f'--{flag.name}={flag.kind.metavar}' for flag in job.needs if flag.kind]
  usage = ['vit-jax', name, *needs, *(['[--flag=VALUE …]'] if job.takes else []), job.words]
  result = argparse.ArgumentParser(
      usage=' '.join(usage).rstrip(), description=job.line, epilog=OVERRIDES if job.has_settings else None,
      add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS,
      formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=40))
  for title, flags in (('required', job.needs), ('optional', job.takes)):
    group = result.add_argument_group(title)
    for flag in flags:
      if flag.kind:
        metavar = f'[{flag.kind.metavar}]' if flag.alone else flag.kind.metavar
        group.add_argument(f'--{flag.name}', action='append', metavar=metavar, help=_describe(flag))
      else:
        group.add_argument(f'--{flag.name}', action='store_true', help=flag.help)
  return result


def _describe(flag: Flag) -> str:
  """Returns the help of a flag, with its limits and its default."""
  default = flag.usual or ('' if flag.default in (None, '', []) else str(flag.default))
  notes = '; '.join(filter(None, [flag.kind.limits if flag.kind else '', f'default: {default}' if default else '']))
  return (f'{flag.help} ({notes})' if notes else flag.help).replace('%', '%%')


def help_text(arguments: Sequence[str] = ()) -> str:
  """Returns the help of the job that the arguments name, or that of the program.

  Raises:
    UserError: there is no such job.
  """
  words = [word for word in arguments if word not in HELP_WORDS]
  if words:
    return parser(_find_job(words)[0]).format_help()
  width = max(map(len, JOBS)) + 2
  return HELP.format(jobs='\n'.join(f'  {name:<{width}}{job.line}' for name, job in JOBS.items()))


def run(arguments: Sequence[str] | None = None) -> int:
  """Runs a command line and returns its exit status; every exception becomes a message, see `core/reports.py`.

  Args:
    arguments: after the program's name; None = those of this process.
  """
  words = list(sys.argv[1:] if arguments is None else arguments)
  try:
    words, verbosity = console.split_switches(words)
  except UserError as error:
    print(reports.explain(error, words).message, file=sys.stderr)
    return failures.USER_ERROR
  with console.verbosity_set(verbosity):
    return _run(words)


def _run(arguments: list[str]) -> int:
  """Runs a command line without -q and -v, as `run`."""
  try:
    if isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(errors='backslashreplace')  # names of files need not be text
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

  Otherwise the next file that is opened would have its number, and what libraries print would be written into it.
  """
  for number in range(3):
    try:
      os.fstat(number)
    except OSError:
      os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
  for name in ('stdout', 'stderr'):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, 'w', encoding='utf-8', errors='backslashreplace'))


def program() -> None:
  """Runs the command line of this process and exits. A second Ctrl-C exits at once, without closing anything."""
  open_streams()
  implementation.leave_current_folder()
  gc.set_threshold(50_000, 20, 50)  # by default, the search for garbage is a tenth of the time to the first step
  os.environ.setdefault('PYTHONWARNINGS', 'ignore:resource_tracker')  # it warns of semaphores that an interrupt leaves
  signals.watch()
  status = run()
  if status == signals.INTERRUPTED:  # a normal exit would wait for threads and for saves
    for child in multiprocessing.active_children():
      child.terminate()
    os._exit(status)
  sys.exit(status)


if __name__ == '__main__':
  program()
