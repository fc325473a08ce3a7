"""Folders of images: layouts, order and messages."""
from __future__ import annotations

import collections
import pathlib
import pickle
import shutil
from collections.abc import Callable

import pytest

from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.formats import folder
from vit_jax.data.image import decode
from vit_jax.data.source import Source, first_label, read_one, title


def open_all(root: pathlib.Path, **fields: object) -> opening.Sources:
  return opening.open_sources(schema.Data(source=f'folder:{root}', **fields), image_px=(8, 8))


def paths(source: Source) -> list[str]:
  return [source.describe(i) for i in range(len(source))]


def test_classes_are_sorted_and_labels_follow(image_folder: pathlib.Path) -> None:
  opened = open_all(image_folder)
  assert (len(opened.train), len(opened.eval)) == (37, 20)
  assert opened.class_names == ('ant', 'bee', 'cow', 'dog', 'elk', 'fox', 'gnu')
  for i, path in enumerate(paths(opened.train)):
    assert pathlib.Path(path).parent.name == opened.class_names[first_label(opened.train, i)]
    assert read_one(opened.train, i)[:2] == (pathlib.Path(path).read_bytes(), opened.train.labels(i))


def test_a_slice_holds_all_classes(image_folder: pathlib.Path) -> None:
  part = open_all(image_folder, train_split='train[:60%]').train
  assert len(part) == 22 and len({first_label(part, i) for i in range(22)}) == 7


def test_extensions_in_any_case_and_images_deeper_inside_are_found(tmp_path: pathlib.Path) -> None:
  names = ('a/1.JPG', 'a/x/y/2.jpeg', 'b/3.Png', 'b/4.webp', 'b/5.BMP', 'b/notes.txt', 'b/.hidden.png')
  for i, name in enumerate(names):
    for split in ('train', 'test'):
      path = tmp_path / split / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(encode(random_image(i), '.png'))
  train = open_all(tmp_path).train
  assert sorted(pathlib.Path(p).name for p in paths(train)) == ['1.JPG', '2.jpeg', '3.Png', '4.webp', '5.BMP']
  assert decode.decode(read_one(train, 0).image).shape == (12, 15, 3)


def test_validation_stands_in_where_there_is_no_test(tmp_path: pathlib.Path, write_split: Callable[..., None],
                                                     caplog: pytest.LogCaptureFixture) -> None:
  write_split(tmp_path / 'train')
  write_split(tmp_path / 'valid', 9)
  assert len(open_all(tmp_path).eval) == 9
  assert 'has no split test; using valid instead' in caplog.text
  write_split(tmp_path / 'test', 11)
  assert len(open_all(tmp_path).eval) == 11
  assert len(open_all(tmp_path, eval_split='val').eval) == 9


def test_a_single_folder_is_split_in_proportion_whatever_the_file_system_says(
    tmp_path: pathlib.Path, write_split: Callable[..., None]) -> None:
  write_split(tmp_path / 'one', 140)
  shutil.copytree(tmp_path / 'one', tmp_path / 'two')
  first, second = open_all(tmp_path / 'one'), open_all(tmp_path / 'two')
  assert (len(first.train), len(first.eval)) == (126, 14)
  assert not set(paths(first.train)) & set(paths(first.eval))
  assert collections.Counter(first_label(first.eval, i) for i in range(14)) == dict.fromkeys(range(7), 2)
  assert first.train.digest == second.train.digest
  assert paths(open_all(tmp_path / 'one', holdout_seed=1).eval) != paths(first.eval)
  assert len(open_all(tmp_path / 'one', holdout=.5, eval_split='val').eval) == 70
  assert (title(first.train), title(first.eval)) == (f'folder:{tmp_path}/one, all but the 10 % held out',
                                                     f'folder:{tmp_path}/one, the 10 % held out')
  part = open_all(tmp_path / 'one', train_split='train[:50%]').train
  assert (part.name, title(part)) == (f'folder:{tmp_path}/one/train[:50%]',
                                      f'folder:{tmp_path}/one, split train[:50%]')


