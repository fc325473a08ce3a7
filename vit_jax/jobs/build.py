"""Builds the objects of a run from its config.

All jobs use these functions, so training, planning and evaluation cannot differ. A run calls `open_data`,
`with_statistics`, `open_run`, `train_loader` and `resources`, in this order. `open_run` calls `parts` for the mesh of
this process. `plan` and `check` call `parts` alone: it builds the same objects for any mesh, without its devices.
"""
from __future__ import annotations

import dataclasses
import functools
import logging
import math
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from vit_jax.config import durations, elastic, json_files, layout, schema
from vit_jax.config.schema.data import RGB
from vit_jax.core import implementation, traced_costs, trees
from vit_jax.core.contracts import Backbone, Objective, Prepare, Viewed
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Batch, NativeImages, Params, PyTree, Schedule, Shard
from vit_jax.data import loader as loaders
from vit_jax.data import opening, orientation
from vit_jax.data.device.prepare import prepare_train
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Source, origins, title
from vit_jax.evaluate.resources import Encoder, Resources
from vit_jax.models import backbones, cost, probe
from vit_jax.models.kernels import devices
from vit_jax.objectives import adapters, ema, kinds
from vit_jax.optim import freezing, optimizers, schedules
from vit_jax.optim.optimizers import Optimizer
from vit_jax.parallel import mesh as meshes
from vit_jax.record import console, storage
from vit_jax.train import step as steps

if TYPE_CHECKING:  # few runs have labels of a teacher, or begin with loaded weights
  from vit_jax.data.formats.pseudo import PseudoLabeled
  from vit_jax.weights.network import Weights

SIZE_TOLERANCE = .01
"""Relative difference that is allowed between the size of a dataset and `data.num_examples`."""

log = logging.getLogger('vit_jax.jobs')


class Data(NamedTuple):
  """The sources of a run, their classes, and whether the loader decodes all training images once, into memory."""
  train: Source
  eval: Source
  class_names: tuple[str, ...]
  in_memory: bool


class Numbers(NamedTuple):
  """What `parts` needs of the data: examples per epoch, classes of the head, and `Data.in_memory`."""
  num_examples: int
  num_classes: int
  in_memory: bool


class Parts(NamedTuple):
  """All objects of a run except for its data and its state; `prepare` is the part of the input that runs on devices."""
  config: schema.Config
  mesh: Mesh
  lengths: durations.Lengths
  num_classes: int
  backbone: Backbone
  objective: Objective
  schedule: Schedule
  optimizer: Optimizer
  prepare: Prepare
  program: steps.Program


def open_data(config: schema.Config, *, order: Sequence[str] = (), learns: bool = True) -> Data:
  """Opens the sources of a config.

  Args:
    config: the config of the run.
    order: the classes of a run that resumes, whose order stays; () = a new run.
    learns: whether the objective is trained on them.

  Raises:
    UserError: the data cannot be opened, or `learns` and the objective cannot learn their classes.
  """
  console.begin_stage('opening the data')
  sources = opening.open_sources(config.data, image_px=config.image_px, order=order)
  if config.objective.has_head and learns:
    opening.check_learnable(sources.train, what=type(config.objective).__name__)
  in_memory = not config.objective.on_host and loaders.fits_in_memory(
      sources.train, recipe=config.data.recipe, image_px=config.image_px, choice=config.data.in_memory)
  return Data(sources.train, sources.eval, sources.class_names, in_memory)


def with_statistics(config: schema.Config, source: Source) -> schema.Config:
  """Returns the config with what follows from its images: `with_orientation`, and mean and standard deviation of the
  channels, if they are not RGB.

  Raises:
    UserError: neither the config nor the source has them.
  """
  config = with_orientation(config, source)
  num = config.data.channels
  if num == RGB or not config.data.recipe.is_unmeasured:
    return config
  is_mixture = config.data.source.startswith('mix:')  # each of its sources has statistics of its own
  statistics = None if is_mixture else getattr(origins(source)[0], 'statistics', None)
  if statistics is None:
    raise UserError(f'data.recipe.mean: expected mean and std of {num} channels, got none in the config and in '
                    f'{title(source)}. Prepare the images, which measures them (vit-jax prepare --channels={num}), or '
                    'set both.')
  normalized: schema.Config = schema.replaced(
      config, {'data.recipe.mean': tuple(statistics.mean), 'data.recipe.std': tuple(statistics.std)})
  return normalized


