"""A file is loaded whole or not at all, and what is wrong with it is said."""
from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from tests.weights import made
from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Interpolation, PositionResize
from vit_jax.core.errors import UserError
from vit_jax.weights import files, loading, recognize, resize, saving, sidecars

Tensors = dict[str, np.ndarray]


def file(folder: pathlib.Path, found: Tensors, name: str = 'net.safetensors') -> str:
  files.write_safetensors(folder / name, found)
  return str(folder / name)


def timm(**changes: object) -> Tensors:
  return recognize.to_tensors(made.network(**changes), 'timm')


def test_every_parameter_is_told_of(tmp_path: pathlib.Path) -> None:
  found = loading.load(file(tmp_path, timm()), model='heads=4')
  assert {line.what for line in found.report.lines} == {'taken'}
  assert len(found.report.lines) == 24 and 'Tensors: 24 taken' in loading.text(found)
  made.assert_same(found, made.network())
  assert found.num_classes == 7 and found.class_names == () and found.family == 'timm'
  assert json.loads(json.dumps(found.report.plain()))['tensors'][0]['what'] == 'taken'


@pytest.mark.parametrize(('name', 'value', 'says'), [
    ('blocks.1.mlp.fc1.weight', np.ones((47, 32)), r'blocks.1.mlp.fc1.weight gives \[32, 47\], others \[32, 48\], of'),
    ('norm.weight', np.ones(31), r'~ backbone/norm/scale: float32\[31\] in the file, float32\[32\] in the network'),
    ('head.weight', np.ones((7, 30)), r'~ head/kernel: float32\[30, 7\] in the file, float32\[32, 7\] in the network'),
    ('blocks.0.attn.qkv.weight', np.ones((95, 32)), r'blocks.0.attn.qkv.weight is float32\[95, 32\], from which'),
    ('pos_embed', np.ones((1, 19, 32)), r'--model=image: expected the size of images for its 19 rows of pos'),
    ('fc_norm.weight', np.ones(32), 'it normalizes tokens and their mean; networks here do one of these'),
    ('norm_pre.weight', np.ones(32), r'- backbone/norm_before/bias float32\[32\]: only in the network'),
    ('blocks.0.attn.q_bias', np.ones(32), 'and another tensor are both backbone/blocks/attn/query/bias'),
    ('blocks.0.attn.relative_position_bias_table', np.ones(9), 'it is a BEiT'),
    ('rope.freqs', np.ones((2, 2, 4, 3)), r'~ backbone/blocks/attn/frequencies: float32\[2, 2, 4, 3\] in the file'),
    ('extra.weight', np.ones(3), '1 tensors have no place in this network:\n  extra.weight')])
def test_a_tensor_that_does_not_fit_is_an_error_that_names_it(
    name: str, value: np.ndarray, says: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=r'cannot be used: [\s\S]*' + says):
    loading.load(file(tmp_path, timm() | {name: value.astype(np.float32)}), model='heads=4')


@pytest.mark.parametrize(('name', 'says'), [
    ('norm.bias', '- backbone/norm/bias float32[32]: only in the network'),
    ('head.bias', '- head/bias float32[7]: only in the network'),
    ('blocks.0.norm2.weight', 'backbone/blocks/norm2/scale: there is nothing for layers 0 of 2'),
    ('patch_embed.proj.bias', '- backbone/stem/bias')])
def test_a_missing_tensor_is_an_error_that_names_it(name: str, says: str, tmp_path: pathlib.Path) -> None:
  found = timm()
  del found[name]
  with pytest.raises(UserError) as caught:
    loading.load(file(tmp_path, found), model='heads=4')
  assert says in str(caught.value)


@pytest.mark.slow(reason='4 s: several networks are written and read')
def test_a_network_with_the_tensors_of_another_is_told_apart_by_its_name_or_warned_of(tmp_path: pathlib.Path) -> None:
  found = recognize.to_tensors(made.network(made.EFFICIENTNET), 'timm')
  warned = loading.load(file(tmp_path, found, 'net.safetensors')).report.warnings
  assert any('it is assumed to be a tf_efficientnet_…' in one for one in warned)
  named = loading.load(file(tmp_path, found, 'tf_efficientnet_b0-0af12548.pth')).report.warnings
  assert not any('it is assumed to be' in one for one in named)
  with pytest.raises(UserError, match='got efficientnet_b0_ra-3dd342df.pth, which pads as PyTorch does and has'):
    loading.load(file(tmp_path, found, 'efficientnet_b0_ra-3dd342df.pth'))
  (tmp_path / 'config.json').write_text(json.dumps({'architecture': 'efficientnet_b0', 'pretrained_cfg': {}}))
  with pytest.raises(UserError, match='got efficientnet_b0, which pads as PyTorch does'):
    loading.load(file(tmp_path, found, 'net.safetensors'))


