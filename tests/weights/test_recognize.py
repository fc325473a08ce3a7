"""Families are detected: the same network under every name its publishers have given it."""
from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tests.weights import made
from vit_jax.config import schema
from vit_jax.config.schema import Gelu
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes
from vit_jax.weights import hints, infer, loading, recognize, tables

Tensors = dict[str, np.ndarray]


def tensors(family: str, **changes: object) -> Tensors:
  return recognize.to_tensors(made.network(**changes), family)


def leaves(found: Tensors) -> Tensors:
  known = recognize.recognize(found)
  taken = tables.read(known.tensors, known.table)
  assert not taken.unused and not taken.problems, (taken.unused, taken.problems)
  return taken.leaves


def assert_equal(a: Tensors, b: Tensors) -> None:
  one, two = leaves(a), leaves(b)
  assert one.keys() == two.keys()
  for name, leaf in one.items():
    np.testing.assert_array_equal(leaf, two[name], err_msg=name)


def renamed(found: Tensors, *rules: tuple[str, str]) -> Tensors:
  for pattern, new in rules:
    found = {re.sub(pattern, new, name): x for name, x in found.items()}
  return found


def stacked(found: Tensors) -> Tensors:
  """As big_vision's scan keeps blocks."""
  kept = {name: x for name, x in found.items() if 'encoderblock' not in name}
  for name in found:
    if 'encoderblock_0/' in name:
      kept[name.replace('encoderblock_0', 'encoderblock')] = np.stack(
          [found[name.replace('encoderblock_0', f'encoderblock_{i}')] for i in range(2)])
  return kept


LINEN = (('MultiHeadDotProductAttention_1', 'MultiHeadDotProductAttention_0'), ('LayerNorm_2', 'LayerNorm_1'),
         ('MlpBlock_3', 'MlpBlock_0'))


def test_both_numberings_of_vision_transformer_are_read() -> None:
  found = tensors('vision_transformer')
  assert_equal(found, renamed(found, *LINEN))
  assert recognize.recognize(renamed(found, *LINEN)).label == 'vision_transformer'


@pytest.mark.parametrize('change', [
    lambda t: {f'params/{name}': x for name, x in t.items()},
    lambda t: {f'opt/target/{name}': x for name, x in t.items()} | {'opt/state/step': np.ones(1)},
    lambda t: {f'params/img/{name}': x for name, x in t.items()} | {
        'params/txt/head/kernel': np.ones(3), 'params/t': np.ones(1), 'params/b': np.ones(1)},
    lambda t: {f'params/{name}': x for name, x in t.items()} | {
        'opt/0/mu/head/kernel': np.ones(3), 'chrono/steps': np.ones(1)},
    stacked,
    lambda t: {f'params/{name}': x for name, x in stacked(t).items()},
    lambda t: renamed(t, *((f'^(Transformer.*){new}', rf'\1{old}') for old, new in LINEN)),
    lambda t: renamed(t, ('^MAPHead_0/', '')),
], ids=['params', 'optimizer', 'two towers', 'training', 'scan', 'scan with prefix', 'old numbers', 'old map head'])
def test_all_forms_of_big_vision_are_read(change: Callable[[Tensors], Tensors]) -> None:
  found = tensors('big_vision', pool=schema.Map())
  assert recognize.recognize(change(found)).label == 'big_vision'
  assert_equal(found, change(found))


def test_what_is_left_out_of_a_file_is_told_with_its_reason() -> None:
  found = {f'params/img/{name}': x for name, x in tensors('big_vision').items()} | {'params/txt/a': np.ones(1)}
  assert [tuple(line) for line in recognize.recognize(found).dropped] == [
      ('params/txt/a', 'dropped', 'of the text tower')]


@pytest.mark.parametrize('change', [
    lambda t: {f'module.{name}': x for name, x in t.items()},
    lambda t: {f'module.backbone.{name}': x for name, x in t.items() if not name.startswith('head')} | {
        'module.head.mlp.0.weight': np.ones((2, 2)), 'module.head.last_layer.weight_g': np.ones((2, 1))},
    lambda t: {f'_orig_mod.{name}': x for name, x in t.items()},
    lambda t: {f'model.{name}': x for name, x in t.items()},
    lambda t: renamed(t, (r'^blocks\.', 'blocks.0.')),
], ids=['data parallel', 'dino', 'compiled', 'wrapped', 'chunks'])
def test_prefixes_of_pytorch_are_taken_off(change: Callable[[Tensors], Tensors]) -> None:
  found = tensors('timm')
  changed = change(found)
  if any('last_layer' in name for name in changed):
    found = {name: x for name, x in found.items() if not name.startswith('head')}
    changed_family = recognize.recognize(changed)
    assert changed_family.label == 'dino' and len(changed_family.dropped) == 2
  assert_equal(found, changed)