def with_orientation(config: schema.Config, source: Source) -> schema.Config:
  """Returns the config with `data.recipe.exif_orientation`, if it is `auto`, decided by a source of images."""
  decided: schema.Config = schema.replaced(config, {'data.recipe': orientation.decide(config.data.recipe, source)})
  return decided


def open_mesh(config: schema.Config) -> tuple[Mesh, Shard]:
  """Returns the mesh over all devices, and this process's share of each batch."""
  mesh = meshes.make(config.mesh)
  return mesh, meshes.local_rows(mesh)


def open_run(config: schema.Config, data: Data, *, workdir: storage.Path | None = None,
             overridden: Collection[str] = ()) -> tuple[Mesh, Shard, Parts]:
  """Chooses the layout of a run on the devices, logs it, and builds the run; `Parts.config` has no auto settings.

  The layout (mesh, microbatches, rematerialization, kernels) is chosen for the hardware of the run's first start. If
  this start has another number of slices, it is then fitted to them, so that batches and their order stay.

  Args:
    config: a config that `config.check` accepts.
    data: the data of the run.
    workdir: the run directory; a run that was saved on the same hardware keeps its layout.
    overridden: names of the settings on the command line, which are not changed.
  """
  console.begin_stage('building the network')
  hardware = meshes.find_hardware(config.mesh.slices)
  numbers = Numbers(config.data.num_examples or len(data.train), len(data.class_names), data.in_memory)
  saved = saved_config(workdir)
  first = elastic.first_hardware(config, saved, hardware)
  if saved and saved.mesh.chosen_for not in ('', str(first)):
    log.info('The run was laid out for %s before; it is laid out anew for %s.', saved.mesh.chosen_for, first)
  config = layout.reopen(config, first, overridden)
  config = layout.keep(config, saved, first) if saved else config
  chosen = lay_out(config, first, numbers)
  level = logging.DEBUG if hardware.platform == 'cpu' else logging.INFO
  log.log(level if chosen.fits else logging.WARNING, '%s', chosen.text)
  config = elastic.fit(chosen.config, first, hardware)
  if hardware.slices != first.slices:
    log.info('This start runs on %s. The batches, their order and the memory that a device needs stay; masks of '
             'dropout and other random numbers of the network differ.',
             elastic.text(**elastic.describe(config, hardware.slices)))
  mesh, shard = open_mesh(config)
  return mesh, shard, parts(config, mesh=mesh, **numbers._asdict())


def saved_config(workdir: storage.Path | None) -> schema.Config | None:
  """Returns the config saved with the run in `workdir`; None for a new run, or if that file is damaged."""
  if workdir is None or not (workdir / 'config.json').is_file():
    return None
  try:
    with storage.local(workdir / 'config.json') as path:
      return json_files.read(path)
  except UserError:
    return None


def lay_out(config: schema.Config, hardware: layout.Hardware, numbers: Numbers) -> layout.Layout:
  """Returns the layout of a run on any hardware; memory is estimated from shapes, without using its devices."""
  if not layout.auto(config) or hardware.platform == 'cpu' or not hardware.memory_gib:
    return layout.choose(config, hardware, None)
  on_one_device = layout.plain(dataclasses.replace(config, mesh=schema.Mesh(1, 1, 1)))
  mesh = AbstractMesh((1, 1, 1), meshes.AXES, axis_types=(AxisType.Auto,) * 3)
  run = parts(on_one_device, mesh=mesh, **numbers._asdict())  # type: ignore[arg-type]
  state = run.program.abstract_state
  image_bytes = 2 * 4 * math.prod(config.image_px) * config.data.channels  # as it arrives and as it is prepared, f32

  @functools.cache
  def activation_bytes(remat: schema.Remat) -> int:
    return kept_bytes(run, dataclasses.replace(config.model, remat=remat)) + image_bytes

  return layout.choose(config, hardware, layout.Sizes(
      trees.num_bytes((state.params, state.opt, state.extra)), trees.num_bytes(state.params),
      lambda model: activation_bytes(model.remat)))


