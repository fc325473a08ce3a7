"""Batches of one process: its rows of the global batch, wherever they lie in it, and nothing else is read."""
from __future__ import annotations

import errno
import os
import pathlib

import jax
import numpy as np
import pytest
import slices

from vit_jax.config import schema
from vit_jax.core import failures, reports
from vit_jax.core.errors import TemporaryError, UserError
from vit_jax.core.types import Batch, Shard
from vit_jax.data import loader, opening, order
from vit_jax.data.formats.builtin import Arrays
from vit_jax.data.image import transform as transforms
from vit_jax.data.source import Record, Rows, Source, read_one
from vit_jax.parallel import mesh as meshes

BATCH, PX = 16, (8, 10)
RECIPE = schema.Recipe()
KIND = loader.BatchKind(transforms.train_transform(RECIPE, PX), transforms.train_shapes(RECIPE, PX))
# The parts of each of four hosts on a slice of 16 chips, by mesh.
HOSTS = {layout: [meshes.local_shard(meshes.make(schema.Mesh(*sizes),  # type: ignore[arg-type]
                                                 slices.devices('v5e:4x4')), i)
                  for i in range(4)] for layout, sizes in {'data=16': (16, 1, 1), 'data=4,fsdp=4': (4, 4, 1),
                                                           'data=4,tensor=4': (4, 1, 4)}.items()}


class Counting(Rows):
  """A source that notes what is read of it."""

  def __init__(self, source: Source) -> None:
    self._source, self.found = source, list[int]()

  def __getattr__(self, name: str) -> object:
    return getattr(self._source, name)

  def __len__(self) -> int:
    return len(self._source)

  def example(self, row: int) -> Record:
    self.found.append(row)
    return read_one(self._source, row)


@pytest.fixture(scope='module')
def source(image_folder: pathlib.Path) -> Counting:
  return Counting(opening.open_split(schema.Data(source=f'folder:{image_folder}'), 'train', image_px=PX))


def train(source: Counting, shard: Shard, number: int) -> Batch:
  return loader.Train(source, (KIND,), order.Shuffled(len(source), 5), 5, BATCH, shard)(number)


def evaluate(source: Counting, shard: Shard, number: int) -> Batch:
  return loader.Eval(source, transforms.eval_transform(RECIPE, PX), BATCH, shard)(number)


@pytest.mark.parametrize('make', [train, evaluate])
@pytest.mark.parametrize('layout', HOSTS)
def test_a_host_makes_its_rows_of_the_global_batch_and_reads_no_other(source: Counting, layout: str,
                                                                      make: object) -> None:
  assert callable(make)
  whole = make(source, Shard((0,), 1), 2)
  for shard in HOSTS[layout]:
    source.found.clear()
    batch, rows = make(source, shard, 2), shard.rows(BATCH)
    assert len(rows) == BATCH * len(shard.parts) // shard.count
    for name in whole:
      np.testing.assert_array_equal(batch[name], whole[name][rows], err_msg=name)
    counted = rows if make is train else rows[whole['mask'][rows] > 0]
    assert source.found == whole['index'][counted].tolist()


class Numbers(Rows):
  """Six examples, each of them its number."""

  def __len__(self) -> int:
    return 6

  def example(self, row: int) -> int:  # type: ignore[override]
    return row


def test_the_randomness_of_an_example_is_that_of_its_position_in_the_run() -> None:
  def draw(record: int, rng: np.random.Generator) -> dict[str, float]:
    return {'record': record, 'drawn': rng.random()}

  shard, visit = Shard((1,), 2), order.Shuffled(6, 5)
  shapes = {'record': ((), np.int64), 'drawn': ((), np.float64)}
  make = loader.Train(Numbers(), (loader.BatchKind(draw, shapes),), visit, 5, 4, shard)  # type: ignore[arg-type]
  made = [make(number) for number in range(5)]
  positions = [4 * number + row for number in range(5) for row in (2, 3)]
  drawn = np.concatenate([batch['drawn'] for batch in made]).tolist()
  assert drawn == [order.ExampleRngs(5).at(position).random() for position in positions] and len(set(drawn)) == 10
  np.testing.assert_array_equal(np.concatenate([batch['record'] for batch in made]), visit(np.array(positions)))


def test_from_memory_every_batch_has_its_own_place_in_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(loader, '_NUM_POSITIONS', 4)  # of two batches
  zeros, visit = np.zeros(6, np.int32), order.Shuffled(6, 5)
  make = loader.MemoryTrain(dict.fromkeys(('image', 'label', 'box', 'bad'), zeros), visit, 4, Shard((1,), 2))
  for number in (0, 1, 2, 5, 3, 0):
    assert make(number)['index'].tolist() == visit(4 * number + np.array([2, 3])).tolist()


class Failing(Rows):
  """A source that the system does not let be read at one place."""

  def __init__(self, source: Source, error: Exception) -> None:
    self._source, self._error = source, error

  def __getattr__(self, name: str) -> object:
    return getattr(self._source, name)

  def __len__(self) -> int:
    return len(self._source)

  def example(self, row: int) -> Record:
    if row == 3:
      raise self._error
    return read_one(self._source, row)


@pytest.mark.parametrize('number', [errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EACCES,
                                    errno.ENOENT, None])
