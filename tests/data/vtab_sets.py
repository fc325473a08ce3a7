"""Small sets in the format of TFDS with the features of those that VTAB is made of, and the class each example has.

A picture has few pixels; everything else is as TFDS 4.9 declares it. Encoded pictures come from files, for which
TFDS needs no TensorFlow.
"""
from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from tests.data.images import encode
from vit_jax.data.formats import tfds_build

CLEVR_DEPTHS = (8., 8.25, 8.5, 8.75, 9.25, 9.75, 10.5, 7.)
CLEVR_BINS = (0, 1, 1, 2, 3, 4, 5, 0)  # a depth on an edge is below it
KITTI = (  # types and distances, and the bin of the nearest of types 0, 1 and 2
    ([0, 3], [7.5, 1.], 0), ([1], [8.], 0), ([2, 0], [30., 19.9], 1), ([4, 1], [2., 20.], 1), ([2], [20.5], 2),
    ([3, 5, 7], [1., 2., 3.], 3), ([], [], 3))


class Fixture(NamedTuple):
  """A set: the sizes of its splits as published, its features, and example i with the classes it has by task."""
  published: Mapping[str, int]
  features: Callable[[], dict[str, object]]
  example: Callable[[int, str], dict[str, object]]
  classes: Mapping[str, Callable[[int], int]]
  pixels: tuple[int, int, int] = (12, 15, 3)


def _tfds() -> object:
  import tensorflow_datasets as tfds
  return tfds


def _labeled(num_classes: int, text: str, **more: object) -> Callable[[], dict[str, object]]:
  def features() -> dict[str, object]:
    f = _tfds().features
    return {'image': f.Image(), 'label': f.ClassLabel(num_classes=num_classes), text: f.Text()} | {
        name: make(f) for name, make in more.items()}
  return features


def _plain(task: str, num_classes: int, published: Mapping[str, int], text: str = 'file_name') -> Fixture:
  def example(i: int, image: str) -> dict[str, object]:
    return {'image': image, 'label': i * 7 % num_classes, text: f'{i}.jpg'}
  return Fixture(published, _labeled(num_classes, text), example, {task: lambda i: i * 7 % num_classes})


def _clevr_features() -> dict[str, object]:
  f = _tfds().features
  return {
      'image': f.Image(), 'file_name': f.Text(),
      'objects': f.Sequence({
          'color': f.ClassLabel(names=['gray', 'blue', 'brown', 'yellow', 'red', 'green', 'purple', 'cyan']),
          'material': f.ClassLabel(names=['rubber', 'metal']),
          'shape': f.ClassLabel(names=['cube', 'sphere', 'cylinder']),
          'size': f.ClassLabel(names=['small', 'large']), 'rotation': f.Tensor(shape=(), dtype=np.float32),
          '3d_coords': f.Tensor(shape=(3,), dtype=np.float32), 'pixel_coords': f.Tensor(shape=(3,), dtype=np.float32)}),
      'question_answer': f.Sequence({'question': f.Text(), 'answer': f.Text()})}


def _clevr_example(i: int, image: str) -> dict[str, object]:
  num, depth = 3 + i % 8, CLEVR_DEPTHS[i % len(CLEVR_DEPTHS)]
  objects = [{'color': n % 8, 'material': n % 2, 'shape': n % 3, 'size': n % 2, 'rotation': 1.5 * n,
              '3d_coords': np.array([n, 0, 0], np.float32),
              'pixel_coords': np.array([200 - n, n, depth + (num - 1 - n) * .4], np.float32)} for n in range(num)]
  return {'image': image, 'file_name': f'{i}.png', 'objects': objects,
          'question_answer': [{'question': 'How many?', 'answer': str(num)}]}


def _kitti_features() -> dict[str, object]:
  f = _tfds().features
  kinds = ['Car', 'Van', 'Truck', 'Pedestrian', 'Person_sitting', 'Cyclist', 'Tram', 'Misc']
  return {
      'image': f.Image(), 'image/file_name': f.Text(),
      'objects': f.Sequence({
          'type': f.ClassLabel(names=kinds), 'truncated': f.Tensor(shape=(), dtype=np.float32),
          'occluded': f.ClassLabel(num_classes=4), 'alpha': f.Tensor(shape=(), dtype=np.float32),
          'bbox': f.BBoxFeature(), 'dimensions': f.Tensor(shape=(3,), dtype=np.float32),
          'location': f.Tensor(shape=(3,), dtype=np.float32), 'rotation_y': f.Tensor(shape=(), dtype=np.float32)})}


