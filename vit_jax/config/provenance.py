"""The settings that decide what trained weights compute from an image; each checkpoint carries them.

`config.json` of a run directory is a file beside the checkpoints, and may be another run's: replaced by hand, or by a
start that changed it after the checkpoint was saved. Shapes tell only a part of such differences. What differs between
training and evaluation alone, such as dropout, or in rounding alone, such as the dtype, is not compared.
"""
from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from vit_jax.config import engine, schema
from vit_jax.core.errors import UserError

SETTINGS = 'settings'
"""Key of a checkpoint's `meta`."""
_RUNNING = ('dtype', 'quantize', 'execution', 'unroll', 'remat', 'full_remat', 'kernel', 'dropout', 'drop_path',
            'drop_path_even', 'patch_dropout', 'bias_init', 'probe', 'init')
"""Settings of a network that evaluation does not depend on."""
_PREPROCESSING = ('eval_resize_px', 'eval_geometry', 'eval_area', 'interpolation', 'antialias', 'truncate', 'mean',
                  'std', 'eval_native_patch', 'exif_orientation')
_DECODING = ('type', 'norm_pix_loss', 'decoder_heads')
log = logging.getLogger('vit_jax.config')


def settings(config: schema.Config) -> dict[str, Any]:
  """Returns the settings by name, such as `model.gelu`, with values as JSON has them."""
  plain = engine.to_plain(config)
  of_network = {**engine.flat(plain['model'], 'model'), **engine.flat(plain['head'], 'head')}
  return {
      **{name: value for name, value in of_network.items() if name.split('.')[-1] not in _RUNNING},
      **{f'objective.{name}': plain['objective'][name] for name in _DECODING if name in plain['objective']},
      'image_px': plain['image_px'],
      **{f'data.recipe.{name}': plain['data']['recipe'][name] for name in _PREPROCESSING}}


def is_preprocessing(name: str) -> bool:
  """Returns whether a setting is of images, and not of the network."""
  return name.startswith('data.')


def differences(meta: Mapping[str, Any], config: schema.Config) -> dict[str, tuple[Any, Any]]:
  """Returns the settings that a checkpoint and a config both state and that differ.

  Each is given by its name as (checkpoint's, config's).

  Args:
    meta: of the checkpoint.
    config: to compare it with.
  """
  saved, in_config = meta.get(SETTINGS), settings(config)
  if not isinstance(saved, Mapping):
    return {}
  return {name: (value, in_config[name]) for name, value in saved.items()
          if name in in_config and in_config[name] != value}


def check(meta: Mapping[str, Any], config: schema.Config, *, said: str, overridden: Collection[str] = ()) -> None:
  """Compares a checkpoint with the config that it is to be used with.

  Args:
    meta: of the checkpoint.
    config: to be used.
    said: where the config comes from, such as the path of `config.json`.
    overridden: settings that a person has given: a difference in these is logged.

  Raises:
    UserError: lists the settings that differ.
  """
  intended: dict[str, tuple[Any, Any]] = {}
  wrong: dict[str, tuple[Any, Any]] = {}
  for name, pair in differences(meta, config).items():
    is_overridden = any(f'{name}.'.startswith(f'{setting}.') for setting in overridden)
    (intended if is_overridden else wrong)[name] = pair
  if intended:
    log.warning('Settings that differ from those that the checkpoint was saved with:\n%s', text(intended))
  if wrong:
    name, (value, _) = next(iter(wrong.items()))
    raise UserError(f'{said}: expected the settings that checkpoint {meta.get("step", "?")} was saved with, got '
                    f'others:\n{text(wrong)}\nRestore that file, or where the job takes a config, set these settings, '
                    f'for example --config.{name}={_shown(value)}')


def text(differing: Mapping[str, tuple[Any, Any]]) -> str:
  """Returns a line for each of `differences`."""
  return '\n'.join(f'  {name}: {_shown(saved)} in the checkpoint, {_shown(now)} in the config'
                   for name, (saved, now) in differing.items())


def _shown(value: Any) -> str:
  """Returns a value of JSON as it is typed after `--config.NAME=`."""
  return ','.join(map(str, value)) if isinstance(value, list) else str(value)
