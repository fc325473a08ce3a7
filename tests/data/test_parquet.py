"""Parquet files as a source: columns of every type, labels, splits, and files that are damaged or unlike the others."""
from __future__ import annotations

import hashlib
import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.data import packed, parquets
from tests.data.packed import NAMES, Example
from tests.data.parquets import class_label, described, pa, pq
from vit_jax.config import schema
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.data import index as indexes
from vit_jax.data import opening
from vit_jax.data.formats import parquet, parquet_files
from vit_jax.data.image import decode
from vit_jax.data.image.headers import BadImage
from vit_jax.data.index import FOLDER
from vit_jax.data.source import Source, first_label, read_one, row_groups, title

FOUND = packed.examples(23)
BYTES = pa.array([e.image for e in FOUND], pa.binary())
LABELS = [e.label for e in FOUND]
POOLS: list[Any] = []


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  parquet.cache_of.cache_clear()  # no row groups of other files


@pytest.fixture
def files(tmp_path: pathlib.Path) -> pathlib.Path:
  parquets.write(tmp_path / 'files', 'train', FOUND)
  parquets.write(tmp_path / 'files', 'validation', packed.examples(5, first=40), 1)
  return tmp_path / 'files'


def opened(where: Any, split: str = 'train', **settings: Any) -> Source:
  return opening.open_split(schema.Data(source=f'parquet:{where}', **settings), split, image_px=(8, 8))


def one(folder: pathlib.Path, columns: Any, **settings: Any) -> Source:
  """The source of a single file of these columns, or this table."""
  folder.mkdir(exist_ok=True)
  pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), folder / 'train-0.parquet',
                 row_group_size=4)
  return opened(folder, **settings)


def reason(source: Source, index: int) -> str:
  with pytest.raises(BadImage) as error:
    read_one(source, index)
  return str(error.value)


def test_examples_are_in_the_stored_order_with_their_bytes_labels_and_names(files: pathlib.Path) -> None:
  source = opened(files)
  assert [read_one(source, i)[:2] for i in range(len(source))] == [(e.image, (e.label,)) for e in FOUND]
  assert [first_label(source, i) for i in range(len(source))] == LABELS and source.class_names == NAMES
  assert source.describe(8) == str(files / 'train-00001-of-00003.parquet' / '000008.png')
  assert row_groups(source).sizes.tolist() == [3, 3, 1, 3, 3, 2, 3, 3, 2]  # type: ignore[union-attr]


@pytest.mark.parametrize('options', [
    {'compression': kind} for kind in ('none', 'snappy', 'gzip', 'brotli', 'zstd', 'lz4')] + [
    {'use_dictionary': False, 'data_page_version': '2.0'}, {'data_page_size': 100}, {'write_page_index': True},
    {'write_page_checksum': True}], ids=str)
def test_files_of_every_compression_and_layout_are_read(tmp_path: pathlib.Path, options: dict[str, Any]) -> None:
  parquets.write(tmp_path / 'f', 'train', [*FOUND, *FOUND[:9]], 2, rows=7, **options)
  source = opened(tmp_path / 'f')
  assert [read_one(source, i)[:2] for i in range(32)] == [(e.image, (e.label,)) for e in [*FOUND, *FOUND[:9]]]


@pytest.mark.parametrize('column', [
    BYTES, BYTES.cast(pa.large_binary()), pa.chunked_array([BYTES[:5], BYTES[5:]]),
    pa.StructArray.from_arrays([BYTES], ['bytes']), pa.StructArray.from_arrays([
        pa.array([e.key for e in FOUND]), BYTES], ['path', 'bytes'])], ids=lambda column: str(column.type))
def test_images_are_bytes_or_structs_with_them(tmp_path: pathlib.Path, column: Any) -> None:
  source = one(tmp_path / 'f', {'picture': column, 'label': LABELS})
  assert [read_one(source, i).image for i in range(23)] == [e.image for e in FOUND]
  named = getattr(column.type, 'num_fields', 0) == 2
  path = str(tmp_path / 'f' / 'train-0.parquet')
  assert source.describe(8) == (f'{path}/000008' if named else f'{path}[8]')


