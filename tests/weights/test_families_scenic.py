"""Files of TIPS with the names of scenic are read as what their authors' JAX program computes, and as the network that
the same weights are under the names of transformers and timm (`make_golden_tips.py`, `make_golden_families.py`).
"""
from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import chex
import jax
import numpy as np
import pytest

from tests.weights import drawn
from tests.weights import make_golden_families as families
from tests.weights import make_golden_tips as golden
from tests.weights import test_golden_families as measured
from vit_jax.config.schema import Gelu, Interpolation, PositionResize, checks
from vit_jax.core.errors import UserError
from vit_jax.weights import files, inference, loading, saving
from vit_jax.weights.network import Weights

FOUND = np.load(pathlib.Path(__file__).with_name('golden_tips.npz'))
Tensors = dict[str, np.ndarray]
_TOKENS = 'encoder/ToTokenSequence_0'


def tensors(name: str) -> Tensors:
  """The drawn weights of a network of `golden.NETWORKS`."""
  return golden.tensors(json.loads(str(FOUND[f'{name}/shapes'])))


def write(folder: pathlib.Path, own: Tensors) -> str:
  folder.mkdir(exist_ok=True)
  files.write_npz(folder / 'tips_v2_b14_vision.npz', own)
  return str(folder / 'tips_v2_b14_vision.npz')


def as_scenic(state: Tensors, heads: int = 2) -> Tensors:
  """A network with timm's names under those of scenic, with the layer scale folded into the matrices."""
  width, side = state['cls_token'].shape[-1], round(state['pos_embed'].shape[1] ** .5)
  found = {f'{_TOKENS}/cls': np.concatenate([state['cls_token'], state['reg_token']], axis=1),
           f'{_TOKENS}/posembed_input': state['pos_embed'].reshape(1, side, side, width),
           f'{_TOKENS}/embedding/kernel': state['patch_embed.proj.weight'].transpose(2, 3, 1, 0),
           f'{_TOKENS}/embedding/bias': state['patch_embed.proj.bias'],
           'encoder/encoder_norm/scale': state['norm.weight'], 'encoder/encoder_norm/bias': state['norm.bias']}
  for i in range(2):
    theirs, ours = f'blocks.{i}', f'encoder/transformer/encoderblock_{i}'
    attention, is_gated = f'{ours}/MultiHeadDotProductAttention_0', (
        state[f'{theirs}.mlp.fc1.weight'].shape[0] == 2 * state[f'{theirs}.mlp.fc2.weight'].shape[1])
    for n in (1, 2):
      found |= {f'{ours}/LayerNorm_{n - 1}/scale': state[f'{theirs}.norm{n}.weight'],
                f'{ours}/LayerNorm_{n - 1}/bias': state[f'{theirs}.norm{n}.bias']}
    for k, part in enumerate(('query', 'key', 'value')):
      rows = slice(k * width, (k + 1) * width)
      found |= {f'{attention}/{part}/kernel': state[f'{theirs}.attn.qkv.weight'][rows].T.reshape(width, heads, -1),
                f'{attention}/{part}/bias': state[f'{theirs}.attn.qkv.bias'][rows].reshape(heads, -1)}
    one, two = (state[f'{theirs}.ls{n}.gamma'] for n in (1, 2))
    mlp = f'{ours}/FFNSwiGluFused_0' if is_gated else f'{ours}/MlpBlock_0'
    up = [np.split(state[f'{theirs}.mlp.fc1.{leaf}'], 2 if is_gated else 1) for leaf in ('weight', 'bias')]
    for k, (kernel, bias) in enumerate(zip(*up, strict=True)):
      found |= {f'{mlp}/Dense_{k}/kernel': kernel.T, f'{mlp}/Dense_{k}/bias': bias}
    last = f'{mlp}/Dense_{len(up[0])}'
    found |= {f'{attention}/out/kernel': (state[f'{theirs}.attn.proj.weight'].T * one).reshape(heads, -1, width),
              f'{attention}/out/bias': state[f'{theirs}.attn.proj.bias'] * one,
              f'{last}/kernel': state[f'{theirs}.mlp.fc2.weight'].T * two,
              f'{last}/bias': state[f'{theirs}.mlp.fc2.bias'] * two}
  return found


def of_timm(name: str) -> Tensors:
  return families.tensors(measured.about(name)['shapes'])


def of_transformers() -> Tensors:
  """The network of transformers, under timm's names."""
  own = families.tensors(measured.about('hf_tipsv2')['shapes'])
  rules = ((r'^embeddings\.patch_embeddings\.projection\.', 'patch_embed.proj.'),
           (r'^embeddings\.cls_token', 'cls_token'),
           (r'^embeddings\.register_tokens', 'reg_token'), (r'^embeddings\.position_embeddings', 'pos_embed'),
           (r'^layernorm\.', 'norm.'), (r'^encoder\.layer\.|^layers\.', 'blocks.'),
           (r'\.layer_scale(\d)\.lambda1', r'.ls\1.gamma'), (r'\.attention\.o_proj\.', '.attn.proj.'),
           (r'\.attention\.output\.dense\.', '.attn.proj.'), (r'\.attention\.attention\.query\.', '.attention.q_proj.'),
           (r'\.attention\.attention\.key\.', '.attention.k_proj.'),
           (r'\.attention\.attention\.value\.', '.attention.v_proj.'))
  found: Tensors = {}
  for name, x in own.items():
    for pattern, new in rules:
      name = re.sub(pattern, new, name)
    found[name] = x
  first, found['pos_embed'] = np.split(found['pos_embed'], [1], axis=1)
  found['cls_token'] = found['cls_token'] + first  # the JAX program has no position for its class tokens
  for i in range(2):
    for leaf in ('weight', 'bias'):
      found[f'blocks.{i}.attn.qkv.{leaf}'] = np.concatenate(
          [found[f'blocks.{i}.attention.{letter}_proj.{leaf}'] for letter in 'qkv'])
  return found


