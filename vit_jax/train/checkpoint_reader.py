"""Reads and verifies the checkpoints of a run directory; never writes, moves or removes files.

`checkpoint.py` resumes a run with it. The jobs that use a run call it directly, also while the run is training. A
checkpoint is only used if its saved digests match the arrays that were read; otherwise it counts as damaged, and the
previous one is used. Errors of the system, such as a missing permission or too many open files, do not count as damage;
they end the job with a message (`core/failures.py`).
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

ITEMS = ('params', 'opt', 'extra')
MOST_STEPS = 1024  # of a list that processes agree on: it is sent as an array of fixed size
T = TypeVar('T')
log = logging.getLogger('vit_jax.train')


class Restored(NamedTuple):
  """A verified checkpoint; `about` is the argument of `Checkpointer.save`, with what that adds."""
  state: TrainState
  about: dict[str, Any]


class Removed(UserError):
  """A checkpoint was removed while it was read, by a run that keeps only its newest ones."""


class Reader:
  """The checkpoints of one folder. Every process creates one and calls the same methods.

  Args:
    folder: `checkpoints` of a run directory; it may be missing.
  """

  def __init__(self, folder: storage.PathLike) -> None:
    self.folder = storage.open_path(folder)

  def steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints, oldest first."""
    storage.refresh(self.folder)
    return checkpoint_files.steps(self.folder)

  def agreed_steps(self) -> list[int]:
    """Returns the steps that process 0 lists, on every process, since listings of a network folder may differ.

    With several processes these are at most the newest `MOST_STEPS`.
    """
    steps = self.steps()
    if jax.process_count() == 1:
      return steps
    padded = np.full(MOST_STEPS, -1, np.int32)
    padded[:len(steps[-MOST_STEPS:])] = steps[-MOST_STEPS:]
    return [int(step) for step in meshes.of_process_0(padded) if step >= 0]

  def newest(self, abstract: TrainState, *, set_aside: Callable[[int], None] | None = None,
             choose: Callable[[list[int]], int] = max) -> Restored | None:
    """Reads the newest undamaged checkpoint; None if there is no checkpoint.

    Args:
      abstract: shapes, dtypes and shardings of the state.
      set_aside: called with the step of each damaged checkpoint; None = only log a warning.
      choose: chooses another one than the newest among the steps of undamaged checkpoints, on process 0.

    Raises:
      UserError: all checkpoints are damaged, one belongs to another model, or the system does not allow reading them.
    """
    damaged: dict[int, str] = {}
    while left := [step for step in self.agreed_steps() if step not in damaged]:
      step = choose(left)
      if jax.process_count() > 1:  # a step of one process may be any number that a folder can have as its name
        step = int(meshes.of_process_0(np.int32(step)))
      try:
        return self._read(step, abstract)
      except Damaged as error:
        now = self.agreed_steps()
        if step not in now or any(newer > left[-1] and newer not in damaged for newer in now):
          continue  # the run is training: it removes this checkpoint after saving a newer one
        damaged[step] = str(error)
        log.warning('checkpoint %d is damaged%s: %s', step, ' and set aside' if set_aside else '', error)
        if set_aside:
          set_aside(step)
    if not damaged:
      return None
    reasons = '\n'.join(f'  {step}: {why}' for step, why in damaged.items())
    raise UserError(f'{self.folder}: expected a whole checkpoint, got damaged ones only:\n{reasons}')

  def read(self, step: int, abstract: TrainState) -> Restored:
    """Reads and verifies the checkpoint of one step, with the shardings of `abstract`.

    Raises:
      Removed: the checkpoint does not exist, or not any more.
      UserError: it is damaged or belongs to another model, or the system does not allow reading it.
    """
    if step not in (steps := self.agreed_steps()):
      raise Removed(f'{self.folder} has no checkpoint of step {step}; it has: {", ".join(map(str, steps)) or "none"}')
    try:
      return self._read(step, abstract)
    except Damaged as error:
      if step not in (steps := self.agreed_steps()):
        raise Removed(f'{self.folder}: expected a checkpoint of step {step}, got none any more: the run that is '
                      f'training there removed it. It has: {", ".join(map(str, steps)) or "none"}. Choose among these, '
                      'or raise checkpoints.keep_latest.') from error
      raise UserError(f'Checkpoint {step} in {self.folder} is damaged: {error}') from error

  def _read(self, step: int, abstract: TrainState) -> Restored:
    wanted = {name: getattr(abstract, name) for name in ITEMS if jax.tree.leaves(getattr(abstract, name))}
    about, items, started = _all_or_none(f'{self.folder / str(step)}', lambda: self._load(step, wanted))
    started = started or {name: trees.begin_digest(item) for name, item in items.items()}
    for name, finish in started.items():
      if finish() != about['digests'][name]:
        raise Damaged(f'the digest of {name} is not the one that was saved')
    count = jax.device_put(np.asarray(step, np.int32), abstract.step.sharding)
    # An item without arrays, such as the state of a constant optimizer, is not saved; its structure is that of now.
    return Restored(TrainState(count, **{name: items.get(name, getattr(abstract, name)) for name in ITEMS}), about)

  def _load(self, step: int, wanted: Mapping[str, PyTree]) -> tuple[
      dict[str, Any], dict[str, PyTree], dict[str, Callable[[], str]]]:
    """Returns description, items, and functions that wait for their digests; does not wait for other processes.

    A process that is alone begins to verify each item while it reads the next; with several, a digest is a sum over all
    of them, which begins when all have read everything.
    """
    self.check_description(step)
    about = checkpoint_files.read_meta(self.folder / str(step))
    self._check_layout(step, about, wanted)
    if 'data_sha256' in about:  # the order of the data has a file of its own in checkpoints of earlier versions
      about['data'] = checkpoint_files.read_json(self.folder / str(step) / checkpoint_files.DATA)
      if checkpoint_files.sha256(about['data']) != about['data_sha256']:
        raise Damaged('the digest of data is not the one that was saved')
    items: dict[str, PyTree] = {}
    started: dict[str, Callable[[], str]] = {}
    for name, target in wanted.items():
      items[name] = self._read_arrays(step, name, target, about['shapes'][name])
      if jax.process_count() == 1:
        started[name] = trees.begin_digest(items[name])
    return about, items, started

  def check_description(self, step: int) -> None:
    """Checks Orbax's own description of a checkpoint, which Orbax's manager reads on opening.

    Raises:
      UserError: the system does not allow reading it.
      Damaged: it exists, but differs from what was saved.
    """
    path = self.folder / str(step) / checkpoint_files.LIBRARY
    if checkpoint_files.guard(str(path), path.exists):
      checkpoint_files.read_json(path)

  def _read_arrays(self, step: int, name: str, target: PyTree, saved: Mapping[str, str]) -> PyTree:
    path = self.folder / str(step) / name

    def load() -> PyTree:
      handler = ocp.StandardCheckpointHandler()
      try:
        checkpoint_files.check_arrays(name, jax.tree.leaves(handler.metadata(path).tree), saved)
        return handler.restore(path, args=ocp.args.StandardRestore(target))
      finally:
        handler.close()

    return checkpoint_files.guard(str(path), load)

  def _check_layout(self, step: int, meta: Mapping[str, Any], wanted: Mapping[str, PyTree]) -> None:
    if meta['version'] != checkpoint_files.VERSION:
      raise UserError(f'Checkpoint {step} in {self.folder} has layout version {meta["version"]}; this code reads '
                      f'version {checkpoint_files.VERSION}.')
    lines = []
    for name in ITEMS:
      saved, now = meta['shapes'].get(name, {}), shapes(wanted.get(name, {}))
      lines += [f'  {name}/{path}: {saved.get(path, "absent")} in the checkpoint, {now.get(path, "absent")} by the '
                'config' for path in sorted(saved.keys() | now.keys()) if saved.get(path) != now.get(path)]
    if lines:
      lines = lines[:12] + ([f'  … and {len(lines) - 12} more'] if len(lines) > 12 else [])
      raise UserError(f'Checkpoint {step} in {self.folder} was made with another model, objective or optimizer:\n'
                      + '\n'.join(lines) + '\nUse another --workdir, or the config it was made with.')


def shapes(tree: PyTree) -> dict[str, str]:
  """Returns shapes and dtypes by path name, in the form `float32[16, 7]`."""
  return {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in trees.flatten(tree).items()}


def _all_or_none(what: str, load: Callable[[], T]) -> T:
  """Returns the result of `load` if it succeeded on every process; otherwise all processes raise the worst error.

  Args:
    what: is loaded, for the message of the processes that did not fail.
    load: reads it.
  """
  failure: Exception | None = None
  results: list[T] = []
  try:
    results.append(load())
  except (Damaged, UserError, TemporaryError) as error:
    failure = error
  kinds: list[type[Exception]] = [Damaged, TemporaryError, UserError]  # the worst is last
  verdict = worst = next((number for number, kind in enumerate(kinds, 1) if isinstance(failure, kind)), 0)
  if jax.process_count() > 1:
    worst = int(np.max(multihost_utils.process_allgather(np.int32(verdict))))
  if failure is not None and verdict == worst:
    raise failure
  if worst:
    raise kinds[worst - 1](f'another process could not read {what}; see its message')
  return results[0]
