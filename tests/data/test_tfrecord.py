"""TFRecord files as a source: features, labels of every form, and files that are damaged."""
from __future__ import annotations

import bz2
import gzip
import pathlib
import pickle
import re
import zlib
from typing import Any

import pytest

from tests.data import packed
from tests.data.packed import NAMES, Example, field, tf_example, tfrecord, varint
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import index as indexes
from vit_jax.data import open_files, opening
from vit_jax.data.image.headers import BadImage
from vit_jax.data.index import FOLDER
from vit_jax.data.source import Source, first_label, read_one

FOUND = packed.examples(23)
LISTED = ('image/channels (int64), image/class/label (int64), image/class/synset (bytes), image/class/text (bytes), '
          'image/colorspace (bytes), image/encoded (bytes), image/filename (bytes), image/format (bytes), image/height '
          '(int64), image/object/bbox/label (empty), image/object/bbox/xmin (float), image/width (int64)')


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


@pytest.fixture
def files(tmp_path: pathlib.Path) -> pathlib.Path:
  packed.write_tfrecords(tmp_path / 'set', 'train', FOUND)
  packed.write_tfrecords(tmp_path / 'set', 'validation', packed.examples(5, first=40), 1)
  return tmp_path / 'set'


def opened(where: Any, split: str = 'train', **settings: Any) -> Source:
  return opening.open_split(schema.Data(source=f'tfrecord:{where}', **settings), split, image_px=(8, 8))


def one(folder: pathlib.Path, content: bytes, **settings: Any) -> Source:
  """The source of a single file."""
  folder.mkdir(exist_ok=True)
  (folder / 'train.tfrecord').write_bytes(content)
  return opened(folder, **settings)


def reason(source: Source, index: int) -> str:
  with pytest.raises(BadImage) as error:
    read_one(source, index)
  return str(error.value)


def test_records_are_in_the_stored_order_with_their_bytes_and_labels(files: pathlib.Path) -> None:
  source = opened(files, label_offset=1)
  assert [read_one(source, i)[:2] for i in range(len(source))] == [(e.image, (e.label,)) for e in FOUND]
  assert [first_label(source, i) for i in range(len(source))] == [e.label for e in FOUND]
  assert source.class_names == ('0', '1', '2')
  assert source.describe(9) == f'{files}/train-00001-of-00003[2] (000009.png)'
  assert len(opened(files, 'test', label_offset=1)) == 5


@pytest.mark.parametrize('pattern', ['set', 'set/{split}-*-of-*', 'set/train-0000?-of-00003',
                                     'set/train-{00000..00002}-of-00003', '*/train-?*'])
def test_patterns_and_folders_give_the_files_of_a_split(files: pathlib.Path, pattern: str) -> None:
  for other in ('classes.bak', 'dataset_info.json', 'train.index'):
    (files / other).write_text('no records')
  assert len(opened(files.parent / pattern, label_offset=1)) == 23


def test_braces_inside_of_braces_are_refused(files: pathlib.Path) -> None:
  with pytest.raises(UserError, match='expected braces that are closed and not nested, got .* inside of others'):
    opened(files.parent / 'set/{train-{00000..00002},test-00000}-of-00003', label_offset=1)


@pytest.mark.parametrize(('column', 'names'), [('image/class/synset', tuple(f'n0000000{i}' for i in range(3))),
                                               ('image/class/text', NAMES), ('image/class/label', ('0', '1', '2'))])
def test_labels_are_numbers_or_names(files: pathlib.Path, column: str, names: tuple[str, ...]) -> None:
  source = opened(files, label_column=column, label_offset=column == 'image/class/label')
  assert source.class_names == names
  assert [read_one(source, i).label for i in range(23)] == [e.label for e in FOUND]


def test_the_features_of_tfds_are_read_without_a_setting(tmp_path: pathlib.Path) -> None:
  source = one(tmp_path / 't', tfrecord(tf_example({'file_name': e.key, 'image': e.image, 'label': e.label})
                                        for e in FOUND))
  assert [read_one(source, i)[:2] for i in range(23)] == [(e.image, (e.label,)) for e in FOUND]
  assert source.describe(3).endswith('train.tfrecord[3] (000003)')


