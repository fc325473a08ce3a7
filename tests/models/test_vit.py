"""Tests of the Vision Transformer as a whole."""
from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vits
from vits import forward

from vit_jax.config import schema
from vit_jax.config.schema import DType, Execution, Gelu, Pool, Positions
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Params
from vit_jax.models.vit import vit
from vit_jax.models.vit.interpolate import resize
from vit_jax.models.vit.positions import sincos2d

PX = (16, 24)
HOW = schema.PositionResize.BICUBIC_OFFSET
VARIANTS = [(schema.ClassToken(), schema.Learned(), Gelu.TANH), (schema.Mean(), schema.Learned(), Gelu.EXACT),
            (schema.ClassToken(), schema.SinCos(), Gelu.EXACT), (schema.Mean(), schema.SinCos(), Gelu.TANH)]


def some_image(px: tuple[int, int] = PX, seed: int = 0) -> Array:
  return jax.random.uniform(jax.random.key(seed), (6, *px, 3), minval=-1., maxval=1.)


def parameters(settings: schema.ViT) -> Params:
  """Random parameters, in which nothing is zero or one: a mistake anywhere shows."""
  return vits.parameters(settings)


def numpy_norm(x: np.ndarray, p: Params) -> np.ndarray:
  centered = x - x.mean(-1, keepdims=True)
  return centered / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * p['scale'] + p['bias']


def numpy_gelu(x: np.ndarray, kind: Gelu) -> np.ndarray:
  if kind is Gelu.EXACT:
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
  return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def numpy_block(z: np.ndarray, p: Params, kind: Gelu) -> np.ndarray:
  """Equations 2 and 3 for one image `[M, D]`, head by head."""
  y, heads = numpy_norm(z, p['norm1']), []
  for a in range(p['attn']['query']['kernel'].shape[1]):
    q, k, v = (y @ p['attn'][n]['kernel'][:, a] + p['attn'][n]['bias'][a] for n in ('query', 'key', 'value'))
    logits = np.exp(q @ k.T / math.sqrt(q.shape[1]))
    heads.append(logits / logits.sum(1, keepdims=True) @ v @ p['attn']['out']['kernel'][a])
  z = z + sum(heads) + p['attn']['out']['bias']
  hidden = numpy_gelu(numpy_norm(z, p['norm2']) @ p['mlp']['up']['kernel'] + p['mlp']['up']['bias'], kind)
  return z + hidden @ p['mlp']['down']['kernel'] + p['mlp']['down']['bias']


def numpy_vit(s: schema.ViT, p: Params, image: np.ndarray) -> np.ndarray:
  """Equations 1 to 4 for one image `[H, W, 3]` in float64: pooled features `[D]`."""
  h, w = image.shape[0] // s.patch, image.shape[1] // s.patch
  cut = [image[i:i + s.patch, j:j + s.patch]
         for i in range(0, h * s.patch, s.patch) for j in range(0, w * s.patch, s.patch)]
  z = np.stack([c.ravel() for c in cut]) @ p['stem']['kernel'].reshape(-1, s.width) + p['stem']['bias']
  if isinstance(s.positions, schema.SinCos):
    z = z + sincos2d((h, w), s.width)
  if s.pool.class_token:
    z = np.concatenate([p['cls'][0], z])
  if isinstance(s.positions, schema.Learned):
    z = z + p['positions'][0]
  for i in range(s.depth):
    z = numpy_block(z, jax.tree.map(lambda x, i=i: x[i], p['blocks']), s.gelu)
  z = numpy_norm(z, p['norm'])
  return z[0] if s.pool.class_token else z.mean(0)


@pytest.mark.parametrize('pool, positions, gelu', VARIANTS)
def test_the_forward_pass_equals_numpy_in_float64(
    tiny: schema.ViT, pool: Pool, positions: Positions, gelu: Gelu) -> None:
  settings = dataclasses.replace(tiny, pool=pool, positions=positions, gelu=gelu)
  params, image = parameters(settings), some_image()
  features = forward(settings, params, image)
  params64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  expected = np.stack([numpy_vit(settings, params64, x) for x in np.asarray(image, np.float64)])
  np.testing.assert_allclose(features.pooled, expected, rtol=1e-3, atol=1e-4)
  assert features.tokens.shape == (6, 6, 32) and features.grid == (2, 3)


