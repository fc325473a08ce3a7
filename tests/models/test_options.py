"""Tests of the options of a ViT, on three tiny models that together use all of them."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vits
from vits import MODELS, PLAIN, PX, forward, numpy_vit, parameters, some_image

from vit_jax.config import schema
from vit_jax.config.schema import DType, Execution, LastNorm, PositionsAt, Remat
from vit_jax.core import traced_costs, trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Params
from vit_jax.models import cost
from vit_jax.models.vit import vit
from vit_jax.recipes import sizes

OTHERS = [(Execution.UNROLLED, Remat.NAMES), (Execution.SCAN, Remat.MLP), (Execution.SCAN, Remat.FULL)]


def tiny(**options: object) -> schema.ViT:
  return schema.replaced(schema.ViT(**PLAIN), options)


def ablations() -> dict[str, schema.ViT]:
  """The cells of the ViT paper's Table 8, tiny."""
  return {name: tiny(positions=kind) for name, kind in sizes.POSITION_ABLATION.items()}


MEANS = {'mean normed': {'pool': schema.Mean(), 'last_norm': LastNorm.POOLED, 'registers': 1},
         'patches': {'pool': schema.Mean(class_token=True)},
         'patches normed': {'pool': schema.Mean(class_token=True), 'last_norm': LastNorm.POOLED}}


@pytest.mark.slow(reason='1 s each: networks')
@pytest.mark.parametrize('name', MEANS)
def test_the_mean_of_the_patches_can_be_normalized_and_stand_beside_a_class_token(name: str) -> None:
  settings, image = tiny(**MEANS[name]), some_image()
  params, backbone = parameters(settings), vit.build(settings, PX)
  features = forward(settings, params, image)
  params64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  expected = np.stack([numpy_vit(settings, params64, x) for x in np.asarray(image, np.float64)])
  np.testing.assert_allclose(features.pooled, expected, rtol=1e-3, atol=2e-4)
  assert ('cls' in params) is settings.pool.class_token and features.tokens.shape == (6, 6, 32)
  tokens = np.arange(6. * 7 * 32).reshape(6, 7, 32)
  np.testing.assert_allclose(backbone.readout_weights(params, jnp.asarray(tokens)), [[0.] + [1 / 6] * 6] * 6, rtol=1e-6)


@pytest.mark.parametrize('name', [*MODELS, *(f'positions {n}' for n in ('none', '1d-layers', '2d-stem', '2d-shared'))])
def test_the_forward_pass_equals_numpy_in_float64(name: str) -> None:
  settings = MODELS.get(name) or ablations()[name.split()[1]]
  params, image = parameters(settings), some_image()
  features = forward(settings, params, image)
  params64 = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  expected = np.stack([numpy_vit(settings, params64, x) for x in np.asarray(image, np.float64)])
  found = features.tokens if isinstance(settings.pool, schema.Map) else features.pooled
  np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-4)
  assert features.tokens.shape == (6, 6, 32) and features.pooled.shape == (6, 32)


@pytest.mark.quick('False', reason='1 s: a program')
@pytest.mark.parametrize('is_even', [False, True])
def test_stochastic_depth_spares_the_first_block_unless_it_is_even(is_even: bool) -> None:
  settings = tiny(pool=schema.Mean(), drop_path=.9999, drop_path_even=is_even)
  backbone = vit.build(settings, PX)
  params, image = parameters(settings), some_image()
  first = params['blocks']['mlp']['down']['bias']
  moved = {**params, 'blocks': {**params['blocks'], 'mlp': {**params['blocks']['mlp'], 'down': {
      **params['blocks']['mlp']['down'], 'bias': first.at[0, 3].add(1.)}}}}
  run = jax.jit(lambda p: backbone.apply(p, {}, image, train=True, key=jax.random.key(0, impl='unsafe_rbg'))[0].tokens)
  assert np.allclose(run(params), run(moved)) == is_even


