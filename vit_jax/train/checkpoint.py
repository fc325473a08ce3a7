"""Writes checkpoints with Orbax, with a digest of every item in `meta`, so that damage is always detected.

Items: `params`, `extra` (omitted if empty), `opt`, `data` and `meta`. The digests are over the bits of the arrays,
so they do not depend on the mesh. `checkpoint_reader.py` reads and verifies checkpoints. This module saves, removes and
sets them aside, for the run that holds the lock on the run directory. No other module uses Orbax's manager.
"""
from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from vit_jax.config import durations, schema
from vit_jax.core import lazy, os_errors, trees
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.record import checkpoint_files, lease, reader, storage
from vit_jax.train import checkpoint_reader
from vit_jax.train.checkpoint_reader import ITEMS, Restored
from vit_jax.train.local_copies import LocalCopies
from vit_jax.train.state import TrainState

if TYPE_CHECKING:
  import orbax.checkpoint as ocp
  from orbax.checkpoint import checkpoint_managers as managers
else:
  ocp = lazy.Module('orbax.checkpoint')
  managers = lazy.Module('orbax.checkpoint.checkpoint_managers')

WAIT_S = 0.05  # between two looks at a save of several processes
_DEFECTS = (TypeError, AttributeError, NameError, AssertionError, LookupError)
"""Errors of code, not of files, while a checkpoint is written."""
log = logging.getLogger('vit_jax.train')


@dataclasses.dataclass(frozen=True)
class Keep:
  """Which checkpoints are kept. `best` is the name of a metric, or ''; `every` is in steps, `every_s` in seconds."""
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

  def policy(self) -> managers.PreservationPolicy:
    policies: list[managers.PreservationPolicy] = [managers.LatestN(self.latest)]
    if self.every:
      policies.append(managers.EveryNSteps(self.every))
    if self.every_s:
      policies.append(managers.EveryNSeconds(round(self.every_s)))
    if self.best:
      policies.append(managers.BestN(get_metric_fn=self._score, n=1, keep_checkpoints_without_metrics=False))
    return managers.AnyPreservationPolicy(policies)

  def _score(self, metrics: Mapping[str, float]) -> float:
    value = metrics.get(self.best) if isinstance(metrics, Mapping) else None  # the file may be damaged
    if not isinstance(value, int | float):
      return -math.inf
    value = -value if reader.is_lower_better(self.best) else value
    return value if math.isfinite(value) else -math.inf


