"""Files of people's own training: several networks, prefixes, checkpoints of Flax, quantized and non-square ones."""
from __future__ import annotations

import json
import math
import pathlib
import struct
from collections.abc import Callable
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import optax
import pytest
from flax import serialization, traverse_util

import vit_jax
from tests.weights import fuzz, test_pickles
from vit_jax.core import trees
from vit_jax.core.errors import UserError
from vit_jax.weights import files

Tensors = dict[str, np.ndarray]
TIMM, FLAX = fuzz.vit('timm'), fuzz.vit('vision_transformer')
OTHER = {name: x + 1 for name, x in TIMM.items()}


def prefixed(prefix: str, tensors: Tensors) -> Tensors:
  return {prefix + name: x for name, x in tensors.items()}


def torch(path: pathlib.Path, content: dict[str, Any]) -> pathlib.Path:
  """Writes a file as `torch.save` of dicts of tensors in dicts."""
  def tensor(x: Any) -> Any:
    if isinstance(x, dict):
      return {name: tensor(one) for name, one in x.items()}
    strides = tuple(math.prod(x.shape[i + 1:]) for i in range(x.ndim)) if isinstance(x, np.ndarray) else ()
    return test_pickles.Tensor(x.astype(np.float32).ravel(), x.shape, strides) if isinstance(x, np.ndarray) else x

  test_pickles.write(path, tensor(content))
  return path


def load(path: pathlib.Path, **settings: str) -> vit_jax.Model:
  return vit_jax.load(path, **{'model': 'heads=2', **settings})


def is_same(model: vit_jax.Model, tensors: Tensors) -> bool:
  """Whether a network has the norm and the positions of a file, and the head, if the file has one."""
  params = model.weights.params
  norm = params['backbone']['norm']['scale']
  wanted = tensors['norm.weight'] if 'norm.weight' in tensors else tensors['Transformer/encoder_norm/scale']
  return bool(np.array_equal(norm, wanted)) and ('head.bias' not in tensors or bool(
      np.array_equal(params['head']['bias'], tensors['head.bias'])))


@pytest.mark.parametrize('write', [files.write_safetensors, torch])
@pytest.mark.parametrize('prefix', ['module._orig_mod.', 'model.model.', 'net.', 'base_model.model.', 'my.own.vit.'])
def test_a_prefix_that_all_names_share_is_left_out(
    prefix: str, write: Callable[[pathlib.Path, Tensors], Any], tmp_path: pathlib.Path) -> None:
  write(tmp_path / 'a', prefixed(prefix, TIMM))
  assert is_same(load(tmp_path / 'a'), TIMM)


def test_a_head_beside_a_prefixed_network_is_its_head_and_another_tensor_is_an_error(tmp_path: pathlib.Path) -> None:
  found = prefixed('net.', TIMM)
  found |= {name: found.pop(f'net.{name}') for name in ('head.weight', 'head.bias')}
  files.write_safetensors(tmp_path / 'a', found)
  assert is_same(load(tmp_path / 'a'), TIMM)
  files.write_safetensors(tmp_path / 'b', found | {'neck.weight': np.ones((2, 2), np.float32)})
  with pytest.raises(UserError, match=r'1 tensors have no place(.|\n)*neck.weight(.|\n)*with --view=net\.$'):
    load(tmp_path / 'b')
  assert load(tmp_path / 'b', view='net').weights.num_classes == 0


IJEPA = {name: x for name, x in TIMM.items() if not name.startswith(('head', 'cls'))} | {
    'pos_embed': TIMM['pos_embed'][:, 1:]}
CASES = {  # content, the network that is read, others, and a view with the tensors of another
    'teacher': ({'student': prefixed('module.backbone.', OTHER), 'teacher': prefixed('backbone.', TIMM), 'epoch': 3},
                'teacher', 'student'),
    'average': ({'model': TIMM, 'model_ema': OTHER, 'args': None}, 'model', 'model_ema'),
    'basicsr': ({'params': TIMM, 'params_ema': OTHER}, 'params', 'params_ema'),
    'lightning': ({'state_dict': {**prefixed('teacher.', TIMM), **prefixed('student.', OTHER)}}, 'state_dict/teacher',
                  'state_dict/student'),
    'around': ({**TIMM, **prefixed('ema.', OTHER)}, 'the one without a name', 'ema'),
    'deep': ({'state': {'net': TIMM}, 'optimizer': {'lr': .1}}, '', ''),
    'one': ({'model_state_dict': TIMM, 'loss': .3}, '', '')}