def _kitti_example(i: int, image: str) -> dict[str, object]:
  kinds, distances, _ = KITTI[i % len(KITTI)]
  box = _tfds().features.BBox(.1, .2, .3, .4)
  objects = [{'type': kind, 'truncated': 0., 'occluded': 0, 'alpha': .5, 'bbox': box,
              'dimensions': np.ones(3, np.float32), 'location': np.array([-50., 2., z], np.float32), 'rotation_y': 0.}
             for kind, z in zip(kinds, distances, strict=True)]
  return {'image': image, 'image/file_name': f'{i:06d}.png', 'objects': objects}


def _dsprites_features() -> dict[str, object]:
  f = _tfds().features
  sizes = {'shape': 3, 'scale': 6, 'orientation': 40, 'x_position': 32, 'y_position': 32}
  return {'id': f.Text(), 'image': f.Image(shape=(64, 64, 1))} | {
      f'label_{name}': f.ClassLabel(num_classes=num) for name, num in sizes.items()} | {
      f'value_{name}': f.Tensor(shape=[], dtype=np.float32) for name in sizes}


def _dsprites_example(i: int, image: str) -> dict[str, object]:
  labels = {'shape': i % 3, 'scale': i % 6, 'orientation': i * 3 % 40, 'x_position': i * 5 % 32, 'y_position': i % 32}
  return {'id': str(i), 'image': image} | {f'label_{name}': value for name, value in labels.items()} | {
      f'value_{name}': float(value) for name, value in labels.items()}


def _norb_features() -> dict[str, object]:
  f = _tfds().features
  return {'id': f.Text(), 'image': f.Image(shape=(96, 96, 1)), 'image2': f.Image(shape=(96, 96, 1)),
          'label_category': f.ClassLabel(num_classes=5), 'instance': f.ClassLabel(num_classes=10),
          'label_elevation': f.ClassLabel(num_classes=9), 'label_azimuth': f.ClassLabel(num_classes=18),
          'label_lighting': f.ClassLabel(num_classes=6)}


def _norb_example(i: int, image: str) -> dict[str, object]:
  return {'id': str(i), 'image': image, 'image2': image, 'label_category': i % 5, 'instance': i % 10,
          'label_elevation': i % 9, 'label_azimuth': i * 5 % 18, 'label_lighting': i % 6}


def _pets() -> Fixture:
  def features() -> dict[str, object]:
    f = _tfds().features
    return {'image': f.Image(encoding_format='jpeg'), 'label': f.ClassLabel(num_classes=37),
            'species': f.ClassLabel(names=['Cat', 'Dog']), 'file_name': f.Text(),
            'segmentation_mask': f.Image(shape=(None, None, 1), use_colormap=True), 'head_bbox': f.BBoxFeature()}

  def example(i: int, image: str) -> dict[str, object]:
    mask = str(pathlib.Path(image).with_suffix('.png'))
    return {'image': image, 'label': i * 7 % 37, 'species': i % 2, 'file_name': f'{i}.jpg', 'segmentation_mask': mask,
            'head_bbox': _tfds().features.BBox(0., 0., .5, .5)}
  return Fixture({'train': 3680, 'test': 3669}, features, example, {'pets': lambda i: i * 7 % 37})


def _cifar() -> Fixture:
  def features() -> dict[str, object]:
    f = _tfds().features
    return {'id': f.Text(), 'image': f.Image(shape=(32, 32, 3)), 'label': f.ClassLabel(num_classes=100),
            'coarse_label': f.ClassLabel(num_classes=20)}

  def example(i: int, image: str) -> dict[str, object]:
    return {'id': str(i), 'image': image, 'label': i * 7 % 100, 'coarse_label': i % 20}
  return Fixture({'train': 50_000, 'test': 10_000}, features, example, {'cifar100': lambda i: i * 7 % 100})


