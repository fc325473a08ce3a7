"""Weights written in any family come back with every bit, and what a format cannot hold is said."""
from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from tests.weights import made
from vit_jax.config import schema
from vit_jax.config.schema import Gelu, Interpolation, PositionsAt, checks
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes
from vit_jax.weights import files, loading, recognize, resize, saving
from vit_jax.weights.families import timm
from vit_jax.weights.network import Weights

OF_MAE = schema.SinCos(schema.Frequencies.MAE)
STEM_OF_TIMM = {'std_eps': 0., 'var_eps': 1e-8, 'norm_eps': 1e-5}
HYBRID = {'stem': schema.ResNetStem((1,)), 'patch': 8}
TINY_HYBRID: dict[str, Any] = {'stem': schema.ResNetStem((), **STEM_OF_TIMM), 'patch': 32, 'width': 192}
AFTER_POOL: dict[str, Any] = {'pool': schema.Mean(), 'last_norm': schema.LastNorm.POOLED}
DINOV2: dict[str, Any] = {'block.layer_scale': .1, 'num_classes': 0, 'class_names': ()}


def there_and_back(found: Weights, path: pathlib.Path, family: str) -> Weights:
  saving.save(found, str(path), family=family)
  return loading.load(str(path))


@pytest.mark.parametrize(('family', 'name'), [
    ('vision_transformer', 'a.npz'), ('big_vision', 'a.npz'), ('timm', 'a.safetensors'), ('timm', 'a.pth'),
    ('timm', 'folder'), ('huggingface', 'folder'), ('run', 'folder')])
def test_a_vit_comes_back_from_every_family_with_all_that_goes_with_it(
    family: str, name: str, tmp_path: pathlib.Path) -> None:
  found = made.network(gelu=Gelu.EXACT, **{
      'norm.eps': 1e-5 if family != 'timm' or name != 'folder' else 1e-6,
      'positions.resize': schema.PositionResize.BICUBIC_OFFSET})
  if family == 'big_vision':
    found.params['backbone']['positions'][:, 0] = 0.  # which that format adds to the class token
  again = there_and_back(found, tmp_path / name, family)
  made.assert_same(found, again)
  assert again.family == family
  assert again.class_names == found.class_names
  assert again.preprocess._replace(rule='') == found.preprocess._replace(rule='')
  assert dataclasses.replace(again.model, dropout=0.) == found.model


@pytest.mark.parametrize('changes', [{}, {'norm_before': True, 'class_names': ()}])
def test_a_head_without_a_bias_comes_back_from_a_run(changes: dict[str, Any], tmp_path: pathlib.Path) -> None:
  found = made.network(head=schema.Head(bias=False), **changes)
  again = there_and_back(found, tmp_path / 'run', 'run')
  assert (again.num_classes, again.class_names, again.head) == (7, found.class_names, found.head)


@pytest.mark.parametrize(('family', 'name'), [('vision_transformer', 'a.npz'), ('big_vision', 'a.npz'),
                                              ('run', 'folder')])
@pytest.mark.parametrize('truncate', [True, False])
def test_preprocessing_of_big_vision_comes_back(
    family: str, name: str, truncate: bool, tmp_path: pathlib.Path) -> None:
  how = made.HOW._replace(interpolation=Interpolation.AREA, antialias=False, truncate=truncate)
  again = there_and_back(made.network(preprocess=how), tmp_path / name, family)
  assert again.preprocess._replace(rule='') == how._replace(rule='')


@pytest.mark.parametrize(('family', 'name', 'changes'), [
    ('timm', 'a.pth', {'pool.distillation': True}), ('huggingface', 'f', {'pool.distillation': True}),
    ('timm', 'a.safetensors', {'registers': 3, 'block.layer_scale': .1}), ('timm', 'f', {'registers': 3}),
    ('timm', 'a.pth', {'pool': schema.Mean(class_token=True), 'last_norm': schema.LastNorm.POOLED}),
    ('timm', 'f', AFTER_POOL), ('timm', 'f', {**TINY_HYBRID, **AFTER_POOL}),
    ('timm', 'a.safetensors', {'pool': schema.Map()}), ('big_vision', 'a.npz', {'pool': schema.Map()}),
    ('timm', 'a.safetensors', {'attention.qk_norm': True}), ('timm', 'a.safetensors', {'mlp': schema.SwiGlu(48)}),
    ('vision_transformer', 'a.npz', {'pool': schema.Mean()}), ('big_vision', 'a.npz', {'pool': schema.Mean()}),
    ('big_vision', 'a.npz', {'pool': schema.Mean(), 'positions': schema.SinCos()}),
    ('timm', 'a.pth', HYBRID), ('vision_transformer', 'a.npz', HYBRID),
    ('timm', 'a.pth', {**HYBRID, 'stem': schema.ResNetStem(())}),
    ('timm', 'a.pth', {**HYBRID, 'stem': schema.ResNetStem(()), **AFTER_POOL}),
    ('timm', 'a.safetensors', {'positions': schema.Rotary(10., mixed=True), **AFTER_POOL}),
    ('timm', 'a.pth', {'attention.qkv_bias': schema.QkvBias.NONE})])
