"""DINOv2: all terms and the gradient against NumPy in float64, masks, centers, and rows that do not count."""
from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from tests.objectives import test_dino
from vit_jax.config import check, schema
from vit_jax.config.schema import Centering
from vit_jax.core.axes import labelled
from vit_jax.core.errors import UserError
from vit_jax.core.types import Array, Features, Key, Params
from vit_jax.models.heads import Projector
from vit_jax.models.vit import vit
from vit_jax.objectives import dino, dinov2, kinds, patches

WIDTH, PATCH, PX, GROUP, K, NUM = 6, 2, 8, 4, 11, 16
RNG = np.random.default_rng(0)
BATCH = {'views_global': RNG.normal(size=(8, 2, PX, PX, 3)).astype(np.float32),
         'views_local': RNG.normal(size=(8, 3, 4, 4, 3)).astype(np.float32)}
SHARED = schema.Dinov2(group=GROUP, mask_ratio=(.2, .5), dino_weight=.7, ibot_weight=1.3, koleo_weight=.4,
                       center_momentum=.8)
APART = dataclasses.replace(SHARED, patch_out_dim=7, koleo_crops=1)
STEP = np.asarray(1, np.int32)


class Mixing:
  """A backbone of which every token knows the mean of all of them."""

  def init(self, key: Key, image: Array) -> tuple[Params, Any]:
    return {'kernel': labelled(jax.random.normal(key, (PATCH * PATCH * 3, WIDTH)), (None, None))}, {}

  def embed(self, params: Params, image: Array) -> Array:
    return patches.patchify(image, PATCH) @ params['kernel']

  def positions(self, params: Params, grid: tuple[int, int]) -> Array:
    return jnp.sin(jnp.arange(grid[0] * grid[1] * WIDTH, dtype=jnp.float32)).reshape(-1, WIDTH)

  def encode(self, params: Params, tokens: Array, positions: Array, *, grid: tuple[int, int], train: bool,
             key: Key | None, mask: Array | None = None) -> Features:
    x = tokens + positions[None]
    x = jnp.tanh(x + x.mean(1, keepdims=True))
    return Features(x, x.mean(1), grid)

  def apply(self, params: Params, state: Any, image: Array, *, train: bool, key: Key | None) -> tuple[Features, Any]:
    grid = image.shape[1] // PATCH, image.shape[2] // PATCH
    return self.encode(params, self.embed(params, image), self.positions(params, grid), grid=grid, train=train,
                       key=key), state


def task(settings: schema.Dinov2) -> dinov2.Dinov2:
  rates = dino.Rates(teacher_temperature=lambda s: .04 + .01 * jnp.asarray(s, jnp.float32),
                     momentum=lambda s: .5 + .1 * jnp.asarray(s, jnp.float32))
  head = functools.partial(Projector, hidden=5, bottleneck=4, learned_norm=False, dtype=jnp.float32)
  separate = head(settings.patch_out_dim) if settings.patch_out_dim else None
  backbone: Any = Mixing()
  return dinov2.Dinov2(backbone, head(K), separate, settings, PATCH, rates=rates)


@functools.cache
def begin(num_patch_outputs: int) -> tuple[Any, Any]:
  one = task(dataclasses.replace(SHARED, patch_out_dim=num_patch_outputs))
  params, extra = map(programs.draw, jax.eval_shape(one.init, jax.random.key(0), BATCH))
  extra['teacher'] = jax.tree.map(lambda x: x[::-1].copy(), extra['teacher'])  # another network
  return params, extra


def f64(tree: Any) -> Any:
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@functools.cache
def is_masked() -> np.ndarray:
  """What the loss masks with the key."""
  key = jax.random.split(jax.random.key(3), 3)[2]
  return np.asarray(jax.jit(task(SHARED).draw)(key, BATCH['views_global']).is_masked)


