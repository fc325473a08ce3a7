"""Configs as JSON and back; overrides: settings by type, parts by name, and everything that is wrong in one error."""
from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib

import pytest

from vit_jax.config import engine, files, overrides, schema
from vit_jax.core.errors import UserError
from vit_jax.recipes import sizes


@pytest.mark.parametrize('name', files.list_names())
def test_every_config_comes_back_as_it_was(name: str) -> None:
  for config in files.load_study(name, []).runs.values():
    again = engine.from_json(engine.to_json(config))
    assert again == config and [type(s.value) for s in engine.fields(again)] == [
        float if type(s.value) is int and isinstance(t.value, float) else type(s.value)
        for s, t in zip(engine.fields(config), engine.fields(again), strict=True)]


def test_nested_parts_and_choices_come_back() -> None:
  config = schema.Config(
      model=schema.ViT(stem=schema.ResNetStem((2, 2)), pool=schema.Map()), image_px=(32, 48),
      optimizer=schema.Lion(rules=(schema.PathRule('head/.*', lr=schema.Ramp(0., 1.), frozen_until='3 epochs'),)),
      evals={'a': schema.TopK(views=('ema',)), 'b': schema.TopK(every='2 epochs')})
  again = engine.from_json(engine.to_json(config))
  assert again == config and isinstance(again.optimizer, schema.Lion)
  assert isinstance(again.optimizer.rules[0].lr, schema.Ramp) and isinstance(again.model, schema.ViT)
  assert isinstance(again.model.stem, schema.ResNetStem) and again.model.stem.layers == (2, 2)


def test_a_file_of_a_run_is_a_config_with_overrides(tmp_path: pathlib.Path) -> None:
  path = tmp_path / 'config.json'
  path.write_text(engine.to_json(schema.Config(name='mine', seed=7)))
  found = files.load(str(path), ['batch_size=24'])
  assert (found.name, found.seed, found.batch_size) == ('mine', 7, 24)


def test_what_an_older_file_lacks_has_its_default() -> None:
  saved = json.loads(engine.to_json(schema.Config(seed=3)))
  del saved['train'], saved['model']['gelu']
  assert engine.from_json(json.dumps(saved)) == schema.Config(seed=3)


def test_settings_that_are_gone_are_read_if_they_change_nothing() -> None:
  old = {'data': {'type': 'Data', 'placement': 'anywhere', 'verify_shards': 'lazy'},
         'model': {'type': 'ViT', 'patch_dropout_parts': []}, 'objective': {'type': 'LeJepa', 'center': 'global'},
         'checkpoints': {'type': 'Checkpoints', 'local': '2 minutes', 'local_dir': '/dev/shm'},
         'optimizer': {'type': 'AdamW', 'layer_groups': 'mae'},
         'evals': {'a': {'type': 'Retrieval', 'ranks': [1, 5, 10]}, 'b': {'type': 'Logistic', 'tolerance': 1e-6}}}
  assert engine.from_json(json.dumps(old)) == schema.Config(
      objective=schema.LeJepa(), evals={'a': schema.Retrieval(), 'b': schema.Logistic()})
  for part, said in (
      ('"optimizer": {"type": "Muon", "nesterov": false}', 'config.optimizer.nesterov: expected true, '),
      ('"data": {"placement": "host_shards"}', 'config.data.placement: expected "anywhere", '),
      ('"optimizer": {"type": "Lamb", "layer_groups": "timm"}', 'config.optimizer.layer_groups: expected "mae", '),
      ('"model": {"type": "EfficientNet", "norm_momentum": 0.9}', 'config.model.norm_momentum: expected 0.99, ')):
    with pytest.raises(UserError, match=f'{said}as this setting was removed, got '):
      engine.from_json(f'{{{part}}}')
    assert isinstance(engine.from_json(f'{{{part}}}', code='model'), schema.Config)  # weights alone are read
  with pytest.raises(UserError, match='config.optimizer.layer_groups: expected the name of a setting. It was removed'):
    overrides.changed({'': schema.Config()}, ['optimizer.layer_groups=mae'])