def test_parameter_paths_and_shapes_are_the_public_format(tiny: schema.ViT) -> None:
  params, state = jax.eval_shape(vit.build(tiny, PX).init, jax.random.key(0), some_image())
  blocks = {'norm1/scale': (2, 32), 'norm1/bias': (2, 32), 'norm2/scale': (2, 32), 'norm2/bias': (2, 32),
            'attn/out/kernel': (2, 4, 8, 32), 'attn/out/bias': (2, 32),
            'mlp/up/kernel': (2, 32, 48), 'mlp/up/bias': (2, 48),
            'mlp/down/kernel': (2, 48, 32), 'mlp/down/bias': (2, 32)}
  for name in ('query', 'key', 'value'):
    blocks |= {f'attn/{name}/kernel': (2, 32, 4, 8), f'attn/{name}/bias': (2, 4, 8)}
  expected = {'stem/kernel': (8, 8, 3, 32), 'stem/bias': (32,), 'cls': (1, 1, 32), 'positions': (1, 7, 32),
              'norm/scale': (32,), 'norm/bias': (32,)} | {f'blocks/{k}': v for k, v in blocks.items()}
  assert {name: leaf.shape for name, leaf in trees.flatten(params).items()} == expected
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  assert state == {}


@pytest.mark.parametrize('pool, positions, rows', [
    (schema.ClassToken(), schema.Learned(), 7), (schema.Mean(), schema.Learned(), 6),
    (schema.ClassToken(), schema.SinCos(), 0)])
def test_positions_have_a_class_row_only_where_there_is_a_class_token(
    tiny: schema.ViT, pool: Pool, positions: Positions, rows: int) -> None:
  settings = dataclasses.replace(tiny, pool=pool, positions=positions)
  params, _ = jax.eval_shape(vit.build(settings, PX).init, jax.random.key(0), some_image())
  assert ('cls' in params) == pool.class_token
  assert params['positions'].shape == (1, rows, 32) if rows else 'positions' not in params


@pytest.mark.slow(reason='2 s: a network of width 128')
def test_initial_values_have_the_published_distributions() -> None:
  settings = schema.ViT(patch=8, width=128, depth=2, heads=4, mlp=schema.Mlp(256))
  params, _ = jax.jit(vit.build(settings, (64, 64)).init)(jax.random.key(0), jnp.zeros((1, 64, 64, 3)))
  flat = trees.flatten(params)
  stddev = {name: float(leaf.std()) for name, leaf in flat.items()}
  assert stddev['cls'] == stddev['stem/bias'] == stddev['blocks/attn/query/bias'] == 0.
  np.testing.assert_allclose(stddev['positions'], .02, rtol=.05)
  np.testing.assert_allclose(stddev['stem/kernel'], (8 * 8 * 3) ** -.5, rtol=.05)
  for name, fans in [('attn/query', 256), ('attn/out', 256), ('mlp/up', 384), ('mlp/down', 384)]:
    np.testing.assert_allclose(stddev[f'blocks/{name}/kernel'], math.sqrt(2 / fans), rtol=.05, err_msg=name)
  np.testing.assert_allclose([stddev[f'blocks/mlp/{n}/bias'] for n in ('up', 'down')], 1e-6, rtol=.15)
  leaves = [flat[f'blocks/attn/{n}/kernel'] for n in ('query', 'key', 'value')]
  draws = [np.asarray(leaf[i]).ravel() for leaf in leaves for i in range(2)]
  assert np.abs(np.corrcoef(draws) - np.eye(6)).max() < .05  # no key is used twice


def test_the_stem_equals_a_convolution(tiny: schema.ViT) -> None:
  params, image = parameters(tiny), some_image()
  kernel = params['stem']['kernel']
  layout = ('NHWC', 'HWIO', 'NHWC')
  convolved = jax.lax.conv_general_dilated(image, kernel, (8, 8), 'VALID', dimension_numbers=layout)
  expected = convolved.reshape(6, 6, 32) + params['stem']['bias'][None, None]
  np.testing.assert_allclose(jax.jit(vit.build(tiny, PX).embed)(params, image), expected, rtol=1e-4, atol=1e-4)