@pytest.mark.parametrize(('label', 'names', 'several'), [
    (pa.array(LABELS, pa.int8()), ('0', '1', '2'), 0),
    (pa.array(LABELS, pa.uint32()), ('0', '1', '2'), 0),
    (pa.array([NAMES[label] for label in LABELS]), NAMES, 0),
    (pa.array([NAMES[label] for label in LABELS], pa.large_string()), NAMES, 0),
    (pa.array([NAMES[label] for label in LABELS]).dictionary_encode(), NAMES, 0),
    (pa.array([[label, 0] for label in LABELS]), ('0', '1', '2'), 2),
    (pa.array([[NAMES[label], NAMES[0]] for label in LABELS], pa.large_list(pa.string())), NAMES, 2)],
    ids=lambda found: str(getattr(found, 'type', '')))
def test_labels_are_numbers_texts_or_lists_of_them(tmp_path: pathlib.Path, label: Any, names: tuple[str, ...],
                                                   several: int) -> None:
  source = one(tmp_path / 'f', {'image': BYTES, 'label': label}, max_labels=several)
  assert source.class_names == names and getattr(source, 'most_labels', 0) == several
  for index, example in enumerate(FOUND):
    assert read_one(source, index).label == first_label(source, index) == example.label
    assert read_one(source, index).labels == ((example.label, 0) if several else (example.label,))


@pytest.mark.parametrize('feature', [
    [class_label(('x', 'y', 'z'))], {'feature': class_label(('x', 'y', 'z')), '_type': 'List'},
    {'feature': class_label(('x', 'y', 'z')), 'length': -1, '_type': 'Sequence'}], ids=str)
def test_lists_of_named_classes_have_their_names(tmp_path: pathlib.Path, feature: Any) -> None:
  made = pa.table({'image': BYTES, 'tags': [[label] if label else [] for label in LABELS]})
  made = made.replace_schema_metadata(described({'tags': feature}))
  source = one(tmp_path / 'f', made, label_column='tags', max_labels=3)
  assert source.class_names == ('x', 'y', 'z')
  assert [read_one(source, i).labels for i in range(23)] == [(label,) if label else () for label in LABELS]


@pytest.mark.parametrize('metadata', [b'{', b'[]', b'{"info": {"features": 3}}',
                                      b'{"info": {"features": {"label": 3}}}',
                                      b'{"info": {"features": {"label": {"_type": "ClassLabel", "names": [1, 2]}}}}'])
def test_a_description_of_another_form_is_not_used(tmp_path: pathlib.Path, metadata: bytes) -> None:
  made = pa.table({'image': BYTES, 'label': LABELS}).replace_schema_metadata({b'huggingface': metadata})
  assert one(tmp_path / 'f', made).class_names == ('0', '1', '2')


def test_lists_of_nothing_but_null_are_no_labels(tmp_path: pathlib.Path) -> None:
  labels = pa.array([[None]] * 3, pa.list_(pa.int64()))
  rows = pa.table({'image': BYTES[:3], 'label': labels})
  (tmp_path / 'x').mkdir()
  pq.write_table(rows, tmp_path / 'x' / 'train-0.parquet')
  source = opening.open_split(schema.Data(source=f'parquet:{tmp_path}/x'), 'train', image_px=(8, 8))
  assert source.most_labels == 0 and [source.labels(row) for row in range(3)] == [(0,)] * 3


def test_names_of_classes_keep_the_order_of_the_description_and_a_list_gives_another(files: pathlib.Path) -> None:
  made = parquets.table(FOUND, ('cow', 'bee', 'ant'))
  source = one(files.parent / 'f', made)
  assert source.class_names == ('cow', 'bee', 'ant') and read_one(source, 1).label == FOUND[1].label
  (files / 'classes.txt').write_text('bee\ncow\nant\n')
  source = opened(files)
  assert source.class_names == ('bee', 'cow', 'ant')
  assert [first_label(source, i) for i in range(23)] == [(2, 0, 1)[label] for label in LABELS]


def test_numbers_of_classes_can_begin_at_another_number(tmp_path: pathlib.Path) -> None:
  source = one(tmp_path / 'f', {'image': BYTES, 'label': [label + 5 for label in LABELS]}, label_offset=5)
  assert source.class_names == ('0', '1', '2') and [first_label(source, i) for i in range(23)] == LABELS


@pytest.mark.parametrize(('shift', 'listed', 'says'), [
    (1, False, 'expected 1, the number of the first class, for labels from 1 to 3 and 3 classes of .*, got 0. Set'),
    (1, True, 'expected 1, the number'), (2, False, 'expected 2, the number'), (-1, False, '')])
