"""The index of TFRecord files: made in parallel, kept where the files are, and made again if one of them changes."""
from __future__ import annotations

import functools
import logging
import os
import pathlib
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vit_jax.data import index
from vit_jax.data.formats import tfrecord
from vit_jax.data.index import FOLDER

COUNTS = [3, 0, 5, 1]


def write(folder: pathlib.Path) -> list[str]:
  """Files of some records, which are their number and another number of bytes each."""
  folder.mkdir(parents=True)
  number = 0
  for place, count in enumerate(COUNTS):
    frames = []
    for _ in range(count):
      record = b'%03d' % number + bytes(number * 7)
      head = struct.pack('<Q', len(record))
      frames.append(head + tfrecord.mask(head) + record + tfrecord.mask(record))
      number += 1
    (folder / f'{place}.tfrecord').write_bytes(b''.join(frames))
  return sorted(map(str, folder.glob('*.tfrecord')))


@pytest.fixture
def paths(tmp_path: pathlib.Path) -> list[str]:
  return write(tmp_path / 'set')


def numbers(paths: list[str], cache: pathlib.Path) -> list[int]:
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(index.user_files, 'cache_folder', lambda _: cache)
    stored = tfrecord.TfRecords(paths, COUNTS)
    return [int(stored[i][:3]) for i in range(len(stored))]


def scan(paths: list[str]) -> Callable[[str], Any]:
  """What an index does with each file."""
  counted = functools.partial(tfrecord.scan_counted, counts=dict(zip(paths, COUNTS, strict=True)))
  return functools.partial(index._scan_table, scan=counted, types=tfrecord._SPAN_TYPES)


def test_the_index_is_kept_beside_the_files_and_moves_with_them(
    paths: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  assert numbers(paths, tmp_path / 'cache') == list(range(9))
  assert len(list((tmp_path / 'set' / FOLDER).iterdir())) == 1 and not list((tmp_path / 'cache').glob('*.arrow'))
  (tmp_path / 'set').rename(tmp_path / 'moved')
  monkeypatch.setattr(index, 'scan_all', None)
  assert numbers([p.replace('/set/', '/moved/') for p in paths], tmp_path / 'other') == list(range(9))


def test_the_index_of_a_set_that_cannot_be_written_is_in_the_cache(
    paths: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture) -> None:
  (tmp_path / 'set' / FOLDER).write_text('no folder')
  assert numbers(paths, tmp_path / 'cache') == list(range(9))
  assert len(list((tmp_path / 'cache').glob('*.arrow'))) == 1
  with monkeypatch.context() as patch:
    patch.setattr(index, 'scan_all', None)
    assert numbers(paths, tmp_path / 'cache') == list(range(9))
  (tmp_path / 'full').write_text('no folder')
  assert numbers(paths, tmp_path / 'full') == list(range(9))
  assert f'{tmp_path / "full"}: expected to keep the index' in caplog.text


def test_a_changed_file_and_a_damaged_index_are_noticed(paths: list[str], tmp_path: pathlib.Path) -> None:
  numbers(paths, tmp_path / 'cache')
  [kept] = (tmp_path / 'set' / FOLDER).iterdir()
  kept.write_bytes(kept.read_bytes()[:150])
  assert numbers(paths, tmp_path / 'cache') == list(range(9))
  content = pathlib.Path(paths[2]).read_bytes()
  first, second = 12 + 24 + 4, 12 + 31 + 4  # the frames of the first two records, which are exchanged
  pathlib.Path(paths[2]).write_bytes(content[first:first + second] + content[:first] + content[first + second:])
  os.utime(paths[2], ns=(1, 1))
  assert numbers(paths, tmp_path / 'cache') == [0, 1, 2, 4, 3, 5, 6, 7, 8]


def test_processes_give_the_same_index_and_threads_do_where_there_are_none(
    paths: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
  caplog.set_level(logging.INFO, 'vit_jax.data')
  def scanned() -> list[list[list[int]]]:
    return [list(rows.to_pydict().values()) for rows in index.scan_all(scan(paths), paths, format_name='TFRecord')]
  expected = scanned()
  assert len(expected) == 4 and not caplog.records
  monkeypatch.setattr(index, 'MIN_EXAMPLES_FOR_PROCESSES', 1)
  monkeypatch.setattr(index.open_files, 'num_threads', lambda _: 2)
  for in_processes in (lambda work, given, cores: [pickle.loads(pickle.dumps(work))(given[i::cores])
                                                   for i in range(cores)], lambda *_: None):
    monkeypatch.setattr(index, 'in_processes', in_processes)
    assert scanned() == expected
  assert 'Indexing 4 TFRecord files with about 12 examples, once ...' in caplog.text


@pytest.mark.slow(reason='3 s: starts two processes')
def test_processes_are_started_and_index(paths: list[str]) -> None:
  shares = index.in_processes(functools.partial(index.in_threads, scan(paths)), paths, 2)
  assert shares is not None and [[len(rows) for rows in share] for share in shares] == [[3, 5], [0, 1]]


def test_labels_of_many_examples_need_few_bytes_each() -> None:
  def scan(path: str, ignored: index.Counts) -> Iterator[tuple[object, ...]]:
    for row in range(50_000):
      yield row, 1, index.encode(row % 1000 if path != 'b' else (row % 7, 999))
  types = {'offset': 'int64', 'size': 'int64', index.LABEL: index.BYTES}
  tables = [index._scan_table(path, scan, types) for path in 'abcdef']
  tracemalloc.start()
  rows = index._join(tables)
  _, most_bytes = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert most_bytes < 60 * len(rows)
  found = index.Index(rows)
  assert [found.labels_of(row) for row in (0, 999, 49_999, 50_000, 50_013, 99_999)] == [
      [0], [999], [999], [0, 999], [6, 999], [5, 999]]
