"""Tar files as a source: which members make an example, labels of every form, splits, and damaged archives."""
from __future__ import annotations

import json
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import tarfile
import time
from typing import Any

import pytest

from tests.data import packed
from tests.data.packed import NAMES, Example
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import index as indexes
from vit_jax.data import open_files, opening
from vit_jax.data.image.headers import BadImage
from vit_jax.data.index import FOLDER
from vit_jax.data.source import Source, first_label, read_one, title

FOUND = packed.examples(23)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


@pytest.fixture
def tars(tmp_path: pathlib.Path) -> pathlib.Path:
  packed.write_tars(tmp_path / 'tars', 'train', FOUND)
  packed.write_tars(tmp_path / 'tars', 'validation', packed.examples(5, first=40), 1)
  return tmp_path / 'tars'


def opened(where: Any, split: str = 'train', **settings: Any) -> Source:
  return opening.open_split(schema.Data(source=f'wds:{where}', **settings), split, image_px=(8, 8))


def one(folder: pathlib.Path, content: bytes, **settings: Any) -> Source:
  """The source of a single archive."""
  folder.mkdir(exist_ok=True)
  (folder / 'train-0.tar').write_bytes(content)
  return opened(folder, **settings)


def reason(source: Source, index: int) -> str:
  with pytest.raises(BadImage) as error:
    read_one(source, index)
  return str(error.value)


def test_examples_are_in_the_stored_order_with_their_bytes_and_labels(tars: pathlib.Path) -> None:
  source = opened(tars)
  assert [read_one(source, i)[:2] for i in range(len(source))] == [(e.image, (e.label,)) for e in FOUND]
  assert source.class_names == ('0', '1', '2')
  assert source.describe(8) == str(tars / 'set-train-001.tar' / '000008.png')
  assert [first_label(source, i) for i in range(len(source))] == [e.label for e in FOUND]
  assert source.captions(4) == (f'an image of {NAMES[FOUND[4].label]}, é',)  # type: ignore[attr-defined]


@pytest.mark.parametrize(('column', 'names', 'several'), [
    ('cls', ('0', '1', '2'), 0), ('json/label', NAMES, 0), ('json/deep/er', ('0', '1', '2'), 0),
    ('json/both', NAMES, 2)])
def test_labels_are_numbers_names_or_lists_of_them(tars: pathlib.Path, column: str, names: tuple[str, ...],
                                                   several: int) -> None:
  source = opened(tars, label_column=column, max_labels=several)
  assert source.class_names == names and getattr(source, 'most_labels', 0) == several
  for index, example in enumerate(FOUND):
    assert read_one(source, index).label == example.label
    assert read_one(source, index).labels == (tuple(dict.fromkeys((example.label, 0))) if several else (example.label,))


def test_the_digest_depends_on_images_labels_and_names_and_not_on_their_distribution_over_files(
    tars: pathlib.Path, tmp_path: pathlib.Path) -> None:
  packed.write_tars(tmp_path / 'other', 'train', FOUND, 5)
  assert opened(tmp_path / 'other').digest == opened(tars).digest
  for number, changed in enumerate((Example('000003', FOUND[3].image, 0), Example('x', FOUND[3].image, FOUND[3].label),
                                    FOUND[3]._replace(image=FOUND[3].image + b'\0'))):
    assert changed != FOUND[3]
    packed.write_tars(tmp_path / str(number), 'train', [*FOUND[:3], changed, *FOUND[4:]])
    assert opened(tmp_path / str(number)).digest != opened(tars).digest


def test_names_of_classes_come_from_a_list_beside_the_files_or_from_the_setting(tars: pathlib.Path) -> None:
  (tars / 'classes.txt').write_text('\n'.join(NAMES))
  assert opened(tars).class_names == NAMES and first_label(opened(tars, 'validation'), 2) == 42 * 5 % 7 % 3
  (tars / 'other.txt').write_text('cow\nbee\nant\n')
  other = opened(tars, classes=str(tars / 'other.txt'))
  assert first_label(other, 1) == FOUND[1].label  # numbers are places in the list
  by_name = opened(tars, classes=str(tars / 'other.txt'), label_column='json/label')
  assert by_name.class_names == ('cow', 'bee', 'ant') and first_label(by_name, 1) == 2 - FOUND[1].label


def test_numbers_of_classes_can_begin_at_another_number(tars: pathlib.Path) -> None:
  source = opened(tars, label_offset=1, num_classes=2)
  assert source.class_names == ('0', '1')
  for index, example in enumerate(FOUND):
    if example.label:
      assert read_one(source, index).label == example.label - 1
    else:
      assert reason(source, index) == 'the label: expected 1 to 2, got 0'