def train_loader(config: schema.Config, data: Data, shard: Shard) -> loaders.TrainLoader:
  """Returns the loader of training batches.

  Raises:
    UserError: the size of the dataset differs from the config.
  """
  settings, objective = config.data, kinds.of(config)
  check_size(settings, data.train)
  console.begin_stage('preparing the training data')
  answers = None  # of a teacher, beside the labels
  if maps := objective.open_maps(data.train):
    answers = maps.extra()
  elif settings.pseudo.source:
    answers = cast('PseudoLabeled', data.train).extra()
  return loaders.train_loader(
      data.train, recipe=settings.recipe, image_px=config.image_px, batch_size=config.batch_size, seed=config.seed,
      shard=shard, workers=settings.workers, threads=settings.threads, in_memory=data.in_memory,
      max_bad_images=settings.max_bad_images, decode=settings.decode, max_labels=settings.max_labels, extra=answers,
      texts=objective.open_texts(data.train))


def check_size(data: schema.Data, train: Source) -> None:
  """Checks the size of the dataset against `data.num_examples`, which defines the length of an epoch.

  Raises:
    UserError: the size differs by more than `SIZE_TOLERANCE`, and no setting allows it.
  """
  wanted = data.num_examples
  size = cast('PseudoLabeled', train).num_labeled if data.pseudo.source else len(train)  # without images of a teacher
  if not wanted or wanted == size or data.source == 'synthetic':
    return
  if abs(size - wanted) <= SIZE_TOLERANCE * wanted or data.any_num_examples:
    log.warning('data.num_examples=%s, by which epochs are counted, but %s has %s examples.', f'{wanted:,}',
                title(train), f'{size:,}')
    return
  raise UserError(
      f'data.num_examples: expected {size:,}, the size of {data.train_split} of {data.source}, got {wanted:,}. Epochs '
      'are counted by this number. Set --config.data.num_examples=0 to count by the dataset, or '
      '--config.data.any_num_examples=true to keep the schedule of the larger or smaller dataset.')


def resources(config: schema.Config, data: Data, objective: Viewed, *, mesh: Mesh, shard: Shard,
              workdir: storage.Path | None = None, bar: bool = False, weights: Weights | None = None,
              embedded: Sequence[pathlib.Path] = ()) -> Resources:
  """Returns what the evaluators share: sources, loaders, and features of the same weights.

  Args:
    config, data: the config, checked, and the data of the run.
    objective: the objective or the network whose views are evaluated.
    mesh: the devices that hold the parameters.
    shard: the rows of each batch that this process feeds.
    workdir: the directory in whose folder `features` features are stored if it is local; otherwise they stay in memory.
    bar: whether progress may be shown as a bar.
    weights: the weights that are evaluated instead of those of a run; evaluations with texts look there for a text
      tower.
    embedded: files of features, see `evaluate.features.Store`.
  """
  def find_encoder(name: str, settings: schema.TextEvaluation) -> Encoder:
    from vit_jax.jobs import text_towers  # only here: few runs read a text tower
    return text_towers.find(config, weights, name, settings, mesh=mesh)

  views = objective.views()
  folder = pathlib.Path(workdir) / 'features' if workdir is not None and storage.is_local(workdir) else None
  return Resources(config, data, views=views, backbone=backbones.build(config.model, config.image_px), mesh=mesh,
                   shard=shard, folder=folder, embedded=embedded, bar=bar, encoder=find_encoder)


