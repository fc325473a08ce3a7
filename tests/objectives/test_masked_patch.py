"""Masked patch prediction: what is corrupted and how, the colors, and the loss of each variant."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

from vit_jax.config import schema
from vit_jax.config.schema import PatchTarget
from vit_jax.models.vit import vit
from vit_jax.objectives import masked_patch, patches
from vit_jax.objectives.networks import Normalization

MODEL = schema.ViT(patch=4, width=16, depth=1, heads=2, mlp=schema.Mlp(16))
MEAN, STD = (.5, .4, .3), (.2, .25, .3)


def task(target: PatchTarget = PatchTarget.COLOR, **settings: float) -> masked_patch.MaskedPatch:
  return masked_patch.MaskedPatch(vit.build(MODEL, (12, 12)), schema.MaskedPatch(target, **settings),
                                  Normalization(MEAN, STD), patch=4)


@pytest.mark.slow(reason='1 s: another program')
def test_half_is_corrupted_by_mask_other_patch_or_not_at_all() -> None:
  tokens = jnp.arange(1., 4000 * 9 + 1).reshape(4000, 9, 1)
  mixed, choice = task().corrupt(tokens, jnp.zeros((1, 1, 1)), jax.random.key(0))
  mixed, before = np.asarray(mixed)[..., 0], np.asarray(tokens)[..., 0]
  chosen = np.asarray(choice.rank) < 5  # of 9, 4 are left
  assert chosen.sum() == 4000 * 5 and (mixed[~chosen] == before[~chosen]).all()
  share = [(chosen & is_so).sum() / chosen.sum() for is_so in (
      mixed == 0, (mixed != 0) & (mixed != before), mixed == before)]
  np.testing.assert_allclose(share, [.8, .1, .1], atol=5 * np.sqrt(.16 / 20_000))
  swapped = chosen & (mixed != 0) & (mixed != before)
  assert ((mixed - 1)[swapped] // 9 == (before - 1)[swapped] // 9).all()  # from the same image
  away = (mixed - before)[swapped] % 9
  assert set(away) == set(range(1, 9))


def test_chosen_patches_are_masked_or_become_another_one_and_never_themselves() -> None:
  tokens = jnp.arange(1., 20 * 9 + 1).reshape(20, 9, 1)
  corrupt = task(mask_token_prob=.5, random_patch_prob=.5).corrupt
  mixed, choice = corrupt(tokens, jnp.zeros((1, 1, 1)), jax.random.key(0))
  mixed, before, chosen = np.asarray(mixed), np.asarray(tokens), np.asarray(choice.rank)[..., None] < 5
  assert ((mixed != before) == chosen).all() and chosen.sum() == 100 and 30 < (mixed == 0).sum() < 70  # 4 deviations


def test_colors_are_three_bits_a_channel() -> None:
  colors = jnp.array([[0., 0., 0.], [1., 1., 1.], [.124, .126, .5], [.999, 0., .25], [-.1, 1.2, .374]])
  want = [0, 511, 0 * 64 + 1 * 8 + 4, 7 * 64 + 2, 7 * 8 + 2]
  assert masked_patch.color_classes(colors).tolist() == want


def numpy_classes(image: np.ndarray, cells: int) -> np.ndarray:
  """`[B, 9, cells^2]` of a normalized image, from means in float64."""
  pixels, side = image.astype(np.float64) * STD + MEAN, 4 // cells
  found = np.zeros((len(image), 9, cells * cells), int)
  for b, i, g in np.ndindex(*found.shape):
    y, x = 4 * (i // 3) + side * (g // cells), 4 * (i % 3) + side * (g % cells)
    r, g_, b_ = np.clip(np.floor(pixels[b, y:y + side, x:x + side].mean((0, 1)) * 8), 0, 7)
    found[b, i, g] = 64 * r + 8 * g_ + b_
  return found


@pytest.mark.quick('PatchTarget.PIXELS', reason='2 s: another program')
@pytest.mark.parametrize('target', PatchTarget)
def test_the_loss_is_that_of_numpy(target: PatchTarget) -> None:
  one, key = task(target), jax.random.key(5)
  image = jax.random.uniform(jax.random.key(1), (3, 12, 12, 3), minval=-2., maxval=2.)
  batch = {'image': image, 'mask': jnp.array([1., 1., 0.])}
  params, extra = map(programs.draw, jax.eval_shape(one.init, jax.random.key(0), batch))
  out = jax.jit(one.loss)(params, extra, batch, key, jnp.asarray(0))
  corrupt_key, _ = jax.random.split(key)

  @jax.jit
  def predict() -> tuple[jax.Array, patches.Choice]:
    net, backbone = vit.build(MODEL, (12, 12)), params['backbone']
    tokens, choice = one.corrupt(net.embed(backbone, image), params['mask_token'], corrupt_key)
    tokens = net.encode(backbone, tokens, net.positions(backbone, (3, 3)), grid=(3, 3), train=False, key=None).tokens
    return tokens @ params['decoder']['kernel'] + params['decoder']['bias'][None, None], choice

  predicted, choice = predict()
  predicted, losses = np.asarray(predicted, np.float64), []
  for b in (0, 1):
    for i in np.asarray(choice.chosen[b]):
      if target is PatchTarget.PIXELS:
        y, x = 4 * (i // 3), 4 * (i % 3)
        losses.append(((predicted[b, i] - np.asarray(image)[b, y:y + 4, x:x + 4].ravel()) ** 2).mean())
        continue
      cells = 4 if target is PatchTarget.COLORS else 1
      logits = predicted[b, i].reshape(cells * cells, 512)
      log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
      wanted = numpy_classes(np.asarray(image), cells)[b, i]
      losses.append(-log_p[np.arange(cells * cells), wanted].mean())
  assert len(losses) == 10 and float(out.loss.weight) == 2
  assert float(out.loss.value) == pytest.approx(np.mean(losses), rel=1e-5)
  assert set(out.metrics) == (set() if target is PatchTarget.PIXELS else {'accuracy'}) and extra == {}