def test_the_training_files_define_the_classes(tmp_path: pathlib.Path) -> None:
  packed.write_tars(tmp_path / 't', 'train', [e for e in FOUND if e.label != 1])
  packed.write_tars(tmp_path / 't', 'test', [e for e in FOUND if e.label != 2])
  assert opened(tmp_path / 't', 'test').class_names == ('0', '1', '2')
  with pytest.raises(UserError, match='test: expected the classes of the training files, got 1 others: bee'):
    opened(tmp_path / 't', 'test', label_column='json/label')


@pytest.mark.parametrize('kind', [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_every_format_are_read(tmp_path: pathlib.Path, kind: int) -> None:
  folder = '/'.join(['a' * 40] * 4 if kind == tarfile.USTAR_FORMAT else ['b' * 100, 'ü' * 90])
  source = one(tmp_path / 't', packed.tar(packed.members([e._replace(key=f'{folder}/{e.key}') for e in FOUND]), kind))
  assert [read_one(source, i).image for i in range(len(source))] == [e.image for e in FOUND]
  assert source.describe(3) == str(tmp_path / 't' / 'train-0.tar' / folder / '000003.png')


def test_a_size_in_an_extended_header_is_used(tmp_path: pathlib.Path) -> None:
  info = tarfile.TarInfo('a.png')
  info.size, info.pax_headers = len(FOUND[0].image), {'size': str(len(FOUND[0].image))}
  header = bytearray(info.tobuf(tarfile.PAX_FORMAT))
  header[-512 + 124:-512 + 136] = b'00000000000\0'
  header[-512 + 148:-512 + 156] = b'%06o\0 ' % (sum(header[-512:]) - sum(header[-512 + 148:-512 + 156]) + 256)
  source = one(tmp_path / 't', bytes(header) + FOUND[0].image.ljust(-(-info.size // 512) * 512, b'\0')
               + packed.tar([('a.cls', b'0')]))
  assert read_one(source, 0).image == FOUND[0].image


def test_a_key_ends_at_the_first_dot_of_the_base_name_and_a_repeated_extension_begins_a_new_example(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  image = [e.image for e in FOUND]
  source = one(tmp_path / 't', packed.tar([
      ('d.x/a.cls', b'0'), ('d.x/a.PNG', image[0]), ('d.x/a.seg.png', b'no image of the key'),
      ('b.png', image[1]), ('b.png', image[2]), ('b.cls', b'1'), ('e/', b''), ('__meta__.json', b'{}'),
      ('.hidden.png', b''), ('none', b''), ('c.cls', b'2'), ('f.cls', b'2'), ('f.png', image[3]),
      ('b.png', image[4]), ('b.cls', b'0')], links={'g.png': tarfile.SYMTYPE, 'h.png': tarfile.LNKTYPE}))
  assert [source.describe(i).rpartition('.tar/')[2] for i in range(len(source))] == [
      'd.x/a.PNG', 'b.png', 'b.png', 'f.png', 'b.png']
  assert [first_label(source, i) for i in (0, 2, 3, 4)] == [0, 1, 2, 0]
  assert 'expected a label in .cls, got none' in reason(source, 1)
  for counted in ('keys without an image (2)', 'symbolic links (1)', 'hard links (1)',
                  'members without an extension (1)', 'members of the same name as the one before (1)'):
    assert counted in caplog.text, counted


def test_an_archive_with_nothing_to_ignore_has_no_warning(tmp_path: pathlib.Path,
                                                         caplog: pytest.LogCaptureFixture) -> None:
  image = FOUND[0].image
  one(tmp_path / 't', packed.tar([('a.png', image), ('a.cls', b'0'), ('b.png', image), ('b.cls', b'1')]))
  assert 'ignored' not in caplog.text


def test_labels_that_are_missing_damaged_or_out_of_range_count_as_bad_images(tmp_path: pathlib.Path) -> None:
  labels = [b'1', b'', b'x', b'1.5', b'-1', b'7', b'9' * 40, b' 2\n']
  found = [m for i, label in enumerate(labels) for m in ((f'{i}.cls', label), (f'{i}.png', FOUND[i].image))]
  source = one(tmp_path / 't', packed.tar([*found, ('9.png', FOUND[9].image)]), num_classes=3)
  bad = [i for i in range(len(source)) if i not in (0, 7)]
  assert len(source) == 9 and read_one(source, 0).label == 1 and read_one(source, 7).label == 2
  for index in bad:
    assert 'the label: expected 0 to 2' in (said := reason(source, index)) or 'one that is damaged' in said
    with pytest.raises(BadImage):
      first_label(source, index)


def test_images_without_labels_get_one_class_with_a_warning(tmp_path: pathlib.Path,
                                                            caplog: pytest.LogCaptureFixture) -> None:
  content = packed.tar([m for m in packed.members(FOUND) if m[0].endswith(('.png', '.txt'))])
  source = one(tmp_path / 't', content)
  assert source.class_names == ('unlabeled',) and read_one(source, 3) == (FOUND[3].image, (0,), None)
  assert "get the class 'unlabeled'" in caplog.text
  with pytest.raises(UserError, match='expected labels in .cls, got none'):
    one(tmp_path / 't', content, label_column='cls')


def test_one_image_without_a_label_leaves_the_others_theirs(tmp_path: pathlib.Path) -> None:
  members = [one for one in packed.members(FOUND) if one[0] not in (f'{FOUND[0].key}.cls', f'{FOUND[0].key}.json')]
  source = one(tmp_path / 't', packed.tar(members), num_classes=3)
  assert source.class_names != ('unlabeled',) and read_one(source, 3).label == FOUND[3].label
  with pytest.raises(BadImage):
    read_one(source, 0)  # which counts as an image that cannot be decoded


def test_several_images_under_a_key_need_the_extension(tmp_path: pathlib.Path) -> None:
  content = packed.tar([('a.cls', b'0'), ('a.left.png', FOUND[0].image), ('a.jpg', b'x'), ('a.png', FOUND[1].image)])
  with pytest.raises(UserError, match="one image for each key, got 'a.jpg' and 'a.png'. Set data.image_column"):
    one(tmp_path / 't', content)
  assert read_one(one(tmp_path / 't', content, image_column='png'), 0).image == FOUND[1].image
  assert read_one(one(tmp_path / 't', content, image_column='left.png'), 0).image == FOUND[0].image
  with pytest.raises(UserError, match='expected members with .webp, got none in 1 files'):
    one(tmp_path / 't', content, image_column='webp')


def test_a_label_column_of_another_form_is_refused(tars: pathlib.Path) -> None:
  for column in ('json', 'cls/x', '/x'):
    with pytest.raises(UserError, match='data.label_column: expected an extension such as cls, or json/FIELD, got'):
      opened(tars, label_column=column)


@pytest.mark.parametrize('pattern', ['tars', 'tars/set-{split}-*.tar', 'tars/set-{split}-{000..000}.tar',
                                     'tars/set-{train,validation}-00[0-9].tar', '*/*.tar'])
def test_a_pattern_gives_splits(tars: pathlib.Path, pattern: str) -> None:
  num = 7 if '{000' in pattern else len(FOUND)
  assert len(opened(tars.parent / pattern)) == num
  assert len(opened(tars.parent / pattern, 'test')) == len(opened(tars.parent / pattern, 'val[:5]')) == 5
  with pytest.raises(UserError, match="expected one of train, validation, got 'trian'. Did you mean train"):
    opened(tars.parent / pattern, 'trian')


def test_folders_can_name_the_splits(tmp_path: pathlib.Path) -> None:
  for split, num in (('train', 9), ('test', 4)):
    (tmp_path / 't' / split).mkdir(parents=True)
    (tmp_path / 't' / split / '0.tar').write_bytes(packed.tar(packed.members(FOUND[:num])))
  assert (len(opened(tmp_path / 't')), len(opened(tmp_path / 't', 'test'))) == (9, 4)


def test_a_missing_file_of_a_range_and_an_unclear_split_are_refused(tars: pathlib.Path) -> None:
  for pattern, said in (('set-train-{000..003}.tar', 'set-train-003.tar: expected this file, or files of this pattern'),
                        ('set-{split}-{000..001}.tar', 'set-validation-001.tar: expected this file'),
                        ('other-*.tar', 'expected this file, or files'), ('{0..99999999}.tar', 'at most 1,000,000')):
    with pytest.raises(UserError, match=said):
      opened(tars / pattern)
  (tars / 'extra.tar').write_bytes(b'')
  with pytest.raises(UserError, match='the name of a split in all file names or in none, got none in extra.tar. Write'):
    opened(tars)
  (tars / 'extra.tar').rename(tars / 'train-test.tar')
  with pytest.raises(UserError, match='the name of one split in .*train-test.tar, got test, train. Write {split}'):
    opened(tars)


def test_a_part_of_files_without_splits_is_held_out(tmp_path: pathlib.Path) -> None:
  (tmp_path / 't').mkdir()
  (tmp_path / 't' / '0.tar').write_bytes(packed.tar(packed.members(FOUND)))
  train, test = (opened(tmp_path / 't', split, holdout=.25) for split in ('train', 'test'))
  images = {e.image: e.label for e in FOUND}
  kept, held = ([record.image for record in s.read(range(len(s)))] for s in (train, test))
  assert len(held) == 6 and sorted(kept + held) == sorted(images)
  assert sorted(kept, key=list(images).index) == kept  # in the stored order
  for label in range(3):
    assert sum(images[i] == label for i in held) == pytest.approx(sum(e.label == label for e in FOUND) / 4, abs=1)
  assert title(test) == f'wds:{tmp_path / "t"}, the 25 % held out' and test.name == f'wds:{tmp_path / "t"}/test'
  assert train.digest != opened(tmp_path / 't', 'train', holdout=.25, holdout_seed=1).digest


def test_a_description_as_timm_writes_it_lists_the_files(tars: pathlib.Path) -> None:
  def describe(**changes: Any) -> None:
    listed = {'filenames': ['set-train-002.tar', 'set-train-000.tar'], 'shard_lengths': [8, 7], 'num_samples': 15}
    (tars / '_info.json').write_text(json.dumps({'splits': {'train': listed | changes}}))
  describe()
  source = opened(tars)
  assert [read_one(source, i).image for i in range(15)] == [e.image for e in [*FOUND[15:], *FOUND[:7]]]
  for changes, said in (({'shard_lengths': [8, 9]}, 'set-train-000.tar: expected 9 images, as its description says'),
                        ({'filenames': ['../x.tar', 'y.tar']}, 'expected files in this folder'),
                        ({'filenames': ['x.tar', 'y.tar']}, 'expected the file .*x.tar, got none'),
                        ({'shard_lengths': [8]}, 'and the number of examples of each')):
    describe(**changes)
    with pytest.raises(UserError, match=said):
      opened(tars)


def test_an_archive_that_is_cut_anywhere_is_refused(tmp_path: pathlib.Path) -> None:
  content = packed.tar(packed.members(FOUND[:2]))
  end = content.rstrip(b'\0')
  for size in [*range(0, len(end), 1000), *range(0, len(end) + 1, 512)]:
    with pytest.raises(UserError, match='train-0.tar: expected a complete tar archive, got'):
      one(tmp_path / 't', content[:size])


def test_a_damaged_header_more_behind_the_end_and_sparse_members_are_refused(tmp_path: pathlib.Path) -> None:
  content = packed.tar(packed.members(FOUND[:2]))
  sparse = bytearray(packed.tar([('a.png', b'x')]))
  sparse[156:157] = b'S'
  sparse[148:156] = b'%06o\0 ' % (sum(sparse[:512]) - sum(sparse[148:156]) + 256)
  huge = bytearray(packed.tar([('a.png', b'x')]))
  huge[124:136] = b'\x80' + bytes([255] * 11)
  huge[148:156] = b'%06o\0 ' % (sum(huge[:512]) - sum(huge[148:156]) + 256)
  for found, said in ((content[:5] + b'\xff' + content[6:], 'got no header, at byte 0'),
                      (content[:1030] + b'\xff' + content[1031:], 'got one that is damaged, at byte 1,024'),
                      (content + content, 'more bytes behind the end of the archive, perhaps another one'),
                      (bytes(sparse), "stored completely, got the sparse file 'a.png'"),
                      (bytes(huge), 'got one that is truncated, at byte 0'), (b'', 'got one without an end')):
    with pytest.raises(UserError, match=said):
      one(tmp_path / 't', found)


def test_compressed_archives_are_refused_by_name_and_by_content(tmp_path: pathlib.Path) -> None:
  for name in ('a.tar.gz', 'a.tgz', 'a.tar.zst', 'a.tar.bz2', 'a.tar.xz'):
    with pytest.raises(UserError, match=f'tar files that are not compressed, .*got {name}. Decompress them'):
      opened(tmp_path / name)
  import bz2
  import gzip
  import lzma
  content = packed.tar(packed.members(FOUND))
  for compress, kind in ((gzip.compress, 'gzip'), (bz2.compress, 'bzip2'), (lzma.compress, 'xz')):
    with pytest.raises(UserError, match=f'got a file compressed by {kind}, which cannot be read at random'):
      one(tmp_path / 't', compress(content))


def test_a_folder_that_has_the_name_of_an_archive_is_opened(tars: pathlib.Path, tmp_path: pathlib.Path) -> None:
  """An unpacked archive often keeps it."""
  folder = tmp_path / 'set.zip'
  shutil.copytree(tars, folder)
  assert opened(folder).digest == opened(tars).digest


def test_a_file_that_has_shrunk_gives_bad_images_and_one_that_is_gone_an_error(tars: pathlib.Path) -> None:
  source = opened(tars)
  path = tars / 'set-train-001.tar'
  path.write_bytes(path.read_bytes()[:5000])
  assert 'the image is truncated' in reason(source, 14)
  (tars / 'set-train-002.tar').unlink()
  open_files.pool.cache_clear()  # which has the file open
  with pytest.raises(FileNotFoundError):
    read_one(source, 22)


def test_an_image_that_is_too_large_counts_as_bad(tmp_path: pathlib.Path) -> None:
  source = one(tmp_path / 't', packed.tar([('a.cls', b'0'), ('a.png', bytes(2**20 + 1))]), max_file_mib=1)
  assert 'the image has 1,048,577 bytes: expected at most 1,048,576' in reason(source, 0)


def test_files_outside_of_the_folder_are_read_only_if_the_setting_says_so(
    tars: pathlib.Path, tmp_path: pathlib.Path) -> None:
  (tmp_path / 'linked').mkdir()
  (tmp_path / 'linked' / 'train-0.tar').symlink_to(tars / 'set-train-000.tar')
  with pytest.raises(UserError, match='expected a file or folder inside of .*linked, got a link to'):
    opened(tmp_path / 'linked')
  assert len(opened(tmp_path / 'linked', follow_links=True)) == 7


def test_the_index_is_kept_mapped_and_made_again_if_it_is_damaged(tars: pathlib.Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
  source = opened(tars)
  [kept] = (tars / FOLDER).iterdir()
  with monkeypatch.context() as patch:
    patch.setattr(indexes, 'scan_all', None)
    other = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 1500 and other.digest == source.digest
    assert read_one(other, 9) == read_one(source, 9)
  content = kept.read_bytes()
  for damaged in (content[:-9], content[:200] + b'\xff' * 60 + content[260:], b'', content[:128] + content[192:]):
    kept.write_bytes(damaged)
    again = opened(tars)
    assert [read_one(again, i) for i in range(len(again))] == [read_one(source, i) for i in range(len(source))]


def test_more_archives_than_files_may_be_open_are_read(tmp_path: pathlib.Path) -> None:
  for number in range(100):
    (tmp_path / f'train-{number:03d}.tar').write_bytes(packed.tar([(f'{number}.png', b'%d' % number),
                                                                  (f'{number}.cls', b'0')]))
  script = ('import sys\nfrom vit_jax.config import schema\nfrom vit_jax.data import opening\n'
            'from vit_jax.data.source import read_one\n'
            "source = opening.open_split(schema.Data(source=f'wds:{sys.argv[1]}'), 'train', image_px=(8, 8))\n"
            'places = [i * 37 % 100 for i in range(100)]\n'
            'assert [int(read_one(source, i).image) for i in places] == places\n')
  subprocess.run(['bash', '-c', 'ulimit -n 64; exec "$@"', 'bash', sys.executable, '-c', script, str(tmp_path)],
                 check=True, env=os.environ | {'JAX_PLATFORMS': 'cpu'})


def test_a_header_of_very_many_records_is_read_at_once(tmp_path: pathlib.Path) -> None:
  records, extended = b'5 a=\n' * 200_000, tarfile.TarInfo('pax')
  extended.type, extended.size = b'x', len(records)
  before = extended.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512)
  began_s = time.process_time()
  source = one(tmp_path / 't', before + packed.tar([('a.cls', b'0'), ('a.png', FOUND[0].image)]))
  assert read_one(source, 0).image == FOUND[0].image and time.process_time() - began_s < 3


def test_numbers_that_are_not_finite_beside_a_label_do_not_matter(tmp_path: pathlib.Path) -> None:
  source = one(tmp_path / 't', packed.tar([('a.json', b'{"label": 2, "unsafe": NaN, "size": 1e999}'),
                                           ('a.png', FOUND[0].image)]), label_column='json/label')
  assert first_label(source, 0) == 2


def test_a_label_column_that_is_not_unicode_is_an_error_with_a_message(tmp_path: pathlib.Path) -> None:
  packed_file = packed.tar([('a.json', b'{"label": 2}'), ('a.png', FOUND[0].image)])
  with pytest.raises(UserError, match='expected labels in the field'):
    one(tmp_path / 't', packed_file, label_column='json/\udcff')
