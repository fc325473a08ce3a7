"""Compares how many images per second one core reads from several sources of the same images, in the order of
training.

  python -m benchmarks.sources array_record:DIR wds:PATH [SOURCE ...]
  python -m benchmarks.sources --images=FOLDER [--num=5000]

With `--images`, the files below the folder are written as ArrayRecord, tar, TFRecord and (with pyarrow) Parquet files,
8 each, in a random order. Each source is opened for the first time, which makes its index. Reading alone, and reading
with decoding and a random crop, are measured in processor seconds, so that the disk does not count. Sources are
interleaved, a pass of `--reads` images each, and the median over the rounds is printed; `ratio` is to the first source.
`--held_mib` is `data.shuffle_mib`: with less than the images have, row groups are read again, as in a large set.
"""
from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import pathlib
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from benchmarks import host_images, object_store
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.data import opening, windows
from vit_jax.data.formats import example, tfrecord
from vit_jax.data.image import opencv, transform
from vit_jax.data.source import Source, read_one

NUM_IMAGES, ROUNDS = 5_000, 9
IMAGE_PX, BATCH = (32, 32), 256
SHARDS = 8


def measure(sources: Mapping[str, Source], *, num_images: int, rounds: int) -> dict[str, dict[str, host_images.Speed]]:
  """Returns the speed of each source, by what is done with an image."""
  crop, rng = transform.train_transform(schema.Recipe(), IMAGE_PX), np.random.default_rng(0)
  kinds: dict[str, Callable[[Source, int], object]] = {
      'read': lambda source, index: read_one(source, index),
      'read, decode and crop': lambda source, index: crop(read_one(source, index), rng)}
  rates: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in sources} for kind in kinds}
  for turn in range(rounds + 1):
    for kind, use in kinds.items():
      for name, source in sources.items():
        indexes = windows.visit(source, turn, BATCH)(np.arange(num_images)).tolist()
        started_s = time.process_time()
        for index in indexes:
          use(source, index)
        if turn:  # the first round warms up
          rates[kind][name].append(num_images / max(1e-9, time.process_time() - started_s))
  first = next(iter(sources))
  return {kind: {name: host_images.speed(one, found[first]) for name, one in found.items()}
          for kind, found in rates.items()}


def write(images: Sequence[bytes], folder: pathlib.Path) -> list[str]:
  """Writes images in every format, with labels, and returns the names of the sources."""
  object_store.write_records(folder / 'array_record', images, SHARDS)
  names = [f'array_record:{folder}/array_record']
  for kind, write_one in (('wds', _write_tar), ('tfrecord', _write_tfrecord), ('parquet', _write_parquet)):
    if kind == 'parquet' and not importlib.util.find_spec('pyarrow'):
      continue
    (folder / kind).mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(images)), SHARDS)):
      write_one(folder / kind / f'train-{number:05d}-of-{SHARDS:05d}', images, rows.tolist())
    names.append(f'{kind}:{folder}/{kind}')
  return names


def _write_tar(path: pathlib.Path, images: Sequence[bytes], rows: Sequence[int]) -> None:
  with tarfile.open(f'{path}.tar', 'w', format=tarfile.USTAR_FORMAT) as file:
    for row in rows:
      for extension, content in (('cls', b'%d' % (row % 10)), ('jpg', images[row])):
        member = tarfile.TarInfo(f'{row:08d}.{extension}')
        member.size = len(content)
        file.addfile(member, io.BytesIO(content))


def _write_tfrecord(path: pathlib.Path, images: Sequence[bytes], rows: Sequence[int]) -> None:
  with open(path, 'wb') as file:
    for row in rows:
      record = example.serialize({'image/class/label': row % 10, 'image/encoded': images[row]})
      size = len(record).to_bytes(8, 'little')
      file.write(size + tfrecord.mask(size) + record + tfrecord.mask(record))


def _write_parquet(path: pathlib.Path, images: Sequence[bytes], rows: Sequence[int]) -> None:
  import pyarrow
  import pyarrow.parquet
  table = pyarrow.table({'image': [{'bytes': images[row], 'path': f'{row:08d}.jpg'} for row in rows],
                         'label': [row % 10 for row in rows]})
  pyarrow.parquet.write_table(table, f'{path}.parquet', row_group_size=100)


@contextlib.contextmanager
def written(images: str, num: int) -> Iterator[list[str]]:
  """Yields the names of sources of the files below a folder, repeated if there are fewer than `num`."""
  paths = sorted(path for path in pathlib.Path(images).rglob('*.[jJ]*') if path.is_file())
  if not paths:
    raise UserError(f'--images: expected a folder with JPEG files, got none in {images}. Choose another folder.')
  order = np.random.default_rng(0).permutation(num).tolist()
  with tempfile.TemporaryDirectory() as folder:
    os.environ['XDG_CACHE_HOME'] = f'{folder}/cache'
    yield write([paths[i % len(paths)].read_bytes() for i in order], pathlib.Path(folder))


def main(arguments: Sequence[str]) -> int:
  """Prints a table for each kind of use."""
  parser = argparse.ArgumentParser(prog='python -m benchmarks.sources')
  parser.add_argument('sources', nargs='*', metavar='SOURCE', help='such as array_record:DIR wds:PATH')
  parser.add_argument('--images', default='', help='folder of JPEG files, which are written in every format')
  parser.add_argument('--num', type=int, default=NUM_IMAGES, help='of these images')
  parser.add_argument('--reads', type=int, default=NUM_IMAGES, help='images that a pass reads')
  parser.add_argument('--held_mib', type=int, default=1024, help='of decoded row groups that are held')
  flags = parser.parse_args(arguments)
  if bool(flags.sources) is bool(flags.images):
    parser.print_usage(sys.stderr)
    return 2
  opencv.quieten()
  try:
    with written(flags.images, flags.num) if flags.images else contextlib.nullcontext(flags.sources) as names:
      return compare(names, flags.reads, flags.held_mib)
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2


def compare(names: Sequence[str], num_images: int, held_mib: int) -> int:
  """Prints the tables of sources, and the time to open each for the first time, which makes its index; status 0."""
  sources = {}
  for name in names:
    started_s = time.process_time()
    sources[name] = opening.open_split(schema.Data(source=name, shuffle_mib=held_mib), 'train', image_px=IMAGE_PX)
    seconds = time.process_time() - started_s
    num = len(sources[name])
    print(f'{name}: {num:,} images, opened in {seconds:.2f} s of processor time ({1e6 * seconds / num:.0f} µs each)')
  for kind, found in measure(sources, num_images=num_images, rounds=ROUNDS).items():
    print(f'{kind + ", images/s and core":<50}{"median":>10}{"min":>10}{"max":>10}{"ratio":>8}')
    for name, speed in found.items():
      print(f'{name:<50}' + ''.join(f'{x:>10,.0f}' for x in speed[:3]) + f'{speed.ratio:>8.2f}')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
