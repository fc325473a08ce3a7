"""Reads a run directory for `train` when a run resumes, and checks that the run has not changed.

`train` calls these functions in this order. Before the data are opened: `find_machine`, `check_weights`, `pin_sources`,
`keep_orientation`, `check_same`, `find_classes`. With the restored checkpoint: `check_data`, `check_settings` and the
warnings. Before the loop: `find_finished`, `write_config`, `find_lost`. `meta` comes from `checkpoint_files.read_meta`.
"""
from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.config import engine, provenance, schema
from vit_jax.core import documents, failures
from vit_jax.core.errors import UserError, redacted
from vit_jax.data import content, opening
from vit_jax.data.source import Source
from vit_jax.jobs import build
from vit_jax.parallel import layout, xla_flags
from vit_jax.record import checkpoint_files, clock, machine, progress, reader, run_directory, storage

log = logging.getLogger('vit_jax.jobs')
_MACHINE_SETTINGS = ('mesh', *layout.AUTO, 'train.progress', 'train.cpu_threads', 'data.workers', 'data.threads')
"""Prefixes of the settings that may differ when a run is resumed on other hardware."""
_UNIMPORTANT_SETTINGS = ('mesh.chosen', 'trackers.')
"""Prefixes of the settings that the program itself writes, or on which no result depends."""


def check_settings(meta: Mapping[str, Any], config: schema.Config, workdir: storage.Path, *, is_done: bool) -> None:
  """Raises UserError if settings differ from a checkpoint's; those of preprocessing may, unless the run `is_done`."""
  changed = {name: values for name, values in provenance.differences(meta, config).items()
             if is_done or not provenance.is_preprocessing(name)}
  if changed:
    raise UserError(f'--workdir={workdir}: expected a run with the settings of this command, got one with other '
                    f'settings:\n{provenance.text(changed)}\nUse the settings of that run, or another --workdir.')


def find_machine(workdir: storage.Path) -> dict[str, Any]:
  """Returns the description of the machine in the newest readable checkpoint; {} if there is none."""
  return dict(_find_meta(workdir).get('machine', {}))


def find_classes(workdir: storage.Path) -> tuple[str, ...]:
  """Returns the class names of a run in the order of the labels; () if the run has no readable checkpoint."""
  return tuple(_find_meta(workdir).get('class_names', ()))


def _find_meta(workdir: storage.Path) -> dict[str, Any]:
  """Returns the description of the newest readable checkpoint; {} if there is none."""
  folder = workdir / 'checkpoints'
  for step in checkpoint_files.steps(folder)[::-1]:
    try:
      return checkpoint_files.read_meta(folder / str(step))
    except (failures.Damaged, UserError):  # a damaged checkpoint is reported when the state is restored
      continue
  return {}


def warn_of_machine(meta: Mapping[str, Any]) -> None:
  """Warns if this machine may compute other bits than the machine on which a checkpoint was saved."""
  if changed := machine.differences(meta.get('machine', {}), machine.describe()):
    log.warning('The run continues, but not bit for bit as on the machine before:\n%s', '\n'.join(
        f'  {name}: {old or "none"} -> {new or "none"}' for name, (old, new) in changed.items()))
  if jax.default_backend() == 'gpu' and not xla_flags.has(os.environ, 'deterministic'):
    log.warning('The run continues, but not bit for bit: on GPUs XLA chooses kernels by timing them. A run that is '
                'started with --flags=deterministic resumes with the same bits.')


def warn_of_files(meta: Mapping[str, Any], sources: Mapping[str, Source]) -> None:
  """Warns if data files have changed since a checkpoint was saved; the digest of the data may still be equal."""
  if changed := content.changed_files(meta.get('files', {}), sources):
    log.warning('Files of the data have changed since the run was saved, and the run continues with what they contain '
                'now:\n%s', '\n'.join(changed))


def check_data(saved: Mapping[str, Any], current: Mapping[str, Any], workdir: storage.Path) -> None:
  """Raises UserError if the data or their order differ between the checkpoint (`saved`) and this command."""
  changed = [f'  {name}: {saved.get(name)} -> {value}' for name, value in current.items() if saved.get(name) != value]
  if changed:
    raise UserError(f'--workdir={workdir}: expected a run on the same data in the same order, got changes:\n'
                    + '\n'.join(changed) + '\nUse the data settings of that run, or another --workdir.')


def check_same(workdir: storage.Path, config: schema.Config) -> None:
  """Raises UserError if a directory that the command line does not name holds a run with other settings."""
  path = workdir / 'config.json'
  if not path.is_file() or not checkpoint_files.steps(workdir / 'checkpoints'):
    return
  changed = [line for line in changes(engine.to_plain(engine.read_file(path)), config)
             if not line.strip().startswith(_MACHINE_SETTINGS)]
  if changed:
    raise UserError('\n'.join([
        f'--workdir: expected a name for this run, as {workdir} has one with other settings, got none:', *changed,
        f'Set --workdir=DIR to start another run, or --workdir={workdir} to resume that one with these settings.']))


