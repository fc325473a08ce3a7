"""Reads and verifies the checkpoints of a run directory; never writes, moves or removes files.

`checkpoint.py` resumes a run with a `Reader`. The jobs that use a run (evaluate, average) make a `Reader` too, also
while the run is training. A checkpoint is used only if its saved digests match the arrays that were read. Otherwise
the checkpoint counts as damaged, and `newest` reads the checkpoint before it. Errors of the system, such as a missing
permission, do not count as damage: they end the job with a message (`core/failures.py`).

Several processes agree on the step, and on whether all processes could read it (`_all_or_none`): a process
that continued alone would wait for the others forever.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from vit_jax.core import lazy, trees
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.failures import Damaged
from vit_jax.core.types import PyTree
from vit_jax.parallel import mesh as meshes
from vit_jax.record import checkpoint_files, storage
from vit_jax.train.state import TrainState

if TYPE_CHECKING:
  import orbax.checkpoint as ocp
else:
  ocp = lazy.Module('orbax.checkpoint')

ITEMS = ('params', 'opt', 'extra')  # fields of `TrainState`, each an item of Orbax in a checkpoint
MAX_STEPS = 1024  # in the array of fixed size with which process 0 sends its list of steps
T = TypeVar('T')
log = logging.getLogger('vit_jax.train')


class Restored(NamedTuple):
  """A verified checkpoint; `about` is the argument of `Checkpointer.save` with the fields that are added there."""
  state: TrainState
  about: dict[str, Any]


class Removed(UserError):
  """The checkpoint does not exist, for example because the run that is training there has removed it."""


class Reader:
  """The checkpoints of `folder`, which may be missing. Every process creates a reader and calls the same methods."""

  def __init__(self, folder: storage.PathLike) -> None:
    self.folder = storage.open_path(folder)

  def steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints, oldest first."""
    storage.refresh(self.folder)
    return checkpoint_files.steps(self.folder)

  def agreed_steps(self) -> list[int]:
    """Returns the steps that process 0 lists, on every process, because listings of a network folder may differ.

    With several processes, the list has at most the newest `MAX_STEPS` steps.
    """
    steps = self.steps()
    if jax.process_count() == 1:
      return steps
    newest = steps[-MAX_STEPS:]
    padded = np.full(MAX_STEPS, -1, np.int32)
    padded[:len(newest)] = newest
    return [int(step) for step in meshes.broadcast_from_process_0(padded) if step >= 0]

  def newest(self, abstract: TrainState, *, set_aside: Callable[[int], None] | None = None,
             choose: Callable[[list[int]], int] = max) -> Restored | None:
    """Reads the newest undamaged checkpoint; None if there is no checkpoint.

    Args:
      abstract: shapes, dtypes and shardings of the state.
      set_aside: is called with the step of each damaged checkpoint; None = only log a warning.
      choose: returns the step to read from a list of steps, without the damaged ones; the choice of process 0 counts.

    Raises:
      UserError: all checkpoints are damaged, or one belongs to another model or may not be read.
    """
    reason_by_step: dict[int, str] = {}  # of the damaged checkpoints
    while candidates := [step for step in self.agreed_steps() if step not in reason_by_step]:
      step = choose(candidates)
      if jax.process_count() > 1:  # alone, the step may exceed int32
        step = int(meshes.broadcast_from_process_0(np.int32(step)))
      try:
        return self._read_verified(step, abstract)
      except Damaged as error:
        steps_now = self.agreed_steps()
        has_newer = any(other > candidates[-1] for other in steps_now if other not in reason_by_step)
        if has_newer or step not in steps_now:
          continue  # not damaged: the run is training, and removed this checkpoint after it had saved a newer one
        reason_by_step[step] = str(error)
        log.warning('checkpoint %d is damaged%s: %s', step, ' and set aside' if set_aside else '', error)
        if set_aside:
          set_aside(step)
    if not reason_by_step:
      return None
    reasons = '\n'.join(f'  {step}: {reason}' for step, reason in reason_by_step.items())
    raise UserError(f'{self.folder}: expected a whole checkpoint, got damaged ones only:\n{reasons}')

  def read(self, step: int, abstract: TrainState) -> Restored:
    """Reads and verifies the checkpoint of one step, with the shardings of `abstract`.

    Raises:
      Removed: the checkpoint does not exist, or not any more.
      UserError: the checkpoint is damaged or belongs to another model, or the system does not allow reading it.
    """
    steps = self.agreed_steps()
    if step not in steps:
      raise Removed(f'{self.folder} has no checkpoint of step {step}; it has: {", ".join(map(str, steps)) or "none"}')
    try:
      return self._read_verified(step, abstract)
    except Damaged as error:
      steps = self.agreed_steps()
      if step not in steps:
        raise Removed(f'{self.folder}: expected a checkpoint of step {step}, got none any more: the run that is '
                      f'training there removed it. It has: {", ".join(map(str, steps)) or "none"}. Choose among these, '
                      'or raise checkpoints.keep_latest.') from error
      raise UserError(f'Checkpoint {step} in {self.folder} is damaged: {error}') from error

  def _read_verified(self, step: int, abstract: TrainState) -> Restored:
    """Reads and verifies a checkpoint, on all processes or on none; raises Damaged, and errors as `read`."""
    wanted = {name: getattr(abstract, name) for name in ITEMS if jax.tree.leaves(getattr(abstract, name))}
    about, items, finish_by_item = _all_or_none(str(self.folder / str(step)), lambda: self._load(step, wanted))
    finish_by_item = finish_by_item or {name: trees.begin_digest(item) for name, item in items.items()}
    for name, finish in finish_by_item.items():
      if finish() != about['digests'][name]:
        raise Damaged(f'the digest of {name} is not the one that was saved')
    step_array = jax.device_put(np.asarray(step, np.int32), abstract.step.sharding)
    # An item without arrays, such as the state of plain SGD, is not saved: that of `abstract` is the same.
    return Restored(TrainState(step_array, **{name: items.get(name, getattr(abstract, name)) for name in ITEMS}), about)

  def _load(self, step: int, wanted: Mapping[str, PyTree]) -> tuple[
      dict[str, Any], dict[str, PyTree], dict[str, Callable[[], str]]]:
    """Returns the description, the arrays by item, and by item a function that waits for the digest of the arrays.

    One process computes the digest of an item while it reads the next item. With several, there are no functions yet: a
    digest is a sum over all processes, which begin to compute it when all have read the checkpoint.
    """
    self.check_description(step)
    about = checkpoint_files.read_meta(self.folder / str(step))
    self._check_layout(step, about, wanted)
    if 'data_sha256' in about:  # earlier versions wrote the order of the data into a separate file
      about['data'] = checkpoint_files.read_json(self.folder / str(step) / checkpoint_files.DATA)
      if checkpoint_files.sha256(about['data']) != about['data_sha256']:
        raise Damaged('the digest of data is not the one that was saved')
    items: dict[str, PyTree] = {}
    finish_by_item: dict[str, Callable[[], str]] = {}
    for name, target in wanted.items():
      items[name] = self._read_arrays(step, name, target, about['shapes'][name])
      if jax.process_count() == 1:
        finish_by_item[name] = trees.begin_digest(items[name])
    return about, items, finish_by_item

  def check_description(self, step: int) -> None:
    """Raises Damaged if Orbax's own description of a checkpoint, which Orbax's manager reads on opening, is damaged."""
    path = self.folder / str(step) / checkpoint_files.LIBRARY
    if checkpoint_files.guarded_read(str(path), path.exists):
      checkpoint_files.read_json(path)

  def _read_arrays(self, step: int, name: str, target: PyTree, saved: Mapping[str, str]) -> PyTree:
    """Returns the arrays of an item with the shardings of `target`; `saved` has their shapes in the description."""
    path = self.folder / str(step) / name

    def load() -> PyTree:
      handler = ocp.StandardCheckpointHandler()
      try:
        checkpoint_files.check_arrays(name, jax.tree.leaves(handler.metadata(path).tree), saved)
        return handler.restore(path, args=ocp.args.StandardRestore(target))
      finally:
        handler.close()
    return checkpoint_files.guarded_read(str(path), load)

  def _check_layout(self, step: int, about: Mapping[str, Any], wanted: Mapping[str, PyTree]) -> None:
    """Raises UserError if a checkpoint has another version, or arrays of other names or shapes than `wanted`."""
    if about['version'] != checkpoint_files.VERSION:
      raise UserError(f'Checkpoint {step} in {self.folder} has layout version {about["version"]}; this code reads '
                      f'version {checkpoint_files.VERSION}.')
    lines = []
    for name in ITEMS:
      saved = about['shapes'].get(name, {})
      configured = shapes(wanted.get(name, {}))
      for path in sorted(saved.keys() | configured.keys()):
        if saved.get(path) != configured.get(path):
          lines.append(f'  {name}/{path}: {saved.get(path, "absent")} in the checkpoint, '
                       f'{configured.get(path, "absent")} by the config')
    if lines:
      lines = lines[:12] + ([f'  … and {len(lines) - 12} more'] if len(lines) > 12 else [])
      raise UserError(f'Checkpoint {step} in {self.folder} was made with another model, objective or optimizer:\n'
                      + '\n'.join(lines) + '\nUse another --workdir, or the config it was made with.')


def shapes(tree: PyTree) -> dict[str, str]:
  """Returns dtype and shape of each array by path name, in the form `float32[16, 7]`."""
  return {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in trees.flatten(tree).items()}


def _all_or_none(path: str, load: Callable[[], T]) -> T:
  """Returns the result of `load` if it succeeded on every process; otherwise all processes raise the worst error.

  `path` is that of the checkpoint, for the message of the processes that did not fail.
  """
  failure: Exception | None = None
  results: list[T] = []
  try:
    results.append(load())
  except (Damaged, UserError, TemporaryError) as error:
    failure = error
  classes: list[type[Exception]] = [Damaged, TemporaryError, UserError]  # the worst is last
  severity = next((i for i, each in enumerate(classes, 1) if isinstance(failure, each)), 0)  # 0 = no error
  worst = severity
  if jax.process_count() > 1:
    worst = int(np.max(multihost_utils.process_allgather(np.int32(severity))))
  if failure is not None and severity == worst:
    raise failure
  if worst:
    raise classes[worst - 1](f'another process could not read {path}; see its message')
  return results[0]
