"""Saves, removes and sets aside the checkpoints of a run, by Orbax; only the run that holds its directory's lock does.

A checkpoint has the items `params`, `extra` (omitted if empty), `opt` and `meta`. So that damage is always detected,
`meta` has a digest of each of the others, over the bits of the arrays, so that it does not depend on the mesh.
`checkpoint_reader.py` reads and verifies checkpoints. No other module uses Orbax's manager.
"""
from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from vit_jax.config import durations, schema
from vit_jax.core import failures, lazy, trees
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.record import checkpoint_files, run_directory, storage
from vit_jax.train import checkpoint_reader
from vit_jax.train.checkpoint_reader import ITEMS, Restored
from vit_jax.train.state import TrainState

if TYPE_CHECKING:
  import orbax.checkpoint as ocp
  from orbax.checkpoint import checkpoint_managers as managers
else:
  ocp = lazy.Module('orbax.checkpoint')
  managers = lazy.Module('orbax.checkpoint.checkpoint_managers')

WAIT_S = 0.05  # seconds between polls of an unfinished save
_DEFECTS = (TypeError, AttributeError, NameError, AssertionError, LookupError)
"""Errors of code, not of files, while a checkpoint is written."""
_WRITING = 'A checkpoint could not be written to'
_OPENING = 'Checkpoints could not be opened in'
_MOVING = 'A damaged checkpoint could not be set aside from'
"""What a message says that failed, before the folder."""
log = logging.getLogger('vit_jax.train')


@dataclasses.dataclass(frozen=True)
class Keep:
  """Which checkpoints are kept: those to which at least one of these applies.

  latest: how many of the newest ones.
  every: those whose step is a multiple of this number of steps; 0 = none for this reason.
  best: the name of a metric, and so the one with its best value; '' = none for this reason.
  every_s: one for each such number of seconds; 0 = none for this reason.
  """
  latest: int
  every: int = 0
  best: str = ''
  every_s: float = 0.

  @classmethod
  def of(cls, settings: schema.Checkpoints, steps: Callable[[str], int]) -> Keep:
    """Reads the settings of a config; `steps` converts a duration to steps.

    Raises:
      UserError: `keep_every` names steps at which no checkpoint is saved.
    """
    if keep_every_s := durations.parse_wall(settings.keep_every):
      return cls(settings.keep_latest, 0, settings.keep_best, keep_every_s)
    every = 0 if durations.parse_wall(settings.every) else steps(settings.every)
    keep_every = steps(settings.keep_every) if settings.keep_every else 0
    if keep_every and (not every or keep_every % every):
      raise UserError(f'checkpoints.keep_every: expected a multiple of checkpoints.every={settings.every!r}, {every} '
                      f'steps, got {settings.keep_every!r}, {keep_every} steps. Set such a multiple.')
    return cls(settings.keep_latest, keep_every, settings.keep_best)

  def policy(self, known: Mapping[int, float]) -> managers.PreservationPolicy:
    """Returns Orbax's policy; `known` has the values of `best` by step of the checkpoints on disk."""
    policies: list[managers.PreservationPolicy] = [managers.LatestN(self.latest)]
    if self.every:
      policies.append(managers.EveryNSteps(self.every))
    if self.every_s:
      policies.append(managers.EveryNSeconds(round(self.every_s)))
    if self.best:
      policies.append(_Best(self.best, dict(known)))
    return managers.AnyPreservationPolicy(policies)


@dataclasses.dataclass
class _Best:
  """A policy of Orbax that preserves the checkpoint which `checkpoint_files.choose` chooses, also after a restart.

  Orbax's own `BestN` knows only the metrics of the checkpoints that its process has saved.
  """
  metric: str
  known: dict[int, float]

  def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
    del context
    self.known |= {info.step: info.metrics[self.metric] for info in checkpoints if self.metric in (info.metrics or {})}
    values = {info.step: self.known[info.step] for info in checkpoints if info.step in self.known}
    best = checkpoint_files.best_step(values, self.metric)
    return [info.step == best for info in checkpoints]


