"""Batches in memory that processes share: used again only when nobody holds them, and the same as without."""
from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from vit_jax.core.types import Batch
from vit_jax.data import shared
from vit_jax.data.shared import Lease, MakeSharedBatch, OpenedBatches

pytestmark = pytest.mark.skipif(not shared.is_possible(), reason='this platform has no such memory')


class Numbers:
  """Batches whose arrays are their number."""

  def __call__(self, number: int, allocate: shared.Allocate = shared.allocate_private) -> Batch:
    batch = allocate({'image': ((3, 50), np.uint8), 'label': ((3,), np.int32), 'bad': ((3,), bool)})
    batch['image'][:] = number
    batch['label'][:] = number
    if number == 9:
      raise ValueError('broken')
    return batch | {'index': np.arange(3) + number, 'bad': np.ones(3, bool)}


def leases(make: MakeSharedBatch, numbers: range) -> Iterator[Lease]:
  yield from (pickle.loads(pickle.dumps(make(number))) for number in numbers)


def num_segments(make: MakeSharedBatch) -> int:
  return len({id(segment) for segment in make._segments})


def test_batches_are_those_of_this_process_and_segments_are_used_again() -> None:
  make = pickle.loads(pickle.dumps(MakeSharedBatch(Numbers())))
  for number, batch in enumerate(OpenedBatches(leases(make, range(9)))):
    expected = Numbers()(number)
    assert batch.keys() == expected.keys()
    for name, array in expected.items():
      np.testing.assert_array_equal(batch[name], array, err_msg=f'{name} {number}')
      assert batch[name].dtype == array.dtype
  # One that is made while the one before is still held, so two in turns.
  assert num_segments(make) == 2


def test_memory_that_anything_refers_to_is_not_used_again() -> None:
  make = MakeSharedBatch(Numbers())
  batches = OpenedBatches(leases(make, range(9)))
  row, label = next(batches)['image'][1:], next(batches)['label'].reshape(1, 3)
  on_device = jax.device_put(next(batches)['image'])
  for batch in batches:
    del batch
    gc.collect(1)
  assert (row == 0).all() and label.tolist() == [[1, 1, 1]] and (np.asarray(on_device)[0] == 2).all()
  held = num_segments(make)
  del row, label, on_device
  gc.collect(1)
  make(3), make(3), make(3)
  assert num_segments(make) == held  # three are free again


def test_a_batch_that_fails_gives_its_memory_back() -> None:
  make = MakeSharedBatch(Numbers())
  for _ in range(3):
    with pytest.raises(ValueError, match='broken'):
      make(9)
  assert num_segments(make) == 1


def test_arrays_outlive_what_opened_them() -> None:
  source = leases(MakeSharedBatch(Numbers()), range(3))
  batches = OpenedBatches(source)
  one = next(batches)
  batches.close()
  gc.collect(1)
  assert one['label'].tolist() == [0, 0, 0] and one['image'][1].tolist() == [0] * 50


def test_the_segment_of_a_process_that_has_ended_ends_the_batches() -> None:
  gone = Lease(f'/proc/{os.getpid()}/fd/99999', {}, {})

  def until_it_shows() -> Iterator[Lease]:
    yield gone
    yield gone
    raise RuntimeError('Worker process was terminated unexpectedly with exit code -9')
  with pytest.raises(RuntimeError, match='exit code -9'):
    next(OpenedBatches(until_it_shows()))
