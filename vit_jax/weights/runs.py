"""Run directories as weight files: `config.json` and the newest complete checkpoint, without the optimizer state.

Arrays are read onto the host, whatever mesh the run used, and compared with the saved digests. A written directory can
be used as weights, but training cannot resume from it, because it has no optimizer state.
"""
from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from vit_jax.config import engine, provenance, schema
from vit_jax.config.schema import Geometry, Interpolation
from vit_jax.core import lazy, trees
from vit_jax.core.errors import UserError
from vit_jax.core.failures import Damaged
from vit_jax.core.types import Params, PyTree
from vit_jax.models import adapters
from vit_jax.parallel import layout
from vit_jax.parallel.sharding import FROZEN
from vit_jax.record import checkpoint_files, storage

if TYPE_CHECKING:
  import orbax.checkpoint as ocp
else:
  ocp = lazy.Module('orbax.checkpoint')

log = logging.getLogger('vit_jax.weights')
_SHAPE = re.compile(r'(\w+)\[([\d, ]*)\]')


class Found(NamedTuple):
  """A network of a run, on the host; `preprocess` has the form of `preprocess.PreprocessRule.values`.

  trained, frozen: of a run with adapters, what it trains for this view (adapters, heads) and what it does not; else {}.
  """
  config: schema.Config
  step: int
  view: str
  params: Params
  state: PyTree
  preprocess: dict[str, Any]
  class_names: tuple[str, ...]
  trained: Params
  frozen: Params


def is_run(path: pathlib.Path) -> bool:
  """Whether the path is a run directory or one of its checkpoints."""
  return path.is_dir() and ((path / 'checkpoints').is_dir() or _is_step(path))


def _is_step(path: pathlib.Path) -> bool:
  return path.name.isdigit() and path.parent.name == 'checkpoints' and (path / 'params').is_dir()


def read(path: pathlib.Path, *, view: str, first: str = '') -> Found:
  """Reads a network of a run from its newest undamaged checkpoint, or from the checkpoint at `path`.

  With `checkpoints.keep_best` the best one is read. A line in the log names its step if it is not the newest one.

  Args:
    path: a run directory, or `RUN/checkpoints/STEP`.
    view: student, ema or teacher; '' = the first of `first`, ema and student that the run has.
    first: see `view`.

  Raises:
    UserError: there is no checkpoint, all are damaged, or the run has no such view.
  """
  path = path.absolute()
  is_step = _is_step(path)
  folder = path.parent if is_step else path / 'checkpoints'
  damaged: dict[int, str] = {}
  while left := [one for one in checkpoint_files.steps(folder) if one not in damaged]:
    config = engine.read_file(folder.parent / 'config.json', code='model')
    used = None if is_step else checkpoint_files.choose(path, config.checkpoints.keep_best, left)
    step = used.step if used else int(path.name)
    try:
      found = _read(folder / str(step), config, view, first)
    except Damaged as error:
      now = checkpoint_files.steps(folder)
      if is_step and step not in now:
        raise UserError(f'{path}: expected a checkpoint, got none any more: the run that is training there removed it. '
                        f'It has: {", ".join(map(str, now)) or "none"}. Choose among these.') from error
      if is_step:
        raise UserError(f'{path}: expected a complete checkpoint, got a damaged one: {error}') from error
      if step not in now or any(one > left[-1] and one not in damaged for one in now):
        continue  # the run is training: it has saved a newer checkpoint and removes this one
      damaged[step] = str(error)
      log.warning('Checkpoint %d of %s is damaged and not used: %s', step, path, error)
    else:
      if used:
        say(path, used, damaged)
      return found
  if damaged:
    reasons = '\n'.join(f'  {step}: {why}' for step, why in damaged.items())
    raise UserError(f'{path}: expected a complete checkpoint, got damaged ones only:\n{reasons}')
  raise UserError(f'{path}: expected a run with a checkpoint, got one that has no complete checkpoint yet. Wait for '
                  'its first one.')


