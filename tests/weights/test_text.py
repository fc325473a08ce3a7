"""Text towers of files of all programs: what transformers computes, and refusals."""
from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable

import chex
import jax
import numpy as np
import pytest

from tests.weights import text_models
from vit_jax.config.schema import Gelu
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.weights import files, loading, text
from vit_jax.weights.text import TextWeights

Tensors = dict[str, np.ndarray]
TOLERANCE = {'rtol': 1e-5, 'atol': 1e-5}  # f32 sums of up to 48 products in each of two blocks: 1e-6 as seen in torch


def loaded(folder: str) -> TextWeights:
  return text.load(folder, image=loading.load(folder))


def vectors(found: TextWeights, family: str) -> np.ndarray:
  ids = text_models.golden()[f'{family}/ids'].astype(np.int32)
  return np.asarray(jax.jit(found.tower.apply)(found.params, ids, ids > 0))


@pytest.mark.parametrize('family', text_models.FAMILIES)
def test_vectors_of_texts_are_those_of_transformers(family: str, tmp_path: pathlib.Path) -> None:
  found = loaded(text_models.write(family, tmp_path))
  np.testing.assert_allclose(vectors(found, family), text_models.golden()[f'{family}/text'], **TOLERANCE)
  assert found.is_sigmoid == (family in ('siglip', 'siglip2', 'naflex'))
  assert found.scale == pytest.approx(10. if family == 'tips' else np.exp(2.3), rel=1e-6)
  assert found.bias == (-3.5 if found.is_sigmoid else 0.)


@pytest.mark.parametrize('family', text_models.FAMILIES)
def test_both_readers_together_account_for_every_tensor_once(family: str, tmp_path: pathlib.Path) -> None:
  folder = text_models.write(family, tmp_path)
  image = loading.load(folder)
  own = text.recognize(text_models.tensors(family))
  scalars = {'logit_scale', 'logit_bias', 'temperature'} & text_models.tensors(family).keys()
  of_text = {line.name for line in image.report.lines if line.rule == 'of the text tower'}
  assert of_text == own.tensors.keys() | scalars
  params = jax.eval_shape(loaded(folder).tower.init, jax.random.key(0))
  assert trees.num_elements(params) == sum(x.size for x in own.tensors.values())


# The same weights under the names of other programs.

def as_openai(tensors: Tensors, prefix: str = '') -> Tensors:
  """The text tower of transformers' CLIP or SigLIP under the names of OpenAI and open_clip."""
  found: Tensors = {}
  for name, x in tensors.items():
    if name.startswith('vision_model') or name == 'visual_projection.weight':
      continue
    for old, new in (('text_model.', ''), ('embeddings.token_embedding', 'token_embedding'),
                     ('embeddings.position_embedding.weight', 'positional_embedding'),
                     ('encoder.layers.', 'transformer.resblocks.'), ('layer_norm', 'ln_'),
                     ('final_ln_', 'ln_final'), ('mlp.fc1', 'mlp.c_fc'), ('mlp.fc2', 'mlp.c_proj'),
                     ('self_attn.', 'attn.'), ('head.', 'text_projection.')):
      name = name.replace(old, new)
    found[name] = x
  for key in [name for name in found if '.q_proj.' in name]:
    parts = [found.pop(key.replace('q_proj', f'{letter}_proj')) for letter in 'qkv']
    found[re.sub(r'q_proj\.', 'in_proj_', key)] = np.concatenate(parts)
  if 'text_projection.weight' in found and 'text_projection.bias' not in found:
    found['text_projection'] = found.pop('text_projection.weight').T
  return {name if name.startswith('logit') else prefix + name: x for name, x in found.items()}


def as_big_vision(tensors: Tensors) -> Tensors:
  """The text tower of transformers' SigLIP under the names of big_vision, with heads split."""
  found: Tensors = {'params/t': tensors['logit_scale'], 'params/b': tensors['logit_bias']}
  names = (('text_model.', 'params/txt/'), ('embeddings.token_embedding.weight', 'Embed_0/embedding'),
           ('embeddings.position_embedding.weight', 'pos_embedding'), ('encoder.layers.', 'Encoder_0/encoderblock_'),
           ('.layer_norm1.', '/LayerNorm_0/'), ('.layer_norm2.', '/LayerNorm_1/'),
           ('final_layer_norm.', 'Encoder_0/encoder_norm/'), ('.mlp.fc1.', '/MlpBlock_0/Dense_0/'),
           ('.mlp.fc2.', '/MlpBlock_0/Dense_1/'), ('head.', 'head/'))
  for name, x in tensors.items():
    if not name.startswith('text_model'):
      continue
    is_norm = 'norm' in name
    for old, new in names:
      name = name.replace(old, new)
    if place := re.search(r'\.self_attn\.(q|k|v|out)_proj\.(weight|bias)', name):
      full = {'q': 'query', 'k': 'key', 'v': 'value', 'out': 'out'}[place[1]]
      name = name.replace(place[0], f'/MultiHeadDotProductAttention_0/{full}/{place[2]}')
      x = x.T if place[2] == 'weight' else x
      if full != 'out':
        x = x.reshape(*x.shape[:-1], 2, 16)
      elif place[2] == 'weight':
        x = x.reshape(2, 16, 32)
    elif name.endswith('weight') and not is_norm:
      x = x.T
    name = name.replace('/weight', '/scale' if is_norm else '/kernel')
    found[name] = x[None] if name.endswith('pos_embedding') else x
  return found


