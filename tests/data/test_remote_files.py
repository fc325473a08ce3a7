"""Files of several formats in object storage: the examples of the local files, by few requests and in little memory."""
from __future__ import annotations

import collections
import pathlib
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import buckets
import numpy as np
import pyarrow as pa
import pytest

from tests.data import packed, parquets
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data import index, loader, open_files, opening, storage
from vit_jax.data.formats import parquet, tar, tfrecord
from vit_jax.data.source import Source, read_one
from vit_jax.data.user_files import Rules

FOUND = packed.examples(23)
WRITERS: dict[str, Callable[..., None]] = {'wds': packed.write_tars, 'tfrecord': packed.write_tfrecords,
                                           'parquet': parquets.write}
SETTINGS: dict[str, dict[str, Any]] = {'wds': {}, 'tfrecord': {'label_offset': 1}, 'parquet': {}}
KINDS = tuple(WRITERS)
IN_BLOCKS = ('wds', 'tfrecord')
"""Kinds whose files are read from their beginning for the index."""


@pytest.fixture(autouse=True)
def own_state(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Nothing that another test has started, kept or opened."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(storage, '_state', storage._State(storage.Settings()))
  open_files.pool.cache_clear()
  parquet.cache_of.cache_clear()
  yield
  open_files.pool.cache_clear()


def put(server: buckets.Server, name: str, content: bytes) -> None:
  server.generation += 1
  server.objects[name] = (server.generation, content)


@pytest.fixture
def folder(request: pytest.FixtureRequest, bucket: buckets.Server, tmp_path: pathlib.Path) -> pathlib.Path:
  """The examples in files, and the same files below `gs://bucket/set`."""
  kind = request.getfixturevalue('kind') if 'kind' in request.fixturenames else 'wds'
  WRITERS[kind](tmp_path / 'set', 'train', FOUND)
  WRITERS[kind](tmp_path / 'set', 'validation', packed.examples(5, first=40), 1)
  for path in (tmp_path / 'set').iterdir():
    put(bucket, f'bucket/set/{path.name}', path.read_bytes())
  return tmp_path / 'set'


def opened(kind: str, where: object, split: str = 'train', **settings: Any) -> Source:
  data = schema.Data(source=f'{kind}:{where}', **{**SETTINGS[kind], **settings})
  return opening.open_split(data, split, image_px=(8, 8))


PATTERNS = {'wds': ('gs://bucket/set', 'gs://bucket/set/', 'gs://bucket', 'gs://bucket/set/set-{split}-*.tar',
                    'gs://bucket/set/set-train-{000..002}.tar', 'gs://bucket/*/set-{train,validation}-00[0-9].tar'),
            'tfrecord': ('gs://bucket/set', 'gs://bucket/set/{split}-*-of-*', 'gs://bucket/set/train-0000?-of-00003',
                         'gs://bucket/**/train-*'),
            'parquet': ('gs://bucket/set', 'gs://bucket/set/{split}-*.parquet')}


@pytest.mark.parametrize(('kind', 'pattern'), [(kind, one) for kind in KINDS for one in PATTERNS[kind]])
def test_patterns_and_folders_are_found_in_a_bucket(kind: str, pattern: str, folder: pathlib.Path,
                                                    bucket: buckets.Server) -> None:
  bucket.page_size = 3  # of lists
  for name in ('set/classes.bak', 'set/.hidden-train.tar', 'set/.hidden-train.tfrecord', 'settings/x'):
    put(bucket, f'bucket/{name}', b'no file of the set')
  source = opened(kind, pattern)
  assert [read_one(source, i)[:2] for i in range(len(source))] == [(e.image, (e.label,)) for e in FOUND]
  assert source.digest == opened(kind, folder).digest
  assert source.describe(9).startswith('gs://bucket/set/')


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('workers', [0, pytest.param(2, marks=pytest.mark.slow(reason='5 s: starts processes'))])
def test_batches_are_those_of_the_files(kind: str, workers: int, folder: pathlib.Path) -> None:
  def batches(where: object) -> list[dict[str, np.ndarray]]:
    made = loader.train_loader(opened(kind, where), recipe=schema.Recipe(flip=True), image_px=(8, 8), batch_size=8,
                               seed=3, shard=Shard((0,), 1), workers=workers, threads=2, in_memory=False,
                               max_bad_images=0)
    found = [{k: np.array(v) for k, v in b.items()} for _, b in zip(range(9), made.batches(0), strict=False)]
    made.close()
    return found
  for one, other in zip(batches(folder), batches('gs://bucket/set'), strict=True):
    assert one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_what_is_beside_a_folder_is_not_listed(folder: pathlib.Path, bucket: buckets.Server) -> None:
  bucket.page_size = 10
  for number in range(500):
    put(bucket, f'bucket/set-large/{number}.tar', b'')
  bucket.requests.clear()
  tar.find('gs://bucket/set', Rules())
  assert bucket.requests['GET'] < 10


def test_the_files_beside_tars_are_read_from_the_bucket(folder: pathlib.Path, bucket: buckets.Server) -> None:
  put(bucket, 'bucket/set/classes.txt', b'ant\nbee\ncow\n')
  assert opened('wds', 'gs://bucket/set').class_names == packed.NAMES
  put(bucket, 'bucket/set/_info.json', b'{"splits": {"train": {"filenames": ["set-train-002.tar"]}}}')
  assert len(opened('wds', 'gs://bucket/set')) == 8
  put(bucket, 'bucket/set/_info.json', b'{"splits": {"train": {"filenames": ["set-train-003.tar"]}}}')
  with pytest.raises(UserError, match='_info.json: expected the file gs://bucket/set/set-train-003.tar, got none'):
    opened('wds', 'gs://bucket/set')


@pytest.mark.parametrize('kind', KINDS)
def test_the_index_is_kept_in_the_cache_until_an_object_is_written_again(
    kind: str, folder: pathlib.Path, bucket: buckets.Server, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch) -> None:
  source = opened(kind, 'gs://bucket/set')
  kept = list((tmp_path / 'cache' / 'vit_jax' / {'wds': 'tar'}.get(kind, kind)).glob('*.arrow'))
  assert len(kept) == 1 and [name for name in bucket.objects if '.vit_jax_index' in name] == [
      f'bucket/set/.vit_jax_index/{kept[0].name}']
  bucket.requests.clear()
  with monkeypatch.context() as patch:
    refuse_to_scan(patch)
    other = pickle.loads(pickle.dumps(source))
    assert bucket.requests == {'GET': 3}  # whether they are still the same
    assert read_one(other, 9) == read_one(source, 9)
  name = sorted(name for name in bucket.objects if 'train' in name)[0]
  put(bucket, name, bucket.objects[name][1])
  storage._state.generations.clear()  # a new run
  assert opened(kind, 'gs://bucket/set').digest == source.digest
  assert len(list(kept[0].parent.glob('*.arrow'))) == 2


def refuse_to_scan(patch: pytest.MonkeyPatch) -> None:
  patch.setattr(index, 'scan_all', None)


@pytest.mark.parametrize('kind', KINDS)
def test_another_host_reads_the_index_from_the_bucket_and_a_damaged_one_is_made_again(
    kind: str, folder: pathlib.Path, bucket: buckets.Server, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch) -> None:
  source = opened(kind, 'gs://bucket/set')
  [name] = [name for name in bucket.objects if '.vit_jax_index' in name]
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'other'))
  with monkeypatch.context() as patch:
    refuse_to_scan(patch)
    pickle.loads(pickle.dumps(source))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'third'))
  good = bucket.objects[name][1]
  put(bucket, name, good[:100] + bytes([good[100] ^ 1]) + good[101:])
  assert opened(kind, 'gs://bucket/set').digest == source.digest and bucket.objects[name][1] == good


