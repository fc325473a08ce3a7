"""Prepared datasets of small images, for tests of how they are read."""
from __future__ import annotations

import functools
import pathlib
import shutil
import tempfile

import buckets

from vit_jax.config import schema
from vit_jax.data import opening, prepare
from vit_jax.data.formats import builtin

NUM_TRAIN, NUM_TEST = 1437, 360  # digits


@functools.cache
def _written(num_shards: int) -> pathlib.Path:
  """One for all tests of a process."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix='prepared_')) / 'set'
  splits = {'train': builtin.open_digits('train'), 'test': builtin.open_digits('test')}
  prepare.write(splits, folder, prepare.Settings(0, 92, num_shards, 0), name_of=str, run=prepare.LocalRunner())
  return folder


def write(folder: pathlib.Path, *, num_shards: int = 4) -> pathlib.Path:
  """Writes `digits` as shards, and returns the folder."""
  shutil.copytree(_written(num_shards), folder)
  return folder


def damage(path: pathlib.Path) -> None:
  """Changes a byte of a record in a shard."""
  content = bytearray(path.read_bytes())
  content[3_000] ^= 1
  path.write_bytes(content)


def open_all(where: object, **fields: object) -> opening.Sources:
  return opening.open_sources(schema.Data(source=f'array_record:{where}', **fields), image_px=(8, 8))




def upload(folder: pathlib.Path, server: buckets.Server, address: str) -> str:
  """Puts the files of a folder below an address, which is returned."""
  for path in folder.iterdir():
    server.generation += 1
    server.objects[f'{address.removeprefix("gs://")}/{path.name}'] = (server.generation, path.read_bytes())
  return address
