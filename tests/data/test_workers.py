"""How many loader processes a run starts with, how many it goes on with, and what the log says."""
from __future__ import annotations

import pytest

from vit_jax.config import overrides, schema
from vit_jax.data.pipeline import workers
from vit_jax.data.pipeline.workers import Machine, Measured

GIB = 2**30
TPU_HOST, LAPTOP = Machine(240, 400 * GIB), Machine(8, 16 * GIB)
AUTO = schema.AUTO_WORKERS


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
  assert workers.at_start(setting, num_examples=num_examples, batch_bytes=batch_bytes, here=here) == found


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
  assert workers.after(measured, now, batch_bytes=batch_bytes, here=TPU_HOST) == wanted
  text = workers.sentence(measured, now, wanted, setting=AUTO, here=TPU_HOST)
  assert said in text
  if wanted > now:
    assert f'; set data.workers={wanted}.' in workers.sentence(measured, now, wanted, setting=now, here=TPU_HOST)
