"""Builds the objects of a run from its config.

All jobs use these functions, so training, planning and evaluation cannot differ. A run calls `open_data`,
`with_statistics`, `open_run`, `train_loader` and `resources`, in this order. `open_run` calls `parts` with the mesh of
the devices. `plan` and `check` call `parts` alone, since `parts` builds the same objects for a mesh without devices.
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

from vit_jax.config import durations, engine, schema
from vit_jax.config.schema.data import RGB
from vit_jax.core import implementation, traced_costs, trees
from vit_jax.core.contracts import Backbone, Objective, Prepare, Viewed
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Batch, NativeImages, Params, Schedule, Shard
from vit_jax.data import loader as loaders
from vit_jax.data import opening, orientation
from vit_jax.data.device.prepare import prepare_train
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Source, origins, title
from vit_jax.evaluate.resources import Encoder, Resources
from vit_jax.models import backbones, cost, probe
from vit_jax.models.kernels import forms
from vit_jax.objectives import adapters, ema, kinds
from vit_jax.optim import optimizers, rules, schedules
from vit_jax.optim.optimizers import Optimizer
from vit_jax.parallel import elastic, layout
from vit_jax.parallel import mesh as meshes
from vit_jax.record import console, storage
from vit_jax.train import step as steps

if TYPE_CHECKING:  # few runs have labels of a teacher, or begin with loaded weights
  from vit_jax.data.formats.pseudo import PseudoLabeled
  from vit_jax.weights.network import Weights

SIZE_TOLERANCE = .01
"""The largest relative difference between the size of a dataset and `data.num_examples`."""

log = logging.getLogger('vit_jax.jobs')


class Data(NamedTuple):
  """The sources of a run, the names of the classes, and whether the loader holds all decoded images in memory."""
  train: Source
  eval: Source
  class_names: tuple[str, ...]
  in_memory: bool


class Numbers(NamedTuple):
  """What `parts` must know about the data: the examples of an epoch, the classes of the head, and `Data.in_memory`."""
  num_examples: int
  num_classes: int
  in_memory: bool


class Parts(NamedTuple):
  """All objects of a run except for data and state. `prepare` normalizes and augments batches on the devices."""
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
    learns: whether the run is trained on the data, whose classes must then be learnable.

  Raises UserError if the data cannot be opened, or the classes cannot be learned.
  """
  console.begin_stage('opening the data')
  sources = opening.open_sources(config.data, image_px=config.image_px, order=order)
  if config.objective.has_head and learns:
    opening.check_learnable(sources.train, learner=type(config.objective).__name__)
  in_memory = not config.objective.on_host and loaders.fits_in_memory(
      sources.train, recipe=config.data.recipe, image_px=config.image_px, choice=config.data.in_memory)
  return Data(sources.train, sources.eval, sources.class_names, in_memory)


def with_statistics(config: schema.Config, source: Source) -> schema.Config:
  """Returns the config after `with_orientation`, with mean and standard deviation of channels other than RGB.

  Raises UserError if neither the config nor the source has the mean and standard deviation.
  """
  config = with_orientation(config, source)
  num_channels = config.data.channels
  if num_channels == RGB or not config.data.recipe.is_unmeasured:
    return config
  is_mixture = config.data.source.startswith('mix:')  # a mixture has several statistics, one of each source
  statistics = None if is_mixture else getattr(origins(source)[0], 'statistics', None)
  if statistics is None:
    raise UserError(f'data.recipe.mean: expected mean and std of {num_channels} channels, got none in the config and '
                    f'in {title(source)}. Prepare the images, which measures them (vit-jax prepare '
                    f'--channels={num_channels}), or set both.')
  normalized: schema.Config = schema.replaced(
      config, {'data.recipe.mean': tuple(statistics.mean), 'data.recipe.std': tuple(statistics.std)})
  return normalized


def with_orientation(config: schema.Config, source: Source) -> schema.Config:
  """Returns the config; `data.recipe.exif_orientation=auto` becomes true or false, depending on the source."""
  decided: schema.Config = schema.replaced(config, {'data.recipe': orientation.decide(config.data.recipe, source)})
  return decided


def open_mesh(config: schema.Config) -> tuple[Mesh, Shard]:
  """Returns the mesh over all devices, and the rows of each batch that this process loads."""
  mesh = meshes.make(config.mesh)
  return mesh, meshes.local_shard(mesh)


