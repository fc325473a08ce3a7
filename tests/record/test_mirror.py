"""Files that grow, copied to object storage."""
from __future__ import annotations

import time

import buckets
import pytest

from vit_jax.record import mirror, norms_file, reader, writer


def wait_for(bucket: buckets.Server, name: str, content: bytes) -> None:
  for _ in range(400):
    if bucket.objects.get(name, (0, b''))[1] == content:
      return
    time.sleep(.01)
  raise AssertionError(f'{name}: {bucket.objects.get(name)}')


def test_what_has_changed_is_copied_and_nothing_else(bucket: buckets.Server) -> None:
  copies = mirror.Mirror('gs://mine/run', every_s=99.)
  (copies.folder / 'a').write_bytes(b'1')
  (copies.folder / 'b').write_bytes(b'2')
  assert copies.push() and bucket.names('gs://mine/run') == ['a', 'b']
  before = bucket.objects['mine/run/b'][0]
  (copies.folder / 'a').write_bytes(b'11')
  assert copies.push() and bucket.objects['mine/run/b'][0] == before and bucket.read('mine/run/a') == b'11'
  (copies.folder / 'b').write_bytes(b'22')
  copies.close()
  assert bucket.read('mine/run/b') == b'22' and not copies.folder.exists()


def test_it_copies_by_itself_and_goes_on_after_a_failure(
    bucket: buckets.Server, caplog: pytest.LogCaptureFixture) -> None:
  copies = mirror.Mirror('gs://mine/run', every_s=.02)
  (copies.folder / 'a').write_bytes(b'1')
  wait_for(bucket, 'mine/run/a', b'1')
  bucket.broken = True
  (copies.folder / 'a').write_bytes(b'12')
  assert not copies.push() and 'could not be written to, and is tried again' in caplog.text
  bucket.broken = False
  wait_for(bucket, 'mine/run/a', b'12')
  copies.close()


def test_what_could_not_be_copied_in_the_end_stays_and_is_named(
    bucket: buckets.Server, caplog: pytest.LogCaptureFixture) -> None:
  copies = mirror.Mirror('gs://mine/run', every_s=99.)
  (copies.folder / 'a').write_bytes(b'1')
  bucket.broken = True
  copies.close()
  assert (copies.folder / 'a').exists() and f'The files missing in gs://mine/run are in {copies.folder}' in caplog.text


def test_a_record_goes_on_in_object_storage_and_is_whole_at_each_checkpoint(bucket: buckets.Server) -> None:
  first = writer.Writer('gs://mine/run', process_index=0, resumed_from=None, progress_total=9, progress=False)
  first.write(1, {'loss': 2.})
  first.event('checkpoint', step=1)
  first.write(2, {'loss': 1.})  # killed before the next copy: lost
  assert [row['step'] for row in reader.read('gs://mine/run').rows] == [1.]
  second = writer.Writer('gs://mine/run', process_index=0, resumed_from=1, progress_total=9, progress=False)
  second.write(2, {'loss': 1.5})
  second.close()
  found = reader.read('gs://mine/run')
  assert [(row['step'], row['loss']) for row in found.rows] == [(1., 2.), (2., 1.5)] and not found.num_broken
  assert [e['event'] for e in found.events] == ['start', 'checkpoint', 'start']
  assert sum(name.startswith('events.out') for name in bucket.names('gs://mine/run')) == 2
  first.close()


def test_a_file_that_grows_is_kept_in_blocks_of_which_complete_ones_are_uploaded_once(
    bucket: buckets.Server, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(mirror, 'BLOCK_BYTES', 4)
  copies = mirror.Mirror('gs://mine/run', growing=('a',), every_s=99.)
  (copies.folder / 'a').write_bytes(b'0123456')
  assert copies.push() and bucket.names('gs://mine/run') == ['a', 'a.0001']
  assert mirror.read('gs://mine/run/a') == b'0123456'
  before = bucket.objects['mine/run/a'][0]
  (copies.folder / 'a').write_bytes(b'0123456789ab')
  copies.close()
  assert bucket.objects['mine/run/a'][0] == before and mirror.read('gs://mine/run/a') == b'0123456789ab'
  again = mirror.Mirror('gs://mine/run', growing=('a',), every_s=99.)
  again.fetch('a', 'b')
  assert (again.folder / 'a').read_bytes() == b'0123456789ab' and not (again.folder / 'b').exists()
  with open(again.folder / 'a', 'ab') as file:
    file.write(b'c')
  again.close()
  assert bucket.objects['mine/run/a'][0] == before and mirror.read('gs://mine/run/a') == b'0123456789abc'


def test_norms_and_a_long_record_are_read_from_object_storage(bucket: buckets.Server,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(mirror, 'BLOCK_BYTES', 100)
  for resumed_from, steps in ((None, range(1, 30)), (20, range(21, 40))):
    with writer.Writer('gs://mine/run', process_index=0, resumed_from=resumed_from, progress_total=99,
                       progress=False) as out:
      for step in steps:
        out.write(step, {'train/loss': 1.})
        out.norms(step, {'grad': {'a': float(step)}})
  assert [row['step'] for row in reader.read('gs://mine/run').rows] == list(range(1, 40))
  assert [event['grad']['a'] for event in norms_file.read('gs://mine/run')] == list(range(1, 40))
