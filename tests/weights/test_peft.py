"""Adapters of PEFT: outputs and gradients are those of transformers and timm, and written files are PEFT's.

golden_peft.npz is made by make_golden_peft.py.
"""
from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import main
from vit_jax.config import schema
from vit_jax.core import documents, trees
from vit_jax.core.errors import UserError
from vit_jax.models import adapters
from vit_jax.parallel.sharding import FROZEN
from vit_jax.weights import files, inference, loading, peft, runs, saving
from vit_jax.weights.network import Weights

GOLDEN = np.load(pathlib.Path(__file__).with_name('golden_peft.npz'))
CASES = ('hf_lora', 'hf_dora', 'timm_lora', 'timm_dora')
CLOSE = 2e-5
"""Of logits of about 3: two blocks of sums of up to 24 terms in f32, in two programs, after GELU and softmax."""
OURS = {'attention.q_proj': 'attn/query', 'attention.k_proj': 'attn/key', 'attention.v_proj': 'attn/value',
        'attention.o_proj': 'attn/out', 'attn.proj': 'attn/out', 'mlp.fc1': 'mlp/up', 'mlp.fc2': 'mlp/down'}


def part(case: str, kind: str) -> dict[str, np.ndarray]:
  prefix = f'{case}/{kind}/'
  return {name.removeprefix(prefix): GOLDEN[name] for name in GOLDEN if name.startswith(prefix)}


def folder(case: str, where: pathlib.Path, **changed: Any) -> pathlib.Path:
  """A folder of PEFT as its users have it, with the base beside it."""
  base, own = where / 'base', where / 'adapter'
  base.mkdir()
  own.mkdir()
  files.write_safetensors(base / 'model.safetensors', part(case, 'base'))
  if case.startswith('hf'):
    (base / 'config.json').write_text(str(GOLDEN[f'{case}/base_config']))
  config = {**json.loads(str(GOLDEN[f'{case}/config'])), 'base_model_name_or_path': str(base), **changed}
  (own / 'adapter_config.json').write_text(json.dumps(config))
  files.write_safetensors(own / 'adapter_model.safetensors', part(case, 'adapter'))
  return own


def hints(case: str) -> str:
  return 'heads=2' if case.startswith('timm') else ''


_PROGRAMS: dict[str, Callable[..., Any]] = {}


def logits_of(found: Weights, case: str) -> np.ndarray:
  """For the images of the case, by one program for all networks of a shape."""
  key = repr((found.model, found.head, found.num_classes))
  program = _PROGRAMS.setdefault(key, jax.jit(inference.function(found)))
  return np.asarray(program(inference.parameters(found), jnp.asarray(GOLDEN[f'{case}/image'])).logits)


@pytest.mark.parametrize('case', CASES)
def test_a_folder_of_peft_is_read_merged_with_the_outputs_of_peft(case: str, tmp_path: pathlib.Path) -> None:
  found = loading.load(str(folder(case, tmp_path)), model=hints(case))
  np.testing.assert_allclose(logits_of(found, case), GOLDEN[f'{case}/logits'], atol=CLOSE)
  without = logits_of(loading.load(str(tmp_path / 'base'), model=hints(case)), case)
  assert np.abs(without - GOLDEN[f'{case}/logits']).max() > 100 * CLOSE


def settings(case: str) -> schema.Lora:
  config = json.loads(str(GOLDEN[f'{case}/config']))
  return schema.Lora(rank=config['r'], alpha=config['lora_alpha'], dora=config['use_dora'], rslora=config['use_rslora'],
                     targets='query,value' if case == 'hf_lora' else 'query,key,value,out,mlp/.*')


