"""`--job=average`: the mean of several checkpoints of a run, as a run directory of its own that can be evaluated.

Averaging along a run is Polyak's (Izmailov et al. 2018, arXiv 1803.05407, for the newer use). Averaged are the
parameters and every floating array of `extra` (moving averages, teachers, running statistics: these are means of
means, not statistics of the averaged network). Optimiser state, order of data and step are the newest checkpoint's.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.config import check, provenance, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree
from vit_jax.jobs import build, resume
from vit_jax.jobs import runtime as startup
from vit_jax.record import run_directory, storage
from vit_jax.train import checkpoint, checkpoint_reader
from vit_jax.train.state import TrainState
from vit_jax.weights import inherit

log = logging.getLogger('vit_jax.jobs')
OF_SAVING = ('version', 'step', 'digests', 'data_sha256', 'shapes')
"""What `Checkpointer.save` adds to the description it is handed."""


def run(config: schema.Config, workdir: storage.Path, *, to: storage.Path, last: str, steps: str, said: str,
        overridden: Collection[str]) -> int:
  """Averages checkpoints of `workdir` into one of `to`; exit status 0.

  Args:
    config: that of the run.
    workdir: the run directory.
    to: a directory without checkpoints; made if missing.
    last: how many of the newest checkpoints, as text; or '' where `steps` says which.
    steps: their steps, as text with commas.
    said: where the config comes from, for messages.
    overridden: settings that a person has given, which decide over those of the checkpoints.
  """
  check.check(config)
  startup.start()
  if not (workdir / 'checkpoints').is_dir():
    raise UserError(f'{workdir} holds no run: there is no {workdir / "checkpoints"}; want the --workdir of a training '
                    'run')
  if (to / 'checkpoints').exists():
    raise UserError(f'--to={to} holds checkpoints already; want a directory without')
  config = inherit.resolve(config, overridden, workdir).config
  data = build.open_data(config)
  _, _, parts = build.open_run(config, data, workdir=workdir, overridden=overridden)
  config = parts.config
  source = checkpoint_reader.Reader(workdir / 'checkpoints')
  chosen = choose(source.steps(), last=last, steps=steps, workdir=workdir)
  with run_directory.hold(to):
    newest, state = _average(source, chosen, parts, lambda meta: provenance.check(
        meta, config, said=said, overridden=overridden))
    target = checkpoint.Checkpointer(to / 'checkpoints', keep=checkpoint.Keep(1))
    meta = {name: value for name, value in newest.meta.items() if name not in OF_SAVING}
    target.save(chosen[-1], state, data=newest.data, meta={
        **meta, 'averaged_steps': chosen, provenance.SETTINGS: provenance.settings(config)}, metrics={})
    target.wait()
    target.close()
    resume.write_config(to, config)
  if jax.process_index() == 0:
    print(f'The mean of {len(chosen)} checkpoints (steps {", ".join(map(str, chosen))}) is in {to}. To measure it: '
          f'--job=evaluate --workdir={to}', flush=True)
  return 0


def choose(saved: list[int], *, last: str, steps: str, workdir: storage.Path) -> list[int]:
  """The steps to average, oldest first.

  Raises:
    UserError: if not exactly one of `last` and `steps` is given, or it cannot be had.
  """
  shown = ', '.join(map(str, saved)) or 'none'
  if bool(last) == bool(steps):
    raise UserError(f'--job=average wants either --last=N or --steps=A,B,…; {workdir} has checkpoints of steps {shown}')
  text = last or steps
  if not all(word.strip().isdigit() for word in text.split(',')) or (last and ',' in last):
    raise UserError(f'{"--last" if last else "--steps"}={text}: want {"a number" if last else "steps with commas"}')
  wanted = sorted({int(word) for word in text.split(',')})
  if last and not 2 <= wanted[0] <= len(saved):
    raise UserError(f'--last={last}: want at least 2 and at most {len(saved)}: {workdir} has checkpoints of steps '
                    f'{shown} (checkpoints.keep_latest and keep_every say how many stay)')
  chosen = saved[-wanted[0]:] if last else wanted
  missing = [step for step in chosen if step not in saved]
  if missing or len(chosen) < 2:
    raise UserError(f'--steps={steps}: want at least two of the checkpoints in {workdir}, which are of steps {shown}')
  return chosen


def _average(source: checkpoint_reader.Reader, steps: list[int], parts: build.Parts,
             compare: Callable[[Mapping[str, Any]], None]) -> tuple[checkpoint_reader.Restored, TrainState]:
  """The newest checkpoint, and its state with the mean of all of them."""
  program = parts.program
  mean: PyTree = None
  for count, step in enumerate(steps, 1):
    restored = source.read(step, program.abstract_state, program.shardings)
    compare(restored.meta)
    now = restored.state.params, restored.state.extra
    mean = now if mean is None else _mix(mean, now, jnp.asarray(1. / count))
    log.info('Read step %s.', f'{step:,}')
  return restored, restored.state._replace(params=mean[0], extra=mean[1])


@jax.jit
def _mix(mean: PyTree, new: PyTree, weight: jax.Array) -> PyTree:
  """`mean + weight * (new - mean)` of floating leaves in f32; other leaves are the new ones."""
  def mix(a: jax.Array, b: jax.Array) -> jax.Array:
    if not jnp.issubdtype(b.dtype, jnp.floating):
      return b
    a32, b32 = a.astype(jnp.float32), b.astype(jnp.float32)
    return (a32 + weight * (b32 - a32)).astype(b.dtype)

  return jax.tree.map(mix, mean, new)
