"""The order of examples in row groups: each once an epoch, any position alone, and few row groups at a time."""
from __future__ import annotations

import collections
import itertools
import pathlib
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.data import parquets
from vit_jax.config import schema
from vit_jax.core.types import Batch, Shard
from vit_jax.data import content, loader, opening, order, storage, windows
from vit_jax.data.formats import parquet
from vit_jax.data.source import Part, Parts, RowGroups, Source, first_label, read_one, row_groups, take, take_first
from vit_jax.jobs import prepare

SIZES = np.array([3, 5, 4, 0, 7, 2, 9, 1, 6] * 7)
FOUND = parquets.large(600)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
  monkeypatch.setattr(storage, '_state', storage._State(storage.Settings()))
  parquet.cache_of.cache_clear()


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """About 3.4 MB of images in 75 row groups, of which 1 MiB are held."""
  made = tmp_path_factory.mktemp('files')
  parquets.write(made, 'train', FOUND, 3, rows=8)
  return made


def opened(folder: pathlib.Path, split: str = 'train', **settings: Any) -> Source:
  return opening.open_split(schema.Data(source=f'parquet:{folder}', shuffle_mib=1, **settings), split, image_px=(8, 8))


def test_rows_of_a_window_have_another_order_in_each_epoch() -> None:
  """With one row group, the order of row groups cannot hide an order of rows that stays."""
  visit = windows.Windows(np.array([50]), seed=3, span=1, num_lanes=1, window_size=1)
  first, second = visit(np.arange(50)), visit(np.arange(50, 100))
  assert sorted(first) == sorted(second) == list(range(50)) and list(first) != list(second)


def batches(source: Source, numbers: range, *, hosts: int = 1, workers: int = 0, **settings: Any) -> list[Batch]:
  """Global batches of 20, of which each host makes its rows, begun anew at the first step."""
  parts = []
  for host in range(hosts):
    made = loader.train_loader(
        source, recipe=schema.Recipe(flip=True, **settings), image_px=(8, 10), batch_size=20, seed=3,
        shard=Shard((host,), hosts), workers=workers, threads=2, in_memory=False, max_bad_images=0)
    parts.append([{k: np.array(v) for k, v in b.items()}
                  for b in itertools.islice(made.batches(numbers.start), len(numbers))])
    made.close()
  return [{k: np.concatenate([part[i][k] for part in parts]) for k in parts[0][0]} for i in range(len(numbers))]


def check_same(found: list[Batch], expected: list[Batch]) -> None:
  assert len(found) == len(expected)
  for one, other in zip(found, expected, strict=True):
    for name in other:
      np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize(('span', 'lanes', 'groups'), [
    (1, 1, 1), (1, 1, 4), (16, 8, 2), (40, 20, 1), (12, 3, 99), (512, 64, 1)])
def test_every_epoch_visits_every_example_once_in_an_order_of_its_own(span: int, lanes: int, groups: int) -> None:
  visit, total = windows.Windows(SIZES, 5, span, lanes, groups), int(SIZES.sum())
  found = visit(np.arange(4 * total)).reshape(4, total)
  np.testing.assert_array_equal(np.sort(found, axis=1), np.tile(np.arange(total), (4, 1)))
  assert len({tuple(epoch) for epoch in found.tolist()}) == 4
  assert (windows.Windows(SIZES, 6, span, lanes, groups)(np.arange(total)) != found[0]).any()
  chosen = np.random.default_rng(0).permutation(4 * total)[:300]  # a position does not depend on others
  np.testing.assert_array_equal(visit(chosen), found.ravel()[chosen])
  np.testing.assert_array_equal(pickle.loads(pickle.dumps(visit))(chosen), found.ravel()[chosen])


def test_a_window_mixes_the_rows_of_several_row_groups() -> None:
  sizes = np.full(100, 20)
  visit = windows.Windows(sizes, 0, 1, 1, 10)
  found = visit(np.arange(2000)) // 20
  for start in range(0, 2000, 200):
    own = found[start:start + 200]
    assert len(np.unique(own)) == 10  # all rows of ten row groups
    assert len(np.unique(own[:20])) > 6 and np.mean(own[1:] == own[:-1]) < .2


