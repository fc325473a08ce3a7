"""CIFAR-10, CIFAR-100 and MNIST in the files that their authors publish, for `vit-jax prepare --data=cifar10`.

The job calls `find` and `check` for each file of `ARCHIVES[name]`, and opens each split as `Archived`. Examples have
the order of the files. The pages of the authors describe the layouts:

- CIFAR, the binary version (www.cs.toronto.edu/~kriz/cifar.html): a tar file with files of records and a text file with
  the names of the classes, one on each line. A record has one label byte (CIFAR-100: the coarse and the fine label)
  and 3,072 bytes of pixels: the red, green and blue plane of 32 x 32 px, row by row. The Python version is not used,
  as pickles may contain code.
- MNIST (yann.lecun.com/exdb/mnist, "IDX"): 4 bytes, where the last byte is the rank R; R sizes of the axes, as
  big-endian 32-bit numbers; and then a byte for each element. Images and labels are in two files.
"""
from __future__ import annotations

import functools
import gzip
import hashlib
import os
import pathlib
import tarfile
import zlib
from collections.abc import Callable, Sequence
from typing import IO, NamedTuple

import numpy as np

from vit_jax.core import failures
from vit_jax.core.errors import UserError
from vit_jax.core.types import HostArray
from vit_jax.data.formats.builtin import Arrays

SPLITS = ('train', 'test')
_CIFAR = 'https://www.cs.toronto.edu/~kriz'
_MNIST = 'https://storage.googleapis.com/cvdf-datasets/mnist'  # a copy: the server of the authors refuses downloads
_CIFAR_PX = 32  # height and width of an image
_BLOCK_BYTES = 2**20  # that are hashed at a time
_GZIP = b'\x1f\x8b'  # the first bytes of a gzip file


class File(NamedTuple):
  """A published file and the MD5 of the file, or for `.gz` (not `.tar.gz`) of the content: compression may differ."""
  address: str
  md5: str

  @property
  def name(self) -> str:
    return self.address.rpartition('/')[2]


class Split(NamedTuple):
  """The S examples of a split: images `[S, H, W, 1 or 3] u8`, labels `[S] i32`, and the names of the classes."""
  image: HostArray
  label: HostArray
  class_names: tuple[str, ...]


class Archive(NamedTuple):
  """A dataset: the published files, and the function that reads a split, given the paths of all files."""
  files: tuple[File, ...]
  read: Callable[[Sequence[pathlib.Path], str], Split]


class Archived(Arrays):
  """A split of an archive in memory. Its pickle has only the paths: a loader process reads the files again."""

  def __init__(self, dataset: str, files: Sequence[pathlib.Path], split: str) -> None:
    """Reads the split `train` or `test` of a dataset; `files` are the paths of the files of `ARCHIVES[dataset]`."""
    examples = ARCHIVES[dataset].read(files, split)
    super().__init__(examples.image, examples.label, name=f'{dataset}/{split}', class_names=examples.class_names)
    self._arguments = (dataset, tuple(files), split)

  def __reduce__(self) -> tuple[object, ...]:
    return _open_once, self._arguments


@functools.lru_cache(maxsize=2)  # the two splits of a dataset
def _open_once(dataset: str, files: tuple[pathlib.Path, ...], split: str) -> Archived:
  return Archived(dataset, files, split)


def check(file: File, path: pathlib.Path) -> None:
  """Raises UserError unless the file at `path` can be read and has the published checksum."""
  digest = hashlib.md5(usedforsecurity=False)
  try:
    with _opened(path, file.name) as opened:
      while block := opened.read(_BLOCK_BYTES):
        digest.update(block)
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise UserError(f'{path}: expected {file.name}, got a damaged file ({error}). Download it again.') from error
  except OSError as error:
    raise failures.unreadable(error, os.fspath(path)) from error
  if digest.hexdigest() != file.md5:
    raise UserError(f'{path}: expected {file.name} with the MD5 {file.md5}, which its authors publish, got '
                    f'{digest.hexdigest()}. Download it again: {file.address}')