def open_run(config: schema.Config, data: Data, *, workdir: storage.Path | None = None,
             overridden: Collection[str] = ()) -> tuple[Mesh, Shard, Parts]:
  """Chooses and logs the layout of a run on the devices, and builds the run; `Parts.config` has no auto settings.

  The layout (mesh, microbatches, rematerialization, kernels) is chosen for the hardware of the first start of the run.
  If this start has another number of slices, the layout is fitted to the slices. The batches and their order stay.

  Args:
    config: a config that `config.check` accepts.
    data: the data of the run.
    workdir: the run directory; a run that was saved on the same hardware keeps its layout.
    overridden: names of the settings on the command line, which the layout does not change.
  """
  console.begin_stage('building the network')
  hardware = meshes.find_hardware(config.mesh.slices)
  numbers = Numbers(config.data.num_examples or len(data.train), len(data.class_names), data.in_memory)
  saved = saved_config(workdir)
  first_hardware = elastic.first_hardware(config, saved, hardware)
  if saved and saved.mesh.chosen_for not in ('', str(first_hardware)):
    log.info('The run was laid out for %s before; it is laid out anew for %s.', saved.mesh.chosen_for, first_hardware)
  config = layout.reopen(config, first_hardware, overridden)
  if saved:
    config = layout.keep(config, saved, first_hardware)
  chosen = lay_out(config, first_hardware, numbers)
  level = logging.DEBUG if hardware.platform == 'cpu' else logging.INFO
  log.log(level if chosen.fits else logging.WARNING, '%s', chosen.text)
  config = elastic.fit(chosen.config, first_hardware, hardware)
  if hardware.slices != first_hardware.slices:
    log.info('This start runs on %s. The batches, their order and the memory that a device needs stay; masks of '
             'dropout and other random numbers of the network differ.',
             elastic.text(**elastic.describe(config, hardware.slices)))
  mesh, shard = open_mesh(config)
  return mesh, shard, parts(config, mesh=mesh, **numbers._asdict())


def saved_config(workdir: storage.Path | None) -> schema.Config | None:
  """Returns the config that the run in `workdir` saved; None for a new run, or if the file is damaged."""
  if workdir is None or not (workdir / 'config.json').is_file():
    return None
  try:
    with storage.local(workdir / 'config.json') as path:
      return engine.read_file(path)
  except UserError:
    return None


def lay_out(config: schema.Config, hardware: layout.Hardware, numbers: Numbers) -> layout.Layout:
  """Returns the layout of a run on any hardware. The memory is estimated from shapes, without devices."""
  if not layout.auto(config) or hardware.platform == 'cpu' or not hardware.memory_gib:
    return layout.choose(config, hardware, None)
  on_one_device = layout.plain(dataclasses.replace(config, mesh=schema.Mesh(1, 1, 1)))
  mesh = AbstractMesh((1, 1, 1), meshes.AXES, axis_types=(AxisType.Auto,) * 3)
  run = parts(on_one_device, mesh=mesh, **numbers._asdict())  # type: ignore[arg-type]
  state = run.program.abstract_state
  image_bytes = 2 * 4 * math.prod(config.image_px) * config.data.channels  # f32, before and after `prepare`

  @functools.cache
  def activation_bytes(remat: schema.Remat) -> int:
    return kept_bytes(run, dataclasses.replace(config.model, remat=remat)) + image_bytes

  return layout.choose(config, hardware, layout.Sizes(
      trees.num_bytes((state.params, state.opt, state.extra)), trees.num_bytes(state.params),
      lambda model: activation_bytes(model.remat)))