def test_each_host_and_each_of_four_loader_processes_reads_its_own_row_groups() -> None:
  found = RowGroups(np.full(6400, 25), np.full(6400, 2**20), 2**28)
  source = type('', (), {'row_groups': found, '__len__': lambda self: 160_000})()
  batch, steps = 256, 300
  visit = windows.visit(source, 0, batch)
  assert isinstance(visit, windows.Windows) and visit.span == windows.CYCLE * batch
  groups = (visit(np.arange(batch * steps)) // 25).reshape(steps, batch)
  whole = len(np.unique(groups))
  for parts in ([np.unique(part) for part in np.split(groups, 8, axis=1)],
                [np.unique(groups[process::4]) for process in range(4)]):
    assert sum(map(len, parts)) < 1.02 * whole
  held = [len(np.unique(groups[step:step + 4])) for step in range(steps - 4)]
  assert max(held) <= 2 * 256  # of 256 that a process may hold, as many end as begin


def test_sources_that_fit_are_shuffled_as_a_whole(folder: pathlib.Path) -> None:
  source = opening.open_split(schema.Data(source=f'parquet:{folder}'), 'train', image_px=(8, 8))
  assert windows.visit(source, 3, 20) == windows.visit_once(source, 3) == order.Shuffled(600, 3)
  assert isinstance(windows.visit(opened(folder), 3, 20), windows.Windows)


def test_parts_of_sources_have_the_row_groups_of_their_examples(folder: pathlib.Path) -> None:
  source = opened(folder)
  whole = row_groups(source)
  assert whole and whole.sizes.tolist() == [8] * 75
  part = row_groups(opened(folder, 'train[5:30]+train[100:104]'))
  assert part and part.sizes.tolist() == [3, 8, 8, 6, 4]
  assert part.num_bytes.tolist() == whole.num_bytes[[0, 1, 2, 3, 12]].tolist()
  first = row_groups(take_first(source, 20))
  assert first and first.sizes.tolist() == [8, 8, 4]
  some = row_groups(take(source, [1, 9, 10, 599], name='some'))
  assert some and some.sizes.tolist() == [1, 2, 1]
  assert row_groups(take(source, [9, 1], name='unsorted')) is None
  digits = opening.open_split(schema.Data(source='digits'), 'train', image_px=(8, 8))
  assert row_groups(Parts([Part(source, range(9)), Part(digits, range(9))], name='both')) is None


def test_batches_are_the_same_from_any_step_on_for_any_number_of_hosts_and_processes(folder: pathlib.Path) -> None:
  source = opened(folder)
  whole = batches(source, range(40))  # an epoch and a third
  assert sorted(np.concatenate([b['index'] for b in whole[:30]]).tolist()) == list(range(600))
  check_same(batches(opened(folder), range(27, 40)), whole[27:])
  check_same(batches(source, range(29, 33), hosts=2), whole[29:33])
  check_same(batches(source, range(30, 34), hosts=4), whole[30:34])
  check_same(batches(source, range(3, 11), workers=2), whole[3:11])


def test_row_groups_are_decoded_about_once_and_memory_is_bounded(folder: pathlib.Path) -> None:
  source = opened(folder)
  cache, most = parquet._cache(), 0
  get = cache.get

  def watch(key: Any, make: Any) -> Any:
    nonlocal most
    found = get(key, make)
    most = max(most, cache.num_bytes)
    return found
  cache.get = watch  # type: ignore[method-assign]
  batches(source, range(30))
  lanes = windows.visit(source, 3, 20).num_lanes  # type: ignore[attr-defined]
  assert 75 <= cache.num_made <= 75 + lanes + 5  # lanes share row groups; a global shuffle would decode about 400
  assert 2**19 < most <= cache.max_bytes == 2**20


def test_repeated_examples_and_mixtures_are_in_windows_too(folder: pathlib.Path) -> None:
  source = opened(folder)
  batches(source, range(30), repeats=2)
  assert parquet._cache().num_made < 75
  mixed = opening.open_split(schema.Data(source=f'mix:0.5*parquet:{folder},0.5*parquet:{folder}', shuffle_mib=1),
                             'train', image_px=(8, 8))
  made = parquet._cache().num_made
  index = np.concatenate([b['index'] for b in batches(mixed, range(70))])
  assert sorted(index[index < 600][:600].tolist()) == list(range(600))
  assert parquet._cache().num_made - made < 300  # a global shuffle would decode about 1,000


def test_the_window_and_the_batch_are_part_of_what_resuming_compares(folder: pathlib.Path) -> None:
  def digest(source: Source, batch_size: int = 20, **recipe: Any) -> str:
    made = loader.train_loader(
        source, recipe=schema.Recipe(**recipe), image_px=(8, 8), batch_size=batch_size, seed=0, shard=Shard((0,), 1),
        workers=0, threads=1, in_memory=False, max_bad_images=0)
    return made.info.digest
  mixed = opening.open_split(schema.Data(source=f'mix:0.5*parquet:{folder},0.5*parquet:{folder}', shuffle_mib=1),
                             'train', image_px=(8, 8))
  found = [digest(opened(folder)), digest(opened(folder), 40), digest(opened(folder), 20, repeats=2), digest(mixed),
           digest(opening.open_split(schema.Data(source=f'parquet:{folder}'), 'train', image_px=(8, 8)))]
  assert len(set(found)) == 5
  assert ['row_groups=' in one for one in found] == [True, True, True, True, False]


def test_a_dataset_is_prepared_with_each_row_group_decoded_about_once(folder: pathlib.Path,
                                                                     tmp_path: pathlib.Path) -> None:
  source = opened(folder)
  stored = windows.visit_once(source, 0)
  assert isinstance(stored, windows.Windows) and stored.window_size == 2
  prepare.run(tmp_path / 'prepared', data=f'parquet:{folder}', splits=['train'])
  made = opening.open_split(schema.Data(source=f'array_record:{tmp_path}/prepared'), 'train', image_px=(8, 8))
  one, other = content.read(made), content.read(source)
  assert one._replace(order='') == other._replace(order='') and one.order != other.order


def test_the_cache_makes_a_value_once_for_several_threads_and_drops_the_least_recently_used() -> None:
  cache, made = parquet.Cache(10), list[str]()

  def get(key: str, num_bytes: int = 4) -> str:
    def make() -> tuple[str, int]:
      made.append(key)
      barrier.wait(.2) if key == 'slow' else None
      return f'{key}!', num_bytes
    return str(cache.get(key, make))
  barrier = threading.Event()
  threads = [threading.Thread(target=get, args=('slow',)) for _ in range(5)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert made == ['slow'] and get('a') == 'a!' and get('slow') == 'slow!' and cache.num_bytes == 8
  get('b')
  assert 'a' not in cache and 'slow' in cache and cache.num_bytes == 8
  get('huge', 99)
  assert cache.num_bytes == 99 and 'b' not in cache
  get('c')
  assert cache.num_bytes == 4
  with pytest.raises(ZeroDivisionError):
    cache.get('bad', lambda: 1 / 0)  # type: ignore[arg-type, return-value]
  assert get('bad') == 'bad!'


def test_the_cache_counts_what_another_thread_drops_meanwhile() -> None:
  cache = parquet.Cache(10)
  cache.get('a', lambda: ('a', 4))

  class Dropping(collections.OrderedDict[str, tuple[str, int]]):
    def get(self, key: str, default: Any = None) -> Any:
      found = super().get(key, default)
      cache.num_bytes -= self.pop(key)[1]  # as a thread does that makes room
      return found
  cache._entries = Dropping(cache._entries)
  cache.get('a', lambda: ('a', 4))
  assert cache.num_bytes == 4 == sum(size for _, size in cache._entries.values())


def test_a_small_global_shuffle_has_the_batches_of_the_folder(tmp_path: pathlib.Path) -> None:
  for example in FOUND[:60]:
    path = tmp_path / 'folder' / 'train' / parquets.NAMES[example.label] / f'{example.key}.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(example.image)
  open_one: Callable[[str], Source] = lambda name: opening.open_split(
      schema.Data(source=f'{name}:{tmp_path}/{name}'), 'train', image_px=(8, 8))
  known = open_one('folder')
  parquets.write(tmp_path / 'parquet', 'train', [
      parquets.Example(pathlib.Path(known.describe(i)).stem, read_one(known, i).image, first_label(known, i))
      for i in range(60)])
  check_same(batches(open_one('parquet'), range(7)), batches(known, range(7)))
  assert content.read(open_one('parquet')) == content.read(known)
