"""I-JEPA: blocks, loss and gradient against NumPy without padding, the target encoder, sharding, and the alarm."""
from __future__ import annotations

import dataclasses
import functools
from math import erf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import check, schema
from vit_jax.core.errors import UserError
from vit_jax.models.decoders import Predictor
from vit_jax.models.vit import positions, vit
from vit_jax.objectives import kinds
from vit_jax.objectives.ijepa import IJepa, Masks
from vit_jax.train.step import Program

PX, GRID, PATCH, WIDTH, HEADS = (12, 16), (6, 8), 2, 8, 2
MODEL = schema.ViT(patch=PATCH, width=WIDTH, depth=1, heads=HEADS, mlp=schema.Mlp(12), pool=schema.Mean(),
                   gelu=schema.Gelu.EXACT, positions=schema.SinCos(schema.Frequencies.MAE))
SETTINGS = schema.IJepa(predictor_width=8, predictor_depth=1, predictor_heads=2, min_context=4, num_targets=3)
BATCH = {'image': np.random.default_rng(0).normal(size=(8, *PX, 3)).astype(np.float32)}
STEP = np.zeros((), np.int32)


def task(settings: schema.IJepa = SETTINGS) -> IJepa:
  return IJepa(vit.build(MODEL, PX), Predictor(8, 1, 2, MODEL), settings,
               momentum=lambda step: .5 + .1 * jnp.asarray(step, jnp.float32))


@functools.cache
def begin() -> tuple[Any, Any]:
  params, extra = map(programs.draw, jax.eval_shape(task().init, jax.random.key(0), BATCH))
  extra['teacher'] = jax.tree.map(lambda x: x[::-1].copy(), extra['teacher'])  # another network
  return params, extra


@functools.cache
def draw(num: int = 512, context_ratio: float = .5, seed: int = 0) -> Masks:
  image = jax.ShapeDtypeStruct((num, *PX, 3), jnp.float32)
  one = dataclasses.replace(SETTINGS, context_ratio=context_ratio)
  found: Masks = jax.device_get(jax.jit(lambda key: task(one).draw(key, image))(jax.random.key(seed)))
  return found


