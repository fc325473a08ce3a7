"""`--job=pretrain`: continues the pre-training of weights on images: `train` with the config `pretrain:…`.

`commands.Command.run` calls `run`. The heads of the objective start at random values; the backbone is frozen for the
first part of the run, while the heads learn. The network, the resizing and the normalization of images are those of the
weights. The batch size and the length follow from the number of training images, and `run` prints both. Images for k-NN
are held out as in `finetune`. Every other setting is the config's, and every setting but the network, the weights and
the data can be overridden with `--config.NAME=VALUE`.
"""
from __future__ import annotations

import dataclasses
import logging
import math
import shlex
from collections.abc import Collection, Sequence

import jax

from vit_jax.config import durations, files, schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.jobs import finetune, flag_names, train
from vit_jax.record import storage
from vit_jax.weights.network import Weights

log = logging.getLogger('vit_jax.jobs')


def run(weights: str, data: str, workdir: storage.Path | None, *, objective: str, warm_heads: str,
        changes: Sequence[str]) -> int:
  """Trains until the end (exit status 0) or until a signal to stop, as `train.run` does.

  Args:
    weights: the weights to train further, see `weights.loading.load`.
    data: the training images, as in `data.source`.
    workdir: the run directory; None = `runs/pretrain_WEIGHTS_DATA`, where only a run with the same settings is resumed.
    objective: one of `METHODS` of `configs/pretrain.py`.
    warm_heads: the duration for which the backbone is frozen, such as '10 %'; '' = the config's.
    changes: overrides of the config, each `NAME=VALUE`.

  Raises UserError if the weights, the images or an override cannot be used.
  """
  # `train.run` derives the same directory from the name of the config, which does not exist before `make`.
  run_folder = workdir or train.default_workdir(finetune.run_name('pretrain', weights, data))
  overridden = {change.partition('=')[0] for change in changes}
  images, network, process_id = finetune.begin(load_config(objective, warm_heads), weights, data, run_folder, changes)
  with flag_names.naming_flags({'examples:': '--data:'}):  # the colon excludes the plain word `examples`
    config = make(network, images, objective, warm_heads)
  config = with_small_crops(finetune.apply(config, changes), overridden)
  log.info('%s', describe(config, images))
  status = train.run(config, workdir, overridden=overridden, weights=network)
  if not status and not process_id:
    view = next((view for evaluation in config.evals.values() for view in evaluation.views), '')  # such as `teacher`
    init_flag = f' --config.init_view={view}' if view else ''
    view_flag = f' --view={view}' if view else ''
    quoted_run, quoted_data = shlex.quote(str(run_folder)), shlex.quote(data)
    print('Fine-tune the result, or write its features:\n'
          f'  vit-jax finetune --weights={quoted_run} --data={quoted_data}{init_flag}\n'
          f'  vit-jax embed --weights={quoted_run}{view_flag} --data={quoted_data} --to=features.npz', flush=True)
  return status


def load_config(objective: str, warm_heads: str, num_images: int = 0) -> schema.Config:
  """Returns the config for a number of training images; 0 = not known yet. Raises UserError for too few images."""
  name = f'pretrain:B/16,objective={objective}'
  config = files.load(f'{name},examples={num_images}' if num_images else name, [])
  if not warm_heads:
    return config
  try:
    durations.parse(warm_heads)
  except UserError as error:
    raise UserError(f'--warm_heads: {error}') from error
  rule, = config.optimizer.rules
  warmed: schema.Config = schema.replaced(
      config, {'optimizer.rules': (dataclasses.replace(rule, frozen_until=warm_heads),)})
  return warmed


def make(network: Weights, images: finetune.Splits, objective: str, warm_heads: str) -> schema.Config:
  """Returns the config for a network and images; the batch size is a multiple of the number of devices.

  Images are squares of whole patches, at most as large as the shorter side of the weights' images and as 224 px.
  If the training images have no classes that can be learned, k-NN is not evaluated.

  Raises UserError if there are too few images, or the network is not a ViT.
  """
  model = network.model
  if not isinstance(model, schema.ViT):
    raise UserError(f'--weights: expected weights of a ViT, got {network.source}, of kind {type(model).__name__}. '
                    'Choose other weights.')
  config = load_config(objective, warm_heads, len(images.train))
  side_px = max(min(*network.preprocess.image_px, *config.image_px) // model.patch, 1) * model.patch
  evals = dict(config.evals)
  try:
    opening.check_learnable(images.train, learner='k-NN')
  except UserError as error:
    log.info('There is no k-NN evaluation during training: %s', error)
    del evals['knn']
  return dataclasses.replace(
      config, name=finetune.run_name('pretrain', network.source, images.data.source), init_from=network.source,
      batch_size=math.ceil(config.batch_size / jax.device_count()) * jax.device_count(), model=model,
      image_px=(side_px, side_px), evals=evals, data=dataclasses.replace(images.data, recipe=config.data.recipe))


def with_small_crops(config: schema.Config, overridden: Collection[str]) -> schema.Config:
  """Returns the config with small crops of whole patches, about 3/7 of an image's side, unless that is overridden."""
  setting = 'data.recipe.views.local_px'
  if not config.data.recipe.views.on or setting in overridden or not isinstance(config.model, schema.ViT):
    return config
  crop_px = max(round(3 / 7 * min(config.image_px) / config.model.patch), 1) * config.model.patch
  cropped: schema.Config = schema.replaced(config, {setting: crop_px})
  return cropped


def describe(config: schema.Config, images: finetune.Splits) -> str:
  """Returns a text with the settings that follow from the number of images and the weights, written as overrides."""
  chosen = {'batch_size': config.batch_size, 'length': f"'{config.length}'",
            'image_px': ','.join(map(str, config.image_px)), 'optimizer.lr': f'{config.optimizer.lr:g}'}
  if config.data.recipe.views.on:
    chosen['data.recipe.views.local_px'] = config.data.recipe.views.local_px
  rules = config.optimizer.rules  # empty if the optimizer was overridden
  return '\n'.join([
      f'Continuing the pre-training of {config.init_from} with {type(config.objective).__name__}',
      f'on {len(images.train):,} images, evaluated on {len(images.evaluated):,}. Settings that follow from these '
      'numbers and the weights:', *(f'  --config.{name}={value}' for name, value in chosen.items()),
      *(f"  --warm_heads='{rule.frozen_until}', for which the backbone is frozen" for rule in rules
        if rule.frozen_until)])
