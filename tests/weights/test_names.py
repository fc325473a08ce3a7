"""The list of our path names, and the tables that go by it."""
from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights import made
from vit_jax.config import schema
from vit_jax.config.schema import PositionsAt
from vit_jax.core import trees
from vit_jax.models import backbones
from vit_jax.weights import network, tables
from vit_jax.weights.families import clip, flax, rivals, selfsup, timm, tips, transformers, vit

LAYERS = {'positions.at': PositionsAt.LAYERS}
VITS = [{}, {'pool.distillation': True, 'registers': 1, 'block.layer_scale': .1, 'attention.qk_norm': True,
             'mlp': schema.SwiGlu(48)}, {'pool': schema.Map()}, {'pool': schema.Mean(), 'block': schema.Axial()},
        {'positions': schema.Learned2d()}, {'positions': schema.Relative()},
        LAYERS, {'positions': schema.Learned2d(PositionsAt.LAYERS)}, {'stem': schema.ResNetStem((2,))},
        {'stem': schema.ConvStem()}, {'norm_before': True, 'stem.norm': True, 'attention.inner_norm': True,
                                      'mlp.inner_norm': True}]
TABLES = {  # all, those of both kinds of ViTs of timm without the names that only other files have
    'timm': timm.TABLE, 'timm packed': timm.PACKED, 'timm mixer': rivals.MIXER_TIMM, 'timm bit': rivals.BIT_TIMM,
    'efficientnet': rivals.EFFICIENTNET_NAMES, 'bit': rivals.BIT_NAMES,
    'vision_transformer': flax.VISION_TRANSFORMER_NAMES, 'big_vision': flax.BIG_VISION_NAMES,
    'mixer': rivals.MIXER_FLAX, 'tips': tips.MLP, 'tips swiglu': tips.SWIGLU,
    'transformers vit': transformers.VIT, 'transformers dino': transformers.DINO,
    'transformers swiglu': transformers.DINO_SWIGLU, 'clip': clip.TRANSFORMERS, 'dinov3': selfsup.DINOV3_NAMES,
    'aimv2': clip.AIMV2_NAMES, 'mmpretrain': vit.MMPRETRAIN_NAMES}

PATHS = {
    # Vision Transformer; leaves under `blocks` are stacked, depth first
    'backbone/stem/kernel': '[P, P, C, D]',
    'backbone/stem/bias': '[D]',
    'backbone/cls': '[1, 1, D]',
    'backbone/dist': '[1, 1, D]',
    'backbone/registers': '[1, R, D]',
    'backbone/positions': '[1, M, D]: class and distillation token first, none for registers',
    'backbone/positions/(row|column)': '[h, D / 2], [w, D / 2]',
    'backbone/blocks/positions(/(row|column))?': 'as above, of each layer',
    'backbone/blocks/((row|column)/)?norm[12]/(scale|bias)': '[L, D]',
    'backbone/blocks/((row|column)/)?attn/(query|key|value)/kernel': '[L, D, A, K]',
    'backbone/blocks/((row|column)/)?attn/(query|key|value)/bias': '[L, A, K]',
    'backbone/blocks/((row|column)/)?attn/(query|key)_norm/(scale|bias)': '[L, K]',
    'backbone/blocks/attn/relative': '[L, 2 N - 1, A, K]',
    'backbone/blocks/((row|column)/)?attn/out/kernel': '[L, A, K, D]',
    'backbone/blocks/((row|column)/)?attn/out/bias': '[L, D]',
    'backbone/blocks/((row|column)/)?mlp/(up|gate)/kernel': '[L, D, F]',
    'backbone/blocks/((row|column)/)?mlp/(up|gate)/bias': '[L, F]',
    'backbone/blocks/((row|column)/)?mlp/down/kernel': '[L, F, D]',
    'backbone/blocks/((row|column)/)?mlp/down/bias': '[L, D]',
    'backbone/blocks/((row|column)/)?scale[12]': '[L, D]',
    'backbone/blocks/((row|column)/)?(attn|mlp)/norm/(scale|bias)': '[L, D], [L, F]',
    'backbone/(norm|norm_before|stem_norm)/(scale|bias)': '[D]',
    'backbone/pool/probe': '[1, 1, D]',
    'backbone/pool/(attn/(query|key|value|out)|mlp/(up|down)|norm)/(kernel|scale|bias)': 'as in a block, without L',
    # the stem of LV-ViT
    'backbone/stem/conv[123]/kernel': '[side, side, I, W]',
    'backbone/stem/norm[123]/(scale|bias)': '[W]',
    # hybrids and BiT: stages and units from 1
    'backbone/(stem/)?root/kernel': '[7, 7, 3, W]',
    'backbone/stem/root_norm/(scale|bias)': '[W]',
    'backbone/(stem/)?stage[0-9]+/unit[0-9]+/(conv[123]|proj)/kernel': '[side, side, I, O]',
    'backbone/(stem/)?stage[0-9]+/unit[0-9]+/(norm[123]|proj_norm)/(scale|bias)': '[C]',
    # Mixer
    'backbone/blocks/(tokens|channels)/(up|down)/(kernel|bias)': '[L, in, out], [L, out]',
    # EfficientNet: stages and blocks from 1
    'backbone/(stem|top)/(conv/kernel|norm/(scale|bias))': '[side, side, I, O], [C]',
    'backbone/stage[0-9]+/block[0-9]+/(expand|depthwise|project)/(conv/kernel|norm/(scale|bias))':
        '[side, side, I, O], [C]',
    'backbone/stage[0-9]+/block[0-9]+/gate/(down|up)/(kernel|bias)': '[in, out], [out]',
    # running statistics of BatchNorm, in the stem of LV-ViT and in EfficientNet
    'state/stem/norm[123]/(mean|var)': '[W]',
    'state/(stem|top|stage[0-9]+/block[0-9]+/(expand|depthwise|project))/norm/(mean|var)': '[C]',
    # heads; the input of `head_dist` is the distillation token
    '(head|head_dist)/kernel': '[D, C]',
    '(head|head_dist)/bias': '[C]',
    '(head|head_dist)/pre_logits/(kernel|bias)': '[D, D], [D]',
    # the decoder of a masked autoencoder, of width E
    'mask_token': '[1, 1, E]',
    'decoder/(embed|predict)/(kernel|bias)': '[in, out], [out]',
    'decoder/norm/(scale|bias)': '[E]',
    'decoder/blocks/.*': 'as in the backbone',
}
"""Patterns of our path names, with shapes. Axis letters: `core/types.py`. For conditions see the networks' modules."""


