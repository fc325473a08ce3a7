"""A whole training run in one file, to be read from top to bottom: `python -m vit_jax.train_plain digits runs/plain`.

It does what `vit-jax train` does on one device: config, data, network, objective, step, loop, checkpoint, evaluation.
It ends with the same bits of the parameters, which a test compares. `vit-jax train` adds several devices and hosts,
microbatches, other evaluations, pretrained weights, records and reports, pauses, and checks of what is resumed.
"""
from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from vit_jax.config import durations, files, schema
from vit_jax.core import numerics, trees
from vit_jax.core.contracts import LossOut, Objective, Prepare, View
from vit_jax.core.types import Array, Batch, Params, PyTree, Shard
from vit_jax.data import loader as loaders
from vit_jax.data import opening
from vit_jax.data.device.prepare import prepare_eval, prepare_train
from vit_jax.data.source import Source
from vit_jax.jobs import build, startup
from vit_jax.models import backbones
from vit_jax.optim import optimizers, schedules
from vit_jax.optim.optimizers import Optimizer
from vit_jax.train.state import TrainState

Init = Callable[[Batch], TrainState]
Step = Callable[[TrainState, Batch], tuple[TrainState, Array]]
ALONE = Shard((0,), 1)
"""The rows of a batch that this process loads: all of them."""


def main(name: str, workdir: pathlib.Path) -> dict[str, float | str]:
  """Trains a config, and returns the results, which are also in `WORKDIR/plain.json`."""
  # Config: a Python file of typed settings (config/schema), such as configs/digits.py.
  config = files.load(name, [])
  startup.start(config.train)  # threads and instructions of XLA, on which the last bits depend

  # Data: a source gives stored images by their number. The loader decodes, crops and batches them. Batch n is a
  # function of the seed and n alone, so that a run resumes at any step.
  recipe, px = config.data.recipe, config.image_px
  sources = opening.open_sources(config.data, image_px=px)
  in_memory = loaders.fits_in_memory(sources.train, recipe=recipe, image_px=px, choice=config.data.in_memory)
  loader = loaders.train_loader(
      sources.train, recipe=recipe, image_px=px, batch_size=config.batch_size, seed=config.seed, shard=ALONE,
      workers=config.data.workers, threads=config.data.threads, in_memory=in_memory,
      max_bad_images=config.data.max_bad_images)
  num_classes = len(sources.class_names)
  prepare = prepare_train(recipe, num_classes=num_classes, on_device_geometry=in_memory)  # normalizes, mixes

  # Network, and what it learns. An objective has parameters, `extra` (all that no gradient changes, such as an average
  # of the parameters), a loss, and views: the networks that may be evaluated.
  lengths = durations.lengths(config.length, num_examples=len(sources.train), batch_size=config.batch_size)
  objective = build.build_objective(config, backbones.build(config.model, px), num_classes, lengths=lengths)

  # Optimizer: its learning rate is a function of the step.
  peak = schedules.peak_rate(config.optimizer, batch_size=config.batch_size)
  schedule = schedules.build(config.optimizer.schedule, peak=peak, lengths=lengths)
  optimizer = optimizers.build(config.optimizer, schedule, lengths=lengths)

  # State: a new one, or that of the last checkpoint.
  init, train_step = functions(objective, optimizer, prepare, config.seed)
  checkpoints = ocp.CheckpointManager(workdir.absolute() / 'plain')
  first, start = on_device(next(loader.batches(0))), checkpoints.latest_step() or 0
  state = (checkpoints.restore(start, args=ocp.args.StandardRestore(jax.eval_shape(init, first))) if start else
           jax.jit(init)(first))
  save_every, log_every = (lengths.steps(text) or lengths.total_steps for text in (
      config.checkpoints.every, config.train.log_every))
  for step, batch in enumerate(loader.batches(start), start):
    if step == lengths.total_steps:
      break
    state, loss = train_step(state, on_device(batch))
    if (step + 1) % log_every == 0:
      print(f'step {step + 1:,}/{lengths.total_steps:,}  loss {float(loss):.4f}', flush=True)
    if (step + 1) % save_every == 0:
      checkpoints.save(step + 1, args=ocp.args.StandardSave(state))
  loader.close()
  checkpoints.close()

  # Evaluation, and results.
  results: dict[str, float | str] = {'step': int(state.step), 'params_digest': trees.digest(state.params)}
  for name, view in objective.views().items():
    results[f'top1@{name}'] = top1(view, state, config, sources.eval)
  (workdir / 'plain.json').write_text(json.dumps(results, indent=2))
  return results