def test_positions_that_are_not_there_are_those_of_big_vision_or_an_error(tmp_path: pathlib.Path) -> None:
  found = timm()
  del found['pos_embed']
  with pytest.raises(UserError, match='expected position embeddings, got none: they are rotary or absent'):
    loading.load(file(tmp_path, found), model='heads=4')
  fixed = made.network(pool=schema.Mean(), positions=schema.SinCos())
  np.savez(tmp_path / 'a.npz', **recognize.to_tensors(fixed, 'big_vision'))
  loaded = loading.load(str(tmp_path / 'a.npz'))
  assert loaded.model.positions == schema.SinCos()
  assert 'they are assumed to be fixed (sincos)' in str(loaded.report.warnings)


def test_a_file_without_a_head_has_no_classes(tmp_path: pathlib.Path) -> None:
  found = loading.load(file(tmp_path, {k: x for k, x in timm().items() if not k.startswith('head')}), model='heads=4')
  assert found.num_classes == 0 and 'head' not in found.params and 'no head' in loading.text(found)


def test_a_tensor_in_two_shards_is_an_error(tmp_path: pathlib.Path) -> None:
  names = ['model-1-of-2.safetensors', 'model-2-of-2.safetensors']
  tensors = timm()
  file(tmp_path, {name: x for name, x in tensors.items() if not name.startswith('head')}, names[0])
  file(tmp_path, {name: x for name, x in tensors.items() if name.startswith(('head', 'norm.'))}, names[1])
  (tmp_path / 'model.safetensors.index.json').write_text(json.dumps({
      'weight_map': {name: names[name.startswith('head')] for name in tensors}}))
  with pytest.raises(UserError, match='2-of-2.safetensors: expected tensors that no other shard has, got 2 of an'):
    loading.load(str(tmp_path), model='heads=2')
  file(tmp_path, {name: x for name, x in tensors.items() if name.startswith('head')}, names[1])
  assert loading.load(str(tmp_path), model='heads=2').num_classes


def test_heads_that_nothing_tells_are_asked_for(tmp_path: pathlib.Path) -> None:
  path = file(tmp_path, timm())
  with pytest.raises(UserError, match='expected the number of attention heads, got none. .*Set --model=heads=N'):
    loading.load(path)
  with pytest.raises(UserError, match='expected a divisor of the width 32, got 5'):
    loading.load(path, model='heads=5')
  with pytest.raises(UserError, match="'gelu=soft': expected one of the known arguments|arguments: expected"):
    loading.load(path, model='gelu=soft')
  said = loading.load(path, model='heads=4,gelu=tanh,norm_eps=1e-5').model
  assert (said.gelu, said.norm.eps) == (Gelu.TANH, 1e-5)
  np.savez(tmp_path / 'a.npz', **recognize.to_tensors(made.network(), 'vision_transformer'))
  with pytest.raises(UserError, match='--model=heads: expected 4, as the kernels of the file are split, got 8'):
    loading.load(str(tmp_path / 'a.npz'), model='heads=8')


def test_a_head_of_zeros_and_numbers_that_are_none_are_warned_of(tmp_path: pathlib.Path) -> None:
  found = timm()
  found['head.weight'] = np.zeros_like(found['head.weight'])
  found['norm.bias'] = np.full_like(found['norm.bias'], np.nan)
  with pytest.raises(UserError, match='expected weights with finite values, got infinite or NaN values in backbone/norm'
                     '/bias. Use other weights, .* or add --allow_nonfinite'):
    loading.load(file(tmp_path, found), model='heads=4')
  warnings = loading.load(file(tmp_path, found), model='heads=4', allow_nonfinite=True).report.warnings
  assert any('the head is all zeros' in w for w in warnings)
  assert 'not finite: infinite or NaN values in backbone/norm/bias' in warnings


