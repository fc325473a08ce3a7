"""Image files below a folder: which are taken, which are counted, and links that lead in circles."""
from __future__ import annotations

import os
import pathlib
from collections.abc import Callable

import pytest
from PIL import Image

from tests.data.images import random_image
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening, user_files
from vit_jax.data.formats import folder, image_list, tar
from vit_jax.data.image import decode, headers, masks
from vit_jax.data.source import Source, read_one


def find(root: pathlib.Path) -> tuple[list[str], dict[str, int]]:
  finder = user_files.Finder()
  return sorted(finder.find(str(root))), dict(finder.ignored)


def open_train(root: pathlib.Path) -> Source:
  return opening.open_split(schema.Data(source=f'folder:{root}'), 'train', image_px=(8, 8))


def test_every_ending_that_is_taken_can_be_decoded(tmp_path: pathlib.Path) -> None:
  kinds = {'.jp2': 'JPEG2000', '.j2k': 'JPEG2000', '.j2c': 'JPEG2000', '.jpx': 'JPEG2000', '.mpo': 'JPEG'}
  kinds |= {'.dib': 'BMP', '.jpe': 'JPEG', '.jfif': 'JPEG', '.tif': 'TIFF'}
  for ending in user_files.EXTENSIONS:
    path = tmp_path / 'train' / 'ant' / f'one{ending}'
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(random_image(0)).save(path, kinds.get(ending))
  source = open_train(tmp_path)
  assert len(source) == len(user_files.EXTENSIONS)
  for index in range(len(source)):
    image = read_one(source, index).image
    assert isinstance(image, bytes) and decode.decode(image).shape == (12, 15, 3)


def test_the_endings_of_folders_and_tar_files_are_those_of_the_decoder() -> None:
  assert {*decode.PILLOW_READERS, 'jpeg', 'png', 'webp', 'bmp'} == {*headers.FORMATS}
  assert {f'.{ending.decode()}' for ending in tar.EXTENSIONS} == {*user_files.EXTENSIONS}
  assert {*masks.EXTENSIONS} < {*user_files.EXTENSIONS} and not {*user_files.UNREAD} & {*user_files.EXTENSIONS}


@pytest.mark.parametrize('ending', ['.ppm', '.pgm', '.pbm', '.pnm', '.PPM'])
def test_a_folder_of_portable_maps_is_read(ending: str, tmp_path: pathlib.Path) -> None:
  for name in ('ant', 'bee'):
    for number in range(2):
      path = tmp_path / 'train' / name / f'{number}{ending}'
      path.parent.mkdir(parents=True, exist_ok=True)
      Image.fromarray(random_image(number)).save(path, 'PPM')
  source = open_train(tmp_path)
  assert len(source) == 4
  image = read_one(source, 0).image
  assert isinstance(image, bytes) and decode.decode(image).shape == (12, 15, 3)


def test_links_in_circles_are_passed_over_and_counted(tmp_path: pathlib.Path, write_split: Callable[..., None],
                                                      caplog: pytest.LogCaptureFixture) -> None:
  write_split(tmp_path / 'train', 7)
  ant = tmp_path / 'train' / 'ant'
  (ant / 'up').symlink_to('..')
  (ant / 'here').symlink_to('.')
  (ant / 'deep').mkdir()
  (ant / 'deep' / 'back').symlink_to(ant)
  (ant / 'self').symlink_to('self')
  (ant / 'self.png').symlink_to('self.png')
  (ant / 'gone.png').symlink_to('nowhere.png')
  (ant / 'copy.png').symlink_to('000.png')
  (tmp_path / 'train' / 'bee' / 'others').symlink_to('../cow')
  source = open_train(tmp_path)
  names = sorted(os.path.relpath(source.describe(i), tmp_path / 'train') for i in range(len(source)))
  assert names == ['ant/000.png', 'ant/copy.png', 'bee/001.png', 'bee/others/002.png', 'cow/002.png', 'dog/003.png',
                   'elk/004.png', 'fox/005.png', 'gnu/006.png']
  assert f'{tmp_path}/train: ignored 6 files: broken or circular links (6)' in caplog.text


def test_a_class_that_is_a_link_to_itself_is_none(tmp_path: pathlib.Path, write_split: Callable[..., None]) -> None:
  write_split(tmp_path / 'train', 7)
  (tmp_path / 'train' / 'zebra').symlink_to('zebra')
  assert open_train(tmp_path).class_names[-1] == 'gnu'


def test_files_that_are_left_out_are_counted_by_ending(tmp_path: pathlib.Path, write_split: Callable[..., None],
                                                       caplog: pytest.LogCaptureFixture) -> None:
  write_split(tmp_path / 'train', 7)
  for name in ('a.HEIC', 'b.heic', 'notes.txt', 'README', '.hidden', 'c.heif'):
    (tmp_path / 'train' / 'bee' / name).write_bytes(b'x')
  assert len(open_train(tmp_path)) == 7
  assert ('ignored 5 files: .heic (2), .heif (1), .txt (1), without an extension (1). .heic .heif images are not '
          'supported. Convert them to JPEG') in caplog.text
  assert user_files.describe_ignored({}) == '' and user_files.describe_ignored({'.txt': 1}) == '1 file: .txt (1)'


def test_a_message_about_a_large_folder_has_the_first_classes_and_kinds_of_files(tmp_path: pathlib.Path) -> None:
  for number in range(9):
    (tmp_path / f'folder {number}').mkdir()
    (tmp_path / f'folder {number}' / f'a.x{number}').write_bytes(b'x')
  with pytest.raises(UserError) as caught:
    folder.opener(str(tmp_path), schema.Data(holdout=.5), (8, 8))('train')
  assert ('none in 9 of 9 classes: folder 0, folder 1, folder 2, folder 3, folder 4 and 4 more. Ignored 9 files: '
          '.x0 (1), .x1 (1), .x2 (1), .x3 (1), .x4 (1), .x5 (1) and 3 more kinds. Add images') in str(caught.value)


def test_a_folder_of_other_images_alone_says_so(tmp_path: pathlib.Path) -> None:
  (tmp_path / 'train' / 'ant').mkdir(parents=True)
  (tmp_path / 'train' / 'ant' / 'a.heic').write_bytes(b'x')
  with pytest.raises(UserError, match=r'got none in 1 of 1 classes: ant\. Ignored 1 file: .heic \(1\)\. .heic images'):
    open_train(tmp_path)
  found, ignored = find(tmp_path)
  assert (found, ignored) == ([], {'.heic': 1})
  with pytest.raises(UserError, match=r'in or below it, got 1 file: .heic \(1\)'):
    list(image_list.find([str(tmp_path)]))


def test_a_folder_that_may_not_be_read_is_named(tmp_path: pathlib.Path, write_split: Callable[..., None],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
  write_split(tmp_path / 'train', 7)
  scan = os.scandir

  def refuse(folder: str) -> object:
    if str(folder).endswith('cow'):
      raise PermissionError(13, 'Permission denied', folder)
    return scan(folder)
  monkeypatch.setattr(os, 'scandir', refuse)
  with pytest.raises(UserError, match=f'{tmp_path}/train/cow: expected to read it, got "Permission denied"'):
    open_train(tmp_path)