@pytest.mark.parametrize('case', CASES)
def test_of_several_networks_the_report_names_the_one_that_was_read(case: str, tmp_path: pathlib.Path) -> None:
  content, chosen, other = CASES[case]
  path = torch(tmp_path / 'a.pth', content)
  found = load(path)
  assert is_same(found, TIMM)
  note = f'Network: {chosen}, of several in the file. --view={other} reads another.'
  assert (note in found.weights.report.text()) == bool(other)
  if other:
    assert is_same(load(path, view=other), OTHER) and is_same(load(path, view=other.rpartition('/')[2]), OTHER)
    with pytest.raises(UserError, match=rf"--view: expected one of the networks in the file \(.*{other}.*got 'best'"):
      load(path, view='best')
  else:
    with pytest.raises(UserError, match='--view: expected'):
      load(path, view='best')


def test_checkpoints_of_ijepa_are_the_target_encoder(tmp_path: pathlib.Path) -> None:
  predictor = {'module.predictor_embed.weight': np.ones((4, 8), np.float32)}
  shifted = {name: x + 1 for name, x in IJEPA.items()}
  path = torch(tmp_path / 'jepa-latest.pth.tar', {
      'encoder': prefixed('module.', shifted), 'predictor': predictor, 'opt': {}, 'epoch': 1,
      'target_encoder': prefixed('module.', IJEPA)})
  found = load(path)
  assert is_same(found, IJEPA) and found.weights.preprocess.mean == (.485, .456, .406)
  assert ('predictor/module.predictor_embed.weight', 'dropped') in [
      line[:2] for line in found.weights.report.of('dropped')]
  assert is_same(load(path, view='encoder'), shifted)


def test_checkpoints_of_dinov2_are_read_without_their_heads(tmp_path: pathlib.Path) -> None:
  own = {name.replace('blocks.', 'blocks.0.'): x for name, x in TIMM.items() if not name.startswith('head')}
  own |= {f'blocks.0.{i}.ls{n}.gamma': np.full(8, .5, np.float32) for i in (0, 1) for n in (1, 2)}
  own['mask_token'] = np.zeros((1, 8), np.float32)
  heads = {f'{head}.{name}': np.ones((3, 3), np.float32) for head in ('dino_head', 'ibot_head')
           for name in ('mlp.0.weight', 'last_layer.weight_g', 'last_layer.weight_v')}
  path = torch(tmp_path / 'teacher_checkpoint.pth', {'teacher': prefixed('backbone.', own) | heads})
  found = load(path)
  assert is_same(found, own) and found.weights.family == 'dinov2' and found.num_layers == 2
  assert {line.name for line in found.weights.report.of('dropped')} >= heads.keys()


def test_networks_of_unknown_names_are_chosen_by_a_person(tmp_path: pathlib.Path) -> None:
  path = torch(tmp_path / 'a.pth', {'first': TIMM, 'second': OTHER})
  with pytest.raises(UserError, match=r'--view: expected one of the networks in the file \(first, second\), got none'):
    load(path)
  assert is_same(load(path, view='second'), OTHER)
  files.write_safetensors(tmp_path / 'b', TIMM)
  with pytest.raises(UserError, match="--view: expected none for a file with one network, got 'ema'. Leave it out"):
    load(tmp_path / 'b', view='ema')
  with pytest.raises(UserError, match='its 2 tensors are named as in no known family.*: better/x, other/y'):
    load(torch(tmp_path / 'c.pth', {'other': {'y': np.ones(2)}, 'better': {'x': np.ones(2)}}))


# Flax

