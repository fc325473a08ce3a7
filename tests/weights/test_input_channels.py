"""Weights of RGB images in a run whose images have other channels: the first layer is adapted as timm adapts it."""
from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights import made
from vit_jax.config import schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.models import backbones
from vit_jax.weights import adapt, inherit, resize, saving
from vit_jax.weights.adapt import Target
from vit_jax.weights.preprocess import Preprocess

GOLDEN = pathlib.Path(__file__).with_name('timm_input_conv.npz')


@pytest.mark.parametrize('num', [1, 2, 4, 13])
def test_a_kernel_is_adapted_as_timm_does(num: int) -> None:
  with np.load(GOLDEN) as golden:  # by make_timm_input_conv.py
    found = resize.channels(golden['kernel'].transpose(2, 3, 1, 0), num)
    np.testing.assert_allclose(found.transpose(3, 2, 0, 1), golden[f'channels{num}'], rtol=2e-7, atol=1e-7)
  assert found.dtype == np.float32


def like(model: schema.Model, num: int) -> dict:
  backbone = backbones.build(model, (32, 32))
  return {'backbone': jax.eval_shape(backbone.init, jax.random.key(0), jnp.zeros((1, 32, 32, num)))[0]}


HYBRID = schema.ViT(patch=16, width=32, depth=1, heads=4, mlp=schema.Mlp(48), stem=schema.ResNetStem((1, 1, 1), 32))


@pytest.mark.parametrize(('model', 'name'), [
    (made.MODEL, 'backbone/stem/kernel'), (made.MIXER, 'backbone/stem/kernel'), (made.BIT, ''), (HYBRID, '')])
@pytest.mark.parametrize('num', [1, 5])
def test_every_kind_of_network_takes_its_first_kernel(model: schema.Model, name: str, num: int) -> None:
  weights = made.network(model)
  fitted = adapt.adapt(weights, Target(model, (32, 32), like(model, num), ()))
  changed = [line for line in fitted.report.lines if 'channels to' in line.rule]
  assert len(changed) == 1 and changed[0].what == 'resized' and (not name or changed[0].name == name)
  kernel = trees.flatten(weights.params)[changed[0].name]
  np.testing.assert_array_equal(trees.flatten(fitted.params)[changed[0].name], resize.channels(np.asarray(kernel), num))


@pytest.mark.parametrize('model', [made.MIXER, made.BIT, made.EFFICIENTNET, schema.AxialResNet()])
def test_other_networks_take_any_number_of_channels(model: schema.Model) -> None:
  leaves = jax.tree.leaves(like(model, 7))
  assert sum(leaf.ndim == 4 and leaf.shape[2] == 7 for leaf in leaves) == 1


def test_gray_images_give_what_they_gave_in_rgb() -> None:
  weights = made.network()
  fitted = adapt.adapt(weights, Target(made.MODEL, (32, 32), like(made.MODEL, 1), ()))
  gray = np.random.default_rng(0).standard_normal((2, 32, 32, 1)).astype(np.float32)
  backbone = backbones.build(made.MODEL, (32, 32))
  one, three = (backbone.apply(params['backbone'], {}, image, train=False, key=None)[0].pooled for params, image in (
      (fitted.params, gray), (weights.params, np.repeat(gray, 3, axis=3))))
  np.testing.assert_allclose(one, three, atol=1e-5)


def test_weights_of_other_channels_do_not_fit() -> None:
  kernel = resize.channels(np.asarray(made.network().params['backbone']['stem']['kernel']), 5)
  params = trees.map_named(lambda name, leaf: kernel if name == 'backbone/stem/kernel' else leaf, made.network().params)
  with pytest.raises(UserError, match='does not fit this run'):
    adapt.adapt(made.network()._replace(params=params), Target(made.MODEL, (32, 32), like(made.MODEL, 13), ()))


def test_the_statistics_of_rgb_are_not_compared_with_those_of_channels() -> None:
  bands = schema.Recipe(mean=(1.,) * 5, std=(1.,) * 5)
  assert not adapt.preprocessing_differs(made.network(), bands)


@pytest.mark.parametrize('channels', [3, 13])
def test_only_rgb_runs_take_mean_and_deviation_from_weights(channels: int) -> None:
  config = schema.Config(init_from='x.npz', data=schema.Data(channels=channels))
  assert ('data.recipe.mean' in inherit.unset(config, ())) is (channels == 3)


def test_conversion_refuses_them_by_name(tmp_path: pathlib.Path) -> None:
  how: Preprocess = made.HOW._replace(mean=(0.,) * 5, std=(1.,) * 5)
  with pytest.raises(UserError, match='expected weights for RGB images, got weights for 5 channels, which conversion'):
    saving.save(made.network()._replace(preprocess=how), str(tmp_path / 'x.npz'))
