"""Shards of prepared datasets are verified in the background, once, and a changed one stops a run."""
from __future__ import annotations

import itertools
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.data import prepared_sets
from vit_jax.config import schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data.files import checksums, verification
from vit_jax.data.files.checksums import Expected
from vit_jax.data.pipeline import loader
from vit_jax.data.source import Source
from vit_jax.data.sources import splits

LAZY, FIRST, NO = schema.VerifyShards
ALONE = Shard((0,), 1)


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
  return prepared_sets.write(tmp_path / 'set')


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
  """The files that were compared."""
  found: list[str] = []
  real = verification.Background._digest

  def record(self: verification.Background, path: str) -> str | None:
    found.append(path.rpartition('/')[2])
    return real(self, path)
  monkeypatch.setattr(verification.Background, '_digest', record)
  return found


def train(source: Source, batch_size: int = 48, shard: Shard = ALONE) -> loader.TrainLoader:
  return loader.train_loader(source, recipe=schema.Recipe(), image_px=(8, 8), batch_size=batch_size, seed=0,
                             shard=shard, workers=0, threads=2, in_memory=False, max_bad_images=100)


def evaluate(source: Source) -> loader.EvalLoader:
  return loader.eval_loader(source, recipe=schema.Recipe(), image_px=(8, 8), batch_size=48, shard=ALONE, threads=2,
                            workers=0)


def take_until_verified(made: loader.TrainLoader, most: int = 10_000) -> Iterator[int]:
  """Yields step numbers until no thread verifies."""
  for step, _ in enumerate(itertools.islice(made.batches(0), most)):
    yield step
    if not any(thread.name == 'verify' for thread in threading.enumerate()):
      return
    time.sleep(.01)


def test_batches_do_not_wait_for_the_verification(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(verification.Background, '_digest', lambda self, path: self._closed.wait() and None)
  made = train(prepared_sets.open_all(folder).train)
  assert len(list(itertools.islice(made.batches(0), 40))) == 40
  made.close()


def test_each_shard_is_compared_once_in_the_order_of_use(folder: pathlib.Path, digested: list[str]) -> None:
  source = prepared_sets.open_all(folder).train
  made = train(source, batch_size=2)
  first = [source.file(index).name for step in range(40) for index in made.indexes(step).tolist()]  # type: ignore
  for _ in take_until_verified(made):
    pass
  assert digested == list(dict.fromkeys(first)) and len(digested) == 4
  again = train(prepared_sets.open_all(folder).train)
  for _ in take_until_verified(again):
    pass
  assert len(digested) == 4
  prepared_sets.open_all(folder, verify_shards=FIRST)  # they are noted for this way too


def test_a_changed_shard_stops_the_run_with_the_message_of_a_comparison_before_it(folder: pathlib.Path) -> None:
  prepared_sets.damage(folder / 'train-00002-of-00004.array_record')
  with pytest.raises(UserError) as before:
    prepared_sets.open_all(folder, verify_shards=FIRST)
  made = train(prepared_sets.open_all(folder).train)
  with pytest.raises(UserError) as stopped:
    for _ in take_until_verified(made):
      pass
  assert str(stopped.value) == str(before.value)
  assert f'{folder}: expected unchanged shards, got 1 of 4 with another checksum: train-00002' in str(before.value)
  assert len(prepared_sets.open_all(folder, verify_shards=NO).train) == prepared_sets.NUM_TRAIN
  verified = checksums._read(Expected(folder, {}).notes)
  assert 'train-00002-of-00004.array_record' not in verified


def test_an_evaluation_ends_when_its_shards_are_verified_which_it_does_not_slow(
    folder: pathlib.Path, digested: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(verification, 'BYTES_PER_S', 1_000.)
  source = prepared_sets.open_all(folder).eval
  assert len(list(evaluate(source).batches())) == 8 and len(digested) == 4
  prepared_sets.damage(folder / 'test-00001-of-00004.array_record')
  with pytest.raises(UserError, match='got 1 of 4 with another checksum: test-00001'):
    list(evaluate(source).batches())


def test_a_slice_verifies_the_shards_that_it_uses(folder: pathlib.Path, digested: list[str]) -> None:
  source = prepared_sets.open_all(folder).train
  assert len(list(evaluate(splits.select(lambda name: source, 'train[:40%]')).batches())) == 12
  assert sorted(digested) == [f'train-{i:05d}-of-00004.array_record' for i in (0, 1)]


def test_a_closed_loader_ends_a_slow_comparison(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(verification, 'BYTES_PER_S', 1.)
  made = train(prepared_sets.open_all(folder).train)
  next(batches := made.batches(0))
  assert any(thread.name == 'verify' for thread in threading.enumerate())
  made.close()
  assert not any(thread.name == 'verify' for thread in threading.enumerate())
  batches.close()  # type: ignore[attr-defined]
  assert not Expected(folder, {}).notes.exists()


def test_a_comparison_takes_no_more_than_its_rate(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / 'a').write_bytes(bytes(2**20))
  monkeypatch.setattr(verification, 'BYTES_PER_S', 2**20 / .3)
  expected = Expected(tmp_path, {'a': checksums.sha256(tmp_path / 'a')})
  began_s = time.monotonic()
  running = verification.Background(iter([verification.File(expected, 'a', 0)]))
  running._thread.join()
  assert time.monotonic() - began_s > .29
  running.check()


def test_a_file_that_another_process_compares_is_left_to_it(tmp_path: pathlib.Path, digested: list[str],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(verification, 'POLL_S', .05)
  for name in 'ab':
    (tmp_path / name).write_bytes(b'x')
  expected = Expected(tmp_path, {name: checksums.sha256(tmp_path / name) for name in 'ab'})
  expected.notes.parent.mkdir(parents=True)
  script = (f'import fcntl, sys; lock = open({str(expected.notes.with_suffix(".lock"))!r}, "ab"); '
            'fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0); print(1, flush=True); sys.stdin.read()')
  with subprocess.Popen([sys.executable, '-c', script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
    assert other.stdout and other.stdout.readline()
    files = [verification.File(expected, name, number) for number, name in enumerate('ab')]
    running = verification.Background(iter(files))
    deadline = time.monotonic() + 20
    while digested != ['b'] and time.monotonic() < deadline:
      time.sleep(.02)
    time.sleep(.2)
    assert digested == ['b']
    assert other.stdin
    other.stdin.close()  # killed or done: its lock is gone
    running.finish()
  assert digested == ['b', 'a'] and expected.find_new() == []


def test_a_shard_that_is_gone_stops_the_run(folder: pathlib.Path) -> None:
  source = prepared_sets.open_all(folder).eval
  (folder / 'test-00001-of-00004.array_record').unlink()
  used = evaluate(source)._use(0)
  with pytest.raises(UserError, match='test-00001-of-00004.array_record: expected to read it'):
    used.finish()