def test_patch_dropout_keeps_another_part_of_each_image_with_its_positions(monkeypatch: pytest.MonkeyPatch) -> None:
  settings = tiny(pool=schema.Mean(), patch_dropout=.5)
  backbone, image = vit.build(settings, PX), some_image()
  marks = jnp.arange(6.)[:, None] * jnp.ones((1, 32))
  monkeypatch.setattr(vit.ViT, 'stem', lambda *_, **__: (jnp.tile(marks, (6, 1, 1)), {}))
  monkeypatch.setattr(vit.ViT, 'positions', lambda *_: 10. * marks)
  monkeypatch.setattr(vit.ViT, 'encode', lambda _, __, tokens, positions, **___: (tokens, positions))
  (tokens, positions), _ = backbone.apply({}, {}, image, train=True, key=jax.random.key(0))
  kept = np.asarray(tokens[..., 0])
  np.testing.assert_array_equal(positions, 10. * tokens)
  assert kept.shape == (6, 3) and all(len(set(row)) == 3 for row in kept.tolist())
  assert len({tuple(sorted(row)) for row in kept.tolist()}) > 2
  (tokens, positions), _ = backbone.apply({}, {}, image, train=False, key=None)
  assert tokens.shape == (6, 6, 32) and positions.shape == (6, 32)


def test_flops_of_training_are_those_of_the_patches_that_are_kept() -> None:
  def flops(share: float) -> float:
    backbone = vit.build(tiny(pool=schema.Mean(), kernels=schema.Kernels.PLAIN, patch_dropout=share), PX)
    found = traced_costs.flops(lambda p, x: backbone.apply(p, {}, x, train=True, key=jax.random.key(0))[0].pooled,
                               vits.shapes_of(tiny(pool=schema.Mean())), some_image())
    return sum(count for scope, count in found.items() if 'mlp' in scope)

  assert flops(.5) == flops(0.) / 2 and flops(.99) == flops(0.) / 6


def test_parameter_paths_and_shapes_are_the_public_format() -> None:
  found = {name: {path: leaf.shape for path, leaf in trees.flatten(vits.shapes_of(s)).items()}
           for name, s in MODELS.items()}
  gated, parallel, axial = found['gated'], found['parallel'], found['axial']
  assert {k: v for k, v in gated.items() if k.split('/')[0] in ('cls', 'registers', 'positions')} == {
      'registers': (1, 2, 32)}
  assert gated['blocks/positions/column'] == (2, 3, 16) and gated['blocks/positions/row'] == (2, 2, 16)
  assert gated['blocks/mlp/gate/kernel'] == gated['blocks/mlp/up/kernel'] == (2, 32, 48)
  assert gated['blocks/mlp/gate/bias'] == (2, 48) and gated['blocks/mlp/down/kernel'] == (2, 48, 32)
  assert gated['blocks/scale1'] == gated['blocks/scale2'] == (2, 32)
  assert gated['pool/probe'] == (1, 1, 32) and gated['pool/attn/query/kernel'] == (32, 4, 8)
  assert gated['pool/norm/scale'] == (32,) and gated['pool/mlp/up/kernel'] == (32, 48)
  assert parallel['blocks/attn/relative'] == (2, 11, 4, 8) and parallel['registers'] == (1, 1, 32)
  assert parallel['blocks/attn/query_norm/scale'] == parallel['blocks/attn/key_norm/bias'] == (2, 8)
  assert 'blocks/norm2/scale' not in parallel and 'positions' not in parallel
  assert axial['positions'] == (1, 6, 32) and not any(name.startswith('blocks/attn') for name in axial)
  assert axial['blocks/row/attn/query/kernel'] == axial['blocks/column/attn/query/kernel'] == (2, 32, 4, 8)
  assert axial['blocks/row/scale1'] == axial['blocks/column/norm2/bias'] == (2, 32)


@pytest.mark.slow(reason='2 s: draws networks')
def test_initial_values_of_options_are_the_published_ones() -> None:
  settings = tiny(width=128, registers=4, block=schema.Plain(1e-5), pool=schema.Map(),
                  positions=schema.Learned(PositionsAt.LAYERS))

  @jax.jit
  def made(key: Array) -> Params:
    params, _ = vit.build(settings, (64, 64)).init(key, jnp.zeros((1, 64, 64, 3)))
    return {'registers': params['registers'], 'blocks': {k: params['blocks'][k] for k in ('scale1', 'positions')}}

  params = made(jax.random.key(0))
  np.testing.assert_allclose(params['registers'].std(), 1e-6, rtol=.15)
  np.testing.assert_allclose(params['blocks']['scale1'], 1e-5, rtol=1e-6)
  np.testing.assert_allclose(params['blocks']['positions'].std(), .02, rtol=.05)
  own = np.asarray(params['blocks']['positions']).reshape(2, -1)
  assert abs(np.corrcoef(own)[0, 1]) < .05  # no layer has the positions of another