def encode(p: Any, views: np.ndarray, masked: np.ndarray | None = None) -> np.ndarray:
  """The tokens `[B, V, N, D]`."""
  b, v, h, w, _ = views.shape
  cut = views.astype(np.float64).reshape(b, v, h // PATCH, PATCH, w // PATCH, PATCH, 3).swapaxes(3, 4)
  x = cut.reshape(b, v, -1, PATCH * PATCH * 3) @ p['backbone']['kernel']
  if masked is not None:
    x = np.where(masked[..., None], p['mask_token'][0, 0], x)
  x = x + np.sin(np.arange(x.shape[2] * WIDTH)).reshape(-1, WIDTH)
  return np.tanh(x + x.mean(2, keepdims=True))


def head(p: Any, x: np.ndarray) -> np.ndarray:
  for name in ('mlp1', 'mlp2', 'mlp3'):
    x = x @ p[name]['kernel'] + p[name]['bias']
    x = test_dino._erf_gelu(x) if name != 'mlp3' else x
  w = p['prototypes']['kernel']
  return x / np.linalg.norm(x, axis=-1, keepdims=True) @ (w / np.linalg.norm(w, axis=0))


def targets(outputs: np.ndarray, center: np.ndarray, centering: Centering) -> np.ndarray:
  """Of rows `[R, K]` at step 1; Sinkhorn as DINOv2 states it, with the number of rows."""
  if centering is not Centering.SINKHORN:
    return test_dino.softmax((outputs - center) / .05)
  q = np.exp(outputs / .05).T
  q, (num, rows) = q / q.sum(), q.shape
  for _ in range(3):
    q = q / q.sum(1, keepdims=True) / num
    q = q / q.sum(0, keepdims=True) / rows
  return (q * rows).T


def numpy_loss(params: Any, extra: Any, settings: schema.Dinov2, count: int = 8, *, hides: bool = True,
               compared: np.ndarray | None = None) -> dict[str, float]:
  """The terms, by loops over pairs, patches and neighbors; images from `count` on do not count.

  `compared` are the patches of the second term, None: those that are masked, which the student does not see if `hides`.
  """
  masked, data = (is_masked() if compared is None else compared)[:count], {k: v[:count] for k, v in BATCH.items()}
  student, teacher = encode(params, data['views_global'], masked if hides else None), encode(
      extra['teacher'], data['views_global'])
  x, name = student.mean(2), 'patch_projector' if settings.patch_out_dim else 'projector'
  seen = np.concatenate([x, encode(params, data['views_local']).mean(2)], 1)
  log_p = np.log(test_dino.softmax(head(params['projector'], seen) / .1))
  rows = head(extra['teacher']['projector'], teacher.mean(2)).reshape(count * 2, -1)
  p_t = targets(rows, extra['center'], settings.centering).reshape(count, 2, -1)
  pairs = [-(p_t[:, t] * log_p[:, s]).sum(-1).mean() for t in range(2) for s in range(5) if s != t]
  patch_t = targets(head(extra['teacher'][name], teacher[masked]), extra['patch_center'], settings.centering)
  patch_p = np.log(test_dino.softmax(head(params[name], student[masked]) / .1))
  weight = (masked / np.maximum(masked.sum(-1, keepdims=True), 1))[masked]
  unit, spread = x / np.linalg.norm(x, axis=-1, keepdims=True), 0.
  for view in range(settings.koleo_crops):
    for i in range(count):
      others = [j for j in range(i // GROUP * GROUP, min(i // GROUP * GROUP + GROUP, count)) if j != i]
      nearest = max(others, key=lambda j: unit[i, view] @ unit[j, view])
      spread -= np.log(np.linalg.norm(unit[i, view] - unit[nearest, view])) / count
  found = {'dino': np.mean(pairs), 'ibot': -(weight * (patch_t * patch_p).sum(-1)).sum() / (2 * count),
           'koleo': spread, 'masked': masked.mean()}
  s = settings
  return {**found, 'loss': s.dino_weight * found['dino'] + s.ibot_weight * found['ibot'] + s.koleo_weight * spread}


CASES = {'shared, mean': SHARED, 'separate, mean': APART,
         'shared, sinkhorn': dataclasses.replace(SHARED, centering=Centering.SINKHORN, center_momentum=.9),
         'separate, sinkhorn': dataclasses.replace(APART, centering=Centering.SINKHORN, center_momentum=.9)}


@functools.cache
def value(name: str) -> Any:
  """Gradient and output of the loss, compiled."""
  def loss(params: Any, extra: Any, batch: Any) -> Any:
    out = task(CASES[name]).loss(params, extra, batch, jax.random.key(3), STEP)
    return out.loss.value, out
  return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.quick('separate, mean', 'shared, sinkhorn', reason='1 s each: a program; these two have all four')
@pytest.mark.parametrize('name', CASES)
def test_every_term_is_that_of_numpy(name: str) -> None:
  params, extra = begin(CASES[name].patch_out_dim)
  _, out = value(name)(params, extra, BATCH)
  got = {k: float(out.metrics[k].value) for k in ('dino', 'ibot', 'koleo', 'masked')} | {'loss': float(out.loss.value)}
  want = numpy_loss(f64(params), f64(extra), CASES[name])
  assert got == pytest.approx(want, rel=5e-5)  # f32; outputs are divided by temperatures of 0.05 and 0.1
  assert min(want.values()) > .05


@pytest.mark.quick('separate, mean', reason='1 s: a program; the other is that of the test above')
@pytest.mark.parametrize('name', ['separate, mean', 'shared, sinkhorn'])
def test_the_gradient_is_that_of_float64_differences(name: str) -> None:
  params, extra = begin(CASES[name].patch_out_dim)
  grads, _ = value(name)(params, extra, BATCH)
  last = 'patch_projector' if CASES[name].patch_out_dim else 'projector'
  for path in (('mask_token',), ('backbone', 'kernel'), ('projector', 'mlp1', 'kernel'), (last, 'mlp3', 'bias'),
               (last, 'prototypes', 'kernel')):
    ends, got = [], functools.reduce(lambda tree, part: tree[part], path, grads)
    for shift in (1e-5, -1e-5):
      moved = jax.tree.map(lambda x: np.array(x, np.float64), params)
      leaf = functools.reduce(lambda tree, part: tree[part], path, moved)
      leaf[(0,) * (leaf.ndim - 1) + (1,)] += shift
      ends.append(numpy_loss(moved, f64(extra), CASES[name])['loss'])
    want = (ends[0] - ends[1]) / 2e-5
    np.testing.assert_allclose(got[(0,) * (got.ndim - 1) + (1,)], want, rtol=1e-3, atol=2e-5, err_msg=str(path))


@pytest.mark.quick('shared, sinkhorn', reason='1 s: a program; Sinkhorn has more to leave out')
@pytest.mark.parametrize('name', ['separate, mean', 'shared, sinkhorn'])
def test_images_that_do_not_count_change_nothing(name: str) -> None:
  """Six of eight count, the other two are not numbers."""
  params, extra = begin(CASES[name].patch_out_dim)
  batch = {k: np.concatenate([v[:6], np.full_like(v[:2], np.nan)]) for k, v in BATCH.items()}
  grads, out = value(name)(params, extra, {**batch, 'mask': np.array([1.] * 6 + [0.] * 2, np.float32)})
  assert float(out.loss.value) == pytest.approx(numpy_loss(f64(params), f64(extra), CASES[name], 6)['loss'], rel=5e-5)
  assert out.loss.weight == 6 and all(np.isfinite(g).all() for g in jax.tree.leaves((grads, out.stats)))


def test_centers_move_to_the_outputs_and_the_teacher_to_all_parameters() -> None:
  params, extra = begin(7)
  one = task(APART)
  _, out = value('separate, mean')(params, extra, BATCH)
  after, wide = jax.jit(one.after_update)(params, extra, out.stats, STEP), f64(extra)
  tokens = encode(wide['teacher'], BATCH['views_global'])
  for name, projector, x in (('center', 'projector', tokens.mean(2)),
                             ('patch_center', 'patch_projector', tokens[is_masked()])):
    outputs = head(wide['teacher'][projector], x)
    mean = outputs.reshape(-1, outputs.shape[-1]).mean(0)
    np.testing.assert_allclose(after[name], .8 * wide[name] + .2 * mean[None], rtol=1e-4, atol=1e-6)
  programs.assert_close(after['teacher'], jax.tree.map(lambda t, p: .6 * t + .4 * p, wide['teacher'], f64(params)),
                        rtol=1e-5)
  assert set(after['teacher']) == {'backbone', 'projector', 'patch_projector', 'mask_token'}


def test_masks_have_the_shares_of_their_group_and_fill_the_slots() -> None:
  """14 x 14 patches, groups of 8 images: 8 of 16 crops are masked, by shares in 8 equal parts of 0.1 to 0.5."""
  one = task(dataclasses.replace(SHARED, group=8, mask_ratio=(.1, .5)))
  views = jax.ShapeDtypeStruct((256, 2, 28, 28, 3), jnp.float32)
  masks = jax.device_get(jax.jit(lambda key: one.draw(key, views))(jax.random.key(0)))
  counts = np.sort(masks.is_masked.sum(-1).reshape(32, 16))
  edges = np.linspace(.1, .5, 9)
  assert not counts[:, :8].any() and masks.number.shape == (32, int(sum(int(196 * e) for e in edges[1:])))
  assert (counts[:, 8:] <= (196 * edges[1:]).astype(int)).all() and counts.max() > .46 * 196
  assert (counts[:, 8:] >= (196 * edges[:-1]).astype(int)).mean() > .9  # a block less where none fitted in 10 tries
  assert counts[:, 8:].mean() == pytest.approx(.3 * 196, rel=.02)
  for group, number, weight in zip(masks.is_masked.reshape(32, 16, 196), masks.number, masks.weight, strict=True):
    used = number[weight > 0]
    assert sorted(used) == list(np.flatnonzero(group)) and weight.sum() == pytest.approx(8, rel=1e-5)
    np.testing.assert_allclose(1 / weight[weight > 0], group.sum(1)[used // 196], rtol=1e-5)
  first = masks.is_masked.reshape(32, 16, 196).any(-1)
  assert len({tuple(row) for row in first}) > 30  # each group hides other crops


def test_blocks_are_made_of_rectangles_that_do_not_span_the_image() -> None:
  wanted = np.full(400, 40)
  found = np.asarray(jax.jit(lambda key: dinov2.blocks(key, wanted, (12, 16)))(jax.random.key(1))).reshape(-1, 12, 16)
  assert (found.sum((1, 2)) <= 40).all() and found.sum((1, 2)).mean() > 39.5
  beside = (found[:, :, 1:] & found[:, :, :-1]).sum() / found.sum()
  assert beside > .6  # of 40 single patches at random 0.2
  assert found.mean(0).min() > .002 and found.mean(0)[4:8, 5:11].mean() > found.mean(0)[0].mean()
  none = jax.jit(lambda key: dinov2.blocks(key, wanted * 0, (12, 16)))(jax.random.key(1))
  assert not none.any()


def test_sides_of_rectangles_have_the_distribution_of_beit(monkeypatch: pytest.MonkeyPatch) -> None:
  """The first rectangle in 20,000 images of 24 x 24 patches, beside BEiT's sampler, written again in NumPy."""
  monkeypatch.setattr(dinov2, 'TRIES', 1)
  wanted, rng = np.full(20_000, 200), np.random.default_rng(0)
  masks = np.asarray(jax.jit(lambda key: dinov2.blocks(key, wanted, (24, 24)))(jax.random.key(1))).reshape(-1, 24, 24)
  masks = masks[masks.any((1, 2))]
  found = np.stack([masks.any(2).sum(1), masks.any(1).sum(1)])
  area, ratio = rng.uniform(4, 200, 20_000), np.exp(rng.uniform(np.log(.3), np.log(1 / .3), 20_000))
  sides = np.round(np.sqrt([area * ratio, area / ratio])).astype(int)
  expected = sides[:, (sides < 24).all(0) & (sides.prod(0) <= 200)]
  # A mean of 19,000 logarithms with a deviation of about 0.7 has one of 0.005; the difference of two means 0.007.
  for of_sides in (lambda sides: np.log(sides[0] / sides[1]), lambda sides: np.log(sides).sum(0)):
    a, b = of_sides(found), of_sides(expected)
    assert a.mean() == pytest.approx(b.mean(), abs=5 * np.hypot(a.std(), b.std()) / 19_000 ** .5)
    np.testing.assert_allclose(np.quantile(a, (.1, .9)), np.quantile(b, (.1, .9)), atol=.1)
  assert found.shape[1] == pytest.approx(expected.shape[1], abs=5 * 2 ** .5 * 31)  # a deviation of 31 or less


def config(**changes: Any) -> schema.Config:
  model = schema.ViT(patch=8, width=8, depth=1, heads=2, mlp=schema.Mlp(8))
  views = schema.Data(recipe=schema.Recipe(views=schema.Views(on=True, num_local=2, local_px=8)))
  return schema.Config(batch_size=changes.pop('batch_size', 8), image_px=(16, 16), model=changes.pop('model', model),
                       data=views, train=changes.pop('train', schema.Train()), objective=schema.Dinov2(
                           **{'group': 4, 'out_dim': K, 'hidden_dim': 5, 'bottleneck_dim': 4, **changes}))


def test_a_config_has_the_heads_and_schedules_of_its_settings() -> None:
  given = config(patch_out_dim=13, patch_bottleneck_dim=3, momentum=schema.Ramp(.9, 1.),
                 teacher_temperature=schema.Ramp(.04, .07, until='200 steps', curve=schema.Curve.LINEAR))
  lengths = programs.durations.Lengths(800, 8, 1000)
  one = kinds.of(given).build(vit.build(given.model, given.image_px), 3, lengths=lengths)
  assert isinstance(one, dinov2.Dinov2)
  assert [round(float(one._teacher_temperature(s)), 4) for s in (0, 100, 200, 900)] == [.04, .055, .07, .07]
  assert [round(float(one._momentum(s)), 4) for s in (0, 500, 1000)] == [.9, .95, 1.]
  views = {'views_global': jnp.zeros((8, 2, 16, 16, 3))}
  params, extra = jax.eval_shape(one.init, jax.random.key(0), views)
  assert params['patch_projector']['prototypes']['kernel'].shape == (3, 13)
  assert params['projector']['prototypes']['kernel'].shape == (4, K) and extra['patch_center'].shape == (1, 13)


@pytest.mark.parametrize(('given', 'said'), [
    ({'batch_size': 6}, 'batch_size: expected a multiple of objective.group=4'),
    ({'mask_ratio': (.5, .1)}, 'objective.mask_ratio: expected the smaller number first'),
    ({'mask_ratio': (.1, .2)}, 'objective.mask_ratio: expected an end of at least one of 4 patches'),
    ({'mask_share': .1}, 'objective.mask_share: expected at least one of 2 x objective.group=4 crops'),
    ({'patch_bottleneck_dim': 3}, 'objective.patch_bottleneck_dim: expected its default 256 with objective.patch_out'),
    ({'train': schema.Train(accumulate=2)}, 'train.accumulate: expected 1 for objective Dinov2'),
    ({'train': schema.Train(accumulate=2), 'centering': Centering.SINKHORN}, 'train.accumulate: expected 1 with'),
    ({'group': 1}, 'objective.group: expected'),
    ({'model': schema.Mixer(patch=8)}, 'model: expected a ViT for objective Dinov2')])
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(config(**given))
  assert said in str(error.value)
