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
    'plan': Job('compile the train step for hardware that is not here: does it fit, what does it cost',
                ('config', 'topology'), ('workdir', 'search')),
    'average': Job('average checkpoints of a run into one of its own, for --job=evaluate',
                   ('config', 'workdir', 'to'), ('last', 'steps')),
    'report': Job('write report.html of a run directory', ('workdir',)),
    'prepare': Job('write images as ArrayRecord shards, which data.source=array_record:DIR reads', ('data', 'to'),
                   ('short_px', 'shards', 'quality', 'seed', 'splits', 'data_dir')),
    'list': Job('list the configs, with one line each'),
}
FLAGS = {
    'job': 'what to do; a first word that names a job is the same (default: train)',
    'config': 'name or path of a config, with arguments after a colon: digits, configs/digits.py',
    'workdir': 'directory of the run: made if missing, continued if it holds a run',
    'data': 'what to prepare: folder:PATH or tfds:NAME[/CONFIG][:VERSION]',
    'to': 'where to write',
    'last': 'of average: how many of the newest checkpoints',
    'steps': 'of average: which checkpoints, by step: 8000,9000,10000',
    'short_px': 'of prepare: shrink pictures to this short side (default: keep the files as they are)',
    'shards': 'of prepare: number of files of a split (default: one for 256 MiB)',
    'quality': 'of prepare: of the JPEG files of shrunk pictures, 1 to 100 (default: 90)',
    'seed': 'of prepare: of the order of the examples (default: 0)',
    'splits': 'of prepare: which, by name (default: train,test)',
    'data_dir': 'of prepare: where sets of TFDS lie (default: $TFDS_DATA_DIR, or ~/tensorflow_datasets)',
    'topology': 'hardware to plan for: v3:16x16, v3-512, v5e:16x16, v4:4x4x8, h200:8, cpu:8',
    'search': 'also look for settings that fit, and the fastest of them; takes no value',
}
SWITCHES = ('search',)
"""Flags without a value."""
HELP = """Vision Transformers in JAX, from raw pictures to the tables of the paper.

  python -m vit_jax.main --config=digits --workdir=runs/digits
  python -m vit_jax.main --config=from_folder --config.data.source=folder:PATH --workdir=runs/mine
  python -m vit_jax.main --job=evaluate --config=digits --workdir=runs/digits
  python -m vit_jax.main --job=plan --config=vit_l16_jft:mesh=v3:16x16 --topology=v3:16x16

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
    elif name in SWITCHES:
      faults += [f'--{name}={value}: takes no value; want --{name}'] * bool(equals)
      flags[name] = 'true'
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
  from vit_jax.jobs import hardware
  workdir = pathlib.Path(command.flags.get('workdir', '')).expanduser().absolute()
  hardware.choose()  # before any job imports jax
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
    case 'plan':
      from vit_jax.config import files
      config = files.load(command.flags['config'], command.overrides)
      hardware.use_cpu()
      from vit_jax.jobs import plan
      return plan.run(config, command.flags['topology'], workdir=workdir if 'workdir' in command.flags else None,
                      search='search' in command.flags)
    case 'prepare':
      from vit_jax.jobs import prepare
      return prepare.run(command.flags)
    case 'average':
      from vit_jax.config import files
      config = files.load(command.flags['config'], command.overrides)
      from vit_jax.jobs import average
      return average.run(config, workdir, to=pathlib.Path(command.flags['to']).expanduser().absolute(),
                         last=command.flags.get('last', ''), steps=command.flags.get('steps', ''))
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
    if 'vit_jax.parallel.hosts' in sys.modules:
      sys.modules['vit_jax.parallel.hosts'].leave(2)  # an ordinary end would wait for the other processes
    return 2


if __name__ == '__main__':
  sys.exit(run())
