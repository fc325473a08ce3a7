"""The list of our path names, and the tables that go by it."""
from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights import made
from vit_jax.config import schema
from vit_jax.config.schema import Pool, Positions, PositionsAt
from vit_jax.core import trees
from vit_jax.models import backbones
from vit_jax.weights import loading, names, names_families, tables

LAYERS = {'positions_at': PositionsAt.LAYERS}
VITS = [{}, {'distilled': True, 'registers': 1, 'layer_scale': .1, 'qk_norm': True, 'swiglu': True}, {'pool': Pool.MAP},
        {'pool': Pool.MEAN, 'axial': True}, {'positions': Positions.LEARNED2D}, {'positions': Positions.RELATIVE},
        LAYERS, {**LAYERS, 'positions': Positions.LEARNED2D}, {'stem': schema.ResNetStem((2,))},
        {'stem': schema.ConvStem()}, {'norm_before': True, 'stem_norm': True, 'attn_norm': True, 'mlp_norm': True}]
TABLES = ('TIMM', 'TIMM_SWIGLU', 'TIMM_MIXER', 'TIMM_BIT', 'TIMM_EFFICIENTNET', 'BIT', 'VISION_TRANSFORMER',
          'BIG_VISION', 'FLAX_MIXER', 'HUGGINGFACE', 'HUGGINGFACE_DINO', 'HUGGINGFACE_DINO_SWIGLU', 'HUGGINGFACE_TOWER',
          'HUGGINGFACE_DINOV3', 'HUGGINGFACE_AIMV2')


def paths() -> set[str]:
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
  found = paths()
  unlisted = sorted(name for name in found if not any(re.fullmatch(pattern, name) for pattern in names.PATHS))
  idle = sorted(pattern for pattern in names.PATHS if not any(re.fullmatch(pattern, name) for name in found))
  assert unlisted == [] and idle == []


@pytest.mark.parametrize('table', TABLES)
def test_tables_name_only_paths_of_the_list_each_once(table: str) -> None:
  entries = getattr(names, table, None) or getattr(names_families, table)
  ours = [entry.ours.format(s=1, u=1, t=2) for entry in entries]
  assert len(set(ours)) == len(ours) and len({(e.theirs, e.part) for e in entries}) == len(entries)
  assert [name for name in ours if not any(re.fullmatch(pattern, name) for pattern in names.PATHS)] == []


@pytest.mark.parametrize('layout', ['SAME', 'DENSE', 'CONV', 'VECTOR', 'POINT', 'POINT_CONV'])
def test_a_layout_is_undone_by_its_inverse(layout: str) -> None:
  from vit_jax.weights import layouts
  one = getattr(layouts, layout)
  shape = {'CONV': (5, 3, 2, 4), 'DENSE': (5, 3), 'POINT': (1, 1, 5, 3), 'POINT_CONV': (5, 3, 1, 1)}.get(layout, (6,))
  array = np.random.default_rng(0).random(shape)
  np.testing.assert_array_equal(one.write(one.read(array)), array)
  np.testing.assert_array_equal(layouts.CONV.read(np.ones((5, 3, 2, 4))).shape, (2, 4, 3, 5))


def test_stages_and_units_count_from_one_here_and_from_zero_there() -> None:
  table = names.TIMM
  written, unmatched = tables.write({'backbone/stem/stage2/unit3/conv1/kernel': np.ones((1, 1, 2, 4))}, table)
  assert list(written) == ['patch_embed.backbone.stages.1.blocks.2.conv1.weight'] and not unmatched
  assert list(tables.read(written, table).leaves) == ['backbone/stem/stage2/unit3/conv1/kernel']


def test_every_layer_has_its_place_also_beyond_ten() -> None:
  tensors = {f'blocks.{i}.norm1.weight': np.full(3, i, np.float32) for i in range(12)}
  found = tables.read(tensors, names.TIMM)
  np.testing.assert_array_equal(found.leaves['backbone/blocks/norm1/scale'][:, 0], np.arange(12))
  assert loading.describe(made.MODEL).startswith('ViT of width 32, depth 2, 4 heads')
