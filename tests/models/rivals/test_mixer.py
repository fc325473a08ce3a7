"""Tests of the Mixer: the arithmetic, the public format, how it is run, and growing to larger images."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
from networks import MIXER, PX

from vit_jax.config import schema
from vit_jax.config.schema import DType, Execution, Remat
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Params
from vit_jax.models import backbones
from vit_jax.models.rivals import mixer

RANDOM = dataclasses.replace(MIXER, dropout=.2, drop_path=.3)


def tokens(settings: schema.Mixer, params: Params, image: Array) -> Array:
  backbone = backbones.build(settings, (image.shape[1], image.shape[2]))
  return jax.jit(lambda p, x: backbone.apply(p, {}, x, train=False, key=None)[0].tokens)(params, image)


def test_the_mixer_equals_numpy_image_by_image() -> None:
  (params, _), image = networks.variables(MIXER), networks.some_image()
  want = [networks.numpy_mixer(MIXER, networks.wide(params), np.asarray(one, np.float64)) for one in image]
  np.testing.assert_allclose(tokens(MIXER, params, image), np.stack(want), rtol=1e-3, atol=1e-4)


@pytest.mark.slow(reason='1 s: another program')
def test_features_are_normed_tokens_and_their_mean() -> None:
  params, state = networks.variables(MIXER)
  backbone, grids = backbones.build(MIXER, PX), []

  @jax.jit
  def run(image: Array) -> tuple[Array, Array]:
    features, after = backbone.apply(params, state, image, train=False, key=None)
    grids.append((features.grid, after))
    return features.pooled, features.tokens

  pooled, tokens = run(networks.some_image())
  assert grids == [((9, 7), {})] and tokens.shape == (3, 63, 32)
  np.testing.assert_allclose(pooled, tokens.mean(1), rtol=1e-4, atol=1e-6)


def test_parameter_paths_and_shapes_are_the_public_format() -> None:
  params, _ = networks.variables(MIXER)
  expected = {
      'stem/kernel': (4, 4, 3, 32), 'stem/bias': (32,), 'norm/scale': (32,), 'norm/bias': (32,),
      **{f'blocks/{norm}/{leaf}': (2, 32) for norm in ('norm1', 'norm2') for leaf in ('scale', 'bias')},
      'blocks/tokens/up/kernel': (2, 63, 10), 'blocks/tokens/up/bias': (2, 10),
      'blocks/tokens/down/kernel': (2, 10, 63), 'blocks/tokens/down/bias': (2, 63),
      'blocks/channels/up/kernel': (2, 32, 48), 'blocks/channels/up/bias': (2, 48),
      'blocks/channels/down/kernel': (2, 48, 32), 'blocks/channels/down/bias': (2, 32)}
  assert {name: leaf.shape for name, leaf in trees.flatten(params).items()} == expected


def loss_of(settings: schema.Mixer, params: Params) -> tuple[Array, Params]:
  image, backbone = networks.some_image(), backbones.build(settings, PX)

  def loss(params: Params) -> Array:
    pooled = backbone.apply(params, {}, image, train=True, key=jax.random.key(3, impl='unsafe_rbg'))[0].pooled
    return (pooled * jnp.arange(32.)[None]).sum()

  return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.slow(reason='5 s of compilation; tests/models/test_stack.py has what runs the layers')
@pytest.mark.parametrize('execution, remat', [
    (Execution.SCAN, Remat.NONE), (Execution.UNROLLED, Remat.FULL), (Execution.SCAN, Remat.NAMES)])
def test_execution_and_remat_change_neither_output_nor_gradient(execution: Execution, remat: Remat) -> None:
  params, _ = networks.variables(RANDOM)
  want = loss_of(RANDOM, params)
  found = loss_of(dataclasses.replace(RANDOM, execution=execution, remat=remat), params)
  chex.assert_trees_all_close(found, want, rtol=2e-3, atol=2e-4)


@pytest.mark.slow(reason='4 s; tests/models/test_vit.py has the layers that drop')
def test_dropout_and_stochastic_depth_depend_on_the_key_and_on_train() -> None:
  params, _ = networks.variables(RANDOM)
  backbone, image = backbones.build(RANDOM, PX), networks.some_image()
  run = jax.jit(lambda key: backbone.apply(params, {}, image, train=True, key=key)[0].pooled)
  first, again, other = (run(jax.random.key(i, impl='unsafe_rbg')) for i in (0, 0, 1))
  np.testing.assert_array_equal(first, again)
  assert jnp.abs(first - other).max() > 1e-2
  np.testing.assert_array_equal(tokens(RANDOM, params, image), tokens(MIXER, params, image))
  with jax.debug_key_reuse(True):
    run(jax.random.key(2, impl='unsafe_rbg'))
  with pytest.raises(AssertionError, match='needs a key'):
    backbone.apply(params, {}, image, train=True, key=None)


@pytest.mark.slow(reason='1 s: two programs; tests/models/test_vit.py has the dtypes')
def test_bf16_is_near_f32_and_features_stay_f32() -> None:
  (params, _), image = networks.variables(MIXER), networks.some_image()
  high, low = (tokens(dataclasses.replace(MIXER, dtype=dtype), params, image) for dtype in DType)
  assert low.dtype == jnp.float32
  assert 1e-4 < jnp.linalg.norm(low - high) / jnp.linalg.norm(high) < 3e-2


@pytest.mark.slow(reason='2 s: two networks; tests/weights/test_adapt.py grows a mixer')
def test_grown_parameters_treat_each_tile_of_a_larger_image_as_an_image() -> None:
  (params, _), tiles = networks.variables(MIXER), networks.some_image(num_images=6)
  rows = [jnp.concatenate(list(tiles[3 * i:3 * i + 3]), 1) for i in range(2)]
  large = jnp.concatenate(rows)[None]  # 2 x 3 tiles
  grown = mixer.grow(params, (9, 7), times=(2, 3))
  found = tokens(dataclasses.replace(MIXER, tokens_mlp=60), grown, large)
  want = tokens(MIXER, params, tiles).reshape(2, 3, 9, 7, 32).transpose(0, 2, 1, 3, 4)
  np.testing.assert_allclose(found.reshape(want.reshape(18, 21, 32).shape), want.reshape(18, 21, 32), rtol=1e-3,
                             atol=1e-4)
  shapes, _ = networks.variables(dataclasses.replace(MIXER, tokens_mlp=60), (72, 84))
  assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, shapes)


def test_parameters_for_another_number_of_tokens_are_refused() -> None:
  params, _ = networks.variables(MIXER)
  with pytest.raises(UserError, match=r'image_px: expected a size of 63 patches of 4 px, which the MLP over tokens was '
                                      r'made for, got \(32, 28\), which has 56'):
    tokens(MIXER, params, networks.some_image((32, 28)))
  with pytest.raises(UserError, match='image_px: expected multiples of model.patch=4 px'):
    backbones.build(MIXER, PX).apply(params, {}, networks.some_image((30, 28)), train=False, key=None)
  with pytest.raises(UserError) as error:
    backbones.build(schema.Mixer(patch=5, tokens_mlp=0, drop_path=1., norm_eps=0.), PX)
  assert str(error.value).splitlines() == [
      'model.tokens_mlp: expected at least 1, got 0.', 'model.drop_path: expected 0 to below 1, got 1.0.',
      'model.norm_eps: expected more than 0, got 0.0.',
      'image_px: expected multiples of model.patch=5 px, such as (35, 30), got (36, 28).']
