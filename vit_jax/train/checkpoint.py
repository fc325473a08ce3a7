"""Saves, removes and sets aside the checkpoints of a run, with Orbax.

The train job makes a `Checkpointer` on each process, inside `run_directory.hold`. The job calls `restore` once, and the
hook `Checkpoint` then calls `save` and `check`. Orbax writes in its own threads while the run trains. A checkpoint has
the items `params`, `opt`, `extra` (omitted if empty) and `meta`, a description with a digest of each other item. A
digest depends on the bits of the arrays, not on the mesh. `checkpoint_reader.py` reads and verifies checkpoints.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
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

_POLL_S = 0.05  # between two checks whether a save has finished
_DEFECTS = (TypeError, AttributeError, NameError, AssertionError, LookupError)  # of the program: raised unchanged
_WRITING_FAILED = 'A checkpoint could not be written to'
_OPENING_FAILED = 'Checkpoints could not be opened in'
"""Beginnings of error messages; the path of the folder follows."""
log = logging.getLogger('vit_jax.train')


@dataclasses.dataclass(frozen=True)
class Keep:
  """Rules for the checkpoints that are kept: a checkpoint is kept if at least one rule applies.

  latest: this number of the newest checkpoints.
  every: checkpoints whose step is a multiple of this number; 0 = no such rule.
  best: the checkpoint with the best value of the metric with this name; '' = no such rule.
  every_s: one checkpoint for each interval of so many seconds; 0 = no such rule.
  """
  latest: int
  every: int = 0
  best: str = ''
  every_s: float = 0.

  @classmethod
  def of(cls, settings: schema.Checkpoints, steps: Callable[[str], int]) -> Keep:
    """Returns the rules of a config; `steps` converts a duration such as '5 epochs' to a number of steps.

    Raises UserError if `keep_every` is not a multiple of `every`, so that some steps to keep have no checkpoint.
    """
    if keep_every_s := durations.parse_wall(settings.keep_every):
      return cls(settings.keep_latest, 0, settings.keep_best, keep_every_s)
    every = 0 if durations.parse_wall(settings.every) else steps(settings.every)
    keep_every = steps(settings.keep_every) if settings.keep_every else 0
    if keep_every and (not every or keep_every % every):
      raise UserError(f'checkpoints.keep_every: expected a multiple of checkpoints.every={settings.every!r}, {every} '
                      f'steps, got {settings.keep_every!r}, {keep_every} steps. Set such a multiple.')
    return cls(settings.keep_latest, keep_every, settings.keep_best)

  def policy(self, on_disk: Mapping[int, float]) -> managers.PreservationPolicy:
    """Returns Orbax's policy; `on_disk` has the value of the metric `best` by step of the checkpoints on disk."""
    policies: list[managers.PreservationPolicy] = [managers.LatestN(self.latest)]
    if self.every:
      policies.append(managers.EveryNSteps(self.every))
    if self.every_s:
      policies.append(managers.EveryNSeconds(round(self.every_s)))
    if self.best:
      policies.append(_Best(self.best, dict(on_disk)))
    return managers.AnyPreservationPolicy(policies)


@dataclasses.dataclass
class _Best:
  """A policy of Orbax that preserves the checkpoint that `checkpoint_files.choose` chooses, also after a restart.

  Orbax's own `BestN` knows only checkpoints that this process has saved; `value_by_step` has all metrics on disk too.
  """
  metric: str
  value_by_step: dict[int, float]

  def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
    del context
    for info in checkpoints:
      if info.metrics and self.metric in info.metrics:
        self.value_by_step[info.step] = info.metrics[self.metric]
    existing = {info.step: self.value_by_step[info.step] for info in checkpoints if info.step in self.value_by_step}
    best = checkpoint_files.best_step(existing, self.metric)
    return [info.step == best for info in checkpoints]