def test_block_by_block_gives_what_apply_gives(tiny: schema.ViT) -> None:
  params, image, backbone = parameters(tiny), some_image(), vit.build(tiny, PX)
  tokens = backbone.embed(params, image) + backbone.positions(params, (2, 3))[None]
  cls = jnp.broadcast_to(params['cls'] + params['positions'][:, :1], (6, 1, 32))
  x = jnp.concatenate([cls, tokens], axis=1)
  np.testing.assert_allclose(backbone.begin(params, image), x, rtol=1e-5, atol=1e-6)
  block = jax.jit(lambda x, i: backbone.block(params, x, layer=i, capture=True))
  for i in range(2):
    x, captured = block(x, i)
    assert captured['attention'].shape == (6, 4, 7, 7)
  normed = numpy_norm(np.asarray(x), jax.tree.map(np.asarray, params['norm']))
  np.testing.assert_allclose(forward(tiny, params, image).tokens, normed[:, 1:], rtol=1e-3, atol=1e-4)


@pytest.mark.slow(reason='2 s: two programs')
def test_tokens_come_in_any_order_with_their_positions(tiny: schema.ViT) -> None:
  params, image, backbone = parameters(tiny), some_image(), vit.build(tiny, PX)
  tokens, positions = backbone.embed(params, image), backbone.positions(params, (2, 3))
  order = jnp.asarray([4, 0, 5, 2, 1, 3])
  encode = jax.jit(lambda t, p: backbone.encode(params, t, p, grid=(2, 3), train=False, key=None))
  shuffled = encode(tokens[:, order], positions[order])
  whole = encode(tokens, jnp.broadcast_to(positions[None], (6, 6, 32)))
  np.testing.assert_allclose(shuffled.pooled, whole.pooled, rtol=1e-3, atol=1e-4)
  np.testing.assert_allclose(shuffled.tokens, whole.tokens[:, order], rtol=1e-3, atol=1e-4)
  assert encode(tokens[:, :2], positions[:2]).tokens.shape == (6, 2, 32)


@pytest.mark.quick('learned', reason='1 s: a network')
@pytest.mark.parametrize('positions', [schema.Learned(schema.PositionsAt.STEM, HOW), schema.SinCos()],
                         ids=['learned', 'sincos'])
def test_images_of_another_size_get_resized_positions(tiny: schema.ViT, positions: Positions) -> None:
  settings = dataclasses.replace(tiny, positions=positions)
  params, backbone = parameters(settings), vit.build(settings, PX)
  found = backbone.positions(params, (4, 2))
  expected = (resize(params['positions'][0, 1:], (2, 3), (4, 2), HOW) if positions.has_table
              else jnp.asarray(sincos2d((4, 2), 32)))
  np.testing.assert_array_equal(found, expected)
  features = forward(settings, params, some_image((32, 16)))
  assert features.grid == (4, 2) and features.tokens.shape == (6, 8, 32)


@pytest.mark.slow(reason='1 s: two programs; tests/models/test_options.py has it of gated layers')
@pytest.mark.parametrize('execution', [Execution.SCAN, Execution.UNROLLED])
def test_bf16_is_near_f32_and_features_stay_f32(tiny: schema.ViT, execution: Execution) -> None:
  params, image = parameters(tiny), some_image()
  low = forward(dataclasses.replace(tiny, dtype=DType.BF16, execution=execution), params, image)
  high = forward(tiny, params, image)
  assert low.pooled.dtype == low.tokens.dtype == jnp.float32
  error = jnp.linalg.norm(low.tokens - high.tokens) / jnp.linalg.norm(high.tokens)
  assert 1e-4 < error < 3e-2  # bf16 has 8 bits: 2 ** -9 a rounding, over some ten of them


