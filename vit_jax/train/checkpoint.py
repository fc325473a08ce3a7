"""Checkpoints that are never silently wrong: Orbax, with a digest of every item verified on restore.

Items: `params`, `extra` (left out when empty), `opt`, `data` and `meta`. The digests in `meta` are over
the bits of the arrays, so they hold on any mesh; one flipped byte is noticed, and the checkpoint is set
aside in favour of the one before. The only module that knows Orbax's manager.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree
from vit_jax.record import storage
from vit_jax.train.state import TrainState

VERSION = 1
"""Layout of what is saved; a change that old checkpoints do not survive raises it."""

LOWER_IS_BETTER = ('nll', 'loss', 'ece')
ITEMS = ('params', 'opt', 'extra')
log = logging.getLogger('vit_jax.train')
_OUT_OF_MEMORY = 'RESOURCE_EXHAUSTED'
_ROOM = re.compile(r'no space|quota|file too large|permission|read-only|errno|EFBIG|ENOSPC', re.IGNORECASE)

# What reading damaged files has been seen to raise in Orbax, TensorStore, zstd and json.
DAMAGE = (ValueError, OSError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, AssertionError,
          ArithmeticError, NotImplementedError)


class Restored(NamedTuple):
  """A verified checkpoint: `data` and `meta` as they were handed to `save`."""
  state: TrainState
  data: dict[str, Any]
  meta: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Keep:
  """Which checkpoints stay. `best` names a metric, or is '' for none; `every` is in steps, 0 = off."""
  latest: int
  every: int = 0
  best: str = ''

  def policy(self) -> managers.PreservationPolicy:
    policies: list[managers.PreservationPolicy] = [managers.LatestN(self.latest)]
    if self.every:
      policies.append(managers.EveryNSteps(self.every))
    if self.best:
      policies.append(managers.BestN(get_metric_fn=self._score, n=1, keep_checkpoints_without_metrics=False))
    return managers.AnyPreservationPolicy(policies)

  def _score(self, metrics: Mapping[str, float]) -> float:
    value = metrics.get(self.best, -math.inf)
    name = self.best.split('/')[-1].split('@')[0]
    value = -value if name in LOWER_IS_BETTER else value
    return value if math.isfinite(value) else -math.inf


class Checkpointer:
  """Saves and restores the states of one run directory. Every process makes one and calls the same methods."""

  def __init__(self, folder: storage.PathLike, *, keep: Keep):
    self.folder = storage.open_path(folder)
    self._options = ocp.CheckpointManagerOptions(
        preservation_policy=keep.policy(), enable_async_checkpointing=True, create=True,
        cleanup_tmp_directories=True)
    self._manager = self._open()
    self._is_pending = False

  def _open(self) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(self.folder, options=self._options, item_names=(*ITEMS, 'data', 'meta'))

  def steps(self) -> list[int]:
    """Steps of the checkpoints that are whole on disk, oldest first."""
    return sorted(self._manager.all_steps())

  def save(self, step: int, state: TrainState, *, data: Mapping[str, Any], meta: Mapping[str, Any],
           metrics: Mapping[str, float]) -> str:
    """Starts saving `state` after `step` steps, and returns the digest of its parameters.

    Returns once the arrays have been copied off the devices.

    Raises:
      UserError: if this save or the one before could not be written.
    """
    items = {name: getattr(state, name) for name in ITEMS if jax.tree.leaves(getattr(state, name))}
    digests = {name: trees.digest(item) for name, item in items.items()}
    body = {**meta, 'version': VERSION, 'step': step, 'digests': digests, 'data_sha256': _sha256(data),
            'shapes': {name: _shapes(item) for name, item in items.items()}}
    args = ocp.args.Composite(
        **{name: ocp.args.StandardSave(item) for name, item in items.items()},
        data=ocp.args.JsonSave(dict(data)),
        meta=ocp.args.JsonSave({'body': body, 'sha256': _sha256(body)}))
    finite = {k: v for k, v in metrics.items() if math.isfinite(v)}
    self._guard(lambda: self._manager.save(step, args=args, metrics=finite or None, force=True))
    self._is_pending = True
    return digests['params']

  def check(self) -> None:
    """Raises UserError if a save in the background has failed; never waits for one that is under way.

    Orbax's own `check_for_errors` no longer knows of a failure: the thread that finishes a save has taken it.
    """
    if self._is_pending and not self._manager.is_saving_in_progress():
      self._is_pending = False
      self.wait()

  def wait(self) -> None:
    """Waits for the last save to be whole on disk. Raises UserError if it failed."""
    self._guard(self._manager.wait_until_finished)

  def _guard(self, action: Any) -> None:
    try:
      action()
    except (OSError, ValueError, RuntimeError) as error:
      kept = ', '.join(map(str, self.steps())) or 'none'
      advice = 'Make room or make the folder writable, then run' if _ROOM.search(str(error)) else 'Run'
      raise UserError(f'A checkpoint could not be written to {self.folder}: {_first_line(error)}\n'
                      f'{advice} the same command again: it goes on from the newest whole checkpoint (steps on '
                      f'disk: {kept}).') from error

  def restore(self, abstract: TrainState, shardings: TrainState) -> Restored | None:
    """The newest whole checkpoint, laid out by `shardings`; None if there is none.

    Damaged ones are set aside, with a message.

    Raises:
      UserError: if checkpoints exist but belong to another model, or all are damaged.
    """
    steps = self.steps()
    for step in reversed(steps):
      try:
        return self._read(step, abstract, shardings)
      except (UserError, PermissionError):
        raise
      except DAMAGE as error:
        if _OUT_OF_MEMORY in str(error):  # says nothing of the checkpoint
          raise
        log.warning('checkpoint %d is damaged and set aside: %s', step, _first_line(error))
        self._set_aside(step)
    if steps:
      raise UserError(f'All checkpoints in {self.folder} (steps {", ".join(map(str, steps))}) are damaged; they were '
                      f'moved to {self.folder.parent / "damaged"}. To begin anew, run the same command again.')
    return None

  def read(self, step: int, abstract: TrainState, shardings: TrainState) -> Restored:
    """The checkpoint of one step, verified, laid out by `shardings`.

    Raises:
      UserError: if there is none, it is damaged, or it belongs to another model.
    """
    steps = self.steps()
    if step not in steps:
      raise UserError(f'{self.folder} has no checkpoint of step {step}; it has: {", ".join(map(str, steps)) or "none"}')
    try:
      return self._read(step, abstract, shardings)
    except UserError:
      raise
    except DAMAGE as error:
      raise UserError(f'Checkpoint {step} in {self.folder} is damaged: {_first_line(error)}') from error

  def _read(self, step: int, abstract: TrainState, shardings: TrainState) -> Restored:
    meta = self.read_meta(step)
    wanted = {name: getattr(abstract, name) for name in ITEMS if jax.tree.leaves(getattr(abstract, name))}
    self._check_layout(step, meta, wanted)
    targets = {name: jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                                  item, getattr(shardings, name)) for name, item in wanted.items()}
    got = self._manager.restore(step, args=ocp.args.Composite(
        **{name: ocp.args.StandardRestore(item) for name, item in targets.items()}, data=ocp.args.JsonRestore()))
    for name in wanted:
      if trees.digest(got[name]) != meta['digests'][name]:
        raise ValueError(f'the digest of {name} is not the one that was saved')
    if _sha256(got['data']) != meta['data_sha256']:
      raise ValueError('the digest of data is not the one that was saved')
    count = jax.device_put(np.asarray(step, np.int32), shardings.step)
    state = TrainState(count, got['params'], got['opt'], got['extra'] if 'extra' in wanted else {})
    return Restored(state, got['data'], meta)

  def read_meta(self, step: int) -> dict[str, Any]:
    """What `save` was handed as `meta`, with `step`, `digests` and `shapes`. Raises ValueError if damaged."""
    record = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))['meta']
    if _sha256(record['body']) != record['sha256']:
      raise ValueError('its description is damaged')
    return record['body']

  def _check_layout(self, step: int, meta: Mapping[str, Any], wanted: Mapping[str, PyTree]) -> None:
    if meta['version'] != VERSION:
      raise UserError(f'Checkpoint {step} in {self.folder} has layout version {meta["version"]}; this code reads '
                      f'version {VERSION}.')
    lines = []
    for name in ITEMS:
      saved, now = meta['shapes'].get(name, {}), _shapes(wanted.get(name, {}))
      lines += [f'  {name}/{path}: {saved.get(path, "absent")} in the checkpoint, {now.get(path, "absent")} by the '
                'config' for path in sorted(saved.keys() | now.keys()) if saved.get(path) != now.get(path)]
    if lines:
      shown = lines[:12] + ([f'  … and {len(lines) - 12} more'] if len(lines) > 12 else [])
      raise UserError(f'Checkpoint {step} in {self.folder} was made with another model, objective or optimizer:\n'
                      + '\n'.join(shown) + '\nTake another --workdir, or the config it was made with.')

  def _set_aside(self, step: int) -> None:
    self._manager.close()
    if jax.process_index() == 0:
      damaged = self.folder.parent / 'damaged'
      damaged.mkdir(parents=True, exist_ok=True)
      names = (f'{step}', *(f'{step}-{i}' for i in range(2, 1000)))
      name = next(n for n in names if not (damaged / n).exists())
      storage.move(self.folder / str(step), damaged / name)
    ocp.multihost.sync_global_processes('vit_jax set aside')
    self._manager = self._open()

  def close(self) -> None:
    """Lets go of the folder. A save that failed is only logged here: `wait` is what raises."""
    try:
      self._manager.close()
    except (OSError, ValueError, RuntimeError) as error:
      log.warning('the last checkpoint was not written: %s', _first_line(error))


def _sha256(value: Any) -> str:
  return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _shapes(tree: PyTree) -> dict[str, str]:
  return {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in trees.flatten(tree).items()}


def _first_line(error: BaseException) -> str:
  text = str(error).strip() or type(error).__name__
  return text.splitlines()[0][:300]
