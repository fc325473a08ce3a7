"""`--job=pretrain`: continues the pre-training of weights on images: `train` with the config `pretrain:…`.

The heads of the objective are new, so that the backbone is frozen for the first part of the run, while they learn.
Network, resizing and normalization of images are those of the weights; batch size and length follow from the number of
training images, and all are printed. Images for k-NN are held out as `finetune` does. Every other setting is the
config's, and every setting but the network, the weights and the data can be overridden with `--config.NAME=VALUE`.
"""
from __future__ import annotations

import dataclasses
import logging
import shlex
from collections.abc import Collection, Sequence

import jax

from vit_jax.config import durations, files, schema
from vit_jax.core.errors import UserError
from vit_jax.jobs import finetune, flag_names, resume, train
from vit_jax.jobs import runtime as startup
from vit_jax.record import console, storage
from vit_jax.weights import loading
from vit_jax.weights.network import Weights

log = logging.getLogger('vit_jax.jobs')


def run(weights: str, data: str, workdir: storage.Path | None, *, objective: str, warm_heads: str,
        changes: Sequence[str], overridden: Collection[str]) -> int:
  """Trains until the end (exit status 0) or until a signal to stop, as `train.run` does.

  Args:
    weights: what to continue, see `weights.loading.load`.
    data: the images, as `data.source`.
    workdir: of the run; None = `runs/pretrain_WEIGHTS_DATA`, where only a run with the same settings is resumed.
    objective: one of `METHODS` of `configs/pretrain.py`.
    warm_heads: the part of the run in which the backbone is frozen, a duration; '' = the config's.
    changes: overrides of the config, `NAME=VALUE` each.
    overridden: their names.

  Raises:
    UserError: the weights, the images or an override cannot be used.
  """
  base = load_config(objective, warm_heads)
  finetune.check_changes(base, changes)
  where = workdir or train.default_workdir(finetune.run_name('pretrain', weights, data))
  process_id = startup.start(finetune.apply(base, [one for one in changes if one.startswith('train.')]).train,
                             resume.find_machine(where))
  console.begin_stage('opening the data')
  with flag_names.shown({'data.source': '--data'}):
    found = finetune.choose_splits(finetune.open_settings(base, data, changes))
  console.begin_stage('loading the weights')
  view = next((one.partition('=')[2] for one in changes if one.startswith('init_view=')), '')
  network = loading.load(weights, view=view)
  with flag_names.shown({'examples': '--data'}):
    config = make(network, found, objective, warm_heads)
  config = with_small_crops(finetune.apply(config, changes), overridden)
  log.info('%s', describe(config, found))
  status = train.run(config, workdir, overridden=overridden, found=network)
  if not status and not process_id:
    print(f'Fine-tune the result, or write its features:\n{next_commands(where, data, config)}', flush=True)
  return status


def load_config(objective: str, warm_heads: str, num_images: int = 0) -> schema.Config:
  """Returns the config for a number of training images, or before it is known.

  Raises:
    UserError: `warm_heads` is no duration.
  """
  config = files.load(f'pretrain:B/16,objective={objective}' + f',examples={num_images}' * bool(num_images), [])
  if not warm_heads:
    return config
  try:
    durations.parse(warm_heads)
  except UserError as error:
    raise UserError(f'--warm_heads: {error}') from error
  rule, = config.optimizer.rules
  rules = (dataclasses.replace(rule, frozen_until=warm_heads),)
  return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, rules=rules))


def make(network: Weights, found: finetune.Splits, objective: str, warm_heads: str) -> schema.Config:
  """Returns the config for a network and images; the batch size is a multiple of the number of devices.

  Images are at most 224 px, whatever the weights were trained with. Without two classes there is no k-NN.

  Raises:
    UserError: there are too few images, or the network is no ViT.
  """
  model = network.model
  if not isinstance(model, schema.ViT):
    raise UserError(f'--weights: expected those of a ViT, got {network.source}, of kind {type(model).__name__}. Choose '
                    'other weights.')
  config, devices = load_config(objective, warm_heads, len(found.train)), jax.device_count()
  side = max(min(*network.preprocess.image_px, *config.image_px) // model.patch, 1) * model.patch
  evals = dict(config.evals)
  if len(found.train.class_names) < 2:
    del evals['knn']
  return dataclasses.replace(
      config, name=finetune.run_name('pretrain', network.source, found.data.source), init_from=network.source,
      batch_size=-(-config.batch_size // devices) * devices, model=model, image_px=(side, side), evals=evals,
      data=dataclasses.replace(found.data, recipe=config.data.recipe))


def with_small_crops(config: schema.Config, overridden: Collection[str]) -> schema.Config:
  """Returns the config with small crops of three sevenths of the image, in whole patches, unless their size is set."""
  name, views = 'data.recipe.views.local_px', config.data.recipe.views
  if not views.on or name in overridden or not isinstance(config.model, schema.ViT):
    return config
  px = max(round(3 / 7 * min(config.image_px) / config.model.patch), 1) * config.model.patch
  recipe = dataclasses.replace(config.data.recipe, views=dataclasses.replace(views, local_px=px))
  return dataclasses.replace(config, data=dataclasses.replace(config.data, recipe=recipe))


def describe(config: schema.Config, found: finetune.Splits) -> str:
  """Returns the settings that follow from the number of images and the weights, as overrides to change them."""
  chosen = {'batch_size': config.batch_size, 'length': f"'{config.length}'",
            'image_px': ','.join(map(str, config.image_px)), 'optimizer.lr': f'{config.optimizer.lr:g}'}
  if config.data.recipe.views.on:
    chosen['data.recipe.views.local_px'] = config.data.recipe.views.local_px
  return '\n'.join([
      f'Continuing the pre-training of {config.init_from} with {type(config.objective).__name__}',
      f'on {len(found.train):,} images, evaluated on {len(found.evaluated):,}. Settings that follow from these numbers '
      'and the weights:', *(f'  --config.{name}={value}' for name, value in chosen.items()),
      f"  --warm_heads='{config.optimizer.rules[0].frozen_until}', for which the backbone is frozen"])


def next_commands(workdir: storage.Path, data: str, config: schema.Config) -> str:
  """Returns commands that use a finished run: the view that its evaluations are of."""
  view, = {view for one in config.evals.values() for view in one.views} or {'student'}
  where, source = shlex.quote(str(workdir)), shlex.quote(data)
  return (f'  vit-jax finetune --weights={where} --data={source} --config.init_view={view}\n'
          f'  vit-jax embed --weights={where} --view={view} --data={source} --to=features.npz')
