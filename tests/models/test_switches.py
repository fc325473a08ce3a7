"""Tests of the switches of a ViT that families of published networks need; three tiny models use all of them."""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vits

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Norm, Pool, Positions, RotaryPlaces
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.models.layers import RMSNorm
from vit_jax.models.vit import positions, vit

MODELS = {
    'dino': schema.ViT(  # as DINOv3
        **vits.PLAIN, registers=2, layer_scale=.5, swiglu=True, key_bias=False,
        positions=Positions.ROTARY2D, rotary_places=RotaryPlaces.UNIT),
    'clip': schema.ViT(  # as CLIP, EVA-02 and the Perception Encoder
        **vits.PLAIN, norm_before=True, stem_bias=False, gelu=Gelu.QUICK, attn_norm=True, mlp_norm=True,
        pool=Pool.MAP_CLS, pool_heads=2, pool_mlp=40, positions=Positions.LEARNED_ROTARY2D, rotary_base=10_000.,
        rotary_grid=5, rotary_offset=1.),
    'aim': schema.ViT(  # as AIMv2, without its last norm
        **vits.PLAIN, pool=Pool.MEAN, norm=Norm.RMS, stem_norm=True, final_norm=False, swiglu=True, qk_norm=True,
        qkv_bias=False, out_bias=False, mlp_bias=False),
}


@pytest.mark.parametrize('name', MODELS)
def test_the_forward_pass_equals_numpy_in_float64(name: str) -> None:
  settings, image = MODELS[name], vits.some_image()
  params = vits.parameters(settings)
  p64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  expected = np.stack([vits.numpy_vit(settings, p64, one) for one in np.asarray(image, np.float64)])
  # the tolerance of the other options' test: two blocks of products of up to 48 terms, in f32
  np.testing.assert_allclose(vits.forward(settings, params, image).pooled, expected, rtol=1e-3, atol=2e-4)


def test_switched_off_parameters_do_not_exist() -> None:
  found = {name: set(trees.flatten(vits.shapes_of(settings))) for name, settings in MODELS.items()}
  assert 'blocks/attn/key/bias' not in found['dino'] and 'blocks/attn/query/bias' in found['dino']
  assert 'stem/bias' not in found['clip'] and 'norm_before/bias' in found['clip']
  assert {'blocks/attn/norm/scale', 'blocks/mlp/norm/bias', 'pool/probe', 'cls', 'positions'} <= found['clip']
  assert not [path for path in found['aim'] if path.endswith('bias') and path != 'stem/bias']
  assert 'norm/scale' not in found['aim'] and {'stem_norm/scale', 'blocks/attn/key_norm/scale'} <= found['aim']


@pytest.mark.slow(reason='2 s: three programs')
def test_blocks_one_by_one_and_a_subset_of_patches_agree_with_all_at_once() -> None:
  settings, image = MODELS['clip'], vits.some_image()
  params, backbone = vits.parameters(settings), vit.build(settings, vits.PX)
  whole = vits.forward(settings, params, image).pooled

  @jax.jit
  def others(image: jax.Array) -> tuple[jax.Array, jax.Array]:
    tokens = backbone.begin(params, image)
    for layer in range(2):
      tokens, _ = backbone.block(params, tokens, layer=layer, capture=True)
    order = jnp.asarray([3, 0, 5, 1, 4, 2])  # all of them, in another order
    shuffled = backbone.encode(params, backbone.embed(params, image)[:, order],
                               backbone.positions(params, vits.GRID)[order], grid=vits.GRID, train=False, key=None)
    return backbone.finish(params, tokens, grid=vits.GRID).pooled, shuffled.pooled

  for found in others(image):
    np.testing.assert_allclose(found, whole, rtol=1e-3, atol=2e-5)
  assert backbone.positions(params, (4, 2)).shape == (8, 32 + 8)


@pytest.mark.parametrize('kind', [Positions.ROTARY2D, pytest.param(Positions.LEARNED_ROTARY2D, marks=pytest.mark.slow(
    reason='2 s: two programs'))])
def test_mixed_rotary_positions_with_the_frequencies_of_the_axial_form_are_these(kind: Positions) -> None:
  axial = schema.ViT(**vits.PLAIN, positions=kind, rotary_base=10., rotary_offset=1., registers=1)
  mixed, image = dataclasses.replace(axial, rotary_mixed=True), vits.some_image()
  params = vits.parameters(axial)
  theta = 10. ** -(np.arange(2) / 2)  # heads of 8 channels
  one = np.stack([np.concatenate([theta, 0 * theta]), np.concatenate([0 * theta, theta])])
  frequencies = jnp.asarray(np.broadcast_to(one[None, :, None], (2, 2, 4, 4)), jnp.float32)
  learned = {**params, 'blocks': {**params['blocks'], 'attn': {**params['blocks']['attn'], 'frequencies': frequencies}}}
  assert trees.flatten(learned).keys() == trees.flatten(vits.shapes_of(mixed)).keys()
  whole, other = vits.forward(axial, params, image).pooled, vits.forward(mixed, learned, image).pooled
  np.testing.assert_allclose(other, whole, rtol=1e-5, atol=1e-5)