@pytest.mark.slow(reason='5 to 20 s of compilation; tests/models/test_stack.py has what runs the layers')
@pytest.mark.parametrize(('name', 'others'), [
    ('parallel', OTHERS[:1]),
    *(pytest.param(name, OTHERS, marks=pytest.mark.slow(reason='10 s of compilation')) for name in MODELS)])
def test_execution_and_remat_change_neither_output_nor_gradient(
    name: str, others: list[tuple[Execution, Remat]]) -> None:
  params, image = parameters(MODELS[name]), some_image()

  def outcome(**run: object) -> tuple[Array, Params]:
    backbone = vit.build(dataclasses.replace(MODELS[name], **run), PX)

    def loss(params: Params, image: Array) -> Array:
      features, _ = backbone.apply(params, {}, image, train=True, key=jax.random.key(7, impl='unsafe_rbg'))
      return jnp.sin(features.pooled).sum() + jnp.square(features.tokens).mean()

    return jax.jit(jax.value_and_grad(loss))(params, image)

  value, gradient = outcome()
  for path, leaf in trees.flatten(gradient).items():
    assert float(jnp.abs(leaf).max()) > 0. or path.endswith('key/bias'), path  # every parameter is used
  for execution, remat in others:
    other_value, other_gradient = outcome(execution=execution, remat=remat)
    np.testing.assert_allclose(other_value, value, rtol=1e-5)
    for path, leaf in trees.flatten(gradient).items():
      np.testing.assert_allclose(trees.flatten(other_gradient)[path], leaf, rtol=2e-3, atol=2e-5,
                                 err_msg=f'{path}, {execution.value}, {remat.value}')


@pytest.mark.quick('gated', reason='1 s: two programs')
@pytest.mark.parametrize('name', MODELS)
def test_block_by_block_gives_what_apply_gives_and_captures_attention(name: str) -> None:
  s = MODELS[name]
  params, image, backbone = parameters(s), some_image(), vit.build(s, PX)
  x = jax.jit(backbone.begin)(params, image)
  block = jax.jit(lambda x, i: backbone.block(params, x, layer=i, capture=True))
  for i in range(2):
    x, captured = block(x, i)
  normed = vits._norm(np.asarray(x), jax.tree.map(np.asarray, params['norm']))
  want = forward(s, params, image)
  np.testing.assert_allclose(want.tokens, normed[:, x.shape[1] - 6:], rtol=1e-3, atol=2e-4)
  end = jax.jit(lambda p, x: (backbone.finish(p, x, grid=(2, 3)).pooled, backbone.readout_weights(p, x)))
  pooled, reading = end(params, x)
  np.testing.assert_allclose(pooled, want.pooled, rtol=1e-3, atol=2e-4)
  np.testing.assert_allclose(reading.sum(1), 1., rtol=1e-5)
  assert reading.shape == x.shape[:2] and not reading[:, int(s.pool.class_token):x.shape[1] - 6].any()
  shapes = {k: v.shape for k, v in captured.items()}
  assert shapes == ({'row_attention': (6, 2, 4, 3, 3), 'column_attention': (6, 3, 4, 2, 2)} if name == 'axial'
                    else {'attention': (6, 4, x.shape[1], x.shape[1])})
  for weights in captured.values():
    assert weights.dtype == jnp.float32
    np.testing.assert_allclose(weights.sum(-1), 1., rtol=1e-5)


@pytest.mark.quick('gated', reason='1 s: two programs')
@pytest.mark.parametrize('name', MODELS)
def test_bf16_is_near_f32_and_features_stay_f32(name: str) -> None:
  params, image = parameters(MODELS[name]), some_image()
  low = forward(dataclasses.replace(MODELS[name], dtype=DType.BF16), params, image)
  high = forward(MODELS[name], params, image)
  assert low.pooled.dtype == low.tokens.dtype == jnp.float32
  error = jnp.linalg.norm(low.tokens - high.tokens) / jnp.linalg.norm(high.tokens)
  assert 1e-4 < error < 3e-2