def test_its_variants_come_back(family: str, name: str, changes: dict, tmp_path: pathlib.Path) -> None:
  found = made.network(**changes)
  again = there_and_back(found, tmp_path / name, family)
  made.assert_same(found, again)
  assert checks.replaced(again.model, {'block.layer_scale': found.model.block.layer_scale}) == found.model


def test_the_round_trip_of_all_families_gives_the_same_file(tmp_path: pathlib.Path) -> None:
  saving.save(made.network(), str(tmp_path / 'first.safetensors'))
  names = [tmp_path / name for name in ('first.safetensors', 'a.npz', 'hf', 'last.safetensors')]
  for one, two in zip(names, names[1:], strict=False):
    saving.save(loading.load(str(one)), str(two))
  assert names[0].read_bytes() == names[-1].read_bytes()


@pytest.mark.parametrize(('family', 'name'), [('vision_transformer', 'a.npz'), ('timm', 'a.safetensors'),
                                              ('timm', 'folder'), ('run', 'folder')])
def test_a_mixer_comes_back(family: str, name: str, tmp_path: pathlib.Path) -> None:
  if name == 'folder' and family == 'timm':
    with pytest.raises(UserError, match='got another Mixer. Write a single .safetensors file'):
      saving.save(made.network(made.MIXER), str(tmp_path / name), family=family)
    return
  found = made.network(made.MIXER)
  again = there_and_back(found, tmp_path / name, family)
  made.assert_same(found, again)
  assert again.model == found.model


@pytest.mark.dear('model2-timm-a.safetensors', 'model3-timm-folder', reason='3 s: an EfficientNet')
@pytest.mark.parametrize(('model', 'family', 'name'), [
    (made.BIT, 'bit', 'a.npz'), (made.BIT, 'timm', 'a.pth'), (made.EFFICIENTNET, 'timm', 'a.safetensors'),
    (made.EFFICIENTNET, 'timm', 'folder')])
def test_a_convolutional_network_comes_back_with_its_running_statistics(
    model: schema.Model, family: str, name: str, tmp_path: pathlib.Path) -> None:
  found = made.network(model)
  assert bool(found.state) == (model is made.EFFICIENTNET)
  again = there_and_back(found, tmp_path / name, family)
  made.assert_same(found, again)
  assert (again.model, again.class_names) == (model, made.CLASSES)
  assert again.preprocess._replace(rule='') == found.preprocess._replace(rule='')


@pytest.mark.slow(reason='2 s: an EfficientNet')
def test_running_statistics_are_part_of_a_run(tmp_path: pathlib.Path) -> None:
  found = made.network(schema.EfficientNet(width_factor=.25, depth_factor=.3))
  made.assert_same(found, there_and_back(found, tmp_path / 'run', 'run'))


def test_names_of_a_resnet_are_those_of_its_files(tmp_path: pathlib.Path) -> None:
  saving.save(made.network(made.BIT), str(tmp_path / 'a.npz'))
  found = {name: x.shape for name, x in files.read(tmp_path / 'a.npz').items()}
  assert found['resnet/block2/unit02/b/standardized_conv2d/kernel'] == (3, 3, 64, 64)
  assert found['resnet/block1/unit01/a/proj/standardized_conv2d/kernel'] == (1, 1, 32, 128)
  assert found['resnet/head/conv2d/kernel'] == (1, 1, 256, 7)


@pytest.mark.slow(reason='1 s: an EfficientNet is traced; tests/models/rivals/test_efficientnet.py has its paths')
def test_names_of_an_efficientnet_are_those_of_timm(tmp_path: pathlib.Path) -> None:
  saving.save(made.network(made.EFFICIENTNET), str(tmp_path / 'b.pth'))
  found = {name: x.shape for name, x in files.read(tmp_path / 'b.pth').items()}
  assert found['blocks.0.0.bn1.running_var'] == (32,) and found['blocks.6.0.conv_dw.weight'] == (1152, 1, 3, 3)
  assert found['blocks.1.1.se.conv_reduce.weight'] == (6, 144, 1, 1) and found['classifier.weight'] == (7, 1280)