class Checkpointer:
  """Saves and restores the states of one run directory. Every process creates one and calls the same methods.

  No file is written before `restore` or `save` is called.

  Args:
    folder: `checkpoints` of the run directory.
    keep: which checkpoints are kept.
  """

  def __init__(self, folder: storage.PathLike, *, keep: Keep) -> None:
    self.reader = checkpoint_reader.Reader(folder)
    self.folder = self.reader.folder
    self._keep = keep
    self._opened: ocp.CheckpointManager | None = None
    self._is_pending = False
    self._uncommitted: Exception | None = None

  def steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints, oldest first."""
    return self.reader.steps()

  def restore(self, abstract: TrainState) -> Restored | None:
    """Restores the newest undamaged checkpoint with the shardings of `abstract`; None if there is no checkpoint.

    Damaged checkpoints are set aside, with a message, and files of an interrupted save are removed.

    Raises:
      UserError: checkpoints exist but belong to another model, all are damaged, or the system does not allow reading
        them or writing to the folder.
      TemporaryError: storage, the network or another process failed.
    """
    steps = self.steps()
    try:
      restored = self.reader.newest(abstract, set_aside=self._set_aside)
    except UserError as error:
      if steps and not self.steps():
        raise UserError(f'{error}\nAll of them were moved to {self.folder.parent / "damaged"}. To begin from nothing, '
                        'run the same command again.') from None
      raise
    if jax.process_count() > 1 or self.folder.is_dir() and any(self.folder.iterdir()):
      self._manager()
    else:  # a new run trains its first steps before it imports Orbax
      self._guard(lambda: self.folder.mkdir(parents=True, exist_ok=True), _OPENING)
    return restored

  def save(self, state: TrainState, about: Mapping[str, Any], metrics: Mapping[str, float], *,
           announce: Callable[[str], object] = lambda digest: None) -> str:
    """Starts to save a state, and returns the digest of its parameters as soon as the arrays are copied to the host.

    Args:
      state: of the run after a step.
      about: what else the checkpoint says about the state, as JSON.
      metrics: of this step, from which the best checkpoint is chosen; those that are not finite are left out.
      announce: is called with the digest before anything is written. The caller completes the record of the run up to
        this step in it, so that no checkpoint is ahead of the record.

    Raises:
      UserError: this or the previous checkpoint could not be written, for a reason that the person has to change.
      TemporaryError: it could not be written because storage, the network or another process failed.
    """
    step = int(state.step)
    items = {name: getattr(state, name) for name in ITEMS if jax.tree.leaves(getattr(state, name))}
    started = {name: trees.begin_digest(item) for name, item in items.items()}
    digests = {name: finish() for name, finish in started.items()}
    finite = {k: v for k, v in metrics.items() if math.isfinite(v)}
    body = {**about, 'version': checkpoint_files.VERSION, 'step': step, 'digests': digests, 'metrics': finite,
            'shapes': {name: checkpoint_reader.shapes(item) for name, item in items.items()}}
    args = ocp.args.Composite(
        **{name: ocp.args.StandardSave(item) for name, item in items.items()},
        meta=ocp.args.JsonSave(checkpoint_files.seal(body)))
    announce(digests['params'])
    self.wait()
    self._guard(lambda: self._manager().save(step, args=args, metrics=finite or None, force=True), _WRITING)
    self._is_pending = True
    return digests['params']

  def check(self) -> None:
    """Raises the error of `save` if a save in the background has failed; does not wait for an unfinished one.

    Orbax's own `check_for_errors` does not report it, because the thread that finishes a save consumes the error.
    """
    if self._uncommitted:
      self.wait()
    if self._is_pending and not self._manager().is_saving_in_progress():
      self._is_pending = False
      self.wait()

  def wait(self) -> None:
    """Waits until the last save is complete. Raises the error of `save` if it failed."""
    self._guard(self._wait, _WRITING)

  def reopen(self) -> None:
    """Discards a save that failed, so that another one can be made; for a run of one process."""
    opened, self._opened, self._uncommitted, self._is_pending = self._opened, None, None, False
    if opened is not None:
      with contextlib.suppress(Exception):  # the error that the failed save has raised before
        opened.close()

  def close(self) -> None:
    """Closes the manager. An error of a save is only logged here; `wait` raises it.

    If a save has failed in this process, this does not wait: the other processes wait for it until this one ends.
    """
    held = run_directory.owner_of(self.folder)
    is_lost = self._uncommitted is not None or (held is not None and held.is_replaced)
    if self._opened is None or (is_lost and jax.process_count() > 1):
      return
    try:
      self._opened.close()
    except Exception as error:  # any error that the thread of a save has raised, of any library
      log.warning('the last checkpoint was not written: %s', failures.first_line(error))

  def _manager(self) -> ocp.CheckpointManager:
    """Returns Orbax's manager, opened on first use; it creates the folder and removes files of an interrupted save."""
    if self._opened is None:
      self._guard(self._open, _OPENING)
    assert self._opened is not None
    return self._opened

  def _open(self) -> None:
    for step in self.steps() if jax.process_index() == 0 else ():  # the others may already see no folder
      try:
        self.reader.check_description(step)
      except failures.Damaged as error:
        log.warning('checkpoint %d is damaged and set aside: %s', step, error)
        self._move_aside(step)
    ocp.multihost.sync_global_processes('vit_jax descriptions')
    known = checkpoint_files.metric_values(self.folder.parent, self._keep.best, self.steps()) if self._keep.best else {}
    options = ocp.CheckpointManagerOptions(
        preservation_policy=self._keep.policy(known), enable_async_checkpointing=True, create=True,
        cleanup_tmp_directories=True, temporary_path_class=self._commit_class(),
        async_options=ocp.options.AsyncOptions(barrier_sync_fn=self._barrier()))
    self._opened = ocp.CheckpointManager(self.folder, options=options, item_names=(*ITEMS, 'meta'))

  def _guard(self, action: Callable[[], object], failed: str) -> None:
    """Runs an action of Orbax or of the file system; an error becomes one that says what `failed`, and what to do."""
    try:
      action()
    except (UserError, TemporaryError, *_DEFECTS):
      raise
    except Exception as error:  # any error that the thread of a save has raised, of any library
      if failures.is_of_runtime(error):
        raise
      kind, advice = type(failures.writing('', error)), failures.advice(error)
      try:
        kept = ', '.join(map(str, self.steps())) or 'none'
      except (UserError, TemporaryError):  # the storage does not list its files either
        kept = 'not known'
      raise kind(f'{failed} {self.folder}: {failures.first_line(error)}\n'
                 f'{f"{advice} Then run" if advice else "Run"} the same command again: it continues from the newest '
                 f'whole checkpoint (steps on disk: {kept}).') from error

  def _commit_class(self) -> type[Any]:
    """Returns Orbax's class for the folders of checkpoints; it checks the owner before and after a commit."""
    held, classes = run_directory.owner_of(self.folder), ocp.path.atomicity
    # Those that Orbax chooses itself: a folder is renamed, and in object storage a file is written last.
    default = (classes.AtomicRenameTemporaryPath if isinstance(self.folder, pathlib.Path)
               else classes.CommitFileTemporaryPath)

    class Commit(default):  # type: ignore[misc, valid-type]
      async def finalize(self) -> None:
        if held:
          await asyncio.to_thread(held.check)
        await super().finalize()
        if held:  # before Orbax removes the checkpoints that this one replaces
          await asyncio.to_thread(held.check)

    return Commit

  def _barrier(self) -> ocp.multihost.BarrierSyncFn:
    """Returns Orbax's barrier of processes; a thread whose save has failed keeps the error and does not wait there.

    Orbax's thread waits in a `finally` for the other processes, which wait at an earlier barrier for this save.
    """
    wait = ocp.multihost.get_barrier_sync_fn()

    def sync(*, key: str, timeout_ms: int) -> None:
      error = sys.exc_info()[1]
      if isinstance(error, Exception) and threading.current_thread() is not threading.main_thread():
        self._uncommitted = error
        raise error
      wait(key=key, timeout_ms=timeout_ms)

    return sync

  def _wait(self) -> None:
    """Waits for the last save, but not for the other processes if it failed in this one."""
    manager = self._manager()
    while jax.process_count() > 1 and not self._uncommitted and manager.is_saving_in_progress():
      time.sleep(WAIT_S)
    if self._uncommitted:
      raise self._uncommitted
    manager.wait_until_finished()

  def _set_aside(self, step: int) -> None:
    """Moves a damaged checkpoint to `damaged` of the run directory."""
    if jax.process_index() == 0:
      self._guard(lambda: self._move_aside(step), _MOVING)
    ocp.multihost.sync_global_processes('vit_jax set aside')

  def _move_aside(self, step: int) -> None:
    damaged = self.folder.parent / 'damaged'
    damaged.mkdir(parents=True, exist_ok=True)
    names = (f'{step}', *(f'{step}-{i}' for i in range(2, 1000)))
    name = next(n for n in names if not (damaged / n).exists())
    storage.move(self.folder / str(step), damaged / name)