def test_positions_without_a_row_for_the_class_token_get_one_of_zeros(tmp_path: pathlib.Path) -> None:
  found = timm()
  found['pos_embed'] = found['pos_embed'][:, 1:]
  with pytest.raises(UserError, match=r'its 16 rows of positions \(1 \+ 15 or 16 patches\), got none.*Set --model='):
    loading.load(file(tmp_path, found), model='heads=4')
  loaded = loading.load(file(tmp_path, found), model='heads=4,image=32')
  table = loaded.params['backbone']['positions']
  assert table.shape == (1, 17, 32) and not table[:, 0].any()
  np.testing.assert_array_equal(table[:, 1:], found['pos_embed'])
  assert loaded.report.of('folded')[0].rule == 'the file has none for the first 1: zeros'


def test_positions_of_registers_are_added_to_them(tmp_path: pathlib.Path) -> None:
  found = timm(registers=3)
  table, own = found['pos_embed'].copy(), np.random.default_rng(0).random((1, 3, 32)).astype(np.float32)
  assert table.shape == (1, 1 + 3 + 16, 32) and not table[:, 1:4].any()
  found['pos_embed'][:, 1:4] = own
  loaded = loading.load(file(tmp_path, found), model='heads=4').params['backbone']
  np.testing.assert_array_equal(loaded['positions'], np.delete(table, [1, 2, 3], axis=1))
  np.testing.assert_array_equal(loaded['registers'], found['reg_token'] + own)


def test_a_grid_that_is_not_square_is_told_by_the_size_of_its_images(tmp_path: pathlib.Path) -> None:
  how = made.HOW._replace(image_px=(16, 40))
  path = file(tmp_path, timm(preprocess=how))
  with pytest.raises(UserError, match=r'images for its 11 rows of positions \(1 \+ 10 or 11 patches\), got none'):
    loading.load(path, model='heads=4')
  assert loading.load(path, model='heads=4,image=16x40').preprocess.image_px == (16, 40)


@pytest.mark.parametrize('how', ['bicubic_offset', ''])
def test_positions_are_resized_for_the_images_that_a_person_sets(how: str, tmp_path: pathlib.Path) -> None:
  path = file(tmp_path, timm())
  own = loading.load(path, model='heads=4')
  found = loading.load(path, model=f'heads=4,position_resize={how}' if how else 'heads=4', preprocess='image=24x48')
  used = how or 'bicubic_antialias'  # timm's
  assert found.model.positions.resize.value == used and found.preprocess.image_px == (24, 48)
  before, after = (np.asarray(one.params['backbone']['positions'])[0] for one in (own, found))
  np.testing.assert_array_equal(after[:1], before[:1])
  np.testing.assert_array_equal(after[1:], resize.positions(before[1:], (4, 4), (3, 6), PositionResize(used)))
  assert f'resized backbone/positions: 4 x 4 to 3 x 6 tokens, {used}' in loading.text(found)
  with pytest.raises(UserError, match='image=20x24: expected multiples of the patch side, 8 px'):
    loading.load(path, model='heads=4', preprocess='image=20x24')


def test_what_lies_beside_a_file_tells_what_it_cannot(tmp_path: pathlib.Path) -> None:
  path = file(tmp_path, timm())
  (tmp_path / 'config.json').write_text(json.dumps({
      'architecture': 'vit_x', 'num_classes': 7, 'model_args': {'num_heads': 4, 'act_layer': 'gelu_tanh'},
      'pretrained_cfg': {'input_size': [3, 32, 32], 'mean': [.1, .2, .3], 'std': [.4, .5, .6], 'crop_pct': .875,
                         'interpolation': 'bilinear'}, 'label_names': [f'c{i}' for i in range(7)]}))
  found = loading.load(path)
  assert (found.model.heads, found.model.gelu) == (4, Gelu.TANH) and found.class_names[2] == 'c2'
  p = found.preprocess
  assert (p.mean, p.std, p.resize_px, p.interpolation) == ((.1, .2, .3), (.4, .5, .6), 36, Interpolation.BILINEAR)
  assert 'mean, std, geometry, resize, interpolation, antialias by config.json' in p.rule
  assert loading.load(path, preprocess='half').preprocess.rule.startswith('mean, std by --preprocess')


def test_class_names_that_do_not_fit_the_head_are_left_out_and_said(tmp_path: pathlib.Path) -> None:
  saving.save(made.network(), str(tmp_path / 'a.npz'))
  beside = tmp_path / 'a.npz.json'
  beside.write_text(json.dumps(json.loads(beside.read_text()) | {'class_names': ['x', 'y']}))
  found = loading.load(str(tmp_path / 'a.npz'))
  assert found.class_names == ()
  assert '2 class names in the sidecar do not match the 7 outputs' in str(found.report.warnings)