TREE = traverse_util.unflatten_dict(FLAX, sep='/')
DOUBLE = traverse_util.unflatten_dict({name: 2 * x for name, x in FLAX.items()}, sep='/')


@pytest.mark.parametrize('content', [
    {'params': TREE}, {'params': TREE, 'opt_state': ..., 'step': 9}, (TREE, ..., 9), TREE,
    {'optimizer': {'target': {'params': TREE}}}, {'params': TREE, 'ema_params': DOUBLE}])
def test_checkpoints_of_flax_are_the_networks_that_were_written(content: Any, tmp_path: pathlib.Path) -> None:
  state = optax.sgd(.1, momentum=.9).init(TREE)
  if isinstance(content, tuple):
    content = tuple(state if one is ... else one for one in content)
  else:
    content = {name: state if one is ... else one for name, one in content.items()}
  (tmp_path / 'checkpoint_9').write_bytes(serialization.to_bytes(content))
  np.savez(tmp_path / 'same.npz', **FLAX)  # type: ignore[arg-type]
  one, two = load(tmp_path / 'checkpoint_9').weights, load(tmp_path / 'same.npz').weights
  assert one.family == 'vision_transformer' and one.model == two.model
  for name, leaf in trees.flatten(two.params).items():
    np.testing.assert_array_equal(trees.flatten(one.params)[name], leaf)
  assert ('--view=ema_params' in one.report.text()) == ('ema_params' in content)


def test_pieces_and_dtypes_of_flax_are_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(serialization, 'MAX_CHUNK_SIZE', 64)
  half = {name: x.astype(ml_dtypes.bfloat16) for name, x in FLAX.items()}
  for number, tensors in enumerate((FLAX, half)):
    (tmp_path / f'{number}').write_bytes(serialization.to_bytes(traverse_util.unflatten_dict(tensors, sep='/')))
    found = files.read(tmp_path / f'{number}')
    assert found.keys() == FLAX.keys()
    for name, x in found.items():
      np.testing.assert_array_equal(x, tensors[name].astype(np.float32))


def test_a_flax_model_of_transformers_is_that_of_pytorch(tmp_path: pathlib.Path) -> None:
  d, rng = 8, np.random.default_rng(0)
  dense = {'embeddings/patch_embeddings/projection': (4, 4, 3, d), 'classifier': (d, 3)}
  for i in range(2):
    at = f'encoder/layer/{i}'
    dense |= {f'{at}/attention/attention/{name}': (d, d) for name in ('query', 'key', 'value')}
    dense |= {f'{at}/attention/output/dense': (d, d), f'{at}/intermediate/dense': (d, 12)}
    dense |= {f'{at}/output/dense': (12, d)}
  norms = ['layernorm', *(f'encoder/layer/{i}/layernorm_{x}' for i in range(2) for x in ('before', 'after'))]
  own = {f'{name}/kernel': rng.random(shape) for name, shape in dense.items()}
  own |= {f'{name}/bias': rng.random(shape[-1]) for name, shape in dense.items()}
  own |= {f'{name}/{leaf}': rng.random(d) for name in norms for leaf in ('scale', 'bias')}
  own |= {'embeddings/cls_token': rng.random((1, 1, d)), 'embeddings/position_embeddings': rng.random((1, 5, d))}
  own = {name if name.startswith('classifier') else f'vit/{name}': x.astype(np.float32) for name, x in own.items()}
  torch_names = {}
  for name, x in own.items():
    x = x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T if name.endswith('kernel') else x
    torch_names[name.replace('/kernel', '/weight').replace('/scale', '/weight').replace('/', '.')] = x
  for folder in ('flax', 'torch'):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / 'config.json').write_text(json.dumps({
        'model_type': 'vit', 'num_attention_heads': 2, 'image_size': 8, 'patch_size': 4, 'layer_norm_eps': 1e-12,
        'hidden_act': 'gelu'}))
  (tmp_path / 'flax' / 'flax_model.msgpack').write_bytes(
      serialization.to_bytes(traverse_util.unflatten_dict(own, sep='/')))
  files.write_safetensors(tmp_path / 'torch' / 'model.safetensors', torch_names)
  one, two = (vit_jax.load(tmp_path / folder).weights for folder in ('flax', 'torch'))
  assert (one.family, one.model) == ('huggingface', two.model)
  for name, leaf in trees.flatten(two.params).items():
    np.testing.assert_array_equal(trees.flatten(one.params)[name], leaf)