def test_an_error_of_the_system_stops_the_run_and_counts_as_no_bad_image(
    source: Counting, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(failures, 'PATIENCE_S', 0.)
  failing = Failing(source, MemoryError() if number is None else OSError(number, os.strerror(number)))
  number = errno.ENOMEM if number is None else number
  fit = transforms.eval_transform(RECIPE, PX)
  alone = Shard((0,), 1)
  for make in (lambda: [train(failing, alone, n) for n in range(3)], lambda: evaluate(failing, alone, 0),  # type: ignore[arg-type]
               lambda: loader.decode_all(failing, fit, threads=2), lambda: loader.reason_bad(failing, 3, fit)):
    with pytest.raises((UserError, TemporaryError)) as found:
      make()
    assert reports.explain(found.value).status == (75 if number in (errno.ENOSPC, errno.EIO, errno.ESTALE) else 2)
    message = str(found.value)
    assert source.describe(3) in message and f'got "{os.strerror(number)}"' in message  # type: ignore[operator]
    assert failures.MEANINGS[number].advice in message


class Shaky(Failing):
  """Fails with each of several errors once for every example, then reads it."""

  def __init__(self, source: Source, *numbers: int) -> None:
    super().__init__(source, OSError())
    self._numbers, self.tries = numbers, dict[int, int]()

  def example(self, row: int) -> Record:
    found = self.tries[row] = self.tries.get(row, -1) + 1
    if found < len(self._numbers):
      raise OSError(self._numbers[found], os.strerror(self._numbers[found]))
    return read_one(self._source, row)


def test_a_batch_that_was_read_again_has_the_same_bits(source: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(failures.time, 'sleep', lambda s: None)
  alone = Shard((0,), 1)
  for make in (lambda s: train(s, alone, 1), lambda s: evaluate(s, alone, 0)):
    whole, shaky = make(source), Shaky(source, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
    again = make(shaky)
    assert set(shaky.tries.values()) == {3} and whole.keys() == again.keys()
    for name in whole:
      np.testing.assert_array_equal(whole[name], again[name], err_msg=name)


def test_an_empty_source_is_decoded_to_nothing() -> None:
  empty = Arrays(np.zeros((0, 8, 8, 3), np.uint8), np.zeros(0, np.int32), name='empty', class_names=('a', 'b'))
  decoded = loader.decode_all(empty, transforms.eval_transform(RECIPE, PX), threads=1)
  assert {len(array) for array in decoded.values()} == {0}


@pytest.mark.quick('data=4,fsdp=4', reason='1 s: a program for each mesh')
@pytest.mark.parametrize('layout', HOSTS)
def test_from_memory_the_rows_are_the_same(source: Counting, layout: str) -> None:
  decoded = loader.decode_all(source, transforms.eval_transform(RECIPE, PX), threads=2)
  visit = order.Shuffled(len(source), 5)
  for make in (lambda shard: loader.MemoryTrain(decoded, visit, BATCH, shard)(3),
               lambda shard: loader.MemoryEval(decoded, BATCH, shard)(2)):
    whole = make(Shard((0,), 1))
    for shard in HOSTS[layout]:
      batch = make(shard)
      for name in whole:
        np.testing.assert_array_equal(batch[name], whole[name][shard.rows(BATCH)], err_msg=name)


class Huge(Rows):
  """Three thousand million examples, of which the last is damaged."""
  name, class_names, digest = 'huge', ('a',), '0'

  def __len__(self) -> int:
    return 3_000_000_000

  def example(self, row: int) -> Record:
    assert 0 <= row < len(self)
    return Record(b'' if row == len(self) - 1 else np.full((9, 9, 3), row % 256, np.uint8), (0,))

  def labels(self, row: int) -> tuple[int, ...]:
    return (0,)

  def describe(self, index: int) -> str:
    return f'huge[{index}]'


def far(positions: np.ndarray) -> np.ndarray:
  """The last examples, backwards."""
  return 2_999_999_999 - positions


def test_examples_beyond_32_bits_keep_their_index_and_a_bad_one_is_named(caplog: pytest.LogCaptureFixture) -> None:
  source, shard = Huge(), Shard((0,), 1)
  batch = loader.Train(source, (KIND,), far, 5, 4, shard)(0)
  assert batch['index'].tolist() == [2_999_999_999, 2_999_999_998, 2_999_999_997, 2_999_999_996]
  assert batch['bad'].tolist() == [True, False, False, False]
  bad = loader.BadImages(source, transforms.eval_transform(RECIPE, PX))
  bad.add(batch)
  assert bad.indexes == {2_999_999_999} and 'bad image: huge[2999999999]' in caplog.text
  placed = meshes.put_batch({'index': batch['index']}, meshes.make(schema.Mesh(1, 1, 1), jax.devices()[:1]), shard)
  assert placed['index'].dtype == np.int32


def test_the_loader_tells_the_examples_of_a_step_and_their_order_is_that_of_its_batches() -> None:
  found = loader.train_loader(Huge(), recipe=RECIPE, image_px=PX, batch_size=6, seed=3, shard=Shard((0,), 1), workers=0,
                              threads=1, in_memory=False, max_bad_images=9)
  batches = found.batches(7)
  assert np.array_equal(next(batches)['index'], found.indexes(7)) and found.indexes(7).dtype == np.int64
  assert found.indexes(7).tolist() == order.Shuffled(len(Huge()), 3)(np.arange(42, 48)).tolist()
  assert found.indexes(7).max() > 2**31
  found.close()


def test_an_evaluation_of_more_examples_than_32_bits_count_is_refused() -> None:
  with pytest.raises(UserError, match='huge: expected at most 2,147,483,647 examples to evaluate, got 3,000,000,000'):
    loader.eval_loader(Huge(), recipe=RECIPE, image_px=PX, batch_size=8, shard=Shard((0,), 1), threads=1)