def test_dropout_depends_on_the_key_and_on_train(tiny: schema.ViT) -> None:
  settings = dataclasses.replace(tiny, dropout=.2, drop_path=.2)
  params, image, backbone = parameters(settings), some_image(), vit.build(settings, PX)

  @jax.jit
  def pooled(key: Array) -> Array:
    return backbone.apply(params, {}, image, train=True, key=key)[0].pooled

  keys = [jax.random.key(i, impl='unsafe_rbg') for i in range(2)]
  first, again, other = pooled(keys[0]), pooled(keys[0]), pooled(keys[1])
  np.testing.assert_array_equal(first, again)
  assert jnp.abs(first - other).max() > 1e-2
  still, without = (forward(s, params, image).pooled for s in (settings, tiny))
  np.testing.assert_array_equal(still, without)
  with pytest.raises(AssertionError, match='needs a key'):
    backbone.apply(params, {}, image, train=True, key=None)


def test_no_key_is_used_twice(tiny: schema.ViT) -> None:
  backbone = vit.build(dataclasses.replace(tiny, dropout=.2, drop_path=.2), PX)
  with jax.debug_key_reuse(True):
    jax.eval_shape(jax.jit(backbone.init), jax.random.key(0), some_image())
    run = jax.jit(lambda p, x, key: backbone.apply(p, {}, x, train=True, key=key)[0].pooled)
    run(parameters(backbone.settings), some_image(), jax.random.key(0))


@pytest.mark.skipif('jax.device_count() < 2', reason='needs two devices')
def test_a_batch_over_devices_needs_no_communication(tiny: schema.ViT) -> None:
  mesh = jax.make_mesh(
      (2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
  params, image, backbone = parameters(tiny), some_image(), vit.build(tiny, PX)
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  with jax.set_mesh(mesh):
    run = lambda p, x: backbone.apply(p, {}, x, train=False, key=None)[0].pooled
    compiled = jax.jit(run, in_shardings=(whole, split)).lower(params, image).compile()
    pooled = compiled(jax.device_put(params, whole), jax.device_put(image, split))
  text = compiled.as_text() or ''
  assert 'fusion' in text
  for word in ('all-gather', 'all-reduce', 'all-to-all', 'collective-permute'):
    assert word not in text
  assert pooled.sharding.is_equivalent_to(split, 2)
  np.testing.assert_allclose(pooled, forward(tiny, params, image).pooled, rtol=1e-4, atol=1e-5)


def test_settings_that_do_not_fit_are_all_reported(tiny: schema.ViT) -> None:
  wrong = dataclasses.replace(tiny, width=30, drop_path=1., positions=schema.SinCos())
  with pytest.raises(UserError) as error:
    vit.build(wrong, (16, 30))
  assert str(error.value).splitlines() == [
      'model.drop_path: expected 0 to below 1, got 1.0.',
      'image_px: expected multiples of model.patch=8 px, such as (16, 32), got (16, 30).',
      'model.width: expected a multiple of model.heads=4, got 30.',
      'model.width: expected a multiple of 4, at least 8, with model.positions=sincos, got 30.']
  with pytest.raises(UserError, match='model.depth: expected 1 to 10000, got 0.'):
    vit.build(dataclasses.replace(tiny, depth=0), PX)


def test_an_image_that_patches_do_not_tile_is_refused_in_the_forward_pass(tiny: schema.ViT) -> None:
  with pytest.raises(UserError, match=r'image_px: .* of model.patch=8 px, such as \(16, 24\), got \(20, 24\)'):
    vit.build(tiny, PX).embed({}, jnp.zeros((1, 20, 24, 3)))


@pytest.mark.parametrize(('is_even', 'expected'), [(False, [0., .1, .2]), (True, [.2, .2, .2])])
def test_drop_path_grows_with_the_depth_unless_it_is_even(
    is_even: bool, expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr('vit_jax.models.vit.vit.stack.run', lambda _, __, x, *, rates, **___: ((rates, {}), {}))
  settings = schema.ViT(patch=8, width=8, depth=3, heads=1, mlp=schema.Mlp(8), drop_path=.2, drop_path_even=is_even)
  rates, _, _ = vit.build(settings, PX)._run({}, jnp.zeros((1, 1, 8)), shared=None, grid=(1, 1), key=None, mask=None)
  np.testing.assert_allclose(rates, expected, rtol=1e-6)
