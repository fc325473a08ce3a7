"""Distillation: both losses against NumPy, the second head, and a teacher that sees what the student sees."""
from __future__ import annotations

from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.config.schema import DistillType, SoftMean
from vit_jax.core.types import Array, Features
from vit_jax.models import heads
from vit_jax.models.vit import vit
from vit_jax.objectives.distill import Distill, Trained
from vit_jax.objectives.networks import Normalization

CLASSES = 5
RNG = np.random.default_rng(0)
BATCH = {'image': RNG.normal(size=(4, 8, 8, 3)).astype(np.float32), 'label': np.array([0, 1, 2, 3], np.int32),
         'mask': np.array([1., 1., 1., 0.], np.float32)}
STUDENT = schema.ViT(patch=4, width=16, depth=1, heads=2, mlp=schema.Mlp(16),
                     pool=schema.ClassToken(distillation=True))
HALF, OTHER = Normalization((.5,) * 3, (.5,) * 3), Normalization((.4, .45, .5), (.2, .3, .4))


def task(teach: DistillType = DistillType.SOFT, *, weight: float = .3, distilled: bool = True,
         soft_mean: SoftMean = SoftMean.PAPER) -> Distill:
  teacher = Trained(fakes.PlainNet(), fakes.LinearHead(), normalization=OTHER, student=HALF)
  backbone: Any = vit.build(STUDENT, (8, 8)) if distilled else fakes.PlainNet()
  head: Any = heads.Head(schema.Head()) if distilled else fakes.LinearHead()
  settings = schema.Distill(distill_type=teach, weight=weight, temperature=2., label_smoothing=.1, soft_mean=soft_mean)
  return Distill(backbone, head, teacher, settings, num_classes=CLASSES)


def softmax(x: np.ndarray) -> np.ndarray:
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def teacher_logits(extra: Any) -> np.ndarray:
  """Of the pictures as the teacher wants them, in float64."""
  pixels = BATCH['image'].astype(np.float64) * .5 + .5
  own = ((pixels - OTHER[0]) / OTHER[1]).reshape(4, -1)
  kernel = np.asarray(extra['trained']['backbone']['kernel'], np.float64)
  return np.tanh(own @ kernel) @ np.asarray(extra['trained']['head']['kernel'], np.float64)


@pytest.mark.dear('DistillType.HARD-True-SoftMean.PAPER', reason='3 s: another network')
@pytest.mark.parametrize(('teach', 'distilled', 'soft_mean'), [
    (DistillType.SOFT, True, SoftMean.PAPER), (DistillType.SOFT, False, SoftMean.PAPER),
    (DistillType.HARD, True, SoftMean.PAPER),
    (DistillType.HARD, False, SoftMean.PAPER), (DistillType.SOFT, False, SoftMean.CODE)])
def test_the_loss_is_that_of_numpy(teach: DistillType, soft_mean: SoftMean, *, distilled: bool) -> None:
  one = task(teach, distilled=distilled, soft_mean=soft_mean)
  params, extra = map(programs.draw, jax.eval_shape(one.init, jax.random.key(0), BATCH))
  assert ('head_dist' in params) is distilled
  for head in (*(params[name] for name in ('head', 'head_dist')[:1 + distilled]), extra['trained']['head']):
    head.update({name: 4. * x if name == 'kernel' else np.zeros_like(x) for name, x in head.items()})
  out = jax.jit(one.loss)(params, extra, BATCH, jax.random.key(1), jnp.asarray(0))
  net = vit.build(STUDENT, (8, 8)) if distilled else fakes.PlainNet()
  features, _ = jax.jit(lambda: net.apply(params['backbone'], {}, BATCH['image'], train=False, key=None))()
  kernels = {name: np.asarray(params[name]['kernel'], np.float64) for name in params if name != 'backbone'}
  own = np.asarray(features.pooled, np.float64) @ kernels['head']
  taught = np.asarray(features.distilled, np.float64) @ kernels['head_dist'] if distilled else own
  teacher = teacher_logits(extra)
  target = .9 * np.eye(CLASSES)[BATCH['label']] + .1 / CLASSES
  labels = -(target * np.log(softmax(own))).sum(-1)
  if teach is DistillType.SOFT:
    p, q = softmax(teacher / 2), softmax(taught / 2)
    of_teacher = 4 * (p * np.log(p / q)).sum(-1) / (CLASSES if soft_mean is SoftMean.CODE else 1)
  else:
    of_teacher = -np.log(softmax(taught))[np.arange(4), teacher.argmax(-1)]
  assert float(out.loss.value) == pytest.approx((.7 * labels + .3 * of_teacher)[:3].mean(), rel=1e-4)
  got = {name: float(mean.value) for name, mean in out.metrics.items()}
  assert got == pytest.approx({
      'accuracy': (own.argmax(-1) == BATCH['label'])[:3].mean(), 'labels_loss': labels[:3].mean(),
      'teacher_accuracy': (teacher.argmax(-1) == BATCH['label'])[:3].mean(), 'teacher_loss': of_teacher[:3].mean(),
      'agreement': (taught.argmax(-1) == teacher.argmax(-1))[:3].mean()}, rel=1e-4)