def parts(config: schema.Config, *, mesh: Mesh, num_examples: int, num_classes: int,
          in_memory: bool) -> Parts:
  """Builds a run on a mesh, without allocating memory on devices.

  Args:
    config: a config that `config.check` accepts.
    mesh: the mesh, of real devices or of a topology to plan for.
    num_examples: examples per epoch.
    num_classes: classes of the head.
    in_memory: the images are in memory and have one size; crops and flips are done on the device.
  """
  num_channels = config.data.channels
  if num_channels != config.data.recipe.channels:  # of a plan, which opens no data and has no statistics
    config = schema.replaced(config, {
        'data.recipe.mean': (0.,) * num_channels, 'data.recipe.std': (1.,) * num_channels})
  meshes.check_batch(mesh, config.batch_size, config.microbatches, what='batch_size')
  spec = kinds.of(config)
  for name, model in spec.models().items():
    devices.check_devices(model, mesh, name=name)
  lengths = durations.lengths(config.length, num_examples=num_examples, batch_size=config.batch_size)
  backbone = build_backbone(config)
  task = build_objective(config, backbone, num_classes, lengths=lengths)
  schedule = build_schedule(config, lengths)
  optimizer = optimizers.build(config.optimizer, schedule, lengths=lengths)
  if (settings := config.train.sam).rho:
    from vit_jax.objectives import sam
    peak = schedules.peak_rate(config.optimizer, batch_size=config.batch_size)
    rho_end = settings.rho if settings.rho_end < 0 else settings.rho_end
    task = sam.Sam(task, alpha=settings.alpha, rho=sam.follow_rate(
        schedule, peak=peak, end=config.optimizer.schedule.end_lr, rho=settings.rho, rho_end=rho_end))
  prepare = prepare_train(config.data.recipe, num_classes=num_classes, on_device_geometry=in_memory,
                          soft_labels=bool(config.data.pseudo.source), targets=spec.targets())
  program = steps.build(
      task, optimizer, prepare, mesh=mesh, batch=abstract_batch(config), seed=config.seed,
      accumulate=config.microbatches)
  return Parts(config, mesh, lengths, num_classes, backbone, task, schedule, optimizer, prepare, program)


def build_backbone(config: schema.Config) -> Backbone:
  """Returns the network under the head; it is frozen for a linear probe."""
  return probe.around(backbones.build(config.model, config.image_px), config.head)


def build_objective(config: schema.Config, backbone: Backbone, num_classes: int, *,
                    lengths: durations.Lengths) -> Objective:
  """Returns the objective of a config, with adapters and with an average of the parameters if configured."""
  objective = adapters.around(kinds.of(config).build(backbone, num_classes, lengths=lengths), config.lora)
  if config.optimizer.average:
    law = implementation.load(config.optimizer.average)(config.optimizer, build_schedule(config, lengths))
    return ema.Ema(objective, law)
  if config.train.ema:
    return ema.Ema(objective, ema.Growing(config.train.ema, config.train.ema_warmup))
  return objective


def build_schedule(config: schema.Config, lengths: durations.Lengths) -> Schedule:
  """Returns the learning rate of a config by step."""
  peak = schedules.peak_rate(config.optimizer, batch_size=config.batch_size)
  return schedules.build(config.optimizer.schedule, peak=peak, lengths=lengths)


def keeps_random_network(parts: Parts) -> bool:
  """Returns whether the network begins at random, and rules of the optimizer freeze all of it for the whole run."""
  frozen_for = freezing.until(parts.config.optimizer.rules, parts.lengths.steps)
  names = [name for name in trees.flatten(parts.program.abstract_state.params) if name.startswith('backbone/')]
  return bool(names) and not parts.config.init_from and all(
      frozen_for(name) >= parts.lengths.total_steps for name in names)


