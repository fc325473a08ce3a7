"""`--job=finetune`: fine-tunes weights on images: `train` with the config `finetune:…,own` and the weights' network.

`commands.Command.run` calls `run`; `pretrain.run` also uses `begin`, `apply` and `run_name`. The settings come from:

  the weights           network, normalization, resolution and resizing of images, and the kind of random crops
  the number of images  batch size, length and warm-up (`recipes.finetune.scale`), and the splits (`choose_splits`)
  `--config.NAME=VALUE` any setting but the network, the weights and the data
  the config            all other settings

The checkpoint with the best accuracy on the evaluated split is kept, and its weights are those of the run.
"""
from __future__ import annotations

import dataclasses
import logging
import math
import os
import pathlib
import shlex
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax

from vit_jax.config import files, overrides, schema
from vit_jax.core.errors import UserError, redacted
from vit_jax.data import opening, splits
from vit_jax.data.source import Source
from vit_jax.jobs import build, flag_names, frozen_features, resume, startup, train
from vit_jax.recipes import sizes
from vit_jax.record import console, storage
from vit_jax.weights import loading
from vit_jax.weights.network import Weights

log = logging.getLogger('vit_jax.jobs')

CONFIG = 'finetune:B/16,own'
"""The config; the network of the weights replaces its network."""
VAL = 'val'
"""The name of the evaluation, whatever its split is called."""
SMALL, SMALL_HOLDOUT = 1_000, .2
"""Of fewer images than `SMALL`, this part is held out to evaluate on, where `data.holdout` has its default."""
FLAGS = {'model': '--weights', 'init_from': '--weights', 'init_settings': '--weights', 'data.source': '--data',
         'name': '--workdir'}
"""Settings that cannot be overridden, and the flags that set them."""


class Splits(NamedTuple):
  """The images to train and to evaluate on, and the settings `data` that open them."""
  data: schema.Data
  train: Source
  evaluated: Source


def run(weights: str, data: str, workdir: storage.Path | None, *, lora: int, compare: str = 'yes',
        changes: Sequence[str], overridden: Collection[str]) -> int:
  """Fine-tunes until the end (exit status 0) or until a signal to stop, as `train.run` does.

  Args:
    weights: what to fine-tune, see `weights.loading.load`.
    data: the images, as `data.source`.
    workdir: the run directory; None = `runs/finetune_WEIGHTS_DATA`, where only a run with the same settings is resumed.
    lora: rank of adapters to train in place of all weights; 0 = train all.
    compare: 'yes' = compare a finished run with frozen features, see `frozen_features`; 'no' = do not.
    changes: overrides of the config, `NAME=VALUE` each.
    overridden: their names.

  Raises:
    UserError: the weights, the images or an override cannot be used.
  """
  run_folder = workdir or train.default_workdir(run_name('finetune', weights, data))
  images, network, process_id = begin(load_config(lora=lora), weights, data, run_folder, changes, what='fine-tuning')
  config = apply(make(network, images, lora), changes)
  log.info('%s', describe(config, images))
  status = train.run(config, workdir, overridden=overridden, weights=network)
  if not status and compare == 'yes':
    sources = build.Data(images.train, images.evaluated, images.train.class_names, in_memory=False)
    frozen_features.report(run_folder, config, sources, network, metric=f'{VAL}/top1')
  if not status and not process_id and network.channels == config.data.channels:
    image = images.evaluated.describe(0)  # its path, if the image is a file
    path = shlex.quote(os.path.relpath(image)) if os.path.isfile(image) else 'IMAGES'
    print(f'Predict on other images:\n  vit-jax predict --weights={shlex.quote(str(run_folder))} {path}', flush=True)
  return status


def begin(base: schema.Config, weights: str, data: str, run_folder: storage.Path, changes: Sequence[str], *,
          what: str = '') -> tuple[Splits, Weights, int]:
  """Starts JAX, opens the images and loads the weights; returns both, and the number of this process.

  The overrides are applied to the config `base` first, so that a wrong one is reported before anything is read. `what`
  names the training for messages, if it needs labels that can be learned; '' = any images will do.

  Raises:
    UserError: an override cannot be applied, or the images or the weights cannot be used.
  """
  for name in (change.partition('=')[0] for change in changes):
    if name in FLAGS:
      raise UserError(f'config.{name}: expected no override, as {FLAGS[name]} gives it, got one. Remove it.')
  # The network of `base` is not that of the weights, so that overrides of a network cannot be checked here.
  apply(base, [change for change in changes if not change.startswith(('model.', 'head.'))])
  settings = apply(base, [change for change in changes if change.startswith(('train.', 'init_view='))])
  process_id = startup.start(settings.train, resume.find_machine(run_folder))
  console.begin_stage('opening the data')
  with flag_names.naming_flags({'data.source': '--data'}):
    images = choose_splits(open_settings(base, data, changes))
    if what:
      opening.check_learnable(images.train, learner=what)
  console.begin_stage('loading the weights')
  return images, loading.load(weights, view=settings.init_view), process_id


def load_config(num_examples: int = 0, *, lora: int = 0) -> schema.Config:
  """Returns the config for a number of training images, 0 = not known yet; `lora` is the rank of adapters, 0 = none."""
  numbers = {'examples': num_examples, 'lora': lora}
  config = files.load(','.join([CONFIG, *(f'{name}={number}' for name, number in numbers.items() if number)]), [])
  evaluation, = config.evals.values()
  return dataclasses.replace(config, evals={VAL: evaluation})