def load(name: str, folder: pathlib.Path) -> Weights:
  return loading.load(write(folder, tensors(name)))


def difference(found: Weights, name: str, size: tuple[int, int]) -> float:
  """The largest difference from the authors' program, of the first class token and the patch tokens."""
  out = jax.jit(inference.function(found))(inference.parameters(found), drawn.image(48, 1)[:, :size[0], :size[1]])
  cls, tokens = (FOUND[f'{name}/{size[0]}x{size[1]}/{kind}'] for kind in ('cls', 'tokens'))
  assert out.features.tokens.shape == tokens.shape
  return float(max(np.abs(out.features.pooled - cls[:, 0]).max(), np.abs(out.features.tokens - tokens).max()))


@pytest.mark.parametrize('name', golden.NETWORKS)
def test_outputs_are_those_of_the_jax_program_of_the_authors(name: str, tmp_path: pathlib.Path) -> None:
  found = load(name, tmp_path)
  for size in golden.SIZES[:1] if name == 'swiglu' else golden.SIZES:
    assert difference(found, name, size) < measured.CLOSE, size


def test_a_folded_layer_scale_computes_what_transformers_does_with_it(tmp_path: pathlib.Path) -> None:
  """Two class tokens here are the class token and the register there."""
  where = write(tmp_path, as_scenic(of_transformers()))
  found = loading.load(where, model='gelu=exact')
  assert measured.difference(found, 'hf_tipsv2', families.SIZES[0]) < measured.CLOSE


@pytest.mark.parametrize('name', ['timm_tipsv2', 'timm_tipsv2_giant'])
def test_a_file_of_scenic_is_the_same_network_to_the_bit_as_one_of_pytorch(name: str, tmp_path: pathlib.Path) -> None:
  state = {k: np.ones_like(x) if k.endswith('.gamma') else x for k, x in of_timm(name).items()}
  files.write_safetensors(tmp_path / 'vit_base_patch14_reg1_tipsv2.webli.safetensors', state)
  one = loading.load(write(tmp_path / 'scenic', as_scenic(state)))
  two = loading.load(str(tmp_path / 'vit_base_patch14_reg1_tipsv2.webli.safetensors'), model='heads=2')
  scales = [two.params['backbone']['blocks'].pop(f'scale{n}') for n in (1, 2)]
  assert all((x == 1.).all() for x in scales)
  assert one.model == checks.replaced(two.model, {'block.layer_scale': 0., 'gelu': Gelu.TANH})
  assert one.model.registers == 1
  chex.assert_trees_all_equal(one.params, two.params)


def test_images_and_positions_are_prepared_as_the_authors_do_it(tmp_path: pathlib.Path) -> None:
  own = tensors('mlp')
  own[f'{_TOKENS}/posembed_input'] = own[f'{_TOKENS}/posembed_input'][:, :3]
  found = loading.load(write(tmp_path, own))
  p = found.preprocess
  assert (p.mean, p.std, p.resize_px, p.interpolation) == ((0.,) * 3, (1.,) * 3, 0, Interpolation.BILINEAR)
  assert p.antialias and p.image_px == (24, 32)
  assert found.family == 'tips' and found.model.positions.resize is PositionResize.BILINEAR_ANTIALIAS
  assert found.model.gelu is Gelu.TANH and found.model.norm.eps == 1e-6
  assert 'the second class token is a register here' in found.report.text()


def test_a_file_of_scenic_is_written_with_other_names_without_a_differing_bit(tmp_path: pathlib.Path) -> None:
  found = load('mlp', tmp_path)
  path, _ = saving.save(found, str(tmp_path / 'x.safetensors'))  # raises if a bit differs when read back
  assert 'reg_token' in files.read(path) and loading.load(str(path)).model == found.model


def change(**changed: Any) -> Tensors:
  new = {**tensors('mlp'), **changed['new']}
  return {name: x for name, x in new.items() if x is not None}


@pytest.mark.parametrize(('new', 'said'), [
    ({'encoder/encoder_norm/bias': None}, 'backbone/norm/bias'),
    ({'encoder/transformer/encoderblock_1/LayerNorm_0/bias': None}, 'backbone/blocks/norm1/bias: there is nothing for '
                                                                   'layers 1 of 2'),
    ({f'{_TOKENS}/cls': None}, f'{_TOKENS}/cls: expected an array [1, 2, any], got none'),
    ({f'{_TOKENS}/posembed_input': None}, f'{_TOKENS}/posembed_input: expected an array [1, any, any, any], got none'),
    ({'encoder/transformer/encoderblock_0/gamma': np.ones(32, np.float32)},
     '1 tensors have no place in this network:\n  encoder/transformer/encoderblock_0/gamma'),
    ({f'{_TOKENS}/cls': np.ones((1, 1, 32), np.float32)}, 'expected an array [1, 2, any], got [1, 1, 32]'),
    ({f'{_TOKENS}/posembed_input': np.ones((1, 16, 32), np.float32)}, 'got [1, 16, 32]')])
def test_missing_extra_and_misshapen_tensors_are_named(new: dict[str, np.ndarray | None], said: str,
                                                       tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=re.escape(said)):
    loading.load(write(tmp_path, change(new=new)))
