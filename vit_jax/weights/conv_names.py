"""What the parameters of convolutional networks are called in weight files: BiT and EfficientNet.

Entries and counters are as in `names.py`. Running statistics are named by their paths below `state`.
"""
from __future__ import annotations

from vit_jax.weights.layouts import CONV, POINT, POINT_CONV, SAME, VECTOR
from vit_jax.weights.names import Entry, Table, layer, norm, timm_unit


def _bit_unit(ours: str, theirs: str) -> list[Entry]:
  """A unit of BiT: what is normed before each of its convolutions lies with it."""
  found = [Entry(f'{ours}/proj/kernel', f'{theirs}/a/proj/standardized_conv2d/kernel', SAME)]
  for i, letter in enumerate('abc', 1):
    found += [Entry(f'{ours}/conv{i}/kernel', f'{theirs}/{letter}/standardized_conv2d/kernel', SAME),
              Entry(f'{ours}/norm{i}/scale', f'{theirs}/{letter}/group_norm/gamma', VECTOR),
              Entry(f'{ours}/norm{i}/bias', f'{theirs}/{letter}/group_norm/beta', VECTOR)]
  return found


BIT: Table = (
    Entry('backbone/root/kernel', 'resnet/root_block/standardized_conv2d/kernel', SAME),
    *_bit_unit('backbone/stage{s}/unit{u}', 'resnet/block{s}/unit{u2}'),
    Entry('backbone/norm/scale', 'resnet/group_norm/gamma', VECTOR),
    Entry('backbone/norm/bias', 'resnet/group_norm/beta', VECTOR),
    Entry('head/kernel', 'resnet/head/conv2d/kernel', POINT), Entry('head/bias', 'resnet/head/conv2d/bias', SAME),
)
TIMM_BIT: Table = (
    Entry('backbone/root/kernel', 'stem.conv.weight', CONV),
    *(entry for entry in timm_unit('backbone/stage{s}/unit{u}', 'stages.{s0}.blocks.{u0}')
      if 'proj_norm' not in entry.ours),
    *norm('backbone/norm', 'norm'), *layer('head', 'head.fc', layout=POINT_CONV),
)


def _conv_norm(ours: str, conv: str, batch_norm: str) -> list[Entry]:
  """A convolution and its BatchNorm, whose running statistics are of the state."""
  return [Entry(f'backbone/{ours}/conv/kernel', f'{conv}.weight', CONV), *norm(f'backbone/{ours}/norm', batch_norm),
          Entry(f'state/{ours}/norm/mean', f'{batch_norm}.running_mean', SAME),
          Entry(f'state/{ours}/norm/var', f'{batch_norm}.running_var', SAME)]


def _gate(ours: str, theirs: str) -> list[Entry]:
  return [*layer(f'backbone/{ours}/gate/down', f'{theirs}.se.conv_reduce', layout=POINT_CONV),
          *layer(f'backbone/{ours}/gate/up', f'{theirs}.se.conv_expand', layout=POINT_CONV)]


_FIRST, _LATER = 'blocks.0.{u0}', 'blocks.{t0}.{u0}'
TIMM_EFFICIENTNET: Table = (
    *_conv_norm('stem', 'conv_stem', 'bn1'), *_conv_norm('top', 'conv_head', 'bn2'), *layer('head', 'classifier'),
    *_conv_norm('stage1/block{u}/depthwise', f'{_FIRST}.conv_dw', f'{_FIRST}.bn1'),
    *_gate('stage1/block{u}', _FIRST), *_conv_norm('stage1/block{u}/project', f'{_FIRST}.conv_pw', f'{_FIRST}.bn2'),
    *_conv_norm('stage{t}/block{u}/expand', f'{_LATER}.conv_pw', f'{_LATER}.bn1'),
    *_conv_norm('stage{t}/block{u}/depthwise', f'{_LATER}.conv_dw', f'{_LATER}.bn2'),
    *_gate('stage{t}/block{u}', _LATER),
    *_conv_norm('stage{t}/block{u}/project', f'{_LATER}.conv_pwl', f'{_LATER}.bn3'),
)
"""Blocks of the first stage do not expand, so that their convolutions have other names."""