def say(path: storage.Path, used: checkpoint_files.Chosen, damaged: Collection[int]) -> None:
  """Logs which checkpoint was read for a run, unless it is the newest one."""
  if damaged or not used.is_newest:
    log.info('%s: the weights are those of step %s, %s%s.', path, f'{used.step:,}', reason(used, damaged), (
        '' if used.is_newest else f', not of the last step {used.newest:,}. '
        f'--weights={path / "checkpoints" / str(used.newest)} has the last ones'))


def reason(used: checkpoint_files.Chosen, damaged: Collection[int]) -> str:
  """Returns why a checkpoint stands for a run, of which some are damaged."""
  bad = ' and '.join(f'checkpoint {step}' for step in sorted(damaged))
  return used.reason + f' of the whole checkpoints, without the damaged {bad}' * bool(damaged)


def find_whole(path: storage.Path, metric: str) -> tuple[checkpoint_files.Chosen | None, dict[int, str]]:
  """Returns the checkpoint that `read` reads, and why those that it would rather read are damaged.

  Arrays are compared with their digests only where `metric` chooses among checkpoints, and not by one of several
  processes, which has only just written them.

  Raises:
    UserError, TemporaryError: they cannot be read.
  """
  folder, damaged = path / 'checkpoints', dict[int, str]()
  while left := [one for one in checkpoint_files.steps(folder) if one not in damaged]:
    used = checkpoint_files.choose(path, metric, left)
    assert used is not None
    try:
      body = checkpoint_files.read_meta(folder / str(used.step))
      for name in ('params', 'extra') if used.metric and jax.process_count() == 1 else ():
        if name in body['shapes']:
          _item(folder / str(used.step), body, name)
      return used, damaged
    except Damaged as error:
      if used.step in checkpoint_files.steps(folder):
        damaged[used.step] = str(error)
  return None, damaged


def _read(folder: pathlib.Path, config: schema.Config, view: str, first: str) -> Found:
  body = checkpoint_files.read_meta(folder)
  if body['version'] != checkpoint_files.VERSION:
    raise UserError(f'{folder}: expected layout version {checkpoint_files.VERSION}, got {body["version"]}. '
                    'Read it with the version of this program that wrote it.')
  provenance.check(body, config, said=str(folder.parents[1] / 'config.json'))
  params = _item(folder, body, 'params')
  extra = _item(folder, body, 'extra') if 'extra' in body['shapes'] else {}
  chosen, network, state = select(params, extra, view, first=first, where=str(folder), lora=config.lora)
  p, orientation = body['preprocessing'], config.data.recipe.exif_orientation
  exif = None if orientation is schema.Exif.AUTO else orientation is schema.Exif.TRUE  # converted weights record none
  values = {'mean': tuple(p['mean']), 'std': tuple(p['std']), 'image_px': tuple(body['image_px']),
            'resize': int(p['eval_resize_px']), 'interpolation': Interpolation(p['interpolation']),
            'antialias': bool(p['antialias']), 'truncate': bool(p.get('truncate', False)),
            'geometry': Geometry(p.get('eval_geometry', Geometry.BIG_VISION.value)),  # not in runs of version 0.1
            'exif_orientation': exif, 'native_patch': config.data.recipe.eval_native_patch}
  frozen = _unwrapped(extra).get(FROZEN, {}) if chosen != 'teacher' else {}
  trained = {'student': params, 'ema': extra.get('ema', {})}[chosen] if frozen else {}
  return Found(layout.with_open_execution(config), int(body['step']), chosen, network, state, values,
               tuple(body['class_names']), trained, frozen)


