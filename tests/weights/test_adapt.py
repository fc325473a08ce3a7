"""Weights are fitted to a run by stated rules, or not at all."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights import made
from vit_jax.config import schema
from vit_jax.config.schema import Gelu, PositionResize, checks
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.models import backbones
from vit_jax.models.vit import interpolate
from vit_jax.models.vit import positions as position_tables
from vit_jax.weights import adapt, loading, resize
from vit_jax.weights.network import Weights

POOLED = {'pool': schema.Mean(class_token=True), 'last_norm': schema.LastNorm.POOLED}
OTHER = ('cat', 'dog', 'fox')


def target(model: schema.Model = made.MODEL, *, px: tuple[int, int] = (32, 32), names: tuple[str, ...] = OTHER,
           head: schema.Head | None = None, **changes: object) -> adapt.Target:
  model = checks.replaced(model, changes)
  like = made.expected(model, head or schema.Head(), len(names), None, px,
                       with_dist=isinstance(model, schema.ViT) and model.pool.distillation)
  return adapt.Target(model, px, like, names)


def fit(found: Weights, wanted: adapt.Target) -> adapt.Adapted:
  fitted = adapt.adapt(found, wanted)
  have, need = trees.flatten(fitted.params), trees.flatten(wanted.like)
  new = {line.name for line in fitted.report.of('new')}
  assert have.keys() | new == need.keys() and not have.keys() & new
  assert all(have[name].shape == need[name].shape for name in have)
  return fitted


def told(fitted: adapt.Adapted) -> dict[str, tuple[str, str]]:
  return {line.name: (line.what, line.rule) for line in fitted.report.lines if line.what != 'taken'}


def test_the_same_network_with_other_classes_gets_a_new_head_and_nothing_else() -> None:
  found = made.network()
  fitted = fit(found, target())
  assert {name: what for name, (what, _) in told(fitted).items()} == {'head/kernel': 'new', 'head/bias': 'new'}
  rules = [line for line in fitted.report.lines if line.what == 'dropped']
  assert {line.name for line in rules} == {'head/kernel', 'head/bias'}
  assert rules[0].rule == 'a new head: 7 other classes than the 3 of the run'
  chex.assert_trees_all_equal(fitted.params['backbone'], found.params['backbone'])


def test_a_head_of_the_same_classes_is_kept() -> None:
  found = made.network()
  fitted = fit(found, target(names=made.CLASSES))
  assert not told(fitted)
  made.assert_same(found, found._replace(params=fitted.params))
  assert 'have no names' in str(fit(found._replace(class_names=()), target(names=made.CLASSES)).report.lines)


def test_a_head_of_imagenet_21k_makes_room_for_that_of_a_run() -> None:
  found = made.network(num_classes=21_843, class_names=(), head=schema.Head(pre_logits=32))
  assert '21,843 classes' in loading.text(found)
  rules = {line.name: line.rule for line in fit(found, target()).report.of('dropped')}
  why = 'a new head: the 21,843 classes of the weights have no names'
  assert rules == {'head/kernel': why, 'head/bias': why, **dict.fromkeys(
      ('head/pre_logits/kernel', 'head/pre_logits/bias'), 'the run has a linear head')}


def test_positions_of_another_grid_are_resized_without_the_class_token() -> None:
  found = made.network()
  for how in PositionResize:
    fitted = fit(found, target(px=(48, 24), **{'positions.resize': how}))
    old, new = found.params['backbone']['positions'], fitted.params['backbone']['positions']
    np.testing.assert_array_equal(new[0, 0], old[0, 0])
    np.testing.assert_array_equal(new[0, 1:], resize.positions(old[0, 1:], (4, 4), (6, 3), how))
    assert told(fitted)['backbone/positions'] == ('resized', f'4 x 4 to 6 x 3 tokens, {how.value}')


def features(params: dict, model: schema.ViT, image: np.ndarray) -> np.ndarray:
  backbone = backbones.build(model, image.shape[1:3])
  return np.asarray(jax.jit(lambda p, x: backbone.apply(p, {}, x, train=False, key=None)[0].tokens)(
      params, jnp.asarray(image)))


@pytest.mark.slow(reason='1 s: two networks')
def test_patches_of_another_side_are_resized_so_that_enlarged_images_give_the_same() -> None:
  found = made.network()
  fitted = fit(found, target(patch=16, px=(64, 64)))
  assert told(fitted)['backbone/stem/kernel'] == ('resized', 'patches of 8 to 16 px, by pseudo-inverse')
  small = np.random.default_rng(0).standard_normal((1, 4, 8, 4, 8, 3)).astype(np.float32)
  matrix = interpolate.bilinear(8, 16)  # of each patch by itself
  large = np.einsum('ip,jq,bhpwqc->bhiwjc', matrix, matrix, small).astype(np.float32)
  np.testing.assert_allclose(
      features(fitted.params['backbone'], dataclasses.replace(made.MODEL, patch=16), large.reshape(1, 64, 64, 3)),
      features(found.params['backbone'], made.MODEL, small.reshape(1, 32, 32, 3)), rtol=0, atol=1e-4)


def test_the_class_token_goes_and_comes_with_its_position() -> None:
  found = made.network()
  table = found.params['backbone']['positions']
  without = fit(found, target(pool=schema.Mean()))
  np.testing.assert_array_equal(without.params['backbone']['positions'], table[:, 1:])
  assert told(without)['backbone/cls'] == ('dropped', 'the run pools without a class token')
  assert told(without)['backbone/positions'] == ('folded', 'without the rows of class token')
  pooled = made.network(pool=schema.Mean())
  fitted = fit(pooled, target())
  assert told(fitted)['backbone/cls'] == ('new', 'the weights pool without a class token')
  assert told(fitted)['backbone/positions'] == ('folded', 'zeros for class token')
  assert not fitted.params['backbone']['positions'][:, 0].any()
  np.testing.assert_array_equal(fitted.params['backbone']['positions'][:, 1:], pooled.params['backbone']['positions'])


def test_fine_tuning_begins_with_a_new_norm_where_it_is_that_of_the_mean() -> None:
  # mae/main_finetune.py@efb2a80, line 252: fc_norm and the head are missing in what is loaded.
  fitted = fit(made.network(), target(**POOLED))
  rule = 'the run normalizes the mean of the tokens, the weights do not'
  assert {name: line for name, line in told(fitted).items() if 'head' not in name} == {
      f'backbone/norm/{leaf}': ('new', rule) for leaf in ('scale', 'bias')}
  back = fit(made.network(**POOLED), target())
  assert told(back)['backbone/norm/scale'] == ('new', 'the run normalizes each token, the weights do not')
  same = fit(made.network(**POOLED), target(**POOLED))
  assert not any('norm' in name for name in told(same))


def test_the_distillation_token_goes_and_comes_with_its_head() -> None:
  distilled = made.network(**{'pool.distillation': True})
  table = distilled.params['backbone']['positions']
  fitted = fit(distilled, target(names=made.CLASSES))
  np.testing.assert_array_equal(fitted.params['backbone']['positions'], np.delete(table, 1, axis=1))
  assert told(fitted)['head_dist/kernel'][0] == 'dropped' and told(fitted)['backbone/dist'][0] == 'dropped'
  again = fit(made.network(), target(**{'pool.distillation': True}))
  assert told(again)['backbone/dist'][0] == 'new'
  assert told(again)['backbone/positions'][1] == 'zeros for distillation token'


def test_attention_pooling_goes_and_comes() -> None:
  assert told(fit(made.network(pool=schema.Map()), target(pool=schema.Mean())))['backbone/pool/probe'][0] == 'dropped'
  assert told(fit(made.network(), target(pool=schema.Map())))['backbone/pool/mlp/up/kernel'][0] == 'new'


def test_the_layer_before_the_logits_is_left_out_and_the_decoder_too() -> None:
  found = made.network(head=schema.Head(pre_logits=32))
  assert told(fit(found, target()))['head/pre_logits/kernel'] == ('dropped', 'the run has a linear head')
  fitted = fit(made.network(num_classes=0, class_names=(), decoder=made.DECODER), target())
  assert told(fitted)['mask_token'] == ('dropped', 'the run reconstructs no images')
  assert told(fitted)['head/kernel'] == ('new', 'a new head, zeros')


def test_fixed_positions_that_a_run_computes_are_left_out() -> None:
  found = made.network()
  fixed = position_tables.sincos2d_mae((4, 4), 32)
  found.params['backbone']['positions'] = np.concatenate([np.zeros((1, 32), np.float32), fixed])[None]
  run = target(positions=schema.SinCos(schema.Frequencies.MAE), px=(64, 64))
  assert told(fit(found, run))['backbone/positions'] == (
      'dropped', 'the same as the fixed mae ones of the run')
  with pytest.raises(UserError, match=r'\+ backbone/positions float32\[1, 17, 32\]: only in the weights'):
    fit(made.network(), run)


def test_fixed_positions_become_learned_ones() -> None:
  fitted = fit(made.network(positions=schema.SinCos()), target())
  np.testing.assert_array_equal(fitted.params['backbone']['positions'][0, 1:], position_tables.sincos2d((4, 4), 32))


@pytest.mark.parametrize(('changes', 'run', 'says'), [
    ({'gelu': Gelu.EXACT}, {}, 'model.gelu: expected exact, as in the weights, got tanh. Set --config.model.gelu=e'),
    ({'norm.eps': 1e-12}, {}, 'Set --config.model.norm.eps=1e-12'),
    ({}, {'depth': 3}, r'~ backbone/blocks/attn/key/bias: float32\[2, 4, 8\] in the weights, float32\[3, 4, 8\] in'),
    ({}, {'depth': 3}, r'\n  Use weights of the network of this run, or set --config.model.depth=2.$'),
    ({}, {'stem': schema.ResNetStem((1,))}, 'or set model to that of the weights.$'),
    ({}, {'registers': 2}, '- backbone/registers'),
    ({'registers': 2}, {}, r'\+ backbone/registers'),
    ({'block.layer_scale': .1}, {}, r'\+ backbone/blocks/scale1'),
    ({'stem': schema.ResNetStem((1,))}, {}, r'\+ backbone/stem/root/kernel'),
    ({}, {'stem': schema.ResNetStem((1,))}, '- backbone/stem/root/kernel')])
def test_what_has_no_rule_is_an_error_that_names_it(changes: dict, run: dict, says: str) -> None:
  with pytest.raises(UserError, match=rf'does not fit this run [\s\S]*{says}'):
    fit(made.network(**changes), target(**run))


def test_a_hybrid_in_a_plain_vit_says_which_is_which() -> None:
  with pytest.raises(UserError, match=r'ResNet stem \(1,\)\) does not fit this run \(ViT of width 32'):
    fit(made.network(stem=schema.ResNetStem((1,))), target())


def test_a_network_of_another_kind_does_not_fit() -> None:
  with pytest.raises(UserError, match=r'made \(Mixer of width 32.*does not fit this run \(ViT'):
    fit(made.network(made.MIXER), target())


def test_a_mixer_grows_to_whole_multiples_of_its_image_and_to_nothing_else() -> None:
  found = made.network(made.MIXER)
  fitted = fit(found, target(made.MIXER, px=(64, 96), names=made.CLASSES, tokens_mlp=60))
  assert told(fitted)['backbone/blocks/tokens/up/kernel'] == (
      'resized', '2 x 3 copies on the diagonal, for 8 x 12 tokens')
  assert {name for name, (what, _) in told(fitted).items() if what == 'resized'} == {
      f'backbone/blocks/tokens/{part}/{leaf}' for part in ('up', 'down') for leaf in ('kernel', 'bias')}
  kernel = np.asarray(fitted.params['backbone']['blocks']['tokens']['up']['kernel'])
  assert (kernel != 0).sum() == 6 * found.params['backbone']['blocks']['tokens']['up']['kernel'].size
  with pytest.raises(UserError, match='blocks/tokens/up/kernel: .*2, 16, 10.* in the weights, .*2, 24, 10'):
    fit(found, target(made.MIXER, px=(32, 48)))


def test_images_that_a_run_normalizes_otherwise_are_told() -> None:
  recipe = schema.Recipe(mean=(.485, .456, .406), std=(.5, .5, .5))
  said = adapt.preprocessing_differs(made.network(), recipe)
  assert len(said) == 1 and said[0].endswith('Set --config.data.recipe.mean=0.5,0.5,0.5.')
