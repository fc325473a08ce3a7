"""Token labeling: its loss against NumPy, MixToken and its way back, and the two heads at inference."""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.models import heads
from vit_jax.models.vit import vit
from vit_jax.objectives import token_label
from vit_jax.objectives.token_label import TokenLabel

CLASSES = 5
MODEL = schema.ViT(patch=4, width=16, depth=1, heads=2, mlp=schema.Mlp(16), execution=schema.Execution.SCAN)
RNG = np.random.default_rng(0)
BATCH = {'image': RNG.normal(size=(4, 12, 16, 3)).astype(np.float32), 'label': np.array([0, 1, 2, 3], np.int32),
         'token_targets': RNG.dirichlet(np.ones(CLASSES), (4, 12)).astype(np.float32),
         'labels': RNG.dirichlet(np.ones(CLASSES), 4).astype(np.float32)}
BATCH['token_targets'][1, 2:] = 0  # tokens without a target


def task(model: schema.ViT = MODEL, *, mix: bool = True, class_from_map: bool = True,
         mix_group: int = 0) -> TokenLabel:
  head = heads.Head(schema.Head())
  settings = schema.TokenLabel(
      dense_weight=.7, mix_token=mix, label_smoothing=.1, mix_group=mix_group,
      class_target=schema.ClassTarget.MAP if class_from_map else schema.ClassTarget.LABEL)
  return TokenLabel(vit.build(model, (12, 16)), head, head, settings, patch=4, num_classes=CLASSES)


@pytest.fixture(scope='module')
def params() -> Any:
  found, extra = map(programs.draw, jax.eval_shape(task().init, jax.random.key(0), BATCH))
  assert extra == {}
  for name in ('head', 'aux'):
    found[name] = {'kernel': RNG.normal(size=(16, CLASSES)).astype(np.float32), 'bias': np.zeros(CLASSES, np.float32)}
  return found


def numpy_xent(logits: np.ndarray, target: np.ndarray) -> float:
  logits = logits.astype(np.float64)
  return float(-(target * (logits - np.log(np.exp(logits).sum()))).sum())


