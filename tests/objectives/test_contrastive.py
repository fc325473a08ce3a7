"""Training on images and texts: initial values, frozen towers, limits, projections, and settings that do not fit."""
from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.config import check, files, schema
from vit_jax.config.schema import PairLoss, TextPool, TextProjection
from vit_jax.core import trees
from vit_jax.jobs import build
from vit_jax.objectives import contrastive
from vit_jax.objectives.contrastive import Contrastive

MODEL = schema.ViT(patch=4, width=16, depth=1, heads=2, mlp=schema.Mlp(16), dropout=.2)
TEXT = schema.Text(length=6, width=12, depth=1, heads=2, mlp=16)
FROZEN = {part: schema.PathRule(f'{part}/.*', frozen_until='100 %') for part in ('backbone', 'text', 'backbone/stem')}
BATCH = {'image': np.random.default_rng(0).normal(size=(8, 8, 8, 3)).astype(np.float32),
         'text': np.random.default_rng(1).integers(3, 259, (8, 6)).astype(np.int32), 'text_mask': np.ones((8, 6), bool)}


def config(*frozen: str, **settings: Any) -> schema.Config:
  return schema.Config(
      image_px=(8, 8), model=MODEL, objective=schema.Contrastive(**{'text': TEXT, **settings}), length='10 steps',
      optimizer=schema.AdamW(rules=tuple(FROZEN[part] for part in frozen)), train=schema.Train(accumulate=1))


def task(*frozen: str, **settings: Any) -> Contrastive:
  found = config(*frozen, **settings)
  check.check(found)
  lengths = build.durations.lengths(found.length, num_examples=100, batch_size=8)
  return build.build_objective(found, build.build_backbone(found), 0, lengths=lengths)  # type: ignore[return-value]


def begun(made: Contrastive) -> Any:
  return made.init(jax.random.key(0), {name: jnp.asarray(x) for name, x in BATCH.items()})[0]


@functools.cache
def slopes(*frozen: str) -> dict[str, float]:
  """The largest entry of the gradient of each part."""
  made = task(*frozen)
  found = jax.jit(jax.grad(lambda params: made.loss(params, {}, BATCH, jax.random.key(1), jnp.zeros((), int)
                                                    ).loss.value))(begun(made))
  return {part: max(float(jnp.abs(x).max()) for x in jax.tree.leaves(found[part])) for part in found}


def test_scale_and_bias_begin_as_published() -> None:
  for loss, scale in ((PairLoss.SIGMOID, 10.), (PairLoss.SOFTMAX, 1 / .07)):
    logits = begun(task(loss=loss))['logits']
    assert float(jnp.exp(logits['scale'])) == pytest.approx(scale)
    assert ('bias' in logits) is (loss is PairLoss.SIGMOID)
  logits = begun(task(scale_init=3., bias_init=-2.71))['logits']
  assert float(jnp.exp(logits['scale'])) == pytest.approx(3.) and float(logits['bias']) == pytest.approx(-2.71)


def test_the_loss_is_that_of_unit_vectors_of_both_towers() -> None:
  made = task('backbone', 'text', out_dim=10)  # frozen: without dropout
  params = begun(made)
  out = made.loss(params, {}, BATCH, jax.random.key(1), jnp.zeros((), int))
  pooled = made.views()['student'].predict({**params, 'state': {}}, jnp.asarray(BATCH['image'])).features.pooled
  x = np.asarray(pooled, np.float64) @ np.asarray(params['head']['kernel'], np.float64)
  y = np.asarray(contrastive.tower(TEXT, out_width=10).apply(params['text'], BATCH['text'], BATCH['text_mask']))
  x, y = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, y))
  logits = 10. * x @ y.T - 10.
  want = np.log1p(np.exp(-(2 * np.eye(8) - 1) * logits)).sum() / 8
  assert float(out.loss.value) == pytest.approx(want, rel=1e-4)
  assert float(out.metrics['similarity'].value) == pytest.approx((x * y).sum(1).mean(), abs=1e-5)
  assert 'bias' not in params['head']


@pytest.mark.parametrize('settings', [{}, {'same_class': True, 'prompts': 'clip_best', 'names': 'imagenet'}])
def test_rows_that_count_are_compared_with_each_other_by_row_or_by_class(settings: dict[str, Any]) -> None:
  made = task('backbone', 'text', scale_init=2., bias_init=-1., **settings)
  params, label, num = begun(made), np.array([0, 0, 1, 1, 1, 2, 3, 3]), 6
  rows, _ = made.embed(params, {}, BATCH, jax.random.key(1), jnp.zeros((), int))
  batch = {**BATCH, 'label': label, 'mask': np.float32(np.arange(8) < num)}
  out = made.compare(params, {}, rows, batch, jax.random.key(1), jnp.zeros((), int))
  x, y = (np.asarray(v, np.float64)[:num] for v in rows)
  group = label[:num] if settings else np.arange(num)
  signs = 2. * (group[:, None] == group) - 1.
  assert float(out.loss.value) == pytest.approx(np.log1p(np.exp(-signs * (2. * x @ y.T - 1.))).sum() / num, rel=1e-5)


