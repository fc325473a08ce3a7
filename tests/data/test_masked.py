"""Sources of images with masks: folders, and sets prepared by TFDS."""
from __future__ import annotations

import pathlib
import pickle
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening
from vit_jax.data.formats import tfds_build
from vit_jax.data.image import masks
from vit_jax.data.source import Source, has_masks, read_one

tfds = pytest.importorskip('tensorflow_datasets')


def write(root: pathlib.Path, split: str, number: int, *, folder: str = 'masks') -> None:
  """An image, and a mask that holds its number everywhere."""
  for kind, name, image in (('images', f'{number}.jpg', random_image(number)),
                            (folder, f'{number}.png', np.full((12, 15), number, np.uint8))):
    path = root / kind / split / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def opened(where: pathlib.Path | str, split: str = 'train', **fields: object) -> Source:
  return opening.open_split(schema.Data(source=f'masks:{where}', **fields), split, image_px=(8, 8))


@pytest.mark.parametrize(('names', 'folder'), [
    (('train', 'val'), 'masks'), (('training', 'validation'), 'annotations')])
def test_every_image_comes_with_its_mask(tmp_path: pathlib.Path, names: tuple[str, str], folder: str) -> None:
  for i in range(7):
    write(tmp_path, names[i > 4], i, folder=folder)
  (tmp_path / 'classes.txt').write_text('sky\nsea\n')
  train, test = opened(tmp_path), opened(tmp_path, 'test')
  assert (len(train), len(test), train.class_names, has_masks(train)) == (5, 2, ('sky', 'sea'), True)
  for source in (train, pickle.loads(pickle.dumps(train)), opened(tmp_path, 'train[1:4]+val')):
    for i in range(len(source)):
      record = read_one(source, i)
      number = int(pathlib.Path(source.describe(i)).stem)
      assert record.mask is not None and (masks.decode(record.mask) == number).all() and record.label == -1
  assert has_masks(opened(tmp_path, 'train[1:4]+val'))


def test_a_folder_without_splits_is_divided(tmp_path: pathlib.Path) -> None:
  for i in range(10):
    write(tmp_path, '', i)
  train, test = (opened(tmp_path, split, holdout=.3) for split in ('train', 'test'))
  assert (len(train), len(test), train.class_names) == (7, 3, ())
  names = [source.describe(i) for source in (train, test) for i in range(len(source))]
  assert len(set(names)) == 10 and names != sorted(names)  # a slice has images from all places
  whole = opened(tmp_path, 'all', holdout=.3)
  assert {whole.describe(i) for i in range(len(whole))} == set(names)


def test_missing_masks_are_named(tmp_path: pathlib.Path) -> None:
  for i in range(3):
    write(tmp_path, 'train', i)
  (tmp_path / 'masks/train/1.png').unlink()
  with pytest.raises(UserError, match=r'masks/train: expected a mask \(NAME.png\) for every image, got none for 1 of '
                                      r'3: .*images/train/1\.jpg\.'):
    opened(tmp_path)
  with pytest.raises(UserError, match='expected PATH/images/train/NAME.jpg with .*, got no folder images'):
    opened(tmp_path / 'masks')


def test_images_with_masks_are_not_trained_on(tmp_path: pathlib.Path) -> None:
  for i in range(3):
    write(tmp_path, 'train', i)
  data = schema.Data(source=f'masks:{tmp_path}', eval_split='train')
  with pytest.raises(UserError, match='data.source: expected images with classes to train on, .* Set it as the source'):
    opening.open_sources(data, image_px=(8, 8))


class OxfordIiitPet(tfds.core.GeneratorBasedBuilder):
  """Features as the set of this name has them."""
  VERSION = tfds.core.Version('4.0.0')
  url_infos: dict[str, object] = {}

  def _info(self) -> tfds.core.DatasetInfo:
    features = {'image': tfds.features.Image(), 'label': tfds.features.ClassLabel(names=['a', 'b']),
                'segmentation_mask': tfds.features.Image(shape=(None, None, 1), use_colormap=True)}
    return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

  def _split_generators(self, dl_manager: object) -> dict[str, object]:
    return {'train': self._generate_examples()}

  def _generate_examples(self) -> Iterator[tuple[int, dict[str, object]]]:
    root = pathlib.Path(self._data_dir_root)
    for i in range(4):
      (root / f'{i}.jpg').write_bytes(encode(random_image(i), '.jpg'))
      Image.fromarray(np.full((12, 15), 1 + i % 3, np.uint8)).save(root / f'{i}.png')
      yield i, {'image': str(root / f'{i}.jpg'), 'label': i % 2, 'segmentation_mask': str(root / f'{i}.png')}


def test_tfds_sets_have_masks_without_tensorflow(tmp_path: pathlib.Path) -> None:
  with tfds_build.scratch():
    OxfordIiitPet(data_dir=tmp_path, file_format='array_record').download_and_prepare()
  source = opened('tfds:oxford_iiit_pet', data_dir=str(tmp_path))
  assert (len(source), source.class_names) == (4, ('pet', 'background', 'border')) and has_masks(source)
  values = [int(masks.decode(read_one(source, i).mask or b'').max()) for i in range(4)]
  assert sorted(values) == [1, 1, 2, 3] and source.first_class == 1  # type: ignore[attr-defined]
  assert source.describe_mask(2).endswith('train[2], segmentation_mask')  # type: ignore[attr-defined]
  with pytest.raises(UserError, match='expected the features image and trimap, got .*image.*Set data.label_column'):
    opened('tfds:oxford_iiit_pet', data_dir=str(tmp_path), label_column='trimap')