def split(case: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """PEFT's adapters, or their gradients, as our leaves `[L, ...]`; those of a joined qkv are in three."""
  found: dict[str, list[np.ndarray]] = {}
  for name, x in sorted(tensors.items()):
    if 'lora_' not in name:
      continue
    layer, leaf = name.removesuffix('.weight').rsplit('.', 1)
    kind = {'lora_A': 'lora_a', 'lora_B': 'lora_b', 'lora_magnitude_vector': 'lora_magnitude'}[leaf]
    end = '.'.join(layer.split('.')[-2:])
    if end == 'attn.qkv':
      thirds = [x] * 3 if kind == 'lora_a' else np.split(x, 3)
      pieces = dict(zip(('attn/query', 'attn/key', 'attn/value'), thirds, strict=True))
    else:
      pieces = {OURS[end]: x}
    for ours, piece in pieces.items():
      piece = piece.T
      if ours == 'attn/out' and kind == 'lora_a':
        piece = piece.reshape(2, 8, -1)
      elif ours in ('attn/query', 'attn/key', 'attn/value') and kind != 'lora_a':
        piece = piece.reshape(*piece.shape[:-1], 2, 8)
      found.setdefault(f'backbone/blocks/{ours}/{kind}', []).append(piece)
  return {name: np.stack(pieces) for name, pieces in found.items()}


@pytest.mark.parametrize('case', ['hf_lora', *(pytest.param(case, marks=pytest.mark.slow(
    reason='5 s each: the merged outputs with DoRA are compared by default')) for case in ('hf_dora', 'timm_dora'))])
def test_the_unmerged_network_has_the_outputs_and_gradients_of_peft(case: str, tmp_path: pathlib.Path) -> None:
  folder(case, tmp_path)
  base = loading.load(str(tmp_path / 'base'), model=hints(case))
  head = {'classifier': 'head', 'head': 'head'}
  tensors = part(case, 'adapter')
  trained = trees.unflatten(split(case, tensors))
  name = next(one for one in head if f'base_model.model.{one}.weight' in tensors)
  trained['head'] = {'kernel': tensors[f'base_model.model.{name}.weight'].T, 'bias':
                     tensors[f'base_model.model.{name}.bias']}
  weights = jnp.asarray(GOLDEN[f'{case}/weights'])

  def total(trained: Any) -> tuple[jax.Array, jax.Array]:
    network = adapters.network(trained, {'backbone': base.params['backbone']}, settings(case), key=None)
    logits = inference.function(base)({**network, 'state': {}}, jnp.asarray(GOLDEN[f'{case}/image'])).logits
    return (logits * weights).sum(), logits

  got, logits = jax.jit(jax.grad(total, has_aux=True))(jax.tree.map(jnp.asarray, trained))
  np.testing.assert_allclose(logits, GOLDEN[f'{case}/logits'], atol=CLOSE)
  wanted = part(case, 'gradient')
  np.testing.assert_allclose(got['head']['kernel'], wanted[f'base_model.model.{name}.weight'].T, rtol=1e-4, atol=1e-4)
  ours, theirs = trees.flatten({'backbone': got['backbone']}), split(case, wanted)
  assert ours.keys() == theirs.keys()
  for path, x in theirs.items():
    if case.startswith('timm') and '/lora_a' in path and path.split('/')[3] in ('query', 'key', 'value'):
      if 'query' not in path:
        continue  # the A of a joined qkv is one: its gradient is the sum of those of the three
      x_ours = sum(ours[path.replace('query', one)] for one in ('query', 'key', 'value'))
    else:
      x_ours = ours[path]
    np.testing.assert_allclose(x_ours, x, atol=1e-5 * np.abs(x).max() * 24, err_msg=path)


def run_of(case: str, where: pathlib.Path, family: str, *, lora: schema.Lora | None = None) -> pathlib.Path:
  """A run directory, as training leaves it, whose adapters are those of PEFT, at 24 px and with names of classes."""
  folder(case, where)
  base = loading.load(str(where / 'base'), model=hints(case))
  tensors = part(case, 'adapter')
  name = 'classifier' if case.startswith('hf') else 'head'
  trained = trees.unflatten(split(case, tensors))
  trained['head'] = {'kernel': np.ascontiguousarray(tensors[f'base_model.model.{name}.weight'].T),
                     'bias': tensors[f'base_model.model.{name}.bias']}
  recipe = inference.eval_recipe(base)
  config = schema.Config(model=base.model, lora=lora or settings(case), image_px=(16, 16),
                         init_from=str(where / 'base'), data=schema.Data(recipe=recipe))
  runs.write(where / 'run', config, trained, {FROZEN: {'backbone': base.params['backbone']}},
             class_names=tuple('abcde'), image_px=(16, 16))
  (where / 'run' / 'init.json').write_text(json.dumps({'init_from': {'source': str(where / 'base'), 'family': family}}))
  return where / 'run'


@pytest.mark.parametrize('case', ['hf_lora', 'hf_dora', 'timm_dora'])
def test_a_written_folder_has_the_tensors_of_peft(case: str, tmp_path: pathlib.Path) -> None:
  run = run_of(case, tmp_path, 'huggingface' if case.startswith('hf') else 'timm')
  path = saving.save_adapters(str(run), str(tmp_path / 'written'))
  got, want = files.read(path / 'adapter_model.safetensors'), part(case, 'adapter')
  assert got.keys() == want.keys()
  for name, x in want.items():
    np.testing.assert_array_equal(got[name], x, err_msg=name)
  config, theirs = (json.loads(text) for text in ((path / 'adapter_config.json').read_text(),
                                                  str(GOLDEN[f'{case}/config'])))
  assert all(config[name] == theirs[name] for name in ('peft_type', 'r', 'lora_alpha', 'use_dora', 'use_rslora',
                                                      'modules_to_save', 'rank_pattern', 'alpha_pattern'))
  assert loading.load(str(path), model=hints(case)).class_names == tuple('abcde')


@pytest.mark.parametrize(('targets', 'rank'), [('query,value', 4), ('query,key,value', 6)])
@pytest.mark.parametrize('rslora', [False, True])
def test_adapters_of_their_own_for_query_and_value_are_joined_for_timm(
    targets: str, rank: int, rslora: bool, tmp_path: pathlib.Path) -> None:
  lora = schema.Lora(rank=2, alpha=6., targets=f'{targets},out,mlp/.*', dora=True, rslora=rslora)
  run = run_of('timm_dora', tmp_path, 'timm', lora=lora)
  found = runs.read(run, view='')
  rng = np.random.default_rng(0)
  leaves = {name: (x + .1 * rng.normal(size=x.shape)).astype(np.float32)
            for name, x in trees.flatten(found.trained).items() if 'key' in targets or '/key' not in name}
  shutil.rmtree(run / 'checkpoints')
  runs.write(run, found.config, trees.unflatten(leaves), {FROZEN: found.frozen}, class_names=tuple('abcde'),
             image_px=(16, 16))
  path = saving.save_adapters(str(run), str(tmp_path / 'written'))
  low = peft.read(path).layers['blocks.1.attn.qkv']
  assert low.a.shape == (rank, 16) and low.b.shape == (48, rank) and low.scale == pytest.approx(lora.scale)
  assert (low.b[16:32] == 0).all() == ('key' not in targets)
  again, merged = (trees.flatten(loading.load(str(one), model=hint).params)
                   for one, hint in ((path, 'heads=2'), (run, '')))
  for name, x in merged.items():
    np.testing.assert_allclose(again[name], x, atol=1e-6 * np.abs(x).max(), err_msg=name)


def test_only_runs_with_adapters_are_written(tmp_path: pathlib.Path) -> None:
  folder('timm_lora', tmp_path)
  with pytest.raises(UserError, match='expected a run with --family=peft, got .*base. Train adapters with'):
    saving.save_adapters(str(tmp_path / 'base'), str(tmp_path / 'written'))
  run = run_of_plain(tmp_path)
  with pytest.raises(UserError, match='expected a run that trained adapters, got .*, which trained all weights'):
    saving.save_adapters(str(run), str(tmp_path / 'written'))
  assert not (tmp_path / 'written').exists()


def run_of_plain(where: pathlib.Path) -> pathlib.Path:
  found = loading.load(str(where / 'base'), model='heads=2')
  runs.write(where / 'plain', schema.Config(model=found.model, image_px=(16, 16)), found.params, {},
             class_names=(), image_px=(16, 16))
  return where / 'plain'


def test_patterns_decide_the_scale_of_single_layers(tmp_path: pathlib.Path) -> None:
  found = peft.read(folder('timm_lora', tmp_path))
  assert {layer.rsplit('.', 1)[1]: low.scale for layer, low in found.layers.items()} == {
      'qkv': 4 / 3, 'proj': 3., 'fc1': 3., 'fc2': 3.}


@pytest.mark.parametrize(('changed', 'message'), [
    ({'peft_type': 'IA3'}, "expected peft_type LORA .*, got 'IA3'. Merge the adapters in PEFT"),
    ({'fan_in_fan_out': True}, 'expected fan_in_fan_out false, got true. Merge'),
    ({'init_lora_weights': 'pissa_niter_4'}, "expected init_lora_weights that .*, got 'pissa_niter_4'. Merge"),
    ({'init_lora_weights': 'olora'}, "the base weights as they are, got 'olora'. Merge the adapters in PEFT"),
    ({'base_model_name_or_path': None}, 'expected the weights that the adapters are for .*, got none. Set it to')])
def test_other_adapters_are_refused(changed: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=message):
    loading.load(str(folder('timm_lora', tmp_path, **changed)), model='heads=2')


def test_adapters_of_other_weights_are_named(tmp_path: pathlib.Path) -> None:
  own = folder('timm_lora', tmp_path)
  tensors = {name: x for name, x in part('timm_lora', 'base').items() if 'blocks.1.attn.qkv' not in name}
  files.write_safetensors(tmp_path / 'base' / 'model.safetensors', tensors)
  with pytest.raises(UserError, match=r'blocks.1.attn.qkv: expected a matrix \[48, 16\], got none'):
    loading.load(str(own), model='heads=2')


def test_adapters_of_quantized_weights_are_refused(tmp_path: pathlib.Path) -> None:
  """Merged, their numbers would be taken for parameters."""
  path = folder('timm_lora', tmp_path)
  base = next(one for one in tmp_path.rglob('*.safetensors') if one.name != 'adapter_model.safetensors')
  own = {name: x if 'qkv' not in name else np.int32(100 * x) for name, x in files.read(base).items()}
  np.savez(base.open('wb'), **own)  # type: ignore[arg-type]
  with pytest.raises(UserError, match=r'got int32.* for blocks.0.attn.qkv.weight: the file is quantized'):
    loading.load(str(path), model=hints('timm_lora'))
  low = {name: np.int8(100 * x) for name, x in part('timm_lora', 'adapter').items()}
  np.savez((path / 'adapter_model.safetensors').open('wb'), **low)  # type: ignore[arg-type]
  with pytest.raises(UserError, match=r'got int8.* for .*lora_A.weight and .* more: the file is quantized'):
    loading.load(str(path), model=hints('timm_lora'))


def test_a_convolution_has_no_place(tmp_path: pathlib.Path) -> None:
  own = folder('timm_lora', tmp_path)
  tensors = part('timm_lora', 'adapter') | {
      'base_model.model.patch_embed.proj.lora_A.weight': np.zeros((2, 3, 8, 8), np.float32),
      'base_model.model.patch_embed.proj.lora_B.weight': np.zeros((16, 2, 1, 1), np.float32)}
  files.write_safetensors(own / 'adapter_model.safetensors', tensors)
  with pytest.raises(UserError, match='patch_embed.proj: expected lora_A .* of a dense layer, .*, got lora_A'):
    loading.load(str(own), model='heads=2')


def damaged(case: str, where: pathlib.Path, text: str) -> pathlib.Path:
  """A folder whose config is this text."""
  own = folder(case, where)
  (own / 'adapter_config.json').write_text(text)
  return own


@pytest.mark.parametrize(('changed', 'says'), [
    ({'lora_alpha': None}, 'lora_alpha: expected a finite number from 0 to 1,000,000, got null'),
    ({'lora_alpha': 'large'}, "lora_alpha: expected a finite number from 0 to 1,000,000, got 'large'"),
    ({'lora_alpha': [8]}, r'lora_alpha: expected a finite number from 0 to 1,000,000, got \[8\]'),
    ({'lora_alpha': 1e999}, 'expected a JSON object, got JSON with Infinity, which is not a number'),
    ({'lora_alpha': True}, 'lora_alpha: expected a finite number .*, got true'),
    ({'alpha_pattern': [1]}, r'alpha_pattern: expected an object, got \[1\]'),
    ({'alpha_pattern': {'qkv': 'x'}}, "alpha_pattern.qkv: expected a finite number .*, got 'x'"),
    ({'alpha_pattern': {'(': 1}},
     r"alpha_pattern: expected names of layers or simple patterns of names, got '\('. Write"),
    ({'alpha_pattern': {'(a+)+': 1}}, 'expected names of layers or simple patterns of names'),
    ({'alpha_pattern': {'a*a*a*b': 1}}, 'expected names of layers or simple patterns of names'),
    ({'alpha_pattern': {'a?' * 50 + 'a' * 50: 1}}, 'expected names of layers or simple patterns of names'),
    ({'alpha_pattern': {'(aa|a)' * 30: 1}}, 'expected names of layers or simple patterns of names'),
    ({'base_model_name_or_path': 'google/vit', 'revision': 'refs/pr/3'},
     "adapter_config.json, revision: expected a branch, a tag or a commit without a slash, got 'refs/pr/3'"),
    ({'use_rslora': 'no'}, "use_rslora: expected true or false, got 'no'"),
    ({'base_model_name_or_path': ['a']}, 'base_model_name_or_path: expected text .*, got a list of 1'),
    ({'base_model_name_or_path': 7}, 'base_model_name_or_path: expected text .*, got 7'),
    ({'base_model_name_or_path': 'a\0b'}, 'base_model_name_or_path: expected text without control'),
    ({'base_model_name_or_path': 'a' * 5000}, 'base_model_name_or_path: expected a path or an address'),
    ({'base_model_name_or_path': 'b' * 900}, 'expected'),
    ({'peft_type': ['LORA']}, 'expected peft_type .* got a list of 1')])
def test_a_config_with_other_values_is_named_with_the_value(
    changed: dict[str, Any], says: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=says) as caught:
    loading.load(str(folder('timm_lora', tmp_path, **changed)), model='heads=2')
  assert '\x00' not in str(caught.value)


def test_a_pattern_may_list_all_layers(tmp_path: pathlib.Path) -> None:
  layers = '|'.join(map(str, range(12)))
  (tmp_path / 'adapter_config.json').write_text(json.dumps({'alpha_pattern': {rf'blocks\.({layers})\.attn': 4.}}))
  (pattern, alpha), = peft._patterns(documents.read(tmp_path / 'adapter_config.json', expected='a config'))
  assert alpha == 4. and pattern.match('blocks.11.attn') and not pattern.match('blocks.12.attn')


@pytest.mark.parametrize(('text', 'says'), [
    ('', 'expected a JSON object, got an empty file'), ('[1]', r'expected a JSON object, got \[1\]'),
    ('{"peft_type": ', 'got no JSON at line 1, column 15, where it ends'),
    ('null', 'expected a JSON object, got null')])
def test_a_config_that_is_no_object_is_refused(text: str, says: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=f'adapter_config.json: .*{says}'):
    loading.load(str(damaged('timm_lora', tmp_path, text)), model='heads=2')


@pytest.mark.parametrize(('leaf', 'shape'), [
    ('lora_A.weight', (0, 16)), ('lora_B.weight', (48, 0)), ('lora_A.weight', (2, 0)), ('lora_A.weight', (5, 16)),
    ('lora_magnitude_vector', (47,)), ('lora_magnitude_vector', (0,)), ('lora_magnitude_vector', (1, 49))])
def test_adapters_of_impossible_shapes_are_listed(leaf: str, shape: tuple[int, ...], tmp_path: pathlib.Path) -> None:
  own = folder('timm_dora', tmp_path)
  tensors = part('timm_dora', 'adapter')
  name = next(one for one in tensors if 'attn.qkv' in one and leaf.split('.')[0] in one)
  files.write_safetensors(own / 'adapter_model.safetensors', tensors | {name: np.zeros(shape, np.float32)})
  with pytest.raises(UserError, match=r'attn.qkv: expected lora_A \[r, in\] and lora_B \[out, r\] .*, got lora_'):
    loading.load(str(own), model='heads=2')


@pytest.mark.parametrize(('content', 'says'), [
    ('[]', 'weights.json: expected a JSON object'),
    ('{}', 'weights.json, preprocess: expected the field mean, got none'),
    ('{"preprocess": 3}', 'weights.json, preprocess: expected an object, got 3')])
def test_the_file_beside_adapters_is_checked(content: str, says: str, tmp_path: pathlib.Path) -> None:
  own = folder('timm_lora', tmp_path)
  (own / 'weights.json').write_text(content)
  with pytest.raises(UserError, match=says):
    loading.load(str(own), model='heads=2')


@pytest.mark.parametrize('base', [
    'https://me:hunter2@127.0.0.1:9/a.safetensors', 'hf://owner/name', 'owner/name', 'gs://bucket/a.npz',
    'ViT-B_16-i21k', 'timm/vit_base_patch16_224.augreg_in21k'])
def test_weights_that_only_the_config_names_are_downloaded_on_request_alone(
    base: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  asked: list[str] = []
  monkeypatch.setattr(peft.addresses, 'local', lambda where: asked.append(where) or tmp_path / 'base')
  own = folder('timm_lora', tmp_path, base_model_name_or_path=base)
  with pytest.raises(UserError, match='expected adapters for weights on this machine, got adapters for .* Add --allow'):
    peft.resolve(peft.read(own), 'w', allow_download=False)
  assert not asked
  assert peft.resolve(peft.read(own), 'w', allow_download=True) == tmp_path / 'base'
  assert [one.removeprefix('hf://') for one in asked] == [base.removeprefix('hf://')]
  with pytest.raises(UserError) as caught:
    peft.resolve(peft.read(own), 'w', allow_download=False)
  assert 'hunter2' not in str(caught.value)


def test_the_revision_of_weights_on_the_hub_is_read_and_written(tmp_path: pathlib.Path) -> None:
  run = run_of('timm_lora', tmp_path, 'timm')
  own = tmp_path / 'adapter'
  config = json.loads((own / 'adapter_config.json').read_text())
  for base, revision, address in (
      ('owner/name', 'v2', 'hf://owner/name@v2'), ('owner/name', None, 'hf://owner/name'),
      ('hf://owner/name/a.safetensors', None, 'hf://owner/name/a.safetensors')):
    wanted = {'base_model_name_or_path': base, 'revision': revision}
    (own / 'adapter_config.json').write_text(json.dumps({**config, **wanted}))
    assert peft.read(own).base == address
    (run / 'init.json').write_text(json.dumps({'init_from': {'source': address, 'family': 'timm'}}))
    path = saving.save_adapters(str(run), str(tmp_path / 'written'), overwrite=True)
    found = json.loads((path / 'adapter_config.json').read_text())
    assert {name: found[name] for name in wanted} == wanted
  (own / 'adapter_config.json').write_text(json.dumps({**config, 'revision': 'v2'}))
  assert peft.read(own).base == config['base_model_name_or_path'], 'a path has no revision'


def test_adapters_are_written_as_they_are_into_a_folder(tmp_path: pathlib.Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
  run = run_of('timm_lora', tmp_path, 'timm')
  (tmp_path / 'names.txt').write_text('a\nb\nc\nd\ne\n')
  for words, said in (
      (['--to=a.safetensors'], '--to: expected a folder with --family=peft, got a.safetensors. Change it.'),
      (['--to=a', f'--classes={tmp_path / "names.txt"}'], '--classes: expected none with --family=peft, got'),
      (['--to=a', '--preprocess=half'], '--preprocess: expected none with --family=peft, got half. Leave it out, as')):
    words = [words[0].replace('--to=', f'--to={tmp_path}/'), *words[1:]]
    assert main.run(['convert', f'--weights={run}', '--family=peft', *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / 'a').exists() and not (tmp_path / 'a.safetensors').exists()


def test_weights_at_a_relative_path_must_be_there(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  run = run_of('timm_lora', tmp_path, 'timm')
  (run / 'init.json').write_text(json.dumps({'init_from': {'source': 'base/model.safetensors', 'family': 'timm'}}))
  with pytest.raises(UserError, match='--weights: expected the weights that the run began with at base/model.safetens'):
    saving.save_adapters(str(run), str(tmp_path / 'written'))
  monkeypatch.chdir(tmp_path)
  path = saving.save_adapters(str(run), str(tmp_path / 'written'))
  assert peft.read(path).base == str(tmp_path / 'base' / 'model.safetensors')