def test_all_settings_that_cannot_be_read_are_listed(tmp_path: pathlib.Path) -> None:
  saved = json.loads(engine.to_json(schema.Config()))
  saved['sed'] = 1
  saved['seed'], saved['image_px'], saved['model']['pool'] = 'x', [1], 'middle'
  saved['optimizer'], saved['objective'], saved['init_interpolation'] = {'type': 'Adamx'}, {'type': [1]}, 'bicubic'
  saved['head'] = 3
  (tmp_path / 'config.json').write_text(json.dumps(saved))
  with pytest.raises(UserError) as error:
    engine.read_file(tmp_path / 'config.json')
  for part in ('config.json: expected a config as JSON, got 8 settings cannot be read:',
               "config.sed: expected the name of a setting, got 'sed'. Did you mean config.seed?",
               "config.init_interpolation: expected the name of a setting, got 'init_interpolation'. Did you mean ",
               'config.objective: expected settings with a type, one of Supervised, ',
               'config.seed: expected a whole number, got "x".',
               'config.image_px: expected 2 values, got [1].',
               'config.model.pool: expected classtoken, mean', 'config.optimizer: expected adamw, adam, ',
               "got 'Adamx'. Did you mean adam?", 'config.head: expected settings of type Head, got 3.'):
    assert part in str(error.value), part


@pytest.mark.parametrize(('text', 'said'), [('{', 'not JSON'), ('[]', 'expected settings of type Config')])
def test_other_files_are_not_configs(text: str, said: str) -> None:
  with pytest.raises(UserError, match=said):
    engine.from_json(text)
  assert dataclasses.is_dataclass(schema.Config)


@pytest.mark.parametrize(('content', 'said'), [
    (b'', 'got an empty file'), (b' \n', 'got an empty file'), (b'{"seed": 1', 'got text that is not JSON'),
    (b'\xff\xfe\x00', 'which is not UTF-8'), (b'[' * 100_000, 'got text that is not JSON'),
    (b'{"model": 5}', r'config.model: expected settings with a type, one of ViT'),
    (b'5', 'config: expected settings of type Config, got 5'),
    (b'{"model": {"type": []}}', r'config.model: expected settings with a type, one of ViT'),
    (b'{"model": {"type": "ViT", "stem": null}}',
     r'config.model.stem: expected settings with a type, one of .* got null')])
def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path: pathlib.Path, content: bytes, said: str) -> None:
  path = tmp_path / 'config.json'
  path.write_bytes(content)
  with pytest.raises(UserError, match=f'config.json: expected a config as JSON, (.|\n)*{said}(.|\n)*--config=NAME'):
    engine.read_file(path)


def test_a_folder_in_place_of_the_file_is_an_error(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'config.json').mkdir()
  with pytest.raises(UserError, match='config.json: expected a config as JSON, got "Is a directory"'):
    engine.read_file(tmp_path / 'config.json')


def test_reading_and_writing_again_changes_no_byte() -> None:
  text = engine.to_json(schema.Config())  # an integer as the default of a number would become 1.0
  assert engine.to_json(engine.from_json(text)) == text


def test_overrides_are_parsed_by_type() -> None:
  config = files.load('digits', [
      'model.width=64', 'model.pool=class_token', 'optimizer.lr=3e-4', 'length=20 epochs', 'image_px=16,24',
      'model.dtype=bfloat16', 'evals.test.every=3 epochs', 'train.progress=false', 'data.recipe.mean=.1,.2,.3',
      'data.source=folder:a=b,c'])
  assert config.model.width == 64 and config.model.pool == schema.ClassToken() and config.optimizer.lr == 3e-4
  assert config.model.dtype is schema.DType.BF16 and files.load('digits', ['model.dtype=bf16']) == files.load(
      'digits', ['model.dtype=BFloat16'])
  assert config.image_px == (16, 24) and config.evals['test'].every == '3 epochs' and config.train.progress is False
  assert config.data.recipe.mean == (.1, .2, .3) and config.data.source == 'folder:a=b,c'