def test_features_of_other_names_are_set_and_a_missing_one_is_refused_with_those_that_are_there(
    files: pathlib.Path, tmp_path: pathlib.Path) -> None:
  own = tfrecord(tf_example({'jpeg': e.image, 'kind': e.label}) for e in FOUND)
  source = one(tmp_path / 't', own, image_column='jpeg', label_column='kind')
  assert [read_one(source, i)[:2] for i in range(23)] == [(e.image, (e.label,)) for e in FOUND]
  first = f'{files}/train-00000-of-00003'
  for setting, wanted in (('image_column', 'a feature with encoded images, such as image/encoded'),
                          ('label_column', 'a feature with numbers or names of classes, such as image/class/label')):
    with pytest.raises(UserError, match=re.escape(
        f"data.{setting}: expected {wanted}, got 'picture'. The first records of {first} have {LISTED}. "
        f'Set --config.data.{setting} to one of them.')):
      opened(files, **{setting: 'picture'})
  with pytest.raises(UserError, match=r'data.image_column: expected .*, got none. .* have jpeg \(bytes\), kind'):
    one(tmp_path / 't', own)
  for column, setting in (('image/width', 'image_column'), ('image/object/bbox/xmin', 'label_column')):
    with pytest.raises(UserError, match=f"data.{setting}: expected a feature with .*, got '{column}'"):
      opened(files, **{setting: column})


