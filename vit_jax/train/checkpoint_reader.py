"""Reads and verifies the checkpoints of a run directory; never writes, moves or removes files.

It can therefore be used while the run is training. A checkpoint is only used if its saved digests match the arrays that
were read; otherwise it counts as damaged, and the previous one is used. Errors of the system, such as a missing
permission or too many open files, do not count as damage; they end the job with a message (`core/os_errors.py`).
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
from vit_jax.core.os_errors import Damaged
from vit_jax.core.types import PyTree
from vit_jax.record import checkpoint_files, storage
from vit_jax.train import replicas
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
  """A verified checkpoint; `data` and `meta` are the arguments of `Checkpointer.save`.

  is_local: it was put together from copies on the local disks of the hosts.
  """
  state: TrainState
  data: dict[str, Any]
  meta: dict[str, Any]
  is_local: bool = False


class _Item(NamedTuple):
  """A part of a state that was read.

  wait_for_digest: a function that waits for its digest and returns it; None = its computation has not begun.
  """
  tree: PyTree
  wait_for_digest: Callable[[], str] | None

  def begin_digest(self) -> Callable[[], str]:
    """Returns a function that waits for the digest and returns it."""
    return self.wait_for_digest or trees.begin_digest(self.tree)


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
    return [int(step) for step in multihost_utils.broadcast_one_to_all(padded) if step >= 0]

  def newest(self, abstract: TrainState, shardings: TrainState, *,
             set_aside: Callable[[int], None] | None = None) -> Restored | None:
    """Reads the newest undamaged checkpoint with these `shardings`; None if there is no checkpoint.

    Args:
      abstract: shapes and dtypes of the state.
      shardings: of its arrays.
      set_aside: called with the step of each damaged checkpoint; None = only log a warning.

    Raises:
      UserError: all checkpoints are damaged, one belongs to another model, or the system does not allow reading them.
    """
    damaged: dict[int, str] = {}
    while left := [step for step in self.agreed_steps() if step not in damaged]:
      try:
        return self._read(left[-1], abstract, shardings)
      except Damaged as error:
        now = self.agreed_steps()
        if left[-1] not in now or any(step > left[-1] and step not in damaged for step in now):
          continue  # the run is training: it removes this checkpoint after saving a newer one
        damaged[left[-1]] = str(error)
        log.warning('checkpoint %d is damaged%s: %s', left[-1], ' and set aside' if set_aside else '', error)
        if set_aside:
          set_aside(left[-1])
    if not damaged:
      return None
    reasons = '\n'.join(f'  {step}: {why}' for step, why in damaged.items())
    raise UserError(f'{self.folder}: expected a whole checkpoint, got damaged ones only:\n{reasons}')

  def read(self, step: int, abstract: TrainState, shardings: TrainState) -> Restored:
    """Reads and verifies the checkpoint of one step with these `shardings`.

    Raises:
      Removed: the checkpoint does not exist, or not any more.
      UserError: it is damaged or belongs to another model, or the system does not allow reading it.
    """
    if step not in (steps := self.agreed_steps()):
      raise Removed(f'{self.folder} has no checkpoint of step {step}; it has: {", ".join(map(str, steps)) or "none"}')
    try:
      return self._read(step, abstract, shardings)
    except Damaged as error:
      if step not in (steps := self.agreed_steps()):
        raise Removed(f'{self.folder}: expected a checkpoint of step {step}, got none any more: the run that is '
                      f'training there removed it. It has: {", ".join(map(str, steps)) or "none"}. Choose among these, '
                      'or raise checkpoints.keep_latest.') from error
      raise UserError(f'Checkpoint {step} in {self.folder} is damaged: {error}') from error

  def _read(self, step: int, abstract: TrainState, shardings: TrainState) -> Restored:
    wanted = {name: getattr(abstract, name) for name in ITEMS if jax.tree.leaves(getattr(abstract, name))}
    meta, data, items = _all_or_none(f'{self.folder / str(step)}',
                                     lambda: self._load(step, wanted, shardings))
    items = {name: _complete(item, wanted[name], getattr(shardings, name)) for name, item in items.items()}
    for name, finish in {name: items[name].begin_digest() for name in wanted}.items():
      if finish() != meta['digests'][name]:
        raise Damaged(f'the digest of {name} is not the one that was saved')
    count = jax.device_put(np.asarray(step, np.int32), shardings.step)
    # An item without arrays, such as the state of a constant optimizer, is not saved; its structure is that of now.
    found = {name: items[name].tree if name in items else getattr(abstract, name) for name in ITEMS}
    return Restored(TrainState(step=count, **found), data, meta)

  def read_meta(self, step: int) -> dict[str, Any]:
    """Returns the `meta` passed to `Checkpointer.save`, with `version`, `step`, `digests` and `shapes`.

    Raises:
      UserError: the system does not allow reading it.
      Damaged: it does not exist, or differs from what was saved.
    """
    return checkpoint_files.read_meta(self.folder / str(step))

  def _load(self, step: int, wanted: Mapping[str, PyTree],
            shardings: TrainState) -> tuple[dict[str, Any], dict[str, Any], dict[str, _Item]]:
    """Returns description, data and arrays; reads only what this process needs, without waiting for other processes.

    A process that is alone begins to verify each item while it reads the next; with several, a digest is a sum over all
    of them, which begins when all have read everything.
    """
    self.check_description(step)
    meta = self.read_meta(step)
    self._check_layout(step, meta, wanted)
    data = checkpoint_files.read_json(self.folder / str(step) / checkpoint_files.DATA)
    if checkpoint_files.sha256(data) != meta['data_sha256']:
      raise Damaged('the digest of data is not the one that was saved')

    def read(name: str) -> _Item:
      tree = self._read_arrays(step, name, wanted[name], getattr(shardings, name), meta['shapes'][name])
      return _Item(tree, trees.begin_digest(tree) if jax.process_count() == 1 else None)

    return meta, data, {name: read(name) for name in wanted}

  def check_description(self, step: int) -> None:
    """Checks Orbax's own description of a checkpoint, which Orbax's manager reads on opening.

    Raises:
      UserError: the system does not allow reading it.
      Damaged: it exists, but differs from what was saved.
    """
    path = self.folder / str(step) / checkpoint_files.LIBRARY
    if checkpoint_files.guard(str(path), path.exists):
      checkpoint_files.read_json(path)

  def _read_arrays(self, step: int, name: str, item: PyTree, shardings: PyTree, saved: Mapping[str, str]) -> PyTree:
    """Returns the arrays of an item; of one that replicas share, those that this process reads, and None for others."""
    target = _target(item, shardings)
    sharing = replicas.share(shardings, item)

    def load() -> PyTree:
      handler, path = ocp.StandardCheckpointHandler(), self.folder / str(step) / name
      try:
        checkpoint_files.check_arrays(name, jax.tree.leaves(handler.metadata(path).tree), saved)
        if sharing is None:
          return handler.restore(path, args=ocp.args.StandardRestore(target))
      finally:
        handler.close()
      return _read_shared(path, target, sharing)

    return checkpoint_files.guard(str(self.folder / str(step) / name), load)

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
      shown = lines[:12] + ([f'  … and {len(lines) - 12} more'] if len(lines) > 12 else [])
      raise UserError(f'Checkpoint {step} in {self.folder} was made with another model, objective or optimizer:\n'
                      + '\n'.join(shown) + '\nUse another --workdir, or the config it was made with.')


def _complete(item: _Item, abstract: PyTree, shardings: PyTree) -> _Item:
  """Returns an item with all of its arrays, which replicas that share it send each other; each process calls it."""
  sharing = replicas.share(shardings, abstract)
  if sharing is None:
    return item
  target, structure = jax.tree.flatten(_target(abstract, shardings))
  return _Item(jax.tree.unflatten(structure, sharing.send(item.tree, target)), None)


def _target(item: PyTree, shardings: PyTree) -> PyTree:
  """Returns shapes and dtypes with shardings."""
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), item, shardings)


def _read_shared(path: storage.Path, target: PyTree, sharing: replicas.Sharing) -> list[Any]:
  """Returns the leaves of an item that this process reads for all replicas; None in place of the others."""
  leaves, structure = jax.tree.flatten(target)
  wanted = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharing.target(i, x.sharding)) if sharing.is_reader(i)
            else ocp.PLACEHOLDER for i, x in enumerate(leaves)]
  if not any(map(sharing.is_reader, range(len(leaves)))):
    return [None] * len(leaves)
  tree = jax.tree.unflatten(structure, wanted)
  handler = ocp.PyTreeCheckpointHandler()
  try:
    found = handler.restore(path, args=ocp.args.PyTreeRestore(
        item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)))
  finally:
    handler.close()
  return [x if isinstance(x, jax.Array) else None for x in jax.tree.leaves(found)]


def shapes(tree: PyTree) -> dict[str, str]:
  """Returns shapes and dtypes by path name, in the form `float32[16, 7]`."""
  return {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in trees.flatten(tree).items()}


def _all_or_none(what: str, load: Callable[[], T]) -> T:
  """Returns the result of `load` if it succeeded on every process; otherwise all processes raise the worst error.

  Args:
    what: is loaded, for the message of the processes that did not fail.
    load: reads it.
  """
  own: Damaged | UserError | TemporaryError | None = None
  result: T | None = None
  try:
    result = load()
  except (Damaged, UserError, TemporaryError) as error:
    own = error
  kinds: list[type[Exception]] = [Damaged, TemporaryError, UserError]  # the worst is last
  verdict = next((number for number, kind in enumerate(kinds, 1) if isinstance(own, kind)), 0)
  worst = verdict
  if jax.process_count() > 1:
    worst = int(np.max(multihost_utils.process_allgather(np.int32(verdict))))
  if own is not None and verdict == worst:
    raise own
  if worst:
    raise kinds[worst - 1](f'another process could not read {what}; see its message')
  assert result is not None
  return result
