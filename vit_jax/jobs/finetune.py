"""`--job=finetune`: fine-tunes weights on images: `train` with the config `finetune:…,own` and the weights' network.

The network, the form of its GELU, the normalization, the resolution and the resizing of images are those of the
weights, and random crops are those of the program that they are from. Batch size, length and warm-up follow from the
number of training images by the rules of `recipes.finetune.scale`, and the evaluated split by those of `choose_splits`;
all are printed. The checkpoint with the best accuracy on that split is kept, and the weights of the run are those of
this checkpoint. Every other setting is the config's, and every setting but the network, the weights and the data can be
overridden with `--config.NAME=VALUE`.
"""
from __future__ import annotations

import dataclasses
import logging
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
"""The config; its network is replaced."""
VAL = 'val'
"""The name of the evaluation, whatever its split is called."""
SMALL, SMALL_HOLDOUT = 1_000, .2
"""With fewer images than this and no split to evaluate on, this part is held out, instead of a tenth."""
FLAGS = {'model': '--weights', 'init_from': '--weights', 'init_settings': '--weights', 'data.source': '--data',
         'name': '--workdir'}
"""Settings that flags give."""


class Splits(NamedTuple):
  """The splits of a dataset to train and to evaluate on, and the settings that open them."""
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
    compare: 'yes' = compare a finished run with frozen features, see `frozen_features`.
    changes: overrides of the config, `NAME=VALUE` each.
    overridden: their names.

  Raises:
    UserError: the weights, the images or an override cannot be used.
  """
  where = workdir or train.default_workdir(run_name('finetune', weights, data))
  images, network, process_id = begin(load_config(lora=lora), weights, data, where, changes, what='fine-tuning')
  config = apply(make(network, images, lora), changes)
  log.info('%s', describe(config, images))
  status = train.run(config, workdir, overridden=overridden, weights=network)
  if not status and compare == 'yes':
    sources = build.Data(images.train, images.evaluated, images.train.class_names, in_memory=False)
    frozen_features.report(where, config, sources, network, metric=f'{VAL}/top1')
  if not status and not process_id and network.channels == config.data.channels:
    image = images.evaluated.describe(0)
    path = shlex.quote(os.path.relpath(image)) if os.path.isfile(image) else 'IMAGES'
    print(f'Predict on other images:\n  vit-jax predict --weights={shlex.quote(str(where))} {path}', flush=True)
  return status


def begin(base: schema.Config, weights: str, data: str, where: storage.Path, changes: Sequence[str], *,
          what: str = '') -> tuple[Splits, Weights, int]:
  """Returns images and weights to train from, and the number of this process.

  Raises:
    UserError: an override of the config `base` cannot be applied, before anything is read; the images or the weights
      cannot be used, or `what` cannot learn from these images.
  """
  for name in (change.partition('=')[0] for change in changes):
    if name in FLAGS:
      raise UserError(f'config.{name}: expected no override, as {FLAGS[name]} gives it, got one. Remove it.')
  apply(base, [change for change in changes if not change.startswith(('model.', 'head.'))])
  settings = apply(base, [change for change in changes if change.startswith(('train.', 'init_view='))])
  process_id = startup.start(settings.train, resume.find_machine(where))
  console.begin_stage('opening the data')
  with flag_names.naming_flags({'data.source': '--data'}):
    images = choose_splits(open_settings(base, data, changes))
    if what:
      opening.check_learnable(images.train, what=what)
  console.begin_stage('loading the weights')
  return images, loading.load(weights, view=settings.init_view), process_id


def load_config(num_examples: int = 0, *, lora: int = 0) -> schema.Config:
  """Returns the config for a number of training images, or before it is known; `lora` is the rank of adapters."""
  numbers = {'examples': num_examples, 'lora': lora}
  config = files.load(','.join([CONFIG, *(f'{name}={number}' for name, number in numbers.items() if number)]), [])
  evaluation, = config.evals.values()
  return dataclasses.replace(config, evals={VAL: evaluation})


def apply(config: schema.Config, changes: Sequence[str]) -> schema.Config:
  """Returns the config with overrides."""
  return overrides.apply({'': config}, list(changes), models=sizes.model)['']


def open_settings(base: schema.Config, source: str, changes: Sequence[str]) -> schema.Data:
  """Returns the settings of the data of a config with their overrides; `eval_split` is '' unless it is overridden.

  Raises:
    UserError: the source has no kind.
  """
  if ':' not in source and os.path.isdir(source):
    raise UserError(f'--data: expected one of {opening.FORMS}, got {source!r}. Set --data=folder:{source}.')
  config = dataclasses.replace(base, data=dataclasses.replace(base.data, source=source, eval_split=''))
  return apply(config, [change for change in changes if change.startswith('data.')]).data


def choose_splits(data: schema.Data) -> Splits:
  """Returns the splits to train and to evaluate on.

  Evaluated is `data.eval_split` if it is set, else `val` if there is one, else `test`, else a held-out part of the
  training images: a tenth, or `SMALL_HOLDOUT` of fewer than `SMALL` images.

  Raises:
    UserError: the images cannot be opened.
  """
  train_source = _open(data, data.train_split)
  for split in (data.eval_split,) if data.eval_split else ('val', 'test'):
    try:
      evaluated = _open(data, split)
    except splits.NoSplit:
      if data.eval_split:
        raise
      continue
    if split == 'val' and evaluated.name.endswith('/test'):  # such a source has no splits, and holds out images itself
      share = _share(data, len(train_source) + len(evaluated))
      data = dataclasses.replace(data, eval_split='val', holdout=share)
      return Splits(data, _open(data, data.train_split), _open(data, data.eval_split))
    return Splits(dataclasses.replace(data, eval_split=split), train_source, evaluated)
  if data.train_split != 'train':
    raise UserError(f"data.eval_split: expected the images to evaluate on beside data.train_split={data.train_split}, "
                    "got ''. Set --config.data.eval_split.")
  kept = round(100 * (1 - _share(data, len(train_source))))
  data = dataclasses.replace(data, train_split=f'train[:{kept}%]', eval_split=f'train[{kept}%:]')
  return Splits(data, _open(data, data.train_split), _open(data, data.eval_split))


def _open(data: schema.Data, split: str) -> Source:
  return opening.open_split(data, split, image_px=schema.Config().image_px)  # which only synthetic images have


def _share(data: schema.Data, num_images: int) -> float:
  """Returns the part of the images to hold out."""
  return SMALL_HOLDOUT if num_images < SMALL and data.holdout == schema.Data().holdout else data.holdout


def make(network: Weights, images: Splits, lora: int = 0) -> schema.Config:
  """Returns the config for a network and images; the batch size is a multiple of the number of devices."""
  config, devices = load_config(len(images.train), lora=lora), jax.device_count()
  # Crops of the program whose resizing the weights expect: TensorFlow's for vision_transformer, big_vision and BiT, as
  # in the protocol of the ViT paper; torchvision's for all others, as in timm and transformers, which are larger (a
  # mean of 0.47 of the image instead of 0.38).
  is_tensorflow = network.preprocess.geometry is schema.Geometry.BIG_VISION
  sampler = schema.CropSampler.TENSORFLOW if is_tensorflow else schema.CropSampler.TORCHVISION
  recipe = dataclasses.replace(config.data.recipe, crop_sampler=sampler)
  model = network.model
  if isinstance(model, schema.ViT):  # the protocol starts with a head of zeros, whatever the network began with
    model = dataclasses.replace(model, init=schema.Init.VISION_TRANSFORMER)
  # The best checkpoint of the validation images is kept, and weights of the run are those of this one.
  every = config.evals[VAL].every
  keep = config.checkpoints if images.data.max_labels else schema.Checkpoints(every=every, keep_best=f'{VAL}/top1')
  return dataclasses.replace(
      config, checkpoints=keep, name=run_name('finetune', network.source, images.data.source), init_from=network.source,
      batch_size=-(-config.batch_size // devices) * devices, model=model,
      image_px=network.preprocess.image_px, data=dataclasses.replace(images.data, recipe=recipe))


def run_name(job: str, weights: str, data: str) -> str:
  """Returns the name of a run, such as `finetune vit photos`, without a token that the address of weights has."""
  ends = (where.partition('//')[2] or where.partition(':')[2] or where for where in (redacted(weights), data))
  return ' '.join([job, *(pathlib.PurePosixPath(end).stem or 'run' for end in ends)])


def describe(config: schema.Config, images: Splits) -> str:
  """Returns the settings that follow from the number of images and the weights, as overrides to change them."""
  chosen = {'batch_size': config.batch_size, 'length': f"'{config.length}'", 'optimizer.lr': f'{config.optimizer.lr:g}',
            f'evals.{VAL}.every': f"'{config.evals[VAL].every}'"}
  if config.data.recipe.crop is schema.Crop.INCEPTION:
    chosen['data.recipe.crop_sampler'] = config.data.recipe.crop_sampler.value
  return '\n'.join([
      f'Fine-tuning {config.init_from}',
      f'on {len(images.train):,} images of {len(images.train.class_names):,} classes, evaluated on '
      f'{len(images.evaluated):,}. Settings that follow from these numbers and the weights:',
      *(f'  --config.{name}={value}' for name, value in chosen.items())])