FIXTURES: dict[str, Fixture] = {
    'caltech101': _plain('caltech101', 102, {'train': 3060, 'test': 6084}, 'image/file_name'),
    'cifar100': _cifar(),
    'dtd': _plain('dtd', 47, {'train': 1880, 'validation': 1880, 'test': 1880}),
    'oxford_flowers102': _plain('flowers102', 102, {'train': 1020, 'validation': 1020, 'test': 6149}),
    'oxford_iiit_pet': _pets(),
    'sun397/tfds': _plain('sun397', 397, {'train': 76_128, 'validation': 10_875, 'test': 21_750}),
    'svhn_cropped': _plain('svhn', 10, {'train': 73_257, 'test': 26_032}, 'id'),
    'patch_camelyon': _plain('patch_camelyon', 2, {'train': 262_144, 'validation': 32_768, 'test': 32_768}, 'id'),
    'eurosat/rgb': _plain('eurosat', 10, {'train': 27_000}, 'filename'),
    'resisc45': _plain('resisc45', 45, {'train': 31_500}, 'filename'),
    'diabetic_retinopathy_detection/btgraham-300': _plain(
        'retinopathy', 5, {'train': 35_126, 'validation': 10_906, 'test': 42_670}, 'name'),
    'clevr': Fixture({'train': 70_000, 'validation': 15_000, 'test': 15_000}, _clevr_features, _clevr_example, {
        'clevr/count': lambda i: i % 8, 'clevr/distance': lambda i: CLEVR_BINS[i % len(CLEVR_BINS)]}),
    'dmlab': _plain('dmlab', 6, {'train': 65_550, 'validation': 22_628, 'test': 22_735}, 'filename'),
    'kitti': Fixture({'train': 6_347, 'validation': 423, 'test': 711}, _kitti_features, _kitti_example, {
        'kitti/distance': lambda i: KITTI[i % len(KITTI)][2]}),
    'dsprites': Fixture({'train': 737_280}, _dsprites_features, _dsprites_example, {
        'dsprites/x_position': lambda i: i * 5 % 32 // 2,
        'dsprites/orientation': lambda i: int(i * 3 % 40 // 2.5)}, (16, 16, 1)),
    'smallnorb': Fixture({'train': 24_300, 'test': 24_300}, _norb_features, _norb_example, {
        'smallnorb/azimuth': lambda i: i * 5 % 18, 'smallnorb/elevation': lambda i: i % 9}, (16, 16, 1)),
}


def write(dataset: str, root: pathlib.Path, sizes: Mapping[str, int]) -> None:
  """Prepares a set of TFDS below `root`; the examples of its splits are numbered through."""
  tfds = _tfds()
  fixture, (name, _, config) = FIXTURES[dataset], dataset.partition('/')
  images = _write_pictures(root / 'pictures' / name, fixture.pixels)

  class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version('9.0.0')
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config, version='9.0.0')] if config else []
    url_infos: dict[str, object] = {}

    def _info(self) -> object:
      return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(fixture.features()))

    def _split_generators(self, dl_manager: object) -> dict[str, object]:
      start, found = 0, {}
      for split, size in sizes.items():
        found[split] = self._generate_examples(start, start + size)
        start += size
      return found

    def _generate_examples(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, object]]]:
      for i in range(start, stop):
        yield i, fixture.example(i, images[i % len(images)])

  Builder.name = name
  with tfds_build.scratch():
    Builder(data_dir=root, file_format='array_record').download_and_prepare()


def _write_pictures(folder: pathlib.Path, pixels: tuple[int, int, int]) -> list[str]:
  """A few pictures, as JPEG with a PNG beside it, or PNG where they have one channel of zeros and ones."""
  folder.mkdir(parents=True, exist_ok=True)
  found, rng = [], np.random.default_rng(0)
  for i in range(5):
    picture = rng.integers(0, 256 if pixels[2] == 3 else 2, pixels, dtype=np.uint8)
    path = folder / f'{i}{".jpg" if pixels[2] == 3 else ".png"}'
    path.write_bytes(encode(picture, path.suffix))
    path.with_suffix('.png').write_bytes(encode(picture, '.png'))
    found.append(str(path))
  return found
