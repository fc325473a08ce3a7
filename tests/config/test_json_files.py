"""Configs as JSON and back."""
from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from vit_jax.config import engine, files, schema
from vit_jax.core.errors import UserError


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
