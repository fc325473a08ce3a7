"""Figures of an inspection: reconstructions in pixels and side by side, brightness of attention maps; any backend."""
from __future__ import annotations

import io
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from vit_jax.inspect import figures

MEAN, STD = (.4, .5, .6), (.2, .25, .3)


def test_predictions_become_pixels_and_stay_in_range() -> None:
  pixels = np.random.default_rng(0).integers(0, 256, (3, 6, 9, 3), np.uint8)
  units = (pixels / 255 - np.array(MEAN)) / np.array(STD)
  units[0, 0, 0] = [9., -9., 0.]
  hidden = np.zeros((3, 6, 9, 3))
  hidden[1, :3] = 1
  found = figures.reconstruct(units.astype(np.float32), hidden, mean=MEAN, std=STD)
  assert found.predicted[0, 0, 0].tolist() == [255, 0, 153]
  pixels[0, 0, 0] = found.predicted[0, 0, 0]
  np.testing.assert_array_equal(found.predicted, pixels)
  assert found.hidden.shape == (3, 6, 9) and found.hidden.sum() == 27 and found.hidden[1, :3].all()


def test_the_columns_are_input_masked_prediction_and_both() -> None:
  image, predicted = np.full((1, 4, 4, 3), 7, np.uint8), np.full((1, 4, 4, 3), 200, np.uint8)
  hidden = np.zeros((1, 4, 4), bool)
  hidden[:, :2] = True
  sheet = figures.reconstruction_sheet(image, figures.Reconstruction(predicted, hidden), ['one'])
  drawn = np.asarray(Image.open(io.BytesIO(sheet)).convert('RGB'))
  places = np.linspace(0, drawn.shape[1], 9).astype(int)[1::2]  # the middle of each column
  assert drawn[100, places].tolist() == [[v] * 3 for v in (7, 128, 200, 200)]  # of the upper half, which is hidden
  assert drawn[-20, places].tolist() == [[v] * 3 for v in (7, 7, 200, 7)]


def test_a_few_tokens_with_high_attention_do_not_hide_the_others() -> None:
  image = np.full((28, 28, 3), 200, np.uint8)
  heat = np.full((14, 14), .1)
  heat[5:8, 5:8], heat[0, 0], heat[0, -1] = .5, 50., 40.
  lit = figures.shade(image, heat)[..., 0]
  assert lit[12, 12] == 200 and lit[0, 0] == 200 and lit[20, 4] == 40
  once = np.zeros((14, 14))
  once[7, 7] = 1.
  assert figures.shade(image, once)[14, 14, 0] > 100 and figures.shade(image, np.zeros((14, 14))).max() == 0


@pytest.mark.slow(reason='3 s: a process that imports matplotlib')
def test_a_backend_that_is_not_installed_does_not_stop_a_figure() -> None:
  program = """if True:
      import os
      from vit_jax.inspect import figures
      assert b'PNG' in figures.panels({'': ('y', {})}, xlabel='x')[:4] and os.environ['MPLBACKEND'] == 'no-such-backend'
      """
  subprocess.run([sys.executable, '-c', program], check=True, env={**os.environ, 'MPLBACKEND': 'no-such-backend'})
