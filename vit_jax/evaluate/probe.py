"""Linear classifiers trained with SGD or LARS on features, one for each of several learning rates, in parallel.

The examples of a batch depend only on the epoch and the number of the batch, not on the devices. Each epoch has its own
order of the examples, and drops the last incomplete batch.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from vit_jax.config import durations, schema
from vit_jax.core.types import Array, HostArray, PyTree
from vit_jax.evaluate import linear
from vit_jax.evaluate.features import Split, gather
from vit_jax.evaluate.linear import Linear
from vit_jax.evaluate.resources import Make, Resources
from vit_jax.evaluate.results import Measuring
from vit_jax.models.probe import EPS, Statistics, normalize
from vit_jax.optim import optimizers, schedules
from vit_jax.parallel import mesh as meshes

INIT_STDDEV = .01    # of the initial kernel (MAE, DINO)


class Recipe(NamedTuple):
  """The training of a probe: a linear warm-up from zero, then a cosine schedule to zero, no weight decay.

  epochs, warmup_epochs: numbers of epochs.
  batch_size: limited to the number of examples.
  momentum: of SGD.
  trust_coefficient: of LARS; 0 = SGD.
  normalize: BatchNorm of the features, without scale and bias.
  by_epoch: the learning rate changes once an epoch.
  """
  epochs: int
  batch_size: int
  momentum: float
  warmup_epochs: int
  trust_coefficient: float
  normalize: bool
  by_epoch: bool

  def num_steps(self, num_examples: int) -> int:
    """Returns the total number of training steps."""
    return self.epochs * (num_examples // min(self.batch_size, num_examples))


def train(features: Array, label: Array, weight: Array, example: Array, rates: HostArray, recipe: Recipe, *,
          num_classes: int, mesh: Mesh, on_step: Callable[[int], None]) -> Linear:
  """Trains classifiers `kernel [n, D, C], bias [n, C]` for the given features without standardization.

  Args:
    features: `[G, R, D]` f32, split over the mesh.
    label: `[G, R]` i32.
    weight: `[G, R]` f32, 0 for rows to ignore.
    example: `[G, R]` i32, the position in the source.
    rates: peak learning rates `[n]`.
    recipe: all other settings.
    num_classes: C.
    mesh: of the features.
    on_step: called with the number of steps done, after each epoch.
  """
  gathered = gather({'example': example, 'weight': weight}, mesh)
  used = np.flatnonzero(gathered['weight'] > 0)
  # Positions in the flattened `[G * R]`, in the order of the source.
  rows = used[np.argsort(gathered['example'].ravel()[used], kind='stable')].astype(np.int32)
  batch_size = min(recipe.batch_size, len(rows))
  num_batches = len(rows) // batch_size  # of an epoch
  lengths = durations.Lengths(num_examples=len(rows), batch_size=batch_size, total_steps=recipe.num_steps(len(rows)))
  width = features.shape[-1]
  start = {'kernel': INIT_STDDEV * jax.random.normal(jax.random.key(0), (width, num_classes)),
           'bias': jnp.zeros(num_classes)}
  params = jax.tree.map(lambda x: jnp.tile(x[None], (len(rates),) + (1,) * x.ndim), start)
  states = jax.vmap(_optimizer(recipe, lengths).init)(params)
  statistics, number = Statistics(jnp.zeros(width), jnp.ones(width)), jnp.zeros((), jnp.int32)
  # These arrays are on the host, because arrays of one process cannot be combined with global arrays.
  carry = jax.device_get((params, states, statistics, number))
  for epoch in range(recipe.epochs):
    shuffled = np.random.Generator(np.random.Philox(key=epoch)).permutation(rows)
    batches = shuffled[:num_batches * batch_size].reshape(num_batches, batch_size)
    carry = jax.block_until_ready(_epoch(carry, features, label, batches, rates, recipe, lengths, mesh))
    on_step((epoch + 1) * num_batches)
  params, _, running, _ = carry
  if not recipe.normalize:
    return Linear(params['kernel'], params['bias'])
  # Normalization by the running statistics is a part of the classifier.
  kernel = params['kernel'] / jnp.sqrt(running.variance + EPS)[None, :, None]
  shift = jnp.einsum('d,ndc->nc', running.mean, kernel, precision=jax.lax.Precision.HIGHEST)
  return Linear(kernel, params['bias'] - shift)


def _optimizer(recipe: Recipe, lengths: durations.Lengths) -> optimizers.Optimizer:
  """Returns an optimizer with a peak learning rate of 1; updates are multiplied by each classifier's own rate."""
  settings: schema.Sgd | schema.Lars
  if not recipe.trust_coefficient:
    settings = schema.Sgd(momentum=recipe.momentum, clip_norm=0.)
  else:
    settings = schema.Lars(momentum=recipe.momentum, trust_coefficient=recipe.trust_coefficient,
                           trust_ratio_mask=('kernel',))
  warmup_steps = recipe.warmup_epochs * lengths.total_steps // recipe.epochs
  stairs = f'{lengths.total_steps // recipe.epochs} steps' if recipe.by_epoch else ''
  schedule = schema.Schedule(schema.Decay.COSINE, warmup=f'{warmup_steps} steps', warmup_form=schema.Warmup.FROM_ZERO,
                             stairs=stairs)
  return optimizers.build(settings, schedules.build(schedule, peak=1., lengths=lengths), lengths=lengths)


