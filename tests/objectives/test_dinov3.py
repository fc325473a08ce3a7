"""DINOv3: Gram anchoring and its gradient against NumPy in float64, and the moments when the Gram teacher changes."""
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
from tests.objectives.test_dinov2 import BATCH, PATCH, encode, f64
from vit_jax.config import check, schema
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Record
from vit_jax.models.heads import Projector
from vit_jax.models.vit import vit
from vit_jax.objectives import dino, dinov2, dinov3, kinds
from vit_jax.objectives.dinov3 import Moments

WEIGHT, START = 1.7, 3
LARGE = {**BATCH, 'views_gram': np.random.default_rng(1).normal(size=(8, 2, 16, 16, 3)).astype(np.float32)}


NOW = Moments(0, 0, 0, 3)


def task(moments: Moments = NOW) -> dinov3.Dinov3:
  rates = dino.Rates(teacher_temperature=lambda s: jnp.asarray(.05), momentum=lambda s: jnp.asarray(.6))
  head = functools.partial(Projector, hidden=5, bottleneck=4, learned_norm=False, dtype=jnp.float32)
  settings = dataclasses.replace(test_dinov2.SHARED, koleo_weight=0.)
  backbone: Any = test_dinov2.Mixing()
  return dinov3.Dinov3(backbone, head(11), None, settings, PATCH, rates=rates, weight=WEIGHT, moments=moments)


@functools.cache
def begin() -> tuple[Any, Any]:
  params, extra = map(programs.draw, jax.eval_shape(task().init, jax.random.key(0), BATCH))
  extra['gram'] = jax.tree.map(lambda x: x[::-1].copy() * .7, extra['gram'])  # a network of its own
  return params, extra


def cubic(old: int, new: int) -> np.ndarray:
  """PyTorch's bicubic resizing without antialiasing along one axis, as a matrix, by its definition."""
  found, a = np.zeros((new, old)), -.75
  for i in range(new):
    center = (i + .5) * old / new - .5
    for place in range(int(np.floor(center)) - 1, int(np.floor(center)) + 3):
      x = abs(center - place)
      found[i, min(max(place, 0), old - 1)] += (
          (a + 2) * x ** 3 - (a + 3) * x ** 2 + 1 if x < 1 else a * x ** 3 - 5 * a * x ** 2 + 8 * a * x - 4 * a)
  return found


def gram_loss(params: Any, extra: Any, batch: dict[str, np.ndarray], count: int = 8) -> float:
  """Mean over crops, by loops over pairs of patches."""
  student = encode(params, batch['views_global'][:count], test_dinov2.is_masked()[:count])
  fixed = encode(extra['gram'], batch.get('views_gram', batch['views_global'])[:count])
  side = round(student.shape[2] ** .5)
  if fixed.shape != student.shape:
    rows = cubic(round(fixed.shape[2] ** .5), side)
    fixed = np.einsum('ih,jw,bvhwd->bvijd', rows, rows, fixed.reshape(*fixed.shape[:2], *rows.shape[1:] * 2, -1))
    fixed = fixed.reshape(student.shape)
  total = 0.
  for x, g in zip(student.reshape(-1, *student.shape[2:]), fixed.reshape(-1, *fixed.shape[2:]), strict=True):
    x, g = (one / np.linalg.norm(one, axis=1, keepdims=True) for one in (x, g))
    total += sum((x[p] @ x[q] - g[p] @ g[q]) ** 2 for p in range(len(x)) for q in range(len(x))) / len(x) ** 2
  return total / (2 * count)


@functools.cache
def program(moments: Moments) -> Any:
  def loss(params: Any, extra: Any, batch: Any, step: Any) -> Any:
    out = task(moments=moments).loss(params, extra, batch, jax.random.key(3), step)
    return out.loss.value, out
  return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.quick('at twice the size', reason='2 s each: a program; it also has what the other has')
