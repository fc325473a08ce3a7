"""Weights of SigLIP 2 NaFlex on images at their own aspect, against transformers 5.23 (`make_golden_native.py`)."""
from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from vit_jax.core.types import NativeImages
from vit_jax.weights import inference, loading

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
