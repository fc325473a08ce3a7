"""Digests of content: the same for the same images and labels wherever they are; and what they say of a change."""
from __future__ import annotations

import pathlib
import shutil

import pytest
from data import images

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import content, opening
from vit_jax.data.source import Part, Parts, take


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  for number in range(6):
    path = tmp_path / 'set' / 'test' / ('cat', 'dog', 'owl')[number % 3] / f'{number}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(images.encode(images.random_image(number)))
  return tmp_path / 'set'


def read(folder: pathlib.Path) -> content.Content:
  return content.read(source(folder))


def source(folder: pathlib.Path) -> opening.Source:
  return opening.open_split(schema.Data(source=f'folder:{folder}'), 'test', image_px=(8, 8))


def differences(before: content.Content, folder: pathlib.Path) -> list[str]:
  return content.differences(before, read(folder), source(folder).class_names)


def test_the_place_of_the_files_does_not_count(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
  before = read(folder)
  shutil.copytree(folder, tmp_path / 'other')
  assert read(tmp_path / 'other') == before and differences(before, tmp_path / 'other') == []
  assert before.examples == 6 and len(before.classes.split()) == 3


def test_a_changed_image_of_the_same_size_is_found_by_its_class(folder: pathlib.Path) -> None:
  before, path = read(folder), folder / 'test' / 'dog' / '1.png'
  bits = bytearray(path.read_bytes())
  bits[-20] ^= 1
  path.write_bytes(bits)
  assert source(folder).digest and differences(before, folder) == ['other images, in class dog']


def test_a_changed_label_is_found_by_both_classes(folder: pathlib.Path) -> None:
  before = read(folder)
  (folder / 'test' / 'cat' / '3.png').rename(folder / 'test' / 'owl' / '3.png')
  assert differences(before, folder) == ['the same images with other labels, in classes cat, owl']


def test_exchanged_and_renamed_classes_are_other_labels(folder: pathlib.Path) -> None:
  before = read(folder)
  (folder / 'test' / 'cat').rename(folder / 'test' / 'ant')
  assert differences(before, folder) == ['the same images with other labels']


def test_another_order_is_found(folder: pathlib.Path) -> None:
  before, path = read(folder), folder / 'test' / 'cat'
  (path / '0.png').rename(path / '9.png')
  assert differences(before, folder) == ['the same images and labels in another order']


def test_a_missing_image_is_counted(folder: pathlib.Path) -> None:
  before = read(folder)
  (folder / 'test' / 'owl' / '5.png').unlink()
  assert differences(before, folder) == ['5 images in place of 6', 'other images, in class owl']


def test_an_image_that_cannot_be_read_is_named(folder: pathlib.Path) -> None:
  opened = source(folder)
  (folder / 'test' / 'owl' / '5.png').unlink()
  with pytest.raises(UserError, match=r'owl/5\.png'):
    content.read(opened)


def test_decoded_images_and_parts_of_a_source_have_a_content() -> None:
  digits = opening.open_split(schema.Data(source='digits'), 'test', image_px=(16, 16))
  whole = content.read(digits)
  assert whole.examples == 360 and len(whole.classes.split()) == 10
  backwards = content.read(take(digits, range(359, -1, -1), name='x'))
  assert backwards._replace(order='') == whole._replace(order='') and backwards.order != whole.order


def test_a_class_without_images_counts() -> None:
  digits = take(opening.open_split(schema.Data(source='digits'), 'test', image_px=(16, 16)), [0, 1], name='x')
  more = Parts([Part(digits, labels=tuple(range(10)))], class_names=(*digits.class_names, 'ten'))
  before = content.read(digits)
  assert content.differences(before, content.read(more), more.class_names) == ['the same images with other labels']
