"""Feature distillation: the loss against NumPy in float64, what the teacher sees, and its stored features."""
from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
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
from vit_jax.core.types import Shard
from vit_jax.data.labels import stored_features
from vit_jax.data.labels.stored_features import PATCHES, POOLED, SUMS, Info, StoredFeatures
from vit_jax.data.pipeline import loader
from vit_jax.data.sources import builtin
from vit_jax.models.vit import vit
from vit_jax.objectives import feature_distill, kinds

RNG = np.random.default_rng(0)
WIDTH, NUM = 6, 16
TEACHER = schema.ViT(patch=8, width=8, depth=1, heads=2, mlp=schema.Mlp(8))
BATCH = {'image': RNG.normal(size=(6, 8, 8, 3)).astype(np.float32),
         POOLED: RNG.normal(size=(6, 5)).astype(np.float16), PATCHES: RNG.normal(size=(6, NUM, 5)).astype(np.float16)}


def config(model: schema.Model | None = None, erase: float = 0., **changes: Any) -> schema.Config:
  recipe = schema.Recipe(erase=schema.Erase(probability=erase) if erase else schema.Erase())
  teacher = changes.pop('teacher', schema.FeatureTeacher(model=TEACHER, px=24, mean=(.4, .5, .6), std=(.2, .3, .4)))
  student = schema.ViT(patch=2, width=8, depth=1, heads=2, mlp=schema.Mlp(8), pool=schema.Mean())
  return schema.Config(image_px=(8, 8), batch_size=6, model=model or student, data=schema.Data(recipe=recipe),
                       objective=schema.FeatureDistill(teacher=teacher, **changes))


@functools.cache
def stored_task(kind: FeatureDistance) -> Any:
  """On the backbone of which tokens know their mean, with features in the batch."""
  backbone: Any = test_dinov2.Mixing()
  layers = feature_distill.Spec(config(), config().objective).build(
      vit.build(config().model, (8, 8)), 0, lengths=programs.LENGTHS)._maps
  maps = {name: dataclasses.replace(layer, features=(5,)) for name, layer in layers.items()}
  settings = schema.FeatureDistill(distance=kind, pooled_weight=.7, patch_weight=1.9)
  return feature_distill.FeatureDistill(backbone, settings, None, maps)


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
  one = stored_task(kind)
  params = programs.draw(jax.eval_shape(one.init, jax.random.key(0), BATCH)[0])

  def value(p: Any, batch: Any) -> Any:
    out = one.loss(p, {}, batch, jax.random.key(1), np.int32(0))
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
    ({'stored_epochs': 2}, "objective.stored_epochs: expected its default 1 with objective.features=''"),
    ({'teacher': schema.FeatureTeacher(model=TEACHER, px=20)}, 'objective.teacher.px: expected a multiple of'),
    ({'teacher': schema.FeatureTeacher(model=TEACHER, px=16, std=(.1,))}, 'objective.teacher.std: expected 3 numbers'),
    ({'features': 'x', 'erase': .5}, 'data.recipe.erase.probability: expected 0 with objective.features')])
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], said: str) -> None:
  check.check(config())
  with pytest.raises(UserError) as error:
    check.check(config(**given))
  assert said in str(error.value)


def opened(seed: int = 3, batch_size: int = 6, features: StoredFeatures | None = None,
           **recipe: Any) -> loader.TrainLoader:
  return loader.train_loader(
      builtin.open_digits('train'), recipe=schema.Recipe(crop_area=(.3, 1.), **recipe), image_px=(8, 8),
      batch_size=batch_size, seed=seed, shard=Shard((0,), 1), workers=0, threads=1, in_memory=False, max_bad_images=0,
      features=features)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  """Features of the first 20 positions, which are their numbers."""
  made = opened(batch_size=20)
  sums = stored_features.checksums(next(made.batches(0))['image'])
  made.close()
  info = Info(20, 2, 0, {'weights': 'x'})
  assert stored_features.write(tmp_path / 'made', info, lambda rows: {
      POOLED: np.stack([np.array(rows), -np.array(rows)], 1), SUMS: sums[rows.start:rows.stop]})
  return tmp_path / 'made'