def forged(content: bytes, name: str, folder: pathlib.Path, changes: dict[str, Any]) -> bytes:
  """Returns an index with other columns and the right checksum, as whoever may write the bucket can make it."""
  folder.mkdir(exist_ok=True)
  place = folder / pathlib.Path(name).name
  place.write_bytes(content)
  rows = index.read_sealed(place)
  for column, values in changes.items():
    kept = rows.drop_columns([column]) if column in rows.column_names else rows
    rows = kept.append_column(column, values) if len(values) else kept
  place.unlink()
  index.write_sealed(place, rows)
  return place.read_bytes()


def ends_beyond() -> pa.Array:
  """Bytes that end behind the end of their buffer."""
  ends = pa.py_buffer(np.array([0, *[2**40] * 22, 1], np.int64))
  return pa.Array.from_buffers(pa.large_binary(), 23, [None, ends, pa.py_buffer(b'x')])


@pytest.mark.parametrize(('kind', 'changes'), [('parquet' if 'place' in one else 'wds', one) for one in (
    {'file': pa.array([0] * 22 + [3], pa.int32())}, {'file': pa.array([-1] + [0] * 22, pa.int32())},
    {'file': pa.array([1] * 8 + [0] * 15, pa.int32())}, {'offset': pa.array([-2] * 23)},
    {'offset': pa.array([.5] * 23)}, {'offset': pa.array([None] * 23, pa.int64())}, {'size': pa.array([-1] * 23)},
    {'name': ends_beyond()}, {'name': pa.array([])}, {'label': pa.array(['x'] * 23)}, {'more': pa.array([0] * 23)},
    {'place': pa.array([0, 2] + [0] * 21)})],
    ids=lambda one: one if isinstance(one, str) else ' '.join(f'{name} {x.type}' for name, x in one.items()))