@functools.partial(jax.jit, static_argnums=(5, 6, 7), donate_argnums=0)
def _epoch(carry: PyTree, features: Array, label: Array, batches: Array, rates: Array,
           recipe: Recipe, lengths: durations.Lengths, mesh: Mesh) -> PyTree:
  """Trains for one epoch on batches `[steps, b]` of rows of the flattened split.

  `carry` has the parameters and the optimizer states of all classifiers, the running statistics of the features, and
  the number of the step.
  """
  optimizer, num_shards = _optimizer(recipe, lengths), mesh.shape['data'] * mesh.shape['fsdp']
  sharding = meshes.replicated(mesh) if batches.shape[1] % num_shards else meshes.batch_sharding(mesh)
  flat_SD, flat_S = features.reshape(-1, features.shape[-1]), label.reshape(-1)

  def loss(params: PyTree, x_BD: Array, true_B: Array) -> Array:
    logits_BC = jnp.dot(x_BD, params['kernel'], precision=jax.lax.Precision.HIGHEST) + params['bias'][None]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits_BC), true_B[:, None], -1).mean()

  def step(carry: PyTree, rows_B: Array) -> tuple[PyTree, None]:
    params, states, statistics, number = carry
    x_BD = jax.lax.with_sharding_constraint(flat_SD[rows_B], sharding)
    if recipe.normalize:
      x_BD, statistics = normalize(x_BD, statistics)
    grads = jax.vmap(jax.grad(loss), in_axes=(0, None, None))(params, x_BD, flat_S[rows_B])

    def update(params: PyTree, grads: PyTree, state: Any, rate: Array) -> tuple[PyTree, Any]:
      updates, state = optimizer.update(grads, state, params, step=number, grad_norm=jnp.zeros(()))
      return jax.tree.map(lambda p, u: p + rate * u, params, updates), state

    params, states = jax.vmap(update)(params, grads, states, rates)
    return (params, states, statistics, number + 1), None

  return jax.lax.scan(step, carry, batches)[0]


def evaluator(train_split: Split, test: Split, *, num_classes: int, recipe: Recipe, rates: Sequence[float],
              holdout: float) -> linear.Evaluator:
  """Returns the evaluator of one view: `top1`, `top5`, the chosen learning rate `lr` and its held-out accuracy.

  Args:
    train_split, test, holdout: see `linear.Evaluator`.
    num_classes: C.
    recipe: training settings.
    rates: peak learning rates to choose from, for the batch size of the recipe.
  """
  def fit(data: linear.Data, rates: Sequence[float]) -> Linear:
    repeats = 2 if len(rates) > 1 else 1  # the best rate is then used with all examples
    with train_split.count('steps', recipe.num_steps(int(data.weight.sum())), repeats=repeats) as progress:
      return train(data.features, data.label, data.weight, data.example, np.asarray(rates, np.float32), recipe,
                   num_classes=num_classes, mesh=train_split.mesh, on_step=progress.update)

  return linear.Evaluator(train_split, test, fit, rates, setting='lr', holdout=holdout, rank=linear.by_accuracy,
                          is_standardized=False)


def build(resources: Resources, name: str, settings: schema.Probe) -> Make:
  """Builds the evaluator for each view."""
  train, test = resources.sources(name)
  size = min(settings.train_batch_size, len(train))
  recipe = Recipe(
      epochs=settings.epochs, batch_size=size, momentum=settings.momentum, warmup_epochs=settings.warmup_epochs,
      trust_coefficient=settings.trust_coefficient, normalize=settings.batch_norm,
      by_epoch=settings.rate_by_epoch)
  base = settings.base_batch_size
  rates = [rate * size / base if base else rate for rate in settings.learning_rates]

  def make(view: str) -> Measuring:
    return evaluator(
        *resources.splits(name, settings, train, test, view),
        num_classes=len(train.class_names), recipe=recipe, rates=rates, holdout=settings.holdout)
  return make