def test_a_run_has_the_features_of_its_crops_and_repeats_them(folder: pathlib.Path) -> None:
  made = opened(features=StoredFeatures(folder, [POOLED]))
  stream, plain = made.batches(2), opened()
  rows = [next(stream) for _ in range(4)]  # positions 12 to 35
  numbers = np.concatenate([one[POOLED] for one in rows])
  np.testing.assert_array_equal(numbers[:, 0], np.arange(12, 36) % 20)
  assert numbers.dtype == np.float16 and (numbers[:, 1] == -numbers[:, 0]).all()
  firsts = [batch for batch, _ in zip(plain.batches(0), range(4), strict=False)]
  images = np.concatenate([one['image'] for one in firsts])[:20]
  np.testing.assert_array_equal(np.concatenate([one['image'] for one in rows]), images[np.arange(12, 36) % 20])
  indexes = np.concatenate([one['index'] for one in firsts])
  np.testing.assert_array_equal(made.indexes(3), indexes[np.arange(18, 24) % 20])
  assert made.info.digest.startswith(f'{plain.info.digest} features=')
  for one in (made, plain):
    one.close()


@pytest.mark.parametrize('changes', [{'seed': 4}, {'flip': False}, {'antialias': True}])
def test_features_of_other_crops_are_refused(changes: dict[str, Any], folder: pathlib.Path) -> None:
  made = opened(features=StoredFeatures(folder, [POOLED]), **changes)
  with pytest.raises(UserError, match=r'expected features of the crops of this run, got .*made, whose crops differ in'):
    next(made.batches(0))
  made.close()


def test_writing_resumes_and_never_mixes(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(stored_features, 'PER_PART', 8)
  info, asked = Info(20, 2, 3, {}), []

  def compute(rows: range) -> dict[str, np.ndarray]:
    asked.append(rows.start)
    if len(asked) == 2:
      raise KeyboardInterrupt
    return {POOLED: np.full((len(rows), 2), rows.start), PATCHES: np.full((len(rows), 3, 2), .5),
            SUMS: np.array(rows)}

  to = folder.parent / 'new'
  with pytest.raises(KeyboardInterrupt):
    stored_features.write(to, info, compute)
  assert not to.exists() and stored_features.write(to, info, compute) and asked == [0, 8, 8, 16]
  assert not stored_features.write(to, info, compute) and len(asked) == 4
  found = StoredFeatures(to, [POOLED, PATCHES])
  assert [found._row(row)[POOLED][0] for row in (7, 8, 19)] == [0, 8, 16] and found.info == info
  for where, other in ((to, info._replace(width=3)), (folder, info)):
    with pytest.raises(UserError, match='expected a new folder, got one with other content'):
      stored_features.write(where, other, compute)


def test_damaged_and_missing_features_are_refused(folder: pathlib.Path) -> None:
  with pytest.raises(UserError, match='objective.patch_weight: expected 0, as .* has no features of patches'):
    StoredFeatures(folder, [POOLED, PATCHES])
  with pytest.raises(UserError, match=r'expected a directory of features, got .*none, which has no info.json'):
    StoredFeatures(folder.parent / 'none', [POOLED])
  file = folder / 'pooled-00000.npy'
  whole = file.read_bytes()
  for content in (whole[:-8], whole[:20], b'', b'PK'):
    file.write_bytes(content)
    with pytest.raises(UserError, match=r'pooled-00000.npy: expected an array of shape \(20, 2\), got a file that is'):
      StoredFeatures(folder, [POOLED])
  np.save(file, np.zeros((19, 2), np.float16))
  with pytest.raises(UserError, match=r'expected an array of shape \(20, 2\), got \(19, 2\) of float16'):
    StoredFeatures(folder, [POOLED])
  text = json.loads((folder / 'info.json').read_text())
  for broken in ({**text, 'format': 'x'}, {**text, 'num_rows': 0}):
    (folder / 'info.json').write_text(json.dumps(broken))
    with pytest.raises(UserError, match='info.json.*: expected'):
      StoredFeatures(folder, [POOLED])


def test_a_config_needs_the_features_of_its_patches_and_passes(folder: pathlib.Path) -> None:
  source = builtin.open_digits('train')
  given = config(features=str(folder), patch_weight=0.)
  spec = kinds.of(given)
  assert spec.batch_shapes() == {POOLED: ((2,), np.float16)} and spec.models() == {'model': given.model}
  with pytest.raises(UserError, match=r'objective.stored_epochs: expected 0.0\d+, passes over'):
    spec.open_features(source)
  few: Any = range(10)
  with pytest.raises(UserError, match='objective.stored_epochs: expected 2, passes over 10 images'):
    spec.open_features(few)
  twice = config(features=str(folder), patch_weight=0., stored_epochs=2)
  assert isinstance(kinds.of(twice).open_features(few), StoredFeatures) and twice.objective.on_host
  assert not config().objective.on_host and config().objective.has_weights and not twice.objective.has_weights
