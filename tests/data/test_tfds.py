"""Sets prepared by TFDS, read without TensorFlow."""
from __future__ import annotations

import hashlib
import json
import pathlib
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.formats import tfds as stored_tfds
from vit_jax.data.formats import tfds_build, tfrecord
from vit_jax.data.image import decode
from vit_jax.data.image.headers import BadImage
from vit_jax.data.index import FOLDER
from vit_jax.data.source import UNKNOWN, Source, first_label, read_one
from vit_jax.jobs import prepare

tfds = pytest.importorskip('tensorflow_datasets')

CLASSES = ['ant', 'bee', 'cow']


class Animals(tfds.core.GeneratorBasedBuilder):
  """Two splits of JPEG files."""
  VERSION = tfds.core.Version('1.2.0')
  url_infos: dict[str, object] = {}  # else a package that only builders in a file of their own need

  def _info(self) -> tfds.core.DatasetInfo:
    features = {'image': tfds.features.Image(shape=(None, None, 3), encoding_format='jpeg'),
                'label': tfds.features.ClassLabel(names=CLASSES), 'file_name': tfds.features.Text()}
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager: object) -> dict[str, object]:
    return {'train': self._generate_examples(0, 13), 'validation': self._generate_examples(13, 18)}

  def _generate_examples(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, object]]]:
    for i in range(start, stop):
      path = pathlib.Path(self._data_dir_root) / f'{i}.jpg'
      path.write_bytes(encode(random_image(i), '.jpg'))
      yield i, {'image': str(path), 'label': i % 3, 'file_name': path.name}


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  root = tmp_path_factory.mktemp('tfds')
  with tfds_build.scratch():
    Animals(data_dir=root, file_format='array_record').download_and_prepare()
  return root


def open_all(data_dir: pathlib.Path, name: str = 'animals', **fields: object) -> opening.Sources:
  data = schema.Data(source=f'tfds:{name}', data_dir=str(data_dir), **fields)
  return opening.open_sources(data, image_px=(8, 8))


def test_stored_bytes_and_labels_come_back(data_dir: pathlib.Path) -> None:
  opened = open_all(data_dir)  # its evaluation split is `validation`, as there is no test
  assert (len(opened.train), len(opened.eval), opened.class_names) == (13, 5, tuple(CLASSES))
  found = {read_one(opened.train, i).image: read_one(opened.train, i).label for i in range(13)}
  assert found == {encode(random_image(i), '.jpg'): i % 3 for i in range(13)}
  assert decode.decode(read_one(opened.train, 4).image).shape == (12, 15, 3)
  assert opened.train.describe(4) == 'tfds:animals/1.2.0/train[4]'


def test_the_digest_is_that_of_the_description_as_tfds_reads_it(data_dir: pathlib.Path) -> None:
  info = tfds.builder_from_directory(data_dir / 'animals' / '1.2.0').info
  for source, split in zip(open_all(data_dir)[:2], ('train', 'validation'), strict=True):
    own = info.splits[split]
    text = (f'{info.full_name} {split} {list(own.shard_lengths)} {own.num_bytes} '
            f"Columns(image='image', label='label', class_names={tuple(CLASSES)}, several=False)")
    assert source.digest == hashlib.sha256(text.encode()).hexdigest()
  for num in (0, 1, 1023, 1024, 1536, 2**20 - 1, 10**7, 2**30, 7 * 2**41, 3 * 2**60):
    assert stored_tfds._format_bytes(num) == str(tfds.core.units.Size(num))


def test_slices_versions_and_pickles_work(data_dir: pathlib.Path) -> None:
  part = open_all(data_dir, 'animals:1.2.0', train_split='train[:50%]+validation').train
  whole = open_all(data_dir).train
  assert len(part) == 12 and read_one(part, 3) == read_one(whole, 3)
  copy = pickle.loads(pickle.dumps(part))
  assert read_one(copy, 11) == read_one(part, 11) and len(pickle.dumps(part)) < 20_000


