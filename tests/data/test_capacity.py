"""How many threads, processes and batches a machine has room for; a batch that cannot fit is refused before it is
allocated."""
from __future__ import annotations

import pathlib

import numpy as np
import pytest

from vit_jax.config import overrides, schema
from vit_jax.core.errors import UserError
from vit_jax.core.types import Shard
from vit_jax.data.pipeline import capacity
from vit_jax.data.pipeline.capacity import Machine, Measured

GIB = 2**30
TPU_HOST, LAPTOP = Machine(240, 400 * GIB), Machine(8, 16 * GIB)
AUTO = schema.AUTO_WORKERS
SHAPES = {'image': ((10, 10, 3), np.uint8), 'box': ((4,), np.float32)}  # 316 bytes, and 8 of its number


@pytest.mark.parametrize(('batch', 'shard', 'fits'), [
    (10, Shard((0,), 1), True), (11, Shard((0,), 1), False), (20, Shard((1,), 2), True), (22, Shard((1,), 2), False),
    (10**9, Shard((0,), 1), False)])
def test_the_part_of_this_process_counts(batch: int, shard: Shard, fits: bool) -> None:
  if fits:
    capacity.check_batch('batch_size', batch, shard, SHAPES, limit=3240)
    return
  most = 10 * shard.count
  with pytest.raises(UserError, match=f'^batch_size: expected .* at most {most} examples, got {batch:,},'):
    capacity.check_batch('batch_size', batch, shard, SHAPES, limit=3240)


def test_a_container_may_have_less_than_the_machine(tmp_path: pathlib.Path) -> None:
  whole = capacity.memory_bytes(tmp_path)
  assert whole > 2**28
  (tmp_path / 'sys/fs/cgroup').mkdir(parents=True)
  for text, found in (('max\n', whole), ('123456789\n', 123456789), (f'{whole * 8}', whole)):
    (tmp_path / 'sys/fs/cgroup/memory.max').write_text(text)
    assert capacity.memory_bytes(tmp_path) == found


def test_auto_is_the_default_and_a_word_of_the_command_line() -> None:
  assert schema.Data().workers == AUTO
  config = {'x': schema.Config(data=schema.Data(workers=3))}
  assert overrides.apply(config, ['data.workers=auto'])['x'].data.workers == AUTO
  assert overrides.apply(config, ['data.workers=0'])['x'].data.workers == 0


@pytest.mark.parametrize(('setting', 'num_examples', 'batch_bytes', 'here', 'found'), [
    (5, 10, 10, LAPTOP, 5), (0, 10**9, 10, TPU_HOST, 0),
    (AUTO, 10**9, 150 * 2**20, TPU_HOST, 15), (AUTO, 10**9, 150 * 2**20, LAPTOP, 0), (AUTO, 1_000, 10, TPU_HOST, 0),
    (AUTO, 10**9, 5 * GIB, TPU_HOST, 5), (AUTO, 10**9, 50 * GIB, TPU_HOST, 0)])
def test_a_run_starts_with_processes_where_cores_data_and_memory_are_there(
    setting: int, num_examples: int, batch_bytes: int, here: Machine, found: int) -> None:
  assert capacity.workers_at_start(setting, num_examples=num_examples, batch_bytes=batch_bytes, here=here) == found


@pytest.mark.parametrize(('measured', 'now', 'batch_bytes', 'wanted', 'said'), [
    (Measured(8_400, 16_000, 14.), 0, 2**20, 3,
     'The host makes 8.4k of the 16k images/s that the step takes: the threads of one process use 14.0 of 240 cores; '
     '3 loader processes take over now (data.workers=3).'),
    (Measured(16_000, 44_000, 30.), 3, 2**20, 10, '3 loader processes use 30.0 of 240 cores; 10 loader processes take'),
    (Measured(16_000, 16_000, 30.), 3, 2**20, 3, 'The host makes the 16k images/s that the step takes.'),
    (Measured(900, 16_000, 230.), 3, 2**20, 3, 'The host makes 900 of the 16k images/s that the step takes: its 240 '
     'cores are busy. Store smaller images'),
    (Measured(900, 16_000, 30.), 3, 50 * GIB, 3, 'and there is no memory for more processes')])
def test_processes_follow_what_the_step_takes(measured: Measured, now: int, batch_bytes: int, wanted: int,
                                              said: str) -> None:
  assert capacity.workers_after(measured, now, batch_bytes=batch_bytes, here=TPU_HOST) == wanted
  text = capacity.describe(measured, now, wanted, setting=AUTO, here=TPU_HOST)
  assert said in text
  if wanted > now:
    assert f'; set data.workers={wanted}.' in capacity.describe(measured, now, wanted, setting=now, here=TPU_HOST)


def test_busy_cores_are_told_of_the_decoder_of_crops_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
  for is_installed in (True, False):
    monkeypatch.setattr(capacity.jpeg, 'is_installed', lambda is_installed=is_installed: is_installed)
    text = capacity.describe(Measured(900, 16_000, 230.), 3, 3, setting=AUTO, here=TPU_HOST)
    assert ('decode only crops of JPEG files (pip install ' in text) == (not is_installed)
    assert text.endswith(', or use a host with more cores.')


@pytest.mark.parametrize(('threads', 'workers', 'batch_bytes', 'cores', 'expected'), [
    (0, 0, 10, 4, (4, 4)), (0, 0, 10, 112, (16, 16)), (0, 7, 10, 112, (16, 16)), (0, 10, 10, 112, (12, 12)),
    (6, 4, 10, 112, (2, 2)), (40, 0, 0, 4, (40, 40)),
    (0, 0, 1_000, 112, (16, 9)),  # a quarter of 100,000 bytes: 25 batches
    (0, 2, 1_000, 112, (9, 1)), (0, 2, 4_000, 112, (1, 1)), (0, 0, 10**9, 112, (1, 1))])
def test_batches_ahead_take_a_quarter_of_the_memory(threads: int, workers: int, batch_bytes: int, cores: int,
                                                    expected: tuple[int, int]) -> None:
  assert capacity.sizes(threads, workers, batch_bytes=batch_bytes, here=Machine(cores, 100_000)) == expected
