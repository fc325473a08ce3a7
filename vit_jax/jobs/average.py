"""`--job=average`: averages several checkpoints of a run into a new run directory, which can be evaluated.

Averaging goes back to Polyak and Juditsky (1992); for deep networks see Izmailov et al. 2018 (arXiv 1803.05407). The
parameters and all floating-point arrays of `extra` (EMA, teachers, running statistics) are averaged. An average of
running statistics differs from the statistics of the averaged network. With LoRA, the factors A and B are averaged
separately. The product of the two averages is not the average of the products A B, so the job logs a warning.
Optimizer state, data order and step are those of the newest checkpoint.

`commands.Command.run` calls `run`, in every process. `run` checks the directories and the flags, builds the program of
the run, reads the checkpoints one after the other and averages them (`read_average`), and saves the average as the only
checkpoint of a new run. This module does not know how a network or an objective is built.
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
_MAX_TRIES = 5  # to read the newest checkpoints, since a run that is training may remove one of them meanwhile


class Average(NamedTuple):
  """The steps of the averaged checkpoints, oldest first; the state of the newest checkpoint, with the averages in place
  of `params` and `extra`; and the description of the newest checkpoint."""
  steps: list[int]
  state: TrainState
  about: dict[str, Any]


def run(config: schema.Config, workdir: storage.Path, *, to: storage.Path, last: int | None,
        steps: Sequence[int] | None, source: str, overridden: Collection[str]) -> int:
  """Writes the average of checkpoints of the run `workdir` as the run `to`, and returns the exit status 0.

  Args:
    config, workdir: the config and the directory of the run.
    to: the new run directory, which is created if it does not exist.
    last: the number of newest checkpoints to average; None = `steps` selects the checkpoints.
    steps: the steps of the checkpoints to average; None = `last` selects them.
    source: where the config was read, for messages.
    overridden: names of the settings on the command line, which override those of the checkpoints.

  Raises UserError if `to` has files, or the checkpoints cannot be chosen or read, or have other settings.
  """
  check.check(config)
  startup.start()
  check_is_run(workdir)
  _check_is_free(to)
  reader = checkpoint_reader.Reader(workdir / 'checkpoints')

  def find_steps() -> list[int]:
    return choose_steps(reader.agreed_steps(), last=last, steps=steps, workdir=workdir)

  find_steps()  # reports a wrong flag before the data are opened
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
                           max_tries=_MAX_TRIES if last else 1)  # named steps stay the same
    _write_run(average, to, config=config)
  if jax.process_index() == 0:
    print(f'The average of {len(average.steps)} checkpoints (steps {", ".join(map(str, average.steps))}) is in {to}. '
          f'Evaluate it with vit-jax evaluate --workdir={shlex.quote(str(to))}', flush=True)
  return 0


def _check_is_free(to: storage.Path) -> None:
  """Raises UserError unless `to` is new, or has no checkpoints and no files that a person may want to keep."""
  run_directory.check_ours(to, '--to')
  if (to / 'checkpoints').exists() or os.path.islink(to / 'checkpoints'):
    raise UserError(f'--to: expected a directory without checkpoints, got {to}. Use another one.')
  if storage.is_local(to) and to.exists() and not run_directory.holds_nothing(to):
    raise UserError(f'--to: expected a new or empty directory, got {to}, which has files. Use another one.')


def choose_steps(saved: list[int], *, last: int | None, steps: Sequence[int] | None,
                 workdir: storage.Path) -> list[int]:
  """Returns the steps of `saved` to average, oldest first. Raises UserError if `last` or `steps` cannot select them."""
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
                 check_settings: Callable[[Mapping[str, Any]], None], max_tries: int) -> Average:
  """Returns the average of checkpoints. At most two means and one checkpoint are in memory at a time.

  Args:
    reader: the reader of the checkpoints.
    abstract: the shapes, dtypes and shardings of the state in a checkpoint.
    find_steps: returns the steps to average. It is called again if the run, which may be training, removes one of them.
    check_settings: raises UserError if the description of a checkpoint has other settings than the config.
    max_tries: how often `find_steps` is called at most. A checkpoint that is missing then is a UserError.
  """
  num_tries = 0
  while True:
    num_tries += 1
    steps = find_steps()
    mean: PyTree | None = None
    try:
      for count, step in enumerate(steps, 1):
        state, about = reader.read(step, abstract)
        check_settings(about)
        arrays = {'params': state.params, 'extra': state.extra}
        weight = jnp.asarray(1. / count)  # an array, so that `_add_to_mean` is compiled once
        mean = arrays if mean is None else _add_to_mean(mean, arrays, weight)
        log.info('Read step %s.', f'{step:,}')
        if count < len(steps):
          del state, arrays  # before the next checkpoint is read
    except checkpoint_reader.Removed as error:
      if num_tries == max_tries:
        raise
      log.info('%s The newest checkpoints are chosen again.', error)
    else:
      assert mean is not None  # `choose_steps` returns at least two steps
      return Average(steps, state._replace(**mean), about)


@jax.jit
def _add_to_mean(mean: PyTree, arrays: PyTree, weight: jax.Array) -> PyTree:
  """Returns `mean + weight * (arrays - mean)` for leaves of floats; other leaves are those of `arrays`.

  The sum is computed in f32 and rounded to the dtype of the leaf at every step, which matters for leaves in bf16.
  """
  def add(old: jax.Array, new: jax.Array) -> jax.Array:
    if not jnp.issubdtype(new.dtype, jnp.floating):
      return new
    old_f32, new_f32 = old.astype(jnp.float32), new.astype(jnp.float32)
    return (old_f32 + weight * (new_f32 - old_f32)).astype(new.dtype)

  return jax.tree.map(add, mean, arrays)


def _write_run(average: Average, to: storage.Path, *, config: schema.Config) -> None:
  """Writes the config, then the checkpoint, so that a process that is killed leaves no checkpoint without a config."""
  resume.write_config(to, config)
  checkpointer = checkpoint.Checkpointer(to / 'checkpoints', keep=checkpoint.Keep(1))
  about = {name: value for name, value in average.about.items() if name not in ADDED_BY_SAVE}
  about |= {'averaged_steps': average.steps, provenance.SETTINGS: provenance.settings(config)}
  checkpointer.save(average.state, about, metrics={})  # nothing was measured for the average
  checkpointer.wait()
  checkpointer.close()