@pytest.mark.slow(reason='2 s; the forward pass in numpy has axial attention')
def test_axial_attention_mixes_rows_then_columns_and_nothing_else() -> None:
  settings = tiny(block=schema.Axial(), pool=schema.Mean(), positions=schema.NoPositions(), depth=1)
  params, backbone = parameters(settings), vit.build(settings, PX)
  x = jax.random.normal(jax.random.key(1), (1, 6, 32))
  one_changed = x + 3. * jnp.eye(6)[:, :, None] * jax.random.normal(jax.random.key(2), (1, 1, 32))  # image i: token i
  still = {k: (v if k == 'row' else jax.tree.map(jnp.zeros_like, v)) for k, v in params['blocks'].items()}
  run = jax.jit(lambda x: backbone.block({'blocks': still}, x, layer=0, capture=False)[0])  # columns pass x on
  depends = np.abs(run(one_changed) - run(jnp.broadcast_to(x, (6, 6, 32)))).max(-1) > 1e-4  # [token in, token out]
  np.testing.assert_array_equal(depends, np.kron(np.eye(2), np.ones((3, 3))).astype(bool))


def test_images_of_another_size_are_taken_where_positions_can_be_resized() -> None:
  image = some_image((32, 16))
  for settings in (MODELS['gated'], MODELS['axial'], ablations()['2d-stem']):
    features = jax.eval_shape(lambda x, s=settings: forward(s, vits.shapes_of(s), x), image)
    assert features.tokens.shape == (6, 8, 32) and features.pooled.shape == (6, 32)
  with pytest.raises(UserError, match='relative: expected images of 16 x 24 px, got 4 x 2 patches of 8 px.'):
    forward(MODELS['parallel'], parameters(MODELS['parallel']), image)


def test_a_part_of_the_tokens_is_refused_where_blocks_know_places() -> None:
  for name, said in (('gated', 'positions.at=layers'), ('parallel', 'positions=relative'), ('axial', 'block=axial')):
    backbone = vit.build(MODELS[name], PX)
    with pytest.raises(UserError, match=f'model.{said}: expected all 2 x 3 patch tokens of an image, got 4'):
      backbone.encode({}, jnp.zeros((1, 4, 32)), jnp.zeros((4, 32)), grid=(2, 3), train=False, key=None)


@pytest.mark.slow(reason='1 s: two programs')
def test_shared_positions_follow_tokens_in_any_order() -> None:
  settings = ablations()['1d-shared']
  params, image, backbone = parameters(settings), some_image(), vit.build(settings, PX)
  tokens, positions, order = backbone.embed(params, image), backbone.positions(params, (2, 3)), jnp.asarray([4, 0, 5])
  encode = jax.jit(lambda t, p: backbone.encode(params, t, p, grid=(2, 3), train=False, key=None).pooled)
  each = jnp.broadcast_to(positions[None, order], (6, 3, 32))
  np.testing.assert_allclose(encode(tokens[:, order], positions[order]),
                             encode(tokens[:, order[::-1]], each[:, ::-1]), rtol=1e-3, atol=1e-4)


def test_an_attention_delta_is_added_to_the_weights() -> None:
  settings = tiny(pool=schema.Mean())
  params, backbone, x = parameters(settings), vit.build(settings, PX), jax.random.normal(jax.random.key(1), (2, 6, 32))
  delta = jax.random.normal(jax.random.key(3), (2, 4, 6, 6))
  block = jax.jit(lambda p, x, delta: backbone.block(p, x, layer=1, capture=True, attn_delta=delta))
  (plain, captured), (moved, after) = (block(params, x, d) for d in (jnp.zeros_like(delta), delta))
  np.testing.assert_allclose(after['attention'], captured['attention'] + delta, rtol=1e-5, atol=1e-6)
  assert np.abs(moved - plain).max() > 1e-2