@pytest.mark.quick('True', reason='2 s: another program')
@pytest.mark.parametrize('class_from_map', [True, False])
def test_the_loss_is_that_of_numpy_with_tokens_exchanged_and_back(params: Any, class_from_map: bool) -> None:
  one, key = task(class_from_map=class_from_map), jax.random.key(4)
  batch = BATCH if class_from_map else {name: value for name, value in BATCH.items() if name != 'labels'}
  kept = np.asarray(jax.jit(lambda key: token_label.draw_kept(jax.random.split(key)[0], (3, 4)))(key))
  assert 0 < kept.mean() < 1
  out = jax.jit(one.loss)(params, {}, batch, key, jnp.asarray(0))
  net = vit.build(MODEL, (12, 16))

  @jax.jit
  def encode(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    features = net.encode(params['backbone'], tokens, net.positions(params['backbone'], (3, 4)), grid=(3, 4),
                          train=False, key=None)
    return features.tokens, features.pooled

  tokens = np.asarray(jax.jit(net.embed)(params['backbone'], BATCH['image']))
  partner = [1, 0, 3, 2]
  mixed = np.stack([[tokens[b, n] if kept[n] else tokens[partner[b], n] for n in range(12)] for b in range(4)])
  encoded, pooled = (np.asarray(x, np.float64) for x in encode(mixed))
  classes, dense = [], []
  for b in range(4):
    whole = BATCH['labels'] if class_from_map else np.eye(CLASSES)[BATCH['label']]
    target = kept.mean() * whole[b] + (1 - kept.mean()) * whole[partner[b]]
    on = .9 + .1 / CLASSES if class_from_map else .9  # of a map the authors' code takes the value of a true class
    classes.append(numpy_xent(pooled[b] @ params['head']['kernel'], on * target + .1 / CLASSES))
    of_tokens = []
    for n in range(12):
      own = encoded[b if kept[n] else partner[b], n]
      soft = BATCH['token_targets'][b, n].astype(np.float64)
      if soft.sum():
        of_tokens.append(numpy_xent(own @ params['aux']['kernel'], (.9 + .1 / CLASSES) * soft + .1 / CLASSES))
    assert len(of_tokens) == (2 if b == 1 else 12)
    dense.append(np.mean(of_tokens))
  assert float(out.metrics['class_loss'].value) == pytest.approx(np.mean(classes), rel=1e-4)
  assert float(out.metrics['dense_loss'].value) == pytest.approx(np.mean(dense), rel=1e-4)
  assert float(out.loss.value) == pytest.approx(np.mean(classes) + .7 * np.mean(dense), rel=1e-4)


@pytest.mark.slow(reason='3 s: two programs')
def test_without_mixing_images_are_alone(params: Any) -> None:
  loss = jax.jit(task(mix=False).loss)
  whole = loss(params, {}, BATCH, jax.random.key(4), jnp.asarray(0))
  half = loss(params, {}, {k: v[:2] for k, v in BATCH.items()} | {'mask': jnp.array([1., 0.])}, jax.random.key(4),
              jnp.asarray(0))
  alone = loss(params, {}, {k: v[:1] for k, v in BATCH.items()}, jax.random.key(4), jnp.asarray(0))
  assert float(half.loss.value) == pytest.approx(float(alone.loss.value), rel=1e-5)
  assert float(whole.loss.weight) == 4


@pytest.mark.slow(reason='2 s: another program')
def test_a_row_whose_partner_is_padding_is_not_mixed(params: Any) -> None:
  batch = {k: v[:2] for k, v in BATCH.items()} | {'mask': jnp.array([1., 0.])}
  mixing, alone = (jax.jit(task(mix=mix).loss)(params, {}, batch, jax.random.key(4), jnp.asarray(0))
                   for mix in (True, False))
  assert float(mixing.loss.value) == pytest.approx(float(alone.loss.value), rel=1e-5)


@pytest.mark.slow(reason='1 s: another program; the loss with mixed tokens is above')
def test_the_box_is_that_of_cutmix_on_the_token_grid() -> None:
  kept = np.asarray(jax.vmap(lambda key: token_label.draw_kept(key, (6, 8)))(jax.random.split(jax.random.key(0), 500)))
  kept = kept.reshape(500, 6, 8)
  for one in kept:
    rows, columns = (1 - one).max(1), (1 - one).max(0)
    np.testing.assert_array_equal(1 - one, rows[:, None] * columns[None])  # a box
    for line in (rows, columns):
      inside = np.flatnonzero(line)
      assert not len(inside) or len(inside) == inside[-1] - inside[0] + 1
  assert .55 < kept.mean() < .85 and kept.min() == 0


def test_every_group_of_images_has_its_own_box(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(token_label, 'draw_kept', lambda key, grid: jax.random.uniform(key, (grid[0] * grid[1],)))
  kept = task(mix_group=2)._kept(jax.random.key(1), 8, (6, 8), None)
  assert kept is not None
  groups = np.asarray(kept).reshape(4, 2, 48)
  np.testing.assert_array_equal(groups[:, 0], groups[:, 1])
  assert len({group.tobytes() for group in groups[:, 0]}) == 4


def test_both_heads_speak_at_inference(params: Any) -> None:
  view = task().views()['student']
  out = jax.jit(view.predict)(view.select(params, {}), BATCH['image'])
  dense = np.asarray(out.features.tokens) @ np.asarray(params['aux']['kernel'])
  want = np.asarray(out.features.pooled) @ np.asarray(params['head']['kernel']) + .5 * dense.max(1)
  np.testing.assert_allclose(out.logits, want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow(reason='3 s; tests/models/test_stem.py has the statistics')
def test_running_statistics_of_a_stem_are_kept() -> None:
  model = schema.ViT(**{**vars(MODEL), 'stem': schema.ConvStem(width=8)})
  one = task(model)
  params, extra = jax.jit(one.init)(jax.random.key(0), BATCH)
  out = jax.jit(one.loss)(params, extra, BATCH, jax.random.key(1), jnp.asarray(0))
  after = one.after_update(params, extra, out.stats, jnp.asarray(0))
  changed = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), after['model_state'], extra['model_state'])
  assert min(jax.tree.leaves(changed)) > 0
  assert 'model_state' in after and 'stem' in one.views()['student'].select(params, after)['state']
