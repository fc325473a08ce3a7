"""`vit-jax check`: finds problems of a run on this machine, before hardware is requested for it. Compiles nothing.

A person passes the config of a run, and a launcher the command that it is about to run (`--line`). `run` checks the
flags, the config with its overrides, and that data, weights and run directory exist. With `--topology`, `run` also
checks that mesh, batch and network divide over the devices, and that the estimated memory suffices (`fit`). All
problems are listed together (exit status 2).
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
from vit_jax.jobs import build
from vit_jax.jobs import check as run_checks
from vit_jax.models.kernels import forms
from vit_jax.objectives import kinds
from vit_jax.parallel import mesh as meshes
from vit_jax.record import storage

PROGRAMS = ('vit_jax.main', 'vit-jax')  # ends of the word that names this program in a command line


def run(config: schema.Config | None, *, line: str, topology: str, slices: int, data: str, elsewhere: bool,
        manifest: str, workdir: storage.Path | None, allow_code: bool, overridden: Collection[str] = ()) -> int:
  """Prints what was checked, and returns the exit status 0; raises UserError with all problems.

  Args:
    config: the config of the run; None with `line` or `manifest`.
    line: the command of the run, as text for a shell; '' = none.
    topology: the hardware of the run, such as `v3-512`; '' = hardware is not checked.
    slices: the number of slices of this hardware; 0 = the number in the config.
    data: address of the data that the launcher copies to the hosts; replaces {data} in settings.
    elsewhere: whether the run is on other hosts, which have a copy of this checkout and other files.
    manifest: path of a JobSet of Kubernetes, which has the command and the hardware; '' = none.
    workdir: the run directory; None = the default.
    allow_code: whether to run a config file that the manifest names and that is not part of this package.
    overridden: names of the settings that the command line overrides.
  """
  if [config is not None, bool(line), bool(manifest)].count(True) != 1:
    raise UserError('--config: expected one of --config, --line and --manifest, got none or several. See vit-jax check '
                    '--help.')
  if manifest:
    line, topology, slices = run_checks.read_manifest(manifest)
    elsewhere = True
    from vit_jax.replay import planned
    foreign_code = planned.find_foreign_code(_split_line(line))
    if foreign_code and not allow_code:
      raise UserError('\n'.join(f'{manifest}: {text}.' for text in foreign_code))
  job: str = 'train'
  checked: schema.Config | schema.Study | None = config
  if line:
    command = read(line)
    job, workdir = command.job, command.values.get('workdir')
    overridden = {text.partition('=')[0] for text in command.overrides}
    checked = commands.load_config(command)[0] if 'config' in commands.JOBS[job].flags else None
  configs = [checked] if isinstance(checked, schema.Config) else []
  if isinstance(checked, schema.Study):
    configs = list(checked.runs.values())
  location = run_checks.Location(elsewhere, data, pathlib.Path.cwd())
  problems = [text for each in configs for text in _find_problems(each, workdir, location)]
  if job == 'train' and not problems:
    for each in configs:
      problems += run_checks.training_problems(each, location, workdir, overridden)
  if problems:
    raise UserError('\n'.join(dict.fromkeys(problems)))
  layout = ''
  if topology and job == 'train' and isinstance(checked, schema.Config):
    layout = f'\n{fit(checked, topology, slices)}'
  name = f' of {checked.name}' if checked else ''
  print(f'Checked the {job} command{name}: no problems found.{layout}')
  return 0


def read(line: str) -> commands.Command:
  """Returns the command of a line such as `python -m vit_jax.main --config=digits`, which `main.parse` checks."""
  from vit_jax import main
  return main.parse(_split_line(line))


def _split_line(line: str) -> list[str]:
  """Returns the arguments of a command line; raises UserError if the line does not call this program."""
  try:
    words = shlex.split(line)
  except ValueError:
    raise UserError(f'--line: expected a command line whose quotes are closed, got {line[:80]!r}. Close the quote, or '
                    'remove the backslash at the end.') from None
  programs = [position for position, word in enumerate(words) if word.endswith(PROGRAMS)]
  if not programs:
    raise UserError(f'--line: expected a command with {" or ".join(PROGRAMS)}, got {line!r}. '
                    'Give the complete command in quotes.')
  return words[programs[0] + 1:]


def _find_problems(config: schema.Config, workdir: storage.Path | None, location: run_checks.Location) -> list[str]:
  """Returns the problems of the settings of a config; if `check.check` finds none, also the problems of its paths."""
  try:
    check.check(config)
  except UserError as error:
    return [str(error)]
  problems = []
  for prefix, part in ranges.walk(config):
    if implementation.is_own_type(type(part)) and hasattr(part, 'implementation'):
      try:
        implementation.of(part)  # imports the module of the person, as a run does at its start
      except UserError as error:
        problems.append(f'{prefix.rstrip(".")}: {error}')
  return [*problems, *run_checks.problems(config, workdir, location)]


def fit(config: schema.Config, topology: str, slices: int) -> str:
  """Returns the layout of a run on hardware as text: mesh, batches and memory of a device.

  Raises:
    UserError: the hardware is unknown, the mesh or a batch does not divide over its devices, a schedule is longer than
      the run, the config has another number of slices, or the estimated memory exceeds that of a device.
  """
  from vit_jax.plan import plan as plans  # only here: most checks are not for other hardware
  from vit_jax.plan import topologies
  hardware = topologies.for_run(config, topology, slices)
  # `plans.numbers` opens the data. Other data than the digits of this package may be on other machines only.
  numbers = plans.numbers(config) if config.data.source == 'digits' else run_checks.known_numbers(config)
  laid_out = plans.lay_out(plans.Subject(config, hardware, *numbers))
  if not laid_out.fits_by_arithmetic:
    raise UserError(f'{laid_out.layout}\n--topology: expected hardware with the memory for this run, got {topology}. '
                    'Use more or larger devices, a smaller network, or a smaller batch_size.')
  mesh: Any = plans.abstract_mesh(laid_out)
  _check_batches(laid_out.config, mesh)
  lengths = durations.lengths(config.length, num_examples=laid_out.num_examples, batch_size=config.batch_size)
  build.build_schedule(config, lengths)
  for name, model in kinds.of(laid_out.config).models().items():
    forms.check_devices(model, mesh, name=name)
  return laid_out.layout


def _check_batches(config: schema.Config, mesh: Any) -> None:
  """Raises UserError with a line for each batch, of training or evaluations, that does not divide over the devices."""
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