def test_registers_and_class_token_are_no_patch_tokens() -> None:
  settings = tiny(registers=3, pool=schema.Mean())
  params, image = parameters(settings), some_image()
  features = forward(settings, params, image)
  np.testing.assert_allclose(features.pooled, features.tokens.mean(1), rtol=1e-4, atol=1e-5)
  moved = forward(settings, {**params, 'registers': -params['registers']}, image)
  assert features.tokens.shape == (6, 6, 32) and jnp.abs(moved.tokens - features.tokens).max() > 1e-3


@pytest.mark.slow(reason='3 s; tests/models/test_vit.py has the plain network')
def test_no_key_is_used_twice_with_options() -> None:
  for settings in (MODELS['gated'], MODELS['axial']):  # together they have all that draws
    backbone = vit.build(settings, PX)
    with jax.debug_key_reuse(True):
      jax.eval_shape(jax.jit(backbone.init), jax.random.key(0), some_image())
      run = jax.jit(lambda p, x, key, b=backbone: b.apply(p, {}, x, train=True, key=key)[0].pooled)
      run.lower(parameters(settings), some_image(), jax.random.key(0))


@pytest.mark.slow(reason='1 s: compiles a network; tests/models/test_cost.py has the plain one')
@pytest.mark.parametrize('name', MODELS)
def test_flops_agree_with_those_that_xla_counts(name: str) -> None:
  settings = schema.replaced(MODELS[name], {'width': 256, 'mlp.hidden': 1024, 'execution': Execution.UNROLLED})
  backbone, image = vit.build(settings, (32, 40)), jax.ShapeDtypeStruct((1, 32, 40, 3), jnp.float32)
  params, _ = jax.eval_shape(backbone.init, jax.random.key(0), image)
  run: Callable[[Params, Array], Array] = lambda p, x: backbone.apply(p, {}, x, train=False, key=None)[0].pooled
  analysis = jax.jit(run).lower(params, image).cost_analysis()
  assert analysis is not None
  analytic = cost.forward(settings, (32, 40), head=schema.Head(), num_classes=0).flops
  np.testing.assert_allclose(analysis['flops'], sum(analytic.values()), rtol=.05)  # XLA counts elementwise work too


@pytest.mark.quick('parallel', reason='1 s each: traces of gradients')
@pytest.mark.parametrize('name', MODELS)
def test_remat_keeps_less_the_more_it_computes_again(name: str) -> None:
  kept = [vits.kept_bytes(dataclasses.replace(MODELS[name], depth=12, remat=r, execution=Execution.SCAN))
          for r in Remat if r is not Remat.AUTO]
  assert kept == sorted(kept, reverse=True) and len(set(kept)) == 5


def test_options_that_do_not_fit_are_all_reported() -> None:
  wrong = tiny(block=schema.Axial(), registers=2, positions=schema.Relative(), attention=schema.Attention(dropout=1.))
  with pytest.raises(UserError) as error:
    vit.build(wrong, PX)
  text = str(error.value)
  for said in ('attention.dropout: expected 0 to below 1, got 1.0.',
               'pool: expected mean or map, without a class token, with model.block=axial, got classtoken.',
               'registers: expected 0 with model.block=axial, got 2.',
               'positions: expected learned, learned2d, sincos or nopositions with model.block=axial, got relative.'):
    assert f'model.{said}' in text, said
  assert len(text.splitlines()) == 4


@pytest.mark.parametrize('kind, setting', [
    (schema.Parallel, 'layer_scale'), (schema.SinCos, 'at'), (schema.NoPositions, 'at'), (schema.Relative, 'at'),
    (schema.Rotary, 'at'), (schema.LearnedRotary, 'at'), (schema.Rotary, 'resize'), (schema.Learned, 'base'),
    (schema.UnitInterval, 'grid'), (schema.Mean, 'distillation'), (schema.Map, 'distillation'),
    (schema.ClassToken, 'heads'), (schema.First, 'class_token'), (schema.SwiGlu, 'kernel')])
def test_a_kind_of_part_has_no_settings_that_mean_nothing_there(kind: type, setting: str) -> None:
  with pytest.raises(UserError, match=f"{kind.__name__}: expected the name of a setting, got '{setting}'"):
    kind(**{setting: 1})