def test_labels_from_1_to_the_number_of_classes_ask_for_the_offset(files: pathlib.Path,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
  (files.parent / 'names.txt').write_text('\n'.join(NAMES))
  said = (r'data.label_offset: expected 1, the number of the first class, for labels from 1 to 3 and 3 classes of .*, '
          r'got 0. Set --config.data.label_offset=1.')
  for settings in ({'num_classes': 3}, {'classes': str(files.parent / 'names.txt')}):
    with pytest.raises(UserError, match=said):
      opened(files, **settings)
    assert first_label(opened(files, **settings, label_offset=1), 1) == FOUND[1].label
  caplog.clear()
  assert opened(files).class_names == ('0', '1', '2', '3')  # as sets with a background class have it
  assert 'labels begin at 1, so class 0 has no images' in caplog.text
  caplog.clear()
  opened(files, label_offset=1), opened(files, num_classes=4, label_offset=1)
  assert 'labels begin at 1' not in caplog.text


@pytest.mark.parametrize(('own', 'settings', 'says'), [
    ((0, 1, 2), {}, 'expected labels from 1 to 3, as in the training files, got 0 to 2. If both number'),
    ((2, 3, 4), {}, 'got 2 to 4'), ((0, 1, 2), {'num_classes': 3, 'label_offset': 1}, 'got 0 to 2'),
    ((2, 3), {}, ''), ((1, 2), {}, 'labels begin at 1'), ((0, 1, 2), {'num_classes': 4}, ''),
    ((-1, 2), {}, ''), (('cat', 'dog'), {}, 'expected numbers of classes, as in the training files, got names: cat, ')])
def test_splits_number_their_classes_alike(own: tuple[int | str, ...], settings: dict[str, int], says: str,
                                           tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  for split, labels in (('train', (1, 2, 3)), ('test', own)):
    records = [tf_example({'image': FOUND[0].image, 'label': label}) for label in labels]
    (tmp_path / f'{split}.tfrecord').write_bytes(tfrecord(records))
  if says.startswith('labels begin') or not says:
    opened(tmp_path, 'test', **settings)
    assert bool(says) is ('/test: labels begin at 1' in caplog.text)
  else:
    with pytest.raises(UserError, match=f'/test: .*{says}'):
      opened(tmp_path, 'test', **settings)


def test_several_labels_of_an_image_are_all_read(tmp_path: pathlib.Path) -> None:
  labels = [[0], [2, 1, 2], [], [1, 0]]
  content = tfrecord(tf_example({'image': e.image, 'label': these}) for e, these in zip(FOUND, labels, strict=False))
  without = tfrecord([tf_example({'image': FOUND[4].image})])
  source = one(tmp_path / 't', content + without, max_labels=2)
  assert [read_one(source, i).labels for i in range(5)] == [(0,), (2, 1), (), (1, 0), ()]
  assert source.most_labels == 2  # type: ignore[attr-defined]


def test_labels_that_are_missing_or_out_of_range_count_as_bad_images(tmp_path: pathlib.Path) -> None:
  labels: list[Any] = [1, [], -1, 7, .5, 2**62, 2]
  source = one(tmp_path / 't', tfrecord([*(tf_example({'image': e.image, 'label': label}) for e, label in zip(
      FOUND, labels, strict=False)), tf_example({'image': FOUND[9].image})]), num_classes=3)
  assert (read_one(source, 0).label, read_one(source, 6).label, len(source)) == (1, 2, 8)
  for index in (1, 2, 3, 4, 5, 7):
    said = reason(source, index)
    assert 'the label: expected 0 to 2' in said or 'expected a label in the feature label, got none, or' in said


def test_images_without_labels_get_one_class_with_a_warning(tmp_path: pathlib.Path,
                                                            caplog: pytest.LogCaptureFixture) -> None:
  source = one(tmp_path / 't', tfrecord(tf_example({'image': e.image, 'label': .5, 'of': 3}) for e in FOUND))
  assert source.class_names == ('unlabeled',) and read_one(source, 3) == (FOUND[3].image, (0,), None)
  assert "get the class 'unlabeled'. The first records of " in caplog.text
  assert 'have image (bytes), label (float), of (int64).' in caplog.text


def test_messages_of_other_forms_are_read_as_protobuf_reads_them(tmp_path: pathlib.Path) -> None:
  image = field(field(b'image') + field(field(field(FOUND[0].image)), 2))

  def label(value: int, first: bool = True) -> bytes:
    key, number = field(b'label'), field(field(field(varint(value)), 3), 2)
    return field(key + number if first else number + key)
  loose = field(field(b'label') + field(field(b'\x08\x02', 3), 2))  # numbers that are not packed
  long = field(b'\x12\x81\x00' + bytes(1))  # another entry, whose length has a byte too much
  forms = [field(image + label(2)), field(label(2) + image), field(image) + field(label(2)), field(label(1) + image
           + label(2)), field(image + label(2, first=False)), field(image + loose), field(image + label(2)) +
           field(b'other', 7), field(image) + field(b'') + field(label(2)), field(image + label(2)) + b'\x10\x05',
           field(field(field(b'label') + field(field(b''), 2)) + image + label(2))]
  source = one(tmp_path / 't', tfrecord(forms))
  assert [read_one(source, i)[:2] for i in range(len(forms))] == [(FOUND[0].image, (2,))] * len(forms)
  broken = [long, b'', field(image + b'\xff' * 20), field(image)[:-3], image, b'\x0a\xff' + b'\xff' * 9 + b'\x01']
  source = one(tmp_path / 't', tfrecord([*[tf_example({'image': FOUND[0].image, 'label': 1})] * 100, *broken]))
  for index in range(100, len(source)):
    assert reason(source, index)


def test_records_of_another_kind_are_refused(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='records that are a tf.train.Example, got not a tf.Example record: 5 bytes'):
    one(tmp_path / 't', tfrecord([b'hello']))
  whole = bytearray(tfrecord([tf_example({'image': b'x'})]))
  whole[-1] ^= 1
  for content in (b'', tfrecord([b'']), bytes(whole)):
    with pytest.raises(UserError, match='train.tfrecord: expected records with features that match their checksums, '
                                        'got none in 1 files'):
      one(tmp_path / 't', content)


def test_an_empty_file_beside_others_is_a_shard_without_records(tmp_path: pathlib.Path) -> None:
  packed.write_tfrecords(tmp_path / 't', 'train', FOUND[:2], 4)
  assert len(opened(tmp_path / 't', label_offset=1)) == 2


def test_a_file_that_is_cut_anywhere_is_refused_by_name(tmp_path: pathlib.Path) -> None:
  whole = tfrecord(tf_example(packed.imagenet_features(e)) for e in FOUND[:2])
  end = len(tfrecord([tf_example(packed.imagenet_features(FOUND[0]))]))
  for size in sorted({*range(1, len(whole), 37), *range(1, 20), end - 1, end + 1, len(whole) - 1} - {end}):
    with pytest.raises(UserError, match='train.tfrecord: expected a complete TFRecord file, got .*, at byte .* of'):
      one(tmp_path / 't', whole[:size])


def test_damaged_and_compressed_files_are_refused_by_name(tmp_path: pathlib.Path) -> None:
  content = tfrecord(tf_example(packed.imagenet_features(e)) for e in FOUND)
  for changed, said in ((b'\x01' + content[1:], 'no record, at byte 0'),
                        (content + b'more', 'one that is truncated, at byte'),
                        (content + bytes(50), 'a length that does not match its checksum, at byte'),
                        (gzip.compress(content), 'a file compressed by gzip, which cannot be read at random'),
                        (zlib.compress(content), 'a file compressed by zlib'),
                        (bz2.compress(content), 'a file compressed by bzip2')):
    with pytest.raises(UserError, match=f'train.tfrecord: expected a complete TFRecord file, got {said}'):
      one(tmp_path / 't', changed)
  with pytest.raises(UserError, match='not compressed, which can be read at random, got x.tfrecord.gz. Decompress'):
    opened(tmp_path / 'x.tfrecord.gz')


def test_a_record_with_another_checksum_counts_as_a_bad_image(files: pathlib.Path) -> None:
  source = opened(files, label_offset=1)
  path = files / 'train-00001-of-00003'
  content = bytearray(path.read_bytes())
  content[content.index(FOUND[8].image) + 5] ^= 1
  path.write_bytes(content)
  for again in (source, opened(files, label_offset=1)):
    assert re.fullmatch(rf'the record at byte [\d,]+ of {path} does not match its checksum', reason(again, 8))
    assert again.describe(8) == f'{path}[1]'
    assert [read_one(again, i).image for i in (7, 9)] == [FOUND[7].image, FOUND[9].image]


def test_the_digest_depends_on_the_records_and_not_on_their_distribution_over_files(files: pathlib.Path,
                                                                                   tmp_path: pathlib.Path) -> None:
  packed.write_tfrecords(tmp_path / 'other', 'train', FOUND, 5)
  assert opened(tmp_path / 'other').digest == opened(files).digest
  image = bytearray(FOUND[3].image)
  image[-1] ^= 1
  for number, changed in enumerate((FOUND[3]._replace(label=0), FOUND[3]._replace(image=bytes(image)),
                                    Example('x', FOUND[3].image, FOUND[3].label))):
    packed.write_tfrecords(tmp_path / str(number), 'train', [*FOUND[:3], changed, *FOUND[4:]])
    assert opened(tmp_path / str(number)).digest != opened(files).digest


def test_a_part_of_files_without_splits_is_held_out(tmp_path: pathlib.Path) -> None:
  (tmp_path / 't').mkdir()
  (tmp_path / 't' / 'data.tfrecord').write_bytes(tfrecord(tf_example({'image': e.image, 'label': e.label})
                                                          for e in FOUND))
  train, test = (opened(tmp_path / 't', split, holdout=.25) for split in ('train', 'test'))
  kept, held = ([record.image for record in s.read(range(len(s)))] for s in (train, test))
  assert len(held) == 6 and sorted(kept + held) == sorted(e.image for e in FOUND)


def test_the_index_is_kept_mapped_and_made_again_if_it_is_damaged(files: pathlib.Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
  source = opened(files, label_offset=1)
  [kept] = (files / FOLDER).iterdir()
  with monkeypatch.context() as patch:
    patch.setattr(indexes, 'scan_all', None)
    other = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 1500 and other.digest == source.digest
    assert read_one(other, 9) == read_one(source, 9)
  content = kept.read_bytes()
  for damaged in (content[:-9], content[:200] + b'\xff' * 60 + content[260:], b'', content[:128] + content[192:]):
    kept.write_bytes(damaged)
    again = opened(files, label_offset=1)
    assert [read_one(again, i) for i in range(len(again))] == [read_one(source, i) for i in range(len(source))]


def test_an_image_that_is_too_large_counts_as_bad(tmp_path: pathlib.Path) -> None:
  source = one(tmp_path / 't', tfrecord([tf_example({'image': bytes(2**20 + 1), 'label': 0})]), max_file_mib=1)
  assert 'expected at most 1,048,576' in reason(source, 0)


def test_a_file_that_has_shrunk_gives_bad_images_and_one_that_is_gone_an_error(files: pathlib.Path) -> None:
  source = opened(files, label_offset=1)
  path = files / 'train-00001-of-00003'
  path.write_bytes(path.read_bytes()[:2000])
  assert 'does not match its checksum' in reason(source, 14)
  (files / 'train-00002-of-00003').unlink()
  open_files.pool.cache_clear()  # which has the file open
  with pytest.raises(FileNotFoundError):
    read_one(source, 22)
