"""Tests of EfficientNet: the arithmetic with running and with batch statistics, the public format, scaling."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
from networks import EFFICIENTNET, PX

from vit_jax.config import schema
from vit_jax.config.schema import DType, Remat
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Params, PyTree
from vit_jax.models import backbones, convolution
from vit_jax.models.rivals import efficientnet
from vit_jax.recipes import sizes

STILL = dataclasses.replace(EFFICIENTNET, dropout=0., drop_path=0.)


def run(settings: schema.EfficientNet, params: Params, state: PyTree, *, train: bool) -> tuple[Array, Array, PyTree]:
  """Last map, pooled features, new state."""
  backbone = backbones.build(settings, PX)

  def apply(params: Params, state: PyTree, image: Array) -> tuple[Array, Array, PyTree]:
    features, new = backbone.apply(params, state, image, train=train, key=None)
    return features.tokens, features.pooled, new

  return jax.jit(apply)(params, state, networks.some_image())


@pytest.fixture(scope='module')
def evaluated() -> tuple[Params, PyTree, tuple[Array, Array, PyTree]]:
  params, state = networks.variables(EFFICIENTNET)
  return params, state, run(EFFICIENTNET, params, state, train=False)


@pytest.fixture(scope='module')
def trained() -> tuple[Params, PyTree, tuple[Array, Array, PyTree]]:
  with jax.numpy_dtype_promotion('strict'):
    params, state = networks.variables(STILL)
    return params, state, run(STILL, params, state, train=True)


@pytest.mark.slow(reason='5 s of compilation; tests/models/test_convolution.py has its parts')
def test_with_running_statistics_it_equals_numpy_and_they_stay(
    evaluated: tuple[Params, PyTree, tuple[Array, Array, PyTree]]) -> None:
  params, state, (tokens, pooled, after) = evaluated
  image = np.asarray(networks.some_image(), np.float64)
  want = networks.numpy_efficientnet(EFFICIENTNET, networks.wide(params), networks.wide(state), image)
  assert want.shape == (3, 2, 1, 320)
  np.testing.assert_allclose(tokens, want.reshape(3, 2, 320), rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(pooled, want.mean((1, 2)), rtol=1e-3, atol=1e-4)
  chex.assert_trees_all_equal(state, after)


@pytest.mark.slow(reason='4 s of compilation')
def test_in_training_it_equals_numpy_with_the_statistics_of_the_batch(
    trained: tuple[Params, PyTree, tuple[Array, Array, PyTree]]) -> None:
  params, _, (tokens, pooled, _) = trained
  want = networks.numpy_efficientnet(STILL, networks.wide(params), None, np.asarray(networks.some_image(), np.float64))
  np.testing.assert_allclose(tokens, want.reshape(3, 2, 320), rtol=5e-3, atol=5e-4)
  np.testing.assert_allclose(pooled, want.mean((1, 2)), rtol=5e-3, atol=5e-4)


@pytest.mark.slow(reason='5 s of compilation')
def test_running_statistics_follow_those_of_the_batch(
    trained: tuple[Params, PyTree, tuple[Array, Array, PyTree]]) -> None:
  params, state, (_, _, after) = trained
  image = np.asarray(networks.some_image(), np.float64)
  kernel = np.asarray(params['stem']['conv']['kernel'], np.float64)
  first = networks.conv(image, kernel, 2, networks.same(image, 3, 2))
  for name, value in (('mean', first.mean((0, 1, 2))), ('var', first.var((0, 1, 2)))):
    want = .99 * np.asarray(state['stem']['norm'][name]) + .01 * value
    np.testing.assert_allclose(after['stem']['norm'][name], want, rtol=1e-4, atol=1e-5)
  assert jax.tree.structure(after) == jax.tree.structure(state)
  moved = {name: float(jnp.abs(a - b).max()) for (name, a), b in zip(
      trees.flatten(after).items(), jax.tree.leaves(state), strict=True)}
  assert min(moved.values()) > 0, moved


def test_parameter_paths_and_shapes_are_the_public_format() -> None:
  params, state = networks.variables(EFFICIENTNET)
  shapes = {name: leaf.shape for name, leaf in trees.flatten(params).items()}
  block = {'expand/conv/kernel': (1, 1, 8, 48), 'depthwise/conv/kernel': (5, 5, 1, 48),
           'project/conv/kernel': (1, 1, 48, 16), 'gate/down/kernel': (48, 2), 'gate/down/bias': (2,),
           'gate/up/kernel': (2, 48), 'gate/up/bias': (48,),
           **{f'{part}/norm/{leaf}': (n,) for part, n in (('expand', 48), ('depthwise', 48), ('project', 16))
              for leaf in ('scale', 'bias')}}
  assert {k.removeprefix('stage3/block1/'): v for k, v in shapes.items() if k.startswith('stage3/')} == block
  assert shapes['stem/conv/kernel'] == (3, 3, 3, 8) and shapes['top/conv/kernel'] == (1, 1, 80, 320)
  assert not any(name.startswith('stage1/block1/expand') for name in shapes)
  norms = {name.rpartition('/')[0] for name in shapes if name.endswith('scale')}
  assert {name for name, _ in trees.flatten(state).items()} == {f'{n}/{k}' for n in norms for k in ('mean', 'var')}


@pytest.mark.slow(reason='1 s of tracing')
def test_training_draws_masks_for_the_features_and_for_the_blocks_that_can_be_dropped() -> None:
  params, state = networks.variables(EFFICIENTNET)
  backbone, image = backbones.build(EFFICIENTNET, PX), networks.some_image()
  text = str(jax.make_jaxpr(lambda key: backbone.apply(params, state, image, train=True, key=key))(jax.random.key(0)))
  assert text.count('random_bits[') == 2  # masks of one shape are written once
  with pytest.raises(AssertionError, match='needs a key'):
    jax.eval_shape(lambda: backbone.apply(params, state, image, train=True, key=None))


@pytest.mark.slow(reason='6 s of compilation')
def test_dropout_and_stochastic_depth_depend_on_the_key() -> None:
  noisy = dataclasses.replace(EFFICIENTNET, dropout=.3, drop_path=.5)
  params, state = networks.variables(noisy)
  backbone, image = backbones.build(noisy, PX), networks.some_image()

  @jax.jit
  def tokens_and_pooled(key: Array) -> tuple[Array, Array]:
    features, _ = backbone.apply(params, state, image, train=True, key=key)
    return features.tokens, features.pooled

  found = [tokens_and_pooled(jax.random.key(i, impl='unsafe_rbg')) for i in (0, 0, 1, 2, 3)]
  np.testing.assert_array_equal(found[0][1], found[1][1])
  assert max(float(jnp.abs(found[0][0] - other[0]).max()) for other in found[2:]) > 1e-2  # a block was dropped
  tokens, pooled = found[2]
  assert .2 < (pooled == 0.).mean() < .4
  np.testing.assert_allclose(pooled, jnp.where(pooled == 0., 0., tokens.mean(1) / .7), rtol=1e-4, atol=1e-5)


@pytest.mark.slow(reason='15 s of compilation')
def test_recomputing_blocks_changes_neither_gradient_nor_statistics() -> None:
  params, state = networks.variables(STILL)

  def gradient(remat: Remat) -> tuple[Params, PyTree]:
    backbone = backbones.build(dataclasses.replace(STILL, remat=remat), PX)

    def loss(params: Params) -> tuple[Array, PyTree]:
      features, new = backbone.apply(params, state, networks.some_image(), train=True, key=None)
      return (features.pooled * jnp.arange(320.)[None]).sum(), new

    return jax.jit(jax.grad(loss, has_aux=True))(params)

  kept, again = gradient(Remat.NONE), gradient(Remat.FULL)
  chex.assert_trees_all_close(kept, again, rtol=1e-2, atol=2e-2)


@pytest.mark.slow(reason='6 s of compilation')
def test_bf16_is_near_f32_and_features_and_statistics_stay_f32(
    evaluated: tuple[Params, PyTree, tuple[Array, Array, PyTree]]) -> None:
  params, state, high = evaluated
  low = run(dataclasses.replace(EFFICIENTNET, dtype=DType.BF16), params, state, train=False)
  assert low[0].dtype == jnp.float32 and all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(low[2]))
  assert 1e-4 < jnp.linalg.norm(low[0] - high[0]) / jnp.linalg.norm(high[0]) < 3e-2


def test_channels_are_rounded_to_multiples_of_eight_within_a_tenth() -> None:
  assert [efficientnet.scaled(c, f) for c, f in ((32, 1.), (32, 1.1), (32, .3), (16, 1.1), (24, 1.4), (1, 1.))
          ] == [32, 32, 16, 16, 32, 8]  # .3 * 32 = 9.6: 8 is more than a tenth less


def test_l2_has_the_published_blocks() -> None:
  stages = efficientnet.stages(sizes.efficientnet('L2'))
  assert [(len(blocks), blocks[0].outputs) for blocks in stages] == [
      (6, 72), (11, 104), (11, 176), (16, 344), (16, 480), (22, 824), (6, 1376)]
  assert stages[0][0].inputs == 136 and efficientnet.scaled(1280, 4.3) == 5504


def test_settings_that_do_not_fit_are_all_reported() -> None:
  with pytest.raises(UserError) as error:
    backbones.build(schema.EfficientNet(width_factor=0., dropout=1., remat=Remat.MLP), PX)
  assert str(error.value).splitlines() == [
      'model.width_factor: expected more than 0 to 100, got 0.0.', 'model.dropout: expected 0 to below 1, got 1.0.',
      'model.remat: expected none or full for a network of convolutions, got mlp.']


@pytest.mark.parametrize('side, stride, size', [(3, 1, (6, 5)), (3, 2, (7, 6)), (5, 2, (6, 9)), (5, 1, (3, 2))])
def test_depthwise_by_taps_and_as_xla_has_it_give_the_same_and_the_same_gradient(
    side: int, stride: int, size: tuple[int, int]) -> None:
  x, kernel = networks.normal(2, *size, 4), networks.normal(side, side, 1, 4, seed=1)
  pads = convolution.padding(size, side, stride, is_same=True)
  want = networks.conv(np.asarray(x, np.float64), np.asarray(kernel, np.float64), stride, list(pads))
  np.testing.assert_allclose(efficientnet.by_taps(x, kernel, stride=stride, pads=pads), want, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(efficientnet.plain_depthwise(x, kernel, stride, pads), want, rtol=1e-4, atol=1e-4)
  weights = networks.normal(*want.shape, seed=2)

  def gradient(form: object) -> tuple[Array, Array]:
    return jax.jit(jax.grad(lambda x, k: (form(x, k) * weights).sum(), (0, 1)))(x, kernel)

  own = gradient(lambda x, k: efficientnet.depthwise(x, k, stride, pads))
  other = gradient(lambda x, k: efficientnet.plain_depthwise(x, k, stride, pads))
  for a, b in zip(own, other, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_only_a_cpu_gets_the_loop_over_taps() -> None:
  x, kernel = networks.normal(1, 6, 6, 4), networks.normal(3, 3, 1, 4)
  traced = jax.jit(lambda x, k: efficientnet.depthwise(x, k, 1, ((1, 1), (1, 1)))).trace(x, kernel)
  texts = {platform: traced.lower(lowering_platforms=(platform,)).as_text() for platform in ('cpu', 'tpu', 'cuda')}
  assert 'stablehlo.while' in texts['cpu'] and 'stablehlo.convolution' not in texts['cpu']
  for platform in ('tpu', 'cuda'):
    assert 'stablehlo.convolution' in texts[platform] and 'stablehlo.while' not in texts[platform]
