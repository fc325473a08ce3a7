"""Descriptions and records of datasets from others: nothing is imported or read because of them, and classes fit."""
from __future__ import annotations

import json
import os
import pathlib
import sys

import pytest

from tests import fuzzing
from tests.data import fuzz_readers
from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.formats import example
from vit_jax.data.source import Source

KINDS = ('tfrecord', 'array_record')


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.chdir(tmp_path)


def write(root: pathlib.Path, files: fuzz_readers.Content) -> pathlib.Path:
  for name, content in files.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)
  return root


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  pytest.importorskip('tensorflow_datasets')
  return write(tmp_path / 'animals' / '1.2.0', fuzz_readers.tfds_files('tfrecord'))


def opened(folder: pathlib.Path, **settings: object) -> Source:
  data = schema.Data(source='tfds:animals', data_dir=str(folder.parents[1]), **settings)  # type: ignore[arg-type]
  return opening.open_split(data, 'train', image_px=(8, 8))


def refused(folder: pathlib.Path, **settings: object) -> str:
  with pytest.raises(UserError) as error:
    opened(folder, **settings)
  fuzzing.check_message(str(error.value))
  return str(error.value)


def change(folder: pathlib.Path, name: str, old: str, new: str) -> None:
  text = (folder / name).read_text()
  assert old in text
  (folder / name).write_text(text.replace(old, new))


def test_a_description_imports_no_module(folder: pathlib.Path, tmp_path: pathlib.Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / 'hostile_module.py').write_text('raise SystemExit("imported")')
  monkeypatch.syspath_prepend(str(tmp_path))
  change(folder, 'features.json', '"pythonClassName": "tensorflow_datasets.core.features.text_feature.Text"',
         '"pythonClassName": "hostile_module.Text"')
  assert len(opened(folder)) == 6 and 'hostile_module' not in sys.modules


def test_descriptions_of_earlier_versions_are_read(folder: pathlib.Path) -> None:
  names, features = opened(folder).class_names, 'tensorflow_datasets.core.features'
  label = {'type': f'{features}.class_label_feature.ClassLabel', 'proto_cls': 'x', 'content': '{"numClasses": "3"}'}
  old = {'type': f'{features}.features_dict.FeaturesDict', 'content': {
      'image': {'type': f'{features}.image_feature.Image', 'content': {}}, 'label': label}}
  (folder / 'features.json').write_text(json.dumps(old))
  assert opened(folder).class_names == names and opened(folder).labels(0)
  (folder / 'features.json').write_text(json.dumps(label))
  assert 'expected features by name' in refused(folder)


