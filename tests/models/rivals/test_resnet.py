"""Tests of BiT: the arithmetic, the public format, dtype and recomputation."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
from networks import PX, RESNET

from vit_jax.config import schema
from vit_jax.config.schema import DType, Remat
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Params
from vit_jax.models import backbones
from vit_jax.models.rivals import resnet


def forward(settings: schema.ResNet, params: Params, image: Array) -> Features:
  backbone = backbones.build(settings, PX)
  return jax.jit(lambda p, x: backbone.apply(p, {}, x, train=False, key=None)[0].tokens)(params, image)


@pytest.mark.quick('0.01', reason='1 s: another program')
@pytest.mark.parametrize('var_eps', [1e-10, 1e-2])
def test_bit_equals_numpy_image_by_image(var_eps: float) -> None:
  settings, image = dataclasses.replace(RESNET, var_eps=var_eps), networks.some_image()
  params, _ = networks.variables(settings)
  want = networks.numpy_resnet(settings, networks.wide(params), np.asarray(image, np.float64))
  assert want.shape == (3, 5, 4, 256)
  np.testing.assert_allclose(forward(settings, params, image), want.reshape(3, 20, 256), rtol=1e-3, atol=1e-4)


@pytest.mark.slow(reason='2 s: another program')
def test_features_are_the_map_and_its_mean() -> None:
  backbone, (params, state) = backbones.build(RESNET, PX), networks.variables(RESNET)
  found = []

  @jax.jit
  def run(image: Array) -> tuple[Array, Array]:
    features, after = backbone.apply(params, state, image, train=True, key=None)
    found.append((features.grid, after))
    return features.pooled, features.tokens

  pooled, tokens = run(networks.some_image())
  assert found == [((5, 4), {})] and tokens.shape == (3, 20, 256)
  np.testing.assert_allclose(pooled, tokens.mean(1), rtol=1e-4, atol=1e-5)


def test_parameter_paths_and_shapes_are_the_public_format() -> None:
  params, _ = networks.variables(RESNET)
  norms = {'stage1/unit1': 32, 'stage2/unit1': 128, 'stage2/unit2': 256}
  hidden = {'stage1/unit1': 32, 'stage2/unit1': 64, 'stage2/unit2': 64}
  expected = {'root/kernel': (7, 7, 3, 32), 'norm/scale': (256,), 'norm/bias': (256,)}
  for unit, inputs in norms.items():
    h = hidden[unit]
    expected |= {f'{unit}/norm1/{leaf}': (inputs,) for leaf in ('scale', 'bias')}
    expected |= {f'{unit}/norm{i}/{leaf}': (h,) for i in (2, 3) for leaf in ('scale', 'bias')}
    expected |= {f'{unit}/conv1/kernel': (1, 1, inputs, h), f'{unit}/conv2/kernel': (3, 3, h, h),
                 f'{unit}/conv3/kernel': (1, 1, h, 4 * h)}
    if unit.endswith('unit1'):
      expected[f'{unit}/proj/kernel'] = (1, 1, inputs, 4 * h)
  assert {name: leaf.shape for name, leaf in trees.flatten(params).items()} == expected


@pytest.mark.slow(reason='3 s: two programs')
def test_recomputing_units_changes_neither_output_nor_gradient() -> None:
  short = dataclasses.replace(RESNET, layers=(1,))
  (params, _), image = networks.variables(short), networks.some_image()

  def gradient(remat: Remat) -> Params:
    backbone = backbones.build(dataclasses.replace(short, remat=remat), PX)
    return jax.jit(jax.grad(lambda p: backbone.apply(p, {}, image, train=True, key=None)[0].pooled.sum()))(params)

  kept, again = gradient(Remat.NONE), gradient(Remat.FULL)
  chex.assert_trees_all_close(kept, again, rtol=1e-4, atol=1e-4)
  assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(kept))


@pytest.mark.slow(reason='2 s: two programs')
def test_bf16_is_near_f32_and_features_stay_f32() -> None:
  (params, _), image = networks.variables(RESNET), networks.some_image()
  high, low = (forward(dataclasses.replace(RESNET, dtype=dtype), params, image) for dtype in DType)
  assert low.dtype == jnp.float32
  assert 1e-4 < jnp.linalg.norm(low - high) / jnp.linalg.norm(high) < 3e-2


def test_settings_that_do_not_fit_are_all_reported() -> None:
  with pytest.raises(UserError) as error:
    backbones.build(schema.ResNet(layers=(2, 0), width=48, var_eps=0., remat=Remat.NAMES), PX)
  assert str(error.value).splitlines() == [
      'model.layers: expected numbers, each 1 to 1000, got (2, 0).',
      'model.width: expected a multiple of the 32 groups of its norms, got 48.',
      'model.var_eps: expected a small positive number, here or in std_eps, by which a kernel of equal weights can be '
      'divided, got 0.0.',
      'model.remat: expected none or full for a network of convolutions, got names.']


@pytest.mark.parametrize('var_eps, std_eps', [(1e-10, 0.), (0., 1e-2), (1e-2, 0.)])
def test_each_filter_is_standardized_by_itself(var_eps: float, std_eps: float) -> None:
  kernel = .3 + .1 * networks.normal(3, 3, 5, 4)
  found = resnet.standardized(kernel, var_eps=var_eps, std_eps=std_eps)
  want = networks.standard(np.asarray(kernel, np.float64), var_eps=var_eps, std_eps=std_eps)
  np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_group_norm_is_over_all_places_of_a_group_of_one_image() -> None:
  x = 3. + 2. * networks.normal(2, 4, 3, 12)
  p = {'scale': networks.normal(12, seed=1), 'bias': networks.normal(12, seed=2)}
  found = resnet.group_norm(x, p['scale'], p['bias'], groups=4, eps=1e-2)
  want = networks.group_norm(np.asarray(x, np.float64), networks.wide(p), eps=1e-2, groups=4)
  np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
  assert resnet.group_norm(x.astype(jnp.bfloat16), p['scale'], p['bias'], groups=4, eps=1e-2).dtype == jnp.float32


@pytest.mark.parametrize('is_same', [True, False])
def test_max_pool_pads_with_zeros_or_with_nothing(is_same: bool) -> None:
  x = -1. - jnp.abs(networks.normal(2, 7, 6, 3))  # all negative: a zero of the padding shows
  found = resnet.max_pool(x, style=resnet.Style(0., 1., 1., is_same))
  pads = networks.same(np.asarray(x), 3, 2) if is_same else networks.symmetric(3)
  want = networks.max_pool(np.asarray(x), pads, -np.inf if is_same else 0.)
  np.testing.assert_array_equal(found, want)
  assert (float(found.max()) == 0.) is not is_same
