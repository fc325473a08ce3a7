"""Model sizes by name: ViTs, published variants, BiT, Mixer, EfficientNet, and the small networks of studies."""
from __future__ import annotations

import dataclasses

import pytest

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.models import cost
from vit_jax.recipes import sizes


def problems(model: schema.Model, image_px: tuple[int, int] = (0, 0)) -> list[str]:
  """Problems of a model, for images of 16 x 16 patches where no size is given."""
  side = 16 * getattr(model, 'patch', 14)
  return check.problems(schema.Config(model=model, image_px=image_px if image_px[0] else (side, side)), of='model')


def test_a_name_gives_the_published_sizes() -> None:
  model = sizes.vit('B/16')
  assert (model.width, model.depth, model.heads, model.mlp.hidden, model.patch) == (768, 12, 12, 3072, 16)
  assert sizes.vit('ViT-B/16') == sizes.vit('B_16') == model


def test_any_patch_side_is_taken() -> None:
  assert sizes.vit('So400m/14').patch == 14


def test_a_name_decides_sizes_and_nothing_else() -> None:
  model, plain = sizes.vit('H/14'), schema.ViT()
  assert (model.pool, model.positions, model.dropout, model.gelu) == (
      plain.pool, plain.positions, plain.dropout, plain.gelu)


@pytest.mark.parametrize('name', sorted(sizes.VIT))
def test_heads_divide_the_width_and_sincos_positions_fit(name: str) -> None:
  size = sizes.VIT[name]
  assert size.width % size.heads == 0 and size.width % 4 == 0


def test_a_size_with_a_dash_is_not_taken_for_another() -> None:
  assert sizes.vit('g-opt/16').width == sizes.vit('ViT-g-opt/16').width == 1536 and sizes.vit('ViT-g/14').width == 1408
  assert (sizes.vit('mu/16').depth, sizes.vit('G-opt/14').mlp.hidden, sizes.vit('e/14').mlp.hidden) == (1, 8192, 15360)


def test_the_swiglu_of_dinov2_g_has_4096_hidden_units() -> None:
  assert sizes.swiglu_hidden(1536) == 4096 and sizes.swiglu_hidden(384) == 1024
  assert sizes.swiglu_hidden(100) == 272  # 266.67 rounded down, then up to a multiple of 8


@pytest.mark.parametrize('name', sizes.PUBLISHED)
def test_a_published_model_has_options_that_fit(name: str) -> None:
  assert not problems(sizes.published(name))


def test_published_models_have_the_options_of_their_papers() -> None:
  dino = sizes.published('DINOv2-reg-g/14')
  assert (dino.width, dino.heads, dino.mlp, dino.registers, dino.block) == (
      1536, 24, schema.SwiGlu(4096), 4, schema.Plain(layer_scale=1e-5))
  big = sizes.published('ViT-22B/14')
  assert isinstance(big.block, schema.Parallel) and big.attention.qk_norm and big.pool == schema.Map()
  assert isinstance(sizes.published('Axial-ViT-B/32').block, schema.Axial)
  assert sizes.published('DeiT-III-L/16').block == schema.Plain(layer_scale=1e-4)


def test_an_unknown_published_model_suggests_the_nearest() -> None:
  with pytest.raises(UserError, match="a published model, got 'DINOv2-B/16'. Did you mean .*DINOv2-B/14"):
    sizes.published('DINOv2-B/16')


def test_the_position_ablation_has_the_cells_of_the_papers_table() -> None:
  assert list(sizes.POSITION_ABLATION) == [
      'none', '1d-stem', '1d-layers', '1d-shared', '2d-stem', '2d-layers', '2d-shared', 'relative']
  cells = {name: dataclasses.replace(sizes.vit('B/16'), positions=one)
           for name, one in sizes.POSITION_ABLATION.items()}
  assert cells['1d-stem'] == sizes.vit('B/16')
  assert all(not problems(model) for model in cells.values())


