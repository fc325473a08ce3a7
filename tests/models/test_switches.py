"""Tests of the switches of a ViT that families of published networks need; three tiny models use all of them."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vits

from vit_jax.config import schema
from vit_jax.config.schema import Gelu, LastNorm, Positions, QkvBias
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.models.layers import RMSNorm
from vit_jax.models.vit import rotary, vit

MODELS = {
    'dino': schema.ViT(  # as DINOv3
        **vits.PLAIN | {'mlp': schema.SwiGlu(48)}, registers=2, block=schema.Plain(.5),
        attention=schema.Attention(QkvBias.QUERY_VALUE), positions=schema.Rotary(coordinates=schema.UnitInterval())),
    'clip': schema.ViT(  # as CLIP, EVA-02 and the Perception Encoder
        **vits.PLAIN | {'mlp': schema.Mlp(48, inner_norm=True)}, norm_before=True, stem=schema.PatchStem(bias=False),
        gelu=Gelu.QUICK, attention=schema.Attention(inner_norm=True),
        pool=schema.Map(class_token=True, heads=2, hidden=40),
        positions=schema.LearnedRotary(10_000., coordinates=schema.ByIndex(5, 1.))),
    'aim': schema.ViT(  # as AIMv2, without its last norm
        **vits.PLAIN | {'mlp': schema.SwiGlu(48, bias=False)}, pool=schema.Mean(), norm=schema.RmsNorm(),
        stem=schema.PatchStem(norm=True), last_norm=LastNorm.NONE,
        attention=schema.Attention(QkvBias.NONE, out_bias=False, qk_norm=True)),
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


@pytest.mark.parametrize('kind', [
    schema.Rotary(10., coordinates=schema.ByIndex(offset=1.)),
    pytest.param(schema.LearnedRotary(10., coordinates=schema.ByIndex(offset=1.)),
                 marks=pytest.mark.slow(reason='2 s: two programs'))], ids=['rotary', 'learned'])
def test_mixed_rotary_positions_with_the_frequencies_of_the_axial_form_are_these(kind: Positions) -> None:
  axial = schema.ViT(**vits.PLAIN, positions=kind, registers=1)
  mixed, image = schema.replaced(axial, {'positions.mixed': True}), vits.some_image()
  params = vits.parameters(axial)
  theta = 10. ** -(np.arange(2) / 2)  # heads of 8 channels
  one = np.stack([np.concatenate([theta, 0 * theta]), np.concatenate([0 * theta, theta])])
  frequencies = jnp.asarray(np.broadcast_to(one[None, :, None], (2, 2, 4, 4)), jnp.float32)
  learned = {**params, 'blocks': {**params['blocks'], 'attn': {**params['blocks']['attn'], 'frequencies': frequencies}}}
  assert trees.flatten(learned).keys() == trees.flatten(vits.shapes_of(mixed)).keys()
  whole, other = vits.forward(axial, params, image).pooled, vits.forward(mixed, learned, image).pooled
  np.testing.assert_allclose(other, whole, rtol=1e-5, atol=1e-5)


def test_mixed_frequencies_begin_as_the_axial_ones_turned_in_each_head() -> None:
  found = np.asarray(rotary.mixed_frequencies(10.)(jax.random.key(3), (2, 5, 6)))
  first, second = np.split(found, 2, axis=-1)
  sizes = 10. ** -(np.arange(3) / 3)
  np.testing.assert_allclose(np.hypot(*first), np.broadcast_to(sizes, (5, 3)), rtol=1e-5)
  np.testing.assert_allclose((first * second).sum(0), 0., atol=1e-6)  # at a right angle
  assert len(np.unique(first[0, :, 0].round(4))) == 5


def test_a_layer_scale_of_attention_alone_leaves_the_mlp_as_it_is() -> None:
  both = schema.ViT(**vits.PLAIN, block=schema.Plain(.5))
  one, image, params = schema.replaced(both, {'block.mlp_scale': False}), vits.some_image(), vits.parameters(both)
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


def test_coordinates_in_the_unit_interval_are_those_of_the_image_and_a_reference_grid_scales_numbers() -> None:
  unit = rotary.coordinates(4, schema.UnitInterval())
  np.testing.assert_allclose(unit / (2 * np.pi), [-.75, -.25, .25, .75], rtol=1e-12)
  np.testing.assert_allclose(rotary.coordinates(32, schema.ByIndex(16, 1.))[:3], [.5, 1., 1.5], rtol=1e-12)
  np.testing.assert_allclose(rotary.coordinates(16, schema.ByIndex(0, 1.)), np.arange(1., 17.))


def test_rms_norm_neither_centers_nor_adds() -> None:
  x = np.random.default_rng(0).normal(3., 2., size=(5, 7)).astype(np.float32)
  found = RMSNorm(1e-5).apply({'params': {'scale': jnp.full(7, 2.)}}, jnp.asarray(x, jnp.bfloat16))
  x = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, 2. * x / np.sqrt((x ** 2).mean(1, keepdims=True) + 1e-5), rtol=1e-6)


@pytest.mark.parametrize('wrong, said', [
    ({'pool': schema.Map(heads=5)}, 'model.width: expected a multiple of model.pool.heads=5, got 32'),
    ({'last_norm': LastNorm.POOLED},
     'model.last_norm: expected tokens or none with model.pool=classtoken, got pooled'),
    ({'block.mlp_scale': False}, 'model.block.mlp_scale: expected its default True with model.block.layer_scale=0')])
def test_switches_without_an_effect_are_refused(wrong: dict[str, object], said: str) -> None:
  with pytest.raises(UserError) as error:
    vit.build(schema.replaced(schema.ViT(**vits.PLAIN), wrong), vits.PX)
  assert said in str(error.value)