def test_maes_fine_tuned_files_are_its_own_family() -> None:
  found = recognize.recognize(tensors('timm', pool=schema.Mean(class_token=True), last_norm=schema.LastNorm.POOLED))
  assert found.label == 'mae' and found.hints.norm_after_pool
  assert {'norm.weight', 'cls_token'} <= found.tensors.keys() and 'fc_norm.weight' not in found.tensors
  without = recognize.recognize(tensors('timm', pool=schema.Mean(), last_norm=schema.LastNorm.POOLED))
  assert without.label == 'timm' and without.hints.norm_after_pool


def test_dinov2s_own_names_are_those_of_timm() -> None:
  found = tensors('timm', registers=3, **{'block.layer_scale': .1}, mlp=schema.SwiGlu(48))
  own = renamed(found, ('reg_token', 'register_tokens'), (r'mlp\.fc1', 'mlp.w12'), (r'mlp\.fc2', 'mlp.w3'))
  own['mask_token'] = np.ones((1, 32), np.float32)
  assert recognize.recognize(own).label == 'dinov2'
  assert_equal(found, own)


def test_hugging_face_files_are_read_with_and_without_prefix_and_pooler() -> None:
  found = tensors('huggingface')
  bare = {name.removeprefix('vit.'): x for name, x in found.items()}
  with_pooler = bare | {'pooler.dense.weight': np.ones((2, 2)), 'embeddings.mask_token': np.ones((1, 1, 32))}
  assert_equal(found, bare)
  assert_equal(found, with_pooler)
  assert {line.name for line in recognize.recognize(with_pooler).dropped} == {
      'pooler.dense.weight', 'embeddings.mask_token'}


def test_the_head_of_hugging_faces_dinov2_is_left_out_and_said() -> None:
  found = tensors('huggingface', registers=2, **{'block.layer_scale': .1}, num_classes=0, class_names=())
  found |= {'classifier.weight': np.ones((7, 64), np.float32), 'classifier.bias': np.ones(7, np.float32)}
  dropped = recognize.recognize(found).dropped
  assert [line.name for line in dropped if 'mean patch' in line.rule] == ['classifier.weight', 'classifier.bias']


def test_each_family_has_its_own_gelu_and_epsilon() -> None:
  hints = {family: recognize.recognize(tensors(family)).hints for family in recognize.FORMATS if family != 'bit'}
  assert {f: (h.gelu, h.norm_eps) for f, h in hints.items()} == {
      'vision_transformer': (Gelu.TANH, 1e-6), 'big_vision': (Gelu.TANH, 1e-6), 'timm': (Gelu.EXACT, 1e-6),
      'huggingface': (Gelu.EXACT, 1e-12)}


def test_positions_of_a_decoder_that_are_not_maes_are_refused() -> None:
  found = recognize.to_tensors(made.network(num_classes=0, decoder=made.DECODER), 'timm')
  assert recognize.recognize(found).label == 'mae'
  found['decoder_pos_embed'] = found['decoder_pos_embed'] + np.float32(.01)
  with pytest.raises(UserError, match='decoder_pos_embed is not the fixed 2-D sine-cosine table of MAE'):
    recognize.recognize(found)


def test_unknown_names_show_what_they_are() -> None:
  with pytest.raises(UserError, match='its 2 tensors are named as in no known family .*: conv1.weight, fc.weight'):
    recognize.recognize({'conv1.weight': np.ones(1), 'fc.weight': np.ones(1)})


def test_a_bfloat16_file_of_big_vision_is_read_as_what_it_was(tmp_path: pathlib.Path) -> None:
  from vit_jax.weights import files
  found = tensors('big_vision')
  np.savez(tmp_path / 'a.npz', **{f'params/{k}': x.astype(ml_dtypes.bfloat16).view('V2') for k, x in found.items()})
  rounded = {k: x.astype(ml_dtypes.bfloat16).astype(np.float32) for k, x in found.items()}
  assert_equal(rounded, files.read(tmp_path / 'a.npz'))