def test_an_index_with_impossible_places_in_a_bucket_is_made_again(
    kind: str, changes: dict[str, Any], folder: pathlib.Path, bucket: buckets.Server, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch) -> None:
  source = opened(kind, 'gs://bucket/set')
  [name] = [name for name in bucket.objects if '.vit_jax_index' in name]
  good = bucket.objects[name][1]
  assert forged(good, name, tmp_path / 'forged', {}) == good
  put(bucket, name, forged(good, name, tmp_path / 'forged', changes))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'other'))
  assert opened(kind, 'gs://bucket/set').digest == source.digest and bucket.objects[name][1] == good


@pytest.mark.parametrize('kind', KINDS)
def test_an_object_that_changes_during_a_run_stops_it(kind: str, folder: pathlib.Path, bucket: buckets.Server) -> None:
  source = opened(kind, 'gs://bucket/set')
  name = sorted(name for name in bucket.objects if 'train' in name)[0]
  put(bucket, name, bucket.objects[name][1])
  with pytest.raises(UserError, match='expected an object that does not change, got another one during the run'):
    read_one(source, 0)


@pytest.mark.parametrize('kind', IN_BLOCKS)
def test_an_index_is_read_in_blocks_and_an_image_with_one_request(
    kind: str, folder: pathlib.Path, bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  for block in (2**22, 2**12, 3_000):
    monkeypatch.setattr(storage.Window, 'BLOCK', block)
    monkeypatch.setattr(storage, '_state', storage._State(storage.Settings()))
    path = max((one for one in folder.iterdir() if 'train-' in one.name), key=lambda one: one.stat().st_size)
    bucket.requests.clear()
    scan: Any = {'wds': lambda path: [*tar.scan(path, collections.Counter(), columns=tar.Columns('', 'cls'))],
                 'tfrecord': lambda path: [*tfrecord.scan(path, collections.Counter(), label='image/class/label')],
                 }[kind]
    for local, remote in zip(scan(str(path)), scan(f'gs://bucket/set/{path.name}'), strict=True):
      np.testing.assert_equal(local, remote)
    num_blocks = -(-path.stat().st_size // block)
    assert bucket.requests['GET'] <= num_blocks + 10  # some ahead of the end; there are more headers than that
    assert not storage._state.num_bytes
  source = opened(kind, 'gs://bucket/set')
  bucket.requests.clear()
  assert [record.image for record in source.read([3, 9, 20])] == [FOUND[row].image for row in (3, 9, 20)]
  assert bucket.requests == {'GET': 3} and not storage._state.num_bytes


@pytest.mark.parametrize('kind', IN_BLOCKS)
def test_an_index_of_large_objects_takes_little_memory(kind: str, bucket: buckets.Server, tmp_path: pathlib.Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(storage.Window, 'BLOCK', 2**16)
  large = [e._replace(image=e.image + bytes(200_000)) for e in FOUND]
  WRITERS[kind](tmp_path / 'large', 'train', large, 1)
  [path] = [one for one in (tmp_path / 'large').iterdir() if one.is_file()]
  put(bucket, f'bucket/large/{path.name}', path.read_bytes())
  opened(kind, tmp_path / 'large')  # imports
  tracemalloc.start()
  source = opened(kind, f'gs://bucket/large/{path.name}')
  _, most = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert len(source) == 23 and most < 2**21 < path.stat().st_size // 2


@pytest.mark.parametrize('kind', IN_BLOCKS)
def test_damaged_truncated_missing_and_forbidden_objects_are_named(kind: str, folder: pathlib.Path,
                                                                  bucket: buckets.Server) -> None:
  name = sorted(name for name in bucket.objects if 'train' in name)[1]
  whole = bucket.objects[name][1]
  for content, said in ((whole[:len(whole) // 2], 'one (that is truncated|without an end)'),
                        (b'\x1f\x8b' + whole, 'by gzip'), (whole[:1] + b'\xff' + whole[2:],
                                                             'no (header|record), at byte 0')):
    put(bucket, name, content)
    storage._state.generations.clear()
    with pytest.raises(UserError, match=f'gs://{name}: expected a complete .*, got .*{said}'):
      opened(kind, 'gs://bucket/set')
  del bucket.objects[name]
  pattern = {'wds': 'set-train-{000..002}.tar', 'tfrecord': 'train-{00000..00002}-of-00003'}[kind]
  with pytest.raises(UserError, match=f'gs://{name}: expected this file, or files of this pattern, got none'):
    opened(kind, f'gs://bucket/set/{pattern}')
  with pytest.raises(UserError, match=r'expected files \*.* in or below this folder, got none|got none'):
    opened(kind, 'gs://bucket/none')
  with pytest.raises(UserError, match=r'gs://\*/x: expected the name of a bucket before wildcards'):
    opened(kind, 'gs://*/x')


@pytest.mark.parametrize('kind', KINDS)
def test_requests_that_fail_are_repeated(kind: str, folder: pathlib.Path, bucket: buckets.Server) -> None:
  fault = bucket.fail('503', 'GET', 'bucket/set/*train*', count=1)
  assert read_one(opened(kind, 'gs://bucket/set'), 0).image == FOUND[0].image and len(fault.hits) == 1


def test_a_bucket_that_cannot_be_listed_is_named(bucket: buckets.Server) -> None:
  bucket.broken = True  # after which the list of TensorStore is empty
  with pytest.raises(UserError, match=r'wds:gs://bucket/\*.tar.*: expected to read it, got ".*the network is away'):
    opened('wds', 'gs://bucket/*.tar')


def test_of_parquet_files_only_footers_labels_and_the_images_that_are_used_are_read(
    bucket: buckets.Server, tmp_path: pathlib.Path) -> None:
  large = [e._replace(image=e.image + np.random.default_rng(i).bytes(50_000)) for i, e in enumerate(FOUND)]
  parquets.write(tmp_path / 'large', 'train', large, 1, rows=4)
  [path] = (tmp_path / 'large').glob('*.parquet')
  put(bucket, f'bucket/large/{path.name}', path.read_bytes())
  bucket.sent = 0
  source = opened('parquet', 'gs://bucket/large')
  assert bucket.sent < 140_000 < path.stat().st_size // 8
  bucket.sent = 0
  bucket.requests.clear()
  places = [9, 8, 2, 11, 10, 1]
  assert [record.image for record in source.read(places)] == [large[row].image for row in places]
  assert bucket.requests == {'GET': 2} and 400_000 < bucket.sent < 420_000 and not storage._state.num_bytes
  assert len(list(source.read(places))) == 6 and bucket.requests == {'GET': 2}, 'kept row groups are not sent again'
  put(bucket, f'bucket/large/{path.name}', path.read_bytes()[:-500])
  storage._state.generations.clear()
  with pytest.raises(UserError, match=f'{path.name}: expected a complete Parquet file, got no footer'):
    opened('parquet', 'gs://bucket/large')
  put(bucket, f'bucket/large/{path.name}', b'PAR1')
  storage._state.generations.clear()
  with pytest.raises(UserError, match='expected a complete Parquet file, got no footer'):
    opened('parquet', 'gs://bucket/large')


@pytest.mark.parametrize('kind', ['wds'])
def test_a_bracket_with_an_exclamation_mark_excludes_as_in_local_patterns(folder: pathlib.Path, kind: str) -> None:
  for pattern in ('set-train-00[!0].tar', 'set-{split}-00[!0].tar'):
    local, remote = (opened(kind, f'{root}/{pattern}') for root in (folder, 'gs://bucket/set'))
    assert local.digest == remote.digest
    assert {remote.describe(row).split('/')[-2] for row in range(len(remote))} == {
        'set-train-001.tar', 'set-train-002.tar'}
  for root in (folder, 'gs://bucket/set'):
    with pytest.raises(UserError, match='expected this file, or files of this pattern, got none'):
      opened(kind, f'{root}/set-{{split}}-00[9-0].tar')
