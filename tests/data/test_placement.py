"""Hosts that read only their own shards: the order, what a host needs, and what is compared when a run is resumed."""
from __future__ import annotations

import itertools
import pathlib
import re

import numpy as np
import pytest

from tests.data import prepared_sets
from vit_jax.config import schema
from vit_jax.config.schema import Placement
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data.files import records
from vit_jax.data.pipeline import loader, order
from vit_jax.data.source import Source, shard_sizes
from vit_jax.data.sources import builtin, splits

SIZES = np.array([10, 10, 10, 10, 10, 10])
HOSTS = (0, 1, 0, 1)  # the parts of a host need not be adjacent
FIXED, ANEW = Placement.HOST_SHARDS, Placement.HOST_SHARDS_ANEW


def rows_of(host: int, indexes: np.ndarray, hosts: tuple[int, ...] = HOSTS) -> np.ndarray:
  """The rows of batches `[T, B]` that a host loads."""
  parts = indexes.reshape(len(indexes), len(hosts), -1)
  return parts[:, [h == host for h in hosts]].reshape(len(indexes), -1)


def visit_of(num_steps: int, *, anew: bool = False, sizes: np.ndarray = SIZES, seed: int = 0) -> np.ndarray:
  visit = order.HostShards(sizes, HOSTS, 12, seed, anew)
  return visit(np.arange(12 * num_steps)).reshape(num_steps, 12)