def check_weights(workdir: storage.Path, config: schema.Config) -> None:
  """Raises UserError if this command names other initial weights than the run that it resumes began from."""
  saved = build.saved_config(workdir) if checkpoint_files.steps(workdir / 'checkpoints') else None
  if not config.init_from or not saved:
    return
  old, new = saved.init_from, redacted(config.init_from)
  real_paths = {path if '://' in path else os.path.realpath(os.path.expanduser(path)) for path in (old, new)}
  if old and len(real_paths) == 1:  # the same file may have several paths
    return
  began = f'one that began from {old}' if old else 'one that began from none'
  advice = f'Use {old}, or' if old else 'Leave them out, or use'
  raise UserError(f'--workdir={workdir}: expected a run that began from the weights {new}, got {began}. {advice} '
                  'another --workdir.')


def find_lost(workdir: storage.Path, start: int) -> clock.Lost:
  """Returns and logs the work that the previous start did after step `start`; processes other than 0 return no work."""
  if not start or jax.process_index():
    return clock.Lost(0, 0.)
  try:
    events = reader.read_end(workdir, since=start)
  except FileNotFoundError:  # a user removed the record
    events = []
  lost = clock.find_lost(events, resumed_from=start)
  if lost.steps:
    log.info('%s steps after that checkpoint are lost, %s of work.', f'{lost.steps:,}',
             progress.format_duration(lost.seconds))
  return lost


def record(workdir: storage.Path) -> reader.Run:
  """Returns all events and evaluations in the record of the run, but few rows of training metrics."""
  try:
    return reader.read(workdir, most_rows=1)
  except FileNotFoundError:
    return reader.NOTHING


def find_finished(workdir: storage.Path, until: str, step: int, digest: str) -> dict[str, Any] | None:
  """Returns the results of a run that has ended, or paused at `until`; None if the run is not finished.

  Only results with this step and this digest of the parameters count. Process 0 decides; other processes may get {}.
  """
  try:
    final = documents.load(workdir / (run_directory.paused_file(until) if until else 'final.json'))
    is_finished = final['step'] == step and final['params_digest'] == digest and isinstance(final['metrics'], dict)
  except (OSError, ValueError, LookupError, TypeError):
    final, is_finished = None, False
  if jax.process_count() > 1:
    is_finished = bool(multihost_utils.broadcast_one_to_all(np.bool_(is_finished)))
  return (final or {}) if is_finished else None


def pin_sources(config: schema.Config, workdir: storage.Path) -> schema.Config:
  """Returns the config with each hub dataset at a commit: the commit of the run in `workdir`, or else the newest one.

  Raises UserError or TemporaryError if a dataset is not found.
  """
  saved = build.saved_config(workdir)
  saved_sources = [saved.data.source, saved.data.pseudo.source] if saved else []
  saved_sources += [evaluation.source for evaluation in saved.evals.values()] if saved else []
  def pin(source: str) -> str:
    return opening.pin(source, saved_sources)
  pinned: schema.Config = schema.replaced(config, {
      'data.source': pin(config.data.source), 'data.pseudo.source': pin(config.data.pseudo.source),
      'evals': {name: dataclasses.replace(evaluation, source=pin(evaluation.source))
                for name, evaluation in config.evals.items()}})
  return pinned


def keep_orientation(config: schema.Config, workdir: storage.Path) -> schema.Config:
  """Returns the config with the EXIF orientation of the run in `workdir`, unless the config sets one."""
  saved = build.saved_config(workdir)
  if saved is None or config.data.recipe.exif_orientation is not schema.Exif.AUTO:
    return config
  kept: schema.Config = schema.replaced(config, {'data.recipe.exif_orientation': saved.data.recipe.exif_orientation})
  return kept


def write_config(workdir: storage.Path, config: schema.Config) -> None:
  """Writes `config.json`, and warns of settings that differ from the settings with which the run was started."""
  path = workdir / 'config.json'
  try:
    if not jax.process_index() and path.exists():
      saved = documents.load(path)
      # A study writes the config of a run before the run has chosen its layout.
      comparable = config if saved['mesh']['chosen'] else layout.unchosen(config)
      if changed := changes(saved, comparable):
        log.warning('These settings differ from those the run was started with:\n%s', '\n'.join(changed))
  except (KeyError, TypeError, ValueError, IsADirectoryError) as error:
    log.warning('%s is damaged (%s) and is replaced by the config of this command.', path, failures.first_line(error))
  except OSError as error:
    raise failures.unreadable(error, str(path)) from error
  run_directory.write_text(path, engine.to_json(config))


def changes(saved: Any, config: schema.Config) -> list[str]:
  """Returns one line per setting of `config` that differs from `saved`, a config as parsed JSON.

  The EXIF orientation `auto` equals every value, since a run replaces `auto` with the orientation that the data need.
  """
  old, new = engine.flat(saved), engine.flat(engine.to_plain(config))
  orientation = 'data.recipe.exif_orientation'
  if schema.Exif.AUTO.value in (old.get(orientation), new.get(orientation)):
    old[orientation] = new.get(orientation)
  names = {name.partition('.')[2] for name in engine.RETIRED}
  removed = {name for name in old.keys() - new.keys() if name.rpartition('.')[2] in names}
  return [f'  {name}: {old.get(name)} -> {new.get(name)}' for name in sorted((old.keys() | new.keys()) - removed)
          if old.get(name) != new.get(name) and not name.startswith(_UNIMPORTANT_SETTINGS)]
