"""BiT, hybrids, Mixer and EfficientNet on a mesh: every parameter has a rule, and gradients agree on any mesh."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import networks
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.jobs import build
from vit_jax.recipes import sizes

DATA = fakes.normalized(programs.batch(size=16, px=16))
SPLIT = 'data=2,fsdp=2,tensor=2'
VIT = schema.ViT(patch=4, width=32, depth=1, heads=4, mlp=48)
MODELS: dict[str, schema.Model] = {
    **networks.MODELS, 'efficientnet': schema.EfficientNet(width_factor=.25, depth_factor=.1, dropout=0., drop_path=0.),
    'lv': dataclasses.replace(VIT, stem=schema.ConvStem(width=8), qkv_bias=False, branch_scale=.5),
    'hybrid': dataclasses.replace(VIT, stem=schema.ResNetStem((1,), width=32))}
NAMES = ['BiT-R50x1', 'R+Ti/16', 'R26+S/32', 'R50+B/16', 'Mixer-B/16', 'EfficientNet-B0', 'LV-ViT-T/16',
         'DeiT-distilled-Ti/16']


def config(model: schema.Model) -> schema.Config:
  return schema.Config(image_px=(16, 16), batch_size=16, model=model)


@functools.cache
def found(name: str, settings: str) -> dict[str, Any]:
  c = config(MODELS[name])
  task = build.build_objective(c, build.build_backbone(c), 7, lengths=programs.LENGTHS)
  return programs.gradients(task, programs.MESHES[settings], batch=DATA)


@pytest.mark.slow(reason='3 to 20 s: two programs of a network')
@pytest.mark.parametrize('name', ['lv', pytest.param('mixer', marks=pytest.mark.slow(reason='3 s')),
                                  pytest.param('hybrid', marks=pytest.mark.slow(reason='6 s')),
                                  pytest.param('resnet', marks=pytest.mark.slow(reason='6 s')),
                                  pytest.param('efficientnet', marks=pytest.mark.slow(reason='20 s'))])
def test_gradients_agree_on_one_device_and_on_a_mesh_split_three_ways(name: str) -> None:
  for part, want in found(name, 'one').items():
    # The longest sums are over the 16 x 9 tokens of the batch; two layers have some 30 operations, forth and back.
    programs.assert_reordered(found(name, SPLIT)[part], want, terms=144, operations=30)


@pytest.mark.slow(reason='2 s: two programs')
def test_the_statistics_of_a_split_batch_are_those_of_the_whole() -> None:
  moved = trees.flatten(found('lv', SPLIT)['extra'])
  still = programs.draw(moved)
  assert len(moved) == 6 and all(np.abs(leaf - still[k]).max() > 0 for k, leaf in moved.items()), moved.keys()


@pytest.mark.dear('R50+B/16', 'R26+S/32', 'Mixer-B/16', 'EfficientNet-B0', 'BiT-R50x1', reason='1 to 2 s of tracing')
@pytest.mark.parametrize('name', NAMES)
def test_every_large_kernel_is_split(name: str) -> None:
  backbone = build.build_backbone(schema.Config(model=sizes.model(name)))

  def init() -> Any:
    return backbone.init(jax.random.key(0), jnp.zeros((1, 224, 224, 3)))[0]

  specs = trees.flatten(programs.specs(init, on=programs.mesh(programs.MESHES[SPLIT])))
  leaves = trees.flatten(jax.eval_shape(init))
  whole = [n for n, spec in specs.items() if n.endswith('kernel') and not any(spec) and leaves[n].size > 10_000]
  assert not whole
