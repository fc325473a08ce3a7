"""The command line: `python -m vit_jax.main --job=… --config=…`, or `vit-jax JOB …`.

Reads flags, finds the job, and shows a person's mistakes as messages. Imports neither jax nor a job before
one is chosen, so that `--help` is instant.
"""
from __future__ import annotations

import difflib
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from vit_jax.core.errors import UserError


class Job(NamedTuple):
  """A job's one line, the flags it needs and those it may take."""
  line: str
  needs: tuple[str, ...] = ()
  takes: tuple[str, ...] = ()


JOBS = {
    'train': Job('pre-train or fine-tune; evaluates, checkpoints, and resumes by itself', ('config', 'workdir')),
    'evaluate': Job('measure a run: top-1, top-5, NLL; writes evaluate.json', ('config', 'workdir')),
    'report': Job('write report.html of a run directory', ('workdir',)),
    'list': Job('list the configs, with one line each'),
}
FLAGS = {
    'job': 'what to do; a first word that names a job is the same (default: train)',
    'config': 'name or path of a config, with arguments after a colon: digits, configs/digits.py',
    'workdir': 'directory of the run: made if missing, continued if it holds a run',
}
HELP = """Vision Transformers in JAX, from raw pictures to the tables of the paper.

  python -m vit_jax.main --config=digits --workdir=runs/digits
  python -m vit_jax.main --config=from_folder --config.data.source=folder:PATH --workdir=runs/mine
  python -m vit_jax.main --job=evaluate --config=digits --workdir=runs/digits

Jobs (--job=NAME):
{jobs}

Flags:
{flags}
  --config.NAME=VALUE  overrides any setting of the config, such as
             --config.optimizer.lr=3e-4 --config.length='20 epochs'

The same command goes on where a run stopped. Exit status: 0 done; 2 something to be put right, with a message;
75 stopped by SIGTERM or SIGINT and saved, run it again.
"""


class Command(NamedTuple):
  """A command line, read."""
  job: str
  flags: dict[str, str]
  overrides: list[str]


def parse(arguments: Sequence[str]) -> Command:
  """Reads the arguments after the program's name.

  Raises:
    UserError: lists every flag that is unknown, missing, or not for the job.
  """
  flags: dict[str, str] = {}
  overrides: list[str] = []
  faults: list[str] = []
  rest = list(arguments)
  if rest and rest[0] in JOBS:
    flags['job'] = rest.pop(0)
  while rest:
    word = rest.pop(0)
    name, equals, value = word.lstrip('-').partition('=')
    if not word.startswith('-'):
      faults.append(f'{word!r} is no flag; want --NAME=VALUE' + _nearest(word, JOBS))
    elif name.startswith('config.'):
      if not equals and rest and not rest[0].startswith('-'):
        equals, value = '=', rest.pop(0)
      overrides.append(f'{name.removeprefix("config.")}{equals}{value}')
    elif name not in FLAGS:
      faults.append(f'--{name}: no such flag' + _nearest(name, FLAGS))
    elif equals or (rest and not rest[0].startswith('-')):
      flags[name] = value if equals else rest.pop(0)
    else:
      faults.append(f'--{name} has no value; want --{name}=VALUE')
  job = flags.pop('job', 'train')
  faults += _job_faults(job, flags, overrides)
  if faults:
    raise UserError('\n'.join([*faults, 'See --help.']))
  return Command(job, flags, overrides)


def _job_faults(job: str, flags: dict[str, str], overrides: list[str]) -> list[str]:
  if job not in JOBS:
    return [f'--job={job}: no such job{_nearest(job, JOBS)}; there are: {", ".join(JOBS)}']
  needs, takes = JOBS[job].needs, JOBS[job].takes
  faults = [f'--job={job} needs --{name}: {FLAGS[name]}' for name in needs if not flags.get(name)]
  faults += [f'--{name} is not for --job={job}, which takes: {", ".join((*needs, *takes)) or "no flags"}'
             for name in flags if name not in (*needs, *takes)]
  if overrides and 'config' not in (*needs, *takes):
    faults.append(f'--config.{overrides[0]} is not for --job={job}, which takes no config')
  return faults


def _nearest(word: str, known: Sequence[str] | dict[str, str] | dict[str, Job]) -> str:
  near = difflib.get_close_matches(word, list(known), 1)
  return f'; did you mean {near[0]}?' if near else ''


def dispatch(command: Command) -> int:
  """Runs a job and returns its exit status."""
  workdir = pathlib.Path(command.flags.get('workdir', '')).expanduser()
  match command.job:
    case 'train':
      from vit_jax.config import files
      config = files.load(command.flags['config'], command.overrides)
      from vit_jax.jobs import train
      return train.run(config, workdir)
    case 'evaluate':
      from vit_jax.config import files
      config = files.load(command.flags['config'], command.overrides)
      from vit_jax.jobs import evaluate
      return evaluate.run(config, workdir)
    case 'report':
      from vit_jax.jobs import report
      if not workdir.is_dir():
        raise UserError(f'--workdir={workdir} is no directory; want that of a run')
      print(f'Report: {report.write_report(workdir)}')
    case 'list':
      from vit_jax.jobs import listing
      print(listing.table())
  return 0


def help_text() -> str:
  jobs = '\n'.join(f'  {name:<10}{job.line}' for name, job in JOBS.items())
  return HELP.format(jobs=jobs, flags='\n'.join(f'  --{name:<10}{text}' for name, text in FLAGS.items()))


def run(arguments: Sequence[str] | None = None) -> int:
  """The program: exit status of a command line; mistakes of the person become messages."""
  arguments = sys.argv[1:] if arguments is None else arguments
  if any(word in ('-h', '--help', '-help', 'help') for word in arguments):
    print(help_text())
    return 0
  try:
    return dispatch(parse(arguments))
  except UserError as error:
    print(f'error: {error}', file=sys.stderr, flush=True)
    return 2


if __name__ == '__main__':
  sys.exit(run())
