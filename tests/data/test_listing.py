"""Listings of image files: their order and digest, what is kept for the next start, and when it is read anew."""
from __future__ import annotations

import hashlib
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.data.images import encode, random_image
from vit_jax.config import schema
from vit_jax.data import splits
from vit_jax.data.formats import folder, listing
from vit_jax.data.source import first_label

LONG_AGO_S = 1e9


@pytest.fixture
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(listing, 'MIN_KEPT_FILES', 1)
  return tmp_path / 'cache' / 'vit_jax' / 'listings'


@pytest.fixture
def root(tmp_path: pathlib.Path, write_split: Callable[..., None]) -> pathlib.Path:
  """A split of 37 images, with a folder in a class folder, that was written long ago."""
  path = tmp_path / 'images'
  write_split(path)
  (path / 'ant' / 'more').mkdir()
  (path / 'ant' / 'more' / 'x.png').write_bytes(encode(random_image(1)))
  (path / 'ant' / 'notes.txt').write_text('no image')
  settle(path)
  return path


def settle(path: pathlib.Path) -> None:
  for where, _, _ in os.walk(path):
    os.utime(where, (LONG_AGO_S, LONG_AGO_S))


def open_twice(root: pathlib.Path, change: Callable[[], object]) -> tuple[listing.Table, listing.Table]:
  """Lists the folder before and after a change; the second listing is in the cache, as the first one was."""
  prefixes = sorted(path.name for path in root.iterdir())
  return listing.open_listing(str(root), prefixes), (change(), listing.open_listing(str(root), prefixes))[1]


def open_source(root: pathlib.Path) -> folder.FolderSource:
  source = folder.opener(str(root), schema.Data(holdout=.2, holdout_seed=3), (8, 8))('train')
  assert isinstance(source, folder.FolderSource)
  return source