def test_a_changed_file_changes_the_digest(tmp_path: pathlib.Path, write_split: Callable[..., None]) -> None:
  write_split(tmp_path)
  before = open_all(tmp_path).train
  with open(before.describe(3), 'ab') as f:
    f.write(b'x')
  assert open_all(tmp_path).train.digest != before.digest


def test_a_split_for_evaluation_alone_needs_no_train(tmp_path: pathlib.Path,
                                                     write_split: Callable[..., None]) -> None:
  write_split(tmp_path / 'test', 9)
  (tmp_path / 'test' / 'hen').mkdir()
  data = schema.Data(source=f'folder:{tmp_path}')
  source = opening.open_split(data, 'test', image_px=(8, 8))
  assert len(source) == 9 and source.class_names[-1] == 'hen'
  with pytest.raises(UserError, match="split of .*: expected one of test, got 'train'"):
    open_all(tmp_path)


def test_it_pickles_small(image_folder: pathlib.Path) -> None:
  train = open_all(image_folder).train
  assert len(pickle.dumps(train)) < 1000
  assert paths(pickle.loads(pickle.dumps(train))) == paths(train)


def test_a_missing_folder_is_named(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match='the placeholder folder:PATH. Set --config.data.source=folder:PATH, where PATH'):
    open_all(pathlib.Path('PATH'))
  with pytest.raises(UserError, match=f'{tmp_path}/no: expected a folder with PATH/'):
    open_all(tmp_path / 'no')


def test_a_folder_without_classes_is_refused(tmp_path: pathlib.Path) -> None:
  with pytest.raises(UserError, match=f'{tmp_path}: expected PATH/train/CLASS.*, got no class folders'):
    open_all(tmp_path)


def test_images_without_class_folders_are_refused(tmp_path: pathlib.Path) -> None:
  for i in range(3):
    (tmp_path / f'{i}.png').write_bytes(encode(random_image(i)))
  with pytest.raises(UserError, match=f'{tmp_path}: expected PATH.*, got 3 images but no class folders'):
    open_all(tmp_path)


def test_all_empty_classes_are_listed(tmp_path: pathlib.Path, write_split: Callable[..., None]) -> None:
  write_split(tmp_path / 'train')
  write_split(tmp_path / 'test')
  for name in ('hen', 'yak'):
    (tmp_path / 'train' / name).mkdir()
  with pytest.raises(UserError, match='/train: expected files with the extension .jpg .* in each class, got none in '
                                      '2 of 9 classes: hen, yak'):
    open_all(tmp_path)


def test_classes_only_in_test_are_listed(tmp_path: pathlib.Path, write_split: Callable[..., None]) -> None:
  write_split(tmp_path / 'train')
  write_split(tmp_path / 'test', classes=('ant', 'hen', 'yak'))
  with pytest.raises(UserError, match='/test: expected the classes of .*/train, got 2 others: hen, yak. Use'):
    open_all(tmp_path)


def test_a_holdout_that_is_no_part_is_refused(tmp_path: pathlib.Path,
                                              write_split: Callable[..., None]) -> None:
  write_split(tmp_path)
  with pytest.raises(UserError, match='data.holdout: expected a fraction between 0 and 1, such as 0.1, got 1.5'):
    open_all(tmp_path, holdout=1.5)
  whole = folder.opener(str(tmp_path), schema.Data(holdout=0.), (8, 8))('all')  # of which nothing is held out
  assert len(whole) == len(folder.opener(str(tmp_path), schema.Data(), (8, 8))('all')) > 0


def test_one_image_a_class_leaves_nothing_to_hold_out(tmp_path: pathlib.Path,
                                                      write_split: Callable[..., None]) -> None:
  write_split(tmp_path, 7)
  with pytest.raises(UserError, match='expected at least two images in some class, so that data.holdout=0.1 .*, got 7'):
    open_all(tmp_path)