class Given:
  """A backbone whose features are given."""

  def __init__(self, pooled: Any, distilled: Any = None) -> None:
    self._pooled, self._distilled = pooled, distilled

  def init(self, key: Any, image: Array) -> tuple[Any, Any]:
    return {}, {}

  def apply(self, params: Any, state: Any, image: Array, **_: Any) -> tuple[Features, Any]:
    return Features(jnp.zeros((4, 1, 7)), jnp.asarray(self._pooled), (1, 1),
                    None if self._distilled is None else jnp.asarray(self._distilled)), {}


class Same:
  """A head that gives the features themselves."""

  def init(self, key: Any, width: int, num_classes: int) -> Any:
    return {}

  def apply(self, params: Any, pooled: Array) -> Array:
    return pooled


# DistillationLoss of facebookresearch/deit@7e160fe, losses.py, run in float64 (torch 2.13.0) on these logits, with the
# soft-target cross entropy of timm as its base criterion.
@pytest.mark.quick('DistillType.SOFT-SoftMean.CODE-1.0-3.0-0.30184812755002166', reason='1 s: another program')
@pytest.mark.parametrize(('teach', 'soft_mean', 'weight', 'temperature', 'loss'), [
    (DistillType.SOFT, SoftMean.CODE, .1, 3., 2.664911318126984),
    (DistillType.SOFT, SoftMean.CODE, 1., 3., .30184812755002166),
    (DistillType.SOFT, SoftMean.PAPER, 1., 3., 7 * .30184812755002166),
    (DistillType.HARD, SoftMean.PAPER, .5, 1., 3.210051881199514)])
def test_the_loss_is_that_of_deits_program(teach: DistillType, soft_mean: SoftMean, weight: float, temperature: float,
                                           loss: float) -> None:
  n = np.arange(28.).reshape(4, 7)
  own, taught, teacher = 2 * np.sin(n), 2 * np.cos(n), 3 * np.sin(.5 * n)
  head: Any = Same()
  trained = Trained(Given(teacher), head, normalization=HALF, student=HALF)
  settings = schema.Distill(distill_type=teach, weight=weight, temperature=temperature, label_smoothing=.1,
                            soft_mean=soft_mean)
  one = Distill(Given(own, taught), head, trained, settings, num_classes=7)
  batch = {'image': jnp.zeros((4, 8, 8, 3)), 'label': jnp.arange(4)}
  params, extra = one.init(jax.random.key(0), batch)
  out = jax.jit(one.loss)(params, extra, batch, jax.random.key(1), jnp.asarray(0))
  assert float(out.loss.value) == pytest.approx(loss, rel=2e-6)  # 28 logits of at most 3, in f32


def test_the_teacher_never_changes_and_gets_no_gradient() -> None:
  one = task(distilled=False)
  params, extra = one.init(jax.random.key(0), BATCH)
  gradient = jax.jit(jax.grad(lambda e: one.loss(params, e, BATCH, jax.random.key(1), jnp.asarray(0)).loss.sum))(extra)
  assert not any(g.any() for g in jax.tree.leaves(gradient))
  after = one.after_update(jax.tree.map(lambda x: x + 1, params), extra, {}, jnp.asarray(0))
  assert after.keys() == extra.keys() and after['trained'] is extra['trained']


@pytest.mark.slow(reason='1 s: another program')
def test_inference_takes_the_mean_of_both_heads() -> None:
  one = task()
  params, extra = jax.jit(one.init)(jax.random.key(0), BATCH)
  params['head']['bias'], params['head_dist']['bias'] = jnp.arange(5.), jnp.arange(5.)[::-1] * 3
  view = one.views()['student']
  out = jax.jit(view.predict)(view.select(params, extra), BATCH['image'])
  np.testing.assert_allclose(out.logits[0], (np.arange(5.) + 3 * np.arange(5.)[::-1]) / 2, rtol=1e-5)
  assert set(one.views()) == {'student'}


def test_consistent_teaching_leaves_the_labels_out() -> None:
  one = task(weight=1., distilled=False)
  params, extra = one.init(jax.random.key(0), BATCH)
  loss = jax.jit(one.loss)
  a, b = (float(loss(params, extra, {**BATCH, 'label': label}, jax.random.key(1), jnp.asarray(0)).loss.value)
          for label in (BATCH['label'], BATCH['label'][::-1].copy()))
  assert a == b > 0


@pytest.mark.slow(reason='3 s: another network')
def test_running_statistics_of_the_student_are_kept() -> None:
  teacher = Trained(fakes.BatchNormNet(), fakes.LinearHead(), normalization=HALF, student=HALF)
  one = Distill(fakes.BatchNormNet(), fakes.LinearHead(), teacher, schema.Distill(), num_classes=CLASSES)
  params, extra = one.init(jax.random.key(0), BATCH)
  assert set(extra) == {'trained', 'model_state'} and 'state' in extra['trained']
  out = jax.jit(one.loss)(params, extra, BATCH, jax.random.key(1), jnp.asarray(0))
  after = one.after_update(params, extra, out.stats, jnp.asarray(0))
  assert after['trained'] is extra['trained'] and np.abs(after['model_state']['mean']).max() > 0
