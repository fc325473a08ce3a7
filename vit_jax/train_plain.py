"""A whole training run in one file, to be read from top to bottom: `python -m vit_jax.train_plain digits runs/plain`.

The run does what `vit-jax train` does on one device. A test checks that both train the same parameters, to the last
bit. `vit-jax train` adds several devices and hosts, microbatches, other evaluations, pretrained weights, records and
reports, pauses, and checks before it resumes a run.
"""
from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from vit_jax.config import durations, files, schema
from vit_jax.core import numerics, trees
from vit_jax.core.contracts import Objective, Prepare, View
from vit_jax.core.types import Array, Batch, Key, LossOut, Params, PyTree, Shard
from vit_jax.data import loader as loaders
from vit_jax.data import opening
from vit_jax.data.device.prepare import prepare_eval, prepare_train
from vit_jax.data.source import Source
from vit_jax.jobs import build, startup
from vit_jax.optim import optimizers
from vit_jax.train.state import TrainState

ALL_ROWS = Shard(parts=(0,), count=1)  # This process is the only one, so that it loads all rows of each batch.


def main(config_name: str, workdir: pathlib.Path) -> dict[str, float | str]:
  """Trains and evaluates the network of a config. Returns the results, and writes them to `WORKDIR/plain.json`."""
  # Config: a Python file of typed settings, such as configs/digits.py. The list is for overrides of settings.
  config = files.load(config_name, [])
  startup.start(config.train)  # sets the threads and the CPU instructions of XLA, which decide the last bits

  # Data: a source reads stored images by their index. The loader decodes, crops and batches them. A batch depends on
  # the seed and on the step alone, so that a run can resume at any step.
  data = config.data
  sources = opening.open_sources(data, image_px=config.image_px)
  in_memory = loaders.fits_in_memory(sources.train, recipe=data.recipe, image_px=config.image_px, choice=data.in_memory)
  loader = loaders.train_loader(
      sources.train, recipe=data.recipe, image_px=config.image_px, batch_size=config.batch_size, seed=config.seed,
      shard=ALL_ROWS, workers=data.workers, threads=data.threads, in_memory=in_memory,
      max_bad_images=data.max_bad_images)
  num_classes = len(sources.class_names)
  # The train step calls `prepare`. It normalizes and mixes images, and augments images that are held in memory.
  prepare = prepare_train(data.recipe, num_classes=num_classes, on_device_geometry=in_memory)

  # Network and objective. An objective has parameters, a loss, `extra`, and views. `extra` holds the arrays that are
  # not trained by gradients, such as the EMA of the parameters. A view is a network to evaluate: `student` or `ema`.
  lengths = durations.lengths(config.length, num_examples=len(sources.train), batch_size=config.batch_size)
  objective = build.build_objective(config, build.build_backbone(config), num_classes, lengths=lengths)

  # Optimizer. Its schedule is a function from the step to the learning rate.
  optimizer = optimizers.build(config.optimizer, build.build_schedule(config, lengths), lengths=lengths)

  # State: new parameters, which the last checkpoint replaces if there is one.
  training = Training(objective, optimizer, prepare, config.seed)
  checkpoints = ocp.CheckpointManager(workdir.absolute() / 'plain')
  start_step = checkpoints.latest_step() or 0
  state = jax.jit(training.init)(next(loader.batches(0)))
  if start_step:
    state = checkpoints.restore(start_step, args=ocp.args.StandardRestore(state))

  # Loop. The loader yields batches without end. A period of 0 steps stands for the whole run.
  train_step = jax.jit(training.step)
  save_every = lengths.steps(config.checkpoints.every) or lengths.total_steps
  log_every = lengths.steps(config.train.log_every) or lengths.total_steps
  batches = loader.batches(start_step)
  for num_steps in range(start_step + 1, lengths.total_steps + 1):
    state, loss = train_step(state, jax.device_put(next(batches)))
    if num_steps % log_every == 0:
      print(f'step {num_steps:,}/{lengths.total_steps:,}  loss {float(loss):.4f}', flush=True)
    if num_steps % save_every == 0:
      checkpoints.save(num_steps, args=ocp.args.StandardSave(state))
  loader.close()
  checkpoints.close()

  # Evaluation of each view.
  results: dict[str, float | str] = {'step': int(state.step), 'params_digest': trees.digest(state.params)}
  for name, view in objective.views().items():
    results[f'top1@{name}'] = top1(view, state, config, sources.eval)
  (workdir / 'plain.json').write_text(json.dumps(results, indent=2))
  return results


