"""The config of a run directory, and what must not change when the run is resumed."""
from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from vit_jax.config import json_files, layout, provenance, schema
from vit_jax.core import os_errors
from vit_jax.core.errors import UserError
from vit_jax.data.sources import opening
from vit_jax.jobs import build
from vit_jax.parallel import xla_flags
from vit_jax.record import checkpoint_files, clock, machine, progress, reader, run_directory, storage

log = logging.getLogger('vit_jax.jobs')
T = TypeVar('T')
Settings = TypeVar('Settings', schema.Data, schema.Pseudo, schema.Evaluation)
_OF_THE_MACHINE = ('mesh', *layout.AUTO, 'train.progress', 'train.cpu_threads', 'data.workers', 'data.threads')
"""Settings that may differ when a run is resumed on other hardware."""
_UNIMPORTANT = ('mesh.chosen', 'trackers.')
"""Settings that the program writes, or that no result depends on."""


def check_settings(meta: Mapping[str, Any], config: schema.Config, workdir: storage.Path, *, is_done: bool) -> None:
  """Raises UserError if a run would continue as another network, which the shapes of its arrays do not show.

  The preprocessing of images may change during a run, but not for the checkpoint at its end.
  """
  changed = {name: pair for name, pair in provenance.differences(meta, config).items()
             if is_done or not provenance.is_preprocessing(name)}
  if changed:
    raise UserError(f'--workdir={workdir}: expected a run with the settings of this command, got one with other '
                    f'settings:\n{provenance.text(changed)}\nUse the settings of that run, or another --workdir.')


def find_machine(workdir: storage.Path) -> dict[str, Any]:
  """Returns the description of the machine in the newest readable checkpoint; {} if there is none."""
  folder = workdir / 'checkpoints'
  for step in checkpoint_files.steps(folder)[::-1]:
    try:
      return dict(checkpoint_files.read_meta(folder / str(step)).get('machine', {}))
    except (os_errors.Damaged, UserError):  # it is reported when the state is restored
      continue
  return {}


def warn_of_machine(meta: Mapping[str, Any]) -> None:
  """Warns if the machine computes other bits than the one on which a checkpoint was saved."""
  if found := machine.differences(meta.get('machine', {}), machine.describe()):
    log.warning('The run continues, but not bit for bit as on the machine before:\n%s', '\n'.join(
        f'  {name}: {old or "none"} -> {new or "none"}' for name, (old, new) in found.items()))
  if jax.default_backend() == 'gpu' and not xla_flags.has(os.environ, 'deterministic'):
    log.warning('The run continues, but not bit for bit: on GPUs XLA chooses kernels by timing them. A run that is '
                'started with --flags=deterministic resumes with the same bits.')


def check_data(saved: Mapping[str, Any], now: Mapping[str, Any], workdir: storage.Path) -> None:
  """Raises UserError if a run would continue with other data, or in another order, than before."""
  changed = [f'  {name}: {saved.get(name)} -> {value}' for name, value in now.items() if saved.get(name) != value]
  if changed:
    placed = any('host_shards' in line for line in changed)
    raise UserError(f'--workdir={workdir}: expected a run on the same data in the same order, got changes:\n'
                    + '\n'.join(changed) + '\nUse the data settings of that run'
                    + ' on as many hosts (data.placement), or train on from its weights (init_from) in' * placed
                    + f'{"" if placed else ", or"} another --workdir.')


def check_same(workdir: storage.Path, config: schema.Config) -> None:
  """Raises UserError if a directory that the command line does not name holds a run with other settings."""
  path = workdir / 'config.json'
  if not path.is_file() or not checkpoint_files.steps(workdir / 'checkpoints'):
    return
  changed = [line for line in changes(json.loads(json_files.to_json(json_files.read(path))), config)
             if not line.strip().startswith(_OF_THE_MACHINE)]
  if changed:
    raise UserError('\n'.join([
        f'--workdir: expected a name for this run, as {workdir} has one with other settings, got none:', *changed,
        f'Set --workdir=DIR to start another run, or --workdir={workdir} to resume that one with these settings.']))


def find_lost(workdir: storage.Path, start: int) -> clock.Lost:
  """Returns what the previous start did after step `start`; only process 0 needs it."""
  if not start or jax.process_index():
    return clock.Lost(0, 0.)
  lost = clock.find_lost(recall(lambda: reader.read_end(workdir, since=start)), resumed_from=start)
  if lost.steps:
    log.info('%s steps after that checkpoint are lost, %s of work.', f'{lost.steps:,}',
             progress.format_duration(lost.seconds))
  return lost


def evaluated(workdir: storage.Path) -> list[reader.Row]:
  """Returns the rows of all evaluations, and few of those of training metrics, of the previous starts and this one."""
  return recall(lambda: reader.read(workdir, most_rows=1).rows)


def recall(read: Callable[[], list[T]]) -> list[T]:
  """Returns what a function reads in the record of a run; nothing if the record was removed."""
  try:
    return read()
  except FileNotFoundError:
    return []


def pin_sources(config: schema.Config, workdir: storage.Path) -> schema.Config:
  """Returns the config with each dataset of a hub at a commit: that of the run in `workdir`, or else the present one.

  Raises:
    UserError, TemporaryError: a dataset is not found.
  """
  before = build.saved_config(workdir)
  known = [before.data.source, before.data.pseudo.source] if before else []
  known += [one.source for one in before.evals.values()] if before else []

  def pinned(settings: Settings) -> Settings:
    return dataclasses.replace(settings, source=opening.pin(settings.source, known))
  return dataclasses.replace(
      config, data=dataclasses.replace(pinned(config.data), pseudo=pinned(config.data.pseudo)),
      evals={name: pinned(one) for name, one in config.evals.items()})


def write_config(workdir: storage.Path, config: schema.Config) -> None:
  """Writes `config.json`, and warns of settings that differ from those the run was started with."""
  path = workdir / 'config.json'
  if not jax.process_index() and path.exists():
    _warn_of_changes(path, config)
  run_directory.write_text(path, json_files.to_json(config))


def _warn_of_changes(path: storage.Path, config: schema.Config) -> None:
  try:
    before = json.loads(path.read_text())
    # A study writes the config of a run before the run has chosen its layout.
    changed = changes(before, config if before['mesh']['chosen'] else layout.unchosen(config))
  except (KeyError, TypeError, ValueError, RecursionError, IsADirectoryError) as error:
    log.warning('%s is damaged (%s) and is replaced by the config of this command.', path, os_errors.first_line(error))
    return
  except OSError as error:
    raise os_errors.reading(str(path), error) from error
  if changed:
    log.warning('These settings differ from those the run was started with:\n%s', '\n'.join(changed))


def changes(before: Any, config: schema.Config) -> list[str]:
  """Returns one line per setting of `config` that differs from `before`, a config as parsed JSON."""
  old, new = json_files.flat(before), json_files.flat(json.loads(json_files.to_json(config)))
  return [f'  {name}: {old.get(name)} -> {new.get(name)}' for name in sorted(old.keys() | new.keys())
          if old.get(name) != new.get(name) and not name.startswith(_UNIMPORTANT)]