def test_class_names_beside_weights_without_a_head_are_no_reason_to_warn(tmp_path: pathlib.Path) -> None:
  saving.save(made.network(num_classes=0, class_names=()), str(tmp_path / 'a.npz'))
  beside = tmp_path / 'a.npz.json'
  beside.write_text(json.dumps(json.loads(beside.read_text()) | {'class_names': ['x']}))
  found = loading.load(str(tmp_path / 'a.npz'))
  assert found.class_names == () and 'class names' not in str(found.report.warnings)


@pytest.mark.parametrize('pool', [schema.Mean(), schema.Map()])
def test_the_pooling_is_that_of_the_weights(pool: schema.PoolSettings, tmp_path: pathlib.Path) -> None:
  assert loading.load(file(tmp_path, timm(pool=pool)), model='heads=4').model.pool == pool


def test_a_damaged_neighbor_is_an_error_not_a_guess(tmp_path: pathlib.Path) -> None:
  path = file(tmp_path, timm())
  (tmp_path / 'config.json').write_text('{"model_type": "vit"')
  with pytest.raises(UserError, match='config.json: expected settings .* as JSON, got no JSON at line 1, column 21'):
    loading.load(path, model='heads=4')


@pytest.mark.parametrize(('name', 'value', 'says'), [
    ('blocks.99999999999.norm1.weight', np.ones(32), 'blocks.99999999999.norm1.weight: expected numbers up to 1,000'),
    ('blocks.01.norm1.weight', np.ones(32), r'blocks\.0?1\.norm1\.weight and another tensor are both'),
    ('module.norm.weight', np.ones(32), '1 tensors have no place'), ('²', np.ones(3), '1 tensors have no place'),
    ('pos_embed', np.ones(()), r'pos_embed is float32\[\], from which backbone/positions cannot be made'),
    ('norm.weight', np.ones((32, 0)), r'norm.weight is float32\[32, 0\], from which backbone/norm/scale'),
    ('cls_token', np.ones(32), r'cls_token is float32\[32\], from which backbone/cls cannot be made'),
    ('decoder_embed.weight', np.ones((8, 32)), '- backbone|only in the file|have no place'),
    ('decoder_pos_embed', np.ones(()), 'decoder_pos_embed is not the fixed 2-D sine-cosine table of MAE')])
def test_names_and_shapes_that_no_network_has_are_errors(
    name: str, value: np.ndarray, says: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=r'cannot be used: [\s\S]*(' + says + ')'):
    loading.load(file(tmp_path, timm() | {name: value.astype(np.float32)}), model='heads=4')


