"""`--job=finetune`: fine-tunes weights on images, by the job `train` with a config that follows from both.

`commands.Command.run` calls `run`; `pretrain.run` also uses `begin`, `apply` and `run_name`. The settings come from:

  the weights           network, normalization, resolution and resizing of images, and the kind of random crops
  the number of images  batch size, length and warm-up (`recipes.finetune.scale`), and the splits (`choose_splits`)
  `--config.NAME=VALUE` any setting except the network, the weights and the data
  the config `CONFIG`   all other settings

Jobs that read the finished run use the checkpoint with the best accuracy on the evaluated split.
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
"""The name of the config, whose network is replaced by the network of the weights."""
VAL = 'val'
"""The name of the evaluation in the config, for a split with any name."""
SMALL_DATASET, SMALL_HOLDOUT = 1_000, .2
"""A dataset with fewer images is small: `SMALL_HOLDOUT` replaces the default of `data.holdout`."""
FLAG_BY_SETTING = {'model': '--weights', 'init_from': '--weights', 'init_settings': '--weights',
                   'data.source': '--data', 'name': '--workdir'}
"""Settings that cannot be overridden, with the flags that set them."""


class Splits(NamedTuple):
  """The images to train and to evaluate on, and the settings `data` of a config that opens them."""
  data: schema.Data
  train: Source
  evaluated: Source


def run(weights: str, data: str, workdir: storage.Path | None, *, lora: int, compare: str = 'yes',
        changes: Sequence[str], overridden: Collection[str]) -> int:
  """Fine-tunes until the end (exit status 0) or until a signal to stop, as `train.run` does.

  Args:
    weights: the weights to fine-tune, see `weights.loading.load`.
    data: the images, in the form of the setting `data.source`.
    workdir: the run directory; None = `runs/finetune_WEIGHTS_DATA`, where only a run with the same settings is resumed.
    lora: the rank of adapters to train in place of all weights; 0 = all weights are trained.
    compare: whether to compare the finished run with frozen features (`frozen_features.py`): `yes` or `no`.
    changes: the overrides of the config, `NAME=VALUE` each.
    overridden: the names of the overridden settings.

  Raises UserError if the weights, the images or an override cannot be used.
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
  """Starts JAX, opens the images and loads the weights. Returns images, weights, and the index of this process.

  The overrides are applied to the config `base` first, so that a wrong override is reported before anything is read.
  `what` names a training that needs labels, for messages; '' = the images may have no labels.

  Raises UserError if an override cannot be applied, or the images or the weights cannot be used.
  """
  for name in (change.partition('=')[0] for change in changes):
    if name in FLAG_BY_SETTING:
      raise UserError(f'config.{name}: expected no override, as {FLAG_BY_SETTING[name]} gives it, got one. Remove it.')
  # `base` does not have the network of the weights yet, so that overrides of the network cannot be checked here.
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
  """Returns the config for a number of training images (0 = unknown yet) and a rank of adapters (0 = no adapters)."""
  examples_argument = f',examples={num_examples}' if num_examples else ''
  lora_argument = f',lora={lora}' if lora else ''
  config = files.load(f'{CONFIG}{examples_argument}{lora_argument}', [])
  (evaluation,) = config.evals.values()
  return dataclasses.replace(config, evals={VAL: evaluation})


def apply(config: schema.Config, changes: Sequence[str]) -> schema.Config:
  """Returns the config with overrides, `NAME=VALUE` each."""
  return overrides.changed({'': config}, list(changes), models=sizes.model)['']


def open_settings(base: schema.Config, source: str, changes: Sequence[str]) -> schema.Data:
  """Returns the settings `data` of a config with the overrides; `eval_split` is '' unless it is overridden."""
  if ':' not in source and os.path.isdir(source):
    raise UserError(f'--data: expected one of {opening.SYNTAX}, got {source!r}. Set --data=folder:{source}.')
  config = dataclasses.replace(base, data=dataclasses.replace(base.data, source=source, eval_split=''))
  return apply(config, [change for change in changes if change.startswith('data.')]).data


def choose_splits(data: schema.Data) -> Splits:
  """Returns the splits to train and to evaluate on; raises UserError if they cannot be opened.

  The evaluated split is `data.eval_split` if it is set, else `val` if there is one, else `test` if there is one. If
  there is neither, it is a part of the training images that is held out (`_choose_holdout`).
  """
  train_source = _open(data, data.train_split)
  for split in (data.eval_split,) if data.eval_split else ('val', 'test'):
    try:
      evaluated = _open(data, split)
    except splits.NoSplit:
      if data.eval_split:
        raise
      continue
    # A source without splits holds out the same images for the names `val` and `test`, and names them `test`.
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
  """Returns the share of the images to hold out, 0 to 1: more of a small dataset, unless `data.holdout` is set."""
  is_default = data.holdout == schema.Data().holdout
  return SMALL_HOLDOUT if num_images < SMALL_DATASET and is_default else data.holdout


def make(network: Weights, images: Splits, lora: int = 0) -> schema.Config:
  """Returns the config for a network and images; the batch size is rounded up to a multiple of the device count."""
  config = load_config(len(images.train), lora=lora)
  # Random crops follow the program whose resizing the weights expect. For vision_transformer, big_vision and BiT, it is
  # TensorFlow, as in the protocol of the ViT paper. For all other weights, it is torchvision, as in timm and
  # transformers: the mean crop has 0.47 of the area of the image instead of 0.38.
  is_tensorflow = network.preprocess.geometry is schema.Geometry.BIG_VISION
  sampler = schema.CropSampler.TENSORFLOW if is_tensorflow else schema.CropSampler.TORCHVISION
  recipe = dataclasses.replace(config.data.recipe, crop_sampler=sampler)
  model = network.model
  if isinstance(model, schema.ViT):  # the protocol of the ViT paper starts with a head of zeros
    model = dataclasses.replace(model, init=schema.Init.VISION_TRANSFORMER)
  checkpoints = config.checkpoints  # Multi-label images have no top-1 accuracy to choose the best checkpoint.
  if not images.data.max_labels:
    checkpoints = schema.Checkpoints(every=config.evals[VAL].every, keep_best=f'{VAL}/top1')
  num_devices = jax.device_count()
  return dataclasses.replace(
      config, checkpoints=checkpoints, name=run_name('finetune', network.source, images.data.source),
      init_from=network.source, batch_size=math.ceil(config.batch_size / num_devices) * num_devices, model=model,
      image_px=network.preprocess.image_px, data=dataclasses.replace(images.data, recipe=recipe))


def run_name(job: str, weights: str, data: str) -> str:
  """Returns the name of a run, such as `finetune vit photos`, without the access token of an address of weights."""
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