def find(file: File, folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the path of a published file in a folder, or else of a decompressed copy; None if there is neither."""
  decompressed = file.name if file.name.endswith('.tar.gz') else file.name.removesuffix('.gz')
  return next((folder / name for name in (file.name, decompressed) if (folder / name).is_file()), None)


def _opened(path: pathlib.Path, name: str) -> IO[bytes]:
  """Opens a file; the content if the file is compressed, unless `name`, the published name, is that of a tar file."""
  with open(path, 'rb') as file:
    is_gzip = file.read(2) == _GZIP and not name.endswith('.tar.gz')
  return gzip.open(path) if is_gzip else open(path, 'rb')  # type: ignore[return-value]


def _read_cifar(files: Sequence[pathlib.Path], split: str, *, folder: str, parts: dict[str, tuple[str, ...]],
                names: str, num_labels: int) -> Split:
  """Returns a split from the only one of the `files`, a tar file.

  `folder` in the tar file has the file `names` with the names of the classes, and for each split the files of `parts`
  with records. A record begins with `num_labels` bytes; the last of these bytes is the class.
  """
  with tarfile.open(files[0]) as archive:
    def read(name: str) -> bytes:
      opened = archive.extractfile(f'{folder}/{name}')
      assert opened is not None
      return opened.read()

    content = np.frombuffer(b''.join(read(name) for name in parts[split]), np.uint8)
    class_names = tuple(read(names).decode().split())
  records = content.reshape(-1, num_labels + 3 * _CIFAR_PX * _CIFAR_PX)
  image = records[:, num_labels:].reshape(-1, 3, _CIFAR_PX, _CIFAR_PX).transpose(0, 2, 3, 1)
  return Split(np.ascontiguousarray(image), records[:, num_labels - 1].astype(np.int32), class_names)


def _read_mnist(files: Sequence[pathlib.Path], split: str) -> Split:
  """Returns a split; `files` are the images and the labels of `train`, and then the images and the labels of `test`."""
  image, label = (_read_idx(path) for path in (files[:2] if split == 'train' else files[2:]))
  return Split(image[..., None], label.astype(np.int32), tuple(map(str, range(10))))


def _read_idx(path: pathlib.Path) -> HostArray:
  """Returns the array in an IDX file, u8; the file says its shape."""
  with _opened(path, path.name) as opened:
    content = opened.read()
  shape = np.frombuffer(content, '>i4', content[3], offset=4)
  return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


ARCHIVES = {
    'cifar10': Archive(
        (File(f'{_CIFAR}/cifar-10-binary.tar.gz', 'c32a1d4ab5d03f1284b67883e8d87530'),),
        functools.partial(_read_cifar, folder='cifar-10-batches-bin', names='batches.meta.txt', num_labels=1,
                          parts={'train': tuple(f'data_batch_{i}.bin' for i in range(1, 6)),
                                 'test': ('test_batch.bin',)})),
    'cifar100': Archive(
        (File(f'{_CIFAR}/cifar-100-binary.tar.gz', '03b5dce01913d631647c71ecec9e9cb8'),),
        functools.partial(_read_cifar, folder='cifar-100-binary', names='fine_label_names.txt', num_labels=2,
                          parts={'train': ('train.bin',), 'test': ('test.bin',)})),
    'mnist': Archive(
        (File(f'{_MNIST}/train-images-idx3-ubyte.gz', '6bbc9ace898e44ae57da46a324031adb'),
         File(f'{_MNIST}/train-labels-idx1-ubyte.gz', 'a25bea736e30d166cdddb491f175f624'),
         File(f'{_MNIST}/t10k-images-idx3-ubyte.gz', '2646ac647ad5339dbf082846283269ea'),
         File(f'{_MNIST}/t10k-labels-idx1-ubyte.gz', '27ae3e4e09519cfbb04c329615203637')), _read_mnist)}
"""The datasets by name."""
