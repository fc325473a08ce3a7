"""Scores at the pixels of masks, against an interpolation of whole images, and the confusion, against plain loops."""
from __future__ import annotations

import jax.image
import numpy as np
import pytest

from vit_jax.evaluate import pixels

RNG = np.random.default_rng(0)


def predicted(scores: np.ndarray, mask: tuple[int, int], size: tuple[int, int], window: tuple[int, int],
              stride: int) -> np.ndarray:
  rows, columns = (pixels.spans(mask[i], size[i], window[i], stride, scores.shape[i + 1]) for i in (0, 1))
  return pixels.upsample(scores, rows, columns, mask)


@pytest.mark.parametrize('mask', [(40, 60), (17, 23), (4, 6)])
def test_one_window_is_the_interpolation_of_the_whole_image(mask: tuple[int, int]) -> None:
  scores = RNG.normal(size=(1, 4, 6, 3)).astype(np.float32)
  want = jax.image.resize(scores[0], (*mask, 3), 'bilinear', antialias=False).argmax(-1)
  found = predicted(scores, mask, (32, 48), (32, 48), 16)
  assert (found != want).mean() <= .001  # but for scores that are equal up to rounding
  np.testing.assert_array_equal(found, predicted(scores, mask, (32, 48), (32, 48), 1))


def test_windows_begin_at_the_stride_and_end_at_the_border() -> None:
  assert pixels.starts(32, 32, 7) == [0]
  assert pixels.starts(33, 32, 7) == [0, 1]
  assert pixels.starts(64, 32, 32) == [0, 32] and pixels.starts(70, 32, 16) == [0, 16, 32, 38]


def test_overlapping_windows_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
  scores = RNG.normal(size=(6, 4, 4, 5)).astype(np.float32)  # 2 x 3 windows of 16 px over 20 x 30 px
  total, covered = np.zeros((20, 30, 5)), np.zeros((20, 30, 1))
  for number, (top, left) in enumerate((t, c) for t in (0, 4) for c in (0, 8, 14)):
    total[top:top + 16, left:left + 16] += jax.image.resize(scores[number], (16, 16, 5), 'bilinear', antialias=False)
    covered[top:top + 16, left:left + 16] += 1
  assert covered.min() == 1 and covered.max() == 6
  want = (total / covered).argmax(-1)
  np.testing.assert_array_equal(predicted(scores, (20, 30), (20, 30), (16, 16), 8), want)
  monkeypatch.setattr(pixels, '_BLOCK_ELEMENTS', 3 * 30 * 5)  # three rows at a time
  np.testing.assert_array_equal(predicted(scores, (20, 30), (20, 30), (16, 16), 8), want)


@pytest.mark.parametrize('mask', [(7, 200), (133, 11)])
def test_every_pixel_is_inside_a_window(mask: tuple[int, int]) -> None:
  rows, columns = (pixels.spans(mask[i], size, 16, 9, 2) for i, size in enumerate((40, 21)))
  for spans, size in ((rows, mask[0]), (columns, mask[1])):
    assert set().union(*(range(s.start, s.stop) for s in spans)) == set(range(size))
    np.testing.assert_allclose(np.concatenate([s.weights.sum(1) for s in spans]), 1, rtol=1e-6)


def test_every_counted_pixel_is_in_one_cell() -> None:
  true, predicted = RNG.integers(-1, 5, (13, 17)), RNG.integers(0, 5, (13, 17))
  want = np.zeros((5, 5), int)
  for t, p in zip(true.ravel(), predicted.ravel(), strict=True):
    if t >= 0:
      want[t, p] += 1
  np.testing.assert_array_equal(pixels.count(true, predicted, 5), want)
  assert want.sum() == (true >= 0).sum()


def test_scores_are_those_of_sets_of_pixels() -> None:
  true, predicted = RNG.integers(0, 4, 500), RNG.integers(0, 4, 500)
  found = pixels.scores(pixels.count(true, predicted, 6))  # two classes have no pixels
  want = [((true == c) & (predicted == c)).sum() / ((true == c) | (predicted == c)).sum() for c in range(4)]
  np.testing.assert_allclose(found.iou[:4], want, rtol=1e-12)
  assert np.isnan(found.iou[4:]).all()
  assert found.miou == pytest.approx(np.mean(want)) and found.accuracy == pytest.approx((true == predicted).mean())


def test_a_class_that_is_only_predicted_counts_with_zero() -> None:
  assert pixels.scores(np.array([[3, 1], [0, 0]])).miou == pytest.approx(3 / 8)
  np.testing.assert_array_equal(pixels.total(np.eye(2, dtype=np.int64)), np.eye(2))