def _item(folder: pathlib.Path, body: Mapping[str, Any], name: str) -> PyTree:
  """Returns a verified item of a checkpoint as NumPy arrays. Sizes are checked before anything is decompressed."""
  matches = {path: _SHAPE.fullmatch(text) for path, text in body['shapes'][name].items()}
  shapes = {path: ([int(n) for n in match[2].split(',') if n.strip()], np.dtype(match[1]))
            for path, match in matches.items() if match}
  needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
  memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')  # of this machine, bytes
  if needed > memory:
    raise UserError(f'{folder / name}: expected arrays that fit in the {memory / 2**30:.1f} GiB of memory of this '
                    f'machine, got {needed / 2**30:.1f} GiB. Use a machine with more memory.')
  target = trees.unflatten({path: np.zeros(shape, dtype) for path, (shape, dtype) in shapes.items()})

  def load() -> PyTree:
    with _only_errors('absl'), ocp.PyTreeCheckpointer() as checkpointer:
      checkpoint_files.check_arrays(name, jax.tree.leaves(checkpointer.metadata(folder / name).item_metadata.tree),
                                    body['shapes'][name])
      return checkpointer.restore(folder / name, item=target,
                                  restore_args=ocp.checkpoint_utils.construct_restore_args(target))

  tree = checkpoint_files.guarded_read(str(folder / name), load)
  if trees.digest(tree) != body['digests'][name]:
    raise Damaged(f'the digest of {name} is not the one that was saved')
  return tree


@contextlib.contextmanager
def _only_errors(name: str) -> Iterator[None]:
  """Hides warnings of a logger: Orbax warns that items have no metadata of their own, which they do not need."""
  logger = logging.getLogger(name)
  level = logger.level
  logger.setLevel(max(level, logging.ERROR))
  try:
    yield
  finally:
    logger.setLevel(level)


def select(params: Params, extra: PyTree, view: str, *, where: str, lora: schema.Lora,
           first: str = '') -> tuple[str, Params, PyTree]:
  """Returns the network of a view: its name, parameters with merged adapters, and running statistics.

  Raises:
    UserError: there is no such view.
  """
  parts = _unwrapped(extra)
  state, frozen = parts.get('model_state', {}), parts.get(FROZEN)
  views = {'student': params, **({'ema': parts['ema']} if 'ema' in parts else {})}
  views = {name: adapters.merge(found, frozen, lora) for name, found in views.items()} if frozen else views
  views |= {'teacher': parts['teacher']} if 'teacher' in parts else {}
  view = view or next(name for name in (first, 'ema', 'student') if name in views)
  if view not in views:
    raise UserError(f'--view: expected one of {", ".join(views)}, which {where} has, got {view!r}. Choose one.')
  return view, dict(views[view]), state


def _unwrapped(extra: PyTree) -> dict[str, Any]:
  """Returns the parts of `extra` of an objective and of those around it, such as `ema`."""
  own = {name: part for name, part in extra.items() if name != 'inner'}
  return own | _unwrapped(extra['inner']) if 'inner' in extra else own


def write(path: pathlib.Path, config: schema.Config, params: Params, extra: PyTree, *, class_names: tuple[str, ...],
          image_px: tuple[int, int]) -> None:
  """Writes a run directory with one checkpoint, at step 0, that holds a network without optimizer state.

  `extra` is that of the objective, such as `{'model_state': …}` with the running statistics of the network, or {}.
  """
  items = {'params': params, **({'extra': extra} if extra else {})}
  r = config.data.recipe
  body = {'version': checkpoint_files.VERSION, 'step': 0,
          'digests': {name: trees.digest(item) for name, item in items.items()},
          'shapes': {name: {path: f'{leaf.dtype}{list(leaf.shape)}' for path, leaf in trees.flatten(item).items()}
                     for name, item in items.items()},
          'class_names': list(class_names), 'image_px': list(image_px),
          provenance.SETTINGS: provenance.settings(config),
          'preprocessing': {'eval_resize_px': r.eval_resize_px, 'eval_geometry': r.eval_geometry.value,
                            'antialias': r.antialias, 'truncate': r.truncate, 'mean': list(r.mean), 'std': list(r.std),
                            'interpolation': r.interpolation.value}}
  folder = path.absolute() / 'checkpoints' / '0'
  (folder / 'meta').mkdir(parents=True)
  with ocp.PyTreeCheckpointer() as checkpointer:
    for name, item in items.items():
      checkpointer.save(folder / name, item)
  (folder / checkpoint_files.META).write_text(json.dumps(checkpoint_files.seal(body)))
  (path / 'config.json').write_text(engine.to_json(config))
