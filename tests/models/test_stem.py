"""Tests of a ViT on a network's map, of its distillation token, and of LV-ViT's other options, against numpy."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import networks
import numpy as np
import pytest
import vits

from vit_jax.config import schema
from vit_jax.config.schema import QkvBias, Remat
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Params, PyTree
from vit_jax.models.kernels.forms import FAST
from vit_jax.models.layers import applied, initial
from vit_jax.models.rivals import resnet
from vit_jax.models.vit import vit

PX = vits.PX  # 2 x 3 tokens of 8 px
PLAIN = schema.ViT(patch=8, width=32, depth=2, heads=4, mlp=schema.Mlp(48))
ROOT = dataclasses.replace(PLAIN, stem=schema.ResNetStem((), width=32))
HYBRID = dataclasses.replace(PLAIN, pool=schema.Mean(), stem=schema.ResNetStem(
    (1, 2), width=32, std_eps=.1, var_eps=1e-3, norm_eps=.1))
LV = dataclasses.replace(PLAIN, stem=schema.ConvStem(width=6),
                         attention=schema.Attention(QkvBias.NONE), block=schema.Plain(branch_scale=.5))
DISTILLED = dataclasses.replace(PLAIN, pool=schema.ClassToken(distillation=True), registers=1)


def apply(settings: schema.ViT, params: Params, state: PyTree, image: Array, *, train: bool = False
          ) -> tuple[Features, PyTree]:
  backbone = vit.build(settings, PX)

  def run(params: Params, state: PyTree, image: Array) -> tuple[Features, PyTree]:
    return backbone.apply(params, state, image, train=train, key=None)

  return jax.jit(run)(params, state, image)


@pytest.mark.quick('root', reason='2 s: another network')
@pytest.mark.parametrize('settings', [ROOT, HYBRID], ids=['root', 'stages'])
def test_a_hybrid_is_a_vit_on_the_map_of_its_resnet(settings: schema.ViT) -> None:
  (params, state), image = networks.variables(settings, PX), networks.some_image(PX)
  p = networks.wide(params)
  maps = networks.numpy_resnet_stem(settings.stem, p['stem'], np.asarray(image, np.float64))
  want = [vits.numpy_vit(settings, p, one) for one in maps]
  features, after = apply(settings, params, state, image)
  assert state == after == {} and features.grid == (2, 3) and features.distilled is None
  np.testing.assert_allclose(features.pooled, np.stack(want), rtol=1e-3, atol=2e-4)


@pytest.mark.slow(reason='1 s: a network')
def test_the_stem_of_lv_vit_has_statistics_that_follow_the_batch() -> None:
  (params, state), image = networks.variables(LV, PX), networks.some_image(PX)
  p, s, x = networks.wide(params), networks.wide(state)['stem'], np.asarray(image, np.float64)
  running = batch = x
  for i, stride in enumerate((2, 1, 1), 1):
    kernel, norm = p['stem'][f'conv{i}']['kernel'], p['stem'][f'norm{i}']
    pads = networks.symmetric(kernel.shape[0])
    batch = networks.conv(batch, kernel, stride, pads)
    s[f'norm{i}']['new'] = {k: .9 * s[f'norm{i}'][k] + .1 * v for k, v in (
        ('mean', batch.mean((0, 1, 2))), ('var', batch.var((0, 1, 2))))}
    batch = networks.relu(networks.batch_norm(batch, norm, None, eps=1e-5))
    running = networks.relu(networks.batch_norm(networks.conv(running, kernel, stride, pads), norm, s[f'norm{i}'],
                                                eps=1e-5))
  for train, maps in ((False, running), (True, batch)):
    features, after = apply(LV, params, state, image, train=train)
    want = np.stack([vits.numpy_vit(LV, p, one) for one in maps])
    np.testing.assert_allclose(features.pooled, want, rtol=2e-3, atol=5e-4)
  for i in (1, 2, 3):
    chex.assert_trees_all_close(after['stem'][f'norm{i}'], s[f'norm{i}']['new'], rtol=1e-3, atol=1e-4)


@pytest.mark.slow(reason='2 s: a network')
def test_a_distillation_token_has_a_place_and_features_of_its_own() -> None:
  (params, state), image = networks.variables(DISTILLED, PX), networks.some_image(PX)
  p = networks.wide(params)
  assert params['dist'].shape == (1, 1, 32) and params['positions'].shape == (1, 2 + 6, 32)
  features, _ = apply(DISTILLED, params, state, image)
  want = np.stack([vits.numpy_vit(DISTILLED, p, np.asarray(one, np.float64)) for one in image])
  np.testing.assert_allclose(features.pooled, want[:, 0], rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(features.distilled, want[:, 1], rtol=1e-3, atol=1e-4)
  assert features.tokens.shape == (3, 6, 32)
  larger, _ = apply(DISTILLED, params, state, networks.some_image((32, 24)))
  assert larger.tokens.shape == (3, 12, 32)


@pytest.mark.parametrize('settings, paths', [
    (ROOT, {'kernel': (2, 2, 32, 32), 'bias': (32,), 'root/kernel': (7, 7, 3, 32), 'root_norm/scale': (32,),
            'root_norm/bias': (32,)}),
    (LV, {'kernel': (4, 4, 6, 32), 'bias': (32,), 'conv1/kernel': (7, 7, 3, 6), 'conv2/kernel': (3, 3, 6, 6),
          'conv3/kernel': (3, 3, 6, 6),
          **{f'norm{i}/{leaf}': (6,) for i in (1, 2, 3) for leaf in ('scale', 'bias')}})], ids=['root', 'lv'])
def test_paths_of_a_stem_are_the_public_format(settings: schema.ViT, paths: dict[str, tuple[int, ...]]) -> None:
  params, _ = networks.variables(settings, PX)
  assert {name: leaf.shape for name, leaf in trees.flatten(params['stem']).items()} == paths


def test_paths_of_the_stages_of_a_hybrid_are_the_public_format() -> None:
  params, _ = networks.variables(HYBRID, PX)
  shapes = {name: leaf.shape for name, leaf in trees.flatten(params['stem']).items()}
  unit = {'conv1/kernel': (1, 1, 128, 64), 'conv2/kernel': (3, 3, 64, 64), 'conv3/kernel': (1, 1, 64, 256),
          'proj/kernel': (1, 1, 128, 256),
          **{f'{norm}/{leaf}': (n,) for norm, n in (('norm1', 64), ('norm2', 64), ('norm3', 256), ('proj_norm', 256))
             for leaf in ('scale', 'bias')}}
  assert {k.removeprefix('stage2/unit1/'): v for k, v in shapes.items() if k.startswith('stage2/unit1')} == unit
  assert shapes['kernel'] == (1, 1, 256, 32)
  assert not any('proj' in name for name in shapes if name.startswith('stage2/unit2'))


@pytest.mark.slow(reason='1 s: two networks')
def test_a_new_unit_of_a_hybrid_changes_nothing_but_negative_values() -> None:
  unit = resnet.PostActivationUnit(hidden=32, stride=1, has_proj=False, dtype=jnp.float32, forms=FAST,
                                   style=resnet.Style(0., 1e-5, 1e-6, True))
  x = jax.random.normal(jax.random.key(0), (2, 3, 3, 128))
  found = jax.jit(lambda key, x: applied(unit, initial(unit, key, x), x))(jax.random.key(1), x)
  np.testing.assert_array_equal(found, jnp.maximum(x, 0.))


@pytest.mark.slow(reason='3 s: two programs')
def test_recomputing_reaches_the_units_of_the_stem_and_changes_no_gradient() -> None:
  short = dataclasses.replace(HYBRID, stem=schema.ResNetStem((1,), width=32), depth=1)
  (params, state), image = networks.variables(short, PX), networks.some_image(PX)

  def gradient(remat: Remat) -> tuple[Params, str]:
    stem = vit.build(dataclasses.replace(short, remat=remat), PX).stem
    loss = lambda p: jnp.sin(stem(p, state, image, train=True)[0]).sum()
    return jax.jit(jax.grad(loss))(params), str(jax.make_jaxpr(jax.grad(loss))(params))

  (kept, plain), (again, text) = gradient(Remat.NONE), gradient(Remat.NAMES)
  chex.assert_trees_all_close(kept, again, rtol=2e-3, atol=2e-3)
  assert plain.count('remat') == 0 and text.count('conv_general_dilated') > plain.count('conv_general_dilated')


@pytest.mark.slow(reason='2 s: a network')
def test_tokens_of_a_stem_with_statistics_come_with_its_new_state() -> None:
  params, state = networks.variables(LV, PX)
  assert list(params['blocks']['attn']['query']) == ['kernel'] and 'bias' in params['blocks']['attn']['out']
  backbone, image = vit.build(LV, PX), networks.some_image(PX)
  tokens, after = backbone.stem(params, state, image, train=True)
  assert tokens.shape == (3, 6, 32) and jax.tree.structure(after) == jax.tree.structure(state)
  still, same = backbone.stem(params, state, image, train=False)
  chex.assert_trees_all_equal(same, state)
  assert jnp.abs(tokens - still).max() > 1e-3


def test_settings_that_do_not_fit_are_all_reported() -> None:
  wrong = dataclasses.replace(HYBRID, patch=12, stem=schema.ResNetStem((1, 1), width=40))
  with pytest.raises(UserError) as error:
    vit.build(wrong, (24, 24))
  assert str(error.value).splitlines() == [
      'model.patch: expected a multiple of 8 px, the stride of model.stem=ResNetStem, got 12.',
      'model.stem.width: expected a multiple of the 32 groups of its norms, got 40.']
  wrong = dataclasses.replace(LV, patch=9, block=schema.Plain(branch_scale=0.), stem=schema.ConvStem(0))
  with pytest.raises(UserError) as error:
    vit.build(wrong, (18, 18))
  assert str(error.value).splitlines() == [
      'model.block.branch_scale: expected more than 0, got 0.0.', 'model.stem.width: expected at least 1, got 0.',
      'model.patch: expected a multiple of 2 px, the stride of model.stem=ConvStem, got 9.']
