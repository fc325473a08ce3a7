"""`--job=average`: averages several checkpoints of a run into a new run directory, which can be evaluated.

Averaging goes back to Polyak and Juditsky (1992); for deep networks see Izmailov et al. 2018 (arXiv 1803.05407). The
parameters and all floating-point arrays of `extra` (EMA, teachers, running statistics) are averaged; running statistics
are then averages of averages, not statistics of the averaged network. With LoRA, the factors A and B are averaged
separately. This is not the average of the networks, whose kernels contain the product A B, so the job logs a warning.
Optimizer state, data order and step are those of the newest checkpoint.

`commands.Command.run` calls `run`, in every process. It checks the directories and the flags, builds the program of the
run, reads the checkpoints one by one into their average (`read_average`), and saves this as the only checkpoint of a
new run. This module does not know how a network or an objective is built.
"""
from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.config import check, provenance, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import PyTree
from vit_jax.jobs import build, resume, startup
from vit_jax.jobs.evaluate import check_is_run
from vit_jax.record import run_directory, storage
from vit_jax.train import checkpoint, checkpoint_reader
from vit_jax.train.state import TrainState
from vit_jax.weights import inherit

log = logging.getLogger('vit_jax.jobs')
ADDED_BY_SAVE = ('version', 'step', 'digests', 'data_sha256', 'shapes')  # `Checkpointer.save` adds them to `about`
_TRIES = 5  # of choosing the newest checkpoints; a live run removes one of them while they are read


