"""CIFAR and MNIST in their authors' files: layouts, checksums, and messages without a network."""
from __future__ import annotations

import gzip
import hashlib
import io
import pathlib
import re
import tarfile

import numpy as np
import pytest

from vit_jax.config import files, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data import opening
from vit_jax.data.formats import archives, array_record
from vit_jax.data.image import decode
from vit_jax.data.source import first_label, read_one
from vit_jax.jobs import prepare
from vit_jax.weights import download

RECIPES = ('cifar10', 'mae_cifar10', 'dino_cifar10', 'byol_cifar10', 'masked_patch_cifar10', 'distill_cifar10')
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (12, 32, 32, 3), np.uint8)


def cifar_bytes(number: int, labels: tuple[int, ...]) -> bytes:
  """A record as the page of CIFAR describes it: labels, then the planes red, green and blue."""
  return bytes(labels) + b''.join(IMAGES[number, :, :, channel].tobytes() for channel in range(3))


def write_tar(path: pathlib.Path, members: dict[str, bytes]) -> None:
  with tarfile.open(path, 'w:gz') as archive:
    for name, content in members.items():
      info = tarfile.TarInfo(name)
      info.size = len(content)
      archive.addfile(info, io.BytesIO(content))


def idx(array: HostArray) -> bytes:
  """An IDX file of bytes: two zeros, the code 8 of bytes, the rank, the shape, and the content."""
  return bytes([0, 0, 8, array.ndim]) + b''.join(n.to_bytes(4, 'big') for n in array.shape) + array.tobytes()