def test_a_folder_for_timm_says_its_name_for_the_network() -> None:
  sizes = {'resnetv2_50x1_bit': schema.ResNet(), 'resnetv2_152x4_bit': schema.ResNet((3, 8, 36, 3), 256),
           'tf_efficientnet_b0': made.EFFICIENTNET, 'tf_efficientnet_l2': schema.EfficientNet(4.3, 5.3)}
  for name, model in sizes.items():
    config = timm.config(made.network()._replace(model=model))
    assert (config['architecture'], config['global_pool'], config['model_args']) == (name, 'avg', {})
    assert config['pretrained_cfg']['classifier'] == ('head.fc' if 'bit' in name else 'classifier')
  for model in (made.BIT, schema.EfficientNet(width_factor=.25)):
    with pytest.raises(UserError, match='got another .*. Write a single .safetensors file'):
      timm.config(made.network()._replace(model=model))


def test_the_config_of_a_hybrid_has_all_that_differs_from_the_network_of_its_name() -> None:
  config = timm.config(made.network(**TINY_HYBRID, **AFTER_POOL, registers=2))
  assert (config['architecture'], config['global_pool']) == ('vit_tiny_r_s16_p8_224', 'avg')
  assert config['pretrained_cfg']['first_conv'] == 'patch_embed.backbone.conv'  # its stem has no stages
  assert config['model_args'] == {
      'img_size': 32, 'patch_size': 8, 'embed_dim': 192, 'depth': 2, 'num_heads': 4, 'mlp_ratio': 48 / 192,
      'act_layer': 'gelu_tanh', 'reg_tokens': 2, 'class_token': False, 'global_pool': 'avg', 'fc_norm': True}
  stem = schema.ResNetStem((2, 2, 2, 2), **STEM_OF_TIMM)
  config = timm.config(made.network()._replace(model=schema.ViT(patch=32, width=768, stem=stem)))
  assert (config['architecture'], config['global_pool']) == ('vit_base_r26_s32_224', 'token')
  assert config['pretrained_cfg']['first_conv'] == 'patch_embed.backbone.stem.conv'
  assert config['model_args']['patch_size'] == 1  # of the map of the stem


def test_only_the_mixers_that_timm_has_have_a_config() -> None:
  made_for = made.network(preprocess=made.HOW._replace(image_px=(224, 224)))
  for name in ('S/32', 'S/16', 'B/32', 'B/16', 'L/32', 'L/16'):
    config = timm.config(made_for._replace(model=sizes.mixer(name)))
    assert config['architecture'] == f'mixer_{name[0].lower()}{name[2:]}_224'
  base = sizes.mixer('B/16')
  for other in ({'patch': 8}, {'depth': 13}, {'tokens_mlp': 96}, {'channels_mlp': 768}):
    with pytest.raises(UserError, match='got another Mixer. Write a single .safetensors file'):
      timm.config(made_for._replace(model=dataclasses.replace(base, **other)))
  with pytest.raises(UserError, match='got another Mixer'):
    timm.config(made_for._replace(model=sizes.mixer('H/14')))


@pytest.mark.parametrize('changes', [
    {}, AFTER_POOL, {'positions': schema.Rotary(10., mixed=True)}, {**HYBRID, 'stem': schema.ResNetStem(())}])
def test_a_head_without_a_bias_has_zeros_in_a_file_of_timm(changes: dict[str, Any]) -> None:
  tensors = recognize.to_tensors(made.network(head=schema.Head(bias=False), **changes), 'timm')
  np.testing.assert_array_equal(tensors['head.bias'], np.zeros(7))


@pytest.mark.parametrize(('family', 'name'), [('timm', 'a.pth'), ('huggingface', 'folder'), ('run', 'folder')])
def test_a_masked_autoencoder_comes_back_with_its_decoder(family: str, name: str, tmp_path: pathlib.Path) -> None:
  found = made.network(num_classes=0, decoder=made.DECODER, class_names=())
  again = there_and_back(found, tmp_path / name, family)
  made.assert_same(found, again)
  assert again.decoder and dataclasses.astuple(again.decoder)[2:] == dataclasses.astuple(made.DECODER)[2:]


