"""Tests of the cost of BiT, hybrids, Mixer, EfficientNet and LV-ViT: published figures, XLA."""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.models import backbones, cost
from vit_jax.models.heads import Head
from vit_jax.recipes import catalog, sizes

PLAIN = schema.Head()
SMALL = schema.ViT(patch=8, width=192, depth=1, heads=3, mlp=schema.Mlp(384))
PUBLISHED = [  # parameters with 1,000 classes at 224 px
    # vision_transformer, models_test.py
    ('R+Ti/16', 6_337_704), ('R26+S/32', 36_431_912), ('R26+B/32', 101_383_976), ('R50+B/16', 98_659_112),
    ('R50+L/32', 328_994_856), ('Mixer-B/16', 59_880_472), ('Mixer-B/32', 60_293_428), ('Mixer-L/16', 208_196_168),
    # timm
    ('BiT-R50x1', 25_549_352), ('BiT-R50x3', 217_319_080), ('BiT-R101x1', 44_541_480), ('BiT-R101x3', 387_934_888),
    ('BiT-R152x2', 236_335_208), ('BiT-R152x4', 936_533_224),
    ('EfficientNet-B0', 5_288_548), ('EfficientNet-B1', 7_794_184), ('EfficientNet-B2', 9_109_994),
    ('EfficientNet-B3', 12_233_232), ('EfficientNet-B4', 19_341_616), ('EfficientNet-B5', 30_389_784),
    ('EfficientNet-B6', 43_040_704), ('EfficientNet-B7', 66_347_960), ('EfficientNet-B8', 87_413_142),
    ('EfficientNet-L2', 480_309_308)]
IN_MILLIONS = [  # MLP-Mixer, Table 1, to its two digits, without head
    ('Mixer-S/32', 19.), ('Mixer-S/16', 18.), ('Mixer-B/32', 60.), ('Mixer-B/16', 59.), ('Mixer-L/32', 206.),
    ('Mixer-L/16', 207.), ('Mixer-H/14', 431.)]
LV_VIT = [  # LV-ViT, Table 1: millions with both heads; L at 448 px
    ('LV-ViT-T/16', 224, 8.53), ('LV-ViT-S/16', 224, 26.15), ('LV-ViT-M/16', 224, 55.83), ('LV-ViT-L/16', 448, 150.47)]
DISTILLED = [  # DeiT's files, both heads
    ('DeiT-distilled-Ti/16', 5_910_800), ('DeiT-distilled-S/16', 22_436_432), ('DeiT-distilled-B/16', 87_338_192)]
MACS = [  # what torch.utils.flop_counter counts of timm's models, forward pass, with 1,000 classes
    ('BiT-R50x1', 224, 4_089_184_256), ('BiT-R152x4', 480, 839_254_016_000), ('EfficientNet-B0', 224, 385_814_752),
    ('EfficientNet-B7', 600, 37_745_884_192), ('EfficientNet-L2', 475, 170_892_857_680),
    ('Mixer-B/16', 224, 12_601_767_936), ('R+Ti/16', 224, 433_681_920), ('R26+S/32', 224, 3_463_851_008),
    ('R50+L/32', 224, 19_413_295_104)]
GMACS = [('BiT-R152x4', 480, 844.84), ('EfficientNet-L2', 475, 172.11), ('EfficientNet-L2', 800, 479.12)]
"""timm's benchmark, which counts some elementwise work too."""


def count(model: schema.Model, num_classes: int, px: int = 224) -> int:
  """Parameters of the abstract trees, with a linear head."""
  image, key = jax.ShapeDtypeStruct((1, px, px, 3), jnp.float32), jax.random.key(0)
  backbone = backbones.build(model, (px, px))
  params, state = jax.eval_shape(backbone.init, key, image)
  if num_classes:
    features = jax.eval_shape(lambda p, s, x: backbone.apply(p, s, x, train=False, key=None)[0], params, state, image)
    params['head'] = jax.eval_shape(lambda k: Head(PLAIN).init(k, features.pooled.shape[-1], num_classes), key)
  return trees.num_elements(params)


@pytest.mark.parametrize('name, expected', PUBLISHED)
def test_models_by_name_have_the_published_number_of_parameters(name: str, expected: int) -> None:
  assert catalog.model(name).parameters == expected


@pytest.mark.parametrize('name, expected', IN_MILLIONS)
def test_mixers_have_the_size_of_the_papers_table(name: str, expected: float) -> None:
  assert abs(count(sizes.model(name), 0) / 1e6 - expected) < 1.


@pytest.mark.parametrize('name, px, expected', LV_VIT)
def test_lv_vit_has_the_size_of_the_papers_table(name: str, px: int, expected: float) -> None:
  model = sizes.model(name)
  assert isinstance(model, schema.ViT)
  assert round((count(model, 1000, px) + (model.width + 1) * 1000) / 1e6, 2) == expected


@pytest.mark.parametrize('name, expected', DISTILLED)
def test_deit_with_distillation_token_has_the_published_number_of_parameters(name: str, expected: int) -> None:
  model = sizes.model(name)
  assert isinstance(model, schema.ViT)
  assert count(model, 1000) + (model.width + 1) * 1000 == expected


@pytest.mark.dear(*(f'{name}-{px}-{macs}' for name, px, macs in MACS if px > 224 or name == 'R50+L/32'),
                  reason='1 to 3 s of tracing')
@pytest.mark.parametrize('name, px, macs', MACS)
def test_flops_are_those_that_torch_counts(name: str, px: int, macs: int) -> None:
  flops = cost.forward(sizes.model(name), (px, px), head=PLAIN, num_classes=1000).flops
  assert sum(flops.values()) == 2 * macs


@pytest.mark.slow(reason='1 to 3 s of tracing')
@pytest.mark.parametrize('name, px, gmacs', GMACS)
def test_flops_are_near_the_published_ones(name: str, px: int, gmacs: float) -> None:
  flops = cost.forward(sizes.model(name), (px, px), head=PLAIN, num_classes=1000).flops
  np.testing.assert_allclose(sum(flops.values()) / 2e9, gmacs, rtol=.01)


@pytest.mark.quick('resnet', reason='1 s: compiles a network')
@pytest.mark.parametrize('model', [
    schema.ResNet(layers=(2, 2)), dataclasses.replace(networks.MIXER, width=128, channels_mlp=512, tokens_mlp=128),
    schema.EfficientNet(depth_factor=.3), dataclasses.replace(SMALL, stem=schema.ResNetStem((1, 2))),
    dataclasses.replace(SMALL, stem=schema.ConvStem())], ids=['resnet', 'mixer', 'efficientnet', 'hybrid', 'lv'])
def test_flops_agree_with_those_that_xla_counts(model: schema.Model) -> None:
  px = (256, 192)  # large, so that XLA, which leaves out products with padding, leaves out little
  backbone, image = backbones.build(model, px), jax.ShapeDtypeStruct((1, *px, 3), jnp.float32)
  params, state = jax.eval_shape(backbone.init, jax.random.key(0), image)
  run = jax.jit(lambda p, s, x: backbone.apply(p, s, x, train=False, key=None)[0].pooled)
  # As for a GPU: on a CPU a depthwise convolution is a loop, whose body XLA counts once.
  counted = run.trace(params, state, image).lower(lowering_platforms=('cuda',)).cost_analysis()
  assert counted is not None
  analytic = sum(cost.forward(model, px, head=PLAIN, num_classes=0).flops.values())
  np.testing.assert_allclose(counted['flops'], analytic, rtol=.07)  # XLA counts elementwise work too