@pytest.mark.parametrize('anew', [False, True])
def test_every_example_is_visited_once_an_epoch_by_the_host_of_its_shard(anew: bool) -> None:
  visit, indexes = order.HostShards(SIZES, HOSTS, 12, 0, anew), visit_of(15, anew=anew)
  for epoch in range(3):
    here = indexes[5 * epoch:5 * epoch + 5]
    assert sorted(here.ravel()) == list(range(60))
    for host in range(2):
      assert set(rows_of(host, here).ravel() // 10) == set(visit.shards(host, epoch).tolist())


def test_a_host_has_the_same_shards_in_each_epoch_unless_they_are_dealt_anew() -> None:
  fixed = order.HostShards(SIZES, HOSTS, 12, 0)
  assert all(fixed.shards(1, epoch).tolist() == [1, 3, 5] for epoch in range(9))
  anew = {tuple(order.HostShards(SIZES, HOSTS, 12, 0, True).shards(1, epoch).tolist()) for epoch in range(9)}
  assert len(anew) > 4


def test_epochs_hosts_and_seeds_have_different_orders_and_shards_are_mixed() -> None:
  orders = {tuple((rows_of(host, visit_of(10, seed=seed))[5 * epoch:5 * epoch + 5] % 10).ravel())
            for host in range(2) for epoch in range(2) for seed in range(2)}
  assert len(orders) == 8
  first = rows_of(0, visit_of(1)).ravel() // 10
  assert len(set(first)) > 1


def test_a_position_does_not_need_the_ones_before_it() -> None:
  visit, whole = order.HostShards(SIZES, HOSTS, 12, 3, True), visit_of(20, anew=True, seed=3).ravel()
  assert visit(np.array([230, 5, 77])).tolist() == whole[[230, 5, 77]].tolist()


def test_hosts_with_unequal_shards_use_each_example_about_once_an_epoch() -> None:
  sizes = np.array([9, 10, 11, 8, 10, 9])  # host 0 has 30, host 1 has 27; an epoch takes 29
  indexes = visit_of(29 * 100 // 6, sizes=sizes)
  for host, num in ((0, 30), (1, 27)):
    counts = np.bincount(rows_of(host, indexes).ravel(), minlength=57)
    own = counts[counts > 0]
    assert len(own) == num and abs(own.mean() - 29 * 100 / num) < 1 and own.min() > 80


@pytest.mark.parametrize('position', range(4))
def test_the_order_is_this_one(position: int) -> None:
  """The order may not change between versions."""
  golden = {False: GOLDEN_FIXED, True: GOLDEN_ANEW}
  for anew, expected in golden.items():
    assert visit_of(6, anew=anew, seed=7)[position + 2].tolist() == expected[position]


GOLDEN_FIXED = [
    [6, 47, 48, 30, 14, 35, 42, 45, 43, 58, 37, 10],
    [29, 24, 46, 16, 17, 19, 7, 5, 25, 18, 51, 54],
    [2, 9, 28, 57, 52, 38, 49, 26, 1, 39, 56, 55],
    [28, 21, 49, 37, 18, 31, 48, 24, 4, 17, 16, 56],
]
GOLDEN_ANEW = [
    [6, 27, 28, 30, 14, 35, 22, 25, 23, 58, 37, 10],
    [49, 44, 26, 16, 17, 19, 7, 5, 45, 18, 51, 54],
    [2, 9, 48, 57, 52, 38, 29, 46, 1, 39, 56, 55],
    [58, 51, 29, 47, 18, 41, 28, 54, 34, 17, 16, 6],
]


def train(source: Source, parts: tuple[int, ...], placement: Placement = FIXED, hosts: tuple[int, ...] = HOSTS,
          **more: object) -> loader.TrainLoader:
  settings: dict = {'recipe': schema.Recipe(), 'image_px': (8, 8), 'batch_size': 48, 'seed': 0, 'workers': 0,
                    'shard': Shard(parts, len(hosts), hosts), 'threads': 2, 'in_memory': False, 'max_bad_images': 100}
  return loader.train_loader(source, placement=placement, **(settings | more))


def open_part(folder: pathlib.Path, **fields: object) -> Source:
  data = schema.Data(source=f'array_record:{folder}', placement=FIXED, **fields)
  from vit_jax.data.sources import opening
  return opening.open_split(data, 'train', image_px=(8, 8))


def test_a_host_needs_no_shards_of_others_and_its_rows_are_those_of_all(tmp_path: pathlib.Path) -> None:
  folder = prepared_sets.write(tmp_path / 'set', num_shards=6)
  whole = list(itertools.islice(train(open_part(folder), (0, 1, 2, 3)).batches(0), 40))
  for host in range(2):
    own = prepared_sets.write(tmp_path / f'host{host}', num_shards=6)
    for number in range(6):
      if number % 2 != host:
        (own / f'train-{number:05d}-of-00006.array_record').unlink()
    parts = tuple(part for part, number in enumerate(HOSTS) if number == host)
    rows = Shard(parts, 4).rows(48)
    for batch, complete in zip(train(open_part(own), parts).batches(0), whole, strict=False):
      assert np.array_equal(batch['image'], complete['image'][rows])
      assert np.array_equal(batch['index'], complete['index'][rows])
    missing = own / f'train-{2 + host:05d}-of-00006.array_record'
    missing.unlink()
    with pytest.raises(UserError, match=f'{missing}: expected this shard on this host, got no file'):
      train(open_part(own), parts)
    with pytest.raises(UserError, match='shards have changed'):
      prepared_sets.open_all(own)


def test_a_bad_image_is_replaced_by_one_of_the_same_shard(tmp_path: pathlib.Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
  source = open_part(prepared_sets.write(tmp_path / 'set', num_shards=6))
  ends = np.cumsum(shard_sizes(source))
  real, bad = type(source).__getitem__, set((ends - 1).tolist())
  read: list[int] = []

  def get(self: Source, index: int) -> object:
    read.append(index)
    if index in bad:
      raise records.BadRecord('no image')
    return real(self, index)
  monkeypatch.setattr(type(source), '__getitem__', get)
  own = {number for number in range(6) if number % 2}
  found = train(source, (1, 3), workers=0).batches(0)
  seen = [batch for batch, _ in zip(found, range(60), strict=False)]
  assert sum(batch['bad'].sum() for batch in seen) > 0
  assert set(np.searchsorted(ends, sorted(set(read)), side='right').tolist()) == own


def test_what_a_resumed_run_compares_names_the_number_of_hosts(tmp_path: pathlib.Path) -> None:
  source = open_part(prepared_sets.write(tmp_path / 'set', num_shards=6))
  digests = [train(source, (0,), placement, hosts).info.digest for placement, hosts in (
      (Placement.ANYWHERE, (0, 1)), (FIXED, (0, 1)), (FIXED, (0, 0)), (ANEW, (0, 1)))]
  assert digests == [source.digest, f'{source.digest} host_shards=2', f'{source.digest} host_shards=1',
                     f'{source.digest} host_shards_anew=2']


def test_what_cannot_be_placed_is_an_error(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
  source = open_part(prepared_sets.write(tmp_path / 'set', num_shards=3))
  with pytest.raises(UserError, match='expected anywhere with digits/train, which does not consist of shards'):
    train(builtin.open_digits('train'), (0,))
  with pytest.raises(UserError, match='at least one shard for each of 4 hosts .* got 3 shards'):
    train(source, (0,), hosts=(0, 1, 2, 3))
  with pytest.raises(UserError, match=re.escape('parts of hosts (0, 0, 1)')):
    train(source, (0,), hosts=(0, 0, 1))
  train(source, (0,), hosts=(0, 1))
  assert 'hosts have 479 to 958 images' in caplog.text
  for settings, said in (
      ({'source': 'mix:0.5*digits,0.5*digits'}, 'data.placement: expected anywhere with several sources'),
      ({'in_memory': schema.InMemory.YES, 'recipe': schema.Recipe(crop=schema.Crop.RESIZE)},
       'data.in_memory: expected'),
      ({'recipe': schema.Recipe(repeats=2)}, 'data.recipe.repeats: expected 1 with data.placement=host_shards')):
    problems = schema.Data(**({'source': 'array_record:x', 'placement': FIXED} | settings)).problems(  # type: ignore
        schema.Config(), 'data')
    assert any(said in problem for problem in problems)


def test_slices_have_the_parts_of_their_shards(tmp_path: pathlib.Path) -> None:
  source = open_part(prepared_sets.write(tmp_path / 'set', num_shards=6))
  whole = shard_sizes(source)
  assert whole == [240, 240, 240, 239, 239, 239] and shard_sizes(builtin.open_digits('train')) is None
  assert shard_sizes(splits.select(lambda name: source, 'train[:500]')) == [240, 240, 20]
  assert shard_sizes(splits.select(lambda name: source, 'train[230:490]+train[-1:]')) == [10, 240, 10, 1]