def as_scenic(tensors: Tensors) -> Tensors:
  """The text tower of transformers' TIPSv2 under the names of its JAX files."""
  numbers = {'logit_scale': np.float32(0.), 'logit_bias': np.float32(0.)}
  padded = {**tensors, **numbers}
  found = {}
  for name, x in as_big_vision(padded).items():
    for old, new in (('params/txt/', ''), ('Embed_0/embedding', 'token_emb/emb_var'),
                     ('Encoder_0/encoder_norm', 'text_encoder_norm'), ('Encoder_0/', 'transformer/')):
      name = name.replace(old, new)
    found[name] = x
  return {name: x for name, x in found.items() if not name.startswith('params/')} | {
      'temperature': tensors['temperature']}


@pytest.mark.parametrize(('family', 'rename'), [
    ('clip', as_openai), ('clip', lambda x: as_openai(x, 'text.')), ('siglip', lambda x: as_openai(x, 'text.')),
    ('siglip', as_big_vision), ('tips', as_openai), ('tips', as_scenic)],
    ids=['openai', 'open_clip', 'open_clip-siglip', 'big_vision', 'tips-torch', 'tips-scenic'])
def test_files_of_other_programs_hold_the_same_tower(family: str, rename: Callable[[Tensors], Tensors],
                                                     tmp_path: pathlib.Path) -> None:
  image = loading.load(text_models.write(family, tmp_path / 'whole'))
  want = text.load(str(tmp_path / 'whole'), image=image)
  other = text_models.write(family, tmp_path / 'other', own=rename(text_models.tensors(family)))
  found = text.load(other, image=image)
  chex.assert_trees_all_equal(found.params, want.params)
  assert found.tower == want.tower
  assert (found.scale, found.bias, found.family) == (want.scale, want.bias, want.family)


def test_scanned_blocks_of_big_vision_are_the_same(tmp_path: pathlib.Path) -> None:
  image = loading.load(text_models.write('siglip', tmp_path / 'whole'))
  apart = as_big_vision(text_models.tensors('siglip'))
  stacked = {name: x for name, x in apart.items() if 'encoderblock_' not in name}
  for name in [name for name in apart if 'encoderblock_0' in name]:
    stacked[name.replace('_0', '', 1) if 'Encoder_0' not in name else name.replace('block_0', 'block')] = np.stack(
        [apart[name], apart[name.replace('block_0', 'block_1')]])
  twice = {'params/txt/Encoder_0/pos_embedding': np.ones((1, 16, 32), np.float32)}
  found = text.load(text_models.write('siglip', tmp_path / 'scan', own=stacked | twice), image=image)
  want = text.load(str(tmp_path / 'whole'), image=image)
  chex.assert_trees_all_equal(found.params['blocks'], want.params['blocks'])
  np.testing.assert_array_equal(found.params['positions'], want.params['positions'] + 1.)


def test_the_text_file_of_tips_is_found_beside_that_of_the_images(tmp_path: pathlib.Path) -> None:
  whole = text_models.tensors('tips')
  image = loading.load(text_models.write('tips', tmp_path / 'whole'))
  files.write_npz(tmp_path / 'tips_v2_vision.npz', {k: x for k, x in whole.items() if k.startswith('vision')})
  (tmp_path / 'config.json').write_text(json.dumps(text_models.about('tips')['config']))
  with pytest.raises(UserError, match='expected weights with a text tower, got weights of images alone'):
    text.load(str(tmp_path / 'tips_v2_vision.npz'), image=image)
  files.write_npz(tmp_path / 'tips_v2_text.npz', as_openai(whole))
  found = text.load(str(tmp_path / 'tips_v2_vision.npz'), image=image)
  np.testing.assert_allclose(vectors(found, 'tips'), text_models.golden()['tips/text'], **TOLERANCE)


def test_the_activation_of_openai_files_is_that_of_their_images(tmp_path: pathlib.Path) -> None:
  image = loading.load(text_models.write('clip', tmp_path))
  config = text_models.about('clip')['config']
  config['text_config'] = {'num_attention_heads': 2}
  other = text_models.write('clip', tmp_path / 'openai', own=as_openai(text_models.tensors('clip')))
  (tmp_path / 'openai' / 'config.json').write_text(json.dumps(config))
  assert text.load(other, image=image).tower.gelu is Gelu.QUICK


def change(**tensors: np.ndarray | None) -> Callable[[Tensors], Tensors]:
  def changed(own: Tensors) -> Tensors:
    new = {name.replace('__', '.'): x for name, x in tensors.items()}
    return {name: x for name, x in (own | new).items() if x is not None}
  return changed


@pytest.mark.parametrize(('altered', 'message'), [
    (change(text_model__final_layer_norm__bias=None), r'- norm/bias float32\[32\]: only in the network'),
    (change(text_model__adapter__weight=np.ones(3, np.float32)), 'tensors without a place in a text tower'),
    (change(logit_scale=None), 'expected a scale of the logits, got none'),
    (change(logit_scale=np.ones(2, np.float32)), 'expected one finite number'),
    (change(text_projection__weight=np.ones((24, 32), np.float32)), 'expected vectors of 16 numbers, .* got 24'),
])
def test_incomplete_and_odd_towers_are_refused(altered: Callable[[Tensors], Tensors], message: str,
                                               tmp_path: pathlib.Path) -> None:
  image = loading.load(text_models.write('clip', tmp_path / 'good'))
  with pytest.raises(UserError, match=message):
    text.load(text_models.write('clip', tmp_path / 'bad', own=altered(text_models.tensors('clip'))), image=image)


def test_a_config_that_cannot_be_understood_is_named(tmp_path: pathlib.Path) -> None:
  folder = text_models.write('clip', tmp_path)
  image = loading.load(folder)
  (tmp_path / 'config.json').write_text(json.dumps({'text_config': {'hidden_act': 'tanhshrink'}}))
  with pytest.raises(UserError, match="text_config.hidden_act: expected one of gelu, .*, got 'tanhshrink'"):
    text.load(folder, image=image)