@pytest.mark.parametrize(('name', 'whole', 'joined'), [
    ('backbone/blocks/attn/query/kernel', (2, 32, 4, 8), (2, 32, 32)),
    ('backbone/blocks/attn/out/kernel', (2, 4, 8, 32), (2, 32, 32)), ('text/blocks/attn/key/bias', (2, 4, 8), (2, 32)),
    ('backbone/pool/attn/value/kernel', (32, 4, 8), (32, 32))])
def test_only_the_matrix_with_joined_heads_is_split(name: str, whole: tuple[int, ...], joined: tuple[int, ...]) -> None:
  shapes = {name: np.broadcast_to(np.float32(0), whole)}
  leaf = np.arange(math.prod(joined), dtype=np.float32).reshape(joined)
  np.testing.assert_array_equal(infer.fitted({name: leaf}, shapes)[name], leaf.reshape(whole))
  other = leaf.reshape(*joined[:-2], joined[-2] // 2, 2 * joined[-1])  # as many numbers
  assert infer.fitted({name: other}, shapes)[name].shape == other.shape
  if name.endswith('kernel'):  # the axis beside those of the heads is joined with one of them
    wrong = leaf.reshape((*whole[:-2], -1) if '/out/' in name else (*whole[:-3], -1, whole[-1]))
    assert infer.fitted({name: wrong}, shapes)[name].shape == wrong.shape
  elsewhere = name.replace('attn', 'mlp')
  assert infer.fitted({elsewhere: leaf}, {elsewhere: shapes[name]})[elsewhere].shape == joined


def test_reasons_of_a_program_with_names_of_its_own_are_given_for_its_files_alone() -> None:
  assert recognize.reasons(['head.fc.weight'], 'timm') == []
  assert 'out_type of MMPretrain' in recognize.reasons(['head.fc.weight'], 'mmpretrain')[0]
  assert 'BEiT' in recognize.reasons(['blocks.0.attn.relative_position_bias_table'], 'timm')[0]


@pytest.mark.quick('B2', reason='2 to 10 s: a network is traced; B1 and B2 alone have equal blocks')
@pytest.mark.parametrize('name', sizes.EFFICIENTNET)
def test_each_efficientnet_is_known_by_its_shapes(name: str) -> None:
  model = sizes.efficientnet(name)
  shapes = trees.flatten(loading.expected(model, schema.Head(), 0, None, (32, 32), with_dist=False))
  assert infer.model(shapes, hints.Hints()) == model


def test_an_efficientnet_of_other_channels_is_refused_with_what_it_has() -> None:
  found = {f'backbone/{name}/conv/kernel': np.zeros((1, 1, 8, num)) for name, num in (('stem', 32), ('top', 1281))}
  with pytest.raises(UserError, match='32 channels in its stem, 1281 in its top and 0 blocks; known are B0, B1'):
    infer.model(found, hints.Hints())
  with pytest.raises(UserError, match='expected the tensors of a known network, got none for backbone/top/conv/kernel'):
    infer.model({'backbone/stem/conv/kernel': np.zeros((1, 1, 8, 32))}, hints.Hints())


@pytest.mark.parametrize('name', ['backbone/stem/kernel', 'backbone/blocks/norm1/scale',
                                  'backbone/blocks/channels/up/kernel'])
def test_a_mixer_without_one_of_its_tensors_is_refused(name: str) -> None:
  found = recognize.leaves_of(made.network(made.MIXER))
  del found[name]
  with pytest.raises(UserError, match=f'expected the tensors of a known network, got none for {name}'):
    infer.model(found, hints.Hints())


def test_positions_counted_on_the_grid_of_their_table_need_a_square_one() -> None:
  known = hints.Hints(settings={'positions.base': 1e4, 'positions.coordinates': schema.ByIndex(hints.OWN_GRID)})
  found = recognize.leaves_of(made.network(positions=schema.LearnedRotary(1e4)))
  assert infer.model(found, known).positions.coordinates == schema.ByIndex(4)
  with pytest.raises(UserError, match='expected a square grid of positions, got 16 patches for images of other sides'):
    infer.model(found, known._replace(image_px=(16, 64)))
  found['backbone/positions'] = np.zeros((1, 9, 32), np.float32)
  with pytest.raises(UserError, match='expected a square grid of positions, got 8 patches'):
    infer.model(found, known)