def train_loader(config: schema.Config, data: Data, shard: Shard) -> loaders.TrainLoader:
  """Returns the loader of training batches; raises UserError if the dataset has another size than the config."""
  settings, objective = config.data, kinds.of(config)
  check_size(settings, data.train)
  console.begin_stage('preparing the training data')
  answers = None  # the labels of a teacher, beside the labels of the dataset
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
  """Compares the size of the dataset with `data.num_examples`, which defines the length of an epoch.

  Warns of a difference. Raises UserError if it exceeds `SIZE_TOLERANCE` and `data.any_num_examples` does not allow it.
  """
  expected = data.num_examples
  size = cast('PseudoLabeled', train).num_labeled if data.pseudo.source else len(train)  # without images of a teacher
  if not expected or expected == size or data.source == 'synthetic':
    return
  if abs(size - expected) <= SIZE_TOLERANCE * expected or data.any_num_examples:
    log.warning('data.num_examples=%s, by which epochs are counted, but %s has %s examples.', f'{expected:,}',
                title(train), f'{size:,}')
    return
  raise UserError(
      f'data.num_examples: expected {size:,}, the size of {data.train_split} of {data.source}, got {expected:,}. '
      'Epochs are counted by this number. Set --config.data.num_examples=0 to count by the dataset, or '
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
    workdir: a local directory, in whose folder `features` features are stored. Otherwise they stay in memory.
    bar: whether progress may be shown as a bar.
    weights: the weights that are evaluated, from which evaluations with texts load the text tower; None = a run.
    embedded: files of features, see `evaluate.features.Store`.
  """
  def find_encoder(name: str, settings: schema.TextEvaluation) -> Encoder:
    from vit_jax.jobs import text_towers  # only here: few runs read a text tower
    return text_towers.find(config, weights, name, settings, mesh=mesh)

  views = objective.views()
  folder = pathlib.Path(workdir) / 'features' if workdir is not None and storage.is_local(workdir) else None
  return Resources(config, data, views=views, backbone=backbones.build(config.model, config.image_px), mesh=mesh,
                   shard=shard, folder=folder, embedded=embedded, bar=bar, encoder=find_encoder)


def parts(config: schema.Config, *, mesh: Mesh, num_examples: int, num_classes: int, in_memory: bool) -> Parts:
  """Builds a run on a mesh, without allocating memory on devices.

  Args:
    config: a config that `config.check` accepts.
    mesh: the mesh, of real devices or of a topology to plan for.
    num_examples: examples per epoch.
    num_classes: classes of the head.
    in_memory: whether the loader holds all images in memory, in one size, so that the device crops and flips them.
  """
  num_channels = config.data.channels
  if num_channels != config.data.recipe.channels:  # a plan opens no data, so that the statistics are unknown
    config = schema.replaced(config, {
        'data.recipe.mean': (0.,) * num_channels, 'data.recipe.std': (1.,) * num_channels})
  meshes.check_batch(mesh, config.batch_size, config.microbatches, what='batch_size')
  spec = kinds.of(config)
  for name, model in spec.models().items():
    forms.check_devices(model, mesh, name=name)
  lengths = durations.lengths(config.length, num_examples=num_examples, batch_size=config.batch_size)
  backbone = build_backbone(config)
  objective = build_objective(config, backbone, num_classes, lengths=lengths)
  schedule = build_schedule(config, lengths)
  optimizer = optimizers.build(config.optimizer, schedule, lengths=lengths)
  if (settings := config.train.sam).rho:
    from vit_jax.objectives import sam
    peak = schedules.peak_rate(config.optimizer, batch_size=config.batch_size)
    rho_end = settings.rho if settings.rho_end < 0 else settings.rho_end
    objective = sam.Sam(objective, alpha=settings.alpha, rho=sam.follow_rate(
        schedule, peak=peak, end=config.optimizer.schedule.end_lr, rho=settings.rho, rho_end=rho_end))
  prepare = prepare_train(config.data.recipe, num_classes=num_classes, on_device_geometry=in_memory,
                          soft_labels=bool(config.data.pseudo.source), targets=spec.targets())
  program = steps.build(objective, optimizer, prepare, mesh=mesh, batch=abstract_batch(config), seed=config.seed,
                        accumulate=config.microbatches)
  return Parts(config, mesh, lengths, num_classes, backbone, objective, schedule, optimizer, prepare, program)


def build_backbone(config: schema.Config) -> Backbone:
  """Returns the network without the head, frozen if the head is a linear probe."""
  return probe.around(backbones.build(config.model, config.image_px), config.head)


def build_objective(config: schema.Config, backbone: Backbone, num_classes: int, *,
                    lengths: durations.Lengths) -> Objective:
  """Returns the objective of a config, with adapters and with an average of the parameters if configured."""
  objective = adapters.around(kinds.of(config).build(backbone, num_classes, lengths=lengths), config.lora)
  if config.optimizer.average:
    average = implementation.load(config.optimizer.average)(config.optimizer, build_schedule(config, lengths))
    return ema.Ema(objective, average)
  if config.train.ema:
    return ema.Ema(objective, ema.Growing(config.train.ema, config.train.ema_warmup))
  return objective


def build_schedule(config: schema.Config, lengths: durations.Lengths) -> Schedule:
  """Returns the function from a step to the learning rate of a config."""
  peak = schedules.peak_rate(config.optimizer, batch_size=config.batch_size)
  return schedules.build(config.optimizer.schedule, peak=peak, lengths=lengths)


def keeps_random_network(parts: Parts) -> bool:
  """Returns whether the network has random parameters that rules of the optimizer freeze for the whole run."""
  frozen_for = rules.until(parts.config.optimizer.rules, parts.lengths.steps)
  names = [name for name in trees.flatten(parts.program.abstract_state.params) if name.startswith('backbone/')]
  return bool(names) and not parts.config.init_from and all(
      frozen_for(name) >= parts.lengths.total_steps for name in names)


def abstract_batch(config: schema.Config) -> Batch:
  """Returns the shapes of the global training batches of the loader; the largest shapes if they vary."""
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

  The gradient with respect to the image counts too, so that a classifier costs three times its forward pass, as in the
  papers. Recomputation under remat does not count. SAM doubles the FLOPs. Images that keep their aspect ratio have
  different numbers of tokens, over which the mean is taken. Padding counts.
  """
  flops = [_train_flops(cost.ByText((parts, num_tokens), repr((parts.config, parts.num_classes, num_tokens))))
           for num_tokens in parts.config.data.recipe.native_lengths or (0,)]
  return sum(flops) / len(flops)


@functools.lru_cache(16)  # each key keeps a run's objects alive
def _train_flops(key: cost.ByText) -> float:
  """Returns the FLOPs for `key.value`: the parts, and the number of tokens of an image (0 = images of one size)."""
  parts, num_tokens = key.value
  config = parts.config
  loss = _abstract_loss(parts, cost.plain(config))
  # Images that keep their aspect ratio have a grid of integers, which `allow_int` allows.
  gradient = jax.grad(lambda params, images, others: loss(params, images | others), argnums=(0, 1), allow_int=True)
  batch = dict(parts.program.prepared)
  if num_tokens:  # images that keep their aspect ratio, padded to this number of tokens
    patches, grid = batch['image']
    shorter = jax.ShapeDtypeStruct((patches.shape[0], num_tokens, patches.shape[2]), patches.dtype)
    batch['image'] = NativeImages(shorter, grid)  # type: ignore[arg-type]
  images = {name: shape for name, shape in batch.items() if isinstance(shape, NativeImages) or (
      shape.ndim > 3 and jnp.issubdtype(shape.dtype, jnp.floating))}
  others = {name: shape for name, shape in batch.items() if name not in images}
  flops = traced_costs.flops(gradient, parts.program.abstract_state.params, images, others)
  return sum(flops.values()) / config.batch_size * (2 if config.train.sam.rho else 1)


def kept_bytes(parts: Parts, model: schema.Model) -> int:
  """Returns the bytes that one image keeps for the backward pass.

  `model` is the network of `parts`, possibly with another `remat`, which decides what is kept.
  """
  return _kept_bytes(cost.ByText((parts, model), repr((parts.config, parts.num_classes, model))))


@functools.lru_cache(16)  # each key keeps a run's objects alive
def _kept_bytes(key: cost.ByText) -> int:
  """Returns the bytes for `key.value`: the parts, and the network."""
  parts, model = key.value
  config = layout.put(dataclasses.replace(parts.config, model=model), {
      'model.execution': schema.Execution.SCAN, 'model.attention.kernel': schema.AttentionKernel.XLA,
      'model.mlp.kernel': schema.MlpKernel.XLA})
  loss = _abstract_loss(parts, config)
  min_rows = config.objective.least_rows

  def batch_bytes(num_images: int) -> int:
    batch = jax.tree.map(lambda shape: jax.ShapeDtypeStruct((num_images, *shape.shape[1:]), shape.dtype),
                         parts.program.prepared)
    return traced_costs.kept_bytes(loss, parts.program.abstract_state.params, batch)

  return (batch_bytes(2 * min_rows) - batch_bytes(min_rows)) // min_rows  # without bytes that do not depend on images


def _abstract_loss(parts: Parts, config: schema.Config) -> Callable[[Params, Batch], Array]:
  """Returns a function from (parameters, prepared batch) to the loss, for a run like `parts` with another config."""
  objective = build_objective(config, build_backbone(config), parts.num_classes, lengths=parts.lengths)
  extra = parts.program.abstract_state.extra

  def loss(params: Params, batch: Batch) -> Array:
    zeros = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), extra)
    return objective.loss(params, zeros, batch, jax.random.key(0), jnp.zeros((), jnp.int32)).loss.sum

  return loss
