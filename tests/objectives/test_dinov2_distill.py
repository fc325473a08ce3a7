"""Distillation with DINOv2's losses: every term against NumPy in float64, what moves, and where teachers come from."""
from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from tests.objectives import test_dinov2
from tests.objectives.test_dinov2 import APART, BATCH, NUM, PATCH, SHARED, STEP, WIDTH, K, f64
from tests.weights import made
from vit_jax.config import check, schema
from vit_jax.config.schema import Centering
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array
from vit_jax.models.heads import Projector
from vit_jax.models.vit import vit
from vit_jax.objectives import dino, kinds
from vit_jax.objectives.dinov2_distill import Dinov2Distill
from vit_jax.objectives.feature_distill import PATCHES, POOLED
from vit_jax.weights import init_state, saving

OWN = ('mask_share', 'mask_ratio', 'teacher', 'momentum')


def settings(base: schema.Dinov2, **changes: Any) -> schema.Dinov2Distill:
  kept = {one.name: getattr(base, one.name) for one in dataclasses.fields(base) if one.name not in OWN}
  return schema.Dinov2Distill(**{**kept, 'mask_ratio': base.mask_ratio, **changes})


CASES = {'separate, mean': settings(APART),
         'shared, sinkhorn, all patches': settings(SHARED, centering=Centering.SINKHORN, mask_share=1.,
                                                   mask_ratio=(1., 1.))}


class Given:
  """A teacher with a backbone like that of the student, in place of `Trained`."""

  def init(self, key: Any, num: int) -> Any:
    return {'backbone': test_dinov2.Mixing().init(key, jnp.zeros((num, 8, 8, 3)))[0]}

  def features(self, teacher: Any, image: Array) -> dict[str, Array]:
    found, _ = test_dinov2.Mixing().apply(teacher['backbone'], {}, image, train=False, key=None)
    return {POOLED: found.pooled, PATCHES: found.tokens}


def task(name: str) -> Dinov2Distill:
  s, given, backbone = CASES[name], Given(), test_dinov2.Mixing()
  rates = dino.Rates(lambda s: .04 + .01 * jnp.asarray(s, jnp.float32), lambda s: jnp.asarray(.75))
  head = functools.partial(Projector, hidden=5, bottleneck=4, learned_norm=False, dtype=jnp.float32)
  separate, networks = head(s.patch_out_dim) if s.patch_out_dim else None, (backbone, given)
  one, teacher = (network for network in networks)  # type: Any, Any
  return Dinov2Distill(one, head(K), separate, s, PATCH, rates=rates, teacher=teacher, width=WIDTH)


@functools.cache
def begin(name: str) -> tuple[Any, Any]:
  params, extra = map(programs.draw, jax.eval_shape(task(name).init, jax.random.key(0), BATCH))
  extra['trained'] = jax.tree.map(lambda x: x[::-1].copy(), extra['trained'])  # another network
  extra['teacher'] = jax.tree.map(lambda x: x * np.nan, extra['teacher'])  # which does not teach
  return params, extra


@functools.cache
def value(name: str) -> Any:
  def loss(params: Any, extra: Any) -> Any:
    out = task(name).loss(params, extra, BATCH, jax.random.key(3), STEP)
    return out.loss.value, out
  return jax.jit(jax.grad(loss, has_aux=True))


def wanted(name: str, params: Any) -> dict[str, float]:
  extra = f64(begin(name)[1])
  compared = np.ones((8, 2, NUM), bool) if 'all' in name else None
  return test_dinov2.numpy_loss(params, {**extra, 'teacher': extra['trained']}, CASES[name], hides=False,
                                compared=compared)