def apply(config: schema.Config, changes: Sequence[str]) -> schema.Config:
  """Returns the config with overrides."""
  return overrides.apply({'': config}, list(changes), models=sizes.model)['']


def open_settings(base: schema.Config, source: str, changes: Sequence[str]) -> schema.Data:
  """Returns the data settings of a config with their overrides; `eval_split` is '' unless it is overridden."""
  if ':' not in source and os.path.isdir(source):
    raise UserError(f'--data: expected one of {opening.SYNTAX}, got {source!r}. Set --data=folder:{source}.')
  config = dataclasses.replace(base, data=dataclasses.replace(base.data, source=source, eval_split=''))
  return apply(config, [change for change in changes if change.startswith('data.')]).data


def choose_splits(data: schema.Data) -> Splits:
  """Returns the splits to train and to evaluate on.

  Evaluated is `data.eval_split` if it is set, else `val` if there is one, else `test`, else a held-out part of the
  training images: a tenth, or `SMALL_HOLDOUT` of fewer than `SMALL` images. Raises UserError if they cannot be opened.
  """
  train_source = _open(data, data.train_split)
  for split in (data.eval_split,) if data.eval_split else ('val', 'test'):
    try:
      evaluated = _open(data, split)
    except splits.NoSplit:
      if data.eval_split:
        raise
      continue
    # A source without splits holds out images by itself, for both names, and calls them `test`.
    if split == 'val' and evaluated.name.endswith('/test'):
      holdout = _choose_holdout(data, len(train_source) + len(evaluated))
      data = dataclasses.replace(data, eval_split='val', holdout=holdout)
      return Splits(data, _open(data, data.train_split), _open(data, data.eval_split))
    return Splits(dataclasses.replace(data, eval_split=split), train_source, evaluated)
  if data.train_split != 'train':
    raise UserError(f"data.eval_split: expected the images to evaluate on beside data.train_split={data.train_split}, "
                    "got ''. Set --config.data.eval_split.")
  train_percent = round(100 * (1 - _choose_holdout(data, len(train_source))))
  data = dataclasses.replace(data, train_split=f'train[:{train_percent}%]', eval_split=f'train[{train_percent}%:]')
  return Splits(data, _open(data, data.train_split), _open(data, data.eval_split))


def _open(data: schema.Data, split: str) -> Source:
  return opening.open_split(data, split, image_px=schema.Config().image_px)  # the size of synthetic images


def _choose_holdout(data: schema.Data, num_images: int) -> float:
  """Returns the part of the images to hold out, 0 to 1."""
  return SMALL_HOLDOUT if num_images < SMALL and data.holdout == schema.Data().holdout else data.holdout


def make(network: Weights, images: Splits, lora: int = 0) -> schema.Config:
  """Returns the config for a network and images; the batch size is rounded up to a multiple of the device count."""
  config, num_devices = load_config(len(images.train), lora=lora), jax.device_count()
  # Random crops are those of the program whose resizing the weights expect. For vision_transformer, big_vision and BiT
  # this is TensorFlow, as in the protocol of the ViT paper. For all others it is torchvision, as in timm and
  # transformers, whose crops are larger: on average 0.47 of the image instead of 0.38.
  is_tensorflow = network.preprocess.geometry is schema.Geometry.BIG_VISION
  sampler = schema.CropSampler.TENSORFLOW if is_tensorflow else schema.CropSampler.TORCHVISION
  recipe = dataclasses.replace(config.data.recipe, crop_sampler=sampler)
  model = network.model
  if isinstance(model, schema.ViT):  # the protocol of the ViT paper starts with a head of zeros
    model = dataclasses.replace(model, init=schema.Init.VISION_TRANSFORMER)
  # Multi-label images have no top-1 accuracy, by which the best checkpoint is chosen.
  checkpoints = config.checkpoints
  if not images.data.max_labels:
    checkpoints = schema.Checkpoints(every=config.evals[VAL].every, keep_best=f'{VAL}/top1')
  return dataclasses.replace(
      config, checkpoints=checkpoints, name=run_name('finetune', network.source, images.data.source),
      init_from=network.source, batch_size=math.ceil(config.batch_size / num_devices) * num_devices, model=model,
      image_px=network.preprocess.image_px, data=dataclasses.replace(images.data, recipe=recipe))


def run_name(job: str, weights: str, data: str) -> str:
  """Returns the name of a run, such as `finetune vit photos`; the token of an address of weights is left out."""
  paths = [name.partition('//')[2] or name.partition(':')[2] or name for name in (redacted(weights), data)]
  return ' '.join([job, *(pathlib.PurePosixPath(path).stem or 'run' for path in paths)])


def describe(config: schema.Config, images: Splits) -> str:
  """Returns the settings that follow from the number of images and the weights, as overrides to change them."""
  settings = {'batch_size': config.batch_size, 'length': f"'{config.length}'",
              'optimizer.lr': f'{config.optimizer.lr:g}', f'evals.{VAL}.every': f"'{config.evals[VAL].every}'"}
  if config.data.recipe.crop is schema.Crop.INCEPTION:
    settings['data.recipe.crop_sampler'] = config.data.recipe.crop_sampler.value
  return '\n'.join([
      f'Fine-tuning {config.init_from}',
      f'on {len(images.train):,} images of {len(images.train.class_names):,} classes, evaluated on '
      f'{len(images.evaluated):,}. Settings that follow from these numbers and the weights:',
      *(f'  --config.{name}={value}' for name, value in settings.items())])