def packed(*parts: Any, code: int = 1) -> bytes:
  return msgpack.packb({'a': msgpack.ExtType(code, msgpack.packb(list(parts)))})


NESTED = b'\x81\xa1a' + b'\xdd\x00\x00\x03\xe8' * 900  # lists of 1,000 in one another


@pytest.mark.parametrize(('content', 'says'), [
    (packed([2], 'float32', b'1234'), 'takes 8 bytes, and 4 are there'),
    (packed([-1], 'float32', b'1234'), 'a shape that cannot be'),
    (packed([1], 'object', b'1234'), "an array of the dtype 'object'"),
    (packed([1], 'float32'), 'not a shape, a dtype and numbers'),
    (packed([1], 'float32', b'1234', code=9), 'it has the extension 9, which Flax does not write'),
    (b'\x81\xa1a\xd6\xff\x00\x00\x00\x01', 'it has a time, which Flax does not write'),
    (msgpack.packb({'a': {7: 1}}), 'damaged or cut short'), (packed([1], 'float32', b'1234')[:-1], 'end early'),
    (packed([1], 'float32', b'1234') + b'0', '1 bytes follow'), (NESTED, 'damaged or cut short'),
    (b'\x81\xa1a\xdd\x7f\xff\xff\xff', 'damaged or cut short'), (b'\x81\xa1a\xc9\x7f\xff\xff\xff\x01', 'end early'),
    (b'\x81\xa1a\xdc\x03\xe8' + (b'\xdc\x03\xe8' + b'\x80' * 1000) * 1000, 'more than 1,000,000 values'),
    (msgpack.packb({'step': 1}), 'expected tensors, got a file without any')])
def test_a_damaged_checkpoint_of_flax_is_an_error_with_a_reason(
    content: bytes, says: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'checkpoint_1').write_bytes(content)
  with pytest.raises(UserError, match=says):
    load(tmp_path / 'checkpoint_1')


# Quantized

CONTAINERS: dict[str, Callable[[pathlib.Path, Tensors], Any]] = {
    'npz': lambda path, tensors: np.savez(path.open('wb'), **tensors),  # type: ignore[arg-type]
    'msgpack': lambda path, tensors: path.write_bytes(
        serialization.to_bytes(traverse_util.unflatten_dict(tensors, sep='/')))}


@pytest.mark.parametrize('container', CONTAINERS)
@pytest.mark.parametrize('dtype', [np.int8, np.uint8, np.int32, np.int64, np.bool_, ml_dtypes.float8_e4m3fn])
def test_integers_and_short_floating_point_are_no_parameters(
    container: str, dtype: Any, tmp_path: pathlib.Path) -> None:
  name = 'Transformer/encoderblock_1/MlpBlock_3/Dense_0/kernel'
  CONTAINERS[container](tmp_path / 'a', FLAX | {name: (100 * FLAX[name]).astype(dtype)})
  with pytest.raises(UserError, match=rf'in floating point of 16 to 64 bits, got .* for {name}: the file is quantized'):
    load(tmp_path / 'a')


@pytest.mark.parametrize(('kind', 'size'), [('I8', 1), ('U8', 1), ('F8_E5M2', 1), ('I16', 2), ('I32', 4)])
@pytest.mark.parametrize('name', ['blocks.0.attn.qkv.weight', 'blocks.1.norm1.bias', 'pos_embed'])
def test_a_quantized_safetensors_file_is_refused(kind: str, size: int, name: str, tmp_path: pathlib.Path) -> None:
  header, data = {}, b''
  for one, x in TIMM.items():
    new = bytes(x.size * size) if one == name else x.tobytes()
    header[one] = {'dtype': kind if one == name else 'F32', 'shape': list(x.shape),
                   'data_offsets': [len(data), len(data) + len(new)]}
    data += new
  text = json.dumps(header).encode()
  (tmp_path / 'a').write_bytes(struct.pack('<Q', len(text)) + text + data)
  with pytest.raises(UserError, match=f'for {name}: the file is quantized'):
    load(tmp_path / 'a')


