"""Positions and patch kernels for other images, against SciPy, Pillow and the definition."""
from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from vit_jax.config.schema import PositionResize
from vit_jax.models.vit import interpolate
from vit_jax.weights import published, recognize, resize

ALIGNED, ANTIALIASED = PositionResize.ALIGNED, PositionResize.BICUBIC_ANTIALIAS


def table(grid: tuple[int, int], width: int = 3) -> np.ndarray:
  return np.random.default_rng(0).standard_normal((grid[0] * grid[1], width)).astype(np.float32)


@pytest.mark.parametrize('how', PositionResize)
def test_an_equal_grid_is_returned_as_it_is(how: PositionResize) -> None:
  old = table((5, 7))
  assert resize.positions(old, (5, 7), (5, 7), how) is old


@pytest.mark.parametrize(('old', 'new'), [(14, 24), (7, 12), (16, 37), (24, 14)])
def test_bilinear_is_what_the_published_loaders_mean(old: int, new: int) -> None:
  before = table((old, old))
  wanted = ndimage.zoom(before.reshape(old, old, 3), (new / old, new / old, 1), order=1, mode='nearest')
  np.testing.assert_allclose(resize.positions(before, (old, old), (new, new), ALIGNED).reshape(new, new, 3), wanted,
                             rtol=0, atol=1e-6)


@pytest.mark.parametrize(('old', 'new'), [(28, 48), (32, 16), (16, 30), (28, 14), (48, 24), (8, 26)])
def test_no_row_of_zeros_comes_out_where_theirs_has_one(old: int, new: int) -> None:
  before = table((old, old))
  after = resize.positions(before, (old, old), (new, new), ALIGNED).reshape(new, new, 3)
  corners = before.reshape(old, old, 3)
  for row, column in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
    np.testing.assert_allclose(after[row, column], corners[row, column], rtol=0, atol=1e-6)


def test_a_grid_of_any_shape_becomes_any_other_as_the_forward_pass_does_it() -> None:
  before = table((3, 8))
  for how in PositionResize:
    np.testing.assert_allclose(resize.positions(before, (3, 8), (6, 5), how),
                               interpolate.resize(before, (3, 8), (6, 5), how), rtol=0, atol=1e-6)


@pytest.mark.parametrize(('old', 'new'), [((14, 14), (24, 24)), ((24, 24), (14, 14)), ((9, 16), (5, 23))])
def test_bicubic_is_pillows(old: tuple[int, int], new: tuple[int, int]) -> None:
  before = table(old, 1)
  wanted = np.asarray(Image.fromarray(before.reshape(old)).resize(new[::-1], Image.Resampling.BICUBIC))
  np.testing.assert_allclose(resize.positions(before, old, new, ANTIALIASED).reshape(new), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(('family', 'name', 'registers', 'how'), [
    ('vision_transformer', 'ViT-B_16.npz', False, 'aligned'), ('big_vision', 'mae.npz', False, 'aligned'),
    ('timm', 'vit_base_patch16_224.augreg_in21k', False, 'bicubic_antialias'), ('mae', 'a.pth', False, 'bicubic'),
    ('timm', 'mae_pretrain_vit_base.pth', False, 'bicubic'),
    ('timm', 'deit_tiny_patch16_224-a1311bcf.pth', False, 'bicubic'),
    ('timm', 'dino_deitsmall16_pretrain.pth', False, 'bicubic_offset'), ('dino', 'a.pth', False, 'bicubic_offset'),
    ('timm', 'hf://timm/vit_small_patch14_dinov2.lvd142m', False, 'bicubic_offset'),
    ('timm', 'hf://timm/vit_small_patch14_reg4_dinov2.lvd142m', True, 'bicubic_antialias'),
    ('dinov2', 'a.pth', False, 'bicubic_offset'), ('dinov2', 'a.pth', True, 'bicubic_antialias'),
    ('huggingface', 'facebook/dinov2-base', False, 'bicubic'), ('huggingface', 'x', True, 'bicubic_antialias')])
def test_the_convention_is_that_of_the_program_that_weights_are_from(
    family: str, name: str, registers: bool, how: str) -> None:
  by_name = published.find(['weights', name]).hints.position_resize
  assert recognize.position_resize(family, by_name, has_registers=registers).value == how


@pytest.mark.parametrize('how', PositionResize)
def test_tables_of_the_stem_and_of_all_blocks_are_resized_but_for_their_first_rows(how: PositionResize) -> None:
  one, many = table((3, 4)), np.stack([table((3, 4)), 2 * table((3, 4))])
  first = np.full((1, 3), 9, np.float32)
  leaves = {'backbone/positions': np.concatenate([first, one])[None],
            'backbone/blocks/positions': np.stack([np.concatenate([first, x]) for x in many])[:, None], 'head': first}
  found, lines = resize.tables(leaves, (3, 4), (5, 2), num_first=1, how=how)
  assert [line.name for line in lines] == ['backbone/positions', 'backbone/blocks/positions'] and found['head'] is first
  assert lines[0].rule == f'3 x 4 to 5 x 2 tokens, {how.value}'
  assert found['backbone/positions'].shape == (1, 11, 3) and found['backbone/blocks/positions'].shape == (2, 1, 11, 3)
  np.testing.assert_array_equal(found['backbone/blocks/positions'][:, 0, 0], 9.)
  np.testing.assert_allclose(found['backbone/blocks/positions'][1, 0, 1:], 2 * found['backbone/positions'][0, 1:],
                             rtol=1e-6)


@pytest.mark.parametrize('new', [16, 24, 13])
def test_an_enlarged_kernel_answers_an_enlarged_patch_as_before(new: int) -> None:
  rng = np.random.default_rng(0)
  kernel, patch = rng.standard_normal((12, 12, 3, 5)).astype(np.float32), rng.standard_normal((12, 12, 3))
  matrix = interpolate.bilinear(12, new)
  larger = np.einsum('ip,jq,pqc->ijc', matrix, matrix, patch)
  np.testing.assert_allclose(np.einsum('ijc,ijcd->d', larger, resize.patches(kernel, new)),
                             np.einsum('pqc,pqcd->d', patch, kernel), rtol=0, atol=1e-4)


def test_a_smaller_kernel_is_the_least_squares_solution() -> None:
  kernel = np.random.default_rng(0).standard_normal((6, 6, 1, 2)).astype(np.float32)
  matrix = np.kron(interpolate.bilinear(6, 4), interpolate.bilinear(6, 4))
  wanted = np.linalg.lstsq(matrix.T, kernel.reshape(36, 2).astype(float), rcond=None)[0].reshape(4, 4, 1, 2)
  np.testing.assert_allclose(resize.patches(kernel, 4), wanted, rtol=0, atol=1e-5)
  assert resize.patches(kernel, 6) is kernel