class Checkpointer:
  """Saves and restores the states of one run directory. Every process creates one and calls the same methods.

  `folder` is `checkpoints` of the run directory. No file is written before `restore` or `save` is called.
  """

  def __init__(self, folder: storage.PathLike, *, keep: Keep) -> None:
    self.reader = checkpoint_reader.Reader(folder)
    self.folder = self.reader.folder
    self._keep = keep
    self._manager: ocp.CheckpointManager | None = None  # None = not opened yet
    self._is_pending = False  # whether a save was started whose end `check` has not seen
    self._background_error: Exception | None = None  # of a save that failed in Orbax's thread

  def restore(self, abstract: TrainState) -> Restored | None:
    """Restores the newest undamaged checkpoint with the shardings of `abstract`; None if there is no checkpoint.

    Damaged checkpoints are moved to the folder `damaged`, with a warning. Files of an interrupted save are removed.

    Raises:
      UserError: checkpoints exist but belong to another model, all are damaged, or the system does not allow reading
        the checkpoints or writing to the folder.
      TemporaryError: storage, the network or another process failed.
    """
    steps = self.reader.steps()
    try:
      restored = self.reader.newest(abstract, set_aside=self._set_aside)
    except UserError as error:
      if steps and not self.reader.steps():
        raise UserError(f'{error}\nAll of them were moved to {self.folder.parent / "damaged"}. To begin from nothing, '
                        'run the same command again.') from None
      raise
    if jax.process_count() > 1 or (self.folder.is_dir() and any(self.folder.iterdir())):
      self._open_once()
    else:  # a new run trains its first steps before it imports Orbax
      with self._converted_errors(_OPENING_FAILED):
        self.folder.mkdir(parents=True, exist_ok=True)
    return restored

  def save(self, state: TrainState, about: Mapping[str, Any], metrics: Mapping[str, float], *,
           announce: Callable[[str], object] = lambda digest: None) -> str:
    """Saves a state; returns the digest of its parameters once the arrays are on the host, before they are written.

    Args:
      about: other fields of the description, as JSON values.
      metrics: of this step, from which the best checkpoint is chosen; values that are not finite are left out.
      announce: is called with the digest before anything is written. The caller then makes the record of the run
        durable up to this step, so that no checkpoint is ahead of the record.

    Raises:
      UserError: this or the previous checkpoint could not be written, for a reason that the person has to change.
      TemporaryError: one of both could not be written because storage, the network or another process failed.
    """
    step = int(state.step)
    items = {name: getattr(state, name) for name in ITEMS if jax.tree.leaves(getattr(state, name))}
    finish_by_item = {name: trees.begin_digest(item) for name, item in items.items()}  # all begin before one is awaited
    digests = {name: finish() for name, finish in finish_by_item.items()}
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    body = {**about, 'version': checkpoint_files.VERSION, 'step': step, 'digests': digests, 'metrics': finite,
            'shapes': {name: checkpoint_reader.shapes(item) for name, item in items.items()}}
    args = ocp.args.Composite(**{name: ocp.args.StandardSave(item) for name, item in items.items()},
                              meta=ocp.args.JsonSave(checkpoint_files.seal(body)))
    announce(digests['params'])
    self.wait()
    with self._converted_errors(_WRITING_FAILED):
      self._open_once().save(step, args=args, metrics=finite or None, force=True)
    self._is_pending = True
    return digests['params']

  def check(self) -> None:
    """Raises the error of `save` if a save in the background has failed; does not wait for an unfinished save.

    Orbax's own `check_for_errors` does not raise it, because the thread that finishes a save handles the error.
    """
    if self._background_error:
      self.wait()
    if self._is_pending and not self._open_once().is_saving_in_progress():
      self._is_pending = False
      self.wait()

  def wait(self) -> None:
    """Waits until the last save is complete, or has failed in this process; then raises the error of `save`."""
    with self._converted_errors(_WRITING_FAILED):
      manager = self._open_once()
      while jax.process_count() > 1 and not self._background_error and manager.is_saving_in_progress():
        time.sleep(_POLL_S)
      if self._background_error:
        raise self._background_error
      manager.wait_until_finished()

  def reopen(self) -> None:
    """Discards a save that failed, so that another one can be made; for a run of one process."""
    failed_manager, self._manager = self._manager, None
    self._background_error, self._is_pending = None, False
    if failed_manager is not None:
      with contextlib.suppress(Exception):  # the error of the failed save, which was raised before
        failed_manager.close()

  def close(self) -> None:
    """Closes the manager. An error of a save is only logged here; `wait` raises it.

    With several processes, nothing is closed if a save has failed in this one: the others wait for it until it ends.
    """
    owner = run_directory.owner_of(self.folder)
    has_failed = self._background_error is not None or (owner is not None and owner.is_replaced)
    if self._manager is None or (has_failed and jax.process_count() > 1):
      return
    try:
      self._manager.close()
    except Exception as error:  # the thread of a save may raise any error, of any library
      log.warning('the last checkpoint was not written: %s', failures.first_line(error))

  def _open_once(self) -> ocp.CheckpointManager:
    """Opens Orbax's manager at the first call; returns it. Opening also removes the files of an interrupted save."""
    if self._manager is None:
      with self._converted_errors(_OPENING_FAILED):
        self._manager = self._open()
    return self._manager

  def _open(self) -> ocp.CheckpointManager:
    """Returns a new manager of Orbax, after process 0 has set aside checkpoints whose description it could not read."""
    for step in self.reader.steps() if jax.process_index() == 0 else ():
      try:
        self.reader.check_description(step)
      except failures.Damaged as error:
        log.warning('checkpoint %d is damaged and set aside: %s', step, error)
        self._move_to_damaged(step)
    ocp.multihost.sync_global_processes('vit_jax descriptions')
    best = self._keep.best
    on_disk = checkpoint_files.metric_values(self.folder.parent, best, self.reader.steps()) if best else {}
    options = ocp.CheckpointManagerOptions(
        preservation_policy=self._keep.policy(on_disk), enable_async_checkpointing=True, create=True,
        cleanup_tmp_directories=True, temporary_path_class=self._commit_class(),
        async_options=ocp.options.AsyncOptions(barrier_sync_fn=self._barrier()))
    return ocp.CheckpointManager(self.folder, options=options, item_names=(*ITEMS, 'meta'))

  @contextlib.contextmanager
  def _converted_errors(self, what_failed: str) -> Iterator[None]:
    """Converts errors of Orbax and the file system to UserError or TemporaryError with advice, after `what_failed`."""
    try:
      yield
    except (UserError, TemporaryError, *_DEFECTS):
      raise
    except Exception as error:  # the thread of a save may raise any error, of any library
      if failures.is_of_runtime(error):
        raise
      error_class = type(failures.writing('', error))
      advice = failures.advice(error)
      try:
        steps = ', '.join(map(str, self.reader.steps())) or 'none'
      except (UserError, TemporaryError):  # the storage does not list its files either
        steps = 'not known'
      raise error_class(f'{what_failed} {self.folder}: {failures.first_line(error)}\n'
                        f'{f"{advice} Then run" if advice else "Run"} the same command again: it continues from the '
                        f'newest whole checkpoint (steps on disk: {steps}).') from error

  def _commit_class(self) -> type[Any]:
    """Returns Orbax's class for the folders of checkpoints, with a check of the `Owner` before and after a commit."""
    owner = run_directory.owner_of(self.folder)
    # Orbax chooses the same classes: on disks a folder is renamed, in object storage a file is written last.
    default = (ocp.path.atomicity.AtomicRenameTemporaryPath if isinstance(self.folder, pathlib.Path)
               else ocp.path.atomicity.CommitFileTemporaryPath)

    class Commit(default):  # type: ignore[misc, valid-type]
      async def finalize(self) -> None:
        if owner:
          await asyncio.to_thread(owner.check)
        await super().finalize()
        if owner:  # Orbax then removes the checkpoints that are not kept any more
          await asyncio.to_thread(owner.check)
    return Commit

  def _barrier(self) -> ocp.multihost.BarrierSyncFn:
    """Returns Orbax's barrier of processes, changed so that a thread whose save has failed does not wait at it.

    Orbax's thread calls the barrier also in a `finally`, while it handles an error. There it would wait forever: the
    other processes wait at an earlier barrier for this save. The changed barrier stores the error and raises it.
    """
    wait = ocp.multihost.get_barrier_sync_fn()
    def sync(*, key: str, timeout_ms: int) -> None:
      error = sys.exc_info()[1]
      if isinstance(error, Exception) and threading.current_thread() is not threading.main_thread():
        self._background_error = error
        raise error
      wait(key=key, timeout_ms=timeout_ms)
    return sync

  def _set_aside(self, step: int) -> None:
    """Moves a damaged checkpoint to `damaged` of the run directory, in process 0; every process calls this."""
    if jax.process_index() == 0:
      with self._converted_errors('A damaged checkpoint could not be set aside from'):
        self._move_to_damaged(step)
    ocp.multihost.sync_global_processes('vit_jax set aside')

  def _move_to_damaged(self, step: int) -> None:
    """Moves a checkpoint to `damaged/STEP`, or to `damaged/STEP-2`, … if an earlier start has moved one there."""
    damaged = self.folder.parent / 'damaged'
    damaged.mkdir(parents=True, exist_ok=True)
    target, number = damaged / str(step), 1
    while target.exists():
      number += 1
      target = damaged / f'{step}-{number}'
    storage.move(self.folder / str(step), target)
