"""EfficientNet: files of timm."""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.weights.families.record import Clues, Family, Files
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import CONV, POINT_CONV, SAME, Entry, Table, layer, norm


def _conv_norm(ours: str, conv: str, batch_norm: str) -> list[Entry]:
  """Returns the entries of a convolution and its BatchNorm, whose running statistics belong to the state."""
  return [Entry(f'backbone/{ours}/conv/kernel', f'{conv}.weight', CONV), *norm(f'backbone/{ours}/norm', batch_norm),
          Entry(f'state/{ours}/norm/mean', f'{batch_norm}.running_mean', SAME),
          Entry(f'state/{ours}/norm/var', f'{batch_norm}.running_var', SAME)]


def _gate(ours: str, theirs: str) -> list[Entry]:
  return [*layer(f'backbone/{ours}/gate/down', f'{theirs}.se.conv_reduce', layout=POINT_CONV),
          *layer(f'backbone/{ours}/gate/up', f'{theirs}.se.conv_expand', layout=POINT_CONV)]


_FIRST, _LATER = 'blocks.0.{u0}', 'blocks.{t0}.{u0}'
TABLE: Table = (
    *_conv_norm('stem', 'conv_stem', 'bn1'), *_conv_norm('top', 'conv_head', 'bn2'), *layer('head', 'classifier'),
    *_conv_norm('stage1/block{u}/depthwise', f'{_FIRST}.conv_dw', f'{_FIRST}.bn1'),
    *_gate('stage1/block{u}', _FIRST), *_conv_norm('stage1/block{u}/project', f'{_FIRST}.conv_pw', f'{_FIRST}.bn2'),
    *_conv_norm('stage{t}/block{u}/expand', f'{_LATER}.conv_pw', f'{_LATER}.bn1'),
    *_conv_norm('stage{t}/block{u}/depthwise', f'{_LATER}.conv_dw', f'{_LATER}.bn2'),
    *_gate('stage{t}/block{u}', _LATER),
    *_conv_norm('stage{t}/block{u}/project', f'{_LATER}.conv_pwl', f'{_LATER}.bn3'),
)
"""Blocks of the first stage have no expansion, so their convolutions have other names."""


def _warn(_: schema.Model, clues: Clues) -> list[str]:
  """Returns a warning if nothing says that it is a network of the authors. Raises UserError if it is another."""
  if other := [name for name in clues.names if name.startswith('efficientnet_')]:
    raise UserError(f'expected a network of the authors, tf_efficientnet_…, got {other[0]}, which pads as PyTorch does '
                    'and has another epsilon. Use the tf_ variant.')
  is_known = clues.has_config or any(name.startswith('tf_efficientnet_') for name in clues.names)
  return [] if is_known else ['it is assumed to be a tf_efficientnet_…; the efficientnet_… of timm have the same '
                              'tensors, and other results']


FAMILY = Family(
    'efficientnet', 'EfficientNet', 'timm, with running statistics',
    files=(Files('timm', lambda t: 'conv_stem.weight' in t, TABLE, warn=_warn, label='efficientnet', formats=('timm',),
                 network=schema.EfficientNet),),
    images={**NORMS['imagenet'], **PILLOW, 'resize': .875})