def test_all_bad_overrides_are_listed_at_once() -> None:
  with pytest.raises(UserError) as error:
    files.load('digits', ['modle.width=3', 'model.width=x', 'model.pool=middle', 'optimizer.lr=fast', 'seed',
                          'train.progress=maybe', 'optimizer.momentum=.9', 'model=3', 'image_px=3'])
  text = str(error.value)
  for part in ('9 overrides', 'config.modle.width: expected the name of a setting. Did you mean config.model.width?',
               "config.model.width: expected a whole number, got 'x'.",
               'config.model.pool: expected classtoken, mean, first, map', ", got 'middle'.",
               "config.optimizer.lr: expected a number, got 'fast'.", 'config.seed: expected a value, got none.',
               "config.train.progress: expected true or false, got 'maybe'.",
               'config.optimizer.momentum: expected the name of a setting.',
               'config.model: expected vit, resnet, mixer, efficientnet',
               "config.image_px: expected 2 values such as 16,16, got '3'."):
    assert part in text, part


@pytest.mark.parametrize(('override', 'suggested'), [
    ('optimizer.learning_rate=1', 'config.optimizer.lr'), ('optimizer.wd=1', 'config.optimizer.weight_decay'),
    ('lr=1', 'config.optimizer.lr'), ('model.num_layers=2', 'config.model.depth'), ('epochs=3', 'config.length'),
    ('optimizer.warmup_steps=5', 'config.optimizer.schedule.warmup'), ('train.batch_size=8', 'config.batch_size or '),
    ('model.hidden_size=8', 'config.model.width'), ('data.flip=true', 'config.data.recipe.flip'),
    ('optimizer.weigth_decay=1', 'config.optimizer.weight_decay')])
def test_an_unknown_setting_suggests_the_one_that_other_programs_call_so(override: str, suggested: str) -> None:
  with pytest.raises(UserError, match=f' Did you mean {suggested}'):
    files.load('digits', [override])


def test_a_part_is_replaced_by_name_and_then_takes_overrides_in_any_order() -> None:
  changes = ['optimizer=sgd', 'optimizer.momentum=.8', 'model=Mixer-B/16', 'model.dropout=.1', 'objective=distill',
             'objective.teacher.model=S/16', 'objective.teacher.model.depth=2']
  for order in (changes, changes[::-1]):
    config = overrides.changed({'': schema.Config()}, order, models=sizes.model)['']
    assert config.optimizer == schema.Sgd(momentum=.8)
    assert isinstance(config.model, schema.Mixer) and (config.model.patch, config.model.dropout) == (16, .1)
    assert isinstance(config.objective, schema.Distill) and config.objective.teacher.model.width == 384
    assert config.objective.teacher.model.depth == 2


@pytest.mark.parametrize(('override', 'path', 'expected'), [
    ('model=L/16', 'model', sizes.model('L/16')), ('model=vit', 'model', schema.ViT()),
    ('model=BiT-R50x1', 'model', sizes.model('BiT-R50x1')),
    ('objective=masked_patch', 'objective', schema.MaskedPatch()),
    ('optimizer=AdamW', 'optimizer', schema.AdamW()),
    ('model.stem=convstem', 'model', schema.ViT(stem=schema.ConvStem())),
    ('head=default', 'head', schema.Head())])
def test_the_new_part_has_the_defaults_of_its_name(override: str, path: str, expected: object) -> None:
  before = schema.Config(head=schema.Head(pre_logits=3), optimizer=schema.AdamW(lr=7.))
  after = overrides.changed({'': before}, [override], models=sizes.model)['']
  assert getattr(after, path) == expected
  assert before == schema.Config(head=schema.Head(pre_logits=3), optimizer=schema.AdamW(lr=7.))  # not changed in place


