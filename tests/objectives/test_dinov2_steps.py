"""DINOv2's recipe takes the steps of the authors' program, from equal weights, crops and masks.

`golden_dinov2.npz` is what their own classes computed, in float32: `make_golden_dinov2.py` ran them, and says how.
"""
from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import dinov2_i1k
from tests.objectives import make_golden_dinov2 as made
from vit_jax.config import durations
from vit_jax.config import schema as s
from vit_jax.core import trees
from vit_jax.models.vit import vit
from vit_jax.objectives import kinds
from vit_jax.objectives.dinov2 import Dinov2, Masks
from vit_jax.optim import optimizers, schedules

LENGTHS = durations.Lengths(num_examples=1000, batch_size=made.NUM, total_steps=made.EPOCHS * made.EPOCH)
MODEL = s.ViT(patch=made.PATCH, width=made.WIDTH, depth=made.DEPTH, heads=made.HEADS, mlp=s.Mlp(4 * made.WIDTH),
              gelu=s.Gelu.EXACT, positions=s.Learned(resize=s.PositionResize.BICUBIC_OFFSET),
              block=s.Plain(layer_scale=1e-5), init=s.Init.DINOV2)
IDLE = 'attn/key/bias'
"""Its gradient is 0 but for rounding, by which Adam moves it."""


def config(case: str, patch: pytest.MonkeyPatch) -> s.Config:
  """The recipe with the numbers of a case, but for the size of the images and of the heads' hidden layers."""
  centering, num, bottleneck, num_patch, _ = made.CASES[case]
  is_shared = case.startswith('shared')
  size = dinov2_i1k.Size(
      made.EPOCHS, made.NUM, made.NUM, made.LR / (made.NUM / 1024) ** .5, 1, made.END_DECAY / made.DECAY,
      made.LAYER_DECAY, 0., made.MOMENTUM, s.Centering.MEAN if centering == 'centering' else s.Centering.SINKHORN,
      num, bottleneck, 0 if is_shared else num_patch, made.LOCAL_PX)
  patch.setattr(dinov2_i1k, 'SIZES', {'L/16': size})
  patch.setattr(dinov2_i1k, 'EPOCH', made.EPOCH)
  patch.setattr(dinov2_i1k, '_model', lambda *_: MODEL)
  changes = {'optimizer.clip_norm': made.CLIP, 'objective.hidden_dim': made.HIDDEN}
  return s.replaced(dinov2_i1k.get_config('L/16'), {
      **changes, **({} if is_shared else {'objective.patch_bottleneck_dim': made.CASES[case][4]})})


def masks(given: np.ndarray) -> Masks:
  """The patches that a batch says to be masked, of one group."""
  flat = given.reshape(1, -1)
  number = np.argsort(~flat, axis=1, kind='stable')[:, :40]  # of 128 about 40 % in most crops
  each = np.repeat(1. / np.maximum(given.sum(-1), 1), given.shape[-1], axis=-1).reshape(1, -1)
  weight = np.where(np.take_along_axis(flat, number, 1), np.take_along_axis(each, number, 1), 0.)
  assert flat.sum() <= number.shape[1]
  return Masks(given, number, weight.astype(np.float32))


def golden(case: str) -> dict[str, np.ndarray]:
  """What the program computed for a case."""
  found = np.load(pathlib.Path(made.__file__).with_name('golden_dinov2.npz'))
  return {name.removeprefix(f'{case}/'): found[name] for name in found.files if name.startswith(f'{case}/')}


def products(tree: Any) -> dict[str, float]:
  """The product of each parameter with its probe, in the order of `made.shapes`."""
  found = {name: float((np.asarray(x, np.float64) * made.probe(name, x.shape)).sum())
           for name, x in trees.flatten(tree).items()}
  return dict(sorted(found.items()))


@pytest.mark.slow(reason='4 s each: a training step of the whole recipe')
@pytest.mark.parametrize('case', made.CASES)
def test_steps_of_the_recipe_are_those_of_the_authors_program(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
  given = config(case, monkeypatch)
  one = kinds.of(given).build(vit.build(MODEL, (made.PX, made.PX)), 0, lengths=LENGTHS)
  assert isinstance(one, Dinov2)
  rate = schedules.build(given.optimizer.schedule, peak=given.optimizer.lr, lengths=LENGTHS)
  optimizer = optimizers.build(given.optimizer, rate, lengths=LENGTHS)
  params, teacher = (trees.unflatten(made.weights(case, whose)) for whose in ('student', 'teacher'))
  extra = {'teacher': teacher, 'center': jnp.zeros((1, made.CASES[case][1])),
           'patch_center': jnp.zeros((1, made.CASES[case][3]))}

  @jax.jit
  def take(params: Any, extra: Any, opt: Any, batch: Any, drawn: Masks, step: Any) -> Any:
    def loss(params: Any) -> Any:
      one.draw = lambda key, views: drawn  # type: ignore[method-assign]
      out = one.loss(params, extra, batch, jax.random.key(0), step)
      return out.loss.value, out

    grads, out = jax.grad(loss, has_aux=True)(params)
    norm = jnp.sqrt(sum(jnp.square(x).sum() for x in jax.tree.leaves(grads)))
    updates, opt = optimizer.update(grads, opt, params, step=step, grad_norm=norm)
    params = jax.tree.map(jnp.add, params, updates)
    terms = jnp.stack([out.metrics[name].value for name in ('dino', 'ibot', 'koleo')])
    return params, one.after_update(params, extra, out.stats, step), opt, terms, grads

  want, opt, found = golden(case), optimizer.init(params), []
  for step in range(made.STEPS):
    batch = made.crops(step)
    drawn = masks(batch.pop('masks'))
    params, extra, opt, terms, grads = take(params, extra, opt, batch, drawn, np.asarray(step, np.int32))
    found.append(terms)
    if not step:  # f32, divided by temperatures of 0.04 and 0.1
      np.testing.assert_allclose(list(products(grads).values()), want['gradient'], rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(found, want['terms'], rtol=3e-5)  # likewise, and three steps
  for whose, tree in (('student', params), ('teacher', extra['teacher'])):
    for (name, got), number in zip(products(tree).items(), want[whose], strict=True):
      moved = made.STEPS * made.LR * np.prod(made.shapes(case)[name]) ** .5  # at most, times the length of the probe
      assert abs(got - number) <= moved * (2. if name.endswith(IDLE) else 2e-4), f'{whose} {name}: {got}, not {number}'
  for name in ('center', 'patch_center'):
    np.testing.assert_allclose(extra[name][0], want[name], atol=2e-6)