class Checkpointer:
  """Saves and restores the states of one run directory. Every process creates one and calls the same methods.

  No file is written before `restore` or `save` is called.

  Args:
    folder: `checkpoints` of the run directory.
    keep: which checkpoints are kept.
    local: copies on the local disks of the hosts; None = none.
  """

  def __init__(self, folder: storage.PathLike, *, keep: Keep, local: LocalCopies | None = None) -> None:
    self.reader = checkpoint_reader.Reader(folder)
    self._local = local
    self.folder = self.reader.folder
    self._keep = keep
    self._opened: ocp.CheckpointManager | None = None
    self._is_pending = False
    self._uncommitted: Exception | None = None

  def steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints, oldest first."""
    return self.reader.steps()

  def restore(self, abstract: TrainState, shardings: TrainState) -> Restored | None:
    """Restores the newest undamaged checkpoint with these `shardings`; None if there is no checkpoint.

    Complete copies on the local disks are used if they are newer than all checkpoints. Damaged checkpoints are set
    aside, with a message, and files of an interrupted save are removed.

    Raises:
      UserError: checkpoints exist but belong to another model, all are damaged, or the system does not allow reading
        them or writing to the folder.
    """
    steps, found = self.steps(), None
    try:
      if self._local:
        found = self._local.restore(abstract, shardings, newer_than=max(self.reader.agreed_steps(), default=-1))
      found = found or self.reader.newest(abstract, shardings, set_aside=self._set_aside)
    except UserError as error:
      if steps and not self.steps():
        raise UserError(f'{error}\nAll of them were moved to {self.folder.parent / "damaged"}. To begin from nothing, '
                        'run the same command again.') from None
      raise
    if jax.process_count() > 1 or self._has_files():
      self._manager()
    else:  # a new run trains its first steps before it imports Orbax
      self._guard(lambda: self.folder.mkdir(parents=True, exist_ok=True))
    return found

  def _has_files(self) -> bool:
    return self.folder.is_dir() and next(iter(self.folder.iterdir()), None) is not None

  def save(self, step: int, state: TrainState, *, data: Mapping[str, Any], meta: Mapping[str, Any],
           metrics: Mapping[str, float], announce: Callable[[str], object] = lambda digest: None) -> str:
    """Starts to save the `state` of step `step`, and returns the digest of its parameters.

    Returns as soon as the arrays are copied to the host. `announce` is called with the digest before anything is
    written, so that the record of the run is complete up to this step when the checkpoint is.

    Raises:
      UserError: this or the previous checkpoint could not be written, for a reason that the person has to change.
      TemporaryError: it could not be written because storage, the network or another process failed.
    """
    items = {name: getattr(state, name) for name in ITEMS if jax.tree.leaves(getattr(state, name))}
    started = {name: trees.begin_digest(item) for name, item in items.items()}
    digests = {name: finish() for name, finish in started.items()}
    body = {**meta, 'version': checkpoint_files.VERSION, 'step': step, 'digests': digests,
            'data_sha256': checkpoint_files.sha256(data),
            'shapes': {name: checkpoint_reader.shapes(item) for name, item in items.items()}}
    args = ocp.args.Composite(
        **{name: ocp.args.StandardSave(item) for name, item in items.items()},
        data=ocp.args.JsonSave(dict(data)),
        meta=ocp.args.JsonSave(checkpoint_files.seal(body)))
    announce(digests['params'])
    finite = {k: v for k, v in metrics.items() if math.isfinite(v)}
    self.wait()
    self._guard(lambda: self._manager().save(step, args=args, metrics=finite or None, force=True))
    self._is_pending = True
    return digests['params']

  def save_local(self, step: int, state: TrainState, *, data: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Copies the `state` to the local disks of the hosts, after `restore`; returns when it is copied to the hosts."""
    assert self._local
    self._local.save(step, state, data=data, meta=meta)

  def discard_local(self) -> None:
    """Removes the copies on the local disks of the hosts, which a checkpoint replaces."""
    if self._local:
      self._local.discard()

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
    self._guard(self._wait)

  def reopen(self) -> None:
    """Discards a save that failed, so that another one can be made; for a run of one process."""
    opened, self._opened, self._uncommitted, self._is_pending = self._opened, None, None, False
    if opened is not None:
      with contextlib.suppress(Exception):  # the error that the failed save has raised before
        opened.close()

  def close(self) -> None:
    """Closes the manager. An error of a save is only logged here; `wait` raises it.

    If process 0 could not commit a save, this does not wait: the other processes wait for it until this one ends.
    """
    if self._local:
      self._local.wait()
    held = lease.find(self.folder)
    is_lost = self._uncommitted is not None or held is not None and held.is_replaced
    if self._opened is None or is_lost and jax.process_count() > 1:
      return
    try:
      self._opened.close()
    except Exception as error:  # any error that the thread of a save has raised, of any library
      log.warning('the last checkpoint was not written: %s', os_errors.first_line(error))

  def _manager(self) -> ocp.CheckpointManager:
    """Returns Orbax's manager, opened on first use; it creates the folder and removes files of an interrupted save."""
    if self._opened is None:
      self._guard(self._open)
    assert self._opened is not None
    return self._opened

  def _open(self) -> None:
    for step in self.steps():
      try:
        self.reader.check_description(step)
      except os_errors.Damaged as error:
        log.warning('checkpoint %d is damaged and set aside: %s', step, error)
        self._set_aside(step)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=self._keep.policy(), enable_async_checkpointing=True, create=True,
        cleanup_tmp_directories=True, temporary_path_class=self._commit_class())
    self._opened = ocp.CheckpointManager(self.folder, options=options, item_names=(*ITEMS, 'data', 'meta'))

  def _guard(self, action: Callable[[], object]) -> None:
    try:
      action()
    except (UserError, TemporaryError, *_DEFECTS):
      raise
    except Exception as error:  # any error that the thread of a save has raised, of any library
      kind, advice = type(os_errors.writing('', error)), os_errors.find(error)
      try:
        kept = ', '.join(map(str, self.steps())) or 'none'
      except (UserError, TemporaryError):  # the storage does not list its files either
        kept = 'not known'
      raise kind(f'A checkpoint could not be written to {self.folder}: {os_errors.first_line(error)}\n'
                 f'{f"{advice} Then run" if advice else "Run"} the same command again: it continues from the newest '
                 f'whole checkpoint (steps on disk: {kept}).') from error

  def _commit_class(self) -> type[Any]:
    """Returns Orbax's class for the folders of checkpoints; it reads the run's lease before and after a commit."""
    held, classes = lease.find(self.folder), ocp.path.atomicity
    # Those that Orbax chooses itself: a folder is renamed, and in object storage a file is written last.
    default = (classes.AtomicRenameTemporaryPath if isinstance(self.folder, pathlib.Path)
               else classes.CommitFileTemporaryPath)
    checkpointer = self

    class Commit(default):  # type: ignore[misc, valid-type]
      async def finalize(self) -> None:
        try:
          if held:
            await asyncio.to_thread(held.check)
          await super().finalize()
          if held:  # before Orbax removes the checkpoints that this one replaces
            await asyncio.to_thread(held.check)
        except Exception as error:
          checkpointer._uncommitted = error
          raise

    return Commit

  def _wait(self) -> None:
    """Waits for the last save; Orbax itself would wait for the other processes, which wait for a commit that failed."""
    manager = self._manager()
    while jax.process_count() > 1 and not self._uncommitted and manager.is_saving_in_progress():
      time.sleep(WAIT_S)
    if self._uncommitted:
      raise self._uncommitted
    manager.wait_until_finished()

  def _set_aside(self, step: int) -> None:
    """Moves a damaged checkpoint to `damaged` of the run directory."""
    if jax.process_index() == 0:
      self._guard(lambda: self._move_aside(step))
    ocp.multihost.sync_global_processes('vit_jax set aside')

  def _move_aside(self, step: int) -> None:
    damaged = self.folder.parent / 'damaged'
    damaged.mkdir(parents=True, exist_ok=True)
    names = (f'{step}', *(f'{step}-{i}' for i in range(2, 1000)))
    name = next(n for n in names if not (damaged / n).exists())
    storage.move(self.folder / str(step), damaged / name)
