"""EfficientNet: files of timm."""
from __future__ import annotations

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.weights.families.record import Clues, Family, Files
from vit_jax.weights.preprocess import NORMS, PILLOW
from vit_jax.weights.tables import table

TABLE = table("""
    backbone/{stem,top}/conv/kernel | {conv_stem,conv_head}.weight | filter
    backbone/{stem,top}/norm | {bn1,bn2} | norm
    state/{stem,top}/norm | {bn1,bn2} | statistics
    head | classifier | dense
    backbone/stage1/block{u}/{depthwise,project}/conv/kernel | blocks.0.{u0}.{conv_dw,conv_pw}.weight | filter
    backbone/stage1/block{u}/{depthwise,project}/norm | blocks.0.{u0}.{bn1,bn2} | norm
    state/stage1/block{u}/{depthwise,project}/norm | blocks.0.{u0}.{bn1,bn2} | statistics
    backbone/stage1/block{u}/gate/{down,up} | blocks.0.{u0}.se.{conv_reduce,conv_expand} | point conv
    backbone/stage{t}/block{u}/{expand,depthwise,project}/conv/kernel |
        blocks.{t0}.{u0}.{conv_pw,conv_dw,conv_pwl}.weight | filter
    backbone/stage{t}/block{u}/{expand,depthwise,project}/norm | blocks.{t0}.{u0}.{bn1,bn2,bn3} | norm
    state/stage{t}/block{u}/{expand,depthwise,project}/norm | blocks.{t0}.{u0}.{bn1,bn2,bn3} | statistics
    backbone/stage{t}/block{u}/gate/{down,up} | blocks.{t0}.{u0}.se.{conv_reduce,conv_expand} | point conv
""")
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