def test_labels_beyond_the_names_of_the_description_ask_for_the_offset(shift: int, listed: bool, says: str,
                                                                       tmp_path: pathlib.Path) -> None:
  parquets.write(tmp_path / 'f', 'train', [e._replace(label=e.label + shift) for e in FOUND])
  (tmp_path / 'names.txt').write_text('\n'.join(reversed(NAMES)))
  settings = {'classes': str(tmp_path / 'names.txt')} if listed else {}
  if says:
    with pytest.raises(UserError, match=f'data.label_offset: {says}'):
      opened(tmp_path / 'f', **settings)
    source = opened(tmp_path / 'f', label_offset=shift, **settings)
    assert [source.class_names[first_label(source, i)] for i in range(23)] == [NAMES[label] for label in LABELS]
  else:  # a negative one is none
    assert len(opened(tmp_path / 'f')) == 23


def test_labels_that_are_missing_or_out_of_range_count_as_bad_images(tmp_path: pathlib.Path) -> None:
  made = parquets.table(FOUND)
  source = one(tmp_path / 'f', made.set_column(1, 'label', pa.array([None, -1, 7, *LABELS[3:]], pa.int64())))
  assert 'expected a label in the column label, got none, or one' in reason(source, 0)
  assert 'expected a label in the column label, got none, or one' in reason(source, 1)
  assert 'expected one of the 3 classes' in reason(source, 2) and read_one(source, 3).label == LABELS[3]


