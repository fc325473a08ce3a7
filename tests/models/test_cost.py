"""Tests of the cost of ViTs: against published counts, XLA, and computations by hand."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import schema
from vit_jax.config.schema import Execution, Remat
from vit_jax.core import trees
from vit_jax.core.types import Array, Params
from vit_jax.models import cost
from vit_jax.models.heads import Head
from vit_jax.models.vit import vit
from vit_jax.recipes import sizes

PX = (224, 224)
PUBLISHED = [  # vision_transformer, models_test.py, and with 21,843 classes the same code
    ('Ti/16', 1000, 5_717_416), ('S/16', 1000, 22_050_664), ('S/32', 1000, 22_878_952),
    ('B/8', 1000, 86_576_872), ('B/16', 1000, 86_567_656), ('B/32', 1000, 88_224_232),
    ('L/16', 1000, 304_326_632), ('L/32', 1000, 306_535_400), ('H/14', 1000, 632_045_800),
    ('Ti/16', 21_843, 9_740_115), ('S/16', 21_843, 30_075_219), ('B/16', 21_843, 102_595_923),
    ('B/32', 21_843, 104_252_499), ('L/16', 21_843, 325_690_707), ('H/14', 21_843, 658_745_683)]
PUBLISHED_MEAN = [  # the same source, names ending in -gap-norep
    ('S/16', 22_049_896), ('B/16', 86_566_120), ('S/32', 22_878_184), ('B/32', 88_222_696)]
PUBLISHED_MAP = [  # big_vision, attention pooling, no head
    ('B/16', 92_884_224), ('L/16', 315_894_784), ('So400m/14', 427_680_704), ('g/14', 1_036_448_384),
    ('G/14', 1_881_132_416), ('g-opt/16', 1_163_076_096), ('e/14', 3_873_342_720)]
GMACS = [  # timm's benchmark, forward pass
    ('S/16', 224, 4.60), ('B/32', 224, 4.41), ('B/16', 224, 17.56), ('B/16', 384, 55.5), ('B/8', 224, 78.1),
    ('L/16', 224, 61.6), ('L/16', 384, 191.1), ('H/14', 224, 167.3), ('g/14', 224, 267.0),
    ('G/14', 224, 483.7)]


def count(settings: schema.ViT, *, num_classes: int, head: schema.Head | None = None,
          px: tuple[int, int] = PX) -> int:
  """Parameters of the abstract trees."""
  head = head or schema.Head()
  image, key = jax.ShapeDtypeStruct((1, *px, 3), jnp.float32), jax.random.key(0)
  params, _ = jax.eval_shape(vit.build(settings, px).init, key, image)
  if num_classes:
    params['head'] = jax.eval_shape(lambda k: Head(head).init(k, settings.width, num_classes), key)
  return trees.num_elements(params)


@pytest.mark.parametrize('name, num_classes, expected', PUBLISHED)
def test_sizes_with_class_token_have_the_published_number_of_parameters(
    name: str, num_classes: int, expected: int) -> None:
  assert count(sizes.vit(name), num_classes=num_classes) == expected


@pytest.mark.parametrize('name, expected', PUBLISHED_MEAN)
def test_sizes_with_mean_pooling_have_the_published_number_of_parameters(name: str, expected: int) -> None:
  assert count(dataclasses.replace(sizes.vit(name), pool=schema.Mean()), num_classes=1000) == expected


def test_the_plain_baseline_has_the_published_number_of_parameters() -> None:
  settings = dataclasses.replace(sizes.vit('S/16'), pool=schema.Mean(), positions=schema.SinCos())
  assert count(settings, num_classes=1000) == 21_974_632  # big_vision, S/16 gap + sincos2d
  with_pre_logits = schema.Head(pre_logits=384)
  assert count(settings, num_classes=1000, head=with_pre_logits) == 22_122_472  # and rep_size


def test_pre_logits_add_a_square_layer() -> None:
  plain = count(sizes.vit('B/16'), num_classes=21_843)
  wide = count(sizes.vit('B/16'), num_classes=21_843, head=schema.Head(pre_logits=768))
  assert wide - plain == 768 * 769 and wide == 103_186_515  # the size of the published B/16 file


@pytest.mark.parametrize('name, expected', PUBLISHED_MAP)
def test_sizes_with_attention_pooling_have_the_published_number_of_parameters(name: str, expected: int) -> None:
  assert count(dataclasses.replace(sizes.vit(name), pool=schema.Map()), num_classes=0) == expected


@pytest.mark.parametrize('name, expected', [  # the state dicts of DINOv2 at 518 px, without their mask token
    ('DINOv2-S/14', 22_056_576 - 384), ('DINOv2-B/14', 86_580_480 - 768), ('DINOv2-L/14', 304_368_640 - 1024),
    ('DINOv2-g/14', 1_136_480_768 - 1536), ('DINOv2-reg-B/14', 86_580_480 - 768 + 4 * 768)])
def test_dinov2_has_the_published_number_of_parameters(name: str, expected: int) -> None:
  assert count(sizes.published(name), num_classes=0, px=(518, 518)) == expected


def test_deit3_has_the_published_number_of_parameters() -> None:
  row_of_class_token = 768  # DeiT-III adds positions before the class token; here the class token has one
  assert count(sizes.published('DeiT-III-B/16'), num_classes=1000) - row_of_class_token == 86_585_320


def test_the_kernels_of_vit_22b_have_the_published_number_of_parameters() -> None:
  image = jax.ShapeDtypeStruct((1, *PX, 3), jnp.float32)
  params, _ = jax.eval_shape(vit.build(sizes.published('ViT-22B/14'), PX).init, jax.random.key(0), image)
  kernels = {name: leaf.size for name, leaf in trees.flatten(params['blocks']).items() if name.endswith('kernel')}
  assert round(sum(kernels.values()) / 1e6) == 21_743  # ViT-22B, Table 1, in millions
  count(sizes.published('ViT-22B/14'), num_classes=0)


@pytest.mark.parametrize('patch', [16, 32])
def test_axial_models_have_two_blocks_a_layer_and_no_class_token(patch: int) -> None:
  block = 4 * (768 * 768 + 768) + (768 * 3072 + 3072) + (3072 * 768 + 768) + 2 * 2 * 768  # MSA, MLP, two norms
  expected = (patch * patch * 3 + 1) * 768 + (224 // patch) ** 2 * 768 + 12 * 2 * block + 2 * 768
  assert count(sizes.published(f'Axial-ViT-B/{patch}'), num_classes=0) == expected


def test_axial_attention_costs_the_sum_of_the_sides() -> None:
  model = dataclasses.replace(sizes.published('Axial-ViT-B/16'), patch=8)
  flops = cost.forward(model, (16, 24), head=schema.Head(), num_classes=0).flops
  rows, columns = 2 * 3 ** 2, 3 * 2 ** 2  # pairs of tokens
  products = sum(count for module, count in flops.items() if module.endswith('attn'))
  assert products == 2 * 12 * 2 * (rows + columns) * 768


@pytest.mark.parametrize('name, px, gmacs', GMACS)
def test_flops_equal_the_published_ones(name: str, px: int, gmacs: float) -> None:
  flops = cost.forward(sizes.vit(name), (px, px), head=schema.Head(), num_classes=1000).flops
  np.testing.assert_allclose(sum(flops.values()) / 2e9, gmacs, rtol=2e-3)


def loss_of(settings: schema.ViT, px: tuple[int, int]
            ) -> tuple[Callable[[Params, Array], Array], Params, jax.ShapeDtypeStruct]:
  """The sum of pooled features as a function, with abstract arguments for one image."""
  backbone = vit.build(settings, px)
  image = jax.ShapeDtypeStruct((1, *px, 3), jnp.float32)
  params, _ = jax.eval_shape(backbone.init, jax.random.key(0), image)
  return lambda p, x: backbone.apply(p, {}, x, train=False, key=None)[0].pooled.sum(), params, image


@pytest.mark.parametrize('train', [False, True])
def test_flops_agree_with_those_that_xla_counts_in_an_unrolled_model(train: bool) -> None:
  settings, px = schema.ViT(patch=8, width=256, depth=2, heads=4, mlp=schema.Mlp(1024)), (32, 40)
  loss, params, image = loss_of(settings, px)
  function = jax.grad(loss) if train else loss
  analysis = jax.jit(function).lower(params, image).cost_analysis()
  assert analysis is not None
  if train:
    analytic = cost.train_flops(settings, px, head=schema.Head(), num_classes=0)
  else:
    analytic = sum(cost.forward(settings, px, head=schema.Head(), num_classes=0).flops.values())
  np.testing.assert_allclose(analysis['flops'], analytic, rtol=.05)  # XLA counts elementwise work too


def test_flops_are_shown_by_module_and_do_not_depend_on_how_the_network_is_run() -> None:
  model = schema.ViT(patch=8, width=32, depth=2, heads=4, mlp=schema.Mlp(48))
  flops = cost.forward(model, (16, 24), head=schema.Head(), num_classes=10).flops
  square = 2 * 2 * 7 * 32 * 32  # two layers, two FLOPs
  assert flops == {'stem': 2 * 6 * 192 * 32, 'blocks/attn/query': square, 'blocks/attn/key': square,
                   'blocks/attn/value': square, 'blocks/attn': 2 * 2 * 2 * 7 * 7 * 32, 'blocks/attn/out': square,
                   'blocks/mlp/up': 2 * 2 * 7 * 32 * 48, 'blocks/mlp/down': 2 * 2 * 7 * 32 * 48,
                   'head': 2 * 32 * 10}
  other = dataclasses.replace(model, remat=Remat.FULL, execution=Execution.UNROLLED, full_remat=1)
  assert cost.forward(other, (16, 24), head=schema.Head(), num_classes=10).flops == flops


def test_the_table_lists_every_parameter_and_adds_up_the_modules() -> None:
  params = {'blocks': {'attn': {'query': {'kernel': np.zeros((2, 32, 4, 8))}}}, 'cls': np.zeros((1, 1, 32))}
  table = cost.table(params, {'stem': 1_500_000, 'blocks/attn': 2_000_000, 'pool': 0})
  assert 'blocks/attn/query/kernel  2 x 32 x 4 x 8       2,048' in table
  assert 'all parameters                                 2,080' in table
  assert [line.split()[0] for line in table.splitlines()[-3:]] == ['stem', 'blocks/attn', 'all']
  assert table.splitlines()[-1].split()[-1] == '3.500'