def test_the_names_in_an_npz_are_those_of_the_published_files(tmp_path: pathlib.Path) -> None:
  saving.save(made.network(head=schema.Head(pre_logits=32)), str(tmp_path / 'a.npz'))
  found = {name: x.shape for name, x in files.read(tmp_path / 'a.npz').items()}
  block = 'Transformer/encoderblock_1/'
  assert found['Transformer/posembed_input/pos_embedding'] == (1, 17, 32)
  assert found[f'{block}MultiHeadDotProductAttention_1/query/kernel'] == (32, 4, 8)
  assert found[f'{block}MultiHeadDotProductAttention_1/out/kernel'] == (4, 8, 32)
  assert found[f'{block}MlpBlock_3/Dense_0/kernel'] == (32, 48)
  assert {f'{block}LayerNorm_0/scale', f'{block}LayerNorm_2/bias', 'Transformer/encoder_norm/scale', 'cls',
          'embedding/kernel', 'pre_logits/kernel', 'head/bias'} <= found.keys()


def test_transformers_names_are_those_of_its_files(tmp_path: pathlib.Path) -> None:
  saving.save(made.network(), str(tmp_path / 'm'))
  found = files.read(tmp_path / 'm' / 'model.safetensors')
  assert found['vit.encoder.layer.1.attention.attention.query.weight'].shape == (32, 32)
  assert {'vit.embeddings.cls_token', 'vit.embeddings.patch_embeddings.projection.weight', 'vit.layernorm.weight',
          'vit.encoder.layer.0.output.dense.bias', 'classifier.weight'} <= found.keys()
  config = json.loads((tmp_path / 'm' / 'config.json').read_text())
  assert config['architectures'] == ['ViTForImageClassification'] and config['id2label']['3'] == made.CLASSES[3]
  report = json.loads((tmp_path / 'm' / 'weights.json').read_text())
  assert (report['source'], report['tensors']) == ('made', [])
  processor = json.loads((tmp_path / 'm' / 'preprocessor_config.json').read_text())
  assert processor['size'] == {'shortest_edge': 36} and processor['crop_size'] == {'height': 32, 'width': 32}


@pytest.mark.parametrize(('family', 'name', 'changes', 'says'), [
    ('vision_transformer', 'a.npz', {'registers': 2}, 'no place for 1 of the parameters:\n  backbone/registers'),
    ('huggingface', 'f', {'pool': schema.Mean()}, 'got pool=mean: its ViTs read the class token'),
    ('huggingface', 'f', {'registers': 2}, 'registers or SwiGLU without LayerScale'),
    ('huggingface', 'f', {'block.layer_scale': .1}, 'that of its DINOv2 reads the mean patch as well'),
    ('huggingface', 'f', HYBRID, 'a ResNet stem'),
    ('huggingface', 'f', {**DINOV2, 'mlp': schema.Mlp(50)}, 'a whole mlp_ratio states, got 50 for the width 32. Set'),
    ('huggingface', 'f', {**DINOV2, 'mlp': schema.SwiGlu(40)}, 'a whole mlp_ratio states, got 40 for the width 32'),
    ('timm', 'f', {**HYBRID}, r'got a hybrid with the stem \(1,\)'),
    ('timm', 'f', {**TINY_HYBRID, 'norm_before': True}, 'can describe, got one with a norm before the blocks'),
    ('timm', 'f', {**TINY_HYBRID, 'pool.distillation': True}, 'got one with a distillation token after a ResNet stem'),
    ('timm', 'f', {**TINY_HYBRID, 'stem.width': 32}, r'the stem \(\) of 32 channels and width 192'),
    ('timm', 'a.npz', {}, '--to: expected a folder or .safetensors or .pth .* with --family=timm, got a.npz'),
    ('bit', 'a.npz', {}, 'files of bit have no place for 24 of the parameters'),
    ('keras', 'a.npz', {}, "--family: expected one of vision_transformer, big_vision, .*, got 'keras'")])
def test_what_a_family_cannot_hold_is_said_and_nothing_is_written(
    family: str, name: str, changes: dict, says: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=says):
    saving.save(made.network(**changes), str(tmp_path / name), family=family)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(('mlp', 'ratio'), [(schema.Mlp(96), 3), (schema.SwiGlu(88), 4), (schema.SwiGlu(48), 2)])
def test_the_config_of_a_dinov2_states_the_size_of_its_mlp(
    mlp: schema.Mlp | schema.SwiGlu, ratio: int, tmp_path: pathlib.Path) -> None:
  path, _ = saving.save(made.network(**DINOV2, mlp=mlp), str(tmp_path / 'f'), family='huggingface')
  config = json.loads((path / 'config.json').read_text())
  assert (config['mlp_ratio'], config['use_swiglu_ffn']) == (ratio, isinstance(mlp, schema.SwiGlu))


