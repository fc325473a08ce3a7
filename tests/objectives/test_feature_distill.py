"""Feature distillation: the loss against NumPy in float64, and what the teacher sees."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from tests.objectives import test_dinov2
from tests.objectives.test_dinov2 import f64
from vit_jax.config import check, schema
from vit_jax.config.schema import FeatureDistance
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.models.vit import vit
from vit_jax.objectives import feature_distill, kinds
from vit_jax.objectives.feature_distill import PATCHES, POOLED, TRAINED

RNG = np.random.default_rng(0)
WIDTH, NUM = 6, 16
TEACHER = schema.ViT(patch=8, width=8, depth=1, heads=2, mlp=schema.Mlp(8))
BATCH = {'image': RNG.normal(size=(6, 8, 8, 3)).astype(np.float32),
         POOLED: RNG.normal(size=(6, 5)).astype(np.float16), PATCHES: RNG.normal(size=(6, NUM, 5)).astype(np.float16)}


def config(model: schema.Model | None = None, **changes: Any) -> schema.Config:
  teacher = changes.pop('teacher', schema.FeatureTeacher(model=TEACHER, px=24, mean=(.4, .5, .6), std=(.2, .3, .4)))
  student = schema.ViT(patch=2, width=8, depth=1, heads=2, mlp=schema.Mlp(8), pool=schema.Mean())
  return schema.Config(image_px=(8, 8), batch_size=6, model=model or student,
                       objective=schema.FeatureDistill(teacher=teacher, **changes))


class Knowing:
  """A teacher whose features are its parameters."""

  def init(self, key: Any, num: int) -> Any:
    return {name: BATCH[name] for name in (POOLED, PATCHES)}

  def features(self, teacher: Any, image: Any) -> Any:
    return teacher


@functools.cache
def known_task(kind: FeatureDistance) -> Any:
  """On the backbone of which tokens know their mean, with a teacher of known features."""
  backbone: Any = test_dinov2.Mixing()
  layers = feature_distill.Spec(config(), config().objective).build(
      vit.build(config().model, (8, 8)), 0, lengths=programs.LENGTHS)._maps
  maps = {name: dataclasses.replace(layer, features=(5,)) for name, layer in layers.items()}
  settings = schema.FeatureDistill(distance=kind, pooled_weight=.7, patch_weight=1.9)
  return feature_distill.FeatureDistill(backbone, settings, Knowing(), maps)


def far(predicted: np.ndarray, wanted: np.ndarray, kind: FeatureDistance) -> float:
  if kind is FeatureDistance.MSE:
    return float(np.mean((predicted - wanted) ** 2))
  return 1. - predicted @ wanted / np.linalg.norm(predicted) / np.linalg.norm(wanted)


def numpy_loss(params: Any, kind: FeatureDistance, count: int = 6) -> dict[str, float]:
  tokens = test_dinov2.encode(params, BATCH['image'][:, None])[:, 0]
  p, both = params['predict'], {POOLED: 0., PATCHES: 0.}
  for i in range(count):
    own = {name: x @ p[name]['kernel'] + p[name]['bias'] for name, x in ((POOLED, tokens[i].mean(0)),
                                                                         (PATCHES, tokens[i]))}
    both[POOLED] += far(own[POOLED], BATCH[POOLED][i].astype(float), kind) / count
    both[PATCHES] += sum(far(own[PATCHES][n], BATCH[PATCHES][i, n].astype(float), kind)
                         for n in range(NUM)) / NUM / count
  return {'loss': .7 * both[POOLED] + 1.9 * both[PATCHES], 'pooled_distance': both[POOLED],
          'patch_distance': both[PATCHES]}


@pytest.mark.parametrize('kind', FeatureDistance)
def test_loss_and_gradient_are_those_of_numpy_and_rows_that_do_not_count_change_nothing(kind: FeatureDistance) -> None:
  one = known_task(kind)
  params = programs.draw(jax.eval_shape(one.init, jax.random.key(0), BATCH)[0])

  def value(p: Any, batch: Any) -> Any:
    teacher = {name: batch[name] for name in (POOLED, PATCHES)}
    out = one.loss(p, {TRAINED: teacher}, batch, jax.random.key(1), np.int32(0))
    return out.loss.value, out

  run = jax.jit(jax.grad(value, has_aux=True))
  grads, out = run(params, {**BATCH, 'mask': np.ones(6, np.float32)})
  got = {name: float(mean.value) for name, mean in out.metrics.items()} | {'loss': float(out.loss.value)}
  want = numpy_loss(f64(params), kind)
  assert {name: got[name] for name in want} == pytest.approx(want, rel=1e-5) and 'pooled_cosine' in got
  if kind is FeatureDistance.COSINE:
    assert got['pooled_cosine'] == pytest.approx(1. - want['pooled_distance'], rel=1e-4)
  for path in (('backbone', 'kernel', (2, 1)), ('predict', POOLED, 'kernel', (3, 2)),
               ('predict', PATCHES, 'bias', (4,))):
    ends = []
    for shift in (1e-5, -1e-5):
      moved = jax.tree.map(lambda x: np.array(x, np.float64), params)
      functools.reduce(lambda tree, part: tree[part], path[:-1], moved)[path[-1]] += shift
      ends.append(numpy_loss(moved, kind)['loss'])
    got_one = functools.reduce(lambda tree, part: tree[part], path, grads)
    np.testing.assert_allclose(got_one, (ends[0] - ends[1]) / 2e-5, rtol=2e-3, atol=1e-5, err_msg=str(path))
  few = {name: np.concatenate([x[:4], np.full_like(x[:2], np.nan)]) for name, x in BATCH.items()}
  _, out = run(params, {**few, 'mask': np.array([1.] * 4 + [0.] * 2, np.float32)})
  assert float(out.loss.value) == pytest.approx(numpy_loss(f64(params), kind, 4)['loss'], rel=1e-5)
  assert out.loss.weight == 4


def test_the_teacher_sees_images_at_its_size_and_its_map_is_reduced_to_the_students_grid() -> None:
  """Images are a smooth ramp, which bicubic resizing keeps inside of the borders; 3 x 3 tokens become 4 x 4."""
  given = config()
  trained = kinds.of(given).teacher()
  params = {'backbone': programs.draw(jax.eval_shape(lambda: trained.init(jax.random.key(0), 2)))['backbone']}
  image = np.asarray(RNG.normal(size=(2, 8, 8, 3)), np.float32)
  found = jax.jit(trained.features)(params, image)
  assert found[POOLED].shape == (2, 8) and found[PATCHES].shape == (2, NUM, 8)
  own = ((image * .5 + .5) - np.array([.4, .5, .6])) / np.array([.2, .3, .4])  # the student has mean and deviation 0.5
  large = jax.image.resize(jnp.asarray(own, jnp.float32), (2, 24, 24, 3), 'bicubic')
  backbone = vit.build(TEACHER, (24, 24))
  want, _ = jax.jit(lambda p, x: backbone.apply(p, {}, x, train=False, key=None))(params['backbone'], large)
  np.testing.assert_allclose(found[POOLED], want.pooled, atol=2e-4)
  tokens = jax.image.resize(want.tokens.reshape(2, 3, 3, 8), (2, 4, 4, 8), 'bicubic').reshape(2, NUM, 8)
  np.testing.assert_allclose(found[PATCHES], tokens, atol=2e-4)
  task = kinds.of(given).build(vit.build(given.model, (8, 8)), 0, lengths=programs.LENGTHS)
  own_params, extra = jax.eval_shape(task.init, jax.random.key(0), {'image': jnp.zeros((6, 8, 8, 3))})
  assert own_params['predict'][PATCHES]['kernel'].shape == (8, 8)
  assert trees.flatten(extra['trained']).keys() == trees.flatten(params).keys()


@pytest.mark.parametrize(('given', 'said'), [
    ({'pooled_weight': 0., 'patch_weight': 0.}, 'objective.pooled_weight: expected more than 0 with objective.patch_w'),
    ({'model': schema.Mixer(patch=4)}, 'model: expected a ViT with objective.patch_weight=1.0, got Mixer.'),
    ({'teacher': schema.FeatureTeacher(model=TEACHER, px=20)}, 'objective.teacher.px: expected a multiple of'),
    ({'teacher': schema.FeatureTeacher(model=TEACHER, px=16, std=(.1,))}, 'objective.teacher.std: expected 3 numbers')])
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], said: str) -> None:
  check.check(config())
  with pytest.raises(UserError) as error:
    check.check(config(**given))
  assert said in str(error.value)