def test_a_split_whose_labels_are_all_missing_and_files_without_labels_have_one_class(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  parquets.write(tmp_path / 'f', 'train', FOUND)
  made = parquets.table(FOUND)
  pq.write_table(made.set_column(1, 'label', pa.array([-1] * 23, pa.int64())), tmp_path / 'f' / 'test-0.parquet')
  test = opened(tmp_path / 'f', 'test')
  assert test.class_names == ('unlabeled',) and read_one(test, 3) == (FOUND[3].image, (0,), None)
  assert "test has no labels: its images get the class 'unlabeled'" in caplog.text
  assert opened(tmp_path / 'f').class_names == NAMES
  assert one(tmp_path / 'g', {'image': BYTES}).class_names == ('unlabeled',)


def test_columns_are_chosen_by_type_and_name_and_several_are_asked_for(tmp_path: pathlib.Path) -> None:
  made = pa.table({'left': BYTES, 'right': BYTES, 'fine': LABELS, 'coarse': LABELS, 'note': ['x'] * 23})
  made = made.replace_schema_metadata(described({
      'left': {'_type': 'Value'}, 'right': {'_type': 'Image'}, 'fine': class_label(('x', 'y', 'z')),
      'coarse': class_label(('x', 'y', 'z', 'w'))}))
  with pytest.raises(UserError, match=r"data.label_column: expected the name of the column with labels of .*as several "
                     r"could be meant: fine, coarse, got ''. Set it."):
    one(tmp_path / 'f', made)
  assert one(tmp_path / 'f', made, label_column='coarse').class_names == ('x', 'y', 'z', 'w')
  with pytest.raises(UserError, match=r"data.image_column: .*left, right, got ''"):
    one(tmp_path / 'f', made.replace_schema_metadata(None))
  assert read_one(one(tmp_path / 'f', {'id': [b'x'] * 23, 'image': BYTES}), 3).image == FOUND[3].image
  for settings, said in (({'image_column': 'none'}, r"data.image_column: expected one column of .*left \(binary\).*got "
                          "'none'"), ({'image_column': 'fine'}, "got 'fine' of the type int64"),
                         ({'label_column': 'none'}, "data.label_column: expected one column of .*got 'none'"),
                         ({'label_column': 'left'}, "got 'left' of the type binary. Set another column")):
    with pytest.raises(UserError, match=said):
      one(tmp_path / 'f', made, **{'label_column': 'fine', **settings})
  with pytest.raises(UserError, match=r'expected a column of images, .* got the columns x \(int64\)'):
    one(tmp_path / 'f', {'x': LABELS})


def test_images_may_be_files_below_the_folder_and_never_others(tmp_path: pathlib.Path) -> None:
  folder = tmp_path / 'f'
  (folder / 'sub').mkdir(parents=True)
  (tmp_path / 'secret.png').write_bytes(FOUND[0].image)
  (folder / 'link.png').symlink_to(tmp_path / 'secret.png')
  (folder / 'sub' / 'a.png').write_bytes(FOUND[1].image)
  (folder / 'big.png').write_bytes(bytes(2**20 + 1))
  paths = ['sub/a.png', '../secret.png', str(tmp_path / 'secret.png'), 'link.png', 'gone.png', 'sub', '', 'big.png',
           'a\0b']
  labels = list(range(len(paths)))
  bad = {1: "expected a path below .*, got '../secret.png'", 2: 'expected a path below', 3: "got 'link.png'",
         4: 'expected the file .*gone.png, got "No such file', 5: 'got "Is a directory"', 6: 'got none',
         7: 'expected at most 1,048,576', 8: 'expected a path below'}
  for image in (paths, pa.array([{'bytes': None, 'path': path} for path in paths], parquets.IMAGE)):
    source = one(folder, {'image': image, 'label': labels}, max_file_mib=1)
    assert read_one(source, 0).image == FOUND[1].image
    for index, said in bad.items():
      with pytest.raises(BadImage, match=said):
        read_one(source, index)
  assert row_groups(one(folder, {'image': paths})) is None  # nothing is read in row groups
  assert read_one(one(folder, {'image': paths}, follow_links=True), 3).image == FOUND[0].image


def test_an_image_that_is_missing_or_too_large_counts_as_bad(tmp_path: pathlib.Path) -> None:
  source = one(tmp_path / 'f', {'image': [None, bytes(2**20 + 1), FOUND[2].image]}, max_file_mib=1)
  assert 'expected an image in the column image, got none' in reason(source, 0)
  assert 'the image has 1,048,577 bytes: expected at most 1,048,576' in reason(source, 1)
  assert read_one(source, 2).image == FOUND[2].image


@pytest.mark.parametrize('pattern', ['files', 'files/{split}-*.parquet', 'files/*.parquet',
                                     'files/{train,validation}-0000[0-9]-of-*.parquet'])
def test_a_pattern_gives_splits(files: pathlib.Path, pattern: str) -> None:
  assert len(opened(files.parent / pattern)) == len(FOUND)
  assert len(opened(files.parent / pattern, 'test')) == len(opened(files.parent / pattern, 'val[:5]')) == 5
  with pytest.raises(UserError, match="expected one of train, validation, got 'trian'. Did you mean train"):
    opened(files.parent / pattern, 'trian')


def test_a_part_of_files_without_splits_is_held_out(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'f').mkdir()
  pq.write_table(parquets.table(FOUND), tmp_path / 'f' / '0.parquet', row_group_size=5)
  train, test = (opened(tmp_path / 'f', split, holdout=.25) for split in ('train', 'test'))
  kept, held = ([record.image for record in s.read(range(len(s)))] for s in (train, test))
  assert len(held) == 6 and sorted(kept + held) == sorted(e.image for e in FOUND)
  assert title(test) == f'parquet:{tmp_path / "f"}, the 25 % held out'
  found = row_groups(train)
  assert found and found.sizes.sum() == 17 and len(found.sizes) <= 5


def test_the_digest_depends_on_rows_labels_names_and_row_groups(files: pathlib.Path, tmp_path: pathlib.Path) -> None:
  parquets.write(tmp_path / 'same', 'train', FOUND)
  assert opened(tmp_path / 'same').digest == opened(files).digest
  for number, changed in enumerate((Example('000003', FOUND[3].image, 0), Example('x', FOUND[3].image, FOUND[3].label),
                                    FOUND[3]._replace(image=FOUND[3].image + bytes(40)))):
    assert changed != FOUND[3]
    parquets.write(tmp_path / str(number), 'train', [*FOUND[:3], changed, *FOUND[4:]])
    assert opened(tmp_path / str(number)).digest != opened(files).digest
  parquets.write(tmp_path / 'rows', 'train', FOUND, rows=4)
  assert opened(tmp_path / 'rows').digest != opened(files).digest  # their order in training is another one


def test_a_file_that_is_cut_anywhere_is_refused(files: pathlib.Path) -> None:
  path = files / 'train-00001-of-00003.parquet'
  content = path.read_bytes()
  for size in [0, 4, 7, 8, 12, *range(20, len(content), 777), len(content) - 1]:
    path.write_bytes(content[:size])
    with pytest.raises(UserError, match='train-00001-of-00003.parquet: expected a complete Parquet file, got'):
      opened(files)


def test_something_else_than_a_parquet_file_is_refused(files: pathlib.Path) -> None:
  path = files / 'train-00001-of-00003.parquet'
  content = path.read_bytes()
  for found, said in ((b'', 'got an empty file'), (b'{"a": 1}' * 99, 'no footer at its end'),
                      (content[:-8] + b'\xff\xff\xff\x7fPAR1', 'got a footer of 2,147,483,655 bytes'),
                      (content[:-8] + b'\1\0\0\0PAR1', 'got a damaged one'), (content[:-4] + b'PARE', 'an encrypted')):
    path.write_bytes(found)
    with pytest.raises(UserError, match=said):
      opened(files)


def test_any_changed_byte_is_refused_counts_as_bad_images_or_leaves_the_rest(files: pathlib.Path) -> None:
  path, rng = files / 'train-00001-of-00003.parquet', np.random.default_rng(0)
  content, outcomes = path.read_bytes(), set()
  for place in rng.integers(4, len(content) - 8, 150).tolist():
    path.write_bytes(content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1:])
    parquet.cache_of.cache_clear()
    try:
      source = opened(files, label_column='label', image_column='image', num_classes=0)
    except (UserError, TemporaryError) as error:
      assert str(path) in str(error)
      outcomes.add('refused')
      continue
    for index in range(len(source)):
      try:
        read_one(source, index)
      except BadImage:
        outcomes.add('bad')
  assert outcomes == {'refused', 'bad'}