def test_the_error_for_a_missing_dataset_names_the_folder(data_dir: pathlib.Path) -> None:
  with pytest.raises(UserError, match=f'tfds:plants is not prepared in {data_dir} .expected in {data_dir}/plant'
                                      's/.. Set another data.data_dir, or prepare it, which may need '
                                      'TensorFlow: vit-jax prepare --data=tfds:plants --to=DIR, '
                                      'and then data.source=array_record:DIR'):
    open_all(data_dir, 'plants')
  with pytest.raises(UserError, match=f'expected in {data_dir}/animals/9.9.9'):
    open_all(data_dir, 'animals:9.9.9')


def test_another_format_is_refused(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
  shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
  set_format(tmp_path, 'parquet')
  with pytest.raises(UserError, match='expected ArrayRecord or TFRecord, .*, got parquet'):
    open_all(tmp_path)


def test_configurations_are_listed_if_there_are_several(data_dir: pathlib.Path,
                                                        tmp_path: pathlib.Path) -> None:
  shutil.copytree(data_dir / 'animals', tmp_path / 'zoo' / 'small')
  assert len(open_all(tmp_path, 'zoo').train) == 13
  shutil.copytree(data_dir / 'animals', tmp_path / 'zoo' / 'large')
  with pytest.raises(UserError, match='expected one of the configurations in .*/zoo, large, small, got '
                                      'none. Set tfds:zoo/large'):
    open_all(tmp_path, 'zoo')
  assert len(open_all(tmp_path, 'zoo/small').train) == 13


def test_the_set_can_be_prepared_from_either_format(data_dir: pathlib.Path, tfrecord_dir: pathlib.Path,
                                                    tmp_path: pathlib.Path) -> None:
  digests = set()
  for number, folder in enumerate((data_dir, tfrecord_dir)):
    to = tmp_path / str(number)
    assert prepare.run(to, data='tfds:animals', data_dir=str(folder), shards=2) == 0
    opened = opening.open_sources(schema.Data(source=f'array_record:{to}'), image_px=(8, 8))
    assert {r.image: r.label for r in opened.train.read(range(13))} == {
        encode(random_image(i), '.jpg'): i % 3 for i in range(13)}
    assert len(opened.eval) == 5 and opened.class_names == tuple(CLASSES)
    digests.add(opened.train.digest)
  assert len(digests) == 1


def set_format(root: pathlib.Path, kind: str, name: str = 'animals/1.2.0') -> pathlib.Path:
  info = root / name / 'dataset_info.json'
  fields = json.loads(info.read_text())
  fields['fileFormat'] = kind
  info.write_text(json.dumps(fields))
  return info.parent


@pytest.fixture
def tfrecord_dir(data_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """The same set as TFRecord files: the same records, each in a frame."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return converted(data_dir, tmp_path)


def converted(data_dir: pathlib.Path, tmp_path: pathlib.Path, name: str = 'animals/1.2.0') -> pathlib.Path:
  from array_record.python import array_record_module as array_record
  shutil.copytree(data_dir, tmp_path / 'sets')
  folder = set_format(tmp_path / 'sets', 'tfrecord', name)
  for path in folder.glob('*.array_record-*'):
    reader = array_record.ArrayRecordReader(str(path))
    frames = [head + tfrecord.mask(head) + r + tfrecord.mask(r)
              for r in reader.read_all() for head in (struct.pack('<Q', len(r)),)]
    pathlib.Path(str(path).replace('array_record', 'tfrecord')).write_bytes(b''.join(frames))
    path.unlink()
  return tmp_path / 'sets'


def test_tfrecord_gives_the_same_examples_in_the_same_order(data_dir: pathlib.Path,
                                                            tfrecord_dir: pathlib.Path) -> None:
  one, two = open_all(data_dir), open_all(tfrecord_dir)
  for a, b in ((one.train, two.train), (one.eval, two.eval)):
    assert list(a.read(range(len(a)))) == list(b.read(range(len(b))))
  copy = pickle.loads(pickle.dumps(two.train))
  assert read_one(copy, 11) == read_one(one.train, 11) and len(pickle.dumps(two.train)) < 20_000
  assert two.train.describe(4) == 'tfds:animals/1.2.0/train[4]' and two.train.labels(4) == one.train.labels(4)


def test_the_index_of_tfrecord_files_is_made_once(tfrecord_dir: pathlib.Path) -> None:
  open_all(tfrecord_dir)
  kept = sorted((tfrecord_dir / 'animals' / '1.2.0' / FOLDER).iterdir())
  assert len(kept) == 2 and all(p.suffix == '.arrow' for p in kept)
  made = [p.stat().st_mtime_ns for p in kept]
  open_all(tfrecord_dir)
  assert [p.stat().st_mtime_ns for p in kept] == made


def bad_of(source: Source) -> dict[int, str]:
  """Examples that cannot be read, with the reason."""
  found = {}
  for index in range(len(source)):
    try:
      read_one(source, index)
    except BadImage as error:
      found[index] = str(error)
  return found


def test_records_after_a_cut_of_a_tfrecord_file_are_bad_images(tfrecord_dir: pathlib.Path,
                                                               caplog: pytest.LogCaptureFixture) -> None:
  [path] = (tfrecord_dir / 'animals' / '1.2.0').glob('*train*tfrecord*')
  whole, content = open_all(tfrecord_dir).train, path.read_bytes()
  records = [read_one(whole, i) for i in range(13)]
  path.write_bytes(content[:-20])
  cut = open_all(tfrecord_dir).train
  assert len(cut) == 13 and list(cut.read(range(12))) == records[:12]
  assert list(bad_of(cut)) == [12] and f'the record is lost: {path} is damaged before it' in bad_of(cut)[12]
  assert f'{path} is damaged at byte' in caplog.text and '1 of its 13 records are lost' in caplog.text
  path.write_bytes(b'')
  assert len(bad_of(open_all(tfrecord_dir).train)) == 13
  path.write_bytes(content + content[:len(content) // 2])
  with pytest.raises(UserError, match='expected 13 records, as in dataset_info.json, got 19. Copy or prepare'):
    open_all(tfrecord_dir)
  path.unlink()
  with pytest.raises(UserError, match='expected to read it, got "No such file or directory'):
    open_all(tfrecord_dir)


def test_a_flipped_bit_of_a_tfrecord_file_is_one_bad_image_or_what_follows(tfrecord_dir: pathlib.Path) -> None:
  [path] = (tfrecord_dir / 'animals' / '1.2.0').glob('*train*tfrecord*')
  content, source = path.read_bytes(), open_all(tfrecord_dir).train
  starts = source._records._index['offset'].tolist()  # type: ignore[attr-defined]
  for place, bad in ((starts[5] + 30, [5]), (starts[5] - 3, [*range(5, 13)]), (starts[5] - 12, [*range(5, 13)]),
                     (starts[0], [0])):
    damaged = bytearray(content)
    damaged[place] ^= 4
    path.write_bytes(damaged)
    found = bad_of(open_all(tfrecord_dir).train)
    assert list(found) == bad, place
    assert 'does not match its checksum' in found[bad[0]] or 'is lost' in found[bad[0]]


def test_a_damaged_record_of_an_arrayrecord_file_is_one_bad_image(data_dir: pathlib.Path,
                                                                  tmp_path: pathlib.Path) -> None:
  one, two = shutil.copytree(data_dir, tmp_path / 'one'), shutil.copytree(data_dir, tmp_path / 'two')
  [path] = (one / 'animals' / '1.2.0').glob('*train*array_record*')
  content, damaged = path.read_bytes(), bytearray(path.read_bytes())
  damaged[3_000] ^= 4
  path.write_bytes(damaged)
  source = open_all(one).train
  [(place, reason)] = bad_of(source).items()
  assert f'record {place} of {path} is damaged: Corrupted' in reason
  assert source.describe(place) == f'tfds:animals/1.2.0/train[{place}]'
  (two / path.relative_to(one)).write_bytes(content[:len(content) // 2])
  assert len(bad_of(open_all(two).train)) == 13


def test_a_damaged_description_of_a_set_is_named(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
  shutil.copytree(data_dir, tmp_path, dirs_exist_ok=True)
  folder = tmp_path / 'animals' / '1.2.0'
  for name in ('dataset_info.json', 'features.json'):
    kept = (folder / name).read_text()
    for damaged in ('', kept[:len(kept) // 2], '[]', '{}'):
      (folder / name).write_text(damaged)
      with pytest.raises(UserError, match=f'{folder}.*: expected .*Copy or prepare the dataset again'):
        open_all(tmp_path)
    (folder / name).write_text(kept)


@pytest.mark.slow(reason='2 s: a process; tests/test_imports.py lets nothing of ours import it')
def test_tensorflow_is_not_imported(data_dir: pathlib.Path) -> None:
  code = ('import sys\nfrom vit_jax.config import schema\nfrom vit_jax.data import opening\n'
          f'data = schema.Data(source="tfds:animals", data_dir={str(data_dir)!r})\n'
          'next(iter(opening.open_sources(data, image_px=(8, 8)).train.read([0])))\n'
          'assert "tensorflow" not in sys.modules')
  subprocess.run([sys.executable, '-c', code], check=True, timeout=120)


class Scenes(tfds.core.GeneratorBasedBuilder):
  """Images with any number of classes, and a class of their own."""
  VERSION = tfds.core.Version('1.0.0')
  url_infos: dict[str, object] = {}

  def _info(self) -> tfds.core.DatasetInfo:
    label = tfds.features.ClassLabel(names=CLASSES)
    features = {'image': tfds.features.Image(shape=(None, None, 3), encoding_format='jpeg'), 'main': label,
                'seen': tfds.features.Sequence(label),
                'objects': tfds.features.Sequence({'label': label, 'box': tfds.features.Tensor(
                    shape=(4,), dtype=np.float32)})}
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager: object) -> dict[str, object]:
    return {'train': self._generate_examples()}

  def _generate_examples(self) -> Iterator[tuple[int, dict[str, object]]]:
    for i, seen in enumerate(SEEN):
      path = pathlib.Path(self._data_dir_root) / f'scene{i}.jpg'
      path.write_bytes(encode(random_image(i), '.jpg'))
      yield i, {'image': str(path), 'main': i % 3, 'seen': list(seen),
                'objects': [{'label': label, 'box': [0.] * 4} for label in (*seen, *seen[:1])]}


SEEN = ((0, 2), (), (1,), (2, 1, 0))


@pytest.fixture(scope='module')
def scenes(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  root = tmp_path_factory.mktemp('scenes')
  with tfds_build.scratch():
    Scenes(data_dir=root, file_format='array_record').download_and_prepare()
  return root


@pytest.mark.parametrize('as_tfrecord', [False, True])
def test_a_column_of_several_classes_gives_them_all(scenes: pathlib.Path, tmp_path: pathlib.Path,
                                                    as_tfrecord: bool, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  folder = converted(scenes, tmp_path, 'scenes/1.0.0') if as_tfrecord else scenes
  fields = {'train_split': 'train', 'eval_split': 'train', 'label_column': 'seen', 'max_labels': 3}
  source = open_all(folder, 'scenes', **fields).train
  by_image = {encode(random_image(i), '.jpg'): seen for i, seen in enumerate(SEEN)}
  assert {r.image: r.labels for r in (read_one(source, i) for i in range(4))} == by_image
  assert all(source.labels(i) == read_one(source, i).labels for i in range(4))
  assert source.class_names == tuple(CLASSES) and source.most_labels == UNKNOWN


def test_the_column_of_one_class_is_the_default_and_another_one_is_named(scenes: pathlib.Path) -> None:
  plain = open_all(scenes, 'scenes', eval_split='train').train
  assert len(plain.labels(0)) == 1 and plain.most_labels == 0
  with pytest.raises(UserError, match=r"label_column: expected a feature .* .main, objects/label, seen., got 'image'"):
    open_all(scenes, 'scenes', eval_split='train', label_column='image')
  with pytest.raises(UserError, match='data.max_labels: expected a number, the largest number of labels .*, got 0'):
    open_all(scenes, 'scenes', eval_split='train', label_column='seen')


@pytest.mark.parametrize('as_tfrecord', [False, True])
def test_a_label_column_can_be_a_path_into_a_nested_sequence(
    scenes: pathlib.Path, tmp_path: pathlib.Path, as_tfrecord: bool, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  folder = converted(scenes, tmp_path, 'scenes/1.0.0') if as_tfrecord else scenes
  source = open_all(folder, 'scenes', eval_split='train', label_column='objects/label', max_labels=3).train
  by_image = {encode(random_image(i), '.jpg'): seen for i, seen in enumerate(SEEN)}
  assert {r.image: r.labels for r in source.read(range(4))} == by_image  # a class of two objects counts once
  assert all(first_label(source, i) == read_one(source, i).label for i in range(4))
  assert source.class_names == tuple(CLASSES) and source.most_labels == UNKNOWN
  with pytest.raises(UserError, match=r"with classes \(main, objects/label, seen\), got 'objects'"):
    open_all(folder, 'scenes', eval_split='train', label_column='objects')


def test_columns_with_classes_are_found_inside_of_dictionaries_and_of_one_sequence(data_dir: pathlib.Path,
                                                                                   tmp_path: pathlib.Path) -> None:
  label = tfds.features.ClassLabel(names=CLASSES)
  features = {'a': label, 'b': tfds.features.FeaturesDict({'c': label, 'd': tfds.features.Sequence(label)}),
              'e': tfds.features.Sequence({'f': label, 'g': {'h': label}}),
              'i': tfds.features.Sequence(tfds.features.Sequence(label)), 'j': tfds.features.Text()}
  folder = shutil.copytree(data_dir / 'animals' / '1.2.0', tmp_path / '1.2.0')
  described = tfds.features.FeaturesDict(features).to_json()
  (folder / 'features.json').write_text(json.dumps(described))
  found = {path: one.several for path, one in stored_tfds.read(str(folder)).labels.items()}
  assert found == {'a': False, 'b/c': False, 'b/d': True, 'e/f': True, 'e/g/h': True}


class Captioned(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc]
  """Images with captions and objects, as `coco_captions` has them."""
  VERSION = tfds.core.Version('1.0.0')
  url_infos: dict[str, object] = {}

  def _info(self) -> object:
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({
        'image': tfds.features.Image(), 'captions': tfds.features.Sequence({
            'id': np.int64, 'text': tfds.features.Text()}),
        'objects': tfds.features.Sequence({'label': tfds.features.ClassLabel(num_classes=3)})}))

  def _split_generators(self, dl_manager: object) -> dict[str, object]:
    return {'train': self._generate_examples()}

  def _generate_examples(self) -> Iterator[tuple[int, dict[str, object]]]:
    for i in range(3):
      path = pathlib.Path(self._data_dir_root) / f'c{i}.jpg'
      path.write_bytes(encode(random_image(i), '.jpg'))
      yield i, {'image': str(path), 'captions': [{'id': j, 'text': f'text {i} {j}'} for j in range(i)],
                'objects': [{'label': i}]}


def test_captions_are_read_from_a_sequence_and_no_classes_are_needed(tmp_path: pathlib.Path) -> None:
  with tfds_build.scratch():
    Captioned(data_dir=tmp_path, file_format='array_record').download_and_prepare()
  fields = {'train_split': 'train', 'eval_split': 'train'}
  source = open_all(tmp_path, 'captioned', **fields).train
  by_image = {encode(random_image(i), '.jpg'): tuple(f'text {i} {j}' for j in range(i)) for i in range(3)}
  assert {read_one(source, i).image: source.captions(i) for i in range(3)} == by_image
  assert source.class_names == ('unlabeled',) and read_one(source, 0).label == 0
  with pytest.raises(UserError, match=r"data.caption_column: expected a feature of .* \(captions/text\), got 'words'"):
    open_all(tmp_path, 'captioned', caption_column='words', **fields)
  labeled = open_all(tmp_path, 'captioned', label_column='objects/label', max_labels=1, **fields).train
  assert len(labeled.labels(0)) == 1