def test_units_of_a_stem_are_numbered_from_one(tmp_path: pathlib.Path) -> None:
  shapes = {'resnet/root_block/standardized_conv2d/kernel': (7, 7, 3, 64),
            'resnet/block1/unit07/a/standardized_conv2d/kernel': (1, 1, 64, 64)}
  np.savez(tmp_path / 'a.npz', **{name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
  with pytest.raises(UserError, match='its units of stage 1 are numbered 7, and not from 1 on'):
    loading.load(str(tmp_path / 'a.npz'))


@pytest.mark.parametrize(('content', 'says'), [
    ('[1]', r'expected a JSON object, got \[1\]'), ('[' * 100_000, 'nested too deep'),
    ('{"pretrained_cfg": {"crop_pct": 0}}', 'crop_pct: expected a finite number from 0.01 to 10, got 0'),
    ('{"pretrained_cfg": {"input_size": [3, 1e9, 1e9]}}', 'expected a list of 3 whole numbers from 1 to 16,384'),
    ('{"pretrained_cfg": {"input_size": [3, 99999999, 99999999]}}', 'input_size: expected a list of 3'),
    ('{"pretrained_cfg": {"mean": ["a", 1, 2]}}', 'mean: expected a list of 3 numbers'),
    ('{"pretrained_cfg": {"std": [0, 1, 1]}}', 'std: expected a list of 3 numbers'),
    ('{"pretrained_cfg": {"std": [NaN, 1, 1]}}', 'got JSON with NaN, which is not a number'),
    ('{"pretrained_cfg": {}, "model_args": {"num_heads": 1e999}}', 'JSON with the number 1e999, which is too large'),
    ('{"pretrained_cfg": {}, "model_args": {"num_heads": -4}}', 'heads: expected a whole .* 0 to 4,096, got -4'),
    ('{"model_type": "vit", "num_attention_heads": 4, "layer_norm_eps": -1}', 'eps: expected a finite .*, got -1'),
    ('{"model_type": "vit", "num_attention_heads": 4, "image_size": {"height": 0, "width": 4}}',
     'image_size.height: expected a whole number from 1 to 16,384, got 0')])
def test_numbers_beside_weights_that_cannot_be_are_errors(content: str, says: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'config.json').write_text(content)
  with pytest.raises(UserError, match=f'config.json.*{says}.*Correct the file, fetch it again, or move it away'):
    sidecars.read(tmp_path / 'net.safetensors')


def test_a_run_without_a_checkpoint_a_missing_view_and_a_flipped_byte_are_said(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'empty' / 'checkpoints').mkdir(parents=True)
  with pytest.raises(UserError, match='has no complete checkpoint yet'):
    loading.load(str(tmp_path / 'empty'))
  saving.save(made.network(), str(tmp_path / 'run'), family='run')
  with pytest.raises(UserError, match="--view: expected one of student, which .* has, got 'teacher'"):
    loading.load(str(tmp_path / 'run'), view='teacher')
  with pytest.raises(UserError, match='--model: expected none for the run .*, whose config has all settings'):
    loading.load(str(tmp_path / 'run'), model='heads=4')
  meta = tmp_path / 'run' / 'checkpoints' / '0' / 'meta' / 'metadata'
  meta.write_text(meta.read_text().replace('"step": 0', '"step": 1'))
  with pytest.raises(UserError, match='got damaged ones only:\n  0: its description is not the one that was saved'):
    loading.load(str(tmp_path / 'run'))
  with pytest.raises(UserError, match='run/checkpoints/0: expected a complete checkpoint, got a damaged one: its desc'):
    loading.load(str(tmp_path / 'run' / 'checkpoints' / '0'))


def test_the_checkpoint_before_a_damaged_one_is_used_with_a_warning(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  saving.save(made.network(), str(tmp_path / 'run'), family='run')
  steps = tmp_path / 'run' / 'checkpoints'
  for damaged in ('3', '7'):
    (steps / damaged / 'params').mkdir(parents=True)
    (steps / damaged / 'meta').mkdir()
    (steps / damaged / 'meta' / 'metadata').write_text('{}')
  made.assert_same(loading.load(str(tmp_path / 'run')), made.network())
  assert [f'Checkpoint {step} of {tmp_path}/run is damaged and not used' in caplog.text
          for step in (7, 3, 0)] == [True, True, False]


def test_pooling_that_tensors_cannot_tell_is_warned_of_unless_it_is_set(tmp_path: pathlib.Path) -> None:
  path = file(tmp_path, timm(pool=schema.Mean()))
  guessed = loading.load(path, model='heads=4')
  assert guessed.model.pool == schema.Mean() and any('its pooling is a guess' in one for one in guessed.report.warnings)
  mean, first = schema.Mean(), schema.First()
  for name, pool in (('mean', mean), ('gap', mean), ('first', first), ('0', first)):
    found = loading.load(path, model=f'heads=4,pool={name}')
    assert found.model.pool == pool and not any('pooling' in one for one in found.report.warnings)
  with pytest.raises(UserError, match='--model=pool: expected mean or first, got cls. The file has neither a class'):
    loading.load(path, model='heads=4,pool=cls')
  with pytest.raises(UserError, match='got token_unpooled. Such a network gives one answer for each token'):
    loading.load(path, model='heads=4,pool=token_unpooled')
  with pytest.raises(UserError, match='--model=pool: expected one of token, .* got best'):
    loading.load(path, model='pool=best')
  with_token = loading.load(file(tmp_path, timm(), 'token.safetensors'), model='heads=4,pool=token')
  assert with_token.model.pool == schema.ClassToken()
  assert not any('pooling' in one for one in with_token.report.warnings)
  with pytest.raises(UserError, match='--model=pool: expected cls, which the tensors .* got mean'):
    loading.load(file(tmp_path, timm(), 'token.safetensors'), model='heads=4,pool=mean')


def test_a_file_of_ours_says_how_it_pools(tmp_path: pathlib.Path) -> None:
  saving.save(made.network(pool=schema.First()), str(tmp_path / 'own.npz'), family='big_vision')
  found = loading.load(str(tmp_path / 'own.npz'))
  assert found.model.pool == schema.First() and not any('pooling' in one for one in found.report.warnings)