@pytest.mark.parametrize('part', ['backbone', 'text'])
def test_a_tower_that_the_rules_freeze_has_no_gradient(part: str) -> None:
  other = {'backbone': 'text', 'text': 'backbone'}[part]
  assert slopes(part)[part] == 0. and slopes(part)[other] > 0.
  assert slopes()[part] > 0.


def test_a_tower_with_a_frozen_part_learns() -> None:
  assert slopes('backbone/stem')['backbone'] > 0.


def test_a_frozen_image_tower_has_no_dropout_and_one_that_learns_has() -> None:
  for frozen, is_same in (((), False), (('backbone',), True)):
    made = task(*frozen)
    params = begun(made)
    a, b = (made.loss(params, {}, BATCH, jax.random.key(i), jnp.zeros((), int)).loss.value for i in (1, 2))
    assert (float(a) == float(b)) is is_same


def test_a_scale_at_its_limit_only_falls() -> None:
  slope = jax.vmap(lambda x, sign: jax.grad(lambda x: sign * contrastive.limited(x, 2.))(x))
  np.testing.assert_array_equal(slope(jnp.array([1., 1., 3., 3.]), jnp.array([1., -1., 1., -1.])), [1., -1., 1., 0.])
  assert float(contrastive.limited(jnp.float32(3.), 2.)) == 2.
  made = task(scale_init=20., scale_max=5.)
  out = made.loss(begun(made), {}, BATCH, jax.random.key(1), jnp.zeros((), int))
  assert float(out.metrics['scale'].value) == pytest.approx(5.)


def test_a_tower_has_the_settings_of_its_family() -> None:
  clip = contrastive.tower(dataclasses.replace(
      TEXT, causal=True, pool=TextPool.END, projection=TextProjection.PLAIN, activation=schema.Activation.QUICK),
      out_width=10)
  assert clip.is_causal and not clip.projection_bias and clip.gelu is schema.Gelu.QUICK and clip.out_width == 10
  tips = contrastive.tower(dataclasses.replace(
      TEXT, sinusoidal=True, pool=TextPool.MEAN, projection=TextProjection.NONE, activation=schema.Activation.RELU),
      out_width=10)
  assert tips.is_sinusoidal and tips.out_width == 0 and tips.gelu is None
  assert 'positions' not in jax.eval_shape(tips.init, jax.random.key(0))


def test_in_bf16_products_are_narrow_and_parameters_are_not() -> None:
  model = dataclasses.replace(MODEL, dtype=schema.DType.BF16)
  narrow, wide = contrastive.tower(TEXT, out_width=16, model=model), contrastive.tower(TEXT, out_width=16)
  params = narrow.init(jax.random.key(0))
  assert {x.dtype for x in trees.flatten(params).values()} == {jnp.dtype('float32')}
  a, b = (made.apply(params, BATCH['text'], BATCH['text_mask']) for made in (narrow, wide))
  assert 0. < float(jnp.abs(a - b).max()) < .1 * float(jnp.abs(b).max())


@pytest.mark.parametrize(('changes', 'message'), [
    ({'train.accumulate': 2, 'train.sam.rho': .1}, 'train.accumulate: expected 1 with train.sam.rho=0.1 for objective '
     'Contrastive, which compares all examples'),
    ({'objective.loss': PairLoss.SOFTMAX, 'objective.bias_init': -5.}, 'objective.bias_init: expected its default'),
    ({'objective.form': schema.PairForm.MATRIX, 'objective.chunk': 8}, 'objective.chunk: expected its default'),
    ({'objective.names': 'x'}, 'objective.names: expected its default'),
    ({'objective.prompts': '{} {}'}, 'objective.prompts: expected one {}'),
    ({'objective.text.vocabulary': 100}, 'objective.text.vocabulary: expected at least 259 with'),
    ({'objective.text.tokenizer': 'x'}, 'objective.text.tokenizer: expected its default'),
    ({'objective.text.heads': 5}, 'objective.text.width: expected a multiple of objective.text.heads=5'),
    ({'objective.text.pool': TextPool.END}, 'objective.text.pool: expected last or mean'),
    ({'objective.text.projection': TextProjection.NONE, 'objective.out_dim': 10}, 'objective.out_dim: expected'),
    ({'data.in_memory': schema.InMemory.YES}, 'data.in_memory: expected auto or no for objective Contrastive'),
    ({'data.recipe.mixup': .5}, 'data.recipe.mixup: expected 0'),
])
def test_settings_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
  assert any(found.startswith(message) for found in check.problems(schema.replaced(config(), changes)))


def test_the_small_lit_recipe_expects_one_match_in_its_batch() -> None:
  config = files.load('lit_cifar10', [])
  assert isinstance(config.objective, schema.Contrastive)
  assert config.objective.bias_init == pytest.approx(-math.log(config.batch_size - 1))
  softmax = files.load('lit_cifar10:loss=softmax', []).objective
  assert isinstance(softmax, schema.Contrastive) and softmax.loss is schema.PairLoss.SOFTMAX