class Average(NamedTuple):
  """The steps of the checkpoints; the state of the newest one with the averages in it; and its description."""
  steps: list[int]
  state: TrainState
  about: dict[str, Any]


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

  Raises:
    UserError: `to` is in use, the checkpoints cannot be chosen or read, or they are of another config.
  """
  check.check(config)
  startup.start()
  check_is_run(workdir)
  _check_is_free(to)
  reader = checkpoint_reader.Reader(workdir / 'checkpoints')

  def find_steps() -> list[int]:
    return choose(reader.agreed_steps(), last=last, steps=steps, workdir=workdir)

  find_steps()  # so that a wrong flag is reported before the data are opened
  config = resume.keep_orientation(inherit.resolve(config, overridden, workdir).config, workdir)
  _, _, parts = build.open_run(config, build.open_data(config), workdir=workdir, overridden=overridden)
  config = parts.config
  if config.lora.rank:
    log.warning('%s: the adapters are averaged, which is not the average of the networks with them.', workdir)

  def check_settings(about: Mapping[str, Any]) -> None:
    provenance.check(about, config, said=source, overridden=overridden)

  # Processes may share the directory; process 0 locks it for all.
  with run_directory.hold(to) if jax.process_index() == 0 else contextlib.nullcontext():
    average = read_average(reader, parts.program.placed_state, find_steps=find_steps, check_settings=check_settings,
                           tries=_TRIES if last else 1)  # named steps cannot be chosen again
    _write_run(average, to, config=config)
  if jax.process_index() == 0:
    print(f'The average of {len(average.steps)} checkpoints (steps {", ".join(map(str, average.steps))}) is in {to}. '
          f'Evaluate it with vit-jax evaluate --workdir={shlex.quote(str(to))}', flush=True)
  return 0


def _check_is_free(to: storage.Path) -> None:
  """Raises UserError unless `to` is new, or has no checkpoints and nothing else that is worth keeping."""
  run_directory.check_ours(to, '--to')
  if (to / 'checkpoints').exists() or os.path.islink(to / 'checkpoints'):
    raise UserError(f'--to: expected a directory without checkpoints, got {to}. Use another one.')
  if storage.is_local(to) and to.exists() and not run_directory.holds_nothing(to):
    raise UserError(f'--to: expected a new or empty directory, got {to}, which has files. Use another one.')


def choose(saved: list[int], *, last: int | None, steps: Sequence[int] | None, workdir: storage.Path) -> list[int]:
  """Returns the steps of `saved` to average, oldest first. Raises UserError if `last` or `steps` cannot be used."""
  available = f'{workdir} has checkpoints of steps {", ".join(map(str, saved)) or "none"}.'
  if (last is None) == (steps is None):
    raise UserError(f'--last: expected either --last or --steps, got {"none" if last is None else "both"}. {available}')
  if len(saved) < 2:
    raise UserError(f'--workdir={workdir}: expected a run with at least two checkpoints, got {len(saved)}. Train '
                    'longer, with checkpoints.every, keep_latest and keep_every so that it keeps several.')
  if last is not None:
    if not 2 <= last <= len(saved):
      raise UserError(f'--last: expected 2 to {len(saved)}, got {last}. {available} checkpoints.keep_latest and '
                      'keep_every set how many are kept.')
    return saved[-last:]
  chosen = sorted(set(steps or ()))
  if len(chosen) < 2 or not set(chosen) <= set(saved):
    raise UserError(f'--steps: expected at least two of the checkpoints, got {",".join(map(str, chosen))}. {available}')
  return chosen


def read_average(reader: checkpoint_reader.Reader, abstract: TrainState, *, find_steps: Callable[[], list[int]],
                 check_settings: Callable[[Mapping[str, Any]], None], tries: int) -> Average:
  """Returns the average of checkpoints. At most the last mean, the next one and one checkpoint are in memory.

  Args:
    reader, abstract: the reader of the checkpoints; the shapes, dtypes and shardings of their state.
    find_steps: returns the steps to average. It is called again if the run, which may be training, removes one of them.
    check_settings: raises UserError if a checkpoint of this description is of another config.
    tries: how often `find_steps` is called, at most.

  Raises:
    UserError: a checkpoint cannot be read, is of another config, or does not exist at the last try.
  """
  while True:
    tries, steps = tries - 1, find_steps()
    mean: PyTree | None = None
    try:
      for count, step in enumerate(steps, 1):
        state, about = reader.read(step, abstract)
        check_settings(about)
        arrays = {'params': state.params, 'extra': state.extra}
        weight = jnp.asarray(1. / count)  # an array, so that one program serves all steps
        mean = arrays if mean is None else _add_to_mean(mean, arrays, weight)
        log.info('Read step %s.', f'{step:,}')
        if count < len(steps):
          del state, arrays  # before the next one is read
    except checkpoint_reader.Removed as error:
      if not tries:
        raise
      log.info('%s The newest checkpoints are chosen again.', error)
    else:
      assert mean is not None  # `choose` returns at least two steps
      return Average(steps, state._replace(**mean), about)


@jax.jit
def _add_to_mean(mean: PyTree, arrays: PyTree, weight: jax.Array) -> PyTree:
  """Returns `mean + weight * (arrays - mean)` of floating leaves; other leaves are those of `arrays`.

  It is computed in f32 and rounded to the dtype of the leaf at every step, which matters for leaves in bf16.
  """
  def add(old: jax.Array, new: jax.Array) -> jax.Array:
    if not jnp.issubdtype(new.dtype, jnp.floating):
      return new
    old_f32, new_f32 = old.astype(jnp.float32), new.astype(jnp.float32)
    return (old_f32 + weight * (new_f32 - old_f32)).astype(new.dtype)

  return jax.tree.map(add, mean, arrays)


def _write_run(average: Average, to: storage.Path, *, config: schema.Config) -> None:
  """Writes the config, and then the checkpoint: a program that is killed leaves none without its config."""
  resume.write_config(to, config)
  checkpointer = checkpoint.Checkpointer(to / 'checkpoints', keep=checkpoint.Keep(1))
  about = {name: value for name, value in average.about.items() if name not in ADDED_BY_SAVE}
  about |= {'averaged_steps': average.steps, provenance.SETTINGS: provenance.settings(config)}
  checkpointer.save(average.state, about, metrics={})  # nothing was measured for the average
  checkpointer.wait()
  checkpointer.close()