def test_the_digest_is_that_of_paths_sizes_and_classes_in_the_order(root: pathlib.Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
  source = open_source(root)
  lines = []
  for i in range(len(source)):
    path = pathlib.Path(source.describe(i))
    lines.append(f'{path.relative_to(root)} {path.stat().st_size} {first_label(source, i)}')
    assert path.relative_to(root).parts[0] == source.class_names[first_label(source, i)]
  assert source.digest == hashlib.sha256('\n'.join(lines).encode()).hexdigest()
  monkeypatch.setattr(listing, '_BLOCK_FILES', 8)
  assert open_source(root).digest == source.digest
  names = [str(p.relative_to(root)) for p in root.rglob('*.png')]
  order = [names[i] for i in splits.scattered(map(os.fsencode, names), len(names), seed=3)]
  assert [line.split()[0] for line in lines] == [name for name in order if name in {x.split()[0] for x in lines}]


def test_a_kept_listing_is_used_without_reading_folders(root: pathlib.Path, cache: pathlib.Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
  first = open_source(root)
  assert len(list(cache.glob('*.arrays'))) == 1 and len(list(cache.glob('*.order'))) == 1

  def refuse(*_: object) -> None:
    raise AssertionError('a folder was read')
  monkeypatch.setattr(listing, 'read', refuse)
  monkeypatch.setattr(splits, 'scattered', refuse)
  second = open_source(root)
  assert second.digest == first.digest and len(second) == len(first)
  assert [second.describe(i) for i in range(len(second))] == [first.describe(i) for i in range(len(first))]


@pytest.mark.parametrize('change', [
    lambda root: (root / 'cow' / 'new.png').write_bytes(b'x'),
    lambda root: next((root / 'ant' / 'more').glob('*')).unlink(),
    lambda root: next((root / 'gnu').glob('*')).rename(root / 'gnu' / 'other.png'),
    lambda root: (root / 'bee' / 'below').mkdir(),
    lambda root: next((root / 'bee').glob('*')).write_bytes(b'overwritten in place'),
    lambda root: shutil.rmtree(root / 'ant' / 'more'),
], ids=['added', 'removed', 'renamed', 'new folder', 'overwritten', 'removed folder'])
def test_a_change_is_noticed(root: pathlib.Path, cache: pathlib.Path,
                             change: Callable[[pathlib.Path], object]) -> None:
  before, after = open_twice(root, lambda: change(root))
  assert list(cache.glob('*.arrays')) and after.notes['token'] != before.notes['token']
  found = {root / os.fsdecode(path): after.get('size', i) for i, path in enumerate(after.values('path'))}
  assert found == {path: path.stat().st_size for path in root.rglob('*.png')}


def test_the_order_of_a_listing_that_was_read_anew_is_new(root: pathlib.Path, cache: pathlib.Path) -> None:
  before = open_source(root)
  (root / 'cow' / 'new.png').write_bytes(b'x')
  settle(root)
  os.utime(root / 'cow', (LONG_AGO_S + 9, LONG_AGO_S + 9))
  after = open_source(root)
  assert after.digest != before.digest and len(after) >= len(before)


def test_a_folder_that_changed_just_now_is_not_kept(root: pathlib.Path, cache: pathlib.Path) -> None:
  os.utime(root / 'cow')
  assert len(listing.open_listing(str(root), ['cow', 'ant']))
  assert not list(cache.glob('*.arrays'))


@pytest.mark.parametrize('content', [b'', b'\xff' * 40, (20).to_bytes(8, 'little') + b'{"notes": 1}        '])
def test_a_damaged_file_in_the_cache_is_replaced(root: pathlib.Path, cache: pathlib.Path, content: bytes) -> None:
  def damage() -> None:
    [path] = cache.glob('*.arrays')
    path.write_bytes(content)
  before, after = open_twice(root, damage)
  assert list(after.values('path')) == list(before.values('path')) and after.notes['token'] != before.notes['token']
  again = listing.open_listing(str(root), sorted(path.name for path in root.iterdir()))
  assert again.notes['token'] == after.notes['token']


def test_it_works_where_the_cache_cannot_be_written(root: pathlib.Path, tmp_path: pathlib.Path,
                                                    cache: pathlib.Path) -> None:
  (tmp_path / 'cache').write_text('a file in the way')
  source = open_source(root)
  assert len(pickle.loads(pickle.dumps(source))) == len(source) == 30


def test_a_copy_for_another_process_is_small_and_reads_the_same(root: pathlib.Path, cache: pathlib.Path) -> None:
  found = listing.open_listing(str(root), ['ant', 'bee'])
  data = pickle.dumps(found)
  assert len(data) < 500 and b'.png' not in data
  [path] = cache.glob('*.arrays')
  path.write_bytes(b'replaced')  # processes that have begun keep what they had
  code = 'import pickle, sys; sys.stdout.buffer.write(b"\\n".join(pickle.load(sys.stdin.buffer).values("path")))'
  read = subprocess.run([sys.executable, '-c', code], input=data, capture_output=True, check=True)
  assert read.stdout.splitlines() == list(found.values('path'))


def test_of_several_processes_one_reads_the_folders(root: pathlib.Path, cache: pathlib.Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
  read, calls, entered = listing.read, [], threading.Event()

  def slow_read(*args: object) -> listing.Table:
    calls.append(args)
    entered.set()
    thread.join(.3)
    return read(*args)  # type: ignore[arg-type]
  monkeypatch.setattr(listing, 'read', slow_read)
  others: list[listing.Table] = []
  thread = threading.Thread(target=lambda: (entered.wait(), others.append(listing.open_listing(str(root), ['ant']))))
  thread.start()
  found = listing.open_listing(str(root), ['ant'])
  thread.join()
  assert len(calls) == 1 and list(others[0].values('path')) == list(found.values('path'))


def test_it_works_where_processes_cannot_share_memory(root: pathlib.Path, cache: pathlib.Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
  shared = open_source(root)
  monkeypatch.delattr(os, 'memfd_create', raising=False)
  for _ in range(2):
    copy = pickle.loads(pickle.dumps(open_source(root)))
    assert copy.digest == shared.digest and [copy.describe(i) for i in range(30)] == [
        shared.describe(i) for i in range(30)]


def test_a_listing_is_written_while_the_folders_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
  """No more than one block of files is in the memory of this process, of millions of files, too."""
  written, listed = list[int](), list[int]()
  write = listing.pa.RecordBatchFileWriter.write_batch

  class Folder(NamedTuple):
    path: str
    files: list[tuple[bytes, int]]
    time_ns: int = 1

  def walk(*_: object) -> Iterator[Folder]:
    for number in range(5):
      listed.append(number)
      yield Folder(str(number), [(b'%d' % file, 1) for file in range(2**16)])

  def counted(writer: Any, batch: Any, *rest: Any) -> None:
    written.append(len(listed))
    write(writer, batch, *rest)
  monkeypatch.setattr(listing.user_files.Finder, 'walk', walk)
  monkeypatch.setattr(listing.pa.RecordBatchFileWriter, 'write_batch', counted)
  assert len(listing.read(str(tmp_path), ['.'])) == 5 * 2**16
  assert written == [1, 2, 3, 4, 5, 5]
