"""Random erasing against NumPy."""
from __future__ import annotations

import jax
import numpy as np

from vit_jax.config.schema import Erase
from vit_jax.data.device import prepare

SHAPE = (4000, 37, 29, 3)


def erase(image: np.ndarray, key: int, settings: Erase) -> np.ndarray:
  one = jax.jit(lambda image: prepare.erase({'image': image}, jax.random.key(key), settings=settings)['image'])
  return np.asarray(one(image))


def test_rectangles_have_the_areas_and_aspects_asked_for_and_lie_inside() -> None:
  boxes = np.asarray(jax.jit(lambda: prepare.draw_boxes(jax.random.key(0), SHAPE, settings=Erase(1.)))())
  top, left, tall, wide = boxes.T
  assert (tall > 0).all() and (tall < 37).all() and (wide < 29).all()
  assert (top >= 0).all() and (left >= 0).all() and (top + tall <= 37).all() and (left + wide <= 29).all()
  areas, aspects = tall * wide / (37 * 29), tall / wide
  assert .01 < areas.min() < .03 and .3 < areas.max() < .36  # sides are whole pixels
  assert abs(np.mean(areas) - (.02 + 1 / 3) / 2) < .02  # a little less: large flat ones do not fit
  assert .2 < aspects.min() < .4 and 2.5 < aspects.max() < 5
  assert abs(np.log(aspects).mean()) < .25
  assert top.min() == 0 and (top + tall).max() == 37 and (left + wide).max() == 29


def test_only_chosen_rows_change_and_only_inside_one_rectangle() -> None:
  out = erase(np.full((200, 37, 29, 3), 9., np.float32), 1, Erase(.25))
  hidden = (out != 9.).any(-1)
  rows = hidden.any((1, 2))
  assert abs(rows.mean() - .25) < .1
  for one in hidden[rows]:
    ys, xs = np.where(one)
    assert one[ys.min():ys.max() + 1, xs.min():xs.max() + 1].all()
  noise = out[hidden]
  assert abs(noise.mean()) < .02 and abs(noise.std() - 1) < .02
  assert len(np.unique(noise)) > .99 * noise.size  # new for each value


def test_what_cannot_fit_stays() -> None:
  wide = Erase(1., area=(.9, 1.), aspect=(3., 3.))
  image = np.ones((6, 8, 8, 3), np.float32)
  np.testing.assert_array_equal(erase(image, 0, wide), image)


def test_inside_is_the_rectangle() -> None:
  expected = np.zeros((2, 5, 7), bool)
  expected[0, 1:4, 2:7] = True
  inside = jax.jit(lambda boxes: prepare.inside(boxes, (5, 7)))
  np.testing.assert_array_equal(inside(np.array([[1, 2, 3, 5], [0, 0, 0, 0]])), expected)