def test_a_damaged_row_group_counts_as_bad_images_and_the_others_are_read(tmp_path: pathlib.Path) -> None:
  parquets.write(tmp_path / 'f', 'train', FOUND, 1, write_page_checksum=True)
  path = tmp_path / 'f' / 'train-00000-of-00001.parquet'
  start = pq.read_metadata(path).row_group(1).column(0).dictionary_page_offset
  content = bytearray(path.read_bytes())
  content[start + 900] ^= 1
  path.write_bytes(content)
  source = opened(tmp_path / 'f')
  assert all('the row group is damaged' in reason(source, i) for i in (3, 4, 5))
  assert [read_one(source, i).image for i in (2, 6)] == [FOUND[2].image, FOUND[6].image]
  assert first_label(source, 4) == FOUND[4].label


def test_a_file_with_other_columns_or_class_names_is_refused(files: pathlib.Path) -> None:
  path = files / 'train-00002-of-00003.parquet'
  made = parquets.table(FOUND)
  for other, said in (
      (made.drop(['label']), r"train-00002-of-00003.parquet: expected the column 'label' of the type int64, as the "
       r'first file has it, got the columns image \(struct'),
      (made.set_column(1, 'label', pa.array(LABELS, pa.int32())), "'label' of the type int64, as .* got int32"),
      (made.set_column(0, 'image', BYTES), "'image' of the type struct.* got binary"),
      (parquets.table(FOUND, ('a', 'b')), "expected the 3 class names of the first file for .*'label', got 2")):
    pq.write_table(other, path)
    with pytest.raises(UserError, match=said):
      opened(files)
  pq.write_table(made.slice(0, 0), path)  # without rows
  assert len(opened(files)) == 15
  with pytest.raises(UserError, match='expected rows with images, got none in 1 files'):
    opened(path)