def test_what_is_there_is_overwritten_only_when_asked(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'a.npz'
  path.write_text('mine')
  with pytest.raises(UserError, match='where nothing is, got .*, and a.npz exists. Choose another, or add --overwrite'):
    saving.save(made.network(), str(path))
  assert path.read_text() == 'mine'
  saving.save(made.network(), str(path), overwrite=True)
  made.assert_same(loading.load(str(path)), made.network())


def test_a_folder_of_other_things_is_never_overwritten(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'thesis').mkdir()
  (tmp_path / 'thesis' / 'main.tex').write_text('mine')
  with pytest.raises(UserError, match='that may be overwritten, got .*/thesis: only files, and folders that this job'):
    saving.save(made.network(), str(tmp_path / 'thesis'), overwrite=True)
  assert (tmp_path / 'thesis' / 'main.tex').read_text() == 'mine'


def test_a_run_directory_and_a_file_beside_are_not_overwritten(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'run' / 'checkpoints' / '900').mkdir(parents=True)
  (tmp_path / 'run' / 'config.json').write_text('{}')
  with pytest.raises(UserError, match='expected a path that may be overwritten'):
    saving.save(made.network(), str(tmp_path / 'run'), overwrite=True, family='run')
  assert (tmp_path / 'run' / 'checkpoints' / '900').is_dir()
  (tmp_path / 'a.npz.json').write_text('mine')
  with pytest.raises(UserError, match='and a.npz.json exists'):
    saving.save(made.network(), str(tmp_path / 'a.npz'))
  saving.save(made.network(), str(tmp_path / 'folder'))
  before = (tmp_path / 'folder' / 'config.json').read_bytes()
  (tmp_path / 'folder' / 'config.json').unlink()
  saving.save(made.network(), str(tmp_path / 'folder'), overwrite=True)
  assert (tmp_path / 'folder' / 'config.json').read_bytes() == before
  assert sorted(p.name for p in tmp_path.iterdir()) == ['a.npz.json', 'folder', 'run']


def test_what_a_format_does_not_carry_is_listed(tmp_path: pathlib.Path) -> None:
  how = made.HOW._replace(interpolation=Interpolation.BILINEAR, antialias=False)
  _, lost = saving.save(made.network(preprocess=how), str(tmp_path / 'hf'))
  assert lost == ['preprocessing antialias (False, read back True)']


@pytest.mark.parametrize(('positions', 'name'), [
    (OF_MAE, 'a.pth'), (OF_MAE, 'a.npz'), (OF_MAE, 'folder'),
    (schema.SinCos(), 'a.safetensors')])
def test_fixed_positions_become_a_table_where_a_format_wants_one(
    positions: schema.SinCos, name: str, tmp_path: pathlib.Path) -> None:
  found = made.network(positions=positions)
  _, lost = saving.save(found, str(tmp_path / name))
  assert lost == [f'that positions are fixed ({positions.frequencies.value}): they are written as a table']
  table = loading.load(str(tmp_path / name)).params['backbone']['positions']
  np.testing.assert_array_equal(table[0, 1:], resize.fixed(positions, (4, 4), 32))
  assert not table[:, 0].any()


@pytest.mark.parametrize(('changes', 'says'), [
    ({'block.branch_scale': .5}, r'branch_scale=0.5 \(read back: 1.0\)'),
    ({'positions.at': PositionsAt.SHARED}, r'positions.at=shared \(read back: stem\)'),
    ({'norm.eps': 1e-5}, r'norm.eps=1e-05 \(read back: 1e-06\)')])
def test_what_would_be_another_network_is_not_written(changes: dict, says: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=f'--family: expected a format that can hold this .* cannot say .*{says}'):
    saving.save(made.network(**changes), str(tmp_path / 'folder'), family='timm')
  assert not list(tmp_path.iterdir())


def test_a_file_that_reads_back_otherwise_is_not_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  def spoiled(path: pathlib.Path, tensors: dict) -> None:
    files_write(path, {name: x * np.float32(1.0000001) for name, x in tensors.items()})

  files_write = files.write_npz
  monkeypatch.setattr(files, 'write_npz', spoiled)
  with pytest.raises(UserError, match='expected every bit as it was written, got .*Nothing was kept'):
    saving.save(made.network(), str(tmp_path / 'a.npz'))
  assert not list(tmp_path.iterdir())
  (tmp_path / 'a.npz').write_text('mine')
  with pytest.raises(UserError, match='expected every bit as it was written'):
    saving.save(made.network(), str(tmp_path / 'a.npz'), overwrite=True)
  assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [('a.npz', 'mine')]