def test_files_outside_of_the_folder_are_not_read(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (folder / 'label.labels.txt').rename(tmp_path / 'outside.txt')
  (folder / 'label.labels.txt').symlink_to(tmp_path / 'outside.txt')
  assert 'inside of' in refused(folder) and len(opened(folder, follow_links=True)) == 6
  (folder / 'label.labels.txt').unlink()
  (tmp_path / 'outside.txt').rename(folder / 'label.labels.txt')
  shard = next(folder.glob('*.tfrecord*'))
  shard.rename(tmp_path / 'shard')
  shard.symlink_to(tmp_path / 'shard')
  assert 'inside of' in refused(folder) and len(opened(folder, follow_links=True)) == 6
  change(folder, 'dataset_info.json', '{DATASET}-{SPLIT}', '../../{SPLIT}')
  assert 'expected files in this folder' in refused(folder, follow_links=True)


def test_a_description_has_a_largest_size(folder: pathlib.Path) -> None:
  os.truncate(folder / 'label.labels.txt', 10**8)
  assert 'got a file of 100,000,000 bytes; at most 67,108,864 are read' in refused(folder)
  (folder / 'label.labels.txt').unlink()
  os.mkfifo(folder / 'label.labels.txt')
  assert 'label.labels.txt: expected a text file, got ' in refused(folder)


@pytest.mark.parametrize(('name', 'old', 'new', 'said'), [
    ('dataset_info.json', '"6"', '"1000000000000"', 'at most 10,000,000 records in files of this size, got'),
    ('dataset_info.json', '"6"', '"-6"', "expected a whole number of at least 0, got '-6'"),
    ('dataset_info.json', '"6"', '"x"', "expected a whole number of at least 0, got 'x'"),
    ('dataset_info.json', '"6"', '', 'expected the number of records of at least one file'),
    ('dataset_info.json', '"train"', '"tr\\u0000"', 'expected text without control characters, got'),
    ('features.json', '"3"', '"1000000000000"', 'at most 100,000 classes for 6 images, got 1,000,000,000,000 of label'),
    ('features.json', 'uint8', '\\ud800', 'got half of a surrogate pair'),
    ('features.json', 'file_name', '\\udc00', 'got half of a surrogate pair'),
    ('features.json', 'image', '\ud800', 'got byte 0xed in line 4, which is not UTF-8')])
def test_a_hostile_description_is_refused(name: str, old: str, new: str, said: str, folder: pathlib.Path) -> None:
  if name == 'features.json':
    (folder / 'label.labels.txt').unlink()
  content = (folder / name).read_bytes()
  old_bytes = old.encode() if old != '"3"' or b'"3"' in content else b'3'
  if old == '"3"':
    content = content.replace(b'"numClasses": "3"', f'"numClasses": {new}'.encode())
  else:
    content = content.replace(old_bytes, new.encode(errors='surrogatepass'))
  (folder / name).write_bytes(content)
  assert said in refused(folder)


@pytest.mark.parametrize('kind', KINDS)
def test_records_with_wrong_values_are_bad_images(kind: str, tmp_path: pathlib.Path) -> None:
  pytest.importorskip('tensorflow_datasets')
  files, image = fuzz_readers.tfds_files(kind), encode(random_image(0))
  wrong = {'label': [-1, 3, 2**62, b'ant', []], 'image': [3, [], b'']}
  found = [{'image': image, 'label': 1} | {name: value} for name, values in wrong.items() for value in values]
  shard = next(name for name in files if '-of-' in name)
  files[shard] = fuzz_readers.shard(kind, [example.serialize(one) for one in [{'image': image, 'label': 1}, *found]])
  files['dataset_info.json'] = files['dataset_info.json'].replace(b'"6"', f'"{len(found) + 1}"'.encode())
  source = opened(write(tmp_path / 'animals' / '1.2.0', files))
  num, reasons = fuzz_readers.usable(source)
  assert num == 1 and len(reasons) == len(found)
  for reason, said in zip(reasons, ['got the label -1', 'got the label 3', 'got the label 4611686018427387904',
                                    'got a label that is not a whole number', "expected a value in the feature 'label'",
                                    'expected bytes', "expected a value in the feature 'image'", 'empty'], strict=True):
    assert said in reason
    fuzzing.check_words(reason)


def test_classes_of_a_prepared_dataset_fit_its_images(tmp_path: pathlib.Path) -> None:
  files = dict(fuzz_readers.prepared_of_one())
  info = json.loads(files['info.json'])
  many = [f'c{i}' for i in range(10**6)]
  for names, said in ((many, 'at most 100,000 classes for 6 images, got a list of 1,000,000'),
                      (['ant', 3, 'cow'], 'class_names[1]: expected text without control characters, got 3'),
                      (['ant', 'b\ud800'], 'class_names[1]: expected text'), ('ant', 'class_names: expected a list'),
                      ({'ant': 0}, 'class_names: expected a list, got an object')):
    files['info.json'] = json.dumps(info | {'class_names': names}).encode()
    write(tmp_path / 'set', files)
    with pytest.raises(UserError) as error:
      opening.open_split(schema.Data(source=f'array_record:{tmp_path}/set'), 'train', image_px=(8, 8))
    assert said in str(error.value)
    fuzzing.check_message(str(error.value))


@pytest.mark.parametrize(('field', 'value'), [
    ('num_examples', -1), ('num_examples', 4.5), ('num_examples', '4'), ('num_examples', 10**15), ('num_bytes', -1),
    ('num_bytes', True), ('file', '../a'), ('file', 'a' * 300), ('file', 3), ('sha256', None)])
def test_a_shard_of_a_prepared_dataset_is_described_in_full(field: str, value: object, tmp_path: pathlib.Path) -> None:
  files = dict(fuzz_readers.prepared_of_one())
  info = json.loads(files['info.json'])
  info['splits']['train'][0][field] = value
  files['info.json'] = json.dumps(info).encode()
  write(tmp_path / 'set', files)
  with pytest.raises(UserError, match=rf'info.json, splits.train\[0\].{field}: expected .*, got .* is damaged'):
    opening.open_split(schema.Data(source=f'array_record:{tmp_path}/set'), 'train', image_px=(8, 8))


def test_a_shard_is_a_file_of_its_folder(tmp_path: pathlib.Path) -> None:
  root = write(tmp_path / 'set', fuzz_readers.prepared_of_one())
  shard = next(root.glob('train*'))
  shard.rename(tmp_path / 'outside')
  shard.symlink_to(tmp_path / 'outside')
  data = schema.Data(source=f'array_record:{root}')
  with pytest.raises(UserError, match='expected a file or folder inside of .*, got a link to .*/outside'):
    opening.open_split(data, 'train', image_px=(8, 8))
  data.follow_links = True
  assert len(opening.open_split(data, 'train', image_px=(8, 8))) == 5


def test_own_descriptions_pass(folder: pathlib.Path) -> None:
  assert opened(folder).class_names == fuzz_readers.CLASSES
