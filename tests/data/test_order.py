"""The order of the training data."""
from __future__ import annotations

import numpy as np
import pytest

from tests.data import make_golden_mixing as golden
from vit_jax.data import order


@pytest.mark.parametrize('size', [1, 2, 3, 37, 64, 65, 1000])
def test_every_epoch_visits_each_example_once(size: int) -> None:
  for epoch in range(3):
    seen = order.Shuffled(size, 5)(np.arange(epoch * size, (epoch + 1) * size))
    np.testing.assert_array_equal(np.sort(seen), np.arange(size))


def test_epochs_and_seeds_give_different_orders() -> None:
  orders = {tuple(order.Shuffled(37, s)(np.arange(e * 37, e * 37 + 37)).tolist())
            for e in range(4) for s in range(4)}
  assert len(orders) == 16


def test_a_position_does_not_need_the_ones_before_it() -> None:
  whole = order.Shuffled(37, 1)(np.arange(200))
  np.testing.assert_array_equal(order.Shuffled(37, 1)(np.array([199, 73, 74])),
                                whole[[199, 73, 74]])


def test_each_example_is_as_likely_at_each_place() -> None:
  size, epochs = 7, 1500
  seen = order.Shuffled(size, 0)(np.arange(size * epochs)).reshape(epochs, size)
  counts = np.stack([np.bincount(column, minlength=size) for column in seen.T])
  expected = epochs / size
  chi_square = ((counts - expected) ** 2 / expected).sum()
  assert chi_square < 64  # 36 degrees of freedom: mean 36, 99.7 % below 64


def test_three_hundred_million_examples_need_no_table() -> None:
  seen = order.Shuffled(303_000_000, 0)(np.arange(1000) + 10 * 303_000_000)
  assert len(np.unique(seen)) == 1000
  assert seen.min() >= 0 and seen.max() < 303_000_000


def test_the_order_is_the_one_of_the_first_version() -> None:
  # Made with the first version of this module. Runs that are resumed rely on it: never renew.
  assert order.Shuffled(37, 0)(np.arange(8)).tolist() == [34, 21, 35, 13, 28, 18, 11, 19]


def test_augmentation_follows_from_seed_and_position_alone() -> None:
  draws = {(s, p): order.ExampleRngs(s).at(p).random() for s in range(3) for p in range(3)}
  assert len(set(draws.values())) == 9
  assert order.ExampleRngs(2).at(1).random() == draws[2, 1]


def test_repeated_examples_are_in_one_batch_and_never_neighbors() -> None:
  visit = order.Repeated(order.Shuffled(37, 0), 3, 12)
  whole = visit(np.arange(12 * 40)).reshape(40, 12)
  for row in whole:
    assert sorted(np.bincount(row)[np.unique(row)].tolist()) == [3] * 4
    assert (row[0::2] != row[1::2]).all()
  np.testing.assert_array_equal(whole[:, :4].ravel(), order.Shuffled(37, 0)(np.arange(160)))
  np.testing.assert_array_equal(visit(np.arange(100, 131)), whole.ravel()[100:131])


def test_repeats_that_do_not_divide_the_batch_leave_out_the_last_copies() -> None:
  rows = order.Repeated(order.Shuffled(37, 0), 3, 10)(np.arange(20)).reshape(2, 10)
  for row in rows:
    assert row[:4].tolist() == row[4:8].tolist() and row[8:].tolist() == row[:2].tolist()
    assert (row[0::2] != row[1::2]).all()
  assert not set(rows[0]) & set(rows[1])


def test_copies_are_dealt_to_groups_as_deits_sampler_deals_them_to_devices() -> None:
  rows = np.load(golden.FILE)['rows']
  batch_size = golden.DEVICES * golden.PER_DEVICE
  visit = order.Repeated(lambda positions: positions, golden.REPEATS, batch_size, golden.DEVICES)
  found = visit(np.arange(golden.STEPS * batch_size)).reshape(rows.shape)
  np.testing.assert_array_equal(found, rows)
  for group in found[0].reshape(golden.DEVICES, -1):
    assert len(set(group)) == len(group)


def test_fewer_groups_than_copies_leave_the_order_without_groups() -> None:
  plain, grouped = (order.Repeated(order.Shuffled(37, 0), 3, 12, groups) for groups in (1, 2))
  np.testing.assert_array_equal(plain(np.arange(60)), grouped(np.arange(60)))