@pytest.mark.parametrize('kind', ['F4', 'F8_E8M0', 'F6_E2M3'])
def test_dtypes_of_quantization_alone_are_no_damage(kind: str, tmp_path: pathlib.Path) -> None:
  header = json.dumps({'w': {'dtype': kind, 'shape': [4], 'data_offsets': [0, 4]}}).encode()
  (tmp_path / 'a').write_bytes(struct.pack('<Q', len(header)) + header + bytes(4))
  with pytest.raises(UserError, match=f'got a tensor of the dtype {kind}: the file is quantized'):
    load(tmp_path / 'a')


def test_packed_weights_and_their_config_are_refused_as_quantized(tmp_path: pathlib.Path) -> None:
  found = dict(TIMM)
  found['blocks.0.mlp.fc1.qweight'] = found.pop('blocks.0.mlp.fc1.weight')
  files.write_safetensors(tmp_path / 'a', found)
  with pytest.raises(UserError, match='some of them are of quantized weights'):
    load(tmp_path / 'a')
  (tmp_path / 'config.json').write_text(json.dumps({
      'model_type': 'vit', 'quantization_config': {'quant_method': 'bitsandbytes', 'load_in_8bit': True}}))
  files.write_safetensors(tmp_path / 'model.safetensors', TIMM)
  with pytest.raises(UserError, match=r"config.json: expected .* got quantization_config \('bitsandbytes'\): the"):
    load(tmp_path / 'model.safetensors')


# Grids

def grid(rows: int, **more: np.ndarray) -> Tensors:
  return {**TIMM, 'pos_embed': np.random.default_rng(rows).random((1, rows, 8)).astype(np.float32), **more}


NO_CLASS = {name: x for name, x in TIMM.items() if name != 'cls_token'}
REGISTERS = {'reg_token': np.ones((1, 4, 8), np.float32)}


@pytest.mark.parametrize(('tensors', 'said', 'px', 'first'), [
    (grid(1 + 2 * 4), '16x8', (16, 8), True), (grid(1 + 2 * 4), '8x16', (8, 16), True),
    (grid(9), '12', (12, 12), False), (grid(1 + 3 * 5), '12x20', (12, 20), True), (grid(16), '16', (16, 16), False),
    (grid(1 + 4), '', (8, 8), True), (grid(4, **REGISTERS), '', (8, 8), False),
    (grid(5 + 4, **REGISTERS), '8', (8, 8), True), (grid(5 * 10, **REGISTERS), '20x40', (20, 40), False)])
def test_the_class_token_has_the_first_row_unless_the_size_of_images_says_otherwise(
    tensors: Tensors, said: str, px: tuple[int, int], first: bool, tmp_path: pathlib.Path) -> None:
  files.write_safetensors(tmp_path / 'a', tensors)
  found = load(tmp_path / 'a', model=f'heads=2,image={said}' if said else 'heads=2').weights
  table = found.params['backbone']['positions']
  assert found.preprocess.image_px == px and len(table[0]) == 1 + px[0] * px[1] // 16
  np.testing.assert_array_equal(table[0, -3:], tensors['pos_embed'][0, -3:])
  assert bool(table[0, 0].any()) == first
  side = px[0] // 4
  assert (f'{side * side} patches are assumed to be a square, {side} x {side}.' in found.report.text()) == (not said)


@pytest.mark.parametrize(('tensors', 'said', 'says'), [
    (grid(1 + 2 * 4), '', r'its 9 rows of positions \(1 \+ 8 or 9 patches\), got none.*Set --model=image=HEIGHTxWIDTH'),
    (grid(1 + 3 * 5), '', r'its 16 rows of positions \(1 \+ 15 or 16 patches\), got none'),
    (grid(1 + 2 * 4), ',image=20', 'got 20x20, which has 5 x 5 patches of 4 px. Correct it.'),
    (grid(5 * 10, **REGISTERS), '', r'its 50 rows of positions \(50 or 5 \+ 45 patches\), got none'),
    (NO_CLASS | {'pos_embed': np.ones((1, 8, 8), np.float32)}, '', r'its 8 rows of positions \(8 patches\), got none')])
