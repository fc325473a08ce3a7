"""Tests of the parts of networks of convolutions, against numpy in float64."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest

from vit_jax.core.types import Array
from vit_jax.models import convolution
from vit_jax.models.convolution import Style
from vit_jax.models.kernels import depthwise


def some(*shape: int, seed: int = 0) -> Array:
  return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape)))


@pytest.mark.parametrize('is_same', [True, False])
@pytest.mark.parametrize('side, stride, size', [(1, 1, (6, 5)), (1, 2, (6, 5)), (3, 1, (6, 5)), (3, 2, (7, 6)),
                                                (7, 2, (12, 9))])
def test_a_convolution_equals_sums_over_windows(side: int, stride: int, size: tuple[int, int], is_same: bool) -> None:
  x, kernel = some(2, *size, 3), some(side, side, 3, 4, seed=1)
  found = convolution.convolve(x, kernel, stride=stride, is_same=is_same)
  pads = networks.same(np.asarray(x), side, stride) if is_same else networks.symmetric(side)
  want = networks.conv(np.asarray(x, np.float64), np.asarray(kernel, np.float64), stride, pads)
  np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_padding_at_stride_two_differs_by_where_the_zeros_are() -> None:
  assert convolution.padding((8, 7), 3, 2, is_same=True) == ((0, 1), (1, 1))
  assert convolution.padding((8, 7), 3, 2, is_same=False) == ((1, 1), (1, 1))


@pytest.mark.parametrize('var_eps, std_eps', [(1e-10, 0.), (0., 1e-2), (1e-2, 0.)])
def test_each_filter_is_standardized_by_itself(var_eps: float, std_eps: float) -> None:
  kernel = .3 + .1 * some(3, 3, 5, 4)
  found = convolution.standardized(kernel, var_eps=var_eps, std_eps=std_eps)
  want = networks.standard(np.asarray(kernel, np.float64), var_eps=var_eps, std_eps=std_eps)
  np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_group_norm_is_over_all_places_of_a_group_of_one_image() -> None:
  x, p = 3. + 2. * some(2, 4, 3, 12), {'scale': some(12, seed=1), 'bias': some(12, seed=2)}
  found = convolution.group_norm(x, p['scale'], p['bias'], groups=4, eps=1e-2)
  want = networks.group_norm(np.asarray(x, np.float64), networks.wide(p), eps=1e-2, groups=4)
  np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
  assert convolution.group_norm(x.astype(jnp.bfloat16), p['scale'], p['bias'], groups=4, eps=1e-2).dtype == jnp.float32


@pytest.mark.parametrize('is_same', [True, False])
def test_max_pool_pads_with_zeros_or_with_nothing(is_same: bool) -> None:
  x = -1. - jnp.abs(some(2, 7, 6, 3))  # all negative: a zero of the padding shows
  found = convolution.max_pool(x, style=Style(0., 1., 1., is_same))
  pads = networks.same(np.asarray(x), 3, 2) if is_same else networks.symmetric(3)
  want = networks.max_pool(np.asarray(x), pads, -np.inf if is_same else 0.)
  np.testing.assert_array_equal(found, want)
  assert (float(found.max()) == 0.) is not is_same


@pytest.mark.parametrize('side, stride, size', [(3, 1, (6, 5)), (3, 2, (7, 6)), (5, 2, (6, 9)), (5, 1, (3, 2))])
def test_depthwise_by_taps_and_as_xla_has_it_give_the_same_and_the_same_gradient(
    side: int, stride: int, size: tuple[int, int]) -> None:
  x, kernel = some(2, *size, 4), some(side, side, 1, 4, seed=1)
  pads = convolution.padding(size, side, stride, is_same=True)
  want = networks.conv(np.asarray(x, np.float64), np.asarray(kernel, np.float64), stride, list(pads))
  np.testing.assert_allclose(depthwise.by_taps(x, kernel, stride=stride, pads=pads), want, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(depthwise.plain_depthwise(x, kernel, stride, pads), want, rtol=1e-4, atol=1e-4)
  weights = some(*want.shape, seed=2)

  def gradient(form: object) -> tuple[Array, Array]:
    return jax.jit(jax.grad(lambda x, k: (form(x, k) * weights).sum(), (0, 1)))(x, kernel)

  own = gradient(lambda x, k: depthwise.depthwise(x, k, stride, pads))
  other = gradient(lambda x, k: depthwise.plain_depthwise(x, k, stride, pads))
  for a, b in zip(own, other, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_only_a_cpu_gets_the_loop_over_taps() -> None:
  x, kernel = some(1, 6, 6, 4), some(3, 3, 1, 4)
  traced = jax.jit(lambda x, k: depthwise.depthwise(x, k, 1, ((1, 1), (1, 1)))).trace(x, kernel)
  texts = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ('cpu', 'tpu', 'cuda')}
  assert 'stablehlo.while' in texts['cpu'] and 'stablehlo.convolution' not in texts['cpu']
  for platform in ('tpu', 'cuda'):
    assert 'stablehlo.convolution' in texts[platform] and 'stablehlo.while' not in texts[platform]
