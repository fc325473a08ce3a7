"""CIFAR-10, CIFAR-100 and MNIST in the files that their authors publish, for `vit-jax prepare --data=cifar10`.

The job calls `find` and `check` for each file of `ARCHIVES[name]`, and opens each split as `Archived`.

Layouts, as their pages describe them:

- CIFAR (www.cs.toronto.edu/~kriz/cifar.html, "binary version"): records of one label byte (CIFAR-100: the coarse and
  the fine label) and 3,072 bytes of pixels, the red, green and blue plane of 32 x 32 px, row by row; names of the
  classes as lines of text.
- MNIST (yann.lecun.com/exdb/mnist, "IDX"): big-endian 32-bit numbers, the magic number and the shape, and then bytes.

The binary versions hold no code, unlike the pickles of the Python versions. The order is that of the files.
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
_PX, _BLOCK_BYTES, _GZIP = 32, 2**20, b'\x1f\x8b'


class File(NamedTuple):
  """A published file and its MD5; of a `.gz` file that of its content, which other programs compress differently."""
  address: str
  md5: str

  @property
  def name(self) -> str:
    return self.address.rpartition('/')[2]


class Split(NamedTuple):
  """Images `[S, H, W, 1 or 3] u8`, labels `[S] i32`, and the names of the classes."""
  image: HostArray
  label: HostArray
  class_names: tuple[str, ...]


class Archive(NamedTuple):
  """A dataset: its files, and the function that reads a split from their paths."""
  files: tuple[File, ...]
  read: Callable[[Sequence[pathlib.Path], str], Split]


class Archived(Arrays):
  """A split of an archive. Pickles to few bytes, from which another process reads the archive itself."""

  def __init__(self, dataset: str, files: Sequence[pathlib.Path], split: str) -> None:
    image, label, class_names = ARCHIVES[dataset].read(files, split)
    super().__init__(image, label, name=f'{dataset}/{split}', class_names=class_names)
    self._arguments = dataset, tuple(files), split

  def __reduce__(self) -> tuple[object, ...]:
    return _open_once, self._arguments


@functools.lru_cache(maxsize=2)
def _open_once(dataset: str, files: tuple[pathlib.Path, ...], split: str) -> Archived:
  return Archived(dataset, files, split)


def check(file: File, path: pathlib.Path) -> None:
  """Raises UserError unless a file has the published checksum."""
  found = hashlib.md5(usedforsecurity=False)
  try:
    with _opened(path, file.name) as opened:
      while block := opened.read(_BLOCK_BYTES):
        found.update(block)
  except (EOFError, gzip.BadGzipFile, zlib.error) as error:
    raise UserError(f'{path}: expected {file.name}, got a damaged file ({error}). Download it again.') from error
  except OSError as error:
    raise failures.unreadable(error, os.fspath(path)) from error
  if found.hexdigest() != file.md5:
    raise UserError(f'{path}: expected {file.name} with the MD5 {file.md5}, which its authors publish, got '
                    f'{found.hexdigest()}. Download it again: {file.address}')


def find(file: File, folder: pathlib.Path) -> pathlib.Path | None:
  """Returns the path of a published file in a folder, also of its content (without `.gz`); None if it is not there."""
  names = [file.name, *([file.name.removesuffix('.gz')] if not file.name.endswith('.tar.gz') else [])]
  return next((folder / name for name in names if (folder / name).is_file()), None)


def _opened(path: pathlib.Path, name: str) -> IO[bytes]:
  """Opens a file, or if it is compressed its content; an archive of several files is opened as it is."""
  with open(path, 'rb') as file:
    is_packed = file.read(2) == _GZIP and not name.endswith('.tar.gz')
  return gzip.open(path) if is_packed else open(path, 'rb')  # type: ignore[return-value]


def _read_cifar(files: Sequence[pathlib.Path], split: str, *, folder: str, parts: dict[str, tuple[str, ...]],
                names: str, num_labels: int) -> Split:
  with tarfile.open(files[0]) as archive:
    def content(name: str) -> bytes:
      opened = archive.extractfile(f'{folder}/{name}')
      assert opened is not None
      return opened.read()

    rows = np.frombuffer(b''.join(content(name) for name in parts[split]), np.uint8)
    class_names = tuple(content(names).decode().split())
  rows = rows.reshape(-1, num_labels + 3 * _PX * _PX)
  image = rows[:, num_labels:].reshape(-1, 3, _PX, _PX).transpose(0, 2, 3, 1)
  return Split(np.ascontiguousarray(image), rows[:, num_labels - 1].astype(np.int32), class_names)


def _read_mnist(files: Sequence[pathlib.Path], split: str) -> Split:
  both = files[:2] if split == 'train' else files[2:]
  image, label = (_read_idx(path) for path in both)
  return Split(image[..., None], label.astype(np.int32), tuple(map(str, range(10))))


def _read_idx(path: pathlib.Path) -> HostArray:
  """Returns the bytes of an IDX file in their shape."""
  with _opened(path, path.name) as opened:
    content = opened.read()
  shape = np.frombuffer(content, '>i4', content[3], offset=4)  # the last byte of the magic number is the rank
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