@pytest.mark.quick('shared, sinkhorn, all patches', reason='1 s each: a program')
@pytest.mark.parametrize('name', CASES)
def test_every_term_and_the_gradient_are_those_of_numpy_with_the_frozen_network(name: str) -> None:
  params, extra = begin(name)
  grads, out = value(name)(params, extra)
  got = {k: float(out.metrics[k].value) for k in ('dino', 'ibot', 'koleo', 'masked')} | {'loss': float(out.loss.value)}
  assert got == pytest.approx(wanted(name, f64(params)), rel=5e-5)  # f32; divided by temperatures of 0.05 and 0.1
  for path in ('backbone/kernel', 'projector/mlp3/bias'):
    leaf, ends = trees.flatten(f64(params))[path], []
    for shift in (1e-5, -1e-5):
      moved = {**trees.flatten(f64(params)), path: leaf + shift * (np.arange(leaf.size).reshape(leaf.shape) == 1)}
      ends.append(wanted(name, trees.unflatten(moved))['loss'])
    np.testing.assert_allclose(trees.flatten(grads)[path].ravel()[1], (ends[0] - ends[1]) / 2e-5, rtol=1e-3, atol=2e-5)


def test_the_average_follows_the_student_and_the_teacher_stays() -> None:
  name = 'shared, sinkhorn, all patches'
  params, extra = begin(name)
  old = {**extra, 'teacher': jax.tree.map(np.zeros_like, params)}
  stats = value(name)(params, extra)[1].stats
  after = jax.jit(task(name).after_update)(params, old, stats, STEP)
  programs.assert_close(after['teacher'], jax.tree.map(lambda x: .25 * x, params))
  programs.assert_close(after['trained'], extra['trained'], rtol=0, atol=0)
  programs.assert_close(after['center'], extra['center'], rtol=0, atol=0)  # with Sinkhorn it stays
  assert 'mask_token' not in params


def config(teacher: schema.FeatureTeacher, **changes: Any) -> schema.Config:
  found = test_dinov2.config()
  own = {'out_dim': K, 'hidden_dim': 5, 'bottleneck_dim': 4, 'group': 4, **changes}
  return dataclasses.replace(found, objective=schema.Dinov2Distill(teacher=teacher, **own))


WIDE = schema.ViT(patch=8, width=12, depth=1, heads=2, mlp=schema.Mlp(8))


def test_a_config_has_the_teacher_beside_the_average_with_heads_of_its_own_width() -> None:
  given = config(schema.FeatureTeacher('x', model=WIDE, px=24))
  check.check(given)
  one = kinds.of(given).build(vit.build(given.model, given.image_px), 3, lengths=programs.LENGTHS)
  params, extra = jax.eval_shape(one.init, jax.random.key(0), {'views_global': jnp.zeros((8, 2, 16, 16, 3))})
  assert extra['trained']['projector']['mlp1']['kernel'].shape == (12, 5)
  assert extra['teacher'].keys() == params.keys() == {'backbone', 'projector'}
  assert set(kinds.of(given).models()) == {'model', 'objective.teacher.model'}
  assert set(one.views()) == {'student', 'teacher'}


@pytest.mark.parametrize(('teacher', 'said'), [
    ({'model': schema.Mixer(patch=8)}, 'objective.teacher.model: expected a ViT for objective Dinov2Distill, got'),
    ({'model': WIDE, 'px': 20}, 'objective.teacher.px: expected a multiple of objective.teacher.model.patch=8'),
    ({'mean': (.5,)}, 'objective.teacher.mean: expected 3 numbers')])
def test_teachers_that_cannot_work_are_refused(teacher: dict[str, Any], said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(config(schema.FeatureTeacher('x', **teacher)))
  assert said in str(error.value)


def test_weights_without_the_heads_of_the_teacher_are_refused_before_training(tmp_path: pathlib.Path) -> None:
  """Training would begin with heads at random, which teach nothing."""
  file = tmp_path / 'teacher.npz'
  saving.save(made.network(WIDE, preprocess=made.HOW._replace(resize_px=0, image_px=(16, 16))), str(file))
  given = config(schema.FeatureTeacher(str(file), model=WIDE))
  program = programs.abstract_parts(given).program
  with pytest.raises(UserError, match='objective.teacher.weights: expected weights with projector, got .*teacher.npz, '
                     'which has none. Use the run directory of a complete network.'):
    init_state.given(given, program, ())