def test_row_groups_that_are_too_large_are_refused_and_few_or_sorted_ones_warned_about(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  found = parquets.large(300)
  size = sum(len(e.image) for e in found)
  assert 3 * 2**19 < size < 2**21
  parquets.write(tmp_path / 'one', 'train', found, 1, rows=300)
  with pytest.raises(UserError, match=r'expected row groups of at most data.shuffle_mib=1, as each is read as a '
                     r'whole, got one of 2 MiB with 300 images. Write the files again with smaller ones, such as '
                     r'row_group_size=\d of pyarrow.parquet.write_table, or run vit-jax prepare; or raise data'):
    opened(tmp_path / 'one', shuffle_mib=1)
  assert len(opened(tmp_path / 'one')) == 300 and not caplog.text  # all of it is held
  parquets.write(tmp_path / 'few', 'train', found, 1, rows=100)
  opened(tmp_path / 'few', shuffle_mib=1)
  assert 'row groups of up to 1 MiB, of which 1 are shuffled at a time: images are shuffled among few' in caplog.text
  caplog.clear()
  names = [f'class {i}' for i in range(30)]
  made = parquets.table([e._replace(label=i // 10) for i, e in enumerate(found)], names)
  (tmp_path / 'sorted').mkdir()
  pq.write_table(made, tmp_path / 'sorted' / 'train.parquet', row_group_size=10)
  opened(tmp_path / 'sorted', shuffle_mib=1)
  assert 'is sorted by class: the images of a row group have the same one' in caplog.text
  caplog.clear()
  made = parquets.table([e._replace(label=i * 7 % 30) for i, e in enumerate(found)], names)
  pq.write_table(made, tmp_path / 'sorted' / 'train.parquet', row_group_size=10)
  opened(tmp_path / 'sorted', shuffle_mib=1)
  assert not caplog.text


def test_files_outside_of_the_folder_are_read_only_if_the_setting_says_so(files: pathlib.Path,
                                                                         tmp_path: pathlib.Path) -> None:
  (tmp_path / 'linked').mkdir()
  (tmp_path / 'linked' / 'train-0.parquet').symlink_to(files / 'train-00000-of-00003.parquet')
  with pytest.raises(UserError, match='expected a file or folder inside of .*linked, got a link to'):
    opened(tmp_path / 'linked')
  assert len(opened(tmp_path / 'linked', follow_links=True)) == 7


def test_the_index_is_kept_mapped_and_made_again_if_it_is_damaged(files: pathlib.Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
  source = opened(files)
  [kept] = (files / FOLDER).iterdir()
  with monkeypatch.context() as patch:
    patch.setattr(indexes, 'scan_all', None)
    other = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 1500 and other.digest == source.digest
    assert read_one(other, 9) == read_one(source, 9)
  content = kept.read_bytes()
  for damaged in (content[:-9], content[:200] + b'\xff' * 60 + content[260:], b'', content[:128] + content[192:]):
    kept.write_bytes(damaged)
    again = opened(files)
    assert [read_one(again, i) for i in range(len(again))] == [read_one(source, i) for i in range(len(source))]


def test_more_files_than_may_be_open_are_read(tmp_path: pathlib.Path) -> None:
  for number in range(100):
    pq.write_table(pa.table({'image': [b'%d' % number], 'label': [0]}), tmp_path / f'train-{number:03d}.parquet')
  script = ('import sys\nfrom vit_jax.config import schema\nfrom vit_jax.data import opening\n'
            'from vit_jax.data.source import read_one\n'
            "source = opening.open_split(schema.Data(source=f'parquet:{sys.argv[1]}'), 'train', image_px=(8, 8))\n"
            'places = [i * 37 % 100 for i in range(100)]\n'
            'assert [int(read_one(source, i).image) for i in places] == places\n')
  subprocess.run(['bash', '-c', 'ulimit -n 64; exec "$@"', 'bash', sys.executable, '-c', script, str(tmp_path)],
                 check=True, env=os.environ | {'JAX_PLATFORMS': 'cpu'})


@pytest.mark.parametrize('column', ['', 'tags'])
def test_files_of_the_package_datasets_are_read_as_it_reads_them(column: str, tmp_path: pathlib.Path) -> None:
  golden = pathlib.Path(__file__).with_name('golden_datasets.parquet')
  shutil.copy(golden, tmp_path / 'train.parquet')
  expected = json.loads(golden.with_suffix('.json').read_text())
  source = opened(tmp_path, label_column=column, max_labels=2)
  assert source.class_names == tuple(expected['names'])
  found = [read_one(source, i) for i in range(7)]
  assert [hashlib.sha256(one.image).hexdigest() for one in found] == expected['sha256']
  assert [decode.decode(bytes(one.image)).shape[1::-1] for one in found] == [tuple(size) for size in expected['size']]
  assert [os.path.basename(source.describe(i)) for i in range(7)] == expected['path']
  if column:
    assert [list(one.labels or ()) for one in found] == expected['tags']
  else:
    assert [one.label for one in found] == expected['label']


@pytest.mark.parametrize('place', ['flat image', 'nested image', 'label', 'labels', 'caption', 'captions'])
def test_rows_that_share_a_long_value_share_its_memory(place: str, tmp_path: pathlib.Path) -> None:
  num, shared = 1_000, np.random.default_rng(0).bytes(200_000)  # 200 MB if each row had its own
  text, small = shared.hex()[:200_000], FOUND[0].image
  images = pa.array([shared if place == 'flat image' else small] * num, pa.binary())
  if place == 'nested image':
    images = pa.array([{'bytes': shared, 'path': 'x.png'}] * num, parquets.IMAGE)
  columns = {'image': images, 'label': {'label': [text] * num, 'labels': [[text]] * num}.get(place, ['a'] * num),
             'text': {'caption': [text] * num, 'captions': [[text, 'b']] * num}.get(place, ['c'] * num)}
  (tmp_path / 'x').mkdir()
  pq.write_table(pa.table(columns), tmp_path / 'x' / 'train-0.parquet', row_group_size=num)
  del columns, images
  before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
  POOLS.append(pool)  # arrays may outlive the test
  pa.set_memory_pool(pool)
  try:
    source = opened(tmp_path / 'x', caption_column='text')
    assert read_one(source, 0).image == read_one(source, num - 1).image == (shared if 'image' in place else small)
    assert source.captions(num - 1)[0] == (text if 'caption' in place else 'c')
    assert source.class_names == ((text,) if 'label' in place else ('a',))
  finally:
    pa.set_memory_pool(before)
  assert pool.max_memory() < 20_000_000


def test_images_whose_size_in_memory_is_not_known_are_refused(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'x').mkdir()
  pq.write_table(pa.table({'image': BYTES, 'label': LABELS}), tmp_path / 'x' / 'train-0.parquet',
                 use_dictionary=False, column_encoding={'image': 'DELTA_BYTE_ARRAY'})
  with pytest.raises(UserError, match='expected images that are stored as they are or in a dictionary, got the enc'):
    opened(tmp_path / 'x')


def test_a_name_that_is_too_long_for_a_path_is_cut_and_a_path_refused(tmp_path: pathlib.Path) -> None:
  name = 'x' * 5_000
  source = one(tmp_path / 'x', {'image': pa.array([{'bytes': FOUND[0].image, 'path': name}], parquets.IMAGE)})
  assert read_one(source, 0).image == FOUND[0].image
  assert source.describe(0).endswith(f'/{"x" * 4_093}…')
  lost = pa.array([{'bytes': None, 'path': name}], parquets.IMAGE)  # a cut name is that of no file
  assert 'expected a path below' in reason(one(tmp_path / 'x', {'image': lost}), 0)
  with pytest.raises(UserError, match=r"train-0.parquet: expected paths of at most 4,096 bytes in the column 'image', "
                     'got one of 5,000. Write the file again without it.'):
    one(tmp_path / 'y', {'image': [name]})


@pytest.mark.parametrize('label', [
    pa.array([2**63], pa.uint64()), pa.array([[1, 2**63]], pa.list_(pa.uint64())),
    pa.array([2**63], pa.uint64()).dictionary_encode()], ids=lambda label: str(label.type))
def test_a_label_of_more_than_63_bits_is_no_damage(label: Any, tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=r"train-0.parquet: expected labels below 2\*\*63 in the column 'label', got "
                     '9,223,372,036,854,775,808. Write the file again with other labels.'):
    one(tmp_path / 'x', {'image': BYTES[:1], 'label': label})


@pytest.mark.parametrize('stage', ['parse_footer', '_open_parquet', 'read_column'])
def test_a_lack_of_memory_is_no_damage(stage: str, files: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  def fail(*_: Any, **__: Any) -> None:
    raise pa.ArrowMemoryError('malloc of size 8 failed')

  with monkeypatch.context() as patch:
    patch.setattr(parquet_files, stage, fail)
    with pytest.raises(MemoryError):
      read_one(opened(files), 0)


def test_texts_that_a_dictionary_has_but_no_row_are_no_classes(tmp_path: pathlib.Path) -> None:
  codes = pa.DictionaryArray.from_arrays(pa.array([2, None, 0]), pa.array(['dog', 'unused', 'cat']))
  source = one(tmp_path / 'x', {'image': BYTES[:3], 'label': codes})
  assert source.class_names == ('cat', 'dog') and [first_label(source, i) for i in (0, 2)] == [0, 1]
