"""Networks with weights read from files compute what transformers and timm compute with them (`make_golden.py`)."""
from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights import drawn
from vit_jax.config import schema
from vit_jax.core.types import Outputs
from vit_jax.models.decoders import Decoder
from vit_jax.weights import files, inference, loading, saving
from vit_jax.weights.network import Weights

GOLDEN = np.load(pathlib.Path(__file__).with_name('golden.npz'))
NAMES = sorted({name.split('/')[0] for name in GOLDEN.files})
CONVOLUTIONAL = ('bit', 'efficientnet')
CLOSE = 1e-5  # features are of about unit size; two blocks, or four units of a ResNet, in f32 on both sides
COMPILED: dict[str, Callable[..., Outputs]] = {}


def about(name: str) -> dict[str, Any]:
  return json.loads(str(GOLDEN[f'{name}/about']))


def write(name: str, folder: pathlib.Path, *, as_saved: bool = False) -> pathlib.Path:
  """A file of the reference's weights, under the names of its classes, or those that it saves with."""
  known = about(name)
  tensors = {k: drawn.decoder_positions(4, shape[-1]) if 'decoder_pos_embed' in k else drawn.tensor(k, tuple(shape))
             for k, shape in known['shapes'].items()}
  if as_saved:
    joined = {k.replace('gate_proj', 'weights_in'): np.concatenate([x, tensors[k.replace('gate_proj', 'up_proj')]])
              for k, x in tensors.items() if '.gate_proj.' in k}
    tensors = {name: tensors[k] for k, name in known['saved_names'].items()} | joined
  if name.startswith('npz'):
    np.savez(folder / 'model.npz', **tensors)
    return folder / 'model.npz'
  path = folder / 'model.safetensors'
  files.write_safetensors(path, tensors)
  if known['config']:
    path.with_name('config.json').write_text(json.dumps(known['config']))
  return path


def load(name: str, folder: pathlib.Path, **more: Any) -> Weights:
  said = 'image=32' if name.endswith(CONVOLUTIONAL) else 'heads=4' if name.startswith('timm') else ''
  return loading.load(str(write(name, folder, **more)), model=said, preprocess='half')


def compute(found: Weights) -> dict[str, np.ndarray]:
  """What ours gives for the reference's images, under the reference's names."""
  image = jnp.asarray(drawn.image(found.preprocess.image_px[0]))
  network = repr((found.model, found.head, found.num_classes, found.preprocess.image_px))
  if network not in COMPILED:  # several files have the same network
    COMPILED[network] = jax.jit(inference.function(found))
  out = COMPILED[network](inference.parameters(found), image)
  return {'pooled': out.features.pooled, 'tokens': out.features.tokens, 'logits': out.logits}


SLOW = {'timm_efficientnet'}  # 16 blocks; `models/rivals/test_efficientnet.py` compares the network with NumPy


@pytest.mark.quick(
    'hf_vit', 'hf_dinov2', 'npz_vit', 'timm_map', 'timm_deit_distilled',
    reason='1 to 8 s: compiles a network')
@pytest.mark.parametrize('name', [pytest.param(name, marks=pytest.mark.slow(reason='8 s of CPU to compile B0'))
                                  if name in SLOW else name for name in NAMES])
def test_outputs_are_those_of_the_reference(name: str, tmp_path: pathlib.Path) -> None:
  found = load(name, tmp_path)
  ours = compute(found)
  for kind in ('logits', 'pooled', 'tokens'):
    if f'{name}/{kind}' in GOLDEN:
      np.testing.assert_allclose(ours[kind], GOLDEN[f'{name}/{kind}'], rtol=0, atol=CLOSE, err_msg=kind)


@pytest.mark.parametrize('name', [name for name in NAMES if name.startswith('hf')])
def test_both_layouts_of_names_of_transformers_give_the_same(name: str, tmp_path: pathlib.Path) -> None:
  for folder in ('a', 'b'):
    (tmp_path / folder).mkdir()
  one, two = load(name, tmp_path / 'a'), load(name, tmp_path / 'b', as_saved=True)
  assert set(about(name)['saved_names']) != set(about(name)['saved_names'].values())
  chex.assert_trees_all_equal(one.params, two.params)


def test_the_decoder_of_a_masked_autoencoder_reconstructs_what_the_reference_does(tmp_path: pathlib.Path) -> None:
  found = load('hf_mae', tmp_path)
  assert found.decoder and found.decoder.decoder_heads == 2
  decoder = Decoder(found.decoder.decoder_width, found.decoder.decoder_depth, found.decoder.decoder_heads, found.model)
  places = jnp.broadcast_to(jnp.arange(16)[None], (2, 16))
  tokens, cls = GOLDEN['hf_mae/tokens'], GOLDEN['hf_mae/pooled']
  ours = jax.jit(lambda p: decoder.apply(p['decoder'], p['mask_token'], jnp.asarray(tokens), jnp.asarray(cls),
                                         places=places, grid=(4, 4)))(found.params)
  np.testing.assert_allclose(ours, GOLDEN['hf_mae/patches'], rtol=0, atol=CLOSE)


def test_convolutions_in_timms_format_have_its_epsilons_and_keep_them(tmp_path: pathlib.Path) -> None:
  """On small networks of drawn weights they hardly matter; on published hybrids they are up to 7e-4 of the logits."""
  found = load('timm_hybrid', tmp_path).model
  assert isinstance(found, schema.ViT) and isinstance(found.stem, schema.ResNetStem)
  assert (found.stem.std_eps, found.stem.var_eps, found.stem.norm_eps) == (0., 1e-8, 1e-5)
  own = load('npz_hybrid', tmp_path).model
  assert isinstance(own, schema.ViT) and own.stem == schema.ResNetStem(found.stem.layers, found.stem.width)
  saving.save(load('npz_hybrid', tmp_path), str(tmp_path / 'x.safetensors'))  # raises if a setting changes
  saving.save(load('timm_bit', tmp_path), str(tmp_path / 'bit.npz'))
  bit = loading.load(str(tmp_path / 'bit.npz')).model
  assert isinstance(bit, schema.ResNet) and bit.var_eps == 1e-8
  assert load('npz_bit', tmp_path).model == dataclasses.replace(bit, var_eps=1e-10)
