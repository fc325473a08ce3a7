"""Which images are turned by their EXIF orientation where nobody says it."""
from __future__ import annotations

import dataclasses
import logging
import pathlib
import tarfile

import pytest

from tests.data import images
from vit_jax import main
from vit_jax.config import schema
from vit_jax.config.schema import Exif
from vit_jax.data import opening, orientation
from vit_jax.data.formats import image_list
from vit_jax.data.image import headers

TURNED = headers.write_orientation(images.encode(images.random_image(0, height=8, width=12), '.jpg'), 6)


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """The same photos as a folder, as files with a list of labels, as shards, and as tar files of others."""
  found = tmp_path_factory.mktemp('photos')
  for i in range(6):
    path = found / 'folder' / 'train' / 'ab'[i % 2] / f'{i}.jpg'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(TURNED)
    (found / 'labeled').mkdir(parents=True, exist_ok=True)
    (found / 'labeled' / f'{i}.jpg').write_bytes(TURNED)
    (found / f'{i}.jpg').write_bytes(TURNED)
    (found / f'{i}.cls').write_text(str(i % 2))
  (found / 'labeled' / 'labels.csv').write_text(
      'image,label\n' + ''.join(f'{i}.jpg,{"ab"[i % 2]}\n' for i in range(6)))
  (found / 'tar').mkdir()
  with tarfile.open(found / 'tar' / 'train-000.tar', 'w') as tar:
    for i in range(6):
      tar.add(found / f'{i}.jpg', f'{i}.jpg')
      tar.add(found / f'{i}.cls', f'{i}.cls')
  assert main.run(['prepare', f'--data=folder:{found / "folder"}', f'--to={found / "shards"}',
                   '--splits=train']) == 0
  assert main.run(['prepare', f'--data=wds:{found / "tar"}', f'--to={found / "others"}', '--splits=train']) == 0
  return found


@pytest.mark.parametrize(('source', 'split', 'expected'), [
    ('folder:{}/folder', 'train', True), ('folder:{}/folder', 'train[:50%]', True),
    ('folder:{}/labeled', 'train', True), ('array_record:{}/shards', 'train', True),
    ('array_record:{}/others', 'train', False), ('wds:{}/tar', 'train', False), ('digits', 'train', False),
    ('mix:0.5*folder:{}/folder,0.5*array_record:{}/shards', 'train', True),
    ('mix:0.1*folder:{}/folder,0.9*wds:{}/tar', 'train', True)])
def test_own_files_are_turned_and_published_sets_are_not(
    source: str, split: str, expected: bool, root: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  data = schema.Data(source=source.replace('{}', str(root)), max_labels=1 if 'labeled' in source else 0,
                     mix_classes=schema.MixClasses.SEPARATE)
  opened = opening.open_split(data, split, image_px=(8, 8))
  with caplog.at_level(logging.INFO, 'vit_jax.data'):
    caplog.clear()
    found = orientation.decide(data.recipe, opened)
  assert found.exif_orientation is Exif(expected) and found.upright is expected
  lines = [line for line in caplog.messages if 'EXIF orientation of images is' in line]
  word = 'applied' if expected else 'ignored'
  assert [word in line for line in lines] == [] if source == 'digits' else [True], lines


@pytest.mark.parametrize('chosen', [Exif.TRUE, Exif.FALSE])
def test_what_is_said_is_kept(chosen: Exif, root: pathlib.Path) -> None:
  recipe = schema.Recipe(exif_orientation=chosen)
  for source in (f'folder:{root / "folder"}', 'digits'):
    opened = opening.open_split(schema.Data(source=source), 'train', image_px=(8, 8))
    assert orientation.decide(recipe, opened) is recipe
  assert orientation.decide_for_named_files(recipe) is recipe


def test_files_that_are_named_are_turned(root: pathlib.Path) -> None:
  source = image_list.ImageList([str(root / '0.jpg')])
  assert orientation.has_own_files(source) and orientation.decide_for_named_files(schema.Recipe()).upright
  assert orientation.decide(schema.Recipe(), source).upright


def test_a_config_in_python_may_say_true_or_false() -> None:
  recipe = schema.Recipe(exif_orientation=True)  # type: ignore[arg-type]
  assert recipe.exif_orientation is Exif.TRUE
  assert dataclasses.replace(recipe, exif_orientation=False).exif_orientation is Exif.FALSE
