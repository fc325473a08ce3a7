"""`vit-jax check`: finds problems of a run on this machine, before hardware is requested for it. Compiles nothing.

Launchers call it with the command that they are about to run (`--line`), and a person with the config of a run. `run`
checks the flags, the config with its overrides, and that data, weights and run directory exist. With `--topology` it
also checks that mesh, batch and network divide over the devices, and that the memory suffices by arithmetic (`fit`).
All problems are listed together (exit status 2).
"""
from __future__ import annotations

import pathlib
import shlex
from collections.abc import Collection
from typing import Any

from vit_jax import commands
from vit_jax.config import check, durations, schema
from vit_jax.config.schema import ranges
from vit_jax.core import implementation
from vit_jax.core.errors import UserError
from vit_jax.jobs import check as places
from vit_jax.record import storage

PROGRAMS = ('vit_jax.main', 'vit-jax')


def run(config: schema.Config | None, *, line: str, topology: str, slices: int, data: str, elsewhere: bool,
        manifest: str, workdir: storage.Path | None, allow_code: bool, overridden: Collection[str] = ()) -> int:
  """Prints one line that says what was checked, and returns the exit status 0.

  Args:
    config: of `--config`, or None with `--line`.
    line: a command line of this program, as text for a shell.
    topology: hardware that the run is for; '' = not checked.
    slices: number of such slices; 0 = as in the config.
    data: address of the data that the launcher copies to the hosts; replaces {data} in settings.
    elsewhere: whether the run is on other hosts, which have a copy of this checkout and other files.
    manifest: path of a JobSet of Kubernetes, which has the command and the hardware; '' = none.
    workdir: of the run.
    allow_code: whether a config file that the manifest names may be run, if it is not one of this package.
    overridden: settings on the command line.

  Raises:
    UserError: lists all problems.
  """
  if (config is not None) + bool(line) + bool(manifest) != 1:
    raise UserError('--config: expected one of --config, --line and --manifest, got none or several. See vit-jax check '
                    '--help.')
  if manifest:
    line, topology, slices = places.read_manifest(manifest)
    elsewhere = True
    from vit_jax.replay import planned
    if not allow_code and (foreign_code := planned.find_foreign_code(_words(line))):  # which is not of this package
      raise UserError('\n'.join(f'{manifest}: {text}.' for text in foreign_code))
  job: str = 'train'
  subject: schema.Config | schema.Study | None = config
  if line:
    command = read(line)
    job, workdir = command.job, command.values.get('workdir')
    overridden = {text.partition('=')[0] for text in command.overrides}
    subject = commands.load_config(command)[0] if 'config' in commands.JOBS[job].flags else None
  place = places.Location(elsewhere, data, pathlib.Path.cwd())
  configs = list(subject.runs.values()) if isinstance(subject, schema.Study) else [subject] if subject else []
  problems = [problem for each in configs for problem in _problems(each, workdir, place)]
  if job == 'train' and not problems:
    problems += [problem for each in configs for problem in places.training_problems(each, place, workdir, overridden)]
  if problems:
    raise UserError('\n'.join(dict.fromkeys(problems)))
  text = ''
  if topology and job == 'train' and isinstance(subject, schema.Config):
    text = fit(subject, topology, slices)
  name = f' of {subject.name}' if subject else ''
  print('\n'.join(filter(None, [f'Checked the {job} command{name}: no problems found.', text])))
  return 0


def read(line: str) -> commands.Command:
  """Returns the command of a line such as `python -m vit_jax.main --config=digits`.

  Raises:
    UserError: it is not one of this program, or has unknown flags.
  """
  from vit_jax import main
  return main.parse(_words(line))


def _words(line: str) -> list[str]:
  """Returns the arguments of a command line of this program; raises UserError if it is not one."""
  try:
    words = shlex.split(line)
  except ValueError:
    raise UserError(f'--line: expected a command line whose quotes are closed, got {line[:80]!r}. Close the quote, or '
                    'remove the backslash at the end.') from None
  start = next((i for i, word in enumerate(words) if word.endswith(PROGRAMS)), None)
  if start is None:
    raise UserError(f'--line: expected a command with {" or ".join(PROGRAMS)}, got {line!r}. '
                    'Give the complete command in quotes.')
  return words[start + 1:]


def _problems(config: schema.Config, workdir: storage.Path | None, place: places.Location) -> list[str]:
  """Returns the problems of a config; of its paths only if its settings have none."""
  try:
    check.check(config)
  except UserError as error:
    return [str(error)]
  problems = []
  for prefix, part in ranges.walk(config):
    if implementation.is_own_type(type(part)) and hasattr(part, 'implementation'):
      try:
        implementation.of(part)  # imports the person's module that has the code, as a run does at its start
      except UserError as error:
        problems.append(f'{prefix.rstrip(".")}: {error}')
  return [*problems, *places.problems(config, workdir, place)]


def fit(config: schema.Config, topology: str, slices: int) -> str:
  """Returns the layout of a run on hardware, as text: mesh, batches and memory of a device.

  Raises:
    UserError: the hardware is not known, the mesh or the batch does not divide over its devices, a schedule is longer
      than the run, the slices differ from those of the config, or the memory of a device is too small by arithmetic.
  """
  from vit_jax.models.kernels import devices
  from vit_jax.objectives import kinds
  from vit_jax.optim import schedules
  from vit_jax.plan import plan as plans
  from vit_jax.plan import topologies
  hardware = topologies.for_run(config, topology, slices)
  # `plans.numbers` opens the data, which may be elsewhere; the numbers of others come from the config.
  numbers = plans.numbers(config) if config.data.source == 'digits' else places.known_numbers(config)
  subject = plans.lay_out(plans.Subject(config, hardware, *numbers))
  if not subject.fits_by_arithmetic:
    raise UserError(f'{subject.layout}\n--topology: expected hardware with the memory for this run, got {topology}. '
                    'Use more or larger devices, a smaller network, or a smaller batch_size.')
  mesh: Any = plans.abstract_mesh(subject)
  _check_batches(subject.config, mesh)
  lengths = durations.lengths(config.length, num_examples=subject.num_examples, batch_size=config.batch_size)
  peak = schedules.peak_rate(config.optimizer, batch_size=config.batch_size)
  schedules.build(config.optimizer.schedule, peak=peak, lengths=lengths)
  for name, model in kinds.of(subject.config).models().items():
    devices.check_devices(model, mesh, name=name)
  return subject.layout


def _check_batches(config: schema.Config, mesh: Any) -> None:
  """Raises UserError with every batch, of training and of evaluations, that does not divide over the devices."""
  from vit_jax.parallel import mesh as meshes
  batches = {'batch_size': (config.batch_size, config.microbatches)}
  for name, evaluation in config.evals.items():
    if evaluation.batch_size:
      batches[f'evals.{name}.batch_size'] = (evaluation.batch_size, 1)
  problems = []
  for setting, (batch_size, microbatches) in batches.items():
    try:
      meshes.check_batch(mesh, batch_size, microbatches, what=setting)
    except UserError as error:
      problems.append(str(error))
  if problems:
    raise UserError('\n'.join(problems))