def functions(objective: Objective, optimizer: Optimizer, prepare: Prepare, seed: int) -> tuple[Init, Step]:
  """Returns `init(batch) -> state` and the compiled `train_step(state, batch) -> (state, loss)`."""
  def prepared(batch: Batch, step: Array) -> tuple[Batch, Array]:
    """Returns the normalized, augmented batch, and the key of the loss. Keys follow from the seed and the step."""
    keys = numerics.split_key(jax.random.fold_in(jax.random.key(seed), step), 'prepare', 'loss')
    return prepare(batch, keys['prepare'], step), keys['loss']

  def init(batch: Batch) -> TrainState:
    zeros = jax.tree.map(jnp.zeros_like, prepared(batch, jnp.zeros((), jnp.int32))[0])
    params, extra = objective.init(numerics.split_key(jax.random.key(seed), 'init', 'prepare')['init'], zeros)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), extra)

  @jax.jit
  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Array]:
    batch, key = prepared(batch, state.step)

    def mean_loss(params: Params) -> tuple[Array, LossOut]:
      out = objective.loss(params, state.extra, batch, key, state.step)
      return out.loss.value, out

    grads, out = jax.grad(mean_loss, has_aux=True)(state.params)
    grad_norm = jnp.sqrt(sum((jnp.square(g).sum() for g in trees.flatten(grads).values()), jnp.zeros(())))
    context = {'step': state.step, 'grad_norm': grad_norm, 'ok': jnp.asarray(True)}
    updates, opt = optimizer.update(grads, state.opt, state.params, **context)
    params = jax.tree.map(jnp.add, state.params, updates)
    extra = objective.after_update(params, state.extra, out.stats, state.step)
    return TrainState(state.step + 1, params, opt, extra), out.loss.value

  return init, train_step


def top1(view: View, state: TrainState, config: schema.Config, source: Source) -> float:
  """Returns the share of the images of a source whose label is the class with the largest logit."""
  recipe, size = config.data.recipe, min(config.batch_size, len(source))
  loader = loaders.eval_loader(source, recipe=recipe, image_px=config.image_px, batch_size=size, shard=ALONE,
                               threads=config.data.threads)
  prepare, network = prepare_eval(recipe), view.select(state.params, state.extra)

  @jax.jit
  def count_right(network: PyTree, batch: Batch) -> Array:
    image = prepare(batch, jax.random.key(0), state.step)['image']
    logits = view.predict(network, image).logits
    assert logits is not None  # an objective without a head has no classes
    return ((logits.argmax(-1) == batch['label']) * batch['mask']).sum()  # rows that fill the last batch have mask 0

  num_right = sum(float(count_right(network, on_device(batch))) for batch in loader.batches())
  loader.close()
  return num_right / len(source)


def on_device(batch: Batch) -> Batch:
  """Returns a batch on the device, with int64 arrays (`index`) as int32, since jax has no 64 bits by default."""
  return jax.device_put({name: np.asarray(x, np.int32) if x.dtype == np.int64 else x for name, x in batch.items()})


if __name__ == '__main__':
  print(json.dumps(main(sys.argv[1], pathlib.Path(sys.argv[2])), indent=2))