@pytest.fixture
def published(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  """A folder with tiny files in the published layouts, whose checksums count as the published ones."""
  folder = tmp_path / 'published'
  folder.mkdir()
  names10, names100 = [f'thing{i}' for i in range(10)], [f'fine_{i}' for i in range(100)]
  write_tar(folder / 'cifar-10-binary.tar.gz', {
      'cifar-10-batches-bin/batches.meta.txt': '\n'.join([*names10, '\n']).encode(),
      'cifar-10-batches-bin/readme.html': b'<html>',
      **{f'cifar-10-batches-bin/data_batch_{5 - i}.bin':  # the order in the archive is not that of the numbers
         cifar_bytes(8 - 2 * i, ((8 - 2 * i) % 10,)) + cifar_bytes(9 - 2 * i, ((9 - 2 * i) % 10,)) for i in range(5)},
      'cifar-10-batches-bin/test_batch.bin': cifar_bytes(10, (7,)) + cifar_bytes(11, (3,))})
  write_tar(folder / 'cifar-100-binary.tar.gz', {
      'cifar-100-binary/coarse_label_names.txt': b'a\nb\n',
      'cifar-100-binary/fine_label_names.txt': '\n'.join([*names100, '']).encode(),
      'cifar-100-binary/train.bin': b''.join(cifar_bytes(i, (1, 90 + i)) for i in range(10)),
      'cifar-100-binary/test.bin': cifar_bytes(11, (0, 42))})
  digits = IMAGES[:, :28, :28, 0]
  for name, content in (('train-images-idx3', digits[:10]), ('train-labels-idx1', np.arange(10, dtype=np.uint8)),
                        ('t10k-images-idx3', digits[10:]), ('t10k-labels-idx1', np.array([4, 2], np.uint8))):
    (folder / f'{name}-ubyte.gz').write_bytes(gzip.compress(idx(np.ascontiguousarray(content))))
  for dataset, archive in archives.ARCHIVES.items():
    contents = [(folder / file.name).read_bytes() for file in archive.files]
    known = [file._replace(md5=hashlib.md5(content if dataset != 'mnist' else gzip.decompress(content)).hexdigest())
             for file, content in zip(archive.files, contents, strict=True)]
    monkeypatch.setitem(archives.ARCHIVES, dataset, archive._replace(files=tuple(known)))
  archives._open_once.cache_clear()
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return folder


def open_all(folder: pathlib.Path) -> opening.Sources:
  return opening.open_sources(schema.Data(source=f'array_record:{folder}'), image_px=(8, 8))


@pytest.mark.parametrize('dataset, names, labels', [
    ('cifar10', [f'thing{i}' for i in range(10)], [*range(10), 7, 3]),
    ('cifar100', [f'fine_{i}' for i in range(100)], [*range(90, 100), 42]),
    ('mnist', [str(i) for i in range(10)], [*range(10), 4, 2])])
def test_images_labels_and_classes_are_those_of_the_files_in_their_order(
    dataset: str, names: list[str], labels: list[int], published: pathlib.Path, tmp_path: pathlib.Path) -> None:
  assert prepare.run(tmp_path / 'set', data=dataset, archive=str(published)) == 0
  opened = open_all(tmp_path / 'set')
  assert list(opened.class_names) == names
  rows = [read_one(source, i) for source in (opened.train, opened.eval) for i in range(len(source))]
  assert [row.label for row in rows] == labels and len(opened.train) == 10
  expected = IMAGES if dataset == 'cifar10' else IMAGES[[*range(10), 11]] if dataset == 'cifar100' else np.repeat(
      IMAGES[:, :28, :28, :1], 3, axis=3)
  for row, image in zip(rows, expected, strict=True):
    assert isinstance(row.image, bytes) and row.image.startswith(b'\x89PNG')
    np.testing.assert_array_equal(decode.decode(row.image), image)
  assert opened.train.describe(3) == f'array_record:{tmp_path}/set/train[3] ({dataset}/train[3])'


def test_a_seed_shuffles_and_splits_can_be_chosen(published: pathlib.Path, tmp_path: pathlib.Path) -> None:
  archive = str(published / 'cifar-10-binary.tar.gz')
  prepare.run(tmp_path / 'set', data='cifar10', archive=archive, seed=1, splits=['train'])
  assert list(array_record.read_info(tmp_path / 'set').splits) == ['train']
  source = opening.open_split(schema.Data(source=f'array_record:{tmp_path}/set'), 'train', image_px=(8, 8))
  labels = [first_label(source, i) for i in range(10)]
  assert sorted(labels) == list(range(10)) != labels
  with pytest.raises(UserError, match='--splits: expected some of train, test, got val'):
    prepare.run(tmp_path / 'other', data='cifar10', archive=archive, splits=['val'])


def test_another_checksum_is_refused(published: pathlib.Path, tmp_path: pathlib.Path) -> None:
  path = published / 'cifar-10-binary.tar.gz'
  md5 = archives.ARCHIVES['cifar10'].files[0].md5
  path.write_bytes(path.read_bytes() + b'\0')
  with pytest.raises(UserError, match=f'{path}: expected cifar-10-binary.tar.gz with the MD5 {md5}, .* again'):
    prepare.run(tmp_path / 'set', data='cifar10', archive=str(path))
  damaged = published / 't10k-labels-idx1-ubyte.gz'
  content = damaged.read_bytes()
  for wrong in (content[:-9], content[:10] + b'\xff' * 8 + content[18:]):
    damaged.write_bytes(wrong)
    with pytest.raises(UserError, match=f'{damaged}: expected t10k-labels-idx1-ubyte.gz, got a damaged file'):
      prepare.run(tmp_path / 'set', data='mnist', archive=str(published))
  assert not (tmp_path / 'set').exists()


def test_files_of_mnist_may_be_unpacked_and_files_in_the_cache_are_found(
    published: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(download, 'fetch', lambda *_, **__: pytest.fail('a download'))
  cache = tmp_path / 'cache' / 'vit_jax' / 'archives'
  cache.mkdir(parents=True)
  for path in published.glob('*-ubyte.gz'):
    (cache / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
  assert prepare.run(tmp_path / 'set', data='mnist') == 0
  assert len(open_all(tmp_path / 'set').train) == 10


def test_without_a_network_the_message_names_the_file_and_where_to_put_it(
    published: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  def refuse(address: str) -> None:
    raise OSError(f'no route to {address}')

  fetch = download.fetch
  monkeypatch.setattr(download, 'fetch', lambda *args, **kwargs: fetch(*args, **kwargs, opener=refuse))
  with pytest.raises(UserError, match='--data=cifar100: expected to download cifar-100-binary.tar.gz, got: '
                     'https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz: expected an address that can be '
                     'reached, .* The flag of a path is --archive=PATH; files in '
                     f'{tmp_path}/cache/vit_jax/archives are found without it'):
    prepare.run(tmp_path / 'set', data='cifar100')
  with pytest.raises(UserError, match='--archive: expected cifar-10-binary.tar.gz, or a folder with it, got .* '
                     'Download it from https://www.cs'):
    prepare.run(tmp_path / 'set', data='cifar10', archive=str(tmp_path))
  with pytest.raises(UserError, match='--archive: expected --data=cifar10, cifar100, mnist, got --data=folder:x'):
    prepare.run(tmp_path / 'set', data='folder:x', archive=str(tmp_path))


def test_a_download_is_verified_and_kept(published: pathlib.Path, tmp_path: pathlib.Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
  class Response(io.BytesIO):
    headers: dict[str, str] = {}

  content = (published / 'cifar-10-binary.tar.gz').read_bytes()
  fetch, asked = download.fetch, []

  def serve(address: str) -> Response:
    asked.append(address)
    return Response(content)

  monkeypatch.setattr(download, 'fetch', lambda *args, **kwargs: fetch(*args, **kwargs, opener=serve))
  for name in ('a', 'b'):
    assert prepare.run(tmp_path / name, data='cifar10') == 0
  assert asked == ['https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz']
  content = content[:-1]
  (tmp_path / 'cache/vit_jax/archives/cifar-10-binary.tar.gz').unlink()
  with pytest.raises(UserError, match='with the MD5'):
    prepare.run(tmp_path / 'c', data='cifar10')
  assert not list((tmp_path / 'cache/vit_jax').rglob('*cifar*'))


@pytest.mark.parametrize('name', RECIPES)
def test_recipes_take_the_source_as_an_argument(name: str) -> None:
  assert files.load(f'{name}:source=array_record:sets/cifar10', []).data.source == 'array_record:sets/cifar10'
  assert files.load(name, []).data.source == 'tfds:cifar10'


def test_a_missing_tfds_dataset_names_the_way_without_tensorflow(tmp_path: pathlib.Path) -> None:
  data = schema.Data(source='tfds:cifar10', data_dir=str(tmp_path))
  advice = 'prepare it: vit-jax prepare --data=cifar10 --to='
  with pytest.raises(UserError, match=re.escape(advice)):
    opening.open_split(data, 'train', image_px=(8, 8))
