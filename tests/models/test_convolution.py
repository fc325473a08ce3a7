"""Tests of the parts of networks of convolutions, against numpy in float64."""
from __future__ import annotations

import networks
import numpy as np
import pytest

from vit_jax.models import convolution


@pytest.mark.parametrize('is_same', [True, False])
@pytest.mark.parametrize('side, stride, size', [(1, 1, (6, 5)), (1, 2, (6, 5)), (3, 1, (6, 5)), (3, 2, (7, 6)),
                                                (7, 2, (12, 9))])
def test_a_convolution_equals_sums_over_windows(side: int, stride: int, size: tuple[int, int], is_same: bool) -> None:
  x, kernel = networks.normal(2, *size, 3), networks.normal(side, side, 3, 4, seed=1)
  found = convolution.convolve(x, kernel, stride=stride, is_same=is_same)
  pads = networks.same(np.asarray(x), side, stride) if is_same else networks.symmetric(side)
  want = networks.conv(np.asarray(x, np.float64), np.asarray(kernel, np.float64), stride, pads)
  np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_padding_at_stride_two_differs_by_where_the_zeros_are() -> None:
  assert convolution.padding((8, 7), 3, 2, is_same=True) == ((0, 1), (1, 1))
  assert convolution.padding((8, 7), 3, 2, is_same=False) == ((1, 1), (1, 1))
