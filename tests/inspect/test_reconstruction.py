"""What a masked autoencoder paints: units, what is hidden, and the pictures side by side."""
from __future__ import annotations

import io

import numpy as np
from PIL import Image

from vit_jax.inspect import reconstruction

MEAN, STD = (.4, .5, .6), (.2, .25, .3)


def test_predictions_become_pixels_and_stay_in_range() -> None:
  pixels = np.random.default_rng(0).integers(0, 256, (3, 6, 9, 3), np.uint8)
  units = (pixels / 255 - np.array(MEAN)) / np.array(STD)
  units[0, 0, 0] = [9., -9., 0.]
  hidden = np.zeros((3, 6, 9, 3))
  hidden[1, :3] = 1
  painted = reconstruction.paint(units.astype(np.float32), hidden, mean=MEAN, std=STD)
  assert painted.predicted[0, 0, 0].tolist() == [255, 0, 153]
  pixels[0, 0, 0] = painted.predicted[0, 0, 0]
  np.testing.assert_array_equal(painted.predicted, pixels)
  assert painted.hidden.shape == (3, 6, 9) and painted.hidden.sum() == 27 and painted.hidden[1, :3].all()


def test_the_columns_are_input_masked_prediction_and_both() -> None:
  image, predicted = np.full((4, 4, 3), 7, np.uint8), np.full((4, 4, 3), 200, np.uint8)
  hidden = np.zeros((4, 4), bool)
  hidden[:2] = True
  found = reconstruction.columns(image, predicted, hidden)
  assert [x[0, 0, 0] for x in found] == [7, 128, 200, 200] and [x[3, 3, 2] for x in found] == [7, 7, 200, 7]
  assert len(found) == len(reconstruction.COLUMNS) and all(x.dtype == np.uint8 for x in found)
  painted = reconstruction.Painted(predicted[None], hidden[None])
  drawn = np.asarray(Image.open(io.BytesIO(reconstruction.sheet(image[None], painted, ['one']))).convert('RGB'))
  colors = {tuple(color) for color in drawn.reshape(-1, 3).tolist()}
  assert {(7, 7, 7), (128, 128, 128), (200, 200, 200)} <= colors
