"""From a command line, read, to its job: one function a job, which imports what that job needs and nothing before.

A new job is a function here with its name in `RUN`, and its line in `main.JOBS`.
"""
from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.record import storage


class Command(NamedTuple):
  """A command line, read."""
  job: str
  flags: dict[str, str]
  overrides: list[str]
  files: tuple[str, ...] = ()

  def path(self, flag: str) -> storage.Path:
    """The path that a flag gives, from the root; it may be in object storage, unless the job says otherwise."""
    return storage.open_path(self.flags[flag])

  def local_path(self, flag: str) -> pathlib.Path:
    """The path that a flag gives, of a job that works on this machine alone.

    Raises:
      UserError: it is in object storage.
    """
    if not storage.is_local(self.flags[flag]):
      raise UserError(f'--{flag}={self.flags[flag]}: --job={self.job} works in folders of this machine; want one')
    return pathlib.Path(storage.open_path(self.flags[flag]))


def run(command: Command) -> int:
  """Runs a job and returns its exit status."""
  from vit_jax.parallel import hardware
  hardware.choose()  # before any job imports jax
  return RUN[command.job](command)


def load_config(command: Command) -> schema.Config:
  """The config of `--config`, or without it the one that the run in `--workdir` was started with, with overrides.

  Raises:
    UserError: lists every unknown name and every value that cannot be read.
  """
  from vit_jax.config import files
  if 'config' in command.flags:
    return files.load(command.flags['config'], command.overrides)
  own = command.path('workdir') / 'config.json'
  if not own.is_file():
    raise UserError(f'--workdir={own.parent} holds no run, as there is no config.json; want the directory of a run, '
                    'or --config=NAME as well')
  with storage.local(own) as path:
    return files.load(str(path), command.overrides)


def config_source(command: Command) -> str:
  """Where `load_config` takes the config from, for messages."""
  given = command.flags.get('config')
  return f'--config={given}' if given else str(command.path('workdir') / 'config.json')


def overridden(command: Command) -> set[str]:
  """Names of the settings that a person has given."""
  return {one.partition('=')[0] for one in command.overrides}


def train(command: Command) -> int:
  config = load_config(command)
  from vit_jax.jobs import train as job
  return job.run(config, command.path('workdir'), overridden=overridden(command))


def evaluate(command: Command) -> int:
  given = command.flags
  if 'weights' in given:
    return _measure(command)
  if wrong := [name for name in ('preprocess', 'model', 'view') if name in given]:
    raise UserError(f'--{wrong[0]} is for --weights=…; a run has its own')
  if 'workdir' not in given:
    raise UserError('--job=evaluate needs --workdir=…, the directory of a run, or --weights=…')
  config = load_config(command)
  from vit_jax.jobs import evaluate as job
  return job.run(config, command.path('workdir'), said=config_source(command), overridden=overridden(command))


def _measure(command: Command) -> int:
  """Evaluates weights; without a config, with `configs/evaluate.py`."""
  from vit_jax.config import files
  given = command.flags
  config = files.load(given.get('config', 'evaluate'), command.overrides)
  from vit_jax.jobs import evaluate_weights as job
  asked = job.Asked(given['weights'], *(given.get(name, '') for name in ('preprocess', 'model', 'view')))
  return job.run(config, asked, overridden=overridden(command),
                 workdir=command.path('workdir') if 'workdir' in given else None)


def convert(command: Command) -> int:
  from vit_jax.parallel import hardware
  hardware.use_cpu()
  from vit_jax.jobs import convert as job
  given = command.flags
  texts = {name: given.get(name, '') for name in ('family', 'preprocess', 'model', 'view', 'classes')}
  return job.run(given['weights'], given['to'], overwrite='overwrite' in given, **texts)


def plan(command: Command) -> int:
  config = load_config(command)
  from vit_jax.parallel import hardware
  hardware.use_cpu()
  from vit_jax.plan import job
  workdir = command.path('workdir') if 'workdir' in command.flags else None
  return job.run(config, command.flags['topology'], workdir=workdir, search='search' in command.flags)


