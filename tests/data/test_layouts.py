"""Folders and label files as people have them: what is a split, what a class, and what is refused, by `check`."""
from __future__ import annotations

import pathlib
import unicodedata
from collections.abc import Callable

import pytest

from tests.data.images import encode, random_image
from vit_jax import main
from vit_jax.config import schema
from vit_jax.data import opening
from vit_jax.data.labels import classes
from vit_jax.data.source import first_label, read_one

COMPOSED, DECOMPOSED = (unicodedata.normalize(form, 'café') for form in ('NFC', 'NFD'))


def make(root: pathlib.Path, *folders: str, num: int = 4) -> pathlib.Path:
  """Writes images into folders; those of `cat,dog` into both."""
  for folder in folders:
    where, _, names = folder.rpartition('/')
    for name in names.split(','):
      (root / where / name).mkdir(parents=True, exist_ok=True)
      for i in range(0 if folder.startswith('empty') else num):
        (root / where / name / f'{i}.png').write_bytes(encode(random_image(i)))
  return root


def opened(root: pathlib.Path, **fields: object) -> opening.Sources:
  return opening.open_sources(schema.Data(source=f'folder:{root}', **fields), image_px=(8, 8))


def check(root: pathlib.Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
  """Returns the status and the message of `check`."""
  status = main.run(['check', '--config=from_folder', f'--config.data.source=folder:{root}', '--config.batch_size=4',
                     '--config.model.depth=1', '--config.model.width=16', '--config.model.heads=2',
                     '--config.model.mlp.hidden=16', '--config.image_px=16,16', '--config.optimizer.lr=1e-3', *words])
  return status, capsys.readouterr().err.replace(str(root), 'PATH')


@pytest.mark.parametrize('folders', [
    ('Training/a,b', 'Testing/a,b'), ('Train/a,b', 'Test_images/a,b'), ('train/a,b', 'Testing/a,b'),
    ('seg_train/seg_train/a,b', 'seg_test/seg_test/a,b', 'seg_pred/seg_pred'), ('trainset/a,b', 'devset/a,b'),
    ('animals_train/a,b', 'animals-validation/A,b'.lower())], ids=lambda folders: folders[1])
def test_folders_are_splits_by_their_names_and_by_what_they_have_in_common(
    folders: tuple[str, ...], tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  found = opened(make(tmp_path, *folders))
  assert found.class_names == ('a', 'b') and len(found.train) == len(found.eval) == 8
  assert 'are taken as splits by their names' in caplog.text


@pytest.mark.parametrize(('folders', 'says'), [
    (('fold1/a,b', 'fold2/a,b'), 'folders with the same folders in each: fold1, fold2 have a, b. If the inner ones'),
    (('fold1/x/a,b', 'fold2/x/a,b'), 'folders with the same folders in each: fold1, fold2 have a, b.'),
    (('cat/train,test', 'dog/train,test'), 'got cat, which has the splits test, train. If that is the dataset, '),
    (('train/2019/a,b', 'train/2020/a,b', 'test/2019,2020'), 'PATH/train: expected folders of classes, got folders'),
    (('wrap/photos/train/a,b', 'wrap/photos/test/a,b'), 'got one folder, wrap/photos, which has the splits test, train'
     '. Name that folder: folder:PATH/wrap/photos.'),
    (('photos/a,b',), 'got one folder, which holds others: photos has a, b. If they are the classes, set folder:PATH/'),
    (('train/train/a,b', 'test/test/a,b'), 'PATH/train: expected a folder for each of at least two classes, got one'),
    (('photos/train/a', 'photos/test/a', 'empty/labels/train'), 'If that is the dataset, set folder:PATH/photos; else'),
    (('train/a', 'test/a'), "expected images of at least two classes for Supervised, got folder:PATH/train, whose 4 "
     "images all have the class 'a', such as PATH/train/a/"),
    (('Training', 'Testing'), 'PATH/Training: expected PATH/train/CLASS/*.jpg and'),
    (('bus', 'train'), 'got 4 images but no class folders, beside the folders bus'),
    (('2021/a,b', '2022/a,c'), 'got folders that share some folders: 2021, 2022 have a. If the inner ones are the'),
    (('fold1/a,b', 'fold2/b,c', 'fold3/c,d'), 'share some folders: fold1, fold2, fold3 have b, c.'),
    (('left/x/a', 'right/x/a', 'right/x/b'), 'share some folders: left, right have a.'),
    (('train/2021/a', 'train/2022/a,b', 'test/2021,2022'), 'PATH/train: expected folders of classes, got folders that'),
    (('trainA', 'trainB', 'testA', 'testB'), 'several folders with words for splits: testA, testB, trainA, trainB.'),
    (('1', '01', '2'), 'expected a number of its own for each class, got names for one number: 01, 1. Give'),
    (('pets/a,b', '__MACOSX/pets/a,b'), 'got one folder, which holds others: pets has a, b. If they are the classes'),
    ((f'train/{COMPOSED}', f'train/{DECOMPOSED}'), 'got two whose names differ in their Unicode form alone'),
    ((f'train/a,{COMPOSED}', f'test/a,{COMPOSED},{DECOMPOSED}'), 'PATH/test: expected one folder for each class, got'),
], ids=lambda value: value[0] if isinstance(value, tuple) else '')
def test_what_may_be_something_else_than_classes_is_refused(
    folders: tuple[str, ...], says: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  status, text = check(make(tmp_path, *folders), capsys)
  assert status == 2 and says in text


@pytest.mark.parametrize('folders', [
    ('train/a/images', 'train/b/images', 'test/a,b'), ('a/day,night', 'b'), ('train_station', 'valley'),
    ('a/1,2', 'b/2,3', 'c/3,4'), ('a,b', 'a/1,2', 'b/1,3'), ('2021/a,b', '2022/c,d'), ('testA', 'testB'),
    ('a/images/x,y', 'b/images/z,w')], ids=lambda folders: folders[0])
def test_class_folders_may_have_folders(folders: tuple[str, ...], tmp_path: pathlib.Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
  assert check(make(tmp_path, *folders), capsys)[0] == 0


def test_a_list_of_the_classes_settles_what_they_are(tmp_path: pathlib.Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
  make(tmp_path / 'set', 'left/a,b', 'right/a,b')
  (tmp_path / 'classes.txt').write_text('left\nright\n')
  assert check(tmp_path / 'set', capsys)[0] == 2
  assert check(tmp_path / 'set', capsys, f'--config.data.classes={tmp_path / "classes.txt"}')[0] == 0


@pytest.mark.parametrize(('folders', 'says'), [
    (('a,b', ''), 'PATH: classes are folders; not read: 4 images beside them.'),
    (('train/a,b', 'val/a,b', 'validation/a,b'), 'has no split test; using val instead; not read: validation'),
    (('a,b', '__MACOSX/a,b'), ''), (('im', 'a,b', 'labels'), 'PATH: images are those that labels.csv lists; not read: '
                                    'the folders a, b.')], ids=str)
def test_images_that_are_not_read_are_named(folders: tuple[str, ...], says: str, tmp_path: pathlib.Path,
                                            caplog: pytest.LogCaptureFixture) -> None:
  make(tmp_path, *(name for name in folders if name != 'labels'))
  if 'labels' in folders:
    table(tmp_path, plain)
  assert opened(tmp_path).class_names == (('cat', 'dog') if 'labels' in folders else ('a', 'b'))
  assert says in caplog.text.replace(str(tmp_path), 'PATH') and ('not read' in caplog.text) is bool(says)


@pytest.mark.parametrize(('rows', 'says'), [(range(2, 6), '2 of its 4 images are in labels_train.csv too'),
                                            (range(4, 6), '')])
def test_images_of_two_splits_are_named(rows: range, says: str, tmp_path: pathlib.Path,
                                        caplog: pytest.LogCaptureFixture) -> None:
  make(tmp_path, 'im', num=6)
  for split, chosen in (('train', range(4)), ('test', rows)):
    (tmp_path / f'labels_{split}.csv').write_text('\n'.join(plain(i, *ROWS[i]) for i in chosen))
  assert len(opened(tmp_path).eval) == len(rows)
  assert says in caplog.text and ('too, so a score' in caplog.text) is bool(says)


def test_images_of_two_splits_are_named_however_their_paths_are_written(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  make(tmp_path, 'im', num=3)
  (tmp_path / 'labels_train.csv').write_text('./im/0.png,a\nim/1,b')
  (tmp_path / 'labels_test.csv').write_text('im/0.png,a\nim/1.png,b\nim/2.png,b')
  opened(tmp_path)
  assert '2 of its 3 images are in labels_train.csv too' in caplog.text


def test_a_comment_does_not_decide_the_separator(tmp_path: pathlib.Path) -> None:
  make(tmp_path, 'im', num=6)
  rows = '\n'.join(f'im/{i}.png;{"ab"[i % 2]}' for i in range(6))
  (tmp_path / 'labels.csv').write_text(f'# made by hand, in June\n{rows}')
  assert opened(tmp_path).class_names == ('a', 'b')


def test_names_that_begin_like_comments_decide_the_separator_where_there_are_no_others(tmp_path: pathlib.Path) -> None:
  for i, path in enumerate(sorted((make(tmp_path, 'im', num=6) / 'im').iterdir())):
    path.rename(tmp_path / f'#{i}.png')
  (tmp_path / 'labels.csv').write_text('\n'.join(f'#{i}.png;{"ab"[i % 2]}' for i in range(6)))
  assert opened(tmp_path).class_names == ('a', 'b')


def test_what_learns_no_classes_takes_any_folders(tmp_path: pathlib.Path) -> None:
  assert len(opened(make(tmp_path, '2019/june,july', '2020/june,july')).train) == 14  # of 16, 2 are held out


@pytest.mark.parametrize('names', [['0', '1', '2', '10', '11'], ['000', '001', '002', '010', '011'],
                                   ['1', '2', '10']], ids=lambda names: names[0] + names[-1])
def test_class_folders_named_by_numbers_are_in_their_order(names: list[str], tmp_path: pathlib.Path) -> None:
  assert opened(make(tmp_path, 'train/' + ','.join(names), 'test/' + names[0])).class_names == tuple(names)
  assert opened(tmp_path / 'train').class_names == tuple(names)
  rows = [f'train/{name}/{i}.png,{name}' for name in names for i in range(4)]
  (tmp_path / 'labels.csv').write_text('\n'.join(rows))
  assert opened(tmp_path).class_names == tuple(names)


@pytest.mark.parametrize('layout', ['splits', 'one folder', 'labels'])
def test_a_run_that_resumes_keeps_the_order_of_earlier_versions(layout: str, tmp_path: pathlib.Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
  names = ['0', '1', '2', '10', '11']
  make(tmp_path, 'train/' + ','.join(names), 'test/' + ','.join(names), num=5)
  if layout == 'labels':
    (tmp_path / 'labels.csv').write_text('\n'.join(f'train/{name}/{i}.png,{name}' for name in names for i in range(5)))
  root = tmp_path / 'train' if layout == 'one folder' else tmp_path
  with monkeypatch.context() as patch:
    patch.setattr(classes, 'ordered', lambda names, recorded=(): tuple(sorted(names)))
    before = opened(root)
  data = schema.Data(source=f'folder:{root}')
  again = opening.open_sources(data, image_px=(8, 8), order=before.class_names)
  assert again.class_names == before.class_names == ('0', '1', '10', '11', '2')
  assert (again.train.digest, again.eval.digest) == (before.train.digest, before.eval.digest)
  assert opening.open_sources(data, image_px=(8, 8), order=('0', 'cat')).class_names == tuple(names)


def test_labels_that_are_numbers_in_words_are_in_their_order(tmp_path: pathlib.Path,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
  pq, pa = pytest.importorskip('pyarrow.parquet'), pytest.importorskip('pyarrow')
  names = [str(i) for i in range(12)]
  for split in ('train', 'test'):
    pq.write_table(pa.table({'image': [encode(random_image(i)) for i in range(12)], 'label': names}),
                   tmp_path / f'{split}.parquet')
  data = schema.Data(source=f'parquet:{tmp_path}')
  found = opening.open_sources(data, image_px=(8, 8))
  assert found.class_names == tuple(names) and [first_label(found.eval, i) for i in range(12)] == list(range(12))
  with monkeypatch.context() as patch:
    patch.setattr(classes, 'ordered', lambda names, recorded=(): tuple(sorted(names)))
    before = opening.open_sources(data, image_px=(8, 8))
  again = opening.open_sources(data, image_px=(8, 8), order=before.class_names)
  assert again.train.digest == before.train.digest != found.train.digest
  assert again.class_names == tuple(sorted(names))


def test_a_class_may_have_another_unicode_form_in_each_split(tmp_path: pathlib.Path) -> None:
  found = opened(make(tmp_path, f'train/{COMPOSED},dog', f'val/{DECOMPOSED},dog'))
  assert found.class_names == (COMPOSED, 'dog') and [len(found.train), len(found.eval)] == [8, 8]
  names = [pathlib.Path(found.eval.describe(i)).parent.name for i in range(8)]
  assert all((first_label(found.eval, i) == 0) is (name == DECOMPOSED) for i, name in enumerate(names))
  (tmp_path / 'labels_train.csv').write_text(f'train/{DECOMPOSED}/0.png,{DECOMPOSED}\ntrain/dog/0.png,dog\n')
  (tmp_path / 'labels_test.csv').write_text(f'val/{COMPOSED}/0.png,{COMPOSED}\n')
  found = opened(tmp_path)
  assert found.class_names == (DECOMPOSED, 'dog') and len(found.train) == 2 and first_label(found.eval, 0) == 0


ROWS = [(f'im/{i}', ('cat', 'dog')[i % 2]) for i in range(6)]


def table(root: pathlib.Path, line: Callable[[int, str, str], str], header: str = '',
          name: str = 'labels.csv') -> pathlib.Path:
  make(root, 'im', num=6)
  lines = [header, *(line(i, path, label) for i, (path, label) in enumerate(ROWS))]
  (root / name).write_text('\n'.join(lines) + '\n')
  return root


def plain(i: int, path: str, label: str) -> str:
  return f'{path}.png,{label}'


@pytest.mark.parametrize(('header', 'line', 'name'), [
    ('', plain, 'labels.csv'), ('filename,label', plain, 'labels.csv'), ('Image Index,diagnosis', plain, 'labels.csv'),
    ('isic,dx', lambda i, path, label: f'{path},{label}', 'labels.csv'),
    (',image,label', lambda i, path, label: f'{i},{path}.png,{label}', 'labels.csv'),
    ('Unnamed: 0,file_name,class', lambda i, path, label: f'{i},{path}.png,{label}', 'labels.csv'),
    ('label,image', lambda i, path, label: f'{label},{path}.png', 'labels.csv'),
    ('image;label', lambda i, path, label: f'{path}.png;{label}', 'labels.csv'),
    ('', lambda i, path, label: f'{path}.png\t{label}', 'labels.csv'), ('image,label', plain, 'labels.tsv'),
    ('# by hand\nimage,label\n# more', plain, 'labels.csv'), ('# image,label', plain, 'labels.csv'),
    ('', lambda i, path, label: rf'{path.replace("/", chr(92))}.png,{label}', 'labels.csv'),
    ('image_id,label', lambda i, path, label: f'{path},{label}', 'labels.csv')])
def test_a_table_with_one_class_for_each_image_needs_no_settings(
    header: str, line: Callable[[int, str, str], str], name: str, tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str]) -> None:
  found = opened(table(tmp_path, line, header, name))
  assert found.class_names == ('cat', 'dog') and len(found.train) + len(found.eval) == 6
  for source in (found.train, found.eval):
    for i in range(len(source)):
      assert first_label(source, i) == read_one(source, i).label == int(pathlib.Path(source.describe(i)).stem) % 2
      assert len(source.labels(i)) == 1


def flags(i: int, path: str, label: str) -> str:
  return f'{path}.png,' + ('1.0,0.0' if label == 'cat' else '0.0,1.0')


@pytest.mark.parametrize(('header', 'line', 'says'), [
    ('image,label,split', lambda i, path, label: f'{path}.png,{label},train', 'expected one column with the class of '
     'each image, got 2 beside that of the images: label, split. Set data.label_column to the one with the class.'),
    ('image,MEL,NV', flags, 'got 2 columns of 0 and 1: MEL, NV. Write a line for each image'),
    ('image,label_1,label_2', flags, 'got cells of 0.0 and 1.0 for each of several classes'),
    ('', flags, 'expected the names of classes, got cells of 0.0 and 1.0'),
    ('', lambda i, path, label: f'{path}.png,{i / 7:.3f}', 'got fractions such as 0.000'),
    ('image,label', lambda i, path, label: f'{path}.png,cat', "whose 5 images all have the class 'cat'"),
    ('', lambda i, path, label: f'{label},{path}.png', "got 6 lines that name none, such as line 2: 'cat', which does "
     'not exist. Another cell of these lines is the path of an image. Write the path first.'),
    ('', lambda i, path, label: f'/data/{path}.png,{label}', 'The paths are absolute. Write them relative to PATH.'),
    ('', lambda i, path, label: f'C:\\data\\{i}.png,{label}', 'The paths are absolute. Write them relative to PATH.'),
    ('', lambda i, path, label: f'{i}.png,{label}', "line 2: '0.png', which does not exist. im/0.png is there. Wr"),
    ('', lambda i, path, label: f'{path}.jpg,{label}', 'im/0.png is there. Write paths relative to PATH, with the ext'),
    ('', lambda i, path, label: f'lost{i}.jpg,{label}', 'PATH has im, labels.csv. Write paths of images relative to'),
])
def test_what_a_table_leaves_open_is_refused_with_what_was_found(
    header: str, line: Callable[[int, str, str], str], says: str, tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str]) -> None:
  status, text = check(table(tmp_path, line, header), capsys)
  assert status == 2 and says in text


def test_a_setting_names_the_column_with_the_class(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  table(tmp_path, lambda i, path, label: f'{path}.png,{label},{i % 3}', 'image,label,site')
  assert check(tmp_path, capsys, '--config.data.label_column=label')[0] == 0
  assert opened(tmp_path, label_column='site').class_names == ('0', '1', '2')
  status, text = check(tmp_path, capsys, '--config.data.label_column=Label')
  assert status == 2 and "columns of PATH/labels.csv, image, label, site, got 'Label'. Correct it." in text
  status, text = check(make(tmp_path / 'no', 'a,b'), capsys, '--config.data.label_column=label')
  assert status == 2 and 'data.label_column: expected a label file in PATH, such as labels.csv, got none' in text


def test_tables_of_another_name_are_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  status, text = check(table(tmp_path, plain, name='train.csv'), capsys)
  assert status == 2 and 'got one; not read: train.csv, as label files are named labels.csv, or' in text


def test_images_that_fit_a_path_alike_are_refused(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
  table(tmp_path, lambda i, path, label: f'{path},{label}')
  (tmp_path / 'im/3.jpg').write_bytes(encode(random_image(3)))
  status, text = check(tmp_path, capsys)
  assert status == 2 and "line 5: 'im/3', which may be im/3.jpg, im/3.png" in text.replace('3.png, im/3.jpg',
                                                                                         '3.jpg, im/3.png')