@pytest.mark.parametrize(('before', 'override', 'after', 'said'), [
    (schema.ViT(mlp=schema.Mlp(512, bias=False)), 'model.mlp=swiglu', schema.ViT(mlp=schema.SwiGlu(512, bias=False)),
     'config.model.mlp=swiglu keeps hidden=512 (default: 2048), bias=False (default: True) of mlp.'),
    (schema.ViT(block=schema.Plain(branch_scale=.5, layer_scale=.1)), 'model.block=parallel',
     schema.ViT(block=schema.Parallel(branch_scale=.5)),
     'config.model.block=parallel keeps branch_scale=0.5 (default: 1.0) of plain.'),
    (schema.ViT(block=schema.Plain(layer_scale=.1)), 'model.block=axial',
     schema.ViT(block=schema.Axial(layer_scale=.1)),
     'config.model.block=axial keeps layer_scale=0.1 (default: 0.0) of plain.'),
    (schema.ViT(norm=schema.LayerNorm(1e-5)), 'model.norm=rmsnorm', schema.ViT(norm=schema.RmsNorm(1e-5)),
     'config.model.norm=rmsnorm keeps eps=1e-05 (default: 1e-06) of layernorm.'),
    (schema.ViT(stem=schema.ResNetStem(width=48)), 'model.stem=convstem', schema.ViT(stem=schema.ConvStem()), ''),
    (schema.ViT(mlp=schema.Mlp(512)), 'model.mlp=mlp', schema.ViT(), ''),
    (schema.ViT(mlp=schema.Mlp(512)), 'model=vit', schema.ViT(), '')])
def test_another_kind_of_a_part_keeps_the_settings_that_mean_the_same_and_says_so(
    before: schema.ViT, override: str, after: schema.ViT, said: str, caplog: pytest.LogCaptureFixture) -> None:
  configs = {name: schema.Config(model=before) for name in ('a', 'b')}
  found = overrides.changed(configs, [override])
  assert found['a'].model == found['b'].model == after
  assert caplog.messages == [said] * bool(said)  # once for all runs of a study


def test_a_setting_on_the_command_line_has_precedence_over_the_one_that_is_kept() -> None:
  before = schema.Config(model=schema.ViT(mlp=schema.Mlp(512)))
  for order in (['model.mlp.hidden=96', 'model.mlp=swiglu'], ['model.mlp=swiglu', 'model.mlp.hidden=96']):
    model = overrides.changed({'': before}, order)[''].model
    assert isinstance(model, schema.ViT) and model.mlp == schema.SwiGlu(96)


@pytest.mark.parametrize(('override', 'message'), [
    ('optimizer=sgdd',
     "config.optimizer: expected adamw, adam, adafactor, lamb, lars, lion, muon, rmsprop, schedulefree, sgd, or MODULE:"
     "CLASS of your own, got 'sgdd'. Did you mean sgd?"),
    ('model=S/0', 'config.model: expected SIZE/PATCH such as B/16, with SIZE one of'),
    ('model=huge', 'config.model: expected vit, resnet, mixer, efficientnet'),
    ('head=linear', "config.head: expected default, got 'linear'."),
    ('evals=tset', 'config.evals: expected names of evaluations (test, topk, real, fewshot, '),
    ('optimizer.lr_pre=256',
     'config.optimizer.lr_pre: expected the name of a setting. Did you mean config.optimizer.lr?'),
    ('model.mlp=16', "got '16'. Its settings are config.model.mlp.hidden, config.model.mlp.bias, "),
    ('model.swiglu=true', 'config.model.swiglu: expected the name of a setting. Did you mean config.model.mlp=swiglu?'),
    ('model.norm_eps=1e-5', 'Did you mean config.model.norm.eps?'),
    ('data.decode=whole', "config.data.decode: expected one of auto, full, crop, got 'whole'.")])
def test_unknown_names_are_refused_with_the_known_ones(override: str, message: str) -> None:
  with pytest.raises(UserError) as error:
    overrides.changed({'': files.load('digits', [])}, [override], models=sizes.model)
  assert message in str(error.value)


def test_sizes_are_known_only_where_they_are_given() -> None:
  with pytest.raises(UserError, match="config.model: expected vit, resnet, .*, got 'S/16'."):
    overrides.changed({'': schema.Config()}, ['model=S/16'])


def test_parts_of_every_run_of_a_study_are_replaced() -> None:
  runs = files.load_study('finetune_sweep:B/16,cifar10', ['optimizer=lion', 'optimizer.lr=1e-4']).runs.values()
  assert all(one.optimizer == schema.Lion(lr=1e-4) for one in itertools.islice(runs, 3))
