"""Files of torchvision's ViTs compute what torchvision computes with them (`make_golden_torchvision.py`)."""
from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest

import vit_jax
from tests.weights import drawn
from vit_jax.weights import files, inference, preprocess, published, recognize

FOUND = np.load(pathlib.Path(__file__).with_name('golden_torchvision.npz'))


def tensors(name: str) -> dict[str, np.ndarray]:
  shapes = json.loads(str(FOUND[f'{name}/shapes']))
  return {key: np.asarray(drawn.tensor(key, tuple(shape))) for key, shape in shapes.items()}


@pytest.mark.parametrize(('name', 'prefix'), [('plain', ''), ('plain', 'module.'), ('hidden', '')])
def test_outputs_are_those_of_torchvision(name: str, prefix: str, tmp_path: pathlib.Path) -> None:
  old = (('.mlp.0.', '.mlp.linear_1.'), ('.mlp.3.', '.mlp.linear_2.'))[:2 * bool(prefix)]  # before torchvision 0.13
  found = {}
  for key, x in tensors(name).items():
    for new, before in old:
      key = key.replace(new, before)
    found[prefix + key] = x
  files.write_torch(tmp_path / 'vit_b_16.pth', found)
  model = vit_jax.load(tmp_path / 'vit_b_16.pth', model='heads=2')
  assert model.weights.family == 'torchvision' and model.weights.preprocess.mean == (.485, .456, .406)
  found_now = jax.jit(inference.function(model.weights))(inference.parameters(model.weights), drawn.image(16, 1))
  wanted = FOUND[f'{name}/logits']
  np.testing.assert_allclose(found_now.logits, wanted, atol=1e-5)  # sums of up to 24 terms of unit size in f32


@pytest.mark.parametrize(('name', 'side', 'resize'), [
    ('vit_b_16-c867db91.pth', 224, 256), ('vit_l_16-852ce7e3.pth', 224, 242), ('vit_b_16_swag-9ac1b537.pth', 384, 384),
    ('vit_h_14_lc_swag-c1eb923e.pth', 224, 224)])
def test_published_names_have_the_preprocessing_of_torchvision(name: str, side: int, resize: int) -> None:
  found, warnings = preprocess.decide(published.find([name]).rules, usual=recognize.usual('torchvision'), own_px=None)
  assert (found.image_px, found.resize_px, warnings) == ((side, side), resize, ())
