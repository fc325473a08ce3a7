"""Tests of model sizes by name."""
from __future__ import annotations

import dataclasses

import pytest

from vit_jax.config import schema, vit_options
from vit_jax.core.types import UserError
from vit_jax.recipes import sizes


def test_a_name_gives_the_published_sizes() -> None:
  model = sizes.vit('B/16')
  assert (model.width, model.depth, model.heads, model.mlp, model.patch) == (768, 12, 12, 3072, 16)
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
  assert (sizes.vit('mu/16').depth, sizes.vit('G-opt/14').mlp, sizes.vit('e/14').mlp) == (1, 8192, 15360)


def test_the_swiglu_of_dinov2_g_has_4096_hidden_units() -> None:
  assert sizes.swiglu_hidden(1536) == 4096 and sizes.swiglu_hidden(384) == 1024
  assert sizes.swiglu_hidden(100) == 272  # 266.67 rounded down, then up to a multiple of 8


@pytest.mark.parametrize('name', sizes.PUBLISHED)
def test_a_published_model_has_options_that_fit(name: str) -> None:
  assert not [*vit_options.faults(sizes.published(name))]


def test_published_models_have_the_options_of_their_papers() -> None:
  dino = sizes.published('DINOv2-reg-g/14')
  assert (dino.width, dino.heads, dino.mlp, dino.swiglu, dino.registers, dino.layer_scale) == (
      1536, 24, 4096, True, 4, 1e-5)
  big = sizes.published('ViT-22B/14')
  assert big.parallel and big.qk_norm and big.pool is schema.Pool.MAP and not big.swiglu
  assert sizes.published('Axial-ViT-B/32').axial and sizes.published('DeiT-III-L/16').layer_scale == 1e-4


def test_an_unknown_published_model_shows_the_nearest() -> None:
  with pytest.raises(UserError, match="Unknown published model 'DINOv2-B/16': want .*DINOv2-B/14"):
    sizes.published('DINOv2-B/16')


def test_the_position_ablation_has_the_cells_of_the_papers_table() -> None:
  assert list(sizes.POSITION_ABLATION) == [
      'none', '1d-stem', '1d-layers', '1d-shared', '2d-stem', '2d-layers', '2d-shared', 'relative']
  cells = {name: dataclasses.replace(sizes.vit('B/16'), positions=kind, positions_at=at)
           for name, (kind, at) in sizes.POSITION_ABLATION.items()}
  assert cells['1d-stem'] == sizes.vit('B/16')
  assert all(not [*vit_options.faults(model)] for model in cells.values())


@pytest.mark.parametrize('name', ['X/16', 'B', 'B/0', 'b16', ''])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
  with pytest.raises(UserError) as error:
    sizes.vit(name)
  assert repr(name) in str(error.value) and 'mu Ti S M B L So400m H g g-opt G G-opt e 22B and' in str(error.value)