def every_path() -> set[str]:
  """Of every kind of network, by its own initialization."""
  found = set()
  for i, changes in enumerate(VITS):
    one = made.network(**changes, decoder=None if i else made.DECODER,
                       head=schema.Head(pre_logits=32 if i == 2 else 0))
    found |= trees.flatten({**one.params, 'state': one.state}).keys()
  for model in (made.MIXER, schema.ResNet((1, 1)), schema.EfficientNet()):
    backbone, image = backbones.build(model, (32, 32)), jnp.zeros((1, 32, 32, 3))
    params, state = jax.eval_shape(lambda b=backbone, x=image: b.init(jax.random.key(0), x))
    found |= trees.flatten({'backbone': params, 'state': state}).keys()
  return found


@pytest.mark.slow(reason='4 s: traces every family')
def test_the_list_of_path_names_is_complete_and_has_no_others() -> None:
  found = every_path()
  unlisted = sorted(name for name in found if not any(re.fullmatch(pattern, name) for pattern in PATHS))
  idle = sorted(pattern for pattern in PATHS if not any(re.fullmatch(pattern, name) for name in found))
  assert unlisted == [] and idle == []


@pytest.mark.parametrize('table', TABLES)
def test_tables_name_only_paths_of_the_list_each_once(table: str) -> None:
  entries = TABLES[table]
  ours = [entry.ours.format(s=1, u=1, t=2) for entry in entries]
  assert len(set(ours)) == len(ours) and len({(e.theirs, e.part) for e in entries}) == len(entries)
  assert [name for name in ours if not any(re.fullmatch(pattern, name) for pattern in PATHS)] == []


@pytest.mark.parametrize('layout', ['SAME', 'DENSE', 'CONV', 'VECTOR', 'POINT', 'POINT_CONV'])
def test_a_layout_is_undone_by_its_inverse(layout: str) -> None:
  one = getattr(tables, layout)
  shape = {'CONV': (5, 3, 2, 4), 'DENSE': (5, 3), 'POINT': (1, 1, 5, 3), 'POINT_CONV': (5, 3, 1, 1)}.get(layout, (6,))
  array = np.random.default_rng(0).random(shape)
  np.testing.assert_array_equal(one.write(one.read(array)), array)
  np.testing.assert_array_equal(tables.CONV.read(np.ones((5, 3, 2, 4))).shape, (2, 4, 3, 5))


def test_stages_and_units_count_from_one_here_and_from_zero_there() -> None:
  table = timm.TABLE
  written, unmatched = tables.write({'backbone/stem/stage2/unit3/conv1/kernel': np.ones((1, 1, 2, 4))}, table)
  assert list(written) == ['patch_embed.backbone.stages.1.blocks.2.conv1.weight'] and not unmatched
  assert list(tables.read(written, table).leaves) == ['backbone/stem/stage2/unit3/conv1/kernel']


def test_every_layer_has_its_place_also_beyond_ten() -> None:
  tensors = {f'blocks.{i}.norm1.weight': np.full(3, i, np.float32) for i in range(12)}
  found = tables.read(tensors, timm.TABLE)
  np.testing.assert_array_equal(found.leaves['backbone/blocks/norm1/scale'][:, 0], np.arange(12))
  assert network.describe(made.MODEL).startswith('ViT of width 32, depth 2, 4 heads')