@pytest.mark.parametrize('batch', [BATCH, LARGE], ids=['at the same size', 'at twice the size'])
def test_the_term_and_its_gradient_are_those_of_numpy(batch: dict[str, np.ndarray]) -> None:
  params, extra = begin()
  grads, out = program(NOW)(params, extra, batch, np.int32(0))
  want = gram_loss(f64(params), f64(extra), batch)
  assert float(out.metrics['gram'].value) == pytest.approx(want, rel=2e-5) and want > .02  # f32, 256 pairs of patches
  terms = {name: float(out.metrics[name].value) for name in ('dino', 'ibot')}
  assert float(out.loss.value) == pytest.approx(.7 * terms['dino'] + 1.3 * terms['ibot'] + WEIGHT * want, rel=2e-5)
  plain, _ = jax.jit(jax.grad(lambda p: (dinov2.Dinov2.loss(task(), p, extra, batch, jax.random.key(3),
                                                           np.int32(0)).loss.value, 0), has_aux=True))(params)
  for path in (('mask_token', (0, 0, 1)), ('backbone', 'kernel', (2, 1)), ('backbone', 'kernel', (7, 4))):
    got = functools.reduce(lambda pair, part: [tree[part] for tree in pair], path, [grads, plain])
    ends = []
    for shift in (1e-5, -1e-5):
      moved = jax.tree.map(lambda x: np.array(x, np.float64), params)
      functools.reduce(lambda tree, part: tree[part], path[:-1], moved)[path[-1]] += shift
      ends.append(gram_loss(moved, f64(extra), batch))
    np.testing.assert_allclose(float(got[0] - got[1]), WEIGHT * (ends[0] - ends[1]) / 2e-5, rtol=2e-3, atol=1e-5)


def test_the_term_begins_at_its_step_and_images_that_do_not_count_change_nothing() -> None:
  params, extra = begin()
  later = Moments(START, 0, 0, 3)
  values = []
  for step in (START - 1, START):
    mask = np.array([1.] * 6 + [0.] * 2, np.float32)
    batch = {k: np.concatenate([v[:6], np.full_like(v[:2], np.nan)]) for k, v in BATCH.items()}
    grads, out = program(later)(params, extra, {**batch, 'mask': mask}, np.int32(step))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    values.append(float(out.metrics['gram'].value))
  assert values[0] == 0. and values[1] == pytest.approx(gram_loss(f64(params), f64(extra), BATCH, 6), rel=2e-5)


@pytest.mark.parametrize(('moments', 'want'), [
    (Moments(4, 2, 3, 2), [2, 7, 10]), (Moments(4, 0, 3, 9), [7, 10, 13]), (Moments(4, 4, 0, 3), [4]),
    (Moments(0, 0, 0, 3), [])])
def test_the_gram_teacher_becomes_the_teacher_at_its_moments(moments: Moments, want: list[int]) -> None:
  params, extra = begin()
  one = task(moments=moments)
  stats = {name: jnp.zeros(()) for name in ('count', 'patch_count')} | {
      name: jnp.zeros((1, 11)) for name in ('sum', 'patch_sum')}
  update = jax.jit(one.after_update)
  changed = []
  for done in range(1, 15):
    new = update(params, extra, stats, np.int32(done - 1))
    is_new = bool((new['gram']['backbone']['kernel'] != extra['gram']['backbone']['kernel']).any())
    np.testing.assert_array_equal(new['gram']['backbone']['kernel'],
                                  (new['teacher'] if is_new else extra['gram'])['backbone']['kernel'])
    changed += [done] * is_new
  assert changed == want


def test_copies_for_the_gram_teacher_show_the_same_crop_flip_and_colors() -> None:
  """Of a smooth image, the copy reduced to the size of the crop is the crop, up to the pixels of the filters."""
  y, x = np.mgrid[:90, :120]
  image = np.stack([2 * x, 2 * y, x + y], -1).astype(np.uint8)
  views = schema.Views(on=True, num_local=1, local_px=8, blur=(0., 0., 0.), gram_scale=2.)
  recipe = schema.Recipe(views=views, antialias=True)
  plain = dataclasses.replace(recipe, views=dataclasses.replace(views, gram_scale=1.))
  for seed in range(8):
    found, alone = (transforms.train_transform(one, (24, 16))(Record(image, (0,)), np.random.default_rng(seed))
                    for one in (recipe, plain))
    copy = found.pop('views_gram')
    assert copy.shape == (2, 48, 32, 3) and copy.dtype == np.uint8
    assert all((found[name] == alone[name]).all() for name in found) and set(found) == set(alone)
    small = copy.reshape(2, 24, 2, 16, 2, 3).mean((2, 4))
    assert np.abs(small - found['views_global'])[:, 1:-1, 1:-1].max() < 12
  assert transforms.train_shapes(recipe, (24, 16))['views_gram'] == ((2, 48, 32, 3), np.uint8)