def prepare(command: Command) -> int:
  given = command.flags
  if 'weights' in given or 'config' in given:
    return _prepare_labels(command)
  if 'data' not in given:
    raise UserError('--job=prepare needs --data=…, pictures to write as shards, or --config=… and --weights=… for '
                    'label maps')
  from vit_jax.jobs import prepare as job
  return job.run(given)


def _prepare_labels(command: Command) -> int:
  """Writes label maps; the flags of shards are not for them."""
  given, known = command.flags, ('config', 'weights', 'to', 'preprocess', 'model', 'view')
  faults = [f'--{name} is for --data=…, not for label maps' for name in given if name not in known]
  faults += [f'label maps need --{name}=… too' for name in ('config', 'weights') if name not in given]
  if faults:
    raise UserError('\n'.join(faults))
  config = load_config(command)
  from vit_jax.jobs import teacher_labels as job
  return job.run(config, given['weights'], command.local_path('to'),
                 **{name: given.get(name, '') for name in ('preprocess', 'model', 'view')})


def average(command: Command) -> int:
  config = load_config(command)
  from vit_jax.jobs import average as job
  return job.run(config, command.path('workdir'), to=command.path('to'), last=command.flags.get('last', ''),
                 steps=command.flags.get('steps', ''), said=config_source(command), overridden=overridden(command))


def bench(command: Command) -> int:
  config = load_config(command)
  from vit_jax.bench import job
  return job.run(config, search='search' in command.flags,
                 to=command.local_path('to') if 'to' in command.flags else None,
                 **{name: command.flags.get(name, '') for name in ('models', 'px', 'against', 'turns')})


def report(command: Command) -> int:
  from vit_jax.jobs import report as job
  workdirs = [storage.open_path(part) for part in command.flags['workdir'].split(',')]
  if absent := [str(one) for one in workdirs if not one.is_dir()]:
    raise UserError(f'--workdir={",".join(absent)} is no directory; want that of a run, or several, A,B')
  if len(workdirs) > 1 and 'to' not in command.flags:
    raise UserError('one page of several runs belongs to none of them; say where to write it: --to=FILE.html')
  return job.run(workdirs, command.flags.get('to'))


def list_configs(command: Command) -> int:
  from vit_jax.jobs import listing
  print(listing.table())
  return 0


def predict(command: Command) -> int:
  from vit_jax.jobs import predict as job
  given = command.flags
  return job.run(given['weights'], command.files, top=int(given.get('top', 5)), as_json='json' in given,
                 overlay='overlay' in given, to=command.local_path('to') if 'to' in given else None,
                 **{name: given.get(name, '') for name in ('preprocess', 'model', 'view', 'classes')})


def inspect(command: Command) -> int:
  from vit_jax.inspect import job
  given = command.flags
  if ('weights' in given) == ('workdir' in given):
    raise UserError('--job=inspect needs either --weights=… or --workdir=…, what to look into')
  return job.run(given.get('weights') or given['workdir'], command.files, to=command.local_path('to'),
                 **{name: given.get(name, '')
                    for name in ('discard', 'of_class', 'preprocess', 'model', 'view', 'classes')})


def export(command: Command) -> int:
  from vit_jax.parallel import hardware
  hardware.use_cpu()  # so that a file does not depend on what is here
  from vit_jax.export import job
  given = command.flags
  return job.run(given['weights'], command.local_path('to'), from_pixels='from_pixels' in given,
                 **{name: given.get(name, '') for name in ('preprocess', 'model', 'view')})


def study(command: Command) -> int:
  from vit_jax.config import files
  given, environ = command.flags, dict(os.environ)
  found = files.load_study(given['config'], command.overrides)
  from vit_jax.parallel import hardware
  hardware.use_cpu()  # this process only starts others; devices are theirs
  from vit_jax.study import job
  return job.run(found, command.local_path('workdir') if 'workdir' in given else None, environ=environ,
                 processes=given.get('processes', ''), dry_run='dry_run' in given, topology=given.get('topology', ''))


RUN: dict[str, Callable[[Command], int]] = {
    'train': train,
    'evaluate': evaluate,
    'convert': convert,
    'plan': plan,
    'prepare': prepare,
    'average': average,
    'bench': bench,
    'report': report,
    'list': list_configs,
    'study': study,
    'predict': predict,
    'inspect': inspect,
    'export': export,
}
"""What each of `main.JOBS` runs."""