def abstract_batch(config: schema.Config) -> Batch:
  """Returns the shapes of a global training batch, as yielded by the loader; if they vary, the largest."""
  def array(dtype: type, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((config.batch_size, *shape), dtype)

  recipe = config.data.recipe
  shapes = transforms.train_shapes(recipe, config.image_px, max_labels=config.data.max_labels,
                                   num_tokens=max(recipe.native_lengths, default=0))
  if config.data.pseudo.source:
    top = config.data.pseudo.top
    shapes |= {'token_labels': ((1, top), np.int32), 'token_scores': ((1, top), np.float32)}
  shapes |= kinds.of(config).batch_shapes()
  batch = {name: array(dtype, *shape) for name, (shape, dtype) in shapes.items()}
  return batch | {'index': array(jnp.int32), 'bad': array(jnp.bool_)}


def train_flops(parts: Parts) -> float:
  """Returns the FLOPs of one image in one training step: all networks on all their inputs, forward and backward.

  The gradient by the image counts too, so that a classifier costs three times its forward pass, as the papers count.
  What is computed again under remat is not counted. SAM doubles the FLOPs. For images at their own aspect it is the
  mean over the numbers of tokens, whose padding counts too.
  """
  by_length = [_train_flops(cost.ByText((parts, length), repr((parts.config, parts.num_classes, length))))
           for length in parts.config.data.recipe.native_lengths or (0,)]
  return sum(by_length) / len(by_length)


@functools.lru_cache(16)  # each key keeps a run's objects alive
def _train_flops(key: cost.ByText) -> float:
  parts, length = key.value
  config = parts.config

  def gradient(params: Params, images: Batch, others: Batch) -> PyTree:
    loss = _abstract_loss(parts, cost.plain(config))
    return jax.grad(lambda params, images: loss(params, images | others), argnums=(0, 1),
                    allow_int=True)(params, images)  # grids are integers

  batch = dict(parts.program.prepared)
  if length:  # images at their own aspect, in batches of so many tokens
    patches, grid = batch['image']
    shorter = jax.ShapeDtypeStruct((patches.shape[0], length, patches.shape[2]), patches.dtype)
    batch['image'] = NativeImages(shorter, grid)  # type: ignore[arg-type]
  images = {name: shape for name, shape in batch.items() if isinstance(shape, NativeImages) or (
      shape.ndim > 3 and jnp.issubdtype(shape.dtype, jnp.floating))}
  others = {name: shape for name, shape in batch.items() if name not in images}
  flops = traced_costs.flops(gradient, parts.program.abstract_state.params, images, others)
  return sum(flops.values()) / config.batch_size * (2 if config.train.sam.rho else 1)


def kept_bytes(parts: Parts, model: schema.Model) -> int:
  """Returns the bytes that one image keeps for the backward pass.

  `model` is the network of `parts`, or the same with another `remat`, which decides what is kept.
  """
  return _kept_bytes(cost.ByText((parts, model), repr((parts.config, parts.num_classes, model))))


@functools.lru_cache(16)  # each key keeps a run's objects alive
def _kept_bytes(key: cost.ByText) -> int:
  parts, model = key.value
  config = layout.put(dataclasses.replace(parts.config, model=model), {
      'model.execution': schema.Execution.SCAN, 'model.attention.kernel': schema.AttentionKernel.XLA,
      'model.mlp.kernel': schema.MlpKernel.XLA})
  loss = _abstract_loss(parts, config)
  least = config.objective.least_rows

  def batch_bytes(num_images: int) -> int:
    batch = jax.tree.map(lambda shape: jax.ShapeDtypeStruct((num_images, *shape.shape[1:]), shape.dtype),
                         parts.program.prepared)
    return traced_costs.kept_bytes(loss, parts.program.abstract_state.params, batch)

  return (batch_bytes(2 * least) - batch_bytes(least)) // least  # without what does not depend on the images


def _abstract_loss(parts: Parts, config: schema.Config) -> Callable[[Params, Batch], Array]:
  """Returns the loss of a prepared batch as a function of parameters, for a run like `parts` with another config."""
  objective = build_objective(config, build_backbone(config), parts.num_classes, lengths=parts.lengths)
  extra = parts.program.abstract_state.extra

  def loss(params: Params, batch: Batch) -> Array:
    filled = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), extra)
    return objective.loss(params, filled, batch, jax.random.key(0), jnp.zeros((), jnp.int32)).loss.sum

  return loss