def f64(tree: Any) -> Any:
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def normed(x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
  return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def numpy_blocks(p: Any, x: np.ndarray) -> np.ndarray:
  """One block and the last norm of a transformer, on tokens `[n, D]`, in float64."""
  b = jax.tree.map(lambda leaf: leaf[0], p['blocks'])
  y = normed(x) * b['norm1']['scale'] + b['norm1']['bias']
  q, k, v = (np.einsum('nd,dak->ank', y, b['attn'][n]['kernel']) + b['attn'][n]['bias'][:, None]
             for n in ('query', 'key', 'value'))
  logits = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  x = x + np.einsum('ank,akd->nd', weights @ v, b['attn']['out']['kernel']) + b['attn']['out']['bias']
  y = normed(x) * b['norm2']['scale'] + b['norm2']['bias']
  y = y @ b['mlp']['up']['kernel'] + b['mlp']['up']['bias']
  y = y / 2 * (1 + np.vectorize(erf)(y / np.sqrt(2)))
  x = x + y @ b['mlp']['down']['kernel'] + b['mlp']['down']['bias']
  return normed(x) * p['norm']['scale'] + p['norm']['bias']


def numpy_encode(p: Any, image: np.ndarray, numbers: np.ndarray) -> np.ndarray:
  """The features of some patches, which see each other alone."""
  h, w = GRID
  cut = image.reshape(h, PATCH, w, PATCH, 3).swapaxes(1, 2).reshape(h * w, -1)[numbers]
  x = cut @ p['stem']['kernel'].reshape(-1, WIDTH) + p['stem']['bias']
  return numpy_blocks(p, x + positions.sincos2d_mae(GRID, WIDTH)[numbers])


def numpy_loss(params: Any, extra: Any, masks: Masks, loss: schema.JepaLoss = schema.JepaLoss.L2) -> float:
  """By loops over images and blocks, each with exactly its own patches."""
  total, place = [], positions.sincos2d_mae(GRID, 8)
  for image, context, is_context, targets, is_target in zip(BATCH['image'].astype(np.float64), *masks, strict=True):
    seen, errors, p = context[is_context], [], params['predictor']
    wanted = normed(numpy_encode(extra['teacher']['backbone'], image, np.arange(GRID[0] * GRID[1])), 1e-5)
    tokens = numpy_encode(params['backbone'], image, seen) @ p['embed']['kernel'] + p['embed']['bias'] + place[seen]
    for block, counts in zip(targets, is_target, strict=True):
      asked = params['mask_token'][0] + place[block[counts]]
      y = numpy_blocks(p, np.concatenate([tokens, asked]))[len(tokens):]
      away = np.abs(y @ p['predict']['kernel'] + p['predict']['bias'] - wanted[block[counts]])
      smooth = np.where(away < 1, away ** 2 / 2, away - .5)
      errors.append((away ** 2 if loss is schema.JepaLoss.L2 else smooth).mean(-1))
    total.append(np.concatenate(errors).mean())
  return float(np.mean(total))


def own_masks() -> Masks:
  """Those that the loss draws from key 3."""
  found: Masks = jax.device_get(task().draw(jax.random.split(jax.random.key(3))[0], BATCH['image']))
  return found


@pytest.mark.parametrize('loss', schema.JepaLoss)
def test_the_loss_is_that_of_numpy_without_padding(loss: schema.JepaLoss) -> None:
  params, extra = begin()
  out = jax.jit(task(dataclasses.replace(SETTINGS, loss=loss)).loss)(params, extra, BATCH, jax.random.key(3), STEP)
  want = numpy_loss(f64(params), f64(extra), own_masks(), loss)
  assert float(out.loss.value) == pytest.approx(want, rel=2e-5)  # f32, two transformers of a block
  wanted = np.stack([normed(numpy_encode(f64(extra)['teacher']['backbone'], image.astype(np.float64), np.arange(48)),
                            1e-5) for image in BATCH['image']])
  assert float(out.metrics['deviation'].value) == pytest.approx(wanted.std(0).mean(), rel=1e-4)


def test_the_gradient_is_that_of_float64_differences() -> None:
  params, extra = begin()
  masks, target = own_masks(), f64(extra)
  grads = jax.jit(jax.grad(lambda p: task().loss(p, extra, BATCH, jax.random.key(3), STEP).loss.value))(params)
  for path in (('mask_token',), ('predictor', 'embed', 'kernel'), ('predictor', 'blocks', 'attn', 'value', 'kernel'),
               ('backbone', 'stem', 'kernel'), ('backbone', 'blocks', 'mlp', 'up', 'bias')):
    ends, got = [], functools.reduce(lambda tree, name: tree[name], path, grads)
    for shift in (1e-5, -1e-5):
      moved = jax.tree.map(lambda x: np.array(x, np.float64), params)
      leaf = functools.reduce(lambda tree, name: tree[name], path, moved)
      leaf[(0,) * (leaf.ndim - 1) + (1,)] += shift
      ends.append(numpy_loss(moved, target, masks))
    # A sum over 8 images and some 25 patches in f32; the differences are exact to 1e-9.
    np.testing.assert_allclose(got[(0,) * (got.ndim - 1) + (1,)], (ends[0] - ends[1]) / 2e-5, rtol=1e-3, atol=1e-5)


def test_blocks_have_the_areas_and_aspects_of_their_settings_and_lie_inside() -> None:
  masks, (h, w) = draw(), GRID
  sizes = set()
  for targets, counts in zip(masks.targets.reshape(-1, masks.targets.shape[-1]),
                             masks.is_target.reshape(-1, masks.targets.shape[-1]), strict=True):
    row, column = np.divmod(targets[counts], w)
    block = (row.max() - row.min() + 1, column.max() - column.min() + 1)
    assert len(set(targets[counts])) == counts.sum() == block[0] * block[1]
    assert row.max() < h and column.max() < w
    sizes.add(tuple(map(int, block)))
  exact = [((n * r) ** .5, (n / r) ** .5) for n in np.linspace(.15 * 48, .2 * 48, 50)
           for r in np.linspace(.75, 1.5, 200)]
  assert sizes <= {(round(a), round(b)) for a, b in exact} and len(sizes) > 2
  assert masks.targets.shape[-1] == max(a * b for a, b in {(round(a), round(b)) for a, b in exact})


def test_places_are_uniform() -> None:
  masks = draw(4096)
  first = masks.targets[:, :, 0]
  count = masks.is_target.sum(-1) == 9  # blocks of 3 x 3: 4 x 6 places
  share = np.bincount(first[count], minlength=48) / count.sum()
  places = [row * 8 + column for row in range(4) for column in range(6)]
  assert share[places].sum() == 1. and share[places].max() < 1.3 * share[places].min()


def test_a_context_has_no_patch_of_a_target_and_not_too_few() -> None:
  masks = draw()
  counts = masks.is_context.sum(1)
  assert masks.context.shape == (512, 24) and counts.min() >= SETTINGS.min_context and len(set(counts)) > 5
  for context, is_context, targets, is_target in zip(*masks, strict=True):
    seen = set(context[is_context])
    assert len(seen) == is_context.sum() and not seen & set(targets[is_target])


def test_a_smaller_share_cuts_the_context_at_random() -> None:
  masks = draw(context_ratio=.25)
  assert masks.context.shape == (512, 12) and masks.is_context.mean() > .9
  assert np.bincount(masks.context[masks.is_context], minlength=48).min() > 20


def test_images_and_steps_have_their_own_blocks() -> None:
  one, other = draw(), draw(seed=1)
  assert len({tuple(x) for x in one.targets.reshape(512, -1)}) > 500
  assert (one.targets != other.targets).any(axis=(1, 2)).mean() > .99


def test_the_target_encoder_is_an_ema_with_a_linear_momentum() -> None:
  params, extra = begin()
  for step in (0, 2):
    after = jax.jit(task().after_update)(params, extra, {}, jnp.asarray(step))
    m = .5 + .1 * step
    want = jax.tree.map(lambda t, p, m=m: m * t + (1 - m) * p, extra['teacher']['backbone'], params['backbone'])
    programs.assert_close(after['teacher']['backbone'], want, rtol=1e-6)
  one: Any = kinds.of(config()).build(vit.build(MODEL, PX), 3, lengths=programs.durations.Lengths(800, 8, 1000))
  assert [round(float(one._momentum(step)), 4) for step in (0, 500, 1000)] == [.996, .998, 1.]
  assert set(one.views()) == {'student', 'teacher'}


@functools.cache
def program(settings: str = 'one') -> Program:
  return programs.build(task(), lambda batch, key, step: batch, programs.MESHES[settings], like=BATCH)


def test_eight_devices_take_the_steps_of_one() -> None:
  (state, metrics), (other, others) = (programs.run(program(name), programs.MESHES[name], BATCH, 2)
                                       for name in ('one', 'data=8'))
  programs.assert_close((other.params, other.extra), (state.params, state.extra), rtol=1e-3, atol=1e-5)
  programs.assert_close(others.means, metrics.means, rtol=1e-4)


def test_rows_without_a_mask_do_not_count() -> None:
  params, extra = begin()
  image, loss = BATCH['image'].copy(), jax.jit(task().loss)
  image[5:] = np.nan
  mask = np.array([1.] * 5 + [0.] * 3, np.float32)
  masked = loss(params, extra, {'image': image, 'mask': mask}, jax.random.key(1), STEP)
  image[5:] = 7.
  other = loss(params, extra, {'image': image, 'mask': mask}, jax.random.key(1), STEP)
  assert np.isfinite(float(masked.loss.value)) and float(masked.loss.value) == float(other.loss.value)
  assert float(masked.metrics['deviation'].value) == float(other.metrics['deviation'].value)


def config(**changes: Any) -> schema.Config:
  return schema.Config(image_px=PX, batch_size=8, model=changes.pop('model', MODEL), objective=schema.IJepa(
      **{'predictor_width': 8, 'predictor_depth': 1, 'predictor_heads': 2, 'min_context': 4, **changes}))


def test_targets_that_are_all_the_same_raise_an_alarm_unless_the_threshold_is_0() -> None:
  [watch] = kinds.of(config(collapse=schema.Collapse(.02, '3 steps', '5 steps'))).watches(programs.LENGTHS)
  assert (watch.metric, watch.below, watch.lasting, watch.after, watch.stops) == ('deviation', .02, 3, 5, False)
  assert kinds.of(config(collapse=schema.Collapse(0.))).watches(programs.LENGTHS) == []
  params, extra = begin()
  same = {'image': np.broadcast_to(BATCH['image'][:1], BATCH['image'].shape)}
  out = jax.jit(task().loss)(params, extra, same, jax.random.key(0), STEP)
  assert abs(float(out.metrics['deviation'].value)) < 1e-4


@pytest.mark.parametrize(('given', 'said'), [
    (config(model=dataclasses.replace(MODEL, pool=schema.Map())),
     'model: expected one that encodes a subset of the patches, for objective IJepa, got model.pool=map'),
    (config(model=schema.Mixer()), 'model: expected a ViT for objective IJepa'),
    (config(momentum=schema.Ramp(.9, 1.1)), 'objective.momentum.end: expected 0 to 1, got 1.1'),
    (config(target_area=(.3, .2)), 'objective.target_area: expected the smaller number first'),
    (config(context_area=(.9, .8)), 'objective.context_area: expected the smaller number first'),
    (config(target_aspect=(2., 1.)), 'objective.target_aspect: expected the smaller number first'),
    (config(context_ratio=.05), 'objective.context_ratio: expected a share of at least objective.min_context=4 of 48'),
    (config(predictor_width=10), 'objective.predictor_width: expected a multiple of 4, for 2-D sine-cosine positions'),
    (config(predictor_heads=3), 'objective.predictor_width: expected a multiple of objective.predictor_heads=3'),
    (config(num_targets=0), 'objective.num_targets: expected 1 to 1000, got 0')])
def test_settings_that_cannot_work_are_refused(given: schema.Config, said: str) -> None:
  with pytest.raises(UserError) as error:
    check.check(given)
  assert said in str(error.value)