def test_a_grid_that_nothing_says_is_asked_for(
    tensors: Tensors, said: str, says: str, tmp_path: pathlib.Path) -> None:
  files.write_safetensors(tmp_path / 'a', tensors)
  with pytest.raises(UserError, match=says):
    load(tmp_path / 'a', model=f'heads=2{said}')


def test_a_config_beside_a_file_says_its_grid(tmp_path: pathlib.Path) -> None:
  files.write_safetensors(tmp_path / 'model.safetensors', grid(1 + 2 * 4))
  (tmp_path / 'config.json').write_text(json.dumps({
      'architecture': 'vit_tiny_patch16_224', 'model_args': {'num_heads': 2}, 'pretrained_cfg': {
          'input_size': [3, 8, 16]}}))
  found = vit_jax.load(tmp_path).weights
  assert found.preprocess.image_px == (8, 16) and 'assumed to be a square' not in found.report.text()
  assert found.params['backbone']['positions'][0, 0].any()


# Messages

def test_weights_for_other_channels_say_how_to_use_those_of_rgb(tmp_path: pathlib.Path) -> None:
  files.write_safetensors(tmp_path / 'a', TIMM | {'patch_embed.proj.weight': np.ones((8, 2, 4, 4), np.float32)})
  with pytest.raises(UserError, match=r'for RGB images, got backbone/stem/kernel for data.channels=2\..*Use those for'):
    load(tmp_path / 'a')


def test_a_folder_of_checkpoints_names_them(tmp_path: pathlib.Path) -> None:
  for step in (500, 1000):
    (tmp_path / f'checkpoint-{step}').mkdir()
    files.write_safetensors(tmp_path / f'checkpoint-{step}' / 'model.safetensors', TIMM)
  with pytest.raises(UserError, match=r'in its folders: checkpoint-1000, checkpoint-500\. Give the path of one'):
    load(tmp_path)


@pytest.mark.parametrize(('resample', 'says'), [
    (1, 'bilinear, antialiased is in place of Lanczos of preprocessor_config.json, which is not available here'),
    (0, 'in place of nearest of'), (9, 'in place of the filter 9 of')])
def test_a_filter_that_is_not_here_is_said(resample: int, says: str, tmp_path: pathlib.Path) -> None:
  files.write_safetensors(tmp_path / 'model.safetensors', TIMM)
  (tmp_path / 'preprocessor_config.json').write_text(json.dumps({
      'resample': resample, 'size': {'height': 8, 'width': 8}, 'image_mean': [.5] * 3, 'image_std': [.5] * 3}))
  assert says in load(tmp_path / 'model.safetensors').weights.report.text()


def test_a_size_of_the_longest_edge_is_named(tmp_path: pathlib.Path) -> None:
  files.write_safetensors(tmp_path / 'model.safetensors', TIMM)
  (tmp_path / 'preprocessor_config.json').write_text(json.dumps({'size': {'longest_edge': 512}}))
  with pytest.raises(UserError, match='size: expected height and width, or shortest_edge, and not longest_edge alone'):
    load(tmp_path / 'model.safetensors')


@pytest.mark.parametrize(('name', 'says'), [
    ('vit_base_patch16_224', 'Did you mean timm/vit_base_patch16_224.augreg2_in21k_ft_in1k or'),
    ('vit_base_patch16_224_in21k', r'Did you mean timm/vit_base_patch16_224\.augreg_in21k\?'),
    ('vit_small_patch16_225', 'Did you mean timm/vit_small_patch16_224.augreg_in21k_ft_in1k')])
def test_a_name_of_timm_leads_to_its_weights(name: str, says: str) -> None:
  with pytest.raises(UserError, match=says):
    vit_jax.load(name)