@dataclasses.dataclass(frozen=True)
class Training:
  """The pure functions of a training run, for jax to compile: `init` makes the first state, and `step` the next one."""
  objective: Objective
  optimizer: optimizers.Optimizer
  prepare: Prepare
  seed: int

  def init(self, batch: Batch) -> TrainState:
    """Returns the state of step 0. Of the batch, only the shapes are used."""
    step = jnp.zeros((), jnp.int32)
    prepared, _ = self.prepare_batch(batch, step)
    keys = numerics.split_key(jax.random.key(self.seed), 'init', 'prepare')  # two, as in `vit-jax train`
    params, extra = self.objective.init(keys['init'], jax.tree.map(jnp.zeros_like, prepared))
    return TrainState(step, params, self.optimizer.init(params), extra)

  def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Array]:
    """Returns the state after one update of the parameters, and the mean loss of the batch before the update."""
    prepared, key = self.prepare_batch(batch, state.step)

    def mean_loss(params: Params) -> tuple[Array, LossOut]:
      out = self.objective.loss(params, state.extra, prepared, key, state.step)
      return out.loss.value, out

    grads, out = jax.grad(mean_loss, has_aux=True)(state.params)
    squares = [jnp.square(grad).sum() for grad in trees.flatten(grads).values()]
    grad_norm = jnp.sqrt(sum(squares, jnp.zeros(())))
    context = {'step': state.step, 'grad_norm': grad_norm, 'ok': jnp.asarray(True)}  # ok: the gradient is finite
    updates, opt = self.optimizer.update(grads, state.opt, state.params, **context)
    params = jax.tree.map(jnp.add, state.params, updates)
    extra = self.objective.after_update(params, state.extra, out.stats, state.step)
    return TrainState(state.step + 1, params, opt, extra), out.loss.value

  def prepare_batch(self, batch: Batch, step: Array) -> tuple[Batch, Key]:
    """Returns the normalized and augmented batch, and the key of the loss. Keys follow from the seed and the step."""
    keys = numerics.split_key(jax.random.fold_in(jax.random.key(self.seed), step), 'prepare', 'loss')
    return self.prepare(batch, keys['prepare'], step), keys['loss']


def top1(view: View, state: TrainState, config: schema.Config, source: Source) -> float:
  """Returns the share of the images of a source, 0 to 1, whose label is the class with the largest logit."""
  loader = loaders.eval_loader(
      source, recipe=config.data.recipe, image_px=config.image_px, batch_size=min(config.batch_size, len(source)),
      shard=ALL_ROWS, threads=config.data.threads)
  normalize = prepare_eval(config.data.recipe)

  @jax.jit
  def count_correct(network: PyTree, batch: Batch) -> Array:
    image = normalize(batch, jax.random.key(0), state.step)['image']  # key and step have no effect here
    logits = view.predict(network, image).logits
    assert logits is not None  # an objective without a head has no logits
    return ((logits.argmax(-1) == batch['label']) * batch['mask']).sum()  # padding rows of the last batch have mask 0

  network = view.select(state.params, state.extra)
  num_correct = sum(float(count_correct(network, jax.device_put(batch))) for batch in loader.batches())
  loader.close()
  return num_correct / len(source)


if __name__ == '__main__':
  print(json.dumps(main(sys.argv[1], pathlib.Path(sys.argv[2])), indent=2))
