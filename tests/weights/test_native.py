"""Weights for images at their own aspect, against transformers 5.23 and timm 1.0.31 (`make_golden_native.py`)."""
from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from vit_jax.config.schema import PositionResize
from vit_jax.core.errors import UserError
from vit_jax.core.types import NativeImages
from vit_jax.weights import inference, loading
from vit_jax.weights.network import Weights

GOLDEN = pathlib.Path(__file__).with_name('golden_native.npz')
CONFIG = {'model_type': 'siglip2_vision_model', 'hidden_size': 16, 'intermediate_size': 32, 'num_hidden_layers': 2,
          'num_attention_heads': 2, 'num_patches': 16, 'patch_size': 4}


def test_siglip2_naflex_computes_what_transformers_does_for_images_of_several_grids(tmp_path: pathlib.Path) -> None:
  golden = np.load(GOLDEN)
  tensors = {name.removeprefix('weights/'): golden[name] for name in golden.files if name.startswith('weights/')}
  safetensors.numpy.save_file(tensors, tmp_path / 'model.safetensors')
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG))
  found = loading.load(str(tmp_path))
  images = NativeImages(jnp.asarray(golden['patches']), jnp.asarray(golden['grid']))
  features, _ = inference.backbone(found).apply(found.params['backbone'], {}, images, train=False, key=None)
  np.testing.assert_allclose(features.pooled, golden['pooled'], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(('name', 'model', 'side'), [
    ('gap', 'heads=2', 4), ('par', 'heads=2,position_resize=bicubic_antialias_square', 4), ('siglip', 'heads=2', 4)])
def test_naflexvits_compute_what_timm_does_for_images_of_several_grids(
    name: str, model: str, side: int, tmp_path: pathlib.Path) -> None:
  found = of_timm(name, model, tmp_path / 'model.safetensors')
  assert found.model.patch == side
  golden = np.load(GOLDEN)
  images = NativeImages(jnp.asarray(golden['patches']), jnp.asarray(golden['grid']))
  logits = inference.function(found)(inference.parameters(found), images).logits
  np.testing.assert_allclose(logits, golden[f'{name}/logits'], rtol=1e-5, atol=1e-5)


def test_names_say_how_positions_keep_the_aspect_and_factorized_ones_are_refused(tmp_path: pathlib.Path) -> None:
  named = of_timm('par', 'heads=2', tmp_path / 'naflexvit_base_patch16_par_gap.safetensors')
  other = of_timm('gap', 'heads=2', tmp_path / 'naflexvit_base_patch16_gap.safetensors')
  assert named.model.positions.resize is PositionResize.BICUBIC_ANTIALIAS_SQUARE
  assert other.model.positions.resize is PositionResize.BICUBIC_ANTIALIAS
  unnamed = of_timm('par', 'heads=2', tmp_path / 'model.safetensors')
  for found, is_guess in ((named, False), (other, False), (unnamed, True)):
    assert any('bicubic_antialias_square' in line for line in found.report.warnings) == is_guess
  with pytest.raises(UserError, match='factorized positions'):
    of_timm('gap', 'heads=2', tmp_path / 'model.safetensors', {'embeds.pos_embed_y': np.zeros((1, 4, 16), np.float32)})


def of_timm(name: str, model: str, path: pathlib.Path, more: dict[str, np.ndarray] | None = None) -> Weights:
  """Returns the loaded weights of a network of timm, with further tensors in its file."""
  golden, prefix = np.load(GOLDEN), f'{name}/weights/'
  tensors = {one.removeprefix(prefix): golden[one] for one in golden.files if one.startswith(prefix)}
  safetensors.numpy.save_file(tensors | (more or {}), path)
  return loading.load(str(path), model=model)