@pytest.mark.parametrize('name', ['X/16', 'B', 'B/0', 'b16', ''])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
  with pytest.raises(UserError) as error:
    sizes.vit(name)
  assert str(error.value).endswith(f'got {name!r}. Choose one of these sizes.')
  assert 'one of mu Ti S M B L So400m H g g-opt G G-opt e 22B and PATCH' in str(error.value)


NAMES = ['B/16', 'R50+B/16', 'ViT-R50+L/32', 'DINOv2-B/14', 'LV-ViT-S/16', 'DeiT-distilled-B/16', 'BiT-R50x1',
         'BiT-R200x3', 'Mixer-S/8', 'Mixer-H/14', *(f'EfficientNet-{name}' for name in sizes.EFFICIENTNET)]


@pytest.mark.parametrize('name', NAMES)
def test_a_model_of_any_kind_is_found_by_its_name_and_fits(name: str) -> None:
  assert not problems(sizes.model(name))


def test_rivals_have_the_published_sizes() -> None:
  assert sizes.resnet('R152x4') == schema.ResNet(layers=(3, 8, 36, 3), width=256)
  assert sizes.mixer('B/32') == schema.Mixer(patch=32)
  assert sizes.mixer('H/14').tokens_mlp == 640
  assert sizes.efficientnet('L2') == schema.EfficientNet(
      width_factor=4.3, depth_factor=5.3, dropout=.5, drop_path=.2)
  assert sizes.efficientnet_px('L2') == 800


def test_hybrids_have_the_stems_of_their_files() -> None:
  tiny, small, base = (sizes.published(f'ViT-{name}') for name in ('R+Ti/16', 'R26+S/32', 'R50+B/16'))
  assert tiny.stem == schema.ResNetStem(layers=()) and tiny.patch == 32
  assert small.stem == schema.ResNetStem(layers=(2, 2, 2, 2)) and small.patch == 32
  assert base.stem == schema.ResNetStem(layers=(3, 4, 9)) and base.patch == 16 and base.width == 768


def test_two_models_of_a_name_share_nothing() -> None:
  first, second = sizes.published('R50+B/16'), sizes.published('R50+B/16')
  first.stem.width = 32
  assert second.stem.width == 64


@pytest.mark.parametrize(('name', 'message'), [
    ('BiT-R34x1', 'model: expected BiT-DEPTHxFACTOR such as BiT-R50x1, with DEPTH one of R50 R101 R152 R200 and'),
    ('BiT-R50x0', "got 'R50x0'"), ('Mixer-B', 'model: expected Mixer-SIZE/PATCH such as Mixer-B/16, with SIZE one of'),
    ('EfficientNet-B9', "EfficientNet-SIZE, with SIZE one of B0 B1 B2 B3 B4 B5 B6 B7 B8 L2, got 'B9'."),
    ('ResNet-50', "PATCH in pixels, got 'ResNet-50'.")])
def test_an_unknown_name_lists_the_known_ones_of_its_kind(name: str, message: str) -> None:
  with pytest.raises(UserError) as error:
    sizes.model(name)
  assert message in str(error.value)


@pytest.mark.parametrize('name', sizes.SMALL)
def test_small_networks_cost_the_same_within_5_per_cent(name: str) -> None:
  model, px = sizes.small(name), (sizes.SMALL_PX, sizes.SMALL_PX)
  flops = sum(cost.forward(model, px, head=schema.Head(), num_classes=10).flops.values())
  assert flops == pytest.approx(21.4e6, rel=.05) and not problems(model, px)


def test_an_unknown_small_network_lists_the_known_ones() -> None:
  with pytest.raises(UserError, match="model: expected one of ViT, hybrid, BiT, got 'MLP'"):
    sizes.small('MLP')


def test_a_pretraining_head_has_a_hidden_layer_on_a_class_token_alone() -> None:
  names = ('S/16', 'R26+S/32', 'ViT-g/14', 'Mixer-B/16')
  assert [sizes.pretraining_head(sizes.model(name)) for name in names] == [384, 384, 0, 0]
