"""`--job=average`: averages several checkpoints of a run into a new run directory, which can be evaluated.

Averaging checkpoints goes back to Polyak (Izmailov et al. 2018, arXiv 1803.05407, for deep networks). The parameters
and all floating-point arrays of `extra` (EMA, teachers, running statistics) are averaged; running statistics are then
averages of averages, not statistics of the averaged network. With LoRA, the factors A and B are averaged separately.
This is not the average of the networks, whose kernels contain the product A B, so the job logs a warning. Optimizer
state, data order and step are those of the newest checkpoint.
"""
from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.config import check, provenance, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree
from vit_jax.jobs import build, resume
from vit_jax.jobs import runtime as startup
from vit_jax.jobs.evaluate import check_is_run
from vit_jax.record import run_directory, storage
from vit_jax.train import checkpoint, checkpoint_reader
from vit_jax.train.state import TrainState
from vit_jax.weights import inherit

log = logging.getLogger('vit_jax.jobs')
OF_SAVING = ('version', 'step', 'digests', 'data_sha256', 'shapes')
"""Keys that `Checkpointer.save` adds to the description."""


def run(config: schema.Config, workdir: storage.Path, *, to: storage.Path, last: int | None,
        steps: Sequence[int] | None, source: str, overridden: Collection[str]) -> int:
  """Averages checkpoints of `workdir` into one of `to`; exit status 0.

  Args:
    config, workdir: the config and the directory of the run.
    to: a directory without checkpoints, made if missing.
    last: number of the newest checkpoints to average, or None if `steps` selects them.
    steps: their steps, or None.
    source: where the config was read, for messages.
    overridden: names of the settings on the command line, which override those of the checkpoints.
  """
  check.check(config)
  startup.start()
  check_is_run(workdir)
  run_directory.check_ours(to, '--to')
  if (to / 'checkpoints').exists() or os.path.islink(to / 'checkpoints'):
    raise UserError(f'--to: expected a directory without checkpoints, got {to}. Use another one.')
  if storage.is_local(to) and to.exists() and not run_directory.holds_nothing(to):
    raise UserError(f'--to: expected a new or empty directory, got {to}, which has files. Use another one.')
  config = resume.keep_orientation(inherit.resolve(config, overridden, workdir).config, workdir)
  data = build.open_data(config)
  _, _, parts = build.open_run(config, data, workdir=workdir, overridden=overridden)
  config = parts.config
  if config.lora.rank:
    log.warning('%s: the adapters are averaged, which is not the average of the networks with them.', workdir)
  reader = checkpoint_reader.Reader(workdir / 'checkpoints')
  with run_directory.hold(to):
    chosen, newest, state = _newest_average(
        lambda: choose(reader.agreed_steps(), last=last, steps=steps, workdir=workdir), reader, parts,
        lambda meta: provenance.check(meta, config, said=source, overridden=overridden), tries=5 if last else 1)
    target = checkpoint.Checkpointer(to / 'checkpoints', keep=checkpoint.Keep(1))
    about = {name: value for name, value in newest.about.items() if name not in OF_SAVING}
    target.save(state, {
        **about, 'averaged_steps': chosen, provenance.SETTINGS: provenance.settings(config)}, {})
    target.wait()
    target.close()
    resume.write_config(to, config)
  if jax.process_index() == 0:
    print(f'The average of {len(chosen)} checkpoints (steps {", ".join(map(str, chosen))}) is in {to}. Evaluate it '
          f'with vit-jax evaluate --workdir={to}', flush=True)
  return 0


def choose(saved: list[int], *, last: int | None, steps: Sequence[int] | None, workdir: storage.Path) -> list[int]:
  """Returns the steps to average, oldest first.

  Raises:
    UserError: not exactly one of `last` and `steps` is given, or there are no such checkpoints.
  """
  shown = f'{workdir} has checkpoints of steps {", ".join(map(str, saved)) or "none"}.'
  if (last is None) == (steps is None):
    raise UserError(f'--last: expected either --last or --steps, got {"none" if last is None else "both"}. {shown}')
  if last is not None:
    if not 2 <= last <= len(saved):
      raise UserError(f'--last: expected 2 to {len(saved)}, got {last}. {shown} checkpoints.keep_latest and keep_every '
                      'set how many are kept.')
    return saved[-last:]
  chosen = sorted(set(steps or ()))
  if len(chosen) < 2 or not set(chosen) <= set(saved):
    raise UserError(f'--steps: expected at least two of the checkpoints, got {",".join(map(str, chosen))}. {shown}')
  return chosen


def _newest_average(find: Callable[[], list[int]], reader: checkpoint_reader.Reader, parts: build.Parts,
                    compare: Callable[[Mapping[str, Any]], None], *,
                    tries: int) -> tuple[list[int], checkpoint_reader.Restored, TrainState]:
  """Returns steps, the newest checkpoint of them, and its state with the average of all.

  Chooses again if the run, which may be training, removes one of them.
  """
  program = parts.program
  steps = find()
  mean: Any = None
  try:
    for count, step in enumerate(steps, 1):
      restored = reader.read(step, program.placed_state)
      compare(restored.about)
      now = restored.state.params, restored.state.extra
      mean = now if mean is None else _mix(mean, now, jnp.asarray(1. / count))
      log.info('Read step %s.', f'{step:,}')
  except checkpoint_reader.Removed as error:
    if tries == 1:
      raise
    log.info('%s The newest checkpoints are chosen again.', error)
    return _newest_average(find, reader, parts, compare, tries=tries - 1)
  return steps, restored, restored.state._replace(params=mean[0], extra=mean[1])


@jax.jit
def _mix(mean: PyTree, new: PyTree, weight: jax.Array) -> PyTree:
  """Returns `mean + weight * (new - mean)` of floating leaves in f32; other leaves are those of `new`."""
  def mix(a: jax.Array, b: jax.Array) -> jax.Array:
    if not jnp.issubdtype(b.dtype, jnp.floating):
      return b
    a32, b32 = a.astype(jnp.float32), b.astype(jnp.float32)
    return (a32 + weight * (b32 - a32)).astype(b.dtype)

  return jax.tree.map(mix, mean, new)