def test_mixed_frequencies_begin_as_the_axial_ones_turned_in_each_head() -> None:
  found = np.asarray(positions.mixed_frequencies(10.)(jax.random.key(3), (2, 5, 6)))
  first, second = np.split(found, 2, axis=-1)
  sizes = 10. ** -(np.arange(3) / 3)
  np.testing.assert_allclose(np.hypot(*first), np.broadcast_to(sizes, (5, 3)), rtol=1e-5)
  np.testing.assert_allclose((first * second).sum(0), 0., atol=1e-6)  # at a right angle
  assert len(np.unique(first[0, :, 0].round(4))) == 5


def test_a_layer_scale_of_attention_alone_leaves_the_mlp_as_it_is() -> None:
  both = schema.ViT(**vits.PLAIN, layer_scale=.5)
  one, image, params = dataclasses.replace(both, mlp_scale=False), vits.some_image(), vits.parameters(both)
  blocks = dict(params['blocks'], scale2=jnp.ones_like(params['blocks']['scale2']))
  whole = vits.forward(both, {**params, 'blocks': blocks}, image).pooled
  del blocks['scale2']
  np.testing.assert_allclose(vits.forward(one, {**params, 'blocks': blocks}, image).pooled, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.slow(reason='2 s: another program')
def test_attention_pooling_with_the_class_token_weighs_all_tokens() -> None:
  params, backbone = vits.parameters(MODELS['clip']), vit.build(MODELS['clip'], vits.PX)
  tokens = np.random.default_rng(0).normal(size=(2, 7, 32)).astype(np.float32)
  weights = backbone.readout_weights(params, jnp.asarray(tokens))
  assert weights.shape == (2, 7) and bool((weights > 0).all())
  np.testing.assert_allclose(weights.sum(1), 1., rtol=1e-6)


def test_places_in_the_unit_interval_are_those_of_the_image_and_a_reference_grid_scales_numbers() -> None:
  unit = MODELS['dino']
  np.testing.assert_allclose(positions.places(4, unit) / (2 * np.pi), [-.75, -.25, .25, .75], rtol=1e-12)
  scaled = dataclasses.replace(MODELS['clip'], rotary_grid=16, rotary_offset=1.)
  np.testing.assert_allclose(positions.places(32, scaled)[:3], [.5, 1., 1.5], rtol=1e-12)
  np.testing.assert_allclose(positions.places(16, dataclasses.replace(scaled, rotary_grid=0)), np.arange(1., 17.))


def test_rms_norm_neither_centers_nor_adds() -> None:
  x = np.random.default_rng(0).normal(3., 2., size=(5, 7)).astype(np.float32)
  found = RMSNorm(1e-5).apply({'params': {'scale': jnp.full(7, 2.)}}, jnp.asarray(x, jnp.bfloat16))
  x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, 2. * x / np.sqrt((x ** 2).mean(1, keepdims=True) + 1e-5), rtol=1e-6)


@pytest.mark.parametrize('wrong, said', [
    ({'qkv_bias': False, 'key_bias': False}, 'model.key_bias: expected its default True with model.qkv_bias=False'),
    ({'pool_heads': 2}, 'model.pool_heads: expected its default 0 with model.pool=cls'),
    ({'pool': Pool.MAP, 'pool_heads': 5}, 'model.width: expected a multiple of model.pool_heads=5, got 32'),
    ({'pool': Pool.MEAN, 'norm_after_pool': True, 'final_norm': False}, 'model.final_norm: expected True with model.'),
    ({'rotary_mixed': True}, 'model.rotary_mixed: expected its default False with model.positions=learned'),
    ({'mlp_scale': False}, 'model.mlp_scale: expected its default True with model.layer_scale=0'),
    ({'rotary_places': RotaryPlaces.UNIT}, 'model.rotary_places: expected its default index with model.positions=le'),
    ({'positions': Positions.ROTARY2D, 'rotary_places': RotaryPlaces.UNIT, 'rotary_grid': 4},
     'model.rotary_grid: expected its default 0 with model.rotary_places=unit'),
    ({'positions': Positions.LEARNED_ROTARY2D, 'positions_at': schema.PositionsAt.LAYERS},
     'model.positions_at: expected stem with model.positions=learned_rotary2d')])
def test_switches_without_an_effect_are_refused(wrong: dict[str, object], said: str) -> None:
  with pytest.raises(UserError) as error:
    vit.build(dataclasses.replace(schema.ViT(**vits.PLAIN), **wrong), vits.PX)
  assert said in str(error.value)