def test_copies_for_the_gram_teacher_may_keep_the_colors_of_the_image() -> None:
  """They have the crop and the flip of the others, which are the same with and without them."""
  image = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
  views = schema.Views(on=True, num_local=0, gram_scale=2., gram_colors=False, solarize=(1., 1., 0.))
  still = dataclasses.replace(views, blur=(0., 0., 0.), solarize=(0., 0., 0.), grayscale=0., jitter=schema.Jitter())
  for seed in range(4):
    found, plain, kept = (transforms.train_transform(schema.Recipe(views=one), (16, 16))(
        Record(image, (0,)), np.random.default_rng(seed))
                          for one in (views, dataclasses.replace(views, gram_colors=True), still))
    assert (found['views_global'] == plain['views_global']).all() and (found['views_gram'] != plain['views_gram']).any()
    np.testing.assert_array_equal(found['views_gram'][0], kept['views_gram'][0])


def config(gram: schema.Gram | None = None, views: dict[str, Any] | None = None, **changes: Any) -> schema.Config:
  found = test_dinov2.config(**changes)
  recipe = dataclasses.replace(found.data.recipe, views=dataclasses.replace(found.data.recipe.views, **(views or {})))
  own = {field.name: getattr(found.objective, field.name) for field in dataclasses.fields(schema.Dinov2)
         if field.name in ('out_dim', 'hidden_dim', 'bottleneck_dim', 'group')}
  return dataclasses.replace(found, data=dataclasses.replace(found.data, recipe=recipe),
                             objective=schema.Dinov3(**own, gram=gram or schema.Gram()))


def test_a_config_has_its_moments_and_both_alarms() -> None:
  given = config(schema.Gram(start='600 steps', step='50 %', refresh='100 steps', refreshes=2))
  lengths = programs.durations.Lengths(800, 8, 1000)
  one = kinds.of(given).build(vit.build(given.model, given.image_px), 3, lengths=lengths)
  assert isinstance(one, dinov3.Dinov3) and one._moments == Moments(600, 500, 100, 2)
  assert [watch.metric for watch in kinds.of(given).watches(lengths)] == ['information', 'patch_information']
  params, extra = jax.eval_shape(one.init, jax.random.key(0), {'views_global': jnp.zeros((8, 2, 16, 16, 3))})
  assert trees.flatten(extra['gram']).keys() == {f'backbone/{name}' for name in trees.flatten(params['backbone'])}
  other = config(schema.Gram(start='600 steps', step='50 %', weights='x'))  # weights take the place of the step
  check.check(other)
  begun = kinds.of(other).build(vit.build(given.model, given.image_px), 3, lengths=lengths)
  assert isinstance(begun, dinov3.Dinov3) and begun._moments == Moments(600, 0, 0, 3)
  late = config(schema.Gram(start='2 steps', step='3 steps'))
  with pytest.raises(UserError, match='objective.gram.step: expected a moment before objective.gram.start=2 steps'):
    kinds.of(late).build(vit.build(late.model, late.image_px), 3, lengths=lengths)


@pytest.mark.parametrize(('given', 'said'), [
    ({'gram': schema.Gram(view='teacher')}, 'objective.gram.view: expected its default'),
    ({'gram': schema.Gram(refreshes=2)}, 'objective.gram.refreshes: expected its default'),
    ({'gram': schema.Gram(weight=0.)}, 'objective.gram.weight: expected'),
    ({'views': {'gram_scale': 1.3}}, 'data.recipe.views.gram_scale times image_px=(16, 16): expected a multiple of'),
    ({'train': schema.Train(accumulate=2)}, 'train.accumulate: expected 1 with')])
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], said: str) -> None:
  check.check(config())
  with pytest.raises(UserError) as error:
    check.check(config(**given))
  assert said in str(error.value)


def test_other_objectives_have_no_copies_for_a_gram_teacher() -> None:
  found = config(views={'gram_scale': 2.})
  check.check(found)
  with pytest.raises(UserError, match='data.recipe.views.gram_scale: expected 1 for objective Dino, which has no Gram'):
    check.check(dataclasses.replace(found, objective=schema.Dino()))

