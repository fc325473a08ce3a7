"""Mutated files of data: each is read or refused in our words, takes little memory and time, and crashes nothing."""
from __future__ import annotations

import pathlib
import sys

import pytest

from tests import fuzzing

linux = pytest.mark.skipif(sys.platform != 'linux', reason='limits memory as Linux does')
READERS = ('labels_csv', 'labels_tsv', 'labels_jsonl', 'info', 'shards', 'shards_of_several', 'tfds', 'tfrecord',
           'wds', 'records', 'masks_png', 'masks_gif', 'masks_tif', 'masks_bmp', 'label_maps', 'classes')


def run(reader: str, first: int, last: int, home: pathlib.Path) -> list[fuzzing.Result]:
  if reader in ('tfds', 'tfrecord'):
    pytest.importorskip('tensorflow_datasets')
  found = fuzzing.run('tests.data.fuzz_readers', reader, first, last, home=home)
  fuzzing.check(found, last - first)
  for one in found:
    for reason in one.get('reasons', ()):
      fuzzing.check_words(reason)
  return found


@linux
@pytest.mark.slow(reason='2,000 cases of each reader, at most 60 s each')
@pytest.mark.parametrize('reader', READERS)
def test_thousands_of_mutated_files_are_read_or_refused(reader: str, tmp_path: pathlib.Path) -> None:
  found = run(reader, 0, fuzzing.CASES, tmp_path)
  assert sum('read' in one for one in found) > 20 and sum('refused' in one for one in found) > 20 or reader in (
      'shards', 'shards_of_several', 'tfrecord')  # whose damage is that of single records
  assert max(one['cpu_s'] for one in found) < fuzzing.CPU_S


@linux
@pytest.mark.parametrize('reader', ['labels_jsonl', 'info', 'wds', 'records'])
def test_some_mutated_files_are_read_or_refused(reader: str, tmp_path: pathlib.Path) -> None:
  run(reader, 5000, 5060, tmp_path)
