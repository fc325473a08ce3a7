"""Positions and patch kernels for other images, against SciPy, Pillow and the definition."""
from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from vit_jax.config.schema import Interpolation
from vit_jax.core.errors import UserError
from vit_jax.interop import resize
from vit_jax.models import posemb

BILINEAR, BICUBIC = Interpolation.BILINEAR, Interpolation.BICUBIC


def table(grid: tuple[int, int], width: int = 3) -> np.ndarray:
  return np.random.default_rng(0).standard_normal((grid[0] * grid[1], width)).astype(np.float32)


@pytest.mark.parametrize('how', [BILINEAR, BICUBIC])
def test_an_equal_grid_is_returned_as_it_is(how: Interpolation) -> None:
  old = table((5, 7))
  assert resize.positions(old, (5, 7), (5, 7), how) is old


@pytest.mark.parametrize(('old', 'new'), [(14, 24), (7, 12), (16, 37), (24, 14)])
def test_bilinear_is_what_the_published_loaders_mean(old: int, new: int) -> None:
  before = table((old, old))
  wanted = ndimage.zoom(before.reshape(old, old, 3), (new / old, new / old, 1), order=1, mode='nearest')
  np.testing.assert_allclose(resize.positions(before, (old, old), (new, new), BILINEAR).reshape(new, new, 3), wanted,
                             rtol=0, atol=1e-6)


@pytest.mark.parametrize(('old', 'new'), [(28, 48), (32, 16), (16, 30), (28, 14), (48, 24), (8, 26)])
def test_no_row_of_zeros_comes_out_where_theirs_has_one(old: int, new: int) -> None:
  before = table((old, old))
  after = resize.positions(before, (old, old), (new, new), BILINEAR).reshape(new, new, 3)
  corners = before.reshape(old, old, 3)
  for row, column in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
    np.testing.assert_allclose(after[row, column], corners[row, column], rtol=0, atol=1e-6)


def test_a_grid_of_any_shape_becomes_any_other_as_the_forward_pass_does_it() -> None:
  before = table((3, 8))
  np.testing.assert_allclose(resize.positions(before, (3, 8), (6, 5), BILINEAR),
                             posemb.resize(before, (3, 8), (6, 5)), rtol=0, atol=1e-6)
  assert resize.positions(before, (3, 8), (6, 5), BICUBIC).shape == (30, 3)


@pytest.mark.parametrize(('old', 'new'), [((14, 14), (24, 24)), ((24, 24), (14, 14)), ((9, 16), (5, 23))])
def test_bicubic_is_pillows(old: tuple[int, int], new: tuple[int, int]) -> None:
  before = table(old, 1)
  wanted = np.asarray(Image.fromarray(before.reshape(old)).resize(new[::-1], Image.Resampling.BICUBIC))
  np.testing.assert_allclose(resize.positions(before, old, new, BICUBIC).reshape(new), wanted, rtol=0, atol=1e-5)


def test_another_interpolation_is_refused() -> None:
  with pytest.raises(UserError, match='init_interpolation=area: positions are resized by bilinear or bicubic'):
    resize.positions(table((2, 2)), (2, 2), (4, 4), Interpolation.AREA)


@pytest.mark.parametrize('new', [16, 24, 13])
def test_an_enlarged_kernel_answers_an_enlarged_patch_as_before(new: int) -> None:
  rng = np.random.default_rng(0)
  kernel, patch = rng.standard_normal((12, 12, 3, 5)).astype(np.float32), rng.standard_normal((12, 12, 3))
  matrix = resize.bilinear(12, new)
  larger = np.einsum('ip,jq,pqc->ijc', matrix, matrix, patch)
  np.testing.assert_allclose(np.einsum('ijc,ijcd->d', larger, resize.patches(kernel, new)),
                             np.einsum('pqc,pqcd->d', patch, kernel), rtol=0, atol=1e-4)


def test_a_smaller_kernel_is_the_least_squares_solution() -> None:
  kernel = np.random.default_rng(0).standard_normal((6, 6, 1, 2)).astype(np.float32)
  matrix = np.kron(resize.bilinear(6, 4), resize.bilinear(6, 4))
  wanted = np.linalg.lstsq(matrix.T, kernel.reshape(36, 2).astype(float), rcond=None)[0].reshape(4, 4, 1, 2)
  np.testing.assert_allclose(resize.patches(kernel, 4), wanted, rtol=0, atol=1e-5)
  assert resize.patches(kernel, 6) is kernel
