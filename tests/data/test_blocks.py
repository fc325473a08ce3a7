"""Batches of one process: its rows of the global batch, wherever they lie in it, and nothing else is read."""
from __future__ import annotations

import errno
import os
import pathlib

import numpy as np
import pytest
import slices

from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Batch, Shard
from vit_jax.data.files import access
from vit_jax.data.image import transform as transforms
from vit_jax.data.pipeline import blocks, order
from vit_jax.data.source import Record, Source
from vit_jax.data.sources import opening
from vit_jax.parallel import mesh as meshes

BATCH, PX = 16, (8, 10)
RECIPE = schema.Recipe()
# The parts of each of four hosts on a slice of 16 chips, by mesh.
HOSTS = {layout: [meshes.local_rows(meshes.make(schema.Mesh(*sizes), slices.devices('v5e:4x4')), i)  # type: ignore[arg-type]
                  for i in range(4)] for layout, sizes in {'data=16': (16, 1, 1), 'data=4,fsdp=4': (4, 4, 1),
                                                           'data=4,tensor=4': (4, 1, 4)}.items()}


class Counting:
  """A source that notes what is read of it."""

  def __init__(self, source: Source) -> None:
    self._source, self.read = source, list[int]()

  def __getattr__(self, name: str) -> object:
    return getattr(self._source, name)

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Record:
    self.read.append(index)
    return self._source[index]


@pytest.fixture(scope='module')
def source(image_folder: pathlib.Path) -> Counting:
  return Counting(opening.open_split(schema.Data(source=f'folder:{image_folder}'), 'train', image_px=PX))


def train(source: Counting, shard: Shard, number: int) -> Batch:
  make = blocks.TrainBlocks(source, transforms.train_transform(RECIPE, PX), order.Shuffled(len(source), 5),
                            transforms.train_shapes(RECIPE, PX), 5, BATCH, shard)
  return make(number)


def evaluate(source: Counting, shard: Shard, number: int) -> Batch:
  return blocks.EvalBlocks(source, transforms.eval_transform(RECIPE, PX), BATCH, shard)(number)


@pytest.mark.parametrize('make', [train, evaluate])
@pytest.mark.parametrize('layout', HOSTS)
def test_a_host_makes_its_rows_of_the_global_batch_and_reads_no_other(source: Counting, layout: str,
                                                                      make: object) -> None:
  assert callable(make)
  whole = make(source, Shard((0,), 1), 2)
  for shard in HOSTS[layout]:
    source.read.clear()
    batch, rows = make(source, shard, 2), shard.rows(BATCH)
    assert len(rows) == BATCH * len(shard.parts) // shard.count
    for name in whole:
      np.testing.assert_array_equal(batch[name], whole[name][rows], err_msg=name)
    counted = rows if make is train else rows[whole['mask'][rows] > 0]
    assert source.read == whole['index'][counted].tolist()


class Failing:
  """A source that the system does not let be read at one place."""

  def __init__(self, source: Source, error: Exception) -> None:
    self._source, self._error = source, error

  def __getattr__(self, name: str) -> object:
    return getattr(self._source, name)

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> Record:
    if index == 3:
      raise self._error
    return self._source[index]


@pytest.mark.parametrize('number', [errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EACCES,
                                    errno.ENOENT, None])
def test_an_error_of_the_system_stops_the_run_and_counts_as_no_bad_image(source: Counting, number: int | None) -> None:
  failing = Failing(source, MemoryError() if number is None else OSError(number, os.strerror(number)))
  number = errno.ENOMEM if number is None else number
  fit = transforms.eval_transform(RECIPE, PX)
  alone = Shard((0,), 1)
  for make in (lambda: [train(failing, alone, n) for n in range(3)], lambda: evaluate(failing, alone, 0),  # type: ignore[arg-type]
               lambda: blocks.decode_all(failing, fit, threads=2), lambda: blocks.reason_bad(failing, 3, fit)):
    with pytest.raises(UserError) as found:
      make()
    message = str(found.value)
    assert source.describe(3) in message and f'got "{os.strerror(number)}"' in message  # type: ignore[operator]
    assert access.ADVICE[number] in message


@pytest.mark.quick('data=4,fsdp=4', reason='1 s: a program for each mesh')
@pytest.mark.parametrize('layout', HOSTS)
def test_from_memory_the_rows_are_the_same(source: Counting, layout: str) -> None:
  decoded = blocks.decode_all(source, transforms.eval_transform(RECIPE, PX), threads=2)
  visit = order.Shuffled(len(source), 5)
  for make in (lambda shard: blocks.MemoryTrainBlocks(decoded, visit, BATCH, shard)(3),
               lambda shard: blocks.MemoryEvalBlocks(decoded, BATCH, shard)(2)):
    whole = make(Shard((0,), 1))
    for shard in HOSTS[layout]:
      batch = make(shard)
      for name in whole:
        np.testing.assert_array_equal(batch[name], whole[name][shard.rows(BATCH)], err_msg=name)
